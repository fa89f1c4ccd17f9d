"""The browser of these tests, one for each file, and how it opens a report."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from dlprof.report import html
from dlprof.result import Result
from tests.fixtures import results
from tests.fixtures.browsers import Open, chromium, log

if TYPE_CHECKING:
    from selenium import webdriver


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    yield from chromium(tmp_path_factory.mktemp("profile"))


@cache
def rendered(name: str) -> str:
    """Return the page of a result that the fixtures have."""
    return html.render(results.ALL[name]())


@pytest.fixture
def opened(browser: webdriver.Chrome, tmp_path: Path) -> Open:
    """Return a function that renders a result, opens it from disk in a theme and waits until its figures are drawn."""
    from selenium.webdriver.support.ui import WebDriverWait

    def opened(shown: str | Result, theme: str = "light") -> webdriver.Chrome:
        page = tmp_path / "report.html"
        text = rendered(shown) if isinstance(shown, str) else html.render(shown)
        page.write_text(text, encoding="utf-8", newline="\n")
        features = [{"name": "prefers-color-scheme", "value": theme}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        log(browser, "browser")
        log(browser, "performance")
        browser.get(page.as_uri())
        drawn = "return document.documentElement.dataset.drawn === 'all'"
        WebDriverWait(browser, 60).until(lambda b: b.execute_script(drawn))
        return browser

    return opened
