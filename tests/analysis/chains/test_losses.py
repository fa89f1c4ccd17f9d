"""Losses as people write them out, traced by torch: each is found, and what nothing does faster is left alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from dlprof.analysis.chains.losses import COPY, EXP, LOG, ONE_HOT, SHIFTED, SUM, losses
from tests.fixtures import operators

torch: Any = pytest.importorskip("torch")
F: Any = torch.nn.functional

ROWS, WIDTH, CLASSES = 32, 16, 200
TARGETS = torch.arange(ROWS) % CLASSES
PLACES = torch.arange(ROWS)

Loss = Callable[[Any], Any]


def hot(dtype: Any = torch.float32) -> Any:
    return F.one_hot(TARGETS, CLASSES).to(dtype)


def by_exp(x: Any) -> Any:
    e = torch.exp(x)
    return -torch.log((e / e.sum(-1, keepdim=True))[PLACES, TARGETS]).mean()


def smoothed(x: Any) -> Any:
    return -((hot() * 0.9 + 0.1 / CLASSES) * F.log_softmax(x, -1)).sum(-1).mean()


def shifted(x: Any) -> Any:
    less = x - x.max(1, keepdim=True).values
    return -(less - less.exp().sum(1, keepdim=True).log()).gather(1, TARGETS[:, None]).mean()


WRITTEN: dict[str, tuple[str, Loss]] = {
    "log and index": (LOG, lambda x: -torch.log(torch.softmax(x, -1))[PLACES, TARGETS].mean()),
    "log and gather": (LOG, lambda x: -torch.softmax(x, -1).log().gather(1, TARGETS[:, None]).mean()),
    "log and nll": (LOG, lambda x: F.nll_loss(torch.log(torch.softmax(x, -1) + 1e-9), TARGETS)),
    "one-hot": (ONE_HOT, lambda x: -(hot() * F.log_softmax(x, -1)).sum(-1).mean()),
    "one-hot behind": (ONE_HOT, lambda x: -(F.log_softmax(x, -1) * hot()).sum(-1).mean()),
    "one-hot of log": (ONE_HOT, lambda x: -(hot() * torch.log(torch.softmax(x, -1) + 1e-9)).sum(-1).mean()),
    "smoothed": (ONE_HOT, smoothed),
    "logsumexp": (SUM, lambda x: (torch.logsumexp(x, -1) - x.gather(1, TARGETS[:, None])[:, 0]).mean()),
    "log of a sum": (SUM, lambda x: (x.exp().sum(1).log() - x.gather(1, TARGETS[:, None])[:, 0]).mean()),
    "shifted": (SHIFTED, shifted),
    "exp": (EXP, by_exp),
}


def found(folder: Path, loss: Loss, dtype: str = "float32", **autocast: Any) -> pd.DataFrame:
    weight = torch.randn(WIDTH, CLASSES, dtype=getattr(torch, dtype), requires_grad=True)
    x = torch.randn(ROWS, WIDTH, dtype=getattr(torch, dtype))

    def run() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=bool(autocast)):
            made = loss(x @ weight)
        made.backward()

    return operators.profiled(torch, folder, run).once(losses)


@pytest.mark.parametrize("name", WRITTEN)
def test_a_loss_that_is_written_out_is_found_forward_and_backward(tmp_path: Path, name: str) -> None:
    form, loss = WRITTEN[name]
    frame = found(tmp_path, loss)
    assert set(frame["form"]) == {form}
    assert sorted(frame["passes"]) == ["backward", "forward"]
    assert frame["calls"].tolist() == [1, 1]
    assert (frame["left_ns"] <= 0.5 * frame["ns"] + 1).all()


SOFT = torch.softmax(torch.randn(ROWS, CLASSES), -1)
ALONE: dict[str, Loss] = {
    "cross_entropy": lambda x: F.cross_entropy(x, TARGETS),
    "smoothed": lambda x: F.cross_entropy(x, TARGETS, label_smoothing=0.1),
    "log_softmax and nll": lambda x: F.nll_loss(F.log_softmax(x, -1), TARGETS),
    "log_softmax and gather": lambda x: -F.log_softmax(x, -1).gather(1, TARGETS[:, None]).mean(),
    "soft targets": lambda x: -(SOFT * F.log_softmax(x, -1)).sum(-1).mean(),
    "divergence": lambda x: F.kl_div(F.log_softmax(x, -1), SOFT, reduction="batchmean"),
    "two classes": lambda x: F.binary_cross_entropy_with_logits(x, hot()),
    "entropy": lambda x: -(torch.softmax(x, -1) * torch.log_softmax(x, -1)).sum(-1).mean(),
    "entropy by log": lambda x: -(torch.softmax(x, -1) * torch.softmax(x, -1).log()).sum(-1).mean(),
    "policy": lambda x: -torch.distributions.Categorical(logits=x).log_prob(TARGETS).mean(),
    "chosen first": lambda x: -torch.log(torch.softmax(x, -1).gather(1, TARGETS[:, None])).mean(),
    "overlap": lambda x: 1 - (torch.softmax(x, -1) * hot()).sum(),
    "partition": lambda x: torch.logsumexp(x, -1).pow(2).mean(),
}


@pytest.mark.parametrize("name", ALONE)
def test_what_moves_no_more_than_it_must_is_left_alone(tmp_path: Path, name: str) -> None:
    assert found(tmp_path, ALONE[name]).empty


@pytest.mark.parametrize(
    ("loss", "dtype", "autocast"),
    [
        (lambda x: F.cross_entropy(x.float(), TARGETS), "bfloat16", {}),
        (lambda x: F.cross_entropy(x, TARGETS), "float32", {"on": True}),
        (lambda x: F.nll_loss(F.log_softmax(x.float(), -1), TARGETS), "bfloat16", {}),
    ],
    ids=["by the script", "by autocast", "in two"],
)
def test_a_float32_copy_of_the_logits_is_found(
    tmp_path: Path, loss: Loss, dtype: str, autocast: dict[str, Any]
) -> None:
    frame = found(tmp_path, loss, dtype, **autocast)
    assert set(frame["form"]) == {COPY}
    assert sorted(frame["passes"]) == ["backward", "forward"]
    assert (frame["left_ns"] < 0.5 * frame["ns"]).all()


def test_logits_of_the_type_that_they_were_made_in_are_left_alone(tmp_path: Path) -> None:
    assert found(tmp_path, ALONE["cross_entropy"], "bfloat16").empty


def test_on_a_cpu_a_copy_is_not_judged(tmp_path: Path) -> None:
    called = [("aten::to", 3), ("aten::cross_entropy_loss", 7), ("NllLossBackward0", 2), ("LogSoftmaxBackward0", 6)]
    chain = [(name, ns * 1_000_000) for name, ns in [*called, ("ToCopyBackward0", 3)]]
    assert operators.rank_of(operators.job(tmp_path / "cpu", *chain, on_cpu=True)).once(losses).empty
    frame = operators.rank_of(operators.job(tmp_path / "device", *chain)).once(losses)
    assert frame["ns"].sum() == pytest.approx(21_000_000)
    assert frame["gain_ns"].iloc[0] == pytest.approx(0.67 * 21_000_000, rel=0.02)


def test_functions_of_a_loss_that_is_none_are_not_counted_with_one_that_is(tmp_path: Path) -> None:
    """Soft targets have the same backward functions as one-hot ones."""
    one, many = WRITTEN["one-hot"][1], ALONE["soft targets"]
    (tmp_path / "one").mkdir()
    alone, both = found(tmp_path / "one", one), found(tmp_path, lambda x: many(x) + one(x))
    assert both["calls"].tolist() == [1, 1]
    assert both.set_index("passes")["ns"].to_dict() == alone.set_index("passes")["ns"].to_dict()


def test_a_cast_before_the_logits_are_cut_is_found(tmp_path: Path) -> None:

    def shifted(x: Any) -> Any:
        return F.cross_entropy((x * 2).float()[:-1].contiguous().view(-1, CLASSES), TARGETS[1:])

    frame = found(tmp_path, shifted, "bfloat16")
    assert set(frame["form"]) == {COPY}
    assert sorted(frame["passes"]) == ["backward", "forward"]
