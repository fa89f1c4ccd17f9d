"""Saving checkpoints: found on the rank that saves, silent where rare, abstaining without a record."""

from pathlib import Path

import pytest

from dlprof.analysis.step.rules.checkpoint_stall import RULE
from tests.fixtures import runs
from tests.fixtures.asking import ask
from tests.fixtures.runs import MS


def recorded(folder: Path, *saving: range, dur: int = 50 * MS) -> Path:
    """Record ranks of 63 steps of 100 ms, 60 of them steady; each saves in the steps that are told."""
    steps = [runs.light(n, 100 * MS) for n in range(63)]
    stalls = [[runs.stall("checkpoint", n, dur, path="/data/model.pt") for n in which] for which in saving]
    return runs.recorded(folder / "run", *((None, steps, runs.CPU) for _ in saving), stalls=stalls)


def test_saving_every_fifth_step_is_found(tmp_path: Path) -> None:
    found = ask(RULE, recorded(tmp_path, range(5, 63, 5)))
    assert found.state == "found"
    assert found.share == pytest.approx(0.1)
    assert found.saving_ns == pytest.approx(10 * MS)
    assert found.verdict == "10 % of each step waits for checkpoints."
    assert "every 5th steady step and stands still for 50.0 ms then (/data/model.pt)" in found.summary
    # 10 of 90 ms: six times rarer leaves 1.67 of 91.67 ms.
    assert found.advice[1].startswith("save every 30 steps (now every 5th one)")
    assert "async_save" in found.advice[0]
    assert ([c.training for c in found.changes], found.training) == ([False, True], False)
    assert found.evidence is not None
    assert [row[0] for row in found.evidence.rows[:2]] == ["step 5", "step 10"]


def test_what_a_saving_step_takes_longer_besides_is_saved_too(tmp_path: Path) -> None:
    # Saving stands still for 50 ms, and the state is gathered for 30 ms before; the step after is 10 ms shorter.
    took = dict.fromkeys(range(5, 63, 5), 180 * MS) | {n + 1: 90 * MS for n in range(5, 63, 5)}
    steps = [runs.light(n, took.get(n, 100 * MS)) for n in range(63)]
    stalls = [[runs.stall("checkpoint", n, 50 * MS) for n in range(5, 63, 5)]]
    found = ask(RULE, runs.recorded(tmp_path / "run", (None, steps, runs.CPU), stalls=stalls))
    assert found.saving_ns == pytest.approx((80 - 10) / 5 * MS)
    assert found.lost_share == pytest.approx(found.share)
    assert "50.0 ms then; such a step takes 20.0 ms longer besides" in found.summary


def test_short_saves_are_left_alone_whatever_their_steps_take_besides(tmp_path: Path) -> None:
    # A stall of 5 ms in each fifth step is 1 % of them; that such a step is 30 ms longer as well tells of no stall.
    took = dict.fromkeys(range(5, 63, 5), 135 * MS)
    steps = [runs.light(n, took.get(n, 100 * MS)) for n in range(63)]
    stalls = [[runs.stall("checkpoint", n, 5 * MS) for n in range(5, 63, 5)]]
    clear = ask(RULE, runs.recorded(tmp_path / "run", (None, steps, runs.CPU), stalls=stalls))
    assert clear.state == "clear"
    assert clear.saving_ns == pytest.approx(35 / 5 * MS)


def test_the_others_wait_for_the_rank_that_saves(tmp_path: Path) -> None:
    found = ask(RULE, recorded(tmp_path, range(5, 63, 5), range(0)))
    assert found.ranks == (0,)
    assert {cost.rank: cost.ns for cost in found.by_rank} == pytest.approx({0: 10 * MS})
    assert found.saving_ns == pytest.approx(10 * MS)
    assert "is assumed" in found.sure


def test_rare_and_short_saves_are_left_alone(tmp_path: Path) -> None:
    clear = ask(RULE, recorded(tmp_path, range(5, 63, 5), dur=5 * MS))
    assert (clear.state, clear.summary) == ("clear", "1.0 % of each step waits for checkpoints")
    assert clear.share == pytest.approx(0.01)
    never = ask(RULE, recorded(tmp_path / "never", range(0)))
    assert (never.state, never.summary, never.share) == ("clear", "no steady step saved a checkpoint", 0.0)


def test_one_save_does_not_tell_how_often(tmp_path: Path) -> None:
    steps = [runs.light(n, (400 if n == 30 else 100) * MS) for n in range(63)]
    stalls = [[runs.stall("checkpoint", 30, 300 * MS)]]
    answer = ask(RULE, runs.recorded(tmp_path / "run", (None, steps, runs.CPU), stalls=stalls))
    assert (answer.state, "varies too much" in answer.why) == ("not_measured", True)


def test_without_a_record_it_abstains(tmp_path: Path) -> None:
    steps = [runs.light(n, 100 * MS) for n in range(60)]
    answer = ask(RULE, runs.recorded(tmp_path / "run", (None, steps, runs.CPU)))
    assert (answer.state, "checkpoints" in answer.why) == ("not_measured", True)
