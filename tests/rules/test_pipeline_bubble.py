"""Bubbles of pipelines: found with what more micro-batches give, silent where there are enough, else abstaining."""

import json
from pathlib import Path

import pytest

from dlprof.rules.pipeline_bubble import RULE
from tests import runs, traces
from tests.rules.asking import ask
from tests.runs import MS


def recorded(
    folder: Path, ranks: int, microbatches: int, schedule: str = "Schedule1F1B", call: int = 100, busy: int = 60
) -> Path:
    """Record a pipeline of some ranks: steps of 120 ms, of which schedule.step() takes `call` and work `busy`."""
    steps = [runs.light(n, 120 * MS) for n in range(33)]
    told = {"schedule": schedule, "microbatches": microbatches, "num_stages": ranks, "ranks": list(range(ranks))}
    every = [{**runs.CPU, "pipeline": {**told, "stages": [r]}} for r in range(ranks)]
    path = runs.recorded(folder / "run", *((None, steps, facts) for facts in every))
    for r in range(ranks):
        lines = [
            {
                "step": n,
                "action": "schedule",
                "start_ns": traces.BASE_NS + n * 1_000 * MS,
                "dur_ns": call * MS,
                "busy_ns": busy * MS,
            }
            for n in range(33)
        ]
        (path / f"ranks/{r:05d}/chunks.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_as_few_microbatches_as_ranks_are_found(tmp_path: Path) -> None:
    # Four ranks, four micro-batches: 3/7 of the schedule's step is idle, with eight 3/11. 60 ms of work take 105 ms
    # with four, and 82.5 with eight.
    found = ask(RULE, recorded(tmp_path, 4, 4, call=110))
    assert found.state == "found"
    assert found.saving_ns == pytest.approx(22.5 * MS)
    assert found.verdict == "19 % of each step is a bubble that more micro-batches would fill."
    assert found.summary.startswith(
        "45 % of a pipeline's step of 110.0 ms is idle on its 4 ranks: 43 % by the schedule"
    )
    assert "2.6 % by unequal stages" in found.summary
    assert found.ranks == (0, 1, 2, 3)
    assert "`n_microbatches=8` (is 4)" in found.advice[0]
    assert "27 %" in found.advice[1]  # two stages a rank: 3/11
    assert found.evidence is not None
    assert [round(v, 3) for _, v, _ in found.evidence.rows] == [0.455, 0.429, 0.273, 0.273]


def test_no_more_is_saved_than_is_idle(tmp_path: Path) -> None:
    found = ask(RULE, recorded(tmp_path, 4, 4, call=75))
    assert found.saving_ns == pytest.approx(15 * MS)


def test_enough_microbatches_are_left_alone(tmp_path: Path) -> None:
    clear = ask(RULE, recorded(tmp_path, 4, 32, call=70))
    assert clear.state == "clear"
    assert clear.summary.startswith("14 % of a pipeline's step is idle; twice the micro-batches would save")


def test_a_pipeline_of_one_rank_has_no_bubble(tmp_path: Path) -> None:
    assert ask(RULE, recorded(tmp_path, 1, 4)).summary == "the pipeline has one rank"


def test_a_schedule_of_the_users_own_abstains_with_what_was_measured(tmp_path: Path) -> None:
    answer = ask(RULE, recorded(tmp_path, 4, 4, schedule="MySchedule"))
    assert (answer.state, answer.why.startswith("40 % of a step is idle")) == ("not_measured", True)


def test_without_a_pipeline_it_abstains(tmp_path: Path) -> None:
    path = runs.recorded(tmp_path / "run", (None, [runs.light(n, MS) for n in range(33)], runs.CPU))
    answer = ask(RULE, path)
    assert (answer.state, "no pipeline stages" in answer.why) == ("not_measured", True)
