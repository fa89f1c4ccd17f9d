"""The table of patterns that decides the kind of an event.

An event has a category (the profiler's name of its source) and a name. The first row of PATTERNS that matches both
decides the kind and the side, host or device. A new library or backend needs a new row. No other module derives kinds
from names.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Literal, NamedTuple

Side = Literal["host", "device"]


class Pattern(NamedTuple):
    """One row: events of these categories (lower case, an expression that must match whole) with such a name."""

    side: Side
    kind: str
    categories: str
    name: str = ""


# Kineto's names since torch 1.12 and, after the bar, those of its first releases (Kernel, Memcpy, Operator, ...).
_OP = r"cpu_op|operator|hpu_op"
_MARK = r"cpu_op|operator|user_annotation"

# Kernels that move data between devices. NCCL says ncclKernel_ (to 2.18) and ncclDevKernel_ (from 2.19; on symmetric
# memory ncclSymkDevKernel_), AMD's RCCL either of them or rccl; a bare hip* says nothing. Transformer Engine overlaps
# tensor parallelism with kernels of its own (userbuffers). Expert-parallel kernels carry their namespace (DeepEP's
# first and second edition, its hybrid one, MORI's); what they do on one GPU alone (layouts, copying out, adding up)
# is computing.
EXPERT_KERNEL = (
    r"::internode(?:_ll)?::|::intranode::|deep_ep::elastic::\w*(?:dispatch|combine|barrier)_impl"
    r"|hybrid_ep::(?:dispatch|combine|device_sync)_kernel|\bEp(?:Dispatch|Combine)(?:Intra|Inter)Node"
)
COMMUNICATION_KERNEL = (
    r"(?i:(?:^|\W)(?:nccl|rccl|oneccl|mscclpp|nvshmem))|(?i:nccl(?:dev)?kernel|rccl_|oneccl|mscclpp|nvshmem)"
    r"|cross_device_reduce|(?:one|two)_shot_all_reduce|multimem_(?:one_shot_)?(?:all_reduce|all_gather|reduce_scatter)"
    rf"|(?:^|\W)k?userbuffers_|{EXPERT_KERNEL}"
)
# The calls that issue a collective and torch's marks around one: c10d::allreduce_, gloo:all_reduce, nccl:broadcast.
# record_param_comms is the call inside c10d that tells the profiler a collective's group, size and type;
# horovod:all_reduce is dlprof's own mark, for Horovod makes none.
COMMUNICATION_CALL = (
    r"^_?c10d(?:_functional(?:_autograd)?)?::|^(?:nccl|gloo|mpi|ucc|xccl|rccl|ccl|horovod):(?!:)"
    r"|^record_param_comms$"
)

PATTERNS: tuple[Pattern, ...] = (
    Pattern("device", "communication", r"kernel", COMMUNICATION_KERNEL),
    Pattern("device", "kernel", r"kernel"),
    Pattern("device", "copy", r"gpu_memcpy|memcpy"),
    Pattern("device", "set", r"gpu_memset|memset"),
    Pattern("device", "sync", r"cuda_sync"),
    Pattern("device", "annotation", r"gpu_user_annotation"),
    Pattern("host", "communication", _MARK, COMMUNICATION_CALL),
    Pattern("host", "fetch", _MARK, r"^enumerate\(DataLoader\)#.*\.__next__$|^dlprof::fetch\b"),
    # Kineto's first releases put record_function's ranges among the operators.
    # So does dlprof the modules, which costs least there.
    Pattern("host", "annotation", _MARK, r"^ProfilerStep#\d+$|^Optimizer\.(?:step|zero_grad)#|^nn\.Module: |^dlprof::"),
    Pattern("host", "annotation", r"user_annotation"),
    Pattern("host", "op", _OP),
    Pattern("host", "runtime", r"(?:\w+_)?(?:runtime|driver)|hip"),
    Pattern("host", "python", r"python_function|python function"),
)

# Categories without a thread or stream: the profiler's window and cost, arrows, counters. No rows, no warning.
NO_ROWS = re.compile(
    r"trace|overhead|ac2g|fwdbwd|async.*|cpu_instant_event|external_correlation|cuda_profiler_range|gpu_pm_counter",
    re.I,
)

_COMPILED = tuple((p, re.compile(p.categories), re.compile(p.name)) for p in PATTERNS)


@lru_cache(1 << 16)  # the ranks of a job run the same things
def kind_of(category: str, name: str) -> tuple[Side, str] | None:
    """Return the side and the kind of an event, None if no pattern matches it."""
    category = category.lower()
    for pattern, categories, names in _COMPILED:
        if categories.fullmatch(category) and names.search(name):
            return pattern.side, pattern.kind
    return None


# Operators that multiply matrices or convolve: a trace may have their shapes.
MULTIPLIES = re.compile(r"^aten::(?:_scaled_mm|addmm|baddbmm|bmm|mm|(?:\w+_)?convolution(?:_\w+)?)$")

# What the engine runs of the backward pass: each function stands behind this, and within it once more.
ENGINE = "autograd::engine::evaluate_function: "
FUNCTION = re.compile(rf"^{ENGINE}|^\w+Backward\d*$")

# What makes autograd's numbers worth their time: modules, as dlprof and traces with stacks name them, and operators of
# which normalisations, losses and one-hot rows are written out.
NUMBERS_FOR = re.compile(
    r"^nn\.Module: |^aten::(?:log|logsumexp|one_hot|pow|rsqrt|scatter_?|std|std_mean|var|var_mean)$"
)

# Operators that make no function of the backward pass, or hardly ever, though a trace may number them; and what
# accumulates gradients, which has no number.
UNNUMBERED = re.compile(
    r"^(?:aten::)?(?:as_strided|detach_?|empty\w*|is_nonzero|item|_local_scalar_dense|record_stream|resize_|resolve_\w+"
    r"|result_type|zeros\w*|\w+_backward)$|^torch[:.]|AccumulateGrad$"
)

# A collective by any of its names, without signs and in lower case: the first found decides.
_COLLECTIVES = (
    ("all_reduce", r"allreduce|crossdevicereduce"),
    ("reduce_scatter", r"reducescatter"),
    ("all_gather", r"allgather"),
    (
        "all_to_all",
        r"alltoall|(?:(?:inter|intra)node|elastic|hybridep)\w*(?:dispatch|combine)|ep(?:dispatch|combine)int",
    ),
    ("send_recv", r"sendrecv"),
    ("broadcast", r"broadcast"),
    ("reduce", r"reduce"),
    ("gather", r"gather"),
    ("scatter", r"scatter"),
    ("barrier", r"barrier|devicesync"),
    ("send", r"send"),
    ("recv", r"recv"),
)
_COLLECTIVES_COMPILED = tuple((name, re.compile(expression)) for name, expression in _COLLECTIVES)


@lru_cache(4096)
def collective_of(text: str) -> str:
    """Return the collective that a metadata field, a call or a kernel names, "" if it names none.

    A kernel's template and argument lists are not looked at: NCCL's point-to-point kernels stay send_recv, whatever
    collective they serve.
    """
    squeezed = re.sub(r"[\W_]", "", re.split(r"[(<]", text)[0].lower())
    # A reduction that the kernel applies is no collective: ncclDevKernel_AllGather_RING_LL is matched before it.
    return next((name for name, expression in _COLLECTIVES_COMPILED if expression.search(squeezed)), "")


_COPY = re.compile(r"\b([HDP])to([HDP])\b(?:\s*\((\w+)\s*->\s*(\w+)\))?")
_COPY_WORDS = re.compile(r"(Host|Device|Peer)To(Host|Device|Peer)")


def copy_of(text: str) -> tuple[str, str]:
    """Return a copy's direction (HtoD, DtoH, DtoD, PtoP, HtoH) and host memory (pageable, pinned); "": unknown."""
    found = _COPY.search(text)
    if not found:
        words = _COPY_WORDS.search(text)
        return (f"{words[1][0]}to{words[2][0]}", "") if words else ("", "")
    sides = {(found[3] or "").lower(), (found[4] or "").lower()}
    return f"{found[1]}to{found[2]}", next((m for m in ("pageable", "pinned") if m in sides), "")


