"""Horovod's timeline (HOROVOD_TIMELINE): one file for all ranks, written by rank 0, often without its closing bracket.

A tensor is a "process" of the file. Its collective is negotiated first (NEGOTIATE_ALLREDUCE, in which a mark with each
rank's number says when that rank was ready), and then done (ALLREDUCE, with activities like NCCL_ALLREDUCE inside).
So the file tells of every rank when it came to each collective, and who came last. It tells nothing of what the ranks
compute. The format: horovod/common/timeline.cc and docs/timeline.rst of Horovod.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlprof.errors import DlprofError
from dlprof.read import limits
from dlprof.read.formats import Format, Head, Part
from dlprof.read.sources import Reading

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

    from dlprof.read.foreign.chrome import ChromeTrace

_NEGOTIATE = "NEGOTIATE_"
_READY = re.compile(rb'"ph"\s*:\s*"X"[^{}]{0,40}"name"\s*:\s*"(\d{1,7})"')
_OPERATION = re.compile(rb'"name"\s*:\s*"NEGOTIATE_[A-Z]+"')

# As many occurrences of a tensor make steps.
_LEAST_STEPS = 3

_COLLECTIVES = {
    "ALLREDUCE": "all_reduce",
    "ALLGATHER": "all_gather",
    "BROADCAST": "broadcast",
    "ALLTOALL": "all_to_all",
    "REDUCESCATTER": "reduce_scatter",
    "ADASUM": "all_reduce",
    "BARRIER": "barrier",
}


def recognise(head: Head) -> Sequence[Part]:
    """Return a part for each rank that the beginning of a timeline names."""
    if head.opens != "[" or not _OPERATION.search(head.first):
        return ()
    ranks = {int(number) for number in _READY.findall(head.first)}
    return [Part(rank, str(rank)) for rank in sorted(ranks)[: limits.MOST_RANKS_OF_FILE]] or [Part(0, "0")]


def read(path: Path, piece: str = "0") -> Reading:
    """Return one rank's collectives as spans, from when it was ready to when they were done, and the steps.

    A step is from one time that the first tensor is negotiated to the next. Raises DlprofError if it is no timeline.
    """
    import numpy as np
    import pandas as pd

    from dlprof import schema
    from dlprof.read.foreign import chrome
    from dlprof.read.foreign.chrome import spans_of

    trace = chrome.read(path, _is_operation)
    base = trace.meta.get("start_time_since_epoch_in_micros")
    base_ns = int(base) * 1000 if isinstance(base, int) and 0 < base < 2**52 else 0
    rows = _collectives(trace, piece)
    if not rows:
        raise DlprofError(f"{path}: no collective of rank {piece} in the timeline")
    frame = pd.DataFrame(rows, columns=["tensor", "name", "collective", "begin", "ready", "end", "bytes", "dtype"])
    frame = frame.sort_values(["begin", "tensor"], kind="stable")
    sequence = frame.groupby("tensor").cumcount().to_numpy()
    spans = spans_of(
        {
            # Tensors are exchanged in parallel: each has its own lane. No lane is the training thread.
            "lane": [f"host:horovod {tensor}" for tensor in frame["tensor"]],
            "kind": ["communication"] * len(frame),
            "name": frame["name"].to_list(),
            "start_ns": frame["ready"].to_numpy() + base_ns,
            "dur_ns": (frame["end"] - frame["ready"]).to_numpy(),
            "bytes": frame["bytes"].to_numpy(),
            "collective": frame["collective"].to_list(),
            "group": ["0"] * len(frame),
            "sequence": sequence,
            "communicator": frame["tensor"].astype(str).to_list(),
            "dtype": frame["dtype"].to_list(),
        }
    )
    steps = _steps(frame, np, base_ns)
    ranks = (int(p.name) + 1 for p in trace.places if p.name.isdecimal() and len(p.name) < 8)
    warnings = (
        [] if base_ns else [f"{path.name}: its times have no base: they count from an unknown zero, not from 1970"]
    )
    return Reading(
        {"spans": spans, "traced_steps": schema.check("traced_steps", steps)},
        {"rank": int(piece), "world_size": max(ranks, default=1), "backend": "horovod"},
        (*trace.warnings, *warnings),
    )


def _is_operation(name: str) -> bool:
    return name in _COLLECTIVES


def _collectives(trace: ChromeTrace, rank: str) -> list[tuple[Any, ...]]:
    """Return tensor, name, collective, begin of its negotiation, when the rank was ready, end, bytes, element type."""
    import numpy as np

    name = np.array([place.name for place in trace.places], dtype=object)
    pid = np.array([_number(place.pid) for place in trace.places], dtype=np.int64)
    negotiates = np.array([text.startswith(_NEGOTIATE) for text in name], dtype=bool)
    operates = np.array([text in _COLLECTIVES for text in name], dtype=bool)
    ticks = np.array([text == rank for text in name], dtype=bool)
    of, at = trace.place, trace.start
    by_tensor: dict[int, list[tuple[int, int, int, int, str]]] = {}  # pid → start, order, row, end, kind
    for kind, chosen in (("negotiate", negotiates), ("ready", ticks), ("done", operates)):
        for row in np.flatnonzero(chosen[of]).tolist():
            begun = int(at[row])
            by_tensor.setdefault(int(pid[of[row]]), []).append(
                (begun, _ORDER[kind], row, begun + int(trace.dur[row]), kind)
            )
    found: list[tuple[Any, ...]] = []
    for tensor, marks in by_tensor.items():
        label = trace.processes.get(tensor) or f"tensor {tensor}"
        begin = ready = None
        for start, _, row, end, kind in sorted(marks):
            if kind == "negotiate":
                begin, ready = start, None
            elif kind == "ready" and begin is not None:
                ready = start
            elif kind == "done" and begin is not None and ready is not None:
                operation = name[of[row]]
                size, dtype = _size(trace.args.get(row, b""))
                found.append((tensor, label, _COLLECTIVES[operation], begin, min(ready, end), end, size, dtype))
                begin = ready = None
    return found


_ORDER = {"negotiate": 0, "ready": 1, "done": 2}


def _number(pid: Any) -> int:
    return pid if isinstance(pid, int) and not isinstance(pid, bool) and 0 <= pid < 2**62 else -1


def _size(raw: bytes) -> tuple[int, str]:
    """Return the bytes and the element type in the end mark of an operation; −1 and "": unknown."""
    from dlprof.read.foreign.chrome import fields
    from dlprof.read.kineto.patterns import element_type

    args = fields(raw)
    dtype, width = element_type(str(args.get("dtype", "")))
    shape = re.findall(r"\d{1,18}", str(args.get("shape", "")))[:16]
    if not width or "shape" not in args:
        return -1, dtype if width else ""
    size = width
    for extent in shape:
        size *= int(extent)
    return (size if size < 2**62 else -1), dtype


def _steps(frame: pd.DataFrame, numpy: Any, base_ns: int) -> pd.DataFrame:
    """Return the steps: from each time that the tensor which comes first in a step is negotiated to the next."""
    import pandas as pd

    begins: np.ndarray[Any, Any] = numpy.empty(0, dtype=numpy.int64)
    reduced = frame[frame["collective"] == "all_reduce"]
    if len(reduced):
        each = reduced.groupby("tensor")["begin"].agg(["size", "min"])
        usual = each[each["size"] == int(each["size"].median())]
        if len(usual) and int(usual["size"].iloc[0]) > _LEAST_STEPS:
            first = usual["min"].idxmin()
            begins = numpy.sort(reduced.loc[reduced["tensor"] == first, "begin"].to_numpy())
    starts = begins[:-1] + base_ns
    return pd.DataFrame({"step": numpy.arange(len(starts)), "start_ns": starts, "dur_ns": numpy.diff(begins)}).astype(
        "int64"
    )


FORMAT = Format(
    name="horovod",
    title="Horovod timeline",
    recognised="a list of events with `NEGOTIATE_…`, with or without its closing bracket",
    recognise=recognise,
    read=read,
    tables=("spans", "traced_steps"),
    brings="every collective of every rank, from when the rank was ready: who comes last, and who waits; steps by the"
    " tensor that is exchanged first",
    record="HOROVOD_TIMELINE=timeline.json horovodrun -np 4 python train.py",
    seen=False,
    lacks={"stacks": "Horovod's timeline holds no stacks: py-spy records them beside it (`py-spy record -f raw`)"},
)
