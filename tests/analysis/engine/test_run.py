"""Ranks are read once, here or in other processes; what is known of all is in order, and what breaks costs little."""

from __future__ import annotations

import gc
import os
import pickle
import threading
import weakref
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import dlprof.analysis.step.breakdown  # noqa: F401 - whose name is taken
from dlprof import schema
from dlprof.analysis import engine
from dlprof.analysis.engine import (
    JOB,
    Done,
    Job,
    Maybe,
    MeasureFailed,
    RankData,
    across_ranks,
    by_rank,
    maybe,
    needs,
    open_store,
    per_rank,
)
from dlprof.analysis.engine.ranks import Packed, RankAnswer, concatenated, packed
from dlprof.analysis.engine.run import PROCESS_BYTES, USED, at_once, measure_rank, processes, serial, travelling
from dlprof.analysis.estimate import Estimate, Rule
from dlprof.analysis.step.breakdown import breakdown
from dlprof.analysis.step.savings import own_time
from dlprof.analysis.timeline.device import device_time
from dlprof.analysis.timeline.steps import step_means, timing
from dlprof.errors import DlprofError, DoesNotApply, NotMeasured
from dlprof.read import limits
from dlprof.read.kineto import prefetch, torch_trace
from dlprof.read.kineto.split import free_bytes
from dlprof.read.run import TRACE, Rank, Run, open_run
from dlprof.units import listed
from tests.fixtures import traces
from tests.fixtures.measures import (
    CALLS,
    RANKS,
    broken,
    broken_on_two,
    deadly,
    here_unknown,
    mute,
    nowhere,
    of_broken,
    rows,
    silent,
    total,
)

SPANS_OF: list[weakref.ref[pd.DataFrame]] = []


@per_rank
def holding(spans: pd.DataFrame = needs(schema.SPANS)) -> pd.DataFrame:
    """Raise what holds the rank's tables by its traceback."""
    SPANS_OF.append(weakref.ref(spans))
    raise NotMeasured("no")


def test_serial_and_processes_give_the_same_in_order(job: Run) -> None:
    wanted = [step_means, breakdown, device_time, own_time]
    one, two = engine.measure(job, [*wanted, rows], jobs=1), engine.measure(job, [*wanted, rows], jobs=2)
    for measure in wanted:
        pd.testing.assert_frame_equal(one.frame(measure), two.frame(measure))
    assert (one.ranks, one.facts, one.trace_facts) == (two.ranks, two.facts, two.trace_facts)
    assert one.warnings == two.warnings
    frame = two.frame(rows)
    assert frame["rank"].to_list() == list(range(RANKS))
    assert frame["spans"].is_monotonic_increasing
    assert by_rank(frame, "spans") == dict(enumerate(frame["spans"]))
    assert os.getpid() not in set(frame["process"])
    assert set(one.frame(rows)["process"]) == {os.getpid()}


def test_cores_ranks_and_memory_bound_the_processes(job: Run, tmp_path: Path) -> None:
    assert [at_once(job.ranks, jobs) for jobs in (1, 2, 100)] == [1, 2, RANKS]
    assert 1 <= at_once(job.ranks * 100) <= (os.cpu_count() or 1)
    free = free_bytes()
    assert free is not None
    with (tmp_path / "0.json").open("wb") as file:
        file.truncate(int(free * USED / 2.5) - PROCESS_BYTES)
    large = (*job.ranks, Rank(9, {TRACE: tmp_path / "0.json"}))
    assert at_once(large, 5) == 2
    with (tmp_path / "0.json").open("wb") as file:
        file.truncate(free)
    assert at_once(large, 5) == 1


