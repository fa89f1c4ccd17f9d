"""The loader as it was seen: calls, how each batch was waited for, and what fetching one takes whom."""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof.analysis import intervals as iv
from dlprof.analysis import settings
from dlprof.analysis.engine import Job, Maybe, RankFacts, across_ranks, per_rank, within_rank
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.idle import Idle
from dlprof.analysis.timeline.steady import standard_error, suspended
from dlprof.analysis.timeline.steps import Timing
from dlprof.analysis.timeline.what_if import WhatIf
from dlprof.errors import NotMeasured

# What travels of the batches: enough for a replay, a few kilobytes.
MOST_FETCHES = 400

# Batches that tell what taking one takes.
_ENOUGH = 3


@per_rank
def loader_calls(
    spans: Maybe[pd.DataFrame], steps: Maybe[pd.DataFrame], on_training_thread: Maybe[pd.DataFrame]
) -> pd.DataFrame:
    """Count next() on a DataLoader (one row): calls, and in_process (the loader is known to have no workers).

    Raises NotMeasured where neither the light layer nor a trace was recorded.
    """
    if not spans and not steps:
        raise NotMeasured("neither steps nor a trace were recorded")
    light = int(steps.get()["fetches"].clip(lower=0).sum()) if steps else 0
    traced, single = 0, 0
    if spans:
        thread = on_training_thread.get()
        traced = int(host.is_named(thread, "enumerate(DataLoader)").sum())
        single = int(host.is_named(thread, "enumerate(DataLoader)#_SingleProcess").sum())
    return pd.DataFrame({"calls": [max(light, traced)], "in_process": [single > 0 and single == traced]})


@across_ranks
def before_forward(loader_calls: Maybe[pd.DataFrame], step_means: Maybe[pd.DataFrame]) -> tuple[int, float] | None:
    """Return the rank, and how long it is before its first forward in a mean steady step, ns, where that is longest.

    That is from the end of the optimizer's step, or wherever a step begins, with no loader seen: where data comes in
    another way, it comes there. None: a loader was seen, or nobody knows.
    """
    try:
        if loader_calls.get()["calls"].sum():
            return None
        lead = step_means.get().set_index("rank")["lead_ns"].dropna()
    except NotMeasured:
        return None
    return (int(str(lead.idxmax())), float(lead.max())) if len(lead) else None


@per_rank
def loader_means(
    loading: pd.DataFrame, loader_number: Maybe[int], light_steps: Maybe[pd.DataFrame], rank: RankFacts
) -> pd.DataFrame:
    """Return one row of the training loader in the steady steps, and of what the process used meanwhile.

    Columns: batches, empty (of how many no batch was ready when asked), ready and outstanding (means, batches; NaN
    without workers), taken_ns (the median next() when every batch that was asked for is ready: it receives one, and
    waits for nobody; NaN: not seen) · epochs, start_ns, first_ns, end_ns (means over the run's epochs: iter(), the
    first next(), the workers' leaving; NaN: none) · cores (CPU time of the process ÷ time) and delayed (share of the
    time that the training thread was ready and had no core), NaN where the kernel does not tell.
    """
    if not loading["kind"].isin(["first", "batch"]).any():
        raise NotMeasured("no DataLoader was seen")
    mine = loading[loading["loader"] == loader_number.get()]
    epochs = mine[~_suspended(rank, mine)]
    steady = mine[(mine["kind"] == "batch") & in_steady(light_steps.get(), mine["start_ns"].to_numpy())]
    batches = int(steady["count"].sum())
    queued = steady[steady["empty"] >= 0]
    n = max(int(queued["count"].sum()), 1)
    found = len(queued) > 0
    # What the process used while it was profiled, or began, is of no steady step.
    usage = loading[(loading["kind"] == "usage") & in_steady(light_steps.get(), loading["start_ns"].to_numpy())]
    took = max(int(usage["dur_ns"].sum()), 1)
    delays = len(usage) > 0 and bool((usage["delay_ns"] >= 0).all())
    return pd.DataFrame(
        {
            "batches": [batches],
            "empty": [int(queued["empty"].sum()) if found else -1],
            "ready": [queued["ready"].sum() / n if found else np.nan],
            "outstanding": [queued["outstanding"].sum() / n if found else np.nan],
            "taken_ns": [_taken(queued)],
            "epochs": [int(mine.loc[mine["kind"] == "start", "count"].sum())],
            "start_ns": [_mean(epochs, "start")],
            "first_ns": [_mean(epochs, "first")],
            "end_ns": [_mean(epochs, "end")],
            "cores": [usage["cpu_ns"].sum() / took if len(usage) else np.nan],
            "delayed": [usage["delay_ns"].sum() / took if delays else np.nan],
        }
    )


