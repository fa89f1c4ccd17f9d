"""What people write out operator by operator, traced by torch: each way is found, and what is none is left alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from dlprof.analysis.chains.written_out import (
    COPY,
    ERF,
    EXP,
    GRADIENT,
    HOT_TARGETS,
    LAYER,
    LOG,
    ONE_HOT,
    RMS,
    SHIFTED,
    SUM,
    TANH,
    gelus,
    growing_cats,
    losses,
    norms,
    one_hots,
)
from tests.fixtures import operators

torch: Any = pytest.importorskip("torch")
F: Any = torch.nn.functional

Way = Callable[..., Any]


def traced(folder: Path, measure: Any, run: Callable[[], Any]) -> pd.DataFrame:
    """Trace what a function computes and its backward pass, and return what is found of it."""
    frame: pd.DataFrame = operators.profiled(torch, folder, lambda: run().backward()).once(measure)
    return frame


def both(frame: pd.DataFrame, form: str, calls: int, forward: float, backward: float) -> None:
    """Check that a form is found so often forward and backward, each with the share that one kernel leaves."""
    assert set(frame["form"]) == {form}
    rows = frame.set_index("passes").sort_index()
    assert rows["calls"].to_dict() == {"backward": calls, "forward": calls}
    assert (rows["left_ns"] / rows["ns"]).tolist() == pytest.approx([backward, forward], rel=1e-3)


# ---- losses --------------------------------------------------------------------------------------------------------

ROWS, CLASSES = 32, 200
TARGETS, PLACES = torch.arange(ROWS) % CLASSES, torch.arange(ROWS)
SOFT = torch.softmax(torch.randn(ROWS, CLASSES), -1)


def hot() -> Any:
    return F.one_hot(TARGETS, CLASSES).to(torch.float32)


def chosen(x: Any) -> Any:
    return x.gather(1, TARGETS[:, None])


def by_exp(x: Any) -> Any:
    e = torch.exp(x)
    return -torch.log((e / e.sum(-1, keepdim=True))[PLACES, TARGETS]).mean()


def shifted(x: Any) -> Any:
    less = x - x.max(1, keepdim=True).values
    return -chosen(less - less.exp().sum(1, keepdim=True).log()).mean()


def soft(x: Any) -> Any:
    return -(SOFT * F.log_softmax(x, -1)).sum(-1).mean()


# By form: what a cross entropy leaves of it, and the ways to write it.
WRITTEN: dict[str, tuple[float, Sequence[Way]]] = {
    LOG: (
        0.5,
        [
            lambda x: -torch.log(torch.softmax(x, -1))[PLACES, TARGETS].mean(),
            lambda x: -chosen(torch.softmax(x, -1).log()).mean(),
            lambda x: F.nll_loss(torch.log(torch.softmax(x, -1) + 1e-9), TARGETS),
        ],
    ),
    HOT_TARGETS: (
        0.4,
        [
            lambda x: -(hot() * F.log_softmax(x, -1)).sum(-1).mean(),
            lambda x: -(F.log_softmax(x, -1) * hot()).sum(-1).mean(),
            lambda x: -(hot() * torch.log(torch.softmax(x, -1) + 1e-9)).sum(-1).mean(),
            lambda x: -((hot() * 0.9 + 0.1 / CLASSES) * F.log_softmax(x, -1)).sum(-1).mean(),
        ],
    ),
    SUM: (
        0.4,
        [
            lambda x: (torch.logsumexp(x, -1) - chosen(x)[:, 0]).mean(),
            lambda x: (x.exp().sum(1).log() - chosen(x)[:, 0]).mean(),
        ],
    ),
    SHIFTED: (0.3, [shifted]),
    EXP: (0.35, [by_exp]),
}
# What moves no more than it must; soft targets have the backward functions of one-hot ones.
ALONE: Sequence[Way] = [
    soft,
    lambda x: F.cross_entropy(x, TARGETS),
    lambda x: F.cross_entropy(x, TARGETS, label_smoothing=0.1),
    lambda x: F.nll_loss(F.log_softmax(x, -1), TARGETS),
    lambda x: -chosen(F.log_softmax(x, -1)).mean(),
    lambda x: F.kl_div(F.log_softmax(x, -1), SOFT, reduction="batchmean"),
    lambda x: F.binary_cross_entropy_with_logits(x, hot()),
    lambda x: -(torch.softmax(x, -1) * torch.log_softmax(x, -1)).sum(-1).mean(),
    lambda x: -(torch.softmax(x, -1) * torch.softmax(x, -1).log()).sum(-1).mean(),
    lambda x: -torch.distributions.Categorical(logits=x).log_prob(TARGETS).mean(),
    lambda x: -torch.log(chosen(torch.softmax(x, -1))).mean(),
    lambda x: 1 - (torch.softmax(x, -1) * hot()).sum(),
    lambda x: torch.logsumexp(x, -1).pow(2).mean(),
]


def of_losses(folder: Path, ways: Sequence[Way], dtype: str = "float32", autocast: bool = False) -> pd.DataFrame:
    of = getattr(torch, dtype)
    weight, x = torch.randn(16, CLASSES, dtype=of, requires_grad=True), torch.randn(ROWS, 16, dtype=of)

    def run() -> Any:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return torch.stack([way(x @ weight) for way in ways]).sum()

    return traced(folder, losses, run)


@pytest.mark.parametrize("form", WRITTEN)
def test_a_loss_that_is_written_out_is_found_beside_others(tmp_path: Path, form: str) -> None:
    left, ways = WRITTEN[form]
    both(of_losses(tmp_path, [soft, *ways]), form, len(ways), left, left)


@pytest.mark.parametrize("way", range(len(ALONE)))
def test_a_loss_that_moves_no_more_than_it_must_is_left_alone(tmp_path: Path, way: int) -> None:
    assert of_losses(tmp_path, [ALONE[way]]).empty


@pytest.mark.parametrize(
    ("dtype", "way"),
    [
        ("bfloat16", lambda x: F.cross_entropy(x.float(), TARGETS)),
        ("bfloat16", lambda x: F.nll_loss(F.log_softmax(x.float(), -1), TARGETS)),
        ("bfloat16", lambda x: F.cross_entropy((x * 2).float()[:-1].contiguous().view(-1, CLASSES), TARGETS[1:])),
        ("float32", lambda x: F.cross_entropy(x, TARGETS)),
    ],
    ids=["by the script", "in two", "cut", "by autocast"],
)
def test_a_float32_copy_of_the_logits_is_found(tmp_path: Path, dtype: str, way: Way) -> None:
    both(of_losses(tmp_path, [way], dtype, autocast=dtype == "float32"), COPY, 1, 0.33, 0.33)


# ---- normalisations and activations --------------------------------------------------------------------------------

LENGTH, WIDTH, EPS = 64, 256, 1e-6


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


LAYERS: Sequence[Way] = [
    lambda x, w, b: w * (x - mean(x)) / (x.std(-1, keepdim=True) + EPS) + b,
    lambda x, w, b: (x - mean(x)) / torch.sqrt(x.var(-1, keepdim=True, unbiased=False) + EPS) * w + b,
    lambda x, w, b: w * ((x - mean(x)) * torch.rsqrt(mean((x - mean(x)) ** 2) + EPS)) + b,
    by_sums,
    by_var_mean,
    lambda x, w, b: (x - x.mean(0)) / torch.sqrt(x.var(0, unbiased=False) + EPS) * w + b,
    lambda x, _w, _b: (x - mean(x)) / (x.std(-1, keepdim=True) + EPS),
    lambda x, w, b: (x - mean(x)) / (mean((x - mean(x)).pow(2)) + EPS).sqrt() * w + b,
]
ROOTS: Sequence[Way] = [
    llama,
    lambda x, w, _: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * (1.0 + w),
    lambda x, w, _: x / torch.sqrt(mean(x * x) + EPS) * w,
    lambda x, w, _: x * torch.pow(mean(x**2) + EPS, -0.5) * w,
]
OWN = [getattr(torch.nn, layer)(WIDTH) for layer in ("LayerNorm", "RMSNorm", "BatchNorm1d")]
BY_TANH: Sequence[Way] = [
    lambda x, _w, _b: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0)))),
    lambda x, _w, _b: 0.5 * x * (1.0 + torch.tanh(0.79788456 * x * (1.0 + 0.044715 * x * x))),
    lambda x, _w, _b: x * 0.5 * (1 + torch.tanh(0.79788456 * (x + 0.044715 * x**3))),
]
BY_ERF: Sequence[Way] = [
    lambda x, _w, _b: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))),
    lambda x, _w, _b: 0.5 * x * (1 + torch.erf(x / 1.41421)),
]
NO_GELU: Sequence[Way] = [
    lambda x, _w, _b: F.gelu(x),
    lambda x, _w, _b: F.gelu(x, approximate="tanh"),
    lambda x, _w, _b: torch.tanh(x * 0.5 + 1) * x,
    lambda x, _w, _b: torch.sigmoid(x) * torch.tanh(x) + torch.sigmoid(x) * x,
    lambda x, _w, _b: 30 * torch.tanh(x / 30) + x,
    lambda x, _w, _b: torch.erf(x) * 2 + x,
]


def of_layers(folder: Path, measure: Any, ways: Sequence[Way], dtype: str = "float32") -> pd.DataFrame:
    """Return what is found of layers that multiply, apply a way, and multiply."""
    of = getattr(torch, dtype)
    x = torch.randn(LENGTH, WIDTH, dtype=of)
    weights = [torch.randn(WIDTH, WIDTH, dtype=of, requires_grad=True) for _ in range(len(ways) + 1)]
    w, b = torch.ones(WIDTH, dtype=of, requires_grad=True), torch.zeros(WIDTH, dtype=of, requires_grad=True)

    def run() -> Any:
        y = x @ weights[0]
        for way, weight in zip(ways, weights[1:], strict=True):
            y = y + way(y, w, b) @ weight
        return y.sum()

    return traced(folder, measure, run)


@pytest.mark.parametrize(
    ("measure", "ways", "form", "left"),
    [
        (norms, LAYERS, LAYER, (0.17, 0.15)),
        (norms, ROOTS, RMS, (0.28, 0.22)),
        # Beside torch's own no more backward functions are the script's than it wrote.
        (norms, [lambda x, w, b: OWN[1](llama(x, w, b))] * 2, RMS, (0.28, 0.22)),
        (gelus, BY_TANH, TANH, (0.11, 0.10)),
        (gelus, BY_ERF, ERF, (0.18, 0.15)),
    ],
    ids=["layer norm", "RMS norm", "beside torch's own", "GELU by tanh", "GELU by erf"],
)
def test_layers_are_found_forward_and_backward(
    tmp_path: Path, measure: Any, ways: Sequence[Way], form: str, left: tuple[float, float]
) -> None:
    both(of_layers(tmp_path, measure, ways), form, len(ways), *left)


def test_with_casts_more_is_gained(tmp_path: Path) -> None:
    both(of_layers(tmp_path, norms, [llama], "bfloat16"), RMS, 1, 0.11, 0.11)


# What else has a mean, a root and a factor: a loss and its weight, a penalty on deviations, the norm of vectors.
NO_NORMS: Sequence[Way] = [
    lambda x: torch.sqrt((x - 1).pow(2).mean() + EPS) * 3.0,
    lambda x: F.relu(1 - torch.sqrt(x.var(0) + EPS)).mean(),
    lambda x: F.normalize(x, dim=-1).sum(),
    lambda x: (x.mean() * 2 + x.std()).sqrt(),
    lambda x: torch.softmax(x / 16, -1).log().mean(),
]


@pytest.mark.parametrize(("measure", "ways"), [(norms, [lambda x, _w, _b, m=m: m(x) for m in OWN]), (gelus, NO_GELU)])
def test_torchs_own_and_other_layers_are_left_alone(tmp_path: Path, measure: Any, ways: Sequence[Way]) -> None:
    assert of_layers(tmp_path, measure, ways).empty


def test_what_is_no_normalisation_is_left_alone(tmp_path: Path) -> None:
    weight, x = torch.randn(WIDTH, WIDTH, requires_grad=True), torch.randn(LENGTH, WIDTH)
    assert traced(tmp_path, norms, lambda: torch.stack([way(x @ weight) for way in NO_NORMS]).sum()).empty


def test_an_optimizer_and_clipping_are_no_normalisation(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, 1))
    chosen = [torch.optim.AdamW(model.parameters(), foreach=f) for f in (False, True)]
    x = torch.randn(LENGTH, WIDTH)

    def run() -> None:
        model(x).pow(2).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for one in chosen:
            one.step()

    assert operators.profiled(torch, tmp_path, run).once(norms).empty


# ---- products with one-hot rows, and tensors that grow -------------------------------------------------------------

N, V, H = 32, 128, 16
WORDS = torch.arange(N) % V


@pytest.mark.parametrize(
    "way",
    [
        lambda w: F.one_hot(WORDS, V).float() @ w,
        lambda w: torch.zeros(N, V).scatter_(1, WORDS[:, None], 1.0) @ w,
        lambda w: F.linear(F.one_hot(WORDS, V).to(w.dtype), w.t()),
    ],
    ids=["one_hot", "scatter_", "linear"],
)
def test_a_product_with_one_hot_rows_is_found_with_its_gradient(tmp_path: Path, way: Way) -> None:
    weight, layer = torch.randn(V, H, requires_grad=True), torch.nn.Linear(H, 4)
    frame: Any = traced(tmp_path, one_hots, lambda: layer(torch.tanh(way(weight))).sum()).set_index("form")
    assert frame["calls"].to_dict() == {ONE_HOT: 1, GRADIENT: 1}
    # Of what the product moves: rows read and written; backward the whole matrix, too. Its kernel takes as long as its
    # largest operand has values.
    moved, product = N * V + V * H + N * H, operators.LEAST + max(N * V, V * H)
    assert frame.loc[ONE_HOT, "left_ns"] == pytest.approx(max(2 * N * H / moved * product, operators.LEAST))
    assert frame.loc[GRADIENT, "left_ns"] == pytest.approx(2 * (N + V) * H / moved * frame.loc[GRADIENT, "ns"])
    assert frame["ns"].max() >= 2 * product


PIECES, ROW = 12, 64


def two_grow(x: Any) -> Any:
    first, second = x, x
    for _ in range(PIECES):
        first = torch.cat([first, torch.tanh(x)])
        second = torch.cat([second, x * 2])
    return first + second


def not_grown(x: Any) -> Any:
    """Return features as DenseNet does, of which each layer reads all before it; and other calls of `cat`."""
    dense, less = x, x.repeat(PIECES, 1)
    for _ in range(PIECES):
        dense = torch.cat([dense, torch.tanh(dense * 2)[:ROW]])
    for n in range(PIECES):
        less = torch.cat([torch.tanh(less[n * ROW :]), x])
    skips = [torch.cat([x, torch.sigmoid(x)]) for _ in range(PIECES)][-1]
    return dense.sum() + less.sum() + skips.sum() + torch.cat([torch.tanh(x) for _ in range(PIECES)]).sum()


def test_tensors_that_grow_are_found_and_others_left_alone(tmp_path: Path) -> None:
    x = torch.randn(ROW, ROW, requires_grad=True)
    assert traced(tmp_path, growing_cats, lambda: not_grown(x)).empty
    frame = traced(tmp_path, growing_cats, lambda: two_grow(x).sum())
    (forward,) = frame[frame["passes"] == "forward"].to_dict("records")
    # A kernel takes as long as its operands have values.
    each = [operators.LEAST + (n + 1) * ROW * ROW for n in range(1, PIECES + 1)]
    assert forward["calls"] == 2 * PIECES
    assert (forward["ns"], forward["left_ns"]) == (2 * sum(each), 2 * each[-1])
