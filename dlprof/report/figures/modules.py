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
from dlprof.report.in_model import name_of, outside_of
from dlprof.result import Panel, Result
from dlprof.result.modules import Module, Modules

# A module is opened at first that takes so much of the step, down to this depth.
OPEN_SHARE, OPEN_DEPTH = 0.15, 4

# What modules launched is a column of its own where it is so many times the step's time of a large one.
BESIDE = 1.05

# Of a rank with so many times the mean it is said.
UNEVEN = 1.2


@dataclass(frozen=True)
class Row:
    """A row of the tree: its name below the one around it, its path, how deep, and whether it is open at first."""

    name: str
    path: str
    kind: str
    times: str  # "× 12": so many modules
    note: str
    depth: int
    parent: bool
    open: bool


@dataclass(frozen=True)
class Tree:
    """The modules as a table whose rows open and close, as a flame graph, and what is to be said of both."""

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
    return {"modules": tree.flame} if tree else {}


def _rows(found: Modules) -> Iterator[Row]:
    around: list[Module] = []
    for n, row in enumerate(found.rows):
        del around[row.depth :]
        outer = around[-1] if around else None
        parent = n + 1 < len(found.rows) and found.rows[n + 1].depth > row.depth
        times = f"× {row.modules}" if row.modules > (outer.modules if outer else 1) else ""
        opened = row.share >= OPEN_SHARE and row.depth < OPEN_DEPTH
        yield Row(
            name_of(row, outer),
            plain(row.path, 300),
            plain(row.kind, 80),
            times,
            _note(row, found),
            row.depth,
            parent,
            opened,
        )
        around.append(row)
    for outside in found.outside:
        yield Row(outside_of(outside.part), "", "", "", "", 0, False, False)


def _note(row: Module, found: Modules) -> str:
    said = []
    if row.slowest:
        took = f"{formatting.duration(row.slowest_ns)} against {formatting.duration(row.typical_ns)}"
        said.append(f"slowest {plain(row.slowest, 120)}: {took}")
    if found.ranks > 1 and row.rank_ns >= UNEVEN * row.ns:
        said.append(f"most on rank {row.rank}: {formatting.duration(row.rank_ns)}")
    return "; ".join(said)


_COLUMNS = (
    ("share", "share"),
    ("ns", "time_ns"),
    ("forward_ns", "forward_ns"),
    ("recompute_ns", "recomputed_ns"),
    ("backward_ns", "backward_ns"),
    ("communication_ns", "communication_ns"),
    ("own_ns", "in itself_ns"),
    ("device_ns", "launched_ns"),
    ("calls", "calls"),
    ("flops_per_s", "FLOP/s"),
    ("mfu", "MFU_share"),
    ("copied_bytes", "copied_bytes"),
    ("held_bytes", "holds_bytes"),
)


def _table(found: Modules) -> Table:
    """Return the figures of each row; columns that say nothing are left out."""
    told = {name for name, _ in _COLUMNS if any(getattr(row, name) for row in found.rows)}
    if not any(row.device_ns > BESIDE * row.ns and row.share >= OPEN_SHARE for row in found.rows):
        told -= {"device_ns"}
    columns = [(name, header) for name, header in _COLUMNS if name in told]
    rows = [["", *(_cell(row, name) for name, _ in columns)] for row in found.rows]
    for outside in found.outside:
        known = {"share": outside.share, "ns": outside.ns}
        rows.append(["", *(known.get(name, "") for name, _ in columns)])
    return plain_table(("module", *(header for _, header in columns)), rows, (False, *[True] * len(columns)))


def _cell(row: Module, name: str) -> float | str | None:
    value: float | None = getattr(row, name)
    if name == "flops_per_s" and value is not None:
        return formatting.quantity(value, "FLOP") + "/s" if value else ""
    return "" if not value and name != "share" else value


def _flame(found: Modules) -> Figure:
    """Draw the step, and upon it its modules, each as wide as its time; what no module does is beside them."""
    begins = [0.0]
    frames: list[tuple[int, float, float, str, str]] = [(0, 0.0, found.total_ns, "step", "other")]
    for row in found.rows:
        del begins[row.depth + 1 :]
        category = "communication" if row.communication_ns > row.ns / 2 else "computation"
        times = f" × {row.modules}" if row.modules > 1 else ""
        frames.append(
            (
                row.depth + 1,
                begins[row.depth],
                row.ns,
                (row.path.rpartition(".")[2] or row.path or row.kind) + times,
                category,
            )
        )
        begins.append(begins[row.depth])
        begins[row.depth] += row.ns
    for outside in found.outside:
        frames.append((1, begins[0], outside.ns, outside_of(outside.part), "other"))
        begins[0] += outside.ns
    drawn = flame(Panel("flame", "Modules", tuple(frames), unit="ns"))
    rows = [(name, ns, ns / found.total_ns if found.total_ns else 0.0) for _, _, ns, name, _ in frames[:NAMED]]
    return dataclasses.replace(drawn, table=plain_table(("module", "time_ns", "share"), rows))


def _under(found: Modules, unit: str) -> str:
    """Say what the figures are of."""
    whose = "of the device: of what each launched" if found.on_device else "of the training thread"
    mean = "" if found.ranks < 2 else f", the mean of {found.ranks:,} ranks"
    step = "trace" if unit == "trace" else "mean traced step"
    whole = f"in the {step} of {formatting.duration(found.total_ns)}{mean}; time is that {whose}"
    return f"Each module with all that is inside it, {whole}. With what no module does, they add up to the whole."
