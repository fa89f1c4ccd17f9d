"""What is said of a loader that makes training wait: how it works, what to change, which step is then predicted."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import pandas as pd

from dlprof.analysis import settings
from dlprof.analysis.engine import Job, Maybe
from dlprof.analysis.input.fetch_replay import COLLATING, SAMPLES
from dlprof.analysis.input.input_waits import NOTABLE_SHARE, FasterLoader
from dlprof.analysis.input.worker_plans import Plan
from dlprof.errors import NotMeasured
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
}


def workers_of(loader_calls: pd.DataFrame, job: Job, rank: int) -> int | None:
    """Return how many workers a rank's training loader has; None: not known, but not none."""
    recorded = settings.training_loader(job, rank).get("num_workers")
    if isinstance(recorded, int):
        return recorded
    # A trace without settings still names the iterator, and one of the two has no workers.
    single = loader_calls.set_index("rank")["in_process"].get(rank)
    return 0 if single else None


def _workers_to(n: int, now: int, text: str) -> Change:
    """Return the change to n workers; who had none keeps the new ones between epochs."""
    if now:
        return change(f"`num_workers={n}` (is {now}){text}", num_workers=(now, n))
    return change(
        f"`num_workers={n}, persistent_workers=True` (num_workers is 0){text}",
        num_workers=(0, n),
        persistent_workers=(False, True),
    )


def settings_of_loader(workers: int | None, job: Job, rank: int) -> str:
    """Say who makes the batches."""
    if workers == 0:
        return "batches are made in the training thread (num_workers=0)"
    if workers is None:
        return "worker processes load"
    batch = settings.training_loader(job, rank).get("batch_size")
    what = f"batches of {batch}" if batch else "its batches"
    return f"{count(workers, 'worker')} load{'s' if workers == 1 else ''} {what}"


def work_of_loader(loader_means: Maybe[pd.DataFrame], worker_means: Maybe[pd.DataFrame], rank: int) -> str:
    """Say what the queue and the workers were seen to do; "" where that was not recorded."""
    try:
        means, workers = loader_means.get(), worker_means.get()
    except NotMeasured:
        return ""
    means, workers = means[means["rank"] == rank], workers[workers["rank"] == rank]
    if not len(means) or not len(workers):
        return ""
    said = ""
    # Batches that are there before their turn fill it as well, and the one that is waited for may be missing.
    empty = int(means["empty"].iloc[0])
    if empty > 0:
        of_all = count(int(means["batches"].iloc[0]), "batch")
        said = f"; the queue was empty for {empty} of {of_all}"
    n = workers["batches"] / workers["batches"].sum()
    fetch, cpu = float((workers["dur_ns"] * n).sum()), float((workers["cpu_ns"] * n).sum(skipna=False))
    of_it = f", {duration(cpu)} of it computing" if math.isfinite(cpu) else ""
    who = "a worker" if (workers["worker"] >= 0).all() else "it"
    collating = float((workers["collate_ns"] * n).sum(skipna=False))
    if 2 * collating > fetch:
        of_it += f", {duration(collating)} of it collating"
    return f"{said}; {who} takes {duration(fetch)} for a batch{of_it}"


def changes_by_rate(workers: int | None, mean_step_ns: float, job: Job, rank: int, wait: float) -> Iterator[Change]:
    """Propose as many workers as keep up with the rest of the step, where no batch was recorded; times in ns."""
    cores = settings.cores_per_rank(job, rank)
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


def changes_by_plan(mean_step_ns: float, job: Job, rank: int, plan: Plan, faster: FasterLoader) -> Iterator[Change]:
    """Propose the workers of a plan, or cheaper batches where these do not help."""
    now, then = plan.now, plan.chosen
    predicted = f": a step of {duration(mean_step_ns - plan.gain_ns)} is predicted"
    if not faster.workers_help:
        cores = settings.cores_per_rank(job, rank)
        there = f": a rank has {count(cores, 'core')}" if cores else ""
        less = then.workers > now.workers and then.step_ns < now.step_ns * (1 - NOTABLE_SHARE / 2)
        yield change(f"{CHEAPER[faster.part][0]}; more workers would {'give less' if less else 'not help'}{there}")
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


def queue_changes(workers: int | None, job: Job, rank: int) -> Iterator[Change]:
    """Propose settings of the queue that cost nothing."""
    loader = settings.training_loader(job, rank)
    if workers and loader.get("persistent_workers") is False:
        yield change(
            "`persistent_workers=True` (is False): workers start anew each epoch", persistent_workers=(False, True)
        )
    if workers and loader.get("prefetch_factor") == 1:
        yield change("`prefetch_factor=2` or more (is 1): one slow sample stalls the queue", prefetch_factor=(1, 2))


def predicted_steps(mean_step_ns: float, plan: Plan, rank: int, faster: FasterLoader) -> Panel:
    """Show the predicted steps; where workers do not help, also the one with cheaper batches."""
    shown, gains = {f.workers: f for f in plan.forecasts}, _gains(plan)
    near = [n for n in sorted(shown) if n <= plan.chosen.workers + 2 or n == plan.now.workers]
    marks = {plan.now.workers: " (is)"}
    if faster.workers_help:
        marks[plan.chosen.workers] = marks.get(plan.chosen.workers, "") + " (proposed)"
    rows: list[tuple[str, float, float | None]] = [
        (f"{n}{marks.get(n, '')}", mean_step_ns - gains.get(n, 0.0), max(shown[n].wait_ns, 0.0))
        for n in (near if len(near) <= MOST_ROWS else [near[0], *near[1 - MOST_ROWS :]])
    ]
    if not faster.workers_help:
        rows.append((CHEAPER[faster.part][1], mean_step_ns - faster.saving_ns, None))
    columns = ("num_workers", "mean step_ns", f"rank {rank} waits for data_ns", "speed_times")
    told = tuple((*row, mean_step_ns / row[1]) for row in rows)
    return Panel("table", "Predicted step by number of loader workers", told, columns)


def recorded_waits(step_series: pd.DataFrame, rank: int) -> Panel:
    """Show how long a rank waited for data in each of the last steady steps."""
    mine = step_series[
        (step_series["rank"] == rank) & step_series["steady"].astype(bool) & (step_series["fetch_ns"] >= 0)
    ].tail(MOST_BARS)
    rows = tuple((f"step {s}", float(w), "input_wait") for s, w in zip(mine["step"], mine["fetch_ns"], strict=True))
    steps = "one steady step" if len(rows) == 1 else f"the last {len(rows)} steady steps"
    return Panel("bars", f"Wait in next() on rank {rank}, {steps}", rows, unit="ns")


def _gains(plan: Plan) -> dict[int, float]:
    """Return what the run gains with each number of workers, ns: as the worst rank does, of which more is known."""
    best = plan.now.step_ns - plan.chosen.step_ns
    of_it = plan.gain_ns / best if best > 0 else 1.0
    return {f.workers: of_it * (plan.now.step_ns - f.step_ns) for f in plan.forecasts[1:]}


def forecasts_of(mean_step_ns: float, plan: Plan) -> tuple[Forecast, ...]:
    """Return the mean step that is predicted for each number of workers."""
    gains = _gains(plan)
    return tuple(Forecast("num_workers", str(n), mean_step_ns - gain) for n, gain in sorted(gains.items()))
