"""What batches are made of: their samples, tokens and padding, and their tensors, each of which a worker has to send.

No code of the script's is called: only plain tensors are asked, on a device for no more than their shape.
"""

from __future__ import annotations

import sys
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, repeat
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any

from dlprof.record import guarded
from dlprof.record.model.names import modules_of

if TYPE_CHECKING:
    from dlprof.record.loaders import Pass

# Parts of a batch that are looked at: a batch may be a list of many thousand numbers.
_MOST_PARTS = 1_000

# Of each loader's batches, the first few are looked at, and then one of so many.
_FIRST, _EVERY = 4, 32

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

Lengths = tuple[str, int, list[int]]
Named = Sequence[tuple[str, Any]]  # tensors


def samples_of(batch: Any, over: Pass) -> int:
    """Return how many samples a batch is made of; −1: not known.

    A loader that has a batch size makes such batches; that the last one of an epoch may be smaller is not worth looking
    at each. Of a loader without, all tensors of the first batch must agree in their first dimension.
    """
    if over.leads is None:
        _settle(batch, over)
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
    """Looks at some of a loader's batches."""

    def __init__(self) -> None:
        self._last = UNSEEN
        self._seen = 0

    def see(self, batch: Any) -> tuple[int, int]:
        """Look at a batch, if it is its turn; return the tensors and bytes of the last that was looked at."""
        self._seen += 1
        if self._seen <= _FIRST or self._seen % _EVERY == 0:
            self._last = size_of(batch)
        return self._last


def size_of(batch: Any) -> tuple[int, int]:
    """Return how many tensors a batch has, and their bytes, in lists, tuples, dicts and attributes of objects.

    (−1, −1): it has too many parts to tell. No code of the script's is called.
    """
    tensor: Any = sys.modules["torch"].Tensor
    tensors, size, parts, seen = 0, 0, [batch], set()
    for _ in range(_MOST_PARTS):
        if not parts:
            return tensors, size
        part = parts.pop()
        kind = type(part)
        if kind is tensor:
            tensors += 1
            size += part.nelement() * part.element_size() if part.layout is _strided() else 0
        elif issubclass(kind, tensor):  # what asks it may be the script's
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


def _strided() -> Any:
    return sys.modules["torch"].strided


def _attributes(part: Any) -> Any:
    try:
        return object.__getattribute__(part, "__dict__")
    except AttributeError:  # it has none
        return None


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
