"""Cross entropies computed by separate operators, or from a float32 copy of 16-bit logits.

`log_softmax` and `nll_loss` are what PyTorch's own consists of, so nothing is saved there. Nor with `log_softmax` and
`gather`: its gradient is written as often (0.9 to 1.0 of the time from 1,000 classes on, measured on a CPU).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

import pandas as pd

from dlprof.analysis.chains.calls import Calls
from dlprof.analysis.chains.work import Chain
from dlprof.analysis.engine import per_rank, within_rank

LOG, ONE_HOT, SUM, EXP, COPY = (
    "the log of a softmax",
    "one-hot targets",
    "logsumexp minus the target's logit",
    "exp divided by its sum",
    "a float32 copy of the logits",
)

# By form: forward, backward, and the share of both that PyTorch's own cross entropy takes. Measured on a CPU with torch
# 2.13, from 32 × 10 to 1,024 × 32,000 logits, forward and backward together: 0.40 to 0.60, 0.37 to 0.48 (of a log of a
# softmax 0.20 to 0.33), 0.29 to 0.53, 0.25 to 0.46. By what is read and written of each logit, of which its own
# needs 6: 11, 16, 16 and about 20.
_FORMS = {
    LOG: (re.compile(r"ft*[aj]?gt*u?[in]"), re.compile(r"[IN]U?T*GJ?A?T*F"), 0.5),
    # One-hot targets, or scattered ones, before or after the logarithms, smoothed or not.
    ONE_HOT: (
        re.compile(r"h[txakju]*(?:l|f[aj]?g)u?xu?[sm]|(?:l|fh?[txa]*[aj]?g)h[txak]*u?xu?[sm]"),
        re.compile(r"[SM]U?XU?(?:L|GJ?A?F)"),
        0.4,
    ),
    SUM: (re.compile(r"(?:yi|iy)b"), re.compile(r"B(?:YI|IY)"), 0.4),
    EXP: (re.compile(r"e{1,2}skt*(?:gt*u?i|ig?)"), re.compile(r"(?:IU?G|GU?I|I)KSE{1,2}"), 0.35),
}
# On a device a cast reads 2 bytes and writes 4 of each logit, and all that follows moves 4: 36 bytes forward and
# backward. Cross entropy of the 16-bit logits themselves moves 12; code that torch.compile makes of all, 8.
_COPIED, _COPIED_BACK, _COPIED_LEFT = re.compile(r"t*(?:c|l[in])"), re.compile(r"[NI]LT"), 0.33
# The gradient's cast moves half as much as the softmax's gradient; the cast of a narrower tensor would take less.
_AS_WIDE = 0.2


@within_rank
def loss_chains(calls: Calls, has_device: bool) -> list[Chain]:
    """Return the chains of operators that compute a loss."""
    return [*_written_out(calls), *(_copied(calls) if has_device else ())]


@per_rank
def losses(loss_chains: list[Chain], replaced: Callable[[Sequence[Chain]], pd.DataFrame]) -> pd.DataFrame:
    """Return losses that move their logits more often than cross entropy, with the columns of `work.replaced`."""
    return replaced(loss_chains)


def _written_out(calls: Calls) -> Iterator[Chain]:
    for form, (forward, backward, left) in _FORMS.items():
        made = list(calls.find(forward))
        yield from (Chain(form, "forward", first, last, left) for first, last in made)
        # Losses with soft targets have the same backward functions: count no more than there are forward chains.
        backs = list(calls.find(backward))[: len(made)]
        yield from (Chain(form, "backward", first, last, left) for first, last in backs)


def _copied(calls: Calls) -> Iterator[Chain]:
    """Yield losses whose logits are cast first, by the script or by autocast: their gradients are cast back."""
    backs = [(first, last) for first, last in calls.find(_COPIED_BACK) if _is_wide(calls, last)]
    made = [(first, last) for first, last in calls.find(_COPIED) if calls.took(first, last) > 0][: len(backs)]
    yield from (Chain(COPY, "forward", first, last, _COPIED_LEFT) for first, last in made)
    yield from (Chain(COPY, "backward", first, last, _COPIED_LEFT) for first, last in backs)


def _is_wide(calls: Calls, last: int) -> bool:
    return float(calls.ns[last - 1]) >= _AS_WIDE * float(calls.ns[last - 2]) > 0
