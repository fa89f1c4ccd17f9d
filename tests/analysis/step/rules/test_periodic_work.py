"""Work every n-th step: found with its interval and line, silent where steps are alike, abstaining without a log."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.step.rules.periodic_work import RULE
from tests.fixtures import runs, traces
from tests.fixtures.asking import ask
from tests.fixtures.jobs import record, tiny
from tests.fixtures.runs import MS, light
from tests.fixtures.sampled_stacks import MAIN

ROLL_OUT = f"{MAIN};main (/me/rl.py:30);roll_out (/me/rl.py:20);simulate (/me/rl.py:12) 80\n"


def recorded(folder: Path, every: int, *extra: int, ranks: int = 1, stacks: str = "") -> Path:
    """Record ranks of 203 steps of 10 ms, which take so many ms longer every so many steps."""
    made: list[Any] = []
    for rank in range(ranks):
        more = extra[rank]
        steps = [light(n, (10 + more * (n % every == 0)) * MS) for n in range(203)]
        made.append((None, steps, {**runs.CPU, "pid": 10}))
    path = runs.recorded(folder / "run", *made)
    if stacks:
        (path / "ranks/00000/stacks.txt.gz").write_bytes(gzip.compress(stacks.encode()))
    return path


def test_roll_outs_are_found_with_their_interval_and_function(tmp_path: Path) -> None:
    found = ask(RULE, recorded(tmp_path, 16, 160, stacks=ROLL_OUT))
    assert found.state == "found"
    assert found.saving_ns == pytest.approx(160 * MS * 12 / 200)
    assert found.share == pytest.approx(9.6 / 19.6)
    assert "One step in 16 takes 160.0 ms longer" in found.summary
    assert "simulate (rl.py:12)" in found.summary
    assert found.evidence is not None
    assert found.evidence.rows[0][:2] == (16, 12)
    # To do it more rarely changes the training: it is the last of the changes, and all of it gone is a bound.
    assert ([c.training for c in found.changes], found.at_most) == ([False, False, True], True)
    assert "simulate (rl.py:12)" in found.advice[0]


def test_the_rank_that_does_more_of_it_counts(tmp_path: Path) -> None:
    found = ask(RULE, recorded(tmp_path, 10, 0, 100, ranks=2))
    assert (found.state, found.ranks) == ("found", (1,))


def test_steps_that_are_alike_are_left_alone(tmp_path: Path) -> None:
    assert ask(RULE, recorded(tmp_path, 16, 0)).state == "clear"


def test_a_little_every_few_steps_is_left_alone(tmp_path: Path) -> None:
    assert ask(RULE, recorded(tmp_path, 50, 5)).state == "clear"


def test_a_trace_alone_abstains(tmp_path: Path) -> None:
    assert ask(RULE, runs.foreign(tmp_path, traces.training())).state == "not_measured"


@pytest.mark.long
def test_a_real_script_that_rolls_out(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    body = """
    def simulate():
        time.sleep(0.05)

    for n in range(120):
        if n % 8 == 0:
            simulate()
        time.sleep(0.005)
        train(data[:8])
    """
    record(tiny(tmp_path, body), folder=tmp_path / "run", options=["--no-trace", "--flops", "off"])
    found = ask(RULE, tmp_path / "run")
    assert found.state == "found"
    assert found.evidence is not None
    assert found.evidence.rows[0][0] == 8
    assert found.saving_ns == pytest.approx(50 * MS / 8, rel=0.3)
