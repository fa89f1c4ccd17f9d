"""Cross entropies computed by separate operators, or from a float32 copy of 16-bit logits.

`log_softmax` and `nll_loss` are what PyTorch's own consists of, so nothing is saved there. Nor with `log_softmax` and
`gather`: its gradient is written as often (0.9 to 1.0 of the time from 1,000 classes on, measured on a CPU).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pandas as pd

from dlprof.analysis.chains.calls import Calls, Chain, calls, chains, replaced
from dlprof.analysis.engine import needs, per_rank, within_rank
from dlprof.analysis.timeline.device import has_device

LOG, ONE_HOT, SUM, SHIFTED, EXP, COPY = (
    "the log of a softmax",
    "one-hot targets",
    "logsumexp minus the target's logit",
    "logits less their largest, less the log of their exps' sum",
    "exp divided by its sum",
    "a float32 copy of the logits",
)

# By form: its operators, and the share of forward and backward that PyTorch's own cross entropy takes. Measured on a
# CPU with torch 2.13, from 32 × 10 to 1,024 × 32,000 logits, forward and backward together: 0.40 to 0.60, 0.37 to 0.48
# (of a log of a softmax 0.20 to 0.33), 0.29 to 0.53, 0.30 to 0.33, 0.25 to 0.46. By what is read and written of each
# logit, of which its own needs 6: 11, 16, 16, 27 and about 20.
_FORMS = {
    LOG: (re.compile(r"ft*[aj]?gt*u?[in]"), 0.5),
    # One-hot targets, or scattered ones, before or after the logarithms, smoothed or not.
    ONE_HOT: (
        re.compile(r"h[txakju]*(?:l|f[aj]?g)u?xu?[sm]|(?:l|fh?[txa]*[aj]?g)h[txak]*u?xu?[sm]"),
        0.4,
    ),
    SUM: (re.compile(r"(?:yi|iy)b|(?<!b)e{1,2}sg(?:ib|bi)|ie{1,2}sgb"), 0.4),
    SHIFTED: (re.compile(r"t*0b(?:t*e{1,2}sg(?:bi|ib)|ie{1,2}sgb)"), 0.3),
    EXP: (re.compile(r"e{1,2}skt*(?:gt*u?i|ig?)"), 0.35),
}
# On a device a cast reads 2 bytes and writes 4 of each logit, and all that follows moves 4: 36 bytes forward and
# backward. Cross entropy of the 16-bit logits themselves moves 12; code that torch.compile makes of all, 8.
_COPIED, _COPIED_LEFT = re.compile(r"t*(?:c|l[in])"), 0.33
# The gradient's cast moves half as much as the softmax's gradient; the cast of a narrower tensor would take less.
_AS_WIDE = 0.2


@within_rank
def loss_chains(calls: Calls = needs(calls), has_device: bool = needs(has_device)) -> list[Chain]:
    """Return the chains of operators that compute a loss."""
    written_out = (
        chain
        for form, (pattern, left) in _FORMS.items()
        for first, last in calls.find(pattern)
        for chain in chains(calls, form, first, last, (left, left))
    )
    return [*written_out, *(_copied(calls) if has_device else ())]


@per_rank
def losses(
    loss_chains: list[Chain] = needs(loss_chains), replaced: Callable[[Sequence[Chain]], pd.DataFrame] = needs(replaced)
) -> pd.DataFrame:
    """Return losses that move their logits more often than cross entropy, with the columns of `work.replaced`."""
    return replaced(loss_chains)


def _copied(calls: Calls) -> Iterator[Chain]:
    """Yield losses whose logits are cast first, by the script or by autocast: their gradients are cast back."""
    for first, last in calls.find(_COPIED):
        softmax = next((n for n in calls.made(first, last).tolist() if calls.text[n] == "L"), None)
        if softmax is None or calls.text[softmax + 1 : softmax + 2] != "T":
            continue
        if float(calls.ns[softmax + 1]) >= _AS_WIDE * float(calls.ns[softmax]) > 0:
            yield Chain(COPY, "forward", np.arange(first, last), _COPIED_LEFT)
            back = np.union1d(calls.made(first, last), [softmax + 1])
            yield Chain(COPY, "backward", back, _COPIED_LEFT)
