"""One stage of a pipeline takes longer than the others, and sets their pace.

Every micro-batch passes every stage, so the longest stage limits the throughput, and the others wait for it. Often it
is the last one, which has the head and the loss in addition to its layers, or the first one with a large embedding.

Needs a pipeline of torch.distributed.pipelining on all of its ranks, recorded by dlprof or in traces that show its
chunks: how long each stage's forward and backward took.

Saving: the measured steps replayed with every stage at the mean of all (Lin et al., Understanding Stragglers in Large
Model Training, 2025), every chunk ÷ its kind's mean as it was, and handing over as slow. Of several pipelines it is
that of the middle one: a stage that is long in only one of them is a late rank. Layers cannot be cut at will, and on a
CPU ranks that share cores slow each other down more when all compute at once: it may be less.

What to change: give the longest stage fewer layers. Count the embedding, the head and the loss as layers when the model
is split; a small vocabulary's head takes little, a large one's as much as several layers.
"""

from __future__ import annotations

from dlprof.analysis.engine import Frame, Maybe, maybe, needs
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change
from dlprof.analysis.panels.communication import gantt
from dlprof.analysis.pipeline.chunks import pipeline_chunks
from dlprof.analysis.pipeline.pipes import bubbles, stage_lengths
from dlprof.errors import DoesNotApply
from dlprof.units import duration, percent

# As of a straggler, which a long stage is by design: notable from 5 % of a step on; other tools grade 5, 10, 20 %.
NOTABLE_SHARE = 0.05


def check(stage_lengths: Frame = needs(stage_lengths), bubbles: Maybe[Frame] = maybe(bubbles)) -> Estimate:
    if (stage_lengths.groupby("ranks")["stage"].count() < 2).all():
        raise DoesNotApply("the pipeline has one stage")
    gains = (stage_lengths["saved_ns"] * stage_lengths["calls_a_step"]).groupby(stage_lengths["ranks"]).first()
    # Take the middle one of several pipelines: a delay in only one of them does not come from the split of the model.
    middle = gains.sort_values(kind="stable").index[(len(gains) - 1) // 2]
    stages = stage_lengths[stage_lengths["ranks"] == middle].sort_values("stage_ns", kind="stable")
    longest = stages.to_dict("records")[-1]
    noise = bubbles.get().set_index("rank")["noise_ns"]
    # Stages that differ by chance can be faster than even ones.
    gain = max(float(gains[middle]), 0.0)
    return Estimate(
        saving_ns=gain,
        by_rank_ns={longest["rank"]: gain},
        noise_ns=float(noise.reindex(stages["rank"]).max()) * longest["calls_a_step"],
        loses=f"is spent waiting for stage {longest['stage']} of the pipeline",
        seen=stages,
    )


def explain(
    estimate: Estimate, bubbles: Frame = needs(bubbles), pipeline_chunks: Frame = needs(pipeline_chunks)
) -> Explanation:
    shortest, *_, longest = estimate.seen.to_dict("records")
    name, ns, mean = longest["stage"], longest["stage_ns"], float(estimate.seen["stage_ns"].mean())
    changes = [
        f"move {percent(1 - mean / ns)} of stage {name}'s work to the others: stage {shortest['stage']} is the"
        f" shortest, {duration(mean - shortest['stage_ns'])} a micro-batch below the mean"
    ]
    if name == len(estimate.seen) - 1:
        changes.append("the last stage has the head and the loss in addition to its layers: count them as layers")
    elif name == 0:
        changes.append("the first stage has the embedding in addition to its layers: count it as layers")
    return Explanation(
        title=f"Pipeline stage {name} is longer than the others",
        summary=f"Stage {name} on rank {longest['rank']} takes {duration(ns)} a micro-batch, the mean stage"
        f" {duration(mean)}, the shortest, stage {shortest['stage']}, {duration(shortest['stage_ns'])}.",
        changes=tuple(map(change, changes)),
        evidence=gantt(bubbles, pipeline_chunks, longest["ranks"]),
        sure="Replayed with the chunk times of this run, every stage at the mean of all of them.",
    )


_SAVES_FROM = ("computation", "pipeline_bubble", "communication", "host", "other")
RULE = Rule("Uneven pipeline stages", check, explain, _SAVES_FROM, notable=NOTABLE_SHARE)
