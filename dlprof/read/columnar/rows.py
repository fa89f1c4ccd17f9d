"""Rows of a trace as columns, and the table of spans made from them."""

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

_LONGEST_NS = 10 * 366 * 86_400 * 10**9


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
        np.flatnonzero((r.start != MISSING) & (r.end >= r.start) & (r.end - r.start <= _LONGEST_NS) & _fits(r, base))
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
        "kind": _coded(kinds, of, schema.KINDS),
        "name": _coded(texts, of),
        "start_ns": start[order] + base,
        "dur_ns": (end - start)[order],
        "launch": column(lambda r: r.launch)[order],
        "bytes": size,
        "copy": _coded([d[0] for d in directions], of),
        "memory": _coded([d[1] for d in directions], of),
        "collective": _coded(collectives, of),
        **{name: _coded([""], np.zeros(len(order), dtype=np.int64)) for name in ("group", "communicator")},
        **{name: _coded([""], np.zeros(len(order), dtype=np.int64)) for name in ("dtype", "shape", "forward_thread")},
        "sequence": nothing,
        "peer": nothing.copy(),
        "autograd": nothing.copy(),
    }
    return pd.DataFrame({name: columns[name] for name in schema.SPANS}, copy=False), lost


def _fits(rows: Rows, base: int) -> NDArray[np.bool_]:
    """Return which starts still fit into 64 bits after the base is added."""
    fits: NDArray[np.bool_] = np.abs(rows.start) < 2**62 - base
    return fits


def _lanes(device: NDArray[np.int64], stream: NDArray[np.int64], main: int) -> Any:
    pairs, of = np.unique(np.column_stack((device, stream)), axis=0, return_inverse=True)
    names = [f"{'host' if d < 0 else 'device' if d == main else f'device{d}'}:{number}" for d, number in pairs.tolist()]
    return _coded(names, of.reshape(-1))


def _coded(texts: Sequence[str], of: NDArray[np.int64], categories: Sequence[str] = ()) -> Any:
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
