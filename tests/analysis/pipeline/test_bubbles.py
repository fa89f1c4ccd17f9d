"""How long bubbles are, what they are made of, and how long the stages are."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlprof.analysis.engine import Measured
from dlprof.analysis.pipeline.bubbles import bubbles, stage_lengths
from dlprof.analysis.pipeline.schedules import Action
from dlprof.errors import NotMeasured
from tests.fixtures import pipelines, runs
from tests.fixtures.pipelines import FIRST, SECOND
from tests.fixtures.runs import MS


def measure(path: Path) -> Measured:
    return runs.measured(path, bubbles, stage_lengths)


def test_the_step_is_that_of_the_first_stage(tmp_path: Path) -> None:
    run = measure(pipelines.two_stages(tmp_path))
    frame = run.frame(bubbles)
    assert frame["step_ns"].to_list() == [90 * MS, 90 * MS]
    assert frame["bubble"].to_list() == pytest.approx([1 / 3, 1 / 3])
    for column in ("closed", "simulated", "scheduled"):
        assert frame[column].to_list() == pytest.approx([1 / 3, 1 / 3]), column
    assert frame["schedule_ns"].to_list() == pytest.approx([30 * MS, 30 * MS])
    assert frame[["imbalance_ns", "launch_ns", "communication_ns"]].to_numpy() == pytest.approx(0)


def test_unequal_stages_and_slow_hand_over_are_told_apart(tmp_path: Path) -> None:
    # The second stage takes twice as long; 30 ms of the step are lost between the stages.
    slow = [(a, s, m, start, 2 * dur) for a, s, m, start, dur in SECOND]
    first = [
        ("forward", 0, 0, 0, 10),
        ("forward", 0, 1, 10, 10),
        ("backward", 0, 0, 85, 20),
        ("backward", 0, 1, 150, 20),
    ]
    second = [(a, s, m, start, dur) for (a, s, m, _, dur), start in zip(slow, (20, 40, 90, 110), strict=True)]
    run = measure(pipelines.by_hand(tmp_path, [(first, 0, 180)], [(second, 0, 180)], step=200))
    # 10 forward, then twice 60 on the second stage, 20 backward: 150 ms, of which the stages work 60 and 120. Even
    # stages take 15 and 30: 135 ms, of which 90 are work.
    frame = run.frame(bubbles)
    assert frame["simulated"].to_list() == pytest.approx([0.6, 0.2])
    assert frame["bubble"].to_list() == pytest.approx([2 / 3, 1 / 3])
    assert frame["schedule_ns"].to_list() == pytest.approx([45 * MS, 45 * MS])
    assert frame["imbalance_ns"].to_list() == pytest.approx([45 * MS, -15 * MS])
    # The last stage goes from forward to backward at once, and the call ends 10 ms after the last chunk.
    assert frame["launch_ns"].to_list() == pytest.approx([10 * MS, 10 * MS])
    assert frame["communication_ns"].to_list() == pytest.approx([20 * MS, 20 * MS])
    stages = run.frame(stage_lengths)
    assert stages[["forward_ns", "backward_ns", "stage_ns"]].to_numpy().tolist() == [
        [10 * MS, 20 * MS, 30 * MS],
        [20 * MS, 40 * MS, 60 * MS],
    ]


def test_what_the_host_does_between_chunks_is_told_from_handing_over(tmp_path: Path) -> None:
    # Of two stages, 1 ms before every chunk that waits for nobody, and 3 ms for handing over; 2 ms before all of it.
    first = [
        ("forward", 0, 0, 2, 10),
        ("forward", 0, 1, 13, 10),
        ("backward", 0, 0, 50, 20),
        ("backward", 0, 1, 84, 20),
    ]
    second = [
        ("forward", 1, 0, 15, 10),
        ("backward", 1, 0, 26, 20),
        ("forward", 1, 1, 49, 10),
        ("backward", 1, 1, 60, 20),
    ]
    run = measure(pipelines.by_hand(tmp_path, [(first, 0, 104)], [(second, 0, 104)], step=200))
    frame = run.frame(bubbles)
    idle = frame["step_ns"] - frame["busy_ns"]
    parts = frame[["schedule_ns", "imbalance_ns", "launch_ns", "communication_ns"]]
    assert parts.sum(axis=1).to_list() == pytest.approx(idle.to_list())
    # Six actions follow each other, each launched for 1 ms, and 2 ms before the first.
    assert frame["launch_ns"].to_list() == pytest.approx([8 * MS] * 2)
    assert frame["communication_ns"].to_list() == pytest.approx([6 * MS] * 2)
    assert frame["imbalance_ns"].to_list() == pytest.approx([0, 0])


def test_without_one_of_its_ranks_a_pipeline_is_not_simulated(tmp_path: Path) -> None:
    run = measure(pipelines.by_hand(tmp_path, [(FIRST, 0, 90)]))
    assert run.frame(bubbles)[["simulated", "schedule_ns", "communication_ns"]].isna().all(axis=None)
    assert run.frame(bubbles)["bubble"].to_list() == pytest.approx([1 / 3])
    with pytest.raises(NotMeasured, match="those of rank 1 are not here"):
        run.frame(stage_lengths)


def test_two_pipelines_side_by_side_have_a_step_each(tmp_path: Path) -> None:
    calls = [[([("forward", rank // 2, 0, 0, 30)], 0, end)] for rank, end in enumerate([90, 60, 71, 71])]
    path = pipelines.by_hand(tmp_path, *calls, facts_of=lambda r: pipelines.facts(r // 2, (r % 2, r % 2 + 2)))
    frame = measure(path).frame(bubbles).set_index("rank")
    assert frame["step_ns"].to_dict() == {0: 90 * MS, 1: 60 * MS, 2: 90 * MS, 3: 60 * MS}
    assert frame["bubble"][3] == pytest.approx(0.5)


def test_even_stages_hand_over_where_the_long_one_hid_it(tmp_path: Path) -> None:
    def took(action: Action) -> int:
        return {"forward": 10, "backward": 20}[action[1]] * (2 if action[0] else 1)

    def even(action: Action) -> int:
        return {"forward": 15, "backward": 30}[action[1]]

    before = pipelines.recorded(tmp_path, "Schedule1F1B", 2, 8, took, hand_over=3)
    after = pipelines.recorded(tmp_path / "after", "Schedule1F1B", 2, 8, even, hand_over=3)
    run = runs.measured(before, bubbles, stage_lengths)
    saved = run.frame(bubbles)["step_ns"][0] - runs.measured(after, bubbles).frame(bubbles)["step_ns"][0]
    stages = run.frame(stage_lengths)
    assert stages["saved_ns"].to_list() == pytest.approx([saved] * 2, rel=0.02)
