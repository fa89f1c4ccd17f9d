"""Steps of a short run are those that a report would count; two runs compare by their means, and by their losses."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlprof.errors import NotMeasured
from dlprof.read.run import open_run
from dlprof.trial.measuring import (
    LEAST_LOSSES,
    Losses,
    ahead,
    compared,
    epoch_of,
    epochs_log_ratio,
    log_ratio,
    losses_of,
    steps_of,
)
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


def test_a_start_ends_with_the_first_batch(tmp_path: Path) -> None:
    rows = log(*[10] * 40)
    rows[0]["fetch_ns"] = 4 * MS
    began = {"unix_ns": traces.BASE_NS - 70 * MS}
    assert steps_of(recorded(tmp_path / "run", rows, clock=began)).start_ns == 74 * MS
    assert steps_of(recorded(tmp_path / "other", rows)).start_ns is None


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


N = 60
FALLS = 3.0 * 0.97 ** np.arange(N)


def of(values: np.ndarray, ranks: int = 1) -> Losses:
    return {(f"{rank:05d}", n): float(value) + rank for rank in range(ranks) for n, value in enumerate(values)}


def noise(seed: int, size: float = 0.1) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, size, N)


PLAIN = FALLS + noise(0)
NAN = np.where(np.arange(N) < 30, PLAIN, math.nan)


@pytest.mark.parametrize(
    ("changed", "other_seed", "verdict"),
    [
        (PLAIN, FALLS + noise(1), "equal"),
        (FALLS + noise(2), FALLS + noise(1), "within"),
        (PLAIN + 1e-6, FALLS + noise(1), "within"),
        (PLAIN * 1.5, FALLS + noise(1), "differ"),
        (np.full(N, 3.0), FALLS + noise(1), "differ"),
        (NAN, FALLS + noise(1), "differ"),
        # The script sets the seed: other batches of the same job say what chance does.
        (PLAIN + noise(3, 1e-6), PLAIN, "within"),
        (FALLS + noise(2, 0.05), PLAIN, "within"),
        (PLAIN + 0.1, PLAIN, "differ"),
        (PLAIN * 1.5, PLAIN, "differ"),
        (PLAIN[: LEAST_LOSSES - 1], PLAIN, ""),
    ],
)
def test_losses_are_compared(changed: np.ndarray, other_seed: np.ndarray, verdict: str) -> None:
    assert compared(of(PLAIN), of(changed), of(other_seed)) == verdict


def test_one_rank_that_differs_is_enough() -> None:
    plain, changed = of(PLAIN, 2), {**of(PLAIN, 2), **{("00001", n): 9.0 for n in range(N)}}
    assert compared(plain, plain, plain) == "equal"
    assert compared(plain, changed, of(FALLS + noise(1), 2)) == "differ"
    assert compared(of(NAN), of(NAN), of(PLAIN)) == "equal"


def test_losses_of_all_ranks_are_read_and_broken_lines_are_not(tmp_path: Path) -> None:
    for rank, text in enumerate(('{"step":0,"loss":0.1}\n{"step":0,"loss":null}\n', '[]\n{"step":0,"loss":2}\n{"ste')):
        (tmp_path / f"ranks/0000{rank}").mkdir(parents=True)
        (tmp_path / f"ranks/0000{rank}/losses.jsonl").write_text(text)
    found = dict(losses_of(tmp_path))
    assert math.isnan(found.pop(("00000", 1)))
    assert found == {("00000", 0): 0.1, ("00001", 1): 2.0}
