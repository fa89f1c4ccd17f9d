"""The pages of what was recorded: figures that were worked out by hand, and rows of other machines that stay."""

from __future__ import annotations

from pathlib import Path

from benchmarks import summary
from benchmarks.summary import Recorded, Reported


def row(name: str, rule: str = "", *, machine: str = "2 CPU cores", number: int = 0, **more: object) -> Recorded:
    torch = "2.13.0" if more.get("step_ns") else ""
    return Recorded("job", name, rule, machine, "2026-01-02", number, torch=torch, **more)  # type: ignore[arg-type]


ROWS = [
    row("healthy", step_ns=100e6, found=(("host_bound", 0.06, 94e6),)),
    row("healthy", step_ns=110e6, number=1),
    row("slow", "input_wait", step_ns=150e6, healthy_ns=100e6, found=(("input_wait", 0.3, 105e6),)),
    row(
        *("slow", "input_wait"),
        step_ns=150e6,
        healthy_ns=100e6,
        number=1,
        found=(("host_bound", 0.5, 75e6), ("input_wait", 0.2, 121e6)),
    ),
    row("other", "gc_pauses", step_ns=110e6, healthy_ns=100e6, found=(("input_wait", 0.1, 99e6),), said="a | reason"),
    row("between", "worker_restart", step_ns=90e6, healthy_ns=100e6, found=(("worker_restart", 0.4, None),)),
    row("no fault, --tiny", step_ns=1e6, found=(("host_bound", 0.5, 5e5),)),
    row("gpu_only", "host_sync", said="needs a GPU"),
    row("elsewhere", "host_sync", said="needs a GPU"),
    row("elsewhere", "host_sync", machine="1 × H", step_ns=2e6, healthy_ns=1e6, found=(("host_sync", 0.5, 1e6),)),
]


def test_the_table_sets_each_prediction_beside_the_healthy_step() -> None:
    lines = summary.tables(ROWS).splitlines()
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


def test_a_fault_that_some_machine_has_shown_is_not_listed_as_not_run() -> None:
    lines = [line for line in summary.tables(ROWS).splitlines() if "`gpu_only`" in line or "`elsewhere`" in line]
    assert lines == [
        "| job | `elsewhere` | `host_sync` | 1 × H | 1 of 1, first in 1 | 50% | 2.00 | 1.00 |  |",
        "| job | `gpu_only` | `host_sync` | 2 CPU cores | not run: needs a GPU | | | | |",
    ]


def test_the_sums_are_over_recordings_and_the_errors_over_faults() -> None:
    text = summary.tables(ROWS)
    assert "Found in 4 of 5 faulty recordings of 4 faults; as the first finding in 3." in text
    assert "A finding with a share of 5% or more in 1 of 2 healthy recordings." in text
    assert "off the healthy step by 6.5% in the median of 2 faults (by 15% at most: 2 of them)." in text


def test_recordings_of_one_run_tell_how_closely_any_can_be_measured() -> None:
    def ran(at: float, ns: float, name: str = "healthy") -> Recorded:
        return Recorded("job", name, "", "here", "2026-01-02", 0, ns, at=at)

    # 10 % and 20 % apart; the others are hours later, of another run, or of no known time.
    rows = [ran(100, 1.0), ran(200, 1.1), ran(300, 0.88), ran(9000, 5.0), ran(250, 7.0, "healthy, wide"), ran(0, 9.0)]
    assert "one soon after the other, differ by 15.0% in the median of 2" in summary.tables(rows)
    assert "differ by" not in summary.tables(rows[3:])


def test_a_fault_whose_step_does_less_is_compared_with_none() -> None:
    one = Recorded("ddp_resnet", "small_batch", "memory_headroom", "1 × H", "2026-01-02", 0, 5e6, 9e6, torch="2.13.0")
    assert "| 0 of 1, first in 0 |  |  |  |  |" in summary.tables([one])


def test_what_was_written_comes_back_and_each_half_leaves_the_other_alone(tmp_path: Path) -> None:
    assert not summary.recorded(tmp_path)
    assert not summary.reported(tmp_path)
    summary.write(tmp_path, ROWS)
    made = [
        Reported("job", "slow", "input_wait", "1 × H", "2026-01-02", "h/job-slow", "29 % of <it> | waits", "9 steps")
    ]
    summary.write(tmp_path, made=made)
    assert summary.recorded(tmp_path) == ROWS
    assert summary.reported(tmp_path) == made
    readme = (tmp_path / "README.md").read_text()
    assert "29 % of <it> \\| waits | [report](h/job-slow/report.html)" in readme
    assert "`gpu_only`" in readme
    page = (tmp_path / "index.html").read_text()
    assert '<a href="h/job-slow/report.html">29 % of &lt;it&gt; | waits</a>' in page
