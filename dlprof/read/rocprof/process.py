"""Reads what rocprofv3 of AMD recorded of a process: spans, and the steps that they show.

It writes CSV (a file for each kind of event), JSON (a file for each process) or a database. With CSV, the kernel trace
represents its process. It is read with the files of the same name that hold copies, calls and markers. The columns and
keys: the documentation of ROCprofiler-SDK, "Using rocprofv3".

The database (rocpd, schema 3) has one or more processes. Tables end in the id of their process
(rocpd_kernel_dispatch_1f…); those without it are views, and are not read. The schema: rocprofiler-sdk, "rocpd output
format". A call and its device work have the same `stack_id` in rocpd_event.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from dlprof import schema
from dlprof.errors import DlprofError
from dlprof.read import limits, opening
from dlprof.read.columnar import recurring
from dlprof.read.columnar.database import MISSING, Database, open_database
from dlprof.read.columnar.rows import Ranges, Rows, aligned, annotation_rows, numbered, spans_of, split
from dlprof.read.kineto.patterns import kind_of
from dlprof.read.sources import Reading

_MARKS = "torch.cuda.nvtx.range_push(f'step {n}') and rocprofv3 --marker-trace mark them"
_NO_BASE = "its times count from the machine's start, not from 1970"
_COPY = {"HOST_TO_DEVICE": "HtoD", "DEVICE_TO_HOST": "DtoH", "DEVICE_TO_DEVICE": "DtoD", "HOST_TO_HOST": "HtoH"}


def kinds_of(kernels: Sequence[str]) -> list[str]:
    """Return the kind of each kernel by its name: "communication", or "kernel"."""
    return [(kind_of("kernel", name) or ("device", "kernel"))[1] for name in kernels]


def direction(name: str) -> tuple[str, str]:
    """Return what a copy copies, by rocprofv3's name of it: ("HtoD", ""); what memory it is is not known."""
    return next((to for words, to in _COPY.items() if words in name), ""), ""


def to_host(name: str) -> bool:
    """Return whether the device of a copy is the one that it copies from."""
    return name.endswith("TO_HOST")


def ranges_of(
    texts: Sequence[str],
    name: NDArray[np.int64],
    start: NDArray[np.int64],
    end: NDArray[np.int64],
    thread: NDArray[np.int64],
) -> Ranges:
    """Return the ranges of roctx, in order of start; `name`: index into `texts`, from the script or PyTorch."""
    parts = [split(text) for text in texts]
    return Ranges([name for _, name in parts], [op for op, _ in parts], name, start, end, thread, kind="roctx")


def reading(
    name: str,
    kernels: Rows,
    copies: Rows,
    calls: Rows,
    named: Ranges,
    warnings: Sequence[str],
    facts: Mapping[str, Any],
) -> Reading:
    """Return the tables "spans" and "traced_steps" of a process; its device is the one with most kernels."""
    devices, often = np.unique(kernels.device, return_counts=True)
    main = int(devices[often.argmax()]) if len(devices) else 0
    spans, lost = spans_of([kernels, copies, calls, annotation_rows(named)], main)
    spans, odd = aligned(spans)
    more = [*odd, *([f"{lost:,} events without a usable time are left out"] if lost else [])]
    steps, way = schema.empty("traced_steps"), dict[str, Any]()
    if len(kernels.name):
        steps, way, none_found = recurring.traced_steps(named, kernels, calls, _MARKS)
        more += none_found
    tables = {"spans": schema.check("spans", spans), "traced_steps": schema.check("traced_steps", steps)}
    return Reading(tables, {**facts, **way}, (*warnings, *(f"{name}: {line}" for line in (*more, _NO_BASE))))


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
                agent = row.get("Source_Agent_Id" if to_host(name) else "Destination_Agent_Id") or "0"
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

    packed = opening.read_file(path, limits.MOST_WHOLE)
    most = min(limits.limit(limits.MOST_WHOLE), limits.most_unpacked(len(packed)))
    data = opening.gunzipped(packed, most + 1)
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
                agent = _handle(one.get("src_agent_id" if to_host(name) else "dst_agent_id"))
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
    moved.directions.extend(map(direction, copies[0]))
    name, start, end, _, thread, _, _ = marks[1]
    order = np.lexsort((-end, start))
    named = ranges_of(marks[0], name[order], start[order], end[order], thread[order])
    called = Rows(calls[0], ["runtime"] * len(calls[0]), *calls[1])
    ran = Rows(kernels[0], kinds_of(kernels[0]), *kernels[1])
    return reading(path.name, ran, moved, called, named, warnings, facts)


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


