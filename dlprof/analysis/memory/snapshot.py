"""Snapshots of PyTorch's allocator, replayed: what was allocated on the GPU at each moment, and where.

A snapshot has the blocks of one moment, and the events before it, as many as the recording kept. Together they show
from when to when each block was allocated. A block without an event was allocated before the first one.

The places of a backward pass: what the forward pass saves, in its order, and what is made where that is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof import schema
from dlprof.analysis.compute.products import WIDTH
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


@dataclass(frozen=True)
class Replay:
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
    rows = [
        (
            r.device,
            int(r.allocated[r.peak]),
            int(r.reserved[r.peak]),
            int(r.at_ns[r.peak]),
            len(r.at_ns) - 1,
            int(r.allocated[-1]),
        )
        for r in memory_replay
    ]
    if not rows:
        raise NotMeasured("the snapshot shows no memory of a GPU")
    return pd.DataFrame(rows, columns=["device", "peak_bytes", "reserved_bytes", "at_ns", "events", "end_bytes"])


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


_MOST_SHARED = 1_000  # parameters of several modules that are looked at: more than any model is known to have


def places_of(held: pd.DataFrame) -> pd.DataFrame:
    """Return the places of a footprint: what is saved, in the order of the forward pass; one, if nothing is."""
    saved = held[held["part"] == "activation"].reset_index(drop=True)
    if not len(saved):
        saved = pd.DataFrame({"module": [""], "kind": "", "dtype": "", "tensors": 0, "bytes": 0})
    registered = held.loc[held["part"] == "parameter", "module"].astype(str).drop_duplicates()
    steps = saved["module"].astype(str).map({m: at for at, m in enumerate(registered)}).dropna().diff()
    if (steps < 0).sum() > (steps > 0).sum():  # older recordings have it in the order of the backward pass
        saved = saved[::-1].reset_index(drop=True)
    tensor = saved["bytes"] / saved["tensors"].clip(lower=1)
    texts = saved[["module", "kind", "dtype"]].astype(str)
    frame = texts.assign(
        unit="",
        tensor=tensor.astype(float),
        kept=saved["bytes"].astype(float),
        again=0.0,
        flowing=(2.0 * tensor).where(texts["dtype"].isin(WIDTH), 0.0),
    )
    gradients = held[held["part"] == "gradient"]
    gradient = at_places(held, frame["module"], gradients)
    own = gradient.copy()
    where, last = _where(held, frame["module"]), {name: at for at, name in enumerate(frame["module"])}
    for _, shared in held[held["part"] == "shared"].head(_MOST_SHARED).iterrows():
        # A parameter of two modules has a gradient once the later one has run backward. That of the other is made
        # beside it, and then added.
        whole = gradients[gradients["full_bytes"] >= shared["full_bytes"]].sort_values("full_bytes").head(1)
        for row in whole.itertuples():
            first, later = where.get(str(row.module), 0), last.get(str(shared["module"]), 0)
            if first < later:
                size = row.bytes * shared["full_bytes"] / max(row.full_bytes, 1)
                gradient[later] += size
                own[later] += size
                gradient[first] -= size
    return frame.assign(gradient=gradient, own=own, cast=at_places(held, frame["module"], held[held["part"] == "cast"]))


def at_places(held: pd.DataFrame, places: pd.Series, rows: pd.DataFrame) -> NDArray[np.float64]:
    """Return the bytes of rows at each place: where their module saves something first, else where the next parameters
    do; spread evenly where no module that has any saves something.
    """
    made = np.zeros(len(places))
    where = _where(held, places)
    sizes = rows.groupby(rows["module"].astype(str))["bytes"].sum()
    np.add.at(made, [where.get(str(name), 0) for name in sizes.index], sizes.to_numpy(dtype=float))
    return made


def _where(held: pd.DataFrame, places: pd.Series) -> dict[str, int]:
    """Return the place at which the backward pass of each module with parameters ends."""
    first = {str(name): at for at, name in reversed(list(enumerate(places)))}
    order = held.loc[held["part"] == "parameter", "module"].astype(str).drop_duplicates()
    at = order.map(first)
    spread = pd.Series(np.linspace(0, len(places) - 1, len(order)), order.index)
    at = at.bfill().ffill() if at.notna().any() else spread
    return dict(zip(order, at.round().astype(int), strict=True))


def corners(grows: NDArray[np.float64], stays: NDArray[np.float64]) -> list[int]:
    """Return the places, in order, where a·grows + b·stays may be at its most for positive a and b.

    The upper right of their convex hull (Andrew 1979).
    """
    order = np.lexsort((-stays, -grows))
    best = np.maximum.accumulate(np.concatenate(([-inf], stays[order][:-1])))
    chain: list[int] = []
    for at in order[stays[order] > best].tolist():
        while len(chain) > 1 and _turns(grows, stays, chain[-2], chain[-1], at) <= 0:
            chain.pop()
        chain.append(at)
    return sorted(chain)


def _turns(x: NDArray[np.float64], y: NDArray[np.float64], a: int, b: int, c: int) -> float:
    return float((x[b] - x[a]) * (y[c] - y[a]) - (y[b] - y[a]) * (x[c] - x[a]))


def units(held: pd.DataFrame) -> list[str]:
    """Return the modules that repeat, as a transformer's layers do: the outermost lists of alike modules.

    By path: what is numbered ("layers.0", "layers.1") and holds most of the activations, else most of the parameters.
    """
    paths = held["module"].astype(str)
    numbered = paths.str.extract(r"^(.+?)\.(\d+)(?:\.|$)")
    found = pd.DataFrame({"list": numbered[0], "place": numbered[1], "part": held["part"], "bytes": held["bytes"]})
    found = found.dropna(subset=["list"])
    if not len(found):
        return []
    sizes = found[found["part"] == "activation"].groupby("list")["bytes"].sum()
    if not sizes.sum():
        sizes = found.groupby("list")["bytes"].sum()
    chosen = sizes[sizes >= sizes.sum() / 20].index
    kept = found[found["list"].isin(chosen)].drop_duplicates(["list", "place"])
    return [f"{name}.{place}" for name, place in zip(kept["list"], kept["place"], strict=True)]


def with_modules_inside(held: pd.DataFrame, modules: Sequence[str]) -> list[str]:
    """Return those of some modules that have modules inside: a checkpoint around a single layer saves next to nothing,
    as the layer keeps little more than its input.
    """
    paths = held["module"].astype(str).unique()
    around = dict(zip(paths, unit_of(pd.Series(paths), modules), strict=True))
    outer = {unit for path, unit in around.items() if path != unit}
    return [module for module in modules if module in outer]


def largest_unit(held: pd.DataFrame, modules: Sequence[str]) -> float:
    """Return the bytes of the parameters of the largest module, or of what lies in none of them."""
    parameters = held[held["part"] == "parameter"]
    sizes = parameters["full_bytes"].groupby(unit_of(parameters["module"], modules).to_numpy()).sum()
    return float(sizes.max()) if len(sizes) else 0.0


def unit_of(paths: pd.Series, modules: Sequence[str]) -> pd.Series:
    """Return of each path the one of these modules that it is, or lies in; "": none."""
    known = frozenset(modules)

    def around(path: str) -> str:
        while path and path not in known:
            path = path.rpartition(".")[0]
        return path

    text = paths.astype(str)
    return text.map({path: around(path) for path in text.unique()})
