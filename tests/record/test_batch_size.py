"""What a batch is made of: counted in every nesting, within bounds, without calling the script's code."""

from collections import UserDict
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="recording needs torch")

from dlprof.record.batch_size import BatchSize, size_of  # noqa: E402 - it asks torch


class Sample:
    """As libraries make them: tensors in attributes, one of them a ring."""

    def __init__(self) -> None:
        self.x, self.y, self.itself = torch.zeros(3), [torch.zeros(2, dtype=torch.int64)], self

    def __len__(self) -> int:
        raise AssertionError("called")

    def __getattr__(self, _: str) -> Any:
        raise AssertionError("asked")


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (torch.zeros(4, 8), (1, 128)),
        ([torch.zeros(2), {"a": torch.zeros(1, dtype=torch.uint8), "b": ("text", 3)}], (2, 9)),
        (UserDict(a=torch.zeros(2)), (1, 8)),
        (torch.nn.Parameter(torch.zeros(2)), (1, 0)),
        (7, (0, 0)),
        (list(range(5_000)), (-1, -1)),
        ([torch.zeros(2).to_sparse(), torch.zeros(2)], (2, 8)),
    ],
)
def test_tensors_are_counted_with_their_bytes(batch: object, size: tuple[int, int]) -> None:
    assert size_of(batch) == size


def test_attributes_are_looked_at_and_not_asked_for() -> None:
    assert size_of(Sample()) == (2, 28)


def test_the_first_batches_are_looked_at_and_then_few() -> None:
    batches = BatchSize()
    seen = [batches.see(torch.zeros(n)) for n in range(1, 65)]
    assert sorted(set(seen)) == [(1, 4 * n) for n in (1, 2, 3, 4, 32, 64)]
