"""How long the training thread stands still, from what the kernel counted, and where that tells nothing."""

from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.engine import RankData
from dlprof.analysis.step.blocked import blocked, contention
from dlprof.errors import NotMeasured
from dlprof.read.run import Rank
from tests.fixtures import runs
from tests.fixtures.runs import MS

FACTS = {**runs.CPU, "backend": "gloo", "cpu": {"torch_threads": 1}}


def rank_with(
    folder: Path, facts: dict[str, Any], waits: int = 2 * MS, n: int = 20, files: str = "steps loading", **used: Any
) -> RankData:
    """Return a rank of steps of 10 ms, of which its training thread stands still for some."""
    path = runs.recorded(folder / "run", (None, [runs.light(k, 10 * MS) for k in range(n)], facts))
    runs.loading(path, 0, **{"step": 10 * MS, "wait": waits, "fetch": 0, "cpu": 0, "n": n, "workers": 1} | used)
    at = path / "ranks" / "00000"
    return RankData(Rank(0, {name: at / f"{name}.jsonl" for name in files.split()}, facts))


def test_what_is_neither_run_nor_waited_for_a_core_is_stood_still(tmp_path: Path) -> None:
    assert rank_with(tmp_path, FACTS).once(blocked) == pytest.approx((2 * MS, 0.0), abs=1)


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
    assert rank_with(tmp_path, FACTS | other).once(blocked) is None


def test_a_few_readings_are_not_enough(tmp_path: Path) -> None:
    assert rank_with(tmp_path, FACTS, n=6).once(blocked) is None


def test_what_computes_beside_the_training_thread(tmp_path: Path) -> None:
    """Of 8 ms that the process computes in a step, 5 are the training thread's; a worker 1.5 for each batch."""
    used = {"delay": MS, "thread": 5 * MS, "cpu": 3 * MS // 2, "fetch": 2 * MS}
    frame = rank_with(tmp_path / "a", FACTS, files="steps loading fetches", **used).once(contention)
    assert frame.to_dict("records") == [{"delay_ns": MS, "others_ns": 3 * MS, "loader_ns": 1.5 * MS}]
    # Without workers the loader computes in the training thread.
    frame = rank_with(tmp_path / "b", FACTS, workers=0, delay=MS, thread=5 * MS).once(contention)
    assert frame.to_dict("records") == [{"delay_ns": MS, "others_ns": 3 * MS, "loader_ns": 0.0}]


def test_what_computes_beside_it_is_not_told_where_that_is_not_known(tmp_path: Path) -> None:
    with pytest.raises(NotMeasured, match="threads"):
        rank_with(tmp_path / "a", FACTS | {"cpu": {"torch_threads": 4}}).once(contention)
    # There are workers, and nobody saw what they fetch.
    with pytest.raises(NotMeasured, match="each batch"):
        rank_with(tmp_path / "b", FACTS).once(contention)
