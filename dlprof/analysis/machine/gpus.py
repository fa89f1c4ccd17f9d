"""GPUs by their readings: what held their clocks down while training, and what logs of other tools say on the whole."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd

from dlprof.analysis.engine import Frame, Maybe, across_ranks, maybe, needs, per_rank
from dlprof.analysis.machine.samples import ENOUGH, OPTIONS, Clock, log_clocks, placed_samples, run_span, steady_span
from dlprof.errors import NotMeasured

# Bits of nvmlDeviceGetCurrentClocksEventReasons (nvml.h), and of nvidia-smi's clocks_event_reasons.active. What slows
# hardware down is heat, or a power brake, where neither has its own bit set.
REASONS = {
    "heat": 0x20 | 0x40,  # SwThermalSlowdown, HwThermalSlowdown
    "power_brake": 0x80,
    "hardware": 0x08,
    "power_cap": 0x04,
    "set": 0x02,  # ApplicationsClocksSetting: nvidia-smi -ac or -lgc
}
_IDLE_BIT = 0x01

# A reason in a smaller share of the readings than this is chance.
OFTEN = 0.1

# GPUs that computed without a reason for a lower clock ran at 89 % of their maximum or more (public captures of
# nvidia-smi, of an H100, H200, L40S and RTX 4080 SUPER). A GPU with a locked clock showed no reason either. A clock
# changes in steps of 15 MHz.
LOCKED_SHARE = 0.75
_STEP_MHZ = 15.0

_METRICS = ("sm_clock_mhz", "sm_clock_max_mhz", "clock_reasons_bits", "power_limit_w", "power_limit_default_w")


@per_rank
def clocks(
    placed_samples: Frame = needs(placed_samples), steady_span: Maybe[tuple[int, int]] = maybe(steady_span)
) -> pd.DataFrame:
    """Return one row a GPU that was read: its clock while it was not idle, in steady steps where those are recorded.

    Columns: source (gpu: the rank's own; "nvidia-smi ID": one of a log, which names no rank), readings, clock_mhz (the
    mean), max_mhz, limit_w and default_w (of power), and of each of REASONS its share of the readings and, as
    NAME_mhz, the mean clock of the readings with it; free, free_mhz, free_spread_mhz (their standard deviation): of
    those with none. NaN: not known, or none such.
    Raises NotMeasured where no clock was read.
    """
    samples = placed_samples[placed_samples["metric"].isin(_METRICS)]
    span = steady_span.or_none()
    if span:
        samples = samples[samples["at_ns"].between(*span)]
    rows = []
    for source, mine in samples.groupby("source", observed=True):
        at, place = np.unique(mine["at_ns"].to_numpy(), return_inverse=True)
        codes = mine["metric"].cat.set_categories(_METRICS).cat.codes.to_numpy()
        table = np.full((len(at), len(_METRICS)), np.nan)
        table[place, codes] = mine["value"].to_numpy()
        read = pd.DataFrame(table, columns=list(_METRICS))
        read = read[read["sm_clock_mhz"].notna()]
        bits = read["clock_reasons_bits"].fillna(0).astype(np.int64)
        read, bits = read[bits & _IDLE_BIT == 0], bits[bits & _IDLE_BIT == 0]
        if len(read) < ENOUGH:
            continue
        clock, known = read["sm_clock_mhz"], bool(read["clock_reasons_bits"].notna().all())
        held = {name: (bits & mask) != 0 for name, mask in REASONS.items()}
        free = bits & sum(REASONS.values()) == 0
        rows.append(
            {
                "source": str(source),
                "readings": len(read),
                "clock_mhz": clock.mean(),
                "max_mhz": read["sm_clock_max_mhz"].max(),
                "limit_w": read["power_limit_w"].mean(),
                "default_w": read["power_limit_default_w"].mean(),
                **{name: at.mean() if known else np.nan for name, at in held.items()},
                **{f"{name}_mhz": clock[at].mean() for name, at in held.items()},
                "free": free.mean() if known else np.nan,
                "free_mhz": clock[free].mean() if known else np.nan,
                "free_spread_mhz": clock[free].std(ddof=0) if known else np.nan,
            }
        )
    if not rows and (tools := _without_clock(placed_samples)):
        raise NotMeasured(f"the log has no clocks: {'; '.join(tools)} brings them")
    if not rows:
        raise NotMeasured("no GPU's clock was read often enough while it trained: record longer")
    return pd.DataFrame(rows)


def _without_clock(samples: pd.DataFrame) -> list[str]:
    """Return the options of the tools with logs without clocks that record them."""
    sources = samples.groupby("source", observed=True)["metric"].agg(lambda metrics: "sm_clock_mhz" in set(metrics))
    lacking = {str(source).partition(" ")[0] for source, has in sources.items() if not has}
    return [OPTIONS[tool]["sm_clock_mhz"] for tool in OPTIONS if tool in lacking]


@across_ranks
def held_down(clocks: Frame = needs(clocks)) -> list[tuple[dict[Any, Any], str, float]]:
    """Return each row of `clocks` with what holds its clock down ("": nothing) and the share of the clock that is lost.

    What: heat, power_brake, hardware, set, locked, limit.
    """
    rows = clocks.to_dict("records")
    best = max((row["clock_mhz"] for row in rows if not _slowed(row)), default=math.nan)
    return [(row, *_missing(row, best)) for row in rows]


def _slowed(row: dict[Any, Any]) -> bool:
    return any(row[reason] > OFTEN for reason in ("heat", "power_brake", "hardware", "set")) or _lowered(row)


def _lowered(row: dict[Any, Any]) -> bool:
    return bool(row["limit_w"] < 0.99 * row["default_w"])


def _missing(row: dict[Any, Any], best: float) -> tuple[str, float]:
    """Return what holds a GPU's clock down, and the share of it that is lost; "" where nothing does."""
    clock, highest = row["clock_mhz"], row["max_mhz"]
    for reason in ("heat", "power_brake", "hardware"):
        if row[reason] > OFTEN:
            could = next((mhz for mhz in (row["free_mhz"], best, highest) if mhz > clock), clock)
            return reason, 1 - clock / could
    if row["set"] > OFTEN and highest > clock:
        return "set", 1 - clock / highest
    constant = row["free"] > 1 - OFTEN and row["free_spread_mhz"] < _STEP_MHZ
    if constant and row["free_mhz"] < LOCKED_SHARE * highest:
        return "locked", 1 - clock / highest
    if _lowered(row) and row["power_cap"] > OFTEN:
        could = clock * (row["default_w"] / row["limit_w"]) ** (1 / 3)
        return "limit", 1 - clock / min(could, highest if highest > clock else could)
    return "", 0.0


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
