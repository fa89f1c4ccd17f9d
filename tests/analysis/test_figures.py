"""The figures of a result that are no outcome of a rule."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlprof.analysis.engine import check_needs, measure
from dlprof.analysis.figures import FIELDS
from dlprof.read.run import open_run
from dlprof.result import Result
from tests.fixtures import traces


def test_each_makes_a_field_of_a_result_from_known_measures() -> None:
    assert set(FIELDS) <= set(Result.__struct_fields__)
    for make in FIELDS.values():
        check_needs(make)


def test_a_trace_of_some_steps(tmp_path: Path) -> None:
    path = traces.write(tmp_path / "trace.json", traces.training(5, world_size=1))
    measured = measure(open_run(path), FIELDS.values(), 1)
    window = measured.call(FIELDS["window"])
    parts = {part.category: part.ns for part in measured.call(FIELDS["time"])}
    assert window.traced_steps == 5
    assert sum(parts.values()) == pytest.approx(window.step_ns, rel=1e-3)
    assert {w.kind for w in measured.call(FIELDS["work"])} == {"operator", "kernel"}
    (span,) = measured.call(FIELDS["device"])
    assert span.computation_ns + span.exposed_communication_ns + span.exposed_copy_ns + span.idle_ns == span.span_ns
    # Of one rank, without samples or a snapshot of memory, nothing else is known.
    for name in ("scaling", "foreign_load"):
        assert measured.call(FIELDS[name]) is None
    for name in ("blame", "memory", "profiles", "gpu_logs"):
        assert measured.call(FIELDS[name]) == ()
