"""Reads what AMD's rocprofv3 writes as CSV (a file for each kind of event) and as JSON (a file for each process).

With CSV, the kernel trace represents its process. It is read with the files of the same name that hold copies, calls
and markers. The columns and keys: the documentation of ROCprofiler-SDK, "Using rocprofv3".
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dlprof.errors import DlprofError
from dlprof.read import limits, opening
from dlprof.read.columnar.rows import Rows
from dlprof.read.rocprof import process
from dlprof.read.sources import Reading

_KERNELS = "kernel_trace.csv"
# Files beside it: the end of the name, the kind of rows, and the column with their names.
_BESIDE = {
    "memory_copy_trace.csv": ("copy", "Direction"),
    "hip_api_trace.csv": ("runtime", "Function"),
    "marker_api_trace.csv": ("annotation", "Function"),
}
_TOOL = "rocprofiler-sdk-tool"
_GPU = 2  # the type of an agent


class _Row(NamedTuple):
    """One event: on a device, or on a thread of the host where `agent` is ""."""

    kind: str
    name: str
    agent: str
    queue: str
    launch: int
    start: int
    end: int
    bytes: int = -1


def read_csv(path: Path, piece: str = "") -> Reading:  # noqa: ARG001 - one piece is all of it
    """Return the spans of a kernel trace and of the files of the same process beside it."""
    warnings: list[str] = []
    rows = list(_csv_rows(path, "kernel", "Kernel_Name", warnings))
    if not rows:
        raise DlprofError(f"{path}: no kernel in it")
    for other, (kind, column) in beside(path).items():
        rows += _csv_rows(other, kind, column, warnings)
    return _reading(path, rows, warnings, {})


def beside(path: Path) -> dict[Path, tuple[str, str]]:
    """Return the files that are read with a kernel trace, each with the kind of its rows and the column of names."""
    if not path.name.endswith(_KERNELS):
        return {}
    inside = opening.Inside(path.parent)
    others = {path.with_name(path.name.removesuffix(_KERNELS) + ending): of for ending, of in _BESIDE.items()}
    return {other: of for other, of in others.items() if inside.holds(other)}


def _csv_rows(path: Path, kind: str, named: str, warnings: list[str]) -> Iterator[_Row]:
    """Return the rows of one file; those without usable times are counted in a warning."""
    bad = count = 0
    with opening.open_file(path) as file:
        lines = (line.decode(errors="replace") for some in opening.lines_of(file) for line in some)
        for row in _dicts(lines):
            start, end = _whole(row.get("Start_Timestamp")), _whole(row.get("End_Timestamp"))
            name = row.get(named) or ""
            if start < 0 or end < start or not name:
                bad += 1
                continue
            count += 1
            if count > limits.limit(limits.MOST_ROWS):
                warnings.append(limits.too_many(path, "rows", limits.MOST_ROWS))
                break
            agent, queue = row.get("Agent_Id") or "", row.get("Queue_Id") or row.get("Stream_Id") or "0"
            if kind == "copy":
                agent = row.get("Source_Agent_Id" if process.to_host(name) else "Destination_Agent_Id") or "0"
                queue = row.get("Stream_Id") or "0"
            elif kind != "kernel":
                agent, queue = "", row.get("Thread_Id") or "0"
            yield _Row(kind, name, agent, queue, _whole(row.get("Correlation_Id")), start, end)
    if bad > 1:
        warnings.append(f"{path.name}: {bad:,} malformed lines are left out")


def _dicts(lines: Iterator[str]) -> Iterator[dict[str, str]]:
    """Return the rows by column; an empty one for a line that is none, as with a carriage return within it."""
    reader = csv.DictReader(lines, skipinitialspace=True)
    while True:
        try:
            yield next(reader)
        except StopIteration:  # noqa: PERF203 - the rows after a bad one are read
            return
        except csv.Error:
            yield {}


def read_json(path: Path, piece: str = "") -> Reading:  # noqa: ARG001 - one piece is all of it
    """Return the spans of a process by its JSON."""
    import msgspec

    from dlprof.read.kineto.json_stream import NOT_JSON

    most = limits.limit(limits.MOST_WHOLE)
    with opening.open_file(path) as file:
        packed = file.read(most + 1)
    most = min(most, limits.most_unpacked(len(packed)))
    data = opening.unpacked(packed, most + 1)
    if len(data) > most:
        raise DlprofError(f"{path}: larger than {limits.MOST_WHOLE >> 20} MB: not read (--no-limits reads it)")
    try:
        whole = msgspec.json.decode(data)
    except NOT_JSON as e:
        raise DlprofError(f"{path}: cut off or damaged JSON: {e}; rocprofv3 writes it when the job ends") from None
    tool = whole.get(_TOOL) if isinstance(whole, dict) else None
    tool = tool[0] if isinstance(tool, list) and tool else tool
    if not isinstance(tool, dict):
        raise DlprofError(f"{path}: no record of rocprofv3 in it")
    rows = list(_json_rows(tool))
    if not rows:
        raise DlprofError(f"{path}: no event in it")
    return _reading(path, rows, [], _facts(tool, rows))


def _facts(tool: Mapping[str, Any], rows: Sequence[_Row]) -> dict[str, Any]:
    """Return the host, and the devices that ran kernels."""
    host = str(_object(_object(tool.get("metadata")).get("node")).get("hostname") or "")
    used = {row.agent for row in rows if row.kind == "kernel"}
    gpus = [one for one in _listed(tool.get("agents")) if one.get("type") == _GPU]
    devices = [
        {"id": number, "name": str(one.get("product_name") or one.get("name") or "")}
        for number, one in enumerate(gpus)
        if _handle(one.get("id")) in used
    ]
    return {name: held for name, held in (("host", host), ("devices", devices)) if held}


def _json_rows(tool: Mapping[str, Any]) -> Iterator[_Row]:
    records = _object(tool.get("buffer_records"))
    named = _listed(_object(tool.get("strings")).get("buffer_records"))
    kernels = {
        _whole(symbol.get("kernel_id")): str(symbol.get("formatted_kernel_name") or symbol.get("kernel_name") or "")
        for symbol in _listed(tool.get("kernel_symbols"))
    }
    markers = {
        _whole(one.get("key")): str(one.get("value") or "")
        for one in _listed(_object(tool.get("strings")).get("marker_api"))
    }
    every = {"kernel": "kernel_dispatch", "copy": "memory_copy", "runtime": "hip_api", "annotation": "marker_api"}
    for kind, key in every.items():
        for one in _listed(records.get(key)):
            start, end = _whole(one.get("start_timestamp")), _whole(one.get("end_timestamp"))
            if start < 0 or end < start:
                continue
            correlation = one.get("correlation_id")
            internal = correlation.get("internal") if isinstance(correlation, dict) else correlation
            name = _operation(named, one)
            if kind == "kernel":
                info = _object(one.get("dispatch_info"))
                name = kernels.get(_whole(info.get("kernel_id"))) or "kernel"
                agent, queue = _handle(info.get("agent_id")), _handle(info.get("queue_id"))
            elif kind == "copy":
                agent = _handle(one.get("src_agent_id" if process.to_host(name) else "dst_agent_id"))
                queue = str(one.get("stream_id") or 0)
            else:
                agent, queue = "", str(one.get("thread_id", 0))
                name = markers.get(_whole(internal), "") if kind == "annotation" else name
                if not name:  # a call that pauses, or names a thread
                    continue
            size = _whole(one.get("bytes")) if kind == "copy" else -1
            yield _Row(kind, name, agent, queue, _whole(internal), start, end, size)


def _operation(named: Sequence[Mapping[str, Any]], one: Mapping[str, Any]) -> str:
    kind, operation = one.get("kind"), one.get("operation")
    if isinstance(kind, int) and 0 <= kind < len(named):
        operations = named[kind].get("operations")
        if isinstance(operations, list) and isinstance(operation, int) and 0 <= operation < len(operations):
            return str(operations[operation])
    return str(operation)


def _reading(path: Path, rows: list[_Row], warnings: list[str], facts: Mapping[str, Any]) -> Reading:
    agents: dict[str, int] = {}
    queues: dict[str, int] = {}

    def number(text: str) -> int:
        """Return the number of a queue or thread as it is written; of a handle, which is long, another."""
        return int(text) if text.isdecimal() and len(text) < 10 else queues.setdefault(text, len(queues))

    def chosen(kind: str) -> tuple[list[str], Any]:
        """Return the names of the rows of a kind, and their columns."""
        mine = [row for row in rows if row.kind == kind]
        places: dict[str, int] = {}
        columns = np.array(
            [
                (
                    places.setdefault(row.name, len(places)),
                    row.start,
                    row.end,
                    agents.setdefault(row.agent, len(agents)) if row.agent else -1,
                    -1 - number(row.queue) if kind == "copy" else number(row.queue),
                    row.launch if row.launch > 0 else -1,
                    row.bytes,
                )
                for row in mine
            ],
            dtype=np.int64,
        ).reshape(-1, 7)
        return list(places), columns.T

    kernels, copies, calls, marks = map(chosen, ("kernel", "copy", "runtime", "annotation"))
    moved = Rows(copies[0], ["copy"] * len(copies[0]), *copies[1])
    moved.directions.extend(map(process.direction, copies[0]))
    name, start, end, _, thread, _, _ = marks[1]
    order = np.lexsort((-end, start))
    named = process.ranges_of(marks[0], name[order], start[order], end[order], thread[order])
    called = Rows(calls[0], ["runtime"] * len(calls[0]), *calls[1])
    ran = Rows(kernels[0], process.kinds_of(kernels[0]), *kernels[1])
    return process.reading(path.name, ran, moved, called, named, warnings, facts)


def _whole(value: Any) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return -1
    return number if 0 <= number < 2**62 else -1


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _listed(value: Any) -> list[Mapping[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _handle(value: Any) -> str:
    return str(_object(value).get("handle", value))
