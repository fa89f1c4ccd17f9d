"""Bytes of what models, optimizers and graphs hold, in storages that are shared or absent; looking changes nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from dlprof.record.model import tensors as module
from dlprof.record.model.tensors import (
    Fullest,
    Graph,
    Kept,
    Model,
    ModuleCalls,
    Storages,
    count_idle,
    models_of,
    plain,
    state_of,
    storage_of,
    tensors_in,
    walk,
)
from dlprof.record.observed import Observed

torch: Any = pytest.importorskip("torch", reason="recording needs torch")
checkpointing = pytest.importorskip("torch.utils.checkpoint")
nn = torch.nn
F = nn.functional


WHOLE, TWICE = torch.zeros(100), torch.zeros(8, dtype=torch.bfloat16)
SPARSE = torch.sparse_coo_tensor([[0, 5]], torch.ones(2, 3), (10, 3), check_invariants=True)
# Tensors, and of each data type how many there are and their bytes, in their order.
STORED: dict[str, tuple[list[Any], dict[str, list[list[int]]]]] = {
    "views have their own bytes": (
        [WHOLE[:30], WHOLE[30:90], WHOLE[90:95].expand(7, 5)],
        {"float32": [[1, 120], [1, 240], [1, 40]]},
    ),
    "the first also what is left": ([WHOLE[:30], WHOLE[30:50]], {"float32": [[1, 320], [1, 80]]}),
    "what is there twice counts once": (
        [TWICE, TWICE.view(2, 4), TWICE.detach().t()],
        {"bfloat16": [[1, 16], [1, 0], [1, 0]]},
    ),
    "what a view keeps alive": ([torch.zeros(1_000)[:1]], {"float32": [[1, 4_000]]}),
    "sparse": ([SPARSE], {"int64": [[1, 2 * 8]], "float32": [[1, 6 * 4]]}),
    "made of others": (
        [torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)],
        {"float32": [[3, 6 * 3 * 4]]},  # values, offsets, lengths
    ),
}


@pytest.mark.parametrize("name", STORED)
def test_the_bytes_of_storages(name: str) -> None:
    tensors, expected = STORED[name]
    storages = Storages()
    for n, tensor in enumerate(tensors):
        storages.add(str(n), ("layer", "Linear"), tensor)
    storages.settle()
    found: dict[str, list[list[int]]] = {}
    for (*_, dtype, _), (count, size, full) in storages.rows.items():
        assert size == full
        found.setdefault(dtype, []).append([count, size])
    assert {dtype: found[dtype] for dtype in expected} == expected


def test_tensors_without_memory_and_those_copied_on_write_or_within_functorch() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.zeros(4))
    for tensor in (torch.zeros(4, device="meta"), fake, torch.zeros(2, 2).to_mkldnn()):
        assert [storage_of(one) for one in plain(tensor)] == [None]
    first = torch.zeros(1_000)
    second = torch._lazy_clone(first)
    assert None not in (storage_of(first), storage_of(second))
    assert torch._C._is_cow_tensor(first)  # looking has not copied it
    assert torch._C._is_cow_tensor(second)
    found: list[Any] = []
    whole = torch.zeros(3, 5)

    def look(x: Any) -> Any:
        found.extend(storage_of(one) for one in plain(x))
        return x * 2

    torch.vmap(look)(whole)
    assert found == [storage_of(whole)]


def test_tensors_in_nested_values() -> None:
    class Own:
        tensor = torch.zeros(1)

    a, b = torch.zeros(1), torch.zeros(2)
    assert list(tensors_in([1, {"a": (a, "x")}, [[b]], Own(), None])) == [b, a]
    endless: list[Any] = [a]
    endless.append(endless)
    assert len(list(tensors_in(endless))) < 1_000


class Seen:
    """What the hooks see of a script's models and optimizers, which it keeps."""

    def __init__(self, *models: Any, optimizers: Any = ()) -> None:
        self.kept = (models, optimizers)
        self.observed = Observed()
        for model in models:
            self.observed.see_model(model)
        for optimizer in optimizers:
            self.observed.see_optimizer(optimizer)

    @property
    def models(self) -> list[Model]:
        return models_of(self.observed)


