"""Matrix products by their shapes: what they compute and move, and what sizes or float32 make them take too long.

What to change for products in fewer bits: autocast, and TF32, by the names that the job's torch has for them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from msgspec.structs import replace

from dlprof import schema
from dlprof.analysis import settings
from dlprof.analysis.compute.peaks import allows_tf32
from dlprof.analysis.engine import Frame, Job, needs, per_rank
from dlprof.analysis.host.gaps import SMALL_NS
from dlprof.result import Change, Scalar, change
from dlprof.units import few

SIXTEEN_BITS = ("bfloat16", "float16")

# What a matrix product reaches of the tensor cores' peak where nothing is in its way: well tuned trainings of large
# models report 40 to 57 % over all of a step (Chowdhery et al. 2022, PaLM, table 3; Narayanan et al. 2021).
TENSOR_SHARE = 0.5

# Where the peaks are closer, more of the higher one is reached: at 8 times the rate half of it, at twice 5 / 6.
_REACHED_AT_TWICE = 6.0

# Of TF32's peak products reach a little more than of the higher one. Attention that makes float32 of three of them
# reaches, in float32, this share of it: 1,018 ms of a step on an A100 became about 240 ms in bfloat16.
TF32_REACHED, EMULATED = 0.6, 0.25

# Below this share of the time, products or convolutions are not what a setting is for.
_FEW = 0.1

# Sizes below this are part of the task and no mistake: 10 classes, 3 channels of a picture.
LEAST_SIZE = 16

# Other products of a run count as an example for the misaligned ones from this share of their common time on, and for
# no less than this share of what is expected of the device.
_LEAST_EXAMPLE = 0.2

WIDTH = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}

# By the multiple that a row's length must be of for tensor cores, 16 bytes' worth: 8 numbers of 16 bits, 16 of 8
# (NVIDIA, Matrix Multiplication Background User's Guide, "Tensor Core Requirements"), the precisions in which a device
# then computes.
_PRECISIONS = {8: SIXTEEN_BITS, 16: ("float8",)}


def width_of(dtype: str) -> float:
    """Return the bytes of an element; NaN where the type is not known."""
    return 1 if dtype.startswith("float8") else WIDTH.get(dtype, math.nan)


def multiple_of(dtype: str) -> int:
    """Return of what a row's length must be a multiple for tensor cores; 0: it does not matter."""
    return 16 if dtype.startswith("float8") else 8 if dtype in SIXTEEN_BITS else 0


def sizes(shape: str) -> list[list[int]]:
    """Return the dimensions of the tensors in a shape's text."""
    return [[int(n) for n in tensor.split("x")] for tensor in shape.split()]


def operands(operator: str, shape: str) -> list[list[int]]:
    """Return the dimensions of the two operands of a product: the last two tensors, but the first of a scaled one."""
    tensors = sizes(shape)
    return tensors[:2] if operator.endswith("_scaled_mm") else tensors[-2:]


def products(operator: str, shape: str, dtype: str) -> tuple[float, float]:
    """Return FLOPs and bytes of one matrix product by the shapes of its operands; NaN where these do not determine it.

    Two operations a multiplication; each operand read once and the product written once, in 16 bits where the operands
    have 8. A convolution's output depends on its stride, which no trace has.
    """
    both = operands(operator, shape)
    if operator.removeprefix("aten::") not in ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm") or len(both) < 2:
        return math.nan, math.nan
    a, b = both
    if min(len(a), len(b)) < 2 or a[-1] != b[-2]:
        return math.nan, math.nan
    batch = math.prod(a[:-2])
    m, k, n = a[-2], a[-1], b[-1]
    width = width_of(dtype)
    return 2.0 * batch * m * k * n, float(batch * ((m * k + k * n) * width + m * n * max(width, 2)))


def features(operator: str, shape: str) -> list[int]:
    """Return the sizes of features in the shapes of a product: its columns, or a convolution's channels."""
    if operator.endswith("mm"):
        return operands(operator, shape)[-1][-1:]
    return [c for t in sizes(shape)[-2:] for c in t[1:2]]


def misaligned_sizes(operator: str, shape: str, dtype: str) -> list[int]:
    """Return the sizes of features that do not suit tensor cores in this type, small ones left out."""
    multiple = multiple_of(dtype)
    return [s for s in features(operator, shape) if multiple and s % multiple and s >= LEAST_SIZE]


def reached(fast: float, slow: float) -> float:
    """Return the share of the peak `fast` that products reach which now run at the peak `slow`, both FLOP/s."""
    times = max(fast / slow, 1.0) if slow else 8.0
    return max(TENSOR_SHARE, 1 - math.log2(times) / _REACHED_AT_TWICE)


