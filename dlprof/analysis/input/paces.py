"""At what pace each rank's loop took its batches, and its workers made them, as recorded."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof.analysis import settings
from dlprof.analysis.engine import Job, Maybe, across_ranks
from dlprof.analysis.input.fetch_replay import Pace, held_up, replay, stretches
from dlprof.analysis.input.handover import BARRIER, UNTOLD, told
from dlprof.errors import NotMeasured
from dlprof.units import digits

# Fetches of each worker from which on their order is known.
_ENOUGH = 3

# A step takes so many batches where their mean is a whole number but for this share: a step more or less at an end.
_UNEVEN = 0.1


@dataclass(frozen=True)
class Paces:
    """The paces of all ranks, each made when it is first asked for."""

    loader_means: pd.DataFrame
    step_means: pd.DataFrame
    fetch_series: pd.DataFrame
    step_series: pd.DataFrame
    input_waits: Maybe[pd.DataFrame]
    pinning: Maybe[pd.DataFrame]
    job: Job
    _known: dict[int, Pace] = field(default_factory=dict)

    def of(self, rank: int) -> Pace:
        """Return a rank's pace; raise NotMeasured where its fetches were not recorded, or steps take uneven numbers."""
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
        loader, on_cpu = settings.training_loader(self.job, rank), settings.on_cpu(self.job)
        workers, cores = loader.get("num_workers"), settings.cores(self.job, rank)
        means, fetches = _of(self.loader_means, rank), in_turn(_of(self.fetch_series, rank))
        series = _of(self.step_series, rank)
        series = series[series["steady"].astype(bool) & (series["fetch_ns"] >= 0)]
        if not isinstance(workers, int) or cores is None or not (len(means) and len(fetches) and len(series)):
            raise NotMeasured("how long fetching a batch takes was not recorded")
        row, step = means.fillna({"taken_ns": 0.0, "delayed": 0.0}).iloc[0], _of(self.step_means, rank).iloc[0]
        batches, loaders = _batches(float(row["step_batches"]), int(row["loaders"]), bool(row["alike"]))
        if loaders > 1 and len({one.get("num_workers") for one in _training(self.job, rank)}) > 1:
            raise NotMeasured("the loaders that a step takes batches from have different numbers of workers")
        fetch, used, delay, collate = fetches[["dur_ns", "cpu_ns", "delay_ns", "collate_ns"]].to_numpy(dtype=float).T
        if on_cpu and not workers:
            # The kernel is not asked about fetches of less than some milliseconds; these are taken to compute.
            used = np.where(used < 0, fetch, used)
        if (used < 0).all() or np.isnan(row["cores"]):
            raise NotMeasured("what fetching and training use of the cores was not recorded")
        # From here on, of one batch.
        step_ns, gap_ns = float(step["step_ns"]) / batches, float(fetches["gap_ns"].iloc[0])
        used = np.where(used < 0, used[used >= 0].mean(), used)
        tensors, size = (float(fetches[name].mean()) for name in ("tensors", "tensor_bytes"))
        # A worker computes with sending a batch too, in a thread beside the one that fetches.
        sending = told(tensors, size, np.nan).usual.sending_ns if on_cpu and workers else 0.0
        delay = np.minimum(np.maximum(delay, 0.0), np.maximum(fetch - np.maximum(used - sending, 0.0), 0.0))
        collate = np.clip(collate, 0.0, fetch)
        # Collating computes or waits for a core, and had its core as often as the rest of the batch.
        together, had = np.minimum(collate, used + delay), used / np.maximum(used + delay, 1.0)
        # Taking a batch that is there is the loop's own work.
        waited_ns = (series["fetch_ns"] - batches * row["taken_ns"]).clip(lower=0)
        own = (series["dur_ns"] - waited_ns).to_numpy(dtype=float)
        waits = None if on_cpu else self.input_waits.or_none()
        if waits is not None and len(waits := _of(waits, rank)):
            # A host that waits for no data only launches, and runs ahead: the loop is as fast as its device.
            own = np.maximum(own, batches * step_ns - (waits["wait_ns"] + waits["taken_ns"]).iloc[0])
        own = _between(own, batches, loaders)
        inside = 0.0 if workers else 1.0  # the share of fetching that the loop's own figures hold
        own_delay, own_used = (
            row["delayed"] * step_ns - inside * delay.mean(),
            row["cores"] * step_ns - inside * used.mean(),
        )
        threads = max(settings.threads(self.job, rank) or 1, 1) if on_cpu else 1
        # The kernel measures how long the training thread waited for a core; meanwhile the others spun.
        alone = min(max(1.0 - own_delay / own.mean(), 0.1), 1.0) ** (threads if threads <= cores else 1)
        # Batches were taken with the same lack of cores as the rest of the loop. On a GPU, the loop is ahead of its
        # device, and not replayed without them.
        taken = means["taken_ns"].iloc[0] * alone
        handover = told(tensors, size, taken) if on_cpu else UNTOLD
        recorded = Pace(
            workers=workers,
            prefetch=int(loader.get("prefetch_factor") or 2),
            own=own * alone,
            own_cpu=min(max(own_used, 0.0) / threads / (own.mean() * alone), 1.0),
            threads=threads,
            fetch=fetch - delay + gap_ns,
            fetch_cpu=used,
            cores=cores,
            ranks=settings.neighbours(self.job, rank),
            others_cpu=_others_cpu(self.fetch_series, self.job, rank),
            collate=collate - together * (1 - had),
            collate_cpu=together * had,
            handover=handover,
            gap=gap_ns,
            barrier=BARRIER if on_cpu else 1.0,
            alone=alone,
            batches=batches,
            loaders=loaders,
            pin=0.0 if rank in self.pinning.lacking else float(_of(self.pinning.get(), rank)["pin_ns"].iloc[0]),
        )
        trained, waited = recorded.own.mean() * recorded.own_cpu, own.mean() * (1 - alone)
        stretch, longer = 1 + waited / max(trained, 1.0), 1 + delay.mean() / max(used.mean(), 1.0)
        _, overlap = replay(own, fetch + gap_ns, used, workers * loaders, recorded.prefetch, recorded.pin / loaders)
        busy = (trained + waited) / step_ns, recorded.batch_cpu * longer / step_ns
        model = stretches(recorded, workers * loaders, busy, own.mean() / step_ns, overlap)
        excess = stretch / model[0]
        # What the loop waited for a core and its workers did not compute, others did.
        foreign = max(waited - held_up(recorded) * recorded.ranks * recorded.batch_cpu, 0.0) if workers else waited
        alone = min(excess, 1 + foreign / max(trained, 1.0))
        return replace(recorded, excess=(excess, longer / model[1]), excess_alone=alone, stretch=stretch)


