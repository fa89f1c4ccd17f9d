"""The GPU's memory is nearly used up, or so little of it that a larger batch would make training faster.

What the host does in a step, and what ranks exchange of gradients, is the same for any batch. Where the device waits
for either, a batch twice as large halves that time for each sample; where it computes all the time it gives nothing. At
the other end, a job that holds nearly all of the memory fails on the first batch that is a little longer.

Needs what PyTorch's CUDA allocator tells beside the light layer, and a trace, which tells what the device waits for.

Saving: for as many samples as a step has now, the traced steps replayed with a batch twice as large: twice the time
in kernels and copies, and the host's work, the optimizer and the exchanges as they are. What larger kernels gain comes
on top and is not counted. Where a trace cannot be replayed: half of the time in which the device waits for its host or
only exchanges data. Of memory, what a step leaves allocated (parameters, the optimizer's state) is taken to stay, and
what it needs beyond that to double.

What to change: the batch size, and the learning rate with it (a larger batch trains otherwise: compare the loss by
samples, not by steps). Near the end: a smaller batch, `torch.utils.checkpoint`, a lower precision,
`PYTORCH_ALLOC_CONF=expandable_segments:True` (before torch 2.9 `PYTORCH_CUDA_ALLOC_CONF`).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

import pandas as pd

from dlprof.analysis import settings
from dlprof.analysis.compute.batches import TIMES
from dlprof.analysis.engine import Job, Maybe, by_rank
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.step.breakdown import part, part_noise
from dlprof.analysis.step.savings import saving
from dlprof.errors import NotMeasured
from dlprof.result import Panel
from dlprof.units import duration, percent, size

# Where tools that watch memory warn: above 92 %, and again above 97 %. What is reserved may be cache, so the first is
# asked of what tensors hold at most, the second of what is reserved.
HIGH, CRITICAL = 0.92, 0.97

# What a larger batch may fill: up to where the warning begins.
FULL = HIGH

MOST_ROWS = 16

# The same for any batch: what the host does, and gradients' bytes.
_HOST = ("host", "optimizer_host", "launch_latency")


def check(
    memory_use: Maybe[pd.DataFrame],
    breakdown: Maybe[pd.DataFrame],
    own_time: Maybe[pd.DataFrame],
    larger_batches: Maybe[pd.DataFrame],
    mean_step_ns: Maybe[float],
    job: Job,
) -> Estimate:
    """Estimate what a batch twice as large would give, where it fits; a GPU that is nearly full is a risk."""
    if settings.on_cpu(job):
        raise NotMeasured("the job trains on the CPU")
    frame = memory_use.get().set_index("rank")
    frame = frame[frame["total_bytes"] > 0]
    if not len(frame):
        raise NotMeasured("how much memory the GPU has is not known")
    allocated = frame["peak_allocated_bytes"] / frame["total_bytes"]
    reserved = frame["peak_reserved_bytes"] / frame["total_bytes"]
    if allocated.max() > HIGH or reserved.max() > CRITICAL:
        fullest = int(str((allocated if allocated.max() > HIGH else reserved).idxmax()))
        return Estimate(
            scope="risk",
            # It costs no time: what counts is which ranks it names.
            by_rank_ns=dict.fromkeys((int(str(r)) for r in frame.index[reserved > HIGH]), 1.0),
            explain=lambda: _full(job, frame, fullest),
        )
    if _need(frame, 2) > FULL:
        return nothing(
            f"{percent(float(allocated.max()))} of the GPU's memory is used; a batch twice as large would not fit"
        )
    fixed = _fixed(breakdown.get(), own_time.get())
    gain = saving(own_time.get(), _gone(larger_batches, fixed, 2))
    return Estimate(
        saving_ns=gain,
        by_rank_ns=dict.fromkeys(fixed, gain),
        noise_ns=part_noise(breakdown.get(), *_HOST, "communication") / 2,
        loses="would be gone with a batch twice as large",
        explain=lambda: _explain(
            mean_step_ns.get(), own_time, larger_batches, job, frame, int(str(allocated.idxmax())), fixed
        ),
    )


def _explain(
    mean_step_ns: float,
    own_time: Maybe[pd.DataFrame],
    larger_batches: Maybe[pd.DataFrame],
    job: Job,
    frame: pd.DataFrame,
    fullest: int,
    fixed: Mapping[int, float],
) -> Explanation:
    step, mine = mean_step_ns, frame.to_dict("index")[fullest]
    shares = {k: need for k in TIMES if (need := _need(frame, k)) <= FULL}
    steps = {k: step - saving(own_time.get(), _gone(larger_batches, fixed, k)) for k in shares}
    held, total = float(mine["peak_allocated_bytes"]), float(mine["total_bytes"])
    rows = [(1, step, held / total, 1.0), *((k, ns, shares[k], step / max(ns, 1.0)) for k, ns in steps.items())]
    columns = ("times the batch", "time for as many samples as now_ns", "peak memory_share", "speed_times")
    same = f", with the learning rate to match: a step for as many samples is then {duration(steps[2])}"
    batch = settings.training_loader(job, fullest).get("batch_size")
    return Explanation(
        title="A larger batch would fit, and hide what the device waits for",
        summary=f"Rank {fullest} needs {size(held)} of {size(total)}; for {duration(max(fixed.values()))} of a step of"
        f" {duration(step)} the device waits for its host or only exchanges data, which is the same for any batch.",
        changes=(
            change(f"`batch_size={2 * batch}` (is {batch}){same}", numerics=True, batch_size=(batch, 2 * batch))
            if isinstance(batch, int)
            else change(f"a batch twice as large{same}", numerics=True),
        ),
        evidence=Panel("table", "What a larger batch is predicted to give", tuple(rows), columns),
        sure="Predicted: what the host does and what is exchanged is taken to be the same for any batch, computation to"
        " grow with it. Whether the model trains as well is not known here.",
    )


def _full(job: Job, frame: pd.DataFrame, rank: int) -> Explanation:
    mine = frame.to_dict("index")[rank]
    most, held, total = (float(mine[c]) for c in ("peak_reserved_bytes", "peak_allocated_bytes", "total_bytes"))
    batch = settings.training_loader(job, rank).get("batch_size")
    variable, conf = settings.allocator(job, rank)
    failed = f"; {int(mine['ooms'])} allocations failed" if mine["ooms"] > 0 else ""
    return Explanation(
        title="The GPU's memory is nearly used up",
        summary=f"On rank {rank} tensors held {size(held)} of {size(total)} at most, and PyTorch had reserved"
        f" {size(most)} ({percent(most / total)}){failed}.",
        verdict=f"{percent(max(most, held) / total)} of the GPU's memory was taken: a longer batch may end the job.",
        changes=(
            change(f"a smaller batch{f' (is {batch})' if batch else ''}", numerics=True),
            change("`torch.utils.checkpoint` on the largest blocks"),
            change(
                f"`{variable}=expandable_segments:True` (is {conf or 'not set'}): {size(most - held)} of what is"
                " reserved is cache",
                numerics=False,
                **{variable: (conf, "expandable_segments:True")},
            ),
        ),
        evidence=_by_rank(frame),
        sure="As PyTorch's allocator told, a few times a second; what other libraries and processes hold comes on top.",
    )


def _by_rank(frame: pd.DataFrame) -> Panel:
    """List what each rank needed, the fullest first."""
    shown = frame.sort_values("peak_reserved_bytes", ascending=False, kind="stable").head(MOST_ROWS)
    rows = tuple(
        (int(rank), float(held), float(reserved), float(total), float(reserved / total))
        for rank, held, reserved, total in zip(
            shown.index,
            *(shown[c] for c in ("peak_allocated_bytes", "peak_reserved_bytes", "total_bytes")),
            strict=True,
        )
    )
    columns = ("rank", "by tensors_bytes", "reserved_bytes", "there is_bytes", "reserved_share")
    return Panel("table", "Memory of each GPU at most", rows, columns)


def _need(frame: pd.DataFrame, times: int) -> float:
    """Return the share of memory that a batch so many times as large needs, on the rank where that is most."""
    more = (frame["peak_allocated_bytes"] - frame["kept_bytes"]) * times
    return float(((frame["kept_bytes"] + more) / frame["total_bytes"]).max())


def _gone(larger_batches: Maybe[pd.DataFrame], fixed: Mapping[int, float], times: int) -> dict[int, float]:
    """Return what each rank's step is shorter by for as many samples, ns, with a batch so many times as large."""
    gone = {r: ns * (1 - 1 / times) for r, ns in fixed.items()}
    with suppress(NotMeasured):
        frame = larger_batches.get()
        gone |= by_rank(frame[frame["times"] == times], "gain_ns")
    return gone


def _fixed(breakdown: pd.DataFrame, own_time: pd.DataFrame) -> dict[int, float]:
    """Return each rank's time of a step that is the same for any batch, waiting for other ranks left out, ns."""
    host, exchanged = part(breakdown, *_HOST), part(breakdown, "communication")
    waits = own_time.set_index("rank")["wait_ns"]
    return {r: ns + max(0.0, exchanged.get(r, 0.0) - float(waits.get(r, 0.0))) for r, ns in host.items()}


RULE = Rule(
    "memory_headroom",
    "Memory of the GPU",
    check,
    # Of computation: the optimizer's, and what a kernel takes that computes next to nothing.
    saves_from=(*_HOST, "communication", "computation"),
    # Another batch is another training: worth it from where tools for input and stragglers speak (5 %, XProf).
    notable=0.05,
)
