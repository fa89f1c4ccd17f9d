"""The benchmarks of accuracy and of public scripts: what is recorded next, and the pages that are made of it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks import accuracy, reports, summary
from benchmarks.field import PAGE, ROWS, Change, Row, page
from benchmarks.field import summary as field_summary
from benchmarks.summary import Recorded, Reported
from dlprof.report import html
from tests.fixtures import results


def test_advice_that_changes_numbers_is_no_false_alarm_of_a_healthy_run(tmp_path: Path) -> None:
    sure = {"state": "found", "share": 0.3, "saving_ns": 30.0, "scope": "step", "changes": [{"numerics": False}]}
    outcomes = [
        {**sure, "id": "fp32_matmul", "changes": [{"numerics": True}]},
        {**sure, "id": "input_wait", "changes": [{"numerics": False}, {"numerics": True}]},
        {**sure, "id": "host_bound", "changes": []},
    ]
    result = {"window": {"step_ns": 100.0}, "run": {"torch": "2"}, "outcomes": outcomes}
    (tmp_path / "result.json").write_text(json.dumps(result))
    healthy = Recorded("job", "healthy", "", "here", "2026-01-01", 0)
    assert [i for i, _, _ in accuracy.diagnosed(healthy, tmp_path, 0, "").found] == ["input_wait", "host_bound"]
    planted = dataclasses.replace(healthy, rule="fp32_matmul")
    assert "fp32_matmul" in [i for i, _, _ in accuracy.diagnosed(planted, tmp_path, 0, "").found]


def listed(name: str, rule: str = "", *, machine: str = "2 CPU cores", number: int = 0, **more: object) -> Recorded:
    torch = "2.13.0" if more.get("step_ns") else ""
    return Recorded("job", name, rule, machine, "2026-01-02", number, torch=torch, **more)  # type: ignore[arg-type]


LISTED = [
    listed("healthy", step_ns=100e6, found=(("host_bound", 0.06, 94e6),)),
    listed("healthy", step_ns=110e6, number=1),
    listed("slow", "input_wait", step_ns=150e6, healthy_ns=100e6, found=(("input_wait", 0.3, 105e6),)),
    listed(
        *("slow", "input_wait"),
        step_ns=150e6,
        healthy_ns=100e6,
        number=1,
        found=(("host_bound", 0.5, 75e6), ("input_wait", 0.2, 121e6)),
    ),
    listed(
        "other", "gc_pauses", step_ns=110e6, healthy_ns=100e6, found=(("input_wait", 0.1, 99e6),), said="a | reason"
    ),
    listed("between", "worker_restart", step_ns=90e6, healthy_ns=100e6, found=(("worker_restart", 0.4, None),)),
    listed("no fault, --tiny", step_ns=1e6, found=(("host_bound", 0.5, 5e5),)),
    listed("gpu_only", "host_sync", said="needs a GPU"),
    listed("elsewhere", "host_sync", said="needs a GPU"),
    listed("elsewhere", "host_sync", machine="1 × H", step_ns=2e6, healthy_ns=1e6, found=(("host_sync", 0.5, 1e6),)),
]


def test_the_table_sets_each_prediction_beside_the_healthy_step() -> None:
    lines = summary.tables(LISTED).splitlines()
    cpu = "2 CPU cores"
    assert (
        f"| job | `slow` | `input_wait` | {cpu} | 2 of 2, first in 1 | 25% (20% to 30%) | 1.50 (1.50 to 1.50)"
        " | 1.13 (1.05 to 1.21) | `host_bound` 50% |"
    ) in lines
    assert (
        f"| job | `other` | `gc_pauses` | {cpu} | 0 of 1, first in 0 (a \\| reason) |  | 1.10 |  | `input_wait` 10% |"
    ) in lines
    assert f"| job | `between` | `worker_restart` | {cpu} | 1 of 1, first in 1 | 40% | 0.90 |  |  |" in lines
    assert f"| job | healthy | {cpu} | 2 | 105.0 (100.0 to 110.0) ms | `host_bound` 6.0% in 1 |" in lines


def test_the_sums_are_over_recordings_and_the_errors_over_faults() -> None:
    text = summary.tables(LISTED)
    assert "Found in 4 of 5 faulty recordings of 4 faults; as the first finding in 3." in text
    assert "A finding with a share of 5% or more in 1 of 2 healthy recordings." in text
    assert "off the healthy step by 6.5% in the median of 2 faults (by 15% at most: 2 of them)." in text


def test_what_was_written_comes_back_and_each_half_leaves_the_other_alone(tmp_path: Path) -> None:
    assert not summary.recorded(tmp_path)
    assert not summary.reported(tmp_path)
    summary.write(tmp_path, LISTED)
    made = [
        Reported("job", "slow", "input_wait", "1 × H", "2026-01-02", "h/job-slow", "29 % of <it> | waits", "9 steps")
    ]
    summary.write(tmp_path, made=made)
    assert summary.recorded(tmp_path) == LISTED
    assert summary.reported(tmp_path) == made
    readme = (tmp_path / "README.md").read_text()
    assert "29 % of <it> \\| waits | [report](h/job-slow/report.html)" in readme
    assert "`gpu_only`" in readme
    page = (tmp_path / "index.html").read_text()
    assert '<a href="h/job-slow/report.html">29 % of &lt;it&gt; | waits</a>' in page


def test_a_shared_page_names_plotly_and_does_not_hold_it() -> None:
    page = html.render(results.ALL["ddp"]())
    shared = reports.sharing(page, "../../plotly-basic.min.js")
    assert '<script src="../../plotly-basic.min.js"></script>' in shared
    assert len(page) - len(shared) > 1_000_000
    with pytest.raises(ValueError, match="otherwise than it used to"):
        reports.sharing(shared, "plotly-basic.min.js")


def tried(settings: str, predicted: float | None, measured: float | None, verdict: str, *findings: str) -> Change:
    low, high = (None, None) if measured is None else (measured * 0.99, measured * 1.01)
    return Change(settings, findings, predicted, measured, low, high, verdict)


MADE_UP = [
    Row(
        "right",
        "tuned",
        "",
        found=("input_wait",),
        changes=(
            tried("loader.num_workers=2", 1.5, 1.5, "gain", "input_wait"),
            tried("loader.num_workers=1", None, 1.6, "gain"),
            tried("optimizer.fused=True", 1.1, 1.0, "no_gain", "unfused_optimizer"),
        ),
    ),
    Row(
        "wrong",
        "held_out",
        "",
        changes=(
            tried("loader.num_workers=2", 1.2, 0.8, "slower", "input_wait"),
            tried("torch.compile=default", None, 1.4, "gain"),
            tried("gc.freeze=True", 1.3, None, "not_tried", "gc_pauses"),
        ),
    ),
    Row("unseen", "held_out", "", why="no report"),
]


def test_figures_of_the_advice() -> None:
    figures = field_summary(MADE_UP)
    assert (figures["scripts"], figures["tried"], figures["named"]) == (3, 2, 4)
    assert (figures["signs"], figures["signs_right"]) == (3, 2)
    # Steps predicted 1.5, 1.1 and 1.2 times faster are 1.5, 1 and 0.8 times faster.
    assert figures["median_error"] == pytest.approx(1 - 1.0 / 1.1)
    assert figures["ninth_tenth_error"] == pytest.approx(1 - 0.8 / 1.2)
    assert (figures["levers"], figures["levers_named"]) == (2, 1)


def test_the_page_is_made_of_what_is_kept() -> None:
    assert PAGE.read_text() == page(ROWS)
