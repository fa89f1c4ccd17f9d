"""Reports on paper and on a narrow screen: nothing lies over another, and what is cut is seen to go on."""

from __future__ import annotations

import base64
import io
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from PIL import Image, ImageStat
from selenium import webdriver
from selenium.common.exceptions import TimeoutException
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

from dlprof.analysis.diagnosis import diagnose
from dlprof.analysis.rules import RULES
from dlprof.read.run import open_run
from dlprof.report import comparison
from dlprof.result import Result
from tests.fixtures import comparisons, results
from tests.fixtures.browsers import NEEDS_BROWSER, Open
from tests.fixtures.places import TRACES

pytestmark = [pytest.mark.long, NEEDS_BROWSER]

A4 = {"paperWidth": 8.27, "paperHeight": 11.69, "preferCSSPageSize": True, "printBackground": True}
BETWEEN_MARGINS = 703  # pixels of the width of A4
LIGHT = 250  # of 255: a card's pixels are lighter
MARGIN = 12 / 25.4 * 72  # points, as page.css has it
RECORDED = TRACES / "h200" / "g02_resnet_layout"
PDFTOTEXT = shutil.which("pdftotext")


def deep() -> Result:
    """Return a report whose model has more modules than its region of the screen shows."""
    encoder = results.encoder()
    layers = tuple(results.module(f"layers.{n}", f"Layer{n}", 1, 3.0, own=3.0) for n in range(60))
    return replace(results.training(), modules=replace(encoder, rows=(encoder.rows[0], *layers)))


def recorded() -> Result:
    """Return the report of a recording of a GPU."""
    return diagnose(open_run(RECORDED), RULES, jobs=1)


# Reports, and how many sheets each may take.
REPORTS = pytest.mark.parametrize(
    ("report", "most"),
    [
        pytest.param(results.training, 5, id="training"),
        pytest.param(results.healthy, 3, id="healthy", marks=pytest.mark.slow),
        pytest.param(results.died, 4, id="died", marks=pytest.mark.slow),
        pytest.param(deep, 5, id="deep"),
        pytest.param(
            recorded,
            4,
            id="recorded",
            marks=(pytest.mark.slow, pytest.mark.skipif(not RECORDED.is_dir(), reason="needs the reference traces")),
        ),
    ],
)


@contextmanager
def screen(browser: webdriver.Chrome, width: int, media: str = "") -> Iterator[None]:
    """Show the page on a screen of a width, or as on paper."""
    metrics = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media})
    try:
        WebDriverWait(browser, 20).until(lambda b: b.execute_script("return innerWidth") == width)
        yield
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


# Texts that overlap, in pairs: the boxes of their lines, without what an element that clips leaves out and without a
# sixth above and below, where lines that are set tightly have no ink.
OVERLAPS = """
const lines = [];
const words = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (words.nextNode()) {
  const text = words.currentNode;
  if (!text.data.trim() || text.parentElement.closest('script, style, noscript, .skip')) continue;
  const range = document.createRange();
  range.selectNodeContents(text);
  for (const r of range.getClientRects()) {
    const line = { left: r.left, right: r.right, top: r.top + r.height / 6, bottom: r.bottom - r.height / 6, text };
    for (let e = text.parentElement; e; e = e.parentElement) {
      if (e.ownerSVGElement || getComputedStyle(e).overflow === 'visible') continue;
      const clip = e.getBoundingClientRect();
      for (const [side, most] of [['left', 'max'], ['right', 'min'], ['top', 'max'], ['bottom', 'min']])
        line[side] = Math[most](line[side], clip[side]);
    }
    if (line.right - line.left > 1 && line.bottom - line.top > 1) lines.push(line);
  }
}
lines.sort((a, b) => a.top - b.top);
const found = [];
for (const [i, a] of lines.entries()) for (let j = i + 1; j < lines.length && lines[j].top < a.bottom - 1; j++) {
  const b = lines[j];
  if (a.left < b.right - 1 && b.left < a.right - 1) found.push([a.text.data.slice(0, 60), b.text.data.slice(0, 60)]);
}
return [lines.length, found];
"""
# Boxes whose border would be cut by the edge of the paper's area, and headings of tables that print as they scroll.
EDGES = """
const shown = (what) => [...document.querySelectorAll(what)].filter(e => e.getClientRects().length);
const outside = shown('.box, .finding, pre, table').filter(e => {
  const r = e.getBoundingClientRect();
  return r.left < .5 || r.right > innerWidth - .5;
});
const heads = shown('thead th').filter(e => getComputedStyle(e).position !== 'static');
const repeated = shown('thead').filter(e => getComputedStyle(e).display === 'table-header-group');
return [...outside, ...heads, ...repeated].map(e => e.outerHTML.slice(0, 120));
"""


