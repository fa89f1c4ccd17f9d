"""The settings that a recording can override in an unedited script: `--set loader.num_workers=4`.

One table for who names them (changes of findings), who takes them (the command line, `dlprof try`) and who applies them
(dlprof/record/overrides). Standard library only: it is imported inside ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from dlprof.errors import DlprofError
from dlprof.units import count, few

Value = bool | int | float | str


@dataclass(frozen=True)
class Override:
    """A setting that can be overridden.

    `name` is GROUP.SETTING; SETTING is what changes and facts call it. `numerics`: whether the job then computes other
    numbers. `risk` is one sentence for the user; "" where there is none.
    """

    name: str
    parse: Callable[[str], Value]
    values: str  # what it takes, for help: "0, 1, 2, …"
    help: str
    numerics: bool = False
    risk: str = ""

    @property
    def setting(self) -> str:
        """The setting's name in code and in `Change.settings`."""
        return self.name.partition(".")[2]


def _bool(text: str) -> bool:
    known = {"true": True, "1": True, "on": True, "false": False, "0": False, "off": False}
    if text.lower() not in known:
        raise ValueError("True or False")
    return known[text.lower()]


# More processes, threads or batches than any host is given.
_MOST = 100_000


def _whole(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit()) or len(text) > 9 or not least <= int(text) <= _MOST:
            raise ValueError(f"a whole number from {least} to {_MOST}")
        return int(text)

    return parse


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < _MOST:
        raise ValueError(f"a number above 0 and below {_MOST}")
    return value


