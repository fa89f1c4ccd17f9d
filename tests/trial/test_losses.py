"""Losses of two runs are the same, or as far apart as chance brings them, or they differ."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from dlprof.trial.losses import LEAST, Losses, compared, losses_of

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
        (PLAIN[: LEAST - 1], PLAIN, ""),
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
