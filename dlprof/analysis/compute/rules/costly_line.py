"""A line of the model is known to do work that need not be done, or not so.

Positions and masks that are the same in each step, the differences of all pairs where a product of matrices would do,
a graph that is walked again: the operators of such a line are as fast as they can be, and no rule on operators sees
that they are too many.

Needs the step log, and a line that takes a notable part of the step and of which the source says what it does. On a
GPU: a trace and a step whose operators were counted by line. On a CPU: the stacks that py-spy saw in the passes, of
which the line takes a fifth.

Saving: the most that it can be, the line gone. On a GPU by a replay without the kernels that the line's operators and
their backward pass launch. On a CPU its share of the stacks in the pass, of that pass, and its part of the backward
pass: what its operators take there by the trace, else as much as of the forward pass, and with a loss that is written
out in a loop, all of it; of the time between operators its part, by how many it calls; and of a line that calls
`grad` what that takes, with the functions of the backward pass that differentiate it once more.

What to change: what the line is known to be.
"""

from __future__ import annotations

from collections.abc import Mapping

from dlprof.analysis import idioms, settings
from dlprof.analysis.compute.cpu_work import cpu_parts, cpu_work, in_all_steps
from dlprof.analysis.engine import JOB, Frame, Job, Maybe, maybe, needs
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.source.line_shares import AROUND, CostlyLine, call_sites, costliest, costly_lines, is_at
from dlprof.analysis.source.line_work import line_work
from dlprof.analysis.source.patches import Call
from dlprof.analysis.step.breakdown import breakdown, part
from dlprof.analysis.timeline.steps import mean_step_ns, phases_of_step
from dlprof.result import Place
from dlprof.units import duration, percent

# What goes with a line of a pass, or of a loss: autograd runs the line's part of the backward pass elsewhere.
_PASSES = {"forward": ("forward", "backward"), "backward": ("backward",), "rest": ("rest", "backward")}
_NAMED = {"forward": "the forward pass", "backward": "the backward pass", "rest": "the loss"}


def check(
    costly_lines: Maybe[Frame] = maybe(costly_lines),
    phases_of_step: Maybe[Frame] = maybe(phases_of_step),
    call_sites: Maybe[list[Call]] = maybe(call_sites),
    line_work: Maybe[Frame] = maybe(line_work),
    cpu_parts: Maybe[Frame] = maybe(cpu_parts),
    cpu_work: Maybe[Frame] = maybe(cpu_work),
    breakdown: Maybe[Frame] = maybe(breakdown),
    job: Job = needs(JOB),
) -> Estimate:
    lines = line_work.or_none()
    if not settings.on_cpu(job):
        found = _traced(line_work.get(), costly_lines.or_none())
    elif lines is None or (parts := cpu_parts.or_none()) is None:
        found = _seen(costly_lines, phases_of_step.get(), call_sites, None)
    else:
        traced = _traced(lines, costly_lines.or_none())
        all_ns = in_all_steps({rank: took for rank, (took, *_) in traced.items()}, parts, cpu_work.get())
        host_ns = {} if breakdown.or_none() is None else part(breakdown.get(), "host")
        stacks, phases = costly_lines.or_none(), phases_of_step.or_none()
        found = {}
        for rank, (_, _, line) in traced.items():
            took = all_ns[rank] + _between(lines, host_ns, rank, line)
            took += 0.0 if stacks is None or phases is None else _in_grad(stacks, phases, rank, line)
            found[rank] = took, "", line
        if stacks is not None and phases is not None:
            for rank, seen in _seen(costly_lines, phases, call_sites, lines).items():
                found[rank] = max(found.get(rank, seen), seen, key=lambda one: one[0])
    if not found:
        return nothing("no line of the model is known to do needless work")
    return Estimate(
        gone_ns={rank: took for rank, (took, _, _) in found.items()}, loses="goes to one line of the model", seen=found
    )


