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
that of batches that cost nothing to make, with the garbage that is collected meanwhile. So does keeping the samples,
where it is not known what that line does: a few samples are looked at each time that they are made, and if all are the
same in every epoch, fit into half of the memory that is left, and take ten times as long as to copy them, to make them
once is enough.

A worker that sends a part of a larger tensor copies the whole storage that it is a part of (`dlprof explain
needless_workers`, which tells of it on a CPU). Where a batch is copied with at least four times the bytes that it
holds, and a megabyte more, and that takes at least half of the time that waiting costs, the saving is that of copying
no more than it holds: a bound. To `.clone()` the part is then the first change.

What to change, in this order: cure a line that does needless work for every sample, keep samples that are always the
same, let worker processes load (`num_workers`, with `persistent_workers=True` where there were none), make a sample
cheaper (decode smaller, cache what is decoded, store what is read together in one file), collate whole tensors, hand
over fewer bytes where pinning them is the limit, and give the loader's processes free cores.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from dlprof.analysis import settings
from dlprof.analysis.engine import JOB, Frame, Job, Maybe, by_rank, maybe, needs
from dlprof.analysis.estimate import LEAST_SHARE, Estimate, Explanation, Rule
from dlprof.analysis.host.stacks import hottest, hottest_own
from dlprof.analysis.idioms import FILTERED, LOOPS
from dlprof.analysis.input.fetch_replay import COLLATING, PINNING, SAMPLES
from dlprof.analysis.input.input_waits import (
    LARGER_PART,
    MADE_HERE,
    NOTABLE_SHARE,
    SAVES_FROM,
    CopiedStorages,
    FasterLoader,
    Plan,
    Starving,
    copied_storages,
    faster_loader,
    input_cost_ns,
    input_waits,
    starving,
)
from dlprof.analysis.input.loader import loader_means, pinning, worker_means
from dlprof.analysis.source.line_shares import CostlyLine
from dlprof.analysis.source.rewrites import KEEP
from dlprof.analysis.step.breakdown import breakdown, part_least, part_noise
from dlprof.analysis.step.savings import own_time
from dlprof.analysis.timeline.steps import step_series
from dlprof.errors import DoesNotApply
from dlprof.result import Change, Forecast, Panel, Place, change
from dlprof.units import count, duration, percent, ranks_named, size

MOST_BARS = 60
MOST_ROWS = 12

# What to change where a part of making batches takes longest, and what it is called in the table.
CHEAPER: Mapping[str, tuple[str, str]] = {
    SAMPLES: ("make a sample cheaper, or cache what is decoded", "samples that cost nothing"),
    COLLATING: (
        "collate whole tensors (`torch.stack`), not number by number in Python",
        "collating that costs nothing",
    ),
    PINNING: (
        "hand over fewer bytes: samples as they are stored (`uint8` for pictures), converted on the device",
        "batches that cost nothing to pin",
    ),
}


def described(starving: Starving, loader_means: Maybe[pd.DataFrame], worker_means: Maybe[pd.DataFrame]) -> str:
    """Say who makes the batches, and what the queue and the workers were seen to do, as far as that was recorded."""
    if starving.workers == 0:
        who = "batches are made in the training thread (num_workers=0)"
    elif starving.workers is None:
        who = "worker processes load"
    else:
        batch = starving.loader.get("batch_size")
        loads = f"load{'s' if starving.workers == 1 else ''} {f'batches of {batch}' if batch else 'its batches'}"
        who = f"{count(starving.workers, 'worker')} {loads}"
    means, workers = (
        pd.DataFrame({"rank": []}) if (frame := need.or_none()) is None else frame[frame["rank"] == starving.rank]
        for need in (loader_means, worker_means)
    )
    if not len(means) or not len(workers):
        return who
    # Batches that are there before their turn fill the queue as well, and the one that is waited for may be missing.
    if (empty := int(means["empty"].iloc[0])) > 0:
        who += f"; the queue was empty for {empty} of {count(int(means['batches'].iloc[0]), 'batch')}"
    share = workers["batches"] / workers["batches"].sum()
    fetch, cpu, collating = (float((workers[c] * share).sum(skipna=False)) for c in ("dur_ns", "cpu_ns", "collate_ns"))
    who += f"; {'a worker' if (workers['worker'] >= 0).all() else 'it'} takes {duration(fetch)} for a batch"
    if math.isfinite(cpu):
        sends = cpu > fetch and starving.workers
        who += f", and computes {duration(cpu)} with sending it" if sends else f", {duration(cpu)} of it computing"
    return who + (f", {duration(collating)} of it collating" if 2 * collating > fetch else "")