def _one_of(*words: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in words:
            raise ValueError(" or ".join(words))
        return text

    return parse


_FLAG = "True, False"
_COMPILE = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs", "off")

OVERRIDES = (
    Override(
        "loader.num_workers",
        _whole(0),
        "0, 1, 2, …",
        "Worker processes of each DataLoader. An iterable data set keeps its number unless its code asks which worker"
        " it is in: each would give all samples.",
        risk="Random draws of a data set differ; one that uses the GPU or an open connection fails in a worker.",
    ),
    Override("loader.pin_memory", _bool, _FLAG, "Copy batches into page-locked memory."),
    Override(
        "loader.persistent_workers",
        _bool,
        _FLAG,
        "Keep the workers between epochs; a loader without workers stays as it is.",
        risk="Workers do not see what the script changes in the data set after the first epoch.",
    ),
    Override(
        "loader.prefetch_factor",
        _whole(1),
        "1, 2, …",
        "Batches that each worker makes ahead; a loader without workers stays as it is.",
        risk="Memory grows with each batch.",
    ),
    Override(
        "loader.multiprocessing_context",
        _one_of("fork", "spawn", "forkserver"),
        "fork, spawn, forkserver",
        "How workers are started.",
        risk="With spawn and forkserver the data set must be picklable.",
    ),
    Override("ddp.bucket_cap_mb", _positive, "MB", "Size of a bucket of gradients that are exchanged together."),
    Override("ddp.gradient_as_bucket_view", _bool, _FLAG, "Keep gradients in the buckets, without a copy."),
    Override(
        "ddp.static_graph",
        _bool,
        _FLAG,
        "The same parameters are used in each step.",
        risk="Wrong gradients or an error where the used parameters change from step to step.",
    ),
    Override(
        "ddp.find_unused_parameters",
        _bool,
        _FLAG,
        "Look for parameters without a gradient in each step.",
        risk="False fails where some parameters get no gradient.",
    ),
    Override(
        "ddp.broadcast_buffers",
        _bool,
        _FLAG,
        "Broadcast rank 0's buffers before each forward pass: forward_sync_buffers of torch 2.13 and later.",
        numerics=True,
        risk="With False, buffers such as batch-norm statistics differ between ranks.",
    ),
    Override("ddp.comm_hook", _one_of("fp16", "bf16"), "fp16, bf16", "Exchange gradients in 16 bits.", numerics=True),
    Override(
        "optimizer.fused",
        _bool,
        _FLAG,
        "One kernel for all parameters of a group, of torch's optimizers that have one (Adam, AdamW, SGD, Adagrad).",
    ),
    Override(
        "optimizer.foreach",
        _bool,
        _FLAG,
        "Few kernels for whole lists of parameters, in torch's optimizers.",
        risk="True needs as much memory again as the parameters, during each step.",
    ),
    Override(
        "torch.float32_matmul_precision",
        _one_of("highest", "high", "medium"),
        "highest, high, medium",
        "How float32 products are computed.",
        numerics=True,
    ),
    Override(
        "torch.cudnn_benchmark",
        _bool,
        _FLAG,
        "Time convolution algorithms, and take the fastest.",
        risk="True times them anew for each shape of the input.",
    ),
    Override(
        "torch.num_threads", _whole(1), "1, 2, …", "Threads of an operator on the CPU; loader workers keep theirs."
    ),
    Override(
        "torch.autocast",
        _one_of("bf16", "fp16", "off"),
        "bf16, fp16, off",
        "Call the outermost model under autocast, or not; what it returns is float32 again.",
        numerics=True,
        risk="fp16 needs a gradient scaler in the script: small gradients become 0 without one.",
    ),
    Override(
        "torch.compile",
        _one_of(*_COMPILE),
        ", ".join(_COMPILE),
        "Compile the outermost model at its first call; off: what the script compiles runs uncompiled.",
        numerics=True,
        risk="Each new shape may be compiled again. On a GPU, reduce-overhead and max-autotune overwrite what the last"
        " call returned.",
    ),
    Override(
        "model.memory_format",
        _one_of("channels_last", "contiguous_format"),
        "channels_last, contiguous_format",
        "Memory format of the outermost model's convolutions, and of the images and volumes that it is called with.",
        risk="Code of the script's that flattens images with view() fails.",
    ),
    Override(
        "gc.freeze", _bool, _FLAG, "Exempt the objects made so far from garbage collection before the first step."
    ),
    Override(
        "gc.enabled",
        _bool,
        _FLAG,
        "Automatic garbage collection.",
        risk="With False, memory held in cycles is never freed.",
    ),
    Override(
        "copy.non_blocking",
        _bool,
        _FLAG,
        "Let copies from the host to a device (Tensor.to, Tensor.cuda) not wait for it.",
        risk="Wrong where the script writes into pinned memory that is still being copied.",
    ),
)

# What explains the variables of the environment, as one entry.
ENVIRONMENT = Override(
    "env.NAME",
    str,
    "any text",
    "A variable of the environment, set before the command starts, and kept where a launcher or the script sets it:"
    " OMP_NUM_THREADS, OMP_WAIT_POLICY, KMP_BLOCKTIME, MKL_NUM_THREADS, NCCL_ALGO, NCCL_BUFFSIZE, MALLOC_ARENA_MAX,"
    " LD_PRELOAD (another allocator), PYTORCH_CUDA_ALLOC_CONF, CUDA_DEVICE_MAX_CONNECTIONS, …",
    risk="NVIDIA_TF32_OVERRIDE and TORCH_ALLOW_TF32_CUBLAS_OVERRIDE change numbers.",
)

# Variables of the environment are overridden as env.NAME=VALUE; these compute other numbers.
_NUMERIC_VARIABLES = ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")

_OURS = ("PYTHONPATH", "PYTHONHOME")

_BY_NAME = {o.name: o for o in OVERRIDES}


def parse(words: Iterable[str]) -> dict[str, Value]:
    """Return overrides from NAME=VALUE words, by name; raise DlprofError for an unknown name or value."""
    found: dict[str, Value] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals:
            raise DlprofError(f"--set {word}: NAME=VALUE expected, such as loader.num_workers=4")
        try:
            found[name] = _value(name, text)
        except ValueError as e:
            raise DlprofError(f"--set {word}: {e}") from None
    if why := _clash(found):
        raise DlprofError(f"--set {why}")
    return found


def checked(settings: Mapping[str, object]) -> dict[str, Value]:
    """Return overrides of this process from values by name; raise ValueError for an unknown name or value.

    Variables of the environment are none: a process reads most of them as it starts.
    """
    found: dict[str, Value] = {}
    for name, value in settings.items():
        if str(name).startswith("env."):
            raise ValueError(f"set: {name} is to be set before this process starts, by `dlprof wrap --set` for example")
        try:
            found[name] = _value(str(name), str(value))
        except ValueError as e:
            raise ValueError(f"set: {name}={value!r}: {e}") from None
    if why := _clash(found):
        raise ValueError(f"set: {why}")
    return found


def _value(name: str, text: str) -> Value:
    """Return the value of an override; raise ValueError with the reason where there is none."""
    group, _, variable = name.partition(".")
    if group == "env" and variable.isidentifier():
        if variable in _OURS or variable.startswith("DLPROF_"):
            raise ValueError("recording needs this variable itself")
        return text
    if name not in _BY_NAME:
        raise ValueError(f"no setting {name!r}; `dlprof explain settings` lists them")
    try:
        return _BY_NAME[name].parse(text)
    except ValueError as e:
        raise ValueError(f"{e} expected") from None


def _clash(settings: Mapping[str, Value]) -> str:
    """Return which settings exclude each other; "": none."""
    both = settings.get("optimizer.fused") and settings.get("optimizer.foreach")
    return "optimizer.fused and optimizer.foreach: an optimizer takes one of them" if both else ""


def changes_numbers(overrides: Mapping[str, Value]) -> list[str]:
    """Return the names of those overrides with which the job computes other numbers."""
    variables = [f"env.{v}" for v in _NUMERIC_VARIABLES]
    return [name for name in overrides if name in variables or (name in _BY_NAME and _BY_NAME[name].numerics)]


def named(setting: str) -> str | None:
    """Return the override of a setting as changes and facts name it (num_workers); None where there is none."""
    if setting.isupper():
        return f"env.{setting}"
    return next((o.name for o in OVERRIDES if o.setting == setting), None)


@dataclass(frozen=True)
class Outcome:
    """What an override has done, in one rank or in several.

    `applied`: how often it took effect; 0: never. `before`: the values that the script had there. `places`: file, line
    and function of the script's calls that it changed. `error`: why it did not apply, or not everywhere; None: nothing
    failed.
    """

    applied: int = 0
    before: tuple[Value | None, ...] = ()
    places: tuple[tuple[str, int, str], ...] = ()
    error: str | None = None


def outcomes(asked: Iterable[str], reports: Iterable[object]) -> dict[str, Outcome]:
    """Return what each override did, by name, from the ranks' logs `overrides`: their counts are summed.

    An override that no report names never applied. What in a report is not of the kind expected counts as not there.
    """
    found = {name: Outcome() for name in asked}
    for report in reports:
        for name, entry in report.items() if isinstance(report, Mapping) else ():
            if isinstance(name, str) and isinstance(entry, Mapping):
                found[name] = _together(found.get(name, Outcome()), entry)
    return found


def _together(one: Outcome, entry: Mapping[str, object]) -> Outcome:
    applied, error = entry.get("applied"), entry.get("error")
    before, places = entry.get("before"), entry.get("places")
    values = [v for v in before if v is None or isinstance(v, (bool, int, float, str))] if _is_list(before) else []
    known = [
        (p[0], p[1], p[2])
        for p in (places if _is_list(places) else ())
        if _is_list(p) and len(p) == 3 and isinstance(p[0], str) and type(p[1]) is int and isinstance(p[2], str)
    ]
    return Outcome(
        one.applied + (applied if type(applied) is int and applied > 0 else 0),
        tuple(dict.fromkeys((*one.before, *values))),
        tuple(dict.fromkeys((*one.places, *known))),
        one.error or (error if isinstance(error, str) else None),
    )


def _is_list(value: object) -> TypeGuard[list[Any]]:
    return isinstance(value, list)


def described(value: object, outcome: Outcome) -> str:
    """Say what an override did: 0 → 4 at train.py:12, 1 time."""
    if not outcome.applied:
        text = f"{value} never applied"
    else:
        before = ", ".join(map(str, outcome.before))
        places = list(dict.fromkeys(f"{file}:{line}" for file, line, _ in outcome.places))
        where = f" at {few(places, 4)}" if places else ""
        text = f"{before} → {value}{where}, {count(outcome.applied, 'time')}"
    return f"{text}: {outcome.error}" if outcome.error else text
