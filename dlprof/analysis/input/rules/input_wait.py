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

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

import pandas as pd

from dlprof.analysis import settings
from dlprof.analysis.engine import Job, Maybe, by_rank
from dlprof.analysis.estimate import LEAST_SHARE, Estimate, Explanation, Rule, change, worst
from dlprof.analysis.host.stacks import hottest_own
from dlprof.analysis.input.loader import gained
from dlprof.analysis.input.workers import COLLATING, SAMPLES, Plan, costly, freed_by_cheaper, planned, step_with_cheaper
from dlprof.analysis.step.breakdown import part, part_least, part_noise
from dlprof.analysis.step.headroom import room
from dlprof.analysis.step.savings import saving_input
from dlprof.errors import NotMeasured
from dlprof.result import Change, Forecast, Panel
from dlprof.units import count, duration, percent

# From here on a wait is worth a change: XProf's input pipeline analyzer and the TensorBoard plugin say 5 %.
NOTABLE_SHARE = 0.05

# More workers are what is missing where they give the larger part of what there is to gain.
LARGER_PART = 0.5

# Workers that compute slow everything that computes beside them, and who waits for data launches late.
_SAVES_FROM = ("computation", "communication", "input_wait", "optimizer_host", "host", "launch_latency", "other")

MOST_BARS = 60
MOST_ROWS = 12

# What to change where a part of making batches takes longest, and how it is told in the table.
_CHEAPER: Mapping[str, tuple[str, str]] = {
    SAMPLES: ("make a sample cheaper, or cache what is decoded", "samples that cost nothing"),
    COLLATING: (
        "collate whole tensors (`torch.stack`), not number by number in Python",
        "collating that costs nothing",
    ),
}


@dataclass(frozen=True)
class _Cure:
    """What takes the wait away, and what that saves: more workers, or where these do not help a cheaper `part`."""

    saving_ns: float
    plan: Plan | None = None  # None: the batches were not recorded
    helps: bool = False  # whether it is the plan's workers
    part: str = SAMPLES


def check(
    loader_calls: Maybe[pd.DataFrame],
    before_forward: Maybe[tuple[int, float] | None],
    mean_step_ns: Maybe[float],
    breakdown: Maybe[pd.DataFrame],
    fetch_gains: Maybe[pd.DataFrame],
    loader_means: Maybe[pd.DataFrame],
    step_series: Maybe[pd.DataFrame],
    own_time: Maybe[pd.DataFrame],
    step_means: Maybe[pd.DataFrame],
    fetch_series: Maybe[pd.DataFrame],
    blame: Maybe[pd.DataFrame],
    worker_means: Maybe[pd.DataFrame],
    hottest: Maybe[pd.DataFrame],
    of_step: Maybe[str],
    job: Job,
) -> Estimate:
    """Estimate the exposed wait of each rank, and what the job would gain by a faster loader."""
    calls = loader_calls.get().set_index("rank")
    if not calls["calls"].sum():
        raise NotMeasured(_no_loader(before_forward.get(), mean_step_ns))
    wait, taken = _waits(breakdown.get(), fetch_gains, loader_means)
    step = mean_step_ns.get()
    cost = min(
        saving_input(step_series.get(), own_time.get(), wait),
        room(breakdown.get(), ("input_wait",) if settings.on_cpu(job) else _SAVES_FROM),
    )
    # It is the wait that must be worth a change. What takes it away is predicted then only: that is dear.
    long = cost >= NOTABLE_SHARE * step
    cure = (
        _cure(
            loader_means,
            step_means,
            fetch_series,
            step_series,
            breakdown,
            fetch_gains,
            own_time,
            mean_step_ns,
            job,
            wait,
            cost,
        )
        if long
        else _Cure(cost)
    )
    ready = max(taken.values()) / step
    return Estimate(
        saving_ns=cure.saving_ns,
        by_rank_ns=wait,
        noise_ns=part_noise(breakdown.get(), "input_wait"),
        least_ns=part_least(breakdown.get(), "input_wait"),
        lost_ns=cost,
        within={"input_wait": min(cure.saving_ns, cost)},
        notable=LEAST_SHARE if long else None,
        loses="waits for data"
        + (f", and {percent(ready)} takes over batches that are ready" if ready >= LEAST_SHARE else "")
        + (f"; a faster loader would save {percent(cure.saving_ns / step)}" if cure.saving_ns < cost else ""),
        explain=lambda: _explain(
            mean_step_ns,
            blame,
            loader_calls,
            loader_means,
            worker_means,
            hottest,
            of_step.get(),
            step_series,
            own_time,
            job,
            wait,
            cost,
            cure,
        ),
    )