def test_progress_counts_the_ranks(job: Run) -> None:
    seen: list[Done] = []
    engine.measure(job, [rows], jobs=1, progress=seen.append)
    assert [(done.ranks, done.of_ranks) for done in seen] == [(n, RANKS) for n in range(RANKS + 1)]
    assert (seen[0].files, seen[0].bytes) == (0, 0)
    sizes = [p.stat().st_size for r in job.ranks for p in r.files.values()]
    assert (seen[-1].files, seen[-1].of_files, seen[-1].bytes) == (len(sizes), len(sizes), sum(sizes))
    assert all(one.bytes < other.bytes for one, other in pairwise(seen))


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_measure_that_breaks_or_says_nothing_costs_only_those_that_need_it(job: Run, jobs: int) -> None:
    wanted = [rows, broken, broken_on_two, of_broken, total, mute, silent, nowhere, here_unknown]
    run = engine.measure(job, wanted, jobs)
    assert len(run.frame(rows)) == RANKS
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
    assert run.frame(silent)["rank"].to_list() == [3]
    assert run.lacking(silent) == {r: f"rank {r} cannot say" for r in range(3)}
    # It does not apply only where it applies to no rank.
    kinds = {mute: (NotMeasured, "rank 0 cannot say"), here_unknown: (NotMeasured, "rank 2 cannot say")}
    for measure, (kind, why) in {**kinds, nowhere: (DoesNotApply, "rank 0 has none")}.items():
        with pytest.raises(NotMeasured, match=f"^{why}$") as raised:
            run.frame(measure)
        assert type(raised.value) is kind
    with pytest.raises(NotMeasured):
        run.frame(device_time)  # nobody asked for it
    CALLS.clear()
    run = engine.measure(job, [total, total], jobs)
    for _ in range(2):
        assert run.frame(total)["spans"].item() == run.frame(rows)["spans"].sum()
    assert len(CALLS) == 1


@pytest.mark.long
def test_a_process_that_is_killed_loses_only_its_rank_and_that_is_not_kept(job: Run, tmp_path: Path) -> None:
    """A second time there may be memory for it."""
    run = engine.measure(job, [rows, deadly], jobs=2)
    assert run.ranks == tuple(range(RANKS))
    assert [run.frame(m)["rank"].to_list() for m in (rows, deadly)] == [[0, 2, 3]] * 2
    (why,) = run.warnings[1]
    assert "rank1.json.gz killed its process" in why
    assert (run.lacking(rows), run.failures()) == ({1: why}, {})  # it was said once already
    store = open_store(job, tmp_path)
    store.make()
    for backend in (None, processes):
        answers = engine.answers_of(job, [rows, deadly], jobs=1, store=store, backend=backend)
        assert "killed its process" in answers[1].warnings[0]
        assert sorted(store.read(job.ranks, travelling([rows, deadly])).answers) == [0, 2, 3]


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


def test_what_is_decoded_already_is_read_last(job: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "is_begun", lambda path: path.name in ("rank0.json.gz", "rank2.json.gz"))
    assert set(list(engine.answers_of(job, [rows], jobs=1))[2:]) == {0, 2}


def test_foreign_traces_of_which_none_can_be_read_are_refused_and_a_recorded_run_is_not(tmp_path: Path) -> None:
    ranks = tuple(Rank(r, {TRACE: tmp_path / f"{r}.json"}) for r in range(2))
    with pytest.raises(DlprofError, match=r"none of 2 traces can be read: .*0\.json: no such file"):
        engine.measure(Run(tmp_path, ranks), [rows], jobs=1)
    assert engine.measure(Run(tmp_path, ranks, recorded=True), [rows], jobs=1).ranks == (0, 1)
    empty = engine.measure(Run(tmp_path, (), recorded=True), [rows, total], jobs=1)
    for measure in (rows, total):
        with pytest.raises(NotMeasured):
            empty.frame(measure)


@pytest.mark.long
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


def test_a_rank_asks_once_and_leaves_no_tables_behind(job: Run) -> None:
    """What a measure raises holds its rank by its traceback: without a collection it must be gone all the same."""
    rank = RankData(job.ranks[0])
    SPANS_OF.clear()
    for _ in range(2):
        with pytest.raises(NotMeasured, match="no"):
            rank.once(holding)
    assert len(SPANS_OF) == 1
    gc.disable()
    try:
        answer = measure_rank(job.ranks[0], (rows, holding, broken))
        assert isinstance(answer.answers["holding"], NotMeasured)
        assert [SPANS_OF[1]()] == [None]
    finally:
        gc.enable()


