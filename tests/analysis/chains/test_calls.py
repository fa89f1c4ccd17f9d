"""The operators of each thread as letters, what chains of them take, and what one operator in place of each gains."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from dlprof.analysis.chains.calls import Calls, Chain, calls, gains, replaced
from dlprof.analysis.engine import Maybe, RankData
from dlprof.read.run import open_run
from tests.fixtures import layers, operators, runs, traces
from tests.fixtures.runs import MS

US = 1_000


def of(path: Path) -> Calls:
    return RankData(open_run(path).ranks[0]).once(calls)


def test_only_what_lies_in_no_other_operator_counts_thread_after_thread(tmp_path: Path) -> None:
    made = traces.trace(
        traces.step(0, 0, MS),
        traces.op("aten::layer_norm", 0, 100 * US),
        traces.op("aten::mean", 10 * US, 10 * US),
        traces.op("aten::mul", 200 * US, 10 * US),
        traces.op("aten::view", 220 * US, 5 * US),
        traces.op("MyFunction", 300 * US, 100 * US),
        traces.op("aten::rsqrt", 310 * US, 10 * US),
        traces.op("autograd::engine::evaluate_function: MulBackward0", 500 * US, 50 * US, tid=traces.AUTOGRAD),
        traces.op("MulBackward0", 501 * US, 20 * US, tid=traces.AUTOGRAD),
        traces.op("aten::mul", 502 * US, 10 * US, tid=traces.AUTOGRAD),
        traces.op("aten::sum", 530 * US, 10 * US, tid=traces.AUTOGRAD),
        traces.op("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 560 * US, 5 * US),
        world_size=1,
    )
    found = runs.rank_of(tmp_path, made).once(calls)
    # What a function of the script's own calls is the script's; views and the leaves' gradients have no letter.
    assert found.text == "oxrX"
    assert list(found.find(re.compile("xr"))) == [(1, 3)]
    assert list(found.find(re.compile("rX"))) == []  # of two threads


def test_a_call_takes_what_its_kernels_take_in_the_steady_steps(tmp_path: Path) -> None:
    found = of(operators.job(tmp_path, ("aten::mean", 3 * MS), ("aten::view", 0), ("MulBackward0", 2 * MS)))
    assert found.text == "m1" * 3 + "X" * 3
    steps = int((found.ns[[0, 2, 4]] > 0).sum())
    assert found.ns[found.ns > 0].tolist()[:2] == [3 * MS, 20 * MS]
    assert found.took(np.arange(6)) == steps * 23 * MS
    assert sorted(np.unique(found.kernel_of).tolist()) == list(range(9))
    backs = found.step[6:]
    assert sorted(backs[backs >= 0].tolist()) == list(range(steps))


def test_on_a_cpu_it_takes_its_own_time_until_the_next_one(tmp_path: Path) -> None:
    found = of(operators.job(tmp_path, ("aten::mean", 3 * MS), ("aten::rsqrt", MS), on_cpu=True))
    assert found.text == "mr1" * 3
    assert found.took(np.arange(2)) == pytest.approx(4 * MS + 2 * US)
    assert found.step.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert not len(found.kernel_of)


def test_numbers_tell_which_operator_made_a_function(tmp_path: Path) -> None:
    def function(name: str, start: int, number: int) -> traces.Event:
        return layers.function(name, start * US, 5 * US, number, traces.AUTOGRAD)

    made = traces.trace(
        traces.step(0, 0, MS),
        layers.called("", "Net", 0, 60 * US),  # without a module the numbers are not read
        layers.forward("mul", 0, 5 * US, 1),
        layers.forward("softmax", 10 * US, 20 * US, 2),
        layers.forward("_softmax", 12 * US, 10 * US, 2),  # within it
        layers.forward("mul", 40 * US, 5 * US, 3),
        *(function("MulBackward0", 100, 3), function("SoftmaxBackward0", 110, 2), function("MulBackward0", 120, 1)),
        function("MulBackward0", 130, 900),  # of what the trace does not hold
        world_size=1,
    )
    found = runs.rank_of(tmp_path, made).once(calls)
    assert found.text == "xfxXFXX"
    assert found.made(0, 3).tolist() == [3, 4, 5]
    assert found.made(1, 3).tolist() == [3, 4]
    assert found.made(0, 1).tolist() == [5]


def test_without_numbers_as_many_functions_as_operators_are_theirs_the_other_way_round(tmp_path: Path) -> None:
    called = operators.times(["aten::mul", "aten::sum", "aten::mul"], MS)
    backs = operators.times(["MulBackward0", "SumBackward0", "SumBackward0", "MulBackward0"], MS)
    found = of(operators.job(tmp_path, *called, *backs, steps=1, on_cpu=True))
    assert found.text == "xsxXSSX1"
    assert found.made(0, 1).tolist() == [6]
    assert found.made(2, 3).tolist() == [3]
    assert found.made(0, 3).tolist() == [3, 6]  # one of two functions is not that of the sum


TEN = operators.times(["aten::mul"] * 10, MS)
SHORT = operators.times(["aten::mul"] * 10, US)


@pytest.mark.parametrize(
    ("called", "how", "left", "ns", "left_ns", "gain_ns"),
    [
        (TEN, {}, 0.2, 10 * MS, 2 * MS, 8 * MS),
        (TEN, {}, 0.0, 10 * MS, 0, 10 * MS),
        (TEN, {"on_cpu": True}, 0.2, 10 * MS, 2 * MS, 8 * MS),
        # An empty kernel takes 2 µs; of the launches, 12 µs apart, hardly one is left.
        (SHORT, {}, 0.01, 10 * US, 2 * US, 0.99 * 120 * US),
        # Each launched 12 µs after the one before, of which two in ten are left.
        (SHORT, {"rest": 200 * US, "waits": False}, 0.2, 10 * US, 2 * US, 96 * US),
    ],
    ids=["a device", "nothing left", "a CPU", "an empty kernel", "a late host"],
)
def test_what_one_operator_in_place_of_ten_gains(
    tmp_path: Path, called: Any, how: Any, left: float, ns: float, left_ns: float, gain_ns: float
) -> None:
    rank = RankData(open_run(operators.job(tmp_path, *called, **how)).ranks[0])
    text = rank.once(calls).text
    starts = [n for n in range(len(text)) if text.startswith("x" * 10, n)]
    assert len(starts) == 3
    chains = [Chain("products", "forward", np.arange(n, n + 10), left) for n in starts]
    (row,) = rank.once(replaced)(chains).to_dict("records")
    assert (row["form"], row["passes"], row["calls"], row["operators"]) == ("products", "forward", 1, 10)
    assert (row["ns"], row["left_ns"]) == pytest.approx((ns, left_ns), rel=0.01)
    assert row["gain_ns"] == pytest.approx(gain_ns, rel=0.15)
    assert rank.once(replaced)([]).empty


def test_what_the_profiler_made_longer_is_brought_to_all_steps_on_a_cpu() -> None:
    chains = pd.DataFrame({"rank": [0, 0, 1], "gain_ns": [4.0, 4.0, 2.0]})
    whole = Maybe(lambda: pd.DataFrame({"rank": [0, 1], "operators_ns": [50.0, 100.0]}))
    traced = Maybe(lambda: pd.DataFrame({"rank": [0, 1], "operators_ns": [100.0, 100.0]}))
    assert gains(chains, whole, traced, on_cpu=False) == {0: 4.0, 1: 2.0}
    assert gains(chains, whole, traced, on_cpu=True) == {0: 2.0, 1: 2.0}
