"""What was overridden is among the facts of a run, over all its ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis import overview
from dlprof.analysis.overview import override_effects
from dlprof.errors import NotMeasured
from tests.fixtures.runs import CPU, MS, light, measured, recorded

STEPS = [light(n, 100 * MS) for n in range(9)]
ENTRY = {"value": 4, "applied": 1, "before": [0], "places": [["train.py", 12, "main"]], "error": None}


def run(folder: Path, *ranks: dict[str, Any] | None) -> Path:
    made = recorded(folder / "run", *((None, STEPS, CPU) for _ in ranks))
    for n, entries in enumerate(ranks):
        if entries is not None:
            (made / f"ranks/{n:05d}/overrides.json").write_text(json.dumps(entries))
    return made


def facts(made: Path) -> dict[str, str]:
    told = overview.facts(measured(made, *overview.SECTIONS))
    return {fact.name: fact.value for fact in told if fact.section == "Overrides"}


def test_the_facts_say_before_value_place_and_how_often(tmp_path: Path) -> None:
    other = ENTRY | {"places": [["train.py", 12, "main"], ["eval.py", 3, "f"]], "applied": 2, "before": [1]}
    failed = {"value": True, "applied": 0, "before": [], "places": [], "error": "too sparse"}
    made = run(tmp_path, {"loader.num_workers": ENTRY, "optimizer.fused": failed}, {"loader.num_workers": other})
    assert facts(made) == {
        "loader.num_workers": "0, 1 → 4 at train.py:12, eval.py:3, 3 times",
        "optimizer.fused": "True never applied: too sparse",
    }


def test_one_place_and_one_time(tmp_path: Path) -> None:
    assert facts(run(tmp_path, {"loader.num_workers": ENTRY})) == {"loader.num_workers": "0 → 4 at train.py:12, 1 time"}


@pytest.mark.parametrize("entries", [None, {}])
def test_without_overrides_there_is_no_such_fact(entries: dict[str, Any] | None, tmp_path: Path) -> None:
    made = run(tmp_path, entries)
    assert facts(made) == {}
    with pytest.raises(NotMeasured):
        measured(made, override_effects).frame(override_effects)
