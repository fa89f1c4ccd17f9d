"""Parameters, gradients, buffers and optimizers' state of models whose bytes are known."""

from __future__ import annotations

from typing import Any

import pytest

from dlprof.record.model.state import Model, Storages, models_of, state_of
from dlprof.record.observed import Observed

torch: Any = pytest.importorskip("torch", reason="recording needs torch")
nn = torch.nn


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


def trained(model: Any, optimizer: Any) -> None:
    sum(p.float().sum() for p in model.parameters()).backward()
    optimizer.step()


def test_parameters_and_buffers_by_module_and_tied_ones_once() -> None:
    embedding, head = nn.Embedding(100, 16), nn.Linear(16, 100)
    head.weight = embedding.weight
    model = nn.Sequential(embedding, nn.BatchNorm1d(16), head)
    assert counted(Seen(model)) == {
        ("parameter", "0", "float32"): 100 * 16 * 4,
        ("parameter", "1", "float32"): 2 * 16 * 4,
        ("parameter", "2", "float32"): 100 * 4,
        ("shared", "2", "float32"): 0,
        ("buffer", "1", "float32"): 2 * 16 * 4,
        ("buffer", "1", "int64"): 8,
    }


def test_parts_of_a_model_that_are_called_alone_are_not_counted_again() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    assert len(Seen(model[0], model).models) == 1
    assert counted(Seen(model[0], model)) == counted(Seen(model))


def test_gradients_and_those_that_are_not_there() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].requires_grad_(requires_grad=False)
    storages = Storages()
    Model(model).count_gradients(storages)
    assert rows(storages) == {}
    model(torch.ones(1, 4)).sum().backward()
    Model(model).count_gradients(storages)
    assert rows(storages) == {("gradient", "1", "float32"): (4 * 2 + 2) * 4}


@pytest.mark.parametrize(
    ("make", "times", "keys"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), 0, {}),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1, {"momentum_buffer": 1}),
        (lambda p: torch.optim.Adam(p), 2, {"step": 0, "exp_avg": 1, "exp_avg_sq": 1}),
        (lambda p: torch.optim.Adam(p, amsgrad=True), 3, {"exp_avg": 1, "exp_avg_sq": 1, "max_exp_avg_sq": 1}),
    ],
    ids=["sgd", "momentum", "adam", "amsgrad"],
)
def test_state_by_key(make: Any, times: int, keys: dict[str, int]) -> None:
    model = nn.Linear(64, 32)
    optimizer = make(model.parameters())
    trained(model, optimizer)
    storages = Storages()
    told = state_of(optimizer, Seen(model, optimizers=[optimizer]).models, storages)
    size = (64 * 32 + 32) * 4
    steps = 2 * 4 if "exp_avg" in keys else 0  # a number for each parameter
    assert sum(rows(storages).values()) == times * size + steps
    assert told["class"] == type(optimizer).__name__
    found = {one["key"]: one["bytes"] for one in told["state"]}
    assert {key: found[key] for key in keys if key != "step"} == {k: n * size for k, n in keys.items() if k != "step"}
    assert {one["dtype"] for one in told["state"]} <= {"float32"}


def test_copies_in_higher_precision_are_the_optimizers() -> None:
    model = nn.Linear(64, 32).bfloat16()
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    for master in masters:
        master.grad = torch.zeros_like(master)
    optimizer = torch.optim.Adam(masters)
    optimizer.step()
    seen = Seen(model, optimizers=[optimizer])
    assert counted(seen) == {("parameter", "", "bfloat16"): (64 * 32 + 32) * 2}
    storages = Storages()
    told = state_of(optimizer, seen.models, storages)
    size = (64 * 32 + 32) * 4
    assert sum(rows(storages).values()) == 3 * size + 2 * 4
    assert {"key": "master", "dtype": "float32", "device": "cpu", "bytes": size, "full_bytes": size} in told["state"]


def test_tensors_without_a_module_are_parameters() -> None:
    prompt = torch.zeros(10, 4, requires_grad=True)
    model = nn.Linear(4, 4)
    assert counted(Seen(optimizers=[torch.optim.SGD([prompt])])) == {("parameter", "", "float32"): 160}
    both = Seen(model, optimizers=[torch.optim.SGD([prompt, *model.parameters()])])
    assert counted(both) == {("parameter", "", "float32"): 160 + 80}


def test_an_optimizer_around_another_one() -> None:
    class Outer(torch.optim.Optimizer):  # type: ignore[misc]
        def __init__(self, inner: Any) -> None:
            super().__init__(inner.param_groups, {})
            self.optim = inner

    model = nn.Linear(8, 8)
    inner = torch.optim.Adam(model.parameters())
    trained(model, inner)
    storages = Storages()
    state_of(Outer(inner), Seen(model).models, storages)
    assert sum(rows(storages).values()) == 2 * (8 * 8 + 8) * 4 + 2 * 4


def test_sparse_gradients_have_the_rows_that_they_have() -> None:
    model = nn.Embedding(1_000, 8, sparse=True)
    model(torch.tensor([1, 5, 5])).sum().backward()
    storages = Storages()
    Model(model).count_gradients(storages)
    assert rows(storages) == {("gradient", "", "float32"): 3 * 8 * 4, ("gradient", "", "int64"): 3 * 8}
