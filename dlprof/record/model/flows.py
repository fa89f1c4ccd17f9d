"""What a step computes of which little is used, or on more than it must: by where results go in the counted step.

Tensors are known by their storage, which views of them share. A product of which the forward pass reads only some rows
has computed the others for nothing: scores of all tokens whose loss counts a few. A convolution over single pixels
gives the same before its input was made larger. A weight that is put together from factors costs a product of its own
size, and a gradient of that size, which the factors one after the other do not. On a CPU a convolution over many taps,
or by a constant kernel of rank 1, may be cheaper in another form. Rows that are multiplied by zero need not be
computed, nor scores of attention that are masked. The same operator of the same tensors gives the same: in this step
again, or, where nothing that it is made of changes, in each step.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dlprof.record.calls import Place

# Of a product, at most this share is used where it is kept; and so many kinds are.
_LITTLE = 0.5
_MOST_FLOWS = 20
# Rows of so many values and more, of which no larger share is not zero, need no product; so many of them are looked at.
_SPARSE, _WIDE, _LOOKED_AT = 0.02, 256, 64
# A kernel of so many taps is long; one of rank 1 is looked at from so many taps a line, and up to so many values.
_LONG, _LINE, _MOST_VALUES = 64, 5, 1 << 14
# Of operators without products, what moves less is not kept.
_LEAST_BYTES = 1 << 16

# They give a row for each row, as elementwise operators do: what reads their result reads the product.
_BY_ROW = ("aten::_log_softmax", "aten::_softmax", "aten::_to_copy", "aten::clone")
# Of a convolution or an attention no part can be left out by an index before it.
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::linear", "aten::matmul")
_WITH_SUM = ("aten::addmm", "aten::baddbmm")
_LOSSES = ("aten::nll_loss_forward", "aten::nll_loss2d_forward")
_COPIES = ("aten::_to_copy", "aten::clone")
_JOINS = ("aten::cat", "aten::stack")
_PICKS = ("aten::index", "aten::index_select")
# A value below it, filled into scores, leaves nothing of them; so much of them is more than a causal mask does.
_MASKS_OUT, _MOSTLY_MASKED, _OF_PADDING = -1e4, 0.6, 0.1


class Call(NamedTuple):
    """One call of an operator: as it is counted, and the script's line that it comes from, if any."""

    operator: str
    dtype: str
    shape: str
    flops: int
    moved: int  # bytes
    place: Place | None
    caller: Place | None = None  # the line that called the function that this one is in
    fixed: bool = False  # within a layer of PyTorch's, which computes all rows


@dataclass(slots=True, eq=False)
class _Product:
    """A product with rows of so many values, and which parts of it are read: whole rows or not, and by whose rows.

    `used`: the share that is; `of_rows`: the share of its rows.
    """

    call: Call
    width: int
    parts: dict[tuple[int, int], tuple[float, bool, _Product | None]] = field(default_factory=dict)
    read_by: str = ""  # the last operator that does
    read_at: Place | None = None  # and its line
    used: float = 1.0
    of_rows: float = 1.0

    def settle(self) -> None:
        """Say how much of it is used, once that is known of what reads it."""
        if self.parts:
            self.used = min(sum(part * (by.of_rows if by else 1.0) for part, _, by in self.parts.values()), 1.0)
            self.of_rows = self.used if all(rows for _, rows, _ in self.parts.values()) else 1.0
            for _, _, by in self.parts.values():
                if by and by.of_rows < 1:
                    self.read_by, self.read_at = by.read_by, by.read_at

    @property
    def to_change(self) -> Place | None:
        """The line to change: the product's, or that which calls its function, where rows of the result are picked."""
        call, at = self.call, self.read_at
        if call.place is None or call.caller is None or at is None or at.function == call.place.function:
            return call.place
        return call.caller if call.caller.function.startswith(at.function) else call.place


@dataclass(slots=True)
class _Weight:
    """What is made of parameters alone; `product`: the call that multiplied them, if any did.

    `moved`: the bytes that other operators moved for it, by their names.
    """

    product: Call | None
    moved: Counter[str] = field(default_factory=Counter)


