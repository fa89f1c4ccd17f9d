"""What must hold of a report: a right one passes every part, and each wrong figure fails its own."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import judges
from benchmarks.gpu.judges import JUDGES, Recording

MS = 1e6


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


def change(said: dict[str, Any], *path: Any, to: Any) -> dict[str, Any]:
    """Return a result with one value changed."""
    changed = copy.deepcopy(said)
    place = changed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = to
    return changed


ASYNC = {"step_ms": 40.2, "busy_share": 0.99}


def test_a_job_that_runs_ahead() -> None:
    said = result()
    assert failed("asynchronous", said, ASYNC) == []
    assert failed("asynchronous", change(said, "time", 0, "share", to=0.955), ASYNC) == ["computation"]
    assert failed("asynchronous", change(said, "time", to=[]), ASYNC) == ["computation"]
    assert failed("asynchronous", result(host_bound=5.0), ASYNC) == [
        "no host_bound",
        "nothing says that the device waits",
    ]
    assert failed("asynchronous", result(input_wait=5.0), ASYNC) == ["nothing says that the device waits"]
    assert failed("asynchronous", change(said, "window", "overhead", to=0.79), ASYNC) == ["traced ÷ steady"]
    assert failed("asynchronous", change(said, "window", "overhead", to=None), ASYNC) == ["traced ÷ steady"]
    assert failed("asynchronous", change(said, "window", "step_ns", to=35 * MS), ASYNC) == ["step"]
    assert failed("asynchronous", change(said, "window", to=None), ASYNC) == ["traced ÷ steady", "step"]


def test_a_rule_that_ends_with_an_error_fails_wherever_it_happens() -> None:
    said = change(result(), "outcomes", 2, "state", to="error")
    assert failed("asynchronous", said, ASYNC) == ["no rule ends with an error"]


def test_a_job_that_waits_in_every_step() -> None:
    oracle = {"busy_share": 0.98, "gain_ms": 15.0}
    assert failed("waiting", result(host_bound=14.0), oracle) == []
    # The larger of the two counts: both speak of the same idle time.
    assert failed("waiting", result(host_sync=16.0, host_bound=2.0), oracle) == []
    assert failed("waiting", result(host_bound=12.0), oracle) == ["saving"]
    assert failed("waiting", result(input_wait=15.0), oracle) == ["host_bound or host_sync", "saving"]


def test_two_ranks_of_which_one_is_late() -> None:
    said, oracle = result(), {"collectives": 4, "late_ms": 21.0}
    assert failed("late_rank", said, oracle) == []
    assert failed("late_rank", said, {**oracle, "collectives": 5}) == ["collectives matched"]
    unmatched = change(said, "exchanges", 0, "wait_ns", to=None)
    assert failed("late_rank", unmatched, oracle) == ["collectives matched"]
    assert failed("late_rank", change(said, "blame", 0, "ns", to=15 * MS), oracle) == ["rank 0 waits for rank 1"]
    assert failed("late_rank", change(said, "blame", 0, "culprit", to=0), oracle) == ["rank 0 waits for rank 1"]
    nothing = change(change(said, "blame", to=[]), "exchanges", to=[])
    assert failed("late_rank", nothing, oracle) == ["collectives matched", "rank 0 waits for rank 1"]


def test_a_planted_fault_and_its_gain() -> None:
    oracle = {"name": "job late", "rule": "input_wait", "step_ms": 40.0, "gain_ms": 10.0}
    assert failed("fault", result(input_wait=9.0), oracle) == []
    assert failed("fault", result(input_wait=7.0), oracle) == ["job late: gain"]
    assert failed("fault", result(host_bound=9.0), oracle) == ["job late: input_wait"]
    assert failed("fault", result(), {**oracle, "rule": "no_such_rule"}) == ["job late: no_such_rule"]
    # Nothing to compare with: that the rule is found is all that is asked.
    assert failed("fault", result(input_wait=1.0), {**oracle, "gain_ms": None}) == []


def test_a_healthy_run_with_a_finding_of_five_per_cent() -> None:
    assert failed("healthy", result(), {"name": "job healthy"}) == []
    assert failed("healthy", result(gc_pauses=1.9), {"name": "job healthy"}) == []
    assert failed("healthy", result(gc_pauses=2.1), {"name": "job healthy"}) == ["job healthy: nothing found"]


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


def test_steps_that_share_a_line_are_all_counted_and_the_last_line_may_be_cut_off(tmp_path: Path) -> None:
    steps = [{"kind": "train"}, {"kind": "validation"}, {"kind": "train", "steps": 7}, {"kind": "other"}]
    folder = recorded(tmp_path, steps=steps)
    assert failed("counted", result(), {"steps": 8}, folder) == []
    assert failed("counted", result(), {"steps": 9}, folder) == ["steps counted"]
    assert failed("counted", result(), {"steps": 9, "slack": 1}, folder) == []
    assert failed("counted", result(), {"steps": 10, "slack": 1}, folder) == ["steps counted"]
    path = folder / "ranks/00000/steps.jsonl"
    path.write_text(path.read_text() + '{"kind": "tra')
    assert failed("counted", result(), {"steps": 8}, folder) == []


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
    assert failed("product", change(said, "window", "flops", to=16e12), oracle, folder) == ["FLOPs of a step"]
    assert failed("product", change(said, "window", "mfu", to=0.84), oracle, folder) == ["MFU"]
    assert failed("product", change(said, "window", "mfu", to=None), oracle, folder) == ["MFU"]
    assert failed("product", said, {**oracle, "at_ns": [20e9, 30e9]}, folder) == ["GPM's tensor cores"]


def test_copies_and_uploads(tmp_path: Path) -> None:
    said = change(result(), "time", 0, "category", to="copy")
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
    ("matmul", "precision"),
    [
        ({"allow_tf32": True}, "tf32"),
        ({"allow_tf32": False}, "ieee"),
        ({"fp32_precision": "tf32", "allow_tf32": None}, "tf32"),
        ({"fp32_precision": {"matmul": "ieee", "conv": "tf32"}, "allow_tf32": True}, "ieee"),
        ({"fp32_precision": "none", "allow_tf32": True}, "tf32"),
        ({}, None),
    ],
)
def test_how_float32_is_multiplied(matmul: dict[str, Any], precision: str | None) -> None:
    assert judges.multiplies_in(matmul) == precision


def test_settings_and_the_device(tmp_path: Path) -> None:
    facts = {
        "matmul": {"allow_tf32": True},
        "autocast": {"enabled": True, "dtype": "float16"},
        "grad_scaler": True,
        "env": {"PYTORCH_ALLOC_CONF": "max_split_size_mb:256"},
        "device": {"uuid": "1b0f-a001"},
    }
    folder = recorded(tmp_path / "a", facts=facts)
    oracles: dict[str, dict[str, Any]] = {
        "tf32": {"precision": "tf32"},
        "fp16": {},
        "allocator": {"alloc": "max_split_size_mb:256"},
        "device": {"uuid": "GPU-1b0f-a001"},
    }
    for judge, oracle in oracles.items():
        assert failed(judge, {}, oracle, folder) == []
    silent = recorded(tmp_path / "b", facts={"matmul": None, "autocast": None, "env": {}, "device": {}})
    for judge, oracle in oracles.items():
        assert failed(judge, {}, oracle, silent), judge


def test_every_judge_is_known_by_its_name() -> None:
    listed: Callable[[Recording], Any]
    for name, listed in JUDGES.items():
        assert getattr(judges, name) is listed
