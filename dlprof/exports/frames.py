"""Every table and every measure of a run as CSV, for any other program.

FOLDER/tables/RANK/NAME.csv holds the rows of a rank as dlprof/schema.py declares them, times in ns.
FOLDER/measures/NAME.csv holds a measure of all ranks; FOLDER/not_measured.csv lists the others, and why.
"""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pandas as pd

from dlprof.analysis.diagnosis import every_frame
from dlprof.analysis.engine import ALSO, MeasureFailed, Progress, RankData, measure
from dlprof.analysis.rules import RULES
from dlprof.errors import DlprofError, NotMeasured
from dlprof.files import whole, writing
from dlprof.read.run import Run

# What a spreadsheet takes for the beginning of a formula, also after spaces, and as wide characters (OWASP, CSV
# Injection); and control characters, which are written as Python escapes.
_FORMULA = re.compile(r"\s*[=+\-@\uff1d\uff0b\uff0d\uff20]|[\t\r\n]")
_CONTROL = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f]")
_PIECE = 50_000  # rows that pandas turns into text at once


@dataclass(frozen=True)
class Written:
    """How many files of each kind were written."""

    tables: int
    measures: int
    not_measured: int


def _write_tables(folder: Path, rank: RankData) -> pd.DataFrame:
    """Write the tables of a rank, and name them."""
    at = folder / f"{rank.index:05d}"
    at.mkdir(parents=True, exist_ok=True)
    for name in rank.tables:
        _write_csv(rank.table(name), at / f"{name}.csv")
    return pd.DataFrame({"table": rank.tables})


def _write_csv(frame: pd.DataFrame, path: Path) -> None:
    """Write a frame with no text that a spreadsheet would take for a formula: such texts get an apostrophe before."""
    frame = frame.copy(deep=False)
    for name in frame.columns[[not pd.api.types.is_numeric_dtype(kind) for kind in frame.dtypes]]:
        texts = frame[name].astype("object")
        cells = {text: _cell(text) for text in texts.unique() if isinstance(text, str)}
        if any(cell != text for text, cell in cells.items()):
            frame[name] = texts.map(lambda text, cells=cells: cells.get(text, text))
    with whole(path) as part:
        frame.to_csv(part, index=False, chunksize=_PIECE)


def _cell(text: str) -> str:
    # pandas does not quote a carriage return, which ends a row for a spreadsheet: it is escaped as the others are.
    shown = _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)
    return f"'{shown}" if _FORMULA.match(text) else shown


def write(run: Run, folder: Path, jobs: int | None, progress: Progress | None = None) -> Written:
    """Write a run's tables and measures; raise DlprofError if they cannot be written."""
    with writing(str(folder)):
        (folder / "measures").mkdir(parents=True, exist_ok=True)
        wanted = every_frame(RULES)
        measured = measure(run, wanted, jobs, progress, also=partial(_write_tables, folder / "tables"))
        for rank, why in measured.lacking(ALSO).items():
            raise DlprofError(f"{folder}: the tables of rank {rank} cannot be written: {why}")
        silent: list[tuple[str, str]] = []
        for m in wanted:
            try:
                frame = measured.frame(m)
            except (NotMeasured, MeasureFailed) as e:
                silent.append((m.name, str(e)))
                continue
            _write_csv(frame, folder / "measures" / f"{m.name}.csv")
        with whole(folder / "not_measured.csv") as part, part.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([("measure", "why"), *((name, _cell(why)) for name, why in silent)])
        return Written(len(measured.frame(ALSO)), len(wanted) - len(silent), len(silent))
