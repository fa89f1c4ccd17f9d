"""GELU as people write it out, traced by torch: each is found, and what is none is left alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from dlprof.analysis.chains.gelus import ERF, TANH, gelus
from tests.fixtures import operators

torch: Any = pytest.importorskip("torch")
F: Any = torch.nn.functional

Activation = Callable[[Any], Any]
WRITTEN: dict[str, tuple[str, Activation]] = {
    "gpt": (TANH, lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))),
    "megatron": (TANH, lambda x: 0.5 * x * (1.0 + torch.tanh(0.79788456 * x * (1.0 + 0.044715 * x * x)))),
    "half behind": (TANH, lambda x: x * 0.5 * (1 + torch.tanh(0.79788456 * (x + 0.044715 * x**3)))),
    "bert": (ERF, lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))),
    "erf first": (ERF, lambda x: 0.5 * x * (1 + torch.erf(x / 1.41421))),
}
OTHERS: dict[str, Activation] = {
    "torch's": F.gelu,
    "torch's with tanh": lambda x: F.gelu(x, approximate="tanh"),
    "tanh": lambda x: torch.tanh(x * 0.5 + 1) * x,
    "gates": lambda x: torch.sigmoid(x) * torch.tanh(x) + torch.sigmoid(x) * x,
    "softcap": lambda x: 30 * torch.tanh(x / 30) + x,
    "errors": lambda x: torch.erf(x) * 2 + x,
}


def found(folder: Path, activation: Activation) -> pd.DataFrame:
    """Return what is found of two layers that multiply and activate."""
    x = torch.randn(64, 256)
    weights = [torch.randn(256, 256, requires_grad=True) for _ in range(2)]

    def run() -> None:
        y = x
        for weight in weights:
            y = activation(y @ weight)
        y.sum().backward()

    return operators.profiled(torch, folder, run).once(gelus)


@pytest.mark.parametrize("name", WRITTEN)
def test_written_out_it_is_found_forward_and_backward(tmp_path: Path, name: str) -> None:
    form, activation = WRITTEN[name]
    frame = found(tmp_path, activation)
    assert sorted(frame["passes"]) == ["backward", "forward"]
    assert set(frame["form"]) == {form}
    assert frame["calls"].tolist() == [2, 2]
    assert (frame["left_ns"] < 0.2 * frame["ns"]).all()


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_none_is_left_alone(tmp_path: Path, name: str) -> None:
    assert found(tmp_path, OTHERS[name]).empty
