"""How many samples and tokens batches hold, and of what they are made: within bounds, without the script's code."""

from __future__ import annotations

from collections import UserDict, namedtuple
from types import SimpleNamespace
from typing import Any

import pytest

from dlprof.record.batches import BatchSize, look_at, samples_of, size_of
from dlprof.record.loaders import Pass

torch = pytest.importorskip("torch", reason="recording needs torch")

Pair = namedtuple("Pair", "image label")


def passing(batch_size: int | None = None, length: int | None = None) -> Pass:
    return Pass(SimpleNamespace(settings={"batch_size": batch_size, "dataset_length": length}), 0, 0)  # type: ignore[arg-type]


def images(n: int) -> Any:
    return torch.zeros(n, 3, 2, 2)


@pytest.mark.parametrize(
    ("batch", "of"),
    [
        ([images(4), torch.zeros(4)], 4),
        (Pair(images(4), torch.zeros(4)), 4),
        ({"input_ids": torch.zeros(4, 9, dtype=torch.int64)}, 4),
        (UserDict(input_ids=torch.zeros(4, 9, dtype=torch.int64)), 4),
        (images(4), 4),
        # What does not show its samples has as many as the loader's batches.
        ([[torch.zeros(3, 2, 2), torch.zeros(3, 5, 5)], [{"boxes": torch.zeros(7, 4)}]], 4),
        (["a.jpg", "b.jpg"], 4),
        (SimpleNamespace(x=torch.zeros(90, 3)), 4),
        (torch.tensor(3.0), 4),
    ],
)
def test_batches_of_a_loader_with_a_batch_size(batch: object, of: int) -> None:
    assert samples_of(batch, passing(4)) == of


def test_a_data_set_that_is_smaller_than_a_batch_is_one() -> None:
    over = passing(4, length=3)
    assert [samples_of([images(n)], over) for n in (3, 3)] == [3, 3]


@pytest.mark.parametrize(
    ("batch", "of"),
    [
        ([images(6), torch.zeros(6)], 6),
        ([images(6), torch.zeros(6), torch.tensor(3.0)], -1),
        ([images(6), torch.zeros(5)], -1),
        ([torch.zeros(0, 2)], -1),
        ("text", -1),
        ([], -1),
    ],
)
def test_batches_of_a_loader_without_one_must_agree(batch: object, of: int) -> None:
    assert samples_of(batch, passing()) == of


def test_batches_of_a_bucketing_sampler_are_counted_one_by_one() -> None:
    over = passing()
    assert [samples_of({"x": torch.zeros(n, 5), "n": torch.zeros(n)}, over) for n in (6, 9, 2)] == [6, 9, 2]


def test_a_pass_whose_loader_was_not_seen_counts_by_its_tensors() -> None:
    assert samples_of([images(5), torch.zeros(5)], Pass(None, 0, 0)) == 5


@pytest.mark.parametrize(
    ("first", "shape", "tokens"),
    [
        (torch.zeros(8, 16, dtype=torch.int64), 8, 128),
        (torch.zeros(8, 16), 8, 0),
        (torch.zeros(8, 3, 4, 4, dtype=torch.uint8), 8, 0),
        (torch.zeros(8, dtype=torch.int64), 8, 0),
        (torch.tensor(3), -1, 0),
        (torch.nn.Parameter(torch.zeros(2, 2)), -1, 0),
        (torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]), -1, 0),
        ({"x": torch.zeros(8)}, -1, 0),
        (None, -1, 0),
    ],
)
def test_what_a_module_gets(first: Any, shape: int, tokens: int) -> None:
    assert look_at(first) == (shape, tokens)


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
