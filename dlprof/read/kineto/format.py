"""The format of PyTorch profiler traces, as other tools' files in any folder."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from dlprof.read.formats import Format, Head, Part
from dlprof.read.sources import Reading

_TIME = re.compile(rb'"ts"\s*:\s*"?(\d{1,18})(?:\.(\d{1,9}))?')
_BASE = re.compile(rb'"baseTimeNanoseconds"\s*:\s*(\d{1,19})')


def recognise(head: Head) -> Sequence[Part]:
    """Return the rank in a trace's head, or a part for each rank of a merged file."""
    from dlprof.read.kineto import headers, merged

    if head.opens not in ("{", "["):
        return ()
    looked = headers.peek(head.path)
    if not looked["is_trace"]:
        return ()
    began = _began(head.first)
    if merged.is_rewritten(head.first) and (ranks := merged.ranks_of_processes(head.path)):
        return [Part(rank, piece, began) for rank, piece in ranks]
    return (Part(looked.get("rank"), "", began, looked.get("host", ""), looked.get("world_size")),)


def _began(first: bytes) -> int | None:
    """Return the time of the first event that has one, in ns; Unix time if the head has the base."""
    found = next((one for one in _TIME.finditer(first) if int(one[1])), None)
    if found is None:
        return None
    base = _BASE.search(first)
    return int(found[1]) * 1000 + int((found[2] or b"0").ljust(3, b"0")[:3]) + (int(base[1]) if base else 0)


def read(path: Path, piece: str = "") -> Reading:
    """Return the tables of a trace, see torch_trace.py; of a merged one, those of the processes that `piece` names."""
    from dlprof.read.kineto import merged, torch_trace

    return torch_trace.read(path, merged.pids(piece) if piece else None)


FORMAT = Format(
    name="torch_trace",
    title="torch.profiler trace",
    recognised="JSON with `traceEvents`, or a list of events with `ph`",
    recognise=recognise,
    read=read,
    tables=("spans", "traced_steps"),
    brings="kernels, copies, collectives, operators and calls of a few steps; the steps, where it marks them. Ranks"
    " of one merged file, and windows of one rank, are told apart",
    record="torch.profiler.profile(...) with prof.step(), and prof.export_chrome_trace(file)",
    precedence=1,
)