@per_rank
def worker_means(training_fetches: pd.DataFrame) -> pd.DataFrame:
    """Return what a batch takes each worker of the training loader, one row a worker; −1 is the training thread.

    Columns: worker, batches, and means a batch: dur_ns (of fetching, with collating), collate_ns, cpu_ns (of the
    worker's whole process), delay_ns (ready, with no core), stored_bytes (from storage), read_bytes (read at all); NaN:
    not told.
    Raises NotMeasured where no fetch was recorded.
    """
    rows = []
    for worker, group in training_fetches.groupby("worker"):
        means = {name: _a_batch(group, name) for name in _PER_BATCH}
        rows.append({"worker": int(str(worker)), "batches": int(group["count"].sum()), **means})
    return pd.DataFrame(rows)


@per_rank
def fetch_series(training_fetches: pd.DataFrame) -> pd.DataFrame:
    """Return the training loader's last fetches in order: worker, dur_ns, collate_ns, cpu_ns, delay_ns and gap_ns.

    −1: not told. gap_ns, the same in all, is what passes in a busy worker from the end of one fetch to the start of
    the next.
    """
    n = training_fetches["count"].to_numpy()
    series = pd.DataFrame(
        {c: training_fetches[c].to_numpy() / n for c in ("dur_ns", "collate_ns", "cpu_ns", "delay_ns")}
    )
    series = series.where(series >= 0, -1.0).assign(worker=training_fetches["worker"].to_numpy())
    return series.tail(MOST_FETCHES).assign(gap_ns=_gap(training_fetches)).reset_index(drop=True)


# A replay that is shorter than this share of the mean steady step lacks what makes that longer.
REPRODUCED = 0.95

# Shares of the wait for data that may be left, of which fetch_gains tells what the rest gains.
LEFT = (0.0, 0.25, 0.5, 0.75)


@per_rank
def fetch_gains(what_if: WhatIf, idle: Maybe[Idle], timing: Timing) -> pd.DataFrame:
    """Return what a rank with a device gains when its loader waits for less: left (a share of LEFT), gain_ns a step.

    By replaying the traced steps: a wait behind which the device has work gains nothing, and one that also delays
    launches gains more than the time in which the device idles meanwhile. Raises NotMeasured where the trace cannot be
    replayed, or holds no loader.
    """
    if not len(what_if.host.fetch) or what_if.step_ns < REPRODUCED * what_if.measured_ns:
        raise NotMeasured("the replayed steps hold less waiting for data than others")
    most = iv.total(iv.intersect(idle.get().late, iv.merge(timing.windows)))
    gains = [what_if.gain_ns(fetch=left) if most else 0.0 for left in LEFT]
    return pd.DataFrame({"left": LEFT, "gain_ns": gains})


def gained(fetch_gains: Maybe[pd.DataFrame], rank: int, wait_ns: float, freed: float) -> float:
    """Return what a rank gains when a share of its wait for data is gone, ns a step; `wait_ns`: when all of it is."""
    frame = fetch_gains.get() if rank not in fetch_gains.lacking else None
    mine = frame[frame["rank"] == rank] if frame is not None else None
    if mine is None or not mine["gain_ns"].iloc[0] > 0:
        return wait_ns * freed
    left, gain = [*mine["left"], 1.0], [*mine["gain_ns"], 0.0]
    return wait_ns * float(np.interp(1 - freed, left, gain)) / float(gain[0])


