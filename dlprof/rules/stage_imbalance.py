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

from collections.abc import Hashable, Mapping
from typing import Any

from dlprof.diagnosis import Clear, Rule
from dlprof.engine import Measured
from dlprof.measures.pipeline import bubbles, pipeline_chunks, stage_lengths
from dlprof.panels.pipeline import gantt
from dlprof.result import Finding
from dlprof.timeline.steps import mean_step_ns, of_step, step_means
from dlprof.units import digits, duration, percent

# As of a straggler, which a long stage is by design: notable from 5 % of a step on; other tools grade 5, 10 and 20 %.
NOTABLE_SHARE = 0.05


def check(run: Measured) -> Finding | Clear:
    """Look at the pipeline whose step even stages would shorten most."""
    stages = run.frame(stage_lengths)
    if (stages.groupby("ranks")["stage"].count() < 2).all():
        return Clear("the pipeline has one stage")
    gains = stages.groupby("ranks")[["saved_ns", "calls_a_step"]].first().prod(axis=1)
    pipeline, gain, step = str(gains.idxmax()), float(gains.max()), mean_step_ns(run)
    mine = stages[stages["ranks"] == pipeline]
    longest = mine.sort_values("stage_ns").to_dict("records")[-1]
    name, rank, mean = f"stage {longest['stage']}", int(longest["rank"]), float(mine["stage_ns"].mean())
    if gain / step < NOTABLE_SHARE:
        times = digits(longest["stage_ns"] / mean if mean else 0.0)
        saved = percent(max(gain, 0.0) / step)
        return Clear(f"the longest is {name}, {times} × the mean; even ones would save {saved} {of_step(run)}")
    noise = run.frame(bubbles).set_index("rank")["noise_ns"]
    return Finding(
        title=f"Pipeline {name} is longer than the others",
        summary=f"{name.capitalize()} on rank {rank} takes {duration(longest['stage_ns'])} a micro-batch, the mean"
        f" stage {duration(mean)}: the pipeline's step is {digits(longest['slowdown'])} × what even stages would make"
        " it.",
        verdict=f"{percent(gain / step)} {of_step(run)} the pipeline waits for {name}.",
        saving_ns=gain,
        noise_ns=float(noise.reindex(mine["rank"]).max()) * longest["calls_a_step"],
        advice=_advice(mine.to_dict("records"), longest, mean),
        evidence=gantt(run, pipeline),
        ranks=(rank,),
        sure="Replayed with the chunk times of this run, every stage at the mean of all of them.",
    )


def _advice(stages: list[dict[Hashable, Any]], longest: Mapping[Hashable, Any], mean: float) -> tuple[str, ...]:
    name, ns = longest["stage"], float(longest["stage_ns"])
    shortest = min(stages, key=lambda s: float(s["stage_ns"]))
    room = duration(mean - float(shortest["stage_ns"]))
    advice = (
        f"move {percent(1 - mean / ns)} of stage {name}'s work to the others: stage {shortest['stage']} has most room,"
        f" {room} a micro-batch",
    )
    if name == len(stages) - 1:
        return (*advice, "the last stage has the head and the loss beside its layers: count them as layers")
    if name == 0:
        return (*advice, "the first stage has the embedding beside its layers: count it as layers")
    return advice


RULE = Rule(
    "stage_imbalance",
    "Uneven pipeline stages",
    (bubbles, pipeline_chunks, stage_lengths, step_means),
    check,
    saves_from=("computation", "pipeline_bubble", "communication", "host", "other"),
)
