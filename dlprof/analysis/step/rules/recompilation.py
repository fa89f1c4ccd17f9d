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

from dlprof.analysis import settings
from dlprof.analysis.engine import Job, Maybe
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, worst
from dlprof.analysis.step.breakdown import part, part_noise
from dlprof.analysis.step.savings import saving_stalls
from dlprof.errors import NotMeasured
from dlprof.result import Change, Panel
from dlprof.units import count, duration, short

MOST_ROWS = 12

_KIND = "compilation"


def check(
    stall_means: pd.DataFrame,
    compilations: pd.DataFrame,
    breakdown: Maybe[pd.DataFrame],
    stalled_steps: Maybe[pd.DataFrame],
    own_time: Maybe[pd.DataFrame],
    job: Job,
) -> Estimate:
    """Estimate what the job would gain if its steady steps compiled nothing."""
    means = stall_means
    means = means[means["kind"] == _KIND]
    if not len(compilations) and settings.model(job).get("compiled"):
        raise NotMeasured("the model is compiled, but this version of torch does not tell when")
    compiled = part(breakdown.get(), _KIND)
    return Estimate(
        saving_ns=saving_stalls(stalled_steps.get(), stall_means, own_time.get(), _KIND, compiled),
        by_rank_ns=compiled,
        noise_ns=part_noise(breakdown.get(), _KIND),
        loses="is compiling anew",
        summary="" if means["stalls"].sum() else "no steady step compiled anything",
        explain=lambda: _explain(job, worst(compiled), means, compilations[compilations["steady"] > 0]),
    )


def _explain(job: Job, rank: int, means: pd.DataFrame, steady: pd.DataFrame) -> Explanation:
    mine = means[means["rank"] == rank].iloc[0]
    found = steady[steady["rank"] == rank].sort_values("steady_ns", ascending=False)
    return Explanation(
        title="torch.compile compiles again and again",
        summary=f"{count(int(mine['stalls']), 'compilation')} in {int(mine['steps']):,} steady steps of rank {rank};"
        f" the longest took {duration(float(mine['longest_ns']))}{_why(found)}.",
        changes=_changes(found, settings.training_loader(job, rank).get("drop_last")),
        evidence=_evidence(found, rank),
        sure="Measured in every steady step, as Dynamo tells it; estimated as all of it gone.",
    )


def _why(found: pd.DataFrame) -> str:
    reasons = [r for r in found["reason"] if r not in ("", "unknown")]
    return f", because {short(str(reasons[0]), 120)}" if reasons else ""


def _changes(found: pd.DataFrame, drops: bool | None) -> tuple[Change, ...]:
    if found["reason"].str.contains("size mismatch|stride mismatch", regex=True).any():
        same = "give every step the same shapes: pad to few lengths"
        cures = [
            change(same, numerics=True)
            if drops
            else change(f"{same}, `drop_last=True`", numerics=True, drop_last=(drops, True)),
            change("or `torch.compile(..., dynamic=True)`, which compiles once for all sizes", dynamic=(None, True)),
        ]
    else:
        cures = [change("keep what the reasons in the report name the same at every call, or pass it as a tensor")]
    told = change("`TORCH_LOGS=recompiles` prints every reason in full", TORCH_LOGS=(None, "recompiles"))
    return (*cures, told)


def _end(path: str) -> str:
    """Return the end of a path: the file and the function."""
    return path if len(path) <= 60 else "…" + path[-59:]


def _evidence(found: pd.DataFrame, rank: int) -> Panel:
    rows = tuple(
        (_end(str(path)) or "unknown", short(str(reason), 160) or "first time", int(n), float(ns))
        for path, reason, n, ns in zip(found["path"], found["reason"], found["steady"], found["steady_ns"], strict=True)
    )[:MOST_ROWS]
    columns = ("function", "compiled because", "times", "together_ns")
    return Panel("table", f"Compilations in the steady steps of rank {rank}", rows, columns)


RULE = Rule(
    "recompilation",
    "Compiling again and again",
    check,
    saves_from=("compilation",),
)
