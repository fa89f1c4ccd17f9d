"""How long the training thread stands still, from what the kernel counted, and where that tells nothing."""

from pathlib import Path
from typing import Any

import pytest

from dlprof.engine import RankData
from dlprof.measures.blocked import blocked
from dlprof.run import Rank
from tests import runs
from tests.runs import MS

FACTS = {**runs.CPU, "backend": "gloo", "cpu": {"torch_threads": 1}}


def rank_with(folder: Path, facts: dict[str, Any], waits: int = 2 * MS, n: int = 20) -> RankData:
    """Give a rank of steps of 10 ms, of which its training thread stands still for some."""
    path = runs.recorded(folder / "run", (None, [runs.light(k, 10 * MS) for k in range(n)], facts))
    runs.loading(path, 0, step=10 * MS, wait=waits, fetch=0, cpu=0, n=n, workers=1)
    at = path / "ranks" / "00000"
    return RankData(Rank(0, {name: at / f"{name}.jsonl" for name in ("steps", "loading")}, facts))


def test_what_is_neither_run_nor_waited_for_a_core_is_stood_still(tmp_path: Path) -> None:
    assert blocked(rank_with(tmp_path, FACTS)) == pytest.approx((2 * MS, 0.0), abs=1)


@pytest.mark.parametrize(
    "other",
    [
        {"cpu": {"torch_threads": 4}},  # it waits for the threads that compute with it
        {"backend": "mpi"},  # it runs while it waits
        {"device": {"type": "cuda"}},  # it waits for the device
        {"backend": None},
    ],
)
def test_where_standing_still_says_little_it_is_not_told(tmp_path: Path, other: dict[str, Any]) -> None:
    assert blocked(rank_with(tmp_path, FACTS | other)) is None


def test_a_few_readings_are_not_enough(tmp_path: Path) -> None:
    assert blocked(rank_with(tmp_path, FACTS, n=6)) is None
