"""Planted faults, recorded for real on two CPU ranks, must be diagnosed; the run without one is left alone."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dlprof.commands.run import constant, count_gpus
from tests.fixtures.jobs import environment

ROOT = Path(__file__).parents[2]


def outcomes(folder: Path, data: Path, fault: str = "") -> dict[str, dict[str, Any]]:
    """Record a short run of the ResNet, and give what the rules said of it."""
    planted = ["--fault", fault] if fault else []
    options = ("--steps", "30", "--data", str(data), *shown_with("ddp_resnet", fault))
    return recorded("ddp_resnet", folder, *planted, "--", *options)


def shown_with(workload: str, fault: str) -> list[str]:
    """Return the options that a fault needs to cost more than a little."""
    shown = constant(ROOT / "workloads" / f"{workload}.py", "SHOWN_WITH") or {}
    return str(shown.get(fault, "")).split()


def recorded(
    workload: str, folder: Path, *options: str, ranks: tuple[str, str] = ("--procs", "2")
) -> dict[str, dict[str, Any]]:
    """Record a reference workload, on two CPU ranks if not told otherwise, and give what the rules said of it."""
    command = [sys.executable, "-m", "dlprof", "run", str(ROOT / "workloads" / f"{workload}.py"), *ranks]
    command += ["-o", str(folder / "run"), *options]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    result = json.loads((folder / "run" / "result.json").read_text())
    assert result["window"]["source"] == "steps"
    assert (folder / "run" / "report.html").stat().st_size > 1_000_000
    return {o["id"]: o for o in result["outcomes"]}


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "rule", "least"),
    [
        ("no_workers", "input_wait", 0.04),
        pytest.param("slow_worker", "slow_worker_batches", 0.04, marks=pytest.mark.slow),
        pytest.param("python_metrics", "host_bound", 0.1, marks=pytest.mark.slow),
        pytest.param("blocking_allreduce", "exposed_communication", 0.1, marks=pytest.mark.slow),
        pytest.param("changing_shapes", "recompilation", 0.1, marks=pytest.mark.slow),
        # A job with such a stall is recorded and diagnosed in tests/record/collectors/test_stalls.py.
        pytest.param("checkpoint_every_few", "checkpoint_stall", 0.05, marks=pytest.mark.slow),
        pytest.param("garbage", "gc_pauses", 0.1, marks=pytest.mark.slow),
        pytest.param("many_threads", "thread_oversubscription", 0.05, marks=pytest.mark.slow),
        pytest.param("tiny_buckets", "small_collectives", 0.05, marks=pytest.mark.slow),
    ],
)
def test_a_planted_fault_is_found(tmp_path: Path, data: Path, fault: str, rule: str, least: float) -> None:
    found = outcomes(tmp_path, data, fault)[rule]
    assert found["state"] == "found", found
    assert found["share"] > least


@pytest.mark.slow
def test_memory_that_is_never_dropped_and_frequent_validation_are_found(tmp_path: Path) -> None:
    steps = ("--sample", "0.25", "--", "--steps", "80")
    for fault, rule, scope in (
        ("keeps_batches", "memory_growth", "risk"),
        ("validates_often", "validation_share", "job"),
    ):
        (tmp_path / fault).mkdir()
        said = recorded("ddp_resnet", tmp_path / fault, "--fault", fault, *steps)[rule]
        assert (said["state"], said["scope"]) == ("found", scope), said


@pytest.mark.long
def test_without_a_fault_neither_loader_nor_host_is_blamed_for_much(tmp_path: Path, data: Path) -> None:
    # The cores are shared with other tests: a little waiting may be real.
    said = outcomes(tmp_path, data)
    assert said["input_wait"]["share"] < 0.15
    assert said["host_bound"]["share"] < 0.15
    assert said["checkpoint_stall"]["state"] == "clear"
    assert said["gc_pauses"]["state"] == "clear"
    assert said["thread_oversubscription"]["state"] != "found"  # beside other tests it cannot be cleared
    assert said["recompilation"]["state"] == "clear"
    assert said["pageable_copy"]["state"] == "does_not_apply"


@pytest.mark.slow
def test_few_microbatches_are_found_and_enough_are_left_alone(tmp_path: Path) -> None:
    steps = ("--", "--steps", "30")
    (tmp_path / "fault").mkdir()
    found = recorded("pipeline_transformer", tmp_path / "fault", "--fault", "few_microbatches", *steps)
    assert found["pipeline_bubble"]["state"] == "found", found["pipeline_bubble"]
    assert found["pipeline_bubble"]["share"] > 0.1
    said = recorded("pipeline_transformer", tmp_path, *steps)
    assert said["pipeline_bubble"]["state"] == "clear"
    assert said["stage_imbalance"]["state"] == "clear"


@pytest.mark.slow
def test_an_uneven_split_is_found(tmp_path: Path) -> None:
    said = recorded("pipeline_transformer", tmp_path, "--fault", "uneven_split", "--", "--steps", "30")
    assert said["stage_imbalance"]["state"] == "found", said["stage_imbalance"]
    assert "stage 1" in said["stage_imbalance"]["title"]
    assert said["stage_imbalance"]["share"] > 0.1


@pytest.mark.slow
def test_an_optimizer_that_loops_is_found_and_a_fused_one_left_alone(tmp_path: Path) -> None:
    steps = ("--", "--steps", "60", *shown_with("amp_transformer", "loop_optimizer"))
    (tmp_path / "fault").mkdir()
    found = recorded("amp_transformer", tmp_path / "fault", "--fault", "loop_optimizer", *steps)["unfused_optimizer"]
    assert found["state"] == "found", found
    assert found["share"] > 0.04
    assert recorded("amp_transformer", tmp_path, *steps)["unfused_optimizer"]["state"] == "clear"


@pytest.mark.slow
def test_an_optimizer_that_loops_is_found_beside_accumulation_too(tmp_path: Path) -> None:
    options = ("--", "--steps", "60", *shown_with("bert_pretrain", "loop_optimizer"))
    said = recorded("bert_pretrain", tmp_path, "--fault", "loop_optimizer", *options)
    assert said["unfused_optimizer"]["state"] == "found", said["unfused_optimizer"]


@pytest.mark.slow
@pytest.mark.skipif(count_gpus() < 1, reason="needs a GPU, and there is none here")
@pytest.mark.parametrize(
    ("fault", "rule"),
    [
        ("averages_by_hand", "parameter_loop"),
        ("blocks_again", "needless_recompute"),
        ("empties_cache", "device_allocations"),
        ("full_precision", "fp32_matmul"),
        ("looks_for_nan", "anomaly_mode"),
        ("loop_optimizer", "unfused_optimizer"),
        ("odd_shapes", "misaligned_shapes"),
        ("tiny_batch", "host_bound"),
    ],
)
def test_a_fault_that_only_a_gpu_shows_is_found(tmp_path: Path, fault: str, rule: str) -> None:
    options = ("--fault", fault, "--", "--steps", "60", *shown_with("amp_transformer", fault))
    found = recorded("amp_transformer", tmp_path, *options, ranks=("--gpus", "1"))[rule]
    assert found["state"] == "found", found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "rule"),
    [("slow_collate", "input_wait"), ("slow_worker", "slow_worker_batches"), ("workers_restart", "worker_restart")],
)
def test_what_is_wrong_with_a_loader_is_found(tmp_path: Path, fault: str, rule: str) -> None:
    options = ("--procs", "1", "--fault", fault, "--", "--steps", "80", "--data", str(tmp_path / "data"))
    assert recorded("loader_variants", tmp_path, *options)[rule]["state"] == "found"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workload", "fault", "rule", "least"),
    [
        ("dlrm_like", "python_ids", "host_bound", 0.1),
        ("dlrm_like", "uneven_tables", "straggler", 0.1),
        ("fsdp_gpt", "each_layer", "small_collectives", 0.05),
        ("fsdp_gpt", "long_sequences", "straggler", 0.15),
        ("moe_transformer", "imbalance", "expert_imbalance", 0.15),
    ],
)
def test_what_is_wrong_with_a_sharded_job_is_found(
    tmp_path: Path, workload: str, fault: str, rule: str, least: float
) -> None:
    options = ("--", "--steps", "35", *shown_with(workload, fault))
    found = recorded(workload, tmp_path, "--fault", fault, *options)[rule]
    assert found["state"] == "found", found
    assert found["share"] > least


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="lightning is not installed")
@pytest.mark.parametrize(
    ("fault", "rule"),
    [("no_workers", "input_wait"), ("python_callback", "host_bound"), ("validates_often", "validation_share")],
)
def test_what_is_wrong_with_a_lightning_job_is_found(tmp_path: Path, fault: str, rule: str) -> None:
    found = recorded("lightning_cnn", tmp_path, "--fault", fault, "--", "--steps", "60")[rule]
    assert found["state"] == "found", found


# DeepSpeed compiles an operator on its first run: tests/workloads/test_deepspeed_gpt.py has the time for that.
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
def test_a_rank_with_longer_sequences_is_found_in_a_deepspeed_job(tmp_path: Path) -> None:
    found = recorded("deepspeed_gpt", tmp_path, "--fault", "long_sequences", "--", "--steps", "35")["straggler"]
    assert found["state"] == "found", found
    assert found["ranks"] == [1]
