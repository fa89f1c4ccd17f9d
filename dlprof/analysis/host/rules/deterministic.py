"""Deterministic algorithms are on: sorted sums take the place of atomic ones, and every new tensor is filled.

`torch.use_deterministic_algorithms(True)` makes results repeat bit by bit on a GPU. Interpolation is then put together
from single operators, whose gradient is an `index_put_` that sorts its indices and adds up one after the other;
`index_add_`, `scatter_add_` and what has them as gradients go the same way; and empty tensors are filled, with a kernel
each, so that reading what was never written gives the same too.

Needs a trace that links launches to kernels, and the recorded setting: indexing itself sorts in either mode. Left alone
are runs in which the mode costs nothing notable.

Saving: at most what runs only in this mode. The traced steps are replayed without the fills, without the sorted sums in
other operators than indexing, and without the operators around those of interpolation, on the device and on the host.
What takes their place is faster by far, and not known; nor is what other algorithms of cuDNN would gain.

What to change: `torch.use_deterministic_algorithms(False)` outside of debugging, and in Lightning a Trainer that is not
deterministic; `CUBLAS_WORKSPACE_CONFIG` is then not needed either. Two runs no longer agree bit by bit then, which is
rounding, and no other training. Where the fills cost most,
`torch.utils.deterministic.fill_uninitialized_memory = False` leaves them out and keeps the mode.
"""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof import schema
from dlprof.analysis import intervals as iv
from dlprof.analysis.compute.kernels import outer_operators
from dlprof.analysis.engine import RANK, Frame, Maybe, RankFacts, maybe, needs, per_rank
from dlprof.analysis.estimate import Estimate, Explanation, Rule, change, nothing
from dlprof.analysis.panel import table
from dlprof.analysis.source.statements import Trees, statements, switched_on
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.device import Launches, launches
from dlprof.analysis.timeline.host import is_on_device
from dlprof.analysis.timeline.steps import mean_step_ns
from dlprof.analysis.timeline.what_if import WhatIf, what_if
from dlprof.errors import NotMeasured
from dlprof.read.kineto.patterns import ENGINE
from dlprof.units import duration

FILLS, SUMS, INTERPOLATION = "fills of new tensors", "sorted sums", "interpolation"

# New tensors are made by these; the operators that sum by sorting in this mode (torch.use_deterministic_algorithms).
_NEW = re.compile(r"aten::(?:new_)?(?:empty|resize_|set_)")
_SUMS = re.compile(r"aten::(?:index_add|index_copy|scatter|put_?$|gather_backward|index_select_backward)")
# What interpolation is put together from (torch._decomp, _upsample_linear_vec), and the functions of its gradient.
_PARTS = re.compile(
    rf"(?:aten::|{ENGINE})(?:_?unsafe_?index|add|sub|rsub|mul|clamp|to|arange|reshape|floor|contiguous|clone)_?"
    r"(?:Backward\d+)?$",
    re.IGNORECASE,
)
_INDEXED = re.compile(r".*unsafe_?index", re.IGNORECASE)
_COLUMNS = {"what": "what runs only in this mode", "kernels": "kernels a step", "ns": "takes_ns"}


@per_rank
def deterministic_work(
    spans: Frame = needs(schema.SPANS),
    is_on_device: NDArray[np.bool_] = needs(is_on_device),
    outer_operators: NDArray[np.int64] = needs(outer_operators),
    what_if: Maybe[WhatIf] = maybe(what_if),
    launches: Maybe[Launches] = maybe(launches),
    rank: RankFacts = needs(RANK),
) -> pd.DataFrame:
    """Return what runs only as algorithms are deterministic, in a mean replayed step: what (FILLS, SUMS or
    INTERPOLATION), kernels, ns (of these), gain_ns (how much shorter the mean steady step would be without all of
    it). No row where the mode is off; raises NotMeasured where that is not known.
    """
    mode = (rank.facts.get("matmul") or {}).get("deterministic")
    if mode is None:
        raise NotMeasured("whether algorithms are deterministic was not recorded")
    columns = ["what", "kernels", "ns", "gain_ns"]
    if not mode:
        return pd.DataFrame(columns=columns)
    ops = ~is_on_device & host.is_kind(spans, "op")
    fills = (
        ops
        & host.is_one_of(spans["name"], "aten::fill_")
        & (outer_operators >= 0)
        & _matches(spans, _NEW)[outer_operators]
    )
    whatif = what_if.get()
    replay = whatif.replay
    called = launches.get().called[replay.rows]
    sorts = spans["start_ns"].to_numpy()[ops & host.is_one_of(spans["name"], "aten::_index_put_impl_")]
    sums = _times(spans, ops & _matches(spans, _SUMS))
    known = {
        INTERPOLATION: interpolation(spans, ops),
        SUMS: sums[np.unique(np.searchsorted(sums[:, 0], sorts[iv.holds(sums, sorts)], side="right") - 1)],
        FILLS: _times(spans, fills),
    }
    rows, gone = [], np.zeros(len(called), dtype=bool)
    for what, times in known.items():
        mine = iv.holds(times, called) & ~gone
        gone |= mine
        rows.append((what, float(mine.sum()) / replay.steps, float(replay.durations[mine].sum()) / replay.steps))
    gain = whatif.gain_ns(
        durations=np.where(gone, -1, replay.durations), other=((iv.merge(*known.values()), 0.0),) if gone.any() else ()
    )
    return pd.DataFrame([(*row, gain) for row in rows if row[1]], columns=columns)


