"""What a larger batch would need of the GPU's memory, and give."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pandas as pd

from dlprof.analysis import settings
from dlprof.analysis.compute.kernels import FORWARD_SHARE, TIMES
from dlprof.analysis.engine import Job, Maybe, RankFacts, across_ranks, by_rank, per_rank
from dlprof.analysis.memory.footprint import GROWING, main_device, of_device
from dlprof.analysis.memory.memory import total_bytes
from dlprof.analysis.step.breakdown import part
from dlprof.analysis.step.savings import saving
from dlprof.errors import NotMeasured

# Where tools that watch memory warn: above 92 %. A larger batch may fill up to there.
HIGH = 0.92

# The categories of the step that are the same for any batch: what the host does.
HOST = ("host", "optimizer_host", "launch_latency")

# A batch is advised in sizes of which it is a multiple, from twice that on: matrix products in 16 bits want 8.
_EVEN = 8
MOST_TIMES = 64.0  # no step is extrapolated further


@per_rank
def batch_room(
    memory_use: Maybe[pd.DataFrame], held: Maybe[pd.DataFrame], memory_composition: Maybe[pd.DataFrame], rank: RankFacts
) -> pd.DataFrame:
    """Return what grows with the batch on the rank's GPU, one row, bytes: stays_bytes, grows_bytes, floor_bytes (that
    is needed as the optimizer steps, whatever the batch), total_bytes, counted (1: by part, 0: all grows that a step
    does not leave allocated).

    Without the allocator's cache, which a larger batch would use. Raises NotMeasured where the rank uses no GPU, or its
    memory was not read.
    """
    total, composition, table = total_bytes(rank), memory_composition.or_none(), held.or_none()
    if composition is not None and table is not None and (device := main_device(composition)) != "cpu":
        now = of_device(table, composition, device, rank.facts).scaled({"cache": 0.0})
        if "temporary" in set(composition.loc[composition["device"] == device, "part"]):
            grows = sum(now.moments["forward"][p] for p in GROWING)
            row = (sum(now.moments["forward"].values()) - grows, grows, sum(now.moments["update"].values()), total, 1)
            return _row(row)
    use = memory_use.get().iloc[0]
    kept = float(use["kept_bytes"])
    return _row((kept, float(use["peak_allocated_bytes"]) - kept, 0.0, total, 0))


def _row(values: tuple[float, ...]) -> pd.DataFrame:
    columns = ["stays_bytes", "grows_bytes", "floor_bytes", "total_bytes", "counted"]
    return pd.DataFrame([values], columns=columns)


def batch_need(batch_room: pd.DataFrame, times: float) -> float:
    """Return the share of memory that a batch so many times as large needs, on the rank where that is most."""
    grown = batch_room["stays_bytes"] + batch_room["grows_bytes"] * times
    return float((np.maximum(grown, batch_room["floor_bytes"]) / batch_room["total_bytes"]).max())


def most_times(batch_room: pd.DataFrame) -> float:
    """Return how many times as large a batch fits on every rank below HIGH; 0: not even what stays does."""
    free = HIGH * batch_room["total_bytes"] - batch_room["stays_bytes"]
    fits = batch_room["floor_bytes"] <= HIGH * batch_room["total_bytes"]
    times = (free / batch_room["grows_bytes"].clip(lower=1.0)).where(fits, 0.0)
    return float(times.clip(lower=0.0, upper=MOST_TIMES).min())


def even(times: float, batch: object) -> float:
    """Return so many times the batch, or less, so that its size is one that a user would type: a whole number, of 16 on
    a multiple of 8. Where the batch is not known, a multiple in quarters.
    """
    if not isinstance(batch, int) or isinstance(batch, bool) or batch < 1:
        return float(np.floor(4 * times) / 4)
    size = int(batch * times)
    return (size - size % _EVEN if size >= 2 * _EVEN else size) / batch


@across_ranks
def same_for_any_batch(breakdown: pd.DataFrame, own_time: pd.DataFrame) -> dict[int, float]:
    """Return each rank's time of the mean step that is the same for any batch, ns.

    That is what the host does and what ranks exchange of gradients, but for waiting for other ranks.
    """
    exchanged, waits = part(breakdown, "communication"), by_rank(own_time, "wait_ns")
    return {r: ns + max(0.0, exchanged[r] - waits.get(r, 0.0)) for r, ns in part(breakdown, *HOST).items()}


@across_ranks
def larger_batch_steps(
    batch_room: Maybe[pd.DataFrame],
    same_for_any_batch: dict[int, float],
    larger_batches: Maybe[pd.DataFrame],
    own_time: pd.DataFrame,
    mean_step_ns: float,
    breakdown: pd.DataFrame,
    job: Job,
) -> pd.DataFrame:
    """Return what a larger batch would need and give, for as many samples as a step has now, a row a multiple.

    Columns: times (1: as it is; TIMES; and the largest that fits), size (NaN: not known), need (share of the memory of
    the GPU that it fills most; NaN: not known), gain_ns, step_ns, speed (× now), again_ns (the gain where the forward
    pass is computed once more). By replaying the traced steps; where they cannot be, what is the same for any batch is
    divided, and what is computed again comes on top.
    """
    rows = []
    forward = {r: FORWARD_SHARE * ns for r, ns in part(breakdown, "computation").items()}
    for times in (1.0, *TIMES):
        gone = {r: ns * (1 - 1 / times) for r, ns in same_for_any_batch.items()}
        again = {r: ns - forward.get(r, 0.0) for r, ns in gone.items()}
        with suppress(NotMeasured):
            frame = larger_batches.get()
            mine = frame[frame["times"] == times]
            gone, again = gone | by_rank(mine, "gain_ns"), again | by_rank(mine, "again_ns")
        longer = min(again.values(), default=0.0)
        rows.append((times, saving(own_time, gone), saving(own_time, again) if longer >= 0 else longer))
    room, batch = batch_room.or_none(), settings.training_loader(job).get("batch_size")
    most = 0.0 if room is None else even(most_times(room), batch)
    frame = pd.DataFrame(rows, columns=["times", "gain_ns", "again_ns"])
    if most > 1 and most not in frame["times"].to_list():
        frame.loc[len(frame)] = [most, gain_at(frame, most), gain_at(frame, most, "again_ns")]
    frame = frame.sort_values("times", ignore_index=True)
    sizes = frame["times"] * (batch if isinstance(batch, int) else np.nan)
    needs = [np.nan if room is None else batch_need(room, times) for times in frame["times"]]
    frame = frame.assign(size=sizes, need=needs, step_ns=mean_step_ns - frame["gain_ns"])
    return frame.assign(speed=mean_step_ns / frame["step_ns"].clip(lower=1.0))


def gain_at(larger_batch_steps: pd.DataFrame, times: float, column: str = "gain_ns") -> float:
    """Return the gain of a multiple between those of `larger_batch_steps`.

    By the share of the batch that is the same, 1 / times, over which the gain bends downwards: so it is rather more.
    Beyond the largest that is known nothing more is gained.
    """
    left = 1 / larger_batch_steps["times"].to_numpy(dtype=float)
    order = np.argsort(left)
    return float(np.interp(1 / times, left[order], larger_batch_steps[column].to_numpy(dtype=float)[order]))
