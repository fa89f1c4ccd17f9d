"""Where in the model the time is, in words: names of modules, lines for a terminal, the modules of a finding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dlprof.plain import plain
from dlprof.report import formatting
from dlprof.result.modules import InModule, Module, Modules

# What no module does, by part of the step.
_OUTSIDE: Mapping[str, str] = {
    "optimizer": "optimizer",
    "input": "waiting for data",
    "forward": "forward pass of what is no module",
    "backward": "backward pass of what is no module",
    "communication": "communication of no one module",
    "graphs": "CUDA graphs, in which modules are not seen",
    "other": "losses that are functions, Python, all else",
    "idle": "the device idles",
}

# A terminal has so many lines; a module that takes so much is divided into what is inside it.
MOST_LINES, DIVIDED_SHARE = 5, 0.25

LEAST_NAMED = 0.05  # of a finding, in a module that is named
MOST_NAMED = 3


def outside_of(part: str) -> str:
    """Name a part of the step that no module does."""
    return _OUTSIDE.get(part, plain(part, 60))


def name_of(row: Module, outer: Module | None = None) -> str:
    """Return a module's path below the one around it; of the model itself, its class."""
    if not row.path:
        return plain(row.kind, 80) or "the model"
    return plain(row.path[len(outer.path) + 1 :] if outer and outer.path else row.path, 120)


def lines_of(found: Modules) -> list[tuple[float, str]]:
    """Return the share and the name of the modules that take most, none inside another, and of what is outside of them.

    A module that takes much is divided into those inside it, as long as there are lines.
    """
    below: dict[int, list[int]] = {}
    around: list[int] = []
    for n, row in enumerate(found.rows):
        del around[row.depth :]
        below.setdefault(around[-1] if around else -1, []).append(n)
        around.append(n)
    chosen = list(below.get(-1, ()))
    while True:
        wide = [n for n in chosen if below.get(n) and (found.rows[n].share >= DIVIDED_SHARE or len(chosen) == 1)]
        n = max(wide, key=lambda n: found.rows[n].share, default=-1)
        if n < 0 or found.rows[n].own_ns > found.rows[n].ns / 2 or len(chosen) > MOST_LINES:
            break
        chosen.remove(n)
        chosen += below[n]
    lines = [(found.rows[n].share, described(found.rows[n])) for n in chosen]
    lines += [(o.share, outside_of(o.part)) for o in found.outside]
    lines.sort(key=lambda line: -line[0])
    return [line for line in lines[:MOST_LINES] if line[0] >= 0.01]


def described(row: Module) -> str:
    """Return a module's path and class, and how many it stands for: "encoder.layer.* × 12 (BertLayer)"."""
    times = f" × {row.modules}" if row.modules > 1 else ""
    return f"{name_of(row)}{times}{f' ({plain(row.kind, 60)})' if row.path and row.kind else ''}"


def named(where: Sequence[InModule]) -> str:
    """Say in which modules a finding is: "encoder.layer.*.mlp (MLP) 62 %, head (Linear) 12 %"; "": not known."""
    shown = [one for one in where[:MOST_NAMED] if one.share >= LEAST_NAMED]
    return ", ".join(f"{_in(one)} {formatting.percent(one.share)}" for one in shown)


def _in(one: InModule) -> str:
    if not one.path:
        return plain(one.kind, 80) or "no module"
    return plain(one.path, 120) + (f" ({plain(one.kind, 60)})" if one.kind else "")
