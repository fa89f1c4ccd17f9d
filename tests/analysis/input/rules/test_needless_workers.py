"""Workers that cost more than they save: found with what fewer would give; silent on workers that are needed."""

from pathlib import Path

import pytest

from dlprof.analysis.input.fetch_replay import Forecast
from dlprof.analysis.input.input_waits import FewerWorkers
from dlprof.analysis.input.rules import input_wait
from dlprof.analysis.input.rules.needless_workers import RULE
from dlprof.result import Setting
from tests.fixtures import runs
from tests.fixtures.asking import ask
from tests.fixtures.loaders import needless, recorded
from tests.fixtures.runs import MS


def test_workers_whose_batches_are_cheaper_to_make_are_found(tmp_path: Path) -> None:
    path = needless(tmp_path)
    found = ask(RULE, path)
    assert found.state == "found"
    assert found.saving_ns == pytest.approx(6.2 * MS, rel=0.05)
    assert found.changes[0].settings == (Setting("num_workers", 3, 0),)
    assert {f.value: f.setting for f in found.forecasts} == {"0": "num_workers", "1": "num_workers", "2": "num_workers"}
    assert [f.step_ns for f in found.forecasts if f.value == "0"] == pytest.approx([24 * MS - found.saving_ns])
    assert found.evidence is not None
    assert [row[0] for row in found.evidence.rows] == ["0 (proposed)", "1", "2", "3 (is)"]
    # One change, one finding.
    assert ask(input_wait.RULE, path).state == "clear"


def test_workers_that_are_kept_between_epochs_cannot_be_without_workers(tmp_path: Path) -> None:
    found = ask(RULE, needless(tmp_path, persistent_workers=True))
    assert found.changes[0].settings == (Setting("num_workers", 3, 0), Setting("persistent_workers", True, False))


def test_half_of_what_is_not_known_of_the_workers_cost_is_the_noise() -> None:
    now, none = Forecast(2, 24 * MS, 0.0), Forecast(0, 18 * MS, 0.0)
    estimate = RULE.check(FewerWorkers(0, (now, none), none, 2.0 * MS, {0: 6.0 * MS}))
    assert (estimate.saving_ns, estimate.noise_ns) == (6 * MS, 2 * MS)


def test_workers_that_are_needed_are_left_alone(tmp_path: Path) -> None:
    clear = ask(RULE, recorded(tmp_path, fetch=80, cpu=2, workers=4))
    assert (clear.state, clear.share) == ("clear", 0.0)


def test_a_gain_within_what_is_not_known_is_no_finding(tmp_path: Path) -> None:
    # Nothing was taken over ready: without workers, the loop's own work may be what it was.
    assert ask(RULE, needless(tmp_path, takes=0, held_ms=2)).state == "clear"


def test_without_a_record_of_batches_it_abstains(tmp_path: Path) -> None:
    loader = {"role": "train", "num_workers": 2}
    steps = [runs.light(k, 80 * MS, fetch_ns=MS) for k in range(40)]
    path = runs.recorded(tmp_path / "run", (None, steps, {**runs.CPU, "loaders": [loader]}))
    assert ask(RULE, path).state == "not_measured"
