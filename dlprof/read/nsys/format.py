"""What Nsight Systems leaves: exports as SQLite, which are read, and its own reports, which nsys itself exports."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from dlprof import nsys
from dlprof.errors import DlprofError
from dlprof.read.formats import Format, Head, Part
from dlprof.read.nsys.export import processes_of
from dlprof.read.sources import Reading

# What a file begins with (".nsys-rep", ".qdrep" before 2021).
_SQLITE, _REPORT = b"SQLite format 3\0", b"NVIDIA Tegra Profiler Report"

# A report of some GB takes minutes.
_EXPORT_S = 3_600

_HOW = "`nsys export --type sqlite FILE`, where nsys is installed, makes the .sqlite that dlprof reads"

_made: dict[Path, Path] = {}  # report → what was exported from it


def _is_export(head: Head) -> Sequence[Part]:
    return _parts(head.path, head.path) if head.start.startswith(_SQLITE) else ()


def _is_report(head: Head) -> Sequence[Part]:
    """Return the ranks of a report whose export lies beside it, or can be made by nsys."""
    if not head.start.startswith(_REPORT) or not (_beside(head.path).is_file() or nsys.found()):
        return ()
    return _parts(head.path, _exported(head.path))


def _is_any_report(head: Head) -> Sequence[Part]:
    return (Part(),) if head.start.startswith(_REPORT) else ()


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
    if path not in _made:
        program = nsys.found()
        if program is None:
            raise DlprofError(f"{path}: {_HOW}")
        folder = Path(tempfile.mkdtemp(prefix="dlprof-nsys-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        made = folder / "export.sqlite"
        if why := nsys.export(program, path.resolve(), made, _EXPORT_S):
            raise DlprofError(f"{path}: {why}")
        _made[path] = made
    return _made[path]


def _read(path: Path, piece: str) -> Reading:
    from dlprof.read.nsys import export

    return export.read(path, piece)


def _read_report(path: Path, piece: str) -> Reading:
    return _read(_exported(path), piece)


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
        read=_read_report,
        tables=("spans", "traced_steps"),
        brings="the same as its export: that beside it, else one that nsys makes in a temporary folder",
        record="nsys profile --trace=cuda,nvtx --cuda-graph-trace=node …",
        lacks=_LACKS,
    ),
    Format(
        name="nsys_report_unread",
        title="report of Nsight Systems, without nsys",
        recognised='its first words: "NVIDIA Tegra Profiler Report"',
        recognise=_is_any_report,
        left=_HOW,
        record="nsys profile",
    ),
)
