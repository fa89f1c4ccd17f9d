"""Tensors that grow by `cat` in a loop: found by their calls' times, and what else calls `cat` left alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.chains.growing import LEAST_CALLS, growing_cats
from tests.fixtures import operators
from tests.fixtures.runs import MS

torch: Any = pytest.importorskip("torch")

PIECES, ROWS, WIDTH = 12, 64, 64


def grown(x: Any, times: int = PIECES) -> Any:
    made = x
    for _ in range(times):
        made = torch.cat([made, torch.tanh(x)])
    return made


def two_grow(x: Any) -> Any:
    first, second = x, x
    for _ in range(PIECES):
        first = torch.cat([first, torch.tanh(x)])
        second = torch.cat([second, x * 2])
    return first + second


def twice(x: Any) -> Any:
    return grown(x) + grown(x)


@pytest.mark.parametrize(("loop", "tensors"), [(grown, 1), (two_grow, 2), (twice, 2)])
def test_a_tensor_that_grows_is_found(tmp_path: Path, loop: Callable[[Any], Any], tensors: int) -> None:
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    frame = operators.profiled(torch, tmp_path, lambda: loop(x).sum().backward()).once(growing_cats)
    (forward,) = frame[frame["passes"] == "forward"].to_dict("records")
    assert forward["calls"] == tensors * PIECES
    # A kernel takes as long as its operands have values.
    each = [operators.LEAST + (n + 1) * ROWS * WIDTH for n in range(1, PIECES + 1)]
    assert forward["ns"] == tensors * sum(each)
    assert forward["left_ns"] == tensors * each[-1]


def listed(x: Any) -> Any:
    return torch.cat([torch.tanh(x) for _ in range(PIECES)])


def dense(x: Any) -> Any:
    """Return features as DenseNet does: each layer reads all before it."""
    made = x
    for _ in range(PIECES):
        made = torch.cat([made, torch.tanh(made * 2)[:ROWS]])
    return made


def skips(x: Any) -> Any:
    return [torch.cat([x, torch.tanh(x)]) for _ in range(PIECES)][-1]


def few(x: Any) -> Any:
    return grown(x, LEAST_CALLS - 1)


def shrinking(x: Any) -> Any:
    made = x.repeat(PIECES, 1)
    for n in range(PIECES):
        made = torch.cat([torch.tanh(made[n * ROWS :]), x])
    return made


@pytest.mark.parametrize("loop", [listed, dense, skips, few, shrinking])
def test_other_calls_of_cat_are_left_alone(tmp_path: Path, loop: Callable[[Any], Any]) -> None:
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    assert operators.profiled(torch, tmp_path, lambda: loop(x).sum().backward()).once(growing_cats).empty


def test_one_call_that_is_held_up_hides_none(tmp_path: Path) -> None:
    called = [("aten::tanh", MS // 10), ("aten::cat", 0)] * 10
    called = [(name, ns or (place // 2 + 1) * MS // 10) for place, (name, ns) in enumerate(called)]
    called[15] = ("aten::cat", 4 * MS)  # in place of 0.8 ms
    path = operators.job(
        tmp_path, *called, *operators.times(["CatBackward0"] * 10 + ["MmBackward0"], 1_000), on_cpu=True
    )
    frame = operators.rank_of(path).once(growing_cats)
    assert frame["calls"].tolist() == [10, 10]
    assert frame["gain_ns"].iloc[0] == pytest.approx((4.5 - 0.8 + 4) * MS + 9_000, rel=0.01)
