"""Memory in the result: each rank's parts, the modules of the rank with the highest peak, and predicted peaks."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from dlprof.analysis.engine import JOB, Frame, Job, Maybe, across_ranks, maybe, needs
from dlprof.analysis.memory.changes import memory_what_if
from dlprof.analysis.memory.composition import around, held_by_module, held_names, memory_composition
from dlprof.analysis.memory.footprint import PARTS
from dlprof.result import MOST_RANKS
from dlprof.result.figures import DeviceMemory, Footprint, MemoryChange, MemoryPart, ModuleMemory

MOST_MODULES = 60  # rows

_TOLD = ("parameter", "gradient", "optimizer", "activation")

OUTSIDE = "(the model itself)"  # outside its submodules, and the loss
OF_NONE = "(no module)"  # the same where there are several models


@across_ranks
def memory_footprint(
    memory_composition: Frame = needs(memory_composition),
    held_by_module: Maybe[Frame] = maybe(held_by_module),
    held_names: Maybe[Frame] = maybe(held_names),
    memory_what_if: Maybe[Frame] = maybe(memory_what_if),
    job: Job = needs(JOB),
) -> Footprint:
    """Return each rank's memory by part, and of the rank with the highest peak its modules and predicted peaks."""
    sums = memory_composition.groupby(["rank", "device"], sort=False)["bytes"].sum().sort_values(ascending=False)
    order = {part: place for place, part in enumerate(PARTS)}
    devices = []
    for rank, device in sums.index[:MOST_RANKS]:
        mine = memory_composition[(memory_composition["rank"] == rank) & (memory_composition["device"] == device)]
        rows = mine.iloc[mine["part"].map(order).fillna(len(order)).argsort(kind="stable")]
        parts = [
            MemoryPart(str(p), float(n), str(k))
            for p, n, k in zip(rows["part"], rows["bytes"], rows["known"], strict=True)
        ]
        total = (job.facts[rank].get("device") or {}).get("memory_bytes") if device != "cpu" else None
        devices.append(
            DeviceMemory(
                int(rank),
                str(device),
                tuple(parts),
                str(mine["moment"].iloc[0]),
                None if total is None else float(total),
            )
        )
    changes = memory_what_if.or_none()
    rank, device = sums.index[0]
    if changes is not None:
        rank, device = int(changes["rank"].iloc[0]), str(changes["device"].iloc[0])
    by_module, names = held_by_module.or_none(), held_names.or_none()
    return Footprint(
        tuple(devices),
        int(rank),
        ()
        if by_module is None or names is None
        else modules(
            by_module[(by_module["rank"] == rank) & (by_module["device"] == device)], names[names["rank"] == rank]
        ),
        () if changes is None else tuple(_change(row) for row in changes[changes["change"] != ""].to_dict("records")),
        None if changes is None else _known(changes["now_ns"].iloc[0]),
    )


def _change(row: Mapping[object, object]) -> MemoryChange:
    return MemoryChange(
        str(row["change"]),
        str(row["value"]),
        float(row["then_bytes"]),  # type: ignore[arg-type]
        _known(row["times"]),
        _known(row["then_ns"]),
        row["bound"],  # type: ignore[arg-type]
        str(row["why"]),
        *(
            (None, None)
            if row["least_bytes"] == row["most_bytes"]
            else map(_known, (row["least_bytes"], row["most_bytes"]))
        ),
    )


def _known(value: object) -> float | None:
    return None if pd.isna(value) else float(value)  # type: ignore[arg-type, call-overload]


def modules(held_by_module: pd.DataFrame, held_names: pd.DataFrame) -> tuple[ModuleMemory, ...]:
    """Return the memory of one rank's modules on one device, each with the modules inside it, the largest first.

    Identical modules are one row. A module with the same memory as one inside it is left out.
    """
    part = held_by_module["part"].astype(str).where(held_by_module["part"].isin(_TOLD), "other")
    own = held_by_module.assign(part=part).pivot_table("bytes", "module", "part", "sum", fill_value=0.0)
    own = own.reindex(columns=[*_TOLD, "other"], fill_value=0.0)
    named = held_names.set_index("module")
    inside = [(path, m, named["name"].get(m, m)) for path in map(str, own.index) for m in around(path) if m or not path]
    pairs = pd.DataFrame(inside, columns=["module", "around", "path"])
    whole = pairs.merge(own, left_on="module", right_index=True).groupby("path")[[*_TOLD, "other"]].sum()
    counts = pairs.groupby("path")["around"].nunique().to_dict()
    kind_of = {str(name): str(kind) for name, kind in zip(named["name"], named["kind"], strict=True)}
    rows = [
        ModuleMemory(
            str(name) or (OUTSIDE if kind_of.get("") else OF_NONE),
            kind_of.get(str(name), ""),
            counts.get(str(name), 1),
            float(sum(sizes)),
            *sizes,
        )
        for name, *sizes in whole.astype(float).itertuples(name=None)
    ]
    largest = {(row.bytes, row.activation): row.module for row in sorted(rows, key=lambda r: len(r.module))}
    kept = [row for row in rows if row.bytes and largest[row.bytes, row.activation] == row.module]
    return tuple(sorted(kept, key=lambda row: -row.bytes)[:MOST_MODULES])