def rows(storages: Storages) -> dict[tuple[str, str, str], int]:
    """Return bytes by part, path and data type."""
    storages.settle()
    found: dict[tuple[str, str, str], int] = {}
    for row, (_, size, _) in storages.rows.items():
        key = row[0], row[1], row[4]
        found[key] = found.get(key, 0) + size
    return found


def counted(seen: Seen) -> dict[tuple[str, str, str], int]:
    storages = Storages()
    for model in seen.models:
        model.count(storages)
    return rows(storages)


def gradients(model: Any) -> dict[tuple[str, str, str], int]:
    storages = Storages()
    Model(model).count_gradients(storages)
    return rows(storages)


def state(optimizer: Any, seen: Seen) -> tuple[int, dict[str, Any]]:
    """Return the bytes of an optimizer's state, and what is said of it."""
    storages = Storages()
    said = state_of(optimizer, seen.models, storages)
    return sum(rows(storages).values()), said


def test_parameters_and_buffers_by_module_and_tied_ones_once() -> None:
    embedding, head = nn.Embedding(100, 16), nn.Linear(16, 100)
    head.weight = embedding.weight
    model = nn.Sequential(embedding, nn.BatchNorm1d(16), head)
    expected = {
        ("parameter", "0", "float32"): 100 * 16 * 4,
        ("parameter", "1", "float32"): 2 * 16 * 4,
        ("parameter", "2", "float32"): 100 * 4,
        ("shared", "2", "float32"): 0,
        ("buffer", "1", "float32"): 2 * 16 * 4,
        ("buffer", "1", "int64"): 8,
    }
    assert counted(Seen(model)) == expected
    # Nor is a part of it that is called alone counted again.
    assert len(Seen(model[0], model).models) == 1
    assert counted(Seen(model[0], model)) == expected


def test_gradients_those_that_are_not_there_and_sparse_ones() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].requires_grad_(requires_grad=False)
    assert gradients(model) == {}
    model(torch.ones(1, 4)).sum().backward()
    assert gradients(model) == {("gradient", "1", "float32"): (4 * 2 + 2) * 4}
    sparse = nn.Embedding(1_000, 8, sparse=True)
    sparse(torch.tensor([1, 5, 5])).sum().backward()
    assert gradients(sparse) == {("gradient", "", "float32"): 3 * 8 * 4, ("gradient", "", "int64"): 3 * 8}


