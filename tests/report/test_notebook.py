"""The verdict in a notebook's cell: what was found, what it would save, and nothing that a trace's names could run."""

from __future__ import annotations

from dlprof.report.notebook import render
from dlprof.result import Change, Outcome, Result, RunInfo


def test_findings_are_rows_and_texts_are_escaped() -> None:
    found = Outcome("x", "found", "<script>", saving_ns=2e6, share=0.5, speedup=2.0, changes=(Change("do <b>"),))
    page = render(Result(run=RunInfo("run"), window=None, outcomes=(found,)))
    assert page.count("<tr>") == 2
    assert "&lt;script&gt;" in page
    assert "do &lt;b&gt;" in page
    assert "<script" not in page


def test_what_the_reader_must_know_first_is_a_list() -> None:
    page = render(Result(run=RunInfo("run", warnings=("rank 1 is not here",)), window=None))
    assert "<li>rank 1 is not here</li>" in page
    assert "<table>" not in page
