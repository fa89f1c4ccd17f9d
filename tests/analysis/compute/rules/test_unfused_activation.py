"""GELU that is written out: found with what one kernel leaves, silent on torch's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlprof.analysis.compute.rules.unfused_activation import RULE
from tests.fixtures import operators
from tests.fixtures.asking import ask
from tests.fixtures.runs import MS

TANH = ("mul", "pow", "mul", "add", "mul", "tanh", "add", "mul")
ERF = ("mul", "div", "erf", "add", "mul")


@pytest.mark.parametrize(
    ("names", "left", "change"),
    [(TANH, (0.11, 0.10), 'gelu(x, approximate="tanh")'), (ERF, (0.18, 0.15), "gelu(x)")],
)
def test_found_with_what_one_kernel_leaves(
    tmp_path: Path, names: tuple[str, ...], left: tuple[float, float], change: str
) -> None:
    back = [f"{name.capitalize()}Backward0" for name in reversed(names)]
    chain = operators.times([f"aten::{name}" for name in names], MS) + operators.times(back, MS)
    found = ask(RULE, operators.job(tmp_path, *chain))
    assert found.state == "found"
    assert found.saving_ns == pytest.approx(len(names) * (2 - sum(left)) * MS, rel=0.01)
    assert change in found.advice[0]


def test_a_fused_one_is_left_alone(tmp_path: Path) -> None:
    clear = ask(RULE, operators.job(tmp_path, ("aten::gelu", 5 * MS), ("GeluBackward0", 9 * MS)))
    assert (clear.state, clear.share) == ("clear", 0)
