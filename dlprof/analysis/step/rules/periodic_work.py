"""Every n-th step takes longer, for something that the script does between its steps.

Roll-outs of an environment, evaluation in the training loop, logging of histograms, copies of weights: what is done
every n-th step is part of the mean step, and makes the other steps look noisy.

Needs the step log with four such steps or more, and on a GPU their length on its own clock: without it, steps in which
a host waits for its device now and then look the same. What a loader, a checkpoint, a garbage collection or a
compilation takes of them is left to their rules, and so are steps that train more than the others do: another network's
turn, or an optimizer's.

Saving: all of that time gone, which is the most that doing it more rarely, faster or elsewhere can give.

What to change: make the line faster that the report names (in batches, without a loop in Python); do it in another
process while training goes on. If the training may change: do it more rarely.
"""

from __future__ import annotations

import math

from dlprof.analysis.engine import JOB, Frame, Job, Maybe, maybe, needs
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.host.stacks import NOTABLE_SHARE, hottest, hottest_own, own_lines
from dlprof.analysis.panel import table
from dlprof.analysis.source.line_shares import costliest, costly_lines, line_shares, plays
from dlprof.analysis.step.breakdown import breakdown, part
from dlprof.analysis.timeline.stalls import PERIODIC, periodic
from dlprof.analysis.timeline.steps import mean_step_ns
from dlprof.result import Place
from dlprof.units import count, digits, duration, percent

# The phase in which steps are longer, in words.
_WHERE = {
    "rest": "outside of forward, backward and the optimizer",
    "forward": "in forward passes",
    "backward": "in backward passes",
    "optimizer": "in the optimizer",
}

# So many forward passes of a step write something, one token at a time, or evaluate.
_GENERATES = 8
_GENERATE = (
    "keep the keys and values of the tokens that are there (a KV cache: `past_key_values`, `use_cache=True`), if these"
    " passes write token after token, and give the model only the last one"
    " (https://huggingface.co/docs/transformers/kv_cache); if they evaluate: larger batches, under"
    " `torch.inference_mode()`"
)

# Of a model that is known to read no sequences.
_EVALUATE = (
    "evaluate under `torch.inference_mode()`, in larger batches; keep what comes out the same each time, as features of"
    " the same pictures; the training set needs no pass of its own: sum up its loss and hits while it is trained on"
)

# Of a script that steps an environment.
_ACT = (
    "choose actions under `torch.inference_mode()`, for more environments at once (`gymnasium.make_vec`, `num_envs=n`);"
    " what the loss needs of these passes (values, log-probabilities) is as good from one pass over all that was seen"
)

_COLUMNS = {"every": "one step in", "steps": "such steps", "extra_ns": "longer by_ns"}
_COLUMNS |= {"cost_ns": "of the mean step_ns", "phase": "mostly"}


def check(periodic: Frame = needs(periodic), breakdown: Frame = needs(breakdown)) -> Estimate:
    if not len(periodic):
        return nothing("no steps at a fixed interval are longer than the others")
    costs = part(breakdown, PERIODIC)
    return Estimate(
        gone_ns=costs,
        noise_of=(PERIODIC,),
        lost_ns=max(costs.values()),
        loses="goes to what the script does every n-th step",
    )


def explain(
    estimate: Estimate,
    periodic: Frame = needs(periodic),
    hottest: Maybe[Frame] = maybe(hottest),
    costly_lines: Maybe[Frame] = maybe(costly_lines),
    own_lines: Maybe[Frame] = maybe(own_lines),
    line_shares: Maybe[Frame] = maybe(line_shares),
    mean_step_ns: float = needs(mean_step_ns),
    job: Job = needs(JOB),
) -> Explanation:
    rank, mine = estimate.worst, estimate.rows(periodic)
    first = mine.iloc[0]
    every, extra = int(first["every"]), float(first["extra_ns"])
    share = (estimate.lost_ns or estimate.saving_ns) / mean_step_ns
    passes = max(round(float(first["forwards"])), 0)
    more = f"{passes:,} forward pass{'' if passes == 1 else 'es'}"
    forwards = f", with {more} more than the others" if passes else ""
    phase = str(first["phase"])
    seen, line = hottest_own(hottest, rank, phase), costliest(costly_lines, rank, phase)
    shown = mine.assign(phase=mine["phase"].map(_WHERE))
    rarer = 2 ** max(math.ceil(math.log2(share / 0.02)), 1) if share else 2
    of_rank = f" of rank {rank}" if len(job.ranks) > 1 else ""
    elsewhere = change("do it in another process while training goes on")
    cures = [elsewhere]
    where = _aside(own_lines, rank, phase)
    # The passes may be the least of it: what is known of the line that it is mostly seen in comes first.
    known = line is not None and line.idiom is not None
    # A line that forward passes of the training are in, too, says nothing of these.
    if passes >= (1 if phase == "forward" and not known else _GENERATES) and (phase == "forward" or not known):
        models = job.facts.get(rank, {}).get("models") or ()
        reads = not models or any(model.get("reads_sequences") is not False for model in models)
        evaluates = _ACT if plays(line_shares, rank) else _EVALUATE
        cures.insert(0, change(_GENERATE if reads and passes >= _GENERATES else evaluates))
    elif line is not None:
        cures.insert(0, change(line.advice("make this line faster (in batches, without a loop in Python):")))
        where = where or ((line.place,) if line.idiom is not None else ())
    elif hottest.or_none() is None:
        cures.append(change("record with stacks (`pip install py-spy`) to see the lines that it spends its time in"))
    return Explanation(
        title=f"Every {every}th step takes {duration(extra)} longer",
        summary=f"One step in {every}{of_rank} takes {duration(extra)} longer than the others, mostly"
        f" {_WHERE[first['phase']]}{forwards}: {percent(share)} of the mean step.{seen}",
        changes=(
            *cures,
            change(f"do it every {2 * every} steps: {percent(share / 2)} of the step is saved", training=True),
        ),
        at_most=True,
        where=where,
        evidence=table(f"Steps that are longer at a fixed interval, rank {rank}", shown, _COLUMNS),
        sure=f"Measured over {count(int(first['steps']), 'such step')} and all others; the saving is all of it gone,"
        f" the most that any change can give. Done {digits(float(rarer))} × as rarely, it would be"
        f" {percent(share / rarer)} of the step.",
        verdict=f"{percent(share)} of the mean step goes to what the script does every {every}th step.",
    )


def _aside(own_lines: Maybe[Frame], rank: int, phase: str) -> tuple[Place, ...]:
    """Return the line that most often begins a phase in a function which does not train, if that is notable."""
    frame = own_lines.or_none()
    if frame is None:
        return ()
    mine = frame[frame["rank"] == rank]
    of = mine["function"] + "\0" + mine["file"]
    trains = of[mine["doing"].isin(("backward", "optimizer"))]
    aside = mine[(mine["doing"] == phase) & ~of.isin(trains)]
    if phase != "forward" or not len(aside) or aside["seen"].max() < NOTABLE_SHARE * aside["samples"].max():
        return ()
    top = aside.iloc[int(aside["seen"].to_numpy().argmax())]
    return (Place(str(top["file"]), int(top["line"]), str(top["function"])),)


RULE = Rule("Work every n-th step", check, explain, saves_from=(PERIODIC,))
