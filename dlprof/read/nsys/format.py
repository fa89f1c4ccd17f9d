"""What Nsight Systems leaves: exports as SQLite, which are read, and its own reports, which nsys itself exports.

A rank of an export is a process that works on a device, or, on a CPU, one that names ranges.
"""

from __future__ import annotations

import atexit
import contextlib
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dlprof import nsys
from dlprof.errors import DlprofError
from dlprof.read.columnar.database import MISSING, Database, open_database
from dlprof.read.formats import WHOLE, Format, Head, Part
from dlprof.read.sources import lazily

# What a file begins with (".nsys-rep", ".qdrep" before 2021).
_SQLITE, _REPORT = b"SQLite format 3\0", b"NVIDIA Tegra Profiler Report"

# A report of some GB takes minutes.
_EXPORT_S = 3_600

_HOW = "`nsys export --type sqlite FILE`, where nsys is installed, makes the .sqlite that dlprof reads"

_made: dict[Path, Path] = {}  # report → what was exported from it
_refused: dict[Path, str] = {}  # report → why nsys exports nothing from it

# The last 24 bits of a serialized thread id are the thread's id; the bits before are the process's.
THREADS = 1 << 24

# Where an export keeps what ran on a device, and on the host, the surest first.
DEVICE = ("CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_GRAPH_TRACE", "CUPTI_ACTIVITY_KIND_MEMCPY")

HOST = ("NVTX_EVENTS", "CUPTI_ACTIVITY_KIND_RUNTIME", "OSRT_API")

# Without devices, processes with less than this share of the busiest one's ranges are its helpers.
_HELPER = 0.1


@dataclass(frozen=True)
class Process:
    """A process of an export: its serialized id (None: the version keeps none), and the device that it works on."""

    global_pid: int | None
    device: int  # -1: none

    @property
    def pid(self) -> int | None:
        """Its number on its host."""
        return None if self.global_pid is None else self.global_pid // THREADS % THREADS

    @property
    def key(self) -> str:
        """The name of its part of the file; "" for all of the file."""
        return "" if self.global_pid is None else str(self.global_pid)


def processes_of(path: Path) -> list[Process]:
    """Return the ranks of an export, in the order of their devices; raise DlprofError if it is none."""
    with open_database(path) as database:
        found = processes_in(database)
    if not found:
        raise DlprofError(f"{path}: a SQLite file, but no export of Nsight Systems")
    return found


def piece_of(path: Path, pid: int) -> str:
    """Return the piece of an export that is of the process with that number; "" if it holds none."""
    with contextlib.suppress(DlprofError):
        return next((one.key for one in processes_of(path) if one.pid == pid), "")
    return ""


def processes_in(database: Database) -> list[Process]:
    """Return the ranks of an export; none if it is no export. A process counts on its device with most work."""
    if not ("StringIds" in database.tables and any(table in database.tables for table in (*DEVICE, *HOST))):
        return []
    return _with_device(database) or _without(database) or [Process(None, -1)]


def _with_device(database: Database) -> list[Process]:
    took: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for table in DEVICE:
        process, device = (database.integer(table, name) for name in ("globalPid", "deviceId"))
        what = [process, device, f"total({database.integer(table, 'end')} - {database.integer(table, 'start')}) + 1"]
        for pid, number, ns in database.rows(table, what, f"GROUP BY {process}, {device}", most=100_000):
            took[pid][number] += ns
        if took:
            break
    # No rank of a job works on no device and a wrong one only: nvidia-smi and the like launch nothing.
    made = [
        Process(None if pid == MISSING else pid, max(of.items(), key=lambda one: one[1])[0]) for pid, of in took.items()
    ]
    return sorted(made, key=lambda one: (one.device, one.global_pid or 0))


def _without(database: Database) -> list[Process]:
    for table in HOST:
        thread = database.integer(table, "globalTid")
        if "globaltid" not in database.columns(table):
            continue
        # A domain that a library makes names nothing.
        ends = 'WHERE "end" IS NOT NULL' if "end" in database.columns(table) else ""
        group = f"{ends} GROUP BY {thread} & ~{THREADS - 1}"
        counts = {
            pid: count
            for pid, count in database.rows(table, [f"{thread} & ~{THREADS - 1}", "count(*)"], group, most=100_000)
            if pid > 0
        }
        if counts:
            least = _HELPER * max(counts.values()) if table == "NVTX_EVENTS" else max(counts.values())
            return [Process(pid, -1) for pid, count in sorted(counts.items()) if count >= least]
    return []


