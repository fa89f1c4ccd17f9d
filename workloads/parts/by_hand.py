"""What PyTorch has an operator for, written out: for the faults."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own custom
from torch import Tensor, nn


class LayerNorm(nn.Module):
    """nn.LayerNorm by mean, variance and root."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """Return what nn.LayerNorm returns."""
        mean = x.mean(-1, keepdim=True)
        variance = x.var(-1, keepdim=True, unbiased=False)
        return (x - mean) / torch.sqrt(variance + 1e-5) * self.weight + self.bias


class OneHot(nn.Module):
    """nn.Embedding by a product with one-hot rows."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.words, self.weight = words, nn.Parameter(torch.empty(words, width))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return what nn.Embedding returns."""
        return F.one_hot(tokens, self.words).to(self.weight.dtype) @ self.weight


def gelu(x: Tensor) -> Tensor:
    """Return GELU with tanh, as the first code of GPT-2 has it."""
    return 0.5 * x * (1.0 + torch.tanh(0.7978845608 * (x + 0.044715 * torch.pow(x, 3.0))))


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return what F.cross_entropy returns, by a softmax and its logarithm."""
    chances = torch.softmax(logits, -1)
    return -torch.log(chances)[torch.arange(len(targets), device=targets.device), targets].mean()


def in_pieces(head: nn.Module, x: Tensor) -> Tensor:
    """Return what `head` makes of x, sequence by sequence, added to what there is."""
    pieces: tuple[Tensor, ...] = head(x).split(1)
    logits = pieces[0]
    for sequence in pieces[1:]:
        logits = torch.cat([logits, sequence])
    return logits


class Averages:
    """torch.optim.swa_utils.AveragedModel with an exponential average, weight by weight."""

    def __init__(self, decay: float = 0.999) -> None:
        self.decay = decay
        self.of: dict[str, Tensor] = {}

    @torch.no_grad()
    def __call__(self, model: nn.Module) -> None:
        """Take in the weights as they are after a step."""
        for name, weight in model.named_parameters():
            self.of.setdefault(name, weight.clone()).mul_(self.decay).add_(weight, alpha=1 - self.decay)
