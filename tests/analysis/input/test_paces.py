"""The pace of a rank's input: from its records, in the order in which batches are taken, or refused."""

import json
from pathlib import Path

import pandas as pd
import pytest

from dlprof.analysis.input.paces import in_turn, paces
from dlprof.errors import NotMeasured
from tests.fixtures import runs
from tests.fixtures.loaders import held_up, recorded
from tests.fixtures.runs import MS


def test_what_was_waited_for_a_core_is_in_no_pace(tmp_path: Path) -> None:
    path = recorded(tmp_path, fetch=100, cpu=80, workers=1, own=30, cores=1)
    held_up(path, 0, loop=10 * MS, worker=20 * MS, computing=20 * MS)
    made = runs.measured(path, paces).frame(paces)
    mine = made.of(0)
    assert made.of(0) is mine
    assert mine.own.mean() == pytest.approx(20 * MS)
    assert mine.fetch.mean() == pytest.approx(80 * MS, rel=0.01)
    assert mine.fetch_cpu.mean() == pytest.approx(80 * MS)
    assert made.step_ns(0) == pytest.approx(100 * MS)


def test_a_step_of_several_batches_has_no_pace(tmp_path: Path) -> None:
    path = recorded(tmp_path, fetch=80, cpu=2, workers=1)
    file = path / "ranks/00000/loading.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(row | {"count": 1 + (row["kind"] == "batch")}) + "\n" for row in rows))
    with pytest.raises(NotMeasured, match="more than one batch"):
        runs.measured(path, paces).frame(paces).of(0)


def test_fetches_stand_in_the_order_in_which_their_batches_are_taken() -> None:
    # Worker 1 was faster, and has one fetch more than the others.
    fetches = pd.DataFrame({"worker": [1, 1, 0, 1, 0, 1, 0], "dur_ns": [10, 11, 20, 12, 21, 13, 22]})
    assert in_turn(fetches)["dur_ns"].tolist() == [20, 10, 21, 11, 22, 12]
    few = fetches.head(3)
    assert in_turn(few)["dur_ns"].tolist() == [10, 11, 20]
