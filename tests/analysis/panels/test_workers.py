"""The table of the loader's workers: one row each, what was not told as a dash, and no more than one can read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.panels.input import MOST_WORKERS, PICTURE
from dlprof.errors import NotMeasured
from dlprof.result import Panel
from tests.fixtures import runs
from tests.fixtures.runs import MS


def draw(folder: Path, workers: int, slow: int = 0, **without: Any) -> Panel:
    facts = {**runs.CPU, "loaders": [{"role": "train", "num_workers": workers, "prefetch_factor": 2}]}
    steps = [runs.light(n, 20 * MS, fetch_ns=10 * MS) for n in range(10 * max(workers, 4))]
    path = runs.recorded(folder / "run", (None, steps, facts))
    told = {"step": 20 * MS, "wait": 10 * MS, "fetch": 30 * MS, "cpu": 7 * MS, "n": len(steps), "slow": slow}
    runs.loading(path, 0, workers=workers, **told)
    if without:
        file = path / "ranks" / "00000" / "fetches.jsonl"
        rows = [json.loads(line) | without for line in file.read_text().splitlines()]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (panel,) = runs.called(path, PICTURE.draw)
    return panel


def test_a_worker_has_a_row_with_its_mean_batch(tmp_path: Path) -> None:
    panel = draw(tmp_path, workers=2, slow=12 * MS)
    assert panel.columns[:4] == ("rank", "worker", "batches", "fetch_ns")
    assert [row[:2] for row in panel.rows] == [(0, 0), (0, 1)]
    assert [row[3:6] for row in panel.rows] == [(42 * MS, 3 * MS, 7 * MS), (30 * MS, 3 * MS, 7 * MS)]


def test_what_a_kernel_does_not_tell_is_a_dash_and_no_zero(tmp_path: Path) -> None:
    (first, *_) = draw(tmp_path, workers=2, cpu_ns=-1, stored_bytes=-1).rows
    assert first[5] is first[7] is None


def test_of_very_many_workers_the_first_are_shown(tmp_path: Path) -> None:
    panel = draw(tmp_path, workers=MOST_WORKERS + 2)
    assert len(panel.rows) == MOST_WORKERS
    assert panel.note.endswith(f"The first {MOST_WORKERS} of {MOST_WORKERS + 2} workers.")


def test_a_loader_without_workers_has_no_such_table(tmp_path: Path) -> None:
    with pytest.raises(NotMeasured, match="no loader has workers"):
        draw(tmp_path, workers=0)
