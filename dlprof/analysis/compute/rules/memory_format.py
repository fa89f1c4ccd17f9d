"""Convolutions run in the contiguous memory format (NCHW), where channels_last (NHWC) is faster.

Tensor cores convolve in NHWC: for tensors in NCHW cuDNN launches kernels that convert them (`nchwToNhwc`, `nhwcToNchw`).
PyTorch's own batch norm, which bfloat16 uses, is many times slower in NCHW. On a CPU, oneDNN reorders the tensors of
each convolution, and PyTorch's batch norm and max pooling are not vectorised over channels in NCHW.

Needs a trace, and the shapes of the convolutions: from the step whose FLOPs are counted, or traced (`--shapes`,
record_shapes=True). Models in channels_last already, with group or instance norms, with grouped convolutions (not
depthwise ones), or whose convolutions run without tensor cores are left alone: they are no faster in channels_last, or
slower. AMD's GPUs are not judged.

Saving: the conversions; and PyTorch's batch norm less what its kernels for NHWC take: on a V100 and an A100 they moved
4 bytes an element and pass at 80 % of the memory's bandwidth, in 8 passes. The traced steps are replayed: no sooner
than the host launches. cuDNN's batch norm, pooling and the convolutions themselves count as equally fast in both. On a
CPU the saving is what batch norm, max pooling and convolutions gained when six networks were measured on one machine,
less what the copies of the weights' gradients cost.

What to change: `model = model.to(memory_format=torch.channels_last)` before the optimizer is made, and the same for each
batch of images; `torch.channels_last_3d` for volumes. `--set model.memory_format=channels_last` tries both.
"""

from __future__ import annotations

import math

import pandas as pd

from dlprof.analysis import settings
from dlprof.analysis.compute.cpu_work import in_all_steps
from dlprof.analysis.engine import Frame, Job, Maybe, by_rank
from dlprof.analysis.estimate import LEAST_SHARE, Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.panel import table
from dlprof.analysis.source.calls import ModelCall
from dlprof.errors import DoesNotApply, NotMeasured
from dlprof.result import Change
from dlprof.units import duration, percent

# Twice the standard error: a fifth of what batch norm is predicted to take in NHWC, twice the scatter over shapes; on a
# CPU, where convolutions gain 0 to twice what is expected of them, all of that.
_NORM_NOISE, _CPU_NOISE = 0.1, 0.5

_COLUMNS = {"what": "what", "now_ns": "takes_ns", "then_ns": "predicted in channels_last_ns"}


def check(
    nchw: Maybe[Frame],
    nchw_on_cpu: Maybe[Frame],
    cpu_parts: Maybe[Frame],
    cpu_work: Maybe[Frame],
    mean_step_ns: float,
    job: Job,
) -> Estimate:
    on_cpu = settings.on_cpu(job)
    frame = (nchw_on_cpu if on_cpu else nchw).get()
    if any(m.get("channels_last") for rank in job.ranks for m in job.facts[rank].get("models") or []):
        return nothing("the model is in channels_last")
    slow, saved = (
        by_rank(frame.assign(slow_ns=frame["convert_ns"] + frame["norm_ns"]), "slow_ns"),
        by_rank(frame, "saved_ns"),
    )
    noise_ns = float(_CPU_NOISE * frame["convert_ns"].max() if on_cpu else _NORM_NOISE * frame["left_ns"].max())
    if on_cpu:
        saved = in_all_steps(saved, cpu_parts.get(), cpu_work.get())
    worst_ns = max(slow.values(), default=0.0)
    what = "batch norm and max pooling" if on_cpu else "batch norm, and conversions to NHWC and back,"
    summary = f"{what} in the contiguous format take {percent(worst_ns / mean_step_ns)} of the step"
    if worst_ns < LEAST_SHARE * mean_step_ns:
        return nothing(summary)
    if against := next(filter(None, frame["against"]), ""):
        return nothing(f"{summary}, but {against}")
    dimensions = int(frame["dimensions"].max())
    if not dimensions:
        raise NotMeasured(
            "the shapes of its convolutions were neither traced (`--shapes`, record_shapes=True) nor counted"
        )
    return Estimate(
        gone_ns=saved,
        noise_ns=0.0 if math.isnan(noise_ns) else noise_ns,
        loses="would be saved by convolutions in channels_last",
        summary=summary,
        seen=(frame, dimensions),
    )


def explain(estimate: Estimate, model_call: Maybe[ModelCall], mean_step_ns: float, job: Job) -> Explanation:
    frame, dimensions = estimate.seen
    on_cpu = settings.on_cpu(job)
    row = estimate.rows(frame).iloc[0]
    known = not math.isnan(row["left_ns"])
    norm = "batch norm and max pooling" if on_cpu else "batch norm"
    converts = "reorder the operands of convolutions" if on_cpu else "convert tensors for cuDNN, from NCHW and back"
    parts = [
        {
            "what": f"kernels that {converts}" if not on_cpu else "oneDNN's reorders",
            "now_ns": row["convert_ns"],
            "then_ns": 0.0,
        },
        {"what": f"{norm} in NCHW", "now_ns": row["norm_ns"], "then_ns": row["left_ns"]},
    ]
    then = f", {norm} would take {duration(row['left_ns'])} in channels_last" if known and row["norm_ns"] else ""
    return Explanation(
        title="Convolutions run in the contiguous memory format, and not in channels_last",
        summary=f"Of a step of {duration(mean_step_ns)} on rank {estimate.worst}, {norm} in NCHW takes"
        f" {duration(row['norm_ns'])}, and to {converts} takes {duration(row['convert_ns'])}{then}.",
        changes=_changes(
            model_call.or_none() or ModelCall(), "channels_last" if dimensions == 4 else "channels_last_3d"
        ),
        evidence=table(
            f"What depends on the memory format, a traced step of rank {estimate.worst}", pd.DataFrame(parts), _COLUMNS
        ),
        sure="Estimated from other networks on another CPU: `dlprof try` measures it."
        if on_cpu
        else "Predicted by the bytes that the kernels for NHWC move; convolutions and pooling are taken to be as fast"
        f" as now, and the host to launch no faster.{'' if known else ' What batch norm gains is not known.'}",
    )


def _changes(call: ModelCall, name: str) -> tuple[Change, ...]:
    """Return the change, of the model and of its inputs, by the script's own names and lines."""
    made = (
        f" after {call.moved}" if call.moved else f" before the optimizer ({call.optimizer})" if call.optimizer else ""
    )
    called = f" before `{call.model}({call.inputs})` ({call.at})" if call.at else ""
    to = f".to(memory_format=torch.{name})"
    text = f"`{call.model} = {call.model}{to}`{made}, and `{call.inputs} = {call.inputs}{to}`{called}"
    return (change(text, memory_format=("contiguous_format", "channels_last")),)


RULE = Rule(
    "Memory format of convolutions", check, explain, saves_from=("computation", "launch_latency"), of_training=True
)
