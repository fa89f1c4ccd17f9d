"""The run as a whole: what it is, its facts, and the pictures that belong to no rule."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from dlprof.engine import Measure, Measured, MeasureFailed
from dlprof.errors import NotMeasured
from dlprof.measures import settings
from dlprof.measures.arithmetic import arithmetic, operator_flops
from dlprof.measures.excerpt import excerpt
from dlprof.measures.lines import line_times
from dlprof.measures.loader import before_forward, loader_calls, loader_means, worker_means
from dlprof.measures.memory import memory_series, memory_use
from dlprof.measures.pipeline import bubbles, pipeline_chunks, simulated_bubbles
from dlprof.measures.samples import ENOUGH, sample_means, sample_series
from dlprof.measures.stacks import DOING, hottest, shown
from dlprof.measures.steps import mean_step_ns, step_means, step_series
from dlprof.measures.syncs import syncs
from dlprof.measures.whole_job import PARTS, whole_job
from dlprof.result import Fact, Panel, RunInfo
from dlprof.units import UNKNOWN, digits, duration, percent, quantity, size

NEEDS: tuple[Measure, ...] = (
    arithmetic,
    bubbles,
    excerpt,
    hottest,
    line_times,
    loader_calls,
    loader_means,
    memory_series,
    memory_use,
    operator_flops,
    pipeline_chunks,
    sample_means,
    sample_series,
    simulated_bubbles,
    step_means,
    step_series,
    syncs,
    whole_job,
    worker_means,
)

# As many ranks as can be told apart in one chart.
MOST_RANKS = 8

# Functions whose lines are shown, and lines of each.
MOST_FUNCTIONS = 8
MOST_LINES = 50

# Functions of one kind among the hottest: of the user's, of libraries.
MOST_OWN = 8
MOST_LIBRARY = 3
# Seen less often than this, a function is there by chance, or does not matter.
LEAST_SEEN = 5
LEAST_SHARE = 0.01
# Loader workers that are shown, of all ranks.
MOST_WORKERS = 64

# As many points of what was sampled as a chart of this size can show.
MOST_POINTS = 200

_CHILDREN = "loader workers and other children"

# The same warning of many ranks is one warning.
MOST_WARNINGS = 40


def run_info(run: Measured) -> RunInfo:
    """Say which run this is, on what, and how it ended."""
    hosts = run.run.hosts or _several(run, "host")
    missing = run.missing_ranks
    warnings = list(run.run.warnings)
    if missing:
        few = ", ".join(map(str, missing[:12])) + (" …" if len(missing) > 12 else "")
        warnings.append(f"{len(missing)} of {run.world_size} ranks are not here: {few}")
    warnings += _warnings(run)
    return RunInfo(
        path=run.run.path.name or str(run.run.path),
        command=run.run.command,
        world_size=run.world_size,
        ranks=run.ranks,
        missing_ranks=missing[:1024],
        hosts=tuple(hosts),
        device=_device(run),
        torch=_first(_several(run, "versions", "torch")),
        exit=dict(run.run.exit),
        warnings=tuple(warnings),
    )


def _warnings(run: Measured) -> list[str]:
    said: dict[str, list[int]] = {}
    for rank, texts in run.warnings.items():
        for text in texts:
            said.setdefault(text, []).append(rank)
    lines = []
    for text, ranks in said.items():
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks"
        lines.append(text if len(run.ranks) == 1 else f"{who}: {text}")
    for text, ranks in run.failures().items():
        where = f" (ranks {', '.join(map(str, ranks[:8]))}{' …' if len(ranks) > 8 else ''})" if ranks else ""
        lines.append(f"what needs this measure is missing, it failed: {text}{where}")
    extra = len(lines) - MOST_WARNINGS
    return lines[:MOST_WARNINGS] + ([f"… and {extra} more warnings"] if extra > 0 else [])


def _several(run: Measured, *path: str) -> list[str]:
    """Give the distinct values of one fact over the ranks, the recorder's first, then the trace's."""
    values: dict[str, None] = {}
    for r in run.ranks:
        for facts in (run.facts[r], run.trace_facts[r]):
            at: Any = facts
            for key in path:
                at = at.get(key) if isinstance(at, Mapping) else None
            if at not in (None, "", [], {}):
                values[str(at)] = None
                break
    return list(values)


def _first(values: list[str]) -> str:
    return values[0] if values else ""


def _device(run: Measured) -> str:
    names: dict[str, None] = {}
    for r in run.ranks:
        recorded = run.facts[r].get("device") or {}
        listed = run.trace_facts[r].get("devices") or []
        name = recorded.get("name") or (listed[0].get("name") if listed else "")
        if recorded.get("type") == "cpu":
            name = "CPU"
        if name:
            names[str(name)] = None
    return ", ".join(names)


def panels(run: Measured) -> tuple[Panel, ...]:
    """Give the pictures of the run, as far as they were recorded."""
    drawn = (
        _steps_panel,
        _whole_job_panel,
        _timeline_panel,
        _syncs_panel,
        _pipeline_panel,
        _bubbles_panel,
        _flops_panel,
        _memory_panel,
        _hottest_panel,
        _workers_panel,
    )
    made = (_if_measured(make, run) for make in drawn)
    return (*(p for p in made if p is not None), *_sample_panels(run), *_line_panels(run))


def _if_measured(make: Callable[[Measured], Panel], run: Measured) -> Panel | None:
    try:
        return make(run)
    except (NotMeasured, MeasureFailed):
        return None


def _steps_panel(run: Measured) -> Panel:
    series = run.frame(step_series)
    series = series[series["kind"] == "train"]
    if series["step"].nunique() < 2:
        raise NotMeasured("fewer than two steps")
    table = series.pivot_table(index="step", columns="rank", values="dur_ns", aggfunc="first")
    if table.shape[1] > MOST_RANKS:
        table = pd.DataFrame({"mean of ranks": table.mean(axis=1), "slowest rank": table.max(axis=1)})
    else:
        table.columns = pd.Index([f"rank {r}" for r in table.columns])
    rows = tuple(
        (int(step), *(None if pd.isna(v) else float(v) for v in values))
        for step, values in zip(table.index, table.to_numpy(), strict=True)
    )
    slowed = series.groupby("step")["profiled"].max().astype(int) > 0
    note = ""
    if slowed.any() and not slowed.all():
        stretches = slowed.index.to_series().groupby((slowed != slowed.shift()).cumsum()).agg(["first", "last"])
        found = [(a, b) for a, b in stretches.itertuples(index=False, name=None) if slowed[a]]
        told = [f"{a}" if a == b else f"{a} to {b}" for a, b in found]
        note = f"{'Step' if told == [str(found[0][0])] else 'Steps'} {' and '.join(told)}: slowed by what was recorded."
    return Panel("lines", "Steps over the run", rows, ("step", *map(str, table.columns)), unit="ns", note=note)


_PARTS = {
    "setup": "setting up, from importing torch to the first step",
    "warmup": "training, warming up",
    "steady": "training, steady",
    "traced": "slowed by tracing and counting",
    "epoch_ends": "an epoch's first batch or end",
    "validation": "validation",
    "other": "no training and no validation",
    "checkpoint": "of it saving checkpoints",
    "compilation": "of it compiling",
    "garbage_collection": "of it collecting garbage",
}


def _whole_job_panel(run: Measured) -> Panel:
    """Tell what the job's time went into beside its steady steps, as the mean over the ranks."""
    frame = run.frame(whole_job)
    ranks = frame["rank"].nunique()
    sums = frame.groupby("part")[["steps", "ns"]].sum() / ranks
    total = float(sums["ns"][sums.index.isin(PARTS)].sum())
    rows = tuple(
        (label, digits(float(sums["steps"][part])) if part != "setup" else "", duration(ns), percent(ns / total))
        for part, label in _PARTS.items()
        if part in sums.index and (ns := float(sums["ns"][part])) > 0
    )
    if len(rows) < 2:
        raise NotMeasured("all of the job were steady steps")
    note = "Findings and their savings speak of the steady steps alone."
    if ranks > 1:
        note = f"Means over {ranks} ranks. {note}"
    return Panel("table", "The whole job", rows, ("", "how many", "time", "share of the job"), note=note)


