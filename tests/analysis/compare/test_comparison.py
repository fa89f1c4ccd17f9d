"""Two results with known differences: what is significant, what is noise, what was predicted, and their rates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from dlprof.analysis.compare.comparison import Difference, compare, differing, proposals, rates, to_json
from dlprof.analysis.estimate import change
from dlprof.commands.report import analyse
from dlprof.result import Change, Exchange, Fact, Forecast, ForeignLoad, Outcome, Result, Together, Window, Work
from dlprof.result.figures import Throughput
from tests.fixtures import traces
from tests.fixtures.comparisons import ADVICE, WORKERS, clear, found, run, step_of
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


RISK = found("wait", 0, scope="risk")
BECAME: list[tuple[Outcome, Outcome, str, float | None, float | None]] = [
    # What falls below the threshold is not gone for that.
    (found("wait", 5.1), clear("wait", 4.9), "same", 5.1, 4.9),
    (clear("wait", 4.9), found("wait", 5.1), "same", 4.9, 5.1),
    (found("wait", 30), clear("wait", 4), "less", 30, 4),
    (clear("wait", 4), found("wait", 30), "more", 4, 30),
    (found("wait", 30), clear("wait", 0.5), "gone", 30, 0.5),
    (clear("wait", 0.5), found("wait", 30), "new", 0.5, 30),
    # A result of format 1 does not tell what is left.
    (found("wait", 5.1), clear("wait"), "gone", 5.1, None),
    (RISK, RISK, "same", None, None),
    (RISK, clear("wait"), "gone", None, None),
    (clear("wait"), RISK, "new", None, None),
]


@pytest.mark.parametrize(("a", "b", "state", "a_ms", "b_ms"), BECAME)
def test_a_finding_becomes(a: Outcome, b: Outcome, state: str, a_ms: float | None, b_ms: float | None) -> None:
    (change,) = compare(run(100, a), run(100, b)).findings
    assert change.state == state
    if a_ms is not None:
        assert (change.a_ns, change.b_ns) == (a_ms * MS, b_ms and b_ms * MS)


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


def looping(folder: Path, turns: int, *kernels: tuple[str, int]) -> Result:
    """Return the result of a trace without step markers: turns of these kernels, each of so many µs, back to back."""
    events: list[Any] = []
    at = 0
    for n, (name, us) in enumerate(kernels * turns):
        events += traces.launched(name, at, at + 6_000, us * 1_000, n + 1)
        at += us * 1_000 + 6_000
    took = sum(us + 6 for _, us in kernels) * 1_000
    events += [traces.annotation(f"layer {n}", n * took, took // 2) for n in range(turns)]
    return analyse(traces.write(folder / "t.json", traces.trace(*events, world_size=1)), 1)


LOOP = (("gemm", 400), ("norm", 100), ("gelu", 50), ("flash", 300), ("add", 20))


def test_traces_without_steps_are_compared_by_the_loop_that_recurs_in_both(tmp_path: Path) -> None:
    a = looping(tmp_path / "a", 16, *LOOP)
    slower = tuple((name, us * 2 if name == "flash" else us) for name, us in LOOP)
    b = looping(tmp_path / "b", 12, *slower, ("cast", 40))
    c = compare(a, b)
    assert c.step is not None
    lengths: Any = (c.step.a_ns, c.step.b_ns)
    assert lengths == pytest.approx((900_000, 1_246_000), rel=0.01)
    assert c.step.verdict == "slower"
    kernels: dict[str, Any] = {w.time.name: (round((w.time.ns or 0) / 1_000), w.a_calls, w.b_calls) for w in c.kernels}
    assert kernels["flash"] == (pytest.approx(300, abs=6), pytest.approx(1, abs=0.02), pytest.approx(1, abs=0.02))
    assert kernels["cast"][1:] == (None, pytest.approx(1, abs=0.02))
    assert [w.time.name for w in c.ranges] == ["layer #"]
    assert "loop of 5 and 6 kernels that recurs 16 × in A and 12 × in B" in c.doubts[0]
    other = compare(a, looping(tmp_path / "c", 12, *slower, *[(f"k{n}", 5) for n in range(9)]))
    assert (other.step, len(other.not_compared)) == (None, 2)


def test_another_number_of_ranks_leaves_the_means() -> None:
    c = compare(run(100, found("one", 30), wait=20, ranks=2), run(60, clear("one"), wait=5, ranks=4))
    assert (c.ranks, c.time_by_rank, c.prediction) == ((), (), None)
    assert "A has 2 ranks and B 4" in c.not_compared[0]
    assert step_of(c).verdict == "faster"
    assert c.time


def test_doubts_are_listed() -> None:
    a = run(100, noise=None, facts=(Fact("Loader", "batch size", "32"),))
    b = replace(run(100, facts=(Fact("Loader", "batch size", "64"),)), window=Window(3, "trace", 100 * MS))
    said = " ".join(compare(a, b).doubts)
    for doubt in ("batch size is 32 in A and 64 in B", "the profiler slows", "the noise"):
        assert doubt in said
    # Values that were not recorded may differ; another word is a difference.
    hidden, other = ("train.py", "--data", "…"), ("train.py", "--tag=…")
    for one, two, doubted in ((hidden, hidden, 1), (other, hidden, 1), (hidden, other[:1], 0), (other[:1],) * 2 + (0,)):
        a, b = (replace(run(100), run=replace(run(100).run, command=command)) for command in (one, two))
        assert sum("(--keep-arguments records it)" in doubt for doubt in compare(a, b).doubts) == doubted


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


# -- when a difference is more than noise


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


def test_what_one_run_does_not_know_is_unknown_and_a_small_difference_is_noise() -> None:
    assert Difference("copy", None, 3.0, 0.1).verdict == "unknown"
    assert Difference("copy", 1.0, 3.0).verdict == "unknown"  # how much it varies is not known
    assert Difference("copy", 100.0, 98.0, 0.1, least_ns=5.0).verdict == "noise"
    assert Difference("copy", 3.0, 3.0, 0.0).verdict == "noise"
    assert Difference("copy", 3.0, 1.0, 0.9).ns == -2.0


# -- the settings in which two runs differ


def test_settings_that_differ_are_told_apart_from_what_was_measured() -> None:
    facts = [(("Loader", "num workers", n), ("Host", "cores in use", n), ("Job", "folder", n)) for n in ("0", "2")]
    a, b = (run(100, facts=tuple(Fact(*fact) for fact in of)) for of in facts)
    b = replace(b, run=replace(b.run, command=("python", "train.py", "--workers", "2")))
    c = compare(a, b)
    assert {(s.name, s.a, s.b) for s in c.settings} == {("num workers", "0", "2"), ("command", "", "--workers 2")}
    assert [s.name for s in c.measured] == ["cores in use"]
    # Of two commands only the words that differ are named.
    words = (("python", "a.py", "x y"), ("python", "b.py", "x y"))
    ((chosen,), measured) = differing(*(replace(run(100), run=replace(run(100).run, command=w)) for w in words))
    assert (chosen.section, chosen.name, chosen.a, chosen.b) == ("Job", "command", "a.py", "b.py")
    assert measured == ()


# -- what A predicted for the changes of B, checked against what B measured

SEARCH = change("no search", find_unused_parameters=(True, False))
TWO = Forecast("num_workers", "2", 61 * MS)
THREE = Forecast("num_workers", "3", 80 * MS)
MICRO = change("`n_microbatches=16` (is 4): the pipeline's step becomes 70 ms", n_microbatches=(4, 16))
OF_MICRO = (Forecast("microbatches", "8", 80 * MS), Forecast("microbatches", "16", 70 * MS))
WAIT, WAITS_NOT = "input_wait", clear("input_wait")


def of(section: str, name: str, value: str) -> tuple[Fact, ...]:
    return (Fact(section, name, value),)


def waits(step: float, facts: tuple[Fact, ...] = WORKERS[1:2], *outcomes: Outcome) -> Result:
    """Return a run with other workers, that does not wait for data unless its outcomes say so."""
    return run(step, *(outcomes or (WAITS_NOT,)), facts=facts)


def advised(saving: float, *changes: Change, **said: Any) -> Result:
    """Return a run without workers that is told to have two."""
    return run(100, found(WAIT, saving, *(changes or (ADVICE,)), **said), facts=WORKERS[:1])


# A and B → what A predicted for B, or nothing; ms.
PREDICTIONS: dict[str, tuple[Result, Result, dict[str, Any] | None]] = {
    "as predicted": (
        advised(39), waits(61),
        {"least_ns": 61, "most_ns": 61, "verdict": "as_predicted", "reached": 1.0, "changed": ("num_workers 0 → 2",)},
    ),
    "better": (advised(39), waits(50), {"least_ns": 61, "verdict": "better", "reached": 50 / 39}),
    "partly": (advised(39), waits(80), {"most_ns": 61, "verdict": "partly", "reached": 20 / 39}),
    "missed": (advised(39), waits(100.5), {"verdict": "missed", "reached": -0.5 / 39}),
    "the forecast for the value that was chosen": (
        advised(39, forecasts=(TWO, replace(THREE, step_ns=58 * MS))), waits(58, WORKERS[2:]),
        {"most_ns": 58, "basis": "input_wait, for num_workers=3"},
    ),
    # Samples that cost nothing would give 65 ms, three workers 20. For two there is no forecast.
    "a saving of another change is none": (
        advised(65, change("make a sample cheaper"), ADVICE, forecasts=(THREE,)), waits(80, WORKERS[2:]),
        {"least_ns": 80, "most_ns": 80, "verdict": "as_predicted"},
    ),
    "without a forecast for the value": (
        advised(65, change("make a sample cheaper"), ADVICE, forecasts=(THREE,)), waits(80), None,
    ),
    "two findings that forecast one change": (
        run(100, *(found(n, 20, ADVICE, forecasts=(THREE,)) for n in (WAIT, "needless_workers")), facts=WORKERS[:1]),
        run(80, facts=WORKERS[2:]), {"least_ns": 80, "most_ns": 80},
    ),
    "another value than the proposed one": (
        advised(39), waits(90, WORKERS[2:], found(WAIT, 25)),
        {"basis": "input_wait, for num_workers=2, not what B has"},
    ),
    "savings of several findings overlap": (
        run(100, found("one", 30), found("other", 20), found("stays", 10), together=Together(45 * MS, 0.45, 1 / 0.55)),
        run(60, clear("one"), clear("other"), found("stays", 10)),
        {"findings": ("one", "other"), "least_ns": 55, "most_ns": 70, "verdict": "as_predicted"},
    ),
    "a setting of DDP by its own name": (
        run(100, found("unused_parameters", 3, SEARCH), facts=of("Model", "ddp.find_unused_parameters", "True")),
        run(100, clear("x"), facts=of("Model", "ddp.find_unused_parameters", "False")),
        {"changed": ("find_unused_parameters True → False",)},
    ),
    "a setting that took one bottleneck away owes nothing for others": (
        run(100, found("exposed_communication", 40, SEARCH), found("unused_parameters", 5, SEARCH),
            facts=of("Model", "ddp.find_unused_parameters", "True")),
        run(95, found("exposed_communication", 36, change("larger buckets", bucket_cap_mb=(25, 50))),
            clear("unused_parameters"), facts=of("Model", "ddp.find_unused_parameters", "False")),
        {"findings": ("unused_parameters",), "verdict": "as_predicted"},
    ),
    "a forecast is found by the name of the fact": (
        run(100, found("pipeline_bubble", 30, MICRO, forecasts=OF_MICRO), facts=of("Pipeline", "microbatches", "4")),
        run(81, found("pipeline_bubble", 10), facts=of("Pipeline", "microbatches", "8")),
        {"most_ns": 80, "verdict": "as_predicted", "changed": ("microbatches 4 → 8",)},
    ),
    "nothing was changed": (run(100, found("one", 30)), run(70, found("one", 28)), None),
    "nothing was found": (run(100), run(50), None),
}  # fmt: skip


@pytest.mark.parametrize("name", PREDICTIONS)
def test_what_was_predicted(name: str) -> None:
    a, b, told = PREDICTIONS[name]
    found = compare(a, b).prediction
    if told is None:
        assert found is None
        return
    for field, value in told.items():
        expected = value * MS if field.endswith("_ns") else value
        assert getattr(found, field) == (pytest.approx(expected) if isinstance(expected, float) else expected), field


def test_a_finding_names_the_settings_that_it_would_change() -> None:
    changes = (ADVICE, Change("`x=3`, in words alone"), change("later", later=(1, None)))
    assert proposals(found(WAIT, 40, *changes)) == {"num_workers": "2", "persistent_workers": "True", "later": ""}


def test_another_device_or_a_step_of_other_work_is_a_doubt_and_no_test_of_a_prediction() -> None:
    a, b = run(100, found("one", 30)), run(50, clear("one"))
    c = compare(a, replace(b, run=replace(b.run, device="NVIDIA H200")))
    assert (c.prediction, "the devices differ (CPU and NVIDIA H200)" in c.doubts[0]) == (None, True)
    a = run(100, found("one", 30, change("larger", batch_size=(32, 64))), facts=of("Loader", "batch size", "32"))
    c = compare(a, run(150, clear("one"), facts=of("Loader", "batch size", "64")))
    assert (c.prediction, "different work" in c.doubts[0]) == (None, True)


# -- by samples a second


def at(step: float, samples: float | None, tokens: float | None = None, *, ranks: int = 1, of: str = "job") -> Result:
    """Return a run whose step takes so many ms, for so many samples and tokens."""
    result = run(step, ranks=ranks)
    assert result.window is not None
    per_s = 1000 / step
    t = Throughput(
        samples and samples * per_s, tokens and tokens * per_s, samples, "loader", tokens,
        of=of,  # type: ignore[arg-type]
    )  # fmt: skip
    return replace(result, window=replace(result.window, throughput=t))


def test_half_the_batch_is_not_faster_for_that() -> None:
    c: Any = compare(at(100, 32), at(60, 16))
    assert (c.rates.unit, c.rates.ratio, c.rates.verdict) == ("samples", pytest.approx(0.833, rel=1e-3), "slower")
    assert not c.rates.same_work
    assert c.other_work == ("a step is of 32 samples in A and of 16 in B",)
    assert "compared by samples a second" in c.doubts[0]
    assert to_json(c)["rates"]["verdict"] == "slower"


# A and B → by what they compare, the ratio of their rates, and how many differences of their work are told.
RATES: dict[str, tuple[Result, Result, str, float, int]] = {
    "the same work compares by its steps": (at(100, 32), at(60, 32), "samples", 1 / 0.6, 0),
    "strong scaling is the same work": (at(100, 32), at(60, 32, ranks=2), "samples", 1 / 0.6, 0),
    "more ranks with their own batches": (at(100, 32), at(110, 64, ranks=2), "samples", 2 / 1.1, 1),
    "longer sequences": (at(100, 8, 800), at(150, 8, 1600), "tokens", 2 / 1.5, 1),
    "more sequences": (at(100, 8, 800), at(150, 16, 1600), "samples", 2 / 1.5, 1),
    "only tokens are known of both": (at(100, None, 800), at(150, 16, 1600), "tokens", 2 / 1.5, 1),
    "ranks with ranks": (at(100, 8, of="rank"), at(90, 8, of="rank"), "samples", 1 / 0.9, 0),
    "not of as many": (at(100, 8, of="rank", ranks=2), at(90, 8, of="rank"), "", 0, 0),
    "not with jobs": (at(100, 8, of="rank"), at(90, 8), "", 0, 0),
}


@pytest.mark.parametrize("name", RATES)
def test_rates_of(name: str) -> None:
    a, b, unit, ratio, others = RATES[name]
    found = rates(a, b)
    assert (found.unit if found else "") == unit
    if found:
        assert found.ratio == pytest.approx(ratio)
        assert len(compare(a, b).other_work) == others


def test_without_throughput_another_batch_has_no_verdict() -> None:
    a, b = (replace(run(step), facts=(Fact("Loader", "batch size", n),)) for step, n in ((100, "32"), (50, "16")))
    c = compare(a, b)
    assert (c.rates, c.other_work, c.prediction) == (None, ("batch size is 32 in A and 16 in B",), None)


def test_noise_of_a_rate() -> None:
    assert (r := rates(at(100, 8), at(99.5, 16))) is not None
    assert r.noise == pytest.approx(2.01 * (0.005**2 * 2) ** 0.5, rel=0.01)
    unknown = run(99.5, found("x", 1), noise=None)
    assert unknown.window is not None
    t = Throughput(16.0, None, 1.6, "loader")
    other = replace(unknown, window=replace(unknown.window, throughput=t))
    assert (r := rates(at(100, 8), other)) is not None
    assert (r.noise, r.verdict) == (None, "unknown")
