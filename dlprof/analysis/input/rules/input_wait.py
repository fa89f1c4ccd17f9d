"""The training loop waits for its next batch.

A step begins with `next()` on the loader. While the training thread waits there and the device has nothing left to do,
nobody works on the model. The wait ends when the loader can make batches at least as fast as the model takes them.

Needs the wait in the loader (every step of a recorded run, or the loader's ranges in a trace) and, on a GPU, a trace
that tells when the device was idle: a wait behind which the device still computes costs nothing and is not counted. The
traced steps are replayed without the wait, the device working no sooner than its host launches.
With several ranks, a wait counts as far as no other rank is slower anyway; where all ranks' traces are here, the report
tells who waits meanwhile for the rank that waits for its data.

A batch that is ready must still be received: what `next()` takes then is not waiting for data, and not counted.

Saving: what more workers would give, predicted from the recorded batches: their fetches are replayed with n workers
beside the loop's own steps, in order, through a queue as deep as the loader's. Where fetching computes, workers and
training share the cores of the host; where it waits for storage, they do not. Where making batches cheaper would give
more than twice as much, that is the bottleneck and not the number of workers, and the saving is its: what takes longer
of a batch, its samples or collating them, costs nothing, and the other is as it was; on a CPU the cores that it takes
from training are training's again. That is the most that it can give, and the report says so: one recording cannot tell
how cheap it can become. Where batches were not recorded, the saving is the whole wait.

What to change, in this order: let worker processes load (`num_workers`), keep them between epochs
(`persistent_workers=True`), make a sample cheaper (decode smaller, cache what is decoded, store what is read together
in one file), collate whole tensors, and give the loader's processes free cores.
"""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from dlprof.analysis import settings
from dlprof.analysis.engine import Job, Maybe, by_rank
from dlprof.analysis.estimate import LEAST_SHARE, Estimate, Explanation, Rule, worst
from dlprof.analysis.host.stacks import hottest_own
from dlprof.analysis.input.fetch_replay import SAMPLES
from dlprof.analysis.input.input_waits import NOTABLE_SHARE, SAVES_FROM, FasterLoader
from dlprof.analysis.input.loader_advice import (
    CHEAPER,
    changes_by_plan,
    changes_by_rate,
    forecasts_of,
    predicted_steps,
    queue_changes,
    recorded_waits,
    settings_of_loader,
    work_of_loader,
    workers_of,
)
from dlprof.analysis.step.breakdown import part_least, part_noise
from dlprof.errors import NotMeasured
from dlprof.units import count, duration, percent


def check(
    input_waits: pd.DataFrame,
    input_cost_ns: float,
    faster_loader: FasterLoader,
    mean_step_ns: float,
    breakdown: pd.DataFrame,
    of_step: str,
    step_series: pd.DataFrame,
    own_time: pd.DataFrame,
    loader_calls: pd.DataFrame,
    blame: Maybe[pd.DataFrame],
    loader_means: Maybe[pd.DataFrame],
    worker_means: Maybe[pd.DataFrame],
    hottest: Maybe[pd.DataFrame],
    job: Job,
) -> Estimate:
    """Estimate the exposed wait of each rank, and what the job would gain by a faster loader."""
    wait, step, cost = by_rank(input_waits, "wait_ns"), mean_step_ns, input_cost_ns
    saving, ready = faster_loader.saving_ns, input_waits["taken_ns"].max() / step

    def explain() -> Explanation:
        rank, plan = worst(wait), faster_loader.plan
        workers = workers_of(loader_calls, job, rank)
        late = tuple(sorted(r for r, ns in wait.items() if ns >= wait[rank] / 2))
        culprit, victims = _victims(blame, step, late)
        some = "" if len(late) == len(job.ranks) else _listed(late)
        crowds = ", and making it takes the cores from training" if saving > (1 + NOTABLE_SHARE) * cost else ""
        if plan is None:
            changes, evidence = changes_by_rate(workers, step, job, rank, wait[rank]), recorded_waits(step_series, rank)
        else:
            changes = changes_by_plan(step, job, rank, plan, faster_loader)
            evidence = predicted_steps(step, plan, rank, faster_loader)
        return Explanation(
            title=f"{f'Rank {some}' if some else 'The training loop'} waits for data",
            summary=f"Of a step of {duration(step)}, rank {rank} waits {duration(wait[rank])} in next() of its loader"
            f" with nothing else to do; {settings_of_loader(workers, job, rank)}"
            f"{work_of_loader(loader_means, worker_means, rank)}.{_blamed(culprit, victims)}"
            f"{_hottest(workers, hottest, rank)}",
            verdict=f"{percent(cost / step)} {of_step} waits for data{f' on rank {some}' if some else ''}"
            f"{_also(job, late, victims)}{crowds}.",
            changes=(*changes, *queue_changes(workers, job, rank)),
            evidence=evidence,
            forecasts=forecasts_of(step, plan) if plan is not None and faster_loader.workers_help else (),
            sure=_sure(job, faster_loader) + _assumed(own_time, job),
        )

    return Estimate(
        saving_ns=saving,
        by_rank_ns=wait,
        noise_ns=part_noise(breakdown, "input_wait"),
        least_ns=part_least(breakdown, "input_wait"),
        lost_ns=cost,
        within={"input_wait": min(saving, cost)},
        notable=LEAST_SHARE if cost >= NOTABLE_SHARE * step else None,
        loses="waits for data"
        + (f", and {percent(ready)} takes over batches that are ready" if ready >= LEAST_SHARE else "")
        + (f"; a faster loader would save {percent(saving / step)}" if saving < cost else ""),
        explain=explain,
    )