def _cure(
    loader_means: Maybe[pd.DataFrame],
    step_means: Maybe[pd.DataFrame],
    fetch_series: Maybe[pd.DataFrame],
    step_series: Maybe[pd.DataFrame],
    breakdown: Maybe[pd.DataFrame],
    fetch_gains: Maybe[pd.DataFrame],
    own_time: Maybe[pd.DataFrame],
    mean_step_ns: Maybe[float],
    job: Job,
    wait: Mapping[int, float],
    cost: float,
) -> _Cure:
    rank = worst(wait)
    plan = planned(
        loader_means, step_means, fetch_series, step_series, breakdown, fetch_gains, own_time, job, wait, rank
    )
    if plan is None:
        return _Cure(cost)
    part = costly(loader_means.get(), step_means.get(), fetch_series.get(), step_series.get(), breakdown, job, rank)
    gain = max(
        _gain_of_cheaper(
            mean_step_ns,
            own_time,
            loader_means,
            step_means,
            fetch_series,
            step_series,
            breakdown,
            fetch_gains,
            job,
            wait,
            rank,
            part,
        ),
        plan.gain_ns,
    )
    helps = plan.gain_ns >= max(NOTABLE_SHARE * mean_step_ns.get(), LARGER_PART * gain)
    return _Cure(plan.gain_ns if helps else gain, plan, helps, part)


def _explain(
    mean_step_ns: Maybe[float],
    blame: Maybe[pd.DataFrame],
    loader_calls: Maybe[pd.DataFrame],
    loader_means: Maybe[pd.DataFrame],
    worker_means: Maybe[pd.DataFrame],
    hottest: Maybe[pd.DataFrame],
    of_step: str,
    step_series: Maybe[pd.DataFrame],
    own_time: Maybe[pd.DataFrame],
    job: Job,
    wait: Mapping[int, float],
    cost: float,
    cure: _Cure,
) -> Explanation:
    rank, step, plan = worst(wait), mean_step_ns.get(), cure.plan
    late = tuple(sorted(r for r, ns in wait.items() if ns >= wait[rank] / 2))
    culprit, victims = _victims(blame, mean_step_ns, late)
    some = "" if len(late) == len(job.ranks) else _listed(late)
    crowds = ", and making it takes the cores from training" if cure.saving_ns > (1 + NOTABLE_SHARE) * cost else ""
    return Explanation(
        title=f"{f'Rank {some}' if some else 'The training loop'} waits for data",
        summary=f"Of a step of {duration(step)}, rank {rank} waits {duration(wait[rank])} in next() of its loader"
        f" with nothing else to do; {_settings(loader_calls, job, rank)}"
        f"{_seen(loader_means, worker_means, rank)}.{_blamed(culprit, victims)}"
        f"{_hottest(loader_calls, hottest, job, rank)}",
        verdict=f"{percent(cost / step)} {of_step} waits for data{f' on rank {some}' if some else ''}"
        f"{_also(job, late, victims)}{crowds}.",
        changes=(
            *(
                _changes(loader_calls, mean_step_ns.get(), job, rank, wait[rank])
                if plan is None
                else _planned(mean_step_ns.get(), job, rank, plan, cure)
            ),
            *_queue_changes(loader_calls, job, rank),
        ),
        evidence=_evidence(step_series.get(), rank)
        if plan is None
        else _predictions(mean_step_ns.get(), plan, rank, cure),
        forecasts=_forecasts(mean_step_ns.get(), plan) if plan is not None and cure.helps else (),
        sure=_sure(job, cure) + _assumed(own_time, job),
    )


def _waits(
    breakdown: pd.DataFrame, fetch_gains: Maybe[pd.DataFrame], loader_means: Maybe[pd.DataFrame]
) -> tuple[dict[int, float], dict[int, float]]:
    """Return what each rank's wait for data costs the mean steady step, ns, and what of it takes over ready batches.

    That is its exposed wait; with a device, what its own step would be shorter by without it.
    """
    wait = part(breakdown, "input_wait")
    if not fetch_gains.lacking:
        frame = fetch_gains.get()
        wait = wait | by_rank(frame[frame["left"] == 0], "gain_ns")
    try:
        takes = by_rank(loader_means.get().dropna(subset="taken_ns"), "taken_ns")
    except NotMeasured:
        takes = {}
    taken = {r: min(takes.get(r, 0.0), ns) for r, ns in wait.items()}
    return {r: ns - taken[r] for r, ns in wait.items()}, taken