def of_process(database: Database, table: str, process: int | None) -> tuple[str, tuple[int, ...]]:
    """Return the condition for the rows of a process by its serialized id, and its arguments."""
    held = database.columns(table)
    if process is None:
        return "", ()
    if "globalpid" in held:
        return f'WHERE "{held["globalpid"]}" = ?', (process,)
    if "globaltid" in held:
        return f'WHERE ("{held["globaltid"]}" & ~{THREADS - 1}) = ?', (process,)
    return "", ()


def _is_export(head: Head) -> Sequence[Part]:
    return _parts(head.path, head.path) if head.start.startswith(_SQLITE) else ()


def _is_report(head: Head) -> Sequence[Part]:
    """Return the ranks of a report, if its export is beside it or nsys can make one."""
    if not head.start.startswith(_REPORT) or not (_beside(head.path).is_file() or nsys.found()):
        return ()
    try:
        return _parts(head.path, _exported(head.path))
    except DlprofError:  # which reading it says, too
        return (Part(),)


def _parts(path: Path, export: Path) -> tuple[Part, ...]:
    """Return a part for each process; where it is the only one, the file's name may tell its rank."""
    from dlprof.read.kineto.patterns import rank_in

    try:
        processes = processes_of(export)
    except DlprofError:  # a database of something else
        return ()
    alone = rank_in(path.name) if len(processes) == 1 else None
    return tuple(Part(alone, one.key) for one in processes)


def _beside(path: Path) -> Path:
    return path.with_suffix(".sqlite")


def _exported(path: Path) -> Path:
    """Return the export beside a report, else one in a temporary folder; raise DlprofError where nsys makes none."""
    if _beside(path).is_file():
        return _beside(path)
    if path in _refused:
        raise DlprofError(_refused[path])
    if path not in _made:
        program = nsys.found()
        if program is None:
            raise DlprofError(f"{path}: {_HOW}")
        folder = Path(tempfile.mkdtemp(prefix="dlprof-nsys-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        made = folder / "export.sqlite"
        if why := nsys.export(program, path.resolve(), made, _EXPORT_S):
            _refused[path] = f"{path}: {why}"
            raise DlprofError(_refused[path])
        _made[path] = made
    return _made[path]


_read = lazily("nsys.export")


_LACKS = {
    "memory": "nsys does not see PyTorch's allocator (`dlprof wrap` samples it)",
    "stacks": "nsys' samples of the CPU are not read: py-spy records Python's stacks (`py-spy record -f raw`)",
    "samples": "nsys' GPU metrics are not read: a log of nvidia-smi beside the export is",
    "steps": "nsys has no record of every step (`dlprof wrap --nsys` leaves one beside the export)",
}
_BRINGS = (
    "kernels, copies, sets, CUDA graphs and synchronisations by stream, launches, NVTX ranges, PyTorch's operators"
    " where emit_nvtx named them, NCCL, steps; each process of the file is a rank"
)

FORMAT = (
    Format(
        name="nsys",
        title="export of Nsight Systems",
        recognised="SQLite with `StringIds` and tables of CUPTI's activities, NVTX or the OS runtime",
        recognise=_is_export,
        read=_read,
        tables=("spans", "traced_steps"),
        brings=_BRINGS,
        record="nsys profile --trace=cuda,nvtx --cuda-graph-trace=node …; nsys export --type sqlite FILE",
        lacks=_LACKS,
    ),
    Format(
        name="nsys_report",
        title="report of Nsight Systems",
        recognised='its first words: "NVIDIA Tegra Profiler Report"',
        recognise=_is_report,
        read=lambda path, piece: _read(_exported(path), piece),
        tables=("spans", "traced_steps"),
        brings="the same as its export: that beside it, else one that nsys makes in a temporary folder",
        record="nsys profile --trace=cuda,nvtx --cuda-graph-trace=node …",
        lacks=_LACKS,
    ),
    Format(
        name="nsys_report_unread",
        title="report of Nsight Systems, without nsys",
        recognised='its first words: "NVIDIA Tegra Profiler Report"',
        recognise=lambda head: WHOLE if head.start.startswith(_REPORT) else (),
        left=_HOW,
        record="nsys profile",
    ),
)
