"""Which share of a model's and its optimizer's values is subnormal, on a CPU, and nothing that cannot be looked at."""

from __future__ import annotations

from typing import Any

import pytest

from dlprof.record.model.parameters import subnormal_shares

torch: Any = pytest.importorskip("torch", reason="recording needs torch")


def trained(weight: float, square: float) -> tuple[Any, Any]:
    """Return a layer of four weights, one of them `weight`, and its optimizer with squares of which half are that."""
    model = torch.nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    with torch.no_grad():
        model.weight.fill_(1.0)[0, 0] = weight
        state = optimizer.state[model.weight]
        state["exp_avg"].fill_(0.0)
        state["exp_avg_sq"].fill_(1.0)[0, :2] = square
        state["step"] = 1
    return model, optimizer


@pytest.mark.parametrize(
    ("weight", "square", "shares"),
    [
        (1.0, 1.0, {"parameters": 0.0, "state": 0.0}),
        (1e-39, 1.0, {"parameters": 0.25, "state": 0.0}),
        (-1e-39, 3e-45, {"parameters": 0.25, "state": 0.25}),
        (0.0, 1.2e-38, {"parameters": 0.0, "state": 0.0}),
    ],
)
def test_the_share_of_values_below_the_least_normal_one(weight: float, square: float, shares: dict[str, float]) -> None:
    model, optimizer = trained(weight, square)
    assert subnormal_shares([model], [optimizer]) == shares


def test_what_is_on_no_cpu_or_of_another_type_is_not_looked_at() -> None:
    assert subnormal_shares([torch.nn.Linear(2, 2, device="meta"), torch.nn.Linear(2, 2).double()], []) == {}


def test_of_large_tensors_a_part_is_looked_at() -> None:
    model = torch.nn.Linear(1 << 17, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)[0, : 1 << 15] = 1e-40
    assert subnormal_shares([model], []) == {"parameters": 0.5}
