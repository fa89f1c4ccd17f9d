"""How many threads and cores a rank has, and how long its main thread waits for a core.

Which cores of their host the ranks are bound to, which of them they share, and how far these are from their GPU.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from dlprof.analysis import settings
from dlprof.analysis.compute.cpu_work import cpu_parts, split_share
from dlprof.analysis.engine import JOB, Frame, Job, Maybe, across_ranks, maybe, needs
from dlprof.analysis.estimate import change
from dlprof.analysis.machine.samples import OTHERS_WAITED, WAITED, sample_means
from dlprof.analysis.step.breakdown import breakdown, part
from dlprof.analysis.timeline.steps import mean_step_ns
from dlprof.errors import DoesNotApply, NotMeasured
from dlprof.result import Change, Place
from dlprof.units import count, ranks_named

# What binds a process when its OpenMP starts; what a launcher says that it has bound it by.
_OPENMP = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PROC_BIND", "OMP_PLACES")
_OF_LAUNCHER = ("SLURM_CPU_BIND", "SLURM_CPUS_PER_TASK")

_PERIODS = ("throttled_periods_per_s", "quota_periods_per_s")

_OF_PROCESS = ("cpu_cores", "involuntary_switches_per_s", "children_cpu_cores")


@across_ranks
def core_waits(
    sample_means: Frame = needs(sample_means),
    mean_step_ns: float = needs(mean_step_ns),
    breakdown: Maybe[Frame] = maybe(breakdown),
    cpu_parts: Maybe[Frame] = maybe(cpu_parts),
    job: Job = needs(JOB),
) -> pd.DataFrame:
    """Return how the ranks' threads wait for a core, a row a rank.

    Columns: rank, threads (of PyTorch's pool), cores (that the rank has to itself), waited (the share of the time in
    which its main thread is ready and has no core), pool_waited (the same of one of the others of its pool, NaN: not
    counted), waits_ns (of the mean step; on a GPU, where any rank has more threads than cores, at most what the host
    leaves it idle), lost_ns (of the mean step, gone with as many threads as cores), noise_ns (its standard error), and
    of its process cpu_cores, involuntary_switches_per_s and children_cpu_cores (NaN: not sampled).
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
    pool = means.reindex(columns=[OTHERS_WAITED])[OTHERS_WAITED].reindex(frame.index)
    frame["pool_waited"] = (pool / (frame["threads"] - 1).clip(lower=1)).clip(upper=frame["waited"].clip(lower=0.0))
    split = split_share(cpu_parts.or_none(), mean_step_ns)
    gone = [_lost(row, split.get(rank, 1.0)) for rank, row in zip(frame.index, frame.to_dict("records"), strict=True)]
    frame["lost_ns"] = frame["waits_ns"] if not settings.on_cpu(job) else np.array(gone) * mean_step_ns
    frame["lost_ns"] = np.maximum(frame["lost_ns"], frame["waits_ns"])
    return frame.join(means.reindex(columns=list(_OF_PROCESS))).rename_axis("rank").reset_index()


def _lost(row: Mapping[Any, float], split: float) -> float:
    """Return what share of the step a rank loses to more threads than cores.

    An operator that is split goes on only while its main thread and the one that it waits for both have a core. With as
    many threads as cores each of these has more of the work: `split` is the share of the step that they divide.
    """
    if math.isnan(row["pool_waited"]):
        return 0.0
    going = (1 - row["waited"]) * (1 - row["pool_waited"])
    return max(1.0 - going * (1 + split * (row["threads"] / row["cores"] - 1)), 0.0)


