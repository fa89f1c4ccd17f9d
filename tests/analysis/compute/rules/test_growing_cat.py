"""A tensor that grows by cat: found with what one call leaves, silent on calls that copy as much each time."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlprof.analysis.compute.rules.growing_cat import RULE
from tests.fixtures import operators
from tests.fixtures.asking import ask
from tests.fixtures.operators import Named
from tests.fixtures.runs import MS

US = 1_000


def loop(*each: int, work: int = 100 * US) -> list[Named]:
    return [one for ns in each for one in (("aten::tanh", work), ("aten::cat", ns))]


RISING = [n * 100 * US for n in range(1, 11)]


@pytest.mark.parametrize("on_cpu", [False, True])
def test_found_with_what_the_last_call_leaves(tmp_path: Path, on_cpu: bool) -> None:
    found = ask(RULE, operators.job(tmp_path, *loop(*RISING), on_cpu=on_cpu))
    assert found.state == "found"
    assert found.saving_ns == pytest.approx(4.5 * MS, rel=0.02)
    assert "append the pieces to a list" in found.advice[0]
    assert found.evidence is not None
    assert found.evidence.rows[0][:2] == ("forward", 10)


@pytest.mark.parametrize("each", [[MS // 2] * 10, RISING[::-1], RISING[:7]], ids=["even", "falling", "few"])
def test_other_calls_are_left_alone(tmp_path: Path, each: list[int]) -> None:
    clear = ask(RULE, operators.job(tmp_path, *loop(*each)))
    assert (clear.state, clear.share) == ("clear", 0)


def test_a_loop_that_reads_what_there_is_needs_it(tmp_path: Path) -> None:
    called = [one for ns in RISING for one in (("aten::tanh", ns), ("aten::cat", ns))]
    assert ask(RULE, operators.job(tmp_path, *called)).state == "clear"


def test_one_that_is_short_is_left_alone_with_its_share(tmp_path: Path) -> None:
    clear = ask(RULE, operators.job(tmp_path, *loop(*(ns // 20 for ns in RISING), work=10 * US)))
    assert clear.state == "clear"
    assert 0 < clear.share < 0.02
