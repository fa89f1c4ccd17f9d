"""Bytes of parameters, gradients, buffers and optimizers' state, and of tensors that share storages or have none."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from dlprof.record.model import state as module
from dlprof.record.model.state import Model, Storages, count_idle, models_of, of, plain, state_of, tensors_in
from dlprof.record.observed import Observed

torch: Any = pytest.importorskip("torch", reason="recording needs torch")
nn = torch.nn
OWNER = ("layer", "Linear")


def sums(storages: Storages) -> dict[str, list[int]]:
    """Return tensors, bytes and full bytes, by part."""
    return {row[0]: found for row, found in storages.rows.items()}


def stored(*tensors: tuple[str, Any]) -> Storages:
    storages = Storages()
    for part, tensor in tensors:
        storages.add(part, OWNER, tensor)
    return storages


def test_views_have_their_own_bytes_and_the_first_what_is_left() -> None:
    whole = torch.zeros(100)
    views = ("parameter", whole[:30]), ("gradient", whole[30:90]), ("buffer", whole[90:95].expand(7, 5))
    storages = stored(*views)
    assert sums(storages) == {"parameter": [1, 120, 120], "gradient": [1, 240, 240], "buffer": [1, 40, 40]}
    storages.settle()
    assert sum(size for _, size, _ in storages.rows.values()) == whole.untyped_storage().nbytes()


def test_what_is_there_twice_is_counted_once_and_what_a_view_keeps_alive_counts_whole() -> None:
    one = torch.zeros(8, dtype=torch.bfloat16)
    storages = stored(*(("activation", tensor) for tensor in (one, one.view(2, 4), one.detach().t())))
    storages.settle()
    assert storages.rows == {("activation", *OWNER, "cpu", "bfloat16", 0): [3, 16, 16]}
    kept = stored(("activation", torch.zeros(1_000)[:1]))
    kept.settle()
    assert sums(kept) == {"activation": [1, 4_000, 4_000]}


def test_sparse_tensors_and_those_made_of_others() -> None:
    sparse = torch.sparse_coo_tensor([[0, 5]], torch.ones(2, 3), (10, 3), check_invariants=True)
    jagged = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)
    found = {
        (row[0], row[4]): size
        for row, (_, size, _) in stored(("gradient", sparse), ("activation", jagged)).rows.items()
    }
    expected = {("gradient", "int64"): 2 * 8, ("gradient", "float32"): 6 * 4, ("activation", "float32"): 6 * 3 * 4}
    assert {key: found[key] for key in expected} == expected


def test_tensors_without_memory_and_those_copied_on_write_or_within_functorch() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.zeros(4))
    for tensor in (torch.zeros(4, device="meta"), fake, torch.zeros(2, 2).to_mkldnn()):
        assert [of(one) for one in plain(tensor)] == [None]
    first = torch.zeros(1_000)
    second = torch._lazy_clone(first)
    assert None not in (of(first), of(second))
    assert torch._C._is_cow_tensor(first)  # looking has not copied it
    assert torch._C._is_cow_tensor(second)
    found: list[Any] = []
    whole = torch.zeros(3, 5)

    def look(x: Any) -> Any:
        found.extend(of(one) for one in plain(x))
        return x * 2

    torch.vmap(look)(whole)
    assert found == [of(whole)]


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
