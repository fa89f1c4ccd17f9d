"""What each line of the script that calls operators takes of a step: its operators, and their backward pass.

The step whose operators were counted says which line calls which operators how often, and how many bytes they move. The
traced steps say what the operators of a name take, and which of them made each function of the backward pass.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from msgspec import Struct
from numpy.typing import NDArray

from dlprof import schema
from dlprof.analysis.compute.kernels import counted_operator, kernels, outer_operators, shorter_kernels
from dlprof.analysis.compute.operators import operator_work
from dlprof.analysis.engine import RANK, Frame, Maybe, RankFacts, across_ranks, maybe, needs, per_rank, within_rank
from dlprof.analysis.modules.frames import forward_rows
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.host import is_on_device
from dlprof.analysis.timeline.steps import Timing, timing
from dlprof.errors import NotMeasured

_AT = ("phase", "after", "file", "line", "function", "source", "calls")
_COLUMNS = [*_AT, "operators", "forward_ns", "backward_ns", "of_ns", "second_ns", "gain_ns"]

# Of lines with less than this share of what all operators take, no gain is replayed.
_NOTABLE = 0.05


class OperatorPasses(Struct, frozen=True):
    """Of each row of `operator_work`: the name of the operator that it is of ("": none of those that the script's lines
    call), whether it is work of the backward pass, and of a function that an operator of another function made.

    `ns`: what a mean steady traced step takes for an operator's name in the forward pass (False) and the backward one;
    `moved`: the bytes that those which the lines call move, by name.
    """

    name: NDArray[np.object_]
    backward: NDArray[np.bool_]
    second: NDArray[np.bool_]
    took: NDArray[np.float64]
    ns: Mapping[tuple[str, bool], float]
    moved: Mapping[str, int]

    def of(self, moved: Mapping[str, Any], *, trains: bool) -> float:
        """Return what operators take of a step that move so many bytes in the forward pass, ns.

        `trains`: with their part of the backward pass.
        """
        ns = {n: self.ns.get((n, False), 0.0) + trains * self.ns.get((n, True), 0.0) for n in moved}
        return sum(took * min(float(moved[n]) / max(self.moved.get(n, 0), 1), 1.0) for n, took in ns.items())

    def named(self, starts: tuple[str, ...], *, trains: bool) -> float:
        """Return what all operators take of a step whose names start so, as above."""
        return sum(took for (n, back), took in self.ns.items() if n.startswith(starts) and (trains or not back))


@within_rank
def operator_passes(
    operator_work: Frame = needs(operator_work),
    spans: Frame = needs(schema.SPANS),
    is_on_device: NDArray[np.bool_] = needs(is_on_device),
    outer_operators: NDArray[np.int64] = needs(outer_operators),
    timing: Timing = needs(timing),
    rank: RankFacts = needs(RANK),
) -> OperatorPasses:
    """Return what the operators that the script's lines call take in the forward pass and in the backward pass.

    Raises NotMeasured where no step was counted by line.
    """
    called, moved = ([_numbers(one.get(what)) for one in _lines(rank)] for what in ("operators", "moved"))
    if not any(called):
        raise NotMeasured("no step's operators were counted by line")
    names = {name for of in called for name in of}
    name, backward, second = _operators(operator_work["owner"].to_numpy(), spans, is_on_device, outer_operators, names)
    code, of = pd.factorize(name)
    took = operator_work["dur_ns"].to_numpy() / max(len(timing.windows), 1)
    sums = np.bincount(2 * code + backward, took, 2 * len(of)).reshape(-1, 2)
    ns = {(str(n), part): float(each[int(part)]) for n, each in zip(of, sums, strict=True) for part in (False, True)}
    sizes = Counter[str]()
    for one in moved:
        sizes.update(one)
    return OperatorPasses(name, backward, second, took, ns, sizes)


@per_rank
def line_work(
    operator_passes: OperatorPasses = needs(operator_passes),
    operator_work: Frame = needs(operator_work),
    rank: RankFacts = needs(RANK),
    kernels: Maybe[Frame] = maybe(kernels),
    shorter_kernels: Maybe[Callable[..., float]] = maybe(shorter_kernels),
) -> pd.DataFrame:
    """Return the lines that call operators, the one that takes most first: phase, after, file, line, function, source,
    calls, operators (their names), forward_ns, backward_ns, of_ns (what all operators take), second_ns and gain_ns.

    Times are those of a mean steady traced step, ns: on a device of the kernels that the operators launch, on a CPU of
    the operators themselves. Lines that call operators of one name share its time by the bytes that they move there,
    else by their calls. `gain_ns`: how much shorter the step were without them: on a device by a replay; NaN where that
    is little. `second_ns`: what the functions of the backward pass take that differentiate another one's operators, as
    after `torch.autograd.grad(…, create_graph=True)`. Raises NotMeasured where no step was counted by line.
    """
    passes, lines = operator_passes, _lines(rank)
    code, of = pd.factorize(passes.name)
    of_ns, second_ns = sum(passes.ns.values()), float(passes.took[passes.second].sum())
    called, moved = ([_numbers(one.get(what)) for one in lines] for what in ("operators", "moved"))
    rows = []
    for one, shares in zip(lines, _shares(called, moved), strict=True):
        forward, back = (sum(passes.ns.get((n, p), 0.0) * share for n, share in shares.items()) for p in (False, True))
        gain = forward + back
        if gain < _NOTABLE * of_ns:
            gain = math.nan
        elif (shorter := shorter_kernels.or_none()) is not None:
            kept = 1.0 - np.array([shares.get(str(n), 0.0) for n in of])
            left = pd.Series(kept[code], operator_work.index).reindex(kernels.get().index, fill_value=1.0)
            gain = shorter((left < 1.0).to_numpy(), left.to_numpy())
        rows.append((*(one[key] for key in _AT), " ".join(shares), forward, back, of_ns, second_ns, gain))
    frame = pd.DataFrame(rows, columns=_COLUMNS)
    order = (frame["forward_ns"] + frame["backward_ns"]).sort_values(ascending=False, kind="stable").index
    return frame.loc[order].reset_index(drop=True)


def _lines(rank: RankFacts) -> list[dict[str, Any]]:
    return [one for one in (rank.facts.get("flops") or {}).get("lines") or [] if {*_AT} <= {*one}]


def _numbers(found: Any) -> dict[str, int]:
    return {k: v for k, v in (found or {}).items() if isinstance(v, int)} if isinstance(found, dict) else {}


def _shares(called: Sequence[Mapping[str, int]], moved: Sequence[Mapping[str, int]]) -> list[dict[str, float]]:
    """Return for each line its share of all that is called by each name of its operators."""
    calls, size = Counter[str](), Counter[str]()
    for n, moves in zip(called, moved, strict=True):
        calls.update(n)
        size.update(moves)
    return [
        {name: moves.get(name, 0) / size[name] if size[name] else k / calls[name] for name, k in n.items() if k}
        for n, moves in zip(called, moved, strict=True)
    ]


def _operators(
    owner: NDArray[np.int64],
    spans: pd.DataFrame,
    is_on_device: NDArray[np.bool_],
    outer: NDArray[np.int64],
    names: set[str],
) -> tuple[NDArray[np.object_], NDArray[np.bool_], NDArray[np.bool_]]:
    """Return the operator among `names` that each row is work of ("": none), whether in the backward pass, and whether
    in a function that an operator of another function made.

    `owner`: the rows of the innermost operators. What a function of the backward pass does is of the operator that made
    the function.
    """
    is_function = ~host.is_one_of(spans["forward_thread"], "")
    function = _first(owner, outer, is_function)
    functions = np.unique(function[function >= 0])
    made_by = forward_rows(spans, is_on_device, functions) if len(functions) else functions
    of = owner.copy()
    backward = function >= 0
    if len(functions):
        of[backward] = made_by[np.searchsorted(functions, function[backward])]
    second = backward & (_first(of, outer, is_function) >= 0)
    return counted_operator(of, spans, outer, names), backward, second


def _first(rows: NDArray[np.int64], outer: NDArray[np.int64], wanted: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return for each row itself, or the nearest around it, that is wanted; -1: none."""
    at = rows.copy()
    for _ in range(host.MOST_DEEP):
        left = np.flatnonzero((at >= 0) & ~wanted[np.maximum(at, 0)])
        if not len(left):
            break
        at[left] = outer[at[left]]
    return np.where((at >= 0) & wanted[np.maximum(at, 0)], at, -1)


# Lines that the result lists, and the least share of all that is computed that one of them has.
MOST_LINES, LEAST_SHARE = 10, 0.01


@across_ranks
def lines_of_work(line_work: Frame = needs(line_work)) -> pd.DataFrame:
    """Return the lines that take most, mean of the ranks: columns as of `LineWork`."""
    by, ranks = ["file", "line", "function", "source"], line_work["rank"].nunique()
    of_ns = float(line_work.drop_duplicates("rank")["of_ns"].sum())
    sums = line_work.groupby(by, sort=False)[["calls", "forward_ns", "backward_ns"]].sum().reset_index()
    sums["ns"] = sums["forward_ns"] + sums["backward_ns"]
    sums["share"] = sums["ns"] / of_ns
    sums[["calls", "ns", "backward_ns"]] /= ranks
    sums = sums[sums["share"] >= LEAST_SHARE].sort_values("ns", ascending=False, kind="stable").head(MOST_LINES)
    return sums.drop(columns=["forward_ns"]).reset_index(drop=True)
