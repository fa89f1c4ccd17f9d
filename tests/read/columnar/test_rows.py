"""Columns of rows become the table of spans: in order, on lanes by device, without what has no usable time."""

from __future__ import annotations

import numpy as np

from dlprof.read.columnar.database import MISSING
from dlprof.read.columnar.rows import Ranges, Rows, annotation_rows, numbered, spans_of


def column(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(values, dtype=np.int64)


def kernels(device: int, *times: tuple[int, int]) -> Rows:
    """Return kernels on stream 7 of a device, by start and end."""
    count = len(times)
    return Rows(
        ["gemm"],
        ["kernel"],
        column(*[0] * count),
        column(*(start for start, _ in times)),
        column(*(end for _, end in times)),
        column(*[device] * count),
        column(*[7] * count),
        column(*range(1, count + 1)),
    )


def test_spans_are_in_order_the_longer_first_and_on_their_devices_lanes() -> None:
    ranges = Ranges(["step 1", "aten::mm"], [False, True], column(0, 1), column(5, 5), column(90, 20), column(3, 3))
    spans, lost = spans_of(
        [kernels(1, (40, 50), (10, 20)), kernels(0, (10, 12)), annotation_rows(ranges)], main=1, base=100
    )
    assert lost == 0
    told = spans.astype({"lane": str, "kind": str, "name": str})[
        ["lane", "kind", "name", "start_ns", "dur_ns", "launch"]
    ]
    assert told.to_numpy().tolist() == [
        ["host:3", "annotation", "step 1", 105, 85, -1],
        ["host:3", "op", "aten::mm", 105, 15, -1],
        ["device:7", "kernel", "gemm", 110, 10, 2],
        ["device0:7", "kernel", "gemm", 110, 2, 1],
        ["device:7", "kernel", "gemm", 140, 10, 1],
    ]


def test_rows_without_a_usable_time_are_counted() -> None:
    spans, lost = spans_of([kernels(0, (MISSING, 5), (9, 3), (2**62, 2**62 + 1), (1, 2))], main=0)
    assert (len(spans), lost) == (1, 3)
    nothing, lost = spans_of([kernels(0, (9, 3))], main=0)
    assert (len(nothing), lost) == (0, 1)


def test_texts_are_told_apart_by_what_they_say() -> None:
    names, of = numbered(column(8, 2, 8, 5, 9), {2: "a", 8: "b", 9: "a"}, "unknown")
    assert [names[i] for i in of.tolist()] == ["b", "a", "b", "unknown", "a"]
    assert len(names) == 3
    assert numbered(column(), {}, "unknown")[0] == []