@across_ranks
def spare_cores(sample_means: Frame = needs(sample_means), job: Job = needs(JOB)) -> pd.DataFrame:
    """Return how many idle cores each rank could use, a row a rank.

    Columns: rank, threads (of PyTorch's pool), cores (that the rank has to itself), idle (of the host's, its share),
    and more (threads that would have a core each; `threads` where there is no core for another).
    Raises NotMeasured where no rank has the first three.
    """
    means = sample_means[sample_means["source"] == "host"].pivot_table(index="rank", columns="metric", values="mean")
    if not {"cores", "cpu_cores"} <= set(means.columns):
        raise NotMeasured("how many of the host's cores are in use was not sampled")
    free = (means["cores"] - means["cpu_cores"]).clip(lower=0.0)
    of_host = {settings.host(job, int(str(rank))): float(ns) for rank, ns in free.dropna().items()}
    rows = []
    for rank in job.ranks:
        threads, cores, host = settings.threads(job, rank), _cores(job, rank), settings.host(job, rank)
        if threads and cores and host in of_host:
            idle = of_host[host] / settings.neighbours(job, rank)
            # A core that is idle for most of the time is one for another thread.
            rows.append((rank, threads, cores, idle, max(min(cores, threads + round(idle)), threads)))
    if not rows:
        raise NotMeasured("the numbers of cores and of threads are not known")
    return pd.DataFrame(rows, columns=["rank", "threads", "cores", "idle", "more"])


def _cores(job: Job, rank: int) -> int | None:
    """Return how many cores a rank has to itself: those it is bound to, or its share of the host's."""
    cpu = job.facts[rank].get("cpu") or {}
    bound, all_cores = cpu.get("affinity"), cpu.get("count")
    if bound and all_cores and bound < all_cores and bound * settings.neighbours(job, rank) <= all_cores:
        return int(bound)
    return settings.cores_per_rank(job, rank)


@across_ranks
def throttling(sample_means: Frame = needs(sample_means)) -> dict[int, float]:
    """Return in which share of its periods the quota of a rank's container stopped it, by rank; {}: no quota."""
    means = sample_means[sample_means["source"] == "processes"]
    means = means.pivot_table(index="rank", columns="metric", values="mean")
    if not set(_PERIODS) <= set(means.columns):
        return {}
    shares = (means[_PERIODS[0]] / means[_PERIODS[1]].clip(lower=1e-9)).clip(upper=1.0)
    return {int(str(rank)): float(share) for rank, share in shares.dropna().items()}


def line_of(job: Job, rank: int, kind: str) -> Place | None:
    """Return the script's last line that set the process's cores ("affinity") or threads; None: none was seen."""
    calls = [call for call in job.facts[rank].get("calls") or () if call.get("kind") == kind]
    if not calls:
        return None
    last = calls[-1]
    via = f", by {last['via']}" if last.get("via") else ""
    what = f"{last.get('source', '')}{via}"
    return Place(str(last["file"]), int(last["line"]), str(last.get("function", "")), what=what)


def binds_itself(job: Job, rank: int) -> bool:
    """Return whether a rank, alone on its host, was bound to some of the cores by its own process."""
    cpu = job.facts[rank].get("cpu") or {}
    return settings.is_bound(job, rank) and cores_of(cpu.get("at_start")) > cores_of(cpu.get("allowed"))


def freed(job: Job, rank: int) -> Change:
    """Propose more cores for a rank that is bound to some: without what bound it, as far as that is known."""
    cpu, env = job.facts[rank].get("cpu") or {}, job.facts[rank].get("env") or {}
    its = f"its affinity is {cpu['affinity']} of the host's {count(cpu['count'], 'core')}"
    if not binds_itself(job, rank):
        by = next((f"`{name}={env[name]}`" for name in _OF_LAUNCHER if env.get(name)), "`taskset`, `numactl`")
        when = "when it started" if cpu.get("at_start") else "(`os.sched_setaffinity`)"
        return change(f"let it use more cores: {its} {when} ({by}, the job's `--cpus-per-task`)")
    line = line_of(job, rank, "affinity")
    if line is not None:
        return change(f"no `{line.what or 'os.sched_setaffinity'}` at {line.file}:{line.line}: {its} since")
    by = next((f"`{name}={env[name]}` has OpenMP bind it" for name in _OPENMP if env.get(name)), "a library bound it")
    return change(f"let it use more cores: {its}, and was more when it started: {by}")


