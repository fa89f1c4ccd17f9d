"""Every table and measure is there as CSV, with the figures that it had."""

from __future__ import annotations

import csv
from pathlib import Path

import pandas as pd
import pytest

from dlprof.analysis.diagnosis import every_frame
from dlprof.analysis.engine import RankData
from dlprof.analysis.rules import RULES
from dlprof.analysis.step.breakdown import breakdown
from dlprof.errors import DlprofError
from dlprof.exports import frames
from dlprof.read.run import open_run
from tests.fixtures import runs, traces


def test_tables_and_measures_come_back_as_they_were(tmp_path: Path) -> None:
    run = open_run(runs.foreign(tmp_path / "job", *(traces.training(rank=r) for r in range(2))))
    made = frames.write(run, tmp_path / "csv", jobs=1)
    for rank in run.ranks:
        data = RankData(rank)
        for name in data.tables:
            table = data.table(name)
            back = pd.read_csv(tmp_path / "csv" / "tables" / f"{rank.index:05d}" / f"{name}.csv")
            assert list(back.columns) == list(table.columns)
            numbers = [c for c in table.columns if table[c].dtype.kind in "if"]
            pd.testing.assert_frame_equal(back[numbers], table[numbers].reset_index(drop=True), check_dtype=False)
    parts = pd.read_csv(tmp_path / "csv" / "measures" / "breakdown.csv")
    measured = runs.measured(tmp_path / "job", breakdown).frame(breakdown)
    assert parts["category"].tolist() == measured["category"].tolist()
    assert parts["ns"].tolist() == measured["ns"].tolist()
    assert made.tables == 4
    assert made.measures == len(list((tmp_path / "csv" / "measures").iterdir()))


def test_what_was_not_measured_is_told_with_its_reason(tmp_path: Path) -> None:
    run = open_run(runs.foreign(tmp_path / "job", traces.training(world_size=1)))
    made = frames.write(run, tmp_path / "csv", jobs=1)
    with (tmp_path / "csv" / "not_measured.csv").open() as file:
        silent = {row["measure"]: row["why"] for row in csv.DictReader(file)}
    assert silent["matched"].startswith("one rank: ")
    assert len(silent) == made.not_measured
    assert made.measures + made.not_measured == len(every_frame(RULES))
    assert not (tmp_path / "csv" / "measures" / "matched.csv").exists()


def test_several_processes_write_what_one_does(tmp_path: Path) -> None:
    run = open_run(runs.foreign(tmp_path / "job", *(traces.training(rank=r) for r in range(3))))
    written = []
    for jobs in (1, 2):
        folder = tmp_path / f"csv{jobs}"
        made = frames.write(run, folder, jobs)
        files = {p.relative_to(folder): p.read_bytes() for p in sorted(folder.rglob("*.csv"))}
        written.append((made, files))
    assert written[0] == written[1]
    assert written[0][0].tables == 6


def test_no_cell_is_a_formula_to_a_spreadsheet(tmp_path: Path) -> None:
    trace = traces.training(world_size=1)
    formulas = ("=HYPERLINK(A1)", "+1", "-1+1", "@SUM(A1)", "\t=1", " =cmd|' /C calc'!A0", "\uff1d1", "\n=1")
    named = [event for event in trace["traceEvents"] if event.get("cat") == "cpu_op"]
    assert len(named) >= len(formulas)
    for event, formula in zip(named, formulas, strict=False):
        event["name"] = formula
    trace["traceEvents"][-1]["name"] = "a\r=1"
    trace["traceEvents"][-2]["name"] = "\x1b]0;title\x07\x9b2J"
    run = open_run(runs.foreign(tmp_path / "job", trace))
    frames.write(run, tmp_path / "csv", jobs=1)
    found = set()
    for path in (tmp_path / "csv").rglob("*.csv"):
        with path.open(newline="") as file:
            for cell in (cell for row in csv.reader(file) for cell in row):
                found.add(cell)
                assert not set(cell) & {*map(chr, range(9)), "\r", "\x1b", "\x9b"}
                try:
                    float(cell)
                except ValueError:
                    assert not cell.startswith(("=", "+", "-", "@", "\t", "\r"))
    assert {*(f"'{formula}" for formula in formulas), r"a\r=1", r"\x1b]0;title\x07\x9b2J"} <= found


@pytest.mark.parametrize("taken", ["csv", "csv/tables"])
def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path, taken: str) -> None:
    run = open_run(runs.foreign(tmp_path / "job", traces.training(world_size=1)))
    (tmp_path / taken).parent.mkdir(exist_ok=True)
    (tmp_path / taken).write_text("a file")
    with pytest.raises(DlprofError, match="cannot be written"):
        frames.write(run, tmp_path / "csv", jobs=1)
