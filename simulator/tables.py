"""Tables of embeddings beside the model: in the host's memory, from where features are copied, or in the device's."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from simulator.hardware import US
from simulator.job import Tables
from simulator.model import Shop
from simulator.program import COMPUTE, Begin, Copy, End, Function, Instruction, Thread

_ENGINE = "autograd::engine::evaluate_function:"


def on_device(shop: Shop, tables: Tables) -> list[Function]:
    """Return lookups as the device does them: rows are read and written, backward added to the gradients."""
    made = []
    for n in range(tables.count):
        lookup = shop.moved("void at::native::(anonymous namespace)::indexSelectLargeIndex", tables.size, 2, 1)
        gradient = shop.moved("at::native::(anonymous namespace)::compute_grad_weight", tables.size, 3, 1)
        backward = (("aten::embedding_dense_backward", gradient),)
        outer = ("aten::embedding",)
        made.append(Function(f"table{n}", "aten::index_select", (lookup,), backward, "EmbeddingBackward0", outer=outer))
    return made


def lookups(tables: Tables, key_of: Callable[..., int]) -> Iterator[Instruction]:
    """Return lookups on the host, each copied to the device at once."""
    for n in range(tables.count):
        key = key_of("table", n)
        yield Begin("aten::embedding", tables.lookup, key)
        yield End(1 * US, key)
        yield from _copied("HtoD", tables.size, key)


def gradients(tables: Tables, key_of: Callable[..., int], main: int, autograd: int) -> Iterator[Instruction]:
    """Return how gradients come back to the host, and are added up there; the last thread is `autograd`."""
    for n in reversed(range(tables.count)):
        key = key_of("table", n, "backward")
        for name in (f"{_ENGINE} ToCopyBackward0", "ToCopyBackward0"):
            yield Begin(name, 1 * US, key)
        yield from _copied("DtoH", tables.size, key)
        for _ in range(2):
            yield End(300, key)
        yield Thread(main)
        for name in (f"{_ENGINE} EmbeddingBackward0", "EmbeddingBackward0"):
            yield Begin(name, 1 * US, key)
        yield Begin("aten::embedding_dense_backward", tables.gradient, key)
        for _ in range(3):
            yield End(500, key)
        yield Thread(autograd)


def _copied(way: str, size: int, key: int) -> Iterator[Instruction]:
    for name in ("aten::to", "aten::_to_copy", "aten::copy_"):
        yield Begin(name, 2 * US, key)
    yield Copy(way, size, "pageable", COMPUTE, key)
    for _ in range(3):
        yield End(1 * US, key)
