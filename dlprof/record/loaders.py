"""The script's loaders, as a rank sees them while it iterates them: how they are set up, and each pass over one."""

from __future__ import annotations

import sys
import weakref
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any, Protocol, runtime_checkable


@dataclass(slots=True, eq=False)
class LoaderSeen:
    """A loader that the training thread has iterated, and what its batches were used for."""

    loader: weakref.ref[Any]
    settings: dict[str, Any]
    role: str = "unknown"


class _Referable:
    __slots__ = ("__weakref__",)


@dataclass(slots=True, eq=False)
class Pass(_Referable):
    """One pass over a loader: what is known of its iterator, which holds it as `_dlprof_pass`."""

    loader: LoaderSeen | None  # None: it was not seen making the iterator
    began_ns: int
    took_ns: int  # by iter()
    unsettled: bool = True  # the role of its loader may still change
    # How batches.py counts its batches: by the first dimension of their first tensor (None: nobody has looked yet), or
    # so many samples each; −1: not known.
    leads: bool | None = None
    size: int = -1
    # For the FetchWatcher:
    looked_at: bool = False
    asks: bool = True  # call FetchWatcher.ask before the next batch
    fetches: bool = False  # the training thread fetches the batches itself
    workers: str = ""
    reported: bool = False  # some of its batches have rows
    place: int = -1  # of the loader in Observed.loaders, once it is reported


@runtime_checkable
class FetchWatcher(Protocol):
    """A collector that sees every batch of the training thread's loaders. Its methods must not raise."""

    def begun(self, iterator: Any) -> None:
        """See a loader's new iterator. Not called for a loader with an iter() of its own."""

    def ask(self, iterator: Any) -> None:
        """Prepare for the next batch, which is about to be asked for; called where Pass.asks."""

    def got(self, iterator: Any, step: int, began_ns: int, took_ns: int) -> None:
        """See a batch arrive, and which step it begins."""


_passes: weakref.WeakSet[Pass] = weakref.WeakSet()


def begin_pass(iterator: Any, loader: LoaderSeen | None, began_ns: int, took_ns: int) -> Pass:
    """Give an iterator a pass; its iter() began then and took so long (perf_counter, ns)."""
    over = iterator._dlprof_pass = Pass(loader, began_ns, took_ns)
    _passes.add(over)
    return over


def adopt(iterator: Any) -> Pass:
    """Return the pass of an iterator, and make one for an iterator whose making was not seen."""
    return iterator._dlprof_pass or begin_pass(iterator, None, perf_counter_ns(), 0)


def forget_passes() -> None:
    """Make the passes of a recording that has ended like those of iterators whose making was not seen."""
    while _passes:
        Pass.__init__(_passes.pop(), None, perf_counter_ns(), 0)


def worker_info() -> Any:
    """Return what PyTorch knows of the loader's worker that this process is; None: it is none."""
    worker = sys.modules.get("torch.utils.data._utils.worker")
    return None if worker is None else worker.get_worker_info()


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
        "collate": _collating(loader.collate_fn),
        **_share(loader, sampler),
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


def _share(loader: Any, sampler: Any) -> dict[str, int | None]:
    """Return among how many ranks a loader's samples are shared out, and which share it has; None: not known.

    `split`: into how many parts accelerate splits each batch, one for each rank.
    """
    ours = getattr(loader, "batch_sampler", None)
    shares = {
        "replicas": getattr(sampler, "num_replicas", getattr(ours, "num_processes", None)),
        "replica": getattr(sampler, "rank", getattr(ours, "process_index", None)),
        "split": getattr(ours, "num_processes", None) if getattr(ours, "split_batches", False) else None,
    }
    return {name: n if type(n) is int else None for name, n in shares.items()}


def _collating(collate: Any) -> dict[str, Any] | None:
    """Return what makes a batch of samples, and where it stands; None: it is no Python."""
    collate = getattr(collate, "data_collator", collate)  # that the Trainer of transformers wraps
    code = getattr(collate, "__code__", None) or getattr(type(collate).__call__, "__code__", None)
    name = getattr(collate, "__qualname__", type(collate).__qualname__)
    return {"name": name, "file": code.co_filename, "line": code.co_firstlineno} if code is not None else None


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
