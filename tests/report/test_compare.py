"""Comparisons, ladders, sweeps, scaling studies and what-if answers, as lines of a terminal and as pages."""

from __future__ import annotations

import json
import re
import unicodedata
from itertools import pairwise

import pytest
from msgspec.structs import replace
from msgspec.structs import replace as with_fields

from dlprof.analysis.compare.comparison import CameTrue
from dlprof.analysis.compare.ladder import ladder
from dlprof.analysis.scaling.predictions import studied
from dlprof.analysis.scaling.study import sizes
from dlprof.files import compact
from dlprof.report import comparison, studies
from dlprof.report.summary import Summary, answers_json, ladder_json, of_answers, of_ladder, page, rate, text, times
from dlprof.report.terminal import columns
from dlprof.result import Fact, Panel, Result
from dlprof.result.figures import Throughput
from dlprof.result.scale import Answer, Answers, to_json
from dlprof.result.sweep import Axis, Point, Reading, Sweep
from tests.fixtures import comparisons, scaling
from tests.fixtures.pages import Page
from tests.fixtures.scaling import MS, named, weak


def plain(text: str) -> str:
    return text.replace("\u00a0", " ")


# Two runs.


@pytest.mark.parametrize("name", comparisons.ALL)
def test_the_lines_of_a_comparison_fit_and_nothing_in_them_acts(name: str) -> None:
    made = comparisons.ALL[name]()
    for width in (40, 80, 110):
        assert max(map(columns, comparison.text(made, width).split("\n"))) <= width
    said = comparison.text(made, 100)
    assert re.sub(r"\x1b\[[0-9;]*m", "", comparison.text(made, 100, colour=True)) == said
    assert {c for c in said if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")} <= {"\n"}


@pytest.mark.parametrize("name", comparisons.ALL)
def test_the_page_of_a_comparison_runs_nothing_fetches_nothing_and_is_small(name: str) -> None:
    made = comparison.page(comparisons.ALL[name]())
    found = Page(made)
    ids = {a["id"] for _, a in found.elements if "id" in a}
    assert not {"script", "link", "img", "iframe", "object", "embed", "form", "base"} & {t for t, _ in found.elements}
    for _, attributes in found.elements:
        assert not {k for k in attributes if k.startswith("on")} | {"src", "srcset", "data", "action"} & set(attributes)
        assert (attributes.get("href") or "#").removeprefix("#") in {*ids, ""}
    (policy,) = (a["content"] for a in found.of("meta") if a.get("http-equiv") == "Content-Security-Policy")
    assert policy == comparison.POLICY
    assert "script-src" not in comparison.POLICY
    assert len(made.encode()) < 200_000
    assert (found.headings[0], found.headings.count(1)) == (1, 1)
    assert all(b - a <= 1 for a, b in pairwise(found.headings))


def test_verdict_and_prediction_come_first_then_findings_and_settings() -> None:
    said = comparison.text(comparisons.fixed(), 200)
    lines = [line.strip() for line in said.split("\n")]
    assert [line[:3] for line in lines[:2]] == ["A  ", "B  "]
    assert lines[3] == "B is 1.25 × faster: a step takes 171.7 ms instead of 214.6 ms."
    assert lines[4] == (
        "Predicted 148.6 ms for num_workers 2 → 6, measured 171.7 ms ± 1.13 ms: less than predicted,"
        " 65 % of the gain (predicted by input_wait)."
    )
    assert re.search(r"gone +input_wait +66.0 ms → 500.0 µs", said)
    assert "Loader · num_workers: 2 → 6" in said


def test_the_page_has_bars_of_both_runs_on_one_scale() -> None:
    made = comparison.page(comparisons.fixed())
    stacks = re.findall(r'<span class="stack">(.*?)</span>', made, re.DOTALL)
    widths = [sum(float(w) for w in re.findall(r"width:([0-9.]+)%", stack)) for stack in stacks]
    assert len(widths) == 2 + 2 * 4
    assert widths[:2] == [pytest.approx(100, abs=0.5), pytest.approx(80, abs=0.5)]
    words = plain(Page(made).text)
    for part in ("B is 1.25 × faster", "Predicted 148.6 ms for num_workers 2 → 6, measured 171.7 ms", "aten::mm"):
        assert part in words
    empty = {a.get("id") for _, a in Page(comparison.page(comparisons.ALL["empty"]())).elements}
    assert not {"where", "prediction"} & empty


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("same", "No difference beyond noise: a step takes 214.6 ms in A and 214.6 ms in B."),
        ("other", "the devices differ"),
        ("empty", "cannot be compared"),
    ],
)
def test_runs_that_do_not_differ_or_cannot_be_compared(name: str, words: str) -> None:
    assert words in comparison.text(comparisons.ALL[name](), 400)


