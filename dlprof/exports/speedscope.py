"""The stacks that were seen of a run, in the file format of speedscope.app: one profile a rank, role and other tool.

A profile is sampled: stacks of frames, each with the number of times that it was seen, or the time or bytes that it
took. The outermost frame of the training thread's stacks is the phase of the step, where that is known.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from dlprof.analysis.engine import Progress, RankData, so_far
from dlprof.analysis.host.stacks import DOING
from dlprof.errors import DlprofError, NotMeasured
from dlprof.exports import whole_file
from dlprof.files import compact
from dlprof.marks import __version__
from dlprof.read.formats import format_named
from dlprof.read.run import Rank, Run
from dlprof.read.sources import SOURCES

SCHEMA = "https://www.speedscope.app/file-format-schema.json"

# Stacks of one profile; the rarest are left out, and the profile's name says how many.
MOST_STACKS = 20_000

# Units of weights, as speedscope names them; samples have no unit.
UNITS = {"ns": "nanoseconds", "bytes": "bytes"}

ROLES = {"main": "training thread", "worker": "loader workers", "thread": "other threads", "other": "other processes"}


def write(run: Run, path: Path, progress: Progress | None = None) -> int:
    """Write the profiles of all ranks, and return their number; raise DlprofError if no stack was sampled."""
    frames: dict[str, int] = {}
    profiles: list[dict[str, Any]] = []
    far = so_far(run)
    why = ""
    for n, rank in enumerate(run.ranks, 1):
        try:
            table = RankData(replace(rank, files=_stacks_of(rank))).table("stacks")
            profiles += _profiles(rank.index, table, frames, alone=len(run.ranks) == 1)
        except NotMeasured as e:
            why = why or str(e)
        if progress:
            progress(far([r.index for r in run.ranks[:n]]))
    if not profiles:
        raise DlprofError(f"{run.path}: {why or 'no stacks in it'}")
    data = {
        "$schema": SCHEMA,
        "exporter": f"dlprof {__version__}",
        "name": run.path.name,
        "activeProfileIndex": 0,
        "shared": {"frames": [_frame(text) for text in frames]},
        "profiles": profiles,
    }
    with whole_file(path) as part:
        part.write_text(compact(data), encoding="utf-8")
    return len(profiles)


def _stacks_of(rank: Rank) -> dict[str, Path]:
    """Return those files of a rank, by source or format, that bring stacks: its trace need not be read."""
    ours = {source.name: source.tables for source in SOURCES}
    return {n: path for n, path in rank.files.items() if "stacks" in (ours.get(n) or format_named(n).tables)}


def _profiles(rank: int, table: pd.DataFrame, frames: dict[str, int], *, alone: bool) -> list[dict[str, Any]]:
    found = []
    for tool, of_tool in table.groupby("profile", sort=True, observed=True):
        for role, title in ROLES.items():
            stacks = of_tool[of_tool["role"] == role]
            mine = stacks.nlargest(MOST_STACKS, "samples", keep="first")
            if mine.empty:
                continue
            samples = []
            for phase, stack in zip(mine["phase"], mine["stack"], strict=True):
                # Another tool's stacks, and those of threads without a step, have no phase.
                names = ([f"({DOING[phase]})"] if phase in DOING else []) + stack.split(";")
                samples.append([frames.setdefault(name, len(frames)) for name in names])
            weights = mine["samples"].tolist()
            name = " · ".join(filter(None, ("" if alone else f"rank {rank}", title, str(tool))))
            left = f" ({len(stacks) - len(mine):,} rarer stacks left out)" if len(stacks) > len(mine) else ""
            unit = UNITS.get(str(mine["unit"].iloc[0]), "none")
            of = {"type": "sampled", "name": name + left, "unit": unit, "startValue": 0, "endValue": sum(weights)}
            found.append(of | {"samples": samples, "weights": weights})
    return found


def _frame(text: str) -> dict[str, Any]:
    """Return a frame of dlprof's stacks, "name (file:line)"; line 0: unknown."""
    name, _, place = text.removesuffix(")").rpartition(" (")
    file, _, line = place.rpartition(":")
    if not (name and line.isdecimal()):
        return {"name": text}
    return {"name": name, "file": file} | ({"line": int(line)} if line != "0" else {})