def _memory_panel(run: Measured) -> Panel:
    series = run.frame(memory_series)
    kinds = {
        kind: series.pivot_table(index="step", columns="rank", values=f"{kind}_bytes")
        for kind in ("reserved", "allocated")
    }
    if series["rank"].nunique() > MOST_RANKS:
        table = pd.DataFrame({f"most {kind} of a rank": frame.max(axis=1) for kind, frame in kinds.items()})
    else:
        named = [frame.set_axis([f"rank {r} {kind}" for r in frame.columns], axis=1) for kind, frame in kinds.items()]
        table = pd.concat(named, axis=1)
    rows = tuple(
        (int(step), *(None if pd.isna(v) else float(v) for v in values))
        for step, values in zip(table.index, table.to_numpy(), strict=True)
    )
    note = "By tensors at the end of a step, and taken from the device by PyTorch's allocator."
    return Panel("lines", "GPU memory of PyTorch", rows, ("step", *map(str, table.columns)), unit="bytes", note=note)


def _flops_panel(run: Measured) -> Panel:
    frame = run.frame(operator_flops)
    ranks = frame["rank"].nunique()
    named = frame["operator"].str.removeprefix("aten::") + " · " + frame["dtype"]
    sums = frame.groupby(named, sort=False)["flops"].sum().sort_values(ascending=False, kind="stable")
    rows = tuple((str(name), float(n) / ranks) for name, n in sums.items())
    note = "Counted in one step that no time is taken from; two floating-point operations a multiplication."
    return Panel("bars", "What one step computes, by operator", rows, unit="FLOP", note=note)


