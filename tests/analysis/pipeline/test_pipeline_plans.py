"""Plans whose outcome is known: the run that followed them, made by hand, takes what was predicted of it."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from dlprof.analysis.pipeline.pipeline_plans import pipeline_plans
from dlprof.analysis.pipeline.pipes import bubbles
from dlprof.analysis.pipeline.schedules import Action
from dlprof.analysis.timeline.steps import step_means
from dlprof.errors import NotMeasured
from tests.fixtures import pipelines, runs, traces
from tests.fixtures.pipelines import alike
from tests.fixtures.runs import MS


def plans(path: Path) -> pd.DataFrame:
    return runs.measured(path, pipeline_plans).frame(pipeline_plans).set_index("change")


def step_ms(path: Path) -> float:
    return float(runs.measured(path, bubbles, step_means).frame(bubbles)["step_ns"].iloc[0]) / MS


def test_as_it_is_takes_what_was_measured_and_changes_what_they_would(tmp_path: Path) -> None:
    # Four stages of 20 ms forward and 40 ms backward.
    made = plans(pipelines.recorded(tmp_path, "ScheduleGPipe", 4, 4, alike(20, 40)))
    ms = (made["step_ns"] / MS).to_dict()
    assert ms["as it is"] == pytest.approx(7 * 60)
    assert ms["1F1B"] == pytest.approx(7 * 60)
    assert ms["8 micro-batches"] == pytest.approx(11 * 30)
    assert ms["16 micro-batches"] == pytest.approx(19 * 15)
    assert ms["Interleaved1F1B, 2 stages a rank"] == pytest.approx(11 * 30)
    assert ms["Interleaved1F1B, 4 stages a rank"] == pytest.approx(19 * 15)
    assert ms["even stages"] == pytest.approx(7 * 60)
    # 240 ms of work, and three forwards of 10 ms, as the halves of the backward take as long.
    assert ms["InterleavedZeroBubble, 2 stages a rank"] == pytest.approx(270)
    assert "DualPipeV, 2 stages a rank" not in ms  # needs eight micro-batches
    assert made["bubble"]["as it is"] == pytest.approx(3 / 7)
    assert made["bubble"]["8 micro-batches"] == pytest.approx(3 / 11)
    assert set(made.index[made["easy"]]) == {"8 micro-batches", "16 micro-batches", "1F1B"}
    assert (made["gain_ns"] / MS + made["step_ns"] / MS).to_list() == pytest.approx([420] * len(made))


@pytest.mark.parametrize(
    ("schedule", "chunks", "change", "other", "microbatches", "cut"),
    [
        ("ScheduleGPipe", 1, "1F1B", "Schedule1F1B", 8, 1),
        ("Schedule1F1B", 1, "16 micro-batches", "Schedule1F1B", 16, 1),
        ("Schedule1F1B", 1, "LoopedBFS, 2 stages a rank", "ScheduleLoopedBFS", 8, 2),
        ("Schedule1F1B", 1, "ZBVZeroBubble, 2 stages a rank", "ScheduleZBVZeroBubble", 8, 2),
        ("ScheduleInterleaved1F1B", 2, "InterleavedZeroBubble", "ScheduleInterleavedZeroBubble", 8, 2),
        ("ScheduleInterleaved1F1B", 2, "Interleaved1F1B, 4 stages a rank", "ScheduleInterleaved1F1B", 8, 4),
        ("ScheduleInterleaved1F1B", 2, "GPipe, 1 stage a rank", "ScheduleGPipe", 8, 1),
        ("ScheduleZBVZeroBubble", 2, "16 micro-batches", "ScheduleZBVZeroBubble", 16, 2),
        ("ScheduleLoopedBFS", 2, "ZBVZeroBubble, 2 stages a rank", "ScheduleZBVZeroBubble", 8, 2),
    ],
)
def test_who_follows_a_plan_gets_what_it_says(
    tmp_path: Path, schedule: str, chunks: int, change: str, other: str, microbatches: int, cut: int
) -> None:
    # The work of four stages of one rank each, the last of them longer, in ms for the whole batch.
    work = {0: 640, 1: 640, 2: 640, 3: 1280}

    def took(count: int, of: int) -> object:
        def one(action: Action) -> int:
            forward = work[action[0] // count] // count // of
            return {"forward": forward, "backward": 2 * forward}.get(action[1], forward)

        return one

    before = pipelines.recorded(tmp_path, schedule, 4, 8, took(chunks, 8), chunks=chunks)  # type: ignore[arg-type]
    predicted = plans(before)["step_ns"][change] / MS
    after = pipelines.recorded(tmp_path / "after", other, 4, microbatches, took(cut, microbatches), chunks=cut)  # type: ignore[arg-type]
    assert predicted == pytest.approx(step_ms(after), rel=1e-3)


def test_handing_over_costs_more_micro_batches_more(tmp_path: Path) -> None:
    # Two stages: 1F1B hands over four times in a row with two micro-batches, and eight times with eight.
    path = pipelines.recorded(tmp_path, "Schedule1F1B", 2, 2, alike(20, 40), hand_over=6)
    now = plans(path)["step_ns"] / MS
    assert now["as it is"] == pytest.approx(180 + 12)
    after = pipelines.recorded(tmp_path / "after", "Schedule1F1B", 2, 8, alike(5, 10), hand_over=6)
    assert now["8 micro-batches"] == pytest.approx(step_ms(after), rel=1e-3)
    assert now["8 micro-batches"] > 9 * 15 + 12


def test_a_batch_that_cannot_be_cut_so_often_is_not(tmp_path: Path) -> None:
    loader = {"role": "train", "batch_size": 8}
    made = plans(pipelines.recorded(tmp_path, "Schedule1F1B", 2, 4, alike(20, 40), loaders=[loader]))
    assert "8 micro-batches" in made.index
    assert "16 micro-batches" not in made.index


def test_a_schedule_of_the_users_own_has_no_plans(tmp_path: Path) -> None:
    path = pipelines.recorded(tmp_path, "Schedule1F1B", 2, 4, alike(20, 40), name="MySchedule")
    with pytest.raises(NotMeasured, match="what MySchedule does is not known here"):
        plans(path)


def test_the_python_of_a_chunk_is_paid_for_each_micro_batch(tmp_path: Path) -> None:
    # Of 30 ms of two chunks a micro-batch 8 ms are Python: half the size takes 11 + 8 ms, and not 15.
    path = pipelines.recorded(tmp_path, "Schedule1F1B", 2, 2, alike(10, 20))
    without = plans(path)["step_ns"]["4 micro-batches"] / MS
    for rank in range(2):
        at = path / f"ranks/{rank:05d}"
        chunks = [json.loads(line) for line in (at / "chunks.jsonl").read_text().splitlines()]
        events = [traces.step(n, n * 10_000 * MS, 90 * MS) for n in range(3)]
        events += [
            traces.op("aten::mm", c["start_ns"] - traces.BASE_NS + 4 * MS, c["dur_ns"] - 4 * MS)
            for c in chunks
            if c["action"] != "schedule" and c["step"] < 3
        ]
        made = traces.trace(*events, rank=rank, device="", backend="gloo")
        traces.write(at / "trace.json.gz", made)
    now = plans(path)["step_ns"] / MS
    assert now["as it is"] == pytest.approx(90)
    assert without == pytest.approx(5 * 15)
    assert now["4 micro-batches"] == pytest.approx(5 * 19, rel=0.01)
    # Half a stage has half of the operators, and of their Python.
    assert now["Interleaved1F1B, 2 stages a rank"] == pytest.approx(75, rel=0.01)
