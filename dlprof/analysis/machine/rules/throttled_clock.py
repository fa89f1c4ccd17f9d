"""The GPU computes with a lower clock than it could.

A GPU that becomes too hot, whose supply of power fails, or whose owner has set a lower clock or power limit, runs its
multiprocessors slower, and everything computed takes longer by as much. One hot GPU of many holds up all the others.

Needs the clocks and the reasons for them that are sampled beside the job through NVML, or logged by nvidia-smi
(`clocks.sm`, `clocks.max.sm`, `clocks_event_reasons.active`), and a trace, which tells how much of a step computes.
That a GPU under full load reaches its normal power limit is how it is built, and no fault.

Saving: the matrix products and convolutions of the step, times the clock that is missing; all of its computation where
their kernels are not told apart. Missing for heat or a power brake is what the same
GPU has in readings without, else what the fastest like it in this run has, else its maximum; for a clock that was set
its maximum; for a lowered power limit what the default would allow, with power growing as the cube of the clock. A
clock that stands still far below its maximum, while nothing is said to hold it down, is taken for one that was set: of
one that was locked (`nvidia-smi -lgc`) no reason is told. Kernels that wait for memory are taken to gain nothing.

What to change: cooling, the place of the node, its supply (`nvidia-smi -q -d PERFORMANCE,TEMPERATURE` tells); where a
setting does it, `nvidia-smi -rgc`, `-rac`, or `-pl` with the default limit.
"""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import pandas as pd

from dlprof.analysis import settings
from dlprof.analysis.engine import Job, Maybe
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.step.breakdown import part, part_noise
from dlprof.analysis.step.savings import saving
from dlprof.errors import NotMeasured
from dlprof.result import Change, Panel
from dlprof.units import digits, duration, percent

_MOST_ROWS = 16

_WHY = {
    "heat": "it is too hot",
    "power_brake": "its supply of power brakes it",
    "hardware": "its hardware slows it down (heat or power)",
    "set": "its clock was set lower",
    "locked": "it stands still far below its maximum",
    "limit": "its power limit was lowered",
}


def check(
    held_down: Maybe[list[tuple[dict[Any, Any], str, float]]],
    breakdown: Maybe[pd.DataFrame],
    tensor_cores: Maybe[pd.DataFrame],
    own_time: Maybe[pd.DataFrame],
    job: Job,
) -> Estimate:
    """Estimate what computing would take if nothing held down a GPU's clock."""
    if settings.on_cpu(job):
        raise NotMeasured("the job trains on the CPU")
    lost = held_down.get()
    rows = [row for row, _, _ in lost]
    row, why, share = max(lost, key=lambda told: told[2])
    if not why:
        if all(math.isnan(r["heat"]) and math.isnan(r["limit_w"]) for r in rows):
            raise NotMeasured("what holds the clocks down was not read")
        fastest = digits(max(r["clock_mhz"] for r in rows))
        return nothing(f"nothing but its normal power limit holds a GPU's clock down; {fastest} MHz at most")
    computed = _multiplied(breakdown.get(), tensor_cores)
    # A log of nvidia-smi names no rank: then the slowest GPU is taken for all of them.
    own = {r["rank"]: s for r, _, s in lost if r["source"] == "gpu"}
    removed = {rank: ns * own.get(rank, share if not own else 0.0) for rank, ns in computed.items()}
    return Estimate(
        saving_ns=saving(own_time.get(), removed),
        by_rank_ns=removed if own else {},
        noise_ns=part_noise(breakdown.get(), "computation") * share,
        loses="is lost to a GPU's lowered clock",
        explain=lambda: _explain(row, why, share, max(computed.values()), rows),
    )


def _explain(
    row: dict[Any, Any], why: str, share: float, computed_ns: float, rows: list[dict[Any, Any]]
) -> Explanation:
    which = f"The GPU of rank {row['rank']}" if row["source"] == "gpu" else f"GPU {row['source'].split()[-1]}"
    highest = f", of {digits(row['max_mhz'])} at most" if row["max_mhz"] > 0 else ""
    return Explanation(
        title=f"A GPU's clock is held down: {_WHY[why]}",
        summary=f"{which} ran at {digits(row['clock_mhz'])} MHz in the mean{highest}; {percent(share)} of it is"
        f" missing, and {duration(computed_ns)} of a step feel it.",
        changes=(_cure(row, why),),
        evidence=_evidence(rows),
        sure="Predicted with products as fast as the clock, and all else as it is; where a trace does not tell the"
        " products, with all computation as fast as the clock.",
    )


def _multiplied(breakdown: pd.DataFrame, tensor_cores: Maybe[pd.DataFrame]) -> dict[int, float]:
    """Return what each rank computes in kernels that multiply, ns of the mean step; all, where none is known."""
    computed = part(breakdown, "computation")
    with suppress(NotMeasured):
        frame = tensor_cores.get().set_index("rank")
        products = frame[["tensor_ns", "float32_ns", "unknown_ns"]].sum(axis=1)
        share = (products / frame["kernel_ns"].clip(lower=1.0)).replace(0.0, 1.0)
        return {r: ns * float(share.get(r, 1.0)) for r, ns in computed.items()}
    return computed


def _cure(row: dict[Any, Any], why: str) -> Change:
    could = f"{digits(row['max_mhz'])} MHz are possible"
    if why == "set":
        return change(f"`nvidia-smi -rgc` and `nvidia-smi -rac`: the clock was set; {could}")
    if why == "locked":
        return change(f"`nvidia-smi -rgc`: no reason is told, as where a clock was locked; {could}")
    if why == "limit":
        return change(f"`nvidia-smi -pl {row['default_w']:.0f}` (is {row['limit_w']:.0f} W)")
    return change(
        "look at the node's cooling and power (`nvidia-smi -q -d PERFORMANCE,TEMPERATURE`), or leave the node out"
    )


def _evidence(rows: list[dict[Any, Any]]) -> Panel:
    read = ("clock_mhz", "max_mhz", "heat", "power_brake", "hardware", "power_cap", "set")
    cells = tuple(
        (
            f"rank {r['rank']}" if r["source"] == "gpu" else r["source"],
            *(float(r[what]) if math.isfinite(r[what]) else None for what in read),
        )
        for r in sorted(rows, key=lambda r: r["clock_mhz"])[:_MOST_ROWS]
    )
    columns = (
        "GPU of",
        "MHz",
        "at most",
        "heat_share",
        "power brake_share",
        "hardware slowdown_share",
        "power limit_share",
        "clock set_share",
    )
    return Panel("table", "Clocks, and how often what held them down", cells, columns)


RULE = Rule(
    "throttled_clock",
    "Lowered clocks",
    check,
    saves_from=("computation",),
    notable=0.05,  # where tools for stragglers begin to speak
)