@REPORTS
def test_on_paper_no_text_lies_over_another(opened: Open, tmp_path: Path, report: Any, most: int) -> None:
    browser = opened(report())
    pdf = tmp_path / "report.pdf"
    pdf.write_bytes(base64.b64decode(browser.execute_cdp_cmd("Page.printToPDF", A4)["data"]))
    assert 1 <= len(re.findall(rb"/Type /Page\b", pdf.read_bytes())) <= most
    with screen(browser, BETWEEN_MARGINS, "print"):
        lines, found = browser.execute_script(OVERLAPS)
        assert (lines > 20, found) == (True, [])
        assert browser.execute_script(EDGES) == []
        # It would tell.
        rise = "document.querySelector('#facts').style.marginTop = '-60px'"
        browser.execute_script(rise)
        assert browser.execute_script(OVERLAPS)[1]
    if PDFTOTEXT is None:
        pytest.skip("pdftotext (poppler-utils) is not installed")
    check_sheets(pdf)


WORD = re.compile(r'<word xMin="(\S+)" yMin="(\S+)" xMax="(\S+)" yMax="(\S+)">(.*?)</word>')


def check_sheets(pdf: Path) -> None:
    """Check that each word on the printed sheets has a place of its own."""
    told = subprocess.run([str(PDFTOTEXT), "-bbox", str(pdf), "-"], capture_output=True, text=True, check=True).stdout
    sheets = told.split("<page ")[1:]
    for sheet in sheets:
        wide, high = (float(n) for n in re.findall(r'(?:width|height)="(\S+)"', sheet)[:2])
        words = [(*map(float, found[:4]), found[4]) for found in WORD.findall(sheet)]
        assert words, "a sheet is empty"
        outside = [w for w in words if w[0] < MARGIN - 1 or w[2] > wide - MARGIN + 1 or w[3] > high - MARGIN + 1]
        assert outside == []
        # Of a line's height a quarter above and below has no ink of most letters.
        inked = [(x, y + (b - y) / 4, r, b - (b - y) / 4, text) for x, y, r, b, text in words]
        over = [
            (p[4], q[4])
            for p, q in combinations(inked, 2)
            if p[0] < q[2] - 1 and q[0] < p[2] - 1 and p[1] < q[3] - 0.5 and q[1] < p[3] - 0.5
        ]
        assert over == []


# Elements with an end outside the screen or outside their region, and texts that an element clips without saying so:
# with an ellipsis, or as the parts of a bar, which stand in its legend. Figures cut their own frames' names.
CUT = """
document.querySelectorAll('details').forEach(d => d.open = true);
const all = (what) => [...document.querySelectorAll(what)].filter(e => e.getClientRects().length);
const beyond = (e, region) => {
  const r = e.getBoundingClientRect();
  const end = region?.getBoundingClientRect() ?? { right: innerWidth };
  return r.width && r.height && (r.right > end.right + 1 || (e.ownerSVGElement && r.bottom > end.bottom + 1));
};
const clipped = (e) => {
  if (e.scrollWidth <= e.clientWidth + 1 && e.scrollHeight <= e.clientHeight + 1) return false;
  const style = getComputedStyle(e);
  const said = style.textOverflow === 'ellipsis' || style.webkitLineClamp !== 'none' || e.matches('.bar i');
  return e.clientWidth && style.overflow === 'hidden' && !said;
};
return [
  ...all('body :not(.chart *, .skip, .stacked > thead, .stacked > thead *)')
    .filter(e => beyond(e, e.closest('.scroll')) || clipped(e)),
  ...all('.chart :is(.xtick text, .xtitle)').filter(e => beyond(e, e.closest('.chart'))),
].map(e => e.outerHTML.slice(0, 200));
"""


