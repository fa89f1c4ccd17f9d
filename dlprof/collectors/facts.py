"""What a rank is: its place in the job, its machine and versions, and the settings of what it trains with."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import dlprof
from dlprof.hosts import boot
from dlprof.recorder import Recorder
from dlprof.stepping import Step

_PREFIXES = ("NCCL_", "OMP_", "MKL_", "TORCH", "PYTORCH_", "CUDA_", "GLOO_")
_NAMES = ("SLURM_JOB_ID", "SLURM_NNODES", "SLURM_NTASKS", "SLURM_CPUS_ON_NODE")
_SECRET = ("TOKEN", "KEY", "SECRET", "PASS", "CRED", "AUTH")

# The facts are written as soon as there is news, since what was seen may soon be gone. But after so many times there is
# this many times as long between two as one takes: 0.1 % of the job at most.
_FREE = 50
_REST = 1000

_LOCAL_RANKS = ("LOCAL_RANK", "HOROVOD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")


class Facts:
    """Writes facts.json: at the first step, whenever something new was seen, and at the end."""

    name = "facts"

    def __init__(self) -> None:
        self._recorder: Recorder | None = None
        self._fixed: dict[str, Any] = {}
        self._mark: str | None = None
        self._free = _FREE
        self._next_ns = 0  # not written again before, but for so many times
        self._known: dict[int, dict[str, Any]] = {}
        # Not SLURM_NTASKS: a single process in a batch script has that of its whole allocation.
        size = _number("WORLD_SIZE", "HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
        self._group: dict[str, Any] = {"world_size": size or 1, "backend": None}

    def start(self, recorder: Recorder) -> None:
        """Gather what does not change, and write for the first time."""
        self._recorder = recorder
        self._fixed = {
            "format": 1,
            "rank": recorder.rank,
            "local_rank": _number(*_LOCAL_RANKS),
            "host": os.uname().nodename,
            "boot": boot(),
            "pid": os.getpid(),
            "restart": recorder.restart,
            "env": environment(os.environ),
            "script": sys.argv[0] if sys.argv else None,
            "argv": list(sys.argv),
            "clock": {"unix_ns": recorder.unix_ns, "perf_ns": recorder.perf_ns},
        }
        recorder.news = True

    def step(self, done: Sequence[Step]) -> None:
        """Write again if there is news; a script that makes an optimizer a step always has some."""
        recorder = self._recorder
        if recorder is not None and (recorder.news or recorder.mark != self._mark):
            ended_ns = done[-1].start_ns + done[-1].dur_ns
            if ended_ns > self._next_ns or self._free:
                self._free = max(self._free - 1, 0)
                began_ns = time.perf_counter_ns()
                self._write(recorder)
                self._next_ns = ended_ns + _REST * (time.perf_counter_ns() - began_ns)

    def stop(self) -> None:
        """Write for the last time."""
        if self._recorder is not None:
            self._write(self._recorder)

    def _write(self, recorder: Recorder) -> None:
        recorder.news = False
        _unanswered.clear()
        self._mark = recorder.mark
        facts = self._fixed | {
            **self._distributed(),
            "device": _ask(_device),
            "versions": _ask(_versions),
            "cpu": _ask(_cpu),
            "loaders": [{"role": seen.role, **seen.settings} for seen in recorder.loaders],
            "models": self._describe(_model, [(ref, ref()) for ref in recorder.models]),
            "optimizers": self._describe(_optimizer, [(ref, ref()) for ref in recorder.optimizers]),
            "autocast": recorder.autocast,
            "grad_scaler": recorder.grad_scaler,
            "matmul": _ask(_matmul),
            "step": {"mark": recorder.mark},
            "pipeline": recorder.pipeline,
            "window": recorder.window,
            "flops": recorder.flops,
            "warnings": [*recorder.warnings, *(f"facts: {why}" for why in _unanswered.values())],
            "ended": recorder.ended,
        }
        path = recorder.folder / "facts.json"
        unfinished = path.with_name("facts.json.tmp")
        unfinished.write_text(json.dumps(facts, default=str))
        unfinished.replace(path)

    def _distributed(self) -> dict[str, Any]:
        """Give the size and backend of the job; a script destroys its process group before it ends."""
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            self._group = {"world_size": distributed.get_world_size(), "backend": distributed.get_backend()}
        return self._group

    def _describe(self, question: Callable[[Any], Any], seen: list[tuple[Any, Any]]) -> list[Any]:
        """Describe what was seen; what is gone by now, as most is when a job ends, as it was when last described."""
        for key, thing in seen:
            facts = None if thing is None else _ask(question, thing)
            if facts is not None:
                self._known[id(key)] = facts
        return [self._known[id(key)] for key, _ in seen if id(key) in self._known]


def environment(env: Mapping[str, str]) -> dict[str, str]:
    """Give the variables that shape training, and none that may hold a secret."""
    return {
        name: value
        for name, value in sorted(env.items())
        if (name.startswith(_PREFIXES) or name in _NAMES)
        # What torchrun tells its ranks differs in every run and shapes nothing.
        and not name.startswith("TORCHELASTIC_")
        and not any(word in name.upper() for word in _SECRET)
    }


def _torch() -> Any:
    import torch

    return torch


# Why a question had no answer when facts were last written: by its name, so that many objects of a kind say it once.
_unanswered: dict[str, str] = {}


def _ask(question: Callable[..., Any], *args: Any) -> Any:
    """Give the answer, or None and a warning where the script's objects or this version of torch cannot answer."""
    try:
        return question(*args)
    except Exception as e:  # noqa: BLE001 - it runs the script's code (len, attributes); what is unknown is null
        what = question.__name__.strip("_")
        _unanswered[what] = f"no answer for {what} ({type(e).__name__}: {e})"
        return None


