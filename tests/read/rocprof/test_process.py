"""A process of rocprofv3: its device is the one with most kernels, and without marks a warning says what recurs."""

from __future__ import annotations

import numpy as np
import pytest

from dlprof.read.columnar.rows import Rows
from dlprof.read.rocprof import process


def rows(names: list[str], kind: str, *of: tuple[int, int, int]) -> Rows:
    """Return rows by place of the name, start in µs and device, each 1 µs long."""
    name, start, device = (
        (np.array(column, dtype=np.int64) for column in zip(*of, strict=True)) if of else [np.empty(0, np.int64)] * 3
    )
    nothing = np.full(len(name), -1, dtype=np.int64)
    kinds = process.kinds_of(names) if kind == "kernel" else [kind] * len(names)
    made = Rows(names, kinds, name, start * 1000, start * 1000 + 1000, device, np.zeros_like(name), nothing, nothing)
    if kind == "copy":
        made.directions.extend(map(process.direction, names))
    return made


def none() -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.empty(0, dtype=np.int64)


def test_the_device_with_most_kernels_and_steps_by_the_optimizer() -> None:
    names = ["gemm", "ncclDevKernel_Generic", "multi_tensor_apply_kernel"]
    ran = (
        [(0, 10 * n, 4) for n in range(4)]
        + [(1, 10 * n + 3, 4) for n in range(4)]
        + [(2, 10 * n + 6, 4) for n in range(4)]
    )
    kernels = rows(names, "kernel", *ran, (0, 5, 9))
    copies = rows(["MEMORY_COPY_DEVICE_TO_HOST"], "copy", (0, 8, 4))
    named = process.ranges_of([], none(), none(), none(), none())
    made = process.reading("x", kernels, copies, rows([], "runtime"), named, ["before"], {"host": "h"})
    spans = made.tables["spans"].astype({"lane": str, "kind": str, "copy": str})
    assert spans.groupby(["lane", "kind"]).size().to_dict() == {
        ("device9:0", "kernel"): 1,
        ("device:0", "communication"): 4,
        ("device:0", "copy"): 1,
        ("device:0", "kernel"): 8,
    }
    assert set(spans["copy"]) == {"", "DtoH"}
    assert made.warnings[0] == "before"
    assert made.facts["host"] == "h"


def test_without_marks_what_recurs_is_told() -> None:
    kernels = rows(["a", "b"], "kernel", *((n % 2, 5 * n, 0) for n in range(12)))
    named = process.ranges_of([], none(), none(), none(), none())
    made = process.reading("x", kernels, rows([], "copy"), rows([], "runtime"), named, (), {})
    assert made.tables["traced_steps"].empty
    assert any("a loop of 2 kernels recurs" in line and "--marker-trace" in line for line in made.warnings)


@pytest.mark.parametrize(
    ("name", "to"), [("MEMORY_COPY_HOST_TO_DEVICE", "HtoD"), ("DEVICE_TO_DEVICE", "DtoD"), ("unknown", "")]
)
def test_directions_of_copies(name: str, to: str) -> None:
    assert process.direction(name) == (to, "")
    assert process.to_host("MEMORY_COPY_DEVICE_TO_HOST")
    assert not process.to_host(name)