def cheaper(starving: Starving, faster: FasterLoader) -> str:
    """Say how a batch gets cheaper: by the line that takes most of making it, where that is known."""
    if faster.line is None or faster.part == PINNING:
        return CHEAPER[faster.part][0]
    if (kept := faster.kept) is not None:
        workers = " (then with `persistent_workers=True`)" if starving.workers else ""
        once = (
            f"{KEEP}, in `__init__` or at its first `__getitem__`{workers}: every epoch has the same samples (the"
            f" {kept.again:,} that were looked at were), and the {kept.samples:,} take {size(kept.size)}"
        )
        if _unknown(faster):
            return f"{once}; {faster.line.shown.rstrip(',')} takes most of a sample"
        return f"{faster.line.advice()}; or {once}"
    return faster.line.advice("make a sample cheaper, or keep what was made, at")


def changes(starving: Starving, faster: FasterLoader) -> Iterator[Change]:
    """Propose what makes the loader faster, then settings of its queue that cost nothing."""
    yield from _by_rate(starving, faster) if faster.plan is None else _by_plan(starving, faster, faster.plan)
    if starving.workers and starving.loader.get("prefetch_factor") == 1:
        yield change("`prefetch_factor=2` or more (is 1): one slow sample stalls the queue", prefetch_factor=(1, 2))


def _by_rate(starving: Starving, faster: FasterLoader) -> Iterator[Change]:
    """Propose as many workers as keep up with the rest of the step, where no batch was recorded."""
    samples = cheaper(starving, faster)
    workers, cores, busy = starving.workers, starving.cores, max(starving.step_ns - starving.wait_ns, 1.0)
    if _is_about_it(faster):
        yield change(samples)
        samples = "cheaper samples"
    if workers is None:
        # No setting is proposed: to keep the workers between epochs alone is no cure of a loader that is too slow.
        yield change("more `num_workers`, and `persistent_workers=True`")
    elif workers == 0:
        # One worker makes a batch in the time that the training thread waits now, so wait ÷ busy of them keep up with
        # the rest; never only one, or each slow batch stalls the step.
        if cores and starving.threads >= cores:
            taken = f"training computes on all {count(cores, 'core')} of a rank, and a worker would take one from it"
            yield change(f"{samples}: {taken}")
            return
        need = max(2, math.ceil(starving.wait_ns / busy))
        most = max(1, (cores or need + 1) - 1)
        yield _workers_to(min(need, most), 0, "")
        if cores and need > most:
            there = f"a rank has {count(cores, 'core')}"
            yield change(f"{samples}: {need} workers would hide it all, and {there}")
    else:
        need = math.ceil(workers * starving.step_ns / busy)
        if cores is None or need <= cores:
            yield _workers_to(need, workers, ": the rate grows with the workers while cores are free")
        else:
            needed = f"{need} workers would be needed (is {workers}), and a rank has {count(cores, 'core')}"
            yield change(f"{samples}: {needed}")


