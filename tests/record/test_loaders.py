"""How loaders of every make describe themselves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from dlprof.record.loaders import Pass, adopt, forget_passes, settings_of

torch = pytest.importorskip("torch", reason="recording needs torch")
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler  # noqa: E402

NUMBERS: Any = list(range(10))


class Endless(IterableDataset):  # type: ignore[type-arg]
    """Has no length."""

    def __iter__(self) -> Any:
        return iter(())


def some(settings: dict[str, Any], *names: str) -> tuple[Any, ...]:
    return tuple(settings[name] for name in names)


def test_a_plain_loader() -> None:
    settings = settings_of(DataLoader(NUMBERS, batch_size=4, shuffle=True, drop_last=True))
    assert some(settings, "num_workers", "batch_size", "shuffle", "drop_last") == (0, 4, True, True)
    assert some(settings, "dataset", "dataset_length", "iterable", "start_method") == ("list", 10, False, None)


def test_one_with_workers_names_how_they_start_without_deciding_it() -> None:
    import multiprocessing

    before = multiprocessing.get_start_method(allow_none=True)
    loader: Any = DataLoader(NUMBERS, num_workers=2, prefetch_factor=3, multiprocessing_context="spawn")
    assert some(settings_of(loader), "num_workers", "prefetch_factor", "start_method") == (2, 3, "spawn")
    method = settings_of(DataLoader(NUMBERS, num_workers=2))["start_method"]
    assert method == (before or multiprocessing.get_all_start_methods()[0])
    assert multiprocessing.get_start_method(allow_none=True) == before


def test_a_stream_has_no_length_and_no_order() -> None:
    settings = settings_of(DataLoader(Endless(), batch_size=2))
    assert some(settings, "dataset", "dataset_length", "iterable", "shuffle") == ("Endless", None, True, None)


def test_the_size_and_order_of_batches_are_those_of_a_batch_sampler_of_ones_own() -> None:
    data = NUMBERS
    batches = BatchSampler(RandomSampler(data), batch_size=3, drop_last=False)
    assert some(settings_of(DataLoader(data, batch_sampler=batches)), "batch_size", "shuffle") == (3, True)
    around: Any = SimpleNamespace(batch_sampler=batches, __len__=lambda: 4)  # as accelerate wraps the script's
    assert some(settings_of(DataLoader(data, batch_sampler=around)), "batch_size", "shuffle") == (3, True)


def test_samples_that_are_batches_have_no_batch_size() -> None:
    assert settings_of(DataLoader(NUMBERS, batch_size=None))["batch_size"] is None


def test_an_iterator_that_was_not_seen_being_made_gets_a_pass_once() -> None:
    iterator = SimpleNamespace(_dlprof_pass=None)
    over = adopt(iterator)
    assert over.loader is None
    assert over.began_ns > 0
    assert adopt(iterator) is iterator._dlprof_pass is over
    known = Pass(None, 1, 2)
    assert adopt(SimpleNamespace(_dlprof_pass=known)) is known
    over.reported, over.place = True, 3
    forget_passes()
    assert (over.loader, over.reported, over.place, over.unsettled) == (None, False, -1, True)
