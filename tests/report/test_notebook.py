"""The verdict in a notebook's cell: what was found, what it would save, and nothing that a trace's names could run."""

from __future__ import annotations

from dlprof.report.notebook import render
from dlprof.result import Change, Outcome, Result, RunInfo
from tests.fixtures import results


def test_findings_are_rows_and_texts_are_escaped() -> None:
    found = Outcome("x", "found", "<script>", saving_ns=2e6, share=0.5, speedup=2.0, changes=(Change("do <b>"),))
    page = render(Result(run=RunInfo("run"), window=None, outcomes=(found,)))
    assert page.count("<tr>") == 2
    assert "&lt;script&gt;" in page
    assert "do &lt;b&gt;" in page
    assert "<script" not in page


def test_what_changes_the_training_is_a_table_of_its_own_after_the_findings() -> None:
    page = render(results.training())
    cures, _, apart = page.partition("<th>if the training may change</th>")
    assert (cures.count("<tr>"), apart.count("<tr>")) == (1 + 3 + 1, 1)
    assert "batch_size=96" not in cures
    assert "batch_size=96" in apart
    assert "save every 70 steps (now every 7th one) (changes the training)" in cures


def test_what_the_reader_must_know_first_is_a_list() -> None:
    page = render(Result(run=RunInfo("run", warnings=("rank 1 is not here",)), window=None))
    assert "<li>rank 1 is not here</li>" in page
    assert "<table>" not in page