_Found = dict[int, tuple[float, str, CostlyLine]]  # by rank: what the line takes, ns, where it stands, and the line


def _traced(lines: Frame, stacks: Frame | None) -> _Found:
    """Return the line of each rank whose operators take most in the traced steps, of those that are known."""
    found: _Found = {}
    for row in lines[lines["gain_ns"] > 0].to_dict("records"):
        rank, place = int(row["rank"]), Place(row["file"], row["line"], row["function"])
        near = _near(lines, rank, place)
        own = near["line"] == row["line"]
        ns = near["forward_ns"] + near["backward_ns"]
        share, others = float(ns.sum()) / row["of_ns"], float(ns[~own].sum())
        # A line may be known by one beside it, as what a loop does with the results of that.
        for one in near.assign(other=~own).sort_values("other", kind="stable").to_dict("records"):
            known = idioms.known(str(one["source"]), (f"{one['function']} ()",), one["phase"] or "rest")
            # What the stacks would have to tell, as whether a loop is one over elements, no source does.
            if known is None or not known.first or known.last or (one["other"] and not known.beside):
                continue
            if known.fits(str(one["operators"]).split(), int(one["calls"])):
                at = Place(one["file"], one["line"], one["function"])
                line = CostlyLine(at, (place,) if one["other"] else (), share, one["source"], known)
                took = row["gain_ns"] + others + (row["second_ns"] if known.name == idioms.JACOBIAN else 0.0)
                break
        else:
            line = CostlyLine(place, (), share, row["source"], idioms.BY_NAME[idioms.LOOPS])
            if near["calls"].sum() < _MANY or not _is_loop(stacks, rank, place) or _is_large(lines, rank, line):
                continue
            took = row["gain_ns"] + others
        found[rank] = max(found.get(rank, (0.0, "", line)), (took, "", line), key=lambda of: of[0])
    return found


# A loop over elements calls so many operators in a step; one over layers does not.
_MANY = 200


def _is_loop(stacks: Frame | None, rank: int, place: Place) -> bool:
    """Return whether the stacks show that a line is in a loop within the step."""
    if stacks is None:
        return False
    there = (stacks["rank"] == rank) & (stacks["line"] == place.line) & (stacks["function"] == place.function)
    return bool((there & (stacks["idiom"] == idioms.LOOPS)).any())


def _near(lines: Frame, rank: int, place: Place) -> Frame:
    """Return the rows of a line and of those around it in its function."""
    near = lines[(lines["rank"] == rank) & (lines["function"] == place.function)]
    return near[near["file"].astype(str).str.endswith(place.file) & ((near["line"] - place.line).abs() <= AROUND)]


def _between(lines: Frame, host_ns: Mapping[int, float], rank: int, line: CostlyLine) -> float:
    """Return which part of the host's time between operators goes to a line, by how many of all it calls, ns."""
    calls = float(lines.loc[lines["rank"] == rank, "calls"].sum())
    return float(host_ns.get(rank, 0.0) * _near(lines, rank, line.place)["calls"].sum() / max(calls, 1.0))


def _in_grad(stacks: Frame, phases: Frame, rank: int, line: CostlyLine) -> float:
    """Return what the calls of `grad` in a line's function take of a step on a CPU by its stacks, ns."""
    mine = stacks[(stacks["rank"] == rank) & (stacks["doing"] == "backward")]
    there = (mine["function"] == line.place.function) & (mine["idiom"] == idioms.JACOBIAN)
    ns = phases.loc[(phases["rank"] == rank) & (phases["phase"] == "backward"), "ns"].sum()
    return float(ns * mine.loc[there, "samples"].sum() / max(mine["of"].max(), 1)) if there.any() else 0.0


