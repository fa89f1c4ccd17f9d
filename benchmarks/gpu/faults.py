"""Every mistake of the reference workloads that one GPU can show, beside the same run without it."""

from __future__ import annotations

import math
import shlex
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu import judges, timing
from benchmarks.gpu.bench import REPORTS_AT_ONCE, WORKLOADS, Bench
from benchmarks.gpu.jobs import Ended, JobFailedError, how, python, tail
from benchmarks.gpu.judges import Recording
from benchmarks.gpu.outcome import Part, holds, skipped
from dlprof.commands.run import constant

# A step's length is taken from the lines after this step: warming up, the trace window and counting FLOPs are over.
AFTER_STEP = 30
# What making as many reports takes as are made at once.
_REPORTS_S = 15.0


@dataclass(frozen=True)
class Group:
    """A workload with options, and the faults to plant in it. `healthy`: without a fault nothing may be found on it."""

    workload: str
    options: str
    faults: tuple[str, ...]
    healthy: bool = True
    steps: int = 60
    lines: bool = True  # whether it prints a line every so many steps


# ResNet-152, whose step is longer than 16 cores need for its pictures; as many pictures as steps take, in one epoch.
_RESNET = "--model resnet152 --batch-size 128 --images 7680 --epochs 1"

# In the order of their worth: what takes no long start and what people meet most comes first.
GROUPS: tuple[Group, ...] = (
    Group(
        "amp_transformer",
        "--layers 12 --length 1024 --batch-size 16",
        (
            "full_precision",
            "tiny_batch",
            "odd_shapes",
            "scores_in_memory",
            "norms_by_hand",
            "gelu_by_hand",
            "looks_for_nan",
            "blocks_again",
            "empties_cache",
        ),
    ),
    Group("ddp_resnet", _RESNET, ("contiguous", "item_every_step", "no_workers", "pageable", "python_metrics")),
    Group("bert_pretrain", "--layers 12 --batch-size 32 --accumulate 1", ("boolean_mask",)),
    Group("bert_pretrain", "--layers 12 --length 128 --batch-size 64 --accumulate 1", ("padded",), healthy=False),
    Group(
        "amp_transformer",
        "--vocabulary 32768 --layers 4 --length 1024 --batch-size 16",
        ("loss_by_hand", "one_hot_tokens", "logits_by_cat"),
        healthy=False,
    ),
    Group(
        "amp_transformer",
        "--width 256 --length 32 --batch-size 4",
        ("loop_optimizer", "averages_by_hand"),
        healthy=False,
        steps=120,
    ),
    Group("fsdp_gpt", "--layers 8 --width 1024 --heads 8 --length 1024 --batch-size 16", ("norm_every_step",)),
    Group(
        "dlrm_like",
        "--rows 100000 --workers 12",
        ("host_tables", "python_ids", "pageable"),
    ),
    Group(
        "ddp_resnet",
        _RESNET,
        (
            "blocking_copies",
            "copies_back",
            "checkpoint_every_few",
            "garbage",
            "tight_memory",
            "small_batch",
            "changing_shapes",
            "slow_worker",
            "slow_decode",
            "keeps_batches",
            "validates_often",
        ),
    ),
    Group("data_parallel", "--workers 12", ("pageable",)),
    Group(
        "loader_variants",
        "--epochs 8",
        ("pageable", "blocking_copies", "slow_storage", "no_workers", "slow_collate", "slow_worker", "workers_restart"),
        steps=200,
        lines=False,
    ),
    Group(
        "bert_pretrain",
        "--layers 12 --width 64 --length 32 --batch-size 4 --accumulate 1",
        ("loop_optimizer",),
        healthy=False,
        steps=120,
    ),
    Group(
        "fsdp_gpt",
        "--layers 8 --width 512 --heads 8 --length 256 --batch-size 32",
        ("loop_optimizer",),
        healthy=False,
    ),
    Group(
        "amp_transformer",
        "--layers 1 --width 64 --heads 2 --length 32 --batch-size 8",
        ("restless_scale",),
        healthy=False,
        steps=120,
    ),
    Group("lightning_cnn", "--workers 12", ("no_workers", "python_callback", "reads_every_step", "validates_often")),
)

# What one GPU cannot show, and why; "*": nothing of that workload.
_TWO = "needs two GPUs"
ELSEWHERE: dict[tuple[str, str], str] = {
    ("amp_transformer", "data_parallel"): _TWO,
    ("amp_transformer", "find_unused"): _TWO,
    ("amp_transformer", "unequal_lengths"): _TWO,
    ("bert_pretrain", "busy_thread"): "is shown on a CPU only",
    ("bert_pretrain", "kept_outputs"): "is shown on a CPU only",
    ("bert_pretrain", "sync_every_batch"): _TWO,
    ("data_parallel", "data_parallel"): _TWO,
    ("data_parallel", "double"): "these GPUs multiply float64 as fast as float32",
    ("ddp_resnet", "blocking_allreduce"): _TWO,
    ("ddp_resnet", "forward_twice"): "is shown on a CPU only",
    ("ddp_resnet", "histograms"): "is shown on a CPU only",
    ("ddp_resnet", "logs_all"): "is shown on a CPU only",
    ("ddp_resnet", "many_threads"): "is shown on a CPU only",
    ("ddp_resnet", "same_core"): "is shown on a CPU only",
    ("ddp_resnet", "slow_loader_one_rank"): _TWO,
    ("ddp_resnet", "slow_rank"): _TWO,
    ("ddp_resnet", "tiny_buckets"): _TWO,
    ("deepspeed_gpt", "*"): "needs DeepSpeed, whose start is longer than the time there is",
    ("dlrm_like", "table_by_table"): _TWO,
    ("dlrm_like", "uneven_tables"): _TWO,
    ("fsdp_gpt", "each_layer"): _TWO,
    ("fsdp_gpt", "long_sequences"): _TWO,
    ("fsdp_gpt", "no_p2p"): _TWO,
    ("fsdp_gpt", "tiny_batch"): _TWO,
    ("fsdp_gpt", "whole_model"): _TWO,
    ("horovod_resnet", "*"): "needs Horovod",
    ("loader_variants", "needless_workers"): "is shown on a CPU only",
    ("loader_variants", "one_thread"): "is shown on a CPU only",
    ("model_parallel", "*"): _TWO,
    ("moe_transformer", "*"): _TWO,
    ("pipeline_transformer", "*"): _TWO,
    ("tensor_parallel_gpt", "*"): _TWO,
}

