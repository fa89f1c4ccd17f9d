"""Every rule answers once, in one of five ways, and one that breaks costs only its own row."""

from __future__ import annotations

import json
import math
from dataclasses import replace as replace_rule
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from dlprof.analysis.diagnosis import diagnose, rule_named
from dlprof.analysis.engine import Maybe, maybe, needs, per_rank
from dlprof.analysis.estimate import LEAST_SHARE, Estimate, Explanation, change, nothing
from dlprof.analysis.figures import FIELDS, device_of
from dlprof.analysis.rules import RULES
from dlprof.analysis.step.savings import LEAST_NOISE
from dlprof.analysis.timeline.steps import mean_step_ns
from dlprof.errors import DlprofError, DoesNotApply, NotMeasured
from dlprof.read.run import Run, open_run
from dlprof.result import CATEGORIES, MOST_RANKS, Panel, Place
from dlprof.result.stored import to_json
from tests.fixtures import asking, runs, traces
from tests.fixtures.asking import STEP_NS, Check, finding, raising, rule, two_ranks
from tests.fixtures.runs import CPU, MS, light, recorded


@per_rank
def breaks() -> pd.DataFrame:
    """Break."""
    raise ZeroDivisionError("on purpose")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return two_ranks(tmp_path_factory.mktemp("job"))


def answer(job: Run, check: Check) -> Any:
    (outcome,) = diagnose(job, [rule(check)], jobs=1).outcomes
    return outcome


def test_found(job: Run) -> None:
    panel = Panel("bars", "Steps", (("step 0", 1.5),), unit="ns")
    said = answer(job, finding(0.25, evidence=panel, verdict="A quarter.", sure="By hand."))
    assert (said.state, said.id, said.title, said.summary) == ("found", "some_rule", "Found", "It is so.")
    assert (said.share, said.speedup) == (pytest.approx(0.25), pytest.approx(4 / 3))
    assert said.saving_ns == pytest.approx(0.25 * STEP_NS)
    assert (said.advice, said.ranks, said.evidence) == (("Change it.",), (0,), panel)
    assert (said.verdict, said.sure, said.why) == ("A quarter.", "By hand.", "")


def test_clear(job: Run) -> None:
    said = answer(job, lambda: nothing("Looked, and saw nothing."))
    assert (said.state, said.title, said.summary) == ("clear", "Some state", "Looked, and saw nothing.")
    assert (said.saving_ns, said.share, said.speedup, said.why) == (0, 0, 1, "")


def test_what_is_below_the_threshold_keeps_its_figures(job: Run) -> None:
    checked = replace_rule(rule(finding(0.04, noise_ns=5.0, ranks=(0, 1))), notable=0.05)
    said = diagnose(job, [checked], jobs=1).outcomes[0]
    assert (said.state, said.summary) == ("clear", "4.0 % of each step is lost")
    assert said.share == pytest.approx(0.04)
    assert said.saving_ns == pytest.approx(0.04 * STEP_NS)
    assert (said.noise_ns, said.ranks, [cost.rank for cost in said.by_rank]) == (5.0, (0, 1), [0, 1])
    # An estimate may know better from where on it is worth a word.
    easy = replace_rule(rule(finding(0.04, notable=0.03)), notable=0.05)
    assert diagnose(job, [easy], jobs=1).outcomes[0].state == "found"


def test_the_verdict_tells_what_is_lost_and_the_saving_what_comes_back(job: Run) -> None:
    said = answer(job, finding(0.1, lost_ns=0.3 * STEP_NS))
    assert (said.verdict, said.share, said.lost_share) == (
        "30 % of each step is lost.",
        pytest.approx(0.1),
        pytest.approx(0.3),
    )


def test_ranks_that_it_costs_half_the_most_are_named(job: Run) -> None:
    costs = {0: 10.0, 1: 4.9, 2: 5.0, 3: 0.0}
    said = answer(job, finding(0.1, by_rank_ns=costs))
    assert said.ranks == (0, 2)
    assert {cost.rank: cost.ns for cost in said.by_rank} == {0: 10.0, 1: 4.9, 2: 5.0}
    many = answer(job, finding(0.1, by_rank_ns={rank: float(rank) for rank in range(2 * MOST_RANKS)}))
    assert [cost.rank for cost in many.by_rank] == list(range(MOST_RANKS, 2 * MOST_RANKS))