class Outer(torch.optim.Optimizer):  # type: ignore[misc]
    """An optimizer around another one."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner.param_groups, {})
        self.optim = inner


SIZE = (64 * 32 + 32) * 4
STEPS = 2 * 4  # a number for each of two parameters


@pytest.mark.parametrize(
    ("make", "outer", "keys"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), None, {}),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), None, {"momentum_buffer": SIZE}),
        (torch.optim.Adam, None, {"step": STEPS, "exp_avg": SIZE, "exp_avg_sq": SIZE}),
        (
            lambda p: torch.optim.Adam(p, amsgrad=True),
            None,
            {"step": STEPS, "exp_avg": SIZE, "exp_avg_sq": SIZE, "max_exp_avg_sq": SIZE},
        ),
        (torch.optim.Adam, Outer, {"step": STEPS, "exp_avg": SIZE, "exp_avg_sq": SIZE}),
    ],
    ids=["sgd", "momentum", "adam", "amsgrad", "around another one"],
)
def test_state_by_key(make: Any, outer: Any, keys: dict[str, int]) -> None:
    model = nn.Linear(64, 32)
    optimizer = make(model.parameters())
    sum(p.sum() for p in model.parameters()).backward()
    optimizer.step()
    asked = outer(optimizer) if outer else optimizer
    size, said = state(asked, Seen(model, optimizers=[asked]))
    assert (size, said["class"]) == (sum(keys.values()), type(asked).__name__)
    if outer is None:
        assert {one["key"]: one["bytes"] for one in said["state"]} == keys
        assert {one["dtype"] for one in said["state"]} <= {"float32"}


def test_copies_in_higher_precision_are_the_optimizers() -> None:
    model = nn.Linear(64, 32).bfloat16()
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    for master in masters:
        master.grad = torch.zeros_like(master)
    optimizer = torch.optim.Adam(masters)
    optimizer.step()
    seen = Seen(model, optimizers=[optimizer])
    assert counted(seen) == {("parameter", "", "bfloat16"): SIZE // 2}
    size, said = state(optimizer, seen)
    assert size == 3 * SIZE + STEPS
    assert {"key": "master", "dtype": "float32", "device": "cpu", "bytes": SIZE, "full_bytes": SIZE} in said["state"]


def test_tensors_without_a_module_are_parameters() -> None:
    prompt = torch.zeros(10, 4, requires_grad=True)
    model = nn.Linear(4, 4)
    assert counted(Seen(optimizers=[torch.optim.SGD([prompt])])) == {("parameter", "", "float32"): 160}
    both = Seen(model, optimizers=[torch.optim.SGD([prompt, *model.parameters()])])
    assert counted(both) == {("parameter", "", "float32"): 160 + 80}


@pytest.mark.parametrize(("most", "found"), [(sys.maxsize, True), (0, False)], ids=["small", "large"])
def test_idle_modules_are_searched_for_in_no_large_process(
    most: int, found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_BLOCKS", most)
    idle = type("Idle", (nn.Linear,), {})(3, 5)
    storages = Storages()
    count_idle((), storages)
    assert any(row[:2] == ("buffer", "(Idle)") for row in storages.rows) is found
    assert idle.bias is not None


def test_what_comes_to_the_address_of_what_is_gone_is_seen() -> None:
    observed = Observed()
    for _ in range(20):
        one = torch.nn.Linear(1, 1)
        assert id(one) != observed.model_id  # what calls it looks no further otherwise
        observed.see_model(one)
        observed.see_optimizer(torch.optim.SGD(one.parameters()))
        assert observed.models[-1]() is one
        del one
    assert len(observed.optimizers) == 20


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


def pooled(x: Any, layers: Any) -> Any:
    conv, norm = layers
    return F.max_pool2d(norm(conv(x)).relu(), 2)


ROWS = 8 * 16 * 4  # bytes of an input of 8 rows and 16 columns
MAP = 2 * 8 * 8 * 8  # values of the convolution's result


@pytest.mark.parametrize(
    ("compute", "layers", "sizes"),
    [
        # The input is kept for the weight's gradient, and the outputs of exp (8 × 4): the sum needs none.
        (lambda x, layer: layer(x + 0).exp(), nn.Linear(16, 4), {"float32": ROWS + 8 * 4 * 4}),
        (lambda x, _: offloaded(x), nn.Identity(), {"float32": ROWS}),
        (lambda x, layer: spared(x + 2, layer), nn.Linear(16, 32), {"float32": ROWS + 8 * 32 * 4}),
        (lambda x, layer: nested(x + 2, layer), nn.Linear(16, 16), {"float32": ROWS}),
        (lambda x, _: Own.apply(x), nn.Identity(), {"float32": 2 * ROWS}),
        # Its result (for the norm), the norm's means and deviations, the relu's result, the pool's indices.
        (
            pooled,
            nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)),
            {"float32": (MAP + 2 * 8 + MAP) * 4, "int64": MAP // 4 * 8},
        ),
    ],
    ids=[
        "a layer",
        "offloaded",
        "a checkpoint that spares products",
        "nested checkpoints",
        "on a context",
        "a convolution",
    ],
)
def test_bytes_and_the_backward_pass_after_it(compute: Any, layers: Any, sizes: dict[str, int]) -> None:
    x = torch.randn(*((2, 3, 10, 10) if compute is pooled else (8, 16)), requires_grad=compute is not pooled)
    loss = compute(x, layers).sum()
    images = [x] if compute is pooled else []
    assert kept(loss, *images, *layers.parameters(), *layers.buffers()) == sizes
    loss.backward()


def test_a_graph_that_was_used_up_keeps_nothing() -> None:
    loss = torch.randn(10, requires_grad=True).exp().sum()
    loss.backward()
    assert kept(loss) == kept(torch.zeros(3)) == {}


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
        monkeypatch.setattr(module, "_MOST_NODES", most)
        assert walk(y).whole is whole


def test_nodes_belong_to_the_innermost_call() -> None:
    calls = ModuleCalls()
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