# A rehearsal has the one whose fault a CPU can show in seconds.
REHEARSED = (Group("amp_transformer", "--width 256 --length 32 --batch-size 4", ("loop_optimizer",), False, 60),)


def planted(bench: Bench) -> None:
    """Record group after group while there is time; what there was no time for is listed as not run."""
    bench.note(*(skipped(f"{workload} {fault}", why) for (workload, fault), why in ELSEWHERE.items()))
    longest = 0.0
    for n, group in enumerate(bench.pick(GROUPS, REHEARSED)):
        step: dict[str, float] = {}  # ms, of each run of the group; "" is the one without a fault
        made: list[tuple[str, Path, Ended]] = []
        for fault in ("", *group.faults):
            if fault and "" not in step:
                bench.add(skipped(_name(group, fault), "the run without a fault was not made, or did not end well"))
            elif bench.left_s < 1.2 * longest + _REPORTS_S:
                bench.add(skipped(_name(group, fault), "no time left"))
            else:
                began = time.monotonic()
                folder, ended = _record(bench, n, group, fault)
                # The first of a workload may draw its data: that is no measure of the next one.
                longest = max(longest, min(time.monotonic() - began, 40.0))
                print(f"  {_name(group, fault)}: {ended.took_s:.1f} s, exit code {ended.code}", flush=True)
                made.append((fault, folder, ended))
                if ended.code == 0:
                    step[fault] = timing.step_ms_of_lines(ended.lines, AFTER_STEP)
            if len(made) == REPORTS_AT_ONCE:
                _judge(bench, group, made, step)
                made = []
        _judge(bench, group, made, step)


def _record(bench: Bench, number: int, group: Group, fault: str) -> tuple[Path, Ended]:
    script = WORKLOADS / f"{group.workload}.py"
    words = python(script, "--device", bench.device, "--steps", str(group.steps), *shlex.split(group.options))
    if group.lines:
        words += ["--log-every", "10"]
    if group.workload in ("ddp_resnet", "loader_variants"):
        words += ["--data", str(bench.work / "data")]
    if fault:
        words += ["--fault", fault]
    return bench.record(f"{number}-{group.workload}-{fault or 'healthy'}", words, limit_s=100.0)


def _judge(bench: Bench, group: Group, made: Sequence[tuple[str, Path, Ended]], step: dict[str, float]) -> None:
    """Report on recordings of a group, and judge them against its run without a fault."""
    for fault, _, ended in made:
        if ended.code != 0:
            bench.add(of_failure(_name(group, fault), ended, bench.left_s < _REPORTS_S))
            print(tail(ended), flush=True)
    ran = [(fault, folder) for fault, folder, ended in made if ended.code == 0]
    rules = constant(WORKLOADS / f"{group.workload}.py", "FAULTS") or {}
    for (fault, folder), said in zip(ran, bench.tried_reports([folder for _, folder in ran]), strict=True):
        name = _name(group, fault)
        if isinstance(said, JobFailedError):
            bench.add(holds(name, False, str(said)))
            print(said.tail, flush=True)
            continue
        oracle = oracle_of(group, fault, step) | {"name": name, "rule": rules.get(fault, "")}
        print(f"  {name}: {oracle}", flush=True)
        if fault or group.healthy:
            judge = "fault" if fault else "healthy"
            bench.add(*judges.JUDGES[judge](Recording(folder, said, oracle)))
            bench.keep(folder.name, folder, judge, oracle)
        shutil.rmtree(folder, ignore_errors=True)


def oracle_of(group: Group, fault: str, step: dict[str, float]) -> dict[str, Any]:
    """Return the step of a run by its own lines, and what leaving its fault out gave; None where none is like it.

    `step` has the step of each run of the group in ms, NaN where it printed too little; "" is the run without a fault.
    """
    mine, fixed = step[fault], step.get("", math.nan)
    other = constant(WORKLOADS / f"{group.workload}.py", "OTHER_STEP") or ()
    known = fault and fault not in other and math.isfinite(mine) and math.isfinite(fixed)
    return {
        "step_ms": mine if math.isfinite(mine) else None,
        "fixed_ms": fixed if known else None,
        "gain_ms": mine - fixed if known else None,
    }


def of_failure(name: str, ended: Ended, late: bool) -> Part:
    """Return the part of a run that did not end well: skipped where it says that it needs what is not here.

    `late`: the time of the check was over, so that it may have been ended for no fault of its own.
    """
    if ended.code is None and late:
        return skipped(name, "no time left: it was ended")
    needs = next((text.strip() for text in (ended.errors + ended.out).splitlines() if " needs " in text), "")
    if needs and ended.code in (1, 2):
        return skipped(name, needs[-200:])
    return holds(name, False, how(ended))


def _name(group: Group, fault: str) -> str:
    return f"{group.workload} {fault or 'healthy'}{'' if group.healthy or fault else ', with the options of a fault'}"
