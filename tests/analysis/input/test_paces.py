"""The pace of a rank's input: from its records, in the order in which batches are taken, or refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from dlprof.analysis.input.fetch_replay import replayed
from dlprof.analysis.input.input_waits import Paces, in_turn, paces
from dlprof.errors import NotMeasured
from tests.fixtures import runs
from tests.fixtures.loaders import held_up, recorded
from tests.fixtures.runs import MS
from tests.fixtures.traces import BASE_NS


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


def steps_of(made: Paces) -> list[float]:
    """Return the predicted steps with none to four workers, ms."""
    return [replayed(made.of(0), n).step_ns / MS for n in range(5)]


def test_a_step_of_two_batches_of_one_loader(tmp_path: Path) -> None:
    """Gradients of two batches of 40 ms each are accumulated; a step is 80 ms, 20 of them the loop's own."""
    path = recorded(tmp_path, fetch=80, cpu=2, workers=1)
    changed(path, "loading.jsonl", lambda _, row: row | {"count": 1 + (row["kind"] == "batch")})
    halves = 20 * 1_000 * MS  # when the first one began
    changed(path, "fetches.jsonl", lambda n, row: row | {"dur_ns": 40 * MS, "start_ns": BASE_NS + halves + n * 40 * MS})
    made = runs.measured(path, paces).frame(paces)
    mine = made.of(0)
    assert (mine.batches, mine.loaders) == (2, 1)
    assert mine.own[:4] == pytest.approx([10 * MS] * 4)
    assert made.step_ns(0) == pytest.approx(80 * MS)
    assert steps_of(made) == pytest.approx([100, 80, 40, 80 / 3, 20], rel=0.03)


def test_a_step_of_a_batch_of_each_of_two_loaders(tmp_path: Path) -> None:
    """Each has a worker that makes a batch in 80 ms."""
    made = runs.measured(of_two(tmp_path), paces).frame(paces)
    mine = made.of(0)
    assert (mine.batches, mine.loaders, mine.workers) == (2, 2, 1)
    assert mine.own[:4] == pytest.approx([0, 20 * MS, 0, 20 * MS])
    assert steps_of(made) == pytest.approx([180, 80, 40, 80 / 3, 20], rel=0.03)


def test_uneven_steps_have_no_pace(tmp_path: Path) -> None:
    path = recorded(tmp_path / "varies", fetch=80, cpu=2, workers=1)
    changed(path, "loading.jsonl", lambda n, row: row | {"count": 1 + n % 4 // 2} if row["kind"] == "batch" else row)
    with pytest.raises(NotMeasured, match="number varies"):
        runs.measured(path, paces).frame(paces).of(0)
    path = of_two(tmp_path / "twice", count=2)
    with pytest.raises(NotMeasured, match="different numbers of batches from 2 loaders"):
        runs.measured(path, paces).frame(paces).of(0)
    path = of_two(tmp_path / "other", num_workers=3)
    with pytest.raises(NotMeasured, match="different numbers of workers"):
        runs.measured(path, paces).frame(paces).of(0)


def of_two(folder: Path, *, count: int = 1, num_workers: int = 1) -> Path:
    """Record steps of 80 ms that take a batch of one loader, and `count` of another, which has other workers."""
    path = recorded(folder, fetch=80, cpu=2, workers=1)
    for name, other in (("loading.jsonl", {"loader": 1, "workers": "701"}), ("fetches.jsonl", {"pid": 701})):
        file = path / "ranks/00000" / name
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        more = [row | other for row in rows if row.get("kind") != "usage"]
        more = [row | {"count": count} if row.get("kind") == "batch" else row for row in more]
        file.write_text("".join(json.dumps(row) + "\n" for row in (*rows, *more)))
    facts = path / "ranks/00000/facts.json"
    told = json.loads(facts.read_text())
    told["loaders"] += [told["loaders"][0] | {"num_workers": num_workers}]
    facts.write_text(json.dumps(told))
    return path


def changed(path: Path, name: str, change: Callable[[int, dict[str, Any]], dict[str, Any]]) -> None:
    """Change each line of a log of rank 0, by its number."""
    file = path / "ranks/00000" / name
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(change(n, row)) + "\n" for n, row in enumerate(rows)))


def test_fetches_stand_in_the_order_in_which_their_batches_are_taken() -> None:
    # Worker 1 was faster, and has one fetch more than the others.
    fetches = pd.DataFrame({"worker": [1, 1, 0, 1, 0, 1, 0], "dur_ns": [10, 11, 20, 12, 21, 13, 22]}).assign(loader=0)
    assert in_turn(fetches)["dur_ns"].tolist() == [20, 10, 21, 11, 22, 12]
    few = fetches.head(3)
    assert in_turn(few)["dur_ns"].tolist() == [10, 11, 20]
    # Of two loaders, each one's first worker comes before each one's second.
    both = pd.DataFrame({"loader": [0, 0, 1, 1] * 3, "worker": [0, 1] * 6, "dur_ns": range(12)})
    assert in_turn(both)["dur_ns"].tolist() == [0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11]
