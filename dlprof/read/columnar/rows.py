"""Rows of a trace as columns, the table of spans made from them, and the clock of its device.

A profiler converts the timestamps of the device to the clock of the host, and some conversions fail: work then begins
before it was launched, or a copy that its call waited for ends long after that call. `aligned` checks that, and
corrects it where the trace says by how much.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof import schema
from dlprof.read.columnar.database import MISSING
from dlprof.read.kineto.patterns import collective_of, kind_of
from dlprof.read.limits import LONGEST_NS
from dlprof.units import duration


@dataclass(frozen=True)
class Rows:
    """Rows of one kind of activity; all arrays have length n, times are in ns.

    `name`: index into `names`; `kinds` and `directions` (of copies) have an entry for each name. `device`: −1 on the
    host, where `stream` is a thread. `launch`: the same number on a call and the work that it launched; −1: none.
    """

    names: list[str]
    kinds: list[str]
    name: NDArray[np.int64]
    start: NDArray[np.int64]
    end: NDArray[np.int64]
    device: NDArray[np.int64]
    stream: NDArray[np.int64]
    launch: NDArray[np.int64]
    bytes: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    directions: list[tuple[str, str]] = field(default_factory=list)


@dataclass(frozen=True)
class Ranges:
    """Ranges in order of start. `name`: index into `names`; times in ns, on the trace's clock.

    `operator`: for each name, whether it is a PyTorch operator. `open`: how many ranges have no end. `kind`: what users
    call them.
    """

    names: list[str]
    operator: list[bool]
    name: NDArray[np.int64]
    start: NDArray[np.int64]
    end: NDArray[np.int64]
    thread: NDArray[np.int64]
    open: int = 0
    kind: str = "NVTX"


def numbered(ids: NDArray[np.int64], texts: Mapping[int, str], unknown: str) -> tuple[list[str], NDArray[np.int64]]:
    """Return the distinct texts of the ids, and for each id the index of its text."""
    used, of = np.unique(ids, return_inverse=True)
    places: dict[str, int] = {}
    place = np.array([places.setdefault(texts.get(i, unknown), len(places)) for i in used.tolist()], dtype=np.int64)
    return list(places), place[of] if len(place) else of.astype(np.int64)


def annotation_rows(named: Ranges) -> Rows:
    """Return the ranges as host rows. Their names decide: operator, collective, loader call or annotation."""
    kinds = [
        (kind_of("cpu_op" if operator else "user_annotation", name) or ("host", "annotation"))[1]
        for name, operator in zip(named.names, named.operator, strict=True)
    ]
    nothing = np.full(len(named.name), -1, dtype=np.int64)
    return Rows(named.names, kinds, named.name, named.start, named.end, nothing, named.thread, nothing)


def spans_of(every: Sequence[Rows], main: int, base: int = 0) -> tuple[pd.DataFrame, int]:
    """Return the table "spans" of all rows, and how many had no usable time.

    In order of start, the longer first. `main`: the rank's device. `base`: ns added to all times.
    """
    keep = [
        np.flatnonzero(
            # With the base added, times still fit into 64 bits.
            (r.start != MISSING)
            & (np.abs(r.start) < 2**62 - base)
            & (r.end >= r.start)
            & (r.end - r.start <= LONGEST_NS)
        )
        for r in every
    ]
    lost = sum(len(r.start) - len(k) for r, k in zip(every, keep, strict=True))
    pairs = [(r, k) for r, k in zip(every, keep, strict=True) if len(k)]
    if not pairs:
        return schema.empty("spans"), lost

    def column(of: Any) -> NDArray[np.int64]:
        return np.concatenate([of(r)[k] for r, k in pairs])

    start, end = column(lambda r: r.start), column(lambda r: r.end)
    order = np.lexsort((start - end, start))
    texts: list[str] = []
    kinds: list[str] = []
    directions: list[tuple[str, str]] = []
    collectives: list[str] = []
    places: list[NDArray[np.int64]] = []
    for r, k in pairs:
        places.append(r.name[k] + len(texts))
        texts += r.names
        kinds += r.kinds
        directions += r.directions or [("", "")] * len(r.names)
        collectives += [
            collective_of(name) if kind == "communication" else "" for name, kind in zip(r.names, r.kinds, strict=True)
        ]
    of = np.concatenate(places)[order]
    nothing = np.full(len(order), -1, dtype=np.int64)
    size = column(lambda r: r.bytes if len(r.bytes) else np.full(len(r.name), -1, dtype=np.int64))[order]
    columns = {
        "lane": _lanes(column(lambda r: r.device)[order], column(lambda r: r.stream)[order], max(main, 0)),
        "kind": coded(kinds, of, schema.KINDS),
        "name": coded(texts, of),
        "start_ns": start[order] + base,
        "dur_ns": (end - start)[order],
        "launch": column(lambda r: r.launch)[order],
        "bytes": size,
        "copy": coded([d[0] for d in directions], of),
        "memory": coded([d[1] for d in directions], of),
        "collective": coded(collectives, of),
        **{name: coded([""], np.zeros(len(order), dtype=np.int64)) for name in ("group", "communicator")},
        **{name: coded([""], np.zeros(len(order), dtype=np.int64)) for name in ("dtype", "shape", "forward_thread")},
        "sequence": nothing,
        "peer": nothing.copy(),
        "autograd": nothing.copy(),
    }
    return pd.DataFrame({name: columns[name] for name in schema.SPANS}, copy=False), lost


def _lanes(device: NDArray[np.int64], stream: NDArray[np.int64], main: int) -> Any:
    pairs, of = np.unique(np.column_stack((device, stream)), axis=0, return_inverse=True)
    names = [f"{'host' if d < 0 else 'device' if d == main else f'device{d}'}:{number}" for d, number in pairs.tolist()]
    return coded(names, of.reshape(-1))


def coded(texts: Sequence[str], of: NDArray[Any], categories: Sequence[str] = ()) -> Any:
    """Return a categorical from indices into `texts`, which may repeat; only used texts become categories."""
    used = np.flatnonzero(np.bincount(of, minlength=len(texts)))
    chosen = list(categories) or sorted({texts[i] for i in used.tolist()})
    place = {text: i for i, text in enumerate(chosen)}
    codes = np.zeros(len(texts), dtype=np.min_scalar_type(-len(chosen) - 1))
    codes[used] = [place[texts[i]] for i in used.tolist()]
    return pd.Categorical.from_codes(codes[of], categories=pd.Index(chosen))


# What torch.autograd.profiler.emit_nvtx appends to an operator's name.
SAID = (", seq = ", ", op_id = ", ", sizes = ", ", input_op_ids = ")

OPERATOR = re.compile("|".join(map(re.escape, SAID)))

LONGEST = 2_000  # characters of a name


def split(text: str) -> tuple[bool, str]:
    """Return whether a text is a PyTorch operator, and its name."""
    found = OPERATOR.search(text)
    return found is not None, (text[: found.start()] if found else text)[:LONGEST]


# Conversions are good to some tens of µs. From here on the order of host and device is not what it was.
_EARLY_NS = 100_000
_LATE_NS = 2_000_000

# So many pairs say something, so many are looked at, and of the early ones there are at least so many.
_FEWEST, _MOST, _SHARE = 5, 20_000, 0.2

# Copies agree on a constant difference if the middle half of them lies within this, or this share of the difference.
_AGREE_NS, _AGREE = 200_000, 0.02

# What was launched within some time runs within as long, but for what is queued; not this many times (units differ by
# 1,000).
_RATE = 200.0

_UNLINKED = "what the device waited for is not known, and launches are not linked to its work"


def aligned(spans: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """Return the spans with the device's clock on the host's, and what was wrong with it.

    Copies from the device into pageable memory end when their calls do: where they agree on another difference, the
    device's times are corrected by it. Where they do not, or there are none, no launch is linked to the device's work.
    """
    kind = spans["kind"].cat
    of = {name: code for code, name in enumerate(kind.categories)}
    codes, launch = kind.codes.to_numpy(), spans["launch"].to_numpy()
    lanes = spans["lane"].cat
    on_device = np.array([str(name).startswith("device") for name in lanes.categories], dtype=bool)
    device = on_device[lanes.codes.to_numpy()]
    linked = np.flatnonzero(device & (launch >= 0))
    calls = np.flatnonzero((codes == of.get("runtime", -1)) & (launch >= 0))
    if len(linked) < _FEWEST or not len(calls):
        return spans, []
    start, dur = spans["start_ns"].to_numpy(), spans["dur_ns"].to_numpy()
    blocking = linked[(codes == of.get("copy", -1))[linked]]
    # Of copies from the device into pageable memory the calls return when they are done.
    copied = spans.iloc[blocking]
    blocking = blocking[((copied["copy"] == "DtoH") & (copied["memory"] == "pageable")).to_numpy(dtype=bool)]
    rows, at = _calls_of(linked[:: -(-len(linked) // _MOST)], calls, launch)
    if len(rows) < _FEWEST:
        return spans, []
    lag = start[rows] - start[at]
    late, late_at = _calls_of(blocking[:_MOST], calls, launch)
    after = start[late] + dur[late] - (start[late_at] + dur[late_at])
    wrong = _wrong(lag, after, start[rows], start[at])
    if not wrong:
        return spans, []
    if len(after) >= _FEWEST:
        low, middle, high = np.quantile(after, (0.25, 0.5, 0.75)).astype(np.int64).tolist()
        if high - low <= max(_AGREE_NS, _AGREE * abs(middle)):
            moved = _shifted(spans, device, -middle)
            return moved, [
                f"the device's clock is {duration(abs(middle))} {'ahead of' if middle > 0 else 'behind'} the host's:"
                f" {wrong}; corrected by {len(after)} copies whose calls waited for them"
            ]
    moved = (
        _shifted(spans, device, -int(np.quantile(lag, 0.01))) if (lag < -_EARLY_NS).any() else spans.copy(deep=False)
    )
    moved["launch"] = np.where(device, -1, launch)
    return moved, [f"the clocks of host and device do not fit: {wrong}; {_UNLINKED}"]


def _calls_of(
    rows: NDArray[np.int64], calls: NDArray[np.int64], launch: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return those rows of device work whose call is known, and the first call of each."""
    mine = calls[np.isin(launch[calls], launch[rows])]
    ids, first = np.unique(launch[mine], return_index=True)
    if not len(ids):
        return rows[:0], rows[:0]
    place = np.minimum(np.searchsorted(ids, launch[rows]), len(ids) - 1)
    known = ids[place] == launch[rows]
    return rows[known], mine[first[place[known]]]


