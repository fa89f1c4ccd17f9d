"""Every DataLoader is made with the settings asked for, and one that cannot be as the script says."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.fixtures.overriding import done, overriding

torch: Any = pytest.importorskip("torch", reason="recording needs torch")

from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, get_worker_info  # noqa: E402

from dlprof.record.overrides.constructors import install_loaders  # noqa: E402

DATA: Any = TensorDataset(torch.arange(12))
WORKERS = {"num_workers": 2, "prefetch_factor": 4, "persistent_workers": True, "timeout": 9}


def seen(loader: Any) -> tuple[int, int | None, bool]:
    return loader.num_workers, loader.prefetch_factor, loader.persistent_workers


def numbers(loader: Any) -> list[int]:
    return sorted(int(n) for (batch,) in loader for n in batch)


# Settings, loaders that the script makes, how they are, and what is noted of some: applied, before, error.
MADE: dict[str, tuple[Any, ...]] = {
    "workers": (
        *("num_workers=2 prefetch_factor=3 persistent_workers=on", [{}], [(2, 3, True)]),
        {"num_workers": (1, [0], None), "prefetch_factor": (1, [None], None)},
    ),
    "all loaders, that of the validation too": (
        *("num_workers=1", [{"num_workers": 0}, {"num_workers": 2}], [(1, 2, False), (1, 2, False)]),
        {"num_workers": (2, [0, 2], None)},
    ),
    "without workers what belongs to them goes too": (
        *("num_workers=0", [WORKERS | {"multiprocessing_context": "fork"}], [(0, None, False)]),
        {"num_workers": (1, [2], None)},
    ),
    "one without workers takes nothing of theirs": (
        *("prefetch_factor=4 pin_memory=False", [{}], [(0, None, False)]),
        {"prefetch_factor": (0, [], "a loader has no workers"), "pin_memory": (1, [False], None)},
    ),
    "one with workers does": (
        *("prefetch_factor=4 pin_memory=False", [{}, {"num_workers": 1}], [(0, None, False), (1, 4, False)]),
        {"prefetch_factor": (1, [None], "a loader has no workers")},
    ),
}


@pytest.mark.parametrize(("settings", "made", "expected", "noted"), MADE.values(), ids=MADE)
def test_loaders_are_made_as_asked_for(settings: str, made: Any, expected: Any, noted: Any) -> None:
    with overriding(install_loaders, *(f"loader.{setting}" for setting in settings.split())) as effects:
        loaders = [DataLoader(DATA, batch_size=5, **given) for given in made]
        assert list(map(seen, loaders)) == expected
        assert {name: done(effects, f"loader.{name}") for name in noted} == noted
        if len(made) == 1:
            batches = [batch.tolist() for (batch,) in loaders[0]]
            assert batches == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11]]
    assert seen(DataLoader(DATA)) == (0, None, False)


class Loader(DataLoader[Any]):
    """A loader of the script's own, with arguments of its own."""

    def __init__(self, data: Any, *, extra: int, **kwargs: Any) -> None:
        self.extra = extra
        super().__init__(data, batch_size=3, **kwargs)


def test_a_loader_of_the_scripts_own_class_can_still_be_pickled() -> None:
    with overriding(install_loaders, "loader.num_workers=2") as effects:
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
    """Passes the samples of other data sets on."""

    def __init__(self, *datasets: Any) -> None:
        self.datasets = datasets

    def __iter__(self) -> Iterator[Any]:
        return (sample for dataset in self.datasets for sample in dataset)


@pytest.mark.parametrize(
    ("data", "before", "asked", "after"),
    [
        (Whole(), 0, 2, 0),
        (Whole(), 0, 1, 1),
        (Shared(), 0, 2, 2),
        (Whole(), 3, 2, 3),
        (Shared(), 3, 2, 2),
        (Wrapper(Wrapper(Shared())), 0, 2, 2),
        (Wrapper(Shared(), Whole()), 0, 2, 0),
    ],
)
def test_an_iterable_data_set_that_would_give_its_samples_twice_keeps_its_workers(
    data: Any, before: int, asked: int, after: int
) -> None:
    with overriding(install_loaders, f"loader.num_workers={asked}") as effects:
        loader = DataLoader(data, batch_size=4, num_workers=before)
        assert loader.num_workers == after
        applied, _, error = done(effects, "loader.num_workers")
        assert (applied, error is None) == ((1, True) if after == asked else (0, False))
        if isinstance(data, (Whole, Shared)):
            assert after == 3 or numbers(loader) == list(range(12))


class Unpicklable(Dataset[Any]):
    """Cannot be sent to a spawned worker."""

    def __init__(self) -> None:
        self.function: Any = lambda n: (torch.tensor(n),)

    def __len__(self) -> int:
        return 12

    def __getitem__(self, n: int) -> Any:
        return self.function(n)


def test_workers_that_do_not_start_leave_the_loader_as_the_script_has_it() -> None:
    with overriding(install_loaders, "loader.num_workers=2", "loader.multiprocessing_context=spawn") as effects:
        loader = DataLoader(Unpicklable(), batch_size=4)
        assert loader.num_workers == 2
        assert numbers(loader) == list(range(12))
        assert seen(loader) == (0, None, False)
        for name in ("loader.num_workers", "loader.multiprocessing_context"):
            applied, _, error = done(effects, name)
            assert applied == 0
            assert error


class Nested(Dataset[Any]):
    """Iterates a loader of its own in each sample."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, n: int) -> Any:
        inner = DataLoader(DATA, batch_size=12)
        return (torch.tensor(inner.num_workers), next(iter(inner))[0].sum())


def test_workers_and_daemonic_processes_start_no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    with overriding(install_loaders, "loader.num_workers=1"):
        batches: Any = DataLoader(Nested(), batch_size=4)
        ((inner, total),) = batches
        assert (inner.tolist(), total.tolist()) == ([0] * 4, [66] * 4)
    monkeypatch.setattr(multiprocessing.current_process(), "_config", {"daemon": True})
    with overriding(install_loaders, "loader.num_workers=2") as effects:
        assert DataLoader(DATA).num_workers == 0
        assert "daemonic" in str(done(effects, "loader.num_workers")[2])


MISTAKES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "no data": (lambda: DataLoader(), TypeError, "dataset"),  # type: ignore[call-arg]
    "two orders": (lambda: DataLoader(DATA, batch_sampler=[[0]], shuffle=True), ValueError, "batch_sampler"),
    "workers of its own that do not start": (
        *(lambda: numbers(DataLoader(Unpicklable(), num_workers=1, multiprocessing_context="spawn")), Exception),
        "[Pp]ickle",
    ),
}


@pytest.mark.parametrize(("make", "error", "match"), MISTAKES.values(), ids=MISTAKES)
def test_wrong_arguments_are_the_scripts_own_error(make: Any, error: type[Exception], match: str) -> None:
    setting = "loader.pin_memory=False" if error is Exception else "loader.num_workers=2"
    with overriding(install_loaders, setting), pytest.raises(error, match=match):
        make()


def test_torchdatas_loader_is_changed_too() -> None:
    with overriding(install_loaders, "loader.num_workers=2") as effects:
        # Its class is made while loaders are wrapped, as in a script that imports it.
        stateful = pytest.importorskip("torchdata.stateful_dataloader.stateful_dataloader")
        kind: Any = stateful.StatefulDataLoader
        if not hasattr(kind.__init__, "__wrapped__"):
            pytest.skip("torchdata was imported before")
        assert numbers(kind(DATA, batch_size=4)) == list(range(12))
        assert done(effects, "loader.num_workers") == (1, [0], None)
