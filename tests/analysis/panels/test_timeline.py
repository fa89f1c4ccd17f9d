"""One traced step: on one clock where the ranks share one, from each one's beginning where not, and never too many."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.panel import MOST_RANKS
from dlprof.analysis.panels.step import TIMELINE_PICTURE
from dlprof.errors import NotMeasured
from dlprof.result import Panel
from tests.fixtures import runs, traces

US = 1_000


def draw(folder: Path, *made: dict[str, Any]) -> Panel:
    (panel,) = runs.called(runs.foreign(folder, *made), TIMELINE_PICTURE.draw)
    return panel


def at(panel: Panel, lane: str, name: str) -> tuple[int, int]:
    """Return when a piece begins and how long it is, ns."""
    ((start, dur),) = [(row[1], row[2]) for row in panel.rows if row[0] == lane and row[3] == name]
    return start, dur


def test_the_middle_step_stands_where_it_ran(tmp_path: Path) -> None:
    panel = draw(tmp_path, traces.training(world_size=1))
    assert (panel.shape, panel.unit, panel.title) == ("timeline", "ns", "One traced step (step 1)")
    assert at(panel, "rank 0 · thread", "fetch") == (5 * US, 100 * US)
    assert at(panel, "rank 0 · computation 7", "sm90_gemm and 1 more") == (
        180 * US,
        500 * US,
    )  # the two kernels follow each other
    assert {row[4] for row in panel.rows if row[0].endswith("computation 7")} == {"computation", "copy"}
    assert {row[4] for row in panel.rows if row[0].endswith("communication 21")} == {"communication"}


def test_ranks_of_one_clock_are_drawn_on_it(tmp_path: Path) -> None:
    later = traces.training(rank=1, base_ns=traces.BASE_NS + 300 * US)
    panel = draw(tmp_path, traces.training(rank=0), later)
    assert at(panel, "rank 0 · thread", "fetch")[0] == 5 * US
    assert at(panel, "rank 1 · thread", "fetch")[0] == 305 * US
    assert panel.note == ""


def test_ranks_whose_clocks_differ_are_drawn_each_from_its_beginning(tmp_path: Path) -> None:
    def job(rank: int, base_ns: int) -> dict[str, Any]:
        events = (traces.step(0, 0, 1_000 * US), traces.fetch(5 * US, 100 * US), traces.kernel("gemm", 0, 500 * US))
        return traces.trace(*events, rank=rank, world_size=2, base_ns=base_ns, host=f"node-{rank}")

    panel = draw(tmp_path, job(0, traces.BASE_NS), job(1, traces.BASE_NS + 50_000 * US))
    assert at(panel, "rank 0 · thread", "fetch")[0] == at(panel, "rank 1 · thread", "fetch")[0] == 5 * US
    assert "their clocks differ" in panel.note


def test_clocks_that_collectives_bring_together_are_one(tmp_path: Path) -> None:
    elsewhere = traces.training(rank=1, base_ns=traces.BASE_NS + 50_000 * US, host="node-2")
    panel = draw(tmp_path, traces.training(rank=0), elsewhere)
    assert at(panel, "rank 0 · thread", "fetch")[0] == at(panel, "rank 1 · thread", "fetch")[0] == 5 * US
    assert panel.note == ""


def test_arrows_lead_from_the_last_to_come_to_those_that_waited(tmp_path: Path) -> None:
    def job(rank: int, late: int) -> dict[str, Any]:
        collective = traces.collective(300 * US + late, 400 * US - late, 1_000, ranks=(0, 1, 2), correlation=2)
        events = (traces.step(0, 0, 1_000 * US), traces.op("aten::mm", 10 * US, 100 * US))
        launched = traces.launched("gemm", 20 * US, 50 * US, 150 * US, 1)
        return traces.trace(*events, *launched, collective, rank=rank, world_size=3, host="node-1")

    panel = draw(tmp_path, job(0, 0), job(1, 250 * US), job(2, 240 * US))
    # Rank 2 waits 10 µs, a hundredth of the step: not worth an arrow.
    ((at, origin, goal, label),) = panel.arrows
    assert (at, label) == (550 * US, "rank 0 had waited 250.0 µs for rank 1")
    assert origin.startswith("rank 1 · communication")
    assert goal.startswith("rank 0 · communication")
    assert "Arrows lead" in panel.note
    waiting = [(row[0].split(" · ")[0], row[1], row[2], row[3]) for row in panel.rows if row[4] == "waiting"]
    assert waiting == [
        ("rank 0", 300 * US, 250 * US, "waits for rank 1"),
        ("rank 2", 540 * US, 10 * US, "waits for rank 1"),
    ]


def test_of_many_ranks_the_first_are_drawn_and_those_that_others_wait_for(tmp_path: Path) -> None:
    world, late = MOST_RANKS + 3, MOST_RANKS + 1
    made = [traces.training(rank=r, world_size=world) for r in range(world)]
    for event in made[late]["traceEvents"]:
        if "nccl" in event["name"]:
            event["dur"] /= 10
    panel = draw(tmp_path, *made)
    drawn = {row[0].split(" · ")[0] for row in panel.rows}
    assert len(drawn) == MOST_RANKS
    assert {"rank 0", "rank 1", "rank 2", f"rank {late}"} <= drawn
    assert panel.note.startswith(f"{MOST_RANKS} of {world} ranks: ")


def test_the_slowest_step_is_the_one_that_most_ranks_say(tmp_path: Path) -> None:
    def job(rank: int, slow: int) -> dict[str, Any]:
        starts = [n * 2_000 * US for n in range(4)]
        steps = [traces.step(n, at, (1_500 if n == slow else 1_000) * US) for n, at in enumerate(starts)]
        return traces.trace(*steps, *(traces.kernel("gemm", at + US, 500 * US) for at in starts), rank=rank)

    made = [job(rank, slow) for rank, slow in ((0, 3), (1, 3), (2, 1))]
    panels = runs.called(runs.foreign(tmp_path, *made), TIMELINE_PICTURE.draw)
    assert [p.title for p in panels] == ["One traced step (step 2)", "The slowest traced step (step 3)"]
    assert {row[0].split(" · ")[0] for row in panels[1].rows} == {"rank 0", "rank 1"}


def test_a_slowest_step_like_the_others_is_not_drawn_and_one_that_is_not_with_all_ranks(tmp_path: Path) -> None:
    def job(rank: int, longest: int) -> dict[str, Any]:
        starts = [n * 2_000 * US for n in range(4)]
        steps = [traces.step(n, at, (longest if n == 3 else 1_000) * US) for n, at in enumerate(starts)]
        return traces.trace(*steps, *(traces.kernel("gemm", at + US, 500 * US) for at in starts), rank=rank)

    for folder, longest, drawn in (("alike", (1_050, 1_040), [2]), ("slow", (1_500, 1_040), [2, 2])):
        made = [job(rank, us) for rank, us in enumerate(longest)]
        panels = runs.called(runs.foreign(tmp_path / folder, *made), TIMELINE_PICTURE.draw)
        assert [len({row[0] for row in p.rows if "computation" in row[0]}) for p in panels] == drawn


def test_a_trace_without_steps_has_no_picture(tmp_path: Path) -> None:
    with pytest.raises(NotMeasured):
        draw(tmp_path, traces.trace(traces.kernel("gemm", 0, 1_000 * US), world_size=1))
