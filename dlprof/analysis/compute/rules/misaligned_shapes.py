"""Matrix products in 16 bits have sizes that are no multiple of 8, or in 8 bits none of 16.

Tensor cores read operands in pieces of 16 bytes: 8 numbers of 16 bits, 16 of 8. Where a row of a matrix is no multiple
of that, a library pads, takes a slower kernel, or leaves the tensor cores unused (NVIDIA, Matrix Multiplication
Background User's Guide). Vocabularies and hidden sizes that someone counted rather than chose are what does it.

Needs a trace of a GPU with shapes (`record_shapes=True`), or a recording of dlprof's, which counts one step's; and a
GPU whose peaks are known. Only the sizes of features count, from 16 on: a batch may have any size, a classifier 10
classes and a picture 3 channels.

Saving: each such product as fast as the run's other products of this width are a FLOP; where there are too few of them,
at half of the device's peak. Never less than its bytes take, nor 5 µs.

What to change: pad the vocabulary and the widths to a multiple of 8, better of 64 (`nn.Embedding(50304)` for 50257
words).
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from dlprof.analysis import settings
from dlprof.analysis.compute.peaks import device_peaks
from dlprof.analysis.compute.products import misaligned_sizes, multiple_of
from dlprof.analysis.engine import Job, Maybe, by_rank
from dlprof.analysis.estimate import LEAST_SHARE, Estimate, Explanation, Rule, change, nothing, worst
from dlprof.analysis.step.breakdown import part_noise
from dlprof.analysis.step.savings import saving
from dlprof.errors import NotMeasured
from dlprof.result import Change, Panel
from dlprof.units import duration, percent

MOST_ROWS = 12
_MOST_NAMED = 3


def check(
    tensor_cores: Maybe[pd.DataFrame],
    mean_step_ns: Maybe[float],
    own_time: Maybe[pd.DataFrame],
    breakdown: Maybe[pd.DataFrame],
    operators: Maybe[pd.DataFrame],
    job: Job,
) -> Estimate:
    """Estimate what the 16-bit products of such sizes take too long."""
    if settings.on_cpu(job):
        raise NotMeasured("the job trains on the CPU, which has no tensor cores")
    frame = tensor_cores.get()
    if not frame["aligned"].any():
        if not frame["tensor_ns"].sum() - frame["tf32_ns"].sum():
            return nothing("nothing is known to be multiplied in 16 or 8 bits")
        raise NotMeasured("the trace tells no shapes (record_shapes=True), and no step was counted")
    took, saved = by_rank(frame, "misaligned_ns"), by_rank(frame, "misaligned_saved_ns")
    rank = worst(took)
    if frame["misaligned_saved_ns"].isna().any():
        share = took[rank] / mean_step_ns.get()
        told = f"products of misaligned sizes take {percent(share)} of the step"
        if share >= LEAST_SHARE:
            name = device_peaks(job.facts[rank], job.trace_facts[rank])[0]
            raise NotMeasured(
                f"{told}; what they would take otherwise is not known: nor are the peaks of {name or 'this device'}, or"
                " their FLOPs"
            )
        return Estimate(saving_ns=saving(own_time.get(), took), by_rank_ns=took, summary=told)
    return Estimate(
        saving_ns=saving(own_time.get(), saved),
        by_rank_ns=saved,
        noise_ns=part_noise(breakdown.get(), "computation"),
        loses="is lost to sizes that tensor cores do not like",
        explain=lambda: _explain(operators.get(), mean_step_ns.get(), rank, took[rank], saved[rank]),
    )


def _explain(operators: pd.DataFrame, mean_step_ns: float, rank: int, took: float, saved: float) -> Explanation:
    odd = _odd(operators, rank)
    rows = tuple(tuple(r[c] for c in ("operator", "shape", "dtype", "calls", "ns")) for r in odd[:MOST_ROWS])
    columns = ("operator", "shapes", "type", "times a step", "takes_ns")
    return Explanation(
        title="Products have sizes that tensor cores do not like",
        summary=f"Products of misaligned sizes take {duration(took)} of a step of {duration(mean_step_ns)} on"
        f" rank {rank}, {duration(saved)} more than they need.",
        changes=(_padded(odd),),
        evidence=Panel("table", f"Products of misaligned sizes, rank {rank}", rows, columns),
        sure="Estimated by what other products of this run, or of this device, take a FLOP.",
    )


def _padded(odd: list[dict[str, Any]]) -> Change:
    """Name the sizes whose products take longest, and what to make of them."""
    took: dict[tuple[int, int], float] = {}
    for row in odd:
        for size in row["sizes"]:
            key = (size, multiple_of(row["dtype"]))
            took[key] = took.get(key, 0.0) + row["ns"]
    named = sorted(took, key=lambda key: -took[key])[:_MOST_NAMED]
    better = "; ".join(f"{size} → {-(-size // least) * least} or {-(-size // 64) * 64}" for size, least in named)
    least = max((least for _, least in named), default=8)
    return change(
        f"pad widths and the vocabulary to a multiple of {least}, better of 64{f': {better}' if better else ''}",
        numerics=True,
    )


def _odd(operators: pd.DataFrame, rank: int) -> list[dict[str, Any]]:
    """Return the rank's products with misaligned features, the longest first, and their sizes (`sizes`)."""
    columns = ("operator", "shape", "dtype", "calls", "ns")
    mine = operators[(operators["rank"] == rank) & (operators["shape"] != "")][list(columns)]
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*(mine[c].tolist() for c in columns), strict=True)]
    found = [{**r, "sizes": misaligned_sizes(r["operator"], r["shape"], r["dtype"])} for r in rows]
    return [r for r in found if r["sizes"]]


RULE = Rule(
    "misaligned_shapes",
    "Misaligned sizes",
    check,
    saves_from=("computation",),
)
