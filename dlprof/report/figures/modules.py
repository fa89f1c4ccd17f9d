"""The modules of the model: a tree table whose rows open and close, a flame graph, and their names in words."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from dlprof.plain import plain
from dlprof.report import formatting
from dlprof.report.figures.drawing import ROWS, Figure, Table, plain_table
from dlprof.report.figures.shapes import FUNCTIONS, flame
from dlprof.result import Panel, Result
from dlprof.result.figures import InModule, Module, Modules

# Rows with at least this share of the step are open at first, down to this depth.
OPEN_SHARE, OPEN_DEPTH = 0.15, 4

# The column of launched device work is shown where it exceeds the step's time of a large module by this factor.
BESIDE = 1.05

# A rank is named whose time is at least this many times the mean.
UNEVEN = 1.2


class Row(Struct, frozen=True):
    """A row of the tree: its name relative to the row around it, path, depth, and whether it is open at first."""

    name: str
    path: str = ""
    kind: str = ""
    times: str = ""  # "× 12": so many modules
    note: str = ""
    depth: int = 0
    parent: bool = False
    open: bool = False


class Tree(Struct, frozen=True):
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
    rows = [(name, ns, ns / found.total_ns if found.total_ns else 0.0) for _, _, ns, name, _ in frames[:FUNCTIONS]]
    return replace(drawn, table=plain_table(("module", "time_ns", "share"), rows))


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


# Time outside any module, by part of the step.
_OUTSIDE: Mapping[str, str] = {
    "optimizer": "optimizer",
    "input": "waiting for data",
    "forward": "forward pass outside modules",
    "backward": "backward pass outside modules",
    "communication": "communication of no single module",
    "graphs": "CUDA graphs (modules inside are not visible)",
    "other": "loss functions, Python, other",
    "idle": "device idle",
}

# Lines on the terminal; modules with a larger share than this are divided into the modules inside them.
MOST_LINES, DIVIDED_SHARE = 5, 0.25
LEAST_SHARE = 0.01

_INDICES = re.compile(r"\{([\d,-]+)\}")
MOST_SPANS = 3  # of indices: from so many on the first and the last are shown

LEAST_NAMED = 0.05  # modules with a smaller share of a finding are not named
MOST_NAMED = 3


def outside_of(part: str) -> str:
    """Name a part of the step outside any module."""
    return _OUTSIDE.get(part, plain(part, 60))


def name_of(row: Module, outer: Module | None = None) -> str:
    """Return a module's path relative to the one around it; for the model itself, its class."""
    if not row.path:
        return plain(row.kind, 80) or "the model"
    return spelled(row.path[len(outer.path) + 1 :] if outer and outer.path else row.path)


def spelled(path: str) -> str:
    """Write the folded indices of a path short: "{1-3}.mlp" as "1–3.mlp", "{3-5,7,10-11}.mlp" as "3…11.mlp"."""
    return plain(_INDICES.sub(lambda found: _few(found[1].split(",")), path), 120)


def _few(spans: Sequence[str]) -> str:
    ends = "-".join(spans).split("-")
    return ",".join(spans).replace("-", "–") if len(spans) < MOST_SPANS else f"{ends[0]}…{ends[-1]}"


def lines_of(found: Modules) -> list[tuple[float, str]]:
    """Return share and name of the largest parts of the step: modules, none inside another, and time outside modules.

    A module with a large share is divided into those inside it and its own time.
    """
    inside = _inside(found)
    chosen, itself = list(inside.get(-1, ())), list[tuple[float, str]]()
    while sum(found.rows[n].share >= LEAST_SHARE for n in chosen) + len(itself) < MOST_LINES:
        wide = [n for n in chosen if n in inside and found.rows[n].share >= DIVIDED_SHARE]
        if not wide:
            break
        n = max(wide, key=lambda n: found.rows[n].share)
        row, below = found.rows[n], [found.rows[i] for i in inside[n]]
        alone_ns = row.communication_ns - sum(one.communication_ns for one in below)
        what = ", communication" if alone_ns > row.own_ns / 2 else " itself"
        itself.append((row.share * row.own_ns / row.ns if row.ns else 0.0, described(row) + what))
        chosen.remove(n)
        chosen += inside[n]
    lines = [*itself, *((found.rows[n].share, described(found.rows[n])) for n in chosen)]
    lines += [(outside.share, outside_of(outside.part)) for outside in found.outside]
    lines.sort(key=lambda line: -line[0])
    return [line for line in lines[:MOST_LINES] if line[0] >= LEAST_SHARE]


def _inside(found: Modules) -> dict[int, list[int]]:
    """Return the rows directly inside each row; the outermost modules are at −1."""
    inside: dict[int, list[int]] = {}
    for n, around in enumerate(nested(found)):
        inside.setdefault(around[-1] if around else -1, []).append(n)
    return inside


def nested(found: Modules) -> Iterator[list[int]]:
    """Yield for each row the rows around it, outermost first; their number is its depth."""
    around: list[int] = []
    for n, row in enumerate(found.rows):
        del around[max(row.depth, 0) :]
        yield list(around)
        around.append(n)


def described(row: Module) -> str:
    """Return path, number and class of a row's modules: "encoder.layer.* × 12 (BertLayer)"."""
    times = f" × {row.modules}" if row.modules > 1 else ""
    return f"{name_of(row)}{times}{_class(row.path, row.kind)}"


def _class(path: str, kind: str) -> str:
    """Return a class in brackets; "" where the path already ends in it."""
    # A model of several that nothing contains is named by its class, in brackets.
    told = not kind or not path or path.rpartition(".")[2].lstrip("(").startswith(kind)
    return "" if told else f" ({plain(kind, 60)})"


def named(where: Sequence[InModule]) -> str:
    """Name the modules of a finding: "encoder.layer.*.mlp (MLP) 62 %, head (Linear) 12 %"; "": none is known."""
    shown = [one for one in where[:MOST_NAMED] if one.share >= LEAST_NAMED]
    if len(where) == 1 and not where[0].path:
        return ""  # the model as a whole
    return ", ".join(f"{_in(one)} {formatting.percent(one.share)}" for one in shown)


def _in(one: InModule) -> str:
    return spelled(one.path) + _class(one.path, one.kind) if one.path else plain(one.kind, 80) or "outside modules"
