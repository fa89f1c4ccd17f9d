"""A small language model, and sequences of tokens that it can learn to continue."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own custom
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import IterableDataset


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return what each place sees of itself and those before it; all are batch × heads × length × width of a head."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Block(nn.Module):
    """Causal self-attention and a feed-forward network, each after a norm and with a residual connection.

    Radford et al., Language Models are Unsupervised Multitask Learners, 2019.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        attend: Callable[[Tensor, Tensor, Tensor], Tensor] = causal_attention,
        norm: Callable[[int], nn.Module] = nn.LayerNorm,
        activate: Callable[[Tensor], Tensor] = F.gelu,
    ) -> None:
        super().__init__()
        self.heads, self.attend, self.activate = heads, attend, activate
        self.norm1, self.norm2 = norm(width), norm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return features, batch × length × width, of features of the same shape."""
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attend(q, k, v).transpose(1, 2).reshape(batch, length, width))
        down: Tensor = self.down(self.activate(self.up(self.norm2(x))))
        return x + down


class Transformer(nn.Module):
    """Predicts each next token of a sequence from those before it.

    With `checkpointing` no features are kept within a block: the backward pass computes them again.
    """

    def __init__(
        self, vocabulary: int, length: int, width: int, heads: int, layers: int, checkpointing: bool = False
    ) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.token, self.place = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits, one row a token, of tokens (batch × length)."""
        x = self.token(tokens) + self.place(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        logits: Tensor = self.head(self.norm(x).flatten(0, 1))
        return logits


class Counting(IterableDataset[Tensor]):
    """Endless sequences of tokens, length + 1 each, that count from anywhere by 1 to 8, round and round."""

    def __init__(self, vocabulary: int, length: int, seed: int) -> None:
        self.vocabulary, self.length, self.seed = vocabulary, length, seed

    def __iter__(self) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        while True:
            start, step = torch.randint(self.vocabulary, (2,), generator=generator).tolist()
            yield (start + (1 + step % 8) * torch.arange(self.length + 1)) % self.vocabulary
