"""Products with one-hot rows: found with what an embedding moves in their place, by traced or counted shapes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.chains.one_hot import GRADIENT, ONE_HOT, one_hots
from tests.fixtures import operators
from tests.fixtures.runs import MS

torch: Any = pytest.importorskip("torch")
F: Any = torch.nn.functional

N, V, H = 32, 128, 16
WORDS = torch.arange(N) % V
# Of what the product moves: rows read and written; backward the whole matrix, too.
MOVED = N * V + V * H + N * H
FORWARD, BACKWARD = 2 * N * H / MOVED, 2 * (N + V) * H / MOVED


def scattered() -> Any:
    return torch.zeros(N, V).scatter_(1, WORDS[:, None], 1.0)


WAYS: dict[str, Callable[[Any], Any]] = {
    "one_hot": lambda w: F.one_hot(WORDS, V).float() @ w,
    "scatter_": lambda w: scattered() @ w,
    "linear": lambda w: F.linear(F.one_hot(WORDS, V).to(w.dtype), w.t()),
}


@pytest.mark.parametrize("name", WAYS)
def test_a_product_with_one_hot_rows_is_found_with_its_gradient(tmp_path: Path, name: str) -> None:
    weight, layer = torch.randn(V, H, requires_grad=True), torch.nn.Linear(H, 4)
    run = lambda: layer(torch.tanh(WAYS[name](weight))).sum().backward()  # noqa: E731
    frame = operators.profiled(torch, tmp_path, run).once(one_hots).set_index("form")
    assert set(frame.index) == {ONE_HOT, GRADIENT}
    assert frame["calls"].tolist() == [1, 1]
    # The product's kernel takes as long as its largest operand has values.
    product = operators.LEAST + max(N * V, V * H)
    assert frame.loc[ONE_HOT, "left_ns"] == pytest.approx(max(FORWARD * product, operators.LEAST))
    assert frame["ns"].max() >= 2 * product


ALONE: dict[str, Callable[[Any], Any]] = {
    "embedding": lambda w: F.embedding(WORDS, w),
    "with something else": lambda w: torch.cat([F.one_hot(WORDS, V).float(), torch.ones(N, 4)], 1)[:, :V] @ w,
    "as targets": lambda w: ((torch.ones(N, H) @ w.t()) * F.one_hot(WORDS, V)).sum(-1, keepdim=True),
}


@pytest.mark.parametrize("name", ALONE)
def test_other_rows_are_left_alone(tmp_path: Path, name: str) -> None:
    weight = torch.randn(V, H, requires_grad=True)
    assert operators.profiled(torch, tmp_path, lambda: ALONE[name](weight).sum().backward()).once(one_hots).empty


CALLED = [("aten::one_hot", 4 * MS), ("aten::to", 3 * MS), ("aten::matmul", 2 * MS), ("aten::matmul", MS)]
BACKS = [("MmBackward0", MS), ("MmBackward0", MS), ("MmBackward0", 2 * MS)]


def counted(shape: str, values: int = N * V) -> dict[str, Any]:
    rows = [{"operator": "aten::mm", "dtype": "float32", "shape": shape, "calls": 1, "flops": 1, "bytes": 1}]
    return {"flops": {"state": "counted", "total": 1, "shapes": rows, "one_hot": [{"values": values, "classes": V}]}}


def test_shapes_of_the_counted_step_are_those_of_the_one_hot_rows(tmp_path: Path) -> None:
    facts = counted(f"{N}x{V} {V}x{H}")
    frame = operators.rank_of(operators.job(tmp_path, *CALLED, *BACKS, **facts)).once(one_hots).set_index("form")
    assert frame.loc[ONE_HOT, "ns"] == pytest.approx(9 * MS)
    assert frame.loc[ONE_HOT, "left_ns"] == pytest.approx(FORWARD * 2 * MS)
    # The last of the backward functions is that of the first product.
    assert frame.loc[GRADIENT, "ns"] == pytest.approx(2 * MS)
    assert frame.loc[GRADIENT, "left_ns"] == pytest.approx(BACKWARD * 2 * MS)


@pytest.mark.parametrize("facts", [{}, counted("64x64 64x64"), counted(f"{N}x{V} {V}x{H}", values=7 * V)])
def test_without_its_shapes_all_of_the_product_is_left(tmp_path: Path, facts: dict[str, Any]) -> None:
    frame = operators.rank_of(operators.job(tmp_path, *CALLED, *BACKS, **facts)).once(one_hots)
    assert frame["form"].tolist() == [ONE_HOT]
    assert frame["left_ns"].sum() == pytest.approx(2 * MS)


def test_where_backward_functions_are_not_as_many_as_products_none_is_taken_for_another(tmp_path: Path) -> None:
    facts = counted(f"{N}x{V} {V}x{H}")
    frame = operators.rank_of(operators.job(tmp_path, *CALLED, *BACKS[1:], **facts)).once(one_hots)
    assert frame["form"].tolist() == [ONE_HOT]
