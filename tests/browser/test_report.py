"""The report and the page of a comparison in a real Chromium: they ask for nothing, and run nothing of a trace."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.common.actions.action_builder import ActionBuilder
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from benchmarks.reports import PLOTLY, sharing
from dlprof.analysis.diagnosis import diagnose
from dlprof.analysis.rules import RULES
from dlprof.read.run import open_run
from dlprof.report import brief, comparison, html
from dlprof.report.figures import drawing
from tests.browser.test_exports import PERFETTO, ROWS, served
from tests.fixtures import comparisons, hosts, results, runs, traces
from tests.fixtures.browsers import AXE, NEEDS_BROWSER, Open, complaints, grave_faults, log, requests
from tests.fixtures.runs import MS

pytestmark = [pytest.mark.long, NEEDS_BROWSER]


def rgb(colour: str) -> str:
    """Write a colour as a browser does."""
    return f"rgb({int(colour[1:3], 16)}, {int(colour[3:5], 16)}, {int(colour[5:], 16)})"


@pytest.mark.parametrize(
    ("name", "theme"),
    [
        *(pytest.param(n, "light", marks=[pytest.mark.slow] * (n in ("healthy", "died"))) for n in results.ALL),
        pytest.param("ddp", "dark", marks=pytest.mark.slow),
    ],
)
def test_the_page_draws_every_figure_as_wide_as_the_window_without_complaint_or_request(
    opened: Open, name: str, theme: str
) -> None:
    browser = opened(name, theme)
    charts = browser.find_elements(By.CSS_SELECTOR, ".chart")
    assert charts or name == "empty"
    assert all(chart.find_elements(By.CSS_SELECTOR, "svg.main-svg") for chart in charts)
    assert all(chart.get_attribute("data-drawn") == "yes" for chart in charts)

    def fits(width: int) -> Callable[[webdriver.Chrome], Any]:
        asked = "return window.innerWidth === arguments[0] && document.documentElement.scrollWidth <= arguments[0]"
        return lambda b: b.execute_script(asked, width)

    try:
        for width in (1280, 700, 360):
            metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
            WebDriverWait(browser, 20).until(fits(width), f"{width} wide")
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert complaints(browser) == []
    assert [url for url in requests(browser) if not url.startswith("file://")] == []


def test_a_page_without_its_shared_script_shows_tables_and_says_so(browser: webdriver.Chrome, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text(sharing(html.render(results.ddp()), PLOTLY), encoding="utf-8", newline="\n")
    browser.get(page.as_uri())
    WebDriverWait(browser, 60).until(lambda b: b.execute_script("return document.documentElement.dataset.drawn"))
    assert browser.find_elements(By.CSS_SELECTOR, ".chart") == []
    assert PLOTLY in browser.find_element(By.CSS_SELECTOR, "header.verdict [role=status]").text
    tables = browser.find_elements(By.CSS_SELECTOR, "figure table")
    assert tables
    assert all(table.is_displayed() for table in tables)
    log(browser, "browser")  # the missing file is a complaint of the browser's, and nothing else is


def test_the_network_log_and_the_policy_would_tell(opened: Open) -> None:
    """The two tests above rest on them: what a page does ask for is logged, and ours may not ask."""
    browser = opened("healthy")
    browser.execute_script("new Image().src = 'http://127.0.0.1:9/x.png'")
    WebDriverWait(browser, 10).until(lambda b: any("Content Security Policy" in c["message"] for c in complaints(b)))
    browser.get("data:text/html,<img src='http://127.0.0.1:9/y.png'>")
    assert any(url.endswith("/y.png") for url in requests(browser))


def test_attacks_run_nothing_and_show_as_text(opened: Open) -> None:
    browser = opened("hostile")
    assert browser.execute_script("return window.hit") is None
    shown = browser.execute_script("return document.body.innerText")
    assert "<script>alert(1)</script>" in shown
    assert "<img src=x onerror=window.hit=1>" in shown
    assert browser.find_elements(By.CSS_SELECTOR, "img, iframe, main script, main svg a") == []
    links = browser.execute_script("return [...document.links].map(a => a.getAttribute('href'))")
    assert [link for link in links if not link.startswith("#")] == []
    # In a figure too, the text is drawn as it is.
    ticks = browser.execute_script(
        "return [...document.querySelectorAll('.chart .ytick text')].map(t => t.textContent)"
    )
    assert "<script>alert(1)</script>" in ticks


def attacked(folder: Path) -> Path:
    """Record two ranks in whose traces, settings and logs every name is an attack."""
    names = [attack.encode("utf-8", "replace").decode() for attack in results.ATTACKS]
    events: list[Any] = []
    for n in range(4):
        t = n * 1_000 * MS
        events.append(traces.step(n, t, 900 * MS))
        for i, name in enumerate(names):
            at = t + i * 60 * MS
            events += [
                traces.op(name, at, 20 * MS),
                traces.annotation(name, at + 21 * MS, 10 * MS),
                *traces.launched(name, at + 32 * MS, at + 33 * MS, 20 * MS, 100 * n + i + 1),
            ]
    facts = {
        "host": names[0],
        "device": {"type": "cuda", "name": names[2]},
        "versions": {"torch": names[1], names[3]: names[4]},
        "env": dict.fromkeys(names, names[0]),
        "loaders": [{"role": "train", "batch_size": names[0], "num_workers": 0, "dataset": names[1]}],
        "model": {"class": names[5], "parameters": 7},
    }
    stalls = [
        {**runs.stall("checkpoint", step, 300 * MS), "path": name} for step, name in enumerate(names[:9], start=5)
    ]
    steps = [runs.light(n, 900 * MS) for n in range(40)]
    made = traces.trace(*events, world_size=2)
    ranks = [(made, steps, facts)] * 2
    path = runs.recorded(folder, *ranks, stalls=[stalls, stalls], command=names, hosts=names)
    stack = ";".join(f"{name.replace(';', ' ')[:60]} (/me/{i}.py:1)".replace("\n", " ") for i, name in enumerate(names))
    (path / "ranks/00000/stacks.part").write_text(f"{hosts.RANK}thread (7): MainThread;{stack} 90\n")
    return path


def test_a_hostile_recording_runs_nothing_either(opened: Open, tmp_path: Path) -> None:
    result = diagnose(open_run(attacked(tmp_path / "run")), RULES, jobs=1)
    assert [o for o in result.outcomes if o.state == "error"] == []
    browser = opened(result)
    assert browser.execute_script("return window.hit") is None
    assert complaints(browser) == []
    assert [url for url in requests(browser) if not url.startswith("file://")] == []
    shown = browser.execute_script("return document.body.textContent")
    for attack in results.ATTACKS[:3]:
        assert attack in shown
    assert browser.find_elements(By.CSS_SELECTOR, "img, iframe, main script, main svg a") == []
    assert all(c.get_attribute("data-drawn") == "yes" for c in browser.find_elements(By.CSS_SELECTOR, ".chart"))


def test_a_finding_opens_its_manual_inside_the_page(opened: Open) -> None:
    browser = opened("ddp")
    finding = browser.find_element(By.ID, "finding-1")
    manual = finding.find_element(By.CSS_SELECTOR, ".manual")
    assert not manual.is_displayed()
    finding.find_element(By.CSS_SELECTOR, ":scope > details > summary").send_keys(Keys.ENTER)
    WebDriverWait(browser, 20).until(lambda _: manual.is_displayed())
    assert "The loader delivers a batch later" in manual.text


@pytest.mark.parametrize(("theme", "ink"), [("light", drawing.INK), ("dark", drawing.DARK[drawing.INK])])
def test_page_and_figures_follow_the_theme(opened: Open, theme: str, ink: str) -> None:
    browser = opened("ddp", theme)
    assert browser.execute_script("return getComputedStyle(document.body).color") == rgb(ink)
    label = "#chart-evidence-2 .bars .bartext"
    assert browser.execute_script(f"return getComputedStyle(document.querySelector('{label}')).fill") == rgb(ink)


@pytest.mark.long
def test_the_keyboard_reaches_every_part_and_zooms(opened: Open) -> None:
    browser = opened("ddp")
    reached: set[str | None] = set()
    wanted = {"a", "summary", "chart-panel-1", "chart-panel-2"}
    for _ in range(80):
        if wanted <= reached:
            break
        browser.switch_to.active_element.send_keys(Keys.TAB)
        active = browser.switch_to.active_element
        reached.add(active.tag_name if active.tag_name in ("a", "summary") else active.get_attribute("id"))
    assert wanted <= reached
    chart = browser.find_element(By.ID, "chart-panel-2")
    span = "const [a, b] = document.getElementById('chart-panel-2')._fullLayout.xaxis.range; return b - a"
    whole = browser.execute_script(span)
    chart.send_keys("+")
    WebDriverWait(browser, 20).until(lambda b: b.execute_script(span) == pytest.approx(whole / 2))
    chart.send_keys("0")
    WebDriverWait(browser, 20).until(lambda b: b.execute_script(span) == pytest.approx(whole))


def column(browser: webdriver.Chrome, label: str, place: int) -> list[str]:
    """Return the cells of a column that are shown, of the table in the region of that label."""
    return list(
        browser.execute_script(
            'return [...document.querySelector(`[aria-label="${arguments[0]}"] table`).tBodies[0].rows]'
            ".filter(row => !row.hidden).map(row => row.cells[arguments[1]].textContent.replaceAll('\u00a0', ' '))",
            label,
            place,
        )
    )


def test_tables_sort_by_what_their_figures_mean(opened: Open) -> None:
    browser = opened("tables")
    head = browser.find_elements(By.CSS_SELECTOR, '[aria-label="Operators"] thead button')
    assert column(browser, "Operators", 1)[:3] == ["1.00 s", "20.0 ms", "999.0 µs"]
    head[1].send_keys(Keys.ENTER)
    assert column(browser, "Operators", 1)[:3] == ["1.00 s", "20.0 ms", "10.0 ms"]
    head[1].send_keys(Keys.ENTER)
    assert column(browser, "Operators", 1)[:3] == ["—", "4.00 µs", "999.0 µs"]
    head[0].send_keys(Keys.ENTER)
    assert column(browser, "Operators", 0)[:4] == ["op 0", "op 1", "op 2", "op 3"]
    sorts = browser.execute_script(
        "return [...document.querySelectorAll('[aria-label=\"Operators\"] th')].map(t => t.ariaSort)"
    )
    assert sorts[:3] == ["ascending", None, None]


def test_tables_are_filtered_by_any_word(opened: Open) -> None:
    browser = opened("tables")
    box = browser.find_element(By.CSS_SELECTOR, 'input[aria-label="Filter the rows of Operators"]')
    box.send_keys("OP 1")
    assert set(column(browser, "Operators", 0)) == {"op 1", "op 10", "op 11"}
    assert browser.find_element(By.CSS_SELECTOR, ".filter [role=status]").text == "3 of 12"
    box.send_keys(Keys.BACKSPACE * 4)
    assert len(column(browser, "Operators", 0)) == 12


MODULES = "The modules of the model"


def names(browser: webdriver.Chrome) -> list[str]:
    """Return the first word of each row of the modules that is shown."""
    return [text.split(" ")[0] for text in column(browser, MODULES, 0)]


def test_modules_open_and_close_by_their_buttons_and_by_keys(opened: Open) -> None:
    browser = opened("ddp")
    outside = ["communication", "device"]
    whole = ["Encoder", "encoder.layer.*", "attention", "mlp", "head", *outside]
    assert names(browser) == whole
    model, layers = browser.find_elements(By.CSS_SELECTOR, f'[aria-label="{MODULES}"] tbody button')
    assert model.accessible_name == "Encoder"
    layers.send_keys(Keys.ENTER)
    assert names(browser) == ["Encoder", "encoder.layer.*", "head", *outside]
    assert layers.get_attribute("aria-expanded") == "false"
    model.send_keys(Keys.ARROW_LEFT)
    assert names(browser) == ["Encoder", *outside]
    model.send_keys(Keys.ARROW_RIGHT)
    assert names(browser) == ["Encoder", "encoder.layer.*", "head", *outside]
    layers.send_keys(Keys.ARROW_RIGHT)
    assert names(browser) == whole
    assert layers.get_attribute("aria-expanded") == "true"


def test_modules_are_sorted_with_what_is_inside_them_and_found_with_what_is_around_them(opened: Open) -> None:
    browser = opened("ddp")
    heads = browser.find_elements(By.CSS_SELECTOR, f'[aria-label="{MODULES}"] thead button')
    heads[2].send_keys(Keys.ENTER)
    heads[2].send_keys(Keys.ENTER)
    assert names(browser) == ["communication", "device", "Encoder", "head", "encoder.layer.*", "mlp", "attention"]
    box = browser.find_element(By.CSS_SELECTOR, f'input[aria-label="Filter the rows of {MODULES}"]')
    box.send_keys("mlp")
    assert names(browser) == ["Encoder", "encoder.layer.*", "mlp"]
    box.send_keys(Keys.BACKSPACE * 3)
    assert len(names(browser)) == 7


def test_a_frame_of_the_flame_graph_is_widened_by_a_click_and_the_whole_comes_back(opened: Open) -> None:
    browser = opened("tables")
    chart = browser.find_element(By.ID, "chart-panel-2")
    span = "return document.getElementById('chart-panel-2')._fullLayout.xaxis.range"
    assert browser.execute_script(span) == [0, 1200]
    drawn = [text.text for text in chart.find_elements(By.CSS_SELECTOR, ".bartext")]
    assert "decode (data.py)" in drawn
    browser.execute_script("arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})", chart)
    frame = chart.find_element(By.CSS_SELECTOR, ".draglayer .nsewdrag").rect
    plot = browser.execute_script("return document.querySelector('#chart-panel-2').getBoundingClientRect().y")
    mouse = ActionBuilder(browser)
    # The third row of frames, in the first tenth of the width.
    at = round(frame["x"] + frame["width"] / 10), round(plot + 8 + (frame["height"]) * 2.5 / 4)
    mouse.pointer_action.move_to_location(at[0] - 3, at[1]).move_to_location(*at).click()  # type: ignore[no-untyped-call]
    mouse.perform()
    WebDriverWait(browser, 20).until(lambda b: b.execute_script(span) == [0, 500])
    chart.send_keys("0")
    WebDriverWait(browser, 20).until(lambda b: b.execute_script(span) == [0, 1200])


def test_the_pointer_tells_time_and_number_of_a_step(opened: Open) -> None:
    browser = opened("tables")
    browser.execute_script("Plotly.Fx.hover('chart-panel-3', {xval: 4})")
    told = "return document.querySelector('#chart-panel-3 .hoverlayer').textContent"
    WebDriverWait(browser, 20).until(lambda b: "step 44" in b.execute_script(told))
    shown = browser.execute_script(told).replace("\u00a0", " ")
    assert "rank 0 : 200 ms · step 44" in shown
    assert "rank 1 : 300 ms" in shown


@pytest.mark.long
@pytest.mark.skipif(not AXE.is_file(), reason="axe-core is not installed (make axe)")
@pytest.mark.parametrize(
    ("name", "theme"), [("ddp", "dark"), ("tables", "light"), pytest.param("many", "light", marks=pytest.mark.slow)]
)
def test_axe_finds_no_serious_fault(opened: Open, name: str, theme: str) -> None:
    browser = opened(name, theme)
    browser.execute_script("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert grave_faults(browser) == {}
    # It would tell.
    browser.execute_script("document.querySelector('main').append(document.createElement('button'))")
    assert set(grave_faults(browser)) == {"button-name"}


def test_print_is_on_paper_whatever_the_screen_shows(opened: Open) -> None:
    """Light, with figures as wide as paper, without what only a screen can use; the screen has its own again after."""
    browser = opened("ddp", "dark")
    widths = "return [...document.querySelectorAll('.chart .main-svg:first-of-type')].map(s => s.clientWidth)"
    label = "return getComputedStyle(document.querySelector('#chart-evidence-2 .bars .bartext')).fill"
    shown = "return getComputedStyle(document.querySelector(arguments[0])).display !== 'none'"
    before, ink = browser.execute_script(widths), browser.execute_script(label)
    browser.execute_script("window.dispatchEvent(new Event('beforeprint'))")
    features = [{"name": "prefers-color-scheme", "value": "dark"}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print", "features": features})
    try:
        WebDriverWait(browser, 20).until(lambda b: set(b.execute_script(widths)) - {0} == {680})
        WebDriverWait(browser, 20).until(lambda b: b.execute_script(label) == rgb(drawing.INK))
        assert browser.execute_script("return getComputedStyle(document.body).color") == rgb(drawing.INK)
        for gone in ("nav", ".keys", ".finding > details", ".onward", "#run", "#checked", "button.copy"):
            assert not browser.execute_script(shown, gone)
        for kept in ("h1", ".bars", ".legend", ".advice", "#facts"):
            assert browser.execute_script(shown, kept)
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "", "features": features})
        browser.execute_script("window.dispatchEvent(new Event('afterprint'))")
    WebDriverWait(browser, 20).until(lambda b: b.execute_script(widths) == before)
    WebDriverWait(browser, 20).until(lambda b: b.execute_script(label) == ink)


def show_comparison(browser: webdriver.Chrome, folder: Path, name: str, theme: str = "light") -> None:
    page = folder / "compare.html"
    page.write_text(comparison.page(comparisons.ALL[name]()), encoding="utf-8", newline="\n")
    features = [{"name": "prefers-color-scheme", "value": theme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    log(browser, "browser")
    log(browser, "performance")
    browser.get(page.as_uri())


@pytest.mark.parametrize("name", comparisons.ALL)
def test_no_complaint_and_no_request(browser: webdriver.Chrome, tmp_path: Path, name: str) -> None:
    show_comparison(browser, tmp_path, name)
    assert complaints(browser) == []
    assert [url for url in requests(browser) if not url.startswith("file://")] == []
    assert browser.execute_script("return document.scripts.length") == 0


def test_differences_are_drawn_as_wide_as_their_column(browser: webdriver.Chrome, tmp_path: Path) -> None:
    show_comparison(browser, tmp_path, "large")
    wide = "return [...document.querySelectorAll('.diff')].map(e => [e.clientWidth, e.firstChild.clientWidth])"
    drawn = browser.execute_script(wide)
    assert drawn
    assert min(column for column, _ in drawn) > 90
    assert max(bar / column for column, bar in drawn) > 0.4


@pytest.mark.parametrize("width", [380, 1280])
@pytest.mark.parametrize("name", ["large", "hostile"])
def test_nothing_is_wider_than_the_screen(browser: webdriver.Chrome, tmp_path: Path, name: str, width: int) -> None:
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        show_comparison(browser, tmp_path, name)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_in_a_notebook_the_page_draws_every_figure_in_its_frame(browser: webdriver.Chrome, tmp_path: Path) -> None:
    path = tmp_path / "notebook.html"
    path.write_text(f"<!doctype html><meta charset='utf-8'>{html.framed(results.ALL['ddp']())}", encoding="utf-8")
    log(browser, "browser")
    browser.get(path.as_uri())
    browser.switch_to.frame(browser.find_element(By.TAG_NAME, "iframe"))
    drawn = "return document.documentElement.dataset.drawn === 'all'"
    WebDriverWait(browser, 60).until(lambda b: b.execute_script(drawn))
    assert browser.find_elements(By.CSS_SELECTOR, ".chart svg.main-svg")
    assert browser.execute_script("return self.origin") == "null"
    browser.switch_to.default_content()
    assert complaints(browser) == []


@pytest.mark.parametrize("allowed", [True, False])
def test_the_buttons_copy_the_command_and_the_report_for_an_agent(opened: Open, allowed: bool) -> None:
    browser = opened("ddp")
    grants = {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]}
    browser.execute_cdp_cmd("Browser.grantPermissions", grants)
    read = "window.read = navigator.clipboard.readText.bind(navigator.clipboard);"
    deny = "navigator.clipboard.writeText = () => Promise.reject();"
    browser.execute_script(read if allowed else read + deny)
    copied = []
    for button in browser.find_elements(By.CSS_SELECTOR, "button.copy"):
        button.send_keys(Keys.ENTER)
        WebDriverWait(button, 10).until(lambda b: b.text == "Copied")
        copied.append(browser.execute_script("return window.read()"))
    # The first is for the command, the next for what would let more be known, the last one for an agent.
    assert copied == [
        "dlprof try runs/ddp_resnet --change 1",
        "dlprof wrap --shapes -- torchrun --nproc-per-node=4 workloads/ddp_resnet.py --epochs 2",
        brief.markdown(results.ddp(), "runs/ddp_resnet", lambda _: None),
    ]
    assert complaints(browser) == []
    browser.execute_cdp_cmd("Browser.resetPermissions", {})


@pytest.mark.skipif(not PERFETTO.is_dir(), reason="Perfetto's page is not installed (make viewers)")
def test_perfetto_is_handed_the_timeline_by_a_click_and_asked_for_nothing_before(opened: Open, tmp_path: Path) -> None:
    browser = opened("ddp")
    page = browser.current_window_handle
    button = browser.find_element(By.ID, "perfetto")
    assert button.get_attribute("data-page") == "https://ui.perfetto.dev"
    assert [url for url in requests(browser) if not url.startswith("file://")] == []
    with served(PERFETTO, tmp_path / "none") as address:
        browser.execute_script("arguments[0].dataset.page = arguments[1]", button, f"{address}/index.html")
        button.send_keys(Keys.ENTER)
        WebDriverWait(browser, 20).until(lambda b: len(b.window_handles) == 2)
        browser.switch_to.window(next(w for w in browser.window_handles if w != page))
        try:
            # A page from a disk is nobody that Perfetto knows: it asks the reader.
            trust = (
                "return [...document.querySelectorAll('button')].find(b => /^(yes|always trust)/i.test(b.textContent))"
            )
            WebDriverWait(browser, 60).until(lambda b: b.execute_script(trust)).click()
            loaded = "return !!(window.app && window.app.trace)"
            WebDriverWait(browser, 60).until(lambda b: b.execute_script(loaded))
            browser.set_script_timeout(60)
            spans = browser.execute_async_script(ROWS, "select name, dur / 1000 from slice order by ts, dur desc")
            lanes = browser.execute_async_script(ROWS, "select count(distinct track_id) from slice")
        finally:
            browser.close()
            browser.switch_to.window(page)
    drawn = next(p for p in results.ddp().panels if p.shape == "timeline").rows
    assert sorted(spans) == sorted([str(row[3]), row[2] // 1000] for row in drawn)
    assert lanes == [[len({row[0] for row in drawn})]]


def test_the_bar_of_a_share_is_as_long_in_every_column(opened: Open) -> None:
    browser = opened("ddp")
    bars = browser.execute_script(
        "return [...document.querySelectorAll('.share')].filter(e => e.clientWidth).map(e => {"
        "  const style = getComputedStyle(e), inside = e.clientWidth - parseFloat(style.paddingRight);"
        "  return [parseFloat(style.getPropertyValue('--w')), parseFloat(style.backgroundSize), inside]; })"
    )
    assert len(bars) > 3
    whole = bars[0][1] / bars[0][0] * 100
    assert whole > 60
    assert [bar for bar in bars if abs(bar[1] - bar[0] * whole / 100) > 0.1 or whole > bar[2] + 0.5] == []
