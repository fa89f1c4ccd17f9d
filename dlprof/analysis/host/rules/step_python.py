"""Lines of the script between the phases of the step take a notable part of it.

What a script does in every step besides fetching, forward, backward and the optimizer: metrics, logging, histograms of
weights, batches made by an own function. On a CPU all of it stands between two steps.

Needs, on a CPU, the step log and stacks (py-spy): the log says how long a step is in none of its phases, the stacks in
which lines it is then. The lines of a loss and of setting gradients to zero are left out. On a GPU it needs a trace
that links launches to kernels: the host's work between the phases costs as much as the device idles meanwhile.
`host_sync` and `parameter_loop` report the waits for the device and the loops over parameters there.

Saving: on a CPU the named lines gone, on a GPU the traced steps replayed without what the host does there; the most
that any change can give. On a CPU where `host_bound` is larger, it counts the time in which these lines compute
nothing, and this rule counts the rest.

What to change: what the lines say: log every k steps, keep metrics as tensors and read them rarely, make batches with a
DataLoader's workers, replace loops in Python.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from msgspec.structs import replace

from dlprof.analysis import settings
from dlprof.analysis.communication.collectives import waits
from dlprof.analysis.engine import JOB, Frame, Job, Maybe, by_rank, maybe, needs
from dlprof.analysis.estimate import LEAST_SHARE, UNKNOWN, Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.host.gaps import (
    HOST,
    SAVES_FROM,
    check_launches,
    host_work,
    launch_means,
    longest_silence,
    own_python,
)
from dlprof.analysis.host.parts import BETWEEN, between_twice, gains_of, host_parts
from dlprof.analysis.host.stacks import hottest, hottest_own, hottest_place, shown
from dlprof.analysis.input.loader import before_forward
from dlprof.analysis.panel import table
from dlprof.analysis.source.line_shares import CostlyLine, costliest, costly_lines, lines_between
from dlprof.analysis.timeline.steps import mean_step_ns
from dlprof.result import Change
from dlprof.units import duration, percent, short

# A step of training always does a little between its phases: from this share on it is worth a look.
NOTABLE_SHARE = 0.05

MOST_LINES = 3

# If the script is silent in one place for this share of what its Python between the phases costs, that is told.
SILENT = 0.5


def check(
    lines_between: Maybe[Frame] = maybe(lines_between),
    between_twice: Maybe[Frame] = maybe(between_twice),
    host_parts: Maybe[Frame] = maybe(host_parts),
    waits: Maybe[Frame] = maybe(waits),
    launch_means: Maybe[Frame] = maybe(launch_means),
    mean_step_ns: float = needs(mean_step_ns),
    job: Job = needs(JOB),
) -> Estimate:
    if settings.on_gpu(job):
        check_launches(launch_means.get())
        return Estimate(
            gone_ns=gains_of(host_parts.get(), BETWEEN, waits),
            noise_of=HOST,
            loses="is lost because the device waits for what the script does between the phases of the step",
        )
    lines = lines_between.get()
    lines = lines[lines["ns"] >= LEAST_SHARE * mean_step_ns]
    shared = between_twice.or_none()
    if shared is not None and not shared["lines_first"].any():
        lines = _left(lines, by_rank(shared, "both_ns"))
        lines = lines[lines["ns"] >= LEAST_SHARE * mean_step_ns]
    if not len(lines):
        return nothing("no line between the phases takes a notable part of the step")
    return Estimate(
        gone_ns=by_rank(lines, "ns"),
        noise_ns=math.hypot(*lines[lines["rank"] == lines["rank"].iloc[0]]["noise_ns"]),
        loses="goes to lines of the script between the phases of the step",
        seen=lines,
    )


def _left(lines: Frame, elsewhere: Mapping[int, float]) -> Frame:
    """Return the lines without the time that another rule reports, subtracted from each rank's lines in proportion."""
    whole = lines.groupby("rank")["ns"].transform("sum")
    left = (1 - lines["rank"].map(elsewhere).fillna(0.0) / whole.clip(lower=1.0)).clip(lower=0.0)
    return lines.assign(ns=lines["ns"] * left, noise_ns=lines["noise_ns"] * left)


