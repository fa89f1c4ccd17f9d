"""An operator is known by the module that it is of, also where it runs in the backward pass."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="recording needs torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from dlprof.record.model.functions import Functions  # noqa: E402


class Layer(torch.nn.Linear):  # type: ignore[misc]
    """A layer that says when it is called."""

    called: list[str] = []  # noqa: RUF012 - of all

    def forward(self, x: Any) -> Any:
        """Multiply."""
        self.called.append(self.name)
        try:
            return super().forward(x)
        finally:
            self.called.pop()


def layer(name: str) -> Any:
    made = Layer(4, 4)
    made.name = name
    return made


def products(reentrant: bool) -> Counter[tuple[str, str]]:
    """Return how many products each layer computes, by part of the step, the middle one checkpointed."""
    functions = Functions(lambda: Layer.called[-1] if Layer.called else "")
    found: Counter[tuple[str, str]] = Counter()

    class Seeing(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func._schema.name in ("aten::mm", "aten::addmm"):
                found[functions.module()] += 1
            return func(*args, **(kwargs or {}))

    first, middle, last = map(layer, ("first", "middle", "last"))

    def twice(x: Any) -> Any:
        return middle(torch.tanh(middle(x)))

    with Seeing():  # type: ignore[no-untyped-call]
        x = torch.tanh(first(torch.ones(2, 4, requires_grad=True)))
        y = last(checkpoint(twice, x, use_reentrant=reentrant))
        (y @ torch.ones(4, 4)).sum().backward()
    return found


@pytest.mark.parametrize("reentrant", [False, True])
def test_products_are_counted_by_module_and_part(reentrant: bool) -> None:
    found = products(reentrant)
    # Each layer's gradients of its weights and of its input are a product each.
    assert [found[name, "backward"] for name in ("first", "middle", "last")] == [2, 4, 2]
    assert [found[name, "forward"] for name in ("first", "middle", "last")] == [1, 2, 1]
    assert found["middle", "recompute"] in ((2,) if reentrant else (1, 2))  # it ends as soon as all is there again
    assert (found["", "forward"], found["", "backward"]) == (1, 1)
    assert found.total() == 4 + 8 + 2 + found["middle", "recompute"]
