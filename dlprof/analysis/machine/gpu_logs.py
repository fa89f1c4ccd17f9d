"""What the logs of GPUs by other tools say on the whole: use, power, clock, memory, and what they lack."""

from __future__ import annotations

import pandas as pd

from dlprof.analysis.engine import Frame, Maybe, across_ranks, maybe, needs, per_rank
from dlprof.analysis.machine.clocks import held_down
from dlprof.analysis.machine.log_clocks import OPTIONS, Clock, log_clocks, placed_samples, run_span
from dlprof.analysis.machine.samples import ENOUGH
from dlprof.errors import NotMeasured

# Below this a GPU counts as idle: nothing but a display or a context.
IDLE = 0.05

_MEANS = ("busy_share", "power_w", "power_limit_w", "sm_clock_mhz")
_MOST = ("sm_clock_max_mhz", "memory_used_bytes", "memory_total_bytes", "temperature_c")


@per_rank
def gpu_logs(
    placed_samples: Frame = needs(placed_samples),
    log_clocks: dict[str, Clock] = needs(log_clocks),
    run_span: tuple[int, int] = needs(run_span),
) -> pd.DataFrame:
    """Return one row a GPU of a log: source, readings, seconds, at, why, and the figures of the log.

    `at`: "run" where they are the readings during the run's steps or trace, "log" where all of the log; `why` that
    is. Means: busy_share, power_w, power_limit_w, sm_clock_mhz. The most: sm_clock_max_mhz, memory_used_bytes,
    memory_total_bytes, temperature_c. `idle_share`: of the readings. `lacks`: the options that would bring what it
    lacks, joined by a space. NaN: not read. Raises NotMeasured where there is no log.
    """
    rows = []
    for source, clock in log_clocks.items():
        mine = placed_samples[placed_samples["source"] == source]
        tool = source.partition(" ")[0]
        if mine.empty or tool == "host" or tool == "processes":
            continue
        at, why = "log", clock.words
        if clock.how != "none" and run_span[1] > run_span[0]:
            inside = mine[mine["at_ns"].between(*run_span)]
            if inside["at_ns"].nunique() >= ENOUGH:
                mine, at = inside, "run"
            else:
                why = why or "fewer than three readings lie in the run"
        by = {str(metric): of["value"] for metric, of in mine.groupby("metric", observed=True)}
        busy = by.get("busy_share")
        rows.append(
            {
                "source": source,
                "readings": int(mine["at_ns"].nunique()),
                "seconds": float(mine["at_ns"].max() - mine["at_ns"].min()) / 1e9 if clock.how != "none" else 0.0,
                "at": at,
                "why": why,
                **{name: float(by[name].mean()) if name in by else None for name in _MEANS},
                **{name: float(by[name].max()) if name in by else None for name in _MOST},
                "idle_share": None if busy is None else float((busy < IDLE).mean()),
                "lacks": "; ".join(option for metric, option in OPTIONS.get(tool, {}).items() if metric not in by),
            }
        )
    if not rows:
        raise NotMeasured("no log of a GPU was read")
    return pd.DataFrame(rows).astype(dict.fromkeys((*_MEANS, *_MOST, "idle_share"), float))


@across_ranks
def gpu_uses(
    gpu_logs: Frame = needs(gpu_logs), held_down: Maybe[list[tuple[dict[str, object], str, float]]] = maybe(held_down)
) -> pd.DataFrame:
    """Return `gpu_logs` with what holds each clock down (`held_by`; "": not known) and the share of it lost."""
    held = {(row["rank"], row["source"]): (why, lost) for row, why, lost in held_down.or_none() or ()}
    of = [
        held.get((rank, source), ("", 0.0)) for rank, source in zip(gpu_logs["rank"], gpu_logs["source"], strict=True)
    ]
    return gpu_logs.assign(held_by=[why for why, _ in of], clock_lost=[lost for _, lost in of])