def cut_for_good(browser: webdriver.Chrome) -> list[str]:
    """Return what is still cut when the figures have been drawn anew."""
    drawn = "return document.documentElement.dataset.drawn === 'all'"
    browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
    WebDriverWait(browser, 60).until(lambda b: b.execute_script(drawn))
    with suppress(TimeoutException):
        WebDriverWait(browser, 20).until(lambda b: b.execute_script(CUT) == [])
    return list(browser.execute_script(CUT))


def cut(browser: webdriver.Chrome, side: str) -> list[WebElement]:
    """Return the regions that go on to the right or below."""
    inner, outer = ("scrollWidth", "clientWidth") if side == "right" else ("scrollHeight", "clientHeight")
    asked = "return [...document.querySelectorAll('.scroll')].filter(e => e.%s > e.%s + 1)"
    return list(browser.execute_script(asked % (inner, outer)))


def shaded(browser: webdriver.Chrome, region: WebElement, side: str, at_end: bool = False) -> bool:
    """Tell whether a region, scrolled to its beginning or its end, is darker than a card along a side of its rows."""
    scrolled = (
        "const [e, x, y] = arguments; e.scrollIntoView({block: 'end', behavior: 'instant'});"
        "e.style.scrollbarWidth = 'none';"
        "e.scrollTo(x, y); dispatchEvent(new Event('resize'));"  # as a phone's address bar does
        "const [r, one] = [e, e.querySelector('tbody tr')].map(e => e.getBoundingClientRect());"
        "return [r.left, one.top, r.right, r.bottom, one.bottom].map(Math.floor)"
    )
    to = 1e6 if at_end else 0
    x, y = (to, 0) if side == "right" else (0, to)
    left, top, right, bottom, low = browser.execute_script(scrolled, region, x, y)
    shot = Image.open(io.BytesIO(base64.b64decode(browser.execute_cdp_cmd("Page.captureScreenshot", {})["data"])))
    line = (right - 4, top, right - 3, low) if side == "right" else (left, bottom - 4, right, bottom - 3)
    return ImageStat.Stat(shot.convert("L").crop(line)).median[0] < LIGHT


@pytest.mark.parametrize(
    ("name", "before"),
    [
        ("tables", 1280),
        ("training", 390),
        *(pytest.param(n, 1280, marks=pytest.mark.slow) for n in ("training", "died", "healthy", "many")),
    ],
)
def test_nothing_is_cut_on_a_narrow_screen_without_a_hint(opened: Open, name: str, before: int) -> None:
    """Neither where the page was loaded on it, nor where its window was made narrow."""
    browser = opened(name)
    with screen(browser, 390):
        if before == 390:
            browser.refresh()
        assert cut_for_good(browser) == []
        assert browser.execute_script("return document.documentElement.scrollWidth") == 390
        below = cut(browser, "below")
        assert [r for r in below if not shaded(browser, r, "below") or shaded(browser, r, "below", True)] == []
        assert below or name in ("died", "healthy")
        assert cut(browser, "right") == []


def test_a_table_that_goes_on_to_the_right_says_so_until_its_end(browser: webdriver.Chrome, tmp_path: Path) -> None:
    page = tmp_path / "compare.html"
    page.write_text(comparison.page(comparisons.ALL["large"]()), encoding="utf-8", newline="\n")
    browser.get(page.as_uri())
    with screen(browser, 390):
        wide = cut(browser, "right")
        assert wide
        assert [r for r in wide if not shaded(browser, r, "right") or shaded(browser, r, "right", True)] == []
