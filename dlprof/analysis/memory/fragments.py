"""The state of PyTorch's allocator: how much is free, in which blocks, and why a request failed."""

from __future__ import annotations

from math import nan

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof import schema
from dlprof.analysis.engine import Frame, needs, per_rank
from dlprof.analysis.memory.snapshot import Replay, memory_replay, shortened
from dlprof.errors import NotMeasured

Ints = NDArray[np.int64]


@per_rank
def memory_state(
    memory_blocks: Frame = needs(schema.MEMORY_BLOCKS), memory_replay: list[Replay] = needs(memory_replay)
) -> pd.DataFrame:
    """Return the allocator's state when the snapshot was taken ("end"), and at the last failed request ("oom").

    Columns: device, moment, allocated_bytes, reserved_bytes, free_bytes (reserved and not allocated), split_bytes (free
    in segments that are partly in use, which cannot be returned to the device), largest_bytes (the largest free block;
    for an oom, of the requesting stream and pool), requested_bytes, device_free_bytes, ooms (so far), site (of the
    request), at_ns. NaN: not known, or no request.
    """
    rows = []
    for r in memory_replay:
        mine = memory_blocks[memory_blocks["device"] == r.device]
        end = _end(mine)
        if end is not None:
            rows.append((r.device, "end", *end, nan, nan, len(r.ooms), "", int(r.at_ns[-1])))
        if len(r.ooms):
            asked = r.ooms.iloc[-1]
            moment = int(asked["moment"]) - 1  # before it failed
            free = float(asked["free_bytes"])
            rows.append(
                (
                    r.device,
                    "oom",
                    int(r.allocated[moment]),
                    int(r.reserved[moment]),
                    *_at(r, moment, int(asked["stream"]), str(asked["pool"])),
                    float(asked["bytes"]),
                    free if free >= 0 else nan,
                    len(r.ooms),
                    shortened([str(asked["site"])])[str(asked["site"])],
                    int(r.at_ns[moment + 1]),
                )
            )
    if not rows:
        raise NotMeasured("the snapshot shows no memory of a GPU")
    columns = ["device", "moment", "allocated_bytes", "reserved_bytes", "free_bytes", "split_bytes", "largest_bytes"]
    return pd.DataFrame(rows, columns=[*columns, "requested_bytes", "device_free_bytes", "ooms", "site", "at_ns"])


def _end(blocks: pd.DataFrame) -> tuple[float, ...] | None:
    """Return allocated, reserved, free, split and largest free bytes of the blocks themselves; None without any."""
    if not len(blocks):
        return None
    free = blocks["state"] == "inactive"
    reserved = float(blocks.drop_duplicates("segment")["segment_bytes"].sum())
    used = blocks.loc[~free, "segment"].unique()
    split = float(blocks.loc[free & blocks["segment"].isin(used), "bytes"].sum())
    unused = float(blocks.loc[free, "bytes"].sum())
    return reserved - unused, reserved, unused, split, float(blocks.loc[free, "bytes"].max()) if free.any() else 0.0


def _at(r: Replay, moment: int, stream: int, pool: str) -> tuple[float, float, float]:
    """Return free, split and largest free bytes at a moment, the last one of a stream and pool; NaN: not known."""
    free = float(r.reserved[moment] - r.allocated[moment])
    segments = r.segments[(r.segments["begins"] <= moment) & (moment < r.segments["ends"])]
    if not len(segments) or abs(float(segments["bytes"].sum()) - float(r.reserved[moment])) > 0:
        return free, nan, nan  # expandable segments are not followed
    live = r.live(moment)
    pieces, within, whole = gaps(
        segments["address"].to_numpy(), segments["bytes"].to_numpy(), r.address[live], r.held[live]
    )
    order = np.argsort(segments["address"].to_numpy(), kind="stable")
    mine = ((segments["stream"] == stream) & (segments["pool"].astype(str) == pool)).to_numpy()[order]
    largest = float(pieces[mine[within]].max(initial=0))
    return free, float(pieces[~whole].sum()), largest


def gaps(segments: Ints, sizes: Ints, blocks: Ints, held: Ints) -> tuple[Ints, NDArray[np.intp], NDArray[np.bool_]]:
    """Return the free pieces between blocks: bytes, which segment (in order of address), whether it is all of that."""
    order = np.argsort(segments, kind="stable")
    begin = segments[order]
    end = begin + sizes[order]
    of = np.searchsorted(begin, blocks, side="right") - 1
    inside = (of >= 0) & (blocks < end[of.clip(0)])
    starts = np.concatenate((blocks[inside] + held[inside], begin))  # behind each block, and where a segment begins
    which = np.concatenate((of[inside], np.arange(len(begin))))
    stops = np.concatenate((blocks[inside], end))
    of_stop = np.concatenate((of[inside], np.arange(len(begin))))
    first = np.lexsort((starts, which))
    last = np.lexsort((stops, of_stop))  # the n-th begin of a segment's free pieces belongs to its n-th end
    size = stops[last] - starts[first]
    within = which[first]
    kept = size > 0
    many = np.bincount(of[inside], minlength=len(begin)) == 0
    return size[kept], within[kept], many[within[kept]]
