"""Chunks by step and call, the mean call, and the bubble's place in the step."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlprof.analysis.pipeline.chunks import pipeline, pipeline_chunks
from dlprof.analysis.step.breakdown import breakdown, part
from dlprof.errors import DoesNotApply
from tests.fixtures import pipelines, runs, traces
from tests.fixtures.pipelines import FIRST
from tests.fixtures.runs import MS, asked


def test_chunks_travel_with_the_call_that_they_belong_to(tmp_path: Path) -> None:
    chunks = runs.measured(pipelines.two_stages(tmp_path), pipeline_chunks).frame(pipeline_chunks)
    assert chunks.groupby(["rank", "step"]).size().unique().tolist() == [5]
    assert chunks["step"].nunique() >= 20


def test_calls_within_a_step_are_counted(tmp_path: Path) -> None:
    calls = [([(a, s, m, at + t, d) for a, s, m, t, d in FIRST], at, at + 90) for at in (0, 100)]
    run = runs.measured(pipelines.by_hand(tmp_path, calls, step=200), pipeline, pipeline_chunks)
    (row,) = run.frame(pipeline).to_dict("records")
    assert (row["calls_a_step"], row["dur_ns"], row["busy_ns"]) == (2, 90 * MS, 60 * MS)
    assert sorted(run.frame(pipeline_chunks)["call"].unique()) == [0, 1]


def test_ranks_choose_the_same_steps_however_many_there_are(tmp_path: Path) -> None:
    path = pipelines.two_stages(tmp_path, steps=500)
    log = path / "ranks/00001/steps.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[1:]))
    frame = runs.measured(path, pipeline_chunks).frame(pipeline_chunks)
    chunks_of = frame.groupby("rank")["step"].unique()
    assert 15 <= len(chunks_of[0]) <= 40
    assert set(chunks_of[0]) == set(chunks_of[1])


def test_on_the_cpu_the_bubble_is_taken_from_every_step(tmp_path: Path) -> None:
    run = runs.measured(pipelines.two_stages(tmp_path), breakdown)
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
    run = runs.measured(pipelines.two_stages(tmp_path, traced=made), breakdown)
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
    path = pipelines.by_hand(
        tmp_path,
        [(FIRST, 0, 90)],
        traced=made,
        facts_of=lambda r: {**pipelines.facts(r), "device": {"type": "cuda"}},
    )
    run = runs.measured(path, breakdown)
    assert asked(run, part, "pipeline_bubble")[0] == pytest.approx(20 * MS)
    assert asked(run, part, "communication")[0] == pytest.approx(9 * MS)
    assert asked(run, part, "computation")[0] == pytest.approx(60 * MS)


def test_without_a_pipeline_it_abstains(tmp_path: Path) -> None:
    path = runs.recorded(tmp_path / "run", (None, [runs.light(n, 100 * MS) for n in range(30)], runs.CPU))
    with pytest.raises(DoesNotApply, match="no pipeline"):
        runs.measured(path, pipeline).frame(pipeline)
