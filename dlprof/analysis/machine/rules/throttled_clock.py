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

from dlprof.analysis import settings
from dlprof.analysis.engine import Job, Maybe
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.panel import table
from dlprof.analysis.step.breakdown import part, part_noise
from dlprof.analysis.step.savings import saving
from dlprof.errors import DoesNotApply, NotMeasured
from dlprof.result import Change
from dlprof.units import digits, duration, percent

_MOST_ROWS = 16

_WHY = {
    "heat": "it is too hot",
    "power_brake": "its power supply slows it down",
    "hardware": "its hardware slows it down (heat or power)",
    "set": "its clock was set lower",
    "locked": "it stays far below its maximum",
    "limit": "its power limit was lowered",
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
    held_down: Maybe[list[tuple[dict[Any, Any], str, float]]],
    breakdown: Maybe[pd.DataFrame],
    tensor_cores: Maybe[pd.DataFrame],
    own_time: pd.DataFrame,
    job: Job,
) -> Estimate:
    """Estimate what computing would take if nothing held down a GPU's clock."""
    if settings.on_cpu(job):
        raise DoesNotApply("the job trains on the CPU: no GPU's clock matters")
    gpus = held_down.get()
    row, why, share = max(gpus, key=lambda gpu: gpu[2])
    if not why:
        frame = pd.DataFrame([row for row, _, _ in gpus])
        if frame[["heat", "limit_w"]].isna().all(axis=None):
            raise NotMeasured("why the clocks are below their maximum was not read: this driver does not report it")
        fastest = digits(frame["clock_mhz"].max())
        return nothing(f"nothing but its normal power limit holds a GPU's clock down; {fastest} MHz at most")
    computed = _multiplied(breakdown.get(), tensor_cores)
    # A log of nvidia-smi names no rank: then the slowest GPU is taken for all of them.
    own = {r["rank"]: lost for r, _, lost in gpus if r["source"] == "gpu"}
    removed = {rank: ns * own.get(rank, share if not own else 0.0) for rank, ns in computed.items()}
    return Estimate(
        saving_ns=saving(own_time, removed),
        by_rank_ns=removed if own else {},
        noise_ns=part_noise(breakdown.get(), "computation") * share,
        loses="is lost to a GPU's lowered clock",
        seen=(row, why, share, max(computed.values())),
    )


def _multiplied(breakdown: pd.DataFrame, tensor_cores: Maybe[pd.DataFrame]) -> dict[int, float]:
    """Return what each rank computes in kernels that multiply, ns of the mean step; all, where none is known."""
    computed = part(breakdown, "computation")
    frame = tensor_cores.or_none()
    if frame is None:
        return computed
    products = frame[["tensor_ns", "float32_ns", "unknown_ns"]].sum(axis=1) / frame["kernel_ns"].clip(lower=1.0)
    share = products.replace(0.0, 1.0).set_axis(frame["rank"])
    return {rank: ns * float(share.get(rank, 1.0)) for rank, ns in computed.items()}


def explain(estimate: Estimate, clocks: pd.DataFrame) -> Explanation:
    """Compare the clock of the GPU that lost most with its maximum, and list all clocks, the lowest first."""
    row, why, share, computed_ns = estimate.seen
    names = [f"rank {r}" if of == "gpu" else of for r, of in zip(clocks["rank"], clocks["source"], strict=True)]
    which = f"The GPU of rank {row['rank']}" if row["source"] == "gpu" else f"GPU {row['source'].split()[-1]}"
    highest = f", of {digits(row['max_mhz'])} MHz at most" if row["max_mhz"] > 0 else ""
    return Explanation(
        title=f"A GPU's clock is held down: {_WHY[why]}",
        summary=f"{which} ran at {digits(row['clock_mhz'])} MHz on average{highest}; {percent(share)} of it is"
        f" missing, which {duration(computed_ns)} of a step depend on.",
        changes=(_remedy(row, why),),
        evidence=table(
            "Clocks, and how often what held them down",
            clocks.assign(name=names).sort_values("clock_mhz", kind="stable"),
            _COLUMNS,
            _MOST_ROWS,
        ),
        sure="Predicted with products as fast as the clock, and all else as it is; where a trace does not show the"
        " products, with all computation as fast as the clock.",
    )


def _remedy(row: dict[Any, Any], why: str) -> Change:
    could = f"{digits(row['max_mhz'])} MHz are possible"
    if why == "set":
        return change(f"`nvidia-smi -rgc` and `nvidia-smi -rac`: the clock was set; {could}")
    if why == "locked":
        return change(f"`nvidia-smi -rgc`: it has no reason, as where a clock was locked; {could}")
    if why == "limit":
        return change(f"`nvidia-smi -pl {row['default_w']:.0f}` (is {row['limit_w']:.0f} W)")
    return change(
        "look at the node's cooling and power (`nvidia-smi -q -d PERFORMANCE,TEMPERATURE`), or leave the node out"
    )


RULE = Rule(
    "throttled_clock",
    "Lowered clocks",
    check,
    explain,
    saves_from=("computation",),
    notable=0.05,  # from where on tools for stragglers report one
)
