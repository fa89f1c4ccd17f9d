"""Traces of PyTorch's profiler as a format that any folder may hold, whoever wrote them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dlprof.read.formats import Format, Head, Part
from dlprof.read.sources import Reading


def recognise(head: Head) -> Sequence[Part]:
    """Return the rank that a trace says it is of."""
    from dlprof.read.kineto import headers

    if head.opens not in ("{", "["):
        return ()
    looked = headers.peek(head.path)
    return (Part(looked.get("rank")),) if looked["is_trace"] else ()


def read(path: Path, piece: str = "") -> Reading:
    """Return the tables of a trace, see torch_trace.py."""
    from dlprof.read.kineto import torch_trace

    return torch_trace.read(path)


FORMAT = Format(
    name="torch_trace",
    title="torch.profiler trace",
    recognised="JSON with `traceEvents`, or a list of events with `ph`",
    recognise=recognise,
    read=read,
    tables=("spans", "traced_steps"),
    brings="kernels, copies, collectives, operators and calls of a few steps; the steps, where it marks them",
    record="torch.profiler.profile(...) with prof.step(), and prof.export_chrome_trace(file)",
)
