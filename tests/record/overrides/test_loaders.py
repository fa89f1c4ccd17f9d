"""Every DataLoader is made with the settings asked for, and one that cannot be as the script says."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Iterator
from typing import Any

import pytest

from tests.fixtures.overriding import done, overriding

torch: Any = pytest.importorskip("torch", reason="recording needs torch")

from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, get_worker_info  # noqa: E402

from dlprof.record.overrides.loaders import install  # noqa: E402

DATA: Any = TensorDataset(torch.arange(12))


def seen(loader: Any) -> tuple[int, int | None, bool]:
    return loader.num_workers, loader.prefetch_factor, loader.persistent_workers


def numbers(loader: Any) -> list[int]:
    return sorted(int(n) for (batch,) in loader for n in batch)


def test_workers_are_started_and_give_the_same_samples_in_the_same_order() -> None:
    with overriding(
        install, "loader.num_workers=2", "loader.prefetch_factor=3", "loader.persistent_workers=on"
    ) as effects:
        loader = DataLoader(DATA, batch_size=5)
        assert seen(loader) == (2, 3, True)
        assert [batch.tolist() for (batch,) in loader] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11]]
        assert done(effects, "loader.num_workers") == (1, [0], None)
        assert done(effects, "loader.prefetch_factor") == (1, [None], None)
    assert seen(DataLoader(DATA)) == (0, None, False)


def test_all_loaders_are_changed_those_of_the_validation_too() -> None:
    with overriding(install, "loader.num_workers=1") as effects:
        assert [seen(DataLoader(DATA, num_workers=n))[0] for n in (0, 2)] == [1, 1]
        assert done(effects, "loader.num_workers") == (2, [0, 2], None)


def test_without_workers_what_belongs_to_them_goes_too() -> None:
    with overriding(install, "loader.num_workers=0") as effects:
        loader = DataLoader(
            DATA, num_workers=2, prefetch_factor=4, persistent_workers=True, timeout=9, multiprocessing_context="fork"
        )
        assert seen(loader) == (0, None, False)
        assert (loader.timeout, loader.multiprocessing_context) == (0, None)
        assert numbers(loader) == list(range(12))
        assert done(effects, "loader.num_workers") == (1, [2], None)


def test_a_loader_without_workers_takes_nothing_of_theirs_and_that_is_noted() -> None:
    with overriding(install, "loader.prefetch_factor=4", "loader.pin_memory=False") as effects:
        assert seen(DataLoader(DATA)) == (0, None, False)
        assert done(effects, "loader.prefetch_factor") == (0, [], "a loader has no workers")
        assert done(effects, "loader.pin_memory") == (1, [False], None)
        assert seen(DataLoader(DATA, num_workers=1)) == (1, 4, False)
        assert done(effects, "loader.prefetch_factor")[:2] == (1, [None])


class Loader(DataLoader[Any]):
    """A loader of the script's own, with arguments of its own."""

    def __init__(self, data: Any, *, extra: int, **kwargs: Any) -> None:
        self.extra = extra
        super().__init__(data, batch_size=3, **kwargs)


def test_a_loader_of_the_scripts_own_class_can_still_be_pickled() -> None:
    with overriding(install, "loader.num_workers=2") as effects:
        loader = pickle.loads(pickle.dumps(Loader(DATA, extra=7)))
        assert (loader.extra, loader.num_workers) == (7, 2)
        assert "__init__" not in vars(loader)
        assert done(effects, "loader.num_workers") == (1, [0], None)


class Whole(IterableDataset[Any]):
    """Gives all of its samples in each worker."""

    def __iter__(self) -> Iterator[Any]:
        return iter(DATA)


