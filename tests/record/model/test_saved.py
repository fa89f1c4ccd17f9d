"""What the autograd graph keeps of models whose bytes are known, and that looking changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dlprof.record.model import saved
from dlprof.record.model.saved import Calls, Fullest, Graph, Kept, walk

torch: Any = pytest.importorskip("torch", reason="recording needs torch")
checkpointing = pytest.importorskip("torch.utils.checkpoint")
nn = torch.nn
F = nn.functional


def kept(loss: Any, *without: Any) -> dict[str, int]:
    """Return the bytes that a graph keeps, by data type, but for those of some tensors."""
    left = {one.untyped_storage()._cdata for one in without}
    sizes: dict[str, int] = {}
    for key, one in walk(loss).kept.items():
        if key not in left:
            sizes[one.dtype] = sizes.get(one.dtype, 0) + one.size
    return sizes


class Own(torch.autograd.Function):  # type: ignore[misc]
    """A function that keeps one tensor as it should, and one on its context."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x.exp())
        ctx.beside = {"sin": x.sin()}
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient * ctx.saved_tensors[0] * ctx.beside["sin"]


def offloaded(x: Any) -> Any:
    with torch.autograd.graph.save_on_cpu():
        return (x + 2).exp()


def spared(x: Any, layer: Any) -> Any:
    """Checkpoint, but for the products."""
    ops = [torch.ops.aten.addmm.default]
    contexts = checkpointing.create_selective_checkpoint_contexts
    return checkpointing.checkpoint(lambda x: layer(x).exp(), x, use_reentrant=False, context_fn=lambda: contexts(ops))


def nested(x: Any, layer: Any) -> Any:
    """Checkpoint two checkpoints."""

    def inner(x: Any) -> Any:
        return checkpointing.checkpoint(lambda x: layer(x).exp(), x, use_reentrant=False)

    return checkpointing.checkpoint(lambda x: inner(inner(x)), x, use_reentrant=False)


ROWS = 8 * 16 * 4  # bytes of the input below


@pytest.mark.parametrize(
    ("compute", "layer", "size"),
    [
        # The input is kept for the weight's gradient, and the outputs of exp (8 × 4): the sum needs none.
        (lambda x, layer: layer(x + 0).exp(), (16, 4), ROWS + 8 * 4 * 4),
        (lambda x, _: offloaded(x), (1, 1), ROWS),
        (lambda x, layer: spared(x + 2, layer), (16, 32), ROWS + 8 * 32 * 4),
        (lambda x, layer: nested(x + 2, layer), (16, 16), ROWS),
        (lambda x, _: Own.apply(x), (1, 1), 2 * ROWS),
    ],
    ids=["a layer", "offloaded", "a checkpoint that spares products", "checkpoints in a checkpoint", "on a context"],
)
def test_bytes_and_the_backward_pass_after_it(compute: Any, layer: tuple[int, int], size: int) -> None:
    made, x = nn.Linear(*layer), torch.randn(8, 16, requires_grad=True)
    loss = compute(x, made).sum()
    assert kept(loss, *made.parameters()) == {"float32": size}
    loss.backward()


def test_a_graph_that_was_used_up_keeps_nothing() -> None:
    loss = torch.randn(10, requires_grad=True).exp().sum()
    loss.backward()
    assert kept(loss) == kept(torch.zeros(3)) == {}


