"""What a batch is made of: how many tensors, and how many bytes they hold. A worker that makes it has to send these."""

from __future__ import annotations

import sys
from typing import Any

# Parts of a batch that are looked at: a batch may be a list of many thousand numbers.
_MOST_PARTS = 1_000

# Of each loader's batches, the first few are looked at, and then one of so many.
_FIRST, _EVERY = 4, 32


# Of a batch that was not looked at.
UNSEEN = (-1, -1)


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