@across_ranks
def fed_ns(
    worker_means: Maybe[pd.DataFrame], loader_means: Maybe[pd.DataFrame], step_means: Maybe[pd.DataFrame], job: Job
) -> float:
    """Return the mean step that the loaders of a job on devices can feed at the best, ns: the slowest rank's; 0: any.

    That is what fetching a step's batches takes its workers, but for waiting for a core. 0 as well where it is not
    known, and on CPUs, whose loaders get faster where the rest of the job needs less of the cores.
    """
    if settings.on_cpu(job) or worker_means.lacking or loader_means.lacking:
        return 0.0
    steps = step_means.get().set_index("rank")["steps"]
    batches = loader_means.get().set_index("rank")["batches"] / steps
    fetched = worker_means.get()
    most = 0.0
    for rank, mine in fetched[fetched["worker"] >= 0].groupby("rank"):
        took = (mine["dur_ns"] - mine["delay_ns"].fillna(0.0)) * mine["batches"]
        workers = settings.training_loader(job, int(str(rank))).get("num_workers") or len(mine)
        if isinstance(workers, int) and (step_means.get()["source"] == "steps").all():
            most = max(most, float(took.sum() / mine["batches"].sum()) / workers * float(batches[rank]))
    return most


@per_rank
def restarts(
    loading: pd.DataFrame,
    light_steps: Maybe[pd.DataFrame],
    has_device: bool,
    fetches: Maybe[pd.DataFrame],
    rank: RankFacts,
) -> pd.DataFrame:
    """Return what epochs cost that begin with new workers, one row a loader with workers.

    Columns: loader, epochs, anew (epochs that began with other workers than the one before), means of those: start_ns
    (iter()), first_ns (the first next()), end_ns (the workers' leaving) and the three's standard error noise_ns,
    after_ns (what forward, backward and optimizer then take longer than in a steady step: a fork leaves the script's
    memory to be copied as it is written to), hidden_ns (of all these, for how long the device went on with work that
    was queued before), and fetch_ns (what a batch takes a worker that is there already). NaN: not recorded.
    """
    rows = []
    for loader, mine in loading[loading["loader"] >= 0].groupby("loader"):
        starts = mine[mine["kind"] == "start"]
        workers = starts["workers"].astype(str).to_numpy()
        if not (workers != "").any():
            continue
        mine = mine.assign(epoch=(mine["kind"] == "start").cumsum() - 1)
        other = np.append(False, workers[1:] != workers[:-1])
        mine = mine[other[mine["epoch"].clip(lower=0)] & (mine["count"] == 1) & ~_suspended(rank, mine)]
        mine = mine[mine["kind"].isin(["start", "first", "end"])]
        together = mine.groupby("epoch")["dur_ns"].sum()
        after = _longer(light_steps.get(), mine.loc[mine["kind"] == "first", "step"])
        rows.append(
            {
                "loader": int(str(loader)),
                "epochs": int(starts["count"].sum()),
                "anew": int(starts.loc[other, "count"].sum()),
                "start_ns": _mean(mine, "start"),
                "first_ns": _mean(mine, "first"),
                "end_ns": _mean(mine, "end"),
                "noise_ns": standard_error(together.to_numpy(dtype=float)),
                "after_ns": after,
                "hidden_ns": _hidden(has_device, light_steps, mine, max(after, 0.0)),
                "fetch_ns": _warm_fetch(fetches, workers),
            }
        )
    columns = ("loader", "epochs", "anew", "start_ns", "first_ns", "end_ns", "noise_ns", "after_ns", "hidden_ns")
    return pd.DataFrame(rows, columns=[*columns, "fetch_ns"])


def _hidden(has_device: bool, light_steps: Maybe[pd.DataFrame], loading: pd.DataFrame, after_ns: float) -> float:
    """Return for how long a device works on while its loader starts anew, the mean of these epochs, ns."""
    if not has_device or not len(loading):
        return 0.0
    steps = light_steps.get()
    usual = float(steps.loc[steps["steady"], "length_ns"].mean())
    longer = (steps.set_index("step")["length_ns"] - usual).reindex(loading["step"].unique()).fillna(0.0).sum()
    epochs = loading["epoch"].nunique()
    whole = float(loading["dur_ns"].sum()) / epochs + after_ns
    return float(np.clip(whole - longer / epochs, 0.0, whole))


def _longer(light_steps: pd.DataFrame, numbers: pd.Series[int]) -> float:
    """Return how much longer model and the optimizer take in these training steps than in steady ones; NaN: none."""
    phases = light_steps[["forward_ns", "backward_ns", "optimizer_ns"]].clip(lower=0).sum(axis=1)
    these = phases[
        light_steps["step"].isin(numbers) & (light_steps["kind"] == "train") & (light_steps["profiled"] == 0)
    ]
    steady = phases[light_steps["steady"]]
    return max(float(these.mean() - steady.mean()), 0.0) if len(these) and len(steady) else float("nan")


