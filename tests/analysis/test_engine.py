"""Each rank is read once, in this process or another, and what breaks in it costs as little as it can."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from dlprof.analysis import engine
from dlprof.analysis.engine import Done, Job, Maybe, MeasureFailed, RankData, RankFacts, across_ranks, per_rank
from dlprof.analysis.estimate import Estimate, Rule
from dlprof.analysis.step.breakdown import breakdown
from dlprof.analysis.step.savings import own_time
from dlprof.analysis.timeline.device import device_time
from dlprof.analysis.timeline.steps import step_means
from dlprof.errors import DlprofError, NotMeasured
from dlprof.read.kineto import prefetch, torch_trace
from dlprof.read.run import TRACE, Rank, Run, open_run
from tests.fixtures import traces

RANKS = 4


@per_rank
def rows(spans: pd.DataFrame) -> pd.DataFrame:
    """Return how many spans the rank has, and in which process they were counted."""
    return pd.DataFrame({"spans": [len(spans)], "process": [os.getpid()]})


@per_rank
def broken_on_two(rank: RankFacts) -> pd.DataFrame:
    """Break on rank 2."""
    if rank.index == 2:
        raise ZeroDivisionError("on purpose")
    return pd.DataFrame({"fine": [1]})


@per_rank
def broken() -> pd.DataFrame:
    """Break everywhere."""
    raise KeyError("nothing")


@per_rank
def silent(rank: RankFacts) -> pd.DataFrame:
    """Say on all ranks but the last why nothing can be said."""
    if rank.index < RANKS - 1:
        raise NotMeasured(f"rank {rank.index} cannot say")
    return pd.DataFrame({"fine": [1]})


@per_rank
def mute(rank: RankFacts) -> pd.DataFrame:
    """Say nowhere anything."""
    raise NotMeasured(f"rank {rank.index} cannot say")


@per_rank
def deadly(rank: RankFacts) -> pd.DataFrame:
    """Kill the process that reads rank 1, as the kernel does where memory runs out."""
    if rank.index == 1:
        os._exit(9)
    return pd.DataFrame({"fine": [1]})


CALLS: list[int] = []


@across_ranks
def total(rows: pd.DataFrame) -> pd.DataFrame:
    """Add up the spans of all ranks."""
    CALLS.append(1)
    return pd.DataFrame({"spans": [rows["spans"].sum()]})


@across_ranks
def of_broken(broken: pd.DataFrame) -> pd.DataFrame:
    """Need what breaks."""
    return broken


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a run of four ranks, each with one step more than the one before."""
    folder = tmp_path_factory.mktemp("job")
    for r in range(RANKS):
        traces.write(folder / f"rank{r}.json.gz", traces.training(3 + r, rank=r, world_size=RANKS))
    return open_run(folder)


def test_serial_and_processes_give_the_same(job: Run) -> None:
    wanted = [step_means, breakdown, device_time, own_time]
    one, two = engine.measure(job, wanted, jobs=1), engine.measure(job, wanted, jobs=2)
    for measure in wanted:
        pd.testing.assert_frame_equal(one.frame(measure), two.frame(measure))
    assert (one.ranks, one.facts, one.trace_facts, one.warnings) == (
        two.ranks,
        two.facts,
        two.trace_facts,
        two.warnings,
    )
    assert set(one.frame(step_means)["rank"]) == set(range(RANKS))


def test_a_frame_holds_all_ranks_in_order(job: Run) -> None:
    frame = engine.measure(job, [rows], jobs=2).frame(rows)
    assert frame["rank"].to_list() == list(range(RANKS))
    assert frame["spans"].is_monotonic_increasing


