"""What was sampled next to the ranks: the readings over the run, and their means while training was steady.

Logs of other tools have clocks of their own: which of them lie on the run's, and by how much the others are moved.

Beside programs outside the job everything waits: the training thread, the threads that it waits for, loader workers. A
bottleneck then looks like any other wait, and hides among them. So what they take of a host's cores is measured too.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timezone
from typing import NamedTuple, cast

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof import schema
from dlprof.analysis import settings
from dlprof.analysis.engine import (
    JOB,
    RANK,
    Frame,
    Job,
    Maybe,
    RankFacts,
    across_ranks,
    maybe,
    needs,
    per_rank,
    within_rank,
)
from dlprof.analysis.step.breakdown import breakdown, part
from dlprof.analysis.timeline.steady import light_steps, standard_error, suspended
from dlprof.analysis.timeline.steps import mean_step_ns
from dlprof.errors import NotMeasured

# How the source of each tool's log begins, and which of its options brings a metric.
OPTIONS: dict[str, dict[str, str]] = {
    "nvidia-smi": {
        "busy_share": "--query-gpu=utilization.gpu",
        "power_w": "--query-gpu=power.draw,enforced.power.limit,power.default_limit",
        "memory_used_bytes": "--query-gpu=memory.used,memory.total",
        "sm_clock_mhz": "--query-gpu=clocks.sm,clocks.max.sm",
        "clock_reasons_bits": "--query-gpu=clocks_event_reasons.active",
    },
    "amd-smi": {
        "busy_share": "amd-smi metric --usage",
        "power_w": "amd-smi metric --power",
        "memory_used_bytes": "amd-smi metric --mem-usage",
        "sm_clock_mhz": "amd-smi metric --clock",
    },
    "rocm-smi": {
        "busy_share": "rocm-smi --showuse",
        "power_w": "rocm-smi --showpower",
        "memory_used_bytes": "rocm-smi --showmeminfo vram",
        "sm_clock_mhz": "rocm-smi --showclocks",
    },
}

_SECOND = 1_000_000_000
_DAY = 86_400 * _SECOND
_QUARTER, _HOUR = 900 * _SECOND, 3600 * _SECOND
_ZONES = 14  # hours that a clock is ahead of UTC, or behind it, at most

# Times since 1970 are larger than this, times since a start or of a trace without a base are smaller.
_UNIX = 10**18

# A log belongs to a run where it covers this share of the shorter one of the two.
_COVERS = 0.5


class Clock(NamedTuple):
    """What is known of a log's clock.

    `shift_ns` moves its times to Unix time. `how`: "zone" (the log says it), "fitted" (the one zone in which it lies
    where the run does), "machine" (taken for this machine's zone), "none" (it has no times).
    """

    shift_ns: int
    how: str
    words: str = ""


@within_rank
def run_span(
    light_steps: Maybe[Frame] = maybe(light_steps), spans: Maybe[Frame] = maybe(schema.SPANS)
) -> tuple[int, int]:
    """Return when the rank's steps, else its trace, began and ended, Unix ns; (0, 0) where that is not known."""
    steps, traced = light_steps.or_none(), spans.or_none()
    frame = steps if steps is not None and len(steps) else traced
    if frame is None or not len(frame):
        return 0, 0
    begin, end = int(frame["start_ns"].min()), int((frame["start_ns"] + frame["dur_ns"]).max())
    return (begin, end) if begin > _UNIX else (0, 0)


@within_rank
def log_clocks(
    samples: Frame = needs(schema.SAMPLES), run_span: tuple[int, int] = needs(run_span), rank: RankFacts = needs(RANK)
) -> dict[str, Clock]:
    """Return the clock of each source of the samples that is of another tool's log."""
    found: dict[str, Clock] = {}
    for name, facts in rank.trace_facts.items():
        if not name.startswith("log ") or not isinstance(facts, dict):
            continue
        mine = samples.loc[samples["source"].isin(facts["sources"]), "at_ns"]
        if len(mine):
            clock = _clock(str(facts["times"]), int(mine.min()), int(mine.max()), run_span)
            found |= dict.fromkeys(facts["sources"], clock)
    return found


def _clock(times: str, begin: int, end: int, run: tuple[int, int]) -> Clock:
    if times == "none":
        return Clock(0, "none", "it has no times")
    if times == "zone":
        return Clock(0, "zone")
    days = 0
    if times == "day":
        if not run[0]:
            return Clock(0, "none", "its times have no date")
        days = run[0] // _DAY * _DAY
    else:
        here = -_offset(begin)
        if _covers(begin + here, end + here, run) or not run[0]:
            return Clock(here, "machine", "its times have no zone, and are taken for this machine's")
    zones = [
        day + n * _QUARTER for n in range(-_ZONES * 4, _ZONES * 4 + 1) for day in ((-_DAY, 0, _DAY) if days else (0,))
    ]
    fits = [zone for zone in zones if _covers(begin + days + zone, end + days + zone, run)]
    whole = [zone for zone in fits if zone % _HOUR == 0] or fits
    if len(whole) == 1:
        words = f"its times have no zone: {_named(-whole[0])} is where it lies with the run"
        return Clock(days + whole[0], "fitted", words)
    if days:
        return Clock(0, "none", "its times have no date, and fit the run in several zones or in none")
    return Clock(-_offset(begin), "machine", "its times have no zone, and do not lie with the run's in this machine's")


def _covers(begin: int, end: int, run: tuple[int, int]) -> bool:
    both = min(end, run[1]) - max(begin, run[0])
    return both >= _COVERS * max(min(end - begin, run[1] - run[0]), 1)


def _offset(at: int) -> int:
    """Return by how many ns this machine's clock is ahead of UTC at a time of its own."""
    local = datetime.fromtimestamp(at // _SECOND, timezone.utc).replace(tzinfo=None).astimezone()
    offset = local.utcoffset()
    return 0 if offset is None else int(offset.total_seconds()) * _SECOND


def _named(zone: int) -> str:
    minutes = abs(zone % _DAY - (_DAY if zone % _DAY > _DAY // 2 else 0)) // (60 * _SECOND)
    sign = "−" if zone % _DAY > _DAY // 2 else "+"
    return f"UTC{sign}{minutes // 60}" + (f":{minutes % 60:02d}" if minutes % 60 else "")


@within_rank
def placed_samples(
    samples: Frame = needs(schema.SAMPLES), log_clocks: dict[str, Clock] = needs(log_clocks)
) -> pd.DataFrame:
    """Return the table "samples" with the times of logs moved to Unix time; what has no times stays as it is."""
    moved = {source: clock.shift_ns for source, clock in log_clocks.items() if clock.shift_ns}
    if not moved:
        return samples
    shift = samples["source"].astype(str).map(moved).fillna(0).to_numpy().astype(np.int64)
    return samples.assign(at_ns=samples["at_ns"] + shift)


# Metrics that only grow → the name of their rate, and its unit: CPU seconds a second are cores, joules a second are
# watts, and nanoseconds of holding clocks down, or of waiting for a core, a share of the time.
_RATES = {
    "cpu_s": ("cpu_cores", 1.0),
    "children_cpu_s": ("children_cpu_cores", 1.0),
    "job_cpu_s": ("job_cpu_cores", 1.0),
    "energy_j": ("mean_power_w", 1.0),
    **{
        f"{name}_ns": (f"{name}_share", 1e-9)
        for name in ("main_thread_waited", "other_threads_waited", "clocks_held_by_power", "clocks_held_by_heat")
    },
    **{
        name: (f"{name}_per_s", 1.0)
        for name in (
            *("page_faults", "major_page_faults", "voluntary_switches", "involuntary_switches"),
            *("children_voluntary_switches", "children_involuntary_switches", "swap_in_bytes", "swap_out_bytes"),
            *("quota_periods", "throttled_periods"),
            *("disk_read_bytes", "disk_written_bytes", "network_received_bytes", "network_sent_bytes"),
            *("nvlink_received_bytes", "nvlink_sent_bytes", "pcie_received_bytes", "pcie_sent_bytes"),
        )
    },
}

# How many points of each metric travel: enough for any screen.
MOST_POINTS = 300

# A mean of fewer readings than this is not reported.
ENOUGH = 3

# A reading stands for no longer than so many times the usual time between two.
MOST_SPAN = 5

# The share of the time in which a rank's main thread was ready to run and waited for a core.
WAITED = "main_thread_waited_share"
# The same of its process's other threads, added up.
OTHERS_WAITED = "other_threads_waited_share"

# Programs of the host's own that use less than this share of the cores in use are not counted.
LITTLE = 0.1


class _Readings(NamedTuple):
    """The readings of a metric of a source: span_s, the seconds before at_ns that each stands for, and since_ns, from
    when on it held.
    """

    source: str
    metric: str
    at_ns: NDArray[np.int64]
    value: NDArray[np.float64]
    span_s: NDArray[np.float64]
    since_ns: NDArray[np.int64]


def _readings(samples: pd.DataFrame) -> Iterator[_Readings]:
    """Return the readings of each metric of each source, what only grows as its rate."""
    every_at, every_value = samples["at_ns"].to_numpy(), samples["value"].to_numpy()
    groups = samples.groupby(["source", "metric"], observed=True, sort=True).indices
    by_key = {tuple(map(str, cast("tuple[str, str]", key))): places for key, places in groups.items()}
    for (source, metric), places in by_key.items():
        at, value = every_at[places], every_value[places]
        rate, unit = _RATES.get(metric, ("", 0.0))
        if not rate:
            yield _Readings(source, metric, at, value, _spans(at), at)
        elif (source, rate) in by_key:
            continue  # a GPU may have both a rate and the total since it started: its own rate counts
        else:
            span, grown = np.diff(at) / 1e9, np.diff(value) * unit
            # A counter that started again at 0, or is now read by another process, has no rate for the time between.
            sound = (span > 0) & (grown >= 0)
            at, span, since = at[1:][sound], span[sound], at[:-1][sound]
            yield _Readings(source, rate, at, grown[sound] / span, span, since)


def _spans(at: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the seconds that each reading stands for: those since the one before it, since in a long job readings
    become rarer; but where one was missed, not all of them.
    """
    since = np.diff(at, prepend=at[:1]) / 1e9
    usual = float(np.median(since[since > 0])) if (since > 0).any() else 1.0
    return np.clip(np.where(since > 0, since, usual), None, MOST_SPAN * usual)


@per_rank
def sample_series(
    placed_samples: Frame = needs(placed_samples), log_clocks: dict[str, Clock] = needs(log_clocks)
) -> pd.DataFrame:
    """Return the readings in order, thinned to means, what only grows as rates: source, metric, at_ns, value.

    Raises NotMeasured where nothing was sampled.
    """
    untimed = [source for source, clock in log_clocks.items() if clock.how == "none"]
    timed = placed_samples[~placed_samples["source"].isin(untimed)] if untimed else placed_samples
    parts = [read for read in _readings(timed) if len(read.at_ns)]
    if not parts and untimed:
        raise NotMeasured("the log has no times")
    if not parts:
        raise NotMeasured("the job was too short for two readings: record longer")
    begin = min(read.at_ns.min() for read in parts)  # means of times since 1970 would not be exact
    frames = []
    for read in parts:
        first = np.arange(0, len(read.at_ns), -(-len(read.at_ns) // MOST_POINTS))
        count = np.diff(first, append=len(read.at_ns))
        at, value = (np.add.reduceat(values, first) / count for values in (read.at_ns - begin, read.value))
        frames.append(
            {"source": read.source, "metric": read.metric, "at_ns": at.astype(np.int64) + begin, "value": value}
        )
    return pd.concat([pd.DataFrame(frame) for frame in frames], ignore_index=True)


def held(samples: pd.DataFrame, begin: int, end: int) -> pd.DataFrame:
    """Return what was sampled from `begin` to `end`, ns, what only grows as rates: source, metric, at_ns, value.

    Each value holds from `at_ns` to the next; the one that holds at `begin` has that as its time, except one that was
    read long before. Raises NotMeasured where nothing was sampled.
    """
    parts = []
    for read in _readings(samples):
        usual = float(np.median(np.diff(read.at_ns))) if len(read.at_ns) > 1 else 0.0
        since = read.since_ns
        first = max(np.searchsorted(since, begin, side="right") - 1, np.searchsorted(since, begin - 2 * usual))
        chosen = slice(first, np.searchsorted(since, end))
        columns = {"at_ns": np.maximum(since[chosen], begin), "value": read.value[chosen]}
        parts.append(pd.DataFrame({"source": read.source, "metric": read.metric} | columns))
    if not parts:
        raise NotMeasured("nothing was sampled in this time: record longer")
    return pd.concat(parts, ignore_index=True)


@within_rank
def steady_span(light_steps: Frame = needs(light_steps)) -> tuple[int, int]:
    """Return when the first steady step began and the last one ended, ns; raise NotMeasured where none was recorded."""
    steady = light_steps[light_steps["steady"]]
    if steady.empty:
        raise NotMeasured("no steady training step was recorded")
    return int(steady["start_ns"].min()), int((steady["start_ns"] + steady["dur_ns"]).max())


@per_rank
def sample_means(
    placed_samples: Frame = needs(placed_samples),
    steady_span: tuple[int, int] = needs(steady_span),
    rank: RankFacts = needs(RANK),
) -> pd.DataFrame:
    """Return each metric while training was steady, what only grows as rates.

    Columns: source, metric, mean, its standard error noise, largest, readings.
    Raises NotMeasured where nothing was sampled, or too little of the steady steps.
    """
    rows = []
    for read in _readings(placed_samples[placed_samples["at_ns"].between(*steady_span)]):
        # A reading stands for the time since the one before it: not for the time in which the job was suspended.
        at = read.at_ns
        sound = ~suspended(rank, np.append(at[:1], at[:-1]), at)
        value = read.value[sound]
        if len(value) >= ENOUGH:
            mean, noise = float(np.average(value, weights=read.span_s[sound])), standard_error(value)
            rows.append((read.source, read.metric, mean, noise, float(value.max()), len(value)))
    if not rows:
        raise NotMeasured(f"fewer than {ENOUGH} readings while training was steady: record longer")
    return pd.DataFrame(rows, columns=["source", "metric", "mean", "noise", "largest", "readings"])


def outside(sample_means: pd.DataFrame) -> float:
    """Return what share of the cores in use programs outside the job have; 0 where it is little, or not known."""
    sums = sample_means.groupby(["source", "metric"])["mean"].sum()
    ours = sum(float(sums.get(("processes", metric), 0.0)) for metric in ("cpu_cores", "children_cpu_cores"))
    ours = max(ours, float(sums.get(("host", "job_cpu_cores"), 0.0)))  # with what the job runs beside its ranks
    used = float(sums.get(("host", "cpu_cores"), 0.0))
    return share if used > 0 and (share := 1 - ours / used) >= LITTLE else 0.0


# A host's own services use less than this share of its cores.
_SERVICES = 0.05

# If this share of a host's cores is in use, none are free, and the job lacks the cores that others use. These count
# from twice the share above.
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
        alone &= float(workers.reindex(here).sum()) < _SERVICES * cores
        lost = waited * (1.0 if alone else foreign / max(used, 1e-9))
        full = used >= _FULL * cores and foreign >= 2 * _SERVICES * cores
        disturbs = full or (foreign >= _SERVICES * cores and lost >= _NOTABLE)
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
