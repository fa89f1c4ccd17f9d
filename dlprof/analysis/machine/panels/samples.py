"""What was sampled over the run: of the hosts, the processes and the GPUs."""

from __future__ import annotations

import pandas as pd

from dlprof.analysis.engine import JOB, Frame, Job, needs
from dlprof.analysis.machine.log_clocks import OPTIONS
from dlprof.analysis.machine.samples import ENOUGH, sample_series
from dlprof.analysis.panel import MOST_RANKS, Picture, points
from dlprof.analysis.step.run_clock import began_ns, first_times
from dlprof.result import Panel

# As many points of what was sampled as a chart of this size can show.
MOST_POINTS = 200

_CHILDREN = "loader workers and other children"

# Title, unit, note, and the metric of a rank's process and of the host.
_OF_HOSTS = (
    ("Cores in use", "cores", "", "cpu_cores", "cpu_cores"),
    ("Memory in use", "bytes", "Memory that processes share counts for each.", "rss_bytes", "memory_used_bytes"),
)

# Title, unit, note and metric of a GPU.
_OF_GPUS = (
    ("GPU: multiprocessors at work", "share", "", "sm_busy_share"),
    ("GPU: some kernel ran", "share", "A kernel that only waits for others counts as well.", "busy_share"),
    ("GPU: power", "W", "", "power_w"),
    ("GPU: clock of the multiprocessors", "MHz", "", "sm_clock_mhz"),
    ("GPU: memory in use", "bytes", "", "memory_used_bytes"),
)


def draw(
    sample_series: Frame = needs(sample_series),
    first_times: tuple[int, ...] = needs(first_times),
    job: Job = needs(JOB),
) -> list[Panel]:
    """Draw what was sampled over the run: cores, memory, and what of the GPUs was read."""
    begin, end = began_ns(first_times, sample_series["at_ns"].min()), sample_series["at_ns"].max()
    # Wide enough that none is left empty between two readings of a rank.
    apart = sample_series.groupby(["rank", "source", "metric"])["at_ns"].diff().median()
    width = int(max((end - begin) / MOST_POINTS, 1.5 * apart, 1))
    series = sample_series.assign(time_ns=(sample_series["at_ns"] - begin) // width * width)
    panels = []
    for title, unit, note, own, of_host in _OF_HOSTS:
        children = _wide(series, "processes", f"children_{own}").sum(axis=1, min_count=1).to_frame(_CHILDREN)
        # Without workers it is a line of zeros.
        children = children if (children[_CHILDREN] > 0).any() else children.iloc[:, :0]
        lines = [_of_ranks(series, "processes", own), children, _of_hosts(series, of_host, job)]
        panels += _chart(title, unit, note, lines)
    for title, unit, note, metric in _OF_GPUS:
        logged = _wide(series, (*OPTIONS,), metric, "source").iloc[:, :MOST_RANKS]
        panels += _chart(title, unit, note, [_of_ranks(series, "gpu", metric), logged])
    return panels


def _chart(title: str, unit: str, note: str, lines: list[pd.DataFrame]) -> list[Panel]:
    table = pd.concat(lines, axis=1).sort_index()
    if len(table) < ENOUGH or table.shape[1] == 0:
        return []
    return [Panel("lines", title, points(table), ("time_ns", *map(str, table.columns)), unit=unit, note=note)]


def _wide(series: pd.DataFrame, source: str | tuple[str, ...], metric: str, by: str = "rank") -> pd.DataFrame:
    """Return a metric over the run, a column a rank or a source."""
    chosen = series[series["source"].str.startswith(source) & (series["metric"] == metric)]
    return chosen.pivot_table(index="time_ns", columns=by, values="value")


def _of_ranks(series: pd.DataFrame, source: str, metric: str) -> pd.DataFrame:
    """Return a metric over the run, a column a rank; of many ranks the mean and the largest."""
    table = _wide(series, source, metric)
    if table.shape[1] > MOST_RANKS:
        return pd.DataFrame({"mean of ranks": table.mean(axis=1), "largest of ranks": table.max(axis=1)})
    return table.rename(columns="rank {}".format)


def _of_hosts(series: pd.DataFrame, metric: str, job: Job) -> pd.DataFrame:
    """Return a metric over the run, a column a host; of more than two their mean."""
    table = _wide(series, "host", metric)
    if table.shape[1] > 2:
        return pd.DataFrame({"mean of hosts": table.mean(axis=1)})
    return table.rename(columns=lambda rank: f"all of {job.facts[rank].get('host') or 'the host'}")


PICTURE = Picture(draw)