def test_nothing_is_explained_that_is_not_found(job: Run) -> None:
    def check(mean_step_ns: float = needs(mean_step_ns)) -> Estimate:
        return Estimate(saving_ns=0.01 * mean_step_ns, loses="is lost")

    def never(estimate: Estimate) -> Explanation:
        raise AssertionError(estimate)

    small = replace_rule(rule(check), explain=never)
    assert diagnose(job, [small], jobs=1).outcomes[0].state == "clear"
    quiet = Estimate(saving_ns=0.5 * STEP_NS, by_rank_ns={0: 1.0}, summary="another rule's", clear=True)
    said = answer(job, lambda: quiet)
    assert (said.state, said.share, said.summary) == ("clear", pytest.approx(0.5), "another rule's")


CURE, LARGER = change("Fix it."), change("Train otherwise.", training=True)
# By the changes of a finding and what it is about: whether it stands apart, and the order of its changes.
TRAINING = {
    "a cure": ((CURE,), "step", False, [False]),
    "only of the training": ((LARGER, LARGER), "step", True, [True, True]),
    "both, and the cure leads": ((LARGER, CURE), "step", False, [False, True]),
    "what may end the job": ((LARGER,), "risk", False, [True]),
    "what did end it": ((LARGER,), "failure", False, [True]),
}


@pytest.mark.parametrize("name", TRAINING)
def test_a_finding_whose_changes_are_all_of_the_training_stands_apart(job: Run, name: str) -> None:
    changes, scope, apart, order = TRAINING[name]
    result = diagnose(job, [rule(finding(0.3, changes=changes, scope=scope))], jobs=1)
    (said,) = result.outcomes
    assert (said.state, said.training) == ("found", apart)
    assert [c.training for c in said.changes] == order
    assert (result.found, result.if_training_may_change) == (((), (said,)) if apart else ((said,), ()))
    (told,) = to_json(result)["outcomes"]
    assert (told["training"], [c["training"] for c in told["changes"]]) == (apart, order)


def test_a_change_of_the_training_never_comes_before_a_cure(job: Run) -> None:
    larger = rule(finding(0.5, changes=(LARGER,)), "larger")
    small, smaller = rule(finding(0.1), "small"), rule(finding(0.05), "smaller")
    rules = [larger, rule(lambda: nothing("fine"), "fine"), small, smaller]
    result = diagnose(job, rules, jobs=1)
    assert [o.id for o in result.outcomes] == ["small", "smaller", "larger", "fine"]
    assert result.together == diagnose(job, [small, smaller], jobs=1).together
    assert diagnose(job, [larger], jobs=1).together is None


ORDERS: dict[str, tuple[list[tuple[str, float, dict[str, Any], dict[str, Any]]], list[str]]] = {
    # What a rule has in a line comes before what is left of the same time, though that is more.
    "a loop": ([("launches", 0.6, {"generic": True}, {}), ("loop", 0.06, {}, {})], ["loop", "launches"]),
    "next to nothing": ([("launches", 0.6, {"generic": True}, {}), ("loop", 0.03, {}, {})], ["launches", "loop"]),
    # Of a bound half is to be expected.
    "a bound": (
        [("python", 0.4, {"generic": True}, {"at_most": True}), ("copy", 0.3, {"of_host": False}, {})],
        ["copy", "python"],
    ),
    # But where most of it is in one place of the script's, it comes before what is left of the same time.
    "a bound in one place": (
        [
            ("launches", 0.35, {"generic": True}, {}),
            ("python", 0.4, {"generic": True}, {"at_most": True, "where": (Place("train.py", 7, share=0.6),)}),
            ("copy", 0.3, {"of_host": False}, {}),
        ],
        ["copy", "python", "launches"],
    ),
    "a bound in many places": (
        [
            ("launches", 0.35, {"generic": True}, {}),
            ("python", 0.4, {"generic": True}, {"at_most": True, "where": (Place("train.py", 7, share=0.4),)}),
        ],
        ["launches", "python"],
    ),
    "a smaller one in one place": (
        [
            ("launches", 0.45, {"generic": True}, {}),
            ("python", 0.4, {"generic": True}, {"at_most": True, "where": (Place("train.py", 7, share=0.6),)}),
        ],
        ["launches", "python"],
    ),
    "of another time": (
        [("launches", 0.6, {"generic": True}, {}), ("copy", 0.3, {"of_host": False}, {})],
        ["launches", "copy"],
    ),
}


