"""Where the device's own time goes, by kind of kernel, and the least that the device needs for it (its roofline).

The floor of an operator is its FLOPs ÷ the peak of their precision or its bytes ÷ the memory's bandwidth, whichever is
longer (Williams et al., Roofline, 2009), summed over its shapes, and no longer than it takes: a cache is faster. It
counts to one kind: what a convolution spends on changes of layout has no floor, for no script asks for that. Bytes are
counted in one step (record/collectors/flops.py). Recordings without them have those of each module: products have their
shapes, and the rest is the floor of all other kinds combined. Work with unknown sizes keeps its recorded time.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof import schema
from dlprof.analysis.compute.kernels import COPY, MULTIPLY, OPTIMIZER, around, kernels, kind_of
from dlprof.analysis.compute.optimizer import launched_by_optimizer
from dlprof.analysis.compute.peaks import device_peaks, peak_of
from dlprof.analysis.engine import RANK, Frame, Maybe, RankFacts, across_ranks, maybe, needs, per_rank
from dlprof.analysis.modules.rows import module_rows
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.device import device_work
from dlprof.analysis.timeline.host import is_on_device
from dlprof.analysis.timeline.steps import Timing, launched_within, timing
from dlprof.errors import NotMeasured
from dlprof.result.figures import DeviceWork, WorkKind
from dlprof.units import percent

# A floor is given where the bytes of so much of the time are known, a kind's rates where those of so much of its own.
_KNOWN_SHARE, _RATE_SHARE = 0.8, 0.9

# Names in the place of an operator: work with bytes only in sum with other kinds; copies and fills, with traced bytes.
_REST, _COPIES = "(rest)", "(copies)"


@per_rank
def work_kinds(
    kernels: Frame = needs(kernels),
    device_work: Frame = needs(device_work),
    launched_within: NDArray[np.int64] = needs(launched_within),
    launched_by_optimizer: Maybe[NDArray[np.bool_]] = maybe(launched_by_optimizer),
    spans: Frame = needs(schema.SPANS),
    is_on_device: NDArray[np.bool_] = needs(is_on_device),
    modules: Maybe[Frame] = maybe(schema.MODULES),
    module_rows: Maybe[Frame] = maybe(module_rows),
    timing: Timing = needs(timing),
    rank: RankFacts = needs(RANK),
) -> pd.DataFrame:
    """Return the kernels, fills and copies within the device's memory of a mean steady traced step, a row a kind.

    Columns as of `WorkKind`, and known_ns (of operators whose bytes are known); in all rows the same: rest_ns (the
    floor of all shared_ns together), fused_ns (what the floor is less with fused chains; NaN: not known), and unlimited
    (the device's name where its limits are not known, else "").
    """
    mine, counted = kernels[kernels["step"] >= 0], rank.facts.get("flops") or {}
    device, _, bandwidth = device_peaks(rank.facts, rank.trace_facts)
    byte_ns, owner, steps = 1e9 / (bandwidth or np.nan), mine["owner"].to_numpy(), len(timing.windows)
    limits = _limits(rank, modules.or_none(), byte_ns)
    operator = _counted_operator(owner, spans, is_on_device, {*limits.index, *(counted.get("uncounted") or ())})
    within, by_optimizer = module_rows.or_none(), launched_by_optimizer.or_none()
    if _REST in limits.index and within is not None:
        operator[(operator == "") & (owner >= 0) & (within["module"].to_numpy()[owner] >= 0)] = _REST
    names, texts = mine["name"].cat, host.written(spans["name"])
    optimizer = False if by_optimizer is None else mine.index.isin(device_work.index[by_optimizer])
    keys = {"name": names.codes, "owner": np.where(owner >= 0, texts[owner], ""), "optimizer": optimizer}
    each = pd.DataFrame({**keys, "operator": operator, "kernels": 1.0, "ns": mine["dur_ns"]})
    frame = each.groupby([*keys, "operator"], sort=False).sum().reset_index()
    kinds = [kind_of(str(names.categories[n]), str(o)) for n, o in zip(frame["name"], frame["owner"], strict=True)]
    frame["kind"] = np.where(frame["optimizer"], OPTIMIZER, kinds)
    inside = host.is_kind(device_work, "set") | host.is_one_of(device_work["copy"], "DtoD")
    copies = device_work[inside & (launched_within >= 0) & (device_work["bytes"] >= 0)]
    copied = {"kind": COPY, "operator": _COPIES, "kernels": float(len(copies)), "ns": float(copies["dur_ns"].sum())}
    frame = pd.concat([frame[[*copied]], pd.DataFrame([copied])], ignore_index=True)
    frame[["kernels", "ns"]] /= steps
    # A copy reads and writes, a fill writes.
    size = float((copies["bytes"] * (1 + host.is_kind(copies, "copy"))).sum()) / steps
    limits.loc[_COPIES] = [0.0, size, size * byte_ns]
    found, rest_ns, reached = _floors(frame, limits)
    fused = float(counted.get("chained_bytes", np.nan)) - float(counted.get("fused_bytes", np.nan))
    unlimited = "" if np.isfinite(limits["least_ns"]).all() else device or "this device"
    return found.assign(rest_ns=rest_ns, fused_ns=fused * byte_ns * reached, unlimited=unlimited)


def _limits(rank: RankFacts, modules: pd.DataFrame | None, byte_ns: float) -> pd.DataFrame:
    """Return the flops and bytes of each operator in the counted step, and least_ns, the least that they take, infinity
    where that is not known. _REST is what modules move beside products, where no operator's bytes were counted.
    """
    counted, matmul = rank.facts.get("flops") or {}, rank.facts.get("matmul") or {}
    peaks, columns = device_peaks(rank.facts, rank.trace_facts)[1], ["operator", "dtype", "flops", "bytes"]
    shaped: list[dict[Any, Any]] = counted.get("shapes") or []
    moved = [row for row in counted.get("moved") or [] if row["device"] != "cpu"]
    totals = [{"bytes": 0.0, **row} for row in counted.get("operators") or []]
    # Each shape has its own limit. The shapes of an operator that are not kept share one.
    taken = [{**row, "flops": -row["flops"], "bytes": -row["bytes"]} for row in shaped]
    rest = pd.DataFrame([*totals, *({"flops": 0.0, **row} for row in moved), *taken], columns=columns)
    rest = rest.astype({"flops": float, "bytes": float}).groupby(columns[:2], sort=False).sum().clip(lower=0.0)
    rows = [*shaped, *rest.reset_index().to_dict("records")]
    if not moved and modules is not None and (modules["moved_bytes"] > 0).any():
        beside = float(modules["moved_bytes"].sum()) - sum(row["bytes"] for row in shaped)
        rows.append({"operator": _REST, "dtype": "", "flops": 0.0, "bytes": max(beside, 0.0)})
    every = pd.DataFrame(rows, columns=columns).astype({"flops": float, "bytes": float})
    # What computes by no known formula has more of a floor than its bytes.
    every = every[~every["operator"].isin(["others", *(counted.get("uncounted") or ())])]
    pairs = zip(every["operator"], every["dtype"], strict=True)
    peak = np.array([peak_of(str(operator), str(dtype), matmul, peaks) for operator, dtype in pairs], dtype=float)
    computing = (every["flops"] / peak * 1e9).where(every["flops"] > 0, 0.0)
    every = every.assign(least_ns=computing.clip(lower=every["bytes"] * byte_ns).fillna(np.inf))
    return every.groupby("operator")[["flops", "bytes", "least_ns"]].sum()


def _counted_operator(
    owner: NDArray[np.int64], spans: pd.DataFrame, is_on_device: NDArray[np.bool_], counted: Collection[str]
) -> NDArray[np.object_]:
    """Return the outermost operator around each launch that was seen in the counted step, "" where there is none.

    `owner`: the row of the innermost operator. A dispatch mode sees an operator, and not those that it is made of.
    """
    outer, codes = around(spans, is_on_device, "op"), spans["name"].cat.codes.to_numpy()
    # The last place is that of no operator.
    named = np.array([*(n if n in counted else "" for n in map(str, spans["name"].cat.categories)), ""], dtype=object)
    at, place = np.unique(owner, return_inverse=True)
    found = np.full(len(at), "", dtype=object)
    while (at >= 0).any():
        met = named[np.where(at >= 0, codes[at], -1)]
        found, at = np.where(met != "", met, found), np.where(at >= 0, outer[at], -1)
    return found[place]


def _floors(frame: pd.DataFrame, limits: pd.DataFrame) -> tuple[pd.DataFrame, float, float]:
    """Return the rows of `work_kinds`, the floor of _REST, and the share of their limits that operators' floors are."""
    operators = limits.join(frame.groupby("operator")["ns"].sum(), how="inner")
    operators["floor_ns"] = operators["least_ns"].clip(upper=operators["ns"])
    # An operator is of the kind that multiplies in it, else of that of most of its time.
    first = frame.assign(multiplies=frame["kind"].isin(MULTIPLY)).sort_values(["multiplies", "ns"], ascending=False)
    home, own = first.drop_duplicates("operator").set_index("operator")["kind"], operators.drop(_REST, errors="ignore")
    parts = {"known_ns": frame["operator"].isin(operators.index), "shared_ns": frame["operator"] == _REST}
    frame = frame.assign(**{part: frame["ns"].where(of, 0.0) for part, of in parts.items()})
    found = frame.groupby("kind")[["kernels", "ns", *parts]].sum()
    found = found.join(own.groupby(home.reindex(own.index))[["floor_ns", "flops", "bytes"]].sum()).fillna(0.0)
    found["floor_ns"] += found["ns"] - found["known_ns"]  # what is not known is at its limit
    floors, least = operators["floor_ns"], float(operators["least_ns"].sum())
    return found.rename_axis("kind").reset_index(), float(floors.get(_REST, 0.0)), float(floors.sum()) / max(least, 1.0)


@across_ranks
def kinds_of_work(work_kinds: Frame = needs(work_kinds)) -> DeviceWork:
    """Return the device's own time by kind, mean of the ranks, with its floor where that is known."""
    by_rank = work_kinds.drop_duplicates("rank")
    sums = work_kinds.drop(columns=["rank", "unlimited", "rest_ns", "fused_ns"]).groupby("kind", sort=False).sum()
    rows = (sums[sums["ns"] > 0] / len(by_rank)).sort_values("ns", ascending=False, kind="stable").reset_index()
    if rows.empty:
        raise NotMeasured("no kernel ran in the traced steps")
    known = rows.pop("known_ns")
    share, why = float(known.sum() / rows["ns"].sum()), ""
    if share < _KNOWN_SHARE:
        why = f"the bytes that operators read and write are known of {percent(share)} of their time alone"
    why = next((f"the limits of {name} are not known" for name in by_rank["unlimited"] if name), why)
    complete = (known >= _RATE_SHARE * rows["ns"]) & (rows["shared_ns"] == 0)
    rows[["flops", "bytes"]] = rows[["flops", "bytes"]].where(complete).replace(0.0, np.nan)
    rest_ns, fused_ns = by_rank[["rest_ns", "fused_ns"]].mean().tolist()
    floor = float(rows["floor_ns"].sum()) + rest_ns
    rows["floor_ns"] = np.nan if why else rows["floor_ns"]
    cells = rows.astype(object).where(rows.notna(), None).to_dict("records")
    kinds = tuple(WorkKind(**{str(name): value for name, value in row.items()}) for row in cells)
    if why:
        return DeviceWork(kinds, why=why)
    return DeviceWork(kinds, floor, rest_ns, None if np.isnan(fused_ns) else floor - fused_ns)
