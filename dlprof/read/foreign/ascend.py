"""Ascend's trace_view.json, which torch_npu's profiler writes: what an event is stands in the name of its process.

"Ascend Hardware" has a thread a stream, with kernels and the waits of streams for each other; "HCCL" (later
"Communication") the collectives; "Overlap Analysis" and the chip's counters are sums of these, and are passed over. The
operators of torch carry a category, as in Kineto's traces. The layout: the documentation of Ascend Extension for
PyTorch, "Ascend PyTorch Profiler".
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dlprof.errors import DlprofError
from dlprof.read.formats import Format, Head, Part
from dlprof.read.sources import Reading

_OURS = re.compile(rb'"(?:Ascend Hardware|Overlap Analysis|CANN)"')
_STEP = re.compile(r"ProfilerStep#(\d{1,18})")

_HARDWARE = re.compile(r"Ascend Hardware")
_COMMUNICATION = re.compile(r"HCCL|Communication", re.I)
_CANN = re.compile(r"^CANN")
# Of the hardware's rows: no work, but waiting and marks.
_NO_WORK = re.compile(r"EVENT_|Notify_Wait|EVENT|NOTIFY|PROFILER_TRACE|PLACE_HOLDER|MODEL_|Free", re.I)
_COPY = re.compile(r"MEMCPY|Memcpy|memcpy")
_COLLECTIVE = re.compile(r"^hcom_|^hccl", re.I)
_SMALL = ("cpu_op", "user_annotation", "python_function")
_LAUNCH = "connection_id"


def recognise(head: Head) -> Sequence[Part]:
    """Return one part where processes of Ascend's are named; the rank by the folder's name where it tells one."""
    from dlprof.read.kineto.patterns import rank_in

    if head.opens not in ("{", "[") or not _OURS.search(head.first) or b'"ph"' not in head.first:
        return ()
    # …/HOST_PID_TIME_ascend_pt/ASCEND_PROFILER_OUTPUT/trace_view.json, and people name the folder after the rank.
    names = (head.name, *(folder.name for folder in list(head.path.parents)[:3]))
    ranks = [rank for rank in map(rank_in, names) if rank is not None]
    return (Part(ranks[0] if ranks else None),)


def _wants(name: str) -> bool:  # noqa: ARG001 - the numbers that link calls and kernels are in all of them
    return True


def read(path: Path, piece: str = "") -> Reading:  # noqa: ARG001 - one piece is all of it
    """Return the spans and the steps of one rank; raises DlprofError where the file holds no event of Ascend's."""
    import numpy as np
    import pandas as pd

    from dlprof import schema
    from dlprof.read.foreign import chrome
    from dlprof.read.foreign.spans import spans_of
    from dlprof.read.kineto.patterns import collective_of, kind_of

    trace = chrome.read(path, _wants)
    names = [place.name for place in trace.places]
    kinds: list[tuple[str, str, str]] = []  # kind, lane, collective; "": no row
    for place in trace.places:
        process = trace.processes.get(place.pid, "")
        thread = trace.threads.get((place.pid, place.tid), "")
        kinds.append(_kind(place, process, thread, kind_of, collective_of))
    known = np.array([bool(kind) for kind, _, _ in kinds], dtype=bool)
    rows = np.flatnonzero(known[trace.place]) if len(trace.place) else np.empty(0, dtype=np.int64)
    if not len(rows):
        raise DlprofError(f"{path}: no event of Ascend's profiler in it")
    of = trace.place[rows]
    said = [chrome.fields(trace.args.get(row, b"")) for row in rows.tolist()]
    spans = spans_of(
        {
            "lane": [kinds[i][1] for i in of.tolist()],
            "kind": [kinds[i][0] for i in of.tolist()],
            "name": [names[i] for i in of.tolist()],
            "start_ns": trace.start[rows],
            "dur_ns": trace.dur[rows],
            "launch": [_positive(one.get(_LAUNCH)) for one in said],
            "bytes": [_positive(one.get("size(Byte)", one.get("size"))) for one in said],
            "collective": [kinds[i][2] for i in of.tolist()],
            "group": ["0" if kinds[i][2] else "" for i in of.tolist()],
        }
    )
    marks = [_STEP.fullmatch(names[i]) for i in of.tolist()]
    found = {int(mark[1]): row for mark, row in zip(marks, rows.tolist(), strict=True) if mark}
    steps = [(step, int(trace.start[row]), int(trace.dur[row])) for step, row in found.items()]
    steps.sort(key=lambda one: one[1])
    table = pd.DataFrame(steps, columns=list(schema.TRACED_STEPS)).astype("int64")
    facts: dict[str, Any] = {"devices": [{"id": 0, "name": "Ascend NPU"}], "backend": "hccl"}
    return Reading({"spans": spans, "traced_steps": schema.check("traced_steps", table)}, facts, tuple(trace.warnings))


def _kind(place: Any, process: str, thread: str, kind_of: Any, collective_of: Any) -> tuple[str, str, str]:
    """Return kind, lane and collective of what lies at a place; an empty kind where it is no row."""
    nothing = ("", "", "")
    where = thread or str(place.tid)
    if place.category in _SMALL:
        known = kind_of(place.category, place.name)
        return (known[1], f"host:{place.tid}", "") if known and known[0] == "host" else nothing
    if _HARDWARE.search(process):
        if _COLLECTIVE.search(place.name) or _NO_WORK.match(place.name):
            return nothing  # the collectives have a process of their own
        return ("copy" if _COPY.search(place.name) else "kernel"), f"device:{where}", ""
    if _COMMUNICATION.search(process):
        # Below a group's row stand the planes of its links, with the pieces of each collective.
        if not _COLLECTIVE.search(place.name):
            return nothing
        return "communication", f"device:{where}", collective_of(place.name)
    if _CANN.search(process) and place.name.startswith(("AscendCL@", "Node@launch", "Runtime@")):
        return "runtime", f"host:{place.tid}", ""
    if _STEP.fullmatch(place.name):
        return "annotation", f"host:{place.tid}", ""
    return nothing


def _positive(value: Any) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return -1
    return number if 0 < number < 2**62 else -1


FORMAT = Format(
    name="ascend",
    title="trace_view.json of Ascend's profiler",
    recognised='a Chrome trace whose processes are named "Ascend Hardware", "CANN" or "Overlap Analysis"',
    recognise=recognise,
    read=read,
    tables=("spans", "traced_steps"),
    brings="kernels and copies of the NPU by stream, HCCL's collectives, torch's operators, the profiler's steps",
    record="torch_npu.profiler.profile(..., on_trace_ready=torch_npu.profiler.tensorboard_trace_handler(folder))",
    seen=False,
)