@pytest.mark.parametrize(
    ("reached", "verdict", "slower", "words"),
    [
        (-12.5, "missed", False, "no gain"),
        (-12.5, "missed", True, "slower instead"),
        (0.65, "partly", False, "65 % of the gain"),
        (40.0, "better", False, ""),
    ],
)
def test_what_became_of_a_prediction(reached: float, verdict: CameTrue, slower: bool, words: str) -> None:
    c = comparisons.fixed()
    assert c.prediction is not None
    assert c.step is not None
    step = with_fields(c.step, a_ns=c.step.b_ns, b_ns=c.step.a_ns) if slower else c.step
    said = plain(comparison.came_true(with_fields(c.prediction, reached=reached, verdict=verdict), step))
    assert words in said
    assert ("of the gain" in said) == ("of the gain" in words)


# A verdict, a table and figures of any study.

HOSTILE = "</script><script>alert(1)</script>\x1b[2J\u202e"
SUMMARY = Summary(
    "train.py",
    "The last run is 1.50 × as fast.",
    Panel(
        "table",
        "The runs",
        (("1 fp32", 100.0, 5e7, "", None), ("2 bf16", 150.5, 3e7, "precision fp32 → bf16 " * 6, None)),
        ("run", "samples a second", "step_ns", "what changed", "J a sample"),
        note="A note.",
    ),
    second="By bf16.",
    lede="train.py · 2 runs",
    notices=("c is left out: broken",),
    tiles=(("150", "samples a second"),),
    panels=(Panel("bars", "By run", (("1", 100.0), ("2", 150.5)), unit="samples/s"),),
    bars="samples a second",
)


@pytest.mark.parametrize("width", [40, 60, 88, 110, 200])
def test_the_lines_of_a_study_fit_and_leave_out_unknown_columns(width: int) -> None:
    said = text(SUMMARY, width)
    assert max(map(columns, said.split("\n"))) <= width
    assert re.sub(r"\x1b\[[0-9;]*m", "", text(SUMMARY, width, colour=True)) == said
    for part in ("1.50 ×", "By bf16.", "! c is left out", "1 fp32", "150", "bf16", "A note."):
        assert part in said
    assert "J a sample" not in said
    if width == 110:
        assert [line.count("█") for line in said.split("\n") if "█" in line] == [8, 12]


def test_the_page_of_a_study_holds_it_all_and_hostile_texts_stay_texts() -> None:
    for part in ("<title>train.py", "c is left out: broken", "By run", "The runs", "plotly", "http-equiv"):
        assert part in page(SUMMARY)
    table = Panel("table", HOSTILE, ((HOSTILE, 1.0),), (HOSTILE, "x"))
    hostile = Summary(HOSTILE, HOSTILE, table, HOSTILE, HOSTILE, (HOSTILE,), ((HOSTILE, HOSTILE),))
    assert not any(attack in page(hostile) for attack in ("<script>alert", "\x1b"))
    assert not any(attack in text(hostile, 80) for attack in ("\u202e", "\x1b"))
    empty = Summary("x", "Nothing.", Panel("table", "The runs", ()))
    assert text(empty) == "  Nothing.\n"
    assert "Nothing." in page(empty)


# Ladders.


def at(step: float, workers: str, power: float | None = None) -> Result:
    made = comparisons.run(step, facts=(Fact("Loader", "num workers", workers),))
    assert made.window is not None
    t = Throughput(32_000 / step, None, 32.0, "loader", power_w=power)
    return replace(made, window=replace(made.window, throughput=t, memory_bytes=2e9))


def test_a_ladder_has_its_whole_gain_and_its_largest_step() -> None:
    made = ladder([("a", at(200, "0")), ("b", at(100, "2")), ("c", at(80, "4"))], [("d", "broken")])
    s = of_ladder(made)
    assert plain(s.headline) == "The last run is 2.50 × as fast as the first: 160 → 400 samples a second."
    assert plain(s.second) == "The largest gain is 2.00 × by b (num workers 0 → 2)."
    assert (s.notices, s.good) == (("d is left out: broken",), False)
    assert "2 GB" in text(s, 110)
    assert "num workers 2 → 4" in text(s, 110)
    assert "samples a second" in page(s)
    json.loads(compact(ladder_json(made)))