@pytest.mark.parametrize("name", ORDERS)
def test_a_cause_in_a_line_comes_before_what_is_left_of_the_hosts_time(job: Run, name: str) -> None:
    found, order = ORDERS[name]
    rules = [replace_rule(rule(finding(s, **said), n), **({"of_host": True} | of)) for n, s, of, said in found]
    assert [o.id for o in diagnose(job, rules, jobs=1).outcomes] == order


def test_not_measured(job: Run) -> None:
    said = answer(job, raising(NotMeasured("no trace")))
    assert (said.state, said.why, said.saving_ns) == ("not_measured", "no trace", 0)


def test_a_rule_is_not_asked_about_a_job_of_another_kind(job: Run, tmp_path: Path) -> None:
    def asked(about: Run, device: Any) -> str:
        one = replace_rule(rule(finding()), only_with=device)
        return diagnose(about, [one], jobs=1).outcomes[0].state

    on_cpu = open_run(recorded(tmp_path, (None, [light(n, 10 * MS) for n in range(40)], CPU)))
    assert (asked(job, "gpu"), asked(job, "cpu")) == ("found", "does_not_apply")
    assert (asked(on_cpu, "gpu"), asked(on_cpu, "cpu")) == ("does_not_apply", "found")


def test_noise_may_be_that_of_a_category(tmp_path: Path) -> None:
    steps = [light(n, 10 * MS, fetch_ns=(1 + n % 3) * MS) for n in range(40)]
    run = open_run(recorded(tmp_path, (None, steps, CPU)))
    result = diagnose(run, [rule(finding(0.5, noise_of=("input_wait",)))], jobs=1)
    (noise,) = (part.noise_ns for part in result.time if part.category == "input_wait")
    assert result.outcomes[0].noise_ns == noise > 0


def test_the_least_saving_may_be_that_of_a_category(job: Run) -> None:
    varies = rule(finding(0.9, noise_ns=STEP_NS, least_of=("computation",)))
    result = diagnose(job, [varies], jobs=1)
    computing = max(part.share for part in result.time if part.category == "computation")
    assert LEAST_SHARE < computing < 0.9
    assert result.outcomes[0].share == pytest.approx(computing)


@pytest.mark.parametrize(("share", "state"), [(0.019, "clear"), (0.021, "not_measured")])
def test_a_saving_that_is_not_known_is_no_finding_and_clear_where_it_cannot_be_one(
    job: Run, share: float, state: str
) -> None:
    said = answer(job, lambda: Estimate(gone_ns={0: share * STEP_NS}, summary="products take long", unknown="no peak"))
    assert (said.state, said.noise_ns) == (state, 0.0)
    assert (said.why or said.summary).startswith("products take long")
    assert ("no peak" in said.why) == (state == "not_measured")


def test_does_not_apply(job: Run) -> None:
    said = answer(job, raising(DoesNotApply("no GPU")))
    assert (said.state, said.why, said.saving_ns) == ("does_not_apply", "no GPU", 0)


def test_error(job: Run) -> None:
    said = answer(job, raising(KeyError("name")))
    assert (said.state, said.why, said.saving_ns) == ("error", "KeyError: 'name'", 0)


def test_one_that_raises_costs_only_its_row(job: Run) -> None:
    rules = [rule(raising(RuntimeError("no")), "b"), rule(finding(), "c"), rule(lambda: nothing("fine"), "a")]
    result = diagnose(job, rules, jobs=1)
    assert [(o.id, o.state) for o in result.outcomes] == [("c", "found"), ("a", "clear"), ("b", "error")]


def test_a_measure_that_breaks_costs_only_its_row(job: Run) -> None:
    def check(breaks: pd.DataFrame = needs(breaks)) -> Estimate:
        return nothing(f"{len(breaks)} rows")

    result = diagnose(job, [rule(check, "a"), rule(finding(), "b")], jobs=1)
    assert [(o.id, o.state, o.why) for o in result.outcomes] == [
        ("b", "found", ""),
        ("a", "error", "ZeroDivisionError: on purpose"),
    ]
    assert any("breaks: ZeroDivisionError: on purpose" in w for w in result.run.warnings)
    assert result.time