def interpolation(spans: pd.DataFrame, ops: NDArray[np.bool_]) -> iv.Intervals:
    """Return when operators run that follow each other as those of interpolation do, its index among them."""
    found = []
    for _, calls in spans[ops & host.is_named(spans, "aten::", ENGINE)].groupby("lane", observed=True):
        calls = host.outermost(calls)
        part = _matches(calls, _PARTS)
        runs = np.cumsum(np.diff(part, prepend=False))
        found.append(_times(calls, part & np.isin(runs, runs[_matches(calls, _INDEXED)])))
    return iv.merge(*found)


def _matches(spans: pd.DataFrame, pattern: re.Pattern[str]) -> NDArray[np.bool_]:
    names = spans["name"].cat
    of_name = np.array([pattern.match(str(name)) is not None for name in names.categories], dtype=bool)
    found: NDArray[np.bool_] = of_name[names.codes.to_numpy()]
    return found


def _times(spans: pd.DataFrame, chosen: NDArray[np.bool_]) -> iv.Intervals:
    start = spans["start_ns"].to_numpy()[chosen]
    return iv.union(start, start + spans["dur_ns"].to_numpy()[chosen])


def check(deterministic_work: Frame = needs(deterministic_work)) -> Estimate:
    if deterministic_work.empty:
        return nothing("nothing runs only because algorithms are deterministic")
    gone = deterministic_work.groupby("rank")["gain_ns"].first()
    return Estimate(
        gone_ns={int(str(rank)): float(ns) for rank, ns in gone.items()},
        noise_of=("computation",),
        loses="goes to deterministic algorithms",
    )


def explain(
    estimate: Estimate,
    deterministic_work: Frame = needs(deterministic_work),
    statements: Trees = needs(statements),
    mean_step_ns: float = needs(mean_step_ns),
) -> Explanation:
    mine = estimate.rows(deterministic_work).sort_values("ns", ascending=False, kind="stable")
    kept = change(
        "`torch.utils.deterministic.fill_uninitialized_memory = False`, which keeps the mode and fills nothing"
    )
    off = (
        "`torch.use_deterministic_algorithms(False)` outside of debugging (without it no `CUBLAS_WORKSPACE_CONFIG` is"
        " needed)"
    )
    return Explanation(
        title="Deterministic algorithms are on",
        summary=f"Of a step of {duration(mean_step_ns)} on rank {estimate.worst},"
        f" {duration(float(mine['ns'].sum()))} go to {' and '.join(mine['what'])}, as only this mode needs them.",
        changes=(
            change(f"{off}: results then no longer repeat bit by bit", numerics=True),
            *([kept] if mine["what"].iloc[0] == FILLS else []),
        ),
        evidence=table(f"What deterministic algorithms cost a step of rank {estimate.worst}", mine, _COLUMNS),
        sure="The traced steps without what runs only in this mode: the most that it can be, since the faster"
        " algorithms take some of it. What other algorithms of cuDNN would gain is not known.",
        at_most=True,
        where=switched_on(statements, "use_deterministic_algorithms", "deterministic"),
    )


RULE = Rule(
    "Deterministic algorithms",
    check,
    explain,
    saves_from=("computation", "host", "launch_latency"),
    only_with="gpu",
)
