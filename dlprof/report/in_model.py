"""Where in the model the time goes, in words: names of modules, lines for the terminal, the modules of a finding."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from dlprof.plain import plain
from dlprof.report import formatting
from dlprof.result.figures import InModule, Module, Modules

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
