"""The script's loaders, as a rank sees them while it iterates them: how they are set up, and each pass over one.

What batches are made of: their samples, tokens and padding, and their tensors, each of which a worker has to send.

No code of the script's is called: only plain tensors are asked, on a device for no more than their shape.
"""

from __future__ import annotations

import sys
import weakref
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice, repeat
from time import perf_counter_ns
from types import SimpleNamespace
from typing import Any, Protocol, runtime_checkable

from dlprof.record import guarded
from dlprof.record.model.names import modules_of


@dataclass(slots=True, eq=False)
class LoaderSeen:
    """A loader that the training thread has iterated, and what its batches were used for."""

    loader: weakref.ref[Any]
    settings: dict[str, Any]
    role: str = "unknown"
    data_of: int | None = None  # the first loader, by its place in Observed.loaders, that reads the same data set


class Referable:
    """A class with slots to whose objects there can be weak references."""

    __slots__ = ("__weakref__",)


@dataclass(slots=True, eq=False)
class Pass(Referable):
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
    firsts: list[Any] | None = None  # beginnings of the workers' first batches, while these are compared
    adopted: bool = False  # its making was not seen, and its loader was looked for


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
    if loader is not None and loader.settings.get("iterable") and (loader.settings.get("num_workers") or 0) > 1:
        over.firsts = None if "same_batches" in loader.settings else []
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
    """Return how a loader was set up, while it exists: most scripts drop theirs as soon as they iterate it."""
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
        "objects": _objects(dataset),
        "transforms": _transforms(dataset),
        "shuffle": {"RandomSampler": True, "SeedableRandomSampler": True, "SequentialSampler": False}.get(
            type(sampler).__name__, getattr(sampler, "shuffle", None)
        ),
        "drop_last": loader.drop_last,
        "in_order": getattr(loader, "in_order", None),
        "collate": _collating(loader.collate_fn),
        **_share(loader, sampler),
    }


def loader_of(iterator: Any) -> Any:
    """Return what an iterator of PyTorch's keeps of its loader, under the loader's own names; None: nothing.

    Iterators do not keep their loaders.
    """
    if not hasattr(iterator, "_num_workers"):
        return None
    batches, workers = iterator._index_sampler, getattr(iterator, "_workers", ())
    method = getattr(workers[0], "_start_method", None) if workers else None
    return SimpleNamespace(
        dataset=iterator._dataset,
        multiprocessing_context=method and SimpleNamespace(get_start_method=lambda: method),
        num_workers=iterator._num_workers,
        batch_size=getattr(batches, "batch_size", None) if iterator._auto_collation else None,
        batch_sampler=batches if iterator._auto_collation else None,
        sampler=getattr(batches, "sampler", batches),
        pin_memory=iterator._pin_memory,
        prefetch_factor=getattr(iterator, "_prefetch_factor", None),
        persistent_workers=getattr(iterator, "_persistent_workers", False),
        drop_last=iterator._drop_last,
        in_order=getattr(iterator, "_in_order", True),
        collate_fn=iterator._collate_fn,
    )


def described(loader: Any, iterator: Any) -> Any:
    """Return a loader, or what stands for one that is not PyTorch's own, as fastai's: it iterates as a loader without
    the attributes of one.
    """
    if hasattr(loader, "batch_size"):
        return loader
    kept = loader_of(iterator)
    own: Any = getattr(loader, "d", None)
    if kept is not None and hasattr(own, "bs"):
        kept.dataset, kept.batch_size, kept.drop_last = own.dataset, own.bs, own.drop_last
        kept.sampler = SimpleNamespace(shuffle=own.shuffle)
    return kept


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
    """Return what makes a batch of samples, and its file and line; None: it is not written in Python."""
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


# Fewer objects than this are no memory to speak of.
_MANY_OBJECTS = 100_000


def _objects(dataset: Any) -> list[dict[str, Any]]:
    """Return the attributes of a data set, or of the one that it wraps, that are lists or dicts of very many objects.

    Their names and lengths, and no value.
    """
    found: list[dict[str, Any]] = []
    for _ in range(_MOST_WRAPPED):
        held = getattr(dataset, "__dict__", None) or {}
        found += [
            {"class": type(dataset).__name__, "name": name, "kind": type(value).__name__, "length": len(value)}
            for name, value in held.items()
            if type(value) in (list, tuple, dict) and len(value) >= _MANY_OBJECTS
        ]
        dataset = held.get("dataset")
    return found


