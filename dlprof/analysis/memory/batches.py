"""The memory that a larger batch needs on the GPU, and the time that it saves."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pandas as pd

from dlprof import schema
from dlprof.analysis.compute.kernels import FORWARD_SHARE, TIMES, larger_batches
from dlprof.analysis.engine import RANK, Frame, Maybe, RankFacts, across_ranks, by_rank, maybe, needs, per_rank
from dlprof.analysis.memory.composition import memory_composition
from dlprof.analysis.memory.footprint import growth, main_device, of_device
from dlprof.analysis.memory.memory import memory_use, total_bytes
from dlprof.analysis.step.breakdown import breakdown, part
from dlprof.analysis.step.savings import own_time, saving
from dlprof.errors import NotMeasured

# Memory monitors warn above 92 %. A larger batch may use up to that.
HIGH = 0.92

# Categories of the step that take the same time for any batch: host work.
HOST = ("host", "optimizer_host", "launch_latency")

# Advised batches of 16 or more are multiples of this: matrix products in 16 bits want 8.
_EVEN = 8
MOST_TIMES = 64.0  # no step is extrapolated further


@per_rank
def batch_room(
    memory_use: Maybe[Frame] = maybe(memory_use),
    held: Maybe[Frame] = maybe(schema.HELD),
    memory_composition: Maybe[Frame] = maybe(memory_composition),
    rank: RankFacts = needs(RANK),
) -> pd.DataFrame:
    """Return how much of the memory of the rank's GPU grows with the batch, one row.

    Columns: stays_bytes, grows_bytes, floor_bytes (needed in the optimizer's step for any batch), total_bytes, counted
    (1: counted by part; 0: all memory that a step frees is taken to grow). The allocator's cache is left out: a larger
    batch would use it. Raises NotMeasured where the rank uses no GPU, or its memory was not read.
    """
    total, composition, table = total_bytes(rank), memory_composition.or_none(), held.or_none()
    if composition is not None and table is not None and (device := main_device(composition)) != "cpu":
        now = of_device(table, composition, device, rank.facts).scaled({"cache": 0.0})
        if "temporary" in set(composition.loc[composition["device"] == device, "part"]):
            moments = dict(growth(now))
            floor = sum(moments.pop("update"))
            # Of the other moments the one that is the first to fill the memory.
            stays, grows = min(moments.values(), key=lambda m: (HIGH * total - m[0]) / max(m[1], 1.0))
            return _row((stays, grows, floor, total, 1))
    use = memory_use.get().iloc[0]
    kept = float(use["kept_bytes"])
    return _row((kept, float(use["peak_allocated_bytes"]) - kept, 0.0, total, 0))


def _row(values: tuple[float, ...]) -> pd.DataFrame:
    columns = ["stays_bytes", "grows_bytes", "floor_bytes", "total_bytes", "counted"]
    return pd.DataFrame([values], columns=columns)


def batch_need(batch_room: pd.DataFrame, times: float) -> float:
    """Return the largest share of memory that a batch `times` as large needs on any rank."""
    grown = batch_room["stays_bytes"] + batch_room["grows_bytes"] * times
    return float((np.maximum(grown, batch_room["floor_bytes"]) / batch_room["total_bytes"]).max())


def most_times(batch_room: pd.DataFrame) -> float:
    """Return the largest batch that fits on every rank below HIGH, as a multiple of the present one; 0: none does."""
    free = HIGH * batch_room["total_bytes"] - batch_room["stays_bytes"]
    fits = batch_room["floor_bytes"] <= HIGH * batch_room["total_bytes"]
    times = (free / batch_room["grows_bytes"].clip(lower=1.0)).where(fits, 0.0)
    return float(times.clip(lower=0.0, upper=MOST_TIMES).min())


def even(times: float, batch: object) -> float:
    """Return a multiple rounded down so that the batch size is one that a user would type.

    That is a whole number, from 16 on a multiple of 8. Where the batch is not known, the multiple is in quarters.
    """
    if not isinstance(batch, int) or isinstance(batch, bool) or batch < 1:
        return float(np.floor(4 * times) / 4)
    size = int(batch * times)
    return (size - size % _EVEN if size >= 2 * _EVEN else size) / batch


@across_ranks
def same_for_any_batch(breakdown: Frame = needs(breakdown), own_time: Frame = needs(own_time)) -> dict[int, float]:
    """Return each rank's time of the mean step that is the same for any batch, ns.

    That is host work and the exchange of gradients, without waiting for other ranks.
    """
    exchanged, waits = part(breakdown, "communication"), by_rank(own_time, "wait_ns")
    return {r: ns + max(0.0, exchanged[r] - waits.get(r, 0.0)) for r, ns in part(breakdown, *HOST).items()}


@across_ranks
def larger_batch_steps(
    same_for_any_batch: dict[int, float] = needs(same_for_any_batch),
    larger_batches: Maybe[Frame] = maybe(larger_batches),
    own_time: Frame = needs(own_time),
    breakdown: Frame = needs(breakdown),
) -> pd.DataFrame:
    """Return the time that larger batches save, per present number of samples, a row for 1 and for each of TIMES.

    Columns: times, gain_ns, again_ns (the gain if the forward pass is recomputed). From a replay of the traced steps;
    without one, the time that is the same for any batch is divided by the multiple, and recomputation is added.
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
    return pd.DataFrame(rows, columns=["times", "gain_ns", "again_ns"])


def gain_at(larger_batch_steps: pd.DataFrame, times: float, column: str = "gain_ns") -> float:
    """Return the gain of a multiple between those of `larger_batch_steps`.

    Interpolated over 1 / times, in which the gain is concave: the true gain is rather more. Beyond the largest known
    multiple the gain stays the same.
    """
    left = 1 / larger_batch_steps["times"].to_numpy(dtype=float)
    order = np.argsort(left)
    return float(np.interp(1 / times, left[order], larger_batch_steps[column].to_numpy(dtype=float)[order]))


def up_to(steps: pd.DataFrame, batch_room: pd.DataFrame, step_ns: float, times: float) -> pd.DataFrame:
    """Return time and memory with larger batches: the rows of `larger_batch_steps` below a multiple, and that one.

    Columns: times, step_ns, speed (× present), need (see `batch_need`).
    """
    rows = [(t, step_ns - gain_at(steps, t), batch_need(batch_room, t)) for t in (*steps["times"], times) if t <= times]
    frame = pd.DataFrame(rows, columns=["times", "step_ns", "need"]).drop_duplicates()
    return frame.assign(speed=step_ns / frame["step_ns"])
