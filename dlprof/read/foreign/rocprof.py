"""What AMD's rocprofv3 writes as CSV (a file a kind of event) and as JSON (one file a process).

Of CSV, the kernel trace stands for its process, and is read with the files of the same name that hold its copies, its
calls and its markers. The columns and keys: the documentation of ROCprofiler-SDK, "Using rocprofv3".
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dlprof.errors import DlprofError
from dlprof.read import opening
from dlprof.read.formats import WHOLE, Format, Head, Part
from dlprof.read.sources import Reading

_KERNELS = "kernel_trace.csv"
# What stands beside it: the end of the name, the kind of its rows, and the column that names them.
_BESIDE = {
    "memory_copy_trace.csv": ("copy", "Direction"),
    "hip_api_trace.csv": ("runtime", "Function"),
    "marker_api_trace.csv": ("annotation", "Function"),
}
_CALLS = {"Domain", "Function", "Thread_Id", "Correlation_Id", "Start_Timestamp", "End_Timestamp"}
_COPIES = {"Direction", "Source_Agent_Id", "Correlation_Id", "Start_Timestamp", "End_Timestamp"}
_WORK = {"Kernel_Name", "Agent_Id", "Queue_Id", "Correlation_Id", "Start_Timestamp", "End_Timestamp"}

_TOOL = "rocprofiler-sdk-tool"
_MOST_JSON = 1 << 30

_COPY = {"HOST_TO_DEVICE": "HtoD", "DEVICE_TO_HOST": "DtoH", "DEVICE_TO_DEVICE": "DtoD", "HOST_TO_HOST": "HtoH"}
_NO_BASE = "its times count from the machine's start, not from 1970"


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


def _columns(head: Head) -> set[str]:
    line = head.start.partition(b"\n")[0].decode(errors="replace")
    return {word.strip().strip('"') for word in line.split(",")}


def _is_kernels(head: Head) -> Sequence[Part]:
    return WHOLE if head.is_text and _columns(head) >= _WORK else ()


def _is_beside(head: Head) -> Sequence[Part]:
    found = _columns(head) if head.is_text else set()
    return WHOLE if found >= _CALLS or found >= _COPIES else ()


def _is_json(head: Head) -> Sequence[Part]:
    return WHOLE if head.opens == "{" and _TOOL in head.text[:400] else ()


def read_csv(path: Path, piece: str = "") -> Reading:  # noqa: ARG001 - one piece is all of it
    """Return the spans of a kernel trace and of the files of the same process beside it."""
    warnings: list[str] = []
    rows = list(_csv_rows(path, "kernel", "Kernel_Name", warnings))
    if not rows:
        raise DlprofError(f"{path}: no kernel in it")
    inside = opening.Inside(path.parent)
    if path.name.endswith(_KERNELS):
        for ending, (kind, column) in _BESIDE.items():
            other = path.with_name(path.name.removesuffix(_KERNELS) + ending)
            if inside.holds(other):
                rows += _csv_rows(other, kind, column, warnings)
    return _reading(path, rows, warnings)


def _csv_rows(path: Path, kind: str, named: str, warnings: list[str]) -> Iterator[_Row]:
    """Return the rows of one file; those without usable times are counted in a warning."""
    bad = count = 0
    with opening.open_file(path) as file:
        lines = (line.decode(errors="replace") for some in opening.lines_of(file) for line in some)
        for row in csv.DictReader(lines, skipinitialspace=True):
            start, end = _whole(row.get("Start_Timestamp")), _whole(row.get("End_Timestamp"))
            name = row.get(named) or ""
            if start < 0 or end < start or not name:
                bad += 1
                continue
            count += 1
            if count > opening.limit(opening.MOST_ROWS):
                warnings.append(opening.too_many(path, "rows", opening.MOST_ROWS))
                break
            agent, queue = row.get("Agent_Id") or "", row.get("Queue_Id") or row.get("Stream_Id") or "0"
            if kind == "copy":
                to_host = name.endswith("TO_HOST")
                agent = row.get("Source_Agent_Id" if to_host else "Destination_Agent_Id") or "0"
                queue = f"copies {row.get('Stream_Id') or ''}".strip()
            elif kind != "kernel":
                agent, queue = "", row.get("Thread_Id") or "0"
            yield _Row(kind, name, agent, queue, _whole(row.get("Correlation_Id")), start, end)
    if bad > 1:
        warnings.append(f"{path.name}: {bad:,} malformed lines are left out")


def read_json(path: Path, piece: str = "") -> Reading:  # noqa: ARG001 - one piece is all of it
    """Return the spans of a process by its JSON."""
    import msgspec

    from dlprof.read.kineto.json_stream import NOT_JSON

    with opening.open_file(path) as file:
        data = file.read(opening.limit(_MOST_JSON) + 1)
    if len(data) > opening.limit(_MOST_JSON):
        raise DlprofError(f"{path}: larger than {_MOST_JSON >> 20} MB: not read (--no-limits reads it)")
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
    return _reading(path, rows, [])


def _json_rows(tool: Mapping[str, Any]) -> Iterator[_Row]:
    records = _object(tool.get("buffer_records"))
    named = _listed(_object(tool.get("strings")).get("buffer_records"))
    kernels = {
        symbol.get("kernel_id"): str(symbol.get("formatted_kernel_name") or symbol.get("kernel_name") or "")
        for symbol in _listed(tool.get("kernel_symbols"))
    }
    for kind, key in (("kernel", "kernel_dispatch"), ("copy", "memory_copy"), ("runtime", "hip_api")):
        for one in _listed(records.get(key)):
            start, end = _whole(one.get("start_timestamp")), _whole(one.get("end_timestamp"))
            if start < 0 or end < start:
                continue
            correlation = one.get("correlation_id")
            internal = correlation.get("internal") if isinstance(correlation, dict) else correlation
            name = _operation(named, one)
            if kind == "kernel":
                info = _object(one.get("dispatch_info"))
                name = kernels.get(info.get("kernel_id")) or "kernel"
                agent, queue = _handle(info.get("agent_id")), _handle(info.get("queue_id"))
            elif kind == "copy":
                to_host = name.endswith("TO_HOST")
                agent, queue = _handle(one.get("src_agent_id" if to_host else "dst_agent_id")), "copies"
            else:
                agent, queue = "", str(one.get("thread_id", 0))
            size = _whole(one.get("bytes")) if kind == "copy" else -1
            yield _Row(kind, name, agent, queue, _whole(internal), start, end, size)


def _operation(named: Sequence[Mapping[str, Any]], one: Mapping[str, Any]) -> str:
    kind, operation = one.get("kind"), one.get("operation")
    if isinstance(kind, int) and 0 <= kind < len(named):
        operations = named[kind].get("operations")
        if isinstance(operations, list) and isinstance(operation, int) and 0 <= operation < len(operations):
            return str(operations[operation])
    return str(operation)


def _reading(path: Path, rows: list[_Row], warnings: list[str]) -> Reading:
    from dlprof import schema
    from dlprof.read.foreign.spans import spans_of
    from dlprof.read.kineto.patterns import collective_of, kind_of

    weight: dict[str, int] = {}
    for row in rows:
        if row.kind == "kernel":
            weight[row.agent] = weight.get(row.agent, 0) + 1
    main = max(weight, key=lambda agent: weight[agent], default="")
    agents = {agent: n for n, agent in enumerate(dict.fromkeys(row.agent for row in rows if row.agent != main))}

    def lane(row: _Row) -> str:
        if not row.agent:
            return f"host:{row.queue}"
        return f"device:{row.queue}" if row.agent == main else f"device{agents[row.agent] + 1}:{row.queue}"

    kinds = [(kind_of("kernel", row.name) or ("", "kernel"))[1] if row.kind == "kernel" else row.kind for row in rows]
    copies = [
        next((to for words, to in _COPY.items() if words in row.name), "") if row.kind == "copy" else "" for row in rows
    ]
    spans = spans_of(
        {
            "lane": [lane(row) for row in rows],
            "kind": kinds,
            "name": [row.name for row in rows],
            "start_ns": [row.start for row in rows],
            "dur_ns": [row.end - row.start for row in rows],
            "launch": [row.launch if row.launch > 0 else -1 for row in rows],
            "bytes": [row.bytes for row in rows],
            "copy": copies,
            "collective": [
                collective_of(row.name) if kind == "communication" else ""
                for row, kind in zip(rows, kinds, strict=True)
            ],
        }
    )
    return Reading(
        {"spans": spans, "traced_steps": schema.empty("traced_steps")}, {}, (*warnings, f"{path.name}: {_NO_BASE}")
    )


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


_BRINGS = "kernels, copies and HIP calls of one process, linked; collectives by their kernels"
_LACKS = {
    "traced_steps": "rocprofv3 marks no steps: `roctx` ranges are read as annotations; torch.profiler marks them",
}

FORMAT = (
    Format(
        name="rocprofv3",
        title="kernel trace of rocprofv3 (CSV)",
        recognised="CSV whose header has Kernel_Name, Agent_Id, Queue_Id and Start_Timestamp",
        recognise=_is_kernels,
        read=read_csv,
        tables=("spans", "traced_steps"),
        brings=_BRINGS,
        record="rocprofv3 --sys-trace --output-format csv -- python train.py",
        seen=False,
        lacks=_LACKS,
    ),
    Format(
        name="rocprofv3_parts",
        title="calls, markers or copies of rocprofv3 (CSV)",
        recognised="CSV whose header has Function or Direction, Correlation_Id and Start_Timestamp",
        recognise=_is_beside,
        left="it is read with the kernel trace of the same process, which lies beside it",
        seen=False,
    ),
    Format(
        name="rocprofv3_json",
        title="trace of rocprofv3 (JSON)",
        recognised="JSON with `rocprofiler-sdk-tool`",
        recognise=_is_json,
        read=read_json,
        tables=("spans", "traced_steps"),
        brings=_BRINGS,
        record="rocprofv3 --sys-trace --output-format json -- python train.py",
        seen=False,
        lacks=_LACKS,
    ),
)