def _transforms(dataset: Any) -> list[str]:
    """Return what a data set, or the one that it wraps, does to its pictures: names of classes, in order; []: unknown.

    It is looked for where torchvision's data sets keep it, as many of users do.
    """
    left: list[Any] = []
    for _ in range(_MOST_WRAPPED):
        held = getattr(dataset, "__dict__", None) or {}
        left = left or [one for name in ("transform", "transforms") if (one := held.get(name)) is not None][:1]
        dataset = held.get("dataset")
    names: list[str] = []
    while left and len(names) < _MOST_PARTS:
        one = left.pop(0)
        parts = getattr(one, "__dict__", {}).get("transforms")
        if type(one).__name__ == "Compose" and isinstance(parts, (list, tuple)):
            left = [*parts, *left]
        else:
            names.append(type(one).__name__)
    return names


# A subset of a mapped data set of the script's.
_MOST_WRAPPED = 3

# Parts of a batch that are looked at: a batch may be a list of many thousand numbers.
_MOST_PARTS = 1_000

# Of each loader's batches, the first few are looked at, and then one of so many.
_FIRST, _EVERY = 4, 32

# So many bytes more than a batch holds are worth a look at each: a copy of a megabyte takes ten times as long.
_MUCH = 1 << 20

# Of a batch that was not looked at.
UNSEEN = (-1, -1)

# Tensors of a batch that must agree, and how deep they are looked for.
_MOST_TENSORS, _DEEPEST = 16, 3

# So many batches are looked at, each after this many times what the last look took: 0.25 % of the job at most.
_MOST_LOOKS, _REST = 64, 400

_MOST_ROWS = 256  # of a batch

# PyTorch works on fewer elements than twice this (at::internal::GRAIN_SIZE) with one thread: workers need other cores.
_GRAIN = 16_384

# What the losses of PyTorch leave out by default, with which libraries pad labels.
_IGNORED = -100

# The values of a tensor that are compared with those of another batch.
_MOST_COMPARED = 256

Lengths = tuple[str, int, list[int]]

Named = Sequence[tuple[str, Any]]  # tensors


def samples_of(batch: Any, over: Pass) -> int:
    """Return how many samples a batch is made of; −1: not known.

    A loader that has a batch size makes such batches; that the last one of an epoch may be smaller is not worth looking
    at each. Of a loader without, all tensors of the first batch must agree in their first dimension.
    """
    if over.leads is None:
        _settle(batch, over)
    if over.firsts is not None:
        _compare(batch, over)
    if over.leads:
        return next((int(shape[0]) for _, tensor in tensors_in(batch) if (shape := _shape(tensor))), over.size)
    return over.size


def look_at(first: Any) -> tuple[int, int]:
    """Return the first dimension of a module's first argument, −1: it is no plain tensor; and its tokens.

    Tokens are the elements of a two-dimensional tensor of integers, as language models get them.
    """
    shape: Sequence[int] = _shape(first) or ()
    if len(shape) == 2 and not (first.is_floating_point() or first.is_complex()):
        return shape[0], shape[0] * shape[1]
    return (shape[0], 0) if shape else (-1, 0)


