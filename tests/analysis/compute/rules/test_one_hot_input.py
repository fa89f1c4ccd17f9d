"""One-hot rows that are multiplied: found with what an embedding leaves, silent on embeddings and on targets."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlprof.analysis.compute.rules.one_hot_input import RULE
from tests.fixtures import operators
from tests.fixtures.asking import ask
from tests.fixtures.runs import MS

CALLED = [("aten::one_hot", 4 * MS), ("aten::to", 3 * MS), ("aten::matmul", 2 * MS), ("aten::matmul", MS)]
BACKS = [("MmBackward0", MS), ("MmBackward0", MS), ("MmBackward0", 2 * MS)]
# 1,000 rows of 1,000 words, 100 wide: the product moves 1.2 million values, of which the chosen rows are a sixth.
SHAPES = [
    {"operator": "aten::mm", "dtype": "float32", "shape": "1000x1000 1000x100", "calls": 1, "flops": 1, "bytes": 1}
]
FLOPS = {"state": "counted", "total": 1, "shapes": SHAPES, "one_hot": [{"values": 1_000_000, "classes": 1_000}]}


@pytest.mark.parametrize("on_cpu", [False, True])
def test_found_with_what_an_embedding_leaves(tmp_path: Path, on_cpu: bool) -> None:
    found = ask(RULE, operators.job(tmp_path, *CALLED, *BACKS, on_cpu=on_cpu, flops=FLOPS))
    assert found.state == "found"
    left = 2 * (1 / 6 + 1 / 3)  # forward the rows, backward the matrix too, of 2 ms each
    assert found.saving_ns == pytest.approx((4 + 3 + 2 + 2 - left) * MS, rel=0.02)
    assert "embedding(index, weight)" in found.advice[0]


def test_without_shapes_the_product_stays_as_long_as_it_is(tmp_path: Path) -> None:
    found = ask(RULE, operators.job(tmp_path, *CALLED, *BACKS))
    assert found.saving_ns == pytest.approx(7 * MS, rel=0.02)


@pytest.mark.parametrize("other", ["aten::embedding", "aten::mul", "aten::cat"])
def test_what_multiplies_no_one_hot_rows_is_left_alone(tmp_path: Path, other: str) -> None:
    called = [CALLED[0], (other, MS), CALLED[2]] if other != "aten::embedding" else [(other, MS), CALLED[2]]
    clear = ask(RULE, operators.job(tmp_path, *called))
    assert (clear.state, clear.share) == ("clear", 0)