def test_a_convolution_with_batch_norm_relu_and_pooling() -> None:
    conv, norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
    x = torch.randn(2, 3, 10, 10)
    loss = F.max_pool2d(norm(conv(x)).relu(), 2).sum()
    # The convolution's output (for the norm), the norm's means and deviations, the relu's output, the pool's indices.
    map_ = 2 * 8 * 8 * 8
    known = (x, *conv.parameters(), *norm.parameters(), *norm.buffers())
    assert kept(loss, *known) == {"float32": (map_ + 2 * 8 + map_) * 4, "int64": map_ // 4 * 8}


def test_attention_keeps_no_scores_where_a_fused_kernel_computes_it() -> None:
    q = torch.randn(2, 4, 32, 16, requires_grad=True)
    fused = F.scaled_dot_product_attention(q, q, q).sum()
    plain = ((q @ q.transpose(-1, -2)).softmax(-1) @ q).sum()
    assert kept(plain, q) == {"float32": 2 * 4 * 32 * 32 * 4}  # the scores after the softmax
    assert kept(fused, q)["float32"] < 2 * (2 * 4 * 32 * 16 + 2 * 4 * 32) * 4


def test_copies_of_parameters_that_autocast_makes_are_known_as_such() -> None:
    layer, x = nn.Linear(16, 4), torch.randn(8, 16)
    with torch.autocast("cpu", torch.bfloat16):
        loss = layer(x.requires_grad_().cos()).sum()
    assert {one.cast_of: one.size for one in walk(loss).kept.values() if one.cast_of} == {id(layer.weight): 16 * 4 * 2}
    # Its input in 16 bits and, for the cosine, in 32.
    assert sorted(one.size for one in walk(loss).kept.values() if not one.cast_of) == [8 * 16 * 2, 8 * 16 * 4]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_keeps_its_inputs_and_nothing_is_computed_again(reentrant: bool) -> None:
    calls: list[int] = []
    layer = nn.Linear(16, 16)

    def block(x: Any) -> Any:
        calls.append(1)
        return layer(layer(x).exp()).exp()

    loss = checkpointing.checkpoint(block, torch.randn(8, 16, requires_grad=True) + 2, use_reentrant=reentrant).sum()
    graph = walk(loss)
    assert sum(one.size for one in graph.kept.values() if one.dtype == "float32") == ROWS
    assert graph.recomputed > 0
    assert calls == [1]
    loss.backward()
    assert calls == [1, 1]


def test_hooks_of_the_script_are_never_asked_to_unpack() -> None:
    unpacked: list[Any] = []

    def unpack(packed: Any) -> Any:
        unpacked.append(packed)
        return packed[0].float()

    x = torch.randn(100, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (tensor.bfloat16(),), unpack):
        loss = x.exp().sum()
    assert kept(loss) == {"bfloat16": 200}
    assert unpacked == []
    loss.backward()
    assert len(unpacked) == 1


def test_what_two_nodes_keep_is_of_the_first() -> None:
    y = torch.randn(10, requires_grad=True).exp()
    (one,) = walk((y * y).sum()).kept.values()
    assert one.number == y.grad_fn._sequence_nr()


def test_what_was_modified_in_place_still_fails_the_backward_pass() -> None:
    y = torch.randn(10, requires_grad=True).exp()
    loss = y.sum()
    y.mul_(2)
    walk(loss)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    "gradients",
    [
        lambda f, x: torch.autograd.grad(f(x), x, create_graph=True)[0],
        lambda f, x: torch.func.grad(f)(x),
        lambda f, x: torch.func.vmap(torch.func.grad(f))(x[None])[0],
    ],
    ids=["double_backward", "functorch", "vmap"],
)
def test_gradients_of_gradients_are_the_same_when_they_were_looked_at(gradients: Callable[..., Any]) -> None:
    def value(x: Any) -> Any:
        loss = (x.exp() * x).sum()
        walk(loss)
        return loss

    x = torch.linspace(0, 1, 10, requires_grad=True)
    first = gradients(value, x)
    walk(first.sum())
    (second,) = torch.autograd.grad(first.sum(), x)
    assert torch.allclose(first, x.exp() * (1 + x))
    assert torch.allclose(second, x.exp() * (2 + x))


def test_nothing_is_kept_alive() -> None:
    freed: list[int] = []

    class Counted(torch.Tensor):  # type: ignore[misc]
        def __del__(self) -> None:
            freed.append(1)

    x = torch.randn(10, requires_grad=True)
    loss = (x.exp().as_subclass(Counted) * x).sum().as_subclass(torch.Tensor)
    graph = walk(loss)
    del loss
    assert freed
    assert sum(one.size for one in graph.kept.values()) > 0


def test_a_graph_of_very_many_nodes_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    y = torch.randn(1, requires_grad=True)
    for _ in range(100):
        y = y * 2
    for most, whole in ((50, False), (500, True)):
        monkeypatch.setattr(saved, "_MOST_NODES", most)
        assert walk(y).whole is whole


def test_nodes_belong_to_the_innermost_call() -> None:
    calls = Calls()
    calls.enter(1, 10)
    calls.enter(2, 12)
    calls.leave(15)
    calls.enter(3, 15)
    calls.leave(15)
    calls.leave(18)
    assert [calls.owner(n) for n in (9, 10, 11, 12, 14, 15, 17, 18, 99)] == [0, 1, 1, 2, 2, 1, 1, 0, 0]


def graph(begins: int, ends: int, *sizes: int, first: int = 0) -> Graph:
    made = {first + n: Kept(begins + n, size, "cpu", "float32") for n, size in enumerate(sizes)}
    return Graph(ends, begins, made)


@pytest.mark.parametrize(
    ("graphs", "most"),
    [
        # Micro-batches one after the other are not there at once.
        ((graph(0, 5, 100, 20), graph(10, 15, 70, first=10)), 120),
        # Those of a pipeline are: three forward passes, then three backward passes.
        ((graph(0, 30, 100), graph(10, 30, 70, first=10), graph(20, 30, 50, first=20)), 220),
        # The third begins once the first backward pass has.
        ((graph(0, 20, 100), graph(10, 40, 70, first=10), graph(20, 40, 50, first=20)), 170),
        # What is made after the first backward pass has begun is not there with what that needed.
        ((graph(0, 20, 100), graph(15, 40, 70, 0, 0, 0, 0, 50, first=10)), 170),
        # What two losses share is there once.
        ((graph(0, 30, 100, 7), graph(0, 30, 100, 9)), 109),
    ],
)
def test_the_most_that_is_there_at_once(graphs: tuple[Graph, ...], most: int) -> None:
    fullest = Fullest()
    for one in graphs:
        fullest.add(one, one.kept)
    assert sum(one.size for one in fullest.most.values()) == fullest.size == most
