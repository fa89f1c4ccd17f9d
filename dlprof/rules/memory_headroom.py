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

from dlprof.diagnosis import Clear, Rule
from dlprof.engine import Measured, by_rank
from dlprof.errors import NotMeasured
from dlprof.measures import settings
from dlprof.measures.batches import TIMES, larger_batches
from dlprof.measures.breakdown import breakdown, part, part_noise
from dlprof.measures.memory import memory_use
from dlprof.measures.replay import own_time, saving
from dlprof.result import Finding, Panel
from dlprof.timeline.steps import mean_step_ns, of_step, step_means
from dlprof.units import duration, percent, size

# Where tools that watch memory warn: above 92 %, and again above 97 %. What is reserved may be cache, so the first is
# asked of what tensors hold at most, the second of what is reserved.
HIGH, CRITICAL = 0.92, 0.97

# What a larger batch may fill: up to where the warning begins.
FULL = HIGH

# Another batch is another training: worth it from where tools for input and stragglers speak (5 %, XProf).
NOTABLE_SHARE = 0.05

MOST_ROWS = 16

# The same for any batch: what the host does, and gradients' bytes.
_HOST = ("host", "optimizer_host", "launch_latency")


def check(run: Measured) -> Finding | Clear:
    """Look at how full the fullest GPU is, and at what a batch twice as large would give."""
    if settings.on_cpu(run):
        raise NotMeasured("the job trains on the CPU")
    frame = run.frame(memory_use).set_index("rank")
    frame = frame[frame["total_bytes"] > 0]
    if not len(frame):
        raise NotMeasured("how much memory the GPU has is not known")
    allocated = frame["peak_allocated_bytes"] / frame["total_bytes"]
    reserved = frame["peak_reserved_bytes"] / frame["total_bytes"]
    fullest = int(str(allocated.idxmax()))
    if allocated.max() > HIGH or reserved.max() > CRITICAL:
        return _full(run, frame, int(str((allocated if allocated.max() > HIGH else reserved).idxmax())))
    need = {k: _need(frame, k) for k in TIMES}
    used = f"{percent(float(allocated.max()))} of the GPU's memory is used"
    if need[2] > FULL:
        return Clear(f"{used}; a batch twice as large would not fit")
    fixed = _fixed(run)
    step = mean_step_ns(run)
    gains = {k: saving(run, _gone(run, fixed, k)) for k in TIMES if need[k] <= FULL}
    if gains[2] / step < NOTABLE_SHARE:
        return Clear(f"{used}; a batch twice as large would fit, and give {percent(gains[2] / step)}")
    batch = settings.training_loader(run, fullest).get("batch_size")
    size_of = f"a batch of {2 * batch} (is {batch})" if isinstance(batch, int) else "a batch twice as large"
    rows = [("1 ×", duration(step), percent(float(allocated.max())), "1.00 ×")]
    rows += [
        (f"{k} ×", duration(step - gain), percent(need[k]), f"{step / max(step - gain, 1.0):.2f} ×")
        for k, gain in gains.items()
    ]
    return Finding(
        title="A larger batch would fit, and hide what the device waits for",
        summary=f"Rank {fullest} needs {size(float(frame['peak_allocated_bytes'][fullest]))} of"
        f" {size(float(frame['total_bytes'][fullest]))}; {duration(max(fixed.values()))} of a step of {duration(step)}"
        " the device waits for its host or only exchanges data, which is the same for any batch.",
        verdict=f"{percent(gains[2] / step)} {of_step(run)} would be gone with a batch twice as large.",
        saving_ns=gains[2],
        noise_ns=part_noise(run, *_HOST, "communication") / 2,
        advice=(
            f"{size_of}, with the learning rate to match: a step for as many samples is then"
            f" {duration(step - gains[2])}",
        ),
        evidence=Panel(
            "table",
            "What a larger batch is predicted to give",
            tuple(rows),
            ("batch", "time for as many samples as now", "memory at most", "speed"),
        ),
        ranks=tuple(sorted(fixed)),
        sure="Predicted: what the host does and what is exchanged is taken to be the same for any batch, computation to"
        " grow with it. Whether the model trains as well is not known here.",
    )


