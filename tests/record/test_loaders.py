"""Samples are known again by their content, without a call of the script's code."""

from __future__ import annotations

from typing import Any

import pytest

from dlprof.record.loaders import UNWATCHED, SampleDigests

torch = pytest.importorskip("torch", reason="recording needs torch")
numpy = pytest.importorskip("numpy")


class Data(list[Any]):
    """A data set of sixteen samples."""


X = torch.arange(12.0).reshape(3, 4)
SAME = {
    "a tensor": (X, X.clone(), X + 1),
    "its shape": (X, X.clone(), X.reshape(4, 3)),
    "its kind of numbers": (torch.zeros(4), torch.zeros(4), torch.zeros(2, dtype=torch.float64)),
    "a tensor that is a view": (X.T, X.T.contiguous(), X),
    "a tensor of half precision": (X.bfloat16(), X.bfloat16(), X.half()),
    "a tensor with a gradient": (X.clone().requires_grad_(), X, X + 1),
    "an array": (numpy.arange(3), numpy.arange(3), numpy.arange(1, 4)),
    "a number of NumPy": (numpy.float32(1.5), numpy.float32(1.5), numpy.float32(2.5)),
    "what is put together": ((X, 3), (X.clone(), 3), (X, 4)),
    "names": ({"x": X, "y": 1}, {"x": X.clone(), "y": 1}, {"x": X, "z": 1}),
    "texts": (["a", b"b", None, True], ["a", b"b", None, True], ["a", b"b", None, False]),
}


def digest(sample: Any) -> tuple[int, ...]:
    return SampleDigests().see(Data([sample] * 16), [3], [sample])


@pytest.mark.parametrize("name", SAME)
def test_what_a_digest_tells_apart(name: str) -> None:
    one, same, other = map(digest, SAME[name])
    assert one == same != other
    assert one[:2] == (3, 16)
    assert one[3] > 0


@pytest.mark.parametrize("sample", [object(), [0] * 100, torch.zeros(1 << 23), X.to_sparse(), {1, 2}])
def test_no_digest_is_made_of_other_kinds_or_of_much(sample: Any) -> None:
    assert digest(sample) == UNWATCHED


def test_a_few_samples_are_watched_and_for_no_long() -> None:
    digests, data = SampleDigests(), Data([0] * 160)
    seen = [digests.see(data, [n, n + 1], [0, 0])[0] for _ in range(20) for n in range(0, 160, 2)]
    assert set(seen) == {-1, *range(0, 160, 10)}
    assert sum(one >= 0 for one in seen) == 96
    assert SampleDigests().see(data, 3, 0) == SampleDigests().see([], [0], [0]) == UNWATCHED
    assert SampleDigests().see(data, ["a", 10], [1, 2])[0] == 10
