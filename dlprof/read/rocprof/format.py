"""What rocprofv3 leaves: CSV (a file a kind of event), JSON and databases (a file a process); which one a file is."""

from __future__ import annotations

from collections.abc import Sequence

from dlprof.errors import DlprofError
from dlprof.read.formats import WHOLE, Format, Head, Part
from dlprof.read.sources import lazily

_SQLITE = b"SQLite format 3\0"
_TOOL = b"rocprofiler-sdk-tool"

_CALLS = {"Domain", "Function", "Thread_Id", "Correlation_Id", "Start_Timestamp", "End_Timestamp"}
_COPIES = {"Direction", "Source_Agent_Id", "Correlation_Id", "Start_Timestamp", "End_Timestamp"}
_WORK = {"Kernel_Name", "Agent_Id", "Queue_Id", "Correlation_Id", "Start_Timestamp", "End_Timestamp"}


def _columns(head: Head) -> set[str]:
    line = head.start.partition(b"\n")[0].decode(errors="replace")
    return {word.strip().strip('"') for word in line.split(",")}


def _is_kernels(head: Head) -> Sequence[Part]:
    return WHOLE if head.is_text and _columns(head) >= _WORK else ()


def _is_beside(head: Head) -> Sequence[Part]:
    found = _columns(head) if head.is_text else set()
    return WHOLE if found >= _CALLS or found >= _COPIES else ()


def _is_json(head: Head) -> Sequence[Part]:
    return WHOLE if head.opens == "{" and _TOOL in head.first[:400] else ()


def _is_database(head: Head) -> Sequence[Part]:
    if not head.start.startswith(_SQLITE):
        return ()
    from dlprof.read.rocprof.process import processes_of

    try:
        return tuple(Part(one.rank, one.key) for one in processes_of(head.path))
    except DlprofError:  # a database of something else
        return ()


_BRINGS = "kernels, copies and HIP calls of one process, linked; collectives by their kernels; steps by roctx ranges"
_LACKS = {
    "traced_steps": "torch.cuda.nvtx.range_push(f'step {n}'), which is roctx on AMD, and rocprofv3 --marker-trace"
}

FORMAT = (
    Format(
        name="rocprofv3",
        title="kernel trace of rocprofv3 (CSV)",
        recognised="CSV whose header has Kernel_Name, Agent_Id, Queue_Id and Start_Timestamp",
        recognise=_is_kernels,
        read=lazily("rocprof.process", "read_csv"),
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
        read=lazily("rocprof.process", "read_json"),
        tables=("spans", "traced_steps"),
        brings=_BRINGS,
        record="rocprofv3 --sys-trace --output-format json -- python train.py",
        seen=False,
        lacks=_LACKS,
    ),
    Format(
        name="rocpd",
        title="database of rocprofv3 (rocpd)",
        recognised="SQLite with tables `rocpd_kernel_dispatch…`",
        recognise=_is_database,
        read=lazily("rocprof.process", "read_database"),
        tables=("spans", "traced_steps"),
        brings=_BRINGS,
        record="rocprofv3 --sys-trace --output-format rocpd -- python train.py",
        seen=False,
        lacks=_LACKS,
    ),
)
