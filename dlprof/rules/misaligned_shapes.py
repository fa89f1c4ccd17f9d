"""Matrix products in 16 bits have sizes that are no multiple of 8.

Tensor cores read operands in pieces of 16 bytes, 8 numbers of 16 bits. Where a row of a matrix is no multiple of that,
a library pads, takes a slower kernel, or leaves the tensor cores unused (NVIDIA, Matrix Multiplication Background
User's Guide). Vocabularies and hidden sizes that someone counted rather than chose are what does it.

Needs a trace of a GPU with shapes (`record_shapes=True`), or a recording of dlprof's, which counts one step's; and a
GPU whose peaks are known. Only the sizes of features count: a batch may have any size.

Saving: each such product as fast as the run's other 16-bit products are a FLOP; where there are too few of them, at
half of the device's peak. Never less than its bytes take, nor 5 µs.

What to change: pad the vocabulary and the widths to a multiple of 8, better of 64 (`nn.Embedding(50304)` for 50257
words).
"""

from __future__ import annotations

from dlprof.diagnosis import Clear, Rule
from dlprof.engine import Measured, by_rank
from dlprof.errors import NotMeasured
from dlprof.measures import settings
from dlprof.measures.arithmetic import device_peaks
from dlprof.measures.breakdown import breakdown, part_noise
from dlprof.measures.operators import SIXTEEN_BITS, features, operators, sizes, tensor_cores
from dlprof.measures.replay import own_time, saving
from dlprof.measures.steps import mean_step_ns, of_step, step_means
from dlprof.result import Finding, Panel
from dlprof.units import digits, duration, percent

# A number in a configuration, so worth saying from where any finding is (diagnosis.LEAST_SHARE).
NOTABLE_SHARE = 0.02

MOST_ROWS = 12
_MOST_NAMED = 3


def check(run: Measured) -> Finding | Clear:
    """Look at the 16-bit products of such sizes, and at what they take too long."""
    if settings.on_cpu(run):
        raise NotMeasured("the job trains on the CPU, which has no tensor cores")
    frame = run.frame(tensor_cores)
    if not frame["aligned"].any():
        if not frame["tensor_ns"].sum() - frame["tf32_ns"].sum():
            return Clear("nothing is multiplied in 16 bits")
        raise NotMeasured("the trace tells no shapes (record_shapes=True), and no step was counted")
    took = by_rank(frame, "misaligned_ns")
    step = mean_step_ns(run)
    if max(took.values()) / step < NOTABLE_SHARE:
        return Clear(f"products off a multiple of 8 take {percent(max(took.values()) / step)} of the step")
    worst = max(took, key=lambda r: took[r])
    if frame["misaligned_saved_ns"].isna().any():
        name = device_peaks(run.facts[worst], run.trace_facts[worst])[0]
        raise NotMeasured(
            f"products off a multiple of 8 take {percent(took[worst] / step)} of the step; what they would take"
            f" otherwise is not known: nor are the peaks of {name or 'this device'}, or their FLOPs"
        )
    saved = by_rank(frame, "misaligned_saved_ns")
    gain = saving(run, saved)
    if gain / step < NOTABLE_SHARE:
        return Clear(f"products off a multiple of 8 are as fast as others but for {percent(gain / step)} of the step")
    evidence = _evidence(run, worst)
    return Finding(
        title="Products have sizes that tensor cores do not like",
        summary=f"16-bit products off a multiple of 8 take {duration(took[worst])} of a step of {duration(step)} on"
        f" rank {worst}, {duration(saved[worst])} more than they need.",
        verdict=f"{percent(gain / step)} {of_step(run)} is lost to sizes off a multiple of 8.",
        noise_ns=part_noise(run, "computation"),
        saving_ns=gain,
        advice=(_advice(run, worst),),
        evidence=evidence,
        ranks=tuple(sorted(r for r, ns in saved.items() if ns >= saved[worst] / 2)),
        sure="Estimated by what other products of this run, or of this device, take a FLOP.",
    )


def _advice(run: Measured, rank: int) -> str:
    """Name the sizes whose products take longest, and what to make of them."""
    frame = run.frame(operators)
    mine = frame[(frame["rank"] == rank) & frame["dtype"].isin(SIXTEEN_BITS) & (frame["shape"] != "")]
    took: dict[int, float] = {}
    for operator, shape, ns in zip(mine["operator"], mine["shape"], mine["ns"], strict=True):
        for size in features(str(operator), str(shape)):
            if size % 8:
                took[size] = took.get(size, 0.0) + float(ns)
    named = sorted(took, key=lambda size: -took[size])[:_MOST_NAMED]
    better = "; ".join(f"{size} → {-(-size // 8) * 8} or {-(-size // 64) * 64}" for size in named)
    return f"pad widths and the vocabulary to a multiple of 8, better of 64{f': {better}' if better else ''}"


def _evidence(run: Measured, rank: int) -> Panel:
    frame = run.frame(operators)
    mine = frame[(frame["rank"] == rank) & frame["dtype"].isin(SIXTEEN_BITS) & (frame["shape"] != "")]
    rows = [
        (str(o), str(s), str(d), digits(float(n)), duration(float(ns)))
        for o, s, d, n, ns in zip(
            mine["operator"], mine["shape"], mine["dtype"], mine["calls"], mine["ns"], strict=True
        )
        if any(size % 8 for tensor in sizes(str(s))[-2:] for size in tensor[-2:])
    ]
    columns = ("operator", "shapes", "type", "times a step", "takes")
    return Panel("table", f"Products with a size off a multiple of 8, rank {rank}", tuple(rows[:MOST_ROWS]), columns)


RULE = Rule(
    "misaligned_shapes",
    "Sizes off a multiple of 8",
    (breakdown, operators, own_time, step_means, tensor_cores),
    check,
    saves_from=("computation",),
)
