"""Reads a torch-profiler (Kineto, Chrome) trace of one rank, from any version and machine, into spans and traced steps.

Files differ in: category names; packed or plain; times as whole or decimal microseconds, absolute or from a base;
streams and threads as numbers or text; repeated steps; a missing end. Times are exact to the nanosecond if the file's
are.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof import schema
from dlprof.read.columnar import recurring
from dlprof.read.columnar.rows import Ranges, aligned, coded
from dlprof.read.kineto import prefetch
from dlprof.read.kineto.event_columns import KIND, Made, Processes, Rows
from dlprof.read.kineto.events import label
from dlprof.read.kineto.format import groups_in, header_facts
from dlprof.read.kineto.patterns import ENGINE
from dlprof.read.kineto.split import decode
from dlprof.read.sources import Reading

_WORK = [KIND[kind] for kind in ("kernel", "communication", "copy", "set")]
_STEP = re.compile(r"ProfilerStep#(\d{1,18})")
# What vLLM and SGLang name the ranges around a step of inference.
_SERVED = re.compile(
    r"execute_(?:new_\d+_cached_|(?:\d+_)?context_\d+\()|step\[(?:\w*EXTEND|DECODE|MIXED|IDLE) bs=\d"
    r"|capture_\d+_(?:DECODE|FULL|PIECEWISE)\b|execute_diffusion_\d"
)
# What torch runs backward. Fewer calls of a loader show no steps; a batch after which as much runs as this share of a
# step's operators, but nothing backward, is a validation's.
_BACKWARD = re.compile(r"Backward\d*$")
_FEWEST_CALLS, _AS_MUCH = 3, 0.3
# Accelerators whose events are in categories of their own, which are not read.
_OTHERS = re.compile(r"unknown category '(mtia|hpu|xla|privateuse1)_", re.I)

# Of so many operators some are a backward pass's, if there is one.
_MANY_OPERATORS = 100
# Times since 1970 in µs are larger than this (May 2001), times since a start or a base are smaller (31 years).
_UNIX_US = 10**15


def read(path: Path, processes: Processes = None) -> Reading:
    """Return tables "spans" (in order of start, the longer first) and "traced_steps", and the facts of a trace file.

    Facts: rank, world_size, host, devices [{id, name, memory_bytes, ...}], backend, groups {name: {desc, size,
    ranks}}, base_time_ns, schema, inference (True: of an inference server), backward (False: there is no backward
    pass), accelerator (whose events are not read), steps_by (how steps were found that the profiler did not mark), loop
    (what recurs where there are none). A file that is cut off is read up to the cut, with a warning. Raises DlprofError
    if the file cannot be read or is no trace. `processes`: those of one rank, in a file of several.
    """
    rows = prefetch.rows_of(path) if processes is None else None
    rows = decode(path, processes) if rows is None else rows
    warnings = list(rows.warnings)
    facts = header_facts(rows.keys, path)
    if processes is not None:
        facts.pop("rank", None)  # a merged file has the header of some rank
    groups = {**rows.exchanges.groups, **groups_in(rows.keys)}
    if groups:
        facts["groups"] = groups
    if other := next((found for line in warnings if (found := _OTHERS.search(line))), None):
        facts["accelerator"] = other[1].upper()
    spans = _spans(rows, groups)
    if len(rows):
        base = facts.get("base_time_ns", 0)
        unix = int(spans["start_ns"].iloc[len(rows) // 2]) >= _UNIX_US * 1000
        if base and unix:
            warnings.append(f"{path.name}: its times are absolute already; baseTimeNanoseconds is not added")
        elif base:
            spans["start_ns"] += base
        elif not unix:
            warnings.append(f"{path.name}: its times have no base: they count from an unknown zero, not from 1970")
    spans, odd = aligned(spans)
    warnings += [f"{path.name}: {line}" for line in odd]
    if _serves(spans):
        facts["inference"] = True
    elif _only_forward(spans):
        facts["backward"] = False
    steps, way, again = _steps(spans)
    facts |= {"steps_by": way} if way else {}
    facts |= {"loop": again.fact} if again else {}
    return Reading(
        {"spans": schema.check("spans", spans), "traced_steps": schema.check("traced_steps", steps)},
        facts,
        tuple(warnings),
    )


def _peers(rows: Rows, groups: Mapping[str, Mapping[str, Any]]) -> dict[int, int]:
    """Return the peer of each row that has one as a rank of the job; −1: known only within an unknown group."""
    found = {}
    for row, (peer, group) in rows.exchanges.peers.items():
        if group is not None:
            known = groups.get(group) or (next(iter(groups.values())) if len(groups) == 1 and not group else {})
            peer = dict(enumerate(known.get("ranks") or [])).get(peer, -1)
        found[row] = peer
    return found


def _spans(rows: Rows, groups: Mapping[str, Mapping[str, Any]]) -> pd.DataFrame:
    if not len(rows):
        return schema.empty("spans")
    order = _in_time(rows.start, rows.dur)
    place = np.empty_like(order)  # row of the file → row of the spans
    place[order] = np.arange(len(order))
    what, lane, launch = rows.what[order], rows.lane[order], rows.launch[order]

    def scattered(of_row: Mapping[int, int]) -> NDArray[np.int64]:
        column = np.full(len(order), -1, dtype=np.int64)
        column[place[list(of_row)]] = list(of_row.values())
        return column

    def sparse(of_row: Mapping[int, str], of_name: Sequence[str] = ()) -> Any:
        categories = {text: code for code, text in enumerate(dict.fromkeys(["", *of_name, *of_row.values()]))}
        narrow = np.min_scalar_type(-len(categories))
        codes = np.zeros(len(order), dtype=narrow)
        if any(of_name):
            codes = np.array([categories[text] for text in of_name], dtype=narrow)[what]
        codes[place[list(of_row)]] = [categories[text] for text in of_row.values()]
        return _categorical(codes, categories)

    names, exchanges = rows.names, rows.exchanges
    size = scattered(rows.bytes)
    kind = np.array(names.kind, dtype=np.int8)[what]
    if rows.sizes:
        for i in np.flatnonzero(np.isin(kind, (KIND["copy"], KIND["set"])) & (size < 0)):
            size[i] = rows.sizes.get(int(launch[i]), -1)
    columns = {
        "lane": coded(_lane_names(rows, lane, np.isin(kind, _WORK)), lane),
        "kind": _categorical(kind, schema.KINDS),
        "name": coded(names.name, what),
        "start_ns": rows.start[order],
        "dur_ns": rows.dur[order],
        "launch": launch,
        "bytes": size,
        "copy": sparse({i: c[0] for i, c in rows.copies.items()}, [c[0] for c in names.direction]),
        "memory": sparse({i: c[1] for i, c in rows.copies.items()}, [c[1] for c in names.direction]),
        "collective": sparse({i: c[0] for i, c in exchanges.collectives.items()}, names.collective),
        "group": sparse({i: c[1] for i, c in exchanges.collectives.items()}),
        "sequence": scattered({i: s[0] for i, s in exchanges.sequences.items()}),
        "communicator": sparse({i: s[1] for i, s in exchanges.sequences.items()}),
        "peer": scattered(_peers(rows, groups)),
        "dtype": sparse({i: c[-1] for i, c in (exchanges.collectives | rows.multiplied).items()}),
        "shape": sparse({i: m[0] for i, m in rows.multiplied.items()} | exchanges.pieces),
        **_numbers(rows.made, place),
    }
    return pd.DataFrame({name: columns[name] for name in schema.SPANS}, copy=False)


def _lane_names(rows: Rows, lane: NDArray[np.int32], works: NDArray[np.bool_]) -> list[str]:
    """Name every lane; the device without a number is the one with most work."""
    count = np.bincount(lane, minlength=len(rows.lanes)).tolist()
    work = np.bincount(lane[works], minlength=len(rows.lanes)).tolist()
    places: list[tuple[str, str]] = []  # device ("host" for the host), thread or stream
    weight: Counter[str] = Counter()
    for on_device, pid, tid, *args in rows.lanes:
        device, stream = args if on_device else ("host", None)
        place = (label(pid if device is None else device), label(tid if stream is None else stream))
        if on_device:
            weight[place[0]] += work[len(places)] * 2**32 + count[len(places)]
        places.append(place)
    main = min(weight, key=lambda d: (-weight[d], len(d), d), default="")
    return [
        f"{'host' if not key[0] else 'device' if device == main else f'device{device}'}:{number}"
        for key, (device, number) in zip(rows.lanes, places, strict=True)
    ]


def _categorical(codes: NDArray[Any], categories: Iterable[str]) -> Any:
    return pd.Categorical.from_codes(codes, categories=pd.Index(list(categories)))


def _numbers(made: Made, place: NDArray[np.int64]) -> dict[str, Any]:
    """Return autograd's numbers, and the threads that made backward functions as texts, "" for none."""
    number = np.full(len(place), -1, dtype=np.int64)
    number[place[made.row]] = made.number
    threads, codes = np.unique(np.append(0, made.maker), return_inverse=True)
    thread = np.zeros(len(place), dtype=np.min_scalar_type(-len(threads)))
    thread[place[made.row]] = codes[1:]
    return {"autograd": number, "forward_thread": _categorical(thread, ["", *map(str, threads[1:].tolist())])}