def _warm_fetch(fetches: Maybe[pd.DataFrame], workers: NDArray[np.object_]) -> float:
    """Return what a batch takes such workers, the first of each left out where they have more; NaN: not recorded."""
    if not fetches:
        return float("nan")
    fetched = fetches.get()
    mine = fetched[fetched["pid"].isin({int(p) for text in set(workers) for p in text.split() if p.isdigit()})]
    warm = mine[mine.duplicated("pid")]
    warm = warm if len(warm) else mine
    return float(warm["dur_ns"].sum() / warm["count"].sum()) if len(warm) else float("nan")


@within_rank
def training_fetches(
    fetches: pd.DataFrame, loading: pd.DataFrame, loader_number: int, light_steps: pd.DataFrame, rank: RankFacts
) -> pd.DataFrame:
    """Return the fetches for the training loader in the run's steady part, each worker's first left out.

    Raises NotMeasured where none was recorded.
    """
    started = loading[(loading["kind"] == "start") & (loading["loader"] == loader_number)]
    pids = {int(p) for text in started["workers"].astype(str).unique() for p in text.split() if p.isdigit()}
    start = fetches["start_ns"].to_numpy()
    if pids:
        # A worker fetches ahead, and the trace's window does not slow it.
        steps = light_steps
        begin = steps.loc[steps["steady"], "start_ns"].min()
        keep = fetches["pid"].isin(pids).to_numpy() & fetches.duplicated("pid").to_numpy() & (start >= begin)
    else:
        keep = (fetches["worker"] == -1).to_numpy() & in_steady(light_steps, start)
    keep &= ~_suspended(rank, fetches)
    if not keep.any():
        raise NotMeasured("no fetch of a batch was recorded in the steady steps")
    kept: pd.DataFrame = fetches[keep]
    return kept


_PER_BATCH = ("dur_ns", "collate_ns", "cpu_ns", "delay_ns", "stored_bytes", "read_bytes")


def _suspended(rank: RankFacts, rows: pd.DataFrame) -> NDArray[np.bool_]:
    start = rows["start_ns"].to_numpy()
    return suspended(rank, start, start + rows["dur_ns"].to_numpy())


@within_rank
def loader_number(loading: pd.DataFrame, light_steps: pd.DataFrame) -> int:
    """Return the number of the loader whose batches the training steps began with; the most frequent one."""
    begun = loading[(loading["kind"] == "batch") & in_steady(light_steps, loading["start_ns"].to_numpy())]
    counts = begun.groupby("loader")["count"].sum()
    return int(str(counts.idxmax())) if len(counts) else -1


def in_steady(light_steps: pd.DataFrame, at: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which instants lie in steady steps."""
    begin = light_steps["start_ns"].to_numpy()
    step = np.searchsorted(begin, at, side="right") - 1
    inside = (step >= 0) & (at < (begin + light_steps["dur_ns"].to_numpy())[step])
    found: NDArray[np.bool_] = inside & light_steps["steady"].to_numpy(dtype=bool)[step]
    return found


def _taken(queued: pd.DataFrame) -> float:
    """Return what taking a batch takes that is surely there, ns: all are, or one whose turn it is may be missing."""
    there = queued[(queued["outstanding"] > 0) & (queued["ready"] == queued["outstanding"])]
    return float((there["dur_ns"] / there["count"]).median()) if len(there) >= _ENOUGH else float("nan")


def _mean(rows: pd.DataFrame, kind: str) -> float:
    mine = rows[rows["kind"] == kind]
    return float(mine["dur_ns"].sum() / mine["count"].sum()) if len(mine) else float("nan")


def _a_batch(rows: pd.DataFrame, column: str) -> float:
    told = rows[rows[column] >= 0]
    return float(told[column].sum() / told["count"].sum()) if len(told) else float("nan")


def _gap(fetches: pd.DataFrame) -> float:
    single = fetches[(fetches["count"] == 1) & (fetches["worker"] >= 0)]
    ended = (single["start_ns"] + single["dur_ns"]).groupby(single["pid"]).shift()
    gaps = (single["start_ns"] - ended).dropna().to_numpy(dtype=float)
    # The shortest are of workers that had the next index waiting; the others waited to be asked, as all of them may.
    return float(min(np.quantile(gaps, 0.1), single["dur_ns"].mean() / 4)) if len(gaps) else 0.0
