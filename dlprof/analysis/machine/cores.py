"""How many threads and cores a rank has, and how long its main thread waits for a core."""

from __future__ import annotations

import numpy as np
import pandas as pd

from dlprof.analysis import settings
from dlprof.analysis.engine import Job, Maybe, across_ranks
from dlprof.analysis.machine.samples import WAITED
from dlprof.analysis.step.breakdown import part
from dlprof.errors import NotMeasured

_OF_PROCESS = ("cpu_cores", "involuntary_switches_per_s", "children_cpu_cores")


@across_ranks
def core_waits(
    sample_means: pd.DataFrame, mean_step_ns: float, breakdown: Maybe[pd.DataFrame], job: Job
) -> pd.DataFrame:
    """Return how the ranks' main threads wait for a core, a row a rank.

    Columns: rank, threads (of PyTorch's pool), cores (that the rank has to itself), waited (the share of the time in
    which its main thread is ready and has no core), waits_ns (of the mean step; on a GPU, where any rank has more
    threads than cores, at most what the host leaves it idle), noise_ns (its standard error), and of its process
    cpu_cores, involuntary_switches_per_s and children_cpu_cores (NaN: not sampled).
    Raises NotMeasured where any of the first three is not known of any rank.
    """
    waits = sample_means[sample_means["metric"] == WAITED].set_index("rank")
    if waits.empty:
        raise NotMeasured(
            "how long threads wait for a core was not read: this kernel does not count it (CONFIG_SCHED_INFO)"
        )
    known = {
        rank: (threads, cores)
        for rank in job.ranks
        if (threads := (job.facts[rank].get("cpu") or {}).get("torch_threads")) and (cores := _cores(job, rank))
    }
    if not known:
        raise NotMeasured("how many cores and threads the ranks have was not recorded (record with `dlprof wrap`)")
    frame = pd.DataFrame.from_dict(known, orient="index", columns=["threads", "cores"])
    frame = frame.join(waits[["mean", "noise"]].set_axis(["waited", "noise_ns"], axis=1), how="inner")
    if frame.empty:
        raise NotMeasured("how many threads the sampled ranks have was not recorded")
    frame = frame.assign(waits_ns=frame["waited"] * mean_step_ns, noise_ns=frame["noise_ns"] * mean_step_ns)
    if not settings.on_cpu(job) and (frame["threads"] > frame["cores"]).any():
        idle = part(breakdown.get(), "host", "optimizer_host")
        frame["waits_ns"] = np.minimum(frame["waits_ns"], [idle.get(rank, 0.0) for rank in frame.index])
    process = sample_means[sample_means["source"] == "processes"]
    means = process.pivot_table(index="rank", columns="metric", values="mean")
    return frame.join(means.reindex(columns=list(_OF_PROCESS))).rename_axis("rank").reset_index()


def _cores(job: Job, rank: int) -> int | None:
    """Return how many cores a rank has to itself: those it is bound to, or its share of the host's."""
    cpu = job.facts[rank].get("cpu") or {}
    bound, all_cores = cpu.get("affinity"), cpu.get("count")
    if bound and all_cores and bound < all_cores and bound * settings.neighbours(job, rank) <= all_cores:
        return int(bound)
    return settings.cores_per_rank(job, rank)
