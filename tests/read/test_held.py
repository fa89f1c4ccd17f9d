"""held.json: a row for each part of each module, and whatever is not of the kind expected counts as not there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dlprof import schema
from dlprof.errors import DlprofError
from dlprof.read import held
from tests.fixtures.holding import row

GOOD = row("parameter", "block.0", 400)


def reading(path: Path, data: Any) -> Any:
    path.write_text(json.dumps(data))
    return held.read(path)


def test_rows_and_what_stands_beside_them(tmp_path: Path) -> None:
    told = {"step": 9, "state": "counted", "optimizers": [{"class": "Adam", "state": []}]}
    found = reading(tmp_path / "held.json", told | {"rows": [GOOD, row("activation", "", 7, dtype="bfloat16")]})
    frame = schema.check("held", found.tables["held"])
    assert frame.astype(object).to_dict("records") == [GOOD, row("activation", "", 7, dtype="bfloat16")]
    assert found.facts == {"held": told}
    assert found.warnings == ()


@pytest.mark.parametrize(
    "changed",
    [{"bytes": -1}, {"bytes": 2**70}, {"bytes": 1.5}, {"tensors": True}, {"part": 3}, {"module": None}, {"dtype": []}],
)
def test_rows_that_are_none_are_left_out_with_a_warning(changed: dict[str, Any], tmp_path: Path) -> None:
    found = reading(tmp_path / "held.json", {"rows": [GOOD | changed, GOOD, {}, 4]})
    assert found.tables["held"]["bytes"].to_list() == [400]
    assert any("held.json: 2 rows of another kind" in text for text in found.warnings)


def test_what_is_odd_beside_the_rows_is_left_out(tmp_path: Path) -> None:
    odd = {"step": "9", "moments": [{"moment": 3, "device": "cpu"}], "process": [], "rows": []}
    found = reading(tmp_path / "held.json", odd)
    assert len(schema.check("held", found.tables["held"])) == 0
    assert found.facts == {"held": {"moments": [{"device": "cpu"}]}}


def test_long_names_are_cut(tmp_path: Path) -> None:
    found = reading(tmp_path / "held.json", {"rows": [GOOD | {"module": "m" * 100_000}]})
    assert found.tables["held"]["module"].to_list() == ["m" * 400]


@pytest.mark.parametrize("text", ["", "{", "[]", "7", '{"rows": 3}', "{}", "[" * 100_000])
def test_a_broken_file_is_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "held.json").write_text(text)
    with pytest.raises(DlprofError, match=r"^held\.json is broken \([^\n]+\)$"):
        held.read(tmp_path / "held.json")
