"""Every rule answers once, in one of five ways, and one that breaks costs only its row; what findings save together."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from msgspec.structs import replace as replace_rule

from dlprof.analysis.diagnosis import diagnose, diagnosed, rule_named, wanted
from dlprof.analysis.engine import Maybe, Measured, check_needs, maybe, measure, needs, per_rank
from dlprof.analysis.estimate import LEAST_SHARE, UNKNOWN, Estimate, Explanation, Rule, change, nothing, worst
from dlprof.analysis.figures import FIELDS
from dlprof.analysis.idioms import BY_NAME
from dlprof.analysis.rules import RULES
from dlprof.analysis.step.savings import LEAST_NOISE
from dlprof.errors import DlprofError, DoesNotApply, NotMeasured
from dlprof.read.run import Run, open_run
from dlprof.result import CATEGORIES, MOST_RANKS, Change, Panel, Place, Result, Setting
from dlprof.result.stored import to_json
from tests.fixtures import asking, runs, traces
from tests.fixtures.asking import STEP_NS, Check, finding, raising, rule, two_ranks
from tests.fixtures.claims import about, case
from tests.fixtures.runs import CPU, MS, light, recorded


@per_rank
def breaks() -> pd.DataFrame:
    """Break."""
    raise ZeroDivisionError("on purpose")


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return two_ranks(tmp_path_factory.mktemp("job"))


@pytest.fixture(scope="module")
def known(job: Run) -> Measured:
    """Return what rules without needs are judged by, measured once."""
    return measure(job, wanted([]), 1)


def answer(known: Measured, check: Check, **of: Any) -> Any:
    (outcome,) = diagnosed(known, [replace_rule(rule(check), **of)]).outcomes
    return outcome


def answer_of(path: Path, check: Check, **of: Any) -> Any:
    return answer(measure(open_run(path), wanted([]), 1), check, **of)


def returning(estimate: Any) -> Check:
    return lambda: estimate


def never(estimate: Estimate) -> Explanation:
    raise AssertionError(estimate)


PANEL = Panel("bars", "Steps", (("step 0", 1.5),), unit="ns")
VARIES: dict[str, Any] = {"sure": "By hand.", "noise_ns": 0.2 * STEP_NS}
COSTS = {0: 10.0, 1: 4.9, 2: 5.0, 3: 0.0}
SMALL = Estimate(saving_ns=0.01 * STEP_NS, loses="is lost")
COPIED: dict[str, Any] = {"saves_from": ("copy",)}
FEW: dict[str, Any] = {"gone_ns": {0: 0.019 * STEP_NS}, "summary": "products take long", "unknown": "no peak"}


@pytest.mark.parametrize(
    ("check", "of", "told"),
    [
        case("found", finding(0.25, evidence=PANEL, verdict="A quarter.", sure="By hand."), {}, id="some_rule",
             title="Found", summary="It is so.", share=0.25, speedup=4 / 3, saving_ns=0.25 * STEP_NS, ranks=(0,),
             advice=("Change it.",), evidence=PANEL, verdict="A quarter.", sure="By hand.", why=""),
        case("clear", lambda: nothing("Looked, and saw nothing."), {}, state="clear", title="Some state", saving_ns=0,
             summary="Looked, and saw nothing.", share=0, speedup=1, why=""),
        # What is below the threshold keeps its figures; an estimate may know better from where on it is notable.
        case("below the threshold", finding(0.04, noise_ns=5.0, ranks=(0, 1)), {"notable": 0.05}, state="clear",
             summary="4.0 % of each step is lost", share=0.04, saving_ns=0.04 * STEP_NS, noise_ns=5.0, ranks=(0, 1)),
        case("an own threshold", finding(0.04, notable=0.03), {"notable": 0.05}),
        case("more is lost than saved", finding(0.1, lost_ns=0.3 * STEP_NS), {}, share=0.1, lost_share=0.3,
             verdict="30 % of each step is lost."),
        case("ranks that it costs half the most", finding(0.1, by_rank_ns=COSTS), {}, ranks=(0, 2)),
        # Nothing is explained that is not found.
        case("not explained", returning(SMALL), {"explain": never}, state="clear"),
        case("another rule's", returning(Estimate(saving_ns=0.5 * STEP_NS, by_rank_ns={0: 1.0}, clear=True,
             summary="another rule's")), {}, state="clear", share=0.5, summary="another rule's"),
        case("not measured", raising(NotMeasured("no trace")), {}, state="not_measured", why="no trace", saving_ns=0),
        case("does not apply", raising(DoesNotApply("no GPU")), {}, state="does_not_apply", why="no GPU", saving_ns=0),
        case("breaks", raising(KeyError("name")), {}, state="error", why="KeyError: 'name'", saving_ns=0),
        case("answers nothing", returning(None), {}, state="error"),
        case("for a GPU", finding(), {"only_with": "gpu"}),
        case("for a CPU", finding(), {"only_with": "cpu"}, state="does_not_apply"),
        # A saving that is not known is no finding, and clear where it cannot be one.
        case("not known, and little", returning(Estimate(**FEW)), {}, state="clear", noise_ns=0.0, why=""),
        case("not known", returning(Estimate(**FEW | {"gone_ns": {0: 0.021 * STEP_NS}})), {}, state="not_measured"),
        case("too small", finding(LEAST_SHARE * 0.99), {}, state="clear"),
        case("negative", finding(-0.5), {}, state="clear"),
        case("large enough", finding(LEAST_SHARE * 1.01), {}),
        case("within the noise", finding(0.1, noise_ns=0.1 * STEP_NS / LEAST_NOISE * 1.01), {}, state="not_measured"),
        case("above the noise", finding(0.1, noise_ns=0.1 * STEP_NS / LEAST_NOISE * 0.99), {}),
        # Of a part that varies the least is reported; its mean less twice its error may be more than the least.
        case("the least", finding(0.3, least_ns=0.12 * STEP_NS, verdict="30 % waits", **VARIES), {}, share=0.12,
             verdict="At least 12 % of each step would be saved: 30 % waits"),
        case("the mean", finding(0.5, least_ns=0.02 * STEP_NS, **VARIES), {}, share=0.5),
        case("neither", finding(0.5, least_ns=0.02 * STEP_NS, **VARIES | {"noise_ns": 0.26 * STEP_NS}), {},
             state="not_measured"),
        # A saving is at most the step, and what the step has of it: a rank copies 25 µs of each step of 997, and its
        # reduction of 120 may be waiting for the other rank's 25.
        case("at most the step", finding(3.0), {}, share=1, saving_ns=STEP_NS),
        case("at most its part", finding(0.5), COPIED, saving_ns=50_000.0),
        case("less than its part", finding(0.05, sure="By hand."), COPIED, saving_ns=0.05 * STEP_NS, sure="By hand."),
        case("no such part", finding(), {"saves_from": ("checkpoint",)}, state="clear"),
        case("a risk", finding(0.0, scope="risk"), {}, scope="risk", saving_ns=0, share=0, speedup=1),
        # What result.json cannot hold is an error.
        *(case(f"not to hold {n}", bad, {}, state="error") for n, bad in enumerate((
            finding(saving_ns=math.nan), finding(saving_ns=math.inf), finding(noise_ns=math.nan),
            finding(ranks=tuple(np.arange(1, 2))), finding(evidence=Panel("table", "T", ((np.int64(3), "x"),))),
            finding(evidence=Panel("table", "T", ((1.0, math.nan),)))))),
    ],
)  # fmt: skip
def test_a_rule_answers(known: Measured, check: Check, of: dict[str, Any], told: dict[str, Any]) -> None:
    result = diagnosed(known, [replace_rule(rule(check), **of)])
    (said,) = result.outcomes
    for name, value in ({"state": "found"} | told).items():
        assert getattr(said, name) == about(value, rel=1e-6), name
    json.dumps(to_json(result), allow_nan=False)


def test_what_a_rule_costs_its_ranks_and_how_sure_it_is(known: Measured) -> None:
    said = answer(known, finding(0.1, by_rank_ns=COSTS))
    assert {cost.rank: cost.ns for cost in said.by_rank} == {0: 10.0, 1: 4.9, 2: 5.0}
    many = answer(known, finding(0.1, by_rank_ns={rank: float(rank) for rank in range(2 * MOST_RANKS)}))
    assert [cost.rank for cost in many.by_rank] == list(range(MOST_RANKS, 2 * MOST_RANKS))
    for check, of, words in (
        (finding(0.3, least_ns=0.12 * STEP_NS, **VARIES), {}, "30 % of each step ± 20 %"),
        (finding(0.5, sure="By hand."), COPIED, "By hand. Capped at the step's time"),
    ):
        assert words in answer(known, check, **of).sure
    for check, words in (
        (finding(0.1, noise_ns=0.1 * STEP_NS), "varies too much"),
        (returning(Estimate(**FEW | {"gone_ns": {0: 0.021 * STEP_NS}})), "no peak"),
    ):
        assert words in answer(known, check).why


def test_estimates(job: Run) -> None:
    assert worst({3: 1.0, 1: 2.0, 2: 2.0}) == 1
    with pytest.raises(ValueError, match="empty"):
        worst({})
    frame = pd.DataFrame({"rank": [0, 1, 1], "ns": [1.0, 2.0, 3.0]})
    assert Estimate(by_rank_ns={0: 1.0, 1: 2.0}).rows(frame)["ns"].tolist() == [2.0, 3.0]
    made = change("`num_workers=6` (is 0)", num_workers=(0, 6), persistent_workers=(None, True))
    settings = (Setting("num_workers", 0, 6), Setting("persistent_workers", None, True))
    assert made == Change("`num_workers=6` (is 0)", settings, numerics=False)
    assert change("a larger batch", numerics=True).numerics


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
def test_a_finding_whose_changes_are_all_of_the_training_stands_apart(known: Measured, name: str) -> None:
    changes, scope, apart, order = TRAINING[name]
    result = diagnosed(known, [rule(finding(0.3, changes=changes, scope=scope))])
    (said,) = result.outcomes
    assert (said.state, said.training) == ("found", apart)
    assert [c.training for c in said.changes] == order
    assert (result.found, result.if_training_may_change) == (((), (said,)) if apart else ((said,), ()))
    (told,) = to_json(result)["outcomes"]
    assert (told["training"], [c["training"] for c in told["changes"]]) == (apart, order)


HOST, LEFT, COPY = {"of_host": True}, {"of_host": True, "generic": True}, {"of_host": False}
SPREAD: dict[str, Any] = {"at_most": True, "where": (Place("train.py", 7, share=0.4),)}
PLACED = SPREAD | {"where": (Place("train.py", 7, share=0.6),)}
FOUND: dict[str, tuple[list[tuple[str, Check, dict[str, Any]]], list[str]]] = {
    # Outcomes are one a rule, the largest first; a change of the training never comes before a cure.
    "by size and state": (
        [("broken", raising(ValueError("no")), {}), ("blind", raising(NotMeasured("no")), {}),
         ("larger", finding(0.7, changes=(LARGER,)), {}), ("cheap", finding(0.1), {}), ("dear", finding(0.6), {}),
         ("also_dear", finding(0.6), {}), ("fine", lambda: nothing("fine"), {})],
        ["also_dear", "dear", "cheap", "larger", "fine", "blind", "broken"]),
    # What a rule has in a line comes before what is left of the same time, though that is more.
    "a loop": ([("launches", finding(0.6), LEFT), ("loop", finding(0.06), HOST)], ["loop", "launches"]),
    "next to nothing": ([("launches", finding(0.6), LEFT), ("loop", finding(0.03), HOST)], ["launches", "loop"]),
    "of another time": ([("launches", finding(0.6), LEFT), ("copy", finding(0.3), COPY)], ["launches", "copy"]),
    # Of a bound half is to be expected.
    "a bound": ([("python", finding(0.4, at_most=True), LEFT), ("copy", finding(0.3), COPY)], ["copy", "python"]),
    "a bound whose remedy is to compile": (
        [("python", finding(0.4, at_most=True, changes=(Change("`torch.compile(model)`: fewer operators"),)), COPY),
         ("copy", finding(0.3), COPY)], ["copy", "python"]),
    "an unknown remedy": (
        [("python", finding(0.5, changes=(Change(f"faster ({UNKNOWN})"),)), COPY), ("copy", finding(0.3), COPY)],
        ["copy", "python"]),
    "a bound with a remedy": ([("python", finding(0.4, at_most=True), COPY), ("copy", finding(0.3), COPY)],
                              ["python", "copy"]),
    # What others usually gain comes after needless work that saves about as much.
    "about as much": ([("threads", finding(0.4), {"weight": 0.9}), ("same", finding(0.38), COPY)], ["same", "threads"]),
    "usually more": ([("threads", finding(0.4), {"weight": 0.9}), ("same", finding(0.34), COPY)], ["threads", "same"]),
    # But where most of it is in one place of the script's, it comes before what is left of the same time.
    "a bound in one place": (
        [("launches", finding(0.35), LEFT), ("python", finding(0.4, **PLACED), LEFT), ("copy", finding(0.3), COPY)],
        ["copy", "python", "launches"]),
    "a bound in many places": (
        [("launches", finding(0.35), LEFT), ("python", finding(0.4, **SPREAD), LEFT)], ["launches", "python"]),
    "a smaller one in one place": (
        [("launches", finding(0.45), LEFT), ("python", finding(0.4, **PLACED), LEFT)], ["launches", "python"]),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_the_order_of_outcomes(known: Measured, name: str) -> None:
    found, order = FOUND[name]
    result = diagnosed(known, [replace_rule(rule(check, id_), **of) for id_, check, of in found])
    assert [o.id for o in result.outcomes] == order


@pytest.mark.parametrize(
    ("share", "text", "order"),
    [
        (0.9, BY_NAME["histograms"].remedy, ["python", "loop"]),
        (0.4, BY_NAME["histograms"].remedy, ["loop", "python"]),
        (0.9, "Fix it.", ["loop", "python"]),
    ],
)
def test_on_a_cpu_a_line_that_is_known_comes_before_a_smaller_part_of_the_same_time(
    tmp_path: Path, share: float, text: str, order: list[str]
) -> None:
    run = open_run(recorded(tmp_path, (None, [light(n, 10 * MS) for n in range(40)], CPU)))
    placed: dict[str, Any] = {"at_most": True, "where": (Place("train.py", 7, share=share),)}
    checks = (finding(0.5, changes=(Change(text),), **placed), "python", LEFT), (finding(0.3), "loop", HOST)
    result = diagnose(run, [replace_rule(rule(check, id_), **of) for check, id_, of in checks], jobs=1)
    assert [o.id for o in result.outcomes] == order


def test_noise_and_the_least_saving_may_be_those_of_a_category(tmp_path: Path, job: Run) -> None:
    steps = [light(n, 10 * MS, fetch_ns=(1 + n % 3) * MS) for n in range(40)]
    run = open_run(recorded(tmp_path, (None, steps, CPU)))
    result = diagnose(run, [rule(finding(0.5, noise_of=("input_wait",)))], jobs=1)
    (noise,) = (part.noise_ns for part in result.time if part.category == "input_wait")
    assert result.outcomes[0].noise_ns == noise > 0
    result = diagnose(job, [rule(finding(0.9, noise_ns=STEP_NS, least_of=("computation",)))], jobs=1)
    computing = max(part.share for part in result.time if part.category == "computation")
    assert LEAST_SHARE < computing < 0.9
    assert result.outcomes[0].share == pytest.approx(computing)


def test_a_measure_that_breaks_costs_only_its_row(job: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(breaks: pd.DataFrame = needs(breaks)) -> Estimate:
        return nothing(f"{len(breaks)} rows")

    def device(frame: Maybe[pd.DataFrame] = maybe(breaks)) -> object:
        return () if frame.or_none() is None else (1,)

    result = diagnose(job, [rule(check, "a"), rule(finding(), "b")], jobs=1)
    assert [(o.id, o.state, o.why) for o in result.outcomes] == [
        ("b", "found", ""),
        ("a", "error", "ZeroDivisionError: on purpose"),
    ]
    assert any("breaks: ZeroDivisionError: on purpose" in w for w in result.run.warnings)
    assert result.time
    # A broken part of the result is left out with a word.
    monkeypatch.setitem(FIELDS, "device", device)
    result = diagnose(job, [], jobs=1)
    assert (result.device, bool(result.time)) == ((), True)
    assert any("ZeroDivisionError" in w for w in result.run.warnings)


@pytest.mark.parametrize("pins", [False, True])
def test_no_other_change_saves_more_than_the_loader_can_feed(tmp_path: Path, pins: bool) -> None:
    # A worker takes 8 ms for a batch, or of two that take as long together the thread that pins; each step takes one.
    loader = {"role": "train", "num_workers": 1 + pins, "pin_memory": pins}
    gpu = {"device": {"type": "cuda", "name": "NVIDIA H100"}, "loaders": [loader]}
    steps = [light(n, 10 * MS) for n in range(40)]
    made = traces.trace(traces.step(50, 0, 10 * MS), *traces.launched("gemm", 0, 0, 9 * MS, 1), world_size=1)
    path = recorded(tmp_path / "run", (made if pins else None, steps, gpu))
    runs.loading(path, 0, step=10 * MS, wait=0, fetch=8 * MS, cpu=0, n=40, workers=1 + pins)
    if pins:
        used = {"kind": "usage", "start_ns": steps[20]["start_ns"], "dur_ns": 100 * MS, "count": 1, "step": 20}
        with (path / "ranks/00000/loading.jsonl").open("a") as file:
            file.write(json.dumps(used | {"pin_ns": 80 * MS}) + "\n")
    said = answer_of(path, finding(0.5, sure="By hand."))
    assert said.share == pytest.approx(0.2)
    assert said.sure == "By hand. Capped, as the loaders need at least 8.00 ms a step."
    assert answer_of(path, finding(0.5), feeds=True).share == pytest.approx(0.5)


def test_every_rule_there_is_answers_once_on_a_gpu_and_on_a_cpu(job: Run, tmp_path: Path) -> None:
    assert {c for r in RULES for c in r.saves_from} <= set(CATEGORIES)
    ranks = []
    for rank in range(2):
        events: list[Any] = []
        for n in range(4):
            at = n * 10 * MS
            events += [traces.step(n, at, 10 * MS), traces.fetch(at, MS), traces.op("aten::mm", at + MS, 5 * MS)]
            events.append(traces.annotation("gloo:all_reduce", at + 7 * MS, MS))
        made = traces.trace(*events, rank=rank, backend="gloo", device="")
        ranks.append((made, [light(n, 9 * MS, fetch_ns=MS) for n in range(40)], CPU))
    path = recorded(tmp_path / "run", *ranks)
    for rank in range(2):
        runs.loading(path, rank, step=9 * MS, wait=MS, fetch=5 * MS, cpu=MS, n=40, workers=1)
    for result in (diagnose(job, RULES, jobs=1), diagnose(open_run(path), RULES, jobs=1)):
        assert [w for w in result.run.warnings if "failed" in w] == []
        assert sorted(o.id for o in result.outcomes) == [r.id for r in RULES]
        assert [o for o in result.outcomes if o.state == "error" or not o.manual] == []
        assert result.panels


def test_the_result_holds_the_whole_run(known: Measured) -> None:
    result = diagnosed(known, [])
    assert (result.run.ranks, result.run.device, result.run.hosts) == ((0, 1), "NVIDIA H100 80GB HBM3", ("node-1",))
    assert result.run.warnings == ()
    assert result.window is not None
    assert (result.window.steps, result.window.source) == (3, "trace")
    assert result.window.step_ns == pytest.approx(STEP_NS)
    assert [d.rank for d in result.device] == [0, 1]
    for r in (0, 1):
        mine = [p for p in result.time if p.rank == r]
        assert sum(p.ns for p in mine) == pytest.approx(STEP_NS)
        assert [p.category for p in mine] == sorted((p.category for p in mine), key=CATEGORIES.index)
    assert {p.shape for p in result.panels} == {"lines", "table", "timeline"}


def test_figures_make_fields_of_a_result_from_known_measures(tmp_path: Path) -> None:
    assert set(FIELDS) <= set(Result.__struct_fields__)
    for make in FIELDS.values():
        check_needs(make)
    path = traces.write(tmp_path / "trace.json", traces.training(5, world_size=1))
    measured = measure(open_run(path), FIELDS.values(), 1)
    window = measured.call(FIELDS["window"])
    assert window.traced_steps == 5
    assert sum(part.ns for part in measured.call(FIELDS["time"])) == pytest.approx(window.step_ns, rel=1e-3)
    assert {w.kind for w in measured.call(FIELDS["work"])} == {"operator", "kernel", "range"}
    (span,) = measured.call(FIELDS["device"])
    assert span.computation_ns + span.exposed_communication_ns + span.exposed_copy_ns + span.idle_ns == span.span_ns
    # Of one rank, without samples or a snapshot of memory, nothing else is known.
    assert [measured.call(FIELDS[name]) for name in ("scaling", "foreign_load")] == [None, None]
    assert [measured.call(FIELDS[name]) for name in ("blame", "memory", "profiles", "gpu_logs")] == [()] * 4


def test_why_nothing_is_known_of_a_run_is_said(tmp_path: Path) -> None:
    blind = traces.trace(*(traces.step(n, n * MS, MS) for n in range(3)), traces.op("aten::mm", 0, 500))
    (said,) = diagnose(open_run(runs.foreign(tmp_path / "blind", blind)), [], jobs=1).run.warnings[1:]
    assert said.startswith("where the time goes was not measured: the job runs on a GPU, but the trace holds nothing")
    # Without steps there is no window and no finding, and every rule says why.
    bare = open_run(runs.foreign(tmp_path / "bare", traces.trace(world_size=1)))
    result = diagnose(bare, RULES, jobs=1)
    assert (result.window, result.time, result.device, result.panels) == (None, (), (), ())
    assert {o.state for o in result.outcomes if o.why} == {"not_measured", "does_not_apply"}
    assert all(o.why for o in result.outcomes)
    assert answer(measure(bare, wanted([]), 1), finding()).state == "not_measured"
    # Of an inference server's steps, which wait on the host, no rule says anything.
    events = []
    for n in range(6):
        events += [traces.step(n, n * MS, MS), traces.annotation("step[DECODE bs=2]", n * MS, MS)]
        events += traces.launched("gemm", n * MS, n * MS + 500_000, 200_000, n + 1)
    served = runs.foreign(tmp_path / "served", traces.trace(*events, world_size=1))
    result = diagnose(open_run(served), RULES, jobs=1)
    assert {(outcome.state, "of inference" in outcome.why) for outcome in result.outcomes} == {("does_not_apply", True)}
    assert sum("dlprof is about training" in warning for warning in result.run.warnings) == 1


def test_a_rule_is_found_by_its_id_and_its_manual_is_its_files(job: Run) -> None:
    rules = [rule(finding(), "a"), rule(finding(), "b")]
    assert rule_named(rules, "b") is rules[1]
    with pytest.raises(DlprofError, match="no rule 'c'; there are: a, b"):
        rule_named(rules, "c")
    assert rules[0].manual == asking.__doc__


def test_what_is_said_of_the_job_is_a_share_of_its_training_loop(tmp_path: Path) -> None:
    """Thirty steps of 10 ms, of which validation adds 20 to each ten: 12 ms a training step."""
    steps = [light(n, 10 * MS) if n % 11 < 10 else light(n, 20 * MS, kind="validation") for n in range(33)]
    path = recorded(tmp_path, (None, steps, CPU))
    said = answer_of(path, finding(0.3, scope="job"))
    assert (said.state, said.scope, said.saving_ns) == ("found", "job", pytest.approx(3 * MS))
    assert said.share == pytest.approx(3 / 12)
    assert answer_of(path, finding(0.021, scope="job")).summary == "1.8 % of the training loop's time is lost"
    # Together with what is said of the step, of the whole loop too.
    most = diagnose(open_run(path), [rule(finding(0.1), "a"), rule(finding(0.2, scope="job"), "b")], jobs=1).together
    assert most is not None
    assert most.saving_ns == pytest.approx(3 * MS)
    assert most.share == pytest.approx(3 / 12, rel=0.05)


def claim(share: float, name: str, *saves_from: str, ranks: tuple[int, ...] = (0, 1), within: float = 0) -> Rule:
    """Return a rule that finds a share in some categories, and `within` of it in input_wait."""
    said = {"within": {"input_wait": within * STEP_NS}} if within else {}
    return rule(finding(share, ranks=ranks, **said), name, saves_from)


def advising(share: float, name: str, saves_from: str, **setting: Any) -> Rule:
    """Return a rule that finds a share and advises a setting."""
    return rule(finding(share, ranks=(0, 1), changes=(change("Change it.", **setting),)), name, (saves_from,))


A = claim(0.3, "a", "computation")
BROAD = ("computation", "copy", "input_wait", "host", "other")
WAITS = claim(0.1, "a", "input_wait", within=0.1)
GRAPHS = advising(0.1, "a", "computation", mode=(None, "reduce-overhead"))
TOGETHER: dict[str, tuple[list[Rule], float | None]] = {
    "nothing": ([rule(lambda: nothing("fine"))], None),
    "one": ([A], 0.3),
    "a risk": ([A, rule(finding(0.0, scope="risk"), "risk")], 0.3),
    "of the training": ([rule(finding(0.3, changes=(LARGER,)))], None),
    "none of the training": ([A, rule(finding(0.5, changes=(LARGER,)), "b")], 0.3),
    # Computation takes 550 of 997 µs: no more than that, however many claim it.
    "the sum": ([A, claim(0.2, "b", "computation")], 0.5),
    "the part": ([A, claim(0.4, "b", "computation"), claim(0.45, "c", "computation")], 550_000 / STEP_NS),
    # One that claims computation and more makes the two others one.
    "two parts": ([claim(0.1, "b", "copy", "computation"), claim(0.5, "c", "computation"), claim(0.02, "d", "copy")],
                  575_000 / STEP_NS),
    "of different parts both": ([claim(0.1, "a", "computation"), claim(0.05, "b", "input_wait")], 0.15),
    # Rank 0 hides what would be saved on rank 1, and the other way round: their sum bounds nothing.
    "hidden": ([claim(0.05, "a", "computation", ranks=(0,)), claim(0.05, "b", "input_wait", ranks=(1,))],
               650_000 / STEP_NS),
    # Nothing bounds what may come out of all parts of the step: it is not told.
    "all parts": ([claim(0.55, name, *CATEGORIES) for name in "ab"], None),
    # A change that two findings advise is made once.
    "one change": ([GRAPHS, advising(0.05, "b", "input_wait", mode=(None, "reduce-overhead"))], 0.1),
    "two changes": ([GRAPHS, advising(0.05, "b", "input_wait", mode=(None, "max-autotune"))], 0.15),
    "no settings": ([advising(0.1, "a", "computation"), advising(0.05, "b", "input_wait")], 0.15),
    # Waiting takes 100 of 997 µs. What both claim of it is there once; half of the step comes out of its other parts.
    # Were it not told, all might come out of the broad one's categories.
    "within a part": ([WAITS, claim(0.6, "b", *BROAD, within=0.1)], 0.5 + 100_000 / STEP_NS),
    "not told within": ([WAITS, claim(0.6, "b", *BROAD)], 0.7),
    "both within": ([claim(0.1, name, *BROAD, within=0.1) for name in "ab"], 100_000 / STEP_NS),
}  # fmt: skip


@pytest.mark.parametrize("name", TOGETHER)
def test_what_findings_save_together(known: Measured, name: str) -> None:
    rules, share = TOGETHER[name]
    most = diagnosed(known, rules).together
    if share is None:
        assert most is None
    else:
        assert most is not None
        assert (most.share, most.saving_ns) == pytest.approx((share, share * STEP_NS))
        assert most.speedup == pytest.approx(1 / (1 - most.share))


# Shares of the step with each change: those of the categories that others took are less by what these took of them.
OTHER = advising(0.1, "b", "input_wait", num_workers=(0, 2))
CHANGED: dict[str, tuple[list[Rule], list[tuple[str, float]]]] = {
    "nothing": ([rule(lambda: nothing("fine"))], []),
    "of different parts both": ([GRAPHS, OTHER], [("a", 0.9), ("b", 0.8)]),
    # 0.3 of the step are of computation, 0.55: the second one saves 0.1 of what is left of it.
    "of one part": ([advising(0.3, "a", "computation"), advising(0.1, "b", "computation", mode=(None, "x"))],
                    [("a", 0.7), ("b", 0.7 - 0.1 * (1 - 0.3 * STEP_NS / 550_000))]),
    "one change": ([GRAPHS, advising(0.05, "b", "input_wait", mode=(None, "reduce-overhead"))], [("a b", 0.9)]),
    "nothing is left": ([claim(0.55, "a", "computation"), advising(0.3, "b", "computation", mode=(None, "x"))],
                        [("a", 0.45)]),
    "the training's last": ([A, rule(finding(0.5, changes=(LARGER,)), "b")], [("a", 0.7), ("b", 0.2)]),
    "a recording tells more": ([A, rule(finding(0.2, changes=(Change("Record it.", informs=True),)), "b")],
                               [("a", 0.7)]),
    "a risk": ([A, rule(finding(0.0, scope="risk"), "risk")], [("a risk", 0.7)]),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGED)
def test_each_change_is_counted_after_those_above_it(known: Measured, name: str) -> None:
    rules, expected = CHANGED[name]
    changes = diagnosed(known, rules).changes
    assert [" ".join(c.findings) for c in changes] == [ids for ids, _ in expected]
    assert [c.after_ns / STEP_NS for c in changes] == pytest.approx([share for _, share in expected], rel=1e-3)


@pytest.mark.parametrize("seed", range(6))
def test_together_is_no_less_than_the_dearest_and_no_more_than_the_sum(known: Measured, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rules = []
    for n in range(int(rng.integers(1, 5))):
        share = float(rng.uniform(0.03, 0.4))
        saves_from = tuple(str(c) for c in rng.choice(CATEGORIES, int(rng.integers(1, 6)), replace=False))
        within = {saves_from[0]: float(rng.uniform(0, 1.2)) * share * STEP_NS} if rng.random() < 0.5 else {}
        rules.append(rule(finding(share, ranks=(0, 1), within=within), f"r{n}", saves_from))
    result = diagnosed(known, rules)
    savings = [o.saving_ns for o in result.outcomes if o.state == "found"]
    if result.together is not None:
        assert max(savings) - 1e-6 <= result.together.saving_ns <= sum(savings) + 1e-6
        assert result.together.share <= max(0.98, max(savings) / STEP_NS)
    else:
        assert sum(savings) > 0.98 * STEP_NS or not savings
