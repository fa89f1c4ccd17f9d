"""Describes a rank: its place in the job, its machine and versions, and the settings of models, optimizers and loaders.

If the process died of a lack of memory, it also has the error that Python printed last, and the user's line of it.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dlprof import redaction
from dlprof.files import boot, write
from dlprof.marks import __version__
from dlprof.plain import words_of
from dlprof.record import guarded
from dlprof.record.device import cpu
from dlprof.record.failures import last_error, memory_failure
from dlprof.record.launch.folder import batch_of
from dlprof.record.model.names import (
    alive,
    children_of,
    class_of,
    modules_of,
    names_of_all,
    parameters_of,
    problems,
    unwrapped,
)
from dlprof.record.model.parameters import subnormal_shares
from dlprof.record.ranks import find_size, local_rank, process_group
from dlprof.record.recorder import Recorder
from dlprof.record.step_clock import Step

# The facts are written as soon as something is new, since objects may soon be gone. After this many writes, the pause
# is this many times the duration of the last write: at most 0.1 % of the job.
_FREE = 50
_LOOK_NS, _MOST_LOOKS = 1_000_000_000, 64
_REST = 1000

# Variables in which launchers name a job to its ranks: the same in all of them, and in no other job at that time.
_LAUNCH = ("PMIX_NAMESPACE", "TORCHELASTIC_RUN_ID", "MASTER_PORT")


class Facts:
    """Writes facts.json: at the first step, whenever something is new, and at the end."""

    name = "facts"
    _recorder: Recorder

    def __init__(self) -> None:
        problems.clear()  # of an earlier recording of this process
        self._fixed: dict[str, Any] = {}
        self._mark: str | None = None
        self._free = _FREE
        self._next_ns = 0  # the earliest time of the next write, once _free is used up
        self._known: dict[int, dict[str, Any]] = {}
        self._idle: list[str] | None = None
        self._frozen: dict[str, tuple[Any, bool | None]] = {}  # of each part: what its weights were at first, `changes`
        self._process: dict[str, Any] = {}
        self._subnormal: list[dict[str, Any]] = []
        self._began_ns = self._look_ns = 0
        self._group: dict[str, Any] = {"world_size": find_size() or 1, "backend": None}

    def start(self, recorder: Recorder) -> None:
        """Collect the facts that do not change."""
        self._recorder = recorder
        self._fixed = {
            "format": 1,
            "rank": recorder.rank,
            "local_rank": local_rank(),
            "host": os.uname().nodename,
            "boot": boot(),
            "pid": os.getpid(),
            "restart": recorder.restart,
            "launch": {"batch": batch_of(os.environ)} | {name: os.environ.get(name) for name in _LAUNCH},
            "env": redaction.environment(os.environ),
            "argv": redaction.words(sys.argv, keep=os.environ.get("DLPROF_KEEP_ARGUMENTS") == "on"),
            "clock": {"unix_ns": recorder.unix_ns, "perf_ns": recorder.perf_ns},
        }
        recorder.observed.news = True
        self._see_early(recorder)

    @guarded
    def _see_early(self, recorder: Recorder) -> None:
        """Keep the lines that bound the process, or set its threads, before torch was imported."""
        script = getattr(sys.modules.get("__main__"), "__file__", None)
        if script is None:
            return
        calls = recorder.observed.calls
        if recorder.cores is not None and frozenset(os.sched_getaffinity(0)) != recorder.cores:
            calls.see_written("affinity", script, r"\b(sched_setaffinity|cpu_affinity)\(.*\S")
        given = Path("/proc/self/environ").read_bytes().split(b"\0")
        for name in _THREADS:
            value = os.environ.get(name)
            if value is not None and f"{name}={value}".encode() not in given:
                calls.see_written("threads", script, rf"[\"']{name}[\"']")

    def fail(self, error: Exception) -> None:
        """Have the early lines unnamed."""
        self._recorder.warn(f"lines before the import of torch are not named: {words_of(error)}")

    def step(self, done: Sequence[Step]) -> None:
        """Write again if something is new; it always is in a script that creates an optimizer in each step."""
        observed = self._recorder.observed
        if done[-1].end_ns >= self._look_ns:
            self._look_at_values(done[-1])
        if not (observed.news or observed.calls.news) and self._recorder.clock.mark == self._mark:
            return
        ended_ns = done[-1].end_ns
        if ended_ns > self._next_ns or self._free:
            self._free = max(self._free - 1, 0)
            began_ns = time.perf_counter_ns()
            self._write()
            self._next_ns = ended_ns + _REST * (time.perf_counter_ns() - began_ns)

    def _look_at_values(self, last: Step) -> None:
        """Sample the values, each time after half as long again as until then: a long job is looked at 40 times."""
        self._began_ns = self._began_ns or last.start_ns
        self._look_ns = last.end_ns + max((last.end_ns - self._began_ns) // 2, _LOOK_NS)
        observed = self._recorder.observed
        models, optimizers = alive(observed.models), alive(observed.optimizers)
        shares = _ask(subnormal_shares, models, optimizers, name="which values are subnormal")
        if shares and len(self._subnormal) < _MOST_LOOKS:
            self._subnormal.append({"step": last.number, **shares})
            observed.news = observed.news or any(shares[name] > 0 for name in shares)

    def stop(self) -> None:
        """Write the final state."""
        if self._fixed:
            self._write()

    def _write(self) -> None:
        recorder, observed = self._recorder, self._recorder.observed
        if observed.calls.problem:
            problem, observed.calls.problem = observed.calls.problem, ""
            recorder.warn(problem)
        for method in [name for name, why in problems.items() if why]:
            recorder.warn(problems[method])
            problems[method] = ""  # warn once
        observed.news = observed.calls.news = False
        _unanswered.clear()
        self._mark = recorder.clock.mark
        facts = self._fixed | {
            **self._distributed(),
            "alone": recorder.alone and not self._group["backend"],  # the script may have created a group since
            "device": _ask(_device, recorder),
            "versions": _ask(_versions),
            "cpu": _ask(_cpu, recorder),
            "process": self._of_process(),
            "loaders": [{"role": s.role, **s.settings, "data_of": s.data_of} for s in observed.loaders],
            "models": self._describe(_model, observed.models),
            "optimizers": self._describe(_optimizer, observed.optimizers),
            "untrained": self._untrained(observed.models, observed.optimizers),
            "frozen": self._frozen_parts(observed.models),
            "dropped": _ask(observed.dropped.facts, observed.models, observed.optimizers, name="dropped gradients"),
            "options": [*observed.options.values()],
            "subnormal": self._subnormal,
            "autocast": observed.autocast,
            "grad_scaler": observed.grad_scaler,
            "graphs": observed.graphs,
            "evaluation": {"steps": observed.evaluated, "with_graph": observed.graded},
            "calls": observed.calls.facts(observed.models),
            "directory": observed.calls.directory,
            "files": observed.calls.files.facts() if recorder.rank == 0 else [],
            "matmul": _ask(_matmul),
            "step": {"mark": recorder.clock.mark, "told": observed.told},
            "pipeline": observed.pipeline,
            "padding": observed.padding.seen,
            "window": recorder.window,
            "windows": recorder.windows,
            "flops": recorder.flops,
            "warnings": [*recorder.warnings, *(f"facts: {why}" for why in _unanswered.values())],
            "ended": recorder.ended,
            "failure": _ask(memory_failure) if recorder.ended else None,
            "error": _ask(last_error) if recorder.ended else None,
            "ended_ns": time.time_ns() if recorder.ended else None,
        }
        write(recorder.folder / "facts.json", json.dumps(facts, default=str))

    def _distributed(self) -> dict[str, Any]:
        """Return the size and backend of the job; both are kept, since a script destroys its group at its end."""
        distributed = process_group()
        if distributed is not None:
            self._group = {"world_size": distributed.get_world_size(), "backend": distributed.get_backend()}
        return self._group

    def _of_process(self) -> dict[str, Any]:
        """Return the state of the process, with the hooks that were seen at any write: a script may end them."""
        now = _ask(_process) or {}
        self._process |= {name: value for name, value in now.items() if value or name not in self._process}
        return self._process

    def _describe(self, question: Callable[[Any], Any], references: Iterable[Callable[[], Any]]) -> list[Any]:
        """Describe the objects. Objects that are gone, as most are at the end of a job, keep their last description."""
        described = []
        for reference in references:
            thing = reference()
            facts = None if thing is None else _ask(question, thing)
            if facts is not None:
                self._known[id(reference)] = facts
            if id(reference) in self._known:
                described.append(self._known[id(reference)])
        return described

    def _untrained(self, models: Iterable[Any], optimizers: Iterable[Any]) -> list[str] | None:
        """Return the paths of the outermost modules that want gradients and have none in any optimizer seen so far.

        None where no parameter of a model is in an optimizer, as where these have copies. What was found last stays
        once the objects are gone.
        """
        models, optimizers = alive(models), alive(optimizers)
        if models and optimizers:
            self._idle = _ask(_without_optimizer, models, optimizers, name="which parameters are in an optimizer")
        return self._idle

    def _frozen_parts(self, models: Iterable[Any]) -> list[dict[str, Any]]:
        """Return the outermost modules of which no parameter wants a gradient: module, and changes: whether its weights
        are others than when it was first seen, as of an average of another model's; None: that is not known.
        """
        here = alive(models)
        found = _ask(_without_gradients, here, name="which parameters are frozen")
        if here and found is not None:  # of models that are gone, what was seen last stays
            before, self._frozen = self._frozen, {}
            for path, weights in found.items():
                first = before.get(path, (weights, False))[0]
                self._frozen[path] = first, None if weights is None or first is None else weights != first
        return [{"module": path, "changes": changes} for path, (_, changes) in self._frozen.items()]


# A part of a model that has less of its parameters is no part that is frozen by itself.
_FROZEN_SHARE = 0.02
_LOOKED_AT = 4


def _without_gradients(models: Sequence[Any]) -> dict[str, Any]:
    """Return the path of each outermost module that wants no gradient, and what tells that its weights were changed.

    None where nothing does: an average of another model is that model's twin, and may be written to by `.data`, which
    counts nothing.
    """
    names, found = names_of_all(models), {}
    for model in models:
        least, todo = _FROZEN_SHARE * sum(p.numel() for p in parameters_of(model)), [model]
        while todo:
            module = todo.pop(0)
            parameters = parameters_of(module)
            if sum(p.numel() for p in parameters) < max(least, 1):
                continue
            if not any(p.requires_grad for p in parameters):
                path = names[id(module)][0] if id(module) in names else ""
                twin = any(
                    type(one) is type(module) and _is_trained(one) for model in models for one in modules_of(model)
                )
                found[path or f"({class_of(module)})"] = _weights(parameters, twin=twin)
            elif not all(p.requires_grad for p in parameters):
                todo += [child for _, child in children_of(unwrapped(module))]
    return found


def _is_trained(module: Any) -> bool:
    return any(p.requires_grad for p in parameters_of(module))


def _weights(parameters: Sequence[Any], *, twin: bool) -> Any:
    """Return where parameters are, and how often each was written to; on a CPU a value of some, too."""
    on_cpu = all(p.device.type == "cpu" for p in parameters)
    if twin and not on_cpu:
        return None
    try:
        values = [float(p.detach().reshape(-1)[0]) for p in parameters[:_LOOKED_AT] if p.numel()] if on_cpu else []
        return [(p.data_ptr(), p._version) for p in parameters], values
    except Exception:  # noqa: BLE001 - an inference tensor counts nothing, and one without storage is nowhere
        return None


def _without_optimizer(models: Sequence[Any], optimizers: Sequence[Any]) -> list[str] | None:
    trained = {id(p) for one in optimizers for group in one.param_groups for p in group["params"]}
    names = names_of_all(models)
    found: dict[str, None] = {}
    todo, seen, known = list(models), 0, False
    while todo and seen < _MOST_MODULES:
        module = todo.pop(0)
        seen += 1
        wanted = [p for p in parameters_of(module) if p.requires_grad]
        idle = sum(id(p) not in trained for p in wanted)
        known |= idle < len(wanted)
        path = names[id(module)][0] if id(module) in names else ""
        if wanted and idle == len(wanted):
            found[path or f"({class_of(module)})"] = None
        elif idle:
            todo += [child for _, child in children_of(unwrapped(module))]
    return list(found) if known else None


def _torch() -> Any:
    import torch

    return torch


# Why a question had no answer at the last write, by its name: many objects of a kind cause one warning.
_unanswered: dict[str, str] = {}

# So many modules are looked at, from the outermost on.
_MOST_MODULES = 2_000


def _ask(question: Callable[..., Any], *args: Any, name: str = "") -> Any:
    """Return the answer, or None with a warning if the script's objects or this version of torch cannot answer."""
    try:
        return question(*args)
    except Exception as e:  # noqa: BLE001 - it runs the script's code (len, attributes); what is unknown is null
        what = name or question.__name__.strip("_")
        _unanswered[what] = f"no answer for {what} ({words_of(e)})"
        return None


