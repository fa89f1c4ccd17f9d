"""The training loop waits for its next batch.

A step begins with `next()` on the loader. While the training thread waits there and the device has nothing left to do,
no part of the job computes. The wait ends when the loader makes batches at least as fast as the model takes them. The
time that `next()` needs to receive a ready batch does not count.

Needs the wait in the loader (the step log, or the loader's ranges in a trace) and, on a GPU, a trace that shows when
the device was idle: the traced steps are replayed without the wait. A wait costs nothing while the device still
computes. With several ranks, a wait counts only as far as no other rank is slower anyway. If all ranks' traces are
present, the report names the ranks that wait meanwhile.

Saving: what more workers would give, predicted from the recorded batches: their fetches are replayed with n workers and
the loop's own steps, in order, through a queue as deep as the loader's. Fetching that computes shares the host's cores
with training; fetching that waits for storage does not. If cheaper batches would give more than twice as much, the
saving is theirs: the slower part of making a batch, reading the samples or collating them, then costs nothing, the
other part stays, and on a CPU training gets the cores. If the thread that pins all batches is the limit, the saving is
that of batches that cost nothing to pin. Both are upper bounds, and the report says so. Where batches were not
recorded, the saving is the whole wait.

With stacks (py-spy), the user's line that takes most of making a batch is named. Where it is known to do needless work
(`dlprof explain idioms`), and no less is saved without it than with more workers, it comes first. The saving is then
that of batches that cost nothing to make, with the garbage that is collected meanwhile.

What to change, in this order: cure a line that does needless work for every sample, let worker processes load
(`num_workers`), keep them between epochs (`persistent_workers=True`), make a sample cheaper (decode smaller, cache what
is decoded, store what is read together in one file), collate whole tensors, hand over fewer bytes where pinning them is
the limit, and give the loader's processes free cores.
"""

from __future__ import annotations

from collections.abc import Sequence

from dlprof.analysis import settings
from dlprof.analysis.engine import JOB, Frame, Job, Maybe, by_rank, maybe, needs
from dlprof.analysis.estimate import LEAST_SHARE, Estimate, Explanation, Rule
from dlprof.analysis.host.stacks import hottest, hottest_own
from dlprof.analysis.input.fetch_replay import PINNING, SAMPLES
from dlprof.analysis.input.input_waits import (
    MADE_HERE,
    NOTABLE_SHARE,
    SAVES_FROM,
    FasterLoader,
    Starving,
    faster_loader,
    input_cost_ns,
    input_waits,
    starving,
)
from dlprof.analysis.input.loader import loader_means, pinning, worker_means
from dlprof.analysis.input.loader_advice import (
    CHEAPER,
    changes,
    described,
    forecasts_of,
    predicted_steps,
    recorded_waits,
)
from dlprof.analysis.source.line_shares import CostlyLine
from dlprof.analysis.step.breakdown import breakdown, part_least, part_noise
from dlprof.analysis.step.savings import own_time
from dlprof.analysis.timeline.steps import step_series
from dlprof.errors import DoesNotApply
from dlprof.units import count, duration, percent, ranks_named, size

_ASSUMED = " That the other ranks wait for a rank that waits for data was not recorded; it is assumed."


def check(
    input_waits: Frame = needs(input_waits),
    input_cost_ns: float = needs(input_cost_ns),
    starving: Starving = needs(starving),
    faster_loader: FasterLoader = needs(faster_loader),
    breakdown: Frame = needs(breakdown),
    job: Job = needs(JOB),
) -> Estimate:
    if settings.loader_alone(job):
        raise DoesNotApply("the loader alone was run, and nothing that waits for it")
    saving, cost, step = faster_loader.saving_ns, input_cost_ns, starving.step_ns
    loses = "waits for the thread that pins batches" if faster_loader.part == PINNING else "waits for data"
    ready = input_waits["taken_ns"].max() / step
    if starving.others:
        loses += f" on {ranks_named(starving.alike)}"
    if starving.others and set(starving.others) <= set(starving.victims):
        loses += f", and {'the other waits' if len(starving.others) == 1 else 'all others wait'} for it"
    if ready >= LEAST_SHARE:
        loses += f", and {percent(ready)} takes over batches that are ready"
    if saving > (1 + NOTABLE_SHARE) * cost:
        loses += ", and making it takes the cores from training"
    if saving < cost:
        loses += f"; a faster loader would save {percent(saving / step)}"
    return Estimate(
        saving_ns=saving,
        by_rank_ns=by_rank(input_waits, "wait_ns"),
        noise_ns=part_noise(breakdown, "input_wait"),
        least_ns=part_least(breakdown, "input_wait"),
        lost_ns=cost,
        within={"input_wait": min(saving, cost)},
        notable=LEAST_SHARE if cost >= NOTABLE_SHARE * step else None,
        loses=loses,
    )


