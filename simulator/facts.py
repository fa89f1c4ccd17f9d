"""Writes facts.json and run.json: what a rank and a run say of themselves (dlprof/record/collectors/facts.py)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from simulator import script
from simulator.exchanges import FIRST_BUCKET
from simulator.hardware import DEVICES
from simulator.job import EPOCH_NS, Job, Place, Recording
from simulator.kineto import FORMS
from simulator.memory import total_bytes
from simulator.model import Shop
from simulator.program import WIDTHS
from simulator.recorder import Window

UUID = "{:08x}-0000-4000-8000-{:012x}"


def of_run(job: Job, start_ns: int, end_ns: int) -> dict[str, Any]:
    """Return run.json."""
    return {
        "format": 1,
        "dlprof": "0.1.0",
        "command": ["python", "train.py"],
        "cwd": "/home/user",
        "start_ns": start_ns - 5_000_000_000,
        "end_ns": end_ns,
        "hosts": [f"node-{n + 1}" for n in range(job.hosts)],
        "exit": {"code": 0, "signal": None},
        "options": {"window": "10,2,5"},
        "resumed_ns": [],
        "warnings": [],
        "tasks": [],
    }


def of_rank(job: Job, recording: Recording, place: Place) -> dict[str, Any]:
    """Return a rank's facts.json."""
    device, model = DEVICES[job.device], job.model
    autocast = model.products in ("bfloat16", "float16")
    first = recording.skip + recording.warmup
    version = FORMS[recording.form].name
    return {
        "format": 1,
        "rank": place.rank,
        "local_rank": place.device_index,
        "host": place.host,
        "boot": UUID.format(7, sum(map(ord, place.host))),
        "pid": place.pid,
        "restart": 0,
        "env": {"OMP_NUM_THREADS": "1"},
        "script": script.FOLDER + script.FILE,
        "argv": ["train.py"],
        "clock": {"unix_ns": place.clock.at(0), "perf_ns": EPOCH_NS % 10**15},
        "world_size": job.ranks,
        "backend": "nccl" if job.ranks > 1 else None,
        "device": {
            "type": "cuda",
            "index": place.device_index,
            "name": device.name,
            "uuid": UUID.format(job.host_of(place.rank), place.device_index),
            "memory_bytes": total_bytes(job),
            "capability": list(device.capability),
            "count": place.devices,
        },
        "versions": {
            "dlprof": "0.1.0",
            "python": "3.11.7",
            "torch": version.partition("-")[2] if version.startswith("torch") else "2.8.0",
            "cuda": None if device.platform == "rocm" else "12.8",
            "cudnn": 91002,
            "nccl": "2.27.5",
        },
        "cpu": {"count": 64, "affinity": 64, "quota": None, "torch_threads": 1, "torch_interop_threads": 32},
        "loaders": _loaders(job, place.rank),
        "models": [_model(job)],
        "optimizers": [_optimizer(job)],
        "autocast": {"enabled": autocast, "dtype": model.products if autocast else None},
        "grad_scaler": model.products == "float16",
        "matmul": {
            "float32_precision": "high" if model.products == "tf32" else "highest",
            "allow_tf32": model.products == "tf32",
            "cudnn_allow_tf32": True,
            "cudnn_benchmark": False,
            "deterministic": False,
        },
        "calls": script.calls(job, recording.steps) if job.pipeline is None and job.devices == 1 else [],
        "directory": script.FOLDER,
        "step": {"mark": "loader" if job.loader is not None else "optimizer", "told": False},
        "pipeline": _pipeline(job, place.rank),
        "window": {
            "skip": recording.skip,
            "warmup": recording.warmup,
            "active": recording.active,
            "state": "exported",
            "first_step": first,
            "last_step": first + recording.active - 1,
            "export_ns": 86_000_000,
            **({"modules": _modules(job, recording)} if job.modules else {}),
        },
        "flops": _flops(job, place.rank),
        "warnings": [],
        "ended": "exit",
    }


