"""An operator is known by the module that it is of, also where it runs in the backward pass."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="recording needs torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from dlprof.record.model.names import Functions  # noqa: E402


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


def test_an_operator_without_a_function_does_not_take_that_of_the_module_before() -> None:
    # A BatchNorm counts its batches before it makes its function.
    inside: list[str] = []
    functions, found = Functions(lambda: inside[-1] if inside else ""), set()

    class Seeing(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found.add((func._schema.name.removeprefix("aten::"), *functions.module()))
            return func(*args, **(kwargs or {}))

    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
    for name, module in model.named_children():
        module.register_forward_pre_hook(lambda *_, name=name: inside.append(name))
        module.register_forward_hook(lambda *_: inside.pop() and None)
    with Seeing():  # type: ignore[no-untyped-call]
        model(torch.ones(2, 3, 8, 8)).sum().backward()
    assert {("convolution_backward", "0", "backward"), ("native_batch_norm_backward", "1", "backward")} <= found
