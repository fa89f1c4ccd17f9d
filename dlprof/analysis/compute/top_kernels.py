"""What kernels and operators take, by name: the longest of all ranks, and those of a run to compare with another."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from dlprof import schema
from dlprof.analysis.compute.operators import operator_work, operators
from dlprof.analysis.engine import Frame, across_ranks, needs, per_rank
from dlprof.analysis.timeline.device import has_device
from dlprof.analysis.timeline.steady import standard_errors
from dlprof.analysis.timeline.steps import Timing, timing
from dlprof.errors import NotMeasured
from dlprof.result import MOST_WORK
from dlprof.units import short

MOST_KERNELS, MOST_OPERATORS = 40, 30

# Names of kernels that templates made can be thousands of letters long; a table shows less of them.
LONGEST_NAME, _LONGEST_SHOWN = 300, 200


@per_rank
def work(
    operator_work: Frame = needs(operator_work),
    spans: Frame = needs(schema.SPANS),
    has_device: bool = needs(has_device),
    timing: Timing = needs(timing),
) -> pd.DataFrame:
    """Return what operators and kernels take of a mean steady traced step: kind, name, calls, ns, noise_ns.

    And of a kernel its unit, what it multiplies on; of all that are of its kind total_ns, and how many names there are.
    On a device an operator has the kernels that it launched, each counts as a call; on a CPU the time that it spends in
    no other. noise_ns is the standard error over the traced steps, 0 of a single one. The heaviest first, MOST_WORK of
    each kind. Raises NotMeasured where no operator's work was traced.
    """
    launched = operator_work[operator_work["owner"] >= 0]
    found = [_by_name("operator", spans["name"].array[launched["owner"]], launched, len(timing.windows))]
    if has_device:
        found.append(_by_name("kernel", spans["name"].array[operator_work.index], operator_work, len(timing.windows)))
    return pd.concat(found, ignore_index=True)


@across_ranks
def heaviest_kernels(work: Frame = needs(work)) -> pd.DataFrame:
    """Return the kernels that take longest, the longest first: name, kind, calls and ns (a step, mean of the ranks),
    call_ns (of one), share (of the time in all kernels), most_on (a rank), most_ns (there), and known, how many there
    are on a rank. Raises NotMeasured where the trace holds no kernel.
    """
    kernels = kernels_of(work)
    if kernels.empty:
        raise NotMeasured("no kernel ran in the traced steps")
    total = float(kernels.drop_duplicates("rank")["total_ns"].sum()) / kernels["rank"].nunique()
    heaviest = kernels.groupby("rank").head(MOST_KERNELS)
    heaviest = heaviest.assign(kind=heaviest["unit"], name=[short(name, _LONGEST_SHOWN) for name in heaviest["name"]])
    frame = _means(heaviest, ["name"], "kind", ["calls", "ns"]).head(MOST_KERNELS)
    call_ns, share = frame["ns"] / frame["calls"], frame["ns"] / total if total else 0.0
    return frame.assign(call_ns=call_ns, share=share, known=int(kernels["names"].max()))


def kernels_of(work: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of `work` that are kernels."""
    return work[work["kind"] == "kernel"]


@across_ranks
def heaviest_operators(operators: Frame = needs(operators)) -> pd.DataFrame:
    """Return the operators that take longest, by dtype and shape, the longest first.

    Columns: operator, dtype, shape ("": of several, among which its time was only shared out, or not known), shapes
    (how many), calls and ns (a step, mean of the ranks), flops and bytes (likewise; NaN: not known), rate (FLOP/s),
    bound ("": not known, or not the same everywhere), most_on (a rank), most_ns (there).
    """
    keys = ["operator", "dtype", "shape"]
    frame = operators.assign(shape=operators["shape"].mask(operators["shared"], ""), own_shape=operators["shape"])
    means = _means(frame, keys, "bound", ["calls", "ns", "flops", "bytes"]).head(MOST_OPERATORS)
    shapes = frame.groupby(keys)["own_shape"].nunique().rename("shapes")
    return means.merge(shapes, on=keys).assign(rate=means["flops"] / means["ns"].replace(0.0, np.nan) * 1e9)


def _means(frame: pd.DataFrame, keys: list[str], kind: str, numbers: list[str]) -> pd.DataFrame:
    """Return the rows of one key as the mean of the ranks, the longest first, with most_on and most_ns; NaN where it is
    not known of one of them, and of `kind` "" where it is not the same in all.
    """
    groups = frame.groupby(keys, sort=False)
    complete = groups[numbers].count().eq(groups.size(), axis=0)
    means = groups[numbers].sum().where(complete) / frame["rank"].nunique()
    means[kind] = groups[kind].first().where(groups[kind].nunique() == 1, "")
    by_rank = frame.groupby([*keys, "rank"], sort=False)["ns"].sum().reset_index("rank")
    most = by_rank.sort_values("ns", ascending=False, kind="stable")
    most = most[~most.index.duplicated()].rename(columns={"rank": "most_on", "ns": "most_ns"})
    return means.join(most).sort_values("ns", ascending=False, kind="stable").reset_index()


def of_ranks(ranks: Sequence[int]) -> tuple[str, dict[str, str]]:
    """Return in words which ranks a table is of, and its columns of the rank with most, where there are several."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}", {}
    return f"mean of {len(ranks)} ranks", {"most_on": "most on rank", "most_ns": "there_ns"}


def _by_name(kind: str, names: pd.Categorical, work: pd.DataFrame, n: int) -> pd.DataFrame:
    """Add up the work of n steps by name."""
    place, found = pd.factorize(names)
    ns = np.bincount(place * n + work["step"].to_numpy(), work["dur_ns"], len(found) * n).reshape(-1, n)
    heaviest = np.argsort(-ns.sum(axis=1), kind="stable")[:MOST_WORK]
    first = np.unique(place, return_index=True)[1][heaviest]
    return pd.DataFrame(
        {
            "kind": kind,
            "name": pd.Series([short(str(name), LONGEST_NAME) for name in found[heaviest]], dtype=object),
            "calls": np.bincount(place, minlength=len(found))[heaviest] / n,
            "ns": ns[heaviest].mean(axis=1),
            "noise_ns": standard_errors(ns[heaviest]),
            "unit": work["unit"].astype("str").to_numpy()[first],
            "total_ns": ns.sum() / n,
            "names": len(found),
        }
    )


@across_ranks
def work_means(work: Frame = needs(work)) -> pd.DataFrame:
    """Return the rows of `work` as the mean of the ranks, the heaviest first, MOST_WORK of each kind.

    What a rank does not have is nothing there. The noise is the mean of the ranks': what holds one of them up holds up
    all.
    """
    means = work.groupby(["kind", "name"])[["calls", "ns", "noise_ns"]].sum() / work["rank"].nunique()
    means = means.reset_index().sort_values(["ns", "name"], ascending=[False, True], kind="stable")
    return means[means.groupby("kind").cumcount() < MOST_WORK].reset_index(drop=True)
