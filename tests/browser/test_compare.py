"""The page of a comparison in a real browser: no complaint, no request, nothing wider than the screen."""

from __future__ import annotations

from pathlib import Path

import pytest
from selenium import webdriver

from dlprof.report.compare import page as compare_page
from tests.fixtures import comparisons
from tests.fixtures.browsers import NEEDS_BROWSER, complaints, log, requests

pytestmark = NEEDS_BROWSER


def show(browser: webdriver.Chrome, folder: Path, name: str, theme: str = "light") -> None:
    page = folder / "compare.html"
    page.write_text(compare_page.render(comparisons.ALL[name]()), encoding="utf-8", newline="\n")
    features = [{"name": "prefers-color-scheme", "value": theme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    log(browser, "browser")
    log(browser, "performance")
    browser.get(page.as_uri())


@pytest.mark.parametrize("name", comparisons.ALL)
def test_no_complaint_and_no_request(browser: webdriver.Chrome, tmp_path: Path, name: str) -> None:
    show(browser, tmp_path, name)
    assert complaints(browser) == []
    assert [url for url in requests(browser) if not url.startswith("file://")] == []
    assert browser.execute_script("return document.scripts.length") == 0


@pytest.mark.parametrize("width", [380, 1280])
@pytest.mark.parametrize("name", ["large", "hostile"])
def test_nothing_is_wider_than_the_screen(browser: webdriver.Chrome, tmp_path: Path, name: str, width: int) -> None:
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        show(browser, tmp_path, name)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
