"""The picture of the steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dlprof.analysis.diagnosis import diagnose
from dlprof.analysis.panels.step import MOST_POINTS, STEPS_PICTURE
from dlprof.read.run import open_run
from dlprof.result import Panel
from tests.fixtures import runs, traces
from tests.fixtures.runs import A100, MS


def test_the_picture_of_the_steps_tells_the_counted_step_from_the_window(tmp_path: Path) -> None:
    slowed = {9, 20, 21, 22}
    steps = [runs.light(n, 10 * MS, profiled=int(n in slowed)) for n in range(30)]
    path = runs.recorded(tmp_path / "run", (None, steps, {"device": A100}))
    (panel,) = [p for p in diagnose(open_run(path), (), jobs=1).panels if p.title == "Steps over the run"]
    assert panel.note.startswith("Steps 9 and 20 to 22: ")


def drawn(
    folder: Path, *ranks: list[dict[str, Any]], stalls: list[dict[str, Any]] | None = None, **info: Any
) -> dict[str, Panel]:
    made_by = ((None, steps, {"device": A100}) for steps in ranks)
    runs.recorded(folder, *made_by, stalls=[stalls] if stalls else None, **info)
    made = runs.measured(folder, STEPS_PICTURE.draw)
    return {panel.title: panel for panel in made.call(STEPS_PICTURE.draw)}


def test_steps_stand_where_they_were_and_what_held_them_up_is_marked(tmp_path: Path) -> None:
    steps = [
        runs.light(n, 10 * MS, kind="validation" if n in (20, 21) else "train", first=int(n == 10)) for n in range(30)
    ]
    stalls = [runs.stall("checkpoint", 15, 8 * MS), runs.stall("garbage_collection", 16, MS // 10)]
    resumed = [traces.BASE_NS + n * 1_000 * MS + 400 * MS for n in (-3, 25, 50)]
    panel = drawn(tmp_path, steps, stalls=stalls, resumed_ns=resumed)["Steps over the run"]
    assert panel.columns == ("time_ns", "rank 0")
    assert panel.rows[3] == (3_000 * MS, 10 * MS)
    assert panel.steps == tuple(n for n in range(30) if n not in (20, 21, 25))
    assert panel.marks == (
        (10_000 * MS, "step 10: an epoch begins or ends", "epoch"),
        (15_000 * MS, "step 15: checkpoint, 8.00 ms", "checkpoint"),
        (20_000 * MS, "step 20: validation, 2 steps, 20.0 ms", "validation"),
        (25_400 * MS, "the job went on after it was stopped", "suspended"),
    )


def test_the_parts_of_the_steps_add_up_to_them_on_the_mean_rank(tmp_path: Path) -> None:
    def steps(fetch: int) -> list[dict[str, Any]]:
        parts = {"fetch_ns": fetch, "forward_ns": 2 * MS, "backward_ns": 3 * MS, "optimizer_ns": MS}
        return [runs.light(n, 10 * MS, **parts) for n in range(MOST_POINTS * 2)]

    panel = drawn(tmp_path, steps(MS), steps(3 * MS))["What the training thread did in its steps"]
    assert panel.shape == "areas"
    assert panel.columns == ("time_ns", "input_wait", "forward", "backward", "optimizer_host", "other")
    assert len(panel.rows) == MOST_POINTS
    assert panel.rows[1] == (2_000 * MS, 2 * MS, 2 * MS, 3 * MS, MS, 2 * MS)
    assert "of 2 steps a point" in panel.note


def test_a_trace_alone_has_steps_by_number(tmp_path: Path) -> None:
    made = runs.measured(runs.foreign(tmp_path, traces.training(world_size=1)), STEPS_PICTURE.draw)
    (panel,) = made.call(STEPS_PICTURE.draw)
    assert panel.columns == ("step", "rank 0")
