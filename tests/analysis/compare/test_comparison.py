"""Two results with known differences: what is significant, what is noise, what is not compared."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace

from dlprof.analysis.compare.comparison import compare, to_json
from dlprof.result import Exchange, Fact, ForeignLoad, Outcome, Window, Work
from tests.fixtures.comparisons import WORKERS, clear, found, run, step_of
from tests.fixtures.results import MS


def test_parts_are_compared_as_means_and_by_rank() -> None:
    c = compare(run(100, wait=40, ranks=2), run(70, wait=10, ranks=2))
    assert {d.name: (d.ns, d.verdict) for d in c.time} == {
        "computation": (0, "noise"),
        "input_wait": (pytest.approx(-30 * MS), "faster"),
    }
    assert [rank for rank, _ in c.time_by_rank] == [0, 1]
    assert [d.verdict for d in c.ranks] == ["faster", "faster"]
    assert c.not_compared == ()


def test_single_steps_are_compared_by_their_quantiles() -> None:
    a, b = run(100, ranks=2), run(100, ranks=2)
    a = replace(a, steps=tuple(replace(s, quantiles_ns=(90 * MS, 95 * MS, 110 * MS, 300 * MS)) for s in a.steps))
    b = replace(b, steps=tuple(replace(s, quantiles_ns=(90 * MS, 95 * MS, 150 * MS, 400 * MS)) for s in b.steps))
    told = {d.name: (d.ns, d.verdict) for d in compare(a, b).quantiles}
    assert told == {
        "5 %": (0, "noise"),
        "50 %": (0, "noise"),
        "95 %": (40 * MS, "unknown"),
        "100 %": (100 * MS, "unknown"),
    }
    assert compare(a, run(100)).quantiles == ()


def test_a_part_that_only_withe_run_has_is_compared_with_none() -> None:
    (_, wait) = compare(run(100), run(140, wait=40)).time
    assert (wait.a_ns, wait.b_ns, wait.verdict) == (0, 40 * MS, "slower")


def test_what_became_of_each_finding() -> None:
    a = run(100, found("gone", 20), found("less", 30), found("same", 10), found("unknown", 5), clear("new"))
    b = run(
        90, found("new", 4), found("less", 9), found("same", 10.3), clear("gone"),
        Outcome("unknown", "not_measured", "Untold", why="no trace"),
    )  # fmt: skip
    states = {f.id: (f.state, f.why) for f in compare(a, b).findings}
    assert states == {
        "less": ("less", ""),
        "gone": ("gone", "B: nothing of it"),
        "same": ("same", ""),
        "unknown": ("unknown", "B: no trace"),
        "new": ("new", "A: nothing of it"),
    }


def test_what_falls_below_the_threshold_is_not_gone_for_that() -> None:
    def became(a: Outcome, b: Outcome) -> tuple[str, float | None, float | None]:
        (change,) = compare(run(100, a), run(100, b)).findings
        return change.state, change.a_ns, change.b_ns

    assert became(found("wait", 5.1), clear("wait", 4.9)) == ("same", 5.1 * MS, 4.9 * MS)
    assert became(clear("wait", 4.9), found("wait", 5.1))[0] == "same"
    assert became(found("wait", 30), clear("wait", 4)) == ("less", 30 * MS, 4 * MS)
    assert became(clear("wait", 4), found("wait", 30))[0] == "more"
    assert became(found("wait", 30), clear("wait", 0.5))[0] == "gone"
    assert became(clear("wait", 0.5), found("wait", 30))[0] == "new"
    # A result of format 1 does not tell what is left.
    assert became(found("wait", 5.1), clear("wait")) == ("gone", 5.1 * MS, None)


def test_a_risk_is_there_or_gone() -> None:
    risk, none = found("full", 0, scope="risk"), clear("full")
    states = [
        compare(run(100, a), run(100, b)).findings[0].state for a, b in ((risk, risk), (risk, none), (none, risk))
    ]
    assert states == ["same", "gone", "new"]


def test_operators_and_kernels_by_what_they_changed() -> None:
    a = run(100, work=(Work("operator", "mm", 2, 50 * MS, MS), Work("operator", "relu", 4, 5 * MS, MS)))
    b = run(80, work=(Work("operator", "mm", 2, 29 * MS, MS), Work("operator", "gelu", 4, 6 * MS, MS)))
    rows = {w.time.name: (w.time.ns, w.time.verdict, w.a_calls, w.b_calls) for w in compare(a, b).operators}
    assert list(rows) == ["mm", "gelu", "relu"]
    assert rows["mm"] == (-21 * MS, "faster", 2, 2)
    # Of what a run does not have, no noise: only that of the other counts, and none is told.
    assert rows["gelu"] == (6 * MS, "slower", None, 4)
    assert rows["relu"] == (-5 * MS, "faster", 4, None)
    assert compare(a, b).kernels == ()


def test_collectives_have_no_noise_that_is_known() -> None:
    a = run(100, exchanges=(Exchange("all_reduce", 2, "below 1 MiB", 3, 10 * MS, 5 * MS),))
    b = run(100, exchanges=(Exchange("all_reduce", 2, "below 1 MiB", 3, 30 * MS, 5 * MS),))
    (row,) = compare(a, b).exchanges
    assert (row.time.ns, row.time.verdict) == (20 * MS, "unknown")
    assert row.wait is not None
    assert row.wait.verdict == "noise"


def test_steps_that_are_not_there_are_not_compared() -> None:
    c = compare(replace(run(100), window=None), run(100, wait=20))
    assert (c.step, c.time, c.ranks, c.prediction) == (None, (), (), None)
    assert c.not_compared == ("steps and their parts: no steady step was recorded in A",)
    whole = replace(run(100), window=Window(1, "trace", 100 * MS, unit="trace"))
    assert compare(run(100), whole).step is None
    assert "B has no step markers" in compare(run(100), whole).not_compared[0]


def test_another_number_of_ranks_leaves_the_means() -> None:
    c = compare(run(100, found("one", 30), wait=20, ranks=2), run(60, clear("one"), wait=5, ranks=4))
    assert (c.ranks, c.time_by_rank, c.prediction) == ((), (), None)
    assert "A has 2 ranks and B 4" in c.not_compared[0]
    assert step_of(c).verdict == "faster"
    assert c.time


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        (("train.py", "--data", "…"), ("train.py", "--data", "…"), True),
        (("train.py", "--tag=…"), ("train.py", "--data", "…"), True),
        (("train.py", "--data", "…"), ("train.py",), False),  # which is a difference
        (("train.py",), ("train.py",), False),
    ],
)
def test_values_that_were_not_recorded_may_differ(a: tuple[str, ...], b: tuple[str, ...], said: bool) -> None:
    one, other = (replace(run(100), run=replace(run(100).run, command=command)) for command in (a, b))
    assert any("(--keep-arguments records it)" in doubt for doubt in compare(one, other).doubts) == said


def test_doubts_are_listed() -> None:
    a = run(100, noise=None, facts=(Fact("Loader", "batch size", "32"),))
    b = replace(run(100, facts=(Fact("Loader", "batch size", "64"),)), window=Window(3, "trace", 100 * MS))
    said = " ".join(compare(a, b).doubts)
    assert "batch size is 32 in A and 64 in B" in said
    assert "the profiler slows" in said
    assert "the noise" in said


def test_the_same_run_twice_differs_in_nothing() -> None:
    a = run(100, found("one", 30), wait=20, work=(Work("operator", "mm", 2, 50 * MS, MS),), facts=WORKERS[:1])
    c = compare(a, a)
    assert {d.verdict for d in (step_of(c), *c.time, *c.ranks, *(w.time for w in c.operators))} == {"noise"}
    assert [f.state for f in c.findings] == ["same"]
    assert (c.settings, c.measured, c.prediction, c.doubts, c.not_compared) == ((), (), None, (), ())


def test_json_holds_all_of_it() -> None:
    a = run(100, found("one", 30), wait=20, work=(Work("operator", "mm", 2, 50 * MS, MS),), facts=WORKERS[:1])
    data = json.loads(json.dumps(to_json(compare(a, run(70, clear("one"), facts=WORKERS[1:2]))), allow_nan=False))
    assert data["format"] == 2
    assert data["step"]["verdict"] == "faster"
    assert data["step"]["ns"] == -30 * MS
    assert data["prediction"]["verdict"] == "as_predicted"
    assert {d["name"] for d in data["time"]} == {"computation", "input_wait"}
    assert (data["a"]["window"]["step_ns"], data["b"]["window"]["step_ns"]) == (100 * MS, 70 * MS)


def test_a_run_beside_other_programs_is_a_doubt() -> None:
    a, b = run(100), run(70)
    load = ForeignLoad("node-1", cores=8.0, used=8.0, foreign=2.5, waited=0.3, disturbs=True)
    (doubt,) = set(compare(a, replace(b, foreign_load=load)).doubts) - set(compare(a, b).doubts)
    assert doubt.startswith("in B programs outside the job used 2.50 of 8 cores")
    calm = replace(b, foreign_load=replace(load, disturbs=False))
    assert compare(a, calm).doubts == compare(a, b).doubts
