"""How the script's loaders are set up, as far as a rank can tell while it iterates them."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable
from typing import Any


class LoaderSeen:
    """A loader that the training thread has iterated, and what its batches were used for."""

    __slots__ = ("loader", "role", "settings")

    def __init__(self, loader: Any, settings: dict[str, Any]) -> None:
        self.loader = weakref.ref(loader)
        self.settings = settings
        self.role = "unknown"


class Pass:
    """One pass over a loader: what is known of its iterator. It hangs on that, and goes with it."""

    __slots__ = (
        "asks",
        "began_ns",
        "fetches",
        "loader",
        "looked_at",
        "place",
        "told",
        "took_ns",
        "unsettled",
        "workers",
    )

    def __init__(self, loader: LoaderSeen | None, began_ns: int, took_ns: int) -> None:
        self.loader = loader  # None: it was not seen making the iterator
        self.began_ns = began_ns
        self.took_ns = took_ns  # that iter() took
        self.unsettled = True  # its loader may yet learn what its batches are used for
        # What whoever records the batches keeps here:
        self.looked_at = False
        self.asks = True  # wants to hear before the next batch is asked for
        self.fetches = False  # the training thread does so itself
        self.workers = ""
        self.told = False  # some of its batches have rows
        self.place = -1  # of the loader among the recorder's, once it is told


def settings_of(loader: Any) -> dict[str, Any]:
    """Return how a loader was set up, while it is there: most scripts drop theirs as soon as they iterate it."""
    dataset = loader.dataset
    iterable = isinstance(dataset, sys.modules["torch.utils.data"].IterableDataset)
    context = loader.multiprocessing_context
    sampler, batch_size = _sampling(loader)
    return {
        "num_workers": loader.num_workers,
        "batch_size": batch_size,
        "pin_memory": loader.pin_memory,
        "prefetch_factor": loader.prefetch_factor,
        "persistent_workers": loader.persistent_workers,
        "start_method": _start_method(context) if loader.num_workers else None,
        "dataset": type(dataset).__name__,
        "dataset_length": _length(dataset),
        "iterable": iterable,
        "shuffle": {"RandomSampler": True, "SeedableRandomSampler": True, "SequentialSampler": False}.get(
            type(sampler).__name__, getattr(sampler, "shuffle", None)
        ),
        "drop_last": loader.drop_last,
        "in_order": getattr(loader, "in_order", None),
    }


def _sampling(loader: Any) -> tuple[Any, int | None]:
    """Return what draws the samples, and how many a batch: a loader with a batch sampler has neither of its own."""
    if loader.batch_size is not None:
        return loader.sampler, loader.batch_size
    batches = getattr(loader, "batch_sampler", None)
    while (inner := getattr(batches, "batch_sampler", None)) is not None:  # accelerate's, around the script's
        batches = inner
    size = getattr(batches, "batch_size", None)
    return getattr(batches, "sampler", loader.sampler), size if isinstance(size, int) else None


def _start_method(context: Any) -> str:
    if context is None:
        import multiprocessing

        # The default, without deciding it for the script.
        method = multiprocessing.get_start_method(allow_none=True)
        return method or multiprocessing.get_all_start_methods()[0]
    return str(context.get_start_method())


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except Exception:  # noqa: BLE001 - the script's code; many datasets have no length
        return None


def watch_method(kind: type, name: str, watched: Callable[[Any], Any]) -> None:
    """Put watched(method) in the place of a class's method, and of that which a class of torchdata's has of its own.

    Those come later, as subclasses, where a script imports them. A subclass of the script's own is left as it is.
    """
    own = vars(kind).get("__init_subclass__")

    def __init_subclass__(cls: type[Any], /, **kwargs: Any) -> None:  # noqa: N807 - what it stands for
        if own is None:
            super(kind, cls).__init_subclass__(**kwargs)  # type: ignore[arg-type]
        else:
            own.__func__(cls, **kwargs)
        with contextlib.suppress(Exception):  # the script's import goes on; its loaders are then known by less
            if cls.__module__.startswith("torchdata.") and name in vars(cls):
                setattr(cls, name, watched(vars(cls)[name]))

    setattr(kind, "__init_subclass__", classmethod(__init_subclass__))  # noqa: B010 - mypy knows another signature
    if name in vars(kind):
        setattr(kind, name, watched(vars(kind)[name]))
