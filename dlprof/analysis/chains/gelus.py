"""GELU by separate operators, as GPT's and BERT's first code has it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import pandas as pd

from dlprof.analysis.chains.calls import Calls, Chain, calls, chains, replaced
from dlprof.analysis.engine import needs, per_rank, within_rank
from dlprof.analysis.timeline.device import has_device

TANH, ERF = "tanh", "erf"

# Half of x times 1 + tanh of a polynomial: x + 0.044715 x³, or 1 + 0.044715 x² times x; or times 1 + erf of x ÷ √2.
_FORMS = {TANH: re.compile(r"[xk][xpa]{3,6}8ax"), ERF: re.compile(r"(?:[xk]@axx|x?[xk]@ax)")}

# The share of the time that one kernel takes, forward and backward, by the values read and written per input value: 2
# and 3, by separate operators 18 and about 30 (with erf: 11 and about 20).
_ON_DEVICE = {TANH: (0.11, 0.10), ERF: (0.18, 0.15)}
# On a CPU measured with torch 2.13, of 512 × 512 to 4,096 × 3,072 values: 0.19 to 0.37 and 0.20 to 0.57, with erf 0.15
# to 0.25 and 0.15 to 0.19.
_ON_CPU = {TANH: (0.33, 0.38), ERF: (0.20, 0.18)}


@within_rank
def gelu_chains(calls: Calls = needs(calls), has_device: bool = needs(has_device)) -> list[Chain]:
    """Return the chains of operators that compute GELU."""
    return [
        chain
        for form, pattern in _FORMS.items()
        for first, last in calls.find(pattern)
        for chain in chains(calls, form, first, last, (_ON_DEVICE if has_device else _ON_CPU)[form])
    ]


@per_rank
def gelus(
    gelu_chains: list[Chain] = needs(gelu_chains), replaced: Callable[[Sequence[Chain]], pd.DataFrame] = needs(replaced)
) -> pd.DataFrame:
    """Return GELU by separate operators, with the columns of `work.replaced`; `form`: TANH or ERF."""
    return replaced(gelu_chains)