def _by_plan(starving: Starving, faster: FasterLoader, plan: Plan) -> Iterator[Change]:
    """Propose the workers of a plan, or cheaper batches where these do not help."""
    now, then = plan.now, plan.chosen
    predicted = f": a step of {duration(starving.step_ns - plan.gain_ns)} is predicted"
    samples = cheaper(starving, faster)
    if faster.line_first:
        rest = duration(max(starving.step_ns - faster.line_ns, 0.0))
        # With workers that live for one epoch alone, each makes its samples again.
        kept = faster.kept is not None and starving.loader.get("persistent_workers") is False and starving.workers
        lives: Any = {"persistent_workers": (False, True)} if kept else {}
        without = "with samples that cost nothing to make" if faster.kept else "without this line alone"
        yield change(f"{samples}; {without} a step of {rest} is left", **lives)
        if plan.gain_ns >= NOTABLE_SHARE * starving.step_ns and then.workers > now.workers:
            yield _workers_to(then.workers, now.workers, f" alone{predicted}")
        return
    if not faster.workers_help:
        cores = f": a rank has {count(starving.cores, 'core')}" if starving.cores else ""
        there = ": one thread pins the batches of all of them" if faster.part == PINNING else cores
        gives = then.workers > now.workers and then.step_ns < now.step_ns * (1 - NOTABLE_SHARE / 2)
        if gives and not plan.sure:
            yield change(
                f"{samples}; whether more workers help is not known: training or other programs may need the same cores"
            )
            return
        yield change(f"{samples}; more workers would {'give less' if gives else 'not help'}{there}")
        if gives:
            yield _workers_to(then.workers, now.workers, f" alone{predicted}")
        return
    left = max(then.wait_ns, 0.0)
    if left > 0.05 * then.step_ns:
        # They use up one batch, and get wait ÷ step less than one back.
        ahead = then.workers * int(starving.loader.get("prefetch_factor") or 2) * then.step_ns / left
        predicted += f" ({duration(then.step_ns - left)} for some {ahead:.0f} steps at first, from what is made ahead)"
    yield _workers_to(then.workers, now.workers, predicted)
    slower = then.step_ns - left - (now.step_ns - now.wait_ns)
    if slower > 0.05 * then.step_ns:
        taken = f"the workers take {duration(slower)} a step from training, which needs the same cores"
        yield change(f"{samples}: {taken}")
    if left > 0.05 * then.step_ns:
        yield change(f"{duration(left)} of waiting is then left: only cheaper samples remove it")


def _workers_to(n: int, now: int, text: str) -> Change:
    """Return the change to n workers; a loader that had none keeps the new ones between epochs."""
    if now:
        return change(f"`num_workers={n}` (is {now}){text}", num_workers=(now, n))
    proposed = f"`num_workers={n}, persistent_workers=True` (num_workers is 0){text}"
    return change(proposed, num_workers=(0, n), persistent_workers=(False, True))


def predicted_steps(starving: Starving, faster: FasterLoader, plan: Plan) -> Panel:
    """Show the predicted steps; where workers do not help, also the one with cheaper batches."""
    step_ns, now, chosen = starving.step_ns, plan.now.workers, plan.chosen.workers
    waits = {f.workers: max(f.wait_ns, 0.0) for f in plan.forecasts}
    near = [n for n in sorted(waits) if n <= chosen + 2 or n == now]
    near = near if len(near) <= MOST_ROWS else [near[0], *near[1 - MOST_ROWS :]]
    marks = {
        n: (" (is)" if n == now else "") + (" (proposed)" if n == chosen and faster.workers_help else "") for n in near
    }
    rows: list[tuple[str, float, float | None]]
    rows = [(f"{n}{marks[n]}", step_ns - plan.gains.get(n, 0.0), waits[n]) for n in near]
    if not faster.workers_help:
        without = "batches that cost nothing to make" if faster.line_first else CHEAPER[faster.part][1]
        rows.append((without, step_ns - faster.saving_ns, None))
    columns = ("num_workers", "mean step_ns", f"rank {starving.rank} waits for data_ns", "speed_times")
    with_speed = tuple((*row, step_ns / row[1]) for row in rows)
    return Panel("table", "Predicted step by number of loader workers", with_speed, columns)


def recorded_waits(step_series: pd.DataFrame, rank: int) -> Panel:
    """Show how long a rank waited for data in each of the last steady steps."""
    mine = step_series[(step_series["rank"] == rank) & step_series["steady"].astype(bool)]
    mine = mine[mine["fetch_ns"] >= 0].tail(MOST_BARS)
    rows = tuple((f"step {s}", float(w), "input_wait") for s, w in zip(mine["step"], mine["fetch_ns"], strict=True))
    steps = "one steady step" if len(rows) == 1 else f"the last {len(rows)} steady steps"
    return Panel("bars", f"Wait in next() on rank {rank}, {steps}", rows, unit="ns")


def forecasts_of(step_ns: float, plan: Plan) -> tuple[Forecast, ...]:
    """Return the mean step that is predicted for each number of workers."""
    return tuple(Forecast("num_workers", str(n), step_ns - gain) for n, gain in sorted(plan.gains.items()))


