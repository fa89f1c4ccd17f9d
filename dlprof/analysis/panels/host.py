"""Panels of the host: stacks and lines of Python, loader workers, queued work and waits."""

from __future__ import annotations

import pandas as pd

from dlprof.analysis.engine import Frame, Maybe, by_rank, maybe, needs
from dlprof.analysis.estimate import worst
from dlprof.analysis.host.stacks import (
    DOING,
    counted_functions,
    flame,
    flame_rows,
    hottest,
    is_own,
    line_times,
    profile_flame,
    profile_functions,
    shown,
)
from dlprof.analysis.host.waiting import FULL, device_lag, queue_series, queued_waits, syncs
from dlprof.analysis.input.loader import worker_means
from dlprof.analysis.panel import MOST_RANKS, PHASES, Picture, points, table
from dlprof.analysis.source.line_shares import line_shares, over_ranks
from dlprof.analysis.timeline.steps import mean_step_ns
from dlprof.errors import DoesNotApply, NotMeasured
from dlprof.result import BY_LINE, Panel
from dlprof.units import duration, quantity

# The most functions with lines shown, and the lines of each.
MOST_FUNCTIONS = 8

MOST_LINES = 50

_FUNCTION = ["role", "function", "file"]


def draw_lines(line_times: Frame = needs(line_times)) -> list[Panel]:
    """Return the source of each function that --lines named, with the time of each line over all ranks."""
    ranks = line_times["rank"].nunique()
    lines = line_times.groupby([*_FUNCTION, "line", "source"], as_index=False)[["hits", "dur_ns"]].sum()
    functions = [part for _, part in lines.groupby(_FUNCTION)]
    functions.sort(key=lambda part: -int(part["dur_ns"].sum()))
    return [_lines_panel(part, ranks) for part in functions[:MOST_FUNCTIONS]]


def _lines_panel(part: pd.DataFrame, ranks: int) -> Panel:
    total, left = int(part["dur_ns"].sum()), len(part) - MOST_LINES
    role, function, file = part[_FUNCTION].iloc[0]
    shown = part.nlargest(MOST_LINES, "dur_ns").sort_values("line")
    rows = tuple(
        (
            int(line),
            # Blank is a line that never ran: most are no statements.
            *((int(hits), int(ns), float(ns / hits), float(ns / total) if total else "") if hits else ("",) * 4),
            # A browser would drop the indentation.
            text[: len(text) - len(text.lstrip())].expandtabs(4).replace(" ", "\u00a0") + text.strip(),
        )
        for line, hits, ns, text in shown[["line", "hits", "dur_ns", "source"]].itertuples(index=False)
    )
    where = "in the loader's workers" if role == "worker" else "in the rank"
    note = f"{file}: {duration(total)} together{f', over {ranks} ranks' if ranks > 1 else ''}."
    if left > 0:
        note += f" {left} lines that took less are left out."
    columns = ("line", "hits", "time_ns", "a hit_ns", "share", "source")
    return Panel("table", f"{BY_LINE}: {function}, {where}", rows, columns, note=note)


LINES_PICTURE = Picture(draw_lines)

MOST_OWN_OF_PROFILES = 12

MOST_LIBRARY_OF_PROFILES = 6

MOST_COUNTED = 20

# Functions with less of the whole are left out.
LEAST_SHARE_OF_PROFILES = 0.002

_ELSEWHERE = {"": "in none of a step's phases"}

_ROOTS = {**_ELSEWHERE, **{doing: name for doing, name in DOING.items() if doing != "rest"}}

_CATEGORIES = {"": "host", **PHASES, "worker": "worker"}

_PROFILES_COLUMNS = {
    "function": "function",
    "own": "whose",
    "alone": "in it_share",
    "total": "with what it calls_share",
}

_COUNTED = {
    "function": "function",
    "own": "whose",
    "calls": "calls",
    "own_ns": "in it alone_ns",
    "total_ns": "with what it calls_ns",
    "share": "in it alone_share",
}