def _full(run: Measured, frame: pd.DataFrame, rank: int) -> Finding:
    mine = frame.to_dict("index")[rank]
    most, held, total = (float(mine[c]) for c in ("peak_reserved_bytes", "peak_allocated_bytes", "total_bytes"))
    batch = settings.training_loader(run, rank).get("batch_size")
    variable, conf = settings.allocator(run, rank)
    failed = f"; {int(mine['ooms'])} allocations failed" if mine["ooms"] > 0 else ""
    return Finding(
        title="The GPU's memory is nearly used up",
        summary=f"On rank {rank} tensors held {size(held)} of {size(total)} at most, and PyTorch had reserved"
        f" {size(most)} ({percent(most / total)}){failed}.",
        verdict=f"{percent(max(most, held) / total)} of the GPU's memory was taken: a longer batch may end the job.",
        scope="risk",
        saving_ns=0.0,
        advice=(
            f"a smaller batch{f' (is {batch})' if batch else ''}, or `torch.utils.checkpoint` on the largest blocks",
            f"`{variable}=expandable_segments:True` (is {conf or 'not set'}): {size(most - held)} of what"
            " is reserved is cache",
        ),
        ranks=tuple(int(str(r)) for r in frame.index[frame["peak_reserved_bytes"] / frame["total_bytes"] > HIGH]),
        evidence=_by_rank(frame),
        sure="As PyTorch's allocator told, a few times a second; what other libraries and processes hold comes on top.",
    )


def _by_rank(frame: pd.DataFrame) -> Panel:
    """Tell what each rank needed, the fullest first."""
    shown = frame.sort_values("peak_reserved_bytes", ascending=False, kind="stable").head(MOST_ROWS)
    rows = tuple(
        (
            f"rank {row['rank']}",
            *(size(float(row[c])) for c in ("peak_allocated_bytes", "peak_reserved_bytes", "total_bytes")),
            percent(row["peak_reserved_bytes"] / row["total_bytes"]),
        )
        for row in shown.rename_axis("rank").reset_index().to_dict("records")
    )
    return Panel(
        "table", "Memory of each GPU at most", rows, ("", "by tensors", "reserved", "there is", "reserved of it")
    )


def _need(frame: pd.DataFrame, times: int) -> float:
    """Give the share of memory that a batch so many times as large needs, on the rank where that is most."""
    more = (frame["peak_allocated_bytes"] - frame["kept_bytes"]) * times
    return float(((frame["kept_bytes"] + more) / frame["total_bytes"]).max())


def _gone(run: Measured, fixed: Mapping[int, float], times: int) -> dict[int, float]:
    """Return what each rank's step is shorter by for as many samples, ns, with a batch so many times as large."""
    gone = {r: ns * (1 - 1 / times) for r, ns in fixed.items()}
    with suppress(NotMeasured):
        frame = run.frame(larger_batches)
        gone |= by_rank(frame[frame["times"] == times], "gain_ns")
    return gone


def _fixed(run: Measured) -> dict[int, float]:
    """Give each rank's time of a step that is the same for any batch, waiting for other ranks left out, ns."""
    host, exchanged = part(run, *_HOST), part(run, "communication")
    waits = run.frame(own_time).set_index("rank")["wait_ns"]
    return {r: ns + max(0.0, exchanged.get(r, 0.0) - float(waits.get(r, 0.0))) for r, ns in host.items()}


RULE = Rule(
    "memory_headroom",
    "Memory of the GPU",
    (breakdown, larger_batches, memory_use, own_time, step_means),
    check,
    # Of computation: the optimizer's, and what a kernel takes that computes next to nothing.
    saves_from=(*_HOST, "communication", "computation"),
)
