"""Much of the job's time goes to validation.

Between the training steps the model is evaluated on held-out data. No step becomes shorter by doing that less often or
faster, but the job does.

Needs the step log, in which steps without a backward pass and without an optimizer's step are validation, and two
phases of it: of one alone it is not known how often it comes. Whether gradients are on in it stands in the facts of the
rank.

Saving: where the stacks show what it does besides, as to keep the scores of all classes for a metric or to draw
figures, all but its forward passes and its waits for data; where much of it goes through what is trained on (the
training's loader, or another one over the whole of the same data set), all of that; where one rank validates while
others wait, or each rank validates the whole set, what sharing it out would save; else what batches as large as in
training would save, where those are four times as large or more, and take no longer; else what its waits for data take,
where these are notable; else, where gradients are on and a CPU trains, at most its forward passes; else what validating
half as often would save. This time is not in the steady steps: it is spread over the training steps, and its share is
that of the training loop.

What to change: what such a line says, as to hand on what the metric needs alone; sum up the loss and the hits of the
training set while it is trained on, instead of going through it once more (they are then those of weights that still
change); share it out over the ranks; as many loader workers as for training; `torch.inference_mode()` where gradients
are on, and the training's autocast; a larger batch than in training, since nothing is kept for a backward pass. If the
training may change: validate less often, or on a fixed part of the data and on all of it only now and then.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from dlprof.analysis import idioms, settings
from dlprof.analysis.engine import JOB, Frame, Job, Maybe, by_rank, maybe, needs
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing, worst
from dlprof.analysis.source.line_shares import CostlyLine, costliest, costly_lines
from dlprof.analysis.step.whole_job import loop_step_ns, validation_cost, validation_loader
from dlprof.analysis.timeline.steps import phases_of_step
from dlprof.errors import NotMeasured
from dlprof.result import Change, Panel
from dlprof.units import count, digits, duration, is_now, percent

# Validation must be, so it is notable only where doing something about it gives what tools for input call notable: 5 %
# (XProf). Validating half as often gives that from 10 % of the loop on. More of it in the loader than WAITS is called
# high by the same tools.
NOTABLE_SHARE = 0.05
WAITS = 0.2

# Gradients are on in validation where so many of its steps build a graph, and off where no more than the others do.
_GRADED = 0.9

# What is seen outside of the passes is validation's where so much of that time is, and of the samples in one line.
_MOSTLY = 0.7

# Batches of validation that are so many times smaller than those of training are mostly overhead.
_SMALLER = 4


def check(
    validation_cost: Frame = needs(validation_cost),
    loop_step_ns: Maybe[float] = maybe(loop_step_ns),
    costly_lines: Maybe[Frame] = maybe(costly_lines),
    phases_of_step: Maybe[Frame] = maybe(phases_of_step),
    job: Job = needs(JOB),
) -> Estimate:
    if not validation_cost["phases"].sum() and (inside := int(validation_cost["inside"].max())):
        raise NotMeasured(
            f"the script validates without a loader, within {count(inside, 'training step')}: see periodic_work and"
            " unused_forward"
        )
    if not validation_cost["phases"].sum():
        return nothing("nothing was validated")
    if validation_cost["phases"].max() < 2:
        raise NotMeasured("one phase of validation was recorded: how often it comes is not known")
    costs = by_rank(validation_cost, "cost_ns")
    # Where one rank validates the others wait for it, so the one that takes longest counts for all.
    (mine,) = validation_cost[validation_cost["rank"] == worst(costs)].to_dict("records")
    waits = mine["fetch_share"] * (mine["fetch_share"] > WAITS)
    mine["waits"] = waits * mine["cost_ns"] >= NOTABLE_SHARE * loop_step_ns.get() and mine["among"] <= 1
    mine["scored"] = mine["again"] * mine["cost_ns"] >= NOTABLE_SHARE * loop_step_ns.get()
    mine["smaller"] = _smaller(job, int(mine["rank"]))
    known = job.facts[int(mine["rank"])].get("evaluation") or {}
    steps = known.get("steps") or 0
    mine["graded"] = (known.get("with_graph") or 0) / steps if steps else None
    mine["may_graph"] = mine["graded"] is None or mine["graded"] >= _GRADED
    # On a GPU nothing bounds what this gains: the host's time of a forward pass is not the device's.
    bounded = bool(mine["graded"]) and mine["may_graph"] and settings.on_cpu(job)
    mine["bounded"] = bounded and mine["among"] <= 1 and not mine["waits"]
    line, rest = costliest(costly_lines, int(mine["rank"]), "rest"), math.inf
    if (phases := phases_of_step.or_none()) is not None:
        rest = float(phases.loc[(phases["rank"] == mine["rank"]) & (phases["phase"] == "rest"), "ns"].sum())
    besides = 1 - mine["fetch_share"] - mine["forward_share"]
    mine["besides"] = line if line is not None and _is_of_validation(line, mine["cost_ns"] * besides, rest) else None
    part = 0.5
    if mine["besides"]:
        part = besides
    elif mine["scored"]:
        part = mine["again"]
    elif mine["among"] > 1:
        part = 1 - 1 / mine["among"]
    elif mine["smaller"] >= _SMALLER:
        part = 1 - 1 / mine["smaller"]
    elif mine["waits"]:
        part = waits
    elif mine["bounded"]:
        part = mine["forward_share"]
    return Estimate(
        saving_ns=mine["cost_ns"] * part,
        by_rank_ns=costs,
        noise_ns=mine["cost_noise_ns"] * part,
        lost_ns=mine["cost_ns"],
        scope="job",
        loses="is validation",
        seen=mine,
    )


def _is_of_validation(line: CostlyLine, besides: float, rest: float) -> bool:
    """Return whether a line that is seen outside of the passes is what validation does besides them, and is needless.

    besides, rest: ns of each training step that validation, and the step itself, spends outside of the passes.
    """
    if line.idiom is None or line.idiom.name == idioms.LOGITS_KEPT:
        return line.idiom is not None
    return line.idiom.first and line.share >= _MOSTLY and besides >= _MOSTLY / (1 - _MOSTLY) * rest


def _smaller(job: Job, rank: int) -> float:
    """Return how many times as many samples a training batch has as one of validation; 1: not known."""
    train, held = settings.training_loader(job, rank).get("batch_size"), validation_loader(job, rank).get("batch_size")
    return float(train / held) if train and held else 1.0


def explain(estimate: Estimate, loop_step_ns: float = needs(loop_step_ns), job: Job = needs(JOB)) -> Explanation:
    mine: dict[str, Any] = estimate.seen
    rank, among, share = estimate.worst, int(mine["among"]), mine["cost_ns"] / loop_step_ns
    why = " The other ranks wait for it." if among > 1 else ""
    if mine["samples"]:
        why = f" Each rank goes through all of its {mine['samples']:,} samples."
    mode = "`torch.inference_mode()` and " if mine["may_graph"] else ""
    if mine["scored"]:
        why += f" {percent(mine['again'])} of it goes through what is trained on."
    how, known = "half of it gone", f" What {mode}larger batches in validation gain is not known."
    if mine["graded"] and mine["may_graph"]:
        why += (
            f" Gradients are on in {percent(mine['graded'])} of its steps: each builds a graph that no backward pass"
            " uses, and predictions that are kept keep the activations of their batches as well."
        )
    if mine["besides"]:
        how, known = "all but its forward passes and its waits for data gone", ""
    elif mine["scored"]:
        how, known = "no pass of its own over what is trained on, the most that this can give", ""
    elif among > 1:
        how, known = f"shared out evenly over {among} ranks", ""
    elif mine["smaller"] >= _SMALLER:
        how, known = "batches as large as in training, in the time of a smaller one: the most that they give", ""
    elif mine["waits"]:
        how, known = "its waits for data gone, the most that more workers can give", ""
    elif mine["bounded"]:
        how, known = "its forward passes gone, more than going without a graph can give", ""
    return Explanation(
        title=f"Validation takes {percent(share)} of the training loop's time",
        summary=f"Every {digits(mine['every'])} training steps rank {rank} validates for {duration(mine['phase_ns'])},"
        f" in {count(mine['fetches'], 'batch')}; {percent(mine['fetch_share'])} of it waits for data.{why}",
        changes=tuple(_changes(job, rank, mine)),
        evidence=_evidence(share, mine),
        sure=f"Measured over the whole job; estimated as {how}. A job that validates less often than the recorded part"
        f" of it has less to gain.{known}",
        where=(mine["besides"].place,) if mine["besides"] else (),
        at_most=bool(
            mine["besides"] or mine["scored"] or mine["waits"] or mine["smaller"] >= _SMALLER or mine["bounded"]
        ),
    )


def _changes(job: Job, rank: int, mine: dict[str, Any]) -> Iterator[Change]:
    loader, autocast = validation_loader(job, rank), job.facts[rank].get("autocast") or {}
    if mine["besides"]:
        yield change(mine["besides"].advice())
    if mine["scored"]:
        yield change(
            "score the training set while it is trained on: sum up the loss and hits of each step (without `.item()`)"
            " instead of a pass over it in the end, if that is what the pass is for"
        )
    if mine["among"] > 1:
        yield change(
            f"share it out over the {mine['among']} ranks: `DistributedSampler(validation_set, shuffle=False)`, and"
            " `all_reduce` the sums",
            shuffle=(None, False),
        )
    if mine["among"] <= 1 and mine["smaller"] >= _SMALLER:
        batch = settings.training_loader(job, rank).get("batch_size")
        yield change(
            f"a larger batch in validation: `batch_size={batch}` as in training (is {loader.get('batch_size')}), or"
            " more, since nothing is kept for a backward pass"
        )
    if mine["bounded"]:
        yield change("`with torch.no_grad():` around validation, in which gradients are on (or `inference_mode()`)")
    rarer = f"validate every {2 * mine['every']:.0f} steps (is {digits(mine['every'])}), or on part of the data"
    yield change(rarer, training=True)
    if mine["among"] <= 1 and not mine["waits"]:
        # The saving is that of validating less often, or in larger batches, and nothing is known of what else would
        # give.
        return
    if mine["fetch_share"] > WAITS:
        yield change(
            f"more `num_workers`{is_now(loader.get('num_workers'))} and `persistent_workers=True` on validation's"
            f" loader: {percent(mine['fetch_share'])} of validation waits for it",
            persistent_workers=(loader.get("persistent_workers"), True),
        )
    mixed = f" and autocast ({autocast['dtype']}, as training)" if autocast.get("enabled") else ""
    larger = f"a larger batch{is_now(loader.get('batch_size'))}, since nothing is kept for a backward pass"
    mode = "`torch.inference_mode()`" if mine["may_graph"] else ""
    yield change("; ".join(filter(None, (f"{mode}{mixed}".removeprefix(" and "), larger))), numerics=bool(mixed))


def _evidence(share: float, mine: dict[str, Any]) -> Panel:
    gone = {"as it is": 0.0}
    if mine["among"] > 1:
        gone[f"shared out over {mine['among']} ranks"] = 1 - 1 / mine["among"]
    gone |= {"half as often": 0.5, "a quarter as often": 0.75}
    if mine["fetch_share"] > WAITS:
        gone["with no waiting for data"] = mine["fetch_share"]
    rows = tuple((name, share * (1 - less), share * less, 1 / (1 - share * less)) for name, less in gone.items())
    columns = ("validation", "share", "saved_share", "speed of the job_times")
    return Panel("table", "Shares of the training loop with less validation", rows, columns)


RULE = Rule("Time for validation", check, explain, notable=NOTABLE_SHARE)
