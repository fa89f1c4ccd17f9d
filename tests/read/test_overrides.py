"""overrides.json: a row for each place, and whatever is not of the kind expected counts as not there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dlprof import schema
from dlprof.errors import DlprofError
from dlprof.read.overrides import read

ENTRY = {"value": 4, "applied": 3, "before": [0, 2], "places": [["a.py", 1, "f"], ["b.py", 9, "g"]], "error": None}


def table(path: Path, data: Any) -> list[tuple[Any, ...]]:
    path.write_text(json.dumps(data))
    frame = read(path).tables["overrides"]
    schema.check("overrides", frame)
    return [tuple(row) for row in frame.astype(object).to_numpy()]


def test_a_row_for_each_place_and_one_where_there_is_none(tmp_path: Path) -> None:
    data = {
        "loader.num_workers": ENTRY,
        "optimizer.fused": {"value": True, "applied": 0, "before": [], "places": [], "error": "sparse"},
    }
    assert table(tmp_path / "overrides.json", data) == [
        ("loader.num_workers", "4", "0, 2", 3, "a.py", 1, "f", ""),
        ("loader.num_workers", "4", "0, 2", 3, "b.py", 9, "g", ""),
        ("optimizer.fused", "True", "", 0, "", -1, "", "sparse"),
    ]


@pytest.mark.parametrize(
    "changed",
    [
        {"applied": "many"},
        {"applied": -3},
        {"applied": True},
        {"before": {"a": 1}, "applied": 0},
        {"places": [["a.py", "1", "f"], "b", [1, 2, 3], ["a.py", 1], ["a.py", 2**70, "f"]], "applied": 0},
        {"error": ["no"], "applied": 0},
    ],
)
def test_odd_parts_count_as_not_there(changed: dict[str, Any], tmp_path: Path) -> None:
    rows = table(tmp_path / "overrides.json", {"loader.num_workers": ENTRY | changed})
    assert all(row[3] == 0 for row in rows)
    assert all(row[5] in (-1, 1, 9) for row in rows)


def test_entries_that_are_none_are_left_out_with_a_warning(tmp_path: Path) -> None:
    (tmp_path / "overrides.json").write_text(json.dumps({"a": 1, "b": {"applied": 1}, "loader.num_workers": ENTRY}))
    reading = read(tmp_path / "overrides.json")
    assert set(reading.tables["overrides"]["name"]) == {"loader.num_workers"}
    assert reading.warnings == ("overrides.json: 2 entries of another kind are left out",)


@pytest.mark.parametrize("text", ["", "[1]", "{", "[" * 100_000])
def test_a_file_that_holds_no_object_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "overrides.json").write_text(text)
    with pytest.raises(DlprofError, match=r"overrides\.json"):
        read(tmp_path / "overrides.json")


def test_nothing_overridden_is_an_empty_table(tmp_path: Path) -> None:
    assert table(tmp_path / "overrides.json", {}) == []
