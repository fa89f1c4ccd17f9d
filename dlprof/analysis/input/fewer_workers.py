"""What the step would be with fewer loader workers, or with none: on a CPU, workers cost training more than they fetch.

A worker computes on the cores that training needs, and each batch that it makes has to be handed over. Where fetching
a batch takes less than that, the training thread had better fetch it itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dlprof.analysis import settings
from dlprof.analysis.engine import JOB, Frame, Job, Maybe, across_ranks, maybe, needs
from dlprof.analysis.input.fetch_replay import Forecast, replayed
from dlprof.analysis.input.input_waits import MOST_RANKS, WORTH, Paces, forecasts, paces
from dlprof.analysis.input.loader import loader_calls
from dlprof.errors import DoesNotApply, NotMeasured


@dataclass(frozen=True)
class FewerWorkers:
    """The steps of the rank that gains least by fewer workers, and by how much all gain by the best number, ns.

    `least_ns`: what they gain where workers cost as little as the recording leaves possible.
    """

    rank: int
    forecasts: tuple[Forecast, ...]  # as it is, then with fewer workers
    chosen: Forecast
    least_ns: float
    by_rank_ns: Mapping[int, float]

    @property
    def gain_ns(self) -> float:
        """What the step is shorter by with the chosen workers."""
        return max(self.forecasts[0].step_ns - self.chosen.step_ns, 0.0)


@across_ranks
def fewer_workers(
    loader_calls: Frame = needs(loader_calls), paces: Maybe[Paces] = maybe(paces), job: Job = needs(JOB)
) -> FewerWorkers:
    """Predict the step with fewer workers than there are.

    Raises DoesNotApply where there are none, or training is on a device; NotMeasured where no loader was seen, its
    batches were not recorded, or do not explain the step.
    """
    if not loader_calls["calls"].any():
        raise NotMeasured("no DataLoader was seen")
    workers = {r: settings.training_loader(job, r).get("num_workers") for r in job.ranks}
    if not settings.on_cpu(job) or not any(workers.values()):
        raise DoesNotApply("training is on a device, or its loader has no workers")
    recorded, found = paces.get(), []
    slowest = sorted((r for r in job.ranks if workers[r]), key=lambda r: -recorded.step_ns(r))[:MOST_RANKS]
    for rank in slowest:
        given = forecasts(recorded, rank)
        fewer = [f for f in given[1:] if f.workers < given[0].workers]
        best = min(f.step_ns for f in fewer)
        chosen = min((f for f in fewer if f.step_ns <= best * (1 + WORTH)), key=lambda f: f.workers)
        found.append((rank, given[0], fewer, chosen))
    # All ranks wait for the one that gains least.
    rank, now, fewer, chosen = min(found, key=lambda one: one[1].step_ns - one[3].step_ns)
    cheap = recorded.of(rank).where_workers_cost_least
    least = now.step_ns - replayed(cheap, chosen.workers).step_ns
    return FewerWorkers(
        rank, (now, *fewer), chosen, least, {r: max(a.step_ns - b.step_ns, 0.0) for r, a, _, b in found}
    )
