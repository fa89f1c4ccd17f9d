"""The run takes long to begin its training.

Before the first step a script imports, reads or prepares its data, makes its model, and waits for the loader's first
batch. In a job of a few minutes, as most are while a model is made, that may be most of the time, and it comes again
with every start: after a time limit, a preemption, an error.

Needs the step log, when the command began and ended, and the stacks that py-spy sees of a process that has loaded
PyTorch for half a second and has not taken a step. Which library a process imports before PyTorch is not seen.

Saving: the time from the import of PyTorch to the first step's end, without its phases, by the share of the stacks
that were seen in one line of the script's, the line that was seen most, with the lines around it, those of its function
that the same line of the script led to, and those that are known to do the same; all waits for workers count as one. It
is spread over the training steps, and its share is that of the run as it was recorded: a run that trains for longer has
less to gain. Imports of less than 20 s are left out: a script needs the libraries that it imports.

What to change: do it once and keep the result in a file; make less of it; or what the line is known to be.
"""

from __future__ import annotations

import pandas as pd

from dlprof.analysis.engine import JOB, Frame, Job, Maybe, by_rank, maybe, needs, per_rank
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing, worst
from dlprof.analysis.idioms import LOOPS
from dlprof.analysis.panel import table
from dlprof.analysis.source.line_shares import CostlyLine, costliest, start_lines
from dlprof.analysis.step.whole_job import run_parts, training_steps
from dlprof.analysis.timeline.steady import light_steps
from dlprof.errors import NotMeasured
from dlprof.result import Change, Place
from dlprof.units import duration, percent

# A start is slow from here on: what takes longer than a model of some size and a data set that is at hand.
_LONG_NS, NOTABLE_SHARE = 3e9, 0.1

# The idiom of an import, and how long imports take where the disk is what makes them slow.
_IMPORTS, _LONG_IMPORT_NS = "imported", 20e9

_START = ("launch", "setup", "first_batch")


_PHASES = ("fetch_ns", "forward_ns", "backward_ns", "optimizer_ns")


@per_rank
def first_step_rest(light_steps: Frame = needs(light_steps)) -> pd.DataFrame:
    """Return how long a rank's first step took beside its phases: ns, one row, 0 where these are not known.

    What was begun before it may end there.
    """
    first = light_steps.head(1)
    rest = (first["length_ns"] - first[[*_PHASES]].clip(lower=0).sum(axis=1)).clip(lower=0)
    return pd.DataFrame({"ns": rest.where(first["forward_ns"] > 0, 0.0)})


def check(
    run_parts: Frame = needs(run_parts),
    training_steps: pd.Series[float] = needs(training_steps),
    start_lines: Maybe[Frame] = maybe(start_lines),
    first_step_rest: Frame = needs(first_step_rest),
    job: Job = needs(JOB),
) -> Estimate:
    start = run_parts[run_parts["part"].isin(_START)]
    rest = by_rank(first_step_rest, "ns")
    total = float(start["ns"].sum()) + max(rest.values(), default=0.0)
    share = total / float(run_parts["ns"].sum())
    said = f"the start took {duration(total)}, {percent(share)} of the run"
    if total < _LONG_NS or share < NOTABLE_SHARE:
        return nothing(said, scope="run")
    frame = start_lines.or_none()
    if frame is None:
        raise NotMeasured(f"{said}; what it was spent on was not seen ({start_lines.why()})")
    imported = float(start.loc[start["part"] != "launch", "ns"].sum())
    # A script needs the libraries that it imports, as long as these are read from a disk of its own.
    imports = frame["idiom"] == _IMPORTS
    importing = imported * float(frame["samples"][imports].sum()) / max(float(frame["samples"].sum()), 1.0)
    known = frame.assign(samples=frame["samples"].mask(imports & (importing < _LONG_IMPORT_NS), 0))
    took: dict[int, float] = {}
    lines: dict[int, tuple[CostlyLine, bool, tuple[Place, ...]]] = {}
    for rank in job.ranks:
        if (line := costliest(Maybe(lambda: known), rank, "start", "start_wait")) is None:
            continue
        mine = frame[(frame["rank"] == rank) & (frame["line"] == line.place.line) & (frame["file"] == line.place.file)]
        function, file, at = mine["via"].iloc[0]
        waits = str(mine["doing"].iloc[mine["samples"].argmax()]) == "start_wait"
        took[rank] = max(line.share, _share(frame[frame["rank"] == rank], line, (function, file, at)))
        took[rank] *= imported + rest.get(rank, 0.0)
        making = costliest(start_lines, rank, "start_worker") if waits else None
        led = (Place(file, at, function),) if (file, at) != (line.place.file, line.place.line) else ()
        lines[rank] = (making or line, waits, led)
    if not took and imports.any():
        return nothing(f"{said}: {duration(importing)} are imports, and no other line takes much of it", scope="run")
    if not took:
        raise NotMeasured(f"{said}; no line of the script takes much of it")
    rank = worst(took)
    return Estimate(
        saving_ns=took[rank] / float(training_steps.mean()),
        by_rank_ns=took,
        scope="run",
        lost_ns=total / float(training_steps.mean()),
        loses="passes before the first step is done",
        summary=said,
        seen=(*lines[rank], total, took[rank]),
    )