def _pipeline(job: Job, rank: int) -> dict[str, Any] | None:
    if job.pipeline is None:
        return None
    return {
        "schedule": f"Schedule{job.pipeline.schedule}",
        "microbatches": job.pipeline.microbatches,
        "stages": [rank % job.stages],
        "num_stages": job.stages,
        "ranks": list(range(rank - rank % job.stages, rank - rank % job.stages + job.stages)),
    }


def _modules(job: Job, recording: Recording) -> dict[str, int]:
    """Return how many ranges of modules the window holds: the model, its blocks, and what has parameters in them."""
    shop = Shop(job.model, DEVICES[job.device])
    of_block = 1 + sum(f.parameters > 0 for f in shop.block(job.model.tokens))
    rest = [*shop.embedding(job.model.tokens), *shop.recurrent(job.model.tokens), *shop.head(job.model.tokens)]
    each = 3 + bool(job.model.times) + sum(f.parameters > 0 for f in rest) + of_block * job.model.blocks
    return {"ranges": each * recording.active, "ns_each": Window.module}


def _loaders(job: Job, rank: int) -> list[dict[str, Any]]:
    loader = job.loader_of(rank)
    if loader is None:
        return []
    return [
        {
            "role": "train",
            "num_workers": loader.workers,
            "batch_size": job.model.tokens // job.model.sequence,
            "pin_memory": job.batch.memory == "pinned",
            "prefetch_factor": loader.prefetch if loader.workers else None,
            "persistent_workers": loader.persistent and loader.workers > 0,
            "start_method": "fork",
            "dataset": "Texts",
            "dataset_length": 1_000_000,
            "iterable": False,
            "shuffle": True,
            "drop_last": True,
            "in_order": True,
        }
    ]


def _model(job: Job) -> dict[str, Any]:
    model, gradients = job.model, job.gradients
    ddp = job.ranks > 1 and gradients.how == "ddp" and job.pipeline is None
    return {
        "class": "Transformer",
        "parameters": model.parameters,
        "parameter_bytes": model.parameters * 4,
        "trainable_parameters": model.parameters,
        "last_bucket_bytes": _last_bucket(job),
        "dtypes": {"float32": model.tensors},
        "modules": 14 * model.blocks + 5,
        "compiled": bool(job.pauses.compile),
        "channels_last": None,
        "ddp": {
            "bucket_cap_mb": gradients.bucket / 2**20,
            "find_unused_parameters": gradients.search,
            "unused_parameter_bytes": 0 if gradients.search else None,
            "gradient_as_bucket_view": True,
            "static_graph": False,
            "broadcast_buffers": True,
        }
        if ddp
        else None,
        "data_parallel": job.devices > 1 and not job.cut,
        "fsdp": job.ranks > 1 and gradients.how == "fsdp",
    }


def _last_bucket(job: Job) -> int:
    """Return the bytes of DDP's last bucket, by its defaults: 1 MiB, then 25 MiB, from the model's end on."""
    shop, tokens = Shop(job.model, DEVICES[job.device]), job.model.tokens
    functions = shop.embedding(tokens) + shop.block(tokens) * job.model.blocks + shop.head(tokens)
    held = last = 0
    most = FIRST_BUCKET
    for f in reversed(functions):
        held += 4 * f.parameters
        last = held or last
        if held >= most:
            held, most = 0, 25 << 20
    return last


def _optimizer(job: Job) -> dict[str, Any]:
    # torch's defaults are None: foreach on a GPU.
    return {
        "class": job.optimizer.name,
        "fused": True if job.optimizer.kind == "fused" else None,
        "foreach": False if job.optimizer.kind == "single" else None,
        "takes": ["fused", "foreach"],
        "parameter_groups": 1,
        "parameters": job.model.tensors,
        "lr": 3e-4,
    }


