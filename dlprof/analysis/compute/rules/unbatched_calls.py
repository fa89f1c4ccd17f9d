"""A loop of the script calls the model once for each element, though no turn needs what another one gives.

A call for sixteen images, frames or time steps costs about as much as one for one of them, where each is little: the
host prepares every operator anew, and an operator on few values is mostly its own start. Loops over the frames of a
clip, over the environments of a simulation, or over the notes of a melody whose past is known are of this kind. Where a
turn gets all that the turns before got and one more (`tokens[:, : t + 1]`), most of the work is done again, too: of a
causal model (a causal mask, a recurrent layer) one pass gives the outputs of all positions.

Needs a trace with the names of modules, a copy of the script, and stacks. The rule looks for a module with parameters
that is called four times or more from one place, in a line of a loop (or comprehension) whose calls get nothing that
another turn has made. Recurrences, stacks of layers, and the loop of the training itself are none.

Saving: where each turn gets more than the one before, all but one of the calls, forward and backward; else, at most,
what the host does between the operators of these calls, and 10 µs of each operator, but for one of the calls.

What to change: put the elements together in one dimension, as that of the batch, call once, and take the result apart
(`frames.flatten(0, 1)` before the call, `.unflatten(0, frames.shape[:2])` behind it). Layers that look at the whole
batch, as batch norm in training, then do so for all turns together.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from dlprof import schema
from dlprof.analysis import intervals as iv
from dlprof.analysis.compute.operators import operator_work
from dlprof.analysis.engine import Frame, Maybe, by_rank, maybe, needs, per_rank
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.host.gaps import SMALL_NS
from dlprof.analysis.modules.frames import FORWARD, PARTS, Frames, module_frames, module_rows
from dlprof.analysis.source.line_shares import costly_lines
from dlprof.analysis.source.statements import Trees, independent_turns, statements
from dlprof.analysis.timeline.device import has_device
from dlprof.analysis.timeline.steps import Timing, mean_step_ns, timing
from dlprof.result import Place
from dlprof.units import count, percent

# So few calls are those of a network with two or three inputs.
_FEW = 4
# A line leads to the calls where so much of the forward pass was seen below it.
_NOTABLE = 0.1


@per_rank
def repeated_calls(
    module_frames: Frames = needs(module_frames),
    module_rows: Frame = needs(module_rows),
    modules: Frame = needs(schema.MODULES),
    operator_work: Frame = needs(operator_work),
    timing: Timing = needs(timing),
    has_device: bool = needs(has_device),
) -> pd.DataFrame:
    """Return the modules with parameters that are called again and again by what encloses them, in a mean steady traced
    step: path, kind, calls (the most by one caller), share (of all operators' time, theirs, forward and backward; on a
    device that of kernels), starts (the share of the step in which their operators begin, SMALL_NS each at most, or
    Python runs between those of their forward pass; on a device 0). A module within another such one is left out.
    """
    frames, windows = module_frames, timing.host_windows
    step = np.searchsorted(windows[:, 0], frames.start, side="right") - 1
    inside = iv.holds(windows, frames.start)
    called = np.flatnonzero(frames.calls & inside & (frames.part == FORWARD) & (frames.module >= 0))
    within = pd.DataFrame({"module": frames.module[called], "by": frames.parent[called], "step": step[called]})
    most = within.groupby(["module", "by", "step"]).size().groupby("module").median()
    trained = [str(path) for path in modules["path"][modules["parameters"] > 0]]
    often = {
        frames.paths[place]: (frames.classes[place], float(calls))
        for place, calls in zip(most.index.tolist(), most, strict=True)
        if calls >= _FEW and any(_is_within(path, frames.paths[place]) for path in trained)
    }
    rows = []
    ns, owner = operator_work["dur_ns"].to_numpy(dtype=float), operator_work["owner"].to_numpy()
    of, forward = module_rows["module"].to_numpy()[owner], (module_rows["part"] == PARTS[FORWARD]).to_numpy()[owner]
    for path, (kind, calls) in often.items():
        if any(other != path and _is_within(path, other) for other in often):
            continue
        below = (of >= 0) & (owner >= 0) & np.array([_is_within(one, path) for one in frames.paths], dtype=bool)[of]
        own = called[[frames.paths[place] == path for place in frames.module[called]]]
        took, same = frames.end[own] - frames.start[own], np.diff(frames.parent[own]) == 0
        # What the loop itself does from one call to the next, unless it is longer than a call.
        turns = np.minimum(frames.start[own][1:] - frames.end[own][:-1], took[:-1])[same & (np.diff(step[own]) == 0)]
        gaps = float(took.sum() + turns.sum()) - float(ns[below & forward].sum())
        starts = 0.0 if has_device else max(gaps, 0.0) + float(np.minimum(ns[below], SMALL_NS).sum())
        rows.append((path, kind, calls, ns[below].sum() / max(ns.sum(), 1.0), starts / max(iv.total(windows), 1)))
    return pd.DataFrame(rows, columns=["path", "kind", "calls", "share", "starts"])


def _is_within(path: str, outer: str) -> bool:
    return not outer or path == outer or path.startswith(f"{outer}.")


def check(
    repeated_calls: Frame = needs(repeated_calls),
    statements: Trees = needs(statements),
    costly_lines: Maybe[Frame] = maybe(costly_lines),
    mean_step_ns: float = needs(mean_step_ns),
) -> Estimate:
    if repeated_calls.empty:
        return nothing("no module is called again and again by one caller")
    lines = costly_lines.get()
    lines = lines[lines["doing"].isin(("forward", "rest"))]
    lines = lines[lines["samples"] >= _NOTABLE * lines["of"]].sort_values("samples", ascending=False)
    places = [
        (function, str(file), int(line))
        for row in lines.to_dict("records")
        for function, file, line in [(row["function"], row["file"], row["line"]), *row["callers"]]
    ]
    found = [(at, turns) for at in places if (turns := independent_turns(statements, at[1], at[2])) is not None]
    if not found:
        return nothing("no loop calls a module for elements that do not depend on each other")
    _, turns = found[0]
    part = repeated_calls["share" if turns.grows else "starts"]
    gone_ns = part * (1 - 1 / repeated_calls["calls"]) * mean_step_ns
    return Estimate(
        gone_ns=by_rank(repeated_calls.assign(gone_ns=gone_ns), "gone_ns"),
        noise_of=("computation", "host"),
        loses="goes to calls of the model for one element after the other" + ("" if turns.grows else ", at most"),
        seen=(repeated_calls, found[0]),
    )


def explain(estimate: Estimate) -> Explanation:
    calls, ((function, file, line), turns) = estimate.seen
    top = estimate.rows(calls).sort_values("share", ascending=False).iloc[0]
    named = str(top["path"]) or str(top["kind"])
    again = (
        "one pass over the whole sequence, where the model is causal (a causal mask, a recurrent layer): its"
        " output at each position is then that of the call for the sequence up to there"
        if turns.grows
        else "one call for all turns of the loop: their inputs put together along the batch, and its result taken apart"
        " (`x.flatten(0, 1)` before the call, `.unflatten(0, x.shape[:2])` behind it)"
    )
    return Explanation(
        title="The model is called for one element after the other",
        summary=f"{named} ({top['kind']}) is called {count(round(float(top['calls'])), 'time')} by one caller, from a"
        f" loop whose turns do not need each other; {percent(float(top['share']))} of what operators take is in it.",
        changes=(change(again),),
        at_most=not turns.grows,
        sure="Read in the script: no call of the loop gets what another turn has made. "
        + (
            "A model that looks at later positions, too, gives something else in one pass."
            if turns.grows
            else "At most: a call for all takes longer than one for one of them."
        ),
        where=(Place(file, line, function, what=turns.text),),
    )


RULE = Rule("Calls for one element at a time", check, explain, ("computation", "host"))