# Element types as torch's metadata, C++ and NCCL call them: torch's own name, and bytes.
_TYPES = {
    "float64": (8, "double", "float64", "f64"),
    "float32": (4, "float", "float32", "f32"),
    "float16": (2, "half", "float16", "f16"),
    "bfloat16": (2, "bfloat16", "bf16"),
    "float8_e4m3fn": (1, "float8_e4m3fn"),
    "float8_e5m2": (1, "float8_e5m2"),
    "float8_e4m3fnuz": (1, "float8_e4m3fnuz"),
    "float8_e5m2fnuz": (1, "float8_e5m2fnuz"),
    "int64": (8, "long", "long int", "int64", "int64_t"),
    "int32": (4, "int", "int32", "int32_t"),
    "int16": (2, "short", "short int", "int16", "int16_t"),
    "int8": (1, "char", "signed char", "int8", "int8_t"),
    "uint8": (1, "byte", "unsigned char", "uint8", "uint8_t"),
    "bool": (1, "bool"),
    "complex64": (8, "complexfloat", "complex<float>", "complex64"),
    "complex128": (16, "complexdouble", "complex<double>", "complex128"),
}
_TYPE_OF = {alias: (name, row[0]) for name, row in _TYPES.items() for alias in row[1:] if isinstance(alias, str)}


@lru_cache(256)
def element_type(text: str) -> tuple[str, int]:
    """Return torch's name of an element type and its bytes; an unknown one unchanged, and 0."""
    known = _TYPE_OF.get(re.sub(r"^(?:c10|at|torch)(?:::|\.)", "", text.strip()).lower())
    return (known[0], int(known[1])) if known else (text.strip(), 0)


_RANK_IN_NAME = re.compile(r"(?:^|[^a-z])(?:rank|worker)[-_ =]?(\d{1,7})(?!\d)", re.I)


def rank_in(file_name: str) -> int | None:
    """Return the rank in a file's name (rank-34.json, rank_3.json, worker0.123.pt.trace.json), else None."""
    found = _RANK_IN_NAME.search(file_name)
    return int(found[1]) if found else None
