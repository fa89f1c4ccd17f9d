"""What was measured of all ranks: in order, each once, and what breaks costs only what needs it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis import engine
from dlprof.analysis.engine import MeasureFailed, RankData
from dlprof.analysis.engine import ranks as engine_ranks
from dlprof.analysis.timeline.device import device_time
from dlprof.errors import DoesNotApply, NotMeasured
from dlprof.read import limits
from dlprof.read.kineto import torch_trace
from dlprof.read.run import Rank, Run, open_run
from tests.fixtures import traces
from tests.fixtures.measures import (
    CALLS,
    RANKS,
    broken,
    broken_on_two,
    here_unknown,
    mute,
    nowhere,
    of_broken,
    rows,
    silent,
    total,
)


def test_a_frame_holds_all_ranks_in_order(job: Run) -> None:
    frame = engine.measure(job, [rows], jobs=2).frame(rows)
    assert frame["rank"].to_list() == list(range(RANKS))
    assert frame["spans"].is_monotonic_increasing


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


def test_it_does_not_apply_only_where_it_applies_to_no_rank(job: Run) -> None:
    run = engine.measure(job, [nowhere, here_unknown], jobs=2)
    with pytest.raises(DoesNotApply, match=r"^rank 0 has none$"):
        run.frame(nowhere)
    with pytest.raises(NotMeasured, match=r"^rank 2 cannot say$") as raised:
        run.frame(here_unknown)
    assert type(raised.value) is NotMeasured


def test_a_measure_across_ranks_is_computed_once(job: Run) -> None:
    run = engine.measure(job, [total, total], jobs=1)
    CALLS.clear()
    assert run.frame(total)["spans"].item() == run.frame(rows)["spans"].sum()
    run.frame(total)
    assert len(CALLS) == 1


def test_what_nobody_asked_for_was_not_measured(job: Run) -> None:
    with pytest.raises(NotMeasured):
        engine.measure(job, [rows], jobs=1).frame(device_time)


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


def test_the_same_question_is_answered_once_even_if_it_fails(job: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    rank, asked = RankData(job.ranks[0]), []

    def fails(*_: object) -> None:
        asked.append(1)
        raise NotMeasured("no")

    monkeypatch.setattr(engine_ranks, "call_with", fails)
    for _ in range(2):
        with pytest.raises(NotMeasured, match="no"):
            rank.once(silent)
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("window", "why"),
    [
        ({"state": "off"}, "recorded without a trace"),
        ({"state": "yielded"}, "the script runs torch.profiler itself"),
        ({"state": "waiting", "skip": 10, "warmup": 2, "active": 5}, "before the trace window of step 17"),
        ({}, "no torch-profiler trace of this rank"),
    ],
)
def test_a_missing_trace_says_why(window: Mapping[str, Any], why: str) -> None:
    with pytest.raises(NotMeasured, match=why):
        RankData(Rank(0, facts={"window": window})).table("spans")


def test_what_claims_to_be_a_huge_job_is_not_believed(tmp_path: Path) -> None:
    traces.write(tmp_path / "rank0.json", traces.training(world_size=limits.MOST_RANKS + 1))
    run = engine.measure(open_run(tmp_path), [rows], jobs=1)
    assert (run.world_size, run.missing_ranks) == (1, ())
    assert run.trace_facts[0].get("world_size") is None
    assert "a world size of 1,048,577 is more than any job has" in str(run.warnings)


def test_of_very_many_threads_those_with_the_most_spans_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = traces.training(world_size=1)
    lanes = len(set(torch_trace.read(traces.write(tmp_path / "few.json", made)).tables["spans"]["lane"]))
    made["traceEvents"] += [traces.op("aten::add", 5_000 * n, 10, tid=100_000 + n) for n in range(5_000)]
    rank = Rank(0, {"torch_trace": traces.write(tmp_path / "rank0.json", made)})
    data = RankData(rank)
    spans = data.table("spans")
    assert len(spans["lane"].cat.categories) == limits.MOST_LANES
    assert (spans["name"] == "sm90_gemm").sum() == 3
    assert spans["start_ns"].is_monotonic_increasing
    assert data.warnings == [
        f"rank0.json: holds {5_000 + lanes:,} threads and streams: those 1,000 with the most spans are used"
        " (--no-limits uses all)"
    ]
    monkeypatch.setenv(limits.NO_LIMITS, "1")
    assert len(RankData(rank).table("spans")["lane"].cat.categories) == 5_000 + lanes


def test_where_there_is_a_rank_there_are_those_before_it(tmp_path: Path) -> None:
    made = traces.training(rank=2)
    del made["distributedInfo"]["world_size"]
    traces.write(tmp_path / "trace.json", made)
    run = engine.measure(open_run(tmp_path), [rows], jobs=1)
    assert (run.ranks, run.world_size, run.missing_ranks) == ((2,), 3, (0, 1))
