"""The GPU computes with a lower clock than it could.

A GPU that becomes too hot, whose power supply fails, or that has a lower clock or power limit set, runs its
multiprocessors slower, and everything computed takes longer by as much. One hot GPU of many holds up all the others.

Needs the clocks and the reasons for them that are sampled through NVML, or logged by nvidia-smi (`clocks.sm`,
`clocks.max.sm`, `clocks_event_reasons.active`), and a trace, for how much of a step computes. That a GPU under full
load reaches its normal power limit is how it is built, and no fault.

Saving: the matrix products and convolutions of the step (all computation where these are not known) times the clock
that is missing. For heat or a power brake: up to what the same GPU has in readings without, else the fastest like it in
this run, else its maximum; for a clock that was set: its maximum; for a lowered power limit: what the default would
allow, with power growing as the cube of the clock. A clock that stays far below its maximum without a reason counts as
set: a locked one (`nvidia-smi -lgc`) has no reason. Kernels that wait for memory are taken to gain nothing.

What to change: cooling, the place of the node, its supply (`nvidia-smi -q -d PERFORMANCE,TEMPERATURE` shows them);
where a setting is the cause, `nvidia-smi -rgc`, `-rac`, or `-pl` with the default limit.
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from dlprof.analysis.compute.operators import tensor_cores
from dlprof.analysis.engine import Frame, Maybe, maybe, needs
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.machine.gpus import clocks, held_down
from dlprof.analysis.panel import table
from dlprof.analysis.step.breakdown import breakdown, part, part_noise
from dlprof.analysis.step.savings import own_time, saving
from dlprof.errors import NotMeasured
from dlprof.units import digits, duration, percent

NOTABLE_SHARE = 0.05  # from where on tools for stragglers report one

_MOST_ROWS = 16

_NODE = "look at the node's cooling and power (`nvidia-smi -q -d PERFORMANCE,TEMPERATURE`), or leave the node out"

# What holds a clock down: in words, and what to do about it, with the columns of `clocks`.
_CAUSES = {
    "heat": ("it is too hot", _NODE),
    "power_brake": ("its power supply slows it down", _NODE),
    "hardware": ("its hardware slows it down (heat or power)", _NODE),
    "set": (
        "its clock was set lower",
        "`nvidia-smi -rgc` and `nvidia-smi -rac`: the clock was set; {most} MHz are possible",
    ),
    "locked": (
        "it stays far below its maximum",
        "`nvidia-smi -rgc`: it has no reason, as where a clock was locked; {most} MHz are possible",
    ),
    "limit": ("its power limit was lowered", "`nvidia-smi -pl {default_w:.0f}` (is {limit_w:.0f} W)"),
}

_COLUMNS = {
    "name": "GPU of",
    "clock_mhz": "MHz",
    "max_mhz": "at most",
    "heat": "heat_share",
    "power_brake": "power brake_share",
    "hardware": "hardware slowdown_share",
    "power_cap": "power limit_share",
    "set": "clock set_share",
}


def check(
    held_down: list[tuple[dict[Any, Any], str, float]] = needs(held_down),
    breakdown: Maybe[Frame] = maybe(breakdown),
    tensor_cores: Maybe[Frame] = maybe(tensor_cores),
    own_time: Frame = needs(own_time),
) -> Estimate:
    row, why, share = max(held_down, key=lambda gpu: gpu[2])
    if not why:
        frame = pd.DataFrame([row for row, _, _ in held_down])
        if frame[["heat", "limit_w"]].isna().all(axis=None):
            raise NotMeasured("why the clocks are below their maximum was not read: `clocks_event_reasons.active`")
        fastest = digits(frame["clock_mhz"].max())
        return nothing(f"nothing but its normal power limit holds a GPU's clock down; {fastest} MHz at most")
    computed = _multiplied(breakdown.get(), tensor_cores)
    # A log of nvidia-smi names no rank: then the slowest GPU is taken for all of them.
    own = {r["rank"]: lost for r, _, lost in held_down if r["source"] == "gpu"}
    removed = {rank: ns * own.get(rank, share if not own else 0.0) for rank, ns in computed.items()}
    return Estimate(
        saving_ns=saving(own_time, removed),
        by_rank_ns=removed if own else {},
        noise_ns=part_noise(breakdown.get(), "computation") * share,
        loses="is lost to a GPU's lowered clock",
        seen=(row, why, share, max(computed.values())),
    )


def _multiplied(breakdown: Frame, tensor_cores: Maybe[Frame]) -> dict[int, float]:
    """Return each rank's time in kernels that multiply, ns of the mean step; in all kernels if none are known."""
    computed = part(breakdown, "computation")
    frame = tensor_cores.or_none()
    if frame is None:
        return computed
    products = frame[["tensor_ns", "float32_ns", "unknown_ns"]].sum(axis=1) / frame["kernel_ns"].clip(lower=1.0)
    share = products.replace(0.0, 1.0).set_axis(frame["rank"])
    return {rank: ns * float(share.get(rank, 1.0)) for rank, ns in computed.items()}


def explain(estimate: Estimate, clocks: Frame = needs(clocks)) -> Explanation:
    row, why, share, computed_ns = estimate.seen
    cause, remedy = _CAUSES[why]
    names = [f"rank {r}" if of == "gpu" else of for r, of in zip(clocks["rank"], clocks["source"], strict=True)]
    slowest = clocks.assign(name=names).sort_values("clock_mhz", kind="stable")
    which = f"The GPU of rank {row['rank']}" if row["source"] == "gpu" else f"GPU {row['source'].split()[-1]}"
    highest = f", of {digits(row['max_mhz'])} MHz at most" if row["max_mhz"] > 0 else ""
    return Explanation(
        title=f"A GPU's clock is held down: {cause}",
        summary=f"{which} ran at {digits(row['clock_mhz'])} MHz on average{highest}; {percent(share)} of it is"
        f" missing, which {duration(computed_ns)} of a step depend on.",
        changes=(change(remedy.format(**row, most=digits(row["max_mhz"]))),),
        evidence=table("Clocks, and how often what held them down", slowest, _COLUMNS, _MOST_ROWS),
        sure="Predicted with products as fast as the clock, and all else as it is; where a trace does not show the"
        " products, with all computation as fast as the clock.",
    )


RULE = Rule("Lowered clocks", check, explain, ("computation",), notable=NOTABLE_SHARE, only_with="gpu")
