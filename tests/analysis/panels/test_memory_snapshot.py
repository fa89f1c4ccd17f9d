"""The pictures of a snapshot: memory by line over time, and the lines at the peak."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dlprof.analysis.panels.memory import MEMORY_SNAPSHOT_PICTURE
from dlprof.report.figures import shapes
from tests.fixtures import dumps, traces
from tests.fixtures.dumps import MB, write
from tests.fixtures.runs import called


def drawn(path: Path, held: Any) -> Any:
    return called(write(path / "s.pickle", held), MEMORY_SNAPSHOT_PICTURE.draw)


def test_areas_by_line_and_a_table_of_the_peak(tmp_path: Path) -> None:
    areas, table = drawn(tmp_path, dumps.training().snapshot())
    assert areas.columns == (
        "since the first event_ns",
        *("forward (model.py:10)", "backward of MulBackward0", "step (optimizer.py:7)"),
    )
    assert max(sum(row[1:]) for row in areas.rows) == 24 * MB
    assert areas.rows[0][0] == 0
    ((at, label, _),) = areas.marks
    # The second step's last allocation is the 12th of the events, 0.1 ms each, from the first on.
    assert (at, label) == (11 * 100_000, "peak")
    assert table.rows[0][2] == 18 * MB
    spec = shapes.panel(areas).spec
    assert spec is not None
    assert [trace["name"] for trace in spec["data"][:1]] == ["forward (model.py:10)"]


def test_where_memory_ran_out_is_marked(tmp_path: Path) -> None:
    areas, _ = drawn(tmp_path, dumps.ran_out(pieces=False).snapshot())
    assert [mark[1] for mark in areas.marks] == ["out of memory", "peak"]


def test_without_times_events_are_counted_and_without_events_there_is_the_table_alone(tmp_path: Path) -> None:
    areas, _ = drawn(tmp_path, dumps.training(timed=False).snapshot())
    assert (areas.columns[0], areas.marks) == ("events of the allocator", ())
    held = {**dumps.training().snapshot(), "device_traces": []}
    (table,) = drawn(tmp_path, held)
    assert table.shape == "table"


def test_a_snapshot_beside_a_trace_joins_its_rank(tmp_path: Path) -> None:
    for rank in range(2):
        traces.write(tmp_path / f"rank{rank}.json", traces.training(rank=rank))
    write(tmp_path / "rank1_snapshot", dumps.training().snapshot())
    panels = called(tmp_path, MEMORY_SNAPSHOT_PICTURE.draw)
    assert [panel.title.endswith("rank 1, GPU 0") for panel in panels] == [True, True]
