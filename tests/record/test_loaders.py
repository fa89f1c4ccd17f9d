"""Samples are known again by their content, without a call of the script's code."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dlprof.record.loaders import UNWATCHED, SampleDigests, described, settings_of

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
    "a tensor of one value, of any strides": (X.as_strided((1,), (9,)), X[0, :1], X[1, :1]),
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


class StandsIn:
    """What fastai's DataLoader `d` hands to PyTorch's iterators: it has no attribute that they do not read."""

    _auto_collation, drop_last, in_order, pin_memory, timeout, num_workers = False, False, True, False, 0, 0
    persistent_workers, pin_memory_device, prefetch_factor, worker_init_fn, generator = False, "", 2, None, None
    multiprocessing_context = _IterableDataset_len_called = None
    _dataset_kind, _index_sampler = 1, iter(range(9))

    def __init__(self, d: Any) -> None:
        self.d, self.dataset = d, self

    def collate_fn(self, batch: Any) -> Any:
        return batch

    def _get_shared_seed(self) -> None: ...

    def __iter__(self) -> Any:
        return iter([[1, 2]] * 8)


def test_what_stands_for_a_loader_is_described_by_what_it_stands_for() -> None:
    from torch.utils.data import DataLoader, dataloader

    own = SimpleNamespace(dataset=Data([0] * 16), bs=2, drop_last=True, shuffle=True)
    loader = StandsIn(own)
    seen = settings_of(described(loader, dataloader._SingleProcessDataLoaderIter(loader)))
    assert {k: seen[k] for k in ("batch_size", "dataset", "dataset_length", "drop_last", "shuffle")} == {
        "batch_size": 2, "dataset": "Data", "dataset_length": 16, "drop_last": True, "shuffle": True,
    }  # fmt: skip
    assert described(loader, iter([])) is None
    real: DataLoader[Any] = DataLoader(own.dataset)
    assert described(real, iter(real)) is real
