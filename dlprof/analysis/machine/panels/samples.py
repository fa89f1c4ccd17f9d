"""What was sampled over the run: of the hosts, the processes and the GPUs."""

from __future__ import annotations

import pandas as pd

from dlprof.analysis.engine import Job
from dlprof.analysis.machine.samples import ENOUGH
from dlprof.analysis.panel import MOST_RANKS, Picture, points
from dlprof.analysis.step.run_clock import began_ns
from dlprof.result import Panel

# As many points of what was sampled as a chart of this size can show.
MOST_POINTS = 200

_CHILDREN = "loader workers and other children"


def draw(sample_series: pd.DataFrame, first_times: tuple[int, ...], job: Job) -> list[Panel]:
    """Draw what was sampled over the run: cores, memory, and of the GPUs what they told."""
    series = sample_series
    zero = began_ns(first_times, series["at_ns"].min())
    # Wide enough that none is left empty between two readings of a rank.
    apart = series.groupby(["rank", "source", "metric"])["at_ns"].diff().median()
    width = int(max((series["at_ns"].max() - zero) / MOST_POINTS, 1.5 * apart, 1))
    series = series.assign(time_ns=(series["at_ns"] - zero) // width * width)
    parts: list[tuple[str, str, str, list[pd.DataFrame]]] = []
    for title, unit, note, own, of_host in (
        ("Cores in use", "cores", "", "cpu_cores", "cpu_cores"),
        ("Memory in use", "bytes", "Memory that processes share counts for each.", "rss_bytes", "memory_used_bytes"),
    ):
        children = _of_ranks(series, "processes", f"children_{own}").sum(axis=1, min_count=1).to_frame(_CHILDREN)
        lines = [_of_ranks(series, "processes", own), children, _of_hosts(job, series, of_host)]
        parts.append((title, unit, note, lines))
    parts += [
        (title, unit, note, [_of_ranks(series, "gpu", metric), _of_log(series, metric)])
        for title, unit, note, metric in (
            ("GPU: multiprocessors at work", "share", "", "sm_busy_share"),
            ("GPU: some kernel ran", "share", "A kernel that only waits for others counts as well.", "busy_share"),
            ("GPU: power", "W", "", "power_w"),
            ("GPU: clock of the multiprocessors", "MHz", "", "sm_clock_mhz"),
            ("GPU: memory in use", "bytes", "", "memory_used_bytes"),
        )
    ]
    return [
        panel for title, unit, note, lines in parts if (panel := _sample_panel(title, unit, note, lines)) is not None
    ]


def _sample_panel(title: str, unit: str, note: str, lines: list[pd.DataFrame]) -> Panel | None:
    table = pd.concat(lines, axis=1).sort_index()
    # A line of zeros is a rank without workers.
    table = table.loc[:, [name for name in table if name != _CHILDREN or table[name].max() > 0]]
    if len(table) < ENOUGH or table.shape[1] == 0:
        return None
    return Panel("lines", title, points(table), ("time_ns", *map(str, table.columns)), unit=unit, note=note)


def _of_ranks(series: pd.DataFrame, source: str, metric: str) -> pd.DataFrame:
    """Return a metric over the run, a column a rank; of many ranks the mean and the largest."""
    chosen = series[(series["source"] == source) & (series["metric"] == metric)]
    table = chosen.pivot_table(index="time_ns", columns="rank", values="value")
    if table.shape[1] > MOST_RANKS:
        return pd.DataFrame({"mean of ranks": table.mean(axis=1), "largest of ranks": table.max(axis=1)})
    return table.rename(columns=lambda rank: f"rank {rank}")


def _of_log(series: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Return a metric as nvidia-smi logged it, a column a GPU."""
    chosen = series[series["source"].str.startswith("nvidia-smi") & (series["metric"] == metric)]
    return chosen.pivot_table(index="time_ns", columns="source", values="value").iloc[:, :MOST_RANKS]


def _of_hosts(job: Job, series: pd.DataFrame, metric: str) -> pd.DataFrame:
    chosen = series[(series["source"] == "host") & (series["metric"] == metric)]
    table = chosen.pivot_table(index="time_ns", columns="rank", values="value")
    if table.shape[1] > 2:
        return pd.DataFrame({"mean of hosts": table.mean(axis=1)})
    return table.rename(columns=lambda rank: f"all of {job.facts[rank].get('host') or 'the host'}")


PICTURE = Picture(draw)
