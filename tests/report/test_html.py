"""The page is one file that asks for nothing, holds its figures as data, and runs no script but its own."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path

import pytest
from jinja2 import DictLoader, Environment
from msgspec.structs import replace

from dlprof.plain import NBSP
from dlprof.report import html
from dlprof.result import CATEGORIES, Blame, Fact, Panel, Result, TimePart
from tests.fixtures import results
from tests.fixtures.pages import Page


@pytest.fixture(scope="module")
def pages() -> dict[str, Page]:
    return {name: Page(html.render(make())) for name, make in results.ALL.items()}


@pytest.mark.parametrize("name", results.ALL)
def test_nothing_is_fetched_and_links_stay_inside(pages: dict[str, Page], name: str) -> None:
    page = pages[name]
    ids = {a["id"] for _, a in page.elements if "id" in a}
    for tag, attributes in page.elements:
        assert not {"src", "srcset", "data", "action", "formaction", "poster", "background", "xlink:href"} & set(
            attributes
        ), tag
        if "href" in attributes:
            assert (attributes["href"] or "")[:1] == "#"
            assert (attributes["href"] or "")[1:] in ids
    assert not {"link", "img", "iframe", "object", "embed", "form", "base"} & {tag for tag, _ in page.elements}


@pytest.mark.parametrize("name", results.ALL)
def test_the_policy_names_the_two_scripts_of_the_page_and_no_other(pages: dict[str, Page], name: str) -> None:
    page = pages[name]
    [policy] = [a["content"] or "" for a in page.of("meta") if a.get("http-equiv") == "Content-Security-Policy"]
    kinds = [a.get("type") for a in page.of("script")]
    assert kinds == ["application/json", None, None]
    hashes = {
        "'sha256-" + base64.b64encode(hashlib.sha256(s.encode()).digest()).decode() + "'" for s in page.scripts[1:]
    }
    parts = {p.split()[0]: set(p.split()[1:]) for p in policy.split(";")}
    assert parts["default-src"] == {"'none'"}
    assert parts["script-src"] == hashes
    assert "connect-src" not in parts


@pytest.mark.parametrize("name", results.ALL)
def test_no_element_carries_a_handler(pages: dict[str, Page], name: str) -> None:
    handlers = [(tag, a) for tag, attributes in pages[name].elements for a in attributes if a.startswith("on")]
    assert handlers == []


@pytest.mark.parametrize("name", results.ALL)
def test_the_data_has_a_place_for_each_figure_and_a_figure_for_each_place(pages: dict[str, Page], name: str) -> None:
    page = pages[name]
    data = json.loads(page.scripts[0])
    places = {(a["id"] or "").removeprefix("chart-") for a in page.of("div") if a.get("class") == "chart"}
    assert set(data["figures"]) == places
    assert not set("<>&\u2028\u2029") & set(page.scripts[0])


@pytest.mark.parametrize("name", results.ALL)
def test_ids_are_single_and_labels_point_at_something(pages: dict[str, Page], name: str) -> None:
    ids = [a["id"] for _, a in pages[name].elements if "id" in a]
    assert len(ids) == len(set(ids))
    labelled = {a["aria-labelledby"] for _, a in pages[name].elements if "aria-labelledby" in a}
    assert labelled <= set(ids)


@pytest.mark.parametrize("name", results.ALL)
def test_the_page_has_a_language_landmarks_and_headings_in_order(pages: dict[str, Page], name: str) -> None:
    page = pages[name]
    assert page.of("html") == [{"lang": "en"}]
    assert [len(page.of(tag)) for tag in ("main", "nav", "footer", "title")] == [1, 1, 1, 1]
    assert page.headings[0] == 1
    assert page.headings.count(1) == 1
    assert all(after <= before + 1 for before, after in zip(page.headings, page.headings[1:], strict=False))


@pytest.mark.parametrize("name", results.ALL)
def test_every_figure_is_described_in_words(pages: dict[str, Page], name: str) -> None:
    charts = [attributes for attributes in pages[name].of("div") if attributes.get("class") == "chart"]
    assert charts or name == "empty"
    for attributes in charts:
        assert attributes.get("role") in ("img", "group")
        assert len(attributes.get("aria-label") or "") > 10


def test_the_page_says_what_the_result_says(pages: dict[str, Page]) -> None:
    said = " ".join(pages["ddp"].text.replace(NBSP, " ").split())
    result = results.ddp()
    assert said.index("31 % of each step waits for data on rank 1.") < said.index("214.6 ms")
    for outcome in result.outcomes:
        assert outcome.id in said
        assert (outcome.why or outcome.summary).replace("`", "") in said
    for outcome in result.found:
        assert outcome.title in said
        assert all(advice.replace("`", "") in said for advice in outcome.advice)
    for fact in result.facts:
        assert fact.value in said
    assert result.run.warnings[0] in said
    assert "148.6 ms" in said


def test_what_changes_the_training_has_a_section_after_the_findings(pages: dict[str, Page]) -> None:
    said = " ".join(pages["training"].text.replace(NBSP, " ").split())
    findings, apart = said.index("Each saving is estimated alone"), said.index("If the training may change This time")
    assert findings < apart < said.index("A larger batch would fit, and fill the GPU")
    assert said.index("save every 70 steps (now every 7th one) (changes the training)") < apart
    ids = [a["id"] for a in pages["training"].of("article")]
    assert ids == ["finding-1", "finding-2", "finding-3", "finding-training-1"]
    assert "Predicted with larger batches" in said[apart:]
    assert "If the training may change" not in pages["ddp"].text


def test_attacks_are_shown_as_text(pages: dict[str, Page]) -> None:
    for attack in results.ATTACKS[:9]:
        assert attack in pages["hostile"].text
    assert "\\u202eevil" in pages["hostile"].text


def test_large_numbers_among_the_facts_are_written_for_readers() -> None:
    facts = tuple(Fact("Model", *said) for said in (("parameters", "272474"), ("parameter bytes", "1089896")))
    page = html.render(replace(results.healthy(), facts=(*facts, Fact("Loader", "batch size", "1024"))))
    for text in ("272,474", "1.09\u00a0MB", ">1024<"):
        assert text in page


def test_a_page_without_findings_does_not_pretend(pages: dict[str, Page]) -> None:
    assert "no rule could be checked" in pages["empty"].text
    assert "no rule could be checked" not in pages["healthy"].text
    assert pages["healthy"].of("article") == []


def test_plotly_is_the_vendored_file_and_can_stand_in_a_script() -> None:
    from importlib.resources import files

    folder = files("dlprof.report") / "page"
    bundle = (folder / "plotly-basic.min.js").read_bytes()
    assert hashlib.sha256(bundle).hexdigest() in (folder / "README.md").read_text(encoding="utf-8")
    for script in (bundle, (folder / "page.js").read_bytes()):
        assert b"</script" not in script.lower()
        assert b"<!--" not in script
        assert b"\r" not in script


def test_data_cannot_close_its_element_and_reads_back_as_it_was() -> None:
    specs = {"</script><!--": ["<script>", "&lt;", "\u2028\u2029", 'quote"', None, 1.5]}
    text = str(html.data(specs))
    assert not set("<>&\u2028\u2029") & set(text)
    assert json.loads(text)["figures"] == specs


def test_lists_that_several_figures_share_are_written_once() -> None:
    times, short = [float(n) for n in range(html.PACKED)], [1.0, 2.0]
    specs = {name: {"data": [{"x": times, "y": [*times, place], "z": short}]} for place, name in enumerate("ab")}
    data = json.loads(str(html.data(specs)))
    assert data["lists"] == [times]
    assert [data["figures"][name]["data"][0]["x"] for name in "ab"] == [{"list": 0}] * 2
    assert data["figures"]["b"]["data"][0]["y"] == [*times, 1]
    assert data["figures"]["b"]["data"][0]["z"] == short


def test_a_manual_keeps_its_paragraphs_lists_and_code() -> None:
    page = Page(str(html._manual(results.MANUAL + "\n\n<b>x</b>")))
    assert [tag for tag, _ in page.elements] == ["p", "p", "code", "p", "ul", "li", "code", "li", "pre", "p", "p"]
    assert "<b>x</b>" in page.text


def full(ranks: int) -> Result:
    """A result with as much of everything as the report ever holds of a job."""
    few = min(ranks, 8)
    name = "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int>, at::detail::Array<char*>>"
    names = tuple(f"rank {r}" for r in range(few))
    times = tuple(tuple(1e9 * n + 1e4 * r for r in range(few + 1)) for n in range(2_000))
    readings = tuple(tuple(1e9 * n + 1e4 * r for r in range(few + 3)) for n in range(200))
    spans = tuple((f"rank {n % few} · device", 1e4 * n, 7e3 + n, name, "computation") for n in range(600 * few))
    panels = (
        Panel("lines", "Steps", times, ("time_ns", *names), "ns", steps=tuple(range(100_000, 102_000))),
        Panel("areas", "Parts", tuple(row[:6] for row in readings), ("time_ns", *CATEGORIES[:5]), "ns"),
        *(Panel("timeline", f"Step {n}", spans, unit="ns") for n in range(2)),
        *(Panel("lines", f"Sampled {n}", readings, ("time_ns", *names, "a", "b")) for n in range(7)),
        Panel("flame", "Stacks", tuple((n % 30, n, 2, f"{name} {n}", "own") for n in range(400)), unit="samples"),
        *(Panel("table", f"Table {n}", ((name, *range(9)),) * 64, tuple(map(str, range(10)))) for n in range(5)),
    )
    time = tuple(TimePart(r, c, 1e7, 1 / len(CATEGORIES)) for r in range(ranks) for c in CATEGORIES)
    blame = tuple(Blame(r, c, "host", 1e6, 0.01) for r in range(ranks) for c in range(8) if r != c)
    facts = tuple(Fact(f"Section {n % 9}", f"name {n}", name) for n in range(150))
    return replace(results.many(ranks), panels=panels, time=time, blame=blame, facts=facts)


@pytest.mark.parametrize(("ranks", "most"), [(8, 2_000_000), (256, 4_000_000)])
def test_a_page_keeps_to_its_size_however_much_was_recorded(ranks: int, most: int) -> None:
    assert len(html.render(full(ranks)).encode()) <= most


def test_a_template_is_kept_compiled_where_that_can_be_written(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    for folder in (kept, kept, tmp_path / "missing"):
        cache = html.Compiled(str(folder))
        environment = Environment(loader=DictLoader({"page": "<p>{{ word }}</p>"}), bytecode_cache=cache)
        assert environment.get_template("page").render(word="told") == "<p>told</p>"
        assert len(list(kept.iterdir())) == 1
    assert not (tmp_path / "missing").exists()
