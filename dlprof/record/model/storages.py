"""Counts the bytes of tensors, each storage once, in rows of the table `held`.

Nothing is computed, no data is read and no device is queried: sizes are in the host's part of each tensor. The only
code of the script's that runs is that of tensor subclasses that name their inner tensors, as PyTorch asks for them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

# Parts of a packed or nested value that are visited, and the depth of nested tensors.
_MOST_PARTS, _DEEPEST = 1_000, 4

# Classes of tensors without storage.
_UNREAL = ("FakeTensor", "FunctionalTensor")

Owner = tuple[str, str]  # a module's path and class
Key = int  # of a storage


class Storages:
    """Adds up tensors. Of a shared storage each tensor has its own bytes, and the first one the rest."""

    def __init__(self) -> None:
        self.rows: dict[tuple[Any, ...], list[int]] = {}  # part, path, class, device, dtype, trainable → sums
        self._left: dict[Key, list[Any]] = {}  # bytes that no tensor has claimed, and the row of the first

    def add(
        self, part: str, owner: Owner, tensor: Any, *, full: int | None = None, trainable: bool = False
    ) -> list[tuple[str, str, int, int]]:
        """Count a tensor, and return of each that it is made of: device, data type, bytes, and bytes before sharding.

        `full`: its elements before it was sharded, where the tensor does not say so itself.
        """
        added = []
        elements = _elements(tensor) if full is None else full
        for one in plain(tensor):
            known = of(one)
            if known is None:
                continue
            key, size = known
            device, dtype, item = str(one.device), dtype_of(one), one.element_size()
            sums = self._sums(part, owner, device, dtype, trainable)
            left = self._left.setdefault(key, [size, sums])
            own = min(one.numel() * item, left[0])
            left[0] -= own
            whole = own if elements is None else elements * item
            for i, more in enumerate((1, own, whole)):
                sums[i] += more
            added.append((device, dtype, own, whole))
        return added

    def add_bytes(self, part: str, owner: Owner, device: str, dtype: str, size: int, full: int | None = None) -> None:
        """Count a tensor that nobody else has; `full`: its bytes before it was sharded, or of what it shares."""
        sums = self._sums(part, owner, device, dtype, trainable=False)
        for i, more in enumerate((1, size, size if full is None else full)):
            sums[i] += more

    def _sums(self, part: str, owner: Owner, device: str, dtype: str, trainable: bool) -> list[int]:
        return self.rows.setdefault((part, *owner, device, dtype, int(trainable)), [0, 0, 0])

    def by_device(self) -> dict[str, int]:
        """Return the bytes of all rows, by device."""
        sizes: dict[str, int] = {}
        for row, sums in self.rows.items():
            sizes[row[3]] = sizes.get(row[3], 0) + sums[1]
        return sizes

    def settle(self) -> None:
        """Count what no tensor of a storage has claimed (padding, or the rest of what a view holds) to its first."""
        for left in self._left.values():
            left[1][1] += left[0]
            left[1][2] += left[0]
            left[0] = 0

    def __contains__(self, key: Key) -> bool:
        """Return whether a storage was counted."""
        return key in self._left


def of(tensor: Any) -> tuple[Key, int] | None:
    """Return the storage of a plain tensor, as a number of its own while it is alive, and its bytes; None: none."""
    try:
        if tensor.device.type == "meta" or type(tensor).__name__ in _UNREAL:
            return None
        storage = tensor.untyped_storage()
        # Not by its address in memory: to ask for that would copy a storage that is copied on write.
        return storage._cdata, storage.nbytes()
    except (AttributeError, NotImplementedError, RuntimeError):  # it has none
        return None


def plain(tensor: Any, depth: int = 0) -> Iterator[Any]:
    """Return the tensors with storages of their own that a tensor is made of: of a DTensor its local one."""
    torch: Any = sys.modules["torch"]
    functorch: Any = torch._C._functorch
    for _ in range(_DEEPEST):
        if not functorch.is_functorch_wrapped_tensor(tensor):
            break
        tensor = functorch.get_unwrapped(tensor)
    if tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
        return
    flatten = getattr(type(tensor), "__tensor_flatten__", None)
    if flatten is None or type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
        yield tensor
        return
    for name in flatten(tensor)[0] if depth < _DEEPEST else ():
        inner = getattr(tensor, name)
        if isinstance(inner, torch.Tensor):
            yield from plain(inner, depth + 1)


def dtype_of(tensor: Any) -> str:
    """Return the name of a tensor's data type: "float32"."""
    return str(tensor.dtype).replace("torch.", "")


def tensors_in(value: Any) -> Iterator[Any]:
    """Return the tensors in a value, in its lists, tuples and dicts, and theirs; none of a script's own objects."""
    tensor: Any = sys.modules["torch"].Tensor
    parts = [value]
    for _ in range(_MOST_PARTS):
        if not parts:
            return
        part = parts.pop()
        if isinstance(part, tensor):
            yield part
        elif isinstance(part, dict):
            parts.extend(dict.values(part))
        elif isinstance(part, tuple):
            parts.extend(tuple.__iter__(part))
        elif isinstance(part, list):
            parts.extend(list.__iter__(part))


def _elements(tensor: Any) -> int | None:
    """Return the elements of the whole that a DTensor is a part of; None of any other."""
    return int(tensor.numel()) if type(tensor).__name__ == "DTensor" else None