def _flops(job: Job, rank: int) -> dict[str, Any]:
    """Return what one step computes, as the recorder counts it: forward products and both gradients of each."""
    model, heads = replace(job.model, tokens=job.tokens_of(rank)), 1
    if job.pipeline is not None:
        heads = int(rank % job.stages == job.stages - 1)
        if job.pipeline.split:
            model = replace(model, blocks=job.pipeline.split[rank % job.stages])
    dtype, width = model.activations, WIDTHS[model.activations]
    h, t, v = model.hidden, model.tokens, model.vocabulary
    rows: list[dict[str, Any]] = []

    def product(operator: str, calls: int, *shapes: tuple[int, ...]) -> None:
        if not calls:
            return
        *batch, m, k = shapes[-2]
        n = shapes[-1][-1]
        count = batch[0] if batch else 1
        moved = (m * k + k * n + m * n) * count * width
        text = " ".join("x".join(map(str, shape)) for shape in shapes)
        flops = 2 * m * k * n * count * calls
        rows.append(
            {
                "operator": operator,
                "dtype": dtype,
                "shape": text,
                "calls": calls,
                "flops": flops,
                "bytes": moved * calls,
            }
        )

    if model.times and model.cell == "written":
        rows_of_a_time = t // model.times
        product("aten::addmm", 2 * model.times, (4 * h,), (rows_of_a_time, h), (h, 4 * h))
        product("aten::mm", 2 * model.times, (rows_of_a_time, 4 * h), (4 * h, h))
        product("aten::mm", 2 * model.times, (h, rows_of_a_time), (rows_of_a_time, 4 * h))
    for calls, k, n in (
        (model.blocks, h, 3 * h),
        (model.blocks, h, h),
        (model.blocks, h, 4 * h),
        (model.blocks, 4 * h, h),
        (heads, h, v),
    ):
        product("aten::addmm", calls, (n,), (t, k), (k, n))
        product("aten::mm", calls, (t, n), (n, k))
        product("aten::mm", calls, (k, t), (t, n))
    if model.tokens_as == "one_hot":
        product("aten::mm", 1, (t, v), (v, h))
        product("aten::mm", 1, (v, t), (t, h))
    count, s = t // model.sequence * model.heads, model.sequence
    width_of_head = h // model.heads
    if model.attention == "unfused":
        # Scores and their gradient; the result, and the gradients of values and queries; the gradient of keys.
        product("aten::bmm", 2 * model.blocks, (count, s, width_of_head), (count, width_of_head, s))
        product("aten::bmm", 3 * model.blocks, (count, s, s), (count, s, width_of_head))
        product("aten::bmm", model.blocks, (count, width_of_head, s), (count, s, s))
    elif model.blocks:
        scored = 4 * count * s * s * width_of_head * model.blocks
        for operator, flops in (("", scored), ("_backward", scored * 5 // 2)):
            kind = "flash" if width == 2 else "efficient"
            name = f"aten::_scaled_dot_product_{kind}_attention{operator}"
            shape = " ".join([f"{t // s}x{model.heads}x{s}x{width_of_head}"] * 3)
            moved = 4 * t * h * width * model.blocks
            rows.append(
                {
                    "operator": name,
                    "dtype": dtype,
                    "shape": shape,
                    "calls": model.blocks,
                    "flops": flops,
                    "bytes": moved,
                }
            )
    total: dict[str, list[int]] = {}
    for row in rows:
        row.update({what: row[what] * job.gradients.accumulate for what in ("calls", "flops", "bytes")})
        one = total.setdefault(row["operator"], [0, 0])
        one[0] += row["flops"]
        one[1] += row["calls"]
    backward = sum(r["flops"] for r in rows if r["operator"] == "aten::mm" or "backward" in r["operator"])
    return {
        "state": "counted",
        "why": "",
        "step": 9,
        "total": sum(r["flops"] for r in rows),
        "backward": backward,
        "operators": [{"operator": o, "dtype": dtype, "flops": f, "calls": c} for o, (f, c) in total.items()],
        "shapes": rows,
        "one_hot": [{"values": t * v, "classes": v}] if model.tokens_as == "one_hot" else [],
        "uncounted": {},
    }