def saved_in_16_bits(
    frame: pd.DataFrame, half: float, bandwidth: float, single: float, column: str = "float32_ns"
) -> float:
    """Return what the products in float32 take more than they would on tensor cores in 16 bits, ns.

    By their FLOPs and bytes where these are known; else as if they ran at the peak of float32 now. `half`: FLOP/s that
    tensor cores reach in 16 bits, `single`: the peak of float32, `bandwidth`: bytes/s of the memory, 0: not known.
    `column`: with their time; of products in TF32, "tf32_ns", whose peak is then `single`. Autocast then reads
    what a forward product takes, in float32, and writes it in 16 bits: a third of the products are forward, and the
    backward pass finds their operands in 16 bits.
    """
    took, flops, moved = (frame[name].to_numpy(dtype=float) for name in (column, "flops", "bytes"))
    of_32 = took > 0
    took, flops, moved = took[of_32], flops[of_32], moved[of_32]
    least = np.fmax(flops / half, moved / 2 / (bandwidth or math.nan)) * 1e9
    saved = np.where(np.isnan(flops), took * (1 - single / half), took - least)
    casts = float(np.nansum(moved)) / 3 * 1.5 / bandwidth * 1e9 if bandwidth else 0.0
    return max(float(np.nansum(np.maximum(saved, 0.0))) - casts, 0.0)


def misaligned(frame: pd.DataFrame, peaks: Mapping[str, float], bandwidth: float) -> tuple[float, float, bool]:
    """Return the ns of misaligned products, what they take too long (NaN: not known), and whether any was looked at.

    The sizes that count are those of features: the columns of a product's second operand, and the channels of a
    convolution. The number of rows (batch × length) may be any.
    """
    took = saved = 0.0
    of_shape = frame["shape"].to_numpy(dtype=object) != ""
    multiples = np.where(of_shape, [multiple_of(str(dtype)) for dtype in frame["dtype"]], 0)
    for multiple, precisions in _PRECISIONS.items():
        if (alike := multiples == multiple).any():
            rate = max(peaks.get(p, 0.0) for p in precisions) * TENSOR_SHARE
            mine, more = _too_long(frame[alike], rate, bandwidth)
            took, saved = took + mine, saved + more
    return took, saved, bool((multiples > 0).any())


def _too_long(rows: pd.DataFrame, rate: float, bandwidth: float) -> tuple[float, float]:
    """Return of products of one width the ns of the misaligned ones, and what of it good sizes would save."""
    each = list(zip(rows["operator"], rows["shape"], rows["dtype"], strict=True))
    odd = {size for product in each for size in misaligned_sizes(*product)}
    is_odd = np.array([not odd.isdisjoint(_inner(operator, shape)) for operator, shape, _ in each], dtype=bool)
    flops, moved, ns, calls = (rows[name].to_numpy(dtype=float) for name in ("flops", "bytes", "ns", "calls"))
    # What well-shaped products of this run reach is the best guess for the others, where each has its own time.
    right = ~is_odd & (flops > 0) & (ns > 0) & ~rows["shared"].to_numpy(dtype=bool)
    if ns[right].sum() > _LEAST_EXAMPLE * ns.sum():
        rate = max(rate * _LEAST_EXAMPLE, flops[right].sum() / ns[right].sum() * 1e9)
    took = float(ns[is_odd].sum())
    if not rate or np.isnan(flops[is_odd]).any():
        return took, math.nan if is_odd.any() else 0.0
    least = np.fmax(np.fmax(flops / rate, moved / (bandwidth or math.nan)) * 1e9, SMALL_NS / 2 * calls)
    return took, float(np.maximum(ns - least, 0.0)[is_odd].sum())


def _inner(operator: str, shape: str) -> list[int]:
    """Return the sizes among which a misaligned one matters: the last two of each operand, a convolution's channels."""
    if not operator.endswith("mm"):
        return features(operator, shape)
    return [d for tensor in operands(operator, shape) for d in tensor[-2:]]


_MOST_FUNCTIONS = 3

# PyTorch's own functions in Python: none of them multiplies what autocast has cast.
_TORCHS = """
BackwardHookFunction Broadcast CheckpointFunction CompiledFunction Gather Graphed NestedRedistribute Redistribute
ReduceAddCoalesced RegisterPostBackwardFunction RegisterPreBackwardFunction Scatter SyncBatchNorm _AllGather
_AllGatherBase _AllReduce _AlltoAll _AlltoAllSingle _Broadcast _DDPSink _FromTorchTensor _Gather _Reduce _Reduce_Scatter
_Scatter _ToTorchTensor
"""


