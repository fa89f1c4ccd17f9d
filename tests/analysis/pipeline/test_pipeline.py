"""Bubbles of pipelines whose every chunk is known, their place in the step, and the formulas of the schedules."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.engine import Measured
from dlprof.analysis.pipeline.bubbles import bubbles, stage_lengths
from dlprof.analysis.pipeline.pipeline import closed_form, pipeline, pipeline_chunks
from dlprof.analysis.pipeline.schedules import Action
from dlprof.analysis.step.breakdown import breakdown, part
from dlprof.analysis.timeline.steps import step_means
from dlprof.errors import NotMeasured
from tests.fixtures import pipelines, runs, traces
from tests.fixtures.runs import MS, asked

Chunk = tuple[str, int, int, int, int]  # action, stage, micro-batch, start and length in ms from the step's begin

# 1F1B of two stages and two micro-batches, 10 ms forward and 20 ms backward.
FIRST: Sequence[Chunk] = [
    ("forward", 0, 0, 0, 10),
    ("forward", 0, 1, 10, 10),
    ("backward", 0, 0, 40, 20),
    ("backward", 0, 1, 70, 20),
]
SECOND: Sequence[Chunk] = [
    ("forward", 1, 0, 10, 10),
    ("backward", 1, 0, 20, 20),
    ("forward", 1, 1, 40, 10),
    ("backward", 1, 1, 50, 20),
]


def called(step: int, chunks: Sequence[Chunk], begin: int, end: int) -> list[dict[str, Any]]:
    """Return the lines of one schedule.step() from `begin` to `end` ms into a step of `runs.light`."""
    zero = traces.BASE_NS + step * 1_000 * MS
    busy = sum(c[4] for c in chunks) * MS
    lines = [{"step": step, "action": "schedule", "start_ns": zero + begin * MS, "dur_ns": (end - begin) * MS}]
    lines[0]["busy_ns"] = busy
    for action, stage, which, start, dur in chunks:
        at = {"start_ns": zero + start * MS, "dur_ns": dur * MS}
        lines.append({"step": step, "action": action, "stage": stage, "microbatch": which, **at})
    return lines


def facts(stages: list[int], ranks: list[int], schedule: str = "Schedule1F1B", microbatches: int = 2) -> dict[str, Any]:
    told = {"schedule": schedule, "microbatches": microbatches, "stages": stages, "num_stages": len(ranks)}
    return {**runs.CPU, "pipeline": {**told, "ranks": ranks}}


def recorded(folder: Path, traced: Any = None) -> Path:
    """Record 30 steps of 100 ms on two ranks; the second's own calls begin early or end early."""
    steps = [runs.light(n, 100 * MS) for n in range(30)]
    if traced is not None:
        steps[10] |= {"profiled": 1}
    told = [facts([r], [0, 1]) for r in (0, 1)]
    path = runs.recorded(folder / "run", (traced, steps, told[0]), (None, steps, told[1]))
    for rank, (chunks, begin, end) in enumerate([(FIRST, 0, 90), (SECOND, 5, 71)]):
        lines = [line for n in range(30) for line in called(n, chunks, begin, end)]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (path / f"ranks/{rank:05d}/chunks.jsonl").write_text(text)
    return path


