"""The documentation is true as far as a program can tell: links lead somewhere, generated parts are up to date."""

from __future__ import annotations

import os
import re
import sys
from importlib import util
from pathlib import Path

import pytest
import yaml

from tests.fixtures.jobs import launch
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_files_that_are_named_are_there(page: Path) -> None:
    named = re.findall(r"`((?:tests|reports|benchmarks|dlprof|docs|workloads|simulator)/[\w/.-]+)`", page.read_text())
    files = [
        name
        for name in named
        if re.search(r"\.\w+$|/$|^(tests|reports)/", name) and not re.search("SUBJECT|NAME", name)
    ]
    assert [name for name in files if not (ROOT / name).exists()] == []


def test_no_page_installs_dlprof_from_an_index_that_has_it_not() -> None:
    # An extra of what is installed already needs no index that has it.
    install = re.compile(r"(?:pip|uv|pipx)(?: tool)? install (?:-\S+ )*['\"]?dlprof(?!\[| @)\b.*")
    assert [found for page in PAGES for found in install.findall(page.read_text())] == []


def test_every_page_and_picture_can_be_reached() -> None:
    linked = {(page.parent / path).resolve() for page in PAGES for path, _ in LINK.findall(page.read_text()) if path}
    there = {*ROOT.glob("docs/*.md"), *ROOT.glob("docs/pictures/*")}
    assert there - linked == set()


def test_the_navigation_of_the_site_has_every_page_once() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    listed = [page for part in nav for page in ([part] if isinstance(part, str) else next(iter(part.values())))]
    assert len(listed) == len(set(listed))
    assert {page.relative_to(ROOT).as_posix() for page in PAGES} <= set(listed)


@pytest.mark.long
def test_the_site_is_built_without_a_warning_and_fetches_nothing(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="mkdocs-material is not installed: pip install '.[docs]'")
    # A proxy that is not there: what wants the network fails.
    env = {**os.environ, "https_proxy": "http://127.0.0.1:9", "http_proxy": "http://127.0.0.1:9"}
    words = ["mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = launch([sys.executable, "-m", *words], ROOT, env={**env, "NO_MKDOCS_2_WARNING": "1"})
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    pages = {path.relative_to(tmp_path).as_posix(): path.read_text() for path in tmp_path.rglob("*.html")}
    assert {"index.html", "CHANGELOG.html", "docs/read.html", "workloads/index.html"} <= pages.keys()
    for name in (name for name in pages if name.startswith("docs/")):
        fetched = re.findall(r'<(?:link|script|img)\b[^>]*(?:href|src)="([^"]+)"', pages[name])
        assert any("main." in one and one.endswith(".css") for one in fetched)
        assert [one for one in fetched if not (tmp_path / "docs" / one).is_file()] == [], name
    assert (tmp_path / "search/search_index.json").is_file()


@pytest.mark.parametrize("name", ["make_architecture", "make_rules", "make_sources"])
def test_generated_pages_are_up_to_date(name: str) -> None:
    spec = util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    made = util.module_from_spec(spec)
    spec.loader.exec_module(made)
    text = made.PAGE.read_text()
    assert text == made.page(text), "run `make docs`"
