"""What rocprofv3 recorded of a process, in whatever it was written: its spans, and the steps that they show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlprof import schema
from dlprof.read.clocks import aligned
from dlprof.read.columnar import recurring
from dlprof.read.columnar.rows import Ranges, Rows, annotation_rows, spans_of, split
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
    about, found = dict(facts), None
    spans, odd = aligned(spans)
    more = [*odd, *([f"{lost:,} events without a usable time are left out"] if lost else [])]
    if len(kernels.name):
        launched = recurring.launched(kernels, calls)
        found = recurring.find(named, launched)
        if found is None:
            again = recurring.loop(launched)
            about |= {"loop": again.fact} if again else {}
            more.append(recurring.none_found(again, _MARKS))
        else:
            about["steps_by"] = f"{found.way} ({found.sure})"
    tables = {
        "spans": schema.check("spans", spans),
        "traced_steps": schema.check("traced_steps", recurring.table(found)),
    }
    return Reading(tables, about, (*warnings, *(f"{name}: {line}" for line in (*more, _NO_BASE))))