def draw_profiles(
    profile_flame: Frame = needs(profile_flame),
    profile_functions: Frame = needs(profile_functions),
    counted_functions: Maybe[Frame] = maybe(counted_functions),
) -> list[Panel]:
    """Show each profile: the tree of calls over all ranks that have it, and its functions, the user's own first."""
    panels = []
    counted = counted_functions.or_none()
    for name, calls in profile_flame.groupby("profile", sort=False):
        functions = profile_functions[profile_functions["profile"] == name]
        unit, tool = str(calls["unit"].iloc[0]), str(functions["tool"].iloc[0]) or "another tool"
        whole = float(functions.groupby("rank")["of"].first().sum())
        exact = None if counted is None else counted[counted["profile"] == name]
        estimated = exact is not None and len(exact) > 0
        note = f"{name}, of {tool}: {quantity(whole, unit)}. A function stands under the one that called it."
        if estimated:
            note += " The file knows who calls whom and no stacks: the widths are estimated from that."
        several = calls["doing"].nunique() > 1
        rows = flame_rows(calls, _ROOTS, _CATEGORIES, rooted=several)
        panels.append(Panel("flame", f"Where Python was: {name}", rows, unit=unit, note=note))
        if estimated and exact is not None:
            panels.append(_counted(str(name), exact))
        else:
            panels.append(_hottest_of_profiles(str(name), functions, whole))
    return panels


def _hottest_of_profiles(name: str, functions: pd.DataFrame, whole: float) -> Panel:
    by = ["function", "file", "own"]
    rows = functions.groupby(by, as_index=False).agg({"line": "first", "alone": "sum", "total": "sum"})
    rows = rows.sort_values(["own", "alone", "total"], ascending=False, kind="stable")
    rows = rows[(rows["alone"] >= LEAST_SHARE_OF_PROFILES * whole) | (rows["total"] >= LEAST_SHARE_OF_PROFILES * whole)]
    nth = rows.groupby("own").cumcount()
    rows = rows[nth < rows["own"].map({True: MOST_OWN_OF_PROFILES, False: MOST_LIBRARY_OF_PROFILES})]
    rows = _readable(rows.assign(alone=rows["alone"] / whole, total=rows["total"] / whole))
    note = "In it: in the function, and for yours in library code that it calls."
    return table(f"Hottest Python functions: {name}", rows, _PROFILES_COLUMNS, note=note)


def _counted(name: str, rows: pd.DataFrame) -> Panel:
    rows = rows.head(MOST_COUNTED).assign(share=rows["own_ns"] / rows["of_ns"])
    rows = _readable(rows.assign(own=[is_own(file) for file in rows["file"]]))
    note = "As cProfile counted them. It slows Python functions more than built-in ones: small functions look too slow."
    return table(f"Functions: {name}", rows, _COUNTED, note=note)


def _readable(functions: pd.DataFrame) -> pd.DataFrame:
    """Return rows of functions with each as a report names it, and whose it is."""
    return functions.assign(
        function=[shown(*row) for row in functions[["function", "file", "line"]].itertuples(index=False)],
        own=functions["own"].map({True: "yours", False: "library"}),
    )


PROFILES_PICTURE = Picture(draw_profiles)

# Waits of less than this share of a step are not worth a table.
LEAST_SHARE_OF_QUEUE = 0.01

_QUEUE_COLUMNS = {
    "ended_by": "the wait ends with",
    "stream": "stream",
    "launched_by": "launched by",
    "times": "times a step",
    "ns": "device idle_ns",
    "queued_ns": "launched before_ns",
    "waits_for": "waits for",
}


def draw_queue(
    queued_waits: Maybe[Frame] = maybe(queued_waits),
    mean_step_ns: float = needs(mean_step_ns),
    queue_series: Maybe[Frame] = maybe(queue_series),
    device_lag: Maybe[Frame] = maybe(device_lag),
) -> list[Panel]:
    """Draw the length of the queue, and list what waits in it on the rank where most does."""
    panels = []
    waits, series, lag = (need.or_none() for need in (queued_waits, queue_series, device_lag))
    if waits is not None and len(waits):
        by = by_rank(waits, "ns")
        if max(by.values()) >= LEAST_SHARE_OF_QUEUE * mean_step_ns:
            panels.append(waits_table(waits, worst(by)))
    if series is not None and lag is not None:
        panels.append(queue_length(series, lag["lag_ns"]))
    return panels


def waits_table(queued_waits: pd.DataFrame, rank: int) -> Panel:
    """List the queued work of one rank that waits while the device idles, the longest first."""
    mine = queued_waits[queued_waits["rank"] == rank].sort_values("ns", ascending=False, kind="stable")
    note = "The device idles although this work was launched before it ran dry."
    return table(f"Queued work that waits, a traced step of rank {rank}", mine, _QUEUE_COLUMNS, note=note)


