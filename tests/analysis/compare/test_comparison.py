"""Two results with known differences: what counts, what is noise, what became of a prediction, what is not compared."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import replace

from dlprof.analysis.compare.comparison import Comparison, compare, to_json
from dlprof.analysis.compare.predictions import proposals
from dlprof.analysis.compare.significance import Difference
from dlprof.analysis.estimate import change
from dlprof.result import (
    Change,
    Exchange,
    Fact,
    Forecast,
    Outcome,
    RankCost,
    RankStep,
    Result,
    RunInfo,
    TimePart,
    Together,
    Window,
    Work,
)

MS = 1e6


def found(name: str, saving: float, *changes: Change, **said: Any) -> Outcome:
    share = saving / 100  # of the steps of most runs here
    return Outcome(name, "found", name.capitalize(), saving_ns=saving * MS, share=share, changes=changes, **said)


def clear(name: str, saving: float = 0.0) -> Outcome:
    share, by_rank = saving / 100, (RankCost(0, saving * MS),) if saving else ()
    said = {"saving_ns": saving * MS, "share": share, "by_rank": by_rank}
    return Outcome(name, "clear", name.capitalize(), summary="nothing of it", **said)  # type: ignore[arg-type]


def run(
    step: float,
    *outcomes: Outcome,
    noise: float | None = 0.5,
    facts: tuple[Fact, ...] = (),
    wait: float = 0.0,
    work: tuple[Work, ...] = (),
    ranks: int = 1,
    **said: Any,
) -> Result:
    """Return a result of so many ranks whose step takes so many ms, `wait` of them waiting for data."""
    noise_ns = None if noise is None else noise * MS
    parts = [("computation", step - wait), ("input_wait", wait)]
    return Result(
        run=RunInfo("run", ("python", "train.py"), ranks, tuple(range(ranks)), device="CPU"),
        window=Window(100, "steps", step * MS, noise_ns=noise_ns),
        time=tuple(TimePart(r, c, ms * MS, ms / step, 0.1 * MS) for r in range(ranks) for c, ms in parts if ms),
        steps=tuple(RankStep(r, 100, step * MS, noise_ns) for r in range(ranks)),
        outcomes=outcomes,
        facts=facts,
        work=work,
        **said,
    )


def step_of(c: Comparison) -> Difference:
    assert c.step is not None
    return c.step


@pytest.mark.parametrize(
    ("b", "noise", "verdict"),
    [
        (80.0, 0.5, "faster"),
        (120.0, 0.5, "slower"),
        (100.9, 0.1, "noise"),  # beyond the standard error, and below what two recordings differ by anyway
        (103.0, 2.0, "noise"),  # √8 × 2 = 5.7
        (110.0, 2.0, "slower"),
        (120.0, None, "unknown"),
    ],
)
def test_a_difference_counts_beyond_its_noise(b: float, noise: float | None, verdict: str) -> None:
    step = step_of(compare(run(100, noise=noise), run(b, noise=noise)))
    assert step.verdict == verdict
    assert step.ns == pytest.approx((b - 100) * MS)
    if noise is not None:
        assert step.noise_ns == pytest.approx(2**0.5 * noise * MS)


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


def test_a_part_that_only_one_run_has_is_compared_with_none() -> None:
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


def test_settings_that_differ_are_told_apart_from_what_was_measured() -> None:
    a = run(
        100, facts=(Fact("Loader", "num workers", "0"), Fact("Host", "cores in use", "1"), Fact("Job", "folder", "x"))
    )
    b = run(
        100, facts=(Fact("Loader", "num workers", "2"), Fact("Host", "cores in use", "2"), Fact("Job", "folder", "y"))
    )
    b = replace(b, run=replace(b.run, command=("python", "train.py", "--workers", "2")))
    c = compare(a, b)
    assert {(s.name, s.a, s.b) for s in c.settings} == {("num workers", "0", "2"), ("command", "", "--workers 2")}
    assert [s.name for s in c.measured] == ["cores in use"]


def test_a_setting_of_ddp_is_known_by_its_own_name() -> None:
    a, b = (
        run(100, o, facts=(Fact("Model", "ddp.find_unused_parameters", str(there)),))
        for o, there in (
            (found("unused_parameters", 3, change("no search", find_unused_parameters=(True, False))), True),
            (clear("x"), False),
        )
    )
    c = compare(a, b)
    assert [(s.name, s.a, s.b) for s in c.settings] == [("ddp.find_unused_parameters", "True", "False")]
    assert c.prediction is not None
    assert c.prediction.changed == ("find_unused_parameters True → False",)


def test_a_setting_that_took_one_bottleneck_away_owes_nothing_for_others() -> None:
    advice = change("no search", find_unused_parameters=(True, False))
    facts = (Fact("Model", "ddp.find_unused_parameters", "True"),)
    a = run(100, found("exposed_communication", 40, advice), found("unused_parameters", 5, advice), facts=facts)
    facts = (Fact("Model", "ddp.find_unused_parameters", "False"),)
    b = run(
        95,
        found("exposed_communication", 36, change("larger buckets", bucket_cap_mb=(25, 50))),
        clear("unused_parameters"),
        facts=facts,
    )
    prediction = compare(a, b).prediction
    assert prediction is not None
    assert prediction.findings == ("unused_parameters",)
    assert prediction.verdict == "as_predicted"


WORKERS = (
    Fact("Loader", "num workers", "0"),
    Fact("Loader", "num workers", "2"),
    Fact("Loader", "num workers", "3"),
)
ADVICE = change("`num_workers=2, persistent_workers=True`", num_workers=(0, 2), persistent_workers=(False, True))


def test_a_finding_names_the_settings_that_it_would_change() -> None:
    named = proposals(
        found("input_wait", 40, ADVICE, Change("`x=3`, in words alone"), change("later", later=(1, None)))
    )
    assert named == {"num_workers": "2", "persistent_workers": "True", "later": ""}


@pytest.mark.parametrize(
    ("measured", "kept", "reached"),
    [(61, "as_predicted", 39 / 39), (50, "better", 50 / 39), (80, "partly", 20 / 39), (100.5, "missed", -0.5 / 39)],
)
def test_a_prediction_is_held_against_what_was_measured(measured: float, kept: str, reached: float) -> None:
    a = run(100, found("input_wait", 39, ADVICE), facts=WORKERS[:1])
    prediction = compare(a, run(measured, clear("input_wait"), facts=WORKERS[1:2])).prediction
    assert prediction is not None
    assert (prediction.least_ns, prediction.most_ns) == (61 * MS, 61 * MS)
    assert (prediction.verdict, prediction.changed) == (kept, ("num_workers 0 → 2",))
    assert prediction.reached == pytest.approx(reached)


def test_the_forecast_for_the_value_that_was_chosen_is_the_prediction() -> None:
    forecasts = (Forecast("num_workers", "2", 61 * MS), Forecast("num_workers", "3", 58 * MS))
    a = run(100, found("input_wait", 39, ADVICE, forecasts=forecasts), facts=WORKERS[:1])
    prediction = compare(a, run(58, clear("input_wait"), facts=WORKERS[2:])).prediction
    assert prediction is not None
    assert prediction.most_ns == pytest.approx(58 * MS)
    assert prediction.basis == "input_wait, for num_workers=3"


def test_another_value_than_the_proposed_one_is_told() -> None:
    a = run(100, found("input_wait", 39, ADVICE), facts=WORKERS[:1])
    prediction = compare(a, run(90, found("input_wait", 25), facts=WORKERS[2:])).prediction
    assert prediction is not None
    assert prediction.basis == "input_wait, for num_workers=2, not what B has"


def test_savings_of_several_findings_overlap() -> None:
    a = run(100, found("one", 30), found("other", 20), found("stays", 10), together=Together(45 * MS, 0.45, 1 / 0.55))
    prediction = compare(a, run(60, clear("one"), clear("other"), found("stays", 10))).prediction
    assert prediction is not None
    assert prediction.findings == ("one", "other")
    assert (prediction.least_ns, prediction.most_ns) == (55 * MS, 70 * MS)
    assert prediction.verdict == "as_predicted"


def test_where_nothing_was_changed_nothing_was_predicted() -> None:
    a, b = run(100, found("one", 30)), run(70, found("one", 28))
    assert compare(a, b).prediction is None
    assert compare(run(100), run(50)).prediction is None


def test_steps_that_are_not_there_are_not_compared() -> None:
    c = compare(replace(run(100), window=None), run(100, wait=20))
    assert (c.step, c.time, c.ranks, c.prediction) == (None, (), (), None)
    assert c.not_compared == ("steps and their parts: no steady step was recorded in A",)
    whole = replace(run(100), window=Window(1, "trace", 100 * MS, unit="trace"))
    assert "nothing marks a step in B" in compare(run(100), whole).not_compared[0]


def test_another_number_of_ranks_leaves_the_means() -> None:
    c = compare(run(100, found("one", 30), wait=20, ranks=2), run(60, clear("one"), wait=5, ranks=4))
    assert (c.ranks, c.time_by_rank, c.prediction) == ((), (), None)
    assert "A has 2 of them and B 4" in c.not_compared[0]
    assert step_of(c).verdict == "faster"
    assert c.time


def test_another_device_is_a_doubt_and_no_test_of_a_prediction() -> None:
    a, b = run(100, found("one", 30)), run(50, clear("one"))
    c = compare(a, replace(b, run=replace(b.run, device="NVIDIA H200")))
    assert c.prediction is None
    assert "the devices differ (CPU and NVIDIA H200)" in c.doubts[0]


def test_a_step_of_other_work_is_no_test_of_a_prediction() -> None:
    a = run(100, found("one", 30, change("larger", batch_size=(32, 64))), facts=(Fact("Loader", "batch size", "32"),))
    c = compare(a, run(150, clear("one"), facts=(Fact("Loader", "batch size", "64"),)))
    assert c.prediction is None
    assert "different work" in c.doubts[0]


def test_doubts_are_told() -> None:
    a = run(100, noise=None, facts=(Fact("Loader", "batch size", "32"),))
    b = replace(run(100, facts=(Fact("Loader", "batch size", "64"),)), window=Window(3, "trace", 100 * MS))
    said = " ".join(compare(a, b).doubts)
    assert "batch size is 32 in A and 64 in B" in said
    assert "the profiler slows" in said
    assert "does not tell its noise" in said


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


def test_a_forecast_is_found_by_the_name_of_the_fact() -> None:
    advice = change("`n_microbatches=16` (is 4): the pipeline's step becomes 70 ms", n_microbatches=(4, 16))
    forecasts = (Forecast("microbatches", "8", 80 * MS), Forecast("microbatches", "16", 70 * MS))
    a = run(
        100, found("pipeline_bubble", 30, advice, forecasts=forecasts), facts=(Fact("Pipeline", "microbatches", "4"),)
    )
    prediction = compare(
        a, run(81, found("pipeline_bubble", 10), facts=(Fact("Pipeline", "microbatches", "8"),))
    ).prediction
    assert prediction is not None
    assert prediction.most_ns == pytest.approx(80 * MS)
    assert prediction.verdict == "as_predicted"
    assert prediction.changed == ("microbatches 4 → 8",)