def _timeline_panel(run: Measured) -> Panel:
    frame = run.frame(excerpt)
    if not len(frame):
        raise NotMeasured("nothing ran in the traced step")
    shown = sorted(frame["rank"].unique())[:MOST_RANKS]
    frame = frame[frame["rank"].isin(shown)]
    begins = frame.groupby("rank")["begin_ns"].first()
    # One clock where the ranks' steps begin within a step of each other; else each rank from its own beginning.
    together = begins.max() - begins.min() <= (frame["start_ns"] - frame["begin_ns"]).max()
    zero = frame["rank"].map(begins) if not together else begins.min()
    frame = frame.assign(at=frame["start_ns"] - zero)
    rows = tuple(
        (f"rank {r} · {lane}", int(at), int(dur), str(name), str(category))
        for r, lane, at, dur, name, category in zip(
            frame["rank"], frame["lane"], frame["at"], frame["dur_ns"], frame["name"], frame["category"], strict=True
        )
    )
    step = int(frame["step"].iloc[0])
    more = len(run.ranks) - len(shown)
    note = f"The first {len(shown)} of {len(run.ranks)} ranks." if more > 0 else ""
    if not together:
        note += " Each rank from its own beginning: their clocks differ."
    return Panel("timeline", f"One traced step (step {step})", rows, unit="ns", note=note.strip())


def _sample_panels(run: Measured) -> list[Panel]:
    """Draw what was sampled over the run: cores, memory, and of the GPUs what they told."""
    try:
        series = run.frame(sample_series)
    except (NotMeasured, MeasureFailed):
        return []
    zero = series["at_ns"].min()
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
        lines = [_of_ranks(series, "processes", own), children, _of_hosts(run, series, of_host)]
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
    rows = tuple(
        (int(at), *(None if pd.isna(v) else float(v) for v in values))
        for at, values in zip(table.index, table.to_numpy(), strict=True)
    )
    return Panel("lines", title, rows, ("time_ns", *map(str, table.columns)), unit=unit, note=note)