_ASSUMED = " That the other ranks wait for a rank that waits for data was not recorded; it is assumed."


def check(
    input_waits: Frame = needs(input_waits),
    input_cost_ns: float = needs(input_cost_ns),
    starving: Starving = needs(starving),
    faster_loader: FasterLoader = needs(faster_loader),
    breakdown: Frame = needs(breakdown),
    copied_storages: Maybe[CopiedStorages] = maybe(copied_storages),
    job: Job = needs(JOB),
) -> Estimate:
    if settings.loader_alone(job):
        raise DoesNotApply("the loader alone was run, and nothing that waits for it")
    saving, cost, step = faster_loader.saving_ns, input_cost_ns, starving.step_ns
    copied = copied_storages.or_none()
    if copied is not None and copied.gain_ns < LARGER_PART * saving:
        copied = None
    if copied is not None and copied.of_cores and cost >= NOTABLE_SHARE * step:
        raise DoesNotApply("its workers copy whole storages, of which samples are parts: needless_workers tells of it")
    saving = saving if copied is None else min(copied.gain_ns, cost)
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
        seen=copied,
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
    copied: CopiedStorages | None = estimate.seen
    doing = "fetch" if starving.workers == 0 else "worker"
    summary = (
        f"Of a step of {duration(starving.step_ns)}, rank {rank} waits {duration(starving.wait_ns)} in next()"
        f" of its loader with nothing else to do; {described(starving, loader_means, worker_means)}.{held_up}"
    )
    if copied is not None:
        return Explanation(
            title="Waiting for workers that copy whole storages",
            summary=f"{summary} {copied.found}",
            changes=(change(copied.remedy), *changes(starving, faster_loader)),
            evidence=recorded_waits(step_series, rank),
            sure="Estimated as waiting for no more copying than of what a batch holds: the most that it can give.",
            at_most=True,
            where=copied.parts,
        )
    return Explanation(
        title=f"{_who_waits(starving.alike) if starving.others else 'The training loop waits'} for data",
        summary=summary + (_line(faster_loader.line) or hottest_own(hottest, rank, doing)),
        changes=tuple(changes(starving, faster_loader)),
        evidence=recorded_waits(step_series, rank) if plan is None else predicted_steps(starving, faster_loader, plan),
        forecasts=() if plan is None else forecasts_of(starving.step_ns, plan),
        sure=_sure(job, faster_loader) + assumed,
        verdict=_verdict(estimate, starving, faster_loader) if _is_about_it(faster_loader) else "",
        at_most=not faster_loader.workers_help,
        where=_where(faster_loader.line) if faster_loader.line is not None and _is_about_it(faster_loader) else (),
    )


def _is_about_it(faster: FasterLoader) -> bool:
    """Return whether the first change is to the line that takes most of making a batch."""
    if faster.plan is None:
        return faster.line is not None and faster.line.idiom is not None and faster.line.idiom.first
    return faster.line_first or (not faster.workers_help and faster.part != PINNING)


def _unknown(faster: FasterLoader) -> bool:
    """Return whether it is not known how to make the line faster that takes most of a batch."""
    return faster.line is None or faster.line.idiom is None or faster.line.idiom.name == LOOPS


def _verdict(estimate: Estimate, starving: Starving, faster: FasterLoader) -> str:
    again = faster.kept is not None and _unknown(faster)
    does = "the same samples are made again in every epoch" if again else faster.line.does if faster.line else ""
    waits = f"{percent((estimate.lost_ns or 0.0) / starving.step_ns)} of each step waits for data"
    return f"{waits}: {does}." if does else ""


def _where(line: CostlyLine) -> tuple[Place, ...]:
    """Return the line to change; of a chain of generators also the one that puts it together."""
    chained = line.idiom is not None and line.idiom.name == FILTERED
    return (line.place, *line.callers[:1]) if chained else (line.place,)


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
        alone = "samples" if faster.kept else "this line, by its share of the stacks,"
        return (
            "Estimated as batches that cost nothing to make: the most that it can give. Without"
            f" {alone} alone, {duration(faster.line_ns)} is saved; by more workers alone, {duration(plan.gain_ns)}."
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