def _in_time(start: NDArray[np.int64], dur: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the order by start; of spans with the same start, the longer first.

    A trace consists of a few long runs that are already in order. A stable sort by one key merges them fast.
    """
    order = np.argsort(start, kind="stable")
    same = np.diff(start[order]) == 0
    tied = np.flatnonzero(np.concatenate((same, [False])) | np.concatenate(([False], same)))
    order[tied] = order[tied][np.lexsort((-dur[order[tied]], start[order[tied]]))]
    return order


def _steps(spans: pd.DataFrame) -> tuple[pd.DataFrame, str, recurring.Loop | None]:
    """Return the steps, how they were found where the profiler did not mark them, and what recurs where there are none.

    By its marks; else by ranges that name steps, by the loader's calls, or by the runs of the optimizer.
    """
    marks = [_STEP.fullmatch(str(n)) for n in spans["name"].cat.categories]
    if any(marks):
        return _marked(spans, np.array([int(m[1]) if m else -1 for m in marks], dtype=np.int64)), "", None
    ranges, launched = _ranges(spans), _launched(spans)
    found = recurring.named(ranges, launched)
    if found is None:
        loaded = _loaded(spans)
        if len(loaded):
            return loaded, "the loader's calls", None
        found = recurring.by_optimizer(ranges, launched)
    if found is None:
        return recurring.table(None), "", recurring.loop(launched)
    return recurring.table(found), f"{found.way} ({found.sure})", None


def _marked(spans: pd.DataFrame, number: NDArray[np.int64]) -> pd.DataFrame:
    """Return the steps that the host marks; of marks with one number that overlap, the longest.

    Marks with one number that do not overlap are several steps, which are numbered anew.
    """
    # Compare category codes: comparing the names as text would take longer than the rest.
    codes = spans["name"].cat.codes.to_numpy()
    rows = np.flatnonzero((number >= 0)[codes])
    kind, lane = spans["kind"].array[rows], spans["lane"].array[rows]
    rows = rows[[k == "annotation" and str(of).startswith("host:") for k, of in zip(kind, lane, strict=True)]]
    step, start, dur = number[codes[rows]], spans["start_ns"].to_numpy()[rows], spans["dur_ns"].to_numpy()[rows]
    order = np.lexsort((-dur, start, step))
    step, start, dur = step[order], start[order], dur[order]
    chosen: list[int] = []
    for i in range(len(step)):
        last = chosen[-1] if chosen else -1
        if last < 0 or step[last] != step[i] or start[i] >= start[last] + dur[last]:
            chosen.append(i)
        elif dur[i] > dur[last]:
            chosen[-1] = i
    found = pd.DataFrame({"step": step[chosen], "start_ns": start[chosen], "dur_ns": dur[chosen]})
    found = found.sort_values("start_ns", kind="stable", ignore_index=True)
    if found["step"].duplicated().any():
        found["step"] = np.arange(len(found))
    return found


def _on_host(spans: pd.DataFrame) -> NDArray[np.bool_]:
    host = np.array([str(name).startswith("host") for name in spans["lane"].cat.categories], dtype=bool)
    return cast("NDArray[np.bool_]", host[spans["lane"].cat.codes.to_numpy()])


def _ranges(spans: pd.DataFrame) -> Ranges:
    """Return the ranges that the script, its framework or an optimizer names."""
    rows = np.flatnonzero((spans["kind"] == "annotation").to_numpy() & _on_host(spans))
    used, name = np.unique(spans["name"].cat.codes.to_numpy()[rows], return_inverse=True)
    names = [str(text) for text in spans["name"].cat.categories[used]]
    start = spans["start_ns"].to_numpy()[rows]
    end, thread = start + spans["dur_ns"].to_numpy()[rows], spans["lane"].cat.codes.to_numpy()[rows]
    return Ranges(names, [False] * len(names), name.astype(np.int64), start, end, thread.astype(np.int64), kind="named")


def _launched(spans: pd.DataFrame) -> recurring.Launched:
    """Return the kernels in order of launch; in a trace without a device, the operators of the host."""
    kind, start = spans["kind"], spans["start_ns"].to_numpy()
    kernels = np.flatnonzero(kind.isin(("kernel", "communication")).to_numpy() & ~_on_host(spans))
    if not len(kernels):
        kernels = np.flatnonzero((kind == "op").to_numpy())
        at = start[kernels]
    else:
        calls = np.flatnonzero((kind == "runtime").to_numpy() & (spans["launch"].to_numpy() >= 0))
        ids, launch = spans["launch"].to_numpy()[calls], spans["launch"].to_numpy()[kernels]
        ids, first = np.unique(ids, return_index=True)
        place = np.minimum(np.searchsorted(ids, launch), max(len(ids) - 1, 0))
        known = ids[place] == launch if len(ids) else np.zeros(len(launch), dtype=bool)
        at = start[kernels]
        at[known] = start[calls[first[place[known]]]]
    order = np.argsort(at, kind="stable")
    used, name = np.unique(spans["name"].cat.codes.to_numpy()[kernels[order]], return_inverse=True)
    return recurring.Launched([str(n) for n in spans["name"].cat.categories[used]], name.astype(np.int64), at[order])


def _loaded(spans: pd.DataFrame) -> pd.DataFrame:
    """Return the steps from one call of the loader to the next that trains; none where nothing trains.

    A call after which nothing trains begins a step of several calls (two loaders, or an optimizer's run for several
    batches), unless as much runs there as in a step: a validation's batch.
    """
    empty = schema.empty("traced_steps")
    names = [str(name) for name in spans["name"].cat.categories]
    codes, start = spans["name"].cat.codes.to_numpy(), spans["start_ns"].to_numpy()

    def of(wanted: Iterable[bool]) -> NDArray[np.int64]:
        return np.flatnonzero(np.array(list(wanted), dtype=bool)[codes])

    calls = of(name.startswith("enumerate(DataLoader)") for name in names)
    if len(calls) < _FEWEST_CALLS:
        return empty
    lane, many = np.unique(spans["lane"].cat.codes.to_numpy()[calls], return_counts=True)
    mine = calls[spans["lane"].cat.codes.to_numpy()[calls] == lane[many.argmax()]]
    begins = start[mine]
    outer = begins >= np.append(0, np.maximum.accumulate(begins + spans["dur_ns"].to_numpy()[mine])[:-1])
    begins = begins[outer]
    steps, backward = (
        np.sort(start[of(wanted)])
        for wanted in (
            [name.startswith("Optimizer.step#") for name in names],
            [name.startswith(ENGINE) or _BACKWARD.search(name) is not None for name in names],
        )
    )

    def inside(at: NDArray[np.int64]) -> NDArray[np.int64]:
        return cast("NDArray[np.int64]", np.diff(np.searchsorted(at, begins)))

    trains = inside(steps if len(steps) > 1 else backward) > 0
    if not trains.any():
        return empty
    work = inside(start[(spans["kind"] == "op").to_numpy()])
    other = ~trains & (inside(backward) == 0) & (work >= _AS_MUCH * float(np.median(work[trains])))
    rows: list[tuple[int, int]] = []
    first = -1
    for i, (mine_trains, elsewhere) in enumerate(zip(trains.tolist(), other.tolist(), strict=True)):
        first = -1 if elsewhere else i if first < 0 else first
        if mine_trains:
            rows.append((int(begins[first]), int(begins[i + 1])))
            first = -1
    begun = np.array(rows, dtype=np.int64)
    return pd.DataFrame({"step": np.arange(len(begun)), "start_ns": begun[:, 0], "dur_ns": begun[:, 1] - begun[:, 0]})


def _serves(spans: pd.DataFrame) -> bool:
    """Return whether a trace comes from an inference server; False for a job that trains and serves."""
    names = [str(name) for name in spans["name"].cat.categories]
    return any(map(_SERVED.match, names)) and not any(name.startswith(ENGINE) for name in names)


def _only_forward(spans: pd.DataFrame) -> bool:
    """Return whether many operators ran, and nothing backward, no optimizer and no graph that may hold them."""
    names = [str(name) for name in spans["name"].cat.categories]
    if int((spans["kind"] == "op").sum()) < _MANY_OPERATORS:
        return False
    trains = ("Optimizer.", "cudaGraphLaunch", "hipGraphLaunch", "dlprof::backward", "dlprof::optimizer")
    return not any(_BACKWARD.search(name) or ENGINE in name or name.startswith(trains) for name in names)