def test_jobs_bounds_the_processes(job: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def spy(*args: Any) -> Iterator[Any]:
        asked.append(args[2])
        return engine.serial(*args)

    monkeypatch.setattr(engine, "processes", spy)
    monkeypatch.setattr(engine, "_cores", lambda: 3)
    assert set(engine.measure(job, [rows], jobs=1).frame(rows)["process"]) == {os.getpid()}
    assert asked == []
    for jobs in (2, 100, None):
        engine.measure(job, [rows], jobs=jobs)
    assert asked == [2, RANKS, 3]


def test_memory_bounds_the_processes(job: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rank, "unpacked_bytes", 1 << 60)
    monkeypatch.setattr(engine, "processes", lambda *_: pytest.fail("there is no room for two"))
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


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_measure_that_breaks_costs_only_those_that_need_it(job: Run, jobs: int) -> None:
    run = engine.measure(job, [rows, broken, broken_on_two, of_broken, total], jobs)
    assert len(run.frame(rows)) == RANKS
    assert len(run.frame(total)) == 1
    for measure in (broken, of_broken):
        with pytest.raises(MeasureFailed, match=r"^KeyError: 'nothing'$"):
            run.frame(measure)
    assert run.frame(broken_on_two)["rank"].to_list() == [0, 1, 3]
    assert run.lacking(broken_on_two) == {2: "ZeroDivisionError: on purpose"}
    assert run.failures() == {
        "broken: KeyError: 'nothing'": [0, 1, 2, 3],
        "broken_on_two: ZeroDivisionError: on purpose": [2],
        "of_broken: KeyError: 'nothing'": [],
    }


@pytest.mark.parametrize("jobs", [1, 2])
def test_what_could_not_be_said_travels(job: Run, jobs: int) -> None:
    run = engine.measure(job, [mute, silent], jobs)
    with pytest.raises(NotMeasured, match=r"^rank 0 cannot say$"):
        run.frame(mute)
    assert run.frame(silent)["rank"].to_list() == [3]
    assert run.lacking(silent) == {r: f"rank {r} cannot say" for r in range(3)}
    assert run.failures() == {}


def test_a_process_that_is_killed_loses_only_its_rank(job: Run) -> None:
    run = engine.measure(job, [rows, deadly], jobs=2)
    assert run.ranks == tuple(range(RANKS))
    assert run.frame(rows)["rank"].to_list() == [0, 2, 3]
    assert run.frame(deadly)["rank"].to_list() == [0, 2, 3]
    (why,) = run.warnings[1]
    assert "rank1.json.gz killed its process" in why
    assert run.lacking(rows) == {1: why}
    assert run.failures() == {}  # it was said once already


def test_a_measure_across_ranks_is_computed_once(job: Run) -> None:
    run = engine.measure(job, [total, total], jobs=1)
    CALLS.clear()
    assert run.frame(total)["spans"].item() == run.frame(rows)["spans"].sum()
    run.frame(total)
    assert len(CALLS) == 1


def test_a_parameter_that_names_nothing_fails_where_it_is_defined() -> None:
    def typo(step_meens: pd.DataFrame) -> pd.DataFrame:
        return step_meens

    def of_a_process(timing: Any) -> Any:
        return timing

    def asks(step_meens: pd.DataFrame) -> Estimate:
        raise AssertionError(len(step_meens))

    with pytest.raises(TypeError, match="step_meens"):
        across_ranks(typo)
    with pytest.raises(TypeError, match="step_meens"):
        per_rank(typo)
    with pytest.raises(TypeError, match="timing"):  # which does not travel
        across_ranks(of_a_process)
    with pytest.raises(TypeError, match="step_meens"):
        Rule("typo", "Some state", asks)


def test_two_measures_of_one_name_fail_where_the_second_is_defined() -> None:
    def breakdown() -> pd.DataFrame:
        return pd.DataFrame()

    def spans() -> pd.DataFrame:
        return pd.DataFrame()

    for taken in (breakdown, spans):
        with pytest.raises(TypeError, match=taken.__name__):
            per_rank(taken)


def test_a_need_that_may_be_lacking_says_why(job: Run) -> None:
    def known(rows: Maybe[pd.DataFrame], mute: Maybe[pd.DataFrame], broken: Maybe[pd.DataFrame]) -> list[Any]:
        assert silent_ranks(mute) == silent_ranks(broken) == list(range(RANKS))
        return [(bool(need), need.or_none() is None, need.why(), need.broke) for need in (rows, mute, broken)]

    def silent_ranks(need: Maybe[pd.DataFrame]) -> list[int]:
        return list(need.lacking)

    assert engine.measure(job, [known], jobs=1).call(known) == [
        (True, False, "", False),
        (False, True, "rank 0 cannot say", False),
        (False, True, "KeyError: 'nothing'", True),
    ]


def test_a_required_need_that_is_lacking_raises_before_the_function_is_called(job: Run) -> None:
    def never(mute: pd.DataFrame) -> None:
        raise AssertionError("it was called")

    with pytest.raises(NotMeasured, match="rank 0 cannot say"):
        engine.measure(job, [never], jobs=1).call(never)


def test_a_function_gets_facts_and_no_frames_that_it_did_not_name(job: Run) -> None:
    def facts(job: Job) -> bool:
        return hasattr(job, "frame") or hasattr(job, "call")

    assert not engine.measure(job, [facts], jobs=1).call(facts)


def test_what_is_needed_is_computed_though_nobody_asks_for_it(job: Run) -> None:
    assert len(engine.measure(job, [total], jobs=1).frame(rows)) == RANKS


def test_what_nobody_asked_for_was_not_measured(job: Run) -> None:
    with pytest.raises(NotMeasured):
        engine.measure(job, [rows], jobs=1).frame(device_time)


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


def test_a_reader_that_breaks_costs_only_its_file(job: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    original = torch_trace.read

    def breaking(path: Path) -> Any:
        if path.name.startswith("rank2"):
            raise ZeroDivisionError("on purpose")
        return original(path)

    monkeypatch.setattr(torch_trace, "read", breaking)
    run = engine.measure(job, [rows], jobs=1)
    assert run.frame(rows)["rank"].to_list() == [0, 1, 3]
    assert "dlprof failed to read it: ZeroDivisionError: on purpose" in run.warnings[2][0]


def test_the_same_question_is_answered_once_even_if_it_fails(job: Run) -> None:
    rank, asked = RankData(job.ranks[0]), []

    def fails(_: RankData) -> int:
        asked.append(1)
        raise NotMeasured("no")

    for _ in range(2):
        with pytest.raises(NotMeasured, match="no"):
            rank.once(fails)
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("window", "why"),
    [
        ({"state": "off"}, "recorded without a trace"),
        ({"state": "yielded"}, "the script runs torch.profiler itself"),
        ({"state": "waiting", "skip": 10, "warmup": 2, "active": 5}, "before the traced window of step 17"),
        ({}, "no torch-profiler trace of this rank"),
    ],
)
def test_a_missing_trace_says_why(window: Mapping[str, Any], why: str) -> None:
    with pytest.raises(NotMeasured, match=why):
        RankData(Rank(0, facts={"window": window})).table("spans")


def test_what_claims_to_be_a_huge_job_is_not_believed(tmp_path: Path) -> None:
    traces.write(tmp_path / "rank0.json", traces.training(world_size=engine.LARGEST_WORLD + 1))
    run = engine.measure(open_run(tmp_path), [rows], jobs=1)
    assert (run.world_size, run.missing_ranks) == (1, ())


def test_where_there_is_a_rank_there_are_those_before_it(tmp_path: Path) -> None:
    made = traces.training(rank=2)
    del made["distributedInfo"]["world_size"]
    traces.write(tmp_path / "trace.json", made)
    run = engine.measure(open_run(tmp_path), [rows], jobs=1)
    assert (run.ranks, run.world_size, run.missing_ranks) == ((2,), 3, (0, 1))


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


@pytest.mark.parametrize("measure", [rows, total], ids=lambda m: m.name)
def test_measures_travel_by_name(measure: engine.Measure[Any]) -> None:
    make, args = measure.__reduce__()
    travelled: Callable[..., Any] = make
    assert travelled(*args) is measure


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

    monkeypatch.setattr(engine, "RankData", read)
    gc.disable()
    try:
        answer = engine.measure_rank(job.ranks[0], (rows, silent, broken))
        assert isinstance(answer.answers["silent"], NotMeasured)
        assert [ref() for ref in seen] == [None]
    finally:
        gc.enable()
