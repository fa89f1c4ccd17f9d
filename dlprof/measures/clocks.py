"""How fast the GPUs' multiprocessors were clocked while training, and what held them down."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from dlprof.engine import RankData, per_rank
from dlprof.errors import NotMeasured
from dlprof.measures.samples import ENOUGH
from dlprof.measures.steps import light_steps

# Bits of nvmlDeviceGetCurrentClocksEventReasons (nvml.h), and of nvidia-smi's clocks_event_reasons.active. What slows
# hardware down is heat, or a power brake, where neither says so itself.
REASONS: Mapping[str, int] = {
    "heat": 0x20 | 0x40,  # SwThermalSlowdown, HwThermalSlowdown
    "power_brake": 0x80,
    "hardware": 0x08,
    "power_cap": 0x04,
    "set": 0x02,  # ApplicationsClocksSetting: nvidia-smi -ac or -lgc
}
_IDLE = 0x01

_METRICS = ("sm_clock_mhz", "sm_clock_max_mhz", "clock_reasons_bits", "power_limit_w", "power_limit_default_w")


@per_rank
def clocks(rank: RankData) -> pd.DataFrame:
    """Give one row a GPU that was read: its clock while it was not idle, in the steady steps where those are recorded.

    Columns: source (gpu: the rank's own; "nvidia-smi ID": one of a log, which names no rank), readings, clock_mhz (the
    mean), max_mhz, limit_w and default_w (of power), and of each of REASONS its share of the readings and, as
    NAME_mhz, the mean clock of the readings with it; free, free_mhz, free_spread_mhz (their standard deviation): of
    those with none. NaN: not told, or none such.
    Raises NotMeasured where no clock was read.
    """
    samples = rank.table("samples")
    samples = samples[samples["metric"].isin(_METRICS)]
    if rank.has("steps"):
        steps = rank.once(light_steps)
        steps = steps[steps["steady"]]
        if len(steps):
            at, last = samples["at_ns"].to_numpy(), steps.iloc[-1]
            samples = samples[(at >= steps["start_ns"].iloc[0]) & (at <= last["start_ns"] + last["dur_ns"])]
    rows = []
    for source, mine in samples.groupby("source", observed=True):
        table = mine.pivot_table(index="at_ns", columns="metric", values="value", observed=True)
        table = table.reindex(columns=list(_METRICS))
        told = table["clock_reasons_bits"].notna()
        bits = table["clock_reasons_bits"].fillna(0).to_numpy().astype(np.int64)
        busy = table["sm_clock_mhz"].notna().to_numpy() & ((bits & _IDLE) == 0)
        table, bits, told = table[busy], bits[busy], told[busy]
        if len(table) < ENOUGH:
            continue
        clock = table["sm_clock_mhz"]
        held = {name: (bits & mask) != 0 for name, mask in REASONS.items()}
        known = bool(told.all())
        free = ~np.logical_or.reduce(list(held.values()))
        rows.append(
            {
                "source": str(source),
                "readings": len(table),
                "clock_mhz": float(clock.mean()),
                "max_mhz": float(table["sm_clock_max_mhz"].max()),
                "limit_w": float(table["power_limit_w"].mean()),
                "default_w": float(table["power_limit_default_w"].mean()),
                **{name: float(at.mean()) if known else np.nan for name, at in held.items()},
                **{f"{name}_mhz": float(clock[at].mean()) for name, at in held.items()},
                "free": float(free.mean()) if known else np.nan,
                "free_mhz": float(clock[free].mean()) if known else np.nan,
                "free_spread_mhz": float(clock[free].std(ddof=0)) if known else np.nan,
            }
        )
    if not rows:
        raise NotMeasured("no clock of a GPU was read while it trained")
    return pd.DataFrame(rows)