def _number(*names: str) -> int | None:
    return next((int(v) for v in (os.environ.get(n, "") for n in names) if v.isdigit()), None)


def _device() -> dict[str, Any]:
    torch = _torch()
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        index = torch.cuda.current_device()
        properties = torch.cuda.get_device_properties(index)
        return {
            "type": "cuda",
            "index": index,
            "name": properties.name,
            "uuid": str(uuid) if (uuid := getattr(properties, "uuid", None)) is not None else None,
            "memory_bytes": properties.total_memory,
            "capability": [properties.major, properties.minor],
            "count": torch.cuda.device_count(),
        }
    return {
        "type": "cpu",
        "index": None,
        "name": _cpu_name(),
        "uuid": None,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "capability": None,
        "count": 0,
    }


def _cpu_name() -> str | None:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine() or None


def _versions() -> dict[str, Any]:
    torch = _torch()
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    return {
        "dlprof": dlprof.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "cudnn": _ask(torch.backends.cudnn.version) if cuda else None,
        "nccl": _ask(_nccl) if cuda else None,
    }


def _nccl() -> str:
    return ".".join(str(part) for part in _torch().cuda.nccl.version())


def _cpu() -> dict[str, Any]:
    torch = _torch()
    return {
        "count": os.cpu_count(),
        "affinity": len(os.sched_getaffinity(0)),
        "quota": _ask(_quota),
        "torch_threads": torch.get_num_threads(),
        "torch_interop_threads": torch.get_num_interop_threads(),
    }


def _quota() -> float | None:
    """Give how many cores' time a container grants; None: it grants all. cgroup v2, then v1."""
    unified = Path("/sys/fs/cgroup/cpu.max")
    if unified.is_file():
        most, _, period = unified.read_text().partition(" ")
        return None if most == "max" else int(most) / int(period)
    v1 = Path("/sys/fs/cgroup/cpu")
    if not (v1 / "cpu.cfs_quota_us").is_file():  # the group of a whole machine has neither
        return None
    most_us = int((v1 / "cpu.cfs_quota_us").read_text())
    return None if most_us <= 0 else most_us / int((v1 / "cpu.cfs_period_us").read_text())


def _model(model: Any) -> dict[str, Any]:
    torch = _torch()
    parameters = list(model.parameters())
    modules = list(model.modules())
    images = [m.weight for m in modules if isinstance(m, torch.nn.Conv2d)]
    names = [type(m).__name__ for m in modules]
    return {
        "class": _inner_class(model),
        "parameters": sum(p.numel() for p in parameters),
        "parameter_bytes": sum(p.numel() * p.element_size() for p in parameters),
        "trainable_parameters": sum(p.numel() for p in parameters if p.requires_grad),
        "dtypes": dict(Counter(str(p.dtype).replace("torch.", "") for p in parameters)),
        "modules": len(modules),
        "compiled": "OptimizedModule" in names
        or any(getattr(m, "_compiled_call_impl", None) is not None for m in modules),
        "channels_last": _channels_last(images[0]) if images else None,
        "ddp": next((_ask(_ddp, m) for m in modules if type(m).__name__ == "DistributedDataParallel"), None),
        "data_parallel": "DataParallel" in names,
        "fsdp": any("FSDP" in name or name == "FullyShardedDataParallel" for name in names),
    }


# What wraps the script's own model, and where it keeps it.
_WRAPPERS = {
    "DataParallel": "module",
    "DeepSpeedEngine": "module",
    "DistributedDataParallel": "module",
    "OptimizedModule": "_orig_mod",
}


def _inner_class(model: Any) -> str:
    """Give the class of the script's own model, inside what wraps it."""
    while (kept := _WRAPPERS.get(type(model).__name__)) is not None:
        model = getattr(model, kept)
    return type(model).__name__


def _channels_last(weight: Any) -> bool:
    torch = _torch()
    return bool(weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous())


def _ddp(ddp: Any) -> dict[str, Any]:
    return {
        "bucket_cap_mb": ddp.bucket_bytes_cap / 2**20,
        "find_unused_parameters": ddp.find_unused_parameters,
        # Of the last step that DDP looked at, which is every hundredth; None: of none yet.
        "unused_parameter_bytes": _ask(_unused_bytes, ddp) if ddp.find_unused_parameters else None,
        "gradient_as_bucket_view": ddp.gradient_as_bucket_view,
        "static_graph": ddp.static_graph,
        "broadcast_buffers": ddp.broadcast_buffers,
    }


def _unused_bytes(ddp: Any) -> int | None:
    size = ddp._get_ddp_logging_data().get("unused_parameter_size")
    return None if size is None else int(size)


def _optimizer(optimizer: Any) -> dict[str, Any]:
    groups = optimizer.param_groups
    lr = groups[0].get("lr")
    return {
        "class": type(optimizer).__name__,
        "fused": groups[0].get("fused"),
        "foreach": groups[0].get("foreach"),
        "parameter_groups": len(groups),
        "parameters": sum(len(g["params"]) for g in groups),
        # A tensor on a device is not read: that would wait for the device.
        "lr": lr if isinstance(lr, (int, float)) else None,
    }


def _cudnn_tf32() -> bool:
    return bool(_torch().backends.cudnn.allow_tf32)


def _matmul() -> dict[str, Any]:
    torch = _torch()
    return {
        "float32_precision": torch.get_float32_matmul_precision(),
        "allow_tf32": torch.backends.cuda.matmul.allow_tf32,
        "cudnn_allow_tf32": _ask(_cudnn_tf32),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
