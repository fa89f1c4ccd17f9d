"""What `dlprof bandwidth` has measured between ranks like a job's: saved in the run's folder, or in that of all runs.

It stands for what the links can carry where no data sheet says: between hosts, over PCIe, between CPUs. So it has to
be of the same backend and devices. Ranks on CPUs also have to be on the same hosts: there is no name by which two
CPUs, with their memory and network, could be known to be alike.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd

from dlprof.analysis import settings
from dlprof.analysis.engine import Job, across_ranks
from dlprof.errors import DlprofError, NotMeasured
from dlprof.files import BANDWIDTHS
from dlprof.read.opening import Inside, read_file
from dlprof.result.bandwidth import Bandwidth, from_json
from dlprof.units import count

# A folder may hold anything: so many are read.
_MOST_FILES = 64

# Sizes are alike to this factor: beyond what was measured nothing is extrapolated further.
ALIKE_SIZE = 2.0


@across_ranks
def measured_links(job: Job) -> pd.DataFrame:
    """Return the collectives that were measured, of measurements that fit a job: those on its own hosts first.

    Columns: collective, ranks, hosts (how many), bytes, took_ns, dtype, and source (which measurement, in words), in
    order of their worth: on the job's own hosts, then the newest. Raises NotMeasured where none fits, with what was
    found.
    """
    kept, broken = _kept(job)
    if not kept:
        raise NotMeasured(broken[0] if broken else "no measurement of `dlprof bandwidth` stands beside the run")
    fitting, why = [], ""
    for path, measured in kept:
        unlike = _unlike(job, measured)
        if unlike:
            why = f"{path.name} is {unlike}"
        else:
            fitting.append((path, measured))
    if not fitting:
        raise NotMeasured(why)
    here = {settings.host(job, r) for r in job.ranks}
    fitting.sort(key=lambda of: (not here <= set(of[1].hosts), -of[1].start_ns))
    rows = [
        {
            "collective": t.collective,
            "ranks": m.ranks,
            "hosts": len(set(m.hosts)),
            "bytes": t.bytes,
            "took_ns": t.ns,
            "dtype": m.dtype,
            "source": _source(path, m, here),
        }
        for path, m in fitting
        for t in m.timings
        if t.ns and t.correct
    ]
    if not rows:
        raise NotMeasured(f"{fitting[0][0].name} holds no time")
    return pd.DataFrame(rows)


def expected(
    links: pd.DataFrame, collective: str, ranks: int, hosts: int, size: float, dtype: str
) -> tuple[float, str]:
    """Return what a collective of `size` bytes takes by measured links, ns, and the source; NaN where none is like it.

    Of as many ranks on as many hosts; `dtype` "" is any. Between two measured sizes a time lies on the line between
    theirs. Beyond the largest it grows with the bytes; below the smallest it stays, for a start takes as long.
    """
    of = links[(links["collective"] == collective) & (links["ranks"] == ranks) & (links["hosts"] == hosts)]
    of = of[of["dtype"] == dtype] if dtype else of
    for source in of["source"].unique():  # the best first
        points = of[of["source"] == source].sort_values("bytes")
        sizes, took = points["bytes"].to_numpy(dtype=float), points["took_ns"].to_numpy(dtype=float)
        if sizes[0] / ALIKE_SIZE <= size <= sizes[-1] * ALIKE_SIZE:
            return float(np.interp(size, sizes, took) * max(size / sizes[-1], 1.0)), str(source)
    return np.nan, ""


def unreadable(job: Job) -> list[str]:
    """Return a line for each file of measurements beside a run that cannot be used."""
    return _kept(job)[1]


def _kept(job: Job) -> tuple[list[tuple[Path, Bandwidth]], list[str]]:
    """Return the measurements beside a run, and why a file is none."""
    kept, broken = [], []
    for path in _files(job):
        try:
            kept.append((path, from_json(json.loads(read_file(path)))))
        except DlprofError as e:  # noqa: PERF203 - each may be broken
            broken.append(f"{path.name}: {e}")
        except (ValueError, RecursionError) as e:
            broken.append(f"{path.name} is broken ({str(e)[:120]})")
    return kept, broken


def _files(job: Job) -> Iterator[Path]:
    run = job.run
    folder = run.path if run.path.is_dir() else run.path.parent
    # The folder of all runs is the user's own; around traces from anywhere there may be anything.
    for where in (folder, folder.resolve().parent) if run.recorded else (folder,):
        inside = Inside(where)
        try:
            yield from [path for path in sorted(where.glob(BANDWIDTHS)) if inside.holds(path)][:_MOST_FILES]
        except OSError:  # may not be listed
            continue


def _unlike(job: Job, measured: Bandwidth) -> str:
    """Say in what a measurement differs from a job so that it tells nothing of it; "" where it does not."""
    on_cpu = settings.on_cpu(job)
    told = {str(job.facts[r].get("backend") or job.trace_facts[r].get("backend") or "not known") for r in job.ranks}
    # A group may have a backend for each kind of device: "cpu:gloo,cuda:nccl".
    kinds = [dict(part.split(":", 1) for part in b.split(",") if ":" in part) or {"": b} for b in told]
    backends = {of.get("", of.get("cpu" if on_cpu else "cuda", "not known")) for of in kinds}
    if backends != {measured.backend}:
        return f"of {measured.backend}, and the job's backend is {' and '.join(sorted(backends))}"
    if on_cpu:
        others = {settings.host(job, r) for r in job.ranks} - set(measured.hosts)
        return f"of other hosts than {sorted(others)[0] or 'the unknown one'}" if others or measured.device else ""
    devices = {settings.device(job, r) for r in job.ranks}
    return "" if devices == {measured.device} else f"of {measured.device or 'CPUs'}, and the job's devices differ"


def _source(path: Path, measured: Bandwidth, here: set[str]) -> str:
    hosts = list(dict.fromkeys(measured.hosts))
    on = hosts[0] if len(hosts) == 1 else f"{hosts[0]} and {count(len(hosts) - 1, 'other')}"
    day = f"{np.datetime64(measured.start_ns, 'ns').astype('datetime64[D]')}"
    elsewhere = "" if here <= set(hosts) else ", other hosts than the job's with the same devices"
    return f"{path.name} of {day}, {count(measured.ranks, 'rank')} on {on}{elsewhere}"
