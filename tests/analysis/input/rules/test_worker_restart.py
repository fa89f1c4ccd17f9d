"""Workers that start anew: found with what staying ones would give; those that stay, or are none, are left alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.input.rules.worker_restart import RULE
from dlprof.result import Setting
from tests.fixtures import runs, traces
from tests.fixtures.asking import ask
from tests.fixtures.runs import MS, light

LOADER = {"role": "train", "num_workers": 2, "persistent_workers": False, "start_method": "fork"}


def recorded(
    folder: Path,
    workers: Sequence[str] = ("1 2", "3 4", "5 6", "7 8"),
    *,
    ranks: int = 1,
    start: int = 50,
    first: int = 250,
    end: int = 20,
    slower: int = 0,
    loader: dict[str, Any] = LOADER,
) -> Path:
    """Record epochs of 10 steps, 100 ms each; an epoch begins with iter() and its first next(), a batch takes 40 ms."""
    steps, loading, fetches = [], [], []
    for epoch, pids in enumerate(workers):
        for k in range(10):
            step = 10 * epoch + k
            at = traces.BASE_NS + step * 1_000 * MS
            longer = (start + first) * (k == 0) + end * (k == 9)
            forward = 10 + slower * (k == 0)
            steps.append(light(step, (100 + longer) * MS, first=int(k in (0, 9)), forward_ns=forward * MS))
            row: dict[str, Any] = {"start_ns": at, "count": 1, "step": step, "loader": 0}
            if k == 0:
                loading.append(row | {"kind": "start", "dur_ns": start * MS, "workers": pids})
            loading.append(row | {"kind": "batch" if k else "first", "start_ns": at + start * MS, "dur_ns": first * MS})
            if pids:
                pid = int(pids.split()[k % 2])
                fetches.append({"pid": pid, "worker": k % 2, "start_ns": at, "count": 1, "dur_ns": 40 * MS})
            if k == 9:
                loading.append(row | {"kind": "end", "start_ns": at + 100 * MS, "dur_ns": end * MS})
    path = runs.recorded(folder, *((None, steps, {**runs.CPU, "loaders": [loader]}) for _ in range(ranks)))
    for rank in range(ranks):
        at_rank = path / f"ranks/{rank:05d}"
        (at_rank / "loading.jsonl").write_text("".join(json.dumps(r) + "\n" for r in loading))
        (at_rank / "fetches.jsonl").write_text("".join(json.dumps(r) + "\n" for r in fetches))
    return path


@pytest.mark.parametrize("ranks", [1, 2])
def test_three_epochs_that_begin_anew_are_spread_over_the_training_steps(tmp_path: Path, ranks: int) -> None:
    found = ask(RULE, recorded(tmp_path, ranks=ranks))
    assert (found.state, found.scope) == ("found", "job")
    # 50 + 250 + 20 ms, less a batch of 40; three times in 40 steps.
    assert found.saving_ns == pytest.approx(3 * 280 * MS / 40)
    # Steps of an epoch's ends last 420 and 120 ms, and all others 100; the job's very first one counts as one of those.
    assert found.share == pytest.approx(21 / ((3 * 520 + 33 * 100 + 4 * 20) / 40), rel=0.02)
    assert found.ranks == tuple(range(ranks))
    assert found.advice == (
        "`persistent_workers=True` (is False) on the loader of training: 2 workers, 280.0 ms less an epoch",
    )
    assert found.changes[0].settings == (Setting("persistent_workers", False, True),)
    assert [cost.ns for cost in found.by_rank] == pytest.approx([3 * 280 * MS / 40] * ranks)
    assert found.evidence is not None
    assert found.evidence.rows == (("training", 4, 50 * MS, 250 * MS, 40 * MS, 0, 20 * MS, 280 * MS),)


def test_spawned_workers_are_told_what_makes_them_slow(tmp_path: Path) -> None:
    found = ask(RULE, recorded(tmp_path, loader={**LOADER, "start_method": "spawn"}, first=1_000))
    assert "spawned" in found.advice[1]
    assert found.changes[1].settings == (Setting("multiprocessing_context", "spawn", "forkserver"),)


def test_of_a_first_batch_nobody_knows_how_long_it_takes_nothing_is_promised(tmp_path: Path) -> None:
    path = recorded(tmp_path)
    (path / "ranks/00000/fetches.jsonl").unlink()
    found = ask(RULE, path)
    assert found.saving_ns == pytest.approx(3 * 70 * MS / 40)
    assert found.evidence is not None
    assert found.evidence.rows[0][4] is None


def test_workers_that_stay_are_left_alone(tmp_path: Path) -> None:
    clear = ask(RULE, recorded(tmp_path, ["1 2"] * 4))
    assert (clear.state, clear.summary, clear.share) == ("clear", "the workers stay from epoch to epoch", 0.0)


def test_workers_that_start_at_once_are_left_alone(tmp_path: Path) -> None:
    clear = ask(RULE, recorded(tmp_path, start=5, first=41, end=2))
    assert clear.state == "clear"
    # 5 + 41 + 2 ms, less a batch of 40; three times in 40 steps of 100 ms and a little.
    assert clear.saving_ns == pytest.approx(3 * 8 * MS / 40)
    assert clear.share == pytest.approx(0.006, rel=0.05)
    assert clear.scope == "job"
    assert "restarting" in clear.summary


def test_a_loader_without_workers_is_left_alone(tmp_path: Path) -> None:
    answer = ask(RULE, recorded(tmp_path, [""] * 4))
    assert (answer.state, answer.why) == ("does_not_apply", "no loader has workers")


def test_of_one_epoch_nothing_is_known(tmp_path: Path) -> None:
    answer = ask(RULE, recorded(tmp_path, ["1 2"]))
    assert (answer.state, "one epoch" in answer.why) == ("not_measured", True)


def test_without_the_record_of_batches_it_abstains(tmp_path: Path) -> None:
    plain = runs.recorded(tmp_path, (None, [light(n, MS) for n in range(9)], runs.CPU))
    assert ask(RULE, plain).state == "not_measured"


def test_what_a_fork_makes_slower_in_the_next_step_counts(tmp_path: Path) -> None:
    assert ask(RULE, recorded(tmp_path, slower=40)).saving_ns == pytest.approx(3 * 320 * MS / 40)


def test_an_epoch_that_begins_while_the_job_is_suspended_is_no_dearer_for_it(tmp_path: Path) -> None:
    path = recorded(tmp_path)
    loading = path / "ranks/00000/loading.jsonl"
    rows = [json.loads(line) for line in loading.read_text().splitlines()]
    third = [row for row in rows if row["kind"] == "start"][2]
    third["dur_ns"] += 60_000 * MS
    loading.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert ask(RULE, path).state == "not_measured"  # one epoch so unlike the others
    told = json.loads((path / "run.json").read_text())
    resumed = third["start_ns"] + third["dur_ns"] - 100 * MS
    (path / "run.json").write_text(json.dumps(told | {"resumed_ns": [resumed]}))
    assert ask(RULE, path).saving_ns == pytest.approx(3 * 280 * MS / 40)
