"""Normalisations as people write them out, traced by torch: each is found, and what is none is left alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from dlprof.analysis.chains.norms import LAYER, RMS, norms
from tests.fixtures import operators

torch: Any = pytest.importorskip("torch")
F: Any = torch.nn.functional

ROWS, WIDTH = 64, 256
EPS = 1e-6


def mean(x: Any) -> Any:
    return x.mean(-1, keepdim=True)


def by_sums(x: Any, w: Any, b: Any) -> Any:
    average = x.sum(-1, keepdim=True) / WIDTH
    variance = ((x - average) ** 2).sum(-1, keepdim=True) / WIDTH
    return (x - average) / (variance + EPS) ** 0.5 * w + b


def by_var_mean(x: Any, w: Any, b: Any) -> Any:
    variance, average = torch.var_mean(x, -1, keepdim=True)
    return (x - average) * (variance + EPS).rsqrt() * w + b


def llama(x: Any, w: Any, _: Any) -> Any:
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return w * wide.to(x.dtype)


Norm = Callable[[Any, Any, Any], Any]
LAYERS: dict[str, Norm] = {
    "std": lambda x, w, b: w * (x - mean(x)) / (x.std(-1, keepdim=True) + EPS) + b,
    "var": lambda x, w, b: (x - mean(x)) / torch.sqrt(x.var(-1, keepdim=True, unbiased=False) + EPS) * w + b,
    "squares": lambda x, w, b: w * ((x - mean(x)) * torch.rsqrt(mean((x - mean(x)) ** 2) + EPS)) + b,
    "sums": by_sums,
    "var_mean": by_var_mean,
    "batch": lambda x, w, b: (x - x.mean(0)) / torch.sqrt(x.var(0, unbiased=False) + EPS) * w + b,
    "without weights": lambda x, _w, _b: (x - mean(x)) / (x.std(-1, keepdim=True) + EPS),
    "deviation first": lambda x, w, b: (x - mean(x)) / (mean((x - mean(x)).pow(2)) + EPS).sqrt() * w + b,
}
ROOTS: dict[str, Norm] = {
    "llama": llama,
    "gemma": lambda x, w, _: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * (1.0 + w),
    "root": lambda x, w, _: x / torch.sqrt(mean(x * x) + EPS) * w,
    "power": lambda x, w, _: x * torch.pow(mean(x**2) + EPS, -0.5) * w,
}


def found(folder: Path, norm: Norm, *, dtype: str = "float32", times: int = 2) -> pd.DataFrame:
    """Return what is found of layers that multiply, normalise and multiply."""
    of = getattr(torch, dtype)
    x = torch.randn(ROWS, WIDTH, dtype=of)
    weights = [torch.randn(WIDTH, WIDTH, dtype=of, requires_grad=True) for _ in range(times + 1)]
    w, b = torch.ones(WIDTH, dtype=of, requires_grad=True), torch.zeros(WIDTH, dtype=of, requires_grad=True)

    def run() -> None:
        y = x @ weights[0]
        for weight in weights[1:]:
            y = y + norm(y, w, b) @ weight
        y.sum().backward()

    return operators.profiled(torch, folder, run).once(norms)


@pytest.mark.parametrize("name", LAYERS)
def test_layer_norms_are_found_forward_and_backward(tmp_path: Path, name: str) -> None:
    frame = found(tmp_path, LAYERS[name])
    assert sorted(frame["passes"]) == ["backward", "forward"]
    assert set(frame["form"]) == {LAYER}
    assert frame["calls"].tolist() == [2, 2]
    assert (frame["left_ns"] < 0.2 * frame["ns"]).all()


@pytest.mark.parametrize("name", ROOTS)
def test_root_mean_squares_are_found_forward_and_backward(tmp_path: Path, name: str) -> None:
    frame = found(tmp_path, ROOTS[name])
    assert sorted(frame["passes"]) == ["backward", "forward"]
    assert set(frame["form"]) == {RMS}
    assert frame["calls"].tolist() == [2, 2]


def test_with_casts_more_is_gained(tmp_path: Path) -> None:
    plain, cast = (found(tmp_path / dtype, llama, dtype=dtype) for dtype in _made(tmp_path, "float32", "bfloat16"))
    left = [(frame["left_ns"].sum() / frame["ns"].sum()) for frame in (plain, cast)]
    assert left[1] < 0.6 * left[0]


def _made(folder: Path, *names: str) -> tuple[str, ...]:
    for name in names:
        (folder / name).mkdir()
    return names


@pytest.mark.parametrize("layer", ["LayerNorm", "RMSNorm", "BatchNorm1d"])
def test_torchs_own_are_left_alone(tmp_path: Path, layer: str) -> None:
    module = getattr(torch.nn, layer)(WIDTH)
    assert found(tmp_path, lambda x, _w, _b: module(x)).empty


def test_beside_torchs_own_no_more_backward_functions_are_the_scripts_than_it_wrote(tmp_path: Path) -> None:
    module = torch.nn.RMSNorm(WIDTH)
    assert found(tmp_path, lambda x, w, b: module(llama(x, w, b)))["calls"].tolist() == [2, 2]


# What else has a mean, a root and a factor: a loss and its weight, a penalty on deviations, the norm of vectors.
OTHERS: dict[str, Callable[[Any], Any]] = {
    "weighted error": lambda x: torch.sqrt((x - 1).pow(2).mean() + EPS) * 3.0,
    "deviations": lambda x: F.relu(1 - torch.sqrt(x.var(0) + EPS)).mean(),
    "unit vectors": lambda x: F.normalize(x, dim=-1).sum(),
    "statistics": lambda x: (x.mean() * 2 + x.std()).sqrt(),
    "softmax": lambda x: torch.softmax(x / 16, -1).log().mean(),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_normalisation_is_left_alone(tmp_path: Path, name: str) -> None:
    weight = torch.randn(WIDTH, WIDTH, requires_grad=True)
    x = torch.randn(ROWS, WIDTH)
    frame = operators.profiled(torch, tmp_path, lambda: OTHERS[name](x @ weight).backward()).once(norms)
    assert frame.empty


def test_an_optimizer_and_clipping_are_none(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, 1))
    chosen = [torch.optim.AdamW(model.parameters(), foreach=f) for f in (False, True)]
    x = torch.randn(ROWS, WIDTH)

    def run() -> None:
        model(x).pow(2).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for one in chosen:
            one.step()

    assert operators.profiled(torch, tmp_path, run).once(norms).empty


def test_on_a_cpu_only_layer_norm_gains(tmp_path: Path) -> None:
    # PyTorch's RMSNorm is made of the same operators there.
    squares = ("aten::pow", "aten::mean", "aten::add", "aten::rsqrt", "aten::mul", "aten::mul")
    layer = ("aten::mean", "aten::var", "aten::sub", "aten::add", "aten::sqrt", "aten::div", "aten::mul", "aten::add")
    for name, chain, calls in (("rms", squares, 0), ("layer", layer, 1)):
        path = operators.job(tmp_path / name, *operators.times(chain, 1_000_000), on_cpu=True)
        frame = operators.rank_of(path).once(norms)
        assert frame["calls"].sum() == calls
