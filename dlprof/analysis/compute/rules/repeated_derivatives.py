"""The same output is differentiated several times in a step, by one variable at a time.

`torch.autograd.grad(u, x)` goes through the whole graph of `u` and gives one derivative. Losses of differential
equations (physics-informed networks), forces and gradient penalties need several: taken one by one, by x, by y, by t,
each goes through the same graph again; and a second derivative that starts from `u` takes the first one once more. With
`create_graph=True` each of them also becomes a part of the graph that `loss.backward()` goes through.

Needs a step that was counted (`--flops`), in which the calls of `torch.autograd.grad` and `backward` are seen with what
they differentiate, and stacks in which a line of the script calls `grad`.

Saving: at most the share of the backward passes, and of `grad`, that the calls have which another one of the same
output could have done: a call for several variables takes longer than one for one of them.

What to change: one call for each output, `u_x, u_y, u_t = torch.autograd.grad(u, (x, y, t), torch.ones_like(u),
create_graph=True)`, and second derivatives from the first ones. The values are the same.
"""

from __future__ import annotations

import pandas as pd

from dlprof.analysis.engine import RANK, Frame, Maybe, RankFacts, by_rank, maybe, needs, per_rank
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.source.line_shares import costly_lines
from dlprof.analysis.timeline.steady import steady_steps
from dlprof.errors import NotMeasured
from dlprof.result import Place
from dlprof.units import count, duration

# So few calls are those of a job with several losses.
_FEW = 4
_GRAD = r"\bgrad\("


@per_rank
def derivatives(steady_steps: Frame = needs(steady_steps), rank: RankFacts = needs(RANK)) -> pd.DataFrame:
    """Return one row: calls of `grad` and `backward` in the counted step, the different outputs of these, and
    backward_ns, what both take of a mean steady step. Raises NotMeasured where no step was counted.
    """
    seen = (rank.facts.get("flops") or {}).get("derivatives")
    if not seen:
        raise NotMeasured("no step was counted (--flops on)")
    backward_ns = float(steady_steps["backward_ns"].mean()) if len(steady_steps) else 0.0
    return pd.DataFrame([{"calls": seen["calls"], "outputs": seen["outputs"], "backward_ns": backward_ns}])


def check(derivatives: Frame = needs(derivatives), costly_lines: Maybe[Frame] = maybe(costly_lines)) -> Estimate:
    again = derivatives[derivatives["calls"] - derivatives["outputs"] >= _FEW]
    if again.empty:
        return nothing("no output is differentiated several times in a step")
    lines = costly_lines.get()
    lines = lines[(lines["doing"] == "backward") & lines["text"].str.contains(_GRAD)]
    if lines.empty:
        return nothing("no line of the script was seen in `grad`")
    gone = again["backward_ns"] * (1 - again["outputs"] / again["calls"])
    return Estimate(
        gone_ns=by_rank(again.assign(gone_ns=gone), "gone_ns"),
        noise_of=("computation",),
        loses="goes to derivatives of the same outputs, one variable at a time, at most",
        seen=(again, lines),
    )


def explain(estimate: Estimate) -> Explanation:
    again, lines = estimate.seen
    calls, outputs, ns = again.set_index("rank").loc[estimate.worst, ["calls", "outputs", "backward_ns"]]
    mine = lines[lines["rank"] == estimate.worst]
    top = (mine if len(mine) else lines).sort_values("samples", ascending=False).iloc[0]
    place = Place(str(top["file"]), int(top["line"]), str(top["function"]), what=str(top["text"]))
    return Explanation(
        title="The same outputs are differentiated one variable at a time",
        summary=f"A step of rank {estimate.worst} calls `grad` and `backward` {count(int(calls), 'time')}, of"
        f" {count(int(outputs), 'different output')}: {duration(float(ns))} of each step.",
        changes=(
            change(
                "one call for all variables of an output: `u_x, u_y = torch.autograd.grad(u, (x, y),"
                " torch.ones_like(u), create_graph=True)`, and second derivatives from the first ones"
            ),
        ),
        at_most=True,
        sure="At most: a call for several variables takes longer than one for one of them.",
        where=(place,),
    )


RULE = Rule("Repeated derivatives", check, explain, ("computation", "host"))