class _Values:
    """Tells which calls compute the same: of the same operator, of the same values.

    A value has a number, and the tensors that it is made of, which no operator of the step has made; None: it is
    another one each time, as it is drawn, or made of what this step has written into.
    """

    def __init__(self) -> None:
        self._of: dict[int, tuple[int, frozenset[int] | None]] = {}  # by storage
        self._places: dict[int, int] = {}  # by storage, of tensors from before the step: their places in the next
        self._given: list[tuple[weakref.ref[Any], int]] = []  # these, with how often they had been written into
        self._calls: dict[int, Place | None] = {}  # and the line of the first
        self._fresh = 0

    def see(
        self, call: Call, tensors: list[Any], args: Any, out: Any, *, moves: bool, random: bool
    ) -> tuple[bool, frozenset[int] | None, bool]:
        """Return whether an operator has computed the same before, what it is made of, as above, and whether it was
        another line that has.
        """
        if "batch_norm" in call.operator and len(args) > 5 and args[5] is not False:
            # What it takes from its own batch, it does not take from the running means, which it writes into.
            tensors = [t for t in tensors if t is not args[3] and t is not args[4]]
        given, made = {_storage(t) for t in tensors}, _strided(out)
        read = [self._read(t) for t in tensors]  # of a view too: itself is gone before what it is of
        if not moves and {_storage(t) for t in made} <= given:
            return False, None, False
        key, of = -1, None
        if moves and not random and call.operator.startswith("aten::"):
            shaped = [(t.storage_offset(), *t.shape, *t.stride(), str(t.dtype)) for t in tensors]
            key = hash((call.operator, *(number for number, _ in read), *shaped, repr(_plain(args))))
            # A part may be another one in each step, as that of a batch is.
            if all(one is not None and _is_whole(t) for t, (_, one) in zip(tensors, read, strict=True)):
                of = frozenset[int]().union(*(one for _, one in read if one is not None))
        else:
            key = self._next()
        again = key in self._calls
        elsewhere = self._calls.setdefault(key, call.place) != call.place
        for n, t in enumerate(made):
            # What was there before the step, and is written into, is another one each time.
            there = _storage(t) in given and _storage(t) in self._places
            self._of[_storage(t)] = hash((key, n)), None if there else of
        return again, of, elsewhere

    def forget(self, out: Any) -> None:
        """Forget what storages hold that an operator of another phase has made or written into."""
        for t in _strided(out):
            self._of.pop(_storage(t), None)
            self._places.pop(_storage(t), None)

    def stays(self, of: frozenset[int]) -> bool:
        """Return whether, now, all of these tensors are still there and have not been written into."""
        return all((t := ref()) is not None and t._version == version for ref, version in (self._given[n] for n in of))

    def _read(self, t: Any) -> tuple[int, frozenset[int] | None]:
        known = self._of.get(_storage(t))
        if known is not None:
            return known
        if t.is_inference():  # which counts no writes
            return self._next(), None
        n = self._places.get(_storage(t))
        if n is None or self._given[n][0]() is None:  # the storage of one that is gone may be another's now
            n = self._places[_storage(t)] = len(self._given)
            self._given.append((weakref.ref(t), t._version))
        return hash((n, t._version)), None if t.requires_grad else frozenset((n,))  # which is trained

    def _next(self) -> int:
        self._fresh += 1
        return -self._fresh