def _answers(**questions: Callable[[], Any]) -> dict[str, Any]:
    """Return the answers by name. Each question is asked separately, so that a failure affects only its own answer."""
    return {name: _ask(question, name=name) for name, question in questions.items()}


def _device(recorder: Recorder) -> dict[str, Any]:
    """Describe the GPU that the rank trains on, or the host if it uses none. No other GPU is queried."""
    torch = _torch()
    index = recorder.device.in_use()
    if index is None and (other := recorder.device.other):
        named: Any = getattr(getattr(torch, other, None), "get_device_name", None)
        unknown = dict.fromkeys(("index", "memory_bytes", "uuid", "capability"))
        return {"type": other, **unknown, "count": 1, "name": (_ask(named, name="name") if named else None) or other}
    if index is None:
        return {
            "type": "cpu",
            "index": None,
            **_answers(name=cpu.name, memory_bytes=lambda: os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
            "uuid": None,
            "capability": None,
            "count": 0,
        }
    properties = torch.cuda.get_device_properties(index)
    return {
        "type": "cuda",
        "index": index,
        **_answers(
            vendor=lambda: "nvidia" if torch.version.hip is None else "amd",
            name=lambda: properties.name,
            uuid=lambda: str(uuid) if (uuid := getattr(properties, "uuid", None)) is not None else None,
            pci=lambda: _pci(properties),
            slice=lambda: _slice(index),
            node=lambda: cpu.node_of(_pci(properties)),
            memory_bytes=lambda: properties.total_memory,
            capability=lambda: [properties.major, properties.minor],
            count=torch.cuda.device_count,
        ),
    }


def _slice(index: int) -> str | None:
    """Return the MIG slice that the rank was given by name; CUDA may report the UUID of the whole GPU for it."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    name = given[index].strip() if index < len(given) else ""
    return name if name.startswith("MIG-") else None


def _pci(properties: Any) -> str | None:
    """Return a GPU's address on the PCI bus, such as 0000:c1:00.0; None if this torch does not know it."""
    numbers: list[Any] = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    return None if None in numbers else "{:04x}:{:02x}:{:02x}.0".format(*numbers)


def _versions() -> dict[str, Any]:
    torch = _torch()
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    return _answers(
        dlprof=lambda: __version__,
        python=platform.python_version,
        torch=lambda: str(torch.__version__),
        cuda=lambda: torch.version.cuda,
        hip=lambda: torch.version.hip,
        cudnn=lambda: torch.backends.cudnn.version() if cuda else None,
        nccl=lambda: ".".join(map(str, torch.cuda.nccl.version())) if cuda else None,
    )


def _cpu(recorder: Recorder) -> dict[str, Any]:
    torch = _torch()
    return _answers(
        at_start=lambda: None if recorder.cores is None else cpu.listed(recorder.cores),
        count=os.cpu_count,
        affinity=lambda: len(os.sched_getaffinity(0)),
        allowed=cpu.cores,
        nodes=cpu.nodes,
        quota=cpu.quota,
        memory_limit_bytes=cpu.memory_limit,
        torch_threads=torch.get_num_threads,
        torch_interop_threads=torch.get_num_interop_threads,
        units=cpu.units,
        onednn=lambda: bool(torch.backends.mkldnn.is_available() and getattr(torch.backends.mkldnn, "enabled", True)),
    )


# What sets the number of threads where a pool is first used.
_THREADS = tuple(f"{of}_NUM_THREADS" for of in ("OMP", "MKL", "OPENBLAS", "NUMEXPR"))


def _process() -> dict[str, Any]:
    """Describe what slows the whole process: its priority, hooks of Python's, libraries that check memory."""
    ours = bool(os.environ.get("DLPROF_LINES"))  # counts lines by these hooks itself
    return _answers(
        nice=lambda: max(os.getpriority(os.PRIO_PROCESS, 0), 0),
        tracer=lambda: None if ours else _named(sys.gettrace()),
        profiler=lambda: None if ours else _named(sys.getprofile()),
        monitors=lambda: [] if ours else _monitors(),
        tracemalloc=lambda: "tracemalloc" in sys.modules and sys.modules["tracemalloc"].is_tracing(),
        development=lambda: bool(sys.flags.dev_mode),
        malloc=lambda: os.environ.get("PYTHONMALLOC"),
        sanitizer=_sanitizer,
    )


@functools.cache
def _sanitizer(maps: str = "/proc/self/maps") -> str | None:
    """Return the library that checks memory or threads in this process; None: there is none."""
    found = re.search(r"/lib((?:a|hwa|l|m|t|ub)san|sanitizer|cuda-memcheck)\b[^/]*$", Path(maps).read_text(), re.M)
    return found and found[1]


def _named(hook: Any) -> str | None:
    """Return what a hook of Python's is, as "module.name"; None: there is none."""
    if hook is None:
        return None
    kind = hook if hasattr(hook, "__qualname__") else type(hook)
    return f"{getattr(kind, '__module__', '')}.{kind.__qualname__}"


def _monitors() -> list[str]:
    """Return the tools that use sys.monitoring (Python 3.12); cProfile and coverage do."""
    monitoring = getattr(sys, "monitoring", None)
    tools = [] if monitoring is None else [monitoring.get_tool(n) for n in range(6)]
    return [str(tool) for tool in tools if tool]


def _model(model: Any) -> dict[str, Any]:
    torch = _torch()
    parameters, modules = parameters_of(model), modules_of(model)
    images = [m.weight for m in modules if issubclass(type(m), (torch.nn.Conv2d, torch.nn.Conv3d))]
    names = [type(m).__name__ for m in modules]
    ddp = next((m for m in modules if type(m).__name__ == "DistributedDataParallel"), None)
    fsdp = any("FSDP" in name or name == "FullyShardedDataParallel" for name in names)
    return {
        "class": _ask(class_of, model, name="the model's class") or type(model).__name__,
        **_answers(
            parameters=lambda: sum(p.numel() for p in parameters),
            parameter_bytes=lambda: sum(map(_bytes, parameters)),
            trainable_parameters=lambda: sum(p.numel() for p in parameters if p.requires_grad),
            last_bucket_bytes=lambda: _last_bucket([_bytes(p) for p in parameters if p.requires_grad]),
            dtypes=lambda: dict(Counter(str(p.dtype).replace("torch.", "") for p in parameters)),
            modules=lambda: len(modules) or None,
            compiled=lambda: (
                "OptimizedModule" in names or any(getattr(m, "_compiled_call_impl", None) is not None for m in modules)
            ),
            channels_last=lambda: _channels_last(images),
            ddp=lambda: _ddp(ddp) if ddp is not None else None,
            tensor_parallel=lambda: _tensor_parallel(parameters, fsdp=fsdp),
            reads_sequences=lambda: any(map(_SEQUENTIAL.search, names)),
            # How models of the transformers library compute attention.
            attention=lambda: next(filter(None, (_attention(m) for m in modules)), None),
            batch_first=lambda: all(getattr(m, "batch_first", True) is not False for m in modules),
        ),
        "data_parallel": "DataParallel" in names,
        "fsdp": fsdp,
    }


# Classes of modules that work along a sequence.
_SEQUENTIAL = re.compile(r"attention|transformer|attn|lstm|gru|rnn|mamba|rwkv|gpt|llama|bert", re.IGNORECASE)


def _attention(module: Any) -> str | None:
    name = getattr(getattr(module, "config", None), "_attn_implementation", None)
    return name if isinstance(name, str) else None


def _tensor_parallel(parameters: Sequence[Any], *, fsdp: bool) -> int:
    """Return over how many ranks layers are split, all of which get the same batch; 1 if they are not split.

    FSDP shards parameters along the first dimension of its mesh, tensor parallelism along the last one.
    """
    most = 1
    for parameter in parameters:
        mesh, placements = getattr(parameter, "device_mesh", None), getattr(parameter, "placements", ())
        if mesh is not None and (not fsdp or sum(not p.is_replicate() for p in placements) > 1):
            most = max(most, int(mesh.size(mesh.ndim - 1)))
    return most


def _bytes(parameter: Any) -> int:
    return int(parameter.numel() * parameter.element_size())


# DistributedDataParallel's buckets, of gradients from the model's end to its beginning: the first one, and the others.
_FIRST_BUCKET, _BUCKET = 1 << 20, 25 << 20


def _last_bucket(sizes: Sequence[int]) -> int:
    """Return the bytes of the last bucket for parameters of these sizes: when it is full, the backward pass is over."""
    filled = last = 0
    most = _FIRST_BUCKET
    for size in reversed(sizes):
        filled += size
        last = filled
        if filled >= most:
            filled, most = 0, _BUCKET
    return last


def _channels_last(weights: Sequence[Any]) -> bool | None:
    """Return whether convolutions are in channels_last; None if their weights have the same layout in both formats."""
    torch = _torch()
    of = {4: torch.channels_last, 5: torch.channels_last_3d}
    layouts = ((w.is_contiguous(memory_format=of[w.dim()]), w.is_contiguous()) for w in weights)
    return next((last for last, contiguous in layouts if last != contiguous), None)


def _ddp(ddp: Any) -> dict[str, Any]:
    def unused_bytes() -> int | None:
        # Of the last step that DDP examined, which is every hundredth; None if it has examined none yet.
        size = ddp._get_ddp_logging_data().get("unused_parameter_size") if ddp.find_unused_parameters else None
        return None if size is None else int(size)

    return _answers(
        bucket_cap_mb=lambda: ddp.bucket_bytes_cap / 2**20,
        find_unused_parameters=lambda: ddp.find_unused_parameters,
        unused_parameter_bytes=unused_bytes,
        gradient_as_bucket_view=lambda: ddp.gradient_as_bucket_view,
        static_graph=lambda: ddp.static_graph,
        broadcast_buffers=lambda: ddp.broadcast_buffers,
    )


def _optimizer(optimizer: Any) -> dict[str, Any]:
    groups = optimizer.param_groups
    return {
        "class": type(optimizer).__name__,
        **_answers(
            fused=lambda: groups[0].get("fused"),
            foreach=lambda: groups[0].get("foreach"),
            # The constructors of torch's optimizers keep all their arguments in `defaults`.
            takes=lambda: [name for name in ("fused", "foreach") if name in optimizer.defaults],
            parameter_groups=lambda: len(groups),
            distinct_groups=lambda: len({_settings_of(g) for g in groups}),
            parameters=lambda: sum(len(g["params"]) for g in groups),
            bytes=lambda: sum(p.numel() * p.element_size() for g in groups for p in g["params"]),
            # A tensor on a device is not read, since that would wait for the device.
            lr=lambda: rate if isinstance(rate := groups[0].get("lr"), (int, float)) else None,
        ),
    }


def _settings_of(group: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Return what an optimizer's group is but for its parameters; a tensor is what it is by identity, as it may lie on
    a device.
    """
    plain = (bool, int, float, str, type(None))
    each = {k: v if isinstance(v, plain) else tuple(v) if isinstance(v, tuple) else id(v) for k, v in group.items()}
    return tuple(sorted((k, v) for k, v in each.items() if k not in ("params", "param_names")))


def _matmul() -> dict[str, Any]:
    """Describe how float32 products and convolutions are computed.

    torch 2.9 brought `fp32_precision` ("ieee", "tf32", "bf16"; "none": as the backend above says). Once a script has
    set one, reading the older settings raises, and in some versions warns on the script's stderr. So where the new
    ones exist, they are read, and the older ones follow from them.
    """
    torch = _torch()
    backends = torch.backends
    found = _answers(
        cudnn_benchmark=lambda: backends.cudnn.benchmark,
        cudnn_deterministic=lambda: backends.cudnn.deterministic,
        deterministic=torch.are_deterministic_algorithms_enabled,
        # torch 2.2 brought it.
        fills_new=lambda: getattr(getattr(torch.utils, "deterministic", None), "fill_uninitialized_memory", None),
    )
    if not hasattr(backends, "fp32_precision"):
        return found | _answers(
            float32_precision=torch.get_float32_matmul_precision,
            allow_tf32=lambda: backends.cuda.matmul.allow_tf32,
            cudnn_allow_tf32=lambda: bool(backends.cudnn.allow_tf32),
        )
    found |= _answers(
        fp32_precision=lambda: backends.fp32_precision,
        matmul_fp32_precision=lambda: backends.cuda.matmul.fp32_precision,
        conv_fp32_precision=lambda: backends.cudnn.conv.fp32_precision,
        cpu_matmul_fp32_precision=lambda: backends.mkldnn.matmul.fp32_precision,
    )
    product, convolution = found["matmul_fp32_precision"], found["conv_fp32_precision"]
    # set_float32_matmul_precision("medium") is TF32 on a GPU, as "high" is, and bfloat16 on a CPU.
    rounded = "medium" if found["cpu_matmul_fp32_precision"] == "bf16" else "high"
    return found | {
        "float32_precision": None if product is None else rounded if product == "tf32" else "highest",
        "allow_tf32": None if product is None else product == "tf32",
        "cudnn_allow_tf32": None if convolution is None else convolution == "tf32",
    }
