"""The files of other tools: what each was taken for, and what was left and why."""

from __future__ import annotations

from collections.abc import Iterable

import pandas as pd

from dlprof.analysis.engine import JOB, Job, needs
from dlprof.analysis.panel import Picture, table
from dlprof.errors import DoesNotApply
from dlprof.read.mixture import Taken
from dlprof.result import Panel
from dlprof.units import count, few

TITLE = "Files: what was read, and what was left"

# Names of one row, and rows.
_NAMED = 3
_MOST = 60

_COLUMNS = {
    "files": "files",
    "what": "what they are",
    "read": "read",
    "brings": "what they bring, or why they are left",
}


def draw(job: Job = needs(JOB)) -> list[Panel]:
    """List the files of a folder that dlprof did not record, those that are read first."""
    taken = job.run.taken
    if len(taken) < 2 and not (job.run.recorded and taken):
        raise DoesNotApply("all figures are of dlprof's own recording, or of one file")
    grouped: dict[tuple[bool, str, str], list[Taken]] = {}
    for one in taken:
        what = one.format.title if one.format else ""
        why = one.left or (one.format.brings if one.format else "")
        grouped.setdefault((not one.ranks, what, why), []).append(one)
    rows = [
        {
            "files": f"{count(len(files), 'file')}: {_names(job, files)}" if len(files) > 1 else _names(job, files),
            "what": what or "not known",
            "read": "left" if left else _ranks(files),
            "brings": why,
        }
        for (left, what, why), files in sorted(grouped.items(), key=lambda item: item[0][0])
    ]
    note = "" if len(rows) <= _MOST else f"{len(rows) - _MOST} more kinds of files are left."
    return [table(TITLE, pd.DataFrame(rows), _COLUMNS, most=_MOST, note=note)]


def _names(job: Job, files: Iterable[Taken]) -> str:
    root = job.run.path
    names = [str(one.path.relative_to(root)) if one.path.is_relative_to(root) else one.path.name for one in files]
    return few(names, _NAMED)


def _ranks(files: Iterable[Taken]) -> str:
    ranks = sorted({rank for one in files for rank in one.ranks})
    if all(one.format and one.format.of_host for one in files):
        return "for the host"
    if len(ranks) > 1 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"rank{'s' if len(ranks) > 1 else ''} {few(ranks, 8)}"


PICTURE = Picture(draw)
