"""`%load_ext dlprof` in a real kernel: a cell is recorded and reported, a run is shown, a mistake is one line."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

import dlprof
from dlprof.report.html import framed
from tests.fixtures import results
from tests.fixtures.jobs import environment, rows

CELLS = [
    """
%load_ext dlprof
import os, torch
os.chdir({folder!r})
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
""",
    """
%%dlprof -o "a run" --no-sample --window 2,1,2 --set optimizer.foreach=False
for _ in range(30):
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
kept = 4
kept
""",
    "%dlprof a run",
    "%%dlprof --no-report --no-sample --no-trace -o b\nmodel(torch.ones(4, 8)).sum().backward()\noptimizer.step()",
    "print(kept)\n1 / 0",
    "%%dlprof --no-sample -o c\n1 / 0",
    "%%dlprof --no-sample -o d\nprint(kept)",
    "%dlprof nowhere",
    "%%dlprof --widow\n1",
    "%%dlprof --nsys\n1",
    "%%dlprof --set optimizer.none=1\n1",
    "%%dlprof 'open\n1",
]


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[Any]]]:
    """Return the folder of a notebook that has run, and what each of its cells showed."""
    pytest.importorskip("torch", reason="recording needs torch")
    folder = tmp_path_factory.mktemp("notebook")
    made = [nbformat.v4.new_code_cell(text.strip().replace("{folder!r}", repr(str(folder)))) for text in CELLS]  # type: ignore[no-untyped-call]
    book = nbformat.v4.new_notebook(cells=made)  # type: ignore[no-untyped-call]
    env = environment(PYTHONPATH=str(Path(dlprof.__file__).parent.parent))
    done = NotebookClient(book, allow_errors=True).execute(env=env)
    return folder, [cell.outputs for cell in done.cells]


def text(outputs: list[Any]) -> str:
    return "".join(out.text for out in outputs if out.output_type == "stream")


@pytest.mark.long
def test_a_cell_is_recorded_and_shows_its_report_as_the_run_itself_does(cells: tuple[Path, list[list[Any]]]) -> None:
    folder, (_, recorded, shown, *_) = cells
    assert sum(row["optimizer_steps"] for row in rows(folder / "a run/ranks/00000")) == 30
    value, report = (out for out in recorded if out.output_type != "stream")
    assert value.data["text/plain"] == "4"
    assert report.data["text/html"] == framed(dlprof.open(folder / "a run").result)
    assert [out.data["text/html"] for out in shown] == [report.data["text/html"]]
    assert (folder / "a run/report.html").exists()


@pytest.mark.long
def test_what_fails_is_one_line_and_a_cells_own_error_is_shown_once(cells: tuple[Path, list[list[Any]]]) -> None:
    folder, (*_, alone, plain, failed, nothing, unknown, option, nsys, setting, quoted) = cells
    assert alone == []
    assert (folder / "b/run.json").exists()
    assert [out.ename for out in plain if out.output_type == "error"] == ["ZeroDivisionError"]
    errors = [out for out in failed if out.output_type == "error"]
    assert [bool(out.traceback) for out in errors] == [True, False]
    assert errors[0].ename == "ZeroDivisionError"
    assert "dlprof: there is no verdict: no backward()" in text(nothing)
    assert "4\n" in text(nothing)
    said = [text(outputs) for outputs in (unknown, option, nsys, setting, quoted)]
    assert [len(one.splitlines()) for one in said] == [1] * 5
    for one, words in zip(said, ("no such file", "--widow", "--nsys", "no setting", "quotation"), strict=True):
        assert words in one


def test_the_page_stands_in_a_frame_that_reaches_nothing_of_the_notebook() -> None:
    page = framed(results.ALL["hostile"]())
    assert page.count("<iframe") == 1
    assert "sandbox='allow-scripts'" in page
    verdict, _, inside = page.partition(" srcdoc='")
    assert "<script" not in verdict
    assert "'" not in inside.removesuffix("'></iframe></details>")
    assert html.unescape(inside).lstrip().startswith("<!doctype html>")