def test_a_broken_part_of_the_result_is_left_out_with_a_word(job: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def device(device_time: Maybe[pd.DataFrame] = maybe(breaks)) -> object:
        return device_of(device_time)

    monkeypatch.setitem(FIELDS, "device", device)
    result = diagnose(job, [], jobs=1)
    assert result.device == ()
    assert result.time
    assert any("ZeroDivisionError" in w for w in result.run.warnings)


def test_why_steps_are_not_divided_is_said(tmp_path: Path, job: Run) -> None:
    blind = traces.trace(*(traces.step(n, n * MS, MS) for n in range(3)), traces.op("aten::mm", 0, 500))
    (said,) = diagnose(open_run(runs.foreign(tmp_path, blind)), [], jobs=1).run.warnings[1:]
    assert said.startswith("where the time goes was not measured: the job runs on a GPU, but the trace holds nothing")
    assert diagnose(job, [], jobs=1).run.warnings == ()


def test_too_small_a_saving_is_none(job: Run) -> None:
    assert answer(job, finding(LEAST_SHARE * 0.99)).state == "clear"
    assert answer(job, finding(-0.5)).state == "clear"
    assert answer(job, finding(LEAST_SHARE * 1.01)).state == "found"


def test_a_saving_within_the_noise_is_none(job: Run) -> None:
    saving = 0.1 * STEP_NS
    said = answer(job, finding(0.1, noise_ns=saving / LEAST_NOISE * 1.01))
    assert said.state == "not_measured"
    assert "varies too much" in said.why
    assert answer(job, finding(0.1, noise_ns=saving / LEAST_NOISE * 0.99)).state == "found"


def test_of_a_part_that_varies_the_least_is_reported(job: Run) -> None:
    varies: dict[str, Any] = {"noise_ns": 0.2 * STEP_NS, "sure": "By hand.", "verdict": "30 % waits"}
    said = answer(job, finding(0.3, least_ns=0.12 * STEP_NS, **varies))
    assert (said.state, said.share) == ("found", pytest.approx(0.12))
    assert said.verdict == "At least 12 % of each step would be saved: 30 % waits"
    assert "30 % of each step ± 20 %" in said.sure
    # Its mean less twice its error may be more than the least of the steps.
    said = answer(job, finding(0.5, least_ns=0.02 * STEP_NS, noise_ns=0.2 * STEP_NS, sure="By hand."))
    assert said.share == pytest.approx(0.5)
    said = answer(job, finding(0.5, least_ns=0.02 * STEP_NS, noise_ns=0.26 * STEP_NS, sure="By hand."))
    assert said.state == "not_measured"


@pytest.mark.parametrize("pins", [False, True])
def test_no_other_change_saves_more_than_the_loader_can_feed(tmp_path: Path, pins: bool) -> None:
    # A worker takes 8 ms for a batch, or of two that take as long together the thread that pins; each step takes one.
    loader = {"role": "train", "num_workers": 1 + pins, "pin_memory": pins}
    gpu = {"device": {"type": "cuda", "name": "NVIDIA H100"}, "loaders": [loader]}
    steps = [light(n, 10 * MS) for n in range(40)]
    made = traces.trace(traces.step(50, 0, 10 * MS), *traces.launched("gemm", 0, 0, 9 * MS, 1), world_size=1)
    path = runs.recorded(tmp_path / "run", (made if pins else None, steps, gpu))
    runs.loading(path, 0, step=10 * MS, wait=0, fetch=8 * MS, cpu=0, n=40, workers=1 + pins)
    if pins:
        used = {"kind": "usage", "start_ns": steps[20]["start_ns"], "dur_ns": 100 * MS, "count": 1, "step": 20}
        with (path / "ranks/00000/loading.jsonl").open("a") as file:
            file.write(json.dumps(used | {"pin_ns": 80 * MS}) + "\n")
    said = answer(open_run(path), finding(0.5, sure="By hand."))
    assert said.share == pytest.approx(0.2)
    assert said.sure == "By hand. Capped, as the loaders need at least 8.00 ms a step."
    feeds = replace_rule(rule(finding(0.5)), feeds=True)
    assert diagnose(open_run(path), [feeds], jobs=1).outcomes[0].share == pytest.approx(0.5)


def test_a_saving_is_at_most_the_step(job: Run) -> None:
    said = answer(job, finding(3.0))
    assert (said.state, said.share, said.saving_ns) == ("found", 1, pytest.approx(STEP_NS))
    assert math.isfinite(said.speedup)


def test_rules_save_from_categories_that_there_are() -> None:
    assert {c for r in RULES for c in r.saves_from} <= set(CATEGORIES)


def test_a_saving_is_at_most_what_the_step_has_of_it(job: Run) -> None:
    # A rank copies 25 µs of each step of 997, and its reduction of 120 may be waiting for the other rank's 25.
    said = diagnose(job, [rule(finding(0.5, sure="By hand."), saves_from=("copy",))], jobs=1).outcomes[0]
    assert said.state == "found"
    assert said.saving_ns == pytest.approx(50_000)
    assert said.sure.startswith("By hand. Capped at the step's time")
    said = diagnose(job, [rule(finding(0.05, sure="By hand."), saves_from=("copy",))], jobs=1).outcomes[0]
    assert said.saving_ns == pytest.approx(0.05 * STEP_NS)
    assert said.sure == "By hand."
    assert diagnose(job, [rule(finding(), saves_from=("checkpoint",))], jobs=1).outcomes[0].state == "clear"


@pytest.mark.parametrize(
    "said",
    [
        {"saving_ns": math.nan},
        {"saving_ns": math.inf},
        {"noise_ns": math.nan},
        {"evidence": Panel("table", "T", ((np.int64(3), "x"),))},
        {"evidence": Panel("table", "T", ((1.0, math.nan),))},
        {"ranks": (np.int64(1),)},
    ],
)
def test_a_finding_that_result_json_cannot_hold_is_an_error(job: Run, said: dict[str, Any]) -> None:
    result = diagnose(job, [rule(finding(**said))], jobs=1)
    assert result.outcomes[0].state == "error"
    json.dumps(to_json(result), allow_nan=False)


def test_a_rule_that_answers_nothing_is_an_error(job: Run) -> None:
    silent: Any = lambda: None  # noqa: E731 - what a careless author may write
    assert answer(job, silent).state == "error"


def test_outcomes_are_one_per_rule_largest_first(job: Run) -> None:
    checks = {
        "cheap": finding(0.1),
        "dear": finding(0.6),
        "also_dear": finding(0.6),
        "fine": lambda: nothing("fine"),
        "blind": raising(NotMeasured("no")),
        "broken": raising(ValueError("no")),
    }
    outcomes = diagnose(job, [rule(c, name) for name, c in checks.items()], jobs=1).outcomes
    assert [o.id for o in outcomes] == ["also_dear", "dear", "cheap", "fine", "blind", "broken"]


def test_every_rule_there_is_answers_once(job: Run) -> None:
    result = diagnose(job, RULES, jobs=1)
    outcomes = result.outcomes
    assert [w for w in result.run.warnings if "failed" in w] == []
    assert sorted(o.id for o in outcomes) == [r.id for r in RULES]
    assert all(o.manual for o in outcomes)
    assert [o for o in outcomes if o.state == "error"] == []


def test_no_measure_breaks_on_a_cpu_job(tmp_path: Path) -> None:
    ranks = []
    for rank in range(2):
        events = [
            e
            for n in range(4)
            for e in (
                traces.step(n, n * 10 * MS, 10 * MS),
                traces.fetch(n * 10 * MS, MS),
                traces.op("aten::mm", n * 10 * MS + MS, 5 * MS),
                traces.annotation("gloo:all_reduce", n * 10 * MS + 7 * MS, MS),
            )
        ]
        made = traces.trace(*events, rank=rank, backend="gloo", device="")
        ranks.append((made, [light(n, 9 * MS, fetch_ns=MS) for n in range(40)], CPU))
    path = recorded(tmp_path / "run", *ranks)
    for rank in range(2):
        runs.loading(path, rank, step=9 * MS, wait=MS, fetch=5 * MS, cpu=MS, n=40, workers=1)
    result = diagnose(open_run(path), RULES, jobs=1)
    assert [o for o in result.outcomes if o.state == "error"] == []
    assert [w for w in result.run.warnings if "failed" in w] == []
    assert result.panels


def test_the_result_holds_the_whole_run(job: Run) -> None:
    result = diagnose(job, [], jobs=1)
    assert result.run.ranks == (0, 1)
    assert (result.run.device, result.run.hosts) == ("NVIDIA H100 80GB HBM3", ("node-1",))
    assert result.window is not None
    assert (result.window.steps, result.window.source) == (3, "trace")
    assert result.window.step_ns == pytest.approx(STEP_NS)
    assert [d.rank for d in result.device] == [0, 1]
    for r in (0, 1):
        mine = [p for p in result.time if p.rank == r]
        assert sum(p.ns for p in mine) == pytest.approx(STEP_NS)
        assert [p.category for p in mine] == sorted((p.category for p in mine), key=CATEGORIES.index)
    assert {p.shape for p in result.panels} == {"lines", "table", "timeline"}


def test_a_run_without_steps_has_no_window_and_every_rule_says_why(tmp_path: Path) -> None:
    traces.write(tmp_path / "rank0.json", traces.trace(world_size=1))
    result = diagnose(open_run(tmp_path), RULES, jobs=1)
    assert (result.window, result.time, result.device, result.panels) == (None, (), (), ())
    assert {o.state for o in result.outcomes if o.why} == {"not_measured", "does_not_apply"}
    assert all(o.why for o in result.outcomes)


def test_a_finding_without_a_step_is_no_finding(tmp_path: Path) -> None:
    traces.write(tmp_path / "rank0.json", traces.trace(world_size=1))
    (said,) = diagnose(open_run(tmp_path), [rule(finding())], jobs=1).outcomes
    assert said.state == "not_measured"


def test_a_manual_is_the_docstring_of_the_rules_file() -> None:
    assert rule(finding()).manual == asking.__doc__


def test_a_rule_is_found_by_its_id() -> None:
    rules = [rule(finding(), "a"), rule(finding(), "b")]
    assert rule_named(rules, "b") is rules[1]
    with pytest.raises(DlprofError, match="no rule 'c'; there are: a, b"):
        rule_named(rules, "c")


def test_device_time_is_asked_for_without_any_rule(job: Run) -> None:
    assert {d.rank: d.span_ns for d in diagnose(job, [], jobs=1).device} == {
        d.rank: d.span_ns for d in diagnose(job, [rule(finding())], jobs=1).device
    }


def test_what_is_said_of_the_job_is_a_share_of_its_training_loop(tmp_path: Path) -> None:
    """Thirty steps of 10 ms, of which validation adds 20 to each ten: 12 ms a training step."""
    steps = [light(n, 10 * MS) if n % 11 < 10 else light(n, 20 * MS, kind="validation") for n in range(33)]
    path = recorded(tmp_path, (None, steps, CPU))
    said = answer(open_run(path), finding(0.3, scope="job"))
    assert (said.state, said.scope, said.saving_ns) == ("found", "job", pytest.approx(3 * MS))
    assert said.share == pytest.approx(3 / 12)
    assert answer(open_run(path), finding(0.021, scope="job")).summary == "1.8 % of the training loop's time is lost"


def test_a_risk_saves_nothing_and_is_found_all_the_same(job: Run) -> None:
    said = answer(job, finding(0.0, scope="risk"))
    assert (said.state, said.scope, said.saving_ns, said.share, said.speedup) == ("found", "risk", 0, 0, 1)


def test_of_an_inference_servers_trace_no_rule_says_anything(tmp_path: Path) -> None:
    """Marked steps that wait on the host: of a training job, several rules would find something."""
    events = []
    for n in range(6):
        events += [traces.step(n, n * MS, MS), traces.annotation("step[DECODE bs=2]", n * MS, MS)]
        events += traces.launched("gemm", n * MS, n * MS + 500_000, 200_000, n + 1)
    result = diagnose(open_run(runs.foreign(tmp_path / "job", traces.trace(*events, world_size=1))), RULES, jobs=1)
    assert {outcome.state for outcome in result.outcomes} == {"does_not_apply"}
    assert all("of inference" in outcome.why for outcome in result.outcomes)
    assert sum("dlprof is about training" in warning for warning in result.run.warnings) == 1
