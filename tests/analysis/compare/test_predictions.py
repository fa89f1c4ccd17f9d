"""What A predicted for the changes of B, checked against what B measured."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from dlprof.analysis.compare.comparison import compare
from dlprof.analysis.compare.predictions import proposals
from dlprof.analysis.estimate import change
from dlprof.result import Change, Fact, Forecast, Together
from tests.fixtures.comparisons import ADVICE, WORKERS, clear, found, run
from tests.fixtures.results import MS


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


def test_a_saving_of_another_change_is_no_prediction_for_the_workers() -> None:
    # Samples that cost nothing would give 65 ms, three workers 20.
    advice = (change("make a sample cheaper"), ADVICE)
    forecasts = (Forecast("num_workers", "3", 80 * MS),)
    a = run(100, found("input_wait", 65, *advice, forecasts=forecasts), facts=WORKERS[:1])
    prediction = compare(a, run(80, clear("input_wait"), facts=WORKERS[2:])).prediction
    assert prediction is not None
    assert (prediction.least_ns, prediction.most_ns, prediction.verdict) == (80 * MS, 80 * MS, "as_predicted")
    # For two there is no forecast.
    assert compare(a, run(80, clear("input_wait"), facts=WORKERS[1:2])).prediction is None


def test_two_findings_that_forecast_one_change_predict_it_once() -> None:
    forecasts = (Forecast("num_workers", "3", 80 * MS),)
    both = (found(name, 20, ADVICE, forecasts=forecasts) for name in ("input_wait", "needless_workers"))
    prediction = compare(run(100, *both, facts=WORKERS[:1]), run(80, facts=WORKERS[2:])).prediction
    assert prediction is not None
    assert (prediction.least_ns, prediction.most_ns) == (80 * MS, 80 * MS)


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