def _wrong(
    lag: NDArray[np.int64], after: NDArray[np.int64], start: NDArray[np.int64], called: NDArray[np.int64]
) -> str:
    """Return what cannot be; "" where all can."""
    if len(after) >= _FEWEST and (late := int(np.median(after))) > _LATE_NS:
        return f"copies that their calls wait for end {duration(late)} after these"
    early = lag < -_EARLY_NS
    if early.mean() > _SHARE:
        return f"work begins {duration(-int(np.median(lag[early])))} before it is launched"
    order = np.argsort(called, kind="stable")
    first, last = order[len(order) // 10], order[-1 - len(order) // 10]
    passed, took = int(called[last] - called[first]), abs(int(start[last] - start[first]))
    if len(order) >= 100 and passed > 0 and not passed / _RATE <= took <= passed * _RATE:
        return f"what was launched within {duration(passed)} runs within {duration(took)}"
    return ""


def _shifted(spans: pd.DataFrame, device: NDArray[np.bool_], by: int) -> pd.DataFrame:
    """Return the spans in order of start, the device's moved by so many ns."""
    start = np.where(device, spans["start_ns"].to_numpy() + by, spans["start_ns"].to_numpy())
    order = np.lexsort((-spans["dur_ns"].to_numpy(), start))
    return spans.assign(start_ns=start).iloc[order].reset_index(drop=True)
