"""Normalisations that are written out: found with what one kernel leaves, silent on fused ones and on short ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlprof.analysis.compute.rules.unfused_norm import RULE
from tests.fixtures import operators
from tests.fixtures.asking import ask
from tests.fixtures.runs import MS

US = 1_000
LAYER = ("aten::mean", "aten::var", "aten::sub", "aten::add", "aten::sqrt", "aten::div", "aten::mul", "aten::add")
BACK = ("Add", "Mul", "Div", "Sqrt", "Add", "Sub", "Var", "Mean")
CHAIN = operators.times(LAYER, MS // 2) + operators.times([f"{name}Backward0" for name in BACK], MS)


def test_found_with_what_one_kernel_leaves(tmp_path: Path) -> None:
    found = ask(RULE, operators.job(tmp_path, *CHAIN))
    assert found.state == "found"
    # Of 4 ms forward 17 % are left, of 8 ms backward 15 %.
    assert found.saving_ns == pytest.approx((4 * 0.83 + 8 * 0.85) * MS, rel=0.01)
    assert "layer_norm" in found.advice[0]
    assert "torch.compile" in found.advice[-1]
    assert found.evidence is not None
    rows = {row[1]: row for row in found.evidence.rows}
    assert rows["forward"][2:4] == (1, 8)
    assert rows["backward"][4:] == (pytest.approx(8 * MS), pytest.approx(1.2 * MS))


def test_on_a_cpu_too(tmp_path: Path) -> None:
    found = ask(RULE, operators.job(tmp_path, *CHAIN, on_cpu=True))
    assert found.state == "found"
    assert found.saving_ns == pytest.approx(12 * 0.85 * MS, rel=0.02)


def test_a_fused_one_is_left_alone(tmp_path: Path) -> None:
    clear = ask(RULE, operators.job(tmp_path, ("aten::layer_norm", 5 * MS), ("NativeLayerNormBackward0", 9 * MS)))
    assert (clear.state, clear.share) == ("clear", 0)


def test_a_short_one_is_left_alone_with_its_share(tmp_path: Path) -> None:
    clear = ask(RULE, operators.job(tmp_path, *operators.times(LAYER, 30 * US)))
    assert clear.state == "clear"
    assert 0 < clear.share < 0.02


def test_a_mean_of_squares_is_replaced_by_rms_norm(tmp_path: Path) -> None:
    chain = ("aten::pow", "aten::mean", "aten::add", "aten::rsqrt", "aten::mul", "aten::mul")
    found = ask(RULE, operators.job(tmp_path, *operators.times(chain, MS)))
    assert "rms_norm" in found.advice[0]
    assert found.saving_ns == pytest.approx(6 * 0.72 * MS, rel=0.01)