def _gain_of_cheaper(
    mean_step_ns: Maybe[float],
    own_time: Maybe[pd.DataFrame],
    loader_means: Maybe[pd.DataFrame],
    step_means: Maybe[pd.DataFrame],
    fetch_series: Maybe[pd.DataFrame],
    step_series: Maybe[pd.DataFrame],
    breakdown: Maybe[pd.DataFrame],
    fetch_gains: Maybe[pd.DataFrame],
    job: Job,
    wait: Mapping[int, float],
    rank: int,
    part: str,
) -> float:
    """Return what the run gains where a part of making batches costs nothing, ns.

    On a GPU's host it is waiting alone: what the host computes beside a busy GPU costs no time. So it is where not all
    ranks' batches were recorded: they are taken to be like this rank's.
    """
    if settings.on_cpu(job):
        with suppress(NotMeasured):
            return float(
                mean_step_ns.get()
                - step_with_cheaper(
                    own_time.get(), loader_means, step_means.get(), fetch_series, step_series, breakdown, job, part
                )
            )
    freed = freed_by_cheaper(
        loader_means.get(), step_means.get(), fetch_series.get(), step_series.get(), breakdown, job, rank, part
    )
    return saving_input(
        step_series.get(), own_time.get(), {r: gained(fetch_gains, r, ns, freed) for r, ns in wait.items()}
    )


def _victims(
    blame: Maybe[pd.DataFrame], mean_step_ns: Maybe[float], late: tuple[int, ...]
) -> tuple[int, dict[int, float]]:
    """Return the late rank whose loader costs others most, and how long each of them waits for it, ns a step.

    −1 and nobody where that is not known, or none waits long enough to be worth a word.
    """
    try:
        frame = blame.get()
    except NotMeasured:
        return -1, {}
    frame = frame[(frame["category"] == "input_wait") & frame["culprit"].isin(late)]
    frame = frame[frame["ns"] >= LEAST_SHARE * mean_step_ns.get()]
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


def _no_loader(before_forward: tuple[int, float] | None, mean_step_ns: Maybe[float]) -> str:
    if before_forward is None:
        return "no DataLoader was seen; data that comes in another way shows as the host's time"
    rank, ns = before_forward
    return (
        f"no DataLoader was seen; {duration(ns)} of each step ({percent(ns / mean_step_ns.get())}) pass on rank {rank}"
        " before the first forward, in no loader that dlprof knows: if data comes in there, it shows as the host's time"
    )


def _sure(job: Job, cure: _Cure) -> str:
    plan = cure.plan
    if plan is None:
        return (
            "Estimated as the whole wait gone, step by step over all ranks: the most that faster loading can give."
            " Workers that need more cores than are free give less."
        )
    if not cure.helps:
        other = "collating" if cure.part == SAMPLES else "reading the samples"
        cores = ", and training with the cores that this leaves" if settings.on_cpu(job) else ""
        return (
            f"Estimated as {_CHEAPER[cure.part][1]}, {other} as it is{cores}: the most that it can give. More workers"
            f" alone would give {duration(plan.gain_ns)} of it."
        )
    return (
        f"Predicted for {count(plan.chosen.workers, 'worker')} by replaying the recorded batches, with the host's cores"
        " and the load that they had; storage is taken to serve more readers at once as fast as these."
    )


def _workers_to(n: int, now: int, text: str) -> Change:
    """Return the change to n workers; who had none keeps the new ones between epochs."""
    if now:
        return change(f"`num_workers={n}` (is {now}){text}", num_workers=(now, n))
    return change(
        f"`num_workers={n}, persistent_workers=True` (num_workers is 0){text}",
        num_workers=(0, n),
        persistent_workers=(False, True),
    )


