"""Counts the bytes that a step's operators read and write, and those that chains of elementwise operators need."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

_MOST_OPERATORS = 60

# Elementwise operators that PyTorch does not tag as such (torch.Tag.pointwise), beside those over lists of tensors.
_FILLS = "copy_ fill_ zero_ ones_like zeros_like full_like"
_UNTAGGED = f"_to_copy native_dropout masked_fill_ leaky_relu_backward mse_loss_backward {_FILLS}".split()
# The argument of which no value is read: it is overwritten, or only its shape matters.
_UNREAD = dict.fromkeys(f"{_FILLS} new_zeros new_ones normal_ uniform_ bernoulli_ random_".split(), 0)
_UNREAD |= {"nll_loss_backward": 1, "max_pool2d_with_indices_backward": 1}
# Of their first argument these use what indices point at: no more bytes than all else has.
_PARTS = "embedding _embedding_bag gather index index_select take nll_loss_forward masked_select"
_PART = f"{_PARTS} index_put_ _index_put_impl_ index_add_ scatter_ scatter_add_".split()

_Sized = list[tuple[Any, int, int]]  # tensors, each with its storage and the bytes of it that count


@dataclass(slots=True)
class _Storage:
    depth: int = 0
    chained: bool = False  # an elementwise operator made it
    unwritten: int = 0  # bytes that nothing has needed in memory so far
    read_at: int = -1  # the depth of the last elementwise operator that read it from memory


class Traffic:
    """The bytes of a step's operators; and of elementwise ones outside the optimizer, what each chain of them needs.

    The depth of a tensor is the number of operators on the longest way to it that are not elementwise. What a chain
    makes at one depth it has in registers; all else it reads once. What it makes is written only where something at
    another depth, or of another kind, reads it. Nothing is computed twice to save a read.
    """

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str, str], list[int]] = {}  # operator, dtype, device → calls, bytes
        self._kinds: dict[Any, tuple[bool, bool, tuple[int, ...]]] = {}
        self._storages: dict[int, _Storage] = {}
        self._chained = self._fused = 0

    def see(self, func: Any, args: Any, out: Any, *, optimizer: bool) -> int:
        """Count one call of an operator; return its bytes: 0 of views, and of what only allocates."""
        moves, elementwise, written = self._kinds.get(func) or self._kinds.setdefault(func, _kind(func))
        if not moves:
            return 0
        name = func._schema.name
        read, changed, made = _parts(name.partition("::")[2], written, args, out)
        touched = [*read, *changed, *made]
        size = sum(n for _, _, n in touched)
        # A scalar may stay on the host. A copy from one device to another is no work of theirs.
        tensors = [t for t, _, _ in touched if t.dim()] or [t for t, _, _ in touched]
        if len({t.device for t in tensors}) == 1:
            key = name, str(tensors[0].dtype).replace("torch.", ""), tensors[0].device.type
            sums = self._sums.setdefault(key, [0, 0])
            sums[0] += 1
            sums[1] += size
            if not optimizer:
                self._chained += size * elementwise
                self._chain(elementwise, read, changed, made)
        return size

    def facts(self) -> dict[str, Any]:
        """Return the operators with most bytes, and the bytes of elementwise ones, as they are and fused."""
        order = sorted(self._sums.items(), key=lambda item: -item[1][1])[:_MOST_OPERATORS]
        moved = [{"operator": o, "dtype": t, "device": d, "calls": n, "bytes": size} for (o, t, d), (n, size) in order]
        return {"moved": moved, "chained_bytes": self._chained, "fused_bytes": self._fused}

    def _chain(self, elementwise: bool, read: _Sized, changed: _Sized, made: _Sized) -> None:
        inputs = [(place, n, self._storages.setdefault(place, _Storage())) for _, place, n in (*read, *changed)]
        depth = max((storage.depth for _, _, storage in inputs), default=0)
        for n, (place, size, storage) in enumerate(inputs):
            if elementwise and storage.chained and storage.depth == depth:
                continue
            if n >= len(read):  # it is written in place
                self._fused += size * elementwise
                self._storages[place] = _Storage(depth + (not elementwise), elementwise)
                continue
            self._fused += storage.unwritten + size * (elementwise and storage.read_at != depth)
            storage.unwritten, storage.read_at = 0, depth if elementwise else storage.read_at
        for _, place, size in made:
            self._storages[place] = _Storage(depth + (not elementwise), elementwise, size * elementwise)


def _kind(func: Any) -> tuple[bool, bool, tuple[int, ...]]:
    """Return whether an operator moves bytes, whether it is elementwise, and which of its arguments it writes."""
    import torch

    schema = func._schema
    namespace, _, name = schema.name.partition("::")
    views = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    allocates = name.startswith(("empty", "new_empty", "detach", "_unsafe_view"))
    of_lists = name.startswith("_foreach_") and not name.endswith(("norm", "max"))
    written = [n for n, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
    # A fused optimizer may change the gradients, the second of its lists, where it scales the loss; it seldom does.
    written = [n for n in written if n != 1 or not name.startswith("_fused_")]
    elementwise = name in _UNTAGGED or of_lists or torch.Tag.pointwise in func.tags
    return not (views or allocates or namespace == "prim"), elementwise, tuple(written)


def _parts(name: str, written: tuple[int, ...], args: Any, out: Any) -> tuple[_Sized, _Sized, _Sized]:
    """Return what an operator reads, what of its arguments it writes, and what it makes, each with its bytes."""
    given = [_sized((arg,)) for arg in args]
    places = {place for of in given for _, place, _ in of}
    read = [one for n, of in enumerate(given) if n != _UNREAD.get(name) for one in of]
    changed = [one for n in written if n < len(given) for one in given[n]]
    made = [one for one in _sized((out,)) if one[1] not in places]
    if name in _PART:
        rest = sum(n for _, _, n in (*read[1:], *made))
        # An operator in place writes where it would have read.
        read[0] = (*read[0][:2], 0 if changed else min(read[0][2], rest))
        changed = [(t, place, min(n, rest)) for t, place, n in changed]
    return read, changed, made


def _sized(values: Iterable[Any]) -> _Sized:
    return [(t, t.untyped_storage()._cdata, _bytes_of(t)) for t in tensors_in(values)]


def tensors_in(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the tensors among values, and in lists and tuples of them."""
    for value in values:
        if hasattr(value, "untyped_storage"):  # a storage itself has none
            yield value
        elif isinstance(value, (tuple, list)):
            yield from tensors_in(value)


def _bytes_of(tensor: Any) -> int:
    """Return the bytes that a tensor holds; one that is expanded is read from the cache, and counts once."""
    strides = tensor.stride()
    if 0 not in strides:
        return int(tensor.nbytes)
    return int(math.prod(n for n, stride in zip(tensor.shape, strides, strict=True) if stride) * tensor.element_size())
