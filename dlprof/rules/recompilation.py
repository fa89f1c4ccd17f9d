"""torch.compile compiles again and again while training.

Dynamo compiles a function for what it has seen: shapes, dtypes, numbers, flags. A call that differs is compiled anew,
while training stands still; from `torch._dynamo.config.recompile_limit` times on the function runs uncompiled. What is
compiled in the first steps is the price of compiling, and not counted here.

Needs the stalls that dlprof records beside the light layer: what Dynamo says it spent on each compilation, and why a
function was compiled anew, taken from its own record after every step. On a GPU also a trace: a compilation counts as
far as device work leaves room for it.

Saving: what the steady steps spent compiling, gone altogether.

What to change: give every step the same shapes (pad, drop the last batch), or say which sizes vary
(`torch.compile(dynamic=True)`, `torch._dynamo.mark_dynamic`); pass numbers that change as tensors; keep flags and
closures the same. `TORCH_LOGS=recompiles` prints every reason in full.
"""

from __future__ import annotations

import pandas as pd

from dlprof.diagnosis import Clear, Rule
from dlprof.engine import Measured
from dlprof.errors import NotMeasured
from dlprof.measures import settings
from dlprof.measures.breakdown import breakdown, part, part_noise
from dlprof.measures.replay import own_time, saving_stalls
from dlprof.measures.stalls import compilations, stall_means, stalled_steps
from dlprof.result import Finding, Panel
from dlprof.timeline.steps import mean_step_ns, of_step, step_means
from dlprof.units import count, duration, percent, short

# No steady step is meant to compile, so it is worth two lines from where any finding is (diagnosis.LEAST_SHARE).
NOTABLE_SHARE = 0.02

MOST_ROWS = 12

_KIND = "compilation"


def check(run: Measured) -> Finding | Clear:
    """Look at what the steady steps of each rank compile, and at what the job would gain without."""
    means = run.frame(stall_means)
    means = means[means["kind"] == _KIND].set_index("rank")
    all_of = run.frame(compilations)
    if not len(all_of) and settings.model(run).get("compiled"):
        raise NotMeasured("the model is compiled, but this version of torch does not tell when")
    compiled = part(run, _KIND)
    gain = saving_stalls(run, _KIND, compiled)
    share = gain / mean_step_ns(run)
    if share < NOTABLE_SHARE:
        return Clear(
            f"{percent(share)} of the step is compiling"
            if means["stalls"].sum()
            else "no steady step compiled anything"
        )
    worst = max(compiled, key=lambda r: compiled[r])
    mine = means.to_dict("index")[worst]
    found = all_of[(all_of["rank"] == worst) & (all_of["steady"] > 0)].sort_values("steady_ns", ascending=False)
    return Finding(
        title="torch.compile compiles again and again",
        summary=f"{count(int(mine['stalls']), 'compilation')} in {int(mine['steps']):,} steady steps of rank {worst};"
        f" the longest took {duration(float(mine['longest_ns']))}{_why(found)}.",
        verdict=f"{percent(share)} {of_step(run)} is compiling anew.",
        noise_ns=part_noise(run, _KIND),
        saving_ns=gain,
        advice=_advice(found),
        evidence=_evidence(found, worst),
        ranks=tuple(sorted(r for r, ns in compiled.items() if ns >= compiled[worst] / 2)),
        sure="Measured in every steady step, as Dynamo tells it; estimated as all of it gone.",
    )


def _why(found: pd.DataFrame) -> str:
    reasons = [r for r in found["reason"] if r not in ("", "unknown")]
    return f", because {short(str(reasons[0]), 120)}" if reasons else ""


def _advice(found: pd.DataFrame) -> tuple[str, ...]:
    sizes = found["reason"].str.contains("size mismatch|stride mismatch", regex=True).any()
    advice = []
    if sizes:
        advice.append("give every step the same shapes: pad to few lengths, `drop_last=True`")
        advice.append("or `torch.compile(..., dynamic=True)`, which compiles once for all sizes")
    else:
        advice.append("keep what the reasons in the report name the same at every call, or pass it as a tensor")
    advice.append("`TORCH_LOGS=recompiles` prints every reason in full")
    return tuple(advice)


def _end(path: str) -> str:
    """Give the end of a path: the file and the function."""
    return path if len(path) <= 60 else "…" + path[-59:]


def _evidence(found: pd.DataFrame, rank: int) -> Panel:
    rows = tuple(
        (_end(str(path)) or "unknown", short(str(reason), 160) or "first time", int(n), duration(float(ns)))
        for path, reason, n, ns in zip(found["path"], found["reason"], found["steady"], found["steady_ns"], strict=True)
    )[:MOST_ROWS]
    columns = ("function", "compiled because", "times", "together")
    return Panel("table", f"Compilations in the steady steps of rank {rank}", rows, columns)


RULE = Rule(
    "recompilation",
    "Compiling again and again",
    (breakdown, compilations, own_time, stall_means, stalled_steps, step_means),
    check,
    saves_from=("compilation",),
)
