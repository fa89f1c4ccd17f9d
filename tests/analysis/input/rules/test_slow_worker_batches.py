"""One slow worker: found with what equal workers would give; equal ones are left alone; without workers it abstains."""

from pathlib import Path

import pytest

from dlprof.analysis.input.rules.slow_worker_batches import RULE
from dlprof.result import Setting
from tests.fixtures import runs
from tests.fixtures.asking import ask
from tests.fixtures.runs import MS


def recorded(folder: Path, *, step: int, slow: int, workers: int = 4) -> Path:
    """Record a rank that computes 20 ms a step; its workers take 40 ms for a batch, the first `slow` ms more."""
    facts = {
        **runs.CPU,
        "loaders": [{"role": "train", "num_workers": workers, "prefetch_factor": 2}],
        "cpu": {"count": 16, "affinity": 16, "torch_threads": 1},
    }
    wait = (step - 20) * MS
    lines = [runs.light(k, step * MS, fetch_ns=wait) for k in range(60)]
    path = runs.recorded(folder / "run", (None, lines, facts))
    runs.loading(path, 0, step=step * MS, wait=wait, fetch=40 * MS, cpu=2 * MS, n=60, workers=workers, slow=slow * MS)
    return path


def test_a_slow_worker_is_found_with_what_equal_ones_would_give(tmp_path: Path) -> None:
    # It gives a batch in 160 ms, and so four in 160: 40 ms a step. As fast as the others, 20 ms are the loop's own.
    found = ask(RULE, recorded(tmp_path, step=40, slow=120))
    assert found.state == "found"
    assert found.saving_ns == pytest.approx(20 * MS, rel=0.1)
    assert "Worker 0 of rank 0 takes 160.0 ms for a batch, the others 40.0 ms" in found.summary
    assert (found.ranks, [cost.rank for cost in found.by_rank]) == ((0,), [0])
    assert [c.settings for c in found.changes] == [(), (Setting("in_order", None, False),)]


def test_equal_workers_are_left_alone(tmp_path: Path) -> None:
    clear = ask(RULE, recorded(tmp_path, step=40, slow=0))
    assert (clear.state, clear.share) == ("clear", 0.0)


def test_a_slow_worker_that_nobody_waits_for_is_left_alone(tmp_path: Path) -> None:
    clear = ask(RULE, recorded(tmp_path, step=20, slow=30))
    assert (clear.state, clear.share) == ("clear", 0.0)
    assert clear.summary == "0 % of each step waits for one slow loader worker"


def test_without_several_workers_it_abstains(tmp_path: Path) -> None:
    answer = ask(RULE, recorded(tmp_path, step=60, slow=0, workers=0))
    assert (answer.state, "two workers" in answer.why) == ("does_not_apply", True)