def _of_ranks(series: pd.DataFrame, source: str, metric: str) -> pd.DataFrame:
    """Give a metric over the run, a column a rank; of many ranks the mean and the largest."""
    chosen = series[(series["source"] == source) & (series["metric"] == metric)]
    table = chosen.pivot_table(index="time_ns", columns="rank", values="value")
    if table.shape[1] > MOST_RANKS:
        return pd.DataFrame({"mean of ranks": table.mean(axis=1), "largest of ranks": table.max(axis=1)})
    return table.rename(columns=lambda rank: f"rank {rank}")


def _of_log(series: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Give a metric as nvidia-smi logged it, a column a GPU."""
    chosen = series[series["source"].str.startswith("nvidia-smi") & (series["metric"] == metric)]
    return chosen.pivot_table(index="time_ns", columns="source", values="value").iloc[:, :MOST_RANKS]


def _of_hosts(run: Measured, series: pd.DataFrame, metric: str) -> pd.DataFrame:
    chosen = series[(series["source"] == "host") & (series["metric"] == metric)]
    table = chosen.pivot_table(index="time_ns", columns="rank", values="value")
    if table.shape[1] > 2:
        return pd.DataFrame({"mean of hosts": table.mean(axis=1)})
    return table.rename(columns=lambda rank: f"all of {run.facts[rank].get('host') or 'the host'}")


_DOING = {
    "rest": "between the phases",
    "compute": "forward, backward, optimizer",
    "fetch": "waiting for the loader",
    "worker": "loader worker",
}


def _hottest_panel(run: Measured) -> Panel:
    """Show the Python functions seen most, the user's own first, over all ranks."""
    frame = run.frame(hottest)
    samples = frame.groupby(["rank", "doing"])["samples"].first().groupby("doing").sum()
    functions = frame.groupby(["doing", "function", "file", "own"], as_index=False).agg(
        line=("line", "first"), alone=("alone", "sum"), total=("total", "sum")
    )
    rows = []
    for doing in DOING:
        mine = functions[functions["doing"] == doing]
        # A function that only calls others of the user's says nothing here.
        mine = mine[mine["alone"] >= max(LEAST_SEEN, LEAST_SHARE * int(samples.get(doing, 0)))]
        own = mine[mine["own"].astype(bool)].nlargest(MOST_OWN, ["alone", "total"])
        library = mine[~mine["own"].astype(bool)].nlargest(MOST_LIBRARY, ["alone", "total"])
        for row in pd.concat([own, library]).itertuples():
            of = float(samples[doing])
            where = shown(str(row.function), str(row.file), int(str(row.line)))
            shares = (percent(float(str(row.alone)) / of), percent(float(str(row.total)) / of))
            rows.append((_DOING[doing], where, "yours" if row.own else "library", *shares))
    kinds = ", ".join(f"{_DOING[doing]} {samples[doing]:,}" for doing in DOING if doing in samples)
    seen = int(samples.sum())
    note = (
        f"py-spy saw {seen:,} stacks: {kinds}. Shares are of those of the same kind."
        " In it: in the function, and for yours in library code that it calls."
    )
    if not rows:
        raise NotMeasured("too few stacks were seen")
    columns = ("while", "function", "whose", "in it", "with what it calls")
    return Panel("table", "Hottest Python functions", tuple(rows), columns, note=note)


def _line_panels(run: Measured) -> list[Panel]:
    """Give the source of each function that --lines named, with the time of each line over all ranks."""
    try:
        lines = run.frame(line_times)
    except (NotMeasured, MeasureFailed):
        return []
    ranks = lines["rank"].nunique()
    lines = lines.groupby(["role", "function", "file", "line", "source"], as_index=False)[["hits", "dur_ns"]].sum()
    functions = [(names, part) for names, part in lines.groupby(["role", "function", "file"])]
    functions.sort(key=lambda f: -int(f[1]["dur_ns"].sum()))
    return [
        _lines_panel(str(role), str(function), str(file), part, ranks)
        for (role, function, file), part in functions[:MOST_FUNCTIONS]
    ]


def _lines_panel(role: str, function: str, file: str, part: pd.DataFrame, ranks: int) -> Panel:
    total = int(part["dur_ns"].sum())
    left = len(part) - MOST_LINES
    part = part.nlargest(MOST_LINES, "dur_ns").sort_values("line")
    rows = tuple(
        (
            int(line),
            f"{hits:,}" if hits else "",
            duration(float(ns)) if hits else "",
            duration(ns / hits) if hits else "",
            percent(ns / total) if hits and total else "",
            # A browser would drop the indentation.
            text[: len(text) - len(text.lstrip())].expandtabs(4).replace(" ", "\u00a0") + text.strip(),
        )
        for line, hits, ns, text in zip(part["line"], part["hits"], part["dur_ns"], part["source"], strict=True)
    )
    where = "in the loader's workers" if role == "worker" else "in the rank"
    note = f"{file}: {duration(float(total))} together" + (f", over {ranks} ranks." if ranks > 1 else ".")
    if left > 0:
        note += f" {left} lines that took less are left out."
    columns = ("line", "hits", "time", "a hit", "share", "source")
    return Panel("table", f"Line by line: {function}, {where}", rows, columns, note=note)


def _syncs_panel(run: Measured) -> Panel:
    """Tell what makes the host wait for its device, on the rank that waits longest."""
    frame = run.frame(syncs)
    if not len(frame):
        raise NotMeasured("the training thread waits for no device")
    waits = frame.groupby("rank")[["ns", "calls"]].sum()
    rank = int(str(waits.sort_values(["ns", "calls"]).index[-1]))
    mine = frame[frame["rank"] == rank]
    if mine["ns"].isna().any():
        rows: tuple[tuple[Any, ...], ...] = tuple(
            (str(asked), digits(float(n))) for asked, n in zip(mine["asked"], mine["calls"], strict=True)
        )
        note = "On a GPU each of these would wait until the device has caught up."
        return Panel("table", f"Values read out of tensors, rank {rank}", rows, ("by", "times a step"), note=note)
    rows = tuple(
        (str(asked) or "Python", str(call), digits(float(n)), duration(float(ns)), duration(float(idle)))
        for asked, call, n, ns, idle in zip(
            mine["asked"], mine["call"], mine["calls"], mine["ns"], mine["idle_ns"], strict=True
        )
    )
    columns = ("by", "waits in", "times a step", "waiting a step", "device then idle")
    note = "Then idle: the device, which ran dry meanwhile, had nothing to do until the host had launched again."
    return Panel("table", f"Waiting until the device has caught up, rank {rank}", rows, columns, note=note)


def _pipeline_panel(run: Measured) -> Panel:
    """Draw one step of the first pipeline, a lane a stage."""
    told = run.frame(bubbles)
    frame = run.frame(pipeline_chunks)
    frame = frame[frame["rank"].isin(told.loc[told["ranks"] == told["ranks"].iloc[0], "rank"])]
    # The first step that most ranks have; where there are many ranks, each writes fewer.
    step = int(str(frame.groupby("step")["rank"].nunique().idxmax()))
    frame = frame[frame["step"] == step].sort_values(["stage", "start_ns"], kind="stable")
    zero = int(frame["start_ns"].min())
    rows = tuple(
        (f"stage {stage} · rank {rank}", int(start) - zero, int(dur), str(which) if which >= 0 else action, str(action))
        for stage, rank, start, dur, which, action in zip(
            frame["stage"],
            frame["rank"],
            frame["start_ns"],
            frame["dur_ns"],
            frame["microbatch"],
            frame["action"],
            strict=True,
        )
    )
    more = told["ranks"].nunique() - 1
    note = f"One of {more + 1} pipelines that run side by side." if more else ""
    schedule = _plain_schedule(str(told["schedule"].iloc[0]))
    return Panel("timeline", f"Pipeline, {schedule}: the micro-batches of step {step}", rows, unit="ns", note=note)


def _bubbles_panel(run: Measured) -> Panel:
    frame = run.frame(bubbles)
    try:
        simulated = run.frame(simulated_bubbles).set_index("rank")["simulated"].to_dict()
    except (NotMeasured, MeasureFailed):
        simulated = {}
    shown = frame.sort_values(["ranks", "rank"]).head(4 * MOST_RANKS)
    rows = tuple(
        (
            f"rank {row['rank']}",
            row["stages"],
            duration(row["busy_ns"]),
            duration(row["step_ns"]),
            percent(row["bubble"]),
            percent(simulated.get(row["rank"], math.nan)),
            percent(row["closed"]),
        )
        for row in shown.to_dict("records")
    )
    columns = ("", "stages", "at work", "of a step of", "bubble, measured", "of these stages", "of the schedule")
    first = frame.iloc[0]
    note = (
        f"{_plain_schedule(str(first['schedule']))}, {first['microbatches']} micro-batches,"
        f" {digits(first['chunks'])} stage{'s' if first['chunks'] > 1 else ''} a rank. A bubble is the idle share of a"
        " step. Of these stages: as they would run with hand-over and launching for nothing, which the rest of the"
        " measured is. Of the schedule: were all stages alike, too."
    )
    if len(frame) > len(shown):
        note += f" The first {len(shown)} of {len(frame)} ranks."
    return Panel("table", "Pipeline bubbles", rows, columns, note=note)


def _plain_schedule(name: str) -> str:
    return name.removeprefix("Schedule")


def _workers_panel(run: Measured) -> Panel:
    frame = run.frame(worker_means)
    if not (frame["worker"] >= 0).any():
        raise NotMeasured("no loader has workers")

    def cell(value: float, write: Callable[[float], str]) -> str:
        return UNKNOWN if pd.isna(value) else write(value)

    times = ("dur_ns", "collate_ns", "cpu_ns", "delay_ns")
    rows = tuple(
        (
            int(row["rank"]),
            int(row["worker"]),
            int(row["batches"]),
            *(cell(row[c], duration) for c in times),
            *(cell(row[c], size) for c in ("stored_bytes", "read_bytes")),
        )
        for row in frame.head(MOST_WORKERS).to_dict("records")
    )
    more = len(frame) - len(rows)
    return Panel(
        "table",
        "Loader workers: what a batch takes each",
        rows,
        (
            "rank",
            "worker",
            "batches",
            "fetch",
            "of it collating",
            "CPU time",
            "waiting for a core",
            "read from storage",
            "read in all",
        ),
        note="Means a batch in the steady steps; CPU time is the worker's whole process's."
        + (f" The first {len(rows)} of {len(frame)} workers." if more > 0 else ""),
    )


def _loader_facts(run: Measured, add: Any) -> None:
    """Add what the queue and the epochs of the training loader were seen to do, or that there is none."""
    lead = before_forward(run)
    if lead is not None:
        where = "between the optimizer's step and" if _several(run, "step", "mark") == ["optimizer"] else "before"
        share = percent(lead[1] / mean_step_ns(run))
        add("Loader", "none that dlprof knows", f"{duration(lead[1])} of a step ({share}) {where} the first forward")
    try:
        means = run.frame(loader_means)
    except (NotMeasured, MeasureFailed):
        return
    queued = means[(means["empty"] >= 0) & (means["batches"] > 0)]
    if len(queued):
        asked, empty = int(queued["batches"].sum()), int(queued["empty"].sum())
        add("Loader", "queue empty when asked", f"{empty:,} of {asked:,} batches")
        add("Loader", "batches ready when asked", digits(float(queued["ready"].mean())))
    for column, name in (("start_ns", "starting an epoch"), ("first_ns", "first batch"), ("end_ns", "ending an epoch")):
        if means[column].notna().any():
            add("Loader", name, duration(float(means[column].mean())))


def facts(run: Measured) -> tuple[Fact, ...]:
    """List what is known of the job, by section; a fact in which ranks differ shows all its values."""
    out: list[Fact] = []

    def add(section: str, name: str, value: object) -> None:
        text = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
        if value not in (None, "", [], ()):
            out.append(Fact(section, name, text[:2000]))

    add("Job", "command", shlex.join(run.run.command) if run.run.command else "")
    add("Job", "folder", Path(run.run.path).name)
    add("Job", "ranks", f"{len(run.ranks)} of {run.world_size}")
    add("Job", "hosts", list(run.run.hosts) or _several(run, "host"))
    add("Job", "backend", _several(run, "backend"))
    code, signal = run.run.exit.get("code"), run.run.exit.get("signal")
    add("Job", "ended", f"by signal {signal}" if signal else f"with exit code {code}" if code is not None else "")
    add("Device", "name", _device(run))
    add("Device", "type", _several(run, "device", "type"))
    add("Device", "memory", [size(float(n)) for n in _several(run, "device", "memory_bytes") if n.isdigit()])
    add("Device", "capability", _several(run, "device", "capability"))
    for key in ("count", "affinity", "quota", "torch_threads"):
        add("Device", f"cpu {key.replace('_', ' ')}", _several(run, "cpu", key))
    for key in ("torch", "cuda", "cudnn", "nccl", "python", "dlprof"):
        add("Software", key, _several(run, "versions", key))
    for section, said in (
        ("Loader", settings.training_loader(run)),
        ("Model", settings.model(run)),
        ("Optimizer", settings.optimizer(run)),
    ):
        for key, value in said.items():
            if isinstance(value, Mapping):
                value = ", ".join(f"{k}={v}" for k, v in value.items())
            add(section, str(key).replace("_", " "), value)
    for key in ("schedule", "microbatches", "num_stages"):
        add("Pipeline", key.replace("_", " "), _several(run, "pipeline", key))
    _loader_facts(run, add)
    for key in ("enabled", "dtype"):
        add("Precision", f"autocast {key}", _several(run, "autocast", key))
    add("Precision", "gradient scaler", _several(run, "grad_scaler"))
    for key in ("float32_precision", "allow_tf32", "cudnn_benchmark", "deterministic"):
        add("Precision", key.replace("_", " "), _several(run, "matmul", key))
    environment: dict[str, None] = {}
    for r in run.ranks:
        environment.update(dict.fromkeys(run.facts[r].get("env") or {}))
    for name in sorted(environment):
        add("Environment", name, _several(run, "env", name))
    _arithmetic_facts(run, add)
    _memory_facts(run, add)
    _sample_facts(run, add)
    _recording_facts(run, add)
    return tuple(out)


def _arithmetic_facts(run: Measured, add: Any) -> None:
    try:
        frame = run.frame(arithmetic)
    except NotMeasured as e:
        add("Arithmetic", "not counted", e)
        return
    except MeasureFailed:
        return
    means = frame[["flops", "flops_per_s", "mfu", "backward"]].mean()
    add(
        "Arithmetic", "a step and rank", f"{quantity(means['flops'], 'FLOP')}, {percent(means['backward'])} in backward"
    )
    add("Arithmetic", "achieved a rank", f"{quantity(means['flops_per_s'], 'FLOP')}/s")
    known = frame["mfu"].notna().any()
    add("Arithmetic", "MFU", percent(means["mfu"]) if known else f"not known: {frame['why'].iloc[0]}")
    uncounted: dict[str, None] = {}
    for r in run.ranks:
        uncounted.update(dict.fromkeys((run.facts[r].get("flops") or {}).get("uncounted") or {}))
    add("Arithmetic", "not in it", [*uncounted])


def _sample_facts(run: Measured, add: Any) -> None:
    """List what was sampled while training was steady."""
    try:
        means = run.frame(sample_means)
    except (NotMeasured, MeasureFailed):
        return

    def told(source: str, metric: str, column: str = "mean") -> list[float]:
        chosen = means[(means["source"] == source) & (means["metric"] == metric)].sort_values("rank")
        return [float(v) for v in chosen[column]]

    def between(values: list[float], unit: str) -> str:
        """Write the values of a few ranks, of many the least and the largest."""
        if len(values) > MOST_RANKS:
            return f"{quantity(min(values), unit)} to {quantity(max(values), unit)}"
        return ", ".join(quantity(v, unit) for v in values)

    cores = told("host", "cores")
    used = told("host", "cpu_cores")
    add("Host", "cores in use", [f"{digits(u)} of {n:.0f}" for u, n in zip(used, cores, strict=False)])
    add("Host", "cores in use by a rank's process", between(told("processes", "cpu_cores"), ""))
    if any(told("processes", "children")):
        add("Host", "cores in use by its children", between(told("processes", "children_cpu_cores"), ""))
    waited = told("processes", "main_thread_waited_share")
    add("Host", "main thread ready, but no core free", between(waited, "share"))
    add("Host", "largest memory of a rank's process", between(told("processes", "rss_bytes", "largest"), "bytes"))
    add("Host", "largest memory in use", between(told("host", "memory_used_bytes", "largest"), "bytes"))
    add("GPU", "a kernel ran", between(told("gpu", "busy_share"), "share"))
    add("GPU", "multiprocessors at work", between(told("gpu", "sm_busy_share"), "share"))
    add("GPU", "tensor cores at work", between(told("gpu", "tensor_busy_share"), "share"))
    add("GPU", "largest memory in use", between(told("gpu", "memory_used_bytes", "largest"), "bytes"))
    add("GPU", "clock", between(told("gpu", "sm_clock_mhz"), "MHz"))
    add("GPU", "highest temperature", between(told("gpu", "temperature_c", "largest"), "°C"))
    power = told("gpu", "mean_power_w") or told("gpu", "power_w")
    add("GPU", "power", between(power, "W"))
    if power:
        step_s = mean_step_ns(run) / 1e9
        add("GPU", "energy of a step", between([watts * step_s for watts in power], "J"))


def _memory_facts(run: Measured, add: Any) -> None:
    """List the most that PyTorch's allocator took on any rank, and what it had to do for it."""
    snapshots = sorted(run.run.path.glob("ranks/*/memory_snapshot.pickle")) if run.run.recorded else []
    add("Memory", "for pytorch.org/memory_viz", [str(path.relative_to(run.run.path)) for path in snapshots])
    try:
        frame = run.frame(memory_use)
    except (NotMeasured, MeasureFailed):
        return
    total = frame["total_bytes"].min()
    for name, column in (("most allocated", "peak_allocated_bytes"), ("most reserved", "peak_reserved_bytes")):
        most = float(frame[column].max())
        add("Memory", name, size(most) + ("" if pd.isna(total) else f" of {size(total)} ({percent(most / total)})"))
    for name, column in (
        ("allocations retried after emptying the cache", "retries"),
        ("allocations that failed", "ooms"),
        ("allocations from the device in the second half", "late"),
    ):
        most = int(frame[column].max())
        add("Memory", name, f"{most:,}" if most >= 0 else "")


def _recording_facts(run: Measured, add: Any) -> None:
    marks = {"user": "dlprof.step()", "loader": "the loader's next()", "optimizer": "the optimizer's step"}
    add("Recording", "a step begins at", [marks.get(m, m) for m in _several(run, "step", "mark")])
    add("Recording", "trace window", _several(run, "window", "state"))
    reports = sorted(run.run.path.glob("hosts/*/nsys*.nsys-rep")) if run.run.recorded else []
    add("Recording", "for nsys-ui", [str(path.relative_to(run.run.path)) for path in reports])
    try:
        means = run.frame(step_means)
    except (NotMeasured, MeasureFailed):
        return
    add("Recording", "steady steps a rank", sorted({int(n) for n in means["steps"]}))
    add("Recording", "traced steps a rank", sorted({int(n) for n in means["traced_steps"]}))
    add("Recording", "standard error of the mean step", duration(float(means["noise_ns"].max())))
