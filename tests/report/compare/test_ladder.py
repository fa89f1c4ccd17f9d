"""A ladder in words: the whole gain, the largest step, what was left out."""

from __future__ import annotations

import json

from msgspec.structs import replace

from dlprof.analysis.compare.ladder import ladder
from dlprof.files import compact
from dlprof.report.compare.page import rate, summary, times, to_json
from dlprof.report.compare.summary import page, text
from dlprof.result import Fact, Result
from dlprof.result.figures import Throughput
from tests.fixtures.comparisons import run


def at(step: float, workers: str, samples: float = 32.0, power: float | None = None) -> Result:
    made = run(step, facts=(Fact("Loader", "num workers", workers),))
    assert made.window is not None
    t = Throughput(samples * 1000 / step, None, samples, "loader", power_w=power)
    return replace(made, window=replace(made.window, throughput=t, memory_bytes=2e9))


def test_the_whole_gain_and_the_largest_step() -> None:
    made = ladder([("a", at(200, "0")), ("b", at(100, "2")), ("c", at(80, "4"))], [("d", "broken")])
    s = summary(made)
    assert s.headline.replace("\u00a0", " ") == (
        "The last run is 2.50 × as fast as the first: 160 → 400 samples a second."
    )
    assert s.second.replace("\u00a0", " ") == "The largest gain is 2.00 × by b (num workers 0 → 2)."
    assert s.notices == ("d is left out: broken",)
    assert not s.good
    said = text(s, 110)
    assert "2 GB" in said
    assert "num workers 2 → 4" in said
    assert "samples a second" in page(s)
    json.loads(compact(to_json(made)))


def test_a_change_that_cost_and_energy() -> None:
    made = ladder([("a", at(100, "0", power=160.0)), ("b", at(150, "2", power=160.0))])
    s = summary(made)
    assert "takes 1.50" in s.headline
    assert "cost" in s.second
    assert [row[6] for row in s.table.rows] == [0.5, 0.75]  # W of samples a second: J a sample


def test_within_noise() -> None:
    s = summary(ladder([("a", at(100, "0")), ("b", at(100.2, "2"))]))
    assert "nothing changed beyond noise" in s.headline
    assert "(noise)" in times(ladder([("a", at(100, "0")), ("b", at(100.2, "2"))]).rungs[1].before)
    assert times(None) == ""


def test_too_few() -> None:
    s = summary(ladder([("a", at(100, "0"))]))
    assert "Fewer than two" in s.headline
    assert s.table.rows == ()


def test_rates_by_unit() -> None:
    result = at(100, "0")
    assert rate(result, "samples") == 320
    assert rate(result, "steps") == 10
    assert rate(replace(result, window=None), "steps") is None
