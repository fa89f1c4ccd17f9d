"""Snapshots of PyTorch's allocator, replayed: what was allocated on the GPU at each moment, where, and what was free.

A snapshot has the blocks of one moment, and the events before it, as many as the recording kept. Together they show
from when to when each block was allocated. A block without an event was allocated before the first one.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from math import nan

import numpy as np
import pandas as pd
from msgspec import Struct
from numpy.typing import NDArray

from dlprof import schema
from dlprof.analysis.engine import Frame, Maybe, maybe, needs, per_rank, within_rank
from dlprof.errors import NotMeasured

Ints = NDArray[np.int64]

ROUNDING = 512  # bytes: the allocator's blocks are multiples of it (kMinBlockSize, c10/cuda/CUDACachingAllocator.cpp)

MOST_SITES = 40  # lines that travel
MOST_DRAWN = 5  # lines with an area of their own: with that of the others, as many as the page has colours
MOST_POINTS = 300  # of a curve: enough for any screen

# Why a rule cannot judge a run without one.
NO_SNAPSHOT = (
    "no snapshot of PyTorch's allocator (torch.cuda.memory._record_memory_history(), and later ._dump_snapshot(file),"
    " write one)"
)

BEFORE = "allocated before the first event"
NO_FRAME = "no frame of Python"
OTHERS = "other lines"

_TAKES, _GIVES = ("segment_alloc", "segment_map"), ("segment_free", "segment_unmap")


class Replay(Struct, frozen=True):
    """One device's allocator over n events. Moment 0 is before the first event, moment k behind the k-th.

    `allocated`, `reserved`: bytes at each moment. `at_ns`: its time (−1: unknown). Of each piece of memory that was
    held: from `begins` on until before `ends` (n + 1: at the end), its address, bytes, and codes of `sites`.
    """

    device: int
    at_ns: Ints
    allocated: Ints
    reserved: Ints
    begins: Ints
    ends: Ints
    address: Ints
    held: Ints
    site: Ints
    sites: tuple[tuple[str, str], ...]  # the user's line, and what it called
    segments: pd.DataFrame  # begins, ends, address, bytes, stream, pool; as far as they are known
    ooms: pd.DataFrame  # moment, bytes, stream, pool, free_bytes, site

    @property
    def peak(self) -> int:
        """The moment with the most allocated."""
        return int(self.allocated.argmax())

    def live(self, moment: int) -> NDArray[np.bool_]:
        """Return which pieces are held at a moment."""
        mask: NDArray[np.bool_] = (self.begins <= moment) & (moment < self.ends)
        return mask


@within_rank
def memory_replay(
    memory_blocks: Frame = needs(schema.MEMORY_BLOCKS), memory_events: Maybe[Frame] = maybe(schema.MEMORY_EVENTS)
) -> list[Replay]:
    """Replay the events of each device that holds or held memory."""
    events = memory_events.or_none()
    devices = set(memory_blocks["device"].tolist()) | (set() if events is None else set(events["device"].tolist()))
    replays = [
        _replayed(
            int(device),
            memory_blocks[memory_blocks["device"] == device].reset_index(drop=True),
            None if events is None else events[events["device"] == device].reset_index(drop=True),
        )
        for device in sorted(devices)
    ]
    return [replay for replay in replays if replay.reserved.max(initial=0) > 0 or len(replay.ooms)]


def _replayed(device: int, blocks: pd.DataFrame, events: pd.DataFrame | None) -> Replay:
    n = 0 if events is None else len(events)
    held = blocks[blocks["state"] != "inactive"]
    parts = [_before(held, events, n)] if events is None else [_paired(events, held), _before(held, events, n)]
    pieces = pd.concat(parts, ignore_index=True)
    codes, sites = pd.factorize(pd.MultiIndex.from_frame(pieces[["site", "via"]].astype(object)))
    begins, ends, size = (pieces[c].to_numpy(dtype=np.int64) for c in ("begins", "ends", "bytes"))
    change = np.bincount(begins, size, n + 2)[: n + 1] - np.bincount(ends, size, n + 2)[: n + 1]
    segments = blocks.drop_duplicates("segment")
    final = int(segments["segment_bytes"].sum())
    at_ns = np.full(n + 1, -1, dtype=np.int64)
    reserved = np.full(n + 1, final, dtype=np.int64)
    ooms = pd.DataFrame(columns=["moment", "bytes", "stream", "pool", "free_bytes", "site"])
    if events is not None and n:
        at_ns[1:] = events["at_ns"]
        at_ns[0] = at_ns[1]
        action, changed = events["action"], events["bytes"].to_numpy()
        more = np.where(action.isin(_TAKES), changed, 0) - np.where(action.isin(_GIVES), changed, 0)
        grown = np.concatenate(([0], np.cumsum(more)))
        # From the end, which the blocks show; where they are cut off, from nothing.
        reserved = grown + (final - grown[-1] if final else max(0, -int(grown.min())))
        failed = events[action == "oom"]
        ooms = failed.assign(moment=failed.index.to_numpy() + 1)[list(ooms.columns)]
    return Replay(
        device,
        at_ns,
        np.cumsum(change).astype(np.int64),
        reserved,
        begins,
        ends,
        pieces["address"].to_numpy(dtype=np.int64),
        size,
        codes.astype(np.int64),
        tuple(sites),
        _segments(segments, events, n),
        ooms,
    )


def _lives(events: pd.DataFrame, takes: tuple[str, ...], gives: tuple[str, ...]) -> pd.DataFrame:
    """Pair each event that takes an address with the next of that address; rows: begins, ends, row (of the event).

    begins 0: it was taken before the first event, and `row` gives it back; ends n + 1: nothing gave it back.
    """
    n = len(events)
    is_take = events["action"].isin(takes).to_numpy()
    chosen = np.flatnonzero(is_take | events["action"].isin(gives).to_numpy())
    chosen = chosen[np.lexsort((chosen, events["address"].to_numpy()[chosen]))]
    address, take = events["address"].to_numpy()[chosen], is_take[chosen]
    same_as_next = np.append(address[1:] == address[:-1], False)[: len(chosen)]
    same_as_last = np.insert(address[1:] == address[:-1], 0, False)[: len(chosen)]
    following = np.append(chosen[1:], -1)[: len(chosen)]
    begun = pd.DataFrame({"begins": chosen + 1, "ends": np.where(same_as_next, following + 1, n + 1), "row": chosen})
    preceded = same_as_last & np.insert(take[:-1], 0, False)[: len(chosen)]
    older = chosen[~take & ~preceded]
    return pd.concat(
        [begun[take], pd.DataFrame({"begins": 0, "ends": older + 1, "row": older})], ignore_index=True
    ).astype(np.int64)


def _paired(events: pd.DataFrame, held: pd.DataFrame) -> pd.DataFrame:
    """Return what events show of pieces of memory: begins, ends, address, bytes, site, via."""
    freed = "free_completed" if (events["action"] == "free_completed").any() else "free_requested"
    lives = _lives(events, ("alloc",), (freed,))
    of = events[["address", "bytes", "site", "via"]].iloc[lives["row"]].reset_index(drop=True)
    made = pd.concat([lives[["begins", "ends"]], of], axis=1)
    made["bytes"] = -(-made["bytes"] // ROUNDING) * ROUNDING
    known = held.drop_duplicates("address").set_index("address")["bytes"]
    at_end = (made["ends"] == len(events) + 1) & made["address"].isin(known.index)
    made.loc[at_end, "bytes"] = known.reindex(made.loc[at_end, "address"]).to_numpy()
    made[["site", "via"]] = made[["site", "via"]].astype(object)
    made.loc[made["begins"] == 0, ["site", "via"]] = (BEFORE, "")
    made.loc[made["site"] == "", "site"] = NO_FRAME
    return made


def _before(held: pd.DataFrame, events: pd.DataFrame | None, n: int) -> pd.DataFrame:
    """Return the blocks that are held at the end and were allocated before the first event."""
    older = held
    if events is not None and n:
        of_block = events[events["action"].isin(("alloc", "free_completed"))].drop_duplicates("address", keep="last")
        taken = of_block.loc[of_block["action"] == "alloc", "address"]
        older = held[~held["address"].isin(taken)]
    made = pd.DataFrame({"begins": 0, "ends": n + 1, **{c: older[c] for c in ("address", "bytes", "site", "via")}})
    made[["site", "via"]] = made[["site", "via"]].astype(object)
    made.loc[made["site"] == "", "site"] = BEFORE if n else NO_FRAME
    return made


def _segments(segments: pd.DataFrame, events: pd.DataFrame | None, n: int) -> pd.DataFrame:
    """Return the allocator's segments over time: begins, ends, address, bytes, stream, pool.

    The events list the pages of growing segments one by one, the blocks list whole segments: these are not matched.
    """
    columns = ["address", "bytes", "stream", "pool"]
    last = segments.rename(columns={"bytes": "block_bytes"}).rename(columns={"segment_bytes": "bytes"})
    last = last.drop(columns="address").rename(columns={"segment": "address"})[columns].assign(begins=0, ends=n + 1)
    if events is None or not n:
        return last
    lives = _lives(events, _TAKES[:1], _GIVES[:1])
    of = pd.concat([lives[["begins", "ends"]], events[columns].iloc[lives["row"]].reset_index(drop=True)], axis=1)
    begun = set(of.loc[of["ends"] == n + 1, "address"].tolist())
    return pd.concat([of, last[~last["address"].isin(begun)]], ignore_index=True)


@per_rank
def memory_peak(memory_replay: list[Replay] = needs(memory_replay)) -> pd.DataFrame:
    """Return one row a device: device, peak_bytes, reserved_bytes, at_ns (all at the peak), events, end_bytes.

    `peak_bytes` is the most that tensors held at any moment that the snapshot covers. `events`: how many are replayed;
    0: the snapshot has no history, and the peak is the moment when it was taken.
    """
    rows = []
    for r in memory_replay:
        at_peak = {"peak_bytes": r.allocated, "reserved_bytes": r.reserved, "at_ns": r.at_ns}
        peak = {name: int(values[r.peak]) for name, values in at_peak.items()}
        rows.append({"device": r.device, **peak, "events": len(r.at_ns) - 1, "end_bytes": int(r.allocated[-1])})
    if not rows:
        raise NotMeasured("the snapshot shows no memory of a GPU")
    return pd.DataFrame(rows)


@per_rank
def memory_holders(memory_replay: list[Replay] = needs(memory_replay)) -> pd.DataFrame:
    """Return the held memory by the line that allocated it: device, moment, site, via, bytes, blocks, share; the most
    first.

    Moments: "peak", and "oom" where memory ran out, the last time. `share`: of all that was held. `via`: what the line
    called for most of it.
    """
    frames = []
    for r in memory_replay:
        moments = {"peak": r.peak}
        if len(r.ooms):
            moments["oom"] = int(r.ooms["moment"].iloc[-1]) - 1
        for name, moment in moments.items():
            live = r.live(moment)
            size = np.bincount(r.site[live], r.held[live], len(r.sites))
            blocks = np.bincount(r.site[live], minlength=len(r.sites))
            of = pd.DataFrame(list(r.sites), columns=["site", "via"]).assign(bytes=size, blocks=blocks)
            of = of[of["blocks"] > 0].sort_values("bytes", ascending=False, kind="stable")
            by_line = of.groupby("site", sort=False).agg(
                via=("via", "first"), bytes=("bytes", "sum"), blocks=("blocks", "sum")
            )
            by_line = by_line.sort_values("bytes", ascending=False, kind="stable").reset_index()
            by_line["share"] = by_line["bytes"] / max(float(size.sum()), 1.0)
            by_line["site"] = by_line["site"].map(shortened(by_line["site"]))
            by_line["via"] = by_line["via"].map(shortened(by_line["via"]))
            by_line.insert(0, "moment", name)
            by_line.insert(0, "device", r.device)
            frames.append(by_line.head(MOST_SITES))
    if not frames:
        raise NotMeasured("the snapshot shows no memory of a GPU")
    return pd.concat(frames, ignore_index=True)


@per_rank
def memory_curve(memory_replay: list[Replay] = needs(memory_replay)) -> pd.DataFrame:
    """Return what each line's memory was over time: device, moment, at_ns, site, bytes; thinned, the peak kept.

    The lines that hold most at the peak, and OTHERS. A point stands for several moments: that of the most allocated.
    """
    frames = []
    for r in memory_replay:
        n = len(r.at_ns)
        if n < 2:
            continue
        lines = np.array([site for site, _ in r.sites], dtype=object)
        live = r.live(r.peak)
        at_peak = pd.Series(np.bincount(r.site[live], r.held[live], len(lines))).groupby(lines).sum()
        top = at_peak[at_peak > 0].sort_values(ascending=False, kind="stable").index[:MOST_DRAWN].tolist()
        starts = np.unique(np.linspace(0, n, min(n, MOST_POINTS) + 1).astype(np.int64))
        kept = np.array([a + int(r.allocated[a:b].argmax()) for a, b in pairwise(starts.tolist())])
        names = shortened(top)
        rest = r.allocated[kept].astype(float)
        for line in top:
            mine = (lines == line)[r.site]
            begins, ends, size = r.begins[mine], r.ends[mine], r.held[mine]
            change = np.bincount(begins, size, n + 1)[:n] - np.bincount(ends, size, n + 1)[:n]
            value = np.cumsum(change)[kept]
            rest = rest - value
            frames.append(_points(r, kept, names[line], value))
        if (rest > 0).any():
            frames.append(_points(r, kept, OTHERS, rest.clip(min=0.0)))
    if not frames:
        raise NotMeasured("the snapshot has no events: torch.cuda.memory._record_memory_history() brings them")
    return pd.concat(frames, ignore_index=True)


def _points(r: Replay, kept: Ints, site: str, value: NDArray[np.float64]) -> pd.DataFrame:
    return pd.DataFrame({"device": r.device, "moment": kept, "at_ns": r.at_ns[kept], "site": site, "bytes": value})


def shortened(sites: Iterable[str]) -> dict[str, str]:
    """Return each site with its file's name instead of its path, with the folder where two files share a name."""
    parted = {site: site.rpartition(" (") for site in dict.fromkeys(sites)}
    paths = {site: rest.replace("\\", "/").rstrip(")").split("/") for site, (_, _, rest) in parted.items()}
    files: dict[str, set[str]] = {}
    for path in paths.values():
        files.setdefault(path[-1].partition(":")[0], set()).add("/".join(path[:-1]))
    short = {}
    for site, (function, sign, _) in parted.items():
        path = paths[site]
        alone = len(files[path[-1].partition(":")[0]]) == 1
        short[site] = f"{function} ({'/'.join(path[-1:] if alone else path[-2:])})" if sign else site
    return short


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
            request = r.ooms.iloc[-1]
            moment = int(request["moment"]) - 1  # before it failed
            free = float(request["free_bytes"])
            rows.append(
                (
                    r.device,
                    "oom",
                    int(r.allocated[moment]),
                    int(r.reserved[moment]),
                    *_at(r, moment, int(request["stream"]), str(request["pool"])),
                    float(request["bytes"]),
                    free if free >= 0 else nan,
                    len(r.ooms),
                    shortened([str(request["site"])])[str(request["site"])],
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
