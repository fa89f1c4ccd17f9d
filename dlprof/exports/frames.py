"""Every table and every measure of a run as CSV, for any other program: tables by rank, measures of all ranks in one.

FOLDER/tables/RANK/NAME.csv holds the rows as dlprof/tables.py declares them, times in ns. FOLDER/measures/NAME.csv
holds what the measures made of them; FOLDER/not_measured.csv tells which could not say anything, and why.
"""

from __future__ import annotations

import csv
import importlib
import pkgutil
from dataclasses import dataclass
from pathlib import Path

from dlprof import measures
from dlprof.engine import Measure, MeasureFailed, Progress, RankData, measure, so_far
from dlprof.errors import NotMeasured
from dlprof.run import Run

# Rows that pandas turns into text at once.
_PIECE = 50_000


@dataclass(frozen=True)
class Written:
    """How many files of each kind were written."""

    tables: int
    measures: int
    not_measured: int


def every_measure() -> tuple[Measure, ...]:
    """List all measures there are, by name."""
    found = {
        value.name: value
        for module in pkgutil.iter_modules(measures.__path__)
        for value in vars(importlib.import_module(f"{measures.__name__}.{module.name}")).values()
        if isinstance(value, Measure)
    }
    return tuple(found[name] for name in sorted(found))


def write(
    run: Run, folder: Path, jobs: int | None, reading: Progress | None = None, writing: Progress | None = None
) -> Written:
    """Write a run's tables and measures. The measures come first; then each rank is read once more for its tables."""
    wanted = every_measure()
    measured = measure(run, wanted, jobs, reading)
    there = 0
    silent: list[tuple[str, str]] = []
    (folder / "measures").mkdir(parents=True, exist_ok=True)
    for m in wanted:
        try:
            frame = measured.frame(m)
        except (NotMeasured, MeasureFailed) as e:
            silent.append((m.name, str(e)))
            continue
        frame.to_csv(folder / "measures" / f"{m.name}.csv", index=False, chunksize=_PIECE)
        there += 1
    with (folder / "not_measured.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("measure", "why"), *silent])
    tables = 0
    far = so_far(run)
    for n, rank in enumerate(run.ranks, 1):
        data = RankData(rank)
        at = folder / "tables" / f"{rank.index:05d}"
        at.mkdir(parents=True, exist_ok=True)
        for name in data.tables:
            data.table(name).to_csv(at / f"{name}.csv", index=False, chunksize=_PIECE)
            tables += 1
        if writing:
            writing(far([r.index for r in run.ranks[:n]]))
    return Written(tables, there, len(silent))
