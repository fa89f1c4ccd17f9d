"""Optimizer steps that a gradient scaler skips: found with what to do, silent where they are few or not known."""

from pathlib import Path

import pytest

from dlprof.analysis.precision.rules.skipped_steps import RULE
from tests.fixtures.asking import ask
from tests.fixtures.runs import MS
from tests.fixtures.scalers import scaled


def test_a_scale_that_grows_too_often_is_found(tmp_path: Path) -> None:
    path = scaled(tmp_path, skipped=range(10, 100, 5), grown=range(9, 99, 5), interval=4)
    found = ask(RULE, path)
    assert found.state == "found"
    assert found.share == pytest.approx(0.18)
    assert found.saving_ns == pytest.approx(18 * MS)
    assert "18 of 100 steady steps" in found.summary
    assert [(s.name, s.now, s.to) for s in found.changes[0].settings] == [("growth_interval", 4, 2_000)]


def test_gradients_that_are_never_finite_are_not_the_scales_fault(tmp_path: Path) -> None:
    found = ask(RULE, scaled(tmp_path, skipped=range(30, 100)))
    assert found.state == "found"
    assert found.saving_ns == pytest.approx(70 * MS)
    assert "at any scale" in found.advice[0]


def test_a_scale_that_fits_after_some_steps_is_left_alone(tmp_path: Path) -> None:
    clear = ask(RULE, scaled(tmp_path, skipped=(*range(12), 70), grown=(69,)))
    assert clear.state == "clear"
    assert clear.share == pytest.approx(0.01)
    assert "13 steps" in clear.summary


def test_what_a_fused_optimizer_skips_on_the_device_is_not_known(tmp_path: Path) -> None:
    asked = ask(RULE, scaled(tmp_path, unknown=True, ranks=2))
    assert asked.state == "not_measured"
    assert "fused optimizer" in asked.why


def test_a_scaler_of_which_there_is_no_record_is_not_measured(tmp_path: Path) -> None:
    path = scaled(tmp_path)
    (path / "ranks/00000/loss_scale.jsonl").unlink()
    assert ask(RULE, path).state == "not_measured"
    facts = path / "ranks/00000/facts.json"
    facts.write_text(facts.read_text().replace('"grad_scaler": true', '"grad_scaler": false'))
    assert ask(RULE, path).state == "does_not_apply"