def two_ranks(folder: Path, first: Sequence[Chunk], second: Sequence[Chunk], end: int) -> Path:
    """Record 30 steps of two ranks with these chunks, in calls of `end` ms."""
    steps = [runs.light(n, 200 * MS) for n in range(30)]
    path = runs.recorded(folder / "run", *((None, steps, facts([r], [0, 1])) for r in (0, 1)))
    for rank, chunks in enumerate([first, second]):
        lines = [line for n in range(30) for line in called(n, chunks, 0, end)]
        (path / f"ranks/{rank:05d}/chunks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def measure(path: Path) -> Measured:
    return runs.measured(path, breakdown, bubbles, pipeline, pipeline_chunks, stage_lengths, step_means)


def test_the_step_is_that_of_the_first_stage(tmp_path: Path) -> None:
    run = measure(recorded(tmp_path))
    frame = run.frame(bubbles)
    assert frame["step_ns"].to_list() == [90 * MS, 90 * MS]
    assert frame["bubble"].to_list() == pytest.approx([1 / 3, 1 / 3])
    for column in ("closed", "simulated", "scheduled"):
        assert frame[column].to_list() == pytest.approx([1 / 3, 1 / 3]), column
    assert frame["schedule_ns"].to_list() == pytest.approx([30 * MS, 30 * MS])
    assert frame[["imbalance_ns", "launch_ns", "communication_ns"]].to_numpy() == pytest.approx(0)
    chunks = run.frame(pipeline_chunks)
    assert chunks.groupby(["rank", "step"]).size().unique().tolist() == [5]
    assert chunks["step"].nunique() >= 20


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
    run = measure(two_ranks(tmp_path, first, second, end=180))
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
    assert stages["slowdown"].to_list() == pytest.approx([150 / 135] * 2)
    assert stages["gain_ns"].to_list() == pytest.approx([15 * MS] * 2)
    # With the second stage alone at the mean: 10, twice 45, 20.
    assert stages["explained"].to_list() == pytest.approx([(150 - 120) / 15] * 2)


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
    run = measure(two_ranks(tmp_path, first, second, end=104))
    frame = run.frame(bubbles)
    idle = frame["step_ns"] - frame["busy_ns"]
    parts = frame[["schedule_ns", "imbalance_ns", "launch_ns", "communication_ns"]]
    assert parts.sum(axis=1).to_list() == pytest.approx(idle.to_list())
    # Six actions follow each other, each launched for 1 ms, and 2 ms before the first.
    assert frame["launch_ns"].to_list() == pytest.approx([8 * MS] * 2)
    assert frame["communication_ns"].to_list() == pytest.approx([6 * MS] * 2)
    assert frame["imbalance_ns"].to_list() == pytest.approx([0, 0])


def test_a_loss_belongs_to_its_forward_and_calls_within_a_step_are_told_apart(tmp_path: Path) -> None:
    # The last stage computes a loss of 5 ms; every step has two calls, one after the other.
    second = [("forward", 1, 0, 10, 5), ("loss", 1, 0, 15, 5), *SECOND[1:]]
    steps = [runs.light(n, 200 * MS) for n in range(30)]
    path = runs.recorded(tmp_path / "run", *((None, steps, facts([r], [0, 1])) for r in (0, 1)))
    for rank, chunks in enumerate([FIRST, second]):
        lines = [
            line
            for n in range(30)
            for at in (0, 100)
            for line in called(n, [(a, s, m, at + t, d) for a, s, m, t, d in chunks], at, at + 90)
        ]
        (path / f"ranks/{rank:05d}/chunks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = measure(path)
    frame = run.frame(bubbles)
    assert frame["calls_a_step"].to_list() == [2, 2]
    assert frame["step_ns"].to_list() == [90 * MS, 90 * MS]
    assert frame["busy_ns"].to_list() == [60 * MS, 60 * MS]
    assert run.frame(stage_lengths)["forward_ns"].to_list() == [10 * MS, 10 * MS]
    assert sorted(run.frame(pipeline_chunks)["call"].unique()) == [0, 1]


def test_steps_that_did_something_else_are_left_out(tmp_path: Path) -> None:
    path = recorded(tmp_path)
    for rank in (0, 1):
        log = path / f"ranks/{rank:05d}/chunks.jsonl"
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        # In step 20 the second micro-batch never came, on either rank.
        kept = [c for c in lines if (c["step"], c.get("microbatch")) != (20, 1)]
        log.write_text("".join(json.dumps(line) + "\n" for line in kept))
    assert measure(path).frame(bubbles)["simulated"].to_list() == pytest.approx([1 / 3, 1 / 3])


def test_ranks_choose_the_same_steps_however_many_there_are(tmp_path: Path) -> None:
    steps = [runs.light(n, 100 * MS) for n in range(500)]
    told = [facts([r], [0, 1]) for r in (0, 1)]
    path = runs.recorded(tmp_path / "run", *((None, steps[r:], told[r]) for r in (0, 1)))
    for rank, chunks in enumerate([FIRST, SECOND]):
        lines = [line for n in range(500) for line in called(n, chunks, 0, 90)]
        (path / f"ranks/{rank:05d}/chunks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    chunks_of = measure(path).frame(pipeline_chunks).groupby("rank")["step"].unique()
    assert 15 <= len(chunks_of[0]) <= 40
    assert set(chunks_of[0]) == set(chunks_of[1])


def test_without_one_of_its_ranks_a_pipeline_is_not_simulated(tmp_path: Path) -> None:
    steps = [runs.light(n, 100 * MS) for n in range(30)]
    path = runs.recorded(tmp_path / "run", (None, steps, facts([0], [0, 1])))
    lines = [line for n in range(30) for line in called(n, FIRST, 0, 90)]
    (path / "ranks/00000/chunks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = measure(path)
    assert run.frame(bubbles)[["simulated", "schedule_ns", "communication_ns"]].isna().all(axis=None)
    assert run.frame(bubbles)["bubble"].to_list() == pytest.approx([1 / 3])
    with pytest.raises(NotMeasured, match="those of rank 1 are not here"):
        run.frame(stage_lengths)


def test_on_the_cpu_the_bubble_is_taken_from_every_step(tmp_path: Path) -> None:
    run = measure(recorded(tmp_path))
    assert asked(run, part, "pipeline_bubble") == {0: pytest.approx(30 * MS), 1: pytest.approx(6 * MS)}
    assert asked(run, part, "other") == {0: pytest.approx(70 * MS), 1: pytest.approx(94 * MS)}


def test_waiting_for_the_neighbour_is_no_communication(tmp_path: Path) -> None:
    # In the traced step, all chunks are operators; the rest of the call is two receives; 10 ms of Python follow.
    at = 10 * 1_000 * MS
    made = traces.trace(
        traces.step(10, at, 100 * MS),
        *(traces.op("aten::mm", at + c[3] * MS, c[4] * MS) for c in FIRST),
        traces.annotation("gloo:recv", at + 20 * MS, 20 * MS),
        traces.annotation("gloo:recv", at + 60 * MS, 10 * MS),
        device="",
        backend="",
        world_size=1,
    )
    run = measure(recorded(tmp_path, made))
    assert asked(run, part, "pipeline_bubble")[0] == pytest.approx(30 * MS)
    assert asked(run, part, "communication")[0] == 0
    assert asked(run, part, "computation")[0] == pytest.approx(60 * MS)
    assert asked(run, part, "host")[0] == pytest.approx(10 * MS)
    assert run.frame(breakdown).groupby("rank")["ns"].sum()[0] == pytest.approx(100 * MS)


def test_on_a_gpu_sending_and_receiving_are_the_bubble_and_other_collectives_are_not(tmp_path: Path) -> None:
    made = traces.trace(
        traces.step(10, 0, 100 * MS),
        traces.launched("gemm", 0, 1 * MS, 60 * MS, 1),
        traces.collective(61 * MS, 20 * MS, 1000, name="recv", kernel_name="ncclDevKernel_SendRecv(x)"),
        traces.collective(81 * MS, 9 * MS, 1000),
        world_size=2,
    )
    steps = [runs.light(n, 100 * MS) for n in range(30)]
    told = {**facts([0], [0, 1]), "device": {"type": "cuda"}}
    path = runs.recorded(tmp_path / "run", (made, steps, told))
    lines = [line for n in range(30) for line in called(n, FIRST, 0, 90)]
    (path / "ranks/00000/chunks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = measure(path)
    assert asked(run, part, "pipeline_bubble")[0] == pytest.approx(20 * MS)
    assert asked(run, part, "communication")[0] == pytest.approx(9 * MS)
    assert asked(run, part, "computation")[0] == pytest.approx(60 * MS)


def test_without_a_pipeline_it_abstains(tmp_path: Path) -> None:
    steps = [runs.light(n, 100 * MS) for n in range(30)]
    path = runs.recorded(tmp_path / "run", (None, steps, runs.CPU))
    with pytest.raises(NotMeasured, match="no pipeline stages were recorded"):
        measure(path).frame(bubbles)


def test_two_pipelines_side_by_side_have_a_step_each(tmp_path: Path) -> None:
    steps = [runs.light(n, 100 * MS) for n in range(30)]
    told = [facts([0], [0, 2]), facts([0], [1, 3]), facts([1], [0, 2]), facts([1], [1, 3])]
    path = runs.recorded(tmp_path / "run", *((None, steps, t) for t in told))
    ends = [90, 60, 71, 71]
    for rank, end in enumerate(ends):
        lines = [line for n in range(30) for line in called(n, [("forward", rank // 2, 0, 0, 30)], 0, end)]
        (path / f"ranks/{rank:05d}/chunks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    frame = measure(path).frame(bubbles).set_index("rank")
    assert frame["step_ns"].to_dict() == {0: 90 * MS, 1: 60 * MS, 2: 90 * MS, 3: 60 * MS}
    assert frame["bubble"][3] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("schedule", "chunks", "bubble"),
    [
        ("ScheduleGPipe", 1, 3 / 11),
        ("Schedule1F1B", 1, 3 / 11),
        ("ScheduleInterleaved1F1B", 2, 3 / 19),
        ("ScheduleLoopedBFS", 2, 3 / 19),
    ],
)
def test_closed_forms_of_four_ranks_and_eight_microbatches(schedule: str, chunks: int, bubble: float) -> None:
    assert closed_form(schedule, 4, 8, chunks) == pytest.approx(bubble)


def test_a_schedule_of_the_users_own_has_no_closed_form() -> None:
    assert math.isnan(closed_form("MySchedule", 4, 8, 1))


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
    # Without handing over more would be saved.
    assert stages["gain_ns"][0] > 1.1 * saved