def test_a_ladder_of_a_loss_of_noise_and_of_one_run() -> None:
    worse = of_ladder(ladder([("a", at(100, "0", 160.0)), ("b", at(150, "2", 160.0))]))
    assert "takes 1.50" in worse.headline
    assert "cost" in worse.second
    assert [row[6] for row in worse.table.rows] == [0.5, 0.75]  # 160 W over so many samples a second, in J a sample
    noise = ladder([("a", at(100, "0")), ("b", at(100.2, "2"))])
    assert "nothing changed beyond noise" in of_ladder(noise).headline
    assert "(noise)" in times(noise.rungs[1].before)
    assert times(None) == ""
    one = of_ladder(ladder([("a", at(100, "0"))]))
    assert ("Fewer than two" in one.headline, one.table.rows) == (True, ())
    rates = [rate(at(100, "0"), unit) for unit in ("samples", "steps")]
    assert rates == [320, 10]
    assert rate(replace(at(100, "0"), window=None), "steps") is None


# Scaling.

STUDY = studied("train.py", sizes(named(a=weak(1), b=weak(2), c=weak(4), d=weak(8))))


def test_a_scaling_study_has_its_efficiency_what_grows_and_a_prediction() -> None:
    shown = text(studies.of_study(STUDY), 110)
    for part in (
        "8 ranks do",
        "the samples a second of 1: an efficiency of",
        "What grows: transfers between ranks by 1.70 ms",
        f"waiting for other ranks by {scaling.latest(8) / MS:.2f} ms",
        "weak scaling",
        "Predicted from the smaller sizes, the step on 8 ranks is off by",
        "On 64 ranks",
    ):
        assert part in shown
    first = studies.first_prediction(STUDY)
    assert first is not None
    assert first.ranks == 64  # no further than accuracy was measured
    assert {p.ranks for p in STUDY.predictions} >= {16, 4096}
    assert "plotly" in page(studies.of_study(STUDY))
    data = json.loads(compact(to_json(STUDY)))
    assert (data["format"], [s["ranks"] for s in data["sizes"]]) == (1, [1, 2, 4, 8])
    assert data["sizes"][0]["step_ns"] == pytest.approx(100 * MS, rel=0.01)


def test_scaling_of_a_shared_batch_of_one_size_and_without_samples() -> None:
    shared = studied("job", sizes(named(a=scaling.at(1, 100, 64), b=scaling.at(2, 50, 64))))
    assert studies.growth(shared) == pytest.approx({"computation": 0.0})
    assert "No part of the step grows" in text(studies.of_study(shared), 110)
    one = text(studies.of_study(studied("job", sizes(named(a=weak(2)), [("broken", "cannot be read")]))), 110)
    for part in ("One size is no scaling", "broken is left out: cannot be read", "Nothing is predicted: one size"):
        assert part in one
    bare = studied("job", sizes(named(a=scaling.at(1, 100, 0), b=scaling.at(2, 125, 0))))
    assert "work a second" in text(studies.of_study(bare), 110)


# Sweeps.


def swept(rates: dict[str, float | None], **more: object) -> Sweep:
    """Return a sweep over n with so many samples a second at each value."""
    points = tuple(
        Point({"w": n}, (Reading(1e10 / r, 10.0),) * 2 if r else (), why="" if r else "it died")
        for n, r in rates.items()
    )
    return replace(Sweep(("python", "train.py"), (Axis("w", tuple(rates)),), points, 2, 30, "complete"), **more)


CURVE = swept({"0": 100.0, "1": 190.0, "2": 297.0, "4": 300.0, "8": None})


def test_a_sweep_has_its_best_point_its_knee_and_what_was_predicted() -> None:
    s = studies.of_sweep(CURVE)
    assert plain(s.headline) == "w=4 is the best: 300 samples a second, 3.00 × (3.00 to 3.00) those of w=0."
    assert "The knee is w=2" in s.second
    assert s.notices == ("w=8 is left out: it died",)
    found = studies.knee(CURVE)
    assert found is not None
    assert found.values == {"w": "2"}
    assert "it died" in text(s, 110)
    points = tuple(replace(p, predicted_ns=1.1e8 if p.readings else None) for p in CURVE.points)
    (panel,) = studies.of_sweep(replace(CURVE, points=points)).panels
    assert panel.columns == ("w", "measured", "predicted")
    assert panel.rows[0][1:] == (100.0, 1e9 * 10 / 1.1e8)


