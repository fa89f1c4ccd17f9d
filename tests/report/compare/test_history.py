"""A history in words: what changed last, when, and by which setting."""

from __future__ import annotations

import json

from msgspec.structs import replace

from dlprof.analysis.compare.history import Recorded, history
from dlprof.files import compact
from dlprof.report.compare.history import summary, to_json
from dlprof.report.compare.summary import page, text
from dlprof.result import Fact
from dlprof.result.throughput import Throughput
from tests.fixtures.comparisons import found, run

DAY = 86_400 * 10**9


def at(day: int, step: float, workers: str) -> Recorded:
    made = run(step, found("input_wait", 10), facts=(Fact("Loader", "num workers", workers),))
    assert made.window is not None
    window = replace(made.window, throughput=Throughput(32 * 1000 / step, None, 32.0, "loader"))
    return Recorded(f"run-{day}", replace(made, window=window), day * DAY)


def test_the_last_change() -> None:
    told = history([at(1, 100, "0"), at(2, 100.5, "0"), at(3, 50, "2"), at(4, 50, "2")])
    s = summary(told)
    assert (
        s.headline.replace("\u00a0", " ")
        == "Since run-3 the job is 2.01 × faster than the run before, at 640 samples a second."
    )
    assert "num workers 0 → 2" in s.second
    assert s.good
    said = text(s, 120)
    assert "1970-01-04 00:00" in said
    assert "input_wait" in said
    (panel,) = s.panels
    assert panel.marks == ((3.0, "num workers 0 → 2", "change"),)
    page(s)
    assert json.loads(compact(to_json(told)))["moments"][0]["run"] == "run-3"


def test_slower_is_no_good() -> None:
    s = summary(history([at(1, 100, "0"), at(2, 150, "0")]))
    assert s.headline.startswith("The last run is 1.50")
    assert "slower" in s.headline
    assert not s.good


def test_no_change_one_run_and_none() -> None:
    assert summary(history([at(1, 100, "0"), at(2, 100, "0")])).headline.startswith("No change over 2 runs")
    assert summary(history([at(1, 100, "0")])).headline.startswith("One run only")
    assert summary(history([], [("x", "broken")])).notices == ("x is left out: broken",)