@across_ranks
def paces(
    loader_means: pd.DataFrame,
    step_means: pd.DataFrame,
    fetch_series: pd.DataFrame,
    step_series: pd.DataFrame,
    input_waits: Maybe[pd.DataFrame],
    pinning: Maybe[pd.DataFrame],
    job: Job,
) -> Paces:
    """Return the paces of all ranks."""
    return Paces(loader_means, step_means, fetch_series, step_series, input_waits, pinning, job)


def _others_cpu(fetch_series: pd.DataFrame, job: Job, rank: int) -> float:
    """Return what a batch of other ranks of a host computes in the mean, ns; NaN: there are none, or it is unknown."""
    others = [r for r in job.ranks if r != rank and settings.host(job, r) == settings.host(job, rank)]
    known = fetch_series[fetch_series["rank"].isin(others) & (fetch_series["cpu_ns"] >= 0)]
    return float(known.groupby("rank")["cpu_ns"].mean().mean())


def _batches(of_a_step: float, loaders: int, alike: bool) -> tuple[int, int]:
    """Return how many batches a step takes, and of how many loaders in turn; raise NotMeasured where that varies."""
    whole = round(of_a_step)
    if whole < 1 or abs(of_a_step / whole - 1) >= _UNEVEN:
        raise NotMeasured(f"a step takes {digits(of_a_step)} batches in the mean: their number varies")
    if loaders > 1 and (not alike or whole % loaders):
        raise NotMeasured(f"the steps take different numbers of batches from {loaders} loaders")
    return whole, loaders


def _between(own: NDArray[np.float64], batches: int, loaders: int) -> NDArray[np.float64]:
    """Divide what the loop does of its own in each step: an equal part follows one batch of every loader."""
    after = np.zeros((len(own), batches))
    after[:, loaders - 1 :: loaders] = own[:, None] * loaders / batches
    return after.ravel()


def _training(job: Job, rank: int) -> list[settings.Settings]:
    return [one for one in job.facts[rank].get("loaders") or [] if one.get("role") == "train"]


def in_turn(fetches: pd.DataFrame) -> pd.DataFrame:
    """Put fetches in the order in which their batches are taken: each worker's one, in turn; what is over is left out.

    Of several loaders, each one's first worker, then each one's second. As they stand, where a worker has too few of
    them for that.
    """
    by_worker = fetches.groupby(["loader", "worker"])
    turn, whole = by_worker.cumcount(), by_worker.size().min()
    if not whole >= _ENOUGH:
        return fetches
    return fetches.assign(turn=turn)[turn < whole].sort_values(["turn", "worker", "loader"], kind="stable")


def _of(frame: pd.DataFrame, rank: int) -> pd.DataFrame:
    return frame[frame["rank"] == rank]