_DISPATCHES = "rocpd_kernel_dispatch"

# Environment variables with the rank of a process, the surest first.
_RANK = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
_MOST_TEXT = 100_000  # characters of an environment that are read_database
_LONGEST = 2_000  # characters of a marker that are read_database


@dataclass(frozen=True)
class Process:
    """A process that launched kernels: the suffix of its tables, its number in them, and its rank if recorded."""

    of: str
    number: int
    rank: int | None = None

    @property
    def key(self) -> str:
        """The name of its part of the file."""
        return f"{self.of}/{self.number}"


def processes_of(path: Path) -> list[Process]:
    """Return the processes of a file, none if it is another database; raise DlprofError if it is none."""
    with open_database(path) as database:
        return [Process(of, number, _rank(database, of, number)) for of, number in _processes(database)]


def _processes(database: Database) -> Iterator[tuple[str, int]]:
    """Return the processes that launched kernels: the end of their tables' names, and their numbers in these."""
    for table in sorted(database.tables):
        if table.startswith(_DISPATCHES):
            for (number,) in database.rows(table, ["DISTINCT pid"], "WHERE pid IS NOT NULL", most=100_000):
                if isinstance(number, int):
                    yield table.removeprefix(_DISPATCHES), number


def _rank(database: Database, of: str, number: int) -> int | None:
    """Return the rank of a process from its recorded environment; None: unknown."""
    table = f"rocpd_info_process{of}"
    if "environment" not in database.columns(table):
        return None
    what = [f"substr(environment, 1, {_MOST_TEXT})"]
    for (text,) in database.rows(table, what, "WHERE id = ?", (number,), most=1):
        variables = _decoded_object(text)
        found = next((str(variables[name]) for name in _RANK if name in variables), "")
        return int(found) if found.isdecimal() and len(found) < 8 else None
    return None


def read_database(path: Path, piece: str = "") -> Reading:
    """Return the spans and steps of the process that `piece` names, else the first; raise DlprofError without one."""
    with open_database(path) as database:
        found = [(of, number) for of, number in _processes(database) if piece in ("", f"{of}/{number}")]
        if not found:
            raise DlprofError(f"{path}: no kernel in it (rocprofv3 --sys-trace records them)")
        made = _Tables(database, *found[0]).reading()
        return Reading(made.tables, made.facts, (*database.damage, *made.warnings))


