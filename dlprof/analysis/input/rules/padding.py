"""Many tokens of a batch are padding, for which the model computes as much as for any others.

All rows of a batch get one length. A mask keeps padding out of the result, and not out of the work: layers compute
every place of a row, and attention every pair of places.

Needs a trace, and the lengths of rows in some batches, which dlprof reads on the host: from a mask of padding, a tensor
of lengths, labels of −100, or an id at the ends of rows (`padding_idx` of an embedding, `pad_token_id` of a
configuration, else what most rows end with). Of batches that are made on a device nothing is read.

Saving: the traced steps replayed with what the forward pass, the loss and the backward pass compute as much shorter as
there are fewer places, attention as there are fewer pairs. cuDNN's attention makes plans for each new length: that step
counts as much longer as the first one was, as often as in the last two thirds of a run of as many steps.

What to change: pad to the longest row of each batch (`padding="longest"`, the default of transformers'
`DataCollatorWithPadding`; `torch.nn.utils.rnn.pad_sequence`). Then put rows of similar length into a batch, or rows one
behind the other without padding. With cuDNN's attention, few different lengths: `pad_to_multiple_of=64`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pandas as pd
from msgspec.structs import replace
from numpy.typing import NDArray

from dlprof import schema
from dlprof.analysis import intervals as iv
from dlprof.analysis import settings
from dlprof.analysis.compute.attention import Found, attention_blocks
from dlprof.analysis.compute.kernels import kernels, shorter_kernels
from dlprof.analysis.compute.operators import operator_work
from dlprof.analysis.engine import JOB, RANK, Frame, Job, Maybe, RankFacts, by_rank, maybe, needs, per_rank
from dlprof.analysis.estimate import LEAST_SHARE, Estimate, Explanation, Rule, change
from dlprof.analysis.panel import table
from dlprof.analysis.step.savings import own_time, saving
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.device import LEAST_KERNEL_NS, has_device
from dlprof.analysis.timeline.host import on_training_thread
from dlprof.analysis.timeline.steps import Timing, mean_step_ns, timing
from dlprof.errors import DoesNotApply, NotMeasured
from dlprof.result import Change, Place, Scalar
from dlprof.units import duration, percent

NOW, LONGEST, ROUNDED = "as it is", "to the longest row of each batch", "to a multiple of 64 above that"
GROUPED, PACKED = "to the longest of similar rows", "none: rows one behind the other"

# cuDNN's plans for a new length took 0.44 s forward and 0.55 s backward on a B200 (modelscope/FunASR, issue 3704).
_MOST_OF_PLANS_NS = 1e9


@per_rank
def padding(
    spans: Frame = needs(schema.SPANS),
    on_training_thread: Frame = needs(on_training_thread),
    kernels: Maybe[Frame] = maybe(kernels),
    shorter_kernels: Maybe[Callable[[NDArray[np.bool_], NDArray[np.float64]], float]] = maybe(shorter_kernels),
    operator_work: Frame = needs(operator_work),
    attention_blocks: Maybe[list[Found]] = maybe(attention_blocks),
    steps: Maybe[Frame] = maybe(schema.STEPS),
    timing: Timing = needs(timing),
    has_device: bool = needs(has_device),
    rank: RankFacts = needs(RANK),
) -> pd.DataFrame:
    """Return ways to pad the batches that were looked at: way, length (of the mean row, padded), share (of the tokens
    that are padding), gain_ns, step_ns, plans_ns (of one new length; 0: it needs none).
    """
    seen = [batch for batch in rank.facts.get("padding") or () if batch.get("lengths") and batch.get("padded")]
    if not seen:
        raise NotMeasured("the lengths of rows in its batches were not recorded (`dlprof wrap` does that)")
    each = [np.array(batch["lengths"]) for batch in seen]
    sizes, real = np.array([len(rows) for rows in each]), np.sort(np.concatenate(each))
    now, longest = (np.repeat(of, sizes) for of in ([one["padded"] for one in seen], [rows.max() for rows in each]))
    batch = int(np.median(sizes))
    last = np.minimum((np.arange(len(real)) // batch + 1) * batch, len(real)) - 1
    ways, new_ns, plans_ns = {NOW: now, LONGEST: longest, GROUPED: real[last], PACKED: real}, 0.0, 0.0
    at, until = (
        host.cover(on_training_thread, host.is_named(on_training_thread, f"dlprof::{phase}"))[:, edge]
        for phase, edge in (("forward", 0), ("backward", 1))
    )
    if not len(at) or not len(until):
        raise NotMeasured("the trace does not mark forward and backward passes")
    passes = iv.union(at[np.maximum(np.searchsorted(at, until) - 1, 0)], until)
    names = spans["name"].cat
    if any("cudnn_attention" in name for name in names.categories):
        ways[ROUNDED] = np.minimum(-(-longest // 64) * 64, now)
        new_ns, plans_ns = _plans(real, batch, steps.get())
    work = kernels.get() if has_device else operator_work
    owner, took = work["owner"].to_numpy(), work["dur_ns"].to_numpy()
    counted = (owner >= 0) & iv.holds(passes, spans["start_ns"].to_numpy()[owner])
    attends = np.array(["attention" in name for name in names.categories], dtype=bool)[names.codes.to_numpy()]
    for block, *_ in attention_blocks.or_none() or ():
        attends[block.before[0] : block.after[-1] + 1] = True
    rows = []
    for way, lengths in ways.items():
        places, pairs = (float((lengths**n).sum() / (now**n).sum()) for n in (1, 2))
        left = np.maximum(np.where(attends[owner], pairs, places), LEAST_KERNEL_NS / np.maximum(took, LEAST_KERNEL_NS))
        on_cpu = float(((1 - left) * took)[counted].sum()) / max(len(timing.windows), 1) / (timing.overhead or 1.0)
        gain = shorter_kernels.get()(counted, left) if has_device else on_cpu
        gain = max(gain - (new_ns if way == LONGEST else 0.0), 0.0)
        rows.append((way, lengths.mean(), 1 - real.sum() / lengths.sum(), gain, timing.step_ns - gain, plans_ns))
    return pd.DataFrame(rows, columns=["way", "length", "share", "gain_ns", "step_ns", "plans_ns"])


def _plans(real: NDArray[np.int64], batch: int, steps: pd.DataFrame) -> tuple[float, float]:
    """Return what plans for new lengths take of a mean step, and for one of them, ns.

    A batch of n rows is as long as the longest: L with the probability F(L)ⁿ − F(L − 1)ⁿ.
    """
    passes = (steps["forward_ns"] + steps["backward_ns"])[steps["kind"] == "train"].to_numpy()
    _, counts = np.unique(real, return_counts=True)
    chance = np.diff((counts.cumsum() / len(real)) ** batch, prepend=0.0)
    new = ((1 - chance) ** (len(passes) // 3) - (1 - chance) ** len(passes)).sum() / (len(passes) - len(passes) // 3)
    plans_ns = min(max(float(passes[0] - np.median(passes)), 0.0), _MOST_OF_PLANS_NS)
    return float(new) * plans_ns, plans_ns


# Batches of similar rows change the order of the data: worth it from twice the share from which other numbers are.
NOTABLE_SHARE = 0.10


def check(
    padding: Maybe[Frame] = maybe(padding),
    own_time: Frame = needs(own_time),
    mean_step_ns: float = needs(mean_step_ns),
    job: Job = needs(JOB),
) -> Estimate:
    if all(job.facts[rank].get("padding") == [] for rank in job.ranks):
        raise DoesNotApply("no batch with rows of tokens was seen on the host")
    frame = padding.get()
    gains = {way: by_rank(frame[frame["way"] == way], "gain_ns") for way in (LONGEST, ROUNDED, GROUPED)}
    least = LEAST_SHARE * mean_step_ns
    way = next((way for way in (LONGEST, ROUNDED) if saving(own_time, gains[way]) >= least), GROUPED)
    return Estimate(
        gone_ns=gains[way],
        noise_of=("computation",),
        notable=NOTABLE_SHARE if way == GROUPED else LEAST_SHARE,
        loses=f"would be saved by padding {way}",
        summary=f"{percent(float(frame['share'][frame['way'] == NOW].mean()))} of the tokens are padding",
        seen=way,
    )


def explain(estimate: Estimate, padding: Frame = needs(padding), job: Job = needs(JOB)) -> Explanation:
    rank, mine, changes = estimate.worst, estimate.rows(padding), list[Change]()
    by_way = {str(row["way"]): row for row in mine.to_dict("records")}
    now, place = by_way[NOW], _collating(job, rank)
    least = now["step_ns"]
    for way, text, name, value in _changes(place, now["length"], now["plans_ns"]):
        if (step := by_way.get(way, now)["step_ns"]) < (1 - LEAST_SHARE) * least or way == estimate.seen:
            least, text = step, f"{text}: a step of {duration(step)} is predicted"
            made = change(text, numerics=way in (GROUPED, PACKED), training=False, **{name: (None, value)})
            changes.append(replace(made, at=None if made.numerics else place))
    share = f"{percent(now['share'])} of the tokens are padding"
    return Explanation(
        title="Batches are mostly padding" if now["share"] > 0.5 else "Batches hold much padding",
        summary=f"{share}: the mean row of rank {rank} is {now['length']:.0f} long, and {by_way[PACKED]['length']:.0f}"
        f" without it. Padded {estimate.seen} it is {by_way[estimate.seen]['length']:.0f} long.",
        changes=tuple(changes),
        evidence=table(
            f"Predicted step by padding, rank {rank}",
            mine,
            {"way": "padding", "length": "mean length", "share": "of the tokens_share", "step_ns": "mean step_ns"},
        ),
        sure="Predicted: fewer tokens are computed in as much less time, no sooner than the host launches that."
        + (f" Plans for new lengths are counted, {duration(now['plans_ns'])} for each." if now["plans_ns"] else ""),
        verdict=f"{share}.",
    )


def _collating(job: Job, rank: int) -> Place | None:
    """Return the script's function that makes batches of samples; None: it is a library's, or not known."""
    collate = settings.training_loader(job, rank).get("collate") or {}
    file = str(collate.get("file") or "-packages/").removeprefix(job.facts[rank].get("directory") or "")
    return None if "-packages/" in file else Place(file, collate.get("line") or 0, collate.get("name") or "")


def _changes(place: Place | None, length: float, plans_ns: float) -> Iterator[tuple[str, str, str, Scalar]]:
    """Yield ways to pad, what a script does for each, and the setting."""
    where = f"in `{place.function}` ({place.file}:{place.line})" if place else "in the loader"
    text = 'in transformers `DataCollatorWithPadding`, and no `padding="max_length"` before it'
    yield LONGEST, f"pad {where} to the longest row of each batch, not to {length:.0f} ({text})", "padding", "longest"
    text = "pad to the longest row, rounded up to a multiple of 64 (`pad_to_multiple_of=64`): cuDNN's attention"
    yield ROUNDED, f"{text} makes plans for each new length, in up to {duration(plans_ns)}", "pad_to_multiple_of", 64
    text = (
        'put similar rows into a batch (a batch sampler; in transformers `train_sampling_strategy="group_by_length"`,'
    )
    yield GROUPED, f"{text} before version 5 `group_by_length=True`)", "train_sampling_strategy", "group_by_length"
    yield PACKED, "put rows one behind the other (`packing=True` in TRL, nested tensors)", "packing", True


RULE = Rule("Padding", check, explain, saves_from=("computation",))
