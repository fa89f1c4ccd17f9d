"""Most tokens of a batch are padding, for which the model computes as much as for the others.

All rows of a batch get one length, the shorter ones by padding. A mask keeps padding out of the result, and not out of
the work: layers compute every place of a row, and attention every pair of places.

Needs the lengths of rows in some batches, which dlprof reads on the host, and a trace. What shows them is a mask of
padding, a tensor of lengths, labels of −100, or ids of padding at the ends of rows (`padding_idx` of an embedding,
`pad_token_id` of a configuration, else what most rows end with). Of batches that are made on a device nothing is read.

Saving: the traced steps replayed with what the forward pass, the loss and the backward pass compute as much shorter as
there are fewer places, and attention by its pairs of places; the optimizer, exchanges and the host's work stay, and no
kernel is shorter than the least. cuDNN's attention makes a plan for each new length, for which a step counts that is as
much longer as the first one was, as often as new lengths come up in the last two thirds of a run of as many steps.

What to change: pad to the longest row of the batch: `padding="longest"` in transformers, the default of
`DataCollatorWithPadding`, and `torch.nn.utils.rnn.pad_sequence`. Then batches of rows of similar length
(`train_sampling_strategy="group_by_length"` of transformers' `TrainingArguments`, `group_by_length=True` before version
5; a batch sampler), or several rows one behind the other without padding (`packing=True` in TRL, attention for variable
lengths, nested tensors). Where cuDNN computes attention: few different lengths, by `pad_to_multiple_of=64`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof.analysis import intervals as iv
from dlprof.analysis import settings
from dlprof.analysis.compute.attention import Found
from dlprof.analysis.engine import Frame, Job, Maybe, RankFacts, by_rank, per_rank, within_rank
from dlprof.analysis.estimate import LEAST_SHARE, Estimate, Explanation, Rule, change
from dlprof.analysis.panel import table
from dlprof.analysis.step.savings import saving
from dlprof.analysis.timeline import device, host
from dlprof.analysis.timeline.steps import Timing
from dlprof.analysis.timeline.what_if import WhatIf
from dlprof.errors import DoesNotApply, NotMeasured
from dlprof.result import Change, Place
from dlprof.units import duration, percent

NOW, LONGEST, ROUNDED, GROUPED, PACKED = (
    "as they are",
    "to the longest row of each batch",
    "to a multiple of 64 above that",
    "rows of similar length in a batch",
    "none: rows one behind the other",
)

# Rows of similar length in a batch change the order of the data: worth it from twice the share at which XProf and
# others begin to report an input pipeline.
NOTABLE_SHARE = 0.10

# Kernels of attention work on blocks of 64 or 128 places (see compute/attention.py).
_MULTIPLE = 64

# What cuDNN's plans for a new length take at most: 0.44 s forward and 0.55 s backward on a B200 (FunASR, issue 3704).
_MOST_OF_PLANS_NS = 1e9

_COLUMNS = {"way": "padding", "length": "length of a row", "padding": "padding_share", "step_ns": "mean step_ns"}


@within_rank
def shorter_rows(
    operator_work: pd.DataFrame,
    spans: pd.DataFrame,
    on_training_thread: pd.DataFrame,
    attention_blocks: list[Found],
    device_work: pd.DataFrame,
    what_if: Maybe[WhatIf],
    has_device: bool,
    timing: Timing,
) -> Callable[[float, float], float]:
    """Return a function of the shares of places and of pairs of places that are left: how much shorter the mean steady
    step would be, ns. Raises NotMeasured where the trace does not mark forward and backward passes."""
    forward, backward = (
        host.cover(on_training_thread, host.is_named(on_training_thread, f"dlprof::{phase}"))
        for phase in ("forward", "backward")
    )
    first = np.searchsorted(forward[:, 0], backward[:, 0]) - 1
    if not (first >= 0).any():
        raise NotMeasured("the trace does not mark forward and backward passes")
    passes = iv.merge(np.column_stack((forward[first, 0], backward[:, 1]))[first >= 0])
    owner, rows = operator_work["owner"].to_numpy(), operator_work.index.to_numpy()
    named = np.array(["attention" in name for name in spans["name"].cat.categories], dtype=bool)
    in_pairs = named[spans["name"].cat.codes.to_numpy()]
    for block, *_ in attention_blocks:
        in_pairs[block.before[0] : block.after[-1] + 1] = True
    counted = (owner >= 0) & iv.holds(passes, spans["start_ns"].to_numpy()[owner])

    def gain(places: float, pairs: float) -> float:
        left = np.ones(len(spans))
        left[rows[counted]] = np.where(in_pairs[owner[counted]], pairs, places)
        took = what_if.get().replay.durations if has_device else operator_work["dur_ns"].to_numpy()
        mine = device_work.index.to_numpy()[what_if.get().replay.rows] if has_device else rows
        shorter = np.maximum(took * left[mine], np.minimum(took, device.LEAST_KERNEL_NS))
        if has_device:
            return what_if.get().gain_ns(durations=shorter.astype(np.int64))
        return float((took - shorter).sum()) / len(timing.windows) / (timing.overhead or 1.0)

    return gain


@per_rank
def padding(
    shorter_rows: Callable[[float, float], float],
    spans: pd.DataFrame,
    steps: Maybe[pd.DataFrame],
    timing: Timing,
    rank: RankFacts,
) -> pd.DataFrame:
    """Return ways to pad the batches that were looked at, a row each: way, length (the mean row's, with padding),
    padding (share of places), gain_ns, step_ns, and plans_ns (of a step, for new lengths; in the gain)."""
    seen = rank.facts.get("padding")
    if not seen:
        raise NotMeasured("the lengths of rows were not recorded" if seen is None else "no batch showed its lengths")
    each = [np.array(batch["lengths"]) for batch in seen]
    sizes, real = np.array([len(rows) for rows in each]), np.sort(np.concatenate(each))
    now = np.repeat([batch["padded"] for batch in seen], sizes)
    longest = np.repeat([rows.max() for rows in each], sizes)
    batch = int(np.median(sizes))
    grouped = real[np.minimum((np.arange(len(real)) // batch + 1) * batch, len(real)) - 1]
    with_cudnn = any("cudnn_attention" in name for name in spans["name"].cat.categories)
    rounded = np.minimum(-(-longest // _MULTIPLE) * _MULTIPLE, now)
    ways = {NOW: now, LONGEST: longest, **({ROUNDED: rounded} if with_cudnn else {}), GROUPED: grouped, PACKED: real}
    found = []
    for way, lengths in ways.items():
        plans = _plans_ns(real, batch, steps.get()) if with_cudnn and way == LONGEST else 0.0
        left = [float((lengths**n).sum() / (now**n).sum()) for n in (1, 2)]
        gain = max(shorter_rows(*left) - plans, 0.0) if way != NOW else 0.0
        found.append((way, lengths.mean(), 1 - real.sum() / lengths.sum(), gain, timing.step_ns - gain, plans))
    return pd.DataFrame(found, columns=["way", "length", "padding", "gain_ns", "step_ns", "plans_ns"])


def _plans_ns(real: NDArray[np.int64], batch: int, steps: pd.DataFrame) -> float:
    """Return what plans for new lengths take of a mean step, where batches are padded to their longest rows.

    A length L is the longest of a batch of n rows with the probability F(L)ⁿ − F(L − 1)ⁿ.
    """
    passes = (steps["forward_ns"] + steps["backward_ns"])[(steps["kind"] == "train").to_numpy()].to_numpy()
    last, first = len(passes), len(passes) // 3
    _, counts = np.unique(real, return_counts=True)
    chance = np.diff((counts.cumsum() / len(real)) ** batch, prepend=0.0)
    new = float(((1 - chance) ** first - (1 - chance) ** last).sum()) / (last - first)
    return new * min(max(float(passes[0] - np.median(passes)), 0.0), _MOST_OF_PLANS_NS)


def check(padding: Maybe[Frame], own_time: Frame, mean_step_ns: float, job: Job) -> Estimate:
    models = [model for rank in job.ranks for model in job.facts[rank].get("models") or ()]
    if models and not any(job.facts[rank].get("padding") or job.facts[rank].get("padding") is None for rank in job.ranks):
        raise DoesNotApply("no batch had rows of tokens")
    frame = padding.get()
    gains = {way: by_rank(frame[frame["way"] == way], "gain_ns") for way in (LONGEST, GROUPED)}
    way = LONGEST if saving(own_time, gains[LONGEST]) >= LEAST_SHARE * mean_step_ns else GROUPED
    return Estimate(
        gone_ns=gains[way],
        noise_of=("computation",),
        notable=LEAST_SHARE if way == LONGEST else NOTABLE_SHARE,
        loses=f"would be saved by less padding: {way}",
        summary=f"{percent(float(frame['padding'][frame['way'] == NOW].mean()))} of the tokens are padding",
        seen=way,
    )


def explain(estimate: Estimate, padding: Frame, job: Job) -> Explanation:
    mine = estimate.rows(padding).set_index("way", drop=False)
    rank, now, best = estimate.worst, mine.loc[NOW], mine.loc[estimate.seen]
    share = f"{percent(now['padding'])} of the tokens are padding"
    changes = [_to_longest(job, rank, now["length"])] if estimate.seen == LONGEST else []
    if ROUNDED in mine.index:
        ...
    return Explanation()


RULE = Rule("Padding", check, explain, saves_from=("computation",), of_training=True)