class _Tables:
    """The tables of one process in an open database."""

    def __init__(self, database: Database, of: str, number: int) -> None:
        self._database, self._of, self._number = database, of, number
        events = self._all("event", "id", "stack_id", "category_id")
        order = np.argsort(events["id"], kind="stable")
        self._events = {name: column[order] for name, column in events.items()}

    def _all(self, table: str, *names: str) -> dict[str, NDArray[np.int64]]:
        return self._database.integers(f"rocpd_{table}{self._of}", names)

    def _mine(self, table: str, *names: str) -> dict[str, NDArray[np.int64]]:
        return self._database.integers(f"rocpd_{table}{self._of}", names, "WHERE pid = ?", (self._number,))

    def _texts(self, table: str, value: str, ids: NDArray[np.int64]) -> dict[int, str]:
        return self._database.texts(f"rocpd_{table}{self._of}", "id", value, np.unique(ids).tolist())

    def _of_event(self, column: str, event: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return a column of the events that rows name; −1 where there is none."""
        known = self._events["id"]
        if not len(known):
            return np.full(len(event), -1, dtype=np.int64)
        place = np.minimum(np.searchsorted(known, event), len(known) - 1)
        value = self._events[column][place]
        return np.where((known[place] == event) & (value > 0), value, -1)

    def reading(self) -> Reading:
        calls, named = self._regions()
        return reading(self._database.name, self._kernels(), self._copies(), calls, named, (), self._facts())

    def _kernels(self) -> Rows:
        held = self._mine("kernel_dispatch", "start", "end", "agent_id", "queue_id", "kernel_id", "event_id")
        kernels = held["kernel_id"]
        texts = {**self._texts("info_kernel_symbol", "kernel_name", kernels)}
        texts |= self._texts("info_kernel_symbol", "display_name", kernels)
        names, name = numbered(kernels, texts, "unnamed kernel")
        device, queue = (np.maximum(held[key], 0) for key in ("agent_id", "queue_id"))
        launch = self._of_event("stack_id", held["event_id"])
        return Rows(names, kinds_of(names), name, held["start"], held["end"], device, queue, launch)

    def _copies(self) -> Rows:
        agents = ("dst_agent_id", "src_agent_id")
        held = self._mine("memory_copy", "start", "end", "name_id", *agents, "size", "stream_id", "event_id")
        names, name = numbered(held["name_id"], self._texts("string", "string", held["name_id"]), "copy")
        from_device = np.array([*map(to_host, names), False])[name]
        device = np.maximum(np.where(from_device, held["src_agent_id"], held["dst_agent_id"]), 0)
        # Copies have no queue, and run beside the kernels.
        lane = -1 - np.maximum(held["stream_id"], 0)
        launch = self._of_event("stack_id", held["event_id"])
        size = np.maximum(held["size"], -1)
        rows = Rows(names, ["copy"] * len(names), name, held["start"], held["end"], device, lane, launch, size)
        rows.directions.extend(map(direction, names))
        return rows

    def _regions(self) -> tuple[Rows, Ranges]:
        """Return the calls of HIP, and the ranges that markers name."""
        held = self._mine("region", "start", "end", "tid", "name_id", "event_id")
        threads = self._all("info_thread", "id", "tid")
        tid = dict(zip(threads["id"].tolist(), threads["tid"].tolist(), strict=True))
        ids, of = np.unique(held["tid"], return_inverse=True)
        thread = np.array([tid.get(i, max(i, 0)) for i in ids.tolist()], dtype=np.int64)[of.reshape(-1)]
        category = self._of_event("category_id", held["event_id"])
        kinds = self._texts("string", "string", category)
        is_call, is_mark = (
            np.isin(category, [i for i, text in kinds.items() if text.startswith(word)]) for word in ("HIP_", "MARKER_")
        )
        names, name = numbered(held["name_id"], self._texts("string", "string", held["name_id"]), "unnamed call")
        host = np.full(int(is_call.sum()), -1, dtype=np.int64)
        launch = self._of_event("stack_id", held["event_id"])
        name, start, end = (column[is_call] for column in (name, held["start"], held["end"]))
        calls = Rows(names, ["runtime"] * len(names), name, start, end, host, thread[is_call], launch[is_call])
        return calls, self._ranges(
            held, is_mark, thread, [i for i, text in kinds.items() if text.startswith("MARKER_")]
        )

    def _ranges(
        self, held: dict[str, NDArray[np.int64]], marked: NDArray[np.bool_], thread: NDArray[np.int64], kinds: list[int]
    ) -> Ranges:
        """Return the ranges of roctx. Their texts are in their events; their names are those of calls."""
        table = f"rocpd_event{self._of}"
        messages: dict[int, str] = {}
        if kinds and "extdata" in self._database.columns(table):
            where = f"WHERE category_id IN ({', '.join(map(str, kinds))})"
            for number, text in self._database.rows(table, ["id", "substr(extdata, 1, 8000)"], where):
                message = _decoded_object(text).get("message")
                if isinstance(number, int) and isinstance(message, str):
                    messages[number] = message[:_LONGEST]
        start, end, event = (held[key] for key in ("start", "end", "event_id"))
        known = np.isin(event, np.fromiter(messages, dtype=np.int64, count=len(messages)))
        rows = np.flatnonzero(marked & known & (start != MISSING) & (end >= start))
        rows = rows[np.lexsort((-end[rows], start[rows]))]
        texts, name = numbered(event[rows], messages, "")
        return ranges_of(texts, name, start[rows], end[rows], thread[rows])

    def _facts(self) -> dict[str, Any]:
        agents = f"rocpd_info_agent{self._of}"
        named = self._database.texts(agents, "id", "product_name")
        kinds = self._database.texts(agents, "id", "type")
        devices = [{"id": i, "name": named.get(i, "")} for i, kind in sorted(kinds.items()) if kind == "GPU"]
        hosts = self._database.texts(f"rocpd_info_node{self._of}", "id", "hostname")
        facts: dict[str, Any] = {"devices": devices} if devices else {}
        return facts | ({"host": next(iter(hosts.values()))} if hosts else {})


def _decoded_object(text: Any) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, UnicodeError, TypeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
