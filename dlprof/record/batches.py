"""What batches are made of: their samples and tokens, and their tensors, each of which a worker has to send.

No code of the script's is called: only plain tensors are asked for their shape.
"""

from __future__ import annotations

import sys
from collections import UserDict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

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


def samples_of(batch: Any, over: Pass) -> int:
    """Return how many samples a batch is made of; −1: not known.

    A loader that has a batch size makes such batches; that the last one of an epoch may be smaller is not worth looking
    at each. Of a loader without, all tensors of the first batch must agree in their first dimension.
    """
    if over.leads is None:
        _settle(batch, over)
    if over.leads:
        first = _leading(batch, 0)
        if first >= 0:
            return first
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
    found: list[int] = []
    _collect(batch, found, 0)
    over.leads = len(set(found)) == 1 and found[0] > 0


def _shape(part: Any) -> Any:
    """Return the shape of a plain tensor, None of anything else."""
    if type(part) is not sys.modules["torch"].Tensor:
        return None
    try:
        return part.shape
    except RuntimeError:  # of a nested tensor
        return ()


def inside(part: Any) -> Iterator[Any]:
    """Return what a list, a tuple, a dict or a UserDict holds; nothing of anything else."""
    if isinstance(part, UserDict):  # as the tokenizers of transformers return
        part = part.__dict__.get("data")
    if isinstance(part, dict):
        return iter(dict.values(part))
    if isinstance(part, tuple):
        return tuple.__iter__(part)
    return list.__iter__(part) if isinstance(part, list) else iter(())


def _leading(part: Any, depth: int) -> int:
    """Return the first dimension of the first tensor of a batch; −1: it begins with something else."""
    shape = _shape(part)
    if shape is not None:
        return int(shape[0]) if shape else -1
    return _leading(next(inside(part), None), depth + 1) if depth < _DEEPEST else -1


def _collect(part: Any, found: list[int], depth: int) -> None:
    """Add the first dimensions of a batch's tensors to a list; −1 of a tensor that has none."""
    shape = _shape(part)
    if shape is not None:
        found.append(int(shape[0]) if shape else -1)
    elif depth < _DEEPEST:
        for one in inside(part):
            if len(found) >= _MOST_TENSORS:
                return
            _collect(one, found, depth + 1)


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
