"""What profiles of other tools show: trees of calls, and the functions with most of the time."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlprof.analysis.host.profiles import counted_functions, profile_flame, profile_functions, profile_summaries
from dlprof.analysis.host.stacks import hottest
from dlprof.errors import NotMeasured
from tests.fixtures import traces
from tests.fixtures.hosts import SEEN, with_stacks
from tests.fixtures.logged import GOLDEN
from tests.fixtures.runs import foreign, measured

FOLDED = "main (t.py:1);f (t.py:5);dumps (json/__init__.py:9) 30\nmain (t.py:1);f (t.py:6) 50\nmain (t.py:2) 20\n"


def test_of_folded_stacks(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text(FOLDED)
    made = measured(tmp_path / "x.txt", profile_functions, profile_flame, profile_summaries)
    # What a library does for f counts as f's.
    rows = {str(row["function"]): row for row in made.frame(profile_functions).to_dict("records")}
    assert [rows["f"][c] for c in ("own", "alone", "total", "of", "line")] == [True, 80, 80, 100, 6]
    assert [rows["main"][c] for c in ("alone", "total")] == [20, 100]
    assert [rows["dumps"][c] for c in ("own", "alone")] == [False, 30]
    tree = made.frame(profile_flame)
    assert tree.loc[tree["name"] == "f (t.py)", "samples"].tolist() == [80]
    summary = made.frame(profile_summaries).iloc[0]
    assert (summary["function"], summary["share"], summary["total"], summary["tool"]) == ("f", 0.8, 100, "py-spy")


def test_of_cprofile_the_counts_are_exact() -> None:
    made = measured(GOLDEN / "calc.prof", counted_functions, profile_summaries)
    first = made.frame(counted_functions).iloc[0]
    assert (first["function"], first["calls"]) == ("decode", 300)
    assert first["own_ns"] / first["of_ns"] > 0.85
    summary = made.frame(profile_summaries).iloc[0]
    assert summary["counted"]
    assert summary["total"] == first["of_ns"]


def test_what_dlprof_saw_itself_is_no_profile(tmp_path: Path) -> None:
    with pytest.raises(NotMeasured):
        measured(with_stacks(tmp_path, SEEN), profile_functions).frame(profile_functions)


def test_a_profile_beside_a_trace_serves_the_rules_where_it_knows_the_phases(tmp_path: Path) -> None:
    folder = foreign(tmp_path / "a", traces.training())
    (folder / "plain.txt").write_text(FOLDED)
    with pytest.raises(NotMeasured):
        measured(folder, hottest).frame(hottest)
    (folder / "spy.raw").write_bytes((GOLDEN / "pyspy.raw.txt").read_bytes())
    (folder / "plain.txt").unlink()
    frame = measured(folder, hottest).frame(hottest)
    fetch = frame[frame["doing"] == "fetch"].iloc[0]
    assert fetch["function"] == "decode"
    assert "rest" not in set(frame["doing"])  # starting up is no part of a step


def test_time_is_no_number_of_samples(tmp_path: Path) -> None:
    folder = foreign(tmp_path / "a", traces.training())
    (folder / "x.json.gz").write_bytes((GOLDEN / "pyspy.speedscope.json.gz").read_bytes())
    frame = measured(folder, hottest).frame(hottest)
    assert frame[frame["doing"] == "fetch"]["samples"].iloc[0] <= 242