class Flows:
    """Follows the results of a step's operators; `facts` says what of them was needless."""

    def __init__(self) -> None:
        self._products: list[_Product] = []
        # By storage: the products that its values are of, and how many values there are.
        self._made: dict[int, tuple[tuple[_Product, ...], int]] = {}
        self._weights: dict[int, _Weight] = {}  # by storage, as are parameters, which no product made
        self._larger: dict[int, tuple[Call, float]] = {}  # what was interpolated to so many times as many pixels
        self._one_hot: set[int] = set()  # storages of ones among zeros
        self._values = _Values()
        self._made_from: Counter[Any] = Counter()  # calls, by their function and the line that called that
        # Calls, whether each repeats another, and one of another line, whether it has a gradient, what it is made of,
        # and the storage it made.
        self._same: list[tuple[Call, bool, bool, bool, frozenset[int] | None, int]] = []
        self._found: list[dict[str, Any]] = []

    def see(
        self,
        call: Call,
        tensors: list[Any],
        args: Any,
        out: Any,
        *,
        moves: bool,
        elementwise: bool,
        random: bool = False,
    ) -> None:
        """Follow one call of the forward pass or the loss; views and what only allocates move nothing.

        `args`: with what is given by name. `random`: the operator draws numbers.
        """
        import torch

        again, of, elsewhere = self._values.see(call, tensors, args, out, moves=moves, random=random)
        self._made_from[_function(call)] += moves
        if moves and call.place is not None and (again or of is not None):
            trains = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
            if again or not trains:
                self._same.append((call, again, elsewhere, trains, of, _storage(out) if _is_strided(out) else -1))
        if call.operator.startswith("c10d::"):  # put together to be sent: a wrapper's work, not the script's
            sent = {_storage(t) for t in tensors if _is_strided(t)}
            self._same = [one for one in self._same if one[-1] not in sent]

        for t in tensors:
            if isinstance(t, torch.nn.Parameter):
                self._weights.setdefault(_storage(t), _Weight(None))
        if not moves:
            return
        if not _is_strided(out):
            self._read(call, tensors, args, out)
            self.forget(out, {_storage(t) for t in tensors})
            return
        made = [one for t in tensors if (one := self._made.get(_storage(t)))]
        source: tuple[_Product, ...] = ()
        by_row = (elementwise or call.operator in _BY_ROW) and self._share(call, tensors) > _LITTLE
        if by_row or (call.operator in _JOINS and len(made) == len(tensors)):
            # Of each element another one, or all one after the other: what reads the result reads these.
            source = tuple(p for products, n in made if not by_row or 2 * out.numel() >= n for p in products)
        product = _Product(call, out.shape[-1]) if call.flops and call.operator in _PRODUCTS else None
        self._read(call, tensors, args, out, but=source, product=product)
        if call.flops:
            self._multiplied(call, tensors, args)
        if (masked := _masked(call.operator, args)) >= _MOSTLY_MASKED:
            self._keep("masked", call, 1 - masked)
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
        elif product is not None:
            self._products.append(product)
            self._made[place] = (product,), out.numel()
        elif source:
            self._made[place] = source, out.numel()
        elif "upsample" in call.operator and tensors:
            self._larger[place] = call, out.numel() / max(tensors[0].numel(), 1)

    def facts(self, *, later: bool = False) -> list[dict[str, Any]]:
        """Return what was needless, the largest product first, a row for each line, operator and shape.

        `later`: some steps have passed, so that what stays the same in each is known too.
        """
        found = [*self._found]
        for one in reversed(self._products):  # what reads a product has come after it
            one.settle()
            if one.parts and one.used <= _LITTLE and not one.call.fixed:
                call = one.call._replace(place=one.to_change)
                found += _kept("unused_rows", call, used=one.used, read_by=one.read_by)
        found += self._of_same(later=later)
        rows: dict[tuple[Any, ...], dict[str, Any]] = {}
        for flow in found:
            key = tuple(flow[name] for name in ("kind", "file", "line", "operator", "dtype", "shape"))
            row = rows.setdefault(key, flow | {"calls": 0, "flops": 0, "used": 0.0})
            row["used"] = (row["used"] * row["calls"] + flow["used"]) / (row["calls"] + 1)
            row["calls"], row["flops"] = row["calls"] + 1, row["flops"] + flow["flops"]
        return sorted(rows.values(), key=lambda row: -row["flops"])[:_MOST_FLOWS]

    def wrote(self, out: Any, changed: list[Any]) -> None:
        """Forget what an operator of the backward pass has made, and what one of an optimizer may have changed."""
        self.forget(out)
        self._values.forget([*_strided(out), *changed])  # fused ones count no writes

    def forget(self, out: Any, given: Collection[int] = ()) -> None:
        """Forget the tensors that are gone, and whose storages those now have that an operator has made.

        `given`: storages of its arguments, of which some operators return parts without a word (`unsafe_split`).
        """
        for t in out if isinstance(out, (tuple, list)) else (out,):
            if _is_strided(t) and _storage(t) not in given:
                for known in (self._made, self._weights, self._larger):
                    known.pop(_storage(t), None)
                self._one_hot.discard(_storage(t))

    def _read(
        self,
        call: Call,
        tensors: list[Any],
        args: Any,
        out: Any,
        but: Collection[_Product] = (),
        product: _Product | None = None,
    ) -> None:
        """Note which part of each product an operator reads; not of those, `but`, which its result stands for.

        Of the rows that a `product` multiplies, those are used whose results are.
        """
        for n, t in enumerate(tensors):
            products, values = self._made.get(_storage(t), ((), 1))
            if not products or set(products) <= {*but}:
                continue
            part, where = t.numel() / max(values, 1), (_storage(t), t.storage_offset())
            if call.operator in _PICKS and n == 0:  # each picks others, as far as is known
                part, where = out.numel() / max(values, 1), (-1, len(products[0].parts))
            elif call.operator in _LOSSES and n == 0:
                target, ignored = args[1], args[4]
                part *= float((target != ignored).float().mean().item()) if target.numel() else 1.0
            part *= self._share(call, tensors)
            by = product if t is tensors[call.operator in _WITH_SUM] else None
            kept = out if call.operator in _PICKS else t
            for one in products:
                one.read_by, one.read_at = call.operator, call.place
                if part >= one.parts.get(where, (0.0,))[0]:
                    one.parts[where] = part, kept.dim() > 1 and kept.shape[-1] == one.width, by

    def _share(self, call: Call, tensors: list[Any]) -> float:
        """Return which share of the rows of a product is not multiplied by zero; 1 for any other operator."""
        if call.operator != "aten::mul" or len(tensors) != 2:
            return 1.0
        rows = next((t for t in tensors if not self._made.get(_storage(t))), None)
        if rows is None or rows.dim() < 2 or rows.shape[-1] != 1 or rows.numel() < 2:
            return 1.0
        return float((rows != 0).float().mean().item())

    def _multiplied(self, call: Call, tensors: list[Any], args: Any) -> None:
        """Keep a product with a weight that was made of factors, or of one-hot rows; a convolution after enlarging."""
        rows = args[call.operator in _WITH_SUM]
        if call.operator in _PRODUCTS and _is_strided(rows):
            if _storage(rows) in self._one_hot:
                self._keep("one_hot", call)
            elif not rows.requires_grad and _storage(rows) not in self._made and (share := _not_zero(rows)) <= _SPARSE:
                ones = share * rows.shape[-1] <= 1
                self._keep("one_hot_given" if ones else "sparse", call, share)
        made = [self._weights.get(_storage(t)) for t in tensors]
        if not all(made):
            weight, t = next(
                ((one, t) for one, t in zip(made, tensors, strict=True) if one and one.product), (None, None)
            )
            if weight is not None and weight.product is not None and t is not None and _is_low(weight.product, t):
                self._keep(
                    "low_rank", call, factors=[weight.product.operator, weight.product.shape], moved=dict(weight.moved)
                )
        if call.operator == "aten::convolution" and not args[6] and args[1].device.type == "cpu":
            taps = args[1].shape[2:]
            if _LONG <= max(taps) == math.prod(taps):
                self._keep("long_kernel", call)
            elif _is_separable(args[1]):
                self._keep("separable", call)
        if call.operator == "aten::convolution" and (larger := self._larger.get(_storage(args[0]))):
            weight, stride, transposed = args[1], args[3], args[6]
            if {*weight.shape[2:], *stride} == {1} and not transposed and weight.shape[0] < weight.shape[1]:
                made_by, times = larger
                used = weight.shape[0] / weight.shape[1]
                self._keep("upsampled", call, used=used, times=times, factors=[made_by.operator, made_by.shape])

    def _of_same(self, *, later: bool) -> Iterator[dict[str, Any]]:
        """Return the products, and of each line the bytes that other operators move, that need no second time."""
        same: list[tuple[str, Call, bool, bool]] = []
        for call, again, elsewhere, train, of, _ in self._same:
            constant = later and of is not None and self._values.stays(of)
            if constant or again:
                same.append(("constant" if constant else "repeated", call, train, elsewhere and not constant))
        products: dict[tuple[str, Place], list[Call]] = {}
        moved: dict[tuple[str, Place], Counter[str]] = {}
        trains: set[tuple[str, Place]] = set()
        often = Counter(_function(call) for _, call, *_ in same)
        for kind, call, train, elsewhere in same:
            if call.place is None:
                continue
            # Where most of what a function does is the same, the line that calls it is what can be changed; not where
            # it does what another function has done.
            mostly = 2 * often[_function(call)] >= self._made_from[_function(call)]
            whole = mostly and not elsewhere and call.caller is not None
            key = kind, call.caller if whole and call.caller is not None else call.place
            trains |= {key} if train else set()
            if call.flops:
                products.setdefault(key, []).append(call._replace(place=key[1]))
            else:
                moved.setdefault(key, Counter())[call.operator] += call.moved
        for key in products.keys() | moved.keys():
            kind, place = key
            others = {name: size for name, size in moved.get(key, {}).items() if size >= _LEAST_BYTES}
            if not (others or key in products):
                continue
            calls = products.get(key) or [Call(max(others, key=others.__getitem__), "", "", 0, 0, place)]
            for n, call in enumerate(calls):
                yield from _kept(kind, call, trains=key in trains, moved={} if n else others)

    def _keep(self, kind: str, call: Call, used: float = 0.0, **more: Any) -> None:
        self._found += _kept(kind, call, used, **more)


