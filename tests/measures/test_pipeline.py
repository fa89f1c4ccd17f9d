"""Bubbles of pipelines whose every chunk is known, their place in the step, and the formulas of the schedules."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dlprof.engine import Measured
from dlprof.errors import NotMeasured
from dlprof.measures.breakdown import breakdown, part
from dlprof.measures.pipeline import (
    bubbles,
    closed_form,
    pipeline,
    pipeline_chunks,
    simulated_bubbles,
    with_twice_the_microbatches,
)
from dlprof.measures.steps import step_means
from tests import runs, traces
from tests.runs import MS

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
    """Give the lines of one schedule.step() from `begin` to `end` ms into a step of `runs.light`."""
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


def measure(path: Path) -> Measured:
    return runs.measured(path, breakdown, bubbles, pipeline, pipeline_chunks, simulated_bubbles, step_means)


def test_the_step_is_that_of_the_first_stage(tmp_path: Path) -> None:
    run = measure(recorded(tmp_path))
    frame = run.frame(bubbles)
    assert frame["step_ns"].to_list() == [90 * MS, 90 * MS]
    assert frame["bubble"].to_list() == pytest.approx([1 / 3, 1 / 3])
    assert frame["closed"].to_list() == pytest.approx([1 / 3, 1 / 3])
    assert frame["doubled"].to_list() == pytest.approx([1 / 5, 1 / 5])
    assert frame["forward_ns"].to_list() == [10 * MS, 10 * MS]
    assert frame["backward_ns"].to_list() == [20 * MS, 20 * MS]
    assert frame["loss_ns"].isna().all()
    chunks = run.frame(pipeline_chunks)
    assert chunks.groupby(["rank", "step"]).size().unique().tolist() == [4]
    assert chunks["step"].nunique() == 8


def test_stages_alike_are_simulated_as_the_schedule_has_them(tmp_path: Path) -> None:
    assert measure(recorded(tmp_path)).frame(simulated_bubbles)["simulated"].to_list() == pytest.approx([1 / 3, 1 / 3])


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
    steps = [runs.light(n, 200 * MS) for n in range(30)]
    path = runs.recorded(tmp_path / "run", *((None, steps, facts([r], [0, 1])) for r in (0, 1)))
    for rank, chunks in enumerate([first, second]):
        lines = [line for n in range(30) for line in called(n, chunks, 0, 180)]
        (path / f"ranks/{rank:05d}/chunks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = measure(path)
    # 10 forward, then twice 60 on the second stage, 20 backward: 150 ms, of which the stages work 60 and 120.
    assert run.frame(simulated_bubbles)["simulated"].to_list() == pytest.approx([0.6, 0.2])
    assert run.frame(bubbles)["bubble"].to_list() == pytest.approx([2 / 3, 1 / 3])


def test_without_one_of_its_ranks_a_pipeline_is_not_simulated(tmp_path: Path) -> None:
    steps = [runs.light(n, 100 * MS) for n in range(30)]
    path = runs.recorded(tmp_path / "run", (None, steps, facts([0], [0, 1])))
    lines = [line for n in range(30) for line in called(n, FIRST, 0, 90)]
    (path / "ranks/00000/chunks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert measure(path).frame(simulated_bubbles)["simulated"].isna().all()


def test_on_the_cpu_the_bubble_is_taken_from_every_step(tmp_path: Path) -> None:
    run = measure(recorded(tmp_path))
    assert part(run, "pipeline_bubble") == {0: pytest.approx(30 * MS), 1: pytest.approx(6 * MS)}
    assert part(run, "other") == {0: pytest.approx(70 * MS), 1: pytest.approx(94 * MS)}


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
    assert part(run, "pipeline_bubble")[0] == pytest.approx(30 * MS)
    assert part(run, "communication")[0] == 0
    assert part(run, "computation")[0] == pytest.approx(60 * MS)
    assert part(run, "host")[0] == pytest.approx(10 * MS)
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
    assert part(run, "pipeline_bubble")[0] == pytest.approx(20 * MS)
    assert part(run, "communication")[0] == pytest.approx(9 * MS)
    assert part(run, "computation")[0] == pytest.approx(60 * MS)


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
        # Forward, input and weight pass of t each, in two chunks: 24 t of work on a rank, 3 t / 2 idle.
        ("ScheduleInterleavedZeroBubble", 2, 1.5 / 25.5),
        ("ScheduleZBVZeroBubble", 2, 1.5 / 25.5),
        ("ScheduleDualPipeV", 2, 1.5 / 25.5),
    ],
)
def test_closed_forms_of_four_ranks_and_eight_microbatches(schedule: str, chunks: int, bubble: float) -> None:
    assert closed_form(schedule, 4, 8, chunks, 0.5 / 24) == pytest.approx(bubble)
    more = with_twice_the_microbatches(schedule, 4, 8, chunks, 0.5 / 24)
    assert more == pytest.approx(closed_form(schedule, 4, 16, chunks, 0.25 / 24))
    assert more < bubble


def test_a_schedule_of_the_users_own_has_no_closed_form() -> None:
    assert math.isnan(closed_form("MySchedule", 4, 8, 1, 0.1))
