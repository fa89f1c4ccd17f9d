"""What programs outside the job take of a host's cores, and whether a run beside them can clear the job.

Beside them everything waits: the training thread, the threads that it waits for, loader workers. A bottleneck then
looks like any other wait, and hides among them.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from dlprof.analysis import settings
from dlprof.analysis.engine import JOB, Frame, Job, Maybe, across_ranks, maybe, needs
from dlprof.analysis.machine.samples import WAITED, sample_means
from dlprof.analysis.step.breakdown import breakdown, part
from dlprof.analysis.timeline.steps import mean_step_ns
from dlprof.errors import NotMeasured

# Less than this share of a host's cores is what its own services use.
_LITTLE = 0.05
# A host whose cores are in use to this share has none to spare, and what others take of it the job would have had: it
# counts from twice the share above on.
_FULL = 0.95
# Waiting for a core, caused by others, from this share of the time on: as for threads of the job's own.
_NOTABLE = 0.05

# What a device leaves idle for its host: of waiting for a core no more than that costs anything.
_OF_HOST = ("host", "optimizer_host", "launch_latency", "input_wait")


@across_ranks
def foreign_load(
    sample_means: Frame = needs(sample_means),
    breakdown: Maybe[Frame] = maybe(breakdown),
    mean_step_ns: float = needs(mean_step_ns),
    job: Job = needs(JOB),
) -> pd.DataFrame:
    """Return what programs outside the job use of each host's cores while training is steady, the most disturbed first.

    Columns: host, cores, used, ours (cores in use, and by all processes of the job and dlprof's own), foreign (the
    difference), waited (the largest share of the time that a training thread of the host was ready and had no core),
    lost (how much of that others cause; NaN as waited: this kernel does not count it), and disturbs (1: they
    take what the job would have used).
    Raises NotMeasured where no host's cores, or not what the job used of them, were sampled.
    """
    of_host = sample_means[sample_means["source"] == "host"]
    means = of_host.pivot_table(index="rank", columns="metric", values="mean")
    if not {"cores", "cpu_cores", "job_cpu_cores"} <= set(means.columns):
        raise NotMeasured("what the job used of the host's cores was not sampled")
    means = means.dropna(subset=["cores", "cpu_cores", "job_cpu_cores"])
    workers = sample_means[sample_means["metric"] == "children_cpu_cores"].set_index("rank")["mean"]
    waits = sample_means[sample_means["metric"] == WAITED].set_index("rank")["mean"]
    waits = _felt(waits, breakdown, mean_step_ns, job)
    hosts = {rank: settings.host(job, rank) for rank in job.ranks}
    rows = []
    for first, row in means.iterrows():
        host = hosts[int(str(first))]
        here = [rank for rank, name in hosts.items() if name == host]
        waited = float(waits.reindex(here).max())
        used, ours, cores = (float(row[name]) for name in ("cpu_cores", "job_cpu_cores", "cores"))
        foreign = max(used - ours, 0.0)
        # A job of no more threads than cores, and of no workers, would wait for none of them alone.
        alone = all((settings.threads(job, rank) or 1) <= (settings.cores_per_rank(job, rank) or 1) for rank in here)
        alone &= float(workers.reindex(here).sum()) < _LITTLE * cores
        lost = waited * (1.0 if alone else foreign / max(used, 1e-9))
        full = used >= _FULL * cores and foreign >= 2 * _LITTLE * cores
        disturbs = full or (foreign >= _LITTLE * cores and lost >= _NOTABLE)
        rows.append((host, cores, used, ours, foreign, waited, lost, int(disturbs)))
    if not rows:
        raise NotMeasured("what the job used of the host's cores was not sampled")
    columns = ["host", "cores", "used", "ours", "foreign", "waited", "lost", "disturbs"]
    frame = pd.DataFrame(rows, columns=columns)
    return frame.sort_values(["disturbs", "lost", "foreign"], ascending=False, kind="stable", ignore_index=True)


def _felt(waits: pd.Series[float], breakdown: Maybe[pd.DataFrame], mean_step_ns: float, job: Job) -> pd.Series[float]:
    """Return as much of the ranks' waiting for a core as their steps can be longer by."""
    if settings.on_cpu(job) or waits.empty:
        return waits
    try:
        idle = part(breakdown.get(), *_OF_HOST)
    except NotMeasured:
        return waits
    return pd.Series(np.minimum(waits, [idle.get(int(str(r)), 0.0) / mean_step_ns for r in waits.index]), waits.index)
