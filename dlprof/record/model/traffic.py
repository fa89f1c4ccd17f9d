"""Counts the bytes that the operators of a step read and write, and those that chains of elementwise ones need."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

# Operators by name that are kept; the rest is summed up as "others".
_MOST_OPERATORS = 60

# Elementwise operators that PyTorch does not tag as such (torch.Tag.pointwise), and those over lists of tensors.
_ELEMENTWISE = frozenset(
    "copy_ _to_copy fill_ zero_ native_dropout masked_fill_ leaky_relu_backward hardtanh_backward elu_backward"
    " mse_loss_backward ones_like zeros_like full_like".split()
)
_OF_LISTS, _NORMS = "aten::_foreach_", ("norm", "max")

# The place of a tensor among the arguments of which no value is read: it is overwritten, or only its shape matters.
_UNREAD = dict.fromkeys("copy_ fill_ zero_ normal_ uniform_ random_ bernoulli_ ones_like zeros_like full_like".split(), 0)
_UNREAD |= dict.fromkeys("nll_loss_backward nll_loss2d_backward max_pool2d_with_indices_backward".split(), 1)
_UNREAD |= dict.fromkeys("new_zeros new_ones new_full rand_like randn_like".split(), 0)
# Of their first argument these use what indices point at: no more than they have besides.
_PICK = frozenset(
    "embedding _embedding_bag gather index index_select take nll_loss_forward nll_loss2d_forward index_put_"
    " _index_put_impl_ index_add_ index_copy_ scatter_ scatter_add_ masked_select".split()
)


class _Storage:
    """What is known of a storage: how it was made, and where it was read since."""

    __slots__ = ("chained", "depth", "reads", "unwritten")

    def __init__(self, depth: int = 0, *, chained: bool = False, unwritten: int = 0) -> None:
        self.depth = depth  # operators that are not elementwise on the longest way to it
        self.chained = chained  # an elementwise operator made it, at this depth
        self.unwritten = unwritten  # bytes of it that nothing has needed in memory so far
        self.reads: set[tuple[int, int]] = set()  # offsets in it, with the depths of what read there


class Traffic:
    """The bytes of a step's operators, each tensor whole, and `fused`: those of elementwise ones outside the optimizer
    if each chain of them were one kernel.

    Such a chain ends where something else comes between: what an elementwise operator reads is in a register if one of
    its chain has made it; else it is read once for all of the chain. What a chain makes is written only where another
    chain, or another kind of operator, reads it. Nothing is computed twice to save a read.
    """

    def __init__(self) -> None:
        self.fused = 0
        self._rows: dict[tuple[str, str, str, bool, bool], list[int]] = {}
        self._kinds: dict[Any, tuple[bool, bool, tuple[int, ...]]] = {}
        self._storages: dict[int, _Storage] = {}

    def see(self, func: Any, args: Any, out: Any, *, optimizer: bool) -> int:
        """Count one call of an operator; return its bytes: 0 of views, and of what only allocates."""
        known = self._kinds.get(func)
        moves, elementwise, written = known or self._kinds.setdefault(func, _kind(func))
        if not moves:
            return 0
        name = func._schema.name
        read, changed, made = _parts(name.partition("::")[2], written, args, out)
        size = sum(n for _, n in (*read, *changed, *made))
        tensors = [t for t, _ in (*read, *changed, *made)]
        # A scalar may stay on the host. A copy from one device to another is no work of theirs.
        tensors = [t for t in tensors if t.dim()] or tensors
        if not tensors or len({t.device for t in tensors}) > 1:
            return size
        device, dtype = tensors[0].device.type, str(tensors[0].dtype).replace("torch.", "")
        row = self._rows.setdefault((name, dtype, device, elementwise, optimizer), [0, 0])
        row[0] += 1
        row[1] += size
        if not optimizer:
            self._chain(elementwise, read, changed, made)
        return size

    def facts(self) -> dict[str, Any]:
        """Return the operators with most bytes, the rest in a row for each kind, and the bytes of fused chains."""
        order = sorted(self._rows.items(), key=lambda item: -item[1][1])
        rest: dict[tuple[str, str, str, bool, bool], list[int]] = {}
        for (_, _, *kind), (calls, size) in order[_MOST_OPERATORS:]:
            sums = rest.setdefault(("others", "", *kind), [0, 0])  # type: ignore[arg-type]
            sums[0] += calls
            sums[1] += size
        named = ("operator", "dtype", "device", "elementwise", "optimizer")
        rows = [*order[:_MOST_OPERATORS], *rest.items()]
        return {
            "moved": [dict(zip(named, key, strict=True)) | {"calls": n, "bytes": size} for key, (n, size) in rows],
            "fused_bytes": self.fused,
        }

    def _chain(self, elementwise: bool, read: _Sized, changed: _Sized, made: _Sized) -> None:
        storages = self._storages
        inputs = [(t, n, storages.setdefault(_place(t), _Storage())) for t, n in (*read, *changed)]
        depth = max((storage.depth for _, _, storage in inputs), default=0)
        for tensor, size, storage in inputs[: len(read)]:
            if elementwise and storage.chained and storage.depth == depth:
                continue
            self.fused += storage.unwritten
            storage.unwritten = 0
            place = (tensor.storage_offset(), depth)
            if elementwise and place not in storage.reads:
                storage.reads.add(place)
                self.fused += size
        for tensor, size, storage in inputs[len(read) :]:
            if elementwise and not (storage.chained and storage.depth == depth):
                self.fused += size
                storages[_place(tensor)] = _Storage(depth, chained=True)
            elif not elementwise:
                storages[_place(tensor)] = _Storage(depth + 1)
        for tensor, size in made:
            after = _Storage(depth, chained=True, unwritten=size) if elementwise else _Storage(depth + 1)
            storages[_place(tensor)] = after


_Sized = list[tuple[Any, int]]  # tensors, with the bytes of them that count


def _kind(func: Any) -> tuple[bool, bool, tuple[int, ...]]:
    """Return whether an operator moves bytes, whether it is elementwise, and which of its arguments it writes."""
    import torch

    schema = func._schema
    name = schema.name.partition("::")[2]
    views = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    moves = not views and not name.startswith(("empty", "new_empty", "detach", "_unsafe_view"))
    of_lists = schema.name.startswith(_OF_LISTS) and not name.endswith(_NORMS)
    elementwise = name in _ELEMENTWISE or of_lists or torch.Tag.pointwise in func.tags
    written = [n for n, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
    # A fused optimizer may change the gradients, the second of its lists, where it scales the loss; it seldom does.
    return moves, elementwise, tuple(n for n in written if n != 1 or not name.startswith("_fused_"))


def _parts(name: str, written: tuple[int, ...], args: Any, out: Any) -> tuple[_Sized, _Sized, _Sized]:
    """Return what an operator reads, what of its arguments it writes, and what it makes, each with its bytes."""
    given = [list(tensors_in((arg,))) for arg in args]
    changed = [(t, bytes_of(t)) for n in written if n < len(given) for t in given[n]]
    places = {_place(t) for tensors in given for t in tensors}
    made = [(t, bytes_of(t)) for t in tensors_in((out,)) if _place(t) not in places]
    unread = _UNREAD.get(name, -1)
    read = [(t, bytes_of(t)) for n, tensors in enumerate(given) if n != unread for t in tensors]
    if name in _PICK and read:
        # An operator in place writes where it would have read.
        rest = sum(n for _, n in (*read[1:], *made))
        read[0] = (read[0][0], 0 if changed else min(read[0][1], rest))
        changed = [(t, min(n, rest)) for t, n in changed]
    return read, changed, made


def _place(tensor: Any) -> int:
    return int(tensor.untyped_storage()._cdata)


def tensors_in(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the tensors among values, and in lists and tuples of them."""
    for value in values:
        if hasattr(value, "element_size"):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from tensors_in(value)


def bytes_of(tensor: Any) -> int:
    """Return the bytes that a tensor holds; one that is expanded is read from the cache, and counts once."""
    shape = [n for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
    return int(math.prod(shape) * tensor.element_size())
