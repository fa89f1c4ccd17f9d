"""What naming the modules costs the traced steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.modules.work import module_naming
from tests.fixtures import layers, runs, traces


def recorded(tmp_path: Path, window: dict[str, Any]) -> Any:
    events = [traces.step(n, 1_000_000 * n, 1_000_000) for n in (12, 13, 14, 15)]
    return runs.measured(runs.recorded(tmp_path, (layers.on_cpu(events), [], {"window": window})), module_naming)


def test_ranges_take_what_the_recorder_measured_for_one(tmp_path: Path) -> None:
    window = {"first_step": 12, "last_step": 15, "modules": {"ranges": 200, "ns_each": 1_200}}
    (row,) = recorded(tmp_path, window).frame(module_naming).to_dict("records")
    assert (row["ranges"], row["ns"], row["share"]) == (50, 60_000, pytest.approx(0.06))


@pytest.mark.parametrize("modules", [None, {"ranges": 0, "ns_each": None}])
def test_where_no_module_was_named_there_is_no_cost(tmp_path: Path, modules: Any) -> None:
    found = recorded(tmp_path, {"first_step": 12, "last_step": 15, "modules": modules})
    assert "no names of modules" in str(found.lacking(module_naming))
