"""The page of a comparison is one file that runs nothing and asks for nothing, and holds what the comparison says."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from dlprof.report.compare import page as compare_page
from tests.fixtures import comparisons
from tests.fixtures.pages import Page


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return {name: compare_page.render(make()) for name, make in comparisons.ALL.items()}


@pytest.mark.parametrize("name", comparisons.ALL)
def test_nothing_runs_and_nothing_is_fetched(pages: dict[str, str], name: str) -> None:
    page = Page(pages[name])
    ids = {a["id"] for _, a in page.elements if "id" in a}
    tags = {tag for tag, _ in page.elements}
    assert not {"script", "link", "img", "iframe", "object", "embed", "form", "base"} & tags
    for _, attributes in page.elements:
        assert not {k for k in attributes if k.startswith("on")} | {"src", "srcset", "data", "action"} & set(attributes)
        if "href" in attributes:
            assert (attributes["href"] or "")[:1] == "#"
            assert (attributes["href"] or "")[1:] in ids
    (policy,) = (a["content"] for a in page.of("meta") if a.get("http-equiv") == "Content-Security-Policy")
    assert policy == compare_page.POLICY
    assert "script-src" not in compare_page.POLICY


@pytest.mark.parametrize("name", comparisons.ALL)
def test_it_is_small_and_its_headings_are_in_order(pages: dict[str, str], name: str) -> None:
    assert len(pages[name].encode()) < 200_000
    levels = Page(pages[name]).headings
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(b - a <= 1 for a, b in pairwise(levels))


def test_the_bars_of_both_runs_are_on_one_scale(pages: dict[str, str]) -> None:
    stacks = re.findall(r'<span class="stack">(.*?)</span>', pages["fixed"], re.DOTALL)
    widths = [sum(float(w) for w in re.findall(r"width:([0-9.]+)%", stack)) for stack in stacks]
    assert len(widths) == 2 + 2 * 4
    assert widths[0] == pytest.approx(100, abs=0.5)
    assert widths[1] == pytest.approx(80, abs=0.5)


def test_verdict_prediction_and_settings_are_there(pages: dict[str, str]) -> None:
    text = Page(pages["fixed"]).text.replace("\u00a0", " ")
    assert "B is 1.25 × faster" in text
    assert "Predicted 148.6 ms for num_workers 2 → 6, measured 171.7 ms" in text
    assert "aten::mm" in text
    assert "num_workers" in text


def test_what_is_not_there_is_not_drawn(pages: dict[str, str]) -> None:
    page = Page(pages["empty"])
    assert "no steady step was recorded in A" in page.text.replace("\u00a0", " ")
    assert "where" not in {a.get("id") for _, a in page.elements}
    assert "prediction" not in {a.get("id") for _, a in page.elements}
