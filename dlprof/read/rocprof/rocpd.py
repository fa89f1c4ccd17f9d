"""The database that rocprofv3 writes (rocpd, schema 3): kernels, copies, calls and markers of one or more processes.

Tables end in the id of their process (rocpd_kernel_dispatch_1f…); those without it are views, and are not read. The
schema: rocprofiler-sdk, "rocpd output format". A call and its device work have the same `stack_id` in rocpd_event.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from dlprof.errors import DlprofError
from dlprof.read.columnar.database import MISSING, Database, open_database
from dlprof.read.columnar.rows import Ranges, Rows, numbered
from dlprof.read.rocprof import process
from dlprof.read.sources import Reading

_KERNELS = "rocpd_kernel_dispatch"

# Environment variables with the rank of a process, the surest first.
_RANK = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
_MOST_TEXT = 100_000  # characters of an environment that are read
_LONGEST = 2_000  # characters of a marker that are read


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
        if table.startswith(_KERNELS):
            for (number,) in database.rows(table, ["DISTINCT pid"], "WHERE pid IS NOT NULL", most=100_000):
                if isinstance(number, int):
                    yield table.removeprefix(_KERNELS), number


def _rank(database: Database, of: str, number: int) -> int | None:
    """Return the rank of a process from its recorded environment; None: unknown."""
    table = f"rocpd_info_process{of}"
    if "environment" not in database.columns(table):
        return None
    what = [f"substr(environment, 1, {_MOST_TEXT})"]
    for (text,) in database.rows(table, what, "WHERE id = ?", (number,), most=1):
        variables = _object(text)
        found = next((str(variables[name]) for name in _RANK if name in variables), "")
        return int(found) if found.isdecimal() and len(found) < 8 else None
    return None


def read(path: Path, piece: str = "") -> Reading:
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
        return process.reading(self._database.name, self._kernels(), self._copies(), calls, named, (), self._facts())

    def _kernels(self) -> Rows:
        held = self._mine("kernel_dispatch", "start", "end", "agent_id", "queue_id", "kernel_id", "event_id")
        kernels = held["kernel_id"]
        texts = {**self._texts("info_kernel_symbol", "kernel_name", kernels)}
        texts |= self._texts("info_kernel_symbol", "display_name", kernels)
        names, name = numbered(kernels, texts, "unnamed kernel")
        device, queue = (np.maximum(held[key], 0) for key in ("agent_id", "queue_id"))
        launch = self._of_event("stack_id", held["event_id"])
        return Rows(names, process.kinds_of(names), name, held["start"], held["end"], device, queue, launch)

    def _copies(self) -> Rows:
        agents = ("dst_agent_id", "src_agent_id")
        held = self._mine("memory_copy", "start", "end", "name_id", *agents, "size", "stream_id", "event_id")
        names, name = numbered(held["name_id"], self._texts("string", "string", held["name_id"]), "copy")
        from_device = np.array([*map(process.to_host, names), False])[name]
        device = np.maximum(np.where(from_device, held["src_agent_id"], held["dst_agent_id"]), 0)
        # Copies have no queue, and run beside the kernels.
        lane = -1 - np.maximum(held["stream_id"], 0)
        launch = self._of_event("stack_id", held["event_id"])
        size = np.maximum(held["size"], -1)
        rows = Rows(names, ["copy"] * len(names), name, held["start"], held["end"], device, lane, launch, size)
        rows.directions.extend(map(process.direction, names))
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
                message = _object(text).get("message")
                if isinstance(number, int) and isinstance(message, str):
                    messages[number] = message[:_LONGEST]
        start, end, event = (held[key] for key in ("start", "end", "event_id"))
        known = np.isin(event, np.fromiter(messages, dtype=np.int64, count=len(messages)))
        rows = np.flatnonzero(marked & known & (start != MISSING) & (end >= start))
        rows = rows[np.lexsort((-end[rows], start[rows]))]
        texts, name = numbered(event[rows], messages, "")
        return process.ranges_of(texts, name, start[rows], end[rows], thread[rows])

    def _facts(self) -> dict[str, Any]:
        agents = f"rocpd_info_agent{self._of}"
        named = self._database.texts(agents, "id", "product_name")
        kinds = self._database.texts(agents, "id", "type")
        devices = [{"id": i, "name": named.get(i, "")} for i, kind in sorted(kinds.items()) if kind == "GPU"]
        hosts = self._database.texts(f"rocpd_info_node{self._of}", "id", "hostname")
        facts: dict[str, Any] = {"devices": devices} if devices else {}
        return facts | ({"host": next(iter(hosts.values()))} if hosts else {})


def _object(text: Any) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, UnicodeError, TypeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
