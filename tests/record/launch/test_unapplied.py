"""What a job's overrides did not do is said once for all ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dlprof.overrides import Outcome
from dlprof.record.launch.supervisor import outcomes, unapplied

ASKED = {"loader.num_workers": 4, "optimizer.fused": True}


def rank(run: Path, number: int, **entries: Any) -> None:
    folder = run / f"ranks/{number:05d}"
    folder.mkdir(parents=True)
    whole = {"value": 1, "applied": 0, "before": [], "places": [], "error": None}
    named = {name.replace("__", "."): whole | entry for name, entry in entries.items()}
    (folder / "overrides.json").write_text(json.dumps(named))


def test_one_that_applied_in_some_rank_is_not_told(tmp_path: Path) -> None:
    rank(tmp_path, 0, loader__num_workers={"applied": 0}, optimizer__fused={"applied": 1})
    rank(tmp_path, 1, loader__num_workers={"applied": 2}, optimizer__fused={"applied": 1})
    assert unapplied(tmp_path, ASKED) == []


def test_one_that_never_applied_or_failed_somewhere_is(tmp_path: Path) -> None:
    rank(tmp_path, 0, loader__num_workers={"error": "no"}, optimizer__fused={"applied": 1})
    rank(tmp_path, 1, loader__num_workers={"error": "no"}, optimizer__fused={"error": "too sparse"})
    assert unapplied(tmp_path, ASKED) == [
        "--set loader.num_workers=4 never applied: no",
        "--set optimizer.fused=True did not apply everywhere: too sparse",
    ]


def test_without_a_rank_and_with_a_broken_file_nothing_applied(tmp_path: Path) -> None:
    expected = ["--set loader.num_workers=4 never applied", "--set optimizer.fused=True never applied"]
    assert unapplied(tmp_path, ASKED) == expected
    rank(tmp_path, 0)
    (tmp_path / "ranks/00000/overrides.json").write_text('{"loader.num_wor')
    assert unapplied(tmp_path, ASKED) == expected


def test_nothing_asked_for_is_nothing_to_tell(tmp_path: Path) -> None:
    assert unapplied(tmp_path, {}) == []


def test_the_counts_of_all_ranks_add_up_and_what_was_not_asked_for_is_left_out(tmp_path: Path) -> None:
    rank(tmp_path, 0, loader__num_workers={"applied": 1, "before": [0]}, gc__freeze={"applied": 1})
    rank(tmp_path, 1, loader__num_workers={"applied": 2, "before": [1]})
    assert outcomes(tmp_path, ["loader.num_workers"]) == {"loader.num_workers": Outcome(3, (0, 1))}