def queue_length(series: pd.DataFrame, lag_ns: pd.Series[float]) -> Panel:
    """Draw how many launches wait, a line a rank; `lag_ns`: how far each device is behind its host."""
    series = series[series["rank"].isin(sorted(series["rank"].unique())[:MOST_RANKS])]
    # Each rank from its own beginning: their clocks may differ.
    by_rank = series.groupby("rank")
    place, at = by_rank.cumcount(), series["at_ns"] - by_rank["at_ns"].transform("min")
    lines = series.assign(place=place).pivot(index="place", columns="rank", values="queued")
    lines.index = pd.Index(at.groupby(place).mean())
    least, most = float(lag_ns.min()), float(lag_ns.max())
    behind = duration(most) if most - least < 0.1 * max(most, 1.0) else f"{duration(least)} to {duration(most)}"
    note = (
        f"Where a step begins, the device is {behind} behind its host. With about {FULL:,} launches queued the next one"
        " waits until one has begun; with none, the device waits for its host."
    )
    columns = ("into the trace_ns", *(f"rank {rank}" for rank in lines.columns))
    return Panel("lines", "Launches queued for the device", points(lines), columns, unit="", note=note)


QUEUE_PICTURE = Picture(draw_queue)

# Functions of one kind among the hottest: of the user's, of libraries.
MOST_OWN_OF_STACKS = 6

MOST_LIBRARY_OF_STACKS = 2

# Seen less often than this, a function is there by chance, or does not matter.
LEAST_SEEN = 5

LEAST_SHARE_OF_STACKS = 0.01

# What a frame of each kind stands on, in the colour of what the training thread was doing.
_CATEGORY = {"rest": "host", **PHASES, "worker": "worker"}

_STACKS_COLUMNS = {
    "doing": "while",
    "function": "function",
    "own": "whose",
    "alone": "in it_share",
    "total": "with what it calls_share",
}


def draw_stacks(flame: Frame = needs(flame), hottest: Frame = needs(hottest)) -> list[Panel]:
    """Show the Python functions seen most, the user's own first, and how they call each other, over all ranks."""
    return [_flame(flame), *_hottest_of_stacks(hottest)]


def _flame(flame: pd.DataFrame) -> Panel:
    """Draw who calls whom: what the training thread was doing, and upon it its functions, the widest first."""
    note = "The wider, the more often Python was seen there; a function stands below its caller."
    rows = flame_rows(flame, DOING, _CATEGORY)
    return Panel("flame", "Where Python was seen", rows, unit="samples", note=note)


def _hottest_of_stacks(hottest: pd.DataFrame) -> list[Panel]:
    samples = hottest.groupby(["rank", "doing"])["samples"].first().groupby("doing").sum()
    by = ["doing", "function", "file", "own"]
    functions = hottest.groupby(by, as_index=False).agg({"line": "first", "alone": "sum", "total": "sum"})
    functions = functions.assign(of=functions["doing"].map(samples), place=functions["doing"].map([*DOING].index))
    # A function that only calls others of the user's says nothing here.
    functions = functions[functions["alone"] >= (LEAST_SHARE_OF_STACKS * functions["of"]).clip(lower=LEAST_SEEN)]
    functions = functions.sort_values(["place", "own", "alone", "total"], ascending=[True, False, False, False])
    nth = functions.groupby(["doing", "own"]).cumcount()
    functions = functions[nth < functions["own"].map({True: MOST_OWN_OF_STACKS, False: MOST_LIBRARY_OF_STACKS})]
    if not len(functions):
        raise NotMeasured("too few stacks were seen")
    shares = {column: functions[column] / functions["of"] for column in ("alone", "total")}
    functions = _readable(functions.assign(doing=functions["doing"].map(DOING), **shares))
    kinds = ", ".join(f"{DOING[doing]} {samples[doing]:,}" for doing in DOING if doing in samples)
    note = (
        f"py-spy saw {samples.sum():,} stacks: {kinds}. Shares are of those of the same kind."
        " In it: in the function itself; of yours, also in library code that it calls."
    )
    return [table("Hottest Python functions", functions, _STACKS_COLUMNS, note=note)]


STACKS_PICTURE = Picture(draw_stacks)

COLUMNS = {
    "caller": "by",
    "call": "waits in",
    "calls": "times a step",
    "ns": "waiting a step_ns",
    "idle_ns": "device then idle_ns",
}


