"""Pauses of the garbage collector: found with what to do, silent where rare, abstaining without a record."""

from pathlib import Path

import pytest

from dlprof.analysis.step.rules.gc_pauses import RULE
from tests.fixtures import runs
from tests.fixtures.asking import ask
from tests.fixtures.runs import MS

KIND = "garbage_collection"


def recorded(folder: Path, *pausing: range, dur: int = 20 * MS) -> Path:
    """Record ranks of 63 steps of 100 ms, 60 of them steady; each pauses in the steps that are told."""
    steps = [runs.light(n, 100 * MS) for n in range(63)]
    stalls = [[runs.stall(KIND, n, dur) for n in which] for which in pausing]
    return runs.recorded(folder / "run", *((None, steps, runs.CPU) for _ in pausing), stalls=stalls)


def test_pauses_of_every_other_step_are_found(tmp_path: Path) -> None:
    found = ask(RULE, recorded(tmp_path, range(3, 63, 2)))
    assert found.state == "found"
    assert found.saving_ns == pytest.approx(10 * MS)
    assert found.share == pytest.approx(0.1)
    assert found.verdict == "10 % of each step is Python's garbage collection."
    assert found.summary.startswith("30 pauses in 60 steady steps of rank 0, one in every 2nd step;")
    assert "30 steps searched all objects" in found.advice[0]
    # 20 ms every 40 steps of 100 ms is half a per cent.
    assert "every 40 steps" in found.advice[1]
    assert "0.5 % of the step" in found.advice[1]
    assert found.evidence is not None
    assert found.evidence.rows[0] == ("step 3", 20.0 * MS, KIND)


def test_ranks_that_pause_in_turn_cost_the_sum(tmp_path: Path) -> None:
    found = ask(RULE, recorded(tmp_path, range(3, 63, 4), range(5, 63, 4)))
    assert found.saving_ns == pytest.approx(10 * MS)
    assert found.ranks == (0, 1)
    together = ask(RULE, recorded(tmp_path / "together", range(3, 63, 4), range(3, 63, 4)))
    assert together.saving_ns == pytest.approx(5 * MS)


def test_short_pauses_are_left_alone(tmp_path: Path) -> None:
    clear = ask(RULE, recorded(tmp_path, range(3, 63, 2), dur=2 * MS))
    assert clear.state == "clear"
    assert clear.share == pytest.approx(0.01)
    assert {cost.rank: cost.ns for cost in clear.by_rank} == pytest.approx({0: MS})


def test_a_single_long_pause_is_chance(tmp_path: Path) -> None:
    steps = [runs.light(n, (400 if n == 30 else 100) * MS) for n in range(63)]
    path = runs.recorded(tmp_path / "run", (None, steps, runs.CPU), stalls=[[runs.stall(KIND, 30, 300 * MS)]])
    answer = ask(RULE, path)
    assert (answer.state, "varies too much" in answer.why) == ("not_measured", True)


def test_no_pause_is_left_alone(tmp_path: Path) -> None:
    assert ask(RULE, recorded(tmp_path, range(0))).state == "clear"


def test_without_a_record_it_abstains(tmp_path: Path) -> None:
    steps = [runs.light(n, 100 * MS) for n in range(60)]
    answer = ask(RULE, runs.recorded(tmp_path / "run", (None, steps, runs.CPU)))
    assert (answer.state, "no record of garbage" in answer.why) == ("not_measured", True)


def test_on_a_gpu_without_a_trace_it_abstains(tmp_path: Path) -> None:
    steps = [runs.light(n, 100 * MS) for n in range(60)]
    stalls = [[runs.stall(KIND, n, 20 * MS) for n in range(60)]]
    path = runs.recorded(tmp_path / "run", (None, steps, {"device": {"type": "cuda"}}), stalls=stalls)
    assert ask(RULE, path).state == "not_measured"