def _function(call: Call) -> tuple[Any, ...]:
    """Return what tells apart the calls of a function from each line that calls it."""
    return () if call.place is None else (call.place.file, call.place.function, call.caller)


def _kept(kind: str, call: Call, used: float = 0.0, **more: Any) -> list[dict[str, Any]]:
    """Return the entry of a call; nothing where no line of the script's has made it."""
    if call.place is None:
        return []
    counted = {"operator": call.operator, "dtype": call.dtype, "shape": call.shape, "flops": call.flops}
    return [{"kind": kind, **call.place.quoted, **counted, "used": used, **more}]


def _is_low(product: Call, weight: Any) -> bool:
    """Return whether factors multiplied one after the other compute less than half of what their product does."""
    rank = int(product.shape.split(" ")[0].split("x")[-1])
    rows, columns = weight.shape[0], math.prod(weight.shape[1:])
    return bool(2 * rank * (rows + columns) < rows * columns)


def _is_separable(weight: Any) -> bool:
    """Return whether a convolution by this constant, of one channel each, is the same as one by lines."""
    import torch

    taps = weight.shape[2:]
    if weight.requires_grad or weight.shape[1] != 1 or sum(k >= _LINE for k in taps) < 2:
        return False
    if weight.numel() > _MOST_VALUES or not weight.is_floating_point():
        return False
    values = weight.detach().double()[:, 0]
    # Of each dimension's lines all are multiples of one: to what float32 keeps of them, or 16 bits.
    close = 1e-5 if weight.dtype in (torch.float32, torch.float64) else 1e-2
    lines = [values.movedim(n + 1, 1).flatten(2) for n in range(len(taps) - 1)]
    return all(bool((torch.linalg.matrix_rank(one, rtol=close) == 1).all()) for one in lines)


