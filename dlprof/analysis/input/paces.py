"""At what pace each rank's loop took its batches, and its workers made them, as recorded."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof.analysis import settings
from dlprof.analysis.engine import Job, Maybe, across_ranks
from dlprof.analysis.input.fetch_replay import Pace, replay, stretches
from dlprof.analysis.step.breakdown import part
from dlprof.errors import NotMeasured

# Fetches of each worker that tell it from the others.
_ENOUGH = 3


@dataclass(frozen=True)
class Paces:
    """The paces of all ranks, each made when it is first asked for."""

    loader_means: pd.DataFrame
    step_means: pd.DataFrame
    fetch_series: pd.DataFrame
    step_series: pd.DataFrame
    breakdown: Maybe[pd.DataFrame]
    job: Job
    _known: dict[int, Pace] = field(default_factory=dict)

    def of(self, rank: int) -> Pace:
        """Return a rank's pace; raise NotMeasured where its fetches were not recorded, or steps take several."""
        if rank not in self._known:
            self._known[rank] = self._made(rank)
        return self._known[rank]

    def step_ns(self, rank: int) -> float:
        """Return the mean steady step of a rank as measured, ns."""
        return float(_of(self.step_means, rank)["step_ns"].iloc[0])

    def workers_in_turn(self, rank: int) -> NDArray[np.int64]:
        """Return which worker made each of the fetches of a rank's pace."""
        made: NDArray[np.int64] = in_turn(_of(self.fetch_series, rank))["worker"].to_numpy()
        return made

    def _made(self, rank: int) -> Pace:
        loader = settings.training_loader(self.job, rank)
        workers, cpu = loader.get("num_workers"), self.job.facts[rank].get("cpu") or {}
        cores = settings.cores(self.job, rank)
        means = _of(self.loader_means, rank)
        steps = _of(self.step_means, rank)
        fetches = in_turn(_of(self.fetch_series, rank))
        series = _of(self.step_series, rank)
        series = series[series["steady"].astype(bool) & (series["fetch_ns"] >= 0)]
        if not isinstance(workers, int) or cores is None or not (len(means) and len(fetches) and len(series)):
            raise NotMeasured("what fetching a batch takes was not recorded")
        row, step = means.iloc[0], steps.iloc[0]
        if not 0.9 < row["batches"] / step["steps"] < 1.1:
            raise NotMeasured("a step takes more than one batch")
        fetch, used, delay, collate = (
            fetches[c].to_numpy(dtype=float) for c in ("dur_ns", "cpu_ns", "delay_ns", "collate_ns")
        )
        if (used < 0).all() or np.isnan(row["cores"]):
            raise NotMeasured("what fetching and training use of the cores was not recorded")
        used = np.where(used < 0, used[used >= 0].mean(), used)
        delay = np.minimum(np.maximum(delay, 0.0), np.maximum(fetch - used, 0.0))
        collate = np.clip(collate, 0.0, fetch)
        # It computes or waits for a core, and had its core as often as the rest of the batch.
        together = np.minimum(collate, used + delay)
        had = used / np.maximum(used + delay, 1.0)
        # Taking a batch that is there is the loop's own work.
        taken = 0.0 if np.isnan(row["taken_ns"]) else float(row["taken_ns"])
        own = (series["dur_ns"] - (series["fetch_ns"] - taken).clip(lower=0)).to_numpy(dtype=float)
        if not settings.on_cpu(self.job) and rank not in self.breakdown.lacking:
            # A host that waits for no data only launches: the loop is as fast as its device.
            own = np.maximum(own, float(step["step_ns"]) - part(self.breakdown.get(), "input_wait")[rank])
        inside = 0.0 if workers else 1.0  # the share of fetching that the loop's own figures hold
        own_delay = (0.0 if np.isnan(row["delayed"]) else row["delayed"]) * step["step_ns"] - inside * delay.mean()
        own_used = row["cores"] * step["step_ns"] - inside * used.mean()
        threads = int(cpu.get("torch_threads") or 1) if settings.on_cpu(self.job) else 1
        # The kernel tells what the training thread waited for a core; what the others did, it spun.
        alone = min(max(1.0 - own_delay / own.mean(), 0.1), 1.0) ** (threads if threads <= cores else 1)
        needs = fetch - delay + float(fetches["gap_ns"].iloc[0])
        recorded = Pace(
            workers=workers,
            prefetch=int(loader.get("prefetch_factor") or 2),
            own=own * alone,
            own_cpu=min(max(own_used, 0.0) / threads / (own.mean() * alone), 1.0),
            threads=threads,
            fetch=needs,
            fetch_cpu=used,
            cores=cores,
            ranks=settings.neighbours(self.job, rank),
            others_cpu=_others_cpu(self.fetch_series, self.job, rank),
            collate=collate - together * (1 - had),
            collate_cpu=together * had,
        )
        trained, waited = recorded.own.mean() * recorded.own_cpu, own.mean() * (1 - alone)
        fetched = recorded.batch_cpu * (1 + delay.mean() / max(used.mean(), 1.0))
        _, while_own = replay(own, fetch + float(fetches["gap_ns"].iloc[0]), used, workers, recorded.prefetch)
        busy = (trained + waited) / step["step_ns"], fetched / step["step_ns"]
        model = stretches(recorded, workers, busy, own.mean() / step["step_ns"], while_own)
        stretch = 1 + waited / max(trained, 1.0)
        beside = stretch / model[0], (1 + delay.mean() / max(used.mean(), 1.0)) / model[1]
        return replace(recorded, beside=beside, stretch=stretch)


@across_ranks
def paces(
    loader_means: pd.DataFrame,
    step_means: pd.DataFrame,
    fetch_series: pd.DataFrame,
    step_series: pd.DataFrame,
    breakdown: Maybe[pd.DataFrame],
    job: Job,
) -> Paces:
    """Return the paces of all ranks."""
    return Paces(loader_means, step_means, fetch_series, step_series, breakdown, job)


def _others_cpu(fetch_series: pd.DataFrame, job: Job, rank: int) -> float:
    """Return what a batch of other ranks of a host computes in the mean, ns; NaN: there are none, or nobody knows."""
    host = settings.host(job, rank)
    others = [r for r in job.ranks if r != rank and settings.host(job, r) == host]
    frame = fetch_series
    frame = frame[frame["rank"].isin(others) & (frame["cpu_ns"] >= 0)]
    return float(frame.groupby("rank")["cpu_ns"].mean().mean())


def in_turn(fetches: pd.DataFrame) -> pd.DataFrame:
    """Put fetches in the order in which their batches are taken: each worker's one, in turn; what is over is left out.

    As they stand, where a worker has too few of them for that.
    """
    turn = fetches.groupby("worker").cumcount()
    whole = int(fetches.groupby("worker").size().min()) if len(fetches) else 0
    if whole < _ENOUGH:
        return fetches
    return fetches.assign(turn=turn)[turn < whole].sort_values(["turn", "worker"], kind="stable")


def _of(frame: pd.DataFrame, rank: int) -> pd.DataFrame:
    return frame[frame["rank"] == rank]