def threads_set_by(job: Job, rank: int) -> str:
    """Say what set the number of threads of a rank: ", by …"; "": not known."""
    line, env = line_of(job, rank, "threads"), job.facts[rank].get("env") or {}
    if line is not None:
        return f", by `{line.what}` at {line.file}:{line.line}"
    given = env.get("OMP_NUM_THREADS")
    if given is None or str(given) != str(settings.threads(job, rank)):
        return ""
    if given == "1" and (job.facts[rank].get("launch") or {}).get("TORCHELASTIC_RUN_ID"):
        return ": `torchrun` sets `OMP_NUM_THREADS=1` where it is not set"
    return f", by `OMP_NUM_THREADS={given}` in its environment"


_MOST_CORES = 65_536


def cores_of(text: object) -> frozenset[int]:
    """Return the cores of a text of the kernel's, "0-3,8"; none of what is no such text."""
    found: set[int] = set()
    for piece in str(text or "").split(","):
        first, _, last = piece.strip().partition("-")
        if first.isdecimal() and (last or first).isdecimal() and len(first) < 7 and len(last) < 7:
            found.update(range(int(first), min(int(last or first), _MOST_CORES) + 1))
    return frozenset(found)


@across_ranks
def bindings(job: Job = needs(JOB)) -> pd.DataFrame:
    """Return a row for each rank that is bound to some of its host's cores.

    Columns: rank, host, cores (that it may use), shared (of these with other ranks), left (cores of the host that no
    rank may use), node and gpu_node (NUMA nodes of its cores, and of its GPU; −1: several, or not known). Raises
    NotMeasured where the cores were not recorded, DoesNotApply where no rank is bound.
    """
    sets: dict[str, dict[int, frozenset[int]]] = defaultdict(dict)
    counts: dict[str, int] = {}
    for rank in job.ranks:
        cpu = job.facts[rank].get("cpu") or {}
        mine, host = cores_of(cpu.get("allowed")), settings.host(job, rank)
        if mine and isinstance(cpu.get("count"), int):
            sets[host][rank], counts[host] = mine, cpu["count"]
    if not sets:
        raise NotMeasured("which cores the ranks may use was not recorded")
    rows = []
    for host, ranks in sets.items():
        every = frozenset().union(*ranks.values())
        for rank, mine in ranks.items():
            if len(mine) >= counts[host]:
                continue
            shared = mine & frozenset().union(*(other for r, other in ranks.items() if r != rank))
            node, gpu = _nodes(job, rank, mine)
            rows.append((rank, host, len(mine), len(shared), max(counts[host] - len(every), 0), node, gpu))
    if not rows:
        raise DoesNotApply("no rank is bound to some of its host's cores")
    return pd.DataFrame(rows, columns=["rank", "host", "cores", "shared", "left", "node", "gpu_node"])


def far_from_gpu(frame: pd.DataFrame) -> str:
    """Say which ranks of `bindings` may only use cores of another NUMA node than their GPU's; "": none known."""
    known = frame[(frame["node"] >= 0) & (frame["gpu_node"] >= 0) & (frame["node"] != frame["gpu_node"])]
    parts = [
        f"{ranks_named(of['rank'])} may only use cores of NUMA node {node}, and"
        f" {'its GPU is' if len(of) == 1 else 'their GPUs are'} at node {gpu}"
        for (node, gpu), of in known.groupby(["node", "gpu_node"])
    ]
    return "; ".join(parts)


def _nodes(job: Job, rank: int, mine: frozenset[int]) -> tuple[int, int]:
    facts = job.facts[rank]
    nodes = (facts.get("cpu") or {}).get("nodes") or {}
    on = [int(name) for name, cores in nodes.items() if str(name).isdecimal() and mine & cores_of(cores)]
    gpu = (facts.get("device") or {}).get("node")
    return (on[0] if len(on) == 1 else -1), (gpu if isinstance(gpu, int) and len(nodes) > 1 else -1)