@per_rank
def own_functions(spans: Frame = needs(schema.SPANS)) -> pd.DataFrame:
    """Return the autograd.Functions in Python that a rank ran forward and backward: function.

    They are traced by the names of their classes, and of their classes with "Backward"; PyTorch's nodes end in a digit.
    """
    names = {str(name) for name in spans["name"].cat.categories[spans["name"].cat.codes.unique()]}
    found = sorted(n for n in names.difference(_TORCHS.split()) if n.isidentifier() and f"{n}Backward" in names)
    return pd.DataFrame({"function": pd.Series(found, dtype=object)})


def autocast(job: Job, rank: int, half: str, functions: Sequence[str]) -> Change:
    """Return the change that runs the forward pass in 16 bits, with the recorded values.

    `functions`: autograd.Functions of the script, whose backward pass gets tensors of another type than it saved.
    """
    facts = job.facts[rank].get("autocast") or {}
    enabled = facts.get("enabled")
    now = "" if enabled is None else f" (autocast is {'on' if enabled else 'off'})"
    scaler = ", and a `GradScaler`" if half == "float16" else ""
    device = "cpu" if settings.on_cpu(job) else "cuda"
    own = ""
    if functions:
        named = few([f"`{name}`" for name in dict.fromkeys(functions)], _MOST_FUNCTIONS)
        own = (
            f'; where {named} has no `@torch.amp.custom_fwd(device_type="{device}", cast_inputs=torch.float32)` on'
            f' forward and no `@torch.amp.custom_bwd(device_type="{device}")` on backward, add them first: an'
            " autograd.Function may fail where the types of its tensors differ"
        )
    made = change(
        f'`with torch.autocast("{device}", torch.{half}):` around the forward pass{now}{scaler}{own}',
        numerics=True,
        autocast_enabled=(enabled, True),
        autocast_dtype=(facts.get("dtype"), half),
    )
    return replace(made, no_diff="it may not be all: see what it says of autograd functions") if functions else made


def tf32(job: Job, rank: int, name: str, of_convolutions: float) -> tuple[Change, ...]:
    """Name the settings that multiply float32 in TF32, by the names that the job's torch has for them.

    `of_convolutions`: their share of the time of such products. Where that is nearly nothing or all, there is one.
    """
    matmul, environment = (job.facts[rank].get(facts) or {} for facts in ("matmul", "env"))
    version = settings.torch_version(job, rank)
    code, convolutions = (f"torch.backends.{of}.fp32_precision = " + '"tf32"' for of in ("cuda.matmul", "cudnn.conv"))
    now, code, newer = matmul.get("matmul_fp32_precision"), f"`{code}`", f"`{convolutions}`"
    sets: dict[str, tuple[Scalar, Scalar]] = {"fp32_precision": (now, "tf32")}
    convolve: dict[str, tuple[Scalar, Scalar]] = {"fp32_precision": (matmul.get("conv_fp32_precision"), "tf32")}
    if version is not None and version >= (2, 9):
        newer = ""
    else:
        now, later = matmul.get("float32_precision"), f" (from torch 2.9 {code})" if version is None else ""
        code, sets = f'`torch.set_float32_matmul_precision("high")`{later}', {"float32_precision": (now, "high")}
        convolutions = "torch.backends.cudnn.allow_tf32 = True"
        newer = f" (from torch 2.9 {newer})" if version is None else ""
        convolve = {"allow_tf32": (matmul.get("cudnn_allow_tf32"), True)}
    text = f"or {code}, which keeps float32 and multiplies in TF32" + (f' (is "{now}")' if now else "")
    if "Instinct" in name:
        text += ", with `HIPBLASLT_ALLOW_TF32=1` in the environment"
        sets["HIPBLASLT_ALLOW_TF32"] = (environment.get("HIPBLASLT_ALLOW_TF32"), "1")
    product = change(text, numerics=True, training=False, **sets)
    recorded = matmul.get("cudnn_allow_tf32") is False or "conv_fp32_precision" in matmul
    if allows_tf32(matmul, True) or not (recorded or of_convolutions > _FEW):
        return (product,)
    first = "or " if of_convolutions > 1 - _FEW else ""
    convolution = change(
        f"{first}`{convolutions}`{newer} for convolutions, which are now without",
        numerics=True,
        training=False,
        **convolve,
    )
    return (convolution,) if first else (product, convolution)
