"""What a step computes of which little is used, or on more than it must: by where results go in the counted step.

Tensors are known by their storage, which views of them share. A product of which the forward pass reads only some rows
has computed the others for nothing: scores of all tokens whose loss counts a few. A convolution over single pixels
gives the same before its input was made larger. A weight that is put together from factors costs a product of its own
size, and a gradient of that size, which the factors one after the other do not.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dlprof.record.calls.frames import Place

# Of a product, at most this share is used where it is kept; and so many kinds are.
_LITTLE = 0.5
_MOST_FLOWS = 12

# They give a row for each row, as elementwise operators do: what reads their result reads the product.
_BY_ROW = ("aten::_log_softmax", "aten::_softmax", "aten::_to_copy", "aten::clone")
# Of a convolution or an attention no part can be left out by an index before it.
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::linear", "aten::matmul")
_LOSSES = ("aten::nll_loss_forward", "aten::nll_loss2d_forward")
_COPIES = ("aten::_to_copy", "aten::clone")
_PICKS = ("aten::index", "aten::index_select")


class Call(NamedTuple):
    """One call of an operator: as it is counted, and the script's line that it comes from, if any."""

    operator: str
    dtype: str
    shape: str
    flops: int
    moved: int  # bytes
    place: Place | None


@dataclass(slots=True, eq=False)
class _Product:
    call: Call
    parts: dict[tuple[int, int], float] = field(default_factory=dict)  # by what reads them, of all its values
    read_by: str = ""  # the last operator that does

    @property
    def used(self) -> float:
        return min(sum(self.parts.values()), 1.0)


@dataclass(slots=True)
class _Weight:
    """What is made of parameters alone; `product`: the call that multiplied them, if any did.

    `moved`: the bytes that other operators moved for it, by their names.
    """

    product: Call | None
    moved: Counter[str] = field(default_factory=Counter)


