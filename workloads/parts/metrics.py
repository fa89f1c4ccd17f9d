"""Statistics of a batch in pure Python: far too slow to be taken after every step, and yet seen in many a script."""

from __future__ import annotations

import random

from torch import Tensor


def bootstrap_accuracy(logits: Tensor, labels: Tensor) -> tuple[float, float]:
    """Return the bounds of the batch's top-3 accuracy, 95 % of bootstrap samples between them."""
    hits = []
    for scores, label in zip(logits.tolist(), labels.tolist(), strict=True):
        best = sorted(range(len(scores)), key=scores.__getitem__)[-3:]
        hits.append(label in best)
    shares = sorted(sum(random.choices(hits, k=len(hits))) / len(hits) for _ in range(10_000))
    return shares[250], shares[-250]


def count_brightness(pictures: Tensor, seen: dict[int, int]) -> None:
    """Add to `seen`, in place, how often each brightness (in tenths) comes in a batch, one pixel after the other."""
    for pixel in pictures.flatten().tolist():
        brightness = round(10 * pixel)
        seen[brightness] = seen.get(brightness, 0) + 1
