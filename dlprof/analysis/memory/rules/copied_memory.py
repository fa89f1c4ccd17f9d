"""Loader workers copy the data set, object by object, as they read it.

A forked worker shares all memory with the script until one of the two writes to it. To read a Python object is to write
to it: its count of references changes, and the page that it is on is copied. A data set that keeps a list or a dict of
many objects is so copied into every worker, sample by sample, until memory is used up: it looks like a leak.

Needs samples of the workers' private memory (`smaps_rollup` of Linux). It counts where that grows throughout while the
workers themselves become no larger, and is notable as a share of the host's memory.

Saving: none. The finding says how much was copied, how fast, and whether the rest fits as well.

What to change: hold the samples in an array or a tensor, whose numbers have no counts: `np.array`, pyarrow, or pickled
bytes in one array, with the offsets in another. Or fewer workers.
"""

from __future__ import annotations

from typing import Any

from dlprof.analysis import settings
from dlprof.analysis.engine import JOB, Frame, Job, needs
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change
from dlprof.analysis.memory.memory import copied_memory
from dlprof.units import count, size

# A share of the memory that is left with what was copied.
_NOTABLE = 0.01


def check(copied_memory: Frame = needs(copied_memory)) -> Estimate:
    frame = copied_memory
    free_before = frame["left_bytes"] + frame["copied_bytes"]
    notable = frame[(frame["grows"] == 1) & (frame["copied_bytes"] >= _NOTABLE * free_before)]
    if not len(notable):
        most = size(float(frame["copied_bytes"].max()))
        return Estimate(scope="risk", summary=f"the workers have copied {most} of shared memory", clear=True)
    worst = notable.sort_values("copied_bytes", ascending=False, kind="stable").to_dict("records")[0]
    return Estimate(scope="risk", by_rank_ns=dict.fromkeys(notable["rank"].tolist(), 1.0), seen=worst)


def explain(estimate: Estimate, job: Job = needs(JOB)) -> Explanation:
    row: dict[Any, Any] = estimate.seen
    loader = settings.training_loader(job, row["rank"])
    workers, each = count(row["workers"], "worker"), size(row["copied_bytes"] / row["workers"])
    fits = row["shared_bytes"] <= row["left_bytes"]
    end = (
        "which fits as well"
        if fits
        else f"enough for {row['left_bytes'] / row['per_step']:,.0f} steps: it may not fit, and the kernel kills then"
    )
    held = max(loader.get("objects") or [], key=lambda one: one.get("length") or 0, default=None)
    what = f"the {held['kind']} `{held['name']}` of `{held['class']}`, {held['length']:,} objects" if held else ""
    kept = what or f"what `{loader.get('dataset') or 'the data set'}` keeps of samples"
    return Explanation(
        title="Workers copy the data set as they read it",
        summary=f"On rank {row['rank']} each of {workers} has copied {each} of the memory that it shares with the"
        f" script, all of them {size(row['per_step'])} a step. Up to {size(row['shared_bytes'])} more can be copied,"
        f" and {size(row['left_bytes'])} are left, {end}.",
        verdict=f"Workers copy the data set as they read it: {size(row['copied_bytes'])} so far.",
        changes=(
            change(
                f"hold {kept}, in an array or a tensor, not as Python objects (`np.array`, pyarrow, or pickled bytes in"
                " one array with the offsets in another): reading an object changes its count of references, and"
                " copies its page"
            ),
        ),
        sure="Read from the kernel's sums of each worker's private memory. The pages that hold no objects are not"
        " copied.",
    )


RULE = Rule("Memory that workers copy", check, explain, only_with="loader")