class Flows:
    """Follows the results of a step's operators; `facts` says what of them was needless."""

    def __init__(self) -> None:
        self._products: list[_Product] = []
        self._made: dict[int, tuple[_Product, int]] = {}  # by storage, with the number of its values
        self._weights: dict[int, _Weight] = {}  # by storage, as are parameters, which no product made
        self._larger: dict[int, tuple[Call, float]] = {}  # what was interpolated to so many times as many pixels
        self._one_hot: set[int] = set()  # storages of ones among zeros
        self._found: list[dict[str, Any]] = []

    def see(self, call: Call, tensors: list[Any], args: Any, out: Any, *, moves: bool, elementwise: bool) -> None:
        """Follow one call of the forward pass or the loss; views and what only allocates move nothing."""
        import torch

        for t in tensors:
            if isinstance(t, torch.nn.Parameter):
                self._weights.setdefault(_storage(t), _Weight(None))
        if not moves:
            return
        if not _is_strided(out):
            self._read(call, tensors, args, out)
            self.forget(out, {_storage(t) for t in tensors})
            return
        source = None
        if elementwise or call.operator in _BY_ROW:
            source = next((one for t in tensors if (one := self._made.get(_storage(t)))), None)
        if source is not None and 2 * out.numel() < source[1]:
            source = None
        self._read(call, tensors, args, out, but=source and source[0])
        if call.flops:
            self._multiplied(call, tensors, args)
        weights = [self._weights.get(_storage(t)) for t in tensors]
        place = _storage(out)
        if any(_storage(t) == place for t in tensors):  # in place
            if call.operator == "aten::scatter_" and not hasattr(args[3], "untyped_storage"):
                self._one_hot.add(place)
            return
        ones = call.operator in _COPIES and any(_storage(t) in self._one_hot for t in tensors)
        self.forget(out)
        if ones:
            self._one_hot.add(place)
        if weights and all(weights):
            known = [one for one in weights if one is not None]
            moved = sum((one.moved for one in known), Counter[str]())
            if not call.flops:
                moved[call.operator] += call.moved
            self._weights[place] = _Weight(
                call if call.flops else next((w.product for w in known if w.product), None), moved
            )
        elif call.flops and call.operator in _PRODUCTS:
            self._products.append(_Product(call))
            self._made[place] = self._products[-1], out.numel()
        elif source is not None:
            self._made[place] = source[0], out.numel()
        elif "upsample" in call.operator and tensors:
            self._larger[place] = call, out.numel() / max(tensors[0].numel(), 1)

    def facts(self) -> list[dict[str, Any]]:
        """Return what was needless, the largest product first, a row for each line, operator and shape."""
        for one in self._products:
            if one.parts and one.used <= _LITTLE:
                self._keep("unused_rows", one.call, used=one.used, read_by=one.read_by)
        rows: dict[tuple[Any, ...], dict[str, Any]] = {}
        for flow in self._found:
            key = tuple(flow[name] for name in ("kind", "file", "line", "operator", "dtype", "shape"))
            row = rows.setdefault(key, flow | {"calls": 0, "flops": 0, "used": 0.0})
            row["used"] = (row["used"] * row["calls"] + flow["used"]) / (row["calls"] + 1)
            row["calls"], row["flops"] = row["calls"] + 1, row["flops"] + flow["flops"]
        return sorted(rows.values(), key=lambda row: -row["flops"])[:_MOST_FLOWS]

    def forget(self, out: Any, given: Collection[int] = ()) -> None:
        """Forget the tensors that are gone, and whose storages those now have that an operator has made.

        `given`: storages of its arguments, of which some operators return parts without a word (`unsafe_split`).
        """
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if _is_strided(t) and _storage(t) not in given:
                for known in (self._made, self._weights, self._larger):
                    known.pop(_storage(t), None)
                self._one_hot.discard(_storage(t))

    def _read(self, call: Call, tensors: list[Any], args: Any, out: Any, but: _Product | None = None) -> None:
        """Note which part of each product an operator reads, `but` of that which its result stands for."""
        for n, t in enumerate(tensors):
            known = self._made.get(_storage(t))
            if known is None or known[0] is but:
                continue
            product, values = known
            part, where = t.numel() / max(values, 1), (_storage(t), t.storage_offset())
            if call.operator in _PICKS and n == 0:  # each picks others, as far as is known
                part, where = out.numel() / max(values, 1), (-1, len(product.parts))
            elif call.operator in _LOSSES and n == 0:
                target, ignored = args[1], args[4]
                part *= float((target != ignored).float().mean().item()) if target.numel() else 1.0
            product.read_by = call.operator
            product.parts[where] = max(product.parts.get(where, 0.0), part)

    def _multiplied(self, call: Call, tensors: list[Any], args: Any) -> None:
        """Keep a product with a weight that was made of factors, or of one-hot rows; a convolution after enlarging."""
        rows = args[call.operator in ("aten::addmm", "aten::baddbmm")]
        if call.operator in _PRODUCTS and _storage(rows) in self._one_hot:
            self._keep("one_hot", call)
        made = [self._weights.get(_storage(t)) for t in tensors]
        if not all(made):
            weight, t = next(
                ((one, t) for one, t in zip(made, tensors, strict=True) if one and one.product), (None, None)
            )
            if weight is not None and weight.product is not None and t is not None and _is_low(weight.product, t):
                self._keep(
                    "low_rank", call, factors=[weight.product.operator, weight.product.shape], moved=dict(weight.moved)
                )
        if call.operator == "aten::convolution" and (larger := self._larger.get(_storage(args[0]))):
            weight, stride, transposed = args[1], args[3], args[6]
            if {*weight.shape[2:], *stride} == {1} and not transposed and weight.shape[0] < weight.shape[1]:
                made_by, times = larger
                used = weight.shape[0] / weight.shape[1]
                self._keep("upsampled", call, used=used, times=times, factors=[made_by.operator, made_by.shape])

    def _keep(self, kind: str, call: Call, used: float = 0.0, **more: Any) -> None:
        if call.place is None:
            return
        where = {name: getattr(call.place, name) for name in ("file", "line", "function", "source")}
        counted = {"operator": call.operator, "dtype": call.dtype, "shape": call.shape, "flops": call.flops}
        self._found.append({"kind": kind, **where, **counted, "used": used, **more})


def _is_low(product: Call, weight: Any) -> bool:
    """Return whether factors multiplied one after the other compute less than half of what their product does."""
    rank = int(product.shape.split(" ")[0].split("x")[-1])
    rows, columns = weight.shape[0], math.prod(weight.shape[1:])
    return bool(2 * rank * (rows + columns) < rows * columns)


def _is_strided(value: Any) -> bool:
    """Return whether this is a tensor with a storage: a sparse one has none."""
    return hasattr(value, "untyped_storage") and str(value.layout) == "torch.strided"


def _storage(tensor: Any) -> int:
    return int(tensor.untyped_storage()._cdata)