def _victims(blame: Maybe[pd.DataFrame], step: float, late: tuple[int, ...]) -> tuple[int, dict[int, float]]:
    """Return the late rank whose loader costs others most, and how long each of them waits for it, ns a step.

    −1 and nobody where that is not known, or none waits long enough to be worth a word.
    """
    try:
        frame = blame.get()
    except NotMeasured:
        return -1, {}
    frame = frame[(frame["category"] == "input_wait") & frame["culprit"].isin(late)]
    frame = frame[frame["ns"] >= LEAST_SHARE * step]
    if not len(frame):
        return -1, {}
    culprit = int(str(frame.groupby("culprit")["ns"].sum().idxmax()))
    return culprit, by_rank(frame[frame["culprit"] == culprit], "ns")


def _blamed(culprit: int, victims: Mapping[int, float]) -> str:
    if not victims:
        return ""
    who = f"Rank {next(iter(victims))} waits" if len(victims) == 1 else f"Ranks {_listed(tuple(victims))} wait"
    mean = duration(sum(victims.values()) / len(victims))
    return f" {who} {mean} a step for rank {culprit}, which waits for its loader."


def _also(job: Job, late: tuple[int, ...], victims: Mapping[int, float]) -> str:
    others = set(job.ranks) - set(late)
    if not others or not others <= set(victims):
        return ""
    return f", and {'the other waits' if len(others) == 1 else 'all others wait'} for it"


def _sure(job: Job, faster: FasterLoader) -> str:
    plan = faster.plan
    if plan is None:
        return (
            "Estimated as the whole wait gone, step by step over all ranks: the most that faster loading can give."
            " Workers that need more cores than are free give less."
        )
    if not faster.workers_help:
        other = "collating" if faster.part == SAMPLES else "reading the samples"
        cores = ", and training with the cores that this leaves" if settings.on_cpu(job) else ""
        return (
            f"Estimated as {CHEAPER[faster.part][1]}, {other} as it is{cores}: the most that it can give. More workers"
            f" alone would give {duration(plan.gain_ns)} of it."
        )
    return (
        f"Predicted for {count(plan.chosen.workers, 'worker')} by replaying the recorded batches, with the host's cores"
        " and the load that they had; storage is taken to serve more readers at once as fast as these."
    )


def _assumed(own_time: pd.DataFrame, job: Job) -> str:
    if len(job.ranks) < 2 or own_time["known"].all():
        return ""
    return " That the other ranks wait for a rank that waits for data was not recorded; it is assumed."


def _listed(ranks: tuple[int, ...]) -> str:
    few = ", ".join(map(str, ranks[:8]))
    return few if len(ranks) <= 8 else f"{few} and {len(ranks) - 8} more"


def _hottest(workers: int | None, hottest: Maybe[pd.DataFrame], rank: int) -> str:
    """Say where the loader was seen most, where stacks were recorded."""
    who, doing = ("the training thread", "fetch") if workers == 0 else ("its workers", "worker")
    most = hottest_own(hottest, rank, doing)
    return f" Of the stacks of {who}{' in there' if doing == 'fetch' else ''}, {most}." if most else ""


RULE = Rule(
    "input_wait",
    "Waiting for data",
    check,
    saves_from=SAVES_FROM,
    feeds=True,
    notable=NOTABLE_SHARE,
)