def _seen(
    costly_lines: Maybe[Frame],
    phases_of_step: Frame,
    call_sites: Maybe[list[Call]],
    line_work: Frame | None,
) -> _Found:
    """Return the line of each rank that was seen most, if it is known."""
    costly_lines.get()
    losses = [call for call in call_sites.or_none() or () if call.kind == "loss"]
    ns = {(int(r), p): float(ns) for r, p, ns in phases_of_step[["rank", "phase", "ns"]].itertuples(index=False)}
    found: _Found = {}
    for rank in {rank for rank, _ in ns}:
        for phase, passes in _PASSES.items():
            line = costliest(costly_lines, rank, phase)
            if line is None or line.idiom is None or not line.idiom.first:
                continue
            if line.idiom.name == idioms.LOOPS and _is_large(line_work, rank, line):
                continue
            if phase != "rest" or any(is_at(call, line.place.file, line.place.line) for call in losses):
                own, *also = (ns[rank, one] for one in passes)
                times = _backward(line_work, rank, line)
                passed = 1.0 if phase == "rest" else 0.0 if _has_no_gradient(line) else line.share
                back = passed * sum(also) if times is None else min(line.share * own * times, sum(also))
                took = line.share * own + back
                found[rank] = max(found.get(rank, (0.0, "", line)), (took, phase, line), key=lambda one: one[0])
    return found


def _has_no_gradient(line: CostlyLine) -> bool:
    """Return whether a line is in a function that makes constants."""
    return bool(line.callers) and line.idiom is not None and line.idiom.name in idioms.OF_FUNCTIONS


# Operators of a line that take as long each on average are no work that is split too finely.
_LARGE_NS = 100_000


def _is_large(lines: Frame | None, rank: int, line: CostlyLine) -> bool:
    """Return whether a line in a loop calls large operators, as layers one after the other do."""
    if lines is None:
        return False
    here = lines["file"].astype(str).str.endswith(line.place.file) & (lines["line"] == line.place.line)
    own = lines[here & (lines["rank"] == rank)]
    return bool(own["forward_ns"].sum() > _LARGE_NS * max(float(own["calls"].sum()), 1.0))


def _backward(lines: Frame | None, rank: int, line: CostlyLine) -> float | None:
    """Return how many times as long as a line, and those around it, its part of the backward pass takes."""
    if lines is None:
        return None
    near = _near(lines, rank, line.place)
    forward = float(near["forward_ns"].sum())
    return float(near["backward_ns"].sum()) / forward if forward > 0 else None


def explain(estimate: Estimate, mean_step_ns: float = needs(mean_step_ns)) -> Explanation:
    took, phase, line = estimate.seen[estimate.worst]
    if not phase:
        summary = f"{percent(line.share)} of what rank {estimate.worst} computes is called in {line.shown}"
        summary += f" and the lines around it, with their part of the backward pass: up to {duration(took)} of a step."
        sure = "Estimated as the operators of this line gone from the traced steps; what is done instead takes some of"
        sure += " it."
        title = "A line of the script does more than it must"
    else:
        name = _NAMED[phase]
        alone = phase == "backward" or _has_no_gradient(line)
        both = ":" if alone else "; with its part of the backward pass that is"
        summary = f"{percent(line.share)} of the stacks in {name} of rank {estimate.worst} are in {line.shown}"
        summary += f" and the lines around it{both} up to {duration(took)} of a step."
        sure = f"Estimated as the line gone, by its share of the stacks in {name}"
        sure += "." if alone else "; that it takes as much of the backward pass is assumed."
        title = f"A line of {name} does more than it must"
    return Explanation(
        title=title,
        summary=summary,
        changes=(change(line.advice()),),
        verdict=f"Up to {percent(took / mean_step_ns)} of each step goes to one line: {line.does}.",
        sure=sure,
        at_most=True,
        where=(line.place, *(() if phase else line.callers)),
    )


RULE = Rule(
    "Needless work in a line of the model",
    check,
    explain,
    ("computation", "host", "other"),
    notable=0.05,
)