def test_only_what_is_not_known_is_read(job: Run, tmp_path: Path) -> None:
    store = open_store(job, tmp_path)
    store.make()
    first = engine.measure(replace(job, ranks=job.ranks[1:]), [rows], jobs=2, store=store).frame(rows)
    only = engine.measure(job, [rows], store=store, only_kept=True)
    assert (only.ranks, only.run.warnings) == ((1, 2, 3), ("1 of 4 ranks was read by no shard and is left out: 0",))
    with pytest.raises(DlprofError, match="no rank of it was read by a shard"):
        engine.measure(job, [rows], only_kept=True)

    def also(data: RankData) -> pd.DataFrame:
        return pd.DataFrame({"mine": [data.index]})

    # What `also` is asked for is never kept.
    run = engine.measure(job, [rows], store=store, backend=serial, also=also)
    assert run.frame(engine.ALSO)["mine"].to_list() == [0, 1, 2, 3]
    assert len(store.read(job.ranks, [rows]).answers) == 3
    seen: list[Done] = []
    second = engine.measure(job, [rows], jobs=1, store=store, progress=seen.append).frame(rows)
    assert second["process"].to_list()[1:] == first["process"].to_list()
    assert second["process"].to_list()[0] not in first["process"].to_list()
    assert [(done.ranks, done.known_ranks) for done in seen] == [(3, 3), (4, 3)]
    assert {done.known_bytes for done in seen} == {seen[0].bytes}


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


@pytest.mark.parametrize(
    ("window", "why"),
    [
        ({"state": "not_asked", "asked": "0,last"}, r"asked for no trace \(--ranks 0,last\)"),
        ({"state": "off"}, "recorded without a trace"),
        ({"state": "nsys"}, "recorded under nsys"),
        ({"state": "yielded"}, "the script runs torch.profiler itself"),
        ({"state": "waiting", "skip": 10, "warmup": 2, "active": 5}, "before the trace window of step 17"),
        ({}, "no torch-profiler trace of this rank"),
    ],
)
def test_a_missing_trace_says_why(window: Mapping[str, Any], why: str) -> None:
    with pytest.raises(NotMeasured, match=why):
        RankData(Rank(0, facts={"window": window})).table("spans")


def test_how_many_ranks_there_are(tmp_path: Path) -> None:
    (tmp_path / "huge").mkdir()
    traces.write(tmp_path / "huge/rank0.json", traces.training(world_size=limits.MOST_RANKS + 1))
    run = engine.measure(open_run(tmp_path / "huge"), [rows], jobs=1)
    assert (run.world_size, run.missing_ranks, run.trace_facts[0].get("world_size")) == (1, (), None)
    assert "a world size of 1,048,577 is more than any job has" in str(run.warnings)
    # Where there is a rank, there are those before it.
    made = traces.training(rank=2)
    del made["distributedInfo"]["world_size"]
    traces.write(tmp_path / "trace.json", made)
    run = engine.measure(open_run(tmp_path / "trace.json"), [rows], jobs=1)
    assert (run.ranks, run.world_size, run.missing_ranks) == ((2,), 3, (0, 1))


def test_of_very_many_threads_those_with_the_most_spans_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = traces.training(world_size=1)
    lanes = len(set(torch_trace.read(traces.write(tmp_path / "few.json", made)).tables["spans"]["lane"]))
    made["traceEvents"] += [traces.op("aten::add", 5_000 * n, 10, tid=100_000 + n) for n in range(2_000)]
    rank = Rank(0, {"torch_trace": traces.write(tmp_path / "rank0.json", made)})
    data = RankData(rank)
    spans = data.table("spans")
    assert len(spans["lane"].cat.categories) == limits.MOST_LANES
    assert (spans["name"] == "sm90_gemm").sum() == 3
    assert spans["start_ns"].is_monotonic_increasing
    assert data.warnings == [
        f"rank0.json: holds {2_000 + lanes:,} threads and streams: those 1,000 with the most spans are used"
        " (--no-limits uses all)"
    ]
    monkeypatch.setenv(limits.NO_LIMITS, "1")
    assert len(RankData(rank).table("spans")["lane"].cat.categories) == 2_000 + lanes


def bare(means: pd.DataFrame) -> pd.DataFrame:
    return means


def of_a_process(timing: Any = needs(timing)) -> Any:
    return timing


def of_all(means: pd.DataFrame = needs(total)) -> pd.DataFrame:
    return means


def asks(means: pd.DataFrame) -> Estimate:
    raise AssertionError(len(means))


def taken() -> pd.DataFrame:
    return pd.DataFrame()


