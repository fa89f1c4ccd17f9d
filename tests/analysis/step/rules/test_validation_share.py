"""Validation: found where it takes much of the loop, with what less of it gives; once, or short, is left alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.step.rules.validation_share import RULE
from dlprof.result import Setting
from tests.fixtures import runs, traces
from tests.fixtures.asking import ask
from tests.fixtures.runs import MS, light

LOADERS = [
    {"role": "train", "num_workers": 4, "batch_size": 32},
    {"role": "validation", "num_workers": 1, "batch_size": 50, "dataset_length": 250},
]


def recorded(folder: Path, *ranks: int, every: int = 10, fetch: int = 5, of: int = 60, dur: int = 60) -> Path:
    """Record ranks of `of` training steps of 100 ms; after each tenth so many batches of 60 ms are validated."""
    made = []
    for batches in ranks:
        steps: list[Any] = []
        for n in range(of):
            steps.append(light(len(steps), 100 * MS))
            if n % every == every - 1:
                for _ in range(batches):
                    kind: dict[str, Any] = {"kind": "validation", "backwards": 0, "optimizer_steps": 0}
                    steps.append(light(len(steps), dur * MS, fetch_ns=fetch * MS, **kind))
        made.append((None, steps, {**runs.CPU, "loaders": LOADERS, "autocast": {"enabled": True, "dtype": "bfloat16"}}))
    return runs.recorded(folder, *made)


def test_a_quarter_of_the_loop_is_found_with_what_half_as_much_gives(tmp_path: Path) -> None:
    found = ask(RULE, recorded(tmp_path, 5))
    assert (found.state, found.scope, found.training) == ("found", "job", True)
    # Five batches of 60 ms after each ten steps of 100: 300 of 1,300 ms; a half of it, over ten steps.
    assert found.saving_ns == pytest.approx(15 * MS)
    assert found.share == pytest.approx(150 / 1_300)
    assert found.speedup == pytest.approx(1_300 / 1_150)
    assert "Every 10 training steps rank 0 validates for 300.0 ms, in 5 batches; 8.3 %" in found.summary
    assert found.advice == ("validate every 20 steps (is 10), or on part of the data",)
    assert "What `torch.inference_mode()` and larger batches in validation gain is not known." in found.sure
    assert found.lost_share == pytest.approx(300 / 1_300)
    assert [cost.ns for cost in found.by_rank] == [pytest.approx(30 * MS)]
    assert found.evidence is not None
    less, speed = pytest.approx(150 / 1_300), pytest.approx(1_300 / 1_150)
    assert found.evidence.rows[1] == ("half as often", less, less, speed)


def test_what_validation_waits_for_its_loader_is_saved_by_more_workers(tmp_path: Path) -> None:
    found = ask(RULE, recorded(tmp_path, 5, fetch=30))
    # Of 300 ms after each ten steps half are waits for data.
    assert found.saving_ns == pytest.approx(15 * MS)
    assert (found.at_most, found.training) == (True, False)
    assert "more `num_workers` (is 1)" in found.advice[0]
    assert "50 % of validation" in found.advice[0]
    assert found.changes[0].settings == (Setting("persistent_workers", None, True),)
    assert "autocast (bfloat16, as training); a larger batch (is 50)" in found.advice[1]
    assert [(c.numerics, c.training) for c in found.changes] == [(False, False), (True, False), (False, True)]
    assert found.evidence is not None
    assert found.evidence.rows[-1][0] == "with no waiting for data"


def test_waits_that_are_not_notable_alone_are_no_cure(tmp_path: Path) -> None:
    # 150 of 1,150 ms are validation, and a quarter of it waits: 3.3 % of the loop.
    found = ask(RULE, recorded(tmp_path, 5, fetch=8, dur=30))
    assert found.saving_ns == pytest.approx(7.5 * MS)
    assert found.training


def test_one_rank_that_validates_for_all_is_told_to_share_it_out(tmp_path: Path) -> None:
    found = ask(RULE, recorded(tmp_path, 5, 0, 0, 0))
    assert found.saving_ns == pytest.approx(0.75 * 30 * MS)
    assert found.ranks == (0,)
    assert "The other ranks wait for it." in found.summary
    assert "DistributedSampler" in found.advice[0]
    assert ([c.training for c in found.changes], found.training) == ([False, False, True], False)
    assert found.changes[0].settings == (Setting("shuffle", None, False),)


def test_ranks_that_all_validate_everything_are_told_to_share_it_out(tmp_path: Path) -> None:
    found = ask(RULE, recorded(tmp_path, 5, 5))
    assert "all of its 250 samples" in found.summary
    assert found.saving_ns == pytest.approx(0.5 * 30 * MS)
    shared = ask(RULE, recorded(tmp_path / "shared", 3, 3, dur=100))
    assert "all of its" not in shared.summary


def test_short_validation_is_left_alone(tmp_path: Path) -> None:
    clear = ask(RULE, recorded(tmp_path, 1))
    assert (clear.state, clear.summary) == ("clear", "5.7 % of the training loop's time is validation")
    # 60 of each 1,060 ms, of which half would be saved.
    assert clear.share == pytest.approx(30 / 1_060)
    assert clear.lost_share == pytest.approx(60 / 1_060)
    none = ask(RULE, recorded(tmp_path / "none", 0))
    assert (none.summary, none.share) == ("nothing was validated", 0.0)


def test_of_one_phase_nobody_knows_how_often_it_comes(tmp_path: Path) -> None:
    answer = ask(RULE, recorded(tmp_path, 50, every=40))
    assert (answer.state, "how often" in answer.why) == ("not_measured", True)


def test_a_trace_alone_does_not_tell(tmp_path: Path) -> None:
    made = traces.trace(traces.step(1, 0, MS), traces.kernel("gemm", 0, MS), world_size=1)
    assert ask(RULE, runs.foreign(tmp_path, made)).state == "not_measured"