def explain(
    estimate: Estimate,
    mean_step_ns: float = needs(mean_step_ns),
    host_parts: Maybe[Frame] = maybe(host_parts),
    own_python: Maybe[Frame] = maybe(own_python),
    host_work: Maybe[Frame] = maybe(host_work),
    hottest: Maybe[Frame] = maybe(hottest),
    longest_silence: Maybe[Frame] = maybe(longest_silence),
    before_forward: tuple[int, float] | None = needs(before_forward),
    costly_lines: Maybe[Frame] = maybe(costly_lines),
) -> Explanation:
    rank = estimate.worst
    if estimate.seen is None:
        line = costliest(costly_lines, rank, "rest")
        explanation = _on_device(estimate, host_parts.get(), own_python, host_work, hottest, line)
        lines_known = bool(explanation.where) or bool(own_python and len(estimate.rows(own_python.get())))
        if longest_silence and line is None and not lines_known:
            explanation = _silent(explanation, estimate, host_parts.get(), longest_silence.get(), mean_step_ns)
        if before_forward is None or before_forward[1] < NOTABLE_SHARE * mean_step_ns:
            return explanation
        lead = change(
            f"batches that are made there ({duration(before_forward[1])} of each step pass before the first forward,"
            " and no loader was seen): in a DataLoader's workers, ahead of the step"
        )
        return replace(explanation, changes=(*explanation.changes, lead))
    lines = estimate.rows(estimate.seen).sort_values("ns", ascending=False)
    places = [shown(*place) for place in lines[["function", "file", "line"]].itertuples(index=False)]
    named = [f"{place}: {percent(ns / mean_step_ns)}" for place, ns in zip(places, lines["ns"], strict=True)]
    more = f" and {len(named) - MOST_LINES} more lines" if len(named) > MOST_LINES else ""
    line, top = costliest(costly_lines, rank, "rest"), lines.iloc[0]
    of_function = (lines["function"] == top["function"]) & (lines["file"] == top["file"])
    first = percent(lines["ns"][of_function].sum() / mean_step_ns)
    if line is not None and (
        line.idiom is None or (line.place.function, line.place.file) != (*top[["function", "file"]],)
    ):
        line = None
    return Explanation(
        title="Lines between the phases take a notable part of each step",
        summary=f"{duration(estimate.by_rank_ns[rank])} of a step of rank {rank} are in the script's own lines outside"
        f" of fetching, forward, backward and the optimizer: {', '.join(named[:MOST_LINES])} of the step{more}.",
        changes=(
            change(
                f"{line.advice(between=True)}; at most {first} of the step"
                if line is not None
                else f"make {places[0]} faster, or run it less often: at most {first} of the step ({UNKNOWN})"
            ),
        ),
        evidence=table(
            f"The script's lines between the phases, rank {rank}",
            lines.assign(place=places, share=lines["ns"] / mean_step_ns),
            {"place": "line", "ns": "of a step_ns", "share": "share"},
        ),
        sure="How long a step is in no phase was measured in every steady step; how that divides, from the stacks. The"
        " saving is these lines gone, the most that any change can give.",
        verdict=f"{percent(estimate.by_rank_ns[rank] / mean_step_ns)} of each step goes to lines between its phases:"
        f" {line.does}."
        if line is not None
        else "",
    )


def _on_device(
    estimate: Estimate,
    host_parts: Frame,
    own_python: Maybe[Frame],
    host_work: Maybe[Frame],
    hottest: Maybe[Frame],
    line: CostlyLine | None,
) -> Explanation:
    rank = estimate.worst
    mine = estimate.rows(host_parts[host_parts["part"] == BETWEEN]).iloc[0]
    named, evidence = "", None
    if own_python:
        functions = estimate.rows(own_python.get()).head(MOST_LINES).to_dict("records")
        named = ", ".join(f"{short(f['function'], 80)} ({duration(f['ns'])})" for f in functions)
    place = hottest_place(hottest, rank, "rest")
    cure = (
        line.advice(between=True)
        if line is not None and line.idiom is not None
        else _WITHOUT_STACKS
        if place is None
        else f"make `{shown(place.function, place.file, place.line)}` faster, or do it less often ({UNKNOWN})"
    )
    seen = hottest_own(hottest, rank, "rest") or (f" The device waited longest for {named}." if named else "")
    if host_work:
        work = estimate.rows(host_work.get())
        work = work[work["phase"] == ""]
        work = work.assign(name=[short(name, 120) for name in work["name"]])
        evidence = table(f"Between the phases on rank {rank}", work, _WORK) if len(work) else None
    return Explanation(
        title="The script's Python between the phases holds up the device",
        summary=f"Rank {rank} spends {duration(mine['host_ns'])} of each step between fetching, forward, backward and"
        f" the optimizer, in no loop over parameters and no wait for the device.{seen}",
        changes=(Change(cure, informs=cure is _WITHOUT_STACKS),),
        evidence=evidence,
        at_most=True,
        where=() if place is None else (place,),
        sure="Estimated by replaying the traced steps, at the pace of those that were not traced, without it: the most"
        " that any change can give.",
    )


def _silent(
    explanation: Explanation, estimate: Estimate, host_parts: Frame, longest_silence: Frame, mean_step_ns: float
) -> Explanation:
    """Return the explanation with where the script is silent, if that is most of what this costs."""
    mine = estimate.rows(longest_silence)
    between = estimate.rows(host_parts[host_parts["part"] == BETWEEN])["gain_ns"].iloc[0]
    if not len(mine) or mine["ns"].iloc[0] < SILENT * between:
        return explanation
    ns, after, before, loader = mine[["ns", "after", "before", "loader"]].iloc[0]
    one, other = short(after, 60), short(before, 60)
    place = f"between {one} and {other}" if one else "in one piece"
    place = f"between one {one.removesuffix(' #')} and the next" if one and one == other else place
    suspect = "" if loader else "; the loader, of which the trace shows nothing, is the first suspect"
    found = Change(
        "see whether the loader is what it waits for (`dlprof wrap` times it, and names the lines of a sample): more"
        " workers, or a cheaper sample",
        informs=True,
    )
    return replace(
        explanation,
        summary=f"{explanation.summary} For {duration(ns)} at a stretch, {place}, the script calls nothing that a"
        f" trace shows{suspect}.",
        changes=explanation.changes if loader else (found, *explanation.changes),
        verdict=f"{percent(estimate.by_rank_ns[estimate.worst] / mean_step_ns)} of each step passes {place} with"
        f" nothing launched{suspect}.",
    )


_WORK = {"name": "what the training thread did while the device idled", "ns": "time a traced step_ns"}
_SAVES_FROM = (*SAVES_FROM, "computation", "other")
_WITHOUT_STACKS = (
    "record it with py-spy, whose stacks say which lines these are (`dlprof doctor` says whether it can run)"
)
RULE = Rule(
    "The script's lines between the phases",
    check,
    explain,
    _SAVES_FROM,
    notable=NOTABLE_SHARE,
    of_host=True,
    generic=True,
)
