"""Normalisation by separate operators: mean, variance, square root, multiply and add."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pandas as pd

from dlprof.analysis.chains.calls import Calls, Chain, calls, chains, replaced
from dlprof.analysis.engine import needs, per_rank, within_rank
from dlprof.analysis.timeline.device import has_device

LAYER, RMS = "mean and variance", "mean of squares"

# x.to(float32), x², its mean, + eps, 1 ÷ root, x times it, back, times the weight (Gemma: 1 + weight). Without eps it
# is the root of a mean, as in error measures; of a difference it is a deviation.
_RMS = re.compile(r"(?<![bt])t*[px](?:m|sk)a(?:r|qz?|p)t*[xk]t*(?:a?xt*)?")
# The mean, what lies between it and the root of the variance, and up to three factors with a sum behind each: the
# deviation over the root, the weight, the bias. torch.std is variance and root.
_LAYER = re.compile(r"t*(?:(?:[mvw]|sk)(?:[abpxmvt]|sk){0,6}(?:[qrd]|(?<=a)p)|d)[abmzt]{0,4}(?:[xk]a?t?){1,3}")

# The share of the time that one kernel takes, forward and backward, by the values read and written per input value.
# A LayerNorm kernel moves 2 forward and 5 backward, with its weights' gradients; separate operators 10 to 14 and about
# 34, for RMSNorm 7 and 23. With casts half of RMSNorm's are twice as wide: 38 and 92 bytes instead of 4 and 10.
_ON_DEVICE = {LAYER: (0.17, 0.15), RMS: (0.28, 0.22)}
_WITH_CASTS = (0.11, 0.11)
# On a CPU measured with torch 2.13, from 16 × 64 values to 8,192 × 2,048: 0.06 to 0.23 of three ways to write a
# LayerNorm, forward and backward. Its RMSNorm is a chain of the same operators, and as slow (0.85 to 1.18).
_ON_CPU = {LAYER: (0.15, 0.15)}

# A factor that is as wide as what the statistics are of takes no less than this share of the first operator's time:
# that of a single number, as of a loss, does.
_AS_WIDE = 0.25


@within_rank
def norm_chains(calls: Calls = needs(calls), has_device: bool = needs(has_device)) -> list[Chain]:
    """Return the chains of operators that normalise."""
    return list(_chains(calls, has_device))


@per_rank
def norms(
    norm_chains: list[Chain] = needs(norm_chains), replaced: Callable[[Sequence[Chain]], pd.DataFrame] = needs(replaced)
) -> pd.DataFrame:
    """Return normalisations by separate operators, with the columns of `work.replaced`; `form`: LAYER or RMS."""
    return replaced(norm_chains)


def _chains(calls: Calls, has_device: bool) -> Iterator[Chain]:
    for form, pattern in ((RMS, _RMS), (LAYER, _LAYER)):
        if not has_device and form not in _ON_CPU:
            continue
        alike: dict[str, list[int]] = {}
        for first, last in calls.find(pattern):
            alike.setdefault(calls.text[first:last], []).append(first)
        for text, places in alike.items():
            for first in places if _is_norm(calls, form, text, places) else ():
                last = first + len(text)
                yield from chains(calls, form, first, last, _left(calls, form, first, last, has_device))


def _is_norm(calls: Calls, form: str, text: str, places: Sequence[int]) -> bool:
    """Return whether chains of one text normalise, by the median of their times: single calls may be delayed."""
    if form == LAYER and "b" not in text:
        return False
    root = max(text.rfind(letter) for letter in "qrd")
    root = text.rfind("p") if root < 0 else root
    factor = next((n for n in range(root + 1, len(text)) if text[n] in "xk"), None)
    if factor is None:
        return False
    start = next(n for n, letter in enumerate(text) if letter != "t")
    at = np.array(places)
    at = at[calls.step[at + start] >= 0]
    return bool(len(at) and np.median(calls.ns[at + factor]) >= _AS_WIDE * np.median(calls.ns[at + start]))


def _left(calls: Calls, form: str, first: int, last: int, has_device: bool) -> tuple[float, float]:
    """Return the shares that are left of a chain, forward and backward."""
    if not has_device:
        return _ON_CPU[form]
    casts = any(calls.text[n] == "t" and calls.ns[n] > 0 for n in range(first, last))
    return _WITH_CASTS if casts and form == RMS else _ON_DEVICE[form]
