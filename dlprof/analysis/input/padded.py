"""Ways to pad the batches of a job, and what each would make of its steps."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof import schema
from dlprof.analysis import intervals as iv
from dlprof.analysis.compute.attention import Found, attention_blocks
from dlprof.analysis.compute.kernels import kernels, shorter_kernels
from dlprof.analysis.compute.operators import operator_work
from dlprof.analysis.engine import RANK, Frame, Maybe, RankFacts, maybe, needs, per_rank
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.device import LEAST_KERNEL_NS, has_device
from dlprof.analysis.timeline.host import on_training_thread
from dlprof.analysis.timeline.steps import Timing, timing
from dlprof.errors import NotMeasured

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