def test_a_sweep_without_gain_without_points_or_cut_short() -> None:
    assert studies.of_sweep(swept({"0": 100.0, "1": 101.0})).headline.startswith("Nothing to gain")
    assert studies.of_sweep(swept({"0": None})).headline == "No point was measured."
    assert studies.knee(swept({"0": None})) is None
    assert "No point" in page(studies.of_sweep(swept({"0": None})))
    assert "it goes on" in studies.of_sweep(swept({"0": 100.0}, state="interrupted")).notices[0]
    assert "the time was up" in studies.of_sweep(swept({"0": 100.0}, state="out_of_time")).notices[0]
    points = tuple(Point({"size": n}, (Reading(1e8 * int(n)),)) for n in "12")
    unlike = studies.of_sweep(Sweep(("t",), (Axis("size", ("1", "2")),), points, 1, 30, "complete"))
    assert any("How many samples" in n for n in unlike.notices)


@pytest.mark.parametrize(
    ("readings", "headline", "second"),
    [
        ({"0": [10], "1": [5]}, "w=1 is the best: 2,000 samples a second, 2.00 × those of w=0.", "measured once"),
        (
            {"0": [10, 16], "1": [9, 15]},
            "Undecided: the points are 9.4 % apart, and the runs of one point scatter by 35 %.",
            "--steps",
        ),
        (
            {"0": [20, 21], "1": [10, 10.4], "2": [10.4, 10.9]},
            "w=1 is the best: 980.8 samples a second, 2.01 × (1.82 to 2.22) those of w=0.",
            "Not told apart from it: w=2.",
        ),
    ],
)
def test_a_best_point_within_its_noise_is_no_best_point(
    readings: dict[str, list[float]], headline: str, second: str
) -> None:
    points = tuple(Point({"w": n}, tuple(Reading(1e6 * ms, 10.0) for ms in of)) for n, of in readings.items())
    s = studies.of_sweep(replace(CURVE, points=points))
    said = plain(s.headline)
    assert (said.startswith(headline), second in s.second) == (True, True), (said, s.second)


def test_a_second_axis_has_a_line_a_value_and_a_third_makes_bars() -> None:
    axes = (Axis("a.x", ("0", "1")), Axis("b.y", ("0", "1")))
    points = tuple(Point({"a.x": x, "b.y": y}, (Reading(1e8 + int(x) * 1e7),)) for x in "01" for y in "01")
    (panel,) = studies.of_sweep(Sweep(("train.py",), axes, points, 1, 30, "complete")).panels
    assert (panel.columns, len(panel.rows)) == (("a.x", "b.y=0", "b.y=1"), 2)
    points = tuple(replace(p, values={**p.values, "c.z": "0"}) for p in points)
    assert studies.of_sweep(Sweep(("t",), (*axes, Axis("c.z", ("0",))), points, 1, 30)).panels[0].shape == "bars"


# What if.

RATE = Throughput(320.0, None, 32.0, "loader")


@pytest.mark.parametrize(
    ("step", "rate", "words"),
    [
        (50, RATE, "With x a step would take 50.0 ms instead of 100.0 ms: 2.00 × faster"),
        (100.1, RATE, "With x a step would take as long as now"),
        (150, RATE, "With x a step would take longer: 150.0 ms instead of 100.0 ms"),
        (50, RATE, "640"),
        (50, None, "steps/s"),
    ],
)
def test_one_change(step: float, rate: Throughput | None, words: str) -> None:
    assert words in text(of_answers("run", Answers(100 * MS, (Answer(("x",), step * MS),), None, rate)), 110)


def test_changes_together_and_what_is_not_known() -> None:
    alone = (Answer(("workers 4",), 80 * MS, unknown=("who knows",)), Answer(("microbatches 8",), None, "no pipeline"))
    answers = Answers(100 * MS, alone, Answer(("workers 4", "microbatches 8"), None, "no pipeline"), RATE)
    said = text(of_answers("run", answers), 110)
    for part in ("workers 4 and microbatches 8 would give is not known: no pipeline", "all together", "who knows"):
        assert part in said
    assert json.loads(compact(answers_json(answers)))["together"]["why"] == "no pipeline"
