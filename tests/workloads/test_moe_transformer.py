"""The mixture of experts: it learns, its layer computes what a loop over tokens would, and balance does balance."""

from __future__ import annotations

import argparse

import pytest
import torch
from parts.job import process_group

from tests.workloads.scripts import load, losses, refusal, train

TINY = [
    "--device=cpu",
    "--width=32",
    "--heads=4",
    "--length=16",
    "--batch-size=8",
    "--layers=2",
    "--log-every=10",
    "--lr=0.01",
]

workload = load("moe_transformer")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """Return the options of a single rank that holds all experts."""
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "0")
    args: argparse.Namespace = workload.parse([*TINY, "--experts=6"])
    return args


@pytest.mark.long
@pytest.mark.parametrize("option", ["--experts=4", "--fault=imbalance", "--fault=loop_optimizer", "--precision=bf16"])
def test_it_learns(option: str) -> None:
    found = losses(train("moe_transformer", *TINY, "--steps=40", option))
    assert len(found) == 4
    assert found[-1] < 0.9 * found[0]


def test_each_token_goes_through_its_experts_and_comes_back_to_its_place(alone: argparse.Namespace) -> None:
    with process_group(alone):
        layer = workload.Experts(alone).eval()
        x = torch.randn(50, 32)
        scores = layer.router(x).softmax(-1)
        weights, chosen = scores.topk(2, -1)
        one_by_one = torch.stack(
            [
                sum(w * layer.experts[e](token) for w, e in zip(weights[n], chosen[n].tolist(), strict=True))
                for n, token in enumerate(x)
            ]
        )
        torch.testing.assert_close(layer(x), one_by_one)


def test_experts_with_more_tokens_than_the_mean_are_preferred_less(alone: argparse.Namespace) -> None:
    with process_group(alone):
        bias = torch.zeros(3)
        workload.balance(bias, torch.tensor([30, 60, 0]))
    torch.testing.assert_close(bias, torch.tensor([0.0, -0.05, 0.05]))


@pytest.mark.parametrize(
    ("options", "ranks", "said"),
    [
        (("--fault=imbalance",), 1, "needs two ranks"),
        (("--experts=5",), 2, "cannot be shared out among 2 ranks"),
        (("--width=30",), 2, "cannot be shared out among 8 heads"),
        (("--top=9",), 2, "must be from 1"),
    ],
)
def test_what_cannot_be_is_a_usage_error(
    options: tuple[str, ...],
    ranks: int,
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    assert said in refusal(workload, ("--device=cpu", *options), capsys)
