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


def recorded(
    workload: str, folder: Path, fault: str = "", *options: str, ranks: tuple[str, str] = ("--procs", "2"), steps: int
) -> dict[str, dict[str, Any]]:
    """Record a reference workload, with what its fault needs to cost more than a little; give each rule's outcome."""
    script = ROOT / "workloads" / f"{workload}.py"
    shown = str((constant(script, "SHOWN_WITH") or {}).get(fault, "")).split()
    command = [sys.executable, "-m", "dlprof", "run", str(script), *ranks, "-o", str(folder / "run")]
    command += [*(["--fault", fault] if fault else []), "--", "--steps", str(steps), *options, *shown]
    done = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    result = json.loads((folder / "run" / "result.json").read_text())
    assert result["window"]["source"] == "steps"
    return {o["id"]: o for o in result["outcomes"]}


# (workload, fault, rule, the least share, steps)
FAULTS = (
    ("ddp_resnet", "no_workers", "input_wait", 0.04, 30),
    ("ddp_resnet", "slow_worker", "slow_worker_batches", 0.04, 30),
    ("ddp_resnet", "python_metrics", "host_bound", 0.1, 30),
    ("ddp_resnet", "blocking_allreduce", "exposed_communication", 0.1, 30),
    ("ddp_resnet", "changing_shapes", "recompilation", 0.1, 30),
    ("ddp_resnet", "checkpoint_every_few", "checkpoint_stall", 0.05, 30),
    ("ddp_resnet", "garbage", "gc_pauses", 0.1, 30),
    ("ddp_resnet", "many_threads", "thread_oversubscription", 0.05, 30),
    ("ddp_resnet", "tiny_buckets", "small_collectives", 0.05, 30),
    ("ddp_resnet", "keeps_batches", "memory_growth", 0, 120),
    ("ddp_resnet", "validates_often", "validation_share", 0, 80),
    ("pipeline_transformer", "few_microbatches", "pipeline_bubble", 0.1, 30),
    ("pipeline_transformer", "uneven_split", "stage_imbalance", 0.1, 30),
    ("amp_transformer", "loop_optimizer", "unfused_optimizer", 0.04, 60),
    ("amp_transformer", "unequal_lengths", "unequal_lengths", 0.1, 60),
    ("bert_pretrain", "loop_optimizer", "unfused_optimizer", 0, 60),
    ("loader_variants", "slow_collate", "input_wait", 0, 80),
    ("loader_variants", "slow_worker", "slow_worker_batches", 0, 80),
    ("loader_variants", "workers_restart", "worker_restart", 0, 80),
    ("dlrm_like", "python_ids", "host_bound", 0.1, 35),
    ("dlrm_like", "uneven_tables", "straggler", 0.1, 35),
    ("fsdp_gpt", "each_layer", "small_collectives", 0.05, 35),
    ("fsdp_gpt", "long_sequences", "straggler", 0.15, 35),
    ("moe_transformer", "imbalance", "expert_imbalance", 0.15, 35),
    ("lightning_cnn", "no_workers", "input_wait", 0, 60),
    ("lightning_cnn", "python_callback", "host_bound", 0, 60),
    ("lightning_cnn", "validates_often", "validation_share", 0, 60),
    ("deepspeed_gpt", "long_sequences", "straggler", 0, 35),
)
LIBRARIES = {"deepspeed_gpt": "deepspeed", "lightning_cnn": "lightning"}
ONE_RANK = ("loader_variants",)


@pytest.mark.slow
@pytest.mark.parametrize(("workload", "fault", "rule", "least", "steps"), FAULTS)
def test_a_planted_fault_is_found(
    tmp_path: Path, data: Path, workload: str, fault: str, rule: str, least: float, steps: int
) -> None:
    if (library := LIBRARIES.get(workload)) and importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    options = ["--data", str(data)] if workload in ("ddp_resnet", "loader_variants") else []
    ranks = ("--procs", "1" if workload in ONE_RANK else "2")
    found = recorded(workload, tmp_path, fault, *options, ranks=ranks, steps=steps)[rule]
    assert found["state"] == "found", found
    assert found["share"] >= least


# The cores are shared with other tests: a little waiting may be real, and threads beside others cannot be cleared.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("workload", "steps", "expected"),
    [
        (
            *("ddp_resnet", 30),
            {"checkpoint_stall": "clear", "gc_pauses": "clear", "recompilation": "clear"}
            | {"pageable_copy": "does_not_apply"},
        ),
        ("pipeline_transformer", 30, {"pipeline_bubble": "clear", "stage_imbalance": "clear"}),
        ("amp_transformer", 60, {"unfused_optimizer": "clear"}),
    ],
)
def test_without_a_fault_nothing_is_blamed_for_much(
    tmp_path: Path, data: Path, workload: str, steps: int, expected: dict[str, str]
) -> None:
    options = ["--data", str(data)] if workload == "ddp_resnet" else []
    said = recorded(workload, tmp_path, "", *options, steps=steps)
    assert {rule: said[rule]["state"] for rule in expected} == expected
    if workload == "ddp_resnet":
        assert max(said[rule]["share"] for rule in ("input_wait", "host_bound")) < 0.3


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
    found = recorded("amp_transformer", tmp_path, fault, ranks=("--gpus", "1"), steps=60)[rule]
    assert found["state"] == "found", found
