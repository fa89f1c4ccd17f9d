"""The script waits for its device, and the device then waits for the script.

A host that runs ahead keeps its device busy: kernels are queued long before they run. `.item()`, `.cpu()`, `print` of a
tensor, a boolean mask as an index, copying from pageable memory and `torch.cuda.synchronize()` stop the host until all
that is queued has run. Then the queue is empty, and the device idles until the host has launched again. With an
optimizer that is not fused, `torch.amp.GradScaler` reads a value itself in every step; the report names it.

Needs a trace of a device that links launches to kernels. Every call that synchronises counts, even if the device is
already done when the host, which the profiler slows, makes the call. `blocking_copy` and `pageable_copy` report waits
for copies to the device; `parameter_loop` reports the waits of a loop over parameters.

Saving: the traced steps, scaled to the length of the untraced ones, replayed without any of these waits. Without only
one of several waits, the host would wait in the next: they are reported as one finding with one saving.

What to change: read values every k steps, or a step late; add up in tensors and read the sum; `torch.where` instead of
masks; pinned memory and `non_blocking=True` for copies; no `torch.cuda.synchronize()` in the loop; `fused=True` in the
optimizer behind a `GradScaler`.
"""

from __future__ import annotations

from dlprof.analysis import settings
from dlprof.analysis.communication.collectives import waits
from dlprof.analysis.engine import JOB, Frame, Job, Maybe, maybe, needs
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change
from dlprof.analysis.host.gaps import HOST, SAVES_FROM
from dlprof.analysis.host.parts import WAITS, gains_of, host_parts
from dlprof.analysis.host.waiting import GRAD_SCALER, linked
from dlprof.analysis.panel import table
from dlprof.analysis.panels.host import COLUMNS, by_python
from dlprof.analysis.timeline.steps import check_marked, step_means
from dlprof.result import Change
from dlprof.units import duration, often

_ITEM = "read values (`.item()`, `float(loss)`, `print`) every k steps"
_MASK = change("index without boolean masks: their size must be known on the host; `torch.where` needs none")
_PINNED = change(
    "`pin_memory=True` and `.to(device, non_blocking=True)`; `.cpu()` every k steps",
    pin_memory=(None, True),
    non_blocking=(None, True),
)

_NO_SCALER = change("bfloat16, which needs no GradScaler", numerics=True)

_OF_DEVICE, _OF_EVENT = "DeviceSynchronize", "EventSynchronize"

_CURES: dict[str, Change] = {
    "aten::item": change(f"{_ITEM}, or add up in a tensor and read that"),
    "aten::_local_scalar_dense": change(_ITEM),
    "aten::is_nonzero": change(
        "do not branch on a tensor of the device (`if`): `torch.where`, or look every k steps (transformers'"
        " Trainer checks the loss of every step for NaN: `TrainingArguments(logging_nan_inf_filter=False)`)"
    ),
    "aten::nonzero": _MASK,
    "aten::index": _MASK,
    "aten::to": _PINNED,
    "aten::_to_copy": _PINNED,
    "aten::copy_": change("copy from and to pinned memory, with `non_blocking=True`", non_blocking=(None, True)),
    "": change(f"{_ITEM}; `.to(device, non_blocking=True)` from pinned memory for what is copied"),
    # Where no operator was traced, as by nsys, the runtime's call says who waits.
    _OF_DEVICE: change("remove `torch.cuda.synchronize()` from the loop, and timing that needs it"),
    _OF_EVENT: change(
        "remove `torch.cuda.Event.synchronize()` from the loop: ask `query()`, or read times every k steps"
    ),
    # torch/amp/grad_scaler.py, `_maybe_opt_step`: what the optimizer takes itself is not read back.
    GRAD_SCALER: change(
        "`fused=True` in the optimizer (Adam, AdamW, SGD, Adagrad): it takes the scale itself, and `GradScaler.step`"
        " need not read back whether gradients overflowed; or bfloat16, which needs no GradScaler",
        fused=(None, True),
    ),
}


def check(
    step_means: Frame = needs(step_means),
    linked: Maybe[Frame] = maybe(linked),
    host_parts: Maybe[Frame] = maybe(host_parts),
    waits: Maybe[Frame] = maybe(waits),
) -> Estimate:
    check_marked(step_means)
    linked.get()  # raises where what the waits cost is not known
    return Estimate(
        gone_ns=gains_of(host_parts.get(), WAITS, waits),
        noise_of=HOST,
        loses="is lost because the host waits for the device and cannot launch ahead",
    )


def explain(estimate: Estimate, linked: Frame = needs(linked), job: Job = needs(JOB)) -> Explanation:
    rank = estimate.worst
    mine = estimate.rows(linked[(linked["copied"] == "") & (linked["looped"] == 0)]).sort_values("ns", ascending=False)
    first, times = mine["caller"].iloc[0], often(float(mine["calls"].sum())).capitalize()
    optimizer = settings.optimizer(job)
    known = _CURES if not optimizer or settings.takes_fused(optimizer) else _CURES | {GRAD_SCALER: _NO_SCALER}
    asked = [
        next((kind for kind in (_OF_DEVICE, _OF_EVENT) if not operator and kind in call), operator)
        for operator, call in zip(mine["caller"], mine["call"], strict=True)
    ]
    cures = dict.fromkeys(known[operator] for operator in asked if operator in known)
    all_of_them = ", all of them: without one alone it would wait in the next" if mine["calls"].sum() > 1.5 else ""
    return Explanation(
        title=f"{'GradScaler' if first == GRAD_SCALER else 'The script'} waits for its device",
        summary=f"{times} a step rank {rank} waits until its device has caught up,"
        f" most of all in {first or 'a call of Python'}: {duration(float(mine['ns'].sum()))} a traced step.",
        changes=tuple(cures) or (change("find the calls that the report lists, and make them less often"),),
        evidence=table(f"Waits of a traced step on rank {rank}", by_python(mine), COLUMNS),
        sure="Estimated by replaying the traced steps, at the pace of those that were not traced, without these"
        f" waits{all_of_them}.",
    )


RULE = Rule("Waiting for the device", check, explain, SAVES_FROM, only_with="gpu", of_host=True)
