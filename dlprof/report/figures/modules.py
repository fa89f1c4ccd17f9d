"""The modules of the model: a tree table whose rows open and close, and a flame graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from msgspec.structs import replace

from dlprof.plain import plain
from dlprof.report import formatting
from dlprof.report.figures.drawing import ROWS, Figure, Table, plain_table
from dlprof.report.figures.flame import NAMED, flame
from dlprof.report.in_model import LEAST_SHARE, name_of, nested, outside_of, spelled
from dlprof.result import Panel, Result
from dlprof.result.figures import Module, Modules

# Rows with at least this share of the step are open at first, down to this depth.
OPEN_SHARE, OPEN_DEPTH = 0.15, 4

# The column of launched device work is shown where it exceeds the step's time of a large module by this factor.
BESIDE = 1.05

# A rank is named whose time is at least this many times the mean.
UNEVEN = 1.2


@dataclass(frozen=True)
class Row:
    """A row of the tree: its name relative to the row around it, path, depth, and whether it is open at first."""

    name: str
    path: str = ""
    kind: str = ""
    times: str = ""  # "× 12": so many modules
    note: str = ""
    depth: int = 0
    parent: bool = False
    open: bool = False


@dataclass(frozen=True)
class Tree:
    """The modules as a table whose rows open and close, as a flame graph, and a note on both."""

    table: Table  # the first cell of each row is empty
    rows: tuple[Row, ...]
    flame: Figure
    under: str
    why: str = ""


def shown(result: Result) -> Tree | None:
    """Return what the page shows of the modules; None where nothing was traced."""
    found = result.modules
    if found is None or not (found.rows or found.why):
        return None
    found = replace(found, rows=found.rows[: ROWS - len(found.outside)])
    rows = tuple(_rows(found))
    return Tree(_table(found), rows, _flame(found), _under(found, formatting.unit(result)), plain(found.why, 400))


def specs(tree: Tree | None) -> dict[str, Figure | None]:
    """Return the figures by the keys under which the page draws them."""
    return {"modules": tree.flame} if tree and tree.rows else {}


def _rows(found: Modules) -> Iterator[Row]:
    depths = [len(around) for around in nested(found)]
    for n, (row, around) in enumerate(zip(found.rows, nested(found), strict=True)):
        outer = found.rows[around[-1]] if around else None
        yield Row(
            name=name_of(row, outer),
            path=plain(row.path, 300),
            kind=plain(row.kind, 80),
            times=f"× {row.modules}" if row.modules > (outer.modules if outer else 1) else "",
            note=_note(row, found, outer.slowest if outer else ""),
            depth=depths[n],
            parent=n + 1 < len(depths) and depths[n + 1] > depths[n],
            open=row.share >= OPEN_SHARE and depths[n] < OPEN_DEPTH,
        )
    for outside in found.outside:
        yield Row(name=outside_of(outside.part))


def _note(row: Module, found: Modules, slower: str) -> str:
    """Name the slowest of repeated layers (not again for modules inside it), and the slowest rank."""
    said = ["compiled as one region: modules inside are not visible"] if row.compiled else []
    if row.fused:
        said.append("compiled: a kernel that several modules share counts to the module around them")
    if row.slowest and not (slower and row.slowest.startswith(f"{slower}.")):
        took = f"{formatting.duration(row.slowest_ns)} against {formatting.duration(row.typical_ns)}"
        said.append(f"slowest {spelled(row.slowest)}: {took}")
    if found.ranks > 1 and row.rank_ns >= UNEVEN * row.ns and row.share >= LEAST_SHARE:
        said.append(f"longest on rank {row.rank}: {formatting.duration(row.rank_ns)}")
    return "; ".join(said)


_COLUMNS = (
    ("share", "share"),
    ("ns", "time_ns"),
    ("forward_ns", "forward_ns"),
    ("recompute_ns", "recomputed_ns"),
    ("backward_ns", "backward_ns"),
    ("communication_ns", "comm_ns"),
    ("own_ns", "own_ns"),
    ("device_ns", "launched_ns"),
    ("calls", "calls"),
    ("flops_per_s", "FLOP/s"),
    ("mfu", "MFU"),
    ("copied_bytes", "copied_bytes"),
    ("moved_bytes", "moved_bytes"),
    ("parameter_bytes", "params_bytes"),
    ("held_bytes", "memory_bytes"),
)


def _table(found: Modules) -> Table:
    """Return the figures of each row; empty columns are left out."""
    told = {name for name, _ in _COLUMNS if any(getattr(row, name) for row in found.rows)}
    if not any(row.device_ns > BESIDE * row.ns and row.share >= OPEN_SHARE for row in found.rows):
        told -= {"device_ns"}
    columns = [(name, header) for name, header in _COLUMNS if name in told]
    rows = [["", *(_cell(row, name) for name, _ in columns)] for row in found.rows]
    for outside in found.outside:
        known = {"share": outside.share, "ns": outside.ns}
        rows.append(["", *(known.get(name, "") for name, _ in columns)])
    return plain_table(("module", *(header for _, header in columns)), rows, (False, *[True] * len(columns)))


def _cell(row: Module, name: str) -> float | str:
    value: float | None = getattr(row, name)
    if not value:
        return "" if name != "share" else 0.0
    if name == "mfu":
        return formatting.percent(value)
    # The heading has the unit: the table is wide.
    return formatting.quantity(value, "FLOP").removesuffix("FLOP") if name == "flops_per_s" else value


def _flame(found: Modules) -> Figure:
    """Draw the step and its modules below it, each as wide as its time, with the time outside modules beside them."""
    frames: list[tuple[int, float, float, str, str]] = [(0, 0.0, found.total_ns, "step", "other")]
    free = [0.0]  # where the next frame of each depth begins
    for row, around in zip(found.rows, nested(found), strict=True):
        depth, name = len(around), name_of(row, found.rows[around[-1]] if around else None)
        del free[depth + 1 :]
        times, kind = f" × {row.modules}" if row.modules > 1 else "", f" · {row.kind}" if row.path and row.kind else ""
        category = "communication" if row.communication_ns > row.ns / 2 else "computation"
        frames.append((depth + 1, free[depth], row.ns, f"{name}{times}{kind}", category))
        free.append(free[depth])
        free[depth] += row.ns
    for outside in found.outside:
        frames.append((1, free[0], outside.ns, outside_of(outside.part), "other"))
        free[0] += outside.ns
    drawn = flame(Panel("flame", "Modules", tuple(frames), unit="ns"))
    rows = [(name, ns, ns / found.total_ns if found.total_ns else 0.0) for _, _, ns, name, _ in frames[:NAMED]]
    return dataclasses.replace(drawn, table=plain_table(("module", "time_ns", "share"), rows))


def _under(found: Modules, unit: str) -> str:
    """Say what the figures mean, and what recording them cost."""
    whose = "device time, by the module that launched the work" if found.on_device else "time of the training thread"
    mean = f", mean of {found.ranks:,} ranks" if found.ranks > 1 else ""
    step = "trace" if unit == "trace" else "traced step"
    said = [
        f"Each module with all modules inside it: {whose}, per {step} ({formatting.duration(found.total_ns)}{mean})."
        f" The outermost modules and the rows outside modules add up to the {unit}."
    ]
    if found.naming_ns is not None and found.total_ns:
        share = formatting.percent(found.naming_ns / found.total_ns)
        said.append(f"Recording the names takes {formatting.duration(found.naming_ns)} of a traced step ({share}).")
    return " ".join(said)