def _not_zero(rows: Any) -> float:
    """Return the largest share of a row that is not zero, of some of the rows; 1 where they are few or narrow."""
    if not rows.is_contiguous() or rows.dim() < 2 or rows.shape[-1] < _WIDE or len(rows) < _WIDE:
        return 1.0
    some = rows.flatten(0, -2)[:: max(rows.numel() // rows.shape[-1] // _LOOKED_AT, 1)]
    return float((some != 0).sum(-1).max().item()) / int(rows.shape[-1])


def _masked(operator: str, args: Any) -> float:
    """Return the share of scores that an operator masks out, in some of the rows; 0 where it is no such one.

    Nor where many queries do not see their own key: those are of padding, which is another waste.
    """
    if operator in ("aten::masked_fill", "aten::masked_fill_"):
        mask, value, out = args[1], args[2], True
    elif operator == "aten::where" and len(args) > 2:
        mask, out = args[0], _is_low_value(args[1])
        value = args[1] if out else args[2]
    else:
        return 0.0
    if mask.dim() < 2 or mask.shape[-2] != mask.shape[-1] or mask.shape[-1] < _WIDE or not _is_low_value(value):
        return 0.0
    some = mask.flatten(0, -2)[:: max(mask.numel() // mask.shape[-1] // _LOOKED_AT, 1)]
    share, own = (float((one.bool() == out).float().mean().item()) for one in (some, mask.diagonal(dim1=-2, dim2=-1)))
    return share if own <= _OF_PADDING else 0.0


def _is_low_value(value: Any) -> bool:
    """Return whether a number, or a tensor of one, masks out what it is filled into."""
    if hasattr(value, "untyped_storage"):
        return bool(value.dim() == 0 and value.item() < _MASKS_OUT)
    return isinstance(value, (int, float)) and value < _MASKS_OUT


def _is_whole(tensor: Any) -> bool:
    """Return whether a tensor is all of its storage, and no part of it."""
    return bool(tensor.numel() * tensor.element_size() >= tensor.untyped_storage().nbytes())


def _strided(out: Any) -> list[Any]:
    return [t for t in (out if isinstance(out, (tuple, list)) else (out,)) if _is_strided(t)]


def _plain(value: Any) -> Any:
    """Return arguments without their tensors."""
    if isinstance(value, (tuple, list)):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    return None if hasattr(value, "untyped_storage") else value


def _is_strided(value: Any) -> bool:
    """Return whether this is a tensor with a storage: a sparse one has none."""
    return hasattr(value, "untyped_storage") and str(value.layout) == "torch.strided"


def _storage(tensor: Any) -> int:
    return int(tensor.untyped_storage()._cdata)
