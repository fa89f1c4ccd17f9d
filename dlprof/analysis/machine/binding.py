"""Which cores of their host the ranks are bound to, which of them they share, and how far these are from their GPU."""

from __future__ import annotations

from collections import defaultdict

import pandas as pd

from dlprof.analysis import settings
from dlprof.analysis.engine import JOB, Job, across_ranks, needs
from dlprof.errors import DoesNotApply, NotMeasured
from dlprof.units import ranks_named

_MOST_CORES = 65_536


def cores_of(text: object) -> frozenset[int]:
    """Return the cores of a text of the kernel's, "0-3,8"; none of what is no such text."""
    found: set[int] = set()
    for part in str(text or "").split(","):
        first, _, last = part.strip().partition("-")
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
    """Say which ranks of `bindings` may only use cores of another NUMA node than their GPU's; "": none is known to."""
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
