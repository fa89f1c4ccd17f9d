"""The checks on a GPU: what must hold of a report, what passes and what fails, and the oracles' arithmetic."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import timing
from benchmarks.gpu.judges import JUDGES, Recording
from benchmarks.gpu.outcome import Part, above, below, between, holds, near, row_of, same, skipped

MS = 1_000_000


def result(**found: float) -> dict[str, Any]:
    """Make a result of a 40 ms step that computes for 98 %, with findings and their savings in ms."""
    outcomes = [
        {"id": i, "state": "found", "saving_ns": ms * MS, "share": ms / 40, "scope": "step"} for i, ms in found.items()
    ]
    outcomes += [
        {"id": i, "state": "clear", "saving_ns": 0.0, "share": 0.0, "scope": "step", "summary": "little"}
        for i in ("host_bound", "host_sync", "input_wait")
        if i not in found
    ]
    time = [
        {"rank": 0, "category": c, "ns": s * 40 * MS, "share": s} for c, s in (("computation", 0.98), ("host", 0.02))
    ]
    window = {"step_ns": 40 * MS, "overhead": 1.02, "flops": 8e12, "mfu": 0.8}
    exchanges = [{"collective": "all_reduce", "count": 4.0, "wait_ns": 5.0, "transfer_ns": 1.0}]
    blame = [{"rank": 0, "culprit": 1, "category": "host", "ns": 20 * MS, "share": 0.5}]
    return {"window": window, "time": time, "outcomes": outcomes, "exchanges": exchanges, "blame": blame}


def failed(judge: str, said: Mapping[str, Any], oracle: Mapping[str, Any], folder: Path = Path()) -> list[str]:
    """Return the names of the parts that fail."""
    return [part.name for part in JUDGES[judge](Recording(folder, said, oracle)) if part.state == "failed"]


def altered(said: dict[str, Any], *path: Any, to: Any) -> dict[str, Any]:
    """Return a result with one value changed."""
    changed = copy.deepcopy(said)
    place = changed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = to
    return changed


ASYNC = {"step_ms": 40.2, "busy_share": 0.99}
WAITING = {"busy_share": 0.98, "gain_ms": 15.0}
LATE = {"collectives": 4, "late_ms": 21.0}
FAULT = {"name": "job late", "rule": "input_wait", "step_ms": 40.0, "gain_ms": 10.0}
SOUND, HEALTHY = result(), {"name": "job healthy"}


@pytest.mark.parametrize(
    ("judge", "said", "oracle", "wrong"),
    [
        ("asynchronous", SOUND, ASYNC, ""),
        ("asynchronous", altered(SOUND, "time", 0, "share", to=0.955), ASYNC, "computation"),
        ("asynchronous", altered(SOUND, "time", to=[]), ASYNC, "computation"),
        ("asynchronous", result(host_bound=5.0), ASYNC, "no host_bound; nothing says that the device waits"),
        ("asynchronous", result(input_wait=5.0), ASYNC, "nothing says that the device waits"),
        ("asynchronous", altered(SOUND, "window", "overhead", to=0.79), ASYNC, "traced ÷ steady"),
        ("asynchronous", altered(SOUND, "window", "overhead", to=None), ASYNC, "traced ÷ steady"),
        ("asynchronous", altered(SOUND, "window", "step_ns", to=35 * MS), ASYNC, "step"),
        ("asynchronous", altered(SOUND, "window", to=None), ASYNC, "traced ÷ steady; step"),
        ("asynchronous", altered(SOUND, "outcomes", 2, "state", to="error"), ASYNC, "no rule ends with an error"),
        ("waiting", result(host_bound=14.0), WAITING, ""),
        # The larger of the two counts: both speak of the same idle time.
        ("waiting", result(host_sync=16.0, host_bound=2.0), WAITING, ""),
        ("waiting", result(host_bound=12.0), WAITING, "saving"),
        ("waiting", result(input_wait=15.0), WAITING, "host_bound or host_sync; saving"),
        ("late_rank", SOUND, LATE, ""),
        ("late_rank", SOUND, {**LATE, "collectives": 5}, "collectives matched"),
        ("late_rank", altered(SOUND, "exchanges", 0, "wait_ns", to=None), LATE, "collectives matched"),
        ("late_rank", altered(SOUND, "blame", 0, "ns", to=15 * MS), LATE, "rank 0 waits for rank 1"),
        ("late_rank", altered(SOUND, "blame", 0, "culprit", to=0), LATE, "rank 0 waits for rank 1"),
        ("fault", result(input_wait=9.0), FAULT, ""),
        ("fault", result(input_wait=7.0), FAULT, "job late: gain"),
        ("fault", result(host_bound=9.0), FAULT, "job late: input_wait"),
        ("fault", SOUND, {**FAULT, "rule": "no_such_rule"}, "job late: no_such_rule"),
        # Nothing to compare with: that the rule is found is all that is asked.
        ("fault", result(input_wait=1.0), {**FAULT, "gain_ms": None}, ""),
        ("healthy", SOUND, HEALTHY, ""),
        ("healthy", result(gc_pauses=1.9), HEALTHY, ""),
        ("healthy", result(gc_pauses=2.1), HEALTHY, "job healthy: nothing found"),
    ],
)
def test_a_right_report_passes_and_each_wrong_figure_fails_its_part(
    judge: str, said: Mapping[str, Any], oracle: Mapping[str, Any], wrong: str
) -> None:
    assert "; ".join(failed(judge, said, oracle)) == wrong


def recorded(folder: Path, **files: Any) -> Path:
    """Make the files of rank 0: facts as given, and lists as lines."""
    rank = folder / "ranks" / "00000"
    rank.mkdir(parents=True)
    for name, content in files.items():
        if isinstance(content, list):
            (rank / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
        else:
            (rank / f"{name}.json").write_text(json.dumps(content))
    return folder


def samples(**values: float) -> list[dict[str, float]]:
    """Make ten samples a second apart."""
    return [{"at_ns": n * 1e9, **values} for n in range(10)]


def link(received: float, sent: float) -> dict[str, float]:
    return {"pcie_received_bytes_per_s": received, "pcie_sent_bytes_per_s": sent}


TIME = {"at_ns": [1e9, 8e9]}


def test_products_of_matrices(tmp_path: Path) -> None:
    folder = recorded(tmp_path, gpu=samples(tensor_busy_share=0.79))
    # 8e12 FLOP in 10 ms are 0.8 of 1e15.
    oracle = {**TIME, "flops": 8e12, "step_ms": 10.0, "peak_flops": 1e15}
    said = result()
    assert failed("product", said, oracle, folder) == []
    assert failed("product", altered(said, "window", "flops", to=16e12), oracle, folder) == ["FLOPs of a step"]
    assert failed("product", altered(said, "window", "mfu", to=0.84), oracle, folder) == ["MFU"]
    assert failed("product", altered(said, "window", "mfu", to=None), oracle, folder) == ["MFU"]
    assert failed("product", said, {**oracle, "at_ns": [20e9, 30e9]}, folder) == ["GPM's tensor cores"]


def test_copies_and_uploads(tmp_path: Path) -> None:
    said = altered(result(), "time", 0, "category", to="copy")
    folder = recorded(tmp_path / "a", gpu=samples(dram_share=0.9, **link(received=5.3e10, sent=3e9)))
    oracle = {**TIME, "busy_share": 0.99, "bytes_per_s": 5e10}
    assert failed("copy", said, oracle, folder) == []
    assert failed("copy", result(), oracle, folder) == ["copying"]
    assert failed("upload", said, oracle, folder) == []
    assert failed("upload", said, {**oracle, "bytes_per_s": 6e10}, folder) == ["PCIe, received by the GPU"]
    assert failed("upload", said, {**oracle, "bytes_per_s": 4.5e10}, folder) == ["PCIe, received by the GPU"]
    # As if the two directions were taken for each other.
    turned = recorded(tmp_path / "b", gpu=samples(dram_share=0.5, **link(received=3e9, sent=5.3e10)))
    assert failed("upload", said, oracle, turned) == ["PCIe, received by the GPU", "PCIe, sent by the GPU"]
    assert failed("copy", said, oracle, turned) == ["GPM's memory"]


@pytest.mark.parametrize(
    ("said", "true", "state"),
    [
        (114.9, 100.0, "passed"),
        (85.1, 100.0, "passed"),
        (115.1, 100.0, "failed"),
        (84.9, 100.0, "failed"),
        (-114.9, -100.0, "passed"),
        (None, 100.0, "failed"),
        (math.nan, 100.0, "failed"),
        (100.0, None, "failed"),
        (100.0, math.nan, "failed"),
        (math.inf, math.inf, "failed"),
    ],
)
def test_a_figure_within_its_share_of_the_truth_passes(said: float | None, true: float | None, state: str) -> None:
    assert near("saving", said, true, share=0.15, unit="ms", how="events").state == state


@pytest.mark.parametrize(
    ("part", "state"),
    [
        # Points are of the unit, and the wider limit counts; the tolerance itself is within: 0.1 + 0.2 is not 0.3.
        (near("", 0.951, 0.98, points=0.03, unit="share", how=""), "passed"),
        (near("", 0.949, 0.98, points=0.03, unit="share", how=""), "failed"),
        (near("", 0.1 + 0.2, 0.0, points=0.3, unit="", how=""), "passed"),
        (near("", 3.0, 1.0, share=0.15, points=2.0, unit="ms", how=""), "passed"),
        (near("", 3.1, 1.0, share=0.15, points=2.0, unit="ms", how=""), "failed"),
        (near("", 124.0, 100.0, share=0.25, points=2.0, unit="ms", how=""), "passed"),
        # Limits exclude their own value but those of a range.
        (below("", 0.0099, 0.01, unit="share", how=""), "passed"),
        (below("", 0.01, 0.01, unit="share", how=""), "failed"),
        (above("", 0.61, 0.6, unit="share", how=""), "passed"),
        (above("", 0.6, 0.6, unit="share", how=""), "failed"),
        (between("", 0.9, 0.9, 1.1, unit="", how=""), "passed"),
        (between("", 1.101, 0.9, 1.1, unit="", how=""), "failed"),
        *((below("", nothing, 0.01, unit="", how=""), "failed") for nothing in (None, math.nan)),
        *((above("", nothing, 0.6, unit="", how=""), "failed") for nothing in (None, math.nan)),
        *((between("", nothing, 0.9, 1.1, unit="", how=""), "failed") for nothing in (None, math.nan)),
        (same("", 60, 60, how=""), "passed"),
        (same("", 59, 60, how=""), "failed"),
        (same("", None, None, how=""), "failed"),
    ],
)
def test_limits(part: Part, state: str) -> None:
    assert part.state == state


def test_a_row_fails_with_its_first_failure_and_passes_with_a_part_that_did() -> None:
    good, bad, left = holds("a", True, ""), holds("b", False, "no kernel"), skipped("c", "one GPU")
    assert row_of("x", [good, left]).state == "passed"
    assert row_of("x", [left]).state == "skipped"
    assert row_of("x", []).state == "failed"
    failed = row_of("x", [good, bad, holds("d", False, "later")], "exit code 1")
    assert failed.state == "failed"
    assert failed.why.startswith("b: no kernel")
    assert "2 more" in failed.why
    assert row_of("x", [good], "exit code 1").state == "failed"


def test_the_steady_step_is_that_of_the_events_whatever_one_pause_took() -> None:
    # Three short steps while the queue fills, then 40 ms each, 38 of them busy, and once the host stood still.
    periods = [10.0, 10.0, 10.0, *[40.0] * 20, 900.0, *[40.0] * 20]
    began = [0.0, *accumulate(periods)]
    busy = [5.0, 5.0, 5.0, *[38.0] * 42]
    found = timing.steady(began, busy[: len(began)], skip=3)
    assert (found.step_ms, found.busy_ms) == (40.0, 38.0)
    assert found.busy_share == pytest.approx(0.95)
    assert found.steps == 41


def test_a_step_from_a_jobs_own_lines() -> None:
    lines = [(0.0, "12 layers"), (1.0, "step 10  loss 2"), (1.5, "step 20  loss 2"), (1.6, "step 20 again is no step")]
    lines += [(2.0, "step 30  loss 1"), (4.5, "step 40  loss 1"), (5.0, "step 50  loss 1"), (5.1, "saved step 50")]
    assert timing.step_times(lines)[-1] == (50, 5.0)
    # 50, 250 (an epoch's end) and 50 ms: the median, from step 20 on.
    assert timing.step_ms_of_lines(lines, 20) == pytest.approx(50.0)
    assert math.isnan(timing.step_ms_of_lines(lines, 50))


def test_lateness_is_against_the_first_of_the_others() -> None:
    arrived = {0: [0, 100 * MS, 200 * MS], 1: [900 * MS, 121 * MS, 219 * MS], 2: [0, 110 * MS, 205 * MS]}
    assert timing.lateness_ms(arrived, late=1, skip=1) == pytest.approx(20.0)
    assert math.isnan(timing.lateness_ms(arrived, late=1, skip=3))
    assert math.isnan(timing.lateness_ms({1: [1, 2]}, late=1, skip=0))