class Shared(IterableDataset[Any]):
    """Shares its samples among the workers."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        at, of = (info.id, info.num_workers) if info else (0, 1)
        return iter([DATA[n] for n in range(at, 12, of)])


class Wrapper(IterableDataset[Any]):
    """Passes the samples of another data set on."""

    def __init__(self, *datasets: Any) -> None:
        self.datasets = datasets

    def __iter__(self) -> Iterator[Any]:
        return (sample for dataset in self.datasets for sample in dataset)


@pytest.mark.parametrize(
    ("data", "before", "after"),
    [
        (Whole(), 0, 0),
        (Shared(), 0, 2),
        (Whole(), 3, 3),
        (Shared(), 3, 2),
        (Wrapper(Wrapper(Shared())), 0, 2),
        (Wrapper(Shared(), Whole()), 0, 0),
    ],
)
def test_an_iterable_data_set_that_would_give_its_samples_twice_keeps_its_workers(
    data: Any, before: int, after: int
) -> None:
    with overriding(install, "loader.num_workers=2") as effects:
        assert DataLoader(data, num_workers=before).num_workers == after
        applied, _, error = done(effects, "loader.num_workers")
        assert (applied, error is None) == ((1, True) if after == 2 else (0, False))


def test_one_worker_gives_an_iterable_data_set_once() -> None:
    with overriding(install, "loader.num_workers=1"):
        loader = DataLoader(Whole(), batch_size=4)
        assert loader.num_workers == 1
        assert numbers(loader) == list(range(12))


class Unpicklable(Dataset[Any]):
    """Cannot be sent to a spawned worker."""

    def __init__(self) -> None:
        self.function: Any = lambda n: (torch.tensor(n),)

    def __len__(self) -> int:
        return 12

    def __getitem__(self, n: int) -> Any:
        return self.function(n)


def test_workers_that_do_not_start_leave_the_loader_as_the_script_has_it() -> None:
    with overriding(install, "loader.num_workers=2", "loader.multiprocessing_context=spawn") as effects:
        loader = DataLoader(Unpicklable(), batch_size=4)
        assert loader.num_workers == 2
        assert numbers(loader) == list(range(12))
        assert seen(loader) == (0, None, False)
        for name in ("loader.num_workers", "loader.multiprocessing_context"):
            applied, _, error = done(effects, name)
            assert applied == 0
            assert error


def test_workers_of_the_scripts_own_that_do_not_start_fail_as_ever() -> None:
    with overriding(install, "loader.pin_memory=False"), pytest.raises(Exception, match=r"[Pp]ickle"):
        numbers(DataLoader(Unpicklable(), num_workers=1, multiprocessing_context="spawn"))


class Nested(Dataset[Any]):
    """Iterates a loader of its own in each sample."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, n: int) -> Any:
        inner = DataLoader(DATA, batch_size=12)
        return (torch.tensor(inner.num_workers), next(iter(inner))[0].sum())


def test_a_loader_inside_a_worker_stays_as_it_is() -> None:
    with overriding(install, "loader.num_workers=1"):
        batches: Any = DataLoader(Nested(), batch_size=4)
        ((inner, total),) = batches
        assert inner.tolist() == [0, 0, 0, 0]
        assert total.tolist() == [66, 66, 66, 66]


def test_a_daemonic_process_starts_no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing.current_process(), "_config", {"daemon": True})
    with overriding(install, "loader.num_workers=2") as effects:
        assert DataLoader(DATA).num_workers == 0
        assert "daemonic" in str(done(effects, "loader.num_workers")[2])


def test_wrong_arguments_are_the_scripts_own_error() -> None:
    with overriding(install, "loader.num_workers=2"), pytest.raises(TypeError):
        DataLoader()  # type: ignore[call-arg]
    with overriding(install, "loader.num_workers=2"), pytest.raises(ValueError, match="batch_sampler"):
        DataLoader(DATA, batch_sampler=[[0]], shuffle=True)


def test_torchdatas_loader_is_changed_too() -> None:
    with overriding(install, "loader.num_workers=2") as effects:
        # Its class is made while loaders are watched, as in a script that imports it.
        stateful = pytest.importorskip("torchdata.stateful_dataloader.stateful_dataloader")
        kind: Any = stateful.StatefulDataLoader
        if not hasattr(kind.__init__, "__wrapped__"):
            pytest.skip("torchdata was imported before")
        assert numbers(kind(DATA, batch_size=4)) == list(range(12))
        assert done(effects, "loader.num_workers") == (1, [0], None)
