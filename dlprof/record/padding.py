"""How much of what a model reads is padding: the lengths that the rows of some batches have without it.

A batch is looked at on the host, as its loader returned it, or as the model gets it where there is no loader. Of a
tensor on a device nothing is read, as that would wait for the device. No code of the script's is called.
"""

from __future__ import annotations

import sys
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from time import perf_counter_ns
from typing import Any

from dlprof.record import guarded
from dlprof.record.batches import inside

# So many batches are looked at, each after this many times what the last look took: 0.25 % of the job at most.
_MOST_LOOKS, _REST = 64, 400

# Of a batch: entries of each level, levels, and rows.
_MOST_PARTS, _DEEPEST, _MOST_ROWS = 16, 3, 256

# PyTorch works on fewer elements than twice this (at::internal::GRAIN_SIZE) with one thread: workers need other cores.
_GRAIN = 16_384

# What the losses of PyTorch leave out by default, with which libraries pad labels.
_IGNORED = -100

Lengths = tuple[str, int, list[int]]


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
            self._pads = self._pads or _pads(models)
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
    modules = [m for ref in models if (model := ref()) is not None for m in model.modules()]
    embeddings = [module for module in modules if isinstance(module, sys.modules["torch"].nn.Embedding)]
    found: list[Any] = [getattr(vars(module).get("config"), "pad_token_id", None) for module in modules]
    found += [one.padding_idx for one in embeddings]
    return tuple(dict.fromkeys(pad for pad in found if type(pad) is int)) if embeddings else None


def lengths_of(batch: Any, pads: Sequence[int] | None = None) -> Lengths | None:
    """Return what shows the lengths of a batch's rows, their length with padding, and the lengths without it.

    `pads`: ids of padding, as far as they are known; None: no model reads ids. Returns None where nothing shows it.
    """
    tensors, unpadded = list(_on_host(batch)), None
    for name, numbers in tensors:
        if numbers.dim() == 1 and ("length" in name or name.endswith(("len", "lens"))):
            lengths = numbers[:_MOST_ROWS].tolist()
            for padded in (t.shape[1] for _, t in tensors if t.dim() > 1 and len(t) == len(numbers)):
                if 0 < min(lengths) <= max(lengths) <= padded:
                    return name, padded, lengths
    for source, table, pad, kept in _tables(tensors, pads):
        parts = table[:_MOST_ROWS].split(_GRAIN // table.shape[1])
        lengths = [length for part in parts for length in _before_run(part, pad).tolist()]
        found, padded = (source, table.shape[1], lengths), sum(length < table.shape[1] - 1 for length in lengths)
        if kept is not None:  # a mask, if there is nothing else outside of the runs
            padded = sum(int(part.eq(kept).sum()) for part in parts) == sum(lengths)
        elif source == "ends":
            padded = 2 * padded >= len(lengths)
        if padded:
            return found
        unpadded = unpadded or (found if kept is None else None)
    return unpadded


def _on_host(part: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the tensors of a batch that lie in the host's memory, with the names that dicts give them."""
    if type(part) is sys.modules["torch"].Tensor:
        if part.is_cpu and part.numel():
            yield name, part
    elif depth <= _DEEPEST:
        part = part.__dict__.get("data") if isinstance(part, UserDict) else part
        items = dict.items(part) if isinstance(part, dict) else ((name, one) for one in inside(part))
        for key, one in islice(items, _MOST_PARTS):
            yield from _on_host(one, key if type(key) is str else name, depth + 1)


def _tables(
    tensors: Sequence[tuple[str, Any]], pads: Sequence[int] | None
) -> Iterator[tuple[str, Any, int, int | None]]:
    """Yield what may show padding: its name, rows × length, the value of padding, and of a mask the other one.

    The sense of a mask is known by the end of the rows at which none has padding.
    """
    tables = [(n, t) for n, t in tensors if t.dim() == 2 and not t.is_floating_point() and 1 < t.shape[1] <= _GRAIN]
    for name, t in sorted(tables, key=lambda one: "attention_mask" not in one[0]):
        masks = any(other is not t and other.shape[:2] == t.shape for _, other in tensors)
        for edge in (0, -1) if masks and (not name or "mask" in name) else ():
            kept, either = int(t[0, edge]), t.element_size() == 1 or "padding" in name
            if (kept == 1 or (kept == 0 and either)) and t[:_MOST_ROWS, edge].eq(kept).all():
                yield name or "mask", t, 1 - kept, kept
    numbers = [(n, t) for n, t in tables if t.element_size() > 1 and "mask" not in n and "type" not in n]
    ids = [t for name, t in numbers if "label" not in name][:1] if pads is not None else []
    yield from (("padding_idx", t, pad, None) for t in ids for pad in pads or ())
    yield from (("labels", t, _IGNORED, None) for _, t in numbers if ids)
    # Where no id is known: what most rows end with, or begin with.
    for edge in (-1, 0) if not pads else ():
        yield from (("ends", t, t[:_MOST_ROWS, edge].mode().values.item(), None) for t in ids)


def _before_run(ids: Any, pad: int) -> Any:
    """Return the lengths of rows without the padding that they end with, or begin with, as most do."""
    places = sys.modules["torch"].arange(1, ids.shape[1] + 1, device="cpu")
    to_end, to_begin = ((ids.ne(pad) * order).amax(1) for order in (places, places.flip(0)))
    # Labels are left out at the beginning of a row for another reason: there is the prompt.
    return to_end if pad == _IGNORED or to_end.sum() <= to_begin.sum() else to_begin