def _settle(batch: Any, over: Pass) -> None:
    """Find out how the batches of a pass are counted, from its first one."""
    settings = over.loader.settings if over.loader is not None else {}
    size, length = settings.get("batch_size"), settings.get("dataset_length")
    if isinstance(size, int) and size > 0:
        size = max(size // (settings.get("split") or 1), 1)
        over.size = min(size, length) if isinstance(length, int) and length > 0 else size
        over.leads = False
        return
    shapes = [_shape(tensor) for _, tensor in islice(tensors_in(batch), _MOST_TENSORS)]
    found = {int(shape[0]) if shape else -1 for shape in shapes}
    over.leads = len(found) == 1 and found.pop() > 0


def _compare(batch: Any, over: Pass) -> None:
    """Note whether all workers of a data set that is iterated begin with the same batch; of one without order.

    The workers give their batches in turn. Batches whose rows are all alike tell nothing.
    """
    assert over.firsts is not None
    assert over.loader is not None
    settings = over.loader.settings
    try:
        tensors = [t for _, t in islice(tensors_in(batch), _MOST_TENSORS) if t.is_cpu and t.dim() and len(t) > 1]
        over.firsts.append([(tuple(t.shape), t[:2].flatten()[:_MOST_COMPARED].tolist()) for t in tensors])
    except Exception:  # noqa: BLE001 - a layout that is not read in this way
        over.firsts = [[]]
    first = over.firsts[0]
    if not any(values[: len(values) // 2] != values[len(values) // 2 :] for _, values in first):
        settings["same_batches"], over.firsts = None, None
    elif over.firsts[-1] != first:
        settings["same_batches"], over.firsts = False, None
    elif len(over.firsts) == settings["num_workers"]:
        settings["same_batches"], over.firsts = True, None


def _shape(part: Any) -> Any:
    """Return the shape of a plain tensor, None of anything else."""
    if type(part) is not sys.modules["torch"].Tensor:
        return None
    try:
        return part.shape
    except RuntimeError:  # of a nested tensor
        return ()


def tensors_in(part: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the plain tensors of a batch, with their names in a dict or a UserDict, as tokenizers return; else ""."""
    if _shape(part) is not None:
        yield name, part
    elif depth < _DEEPEST:
        part = part.__dict__.get("data") if isinstance(part, UserDict) else part
        known = next((kind for kind in (tuple, list) if isinstance(part, kind)), None)
        items = dict.items(part) if isinstance(part, dict) else zip(repeat(name), known.__iter__(part) if known else ())
        for key, one in islice(items, _MOST_TENSORS):
            yield from tensors_in(one, key if type(key) is str else name, depth + 1)


class BatchSize:
    """Looks at some of a loader's batches; at each, while much more would be copied of them than they hold."""

    def __init__(self) -> None:
        self._last = (*UNSEEN, -1)
        self._seen = 0

    def see(self, batch: Any) -> tuple[int, int, int]:
        """Look at a batch, if it is its turn; return what the last that was looked at has: tensors, their bytes, and
        the bytes of memory that a worker copies to send them.

        Sending copies the whole storage that a tensor is a part of, unless shared memory holds it: each storage once,
        and thereafter never again.
        """
        self._seen += 1
        _, held, copied = self._last
        if self._seen <= _FIRST or self._seen % _EVERY == 0 or copied > held + _MUCH:
            storages: dict[int, int] = {}
            tensors, held = size_of(batch, storages)
            self._last = tensors, held, -1 if tensors < 0 else sum(storages.values())
        return self._last


def size_of(batch: Any, storages: dict[int, int] | None = None) -> tuple[int, int]:
    """Return how many tensors a batch has, and their bytes, in lists, tuples, dicts and attributes of objects.

    (−1, −1): it has too many parts to tell. No code of the script's is called. `storages` gets the bytes of those on
    the host that shared memory does not hold.
    """
    torch: Any = sys.modules["torch"]
    tensor = torch.Tensor
    tensors, size, parts, seen = 0, 0, [batch], set()
    for _ in range(_MOST_PARTS):
        if not parts:
            return tensors, size
        part = parts.pop()
        kind = type(part)
        if kind is tensor:
            tensors += 1
            size += part.nelement() * part.element_size() if part.layout is torch.strided else 0
            if storages is not None:
                _add_storage(part, storages)
        elif issubclass(kind, tensor):  # its methods may be the script's
            tensors += 1
        elif issubclass(kind, (list, tuple)):
            items = tuple.__iter__(part) if issubclass(kind, tuple) else list.__iter__(part)
            parts.extend(item for item, _ in zip(items, range(_MOST_PARTS), strict=False))
        elif issubclass(kind, dict):
            parts.extend(value for value, _ in zip(dict.values(part), range(_MOST_PARTS), strict=False))
        elif kind.__module__ != "builtins" and id(part) not in seen:
            seen.add(id(part))
            inside = _attributes(part)
            parts.extend(inside.values() if type(inside) is dict else ())
    return UNSEEN


def _add_storage(tensor: Any, storages: dict[int, int]) -> None:
    try:
        storage = tensor.untyped_storage()
        if storage.device.type == "cpu" and not storage.is_shared():
            # Of two that begin at one address, as of `from_numpy` of one array, each is copied.
            storages[storage._cdata] = storage.nbytes()
    except (AttributeError, RuntimeError):  # of another layout, which has none
        pass


def _attributes(part: Any) -> Any:
    try:
        return object.__getattribute__(part, "__dict__")
    except AttributeError:  # it has none
        return None


# So many samples of a data set are watched, and so many digests made in one process, of samples of no more bytes and
# parts than these. Digests that have taken so long are enough.
_WATCHED, _MOST_DIGESTS, _MOST_BYTES, _MOST_PARTS_OF_SAMPLE = 16, 96, 1 << 24, 64
_DIGESTING_NS = 100_000_000

# The index of a sample, how many its data set has, the digest and the bytes of the sample; no sample is watched.
Digest = tuple[int, int, int, int]
UNWATCHED: Digest = (-1, -1, -1, -1)


class SampleDigests:
    """Makes digests of a few samples by index, so that a report can say whether each epoch makes the same ones anew.

    Samples are tensors, arrays, numbers and texts, and what is put together from these; of others no digest is made.
    No code of the script's is called but a data set's length.
    """

    def __init__(self) -> None:
        self._left, self._ns = _MOST_DIGESTS, _DIGESTING_NS
        self._lengths: dict[int, int] = {}  # of data sets, by their ids

    def see(self, dataset: Any, indices: Any, samples: Any) -> Digest:
        """Return the digest of the first sample of a batch that is watched."""
        if self._left <= 0 or self._ns <= 0 or type(indices) is not list or type(samples) is not list:
            return UNWATCHED
        if id(dataset) not in self._lengths:
            self._lengths[id(dataset)] = _length(dataset) or 0
        length = self._lengths[id(dataset)]
        every = max(length // _WATCHED, 1)
        watched = [n for n, index in enumerate(indices) if type(index) is int and index % every == 0]
        if not length or not watched or len(indices) != len(samples):
            return UNWATCHED
        began = perf_counter_ns()
        found = _digest(samples[watched[0]])
        self._left, self._ns = self._left - 1, self._ns - (perf_counter_ns() - began)
        return (indices[watched[0]], length, *found) if found else UNWATCHED


def _digest(sample: Any) -> tuple[int, int] | None:
    """Return the digest and the bytes of a sample; None: it has a part of another kind, or is too large."""
    torch: Any = sys.modules["torch"]
    array = getattr(sys.modules.get("numpy"), "ndarray", None)
    made, size, parts, seen = blake2b(digest_size=8), 0, [sample], 0
    while parts:
        part = parts.pop()
        kind, seen = type(part), seen + 1
        if kind in (list, tuple):
            made.update(b"%d;" % len(part))
            parts.extend(part[: _MOST_PARTS_OF_SAMPLE + 1])
        elif kind is dict:
            made.update(repr(list(part)[:_MOST_PARTS_OF_SAMPLE]).encode() if all(type(k) is str for k in part) else b"")
            parts.extend(islice(part.values(), _MOST_PARTS_OF_SAMPLE + 1))
        elif kind in (int, float, bool, str, bytes, type(None)):
            text = repr(part).encode()
            made.update(text)
            size += len(text)
        elif kind is array and part.dtype.kind in "biufcSUMm":
            size += part.nbytes
            if size <= _MOST_BYTES:
                made.update(f"{part.dtype}{part.shape}".encode())
                made.update(part.tobytes())
        elif kind is torch.Tensor and part.device.type == "cpu" and part.layout is torch.strided:
            size += part.nelement() * part.element_size()
            if size <= _MOST_BYTES:
                made.update(f"{part.dtype}{tuple(part.shape)}".encode())
                # One value has any strides.
                flat = part.detach().contiguous().as_strided((part.nelement(),), (1,))
                made.update(flat.view(torch.uint8).numpy())
        elif getattr(kind, "__module__", "") == "numpy" and hasattr(part, "dtype") and part.dtype.kind in "biufc":
            made.update(part.tobytes())
            size += part.nbytes
        else:
            return None
        if size > _MOST_BYTES or seen > _MOST_PARTS_OF_SAMPLE:
            return None
    return int.from_bytes(made.digest(), "big") >> 2, size


class Padding:
    """Looks at some batches. `seen` is what they show, a row a batch, as the facts have it."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []
        self.due_ns = 0  # no batch is looked at before
        self._looks = 0
        self._pads: Sequence[int] | None = None

    @guarded
    def look(self, batch: Any, step: int, models: Iterable[Callable[[], Any]]) -> None:
        """Look at a batch that a step trains these models on, unless operators are traced or counted meanwhile."""
        torch: Any = sys.modules["torch"]
        if torch.autograd._profiler_enabled() or torch._C._len_torch_dispatch_stack():
            return
        began = perf_counter_ns()
        with torch._C.DisableTorchFunction():
            if not self._looks:
                self._pads = _pads(models)
            found = lengths_of(batch, self._pads)
        if found:
            self.seen.append(dict(zip(("step", "source", "padded", "lengths"), (step, *found), strict=True)))
        self._looks += 1
        now = perf_counter_ns()
        self.due_ns = now + _REST * (now - began) if self._looks < _MOST_LOOKS else sys.maxsize

    def fail(self, _error: Exception) -> None:
        """Look at no batch any more, after one of an unforeseen kind."""
        self.due_ns = sys.maxsize


def _pads(models: Iterable[Callable[[], Any]]) -> Sequence[int] | None:
    """Return the ids that embeddings, or configurations of transformers, have for padding; None: nothing embeds."""
    modules = [m for ref in models if (model := ref()) is not None for m in modules_of(model)]
    embeddings = [module for module in modules if issubclass(type(module), sys.modules["torch"].nn.Embedding)]
    found: list[Any] = [getattr(vars(module).get("config"), "pad_token_id", None) for module in modules]
    found += [one.padding_idx for one in embeddings]
    return tuple(dict.fromkeys(pad for pad in found if type(pad) is int)) if embeddings else None


def lengths_of(batch: Any, pads: Sequence[int] | None = None) -> Lengths | None:
    """Return what shows the lengths of a batch's rows, their length with padding, and the lengths without it.

    `pads`: ids of padding, as far as they are known; None: no model reads ids. Returns None where nothing shows it.
    """
    tensors = [(name, t) for name, t in tensors_in(batch) if t.is_cpu and t.numel()]
    tables = [(n, t) for n, t in tensors if t.dim() == 2 and not t.is_floating_point() and 1 < t.shape[1] <= _GRAIN]
    found = _by_mask(tables, tensors) or _by_numbers(tensors)
    return found if found or pads is None else _by_ids(tables, pads)


def _by_mask(tables: Named, tensors: Named) -> Lengths | None:
    """Return what a mask shows; its sense is known by the end of the rows at which none has padding."""
    for name, t in sorted(tables, key=lambda one: "attention_mask" not in one[0]):
        masks = any(other is not t and other.shape[:2] == t.shape for _, other in tensors)
        for edge in (0, -1) if masks and (not name or "mask" in name) else ():
            kept, either = int(t[0, edge]), t.element_size() == 1 or "padding" in name
            if (kept == 1 or (kept == 0 and either)) and t[:_MOST_ROWS, edge].eq(kept).all():
                lengths = _lengths(t, 1 - kept)
                if sum(int(part.eq(kept).sum()) for part in _parts(t)) == sum(lengths):  # nothing else, and in one run
                    return name or "mask", t.shape[1], lengths
    return None


def _by_numbers(tensors: Named) -> Lengths | None:
    for name, numbers in tensors:
        if numbers.dim() == 1 and ("length" in name or name.endswith(("len", "lens"))):
            lengths = numbers[:_MOST_ROWS].tolist()
            for padded in (t.shape[1] for _, t in tensors if t.dim() > 1 and len(t) == len(numbers)):
                if 0 < min(lengths) <= max(lengths) <= padded:
                    return name, padded, lengths
    return None


def _by_ids(tables: Named, pads: Sequence[int]) -> Lengths | None:
    numbers = [(name, t) for name, t in tables if t.element_size() > 1 and "mask" not in name and "type" not in name]
    ids = next((t for name, t in numbers if "label" not in name), None)
    if ids is None:
        return None
    tries = [("padding_idx", ids, pad) for pad in pads] + [("labels", t, _IGNORED) for _, t in numbers]
    # Where none is known: what most rows end with, or begin with.
    tries += [("ends", ids, ids[:_MOST_ROWS, edge].mode().values.item()) for edge in (-1, 0) if not pads]
    for source, t, pad in tries:
        lengths = _lengths(t, pad)
        padded = sum(length < t.shape[1] - 1 for length in lengths)
        if padded and (source != "ends" or 2 * padded >= len(lengths)):
            return source, t.shape[1], lengths
    return tries[0][0], ids.shape[1], [ids.shape[1]] * len(ids[:_MOST_ROWS])


def _parts(table: Any) -> Sequence[Any]:
    return table[:_MOST_ROWS].split(_GRAIN // table.shape[1])  # type: ignore[no-any-return]


def _lengths(table: Any, pad: int) -> list[int]:
    """Return the lengths of rows without the padding that they end with, or begin with, as most do."""
    places, lengths = sys.modules["torch"].arange(1, table.shape[1] + 1, device="cpu"), list[int]()
    for part in _parts(table):
        to_end, to_begin = ((part.ne(pad) * order).amax(1) for order in (places, places.flip(0)))
        # Labels are left out at the beginning of a row for another reason: there is the prompt.
        lengths += (to_end if pad == _IGNORED or to_end.sum() <= to_begin.sum() else to_begin).tolist()
    return lengths
