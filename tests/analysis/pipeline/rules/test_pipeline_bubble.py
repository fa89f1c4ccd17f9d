"""Bubbles of pipelines: found with what more micro-batches give, silent where there are enough, else abstaining."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dlprof.analysis.pipeline.rules.pipeline_bubble import RULE
from dlprof.result import Setting
from tests.fixtures import pipelines, runs
from tests.fixtures.asking import ask
from tests.fixtures.pipelines import alike
from tests.fixtures.runs import MS


def test_as_few_microbatches_as_ranks_are_found(tmp_path: Path) -> None:
    # Four ranks, four micro-batches of 60 ms: 7 of them take 420 ms; 16 of a quarter, 19 of 15 ms.
    found = ask(RULE, pipelines.recorded(tmp_path, "Schedule1F1B", 4, 4, alike(20, 40), step=450))
    assert found.state == "found"
    assert found.saving_ns == pytest.approx((420 - 19 * 15) * MS)
    assert found.verdict == "30 % of each step is a bubble that 16 micro-batches would fill."
    assert found.summary.startswith(
        "43 % of a pipeline's step of 420.0 ms is idle on its 4 ranks (1F1B, 4 micro-batches)"
    )
    assert "43 % by the schedule, 0 % by uneven" in found.summary
    assert found.ranks == (0, 1, 2, 3)
    assert found.changes[0].settings == (Setting("microbatches", 4, 16),)
    assert found.advice[0].startswith("`n_microbatches=16` (is 4)")
    assert found.changes[1].settings == (Setting("schedule", "Schedule1F1B", "ScheduleInterleavedZeroBubble"),)
    assert "`ScheduleInterleavedZeroBubble` with 2 stages a rank (is `Schedule1F1B`)" in found.advice[1]
    assert found.evidence is not None
    rows = {row[0]: row for row in found.evidence.rows}
    assert rows["as it is"][1:] == pytest.approx((420 * MS, 0, 1 - 4 / 7, False))
    assert rows["8 micro-batches"][1:] == pytest.approx((330 * MS, 90 * MS, 1 - 8 / 11, True))
    forecasts = {(f.setting, f.value): f.step_ns for f in found.forecasts}
    assert forecasts["microbatches", "16"] == pytest.approx(450 * MS - found.saving_ns)
    assert forecasts["microbatches", "8"] == pytest.approx((450 - 90) * MS)


def test_another_schedule_for_the_same_stages_may_be_the_best_line(tmp_path: Path) -> None:
    # The loader's batch cannot be cut further.
    loader = {"role": "train", "batch_size": 4}
    path = pipelines.recorded(
        tmp_path, "ScheduleInterleaved1F1B", 4, 4, alike(20, 40), chunks=2, loaders=[loader], step=700
    )
    found = ask(RULE, path)
    # 11 slots of 60 ms; four micro-batches in two chunks of 60 ms and three forwards.
    assert found.saving_ns == pytest.approx((660 - 540) * MS)
    assert found.verdict == "17 % of each step is a bubble that InterleavedZeroBubble would fill."


def test_each_call_within_a_step_counts(tmp_path: Path) -> None:
    path = pipelines.recorded(tmp_path, "Schedule1F1B", 4, 4, alike(20, 40), step=900)
    once = ask(RULE, path).saving_ns
    for rank in range(4):
        log = path / f"ranks/{rank:05d}/chunks.jsonl"
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        lines += [line | {"start_ns": line["start_ns"] + 450 * MS} for line in lines]
        log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert ask(RULE, path).saving_ns == pytest.approx(2 * once)


def test_enough_microbatches_are_left_alone(tmp_path: Path) -> None:
    clear = ask(RULE, pipelines.recorded(tmp_path, "Schedule1F1B", 4, 32, alike(4, 8)))
    assert clear.state == "clear"
    assert clear.share == pytest.approx(0.064, rel=0.01)
    assert clear.summary.startswith("8.6 % of a pipeline's step is idle; 128 micro-batches would save 6.4 %")


def test_a_pipeline_of_one_rank_has_no_bubble(tmp_path: Path) -> None:
    answer = ask(RULE, pipelines.recorded(tmp_path, "Schedule1F1B", 1, 4, alike(2, 4)))
    assert (answer.state, answer.why) == ("does_not_apply", "the pipeline has one rank")


@pytest.mark.parametrize(
    ("said", "why"),
    [({"name": "MySchedule"}, "what MySchedule does"), ({"here": (0, 2, 3)}, "those of rank 1 are not here")],
)
def test_what_cannot_be_replayed_abstains_with_what_was_measured(
    tmp_path: Path, said: dict[str, str], why: str
) -> None:
    answer = ask(RULE, pipelines.recorded(tmp_path, "Schedule1F1B", 4, 4, alike(20, 40), **said))  # type: ignore[arg-type]
    assert (answer.state, answer.why.startswith("43 % of a pipeline's step is idle")) == ("not_measured", True)
    assert why in answer.why


def test_without_a_pipeline_it_abstains(tmp_path: Path) -> None:
    path = runs.recorded(tmp_path / "run", (None, [runs.light(n, MS) for n in range(33)], runs.CPU))
    answer = ask(RULE, path)
    assert (answer.state, "no pipeline" in answer.why) == ("does_not_apply", True)