def _planned(mean_step_ns: float, job: Job, rank: int, plan: Plan, cure: _Cure) -> Iterator[Change]:
    now, then = plan.now, plan.chosen
    predicted = f": a step of {duration(mean_step_ns - plan.gain_ns)} is predicted"
    if not cure.helps:
        cores = settings.cores_per_rank(job, rank)
        there = f": a rank has {count(cores, 'core')}" if cores else ""
        less = then.workers > now.workers and then.step_ns < now.step_ns * (1 - NOTABLE_SHARE / 2)
        yield change(f"{_CHEAPER[cure.part][0]}; more workers would {'give less' if less else 'not help'}{there}")
        if less:
            yield _workers_to(then.workers, now.workers, f" alone{predicted}")
        return
    yield _workers_to(then.workers, now.workers, predicted)
    left = max(then.wait_ns, 0.0)
    slower = then.step_ns - left - (now.step_ns - now.wait_ns)
    if slower > 0.05 * then.step_ns:
        yield change(
            f"make a sample cheaper, or cache what is decoded: the workers take {duration(slower)} a step from"
            " training, which needs the same cores"
        )
    if left > 0.05 * then.step_ns:
        yield change(f"{duration(left)} of waiting is then left: only cheaper samples take that away")


def _forecasts(mean_step_ns: float, plan: Plan) -> tuple[Forecast, ...]:
    gains = _gains(plan)
    return tuple(Forecast("num_workers", str(n), mean_step_ns - gain) for n, gain in sorted(gains.items()))


def _gains(plan: Plan) -> dict[int, float]:
    """Return what the run gains with each number of workers, ns: as the worst rank does, of which more is known."""
    best = plan.now.step_ns - plan.chosen.step_ns
    of_it = plan.gain_ns / best if best > 0 else 1.0
    return {f.workers: of_it * (plan.now.step_ns - f.step_ns) for f in plan.forecasts[1:]}


def _predictions(mean_step_ns: float, plan: Plan, rank: int, cure: _Cure) -> Panel:
    """Show the predicted steps; where workers do not help, also the one with cheaper batches."""
    shown, gains = {f.workers: f for f in plan.forecasts}, _gains(plan)
    near = [n for n in sorted(shown) if n <= plan.chosen.workers + 2 or n == plan.now.workers]
    marks = {plan.now.workers: " (is)"}
    if cure.helps:
        marks[plan.chosen.workers] = marks.get(plan.chosen.workers, "") + " (proposed)"
    rows: list[tuple[str, float, float | None]] = [
        (f"{n}{marks.get(n, '')}", mean_step_ns - gains.get(n, 0.0), max(shown[n].wait_ns, 0.0))
        for n in (near if len(near) <= MOST_ROWS else [near[0], *near[1 - MOST_ROWS :]])
    ]
    if not cure.helps:
        rows.append((_CHEAPER[cure.part][1], mean_step_ns - cure.saving_ns, None))
    columns = ("num_workers", "mean step_ns", f"rank {rank} waits for data_ns", "speed_times")
    told = tuple((*row, mean_step_ns / row[1]) for row in rows)
    return Panel("table", "Predicted step by number of loader workers", told, columns)


def _seen(loader_means: Maybe[pd.DataFrame], worker_means: Maybe[pd.DataFrame], rank: int) -> str:
    """Say what the queue and the workers were seen to do; "" where that was not recorded."""
    try:
        means, workers = loader_means.get(), worker_means.get()
    except NotMeasured:
        return ""
    means, workers = means[means["rank"] == rank], workers[workers["rank"] == rank]
    if not len(means) or not len(workers):
        return ""
    told = ""
    # Batches that are there before their turn fill it as well, and the one that is waited for may be missing.
    empty = int(means["empty"].iloc[0])
    if empty > 0:
        of_all = count(int(means["batches"].iloc[0]), "batch")
        told = f"; the queue was empty for {empty} of {of_all}"
    n = workers["batches"] / workers["batches"].sum()
    fetch, cpu = float((workers["dur_ns"] * n).sum()), float((workers["cpu_ns"] * n).sum(skipna=False))
    of_it = f", {duration(cpu)} of it computing" if math.isfinite(cpu) else ""
    who = "a worker" if (workers["worker"] >= 0).all() else "it"
    collating = float((workers["collate_ns"] * n).sum(skipna=False))
    if 2 * collating > fetch:
        of_it += f", {duration(collating)} of it collating"
    return f"{told}; {who} takes {duration(fetch)} for a batch{of_it}"


def _assumed(own_time: Maybe[pd.DataFrame], job: Job) -> str:
    if len(job.ranks) < 2 or own_time.get()["known"].all():
        return ""
    return " That the other ranks wait for a rank that waits for data was not recorded; it is assumed."


