"""What chains take, and what a step gains where one operator stands in place of each."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from dlprof.analysis.chains.calls import Chain, calls, gains, replaced
from dlprof.analysis.engine import Maybe, RankData
from dlprof.read.run import open_run
from tests.fixtures import operators
from tests.fixtures.runs import MS

US = 1_000
TEN = operators.times(["aten::mul"] * 10, MS)


def made(path: Path, left: float) -> pd.DataFrame:
    """Return what becomes of ten products in each step, of which a share is left."""
    rank = RankData(open_run(path).ranks[0])
    starts = [n for n in range(len(rank.once(calls).text)) if rank.once(calls).text.startswith("x" * 10, n)]
    chains = [Chain("products", "forward", np.arange(n, n + 10), left) for n in starts]
    assert len(chains) == 3
    frame: pd.DataFrame = rank.once(replaced)(chains)
    return frame


def test_a_device_gains_the_time_of_the_kernels_that_are_gone(tmp_path: Path) -> None:
    (row,) = made(operators.job(tmp_path, *TEN), 0.2).to_dict("records")
    assert (row["form"], row["passes"], row["calls"], row["operators"]) == ("products", "forward", 1, 10)
    assert row["ns"] == pytest.approx(10 * MS)
    assert row["left_ns"] == pytest.approx(2 * MS)
    assert row["gain_ns"] == pytest.approx(8 * MS, rel=0.01)


def test_nothing_is_left_of_what_is_gone_and_an_empty_kernel_of_the_rest(tmp_path: Path) -> None:
    (row,) = made(operators.job(tmp_path / "gone", *TEN), 0.0).to_dict("records")
    assert (row["left_ns"], row["gain_ns"]) == (0, pytest.approx(10 * MS, rel=0.01))
    (row,) = made(operators.job(tmp_path / "small", *operators.times(["aten::mul"] * 10, US)), 0.01).to_dict("records")
    assert row["left_ns"] == 2 * US


def test_a_host_that_launches_each_too_late_gains_its_launches(tmp_path: Path) -> None:
    # Kernels of 1 µs, each launched 12 µs after the one before, of which two in ten are left.
    path = operators.job(tmp_path, *operators.times(["aten::mul"] * 10, US), rest=200 * US, waits=False)
    (row,) = made(path, 0.2).to_dict("records")
    assert row["ns"] == pytest.approx(10 * US)
    assert 50 * US < row["gain_ns"] < 120 * US


def test_a_cpu_gains_what_the_operators_take(tmp_path: Path) -> None:
    (row,) = made(operators.job(tmp_path, *TEN, on_cpu=True), 0.2).to_dict("records")
    assert row["ns"] == pytest.approx(10 * MS, rel=0.01)
    assert row["gain_ns"] == pytest.approx(8 * MS, rel=0.01)


def test_no_chain_is_an_empty_frame(tmp_path: Path) -> None:
    rank = RankData(open_run(operators.job(tmp_path, *TEN)).ranks[0])
    assert rank.once(replaced)([]).empty


def test_what_the_profiler_made_longer_is_brought_to_all_steps_on_a_cpu() -> None:
    chains = pd.DataFrame({"rank": [0, 0, 1], "gain_ns": [4.0, 4.0, 2.0]})
    whole = Maybe(lambda: pd.DataFrame({"rank": [0, 1], "operators_ns": [50.0, 100.0]}))
    traced = Maybe(lambda: pd.DataFrame({"rank": [0, 1], "operators_ns": [100.0, 100.0]}))
    assert gains(chains, whole, traced, on_cpu=False) == {0: 4.0, 1: 2.0}
    assert gains(chains, whole, traced, on_cpu=True) == {0: 2.0, 1: 2.0}