def draw_syncs(syncs: Frame = needs(syncs)) -> list[Panel]:
    """List what makes the host wait for its device, on the rank that waits longest."""
    if not len(syncs):
        raise NotMeasured("the training thread waits for no device")
    ns, calls = by_rank(syncs, "ns"), by_rank(syncs, "calls")
    rank = max(ns, key=lambda r: (ns[r], calls[r], r))
    mine = syncs[syncs["rank"] == rank]
    if mine["ns"].isna().any():
        note = "On a GPU each of these would wait until the device has caught up."
        columns = {name: COLUMNS[name] for name in ("caller", "calls")}
        return [table(f"Values read out of tensors, rank {rank}", mine, columns, note=note)]
    note = "Then idle: the device, which ran dry meanwhile, had nothing to do until the host had launched again."
    return [table(f"Waiting until the device has caught up, rank {rank}", by_python(mine), COLUMNS, note=note)]


def by_python(waits: pd.DataFrame) -> pd.DataFrame:
    """Return rows of `syncs` with "Python" as the caller where no operator called."""
    return waits.assign(caller=waits["caller"].replace("", "Python"))


SYNCS_PICTURE = Picture(draw_syncs)

_WORKERS_COLUMNS = {
    "rank": "rank",
    "worker": "worker",
    "batches": "batches",
    "dur_ns": "fetch_ns",
    "collate_ns": "of it collating_ns",
    "cpu_ns": "CPU time_ns",
    "delay_ns": "waiting for a core_ns",
    "stored_bytes": "read from storage_bytes",
    "read_bytes": "read in all_bytes",
}

# Loader workers that are shown, of all ranks.
MOST_WORKERS = 64


def draw_workers(worker_means: Frame = needs(worker_means)) -> list[Panel]:
    """List what a mean batch takes each loader worker."""
    if not (worker_means["worker"] >= 0).any():
        raise DoesNotApply("no loader has workers")
    note = "Means a batch in the steady steps; CPU time is the worker's whole process's."
    if len(worker_means) > MOST_WORKERS:
        note += f" The first {MOST_WORKERS} of {len(worker_means)} workers."
    return [table("Loader workers: what a batch takes each", worker_means, _WORKERS_COLUMNS, MOST_WORKERS, note)]


WORKERS_PICTURE = Picture(draw_workers)

MOST_LINES_OF_PHASE = 12  # of a phase

_LINE_SHARES_COLUMNS = {
    "doing": "while",
    "place": "line",
    "function": "function",
    "library": "in library code",
    "share": "phase_share",
    "of_all": "total_share",
}


def draw_line_shares(line_shares: Frame = needs(line_shares)) -> list[Panel]:
    """Show in which lines of the user's files the training thread and the loader's workers were seen."""
    lines = over_ranks(line_shares)
    totals = lines.groupby("doing")["of"].first()
    whole = {True: int(totals.get("worker", 0)), False: int(totals.drop("worker", errors="ignore").sum())}
    lines = lines[lines["own"].astype(bool)]
    lines = lines[lines["samples"] >= (LEAST_SHARE_OF_STACKS * lines["of"]).clip(lower=LEAST_SEEN)]
    if not len(lines):
        raise NotMeasured("no line of the user's was seen often enough")
    # The phase that takes most of the thread comes first, the workers last.
    order = lines["doing"].map(totals).mask(lines["doing"] == "worker", 0)
    lines = lines.assign(order=order).sort_values(["order", "doing", "samples"], ascending=[False, True, False])
    lines = lines[lines.groupby("doing").cumcount() < MOST_LINES_OF_PHASE]
    lines = lines.assign(
        place=lines["file"].astype(str) + ":" + lines["line"].astype(str),
        of_all=lines["samples"] / (lines["doing"] == "worker").map(whole),
        doing=lines["doing"].map(DOING),
    )
    note = (
        f"{whole[False]:,} stacks of the training thread were seen"
        + (f" and {whole[True]:,} of loader workers" if whole[True] else "")
        + ". Each counts for the innermost line of your files that is in it, with what that line called."
        " The total is that of the training thread's stacks, or of the workers'."
    )
    return [table("Time by line of your files", lines, _LINE_SHARES_COLUMNS, note=note)]


LINE_SHARES_PICTURE = Picture(draw_line_shares)