def explain(
    estimate: Estimate,
    starving: Starving = needs(starving),
    faster_loader: FasterLoader = needs(faster_loader),
    step_series: Frame = needs(step_series),
    own_time: Frame = needs(own_time),
    loader_means: Maybe[Frame] = maybe(loader_means),
    worker_means: Maybe[Frame] = maybe(worker_means),
    pinning: Maybe[Frame] = maybe(pinning),
    hottest: Maybe[Frame] = maybe(hottest),
    job: Job = needs(JOB),
) -> Explanation:
    rank, plan, victims = starving.rank, faster_loader.plan, starving.victims
    held_up = _pinned(pinning, rank)
    if victims:
        who = _who_waits([*victims])
        mean = duration(sum(victims.values()) / len(victims))
        held_up += f" {who} {mean} a step for rank {starving.culprit}, which waits for its loader."
    assumed = "" if len(job.ranks) < 2 or own_time["known"].all() else _ASSUMED
    return Explanation(
        title=f"{_who_waits(starving.alike) if starving.others else 'The training loop waits'} for data",
        summary=f"Of a step of {duration(starving.step_ns)}, rank {rank} waits {duration(starving.wait_ns)} in next()"
        f" of its loader with nothing else to do; {described(starving, loader_means, worker_means)}.{held_up}"
        f"{_line(faster_loader.line) or hottest_own(hottest, rank, 'fetch' if starving.workers == 0 else 'worker')}",
        changes=tuple(changes(starving, faster_loader)),
        evidence=recorded_waits(step_series, rank) if plan is None else predicted_steps(starving, faster_loader, plan),
        forecasts=() if plan is None else forecasts_of(starving.step_ns, plan),
        sure=_sure(job, faster_loader) + assumed,
        verdict=_verdict(estimate, starving, faster_loader.line) if _is_about_it(faster_loader) else "",
        at_most=not faster_loader.workers_help,
        where=(faster_loader.line.place,) if faster_loader.line is not None and _is_about_it(faster_loader) else (),
    )


def _is_about_it(faster: FasterLoader) -> bool:
    """Return whether the first change is to the line that takes most of making a batch."""
    if faster.plan is None:
        return faster.line is not None and faster.line.idiom is not None and faster.line.idiom.first
    return faster.line_first or (not faster.workers_help and faster.part != PINNING)


def _verdict(estimate: Estimate, starving: Starving, line: CostlyLine | None) -> str:
    if line is None or not line.does:
        return ""
    return f"{percent((estimate.lost_ns or 0.0) / starving.step_ns)} of each step waits for data: {line.does}."


def _line(line: CostlyLine | None) -> str:
    if line is None:
        return ""
    around = " and the lines around it" if line.share > (line.place.share or 0.0) else ""
    return f" Of the time in which batches are made, {percent(line.share)} is in {line.shown.rstrip(',')}{around}."


def _pinned(pinning: Maybe[Frame], rank: int) -> str:
    if rank in pinning.lacking or not (pin := pinning.get().set_index("rank").loc[rank].to_dict())["known"]:
        return ""
    many, ns = float(pin["batch_bytes"]), float(pin["pin_ns"])
    of = f" ({size(many)}, {size(many / ns * 1e9)}/s)" if many > 0 else ""
    return f" One thread pins all batches, and takes {duration(ns)} for each{of}."


def _sure(job: Job, faster: FasterLoader) -> str:
    plan = faster.plan
    if plan is None:
        return (
            "Estimated as the whole wait gone, step by step over all ranks: the most that faster loading can give."
            " Workers that need more cores than are free give less."
        )
    if faster.workers_help:
        return (
            f"Predicted for {count(plan.chosen.workers, 'worker')} by replaying the recorded batches, with the host's"
            " cores and the load that they had; storage is taken to serve more readers at once as fast as these."
        )
    if faster.line_first:
        return (
            "Estimated as batches that cost nothing to make: the most that changing the line can give. With this line"
            f" alone gone, as its share of the stacks says, {duration(faster.line_ns)} is saved; by more workers alone,"
            f" {duration(plan.gain_ns)}."
        )
    other = {SAMPLES: "collating", PINNING: "making them"}.get(faster.part, "reading the samples")
    cores = ", and training with the cores that this leaves" if settings.on_cpu(job) else ""
    return (
        f"Estimated as {CHEAPER[faster.part][1]}, {other} as it is{cores}: the most that it can give. More workers"
        f" alone would give {duration(plan.gain_ns)} of it."
    )


RULE = Rule("Waiting for data", check, explain, saves_from=(*SAVES_FROM, *MADE_HERE), feeds=True, notable=NOTABLE_SHARE)


def _who_waits(ranks: Sequence[int]) -> str:
    return f"{ranks_named(ranks).capitalize()} {'waits' if len(ranks) == 1 else 'wait'}"
