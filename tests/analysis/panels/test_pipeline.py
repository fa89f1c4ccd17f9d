"""What the report shows of a pipeline: bubbles whose parts add up, stages, and one step drawn."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlprof.analysis.panels import pipeline
from tests.fixtures import pipelines, runs
from tests.fixtures.pipelines import alike
from tests.fixtures.runs import MS


def test_each_rank_has_a_row_and_each_stage(tmp_path: Path) -> None:
    path = pipelines.recorded(tmp_path, "Schedule1F1B", 2, 4, alike(10, 20), hand_over=5)
    _, ranks, stages, schedules = runs.called(path, pipeline.PICTURE.draw)
    assert schedules.rows[0] == ("GPipe", pytest.approx(0.2), 1.0, 1.0, "replayed")
    assert schedules.title == "What schedules leave idle and hold, 2 ranks and 4 micro-batches"
    # Five slots of 30 ms and two hand-overs a round of two micro-batches.
    assert ranks.rows[0][:6] == pytest.approx((0, 50 * MS, 30 * MS, 0, 20 * MS, 0))
    assert ranks.rows[0][6:] == pytest.approx((5 / 17, 0.2, 0.2, 0.2))
    assert "1F1B, 4 micro-batches, 1 stage a rank, a step of 170.0 ms" in ranks.note
    assert stages.rows == (
        (0, 0, 10 * MS, 20 * MS, 1),
        (1, 1, 10 * MS, 20 * MS, 1),
    )


def test_what_was_not_replayed_is_not_told(tmp_path: Path) -> None:
    path = pipelines.recorded(tmp_path, "Schedule1F1B", 2, 4, alike(10, 20), here=[0])
    _, ranks, _ = runs.called(path, pipeline.PICTURE.draw)
    assert ranks.rows[0] == (0, pytest.approx(30 * MS), *(None,) * 4, pytest.approx(0.2), None, None, 0.2)


def test_a_step_is_drawn_with_a_lane_a_stage(tmp_path: Path) -> None:
    panel = runs.called(pipelines.two_stages(tmp_path), pipeline.PICTURE.draw)[0]
    assert panel.shape == "timeline"
    assert panel.rows[0] == ("stage 0 · rank 0", 0, 10_000_000, "0", "forward")
    assert len([row for row in panel.rows if row[4] != "pipeline_bubble"]) == 8


def test_what_a_rank_does_not_work_in_is_its_bubble(tmp_path: Path) -> None:
    path = pipelines.recorded(tmp_path, "Schedule1F1B", 2, 4, alike(10, 20), hand_over=5)
    panel = runs.called(path, pipeline.PICTURE.draw)[0]
    end = max(row[1] + row[2] for row in panel.rows)
    for lane in ("stage 0 · rank 0", "stage 1 · rank 1"):
        mine = sorted(row[1:3] for row in panel.rows if row[0] == lane)
        # They and the chunks follow each other without a hole, from the beginning to the end.
        assert [start for start, _ in mine] == [0, *(start + dur for start, dur in mine)][:-1]
        assert sum(mine[-1]) == end
        assert any(row[0] == lane and row[4] == "pipeline_bubble" for row in panel.rows)
