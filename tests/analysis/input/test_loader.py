"""Calls of the loader, and whether it has workers."""

import json
from pathlib import Path

import pandas as pd
import pytest

from dlprof.analysis.input.loader import fetch_series, loader_calls, loader_means, slowest_workers, worker_means
from dlprof.analysis.timeline.steps import step_means
from dlprof.errors import NotMeasured
from tests.fixtures import runs, traces
from tests.fixtures.loaders import ready
from tests.fixtures.runs import MS

NAMES = ("fetches.jsonl", "loading.jsonl")


@pytest.mark.parametrize(
    ("loader", "single"), [("_SingleProcessDataLoaderIter", True), ("_MultiProcessingDataLoaderIter", False)]
)
def test_a_trace_tells_calls_and_kind(tmp_path: Path, loader: str, single: bool) -> None:
    made = traces.trace(*(traces.fetch(n * MS, 10, loader) for n in range(3)))
    row = runs.rank_of(tmp_path, made).once(loader_calls).iloc[0]
    assert (row["calls"], row["in_process"]) == (3, single)


def test_the_light_layer_counts_all_steps(tmp_path: Path) -> None:
    folder = runs.recorded(tmp_path / "run", (None, [runs.light(n, MS, fetches=2) for n in range(10)], runs.CPU))
    assert runs.measured(folder, loader_calls).frame(loader_calls)["calls"][0] == 20


def told(folder: Path, workers: int) -> Path:
    facts = {**runs.CPU, "loaders": [{"role": "train", "num_workers": workers}]}
    steps = [runs.light(k, 50 * MS, fetch_ns=20 * MS) for k in range(30)]
    path = runs.recorded(folder / "run", (None, steps, facts))
    runs.loading(path, 0, step=50 * MS, wait=20 * MS, fetch=40 * MS, cpu=10 * MS, n=30, workers=workers)
    return path


def test_means_of_the_queue_and_of_each_worker_in_the_steady_steps(tmp_path: Path) -> None:
    run = runs.measured(told(tmp_path, 2), loader_means, worker_means, fetch_series, step_means)
    means = run.frame(loader_means).iloc[0]
    assert means["batches"] == run.frame(step_means)["steps"][0]
    assert means["empty"] == means["batches"]
    assert (means["ready"], means["outstanding"], means["epochs"]) == (0, 4, 1)
    assert means["cores"] == pytest.approx(0.6)
    assert pd.isna(means["end_ns"])
    workers = run.frame(worker_means)
    assert workers["worker"].to_list() == [0, 1]
    assert (workers["dur_ns"] == 40 * MS).all()
    assert (workers["cpu_ns"] == 10 * MS).all()
    assert workers["read_bytes"].isna().all()
    series = run.frame(fetch_series)
    assert (series["dur_ns"] == 40 * MS).all()
    assert series["gap_ns"].iloc[0] == 0


def test_what_was_under_way_while_the_job_was_suspended_is_in_no_mean(tmp_path: Path) -> None:
    path = told(tmp_path, 2)
    at = path / "ranks/00000"
    fetches, rows = ([json.loads(line) for line in (at / name).read_text().splitlines()] for name in NAMES)
    late = traces.BASE_NS + 600_000 * MS  # far from all steps
    fetches.append(fetches[-1] | {"start_ns": late, "dur_ns": 9_000 * MS})
    rows += [rows[0] | {"start_ns": late, "dur_ns": 9_000 * MS}]
    for name, lines in zip(NAMES, (fetches, rows), strict=True):
        (at / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = []
    for resumed in ([], [late + 8_000 * MS]):
        (path / "run.json").write_text(
            json.dumps(json.loads((path / "run.json").read_text()) | {"resumed_ns": resumed})
        )
        run = runs.measured(path, loader_means, worker_means)
        found.append((run.frame(loader_means)["start_ns"][0], run.frame(worker_means)["dur_ns"].max()))
    assert found[0][0] > 4_000 * MS
    assert found[0][1] > 40 * MS
    assert found[1] == (5, 40 * MS)


def test_taking_over_a_batch_is_told_from_those_that_are_surely_ready(tmp_path: Path) -> None:
    path = told(tmp_path, 2)
    assert pd.isna(runs.measured(path, loader_means).frame(loader_means)["taken_ns"][0])
    ready(path, every=2, takes=3 * MS, outstanding=2)
    assert runs.measured(path, loader_means).frame(loader_means)["taken_ns"][0] == 3 * MS
    # Of four that were asked for two are ready: the one whose turn it is may be missing.
    ready(path, every=2, takes=3 * MS, outstanding=4)
    assert pd.isna(runs.measured(path, loader_means).frame(loader_means)["taken_ns"][0])


def test_the_training_thread_is_no_worker(tmp_path: Path) -> None:
    run = runs.measured(told(tmp_path, 0), loader_means, worker_means)
    assert run.frame(loader_means)["empty"][0] == -1
    assert run.frame(worker_means)["worker"].to_list() == [-1]


def test_another_loaders_fetches_are_left_out(tmp_path: Path) -> None:
    path = told(tmp_path, 1)
    rank = path / "ranks/00000"
    other = {"worker": 0, "pid": 9, "start_ns": traces.BASE_NS + 10_000 * MS, "count": 7, "dur_ns": 900 * MS}
    with (rank / "fetches.jsonl").open("a") as file:
        file.write(json.dumps(other) + "\n" + json.dumps({**other, "start_ns": other["start_ns"] + 1}) + "\n")
    assert (runs.measured(path, worker_means).frame(worker_means)["dur_ns"] == 40 * MS).all()


def test_without_a_loader_nothing_is_told(tmp_path: Path) -> None:
    path = told(tmp_path, 1)
    (path / "ranks/00000/loading.jsonl").write_text("")
    (path / "ranks/00000/fetches.jsonl").write_text("")
    run = runs.measured(path, loader_means, worker_means)
    with pytest.raises(NotMeasured, match="no DataLoader"):
        run.frame(loader_means)
    with pytest.raises(NotMeasured, match="no record of the time"):
        run.frame(worker_means)


def test_a_worker_is_compared_with_the_others_of_its_rank() -> None:
    workers = pd.DataFrame(
        {"rank": [0, 1, 1, 1, 2], "worker": [0, 0, 1, 2, -1], "dur_ns": [9.0, 2.0, 8.0, 4.0, 7.0], "batches": 1}
    )
    (row,) = slowest_workers(workers).to_dict("records")
    assert row == {"rank": 1, "worker": 1, "dur_ns": 8.0, "others_ns": 3.0, "workers": 3}
    with pytest.raises(NotMeasured, match="two workers"):
        slowest_workers(workers[workers["rank"] != 1])
