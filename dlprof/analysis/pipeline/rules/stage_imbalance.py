"""One stage of a pipeline takes longer than the others, and sets their pace.

A pipeline moves like a queue: every micro-batch passes every stage, so the longest stage decides how many pass in a
second, and the others wait for it with whatever they hold. Often it is the last one, which has the head and the loss
beside its layers, or the first one with a large embedding.

Needs a pipeline of torch.distributed.pipelining on all of its ranks, recorded by dlprof or in traces that name its
chunks: how long each stage's forward and backward took. The slowdown is the step replayed with the stages as they are ÷
the same with every stage at the mean of all (S in Lin et al., Understanding Stragglers in Large Model Training, 2025),
launching and handing over for nothing in both.

Saving: the measured steps replayed with even stages, every chunk as much longer or shorter than its kind's mean as it
was, and handing over as slow: even stages wait for both more often. Layers cannot be cut at will: it may be less. Ranks
that share cores or memory slow each other down more when all compute at once, as even ones do: on a CPU it may be less
for that, too.

What to change: give the longest stage fewer layers. Count the embedding, the head and the loss as layers when the model
is split; a small vocabulary's head takes little, a large one's as much as several layers.
"""

from __future__ import annotations

import pandas as pd

from dlprof.analysis.engine import Maybe
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.pipeline.panels.pipeline import gantt
from dlprof.units import digits, duration, percent


def check(stage_lengths: pd.DataFrame, bubbles: Maybe[pd.DataFrame], pipeline_chunks: pd.DataFrame) -> Estimate:
    """Estimate what even stages would save of the pipeline that gains most from them."""
    if (stage_lengths.groupby("ranks")["stage"].count() < 2).all():
        return nothing("the pipeline has one stage")
    gains = stage_lengths.groupby("ranks")[["saved_ns", "calls_a_step"]].first().prod(axis=1)
    mine = stage_lengths[stage_lengths["ranks"] == gains.idxmax()].sort_values("stage_ns", kind="stable")
    longest = mine.to_dict("records")[-1]
    noise = bubbles.get().set_index("rank")["noise_ns"]
    # Stages that differ by chance can be faster than even ones.
    gain = max(float(gains.max()), 0.0)
    return Estimate(
        saving_ns=gain,
        by_rank_ns={int(longest["rank"]): gain},
        noise_ns=float(noise.reindex(mine["rank"]).max()) * longest["calls_a_step"],
        loses=f"the pipeline waits for stage {longest['stage']}",
        explain=lambda: _explain(bubbles.get(), pipeline_chunks, mine),
    )


def _explain(bubbles: pd.DataFrame, pipeline_chunks: pd.DataFrame, stages: pd.DataFrame) -> Explanation:
    shortest, *_, longest = stages.to_dict("records")
    name, ns, mean = longest["stage"], float(longest["stage_ns"]), float(stages["stage_ns"].mean())
    changes = [
        change(
            f"move {percent(1 - mean / ns)} of stage {name}'s work to the others: stage {shortest['stage']} has most"
            f" room, {duration(mean - float(shortest['stage_ns']))} a micro-batch"
        )
    ]
    if name == len(stages) - 1:
        changes.append(change("the last stage has the head and the loss beside its layers: count them as layers"))
    elif name == 0:
        changes.append(change("the first stage has the embedding beside its layers: count it as layers"))
    return Explanation(
        title=f"Pipeline stage {name} is longer than the others",
        summary=f"Stage {name} on rank {longest['rank']} takes {duration(ns)} a micro-batch, the mean stage"
        f" {duration(mean)}: the pipeline's step is {digits(longest['slowdown'])} × what even stages would make it.",
        changes=tuple(changes),
        evidence=gantt(bubbles, pipeline_chunks, str(longest["ranks"])),
        sure="Replayed with the chunk times of this run, every stage at the mean of all of them.",
    )


RULE = Rule(
    "stage_imbalance",
    "Uneven pipeline stages",
    check,
    saves_from=("computation", "pipeline_bubble", "communication", "host", "other"),
    # As of a straggler, which a long stage is by design: notable from 5 % of a step on; other tools grade 5, 10, 20 %.
    notable=0.05,
)
