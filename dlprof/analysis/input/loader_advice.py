"""What the report says of a loader that makes training wait: how it works, what to change, which step is predicted."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import pandas as pd

from dlprof.analysis.engine import Maybe
from dlprof.analysis.input.fetch_replay import COLLATING, PINNING, SAMPLES
from dlprof.analysis.input.input_waits import NOTABLE_SHARE, FasterLoader, Plan, Starving
from dlprof.result import Change, Forecast, Panel, change
from dlprof.units import count, duration

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


def cheaper(faster: FasterLoader) -> str:
    """Say how a batch gets cheaper: by the line that takes most of making it, where that is known."""
    if faster.line is None or faster.part == PINNING:
        return CHEAPER[faster.part][0]
    return faster.line.advice("make a sample cheaper, or keep what was made, at")


def changes(starving: Starving, faster: FasterLoader) -> Iterator[Change]:
    """Propose what makes the loader faster, then settings of its queue that cost nothing."""
    yield from _by_rate(starving, faster) if faster.plan is None else _by_plan(starving, faster, faster.plan)
    if starving.workers and starving.loader.get("persistent_workers") is False:
        yield change(
            "`persistent_workers=True` (is False): workers start anew each epoch", persistent_workers=(False, True)
        )
    if starving.workers and starving.loader.get("prefetch_factor") == 1:
        yield change("`prefetch_factor=2` or more (is 1): one slow sample stalls the queue", prefetch_factor=(1, 2))


def _by_rate(starving: Starving, faster: FasterLoader) -> Iterator[Change]:
    """Propose as many workers as keep up with the rest of the step, where no batch was recorded."""
    samples = cheaper(faster)
    workers, cores, busy = starving.workers, starving.cores, max(starving.step_ns - starving.wait_ns, 1.0)
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
    samples = cheaper(faster)
    if faster.line_first:
        rest = duration(max(starving.step_ns - faster.line_ns, 0.0))
        yield change(f"{samples}; without this line alone a step of {rest} is left")
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