taken.__name__ = "breakdown"


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: across_ranks(bare), "'means' needs no measure"),
        (lambda: per_rank(bare), "'means' needs no measure"),
        (lambda: across_ranks(of_a_process), "'timing' is not known across ranks"),  # it does not travel
        (lambda: per_rank(of_all), "'total' is not known per rank"),
        (lambda: Rule("Some state", asks, asks), "'means' needs no measure"),  # type: ignore[arg-type]
        (lambda: per_rank(taken), "already is a measure 'breakdown'"),
    ],
)
def test_what_needs_nothing_known_or_has_a_taken_name_fails_where_it_is_defined(make: Any, why: str) -> None:
    with pytest.raises(TypeError, match=why):
        make()


def test_a_need_that_may_be_lacking_says_why_and_a_required_one_raises(job: Run) -> None:
    def known(
        rows: Maybe[pd.DataFrame] = maybe(rows),
        mute: Maybe[pd.DataFrame] = maybe(mute),
        broken: Maybe[pd.DataFrame] = maybe(broken),
        job: Job = needs(JOB),
    ) -> list[Any]:
        assert list(mute.lacking) == list(broken.lacking) == list(range(RANKS))
        assert type(job) is Job  # facts, and no frames that it did not name
        return [(bool(need), need.or_none() is None, need.why(), need.broke) for need in (rows, mute, broken)]

    def never(mute: pd.DataFrame = needs(mute)) -> None:
        raise AssertionError("it was called")

    run = engine.measure(job, [known, never], jobs=1)
    assert run.call(known) == [
        (True, False, "", False),
        (False, True, "rank 0 cannot say", False),
        (False, True, "KeyError: 'nothing'", True),
    ]
    with pytest.raises(NotMeasured, match="rank 0 cannot say"):
        run.call(never)


FRAMES = {
    "numbers and texts": [
        pd.DataFrame({"n": [1, 2], "x": [0.5, np.nan], "is": [True, False], "t": ["a", "b"]}),
        pd.DataFrame({"n": [3], "x": [1.5], "is": [True], "t": ["b"]}, index=[7]),
    ],
    "a text is missing": [
        pd.DataFrame({"t": pd.array(["a", None], dtype="str")}),
        pd.DataFrame({"t": pd.array([None, "c"], dtype="str")}),
    ],
    "no rows": [pd.DataFrame({"n": [1], "t": ["a"]}), pd.DataFrame({"n": [1], "t": ["a"]}).iloc[:0]],
    "other columns": [pd.DataFrame({"n": [1]}), pd.DataFrame({"n": [2], "m": [3]})],
    "other kinds": [pd.DataFrame({"n": [1]}), pd.DataFrame({"n": [2.5]})],
    "categories": [pd.DataFrame({"c": pd.Categorical(["a"])}), pd.DataFrame({"c": pd.Categorical(["b"])})],
    "objects": [pd.DataFrame({"o": [(1, 2)]}), pd.DataFrame({"o": [None]})],
    "some left out": [pd.DataFrame(np.arange(12).reshape(3, 4), columns=list("abcd"))[["d", "a"]]] * 2,
}


@pytest.mark.parametrize("frames", FRAMES.values(), ids=FRAMES.keys())
def test_frames_travel_as_arrays_and_are_together_what_they_were(frames: list[pd.DataFrame]) -> None:
    travelled = [pickle.loads(pickle.dumps(packed(frame))) for frame in frames]
    expected = pd.concat(frames, ignore_index=True)
    pd.testing.assert_frame_equal(concatenated(travelled), expected)
    pd.testing.assert_frame_equal(concatenated([travelled[0], *frames[1:]]), expected)


def test_an_answer_travels_packed_and_the_rest_as_it_is() -> None:
    frame = FRAMES["numbers and texts"][0]
    answer = RankAnswer({"a": frame, "b": None}, {"host": "x"}, {}, ("w",), ("t",))
    for _ in range(2):  # and once more, from there
        answer = pickle.loads(pickle.dumps(answer))
        assert isinstance(answer.answers["a"], Packed)
        pd.testing.assert_frame_equal(answer.answers["a"].frame(), frame)
    assert (answer.answers["b"], answer.facts, answer.warnings, answer.tables) == (None, {"host": "x"}, ("w",), ("t",))
    assert [pickle.loads(pickle.dumps(measure)) for measure in (rows, total)] == [rows, total]
