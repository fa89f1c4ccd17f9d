"""A part of the model that is not trained computes the same of each sample in every epoch.

A frozen encoder before what is trained, as the autoencoder and the text encoder of latent diffusion, a backbone under a
new head, or the reference of a preference loss, gives the same for the same input. Computed once, it is read from
memory or from a file afterwards, which is nearly free.

Needs the facts of the recorder on which parts want no gradient, and whether their weights stay the same, and a trace
with modules. A part that a backward pass goes through, as the network of a perceptual loss, is left out: its input
comes from what is trained. So is one whose weights change, as an average of the trained ones or a target network.

Saving: its forward pass, which is the most that it can be. Whether a sample's input comes again is not seen: random
augmentation, or noise that is added before, makes another one each time. A job that went through its data set once, and
not further, sees none twice: nothing is reported of it.

What to change: compute its outputs once, in `eval()` mode and without gradients, keep them in a tensor or a file, and
take the rows of a batch from there. Augmentation that matters is kept by a few versions of each sample.
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from dlprof.analysis import settings
from dlprof.analysis.compute.cpu_work import cpu_parts, cpu_work, in_all_steps
from dlprof.analysis.engine import JOB, RANK, Frame, Job, Maybe, RankFacts, maybe, needs, per_rank
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.modules.tree import module_means
from dlprof.analysis.panel import table
from dlprof.analysis.timeline.steady import light_steps
from dlprof.errors import NotMeasured
from dlprof.units import duration, few

NOTABLE_SHARE = 0.1

# A part with more of a backward pass than this share of its forward pass has one.
_NO_BACKWARD = 0.02

# A pass through the data may leave out so much of them: a last batch that is not full.
_ONCE = 0.1

_COLUMNS = {"path": "module", "calls": "calls a step", "ns": "takes_ns"}


@per_rank
def passes(light_steps: Frame = needs(light_steps), rank: RankFacts = needs(RANK)) -> pd.DataFrame:
    """Return one row, times: how often the job went through the data set of its training loader, as far as recorded.

    Raises NotMeasured where its length is not known.
    """
    loader: dict[str, Any] = next((o for o in rank.facts.get("loaders") or () if o.get("role") == "train"), {})
    length, taken = loader.get("dataset_length"), light_steps.loc[light_steps["kind"] == "train", "samples"]
    if not isinstance(length, int) or length < 1 or loader.get("iterable") or (taken < 0).any():
        raise NotMeasured("how long the training data are was not recorded")
    return pd.DataFrame({"times": [float(taken.sum()) * (loader.get("replicas") or 1) / length]})


def check(
    module_means: Frame = needs(module_means),
    cpu_parts: Maybe[Frame] = maybe(cpu_parts),
    cpu_work: Maybe[Frame] = maybe(cpu_work),
    passes: Maybe[Frame] = maybe(passes),
    job: Job = needs(JOB),
) -> Estimate:
    gone_through = passes.or_none()
    if gone_through is not None and ((gone_through["times"] - 1).abs() < _ONCE).all():
        return nothing("the job went through its data once: no sample came twice")
    frozen: set[str] = set()
    for rank in job.ranks:
        told = job.facts[rank].get("frozen")
        if not isinstance(told, list):
            raise NotMeasured("which parts of the model are frozen was not recorded (record with `dlprof wrap`)")
        frozen |= {str(one.get("module")) for one in told if one.get("changes") is False}
    mine = module_means[module_means["path"].isin(frozen)]
    mine = mine[mine["backward_ns"] <= _NO_BACKWARD * mine["forward_ns"]]
    if not len(mine):
        return nothing("every part of the model is trained, or others are trained through it")
    gone = dict.fromkeys(job.ranks, float(mine["forward_ns"].sum()))
    if settings.on_cpu(job):
        gone = in_all_steps(gone, cpu_parts.get(), cpu_work.get())
    return Estimate(gone_ns=gone, loses="goes to the forward pass of what is not trained", seen=mine)


def explain(estimate: Estimate) -> Explanation:
    paths = estimate.seen.sort_values("forward_ns", ascending=False)["path"].drop_duplicates()
    named = few([f"`{path.strip('()')}`" for path in paths], 4)
    takes = duration(estimate.by_rank_ns[estimate.worst])
    return Explanation(
        title="A frozen part computes the same in every epoch",
        summary=f"No parameter of {named} is trained or changes, and no backward pass goes through it: its forward"
        f" pass, {takes} of each step, gives the same for an input that comes again.",
        changes=(
            change(
                f"compute what {named} gives for each sample once, before training, and keep it: where a sample's input"
                " is the same in every epoch, not augmented at random"
            ),
        ),
        evidence=table("Parts that are not trained", estimate.seen, _COLUMNS, 12),
        sure="By the traced forward pass of these parts, all of it gone. Whether their inputs come again was not seen.",
        at_most=True,
    )


RULE = Rule(
    "A frozen part of the model", check, explain, notable=NOTABLE_SHARE, saves_from=("computation", "host"), weight=0.5
)
