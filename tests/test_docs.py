"""The documentation is true as far as a program can tell: links lead somewhere, generated parts are up to date."""

from __future__ import annotations

import re
from importlib import util
from pathlib import Path

import pytest

from tests.fixtures.places import ROOT

PAGES = sorted(
    path
    for path in (
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/*.md"),
        *ROOT.glob("workloads/*.md"),
        *ROOT.glob("benchmarks/**/*.md"),
    )
)
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)")


def anchors(page: Path) -> set[str]:
    """Return what can be linked to in a page, named as GitHub names headings."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_to_files_and_headings_that_there_are(page: Path) -> None:
    dead = []
    for path, anchor in LINK.findall(page.read_text()):
        if path.startswith(("http://", "https://")):
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            dead.append(f"{path}#{anchor}")
    assert dead == []


def test_every_page_and_picture_can_be_reached() -> None:
    linked = {(page.parent / path).resolve() for page in PAGES for path, _ in LINK.findall(page.read_text()) if path}
    there = {*ROOT.glob("docs/*.md"), *ROOT.glob("docs/pictures/*")}
    assert there - linked == set()


@pytest.mark.parametrize("name", ["make_architecture", "make_rules", "make_sources"])
def test_generated_pages_are_up_to_date(name: str) -> None:
    spec = util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    made = util.module_from_spec(spec)
    spec.loader.exec_module(made)
    text = made.PAGE.read_text()
    assert text == made.page(text), "run `make docs`"
