"""The Python stacks that py-spy saw, in the file format of speedscope.app: one profile a rank and role.

A profile is sampled: stacks of frames, each with the number of times that it was seen. The outermost frame of the
training thread's stacks is the phase of the step.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from dlprof.analysis.engine import Progress, so_far
from dlprof.analysis.host.stacks import DOING
from dlprof.errors import DlprofError
from dlprof.exports import whole_file
from dlprof.files import compact
from dlprof.marks import __version__
from dlprof.read.run import Run
from dlprof.read.sources import SOURCES

SCHEMA = "https://www.speedscope.app/file-format-schema.json"

# Stacks of one profile; the rarest are left out, and the profile's name says how many.
MOST_STACKS = 20_000

ROLES = {"main": "training thread", "worker": "loader workers", "thread": "other threads", "other": "other processes"}


def write(run: Run, path: Path, progress: Progress | None = None) -> int:
    """Write the profiles of all ranks, and return their number; raise DlprofError where no stack was seen."""
    source = next(s for s in SOURCES if s.name == "stacks")
    frames: dict[str, int] = {}
    profiles: list[dict[str, Any]] = []
    far = so_far(run)
    for n, rank in enumerate(run.ranks, 1):
        if "stacks" in rank.files:
            table = source.read(rank.files["stacks"]).tables["stacks"]
            profiles += _profiles(rank.index, table, frames, alone=len(run.ranks) == 1)
        if progress:
            progress(far([r.index for r in run.ranks[:n]]))
    if not profiles:
        raise DlprofError(f"{run.path}: {source.absent}")
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


def _profiles(rank: int, table: pd.DataFrame, frames: dict[str, int], *, alone: bool) -> list[dict[str, Any]]:
    found = []
    for role, title in ROLES.items():
        stacks = table[table["role"] == role]
        mine = stacks.nlargest(MOST_STACKS, "samples", keep="first")
        samples = []
        for phase, stack in zip(mine["phase"], mine["stack"], strict=True):
            names = [f"({DOING[phase]})"] * (phase in DOING) + stack.split(";")
            samples.append([frames.setdefault(name, len(frames)) for name in names])
        weights = mine["samples"].tolist()
        name = title if alone else f"rank {rank} · {title}"
        left = f" ({len(stacks) - len(mine):,} rarer stacks left out)" if len(stacks) > len(mine) else ""
        profile = {"type": "sampled", "name": name + left, "unit": "none", "startValue": 0, "endValue": sum(weights)}
        found.append(profile | {"samples": samples, "weights": weights})
    return [profile for profile in found if profile["samples"]]


def _frame(text: str) -> dict[str, Any]:
    """Return a frame of dlprof's stacks, "name (file:line)"; line 0: none is known."""
    name, _, place = text.removesuffix(")").rpartition(" (")
    file, _, line = place.rpartition(":")
    if not (name and line.isdecimal()):
        return {"name": text}
    return {"name": name, "file": file} | ({"line": int(line)} if line != "0" else {})