def _listed(ranks: tuple[int, ...]) -> str:
    few = ", ".join(map(str, ranks[:8]))
    return few if len(ranks) <= 8 else f"{few} and {len(ranks) - 8} more"


def _hottest(loader_calls: Maybe[pd.DataFrame], hottest: Maybe[pd.DataFrame], job: Job, rank: int) -> str:
    """Say where the loader was seen most, where stacks were recorded."""
    who, doing = (
        ("the training thread", "fetch") if _workers(loader_calls, job, rank) == 0 else ("its workers", "worker")
    )
    most = hottest_own(hottest, rank, doing)
    return f" Of the stacks of {who}{' in there' if doing == 'fetch' else ''}, {most}." if most else ""


def _workers(loader_calls: Maybe[pd.DataFrame], job: Job, rank: int) -> int | None:
    said = settings.training_loader(job, rank).get("num_workers")
    if isinstance(said, int):
        return said
    # A trace without settings still names the iterator, and one of the two has no workers.
    single = loader_calls.get().set_index("rank")["in_process"].get(rank)
    return 0 if single else None


def _settings(loader_calls: Maybe[pd.DataFrame], job: Job, rank: int) -> str:
    workers = _workers(loader_calls, job, rank)
    if workers == 0:
        return "batches are made in the training thread (num_workers=0)"
    if workers is None:
        return "worker processes load"
    batch = settings.training_loader(job, rank).get("batch_size")
    what = f"batches of {batch}" if batch else "its batches"
    return f"{count(workers, 'worker')} load{'s' if workers == 1 else ''} {what}"


def _changes(
    loader_calls: Maybe[pd.DataFrame], mean_step_ns: float, job: Job, rank: int, wait: float
) -> Iterator[Change]:
    workers, cores = _workers(loader_calls, job, rank), settings.cores_per_rank(job, rank)
    busy = max(mean_step_ns - wait, 1.0)
    if workers is None:
        yield change("more `num_workers`, `persistent_workers=True`", persistent_workers=(None, True))
    elif workers == 0:
        # One worker makes a batch in the time that the training thread waits now, so wait ÷ busy of them keep up with
        # the rest; never only one, or each slow batch stalls the step.
        need = max(2, math.ceil(wait / busy))
        most = max(1, (cores or need + 1) - 1)
        yield _workers_to(min(need, most), 0, "")
        if cores and need > most:
            there = f"a rank has {count(cores, 'core')}"
            yield change(f"make a sample cheaper: {need} workers would hide it all, and {there}")
    else:
        need = math.ceil(workers * mean_step_ns / busy)
        if cores is None or need <= cores:
            yield _workers_to(need, workers, ": the rate grows with the workers while cores are free")
        else:
            yield change(
                f"make a sample cheaper, or cache what is decoded: {need} workers would be needed (is {workers}),"
                f" and a rank has {count(cores, 'core')}"
            )


def _queue_changes(loader_calls: Maybe[pd.DataFrame], job: Job, rank: int) -> Iterator[Change]:
    loader = settings.training_loader(job, rank)
    if _workers(loader_calls, job, rank) and loader.get("persistent_workers") is False:
        yield change(
            "`persistent_workers=True` (is False): workers start anew each epoch", persistent_workers=(False, True)
        )
    if _workers(loader_calls, job, rank) and loader.get("prefetch_factor") == 1:
        yield change("`prefetch_factor=2` or more (is 1): one slow sample stalls the queue", prefetch_factor=(1, 2))


def _evidence(step_series: pd.DataFrame, rank: int) -> Panel:
    mine = step_series[
        (step_series["rank"] == rank) & step_series["steady"].astype(bool) & (step_series["fetch_ns"] >= 0)
    ].tail(MOST_BARS)
    rows = tuple((f"step {s}", float(w), "input_wait") for s, w in zip(mine["step"], mine["fetch_ns"], strict=True))
    steps = "one steady step" if len(rows) == 1 else f"the last {len(rows)} steady steps"
    return Panel("bars", f"Wait in next() on rank {rank}, {steps}", rows, unit="ns")


RULE = Rule(
    "input_wait",
    "Waiting for data",
    check,
    saves_from=_SAVES_FROM,
    feeds=True,
    notable=NOTABLE_SHARE,
)
