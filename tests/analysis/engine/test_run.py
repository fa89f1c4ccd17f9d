"""Each rank is read once, in this process or another, and what breaks in it costs as little as it can."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from dlprof.analysis import (
    engine,
)
from dlprof.analysis.engine import Done, RankData, open_store
from dlprof.analysis.engine import run as engine_run
from dlprof.analysis.step.breakdown import breakdown
from dlprof.analysis.step.savings import own_time
from dlprof.analysis.timeline.device import device_time
from dlprof.analysis.timeline.steps import step_means
from dlprof.errors import DlprofError, NotMeasured
from dlprof.read import limits
from dlprof.read.kineto import prefetch, torch_trace
from dlprof.read.run import TRACE, Rank, Run
from dlprof.units import listed
from tests.fixtures.measures import RANKS, broken, deadly, rows, silent, total


def test_serial_and_processes_give_the_same(job: Run) -> None:
    wanted = [step_means, breakdown, device_time, own_time]
    one, two = engine.measure(job, wanted, jobs=1), engine.measure(job, wanted, jobs=2)
    for measure in wanted:
        pd.testing.assert_frame_equal(one.frame(measure), two.frame(measure))
    assert (one.ranks, one.facts, one.trace_facts) == (two.ranks, two.facts, two.trace_facts)
    assert one.warnings == two.warnings
    assert set(one.frame(step_means)["rank"]) == set(range(RANKS))


def test_jobs_bounds_the_processes(job: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def spy(*args: Any) -> Iterator[Any]:
        asked.append(args[2])
        return engine_run.serial(*args)

    monkeypatch.setattr(engine_run, "processes", spy)
    monkeypatch.setattr(engine_run, "_cores", lambda: 3)
    assert set(engine.measure(job, [rows], jobs=1).frame(rows)["process"]) == {os.getpid()}
    assert asked == []
    for jobs in (2, 100, None):
        engine.measure(job, [rows], jobs=jobs)
    assert asked == [2, RANKS, 3]


def test_memory_bounds_the_processes(job: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rank, "unpacked_bytes", 1 << 60)
    monkeypatch.setattr(engine_run, "processes", lambda *_: pytest.fail("no memory for two"))
    engine.measure(job, [rows], jobs=4)


def test_work_is_done_in_other_processes(job: Run) -> None:
    assert os.getpid() not in set(engine.measure(job, [rows], jobs=2).frame(rows)["process"])


def test_progress_counts_the_ranks(job: Run) -> None:
    seen: list[Done] = []
    engine.measure(job, [rows], jobs=1, progress=seen.append)
    assert [(done.ranks, done.of_ranks) for done in seen] == [(n, RANKS) for n in range(RANKS + 1)]
    assert (seen[0].files, seen[0].bytes) == (0, 0)
    sizes = [p.stat().st_size for r in job.ranks for p in r.files.values()]
    assert (seen[-1].files, seen[-1].of_files, seen[-1].bytes) == (len(sizes), len(sizes), sum(sizes))
    assert all(one.bytes < other.bytes for one, other in pairwise(seen))


def test_a_process_that_is_killed_loses_only_its_rank(job: Run) -> None:
    run = engine.measure(job, [rows, deadly], jobs=2)
    assert run.ranks == tuple(range(RANKS))
    assert run.frame(rows)["rank"].to_list() == [0, 2, 3]
    assert run.frame(deadly)["rank"].to_list() == [0, 2, 3]
    (why,) = run.warnings[1]
    assert "rank1.json.gz killed its process" in why
    assert run.lacking(rows) == {1: why}
    assert run.failures() == {}  # it was said once already


def test_what_is_needed_is_computed_though_nobody_asks_for_it(job: Run) -> None:
    assert len(engine.measure(job, [total], jobs=1).frame(rows)) == RANKS


def test_a_rank_is_read_once(job: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    read, original = [], torch_trace.read

    def spy(path: Path) -> Any:
        read.append(path.name)
        return original(path)

    monkeypatch.setattr(torch_trace, "read", spy)
    engine.measure(job, [step_means, breakdown, device_time, rows], jobs=1)
    assert sorted(read) == [f"rank{r}.json.gz" for r in range(RANKS)]


def test_what_is_decoded_already_is_read_last(job: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    read, stopped, original = [], [], torch_trace.read

    def spy(path: Path) -> Any:
        read.append(path.name)
        return original(path)

    monkeypatch.setattr(torch_trace, "read", spy)
    monkeypatch.setattr(prefetch, "is_begun", lambda path: path.name in ("rank0.json.gz", "rank2.json.gz"))
    monkeypatch.setattr(prefetch, "stop", lambda: stopped.append(len(read)))
    engine.measure(job, [rows], jobs=1)
    assert set(read[:2]) == {"rank1.json.gz", "rank3.json.gz"}
    assert stopped == [0]


def test_foreign_traces_of_which_none_can_be_read_are_refused_and_a_recorded_run_is_not(tmp_path: Path) -> None:
    ranks = tuple(Rank(r, {TRACE: tmp_path / f"{r}.json"}) for r in range(2))
    with pytest.raises(DlprofError, match=r"none of 2 traces can be read: .*0\.json: no such file"):
        engine.measure(Run(tmp_path, ranks), [rows], jobs=1)
    run = engine.measure(Run(tmp_path, ranks, recorded=True), [rows], jobs=1)
    assert run.ranks == (0, 1)


def test_a_run_of_no_ranks_is_measured(tmp_path: Path) -> None:
    run = engine.measure(Run(tmp_path, (), recorded=True), [rows, total], jobs=1)
    with pytest.raises(NotMeasured):
        run.frame(rows)
    with pytest.raises(NotMeasured):
        run.frame(total)


def test_a_caller_with_threads_gets_processes_that_share_none_of_them(job: Run) -> None:
    # Forking a process that has threads may copy a lock that nobody will ever release: fresh interpreters then.
    idle = threading.Event()
    other = threading.Thread(target=idle.wait)
    other.start()
    try:
        frame = engine.measure(job, [device_time], jobs=2).frame(device_time)
    finally:
        idle.set()
        other.join()
    assert frame.equals(engine.measure(job, [device_time], jobs=1).frame(device_time))


def test_a_rank_leaves_no_tables_behind(job: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a measure raises holds its rank by its traceback: without a collection it must be gone all the same."""
    seen: list[weakref.ref[RankData]] = []

    def read(rank: Rank) -> RankData:
        data = RankData(rank)
        seen.append(weakref.ref(data))
        return data

    monkeypatch.setattr(engine_run, "RankData", read)
    gc.disable()
    try:
        answer = engine_run.measure_rank(job.ranks[0], (rows, silent, broken))
        assert isinstance(answer.answers["silent"], NotMeasured)
        assert [ref() for ref in seen] == [None]
    finally:
        gc.enable()