def _share(lines: Frame, line: CostlyLine, way: tuple[str, str, int]) -> float:
    """Return the share of a rank's start that a line takes with those of its function that the same line led to, with
    that one, with those of its object, and with all that are known to do the same: a loop over files takes its time in
    several lines. Where it waits for workers, with all waits for these.
    """
    led = lines[lines["doing"].isin(("start", "start_wait"))]
    root = line.place.function.partition(".<locals>")[0]
    does = {line.idiom.name} - {LOOPS} if line.idiom else set()
    at = (led["file"] == line.place.file) & (led["line"] == line.place.line)
    near = (led["function"].str.partition(".<locals>")[0] == root) | ((led["file"] == way[1]) & (led["line"] == way[2]))
    if owner := root.rpartition(".")[0]:  # methods of one object work together
        near |= led["function"].str.startswith(f"{owner}.")
    counts = (near & (led["via"].map(way.__eq__))) | led["idiom"].isin(does)
    counts |= led["doing"].isin({"start_wait"} & set(led["doing"][at]))
    return float(led["samples"][counts].sum()) / max(float(led.drop_duplicates("doing")["of"].sum()), 1.0)


def explain(estimate: Estimate, run_parts: Frame = needs(run_parts)) -> Explanation:
    line, waits, led, total, took = estimate.seen
    at = "The first batch waits for workers, which stand at" if waits else "Of it,"
    spent = f"{at} {line.shown} for {duration(took)}" if waits else f"{at} {duration(took)} pass in {line.shown}"
    columns = {"part": "", "steps": "steps", "ns": "time_ns", "share": "share"}
    return Explanation(
        title=f"The start takes {duration(total)}, most of it in one line",
        summary=f"{spent.rstrip(',')}. {line.does[:1].upper()}{line.does[1:]}{'.' if line.does else ''}",
        changes=(_change(line),),
        evidence=table("The run", run_parts, columns),
        verdict=f"{duration(total)} pass before the first step is done, {duration(took)} of them in"
        f" {line.shown.rstrip(',')}{f', which {line.idiom.what}' if line.idiom else ''}.",
        sure="Stacks of the time from soon after the import of PyTorch to the first step's end are taken for"
        " all of it, and the whole line for needless. A run that trains for longer has less to gain.",
        at_most=True,
        where=(line.place, *led),
    )


def _change(line: CostlyLine) -> Change:
    return change(line.advice("do it once and keep the result in a file, or make this line faster:"))


RULE = Rule("A slow start", check, explain, notable=NOTABLE_SHARE)
