"""What is written out for the faults computes what PyTorch's own does."""

from __future__ import annotations

import pytest
import torch
from parts import by_hand
from torch import nn

torch.manual_seed(0)


def test_a_norm() -> None:
    x = torch.randn(4, 8, 16)
    torch.testing.assert_close(by_hand.LayerNorm(16)(x), nn.LayerNorm(16)(x))


def test_an_embedding() -> None:
    made, own = by_hand.OneHot(10, 4), nn.Embedding(10, 4)
    made.weight.data = own.weight.data
    tokens = torch.randint(0, 10, (3, 5))
    torch.testing.assert_close(made(tokens), own(tokens))


def test_a_loss() -> None:
    logits, targets = torch.randn(6, 9), torch.arange(6)
    torch.testing.assert_close(by_hand.cross_entropy(logits, targets), nn.functional.cross_entropy(logits, targets))


@pytest.mark.parametrize("sequences", [1, 4])
def test_logits_in_pieces(sequences: int) -> None:
    head, x = nn.Linear(8, 5), torch.randn(sequences, 3, 8)
    torch.testing.assert_close(by_hand.in_pieces(head, x), head(x))