def test_a_rank_that_killed_its_process_is_not_kept(job: Run, tmp_path: Path) -> None:
    """A second time there may be memory for it."""
    store = open_store(job, tmp_path)
    store.make()
    for backend in (None, engine_run.processes):
        answers = engine.answers_of(job, [rows, deadly], jobs=1, store=store, backend=backend)
        assert "killed its process" in answers[1].warnings[0]
        assert sorted(store.read(job.ranks, engine_run.travelling([rows, deadly])).answers) == [0, 2, 3]


def test_only_what_is_not_known_is_read(job: Run, tmp_path: Path) -> None:
    store = open_store(job, tmp_path)
    store.make()
    some = replace(job, ranks=job.ranks[:3])
    first = engine.measure(some, [rows], jobs=2, store=store).frame(rows)
    seen: list[Done] = []
    second = engine.measure(job, [rows], jobs=1, store=store, progress=seen.append).frame(rows)
    assert second["process"].to_list()[:3] == first["process"].to_list()
    assert second["process"].to_list()[3] not in first["process"].to_list()
    assert [(done.ranks, done.known_ranks) for done in seen] == [(3, 3), (4, 3)]
    assert {done.known_bytes for done in seen} == {seen[0].bytes}


def test_what_is_not_kept_is_left_out_where_that_is_asked_for(job: Run, tmp_path: Path) -> None:
    store = open_store(job, tmp_path)
    store.make()
    some = replace(job, ranks=job.ranks[1:])
    engine.measure(some, [rows], jobs=1, store=store, backend=engine_run.serial)
    run = engine.measure(job, [rows], store=store, only_kept=True)
    assert run.ranks == (1, 2, 3)
    assert run.run.warnings == ("1 of 4 ranks was read by no shard and is left out: 0",)
    with pytest.raises(DlprofError, match="no rank of it was read by a shard"):
        engine.measure(job, [rows], only_kept=True)


def test_what_also_is_asked_for_is_never_kept(job: Run, tmp_path: Path) -> None:
    store = open_store(job, tmp_path)
    store.make()

    def also(data: RankData) -> pd.DataFrame:
        return pd.DataFrame({"mine": [data.index]})

    engine.measure(job, [rows], store=store, backend=engine_run.serial)
    run = engine.measure(job, [rows], store=store, backend=engine_run.serial, also=also)
    assert run.frame(engine.ALSO)["mine"].to_list() == [0, 1, 2, 3]
    assert len(store.read(job.ranks, [rows]).answers) == RANKS


@pytest.mark.parametrize("jobs", [1, 2])
def test_what_is_left_when_the_time_for_reading_is_up_is_named(
    job: Run, jobs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MOST_SECONDS", 0)
    measured = engine.measure(job, [rows], jobs=jobs)
    read = set(measured.frame(rows)["rank"])
    left = sorted(set(range(RANKS)) - read)
    assert read
    assert measured.run.warnings[-1] == f"not read within 0 s: ranks {listed(left)} (--no-limits reads all)"
    monkeypatch.setenv(limits.NO_LIMITS, "1")
    assert set(engine.measure(job, [rows], jobs=jobs).frame(rows)["rank"]) == set(range(RANKS))
