"""Panels of machine, as data that the page draws."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd

from dlprof.analysis.engine import JOB, Frame, Job, needs
from dlprof.analysis.machine.gpus import gpu_uses
from dlprof.analysis.machine.samples import ENOUGH, OPTIONS, sample_series
from dlprof.analysis.panel import MOST_RANKS, Picture, points, table
from dlprof.analysis.step.whole_job import began_ns, first_times
from dlprof.errors import DoesNotApply
from dlprof.read.mixture import Taken
from dlprof.result import Panel
from dlprof.units import count, few

TITLE = "Files: what was read, and what was left"

# Names of one row, and rows.
_NAMED = 3

_MOST = 60

_FILES_COLUMNS = {
    "files": "files",
    "what": "what they are",
    "read": "read",
    "brings": "what they bring, or why they are left",
}


def draw_files(job: Job = needs(JOB)) -> list[Panel]:
    """List the files of a folder that dlprof did not record, those that are read first."""
    taken = job.run.taken
    if len(taken) < 2 and not (job.run.recorded and taken):
        raise DoesNotApply("all figures are of dlprof's own recording, or of one file")
    grouped: dict[tuple[bool, str, str], list[Taken]] = {}
    for one in taken:
        what = one.format.title if one.format else ""
        why = one.left or (one.format.brings if one.format else "")
        grouped.setdefault((not one.ranks, what, why), []).append(one)
    rows = [
        {
            "files": f"{count(len(files), 'file')}: {_names(job, files)}" if len(files) > 1 else _names(job, files),
            "what": what or "not known",
            "read": "left" if left else _ranks(files),
            "brings": why,
        }
        for (left, what, why), files in sorted(grouped.items(), key=lambda item: item[0][0])
    ]
    note = "" if len(rows) <= _MOST else f"{len(rows) - _MOST} more kinds of files are left."
    return [table(TITLE, pd.DataFrame(rows), _FILES_COLUMNS, most=_MOST, note=note)]


def _names(job: Job, files: Iterable[Taken]) -> str:
    root = job.run.path
    names = [str(one.path.relative_to(root)) if one.path.is_relative_to(root) else one.path.name for one in files]
    return few(names, _NAMED)


def _ranks(files: Iterable[Taken]) -> str:
    ranks = sorted({rank for one in files for rank in one.ranks})
    if all(one.format and one.format.of_host for one in files):
        return "for the host"
    if len(ranks) > 1 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"rank{'s' if len(ranks) > 1 else ''} {few(ranks, 8)}"


FILES_PICTURE = Picture(draw_files)

MOST_GPUS = 64

_GPU_LOGS_COLUMNS = {
    "source": "GPU",
    "readings": "readings",
    "busy_share": "some kernel ran_share",
    "idle_share": "readings when idle_share",
    "power_w": "power, W",
    "power_limit_w": "power limit, W",
    "sm_clock_mhz": "clock, MHz",
    "sm_clock_max_mhz": "clock at most, MHz",
    "temperature_c": "highest temperature, °C",
    "memory_used_bytes": "most memory in use_bytes",
    "memory_total_bytes": "memory_bytes",
}


def draw_gpu_logs(gpu_uses: Frame = needs(gpu_uses)) -> list[Panel]:
    """List what each GPU did on the mean, and say which readings that is of and what the log lacks."""
    known = {name: title for name, title in _GPU_LOGS_COLUMNS.items() if gpu_uses[name].notna().any()}
    whole = gpu_uses[gpu_uses["at"] == "log"]
    notes = ["Of the readings during the run." if whole.empty else "Of all readings, not of the run's alone."]
    notes += [f"{text[0].upper()}{text[1:]}." for text in dict.fromkeys(gpu_uses["why"]) if text]
    lacks = [text for text in dict.fromkeys(gpu_uses["lacks"]) if text]
    notes += [f"What it lacks comes with {lacks[0]}."] if lacks else []
    return [table("GPUs by their logs", gpu_uses, known, MOST_GPUS, note=" ".join(notes))]


GPU_LOGS_PICTURE = Picture(draw_gpu_logs)

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


def draw_samples(
    sample_series: Frame = needs(sample_series),
    first_times: tuple[int, ...] = needs(first_times),
    job: Job = needs(JOB),
) -> list[Panel]:
    """Draw what was sampled over the run: cores, memory, and what of the GPUs was read."""
    begin, end = began_ns(first_times, sample_series["at_ns"].min()), sample_series["at_ns"].max()
    # Wide enough that no bin stays empty between two readings of a rank.
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


SAMPLES_PICTURE = Picture(draw_samples)
