"""What was recorded of the data loader: its calls, the wait for each batch, and the cost of fetching one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof import schema
from dlprof.analysis import settings
from dlprof.analysis.engine import (
    JOB,
    RANK,
    Frame,
    Job,
    Maybe,
    RankFacts,
    across_ranks,
    maybe,
    needs,
    per_rank,
    within_rank,
)
from dlprof.analysis.input.fetch_replay import HOSTS_DIFFER, handover_cost
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.device import has_device
from dlprof.analysis.timeline.host import on_training_thread
from dlprof.analysis.timeline.steady import STARVED, device_type, light_steps, standard_error, suspended
from dlprof.analysis.timeline.steps import Timing, step_means, timing
from dlprof.analysis.timeline.what_if import WhatIf, what_if
from dlprof.errors import DoesNotApply, NotMeasured

# The most fetches that a rank passes on: enough for a replay, a few kilobytes.
MOST_FETCHES = 400

# The fewest ready batches whose median next() is the time to take one.
_ENOUGH = 3

# A replay shorter than this share of the mean steady step lacks something that makes the step longer.
REPRODUCED = 0.95

# The remaining shares of the wait for data for which fetch_gains has the gain.
LEFT = (0.0, 0.25, 0.5, 0.75)

# A step's loaders give equally many batches if the fewest from one are more than this share of the most from one.
_ALIKE = 0.9

_TIMES = ("dur_ns", "collate_ns", "cpu_ns", "delay_ns")


@per_rank
def loader_calls(
    spans: Maybe[Frame] = maybe(schema.SPANS),
    steps: Maybe[Frame] = maybe(schema.STEPS),
    on_training_thread: Maybe[Frame] = maybe(on_training_thread),
) -> pd.DataFrame:
    """Count next() on a DataLoader (one row): calls, and in_process (the loader is known to have no workers).

    Raises NotMeasured where neither the step log nor a trace was recorded.
    """
    if not spans and not steps:
        raise NotMeasured("neither steps nor a trace were recorded")
    logged = int(steps.get()["fetches"].clip(lower=0).sum()) if steps else 0
    traced, single = 0, 0
    if spans:
        thread = on_training_thread.get()
        traced = int(host.is_named(thread, "enumerate(DataLoader)").sum())
        single = int(host.is_named(thread, "enumerate(DataLoader)#_SingleProcess").sum())
    return pd.DataFrame({"calls": [max(logged, traced)], "in_process": [single > 0 and single == traced]})


@across_ranks
def before_forward(
    loader_calls: Maybe[Frame] = maybe(loader_calls), step_means: Maybe[Frame] = maybe(step_means)
) -> tuple[int, float] | None:
    """Return the rank with the longest time before the first forward in a mean steady step, and that time, ns.

    The time counts from the end of the optimizer's step, or from the start of the step. A script without a DataLoader
    gets its data there. None: a loader was seen, or the time is not known.
    """
    calls, means = loader_calls.or_none(), step_means.or_none()
    if calls is None or means is None or calls["calls"].any():
        return None
    lead = means.set_index("rank")["lead_ns"].dropna()
    return (int(str(lead.idxmax())), float(lead.max())) if len(lead) else None


@within_rank
def loader_numbers(loading: Frame = needs(schema.LOADING), light_steps: Frame = needs(light_steps)) -> tuple[int, ...]:
    """Return the numbers of the loaders that the training steps take batches from, the most frequent first.

    A loader that gives less than half as many batches as the most frequent one is left out.
    """
    begun = loading[(loading["kind"] == "batch") & in_steady(light_steps, loading["start_ns"].to_numpy())]
    counts = begun.groupby("loader")["count"].sum().sort_values(ascending=False, kind="stable")
    return tuple(int(str(number)) for number in counts.index[2 * counts >= counts.max()])


@within_rank
def fetches(loading: Frame = needs(schema.LOADING)) -> pd.DataFrame:
    """Return the rows of `loading` that fetch a batch: in a worker, or in the training thread (worker −1).

    Raises NotMeasured where there are none.
    """
    fetched: pd.DataFrame = loading[(loading["kind"] == "fetch") | (loading["collate_ns"] >= 0)]
    if not len(fetched):
        raise NotMeasured("no record of the time that each batch took (only `dlprof wrap` and `dlprof run` leave one)")
    return fetched


@within_rank
def training_fetches(
    fetches: Frame = needs(fetches),
    loading: Frame = needs(schema.LOADING),
    loader_numbers: tuple[int, ...] = needs(loader_numbers),
    light_steps: Frame = needs(light_steps),
    rank: RankFacts = needs(RANK),
) -> pd.DataFrame:
    """Return the fetches for the most frequent training loader in the run's steady part, each worker's first left out.

    Raises NotMeasured where none was recorded.
    """
    return _steady_fetches(fetches, loading, loader_numbers[:1], light_steps, rank)


def _steady_fetches(
    fetches: pd.DataFrame, loading: pd.DataFrame, loaders: Sequence[int], light_steps: pd.DataFrame, rank: RankFacts
) -> pd.DataFrame:
    pids = _pids(loading.loc[(loading["kind"] == "start") & loading["loader"].isin(loaders), "workers"])
    start = fetches["start_ns"].to_numpy()
    if pids:
        # A worker fetches ahead, and the profiler does not slow it.
        begin = light_steps.loc[light_steps["steady"], "start_ns"].min()
        keep = fetches["pid"].isin(pids).to_numpy() & fetches.duplicated("pid").to_numpy() & (start >= begin)
    else:
        keep = (fetches["worker"] == -1).to_numpy() & in_steady(light_steps, start)
    # A fetch that a step stood still for is an accident, as that step is.
    for at, took in light_steps.loc[light_steps["kind"] == "stalled", ["start_ns", "dur_ns"]].itertuples(index=False):
        dur = fetches["dur_ns"].to_numpy()
        keep &= ~((dur >= took / 2) & (start < at + took) & (start + dur > at))
    kept: pd.DataFrame = fetches[keep & ~_suspended(rank, fetches)]
    if not len(kept):
        raise NotMeasured("no batch was fetched during the steady steps: record more of them")
    return kept


@per_rank
def loader_means(
    loading: Frame = needs(schema.LOADING),
    loader_numbers: Maybe[tuple[int, ...]] = maybe(loader_numbers),
    light_steps: Maybe[Frame] = maybe(light_steps),
    rank: RankFacts = needs(RANK),
) -> pd.DataFrame:
    """Return one row: the training loader in the steady steps, and the CPU use of the process meanwhile.

    Columns: batches, empty (how often next() found no batch ready), ready and outstanding (means, batches; NaN without
    workers), taken_ns (the median next() when every requested batch is ready: it receives one and does not wait; NaN:
    not seen) · step_batches (of a step, from all its loaders), loaders (how many a step takes batches from) and alike
    (whether it takes as many from each) · epochs, start_ns, first_ns, end_ns (means over the run's epochs: iter(), the
    first next(), the workers' exit; NaN: none) · cores (CPU time of the process ÷ time) and delayed (share of the time
    that the training thread was ready and had no core), NaN where the kernel does not record it.
    """
    if not loading["kind"].isin(["first", "batch"]).any():
        raise DoesNotApply("no DataLoader was seen")
    numbers, kind = loader_numbers.get(), loading["kind"]
    mine = loading["loader"] == (numbers[0] if numbers else -1)
    steady = in_steady(light_steps.get(), loading["start_ns"].to_numpy())
    batches, usage = loading[mine & steady & (kind == "batch")], loading[steady & (kind == "usage")]
    of_steps = loading[loading["loader"].isin(numbers) & steady & (kind == "batch")].groupby("loader")["count"].sum()
    queued = batches[batches["empty"] >= 0]
    # Only where all outstanding batches are ready: otherwise the next one in order may be missing.
    ready = queued[(queued["outstanding"] > 0) & (queued["ready"] == queued["outstanding"])]
    row = {
        "batches": int(batches["count"].sum()),
        "empty": int(queued["empty"].sum()) if len(queued) else -1,
        "ready": _mean(queued, "ready"),
        "outstanding": _mean(queued, "outstanding"),
        "taken_ns": (ready["dur_ns"] / ready["count"]).median() if len(ready) >= _ENOUGH else np.nan,
        "step_batches": float(of_steps.sum() / max(light_steps.get()["steady"].sum(), 1)),
        "loaders": len(numbers),
        "alike": bool(len(of_steps) and _ALIKE * of_steps.max() < of_steps.min()),
        "epochs": int(loading.loc[mine & (kind == "start"), "count"].sum()),
        **_of_epochs(loading[mine & ~_suspended(rank, loading)]),
        "cores": _mean(usage, "cpu_ns", "dur_ns"),
        "delayed": _mean(usage, "delay_ns", "dur_ns") if (usage["delay_ns"] >= 0).all() else np.nan,
    }
    return pd.DataFrame([row])


@per_rank
def worker_means(training_fetches: Frame = needs(training_fetches)) -> pd.DataFrame:
    """Return the time each worker of the training loader needs for a batch, one row a worker; −1: the training thread.

    Columns: worker, batches, and means a batch: dur_ns (of fetching, with collating), collate_ns, cpu_ns (of the
    worker's whole process), delay_ns (ready, with no core), stored_bytes (from storage), read_bytes (read at all); NaN:
    not known. Raises NotMeasured where no fetch was recorded.
    """
    names = (*_TIMES, "stored_bytes", "read_bytes")
    rows = [
        {"worker": worker, "batches": int(mine["count"].sum()), **{n: _mean(mine[mine[n] >= 0], n) for n in names}}
        for worker, mine in training_fetches.groupby("worker")
    ]
    return pd.DataFrame(rows)


@per_rank
def repeated_samples(fetches: Frame = needs(fetches)) -> pd.DataFrame:
    """Return what is known of samples that were made more than once, a row for each length of a data set.

    Columns: of_samples (that length), again (the samples that came again), same (those of them that were the same each
    time) and bytes (of a mean sample). Raises NotMeasured where no sample was watched, as in older runs.
    """
    watched = fetches[(fetches["count"] == 1) & (fetches["sample"] >= 0)]
    if not len(watched):
        raise NotMeasured("no samples of the data set were watched")
    of_sample = watched.groupby(["of_samples", "sample"])["digest"].agg(["size", "nunique"])
    of_sample = of_sample[of_sample["size"] > 1]
    by = of_sample.groupby("of_samples")["nunique"]
    found = pd.DataFrame({"again": by.size(), "same": by.apply(lambda of: int((of == 1).sum()))})
    sizes = watched.groupby("of_samples")["sample_bytes"].mean()
    return found.assign(bytes=sizes.reindex(found.index)).reset_index()


@across_ranks
def slowest_workers(worker_means: Frame = needs(worker_means)) -> pd.DataFrame:
    """Return the slowest worker of each loader that has two or more, one row a rank.

    Columns: worker, dur_ns (of a batch), others_ns (the median of the others'), workers (how many). Raises NotMeasured
    where no loader has two.
    """
    workers = worker_means[worker_means["worker"] >= 0]
    slowest = workers.loc[workers.groupby("rank")["dur_ns"].idxmax()]
    others = workers.drop(slowest.index).groupby("rank")["dur_ns"].agg(["median", "size"])
    if not len(others):
        raise DoesNotApply("no loader has two workers or more")
    slowest = slowest[slowest["rank"].isin(others.index)]
    return slowest[["rank", "worker", "dur_ns"]].assign(
        others_ns=others["median"].to_numpy(), workers=others["size"].to_numpy() + 1
    )


@per_rank
def fetch_series(
    fetches: Frame = needs(fetches),
    loading: Frame = needs(schema.LOADING),
    loader_numbers: tuple[int, ...] = needs(loader_numbers),
    light_steps: Frame = needs(light_steps),
    rank: RankFacts = needs(RANK),
) -> pd.DataFrame:
    """Return the last fetches of the loaders that steps take batches from, in order: dur_ns, collate_ns, cpu_ns,
    delay_ns, loader (its place among these; 0 without workers), worker and gap_ns; and the batch's tensors (their
    number), tensor_bytes and copied_bytes.

    −1: not known. gap_ns, the same in all rows, is the time in a busy worker from the end of one fetch to the start of
    the next. Raises NotMeasured where none was recorded.
    """
    kept = _steady_fetches(fetches, loading, loader_numbers, light_steps, rank)
    series = kept[[*_TIMES, "tensors", "tensor_bytes", "copied_bytes"]].div(kept["count"], axis=0)
    begun = loading[loading["kind"] == "start"]
    of = {
        pid: place
        for place, number in enumerate(loader_numbers)
        for pid in _pids(begun.loc[begun["loader"] == number, "workers"])
    }
    loader = kept["pid"].map(of).fillna(0).astype("int64").where(kept["worker"] >= 0, 0)
    series = series.where(series >= 0, -1.0).assign(worker=kept["worker"], loader=loader, gap_ns=_gap(kept))
    return series.tail(MOST_FETCHES).reset_index(drop=True)


@per_rank
def fetch_gains(what_if: WhatIf = needs(what_if)) -> pd.DataFrame:
    """Return what a rank with a device gains when its loader waits for less: left (a share of LEFT), gain_ns a step.

    The traced steps are replayed. They wait for data as long as the untraced steps do. Removing a wait gains nothing
    while the device has queued work. If the wait also delays launches, it gains more than the device's idle time during
    the wait. Raises NotMeasured where the trace cannot be replayed, or holds no loader.
    """
    if not len(what_if.host.fetch) or what_if.step_ns < REPRODUCED * what_if.measured_ns:
        raise NotMeasured("the replayed steps hold less waiting for data than others")
    return pd.DataFrame({"left": LEFT, "gain_ns": [what_if.gain_ns(fetch=left) for left in LEFT]})


def gained(fetch_gains: Maybe[pd.DataFrame], rank: int, wait_ns: float, freed: float) -> float:
    """Return what a rank gains without the share `freed` of its wait for data, ns a step; `wait_ns`: without any."""
    if rank in fetch_gains.lacking:
        return wait_ns * freed
    mine = fetch_gains.get()
    mine = mine[mine["rank"] == rank]
    left, gain = [*mine["left"], 1.0], [*mine["gain_ns"], 0.0]
    return wait_ns * (float(np.interp(1 - freed, left, gain)) / gain[0] if gain[0] > 0 else freed)


# If the loop waits although the workers make a batch in less than this share of the time, the pinning thread limits it.
_FASTER = 0.8


@per_rank
def pinning(
    loading: Frame = needs(schema.LOADING),
    loader_means: Frame = needs(loader_means),
    worker_means: Frame = needs(worker_means),
    fetch_series: Frame = needs(fetch_series),
    light_steps: Frame = needs(light_steps),
    timing: Timing = needs(timing),
    rank: RankFacts = needs(RANK),
) -> pd.DataFrame:
    """Return the time the pinning thread needs for a batch, one row: pin_ns, batch_bytes (−1: unknown), known.

    known: 1 where the thread was timed, or the loop waits for it: then pin_ns is the time from one batch to the next.
    0: pin_ns is the usual time for so many bytes. Raises DoesNotApply where no thread pins.
    """
    loader, means = settings.loader_of(rank.facts), loader_means.iloc[0]
    workers = loader.get("num_workers")
    if device_type(rank) in (None, "cpu") or loader.get("pin_memory") is not True or not workers:
        raise DoesNotApply("no thread of a loader pins batches")
    tensors, size = (float(fetch_series[name].mean()) for name in ("tensors", "tensor_bytes"))
    timed = loading[(loading["pin_ns"] >= 0) & in_steady(light_steps, loading["start_ns"].to_numpy())]
    each = timing.step_ns * means["loaders"] / max(means["step_batches"], 1.0)
    made, waits = float(worker_means["dur_ns"].max()) / workers, timing.phases.get("fetch", 0.0)
    pin = handover_cost(tensors, size, np.nan).usual.taking_ns
    if len(timed):
        pin = float(timed["pin_ns"].sum() / timed["dur_ns"].sum()) * each
    limits = waits >= STARVED * timing.step_ns and made < _FASTER * each and each <= HOSTS_DIFFER * pin
    known = int(limits or len(timed) > 0)
    return pd.DataFrame({"pin_ns": [each if limits else min(pin, each)], "batch_bytes": [size], "known": [known]})


@across_ranks
def fed_ns(
    worker_means: Maybe[Frame] = maybe(worker_means),
    loader_means: Maybe[Frame] = maybe(loader_means),
    step_means: Maybe[Frame] = maybe(step_means),
    pinning: Maybe[Frame] = maybe(pinning),
    job: Job = needs(JOB),
) -> float:
    """Return the shortest mean step that the loaders of a job on devices can supply, ns, on the slowest rank.

    It is the larger of two times: the workers' fetching of a step's batches, without waits for a core, and the pinning
    thread's. 0: not known, or no limit. Also 0 on CPUs: loaders get faster there when training needs less of the cores.
    """
    if settings.on_cpu(job) or worker_means.lacking or loader_means.lacking:
        return 0.0
    steps = step_means.get().set_index("rank")
    if (steps["source"] != "steps").any():
        return 0.0
    batches = loader_means.get().set_index("rank")["batches"] / steps["steps"]
    fetched, pins = worker_means.get(), pinning.or_none()
    most = 0.0 if pins is None else float((pins["pin_ns"] * pins["known"] * pins["rank"].map(batches)).max())
    for rank, mine in fetched[fetched["worker"] >= 0].groupby("rank"):
        took = (mine["dur_ns"] - mine["delay_ns"].fillna(0.0)) * mine["batches"]
        workers = settings.training_loader(job, int(str(rank))).get("num_workers") or len(mine)
        if isinstance(workers, int):
            most = max(most, float(took.sum() / mine["batches"].sum()) / workers * float(batches[rank]))
    return most


@per_rank
def restarts(
    loading: Frame = needs(schema.LOADING),
    light_steps: Maybe[Frame] = maybe(light_steps),
    has_device: bool = needs(has_device),
    fetches: Maybe[Frame] = maybe(fetches),
    rank: RankFacts = needs(RANK),
) -> pd.DataFrame:
    """Return what it costs to start an epoch with new workers, one row a loader with workers.

    Columns: loader, epochs, anew (epochs that began with other workers than the one before), means of those: start_ns
    (iter()), first_ns (the first next()), end_ns (the workers' exit) and the standard error of their sum, noise_ns,
    after_ns (how much longer forward, backward and optimizer then take than in a steady step: after a fork, each page
    is copied at the first write), hidden_ns (how long the device worked meanwhile on work queued before), fetch_ns (the
    time of a batch in a running worker) · took_ns, the sum, and gain_ns, how much shorter an epoch would be with
    persistent workers: without the first batch where fetch_ns is not known. NaN: not recorded.
    """
    rows = []
    for loader, mine in loading[loading["loader"] >= 0].groupby("loader"):
        starts = mine[mine["kind"] == "start"]
        workers = starts["workers"].astype(str).to_numpy()
        if not (workers != "").any():
            continue
        other = np.append(False, workers[1:] != workers[:-1])
        mine = mine.assign(epoch=(mine["kind"] == "start").cumsum() - 1)
        mine = mine[other[mine["epoch"].clip(lower=0)] & (mine["count"] == 1) & ~_suspended(rank, mine)]
        mine = mine[mine["kind"].isin(["start", "first", "end"])]
        of_epochs, after = _of_epochs(mine), _longer(light_steps.get(), mine.loc[mine["kind"] == "first", "step"])
        hidden = _hidden(light_steps.get(), mine, after) if has_device and len(mine) else 0.0
        fetch, took = _warm_fetch(fetches, _pids(starts["workers"])), np.nansum([*of_epochs.values(), after])
        # A persistent worker still fetches the first batch. Only the part of it that the device did not hide counts.
        stays = np.fmin(np.nan_to_num(of_epochs["first_ns"]), fetch) - np.nan_to_num(hidden)
        rows.append(
            {
                "loader": loader,
                "epochs": int(starts["count"].sum()),
                "anew": int(starts.loc[other, "count"].sum()),
                **of_epochs,
                "noise_ns": standard_error(mine.groupby("epoch")["dur_ns"].sum().to_numpy(dtype=float)),
                "after_ns": after,
                "hidden_ns": hidden,
                "fetch_ns": fetch,
                "took_ns": took,
                "gain_ns": took - np.nan_to_num(hidden) - max(stays, 0.0),
            }
        )
    return pd.DataFrame(rows)


def _hidden(light_steps: pd.DataFrame, loading: pd.DataFrame, after_ns: float) -> float:
    """Return how long a device keeps working while its loader restarts, the mean of these epochs, ns."""
    length = light_steps.set_index("step")["length_ns"]
    usual = light_steps.loc[light_steps["steady"], "length_ns"].mean()
    epochs = loading["epoch"].nunique()
    longer = (length - usual).reindex(loading["step"].unique()).sum() / epochs
    whole = loading["dur_ns"].sum() / epochs + after_ns
    return float(np.clip(whole - longer, 0.0, whole))


def _longer(light_steps: pd.DataFrame, numbers: pd.Series[int]) -> float:
    """Return how much longer model and optimizer take in these training steps than in steady ones; NaN: none."""
    phases = light_steps[["forward_ns", "backward_ns", "optimizer_ns"]].clip(lower=0).sum(axis=1)
    trains = (light_steps["kind"] == "train") & (light_steps["profiled"] == 0)
    longer = phases[light_steps["step"].isin(numbers) & trains].mean() - phases[light_steps["steady"]].mean()
    return float(np.maximum(longer, 0.0))


def _warm_fetch(fetches: Maybe[pd.DataFrame], pids: set[int]) -> float:
    """Return the mean time of a fetch in these workers, without each one's first if there are others; NaN: none."""
    if not fetches:
        return np.nan
    mine = fetches.get()
    mine = mine[mine["pid"].isin(pids)]
    warm = mine[mine.duplicated("pid")]
    return _mean(warm if len(warm) else mine, "dur_ns")


def in_steady(light_steps: pd.DataFrame, at: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return which instants lie in steady steps."""
    begin = light_steps["start_ns"].to_numpy()
    step = np.searchsorted(begin, at, side="right") - 1
    inside = (step >= 0) & (at < (begin + light_steps["dur_ns"].to_numpy())[step])
    found: NDArray[np.bool_] = inside & light_steps["steady"].to_numpy(dtype=bool)[step]
    return found


def _suspended(rank: RankFacts, rows: pd.DataFrame) -> NDArray[np.bool_]:
    start = rows["start_ns"].to_numpy()
    return suspended(rank, start, start + rows["dur_ns"].to_numpy())


def _pids(workers: pd.Series[str]) -> set[int]:
    """Return the process ids in the texts that the starts of a loader recorded ("17 18")."""
    return {int(pid) for text in workers.astype(str).unique() for pid in text.split() if pid.isdigit()}


def _mean(rows: pd.DataFrame, column: str, of: str = "count") -> float:
    """Return the sum of a column ÷ that of another; NaN where there are no rows."""
    return float(rows[column].sum() / max(rows[of].sum(), 1)) if len(rows) else np.nan


def _of_epochs(rows: pd.DataFrame) -> dict[str, float]:
    return {f"{kind}_ns": _mean(rows[rows["kind"] == kind], "dur_ns") for kind in ("start", "first", "end")}


def _gap(fetches: pd.DataFrame) -> float:
    single = fetches[(fetches["count"] == 1) & (fetches["worker"] >= 0)]
    ended = (single["start_ns"] + single["dur_ns"]).groupby(single["pid"]).shift()
    gaps = (single["start_ns"] - ended).dropna().to_numpy(dtype=float)
    # In the shortest gaps the next index was already queued. In the others the worker waited for one; so may all have.
    return float(min(np.quantile(gaps, 0.1), single["dur_ns"].mean() / 4)) if len(gaps) else 0.0
