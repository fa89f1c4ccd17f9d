"""Steps of a short run are those that a report would count, and two runs compare by their means."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from dlprof.errors import NotMeasured
from dlprof.read.run import open_run
from dlprof.trial.measuring import ahead, epoch_of, epochs_log_ratio, log_ratio, steps_of
from tests.fixtures import runs, traces
from tests.fixtures.runs import MS
from tests.fixtures.trials import steps


def log(
    *durations_ms: float, firsts: tuple[int, ...] = (), gaps: dict[int, float] | None = None
) -> list[dict[str, Any]]:
    """Return a step log of steps of these lengths, one after the other; a gap of so many ms comes before some."""
    rows, at = [], traces.BASE_NS
    for n, ms in enumerate(durations_ms):
        at += int((gaps or {}).get(n, 0) * MS)
        rows.append(runs.light(n, int(ms * MS), at, first=int(n in firsts)))
        at += int(ms * MS)
    return rows


def recorded(folder: Path, rows: list[dict[str, Any]], **facts: Any) -> Path:
    return runs.recorded(folder, (None, rows, {**runs.CPU, **facts}))


def test_the_warm_up_is_left_out_and_the_mean_counts(tmp_path: Path) -> None:
    found = steps_of(recorded(tmp_path / "run", log(900, 50, 10, *[10, 30] * 20)))
    assert found.step_ns == pytest.approx(20 * MS, rel=0.03)
    assert found.numbers[0] >= 3


def test_the_loop_is_all_time_between_steps_too(tmp_path: Path) -> None:
    # 500 ms of validation after step 20.
    found = steps_of(recorded(tmp_path / "run", log(*[10] * 43, gaps={21: 500})))
    assert found.step_ns == pytest.approx(10 * MS)
    assert found.loop_ns == pytest.approx((40 * 10 + 500) / 40 * MS)
    assert found.epochs_ns is None


def test_epochs_are_whole_ones_with_what_starts_them(tmp_path: Path) -> None:
    # Epochs of 10 steps: their first takes 200 ms.
    rows = log(*[200 if n % 10 == 0 else 10 for n in range(45)], firsts=(0, 10, 20, 30, 40))
    found = steps_of(recorded(tmp_path / "run", rows))
    assert found.step_ns == pytest.approx(10 * MS)
    assert found.epochs_ns == pytest.approx((200 + 9 * 10) / 10 * MS)
    assert epoch_of(open_run(tmp_path / "run").ranks[0]) == 10


def test_what_the_loader_makes_ahead_and_its_batch_are_known(tmp_path: Path) -> None:
    loaders = [{"role": "validation", "num_workers": 9}, {"role": "train", "num_workers": 3, "batch_size": 8}]
    found = steps_of(recorded(tmp_path / "run", log(*[10] * 40), loaders=loaders))
    assert (found.ahead, found.batch_size) == (6, 8)
    assert ahead({"num_workers": 3, "prefetch_factor": 4}) == 12
    assert ahead({}) == 0


@pytest.mark.parametrize("rows", [[], log(10, 10, 10)])
def test_too_few_steps_are_told(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    with pytest.raises(NotMeasured):
        steps_of(recorded(tmp_path / "run", rows))


def test_the_ratio_is_of_means() -> None:
    assert log_ratio(steps(30), steps(20), "step") == pytest.approx(math.log(1.5))
    assert log_ratio(steps(30), steps(60), "step") == pytest.approx(-math.log(2))


def test_batches_that_were_made_ahead_are_not_compared() -> None:
    fast = steps(20, 40, ahead=8)
    fast.lengths_ns[:8] = 1 * MS  # they came out of the queue
    assert log_ratio(steps(30, 40), fast, "step") == pytest.approx(math.log(1.5))


def test_runs_are_compared_from_the_same_step_on() -> None:
    early = steps(30, 60, first=3)
    early.lengths_ns[:10] = 500 * MS
    assert log_ratio(early, steps(20, 47, first=13), "step") == pytest.approx(math.log(1.5))


def test_the_loop_is_compared_by_whole_epochs_where_both_have_them() -> None:
    one, other = steps(10, epochs_ms=40), steps(10, epochs_ms=20)
    assert log_ratio(one, other, "loop") == pytest.approx(math.log(2))
    assert epochs_log_ratio(one, other) == pytest.approx(math.log(2))
    assert epochs_log_ratio(one, steps(10)) is None
    assert log_ratio(one, steps(5), "loop") == pytest.approx(math.log(2))


def test_batches_of_another_size_cannot_be_compared() -> None:
    with pytest.raises(NotMeasured, match="batches"):
        log_ratio(steps(30, batch_size=8), steps(20, batch_size=16), "step")
    assert log_ratio(steps(30, batch_size=8), steps(20), "step") > 0


def test_what_cannot_be_measured_or_compared(tmp_path: Path) -> None:
    path = recorded(tmp_path / "run", log(*[10] * 40))
    (path / "ranks/00000").rename(path / "ranks/00001")
    for folder in (path, tmp_path / "nothing"):
        with pytest.raises(NotMeasured):
            steps_of(folder)
    with pytest.raises(NotMeasured):
        log_ratio(steps(30, 10, first=3), steps(20, 10, first=100), "step")
