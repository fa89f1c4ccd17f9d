"""The kernels of a rank: what launched them, the unit they multiply on, their kind, and what shorter ones gain.

A trace has only the names of kernels, and they show less every year: a fused Triton kernel has any name that its author
chose. So there are four answers and none of them is a guess: tensor cores on 16- or 8-bit numbers, tensor cores on
float32 (TF32, AMD's XF32), float32 without tensor cores, and "it multiplies, on what is not known". How busy the tensor
cores are is measured by the device's own counters (`tensor_busy_share` of the samples) and by nothing else.

The device's time by kind of kernel has a floor, the least that the device needs for it (its roofline). That of an
operator is its FLOPs ÷ the peak of their precision or its bytes ÷ the memory's bandwidth, whichever is
longer (Williams et al., Roofline, 2009), summed over its shapes, and no longer than it takes: a cache is faster. It
counts to one kind: what a convolution spends on changes of layout has no floor, for no script asks for that. Bytes are
counted in one step (record/collectors/flops.py). Recordings without them have those of each module: products have their
shapes, and the rest is the floor of all other kinds combined. Work with unknown sizes keeps its recorded time.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof import schema
from dlprof.analysis.compute.optimizer import launched_by_optimizer
from dlprof.analysis.compute.peaks import device_peaks, peak_of
from dlprof.analysis.engine import RANK, Frame, Maybe, RankFacts, across_ranks, maybe, needs, per_rank, within_rank
from dlprof.analysis.modules.frames import module_rows
from dlprof.analysis.timeline import device, host
from dlprof.analysis.timeline.device import DeviceSets, device_sets, device_work
from dlprof.analysis.timeline.host import is_on_device
from dlprof.analysis.timeline.steps import Timing, launched_within, timing
from dlprof.analysis.timeline.what_if import LITTLE, WhatIf, what_if
from dlprof.errors import NotMeasured
from dlprof.result.figures import DeviceWork, WorkKind
from dlprof.units import percent

# A backward pass computes twice what its forward pass does (Kaplan et al., Scaling Laws, 2020, section 2.1): the
# forward pass is a third of the computation.
FORWARD_SHARE = 1 / 3

# Multiples of the batch that are tried.
TIMES = (1.5, 2.0, 3.0, 4.0, 8.0)

# The device limits a step if it works for nine tenths of it: above the same share the verdict says that there is little
# else to lose (report/verdict.py).
FILLED = 0.9
_BISECTIONS = 9  # to a hundredth of a batch


@within_rank
def outer_operators(
    spans: Frame = needs(schema.SPANS), is_on_device: NDArray[np.bool_] = needs(is_on_device)
) -> NDArray[np.int64]:
    """Return for each operator of the host the row of the innermost one around it on its thread; -1: none."""
    chosen = host.is_kind(spans, "op") & ~is_on_device
    lanes, starts, took = spans["lane"].cat.codes.to_numpy(), spans["start_ns"].to_numpy(), spans["dur_ns"].to_numpy()
    found = np.full(len(spans), -1, dtype=np.int64)
    for lane in np.unique(lanes[chosen]):
        rows = np.flatnonzero(chosen & (lanes == lane))
        parent = host.parents(starts[rows], starts[rows] + took[rows])
        found[rows] = np.where(parent >= 0, rows[parent], -1)
    return found


def callers(
    spans: pd.DataFrame, is_on_device: NDArray[np.bool_], outer_operators: NDArray[np.int64], calls: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the row of the innermost operator in which each call, a row of the spans, begins; -1: none."""
    chosen = host.is_kind(spans, "op") & ~is_on_device
    lanes, starts, took = spans["lane"].cat.codes.to_numpy(), spans["start_ns"].to_numpy(), spans["dur_ns"].to_numpy()
    found = np.full(len(calls), -1, dtype=np.int64)
    for lane in np.unique(lanes[calls]):
        rows, mine = np.flatnonzero(chosen & (lanes == lane)), np.flatnonzero(lanes[calls] == lane)
        if len(rows):
            at = np.searchsorted(rows, calls[mine]) - 1  # rows are in order of start, the longer first
            found[mine] = np.where(at >= 0, rows[at], -1)
    # The last that began before: it, or one around it, has not ended yet.
    left = np.flatnonzero(found >= 0)
    while len(left := left[starts[found[left]] + took[found[left]] <= starts[calls[left]]]):
        found[left] = outer_operators[found[left]]
        left = left[found[left] >= 0]
    return found


@within_rank
def kernels(
    device_sets: DeviceSets = needs(device_sets),  # noqa: ARG001 - required: without a device in the trace nothing is known
    spans: Frame = needs(schema.SPANS),
    is_on_device: NDArray[np.bool_] = needs(is_on_device),
    outer_operators: NDArray[np.int64] = needs(outer_operators),
    device_work: Frame = needs(device_work),
    launched_within: NDArray[np.int64] = needs(launched_within),
) -> pd.DataFrame:
    """Return the device's kernels that compute, with their row in the spans as index.

    Columns: name, dur_ns, step (the place of the steady traced step that launched it; -1: none), unit (what it
    multiplies on, see unit_of), owner (the row of the innermost operator that launched it; -1: not known).
    Raises NotMeasured where the trace holds no work of a device.
    """
    chosen = host.is_kind(device_work, "kernel")
    work = device_work[["name", "dur_ns", "launch"]][chosen]
    names = work["name"].cat
    units = pd.Categorical([unit_of(str(name)) for name in names.categories], ["", *UNITS])
    calls = np.flatnonzero(host.is_kind(spans, "runtime") & ~is_on_device & (spans["launch"].to_numpy() >= 0))
    owner = pd.Series(callers(spans, is_on_device, outer_operators, calls), spans["launch"].to_numpy()[calls])
    return pd.DataFrame(
        {
            "name": work["name"],
            "dur_ns": work["dur_ns"].astype(float),
            "step": launched_within[chosen],
            "unit": units.take(names.codes.to_numpy()),
            "owner": owner[~owner.index.duplicated()].reindex(work["launch"], fill_value=-1).to_numpy(),
        }
    )


def named(kernels: pd.DataFrame, holds: Callable[[str], bool]) -> NDArray[np.bool_]:
    """Return for each of some kernels whether something holds of its name."""
    names = kernels["name"].cat
    of_name = np.array([holds(str(name)) for name in names.categories], dtype=bool)
    found: NDArray[np.bool_] = of_name[names.codes.to_numpy()]
    return found


@within_rank
def shorter_kernels(
    kernels: Frame = needs(kernels),
    what_if: Maybe[WhatIf] = maybe(what_if),
    timing: Timing = needs(timing),
    device_work: Frame = needs(device_work),
) -> Callable[[NDArray[np.bool_], float | NDArray[np.float64]], float]:
    """Return a function of flags, one for each of `kernels`, and a share, or one for each: how much shorter the mean
    steady step would be, ns, were only that share left of the time of the kernels that are flagged.

    The device works no sooner than its host launches. Where the trace cannot be replayed, all that is shorter is
    gained.
    """

    def gain(chosen: NDArray[np.bool_], left: float | NDArray[np.float64]) -> float:
        share = pd.Series(np.where(chosen, left, 1.0), kernels.index)
        try:
            whatif = what_if.get()
        except NotMeasured:
            inside = kernels["step"].to_numpy() >= 0
            return float((kernels["dur_ns"] * (1 - share))[inside].sum()) / max(len(timing.windows), 1)
        replay = whatif.replay
        share = share.reindex(device_work.index[replay.rows], fill_value=1.0)
        durations = (replay.durations * share.to_numpy()).astype(np.int64)
        most = float((replay.durations - durations).sum()) / replay.steps
        return most if most < LITTLE * whatif.measured_ns else whatif.gain_ns(durations=durations)

    return gain


@per_rank
def larger_batches(
    memory: Maybe[Frame] = maybe(schema.MEMORY),
    what_if: WhatIf = needs(what_if),
    device_work: Frame = needs(device_work),
    launched_by_optimizer: Maybe[NDArray[np.bool_]] = maybe(launched_by_optimizer),
) -> pd.DataFrame:
    """Return for 1 and each of TIMES how much less the mean step would take for as many samples: times, gain_ns, and
    again_ns, the same where the forward pass is computed once more, as with checkpoints (below 0: it takes longer).

    By replaying the traced steps with every kernel and copy so many times as long, but for the least that a kernel
    takes, the optimizer's kernels and the exchanges, which are the same for any batch, as the host's calls are. Waits
    for data grow with the batch, and so may the script's own Python: the gain is what is left if it does. The forward
    pass is FORWARD_SHARE of the computation, and of the host's calls.

    In every row: wait_share, of the present step, in which the device waits for its host or for data (without these the
    step would be so much shorter); and fills, the smallest multiple of the batch with which that is at most 1 − FILLED,
    if Python takes as long for any batch. NaN: if it does not, none in TIMES fills the device. Raises NotMeasured where
    the trace cannot be replayed, or whether a larger batch fits is not known.
    """
    if not memory:
        raise NotMeasured("nothing was asked of the CUDA allocator")
    by_optimizer = launched_by_optimizer.or_none()
    same = host.is_kind(device_work, "communication") | (False if by_optimizer is None else by_optimizer)
    durations = what_if.replay.durations
    longer = np.where(same[what_if.replay.rows], 0, np.maximum(durations - device.LEAST_KERNEL_NS, 0))
    forward = np.where(host.is_kind(device_work, "kernel")[what_if.replay.rows] & (longer > 0), FORWARD_SHARE, 0.0)

    def took(times: float, again: float = 0.0) -> NDArray[np.int64]:
        return ((durations + (times - 1) * longer) * (1 + again * forward)).astype(np.int64)

    def filled(times: float, python: float = 1.0) -> float:
        alone = what_if.left(took(times), calls=0.0, fetch=0.0, python=0.0)
        return alone / what_if.left(took(times), fetch=times, python=python)

    rows = []
    for times in (1.0, *TIMES):
        left = what_if.left(took(times), fetch=times, python=times) / times
        again = what_if.left(took(times, 1.0), calls=1 + FORWARD_SHARE, fetch=times, python=times) / times
        rows.append((times, max(1 - left, 0.0) * what_if.measured_ns, (1 - again) * what_if.measured_ns))
    low, high = 1.0, TIMES[-1]
    if (now := filled(low)) >= FILLED:
        high = low
    elif filled(high, high) < FILLED:
        high = math.nan
    else:
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            low, high = (low, middle) if filled(middle) >= FILLED else (middle, high)
    return pd.DataFrame(rows, columns=["times", "gain_ns", "again_ns"]).assign(wait_share=1 - now, fills=high)


# What a kernel multiplies on, in words.
UNITS = {
    "tensor": "tensor cores, 16 or 8 bits",
    "tf32": "tensor cores, TF32",
    "float32": "float32, no tensor cores",
    "unknown": "multiplies, on what is not known",
}

# Helpers of products and attention that themselves move, add up or convert: split-K sums (PostGSU in hipBLASLt),
# layout changes, the sums before and after FlashAttention's backward, Inductor's pointwise, reduction and foreach
# kernels, which bear the names of the products that they follow (torch/_inductor/codegen/triton.py: only templates,
# triton_tem_, hold a product).
_MULTIPLIES_NOT = re.compile(
    r"split_?k_?reduce|ReduceSplitK|PostGSU|reduce_wgrad|reduce_1Block|epilogue::impl|Offsets?Kernel|im2d?2?col|col2im"
    r"|nchwToNhwc|nhwcToNchw|transpose_(?:NCHW|CNHW)|batched_transpose|dot_do_o|convert_d[qkv]|bwd_(?:preprocess|postprocess)"
    r"|FlashAttnBwd(?:Pre|Post)process|splitkv_combine|FlashAttnFwdCombine|prepare_(?:varlen|grouped)|reshape_and_cache"
    r"|^triton_(?:poi|per|red|for|unk)_|^triton__|attention\w*_reduce|_softmax_|softmax_warp|quantize|[_:]quant_|rotary|group_norm|layer_norm",
    re.IGNORECASE,
)

_ATEN = re.compile(r"\bat::native::")  # PyTorch's own kernels: of them only depthwise convolutions multiply so

_ATEN_MULTIPLIES = re.compile(r"conv_depthwise|at::native::\w*gemm")

# Tensor cores on float32. CUTLASS calls the type tfloat32_t; an instruction of 16×8×8 (s1688) with no 16-bit type in
# the name is TF32's; hipBLASLt's X (S_MX_B) is AMD's XF32; xFormers' f32 kernels multiply so from sm80 on
# (OpMultiplyAddFastF32, PyTorch's mem_eff_attention/gemm_kernel_utils.h).
_TF32 = re.compile(
    r"tf32|tfloat32|tensorop_s1688(?!.*(?:f16|bf16|h1688))|Cijk_\w*?_S_?MX_?B_|nvjet_(?:sm\d+_)?sss_"
    r"|fmha_cutlass[FB]_f32_\w+_sm(?:8\d|9\d|1\d\d)"
)

# float32 without tensor cores, on AMD on its matrix cores in full float32, which is as slow: cuBLAS's and cuDNN's names
# since Maxwell; Winograd and FFT convolutions under names of their own; Tensile's type codes S_B and SB (rocBLAS,
# hipBLASLt); MIOpen's fp32.
_FLOAT32 = re.compile(
    r"(?<!fp16_)(?<![a-z0-9])s(?:c?gemm|cudnn)|gcgemm|simt_\w*?s\w*?gemm|ffma|magma_sgemm|convolve_sgemm<float"
    r"|sgemm_largek|(?:dgrad|wgrad)\w*<float|gem(?:mSN|mk1|v)\w*<(?:int, (?:int, )?)?float"
    r"|gemvx::kernel<int, int, float"
    r"|winograd(?:Forward|Wgrad)\w*<float|generateWinogradTiles\w*<\d+, float|fft2d_\w+<float"
    r"|f32f32_f32f32_f32(?!.*tensor\d)"
    r"|fmha_cutlass[FB]_f32_|Cijk_\w*?_S_?B_|igemm_\w+_fp32_|naive_conv\w*_float_|Conv\w*_fp32_"
    r"|conv2d_grouped_direct_kernel<(?:\w+, )*?float"
)

# Tensor cores on 16 or 8 bits. cuBLAS, cuDNN, CUTLASS 2: the shape of an instruction (884, 1688, 16816, 16832) or
# "tensorop"; xmma and nvjet; CUTLASS 3 by its main loop's name; FlashAttention 2, 3 and 4, cuDNN's and TensorRT-LLM's
# attention, which take nothing else; DeepGEMM; TensorRT-LLM's products by their types.
_TENSOR = re.compile(
    r"tensorop|[hsi]884|[hs]1688|16816|i8816|16832|161616|hmma|imma|qmma|wgmma|[Gg]mma|[Uu]mma|tcgen05|nvjet|xmma"
    r"|flash_(?:fwd|bwd)|FlashAttn(?:Fwd|Bwd)|FlashAttention(?:Forward|Backward)|flash_?mla|[Ff]mha|_native_sdpa"
    r"|MmaTensorOp|MainloopSm(?:90|1\d\d)|deep_gemm::\w*(?:fp8|bf16|f8|fp4)"
    r"|(?:^|_)(?:bmm|gemm)_\w*(?:E4m3|E5m2|E2m1|Bfloat16|Fp16)"
)

# AMD's matrix cores on 16 or 8 bits: Tensile's type codes of what is read, or read, written and computed in (HHS, BBS,
# B_BS, F8F8S, ...); MIOpen's implicit products on xdlops; Composable Kernel where its mangled types are 16-bit ones
# (t: unsigned short, which stands for bfloat16; DF16b; DF16_).
_MATRIX = re.compile(
    r"Cijk_[A-Za-z]+_[A-Za-z]+_(?:H_?H|H_?B_|H_?S_?S|B_?B_?S|B_?S_?S|B_B_|BB_|F8|B8|I8|FP8)\w*"
    r"|igemm_(?:fwd|bwd|wrw)_gtcx?\d?\w*_(?:bf16|fp16|int8)_"
    r"|(?:xdl|mfma|wmma).*?(?:DF16|bhalf|_Float16|__bf16|bfloat16|Ett?tf|tt?ft|f8_t)|(?:xdlops|mfma|xdl)\w*(?:bf16|fp16|f16|fp8)"
)

_NO_TENSOR = re.compile(r"simt|ffma")

_DOUBLE = re.compile(r"[dz]884|dgemm|d1688|f64f64|double")

# A name that shows that a kernel multiplies matrices or convolves, and no more.
_PRODUCT = re.compile(
    r"(?<!fb)gemm|(?<!cublasG)(?<!cublas)gemv|matmul|(?:^|[\W_])(?:b|add|baddb)?mm(?:$|[\W_\d])|triton_tem_|convol|(?:^|[\W_])conv\d?d?(?:$|[\W_])|fprop|dgrad"
    r"|wgrad|winograd|attn|attention|sdpa|fmha|Cijk_|(?:fused_)?moe_kernel|xdlops|_xdl_|mfma|wmma|bwd_kernel_d[kq]|sage_fwd"
    r"|conv_depthwise",
    re.IGNORECASE,
)

# xFormers' attention on float32, which emulates it by three products in TF32 (OpMultiplyAddFastF32).
_ATTENTION_32 = re.compile(r"fmha_cutlass[FB]_f32_")


@lru_cache(1 << 14)
def in_float32(name: str) -> bool:
    """Return whether a kernel multiplies in float32, at full precision, and would be faster in 16 bits."""
    return unit_of(name) == "float32" or _ATTENTION_32.search(name) is not None


@lru_cache(1 << 14)  # the ranks of a job run the same kernels
def unit_of(name: str) -> str:
    """Return what a kernel multiplies on: "tensor", "tf32", "float32", "unknown" (it multiplies), "" (it does not)."""
    if _MULTIPLIES_NOT.search(name) or (_ATEN.search(name) and not _ATEN_MULTIPLIES.search(name)):
        return ""
    if _DOUBLE.search(name):
        return "unknown" if _PRODUCT.search(name) else ""
    if _TF32.search(name):
        return "tf32"
    if _NO_TENSOR.search(name) or not (_TENSOR.search(name) or _MATRIX.search(name)):
        if _FLOAT32.search(name):
            return "float32"
        return "unknown" if _PRODUCT.search(name) else ""
    return "float32" if _ATTENTION_32.search(name) else "tensor"


# Kinds of kernels. A convolution of 1 × 1 is a matrix product by its name, so the operator that launched it decides.
PRODUCT, CONVOLUTION, ATTENTION = MULTIPLY = ("matrix products", "convolution", "attention")

NORM, LOSS, REDUCTION, COPY = "normalization", "softmax and loss", "reductions", "copies and fills"

ELEMENTWISE, LAYOUT, OPTIMIZER = "elementwise operators", "layout and type changes", "optimizer kernels"

_OF_ATTENTION = re.compile(r"attn|attention|sdpa|fmha|flash|flex|bwd_kernel_d[kq]|sage_fwd", re.IGNORECASE)

_OF_CONVOLUTION = re.compile(
    r"conv|[fd]prop|[dw]grad|winograd|igemm|scudnn|im2d?2?col|col2im|vol2col|fft2d|gcgemm|Offsets?Kernel", re.IGNORECASE
)

# For kernels that multiply nothing, the first match counts: Inductor's names, by form and the fused operators; those of
# PyTorch's own kernels, cuDNN, cuBLAS, FlashAttention, fbgemm, apex, MIOpen, rocBLAS and hipBLASLt. A sum or conversion
# that a product, a convolution or attention needs (split-K, im2col, what FlashAttention does before its backward pass)
# is part of it; a change of layout is not: it goes with tensors in another layout.
_MOVES = "to_copy|clone|copy|transpose|permute|unsafe_view|view|cat|convert_element_type|t"

_KINDS = tuple(
    (kind, re.compile(pattern, re.IGNORECASE))
    for kind, pattern in (
        (LAYOUT, rf"^triton_(?:poi|for|unk)_fused(?:__?(?:{_MOVES}))+_\d+$"),
        (ELEMENTWISE, r"^triton_(?:poi|for|unk)_"),
        (NORM, r"^triton_(?:per|red|mix)_.*(?:norm|(?:mean|pow).*rsqrt)"),
        (LOSS, r"^triton_(?:per|red|mix)_.*(?:softmax|loss)"),
        (REDUCTION, r"^triton_(?:per|red|mix)_"),
        (LAYOUT, r"nchw2?To2?nhwc|nhwc2?To2?nchw|transpose|permute_?(?!.*embs)kernel|convertTensor|tensorTransform"),
        (OPTIMIZER, r"Fused(?:Optimizer|Adam|Sgd|Adagrad|Lion|Lamb)|(?:Adam|SGD|Lamb|Adagrad)Functor"),
        (ATTENTION, r"dot_do_o|convert_d[qkv]|splitkv|unpack_cudnn|" + _OF_ATTENTION.pattern),
        (NORM, r"(?:batch|layer|group|rms|instance)_?norm|\bln_(?:fwd|bwd)|bn_(?:fw|bw)|GammaBeta|RowwiseMoments"),
        (LOSS, r"soft_?max|nll_?loss|NLLCrit|cross_?entropy|[a-z]loss|mse_(?:kernel|backward)|smooth_l1|(?:^|_)bce"),
        (PRODUCT, r"split_?k_?reduce|ReduceSplitK|PostGSU|reduce_1Block|\bdot_kernel|epilogue::impl"),
        (
            "embedding, gather and sort",
            r"embedding|embs|indices|indexing|recat_|gather|scatter|index_(?!t)|indexSelect|indexFunc|index_kernel|topk"
            r"|compute_grad_weight|radix|sort|unique|segment|bucketize|nonzero|masked_(?:select|scatter)|krn_partial"
            r"|RunLength|ByKey|Compact|DeviceSelect|offsets_range|permute_\dD|sparse|histogram|lengths_range|lookup",
        ),
        (CONVOLUTION, _OF_CONVOLUTION.pattern),
        ("pooling and resizing", r"pool|upsample|interp|grid_sampl"),
        (LAYOUT, r"direct_copy|copy_kernel|CatArray|SubTensorOp|FP8rowwise|repeat_"),
        (COPY, r"fillBuffer|copyBuffer|FillFunctor|(?<!masked_)fill_kernel"),
        (REDUCTION, r"reduc|LpNorm|MeanOps|cumsum|cumprod|scan|argm(?:ax|in)"),
        (
            ELEMENTWISE,
            r"elementwise|pointwise|Functor|dropout|philox|distribution|activation|[a-z]lu(?:$|\W|_)|OpTensor|bias|rnn"
            r"|add_tensor|scale(?:packed)?tensor|rotary|rope|where|clamp|triu_tril|arange|lstm|gru_|quantize|addcmul",
        ),
    )
)


@lru_cache(1 << 14)  # the ranks of a job run the same kernels
def kind_of(name: str, operator: str = "") -> str:
    """Return the kind of a kernel by its name and that of the operator which launched it; "other" where none shows."""
    among, kind = _KINDS, "other"
    if unit_of(name):
        among, kind = ((ATTENTION, _OF_ATTENTION), (CONVOLUTION, _OF_CONVOLUTION)), PRODUCT
    kind = next((kind for kind, pattern in among if pattern.search(name)), kind)
    if kind == PRODUCT:
        return CONVOLUTION if "conv" in operator else ATTENTION if "attention" in operator else PRODUCT
    return kind


# A floor is given where the bytes of so much of the time are known, a kind's rates where those of so much of its own.
_KNOWN_SHARE, _RATE_SHARE = 0.8, 0.9

# Names in the place of an operator: work with bytes only in sum with other kinds; copies and fills, with traced bytes.
_REST, _COPIES = "(rest)", "(copies)"


@per_rank
def work_kinds(
    kernels: Frame = needs(kernels),
    device_work: Frame = needs(device_work),
    launched_within: NDArray[np.int64] = needs(launched_within),
    launched_by_optimizer: Maybe[NDArray[np.bool_]] = maybe(launched_by_optimizer),
    spans: Frame = needs(schema.SPANS),
    outer_operators: NDArray[np.int64] = needs(outer_operators),
    modules: Maybe[Frame] = maybe(schema.MODULES),
    module_rows: Maybe[Frame] = maybe(module_rows),
    timing: Timing = needs(timing),
    rank: RankFacts = needs(RANK),
) -> pd.DataFrame:
    """Return the kernels, fills and copies within the device's memory of a mean steady traced step, a row a kind.

    Columns as of `WorkKind`, and known_ns (of operators whose bytes are known); in all rows the same: rest_ns (the
    floor of all shared_ns together), fused_ns (what the floor is less with fused chains; NaN: not known), and unlimited
    (the device's name where its limits are not known, else "").
    """
    mine, counted = kernels[kernels["step"] >= 0], rank.facts.get("flops") or {}
    device, _, bandwidth = device_peaks(rank.facts, rank.trace_facts)
    byte_ns, owner, steps = 1e9 / (bandwidth or np.nan), mine["owner"].to_numpy(), len(timing.windows)
    limits = _limits(rank, modules.or_none(), byte_ns)
    operator = counted_operator(owner, spans, outer_operators, {*limits, *(counted.get("uncounted") or ())})
    within, by_optimizer = module_rows.or_none(), launched_by_optimizer.or_none()
    if _REST in limits and within is not None:
        operator[(operator == "") & (owner >= 0) & (within["module"].to_numpy()[owner] >= 0)] = _REST
    names, launchers = mine["name"].cat, spans["name"].cat
    of_operator, operators = pd.factorize(operator)
    optimizer = False if by_optimizer is None else mine.index.isin(device_work.index[by_optimizer])
    launcher = np.where(owner >= 0, launchers.codes.to_numpy()[owner], len(launchers.categories))
    keys = (names.codes.to_numpy(), launcher, of_operator, np.broadcast_to(optimizer, len(mine)).astype(np.int64))
    sizes = (len(names.categories), len(launchers.categories) + 1, max(len(operators), 1), 2)
    alike, place = np.unique(np.ravel_multi_index(keys, sizes), return_inverse=True)
    ns = np.bincount(place, mine["dur_ns"].to_numpy(), len(alike)) / steps
    number = np.bincount(place, minlength=len(alike)) / steps
    called = [*map(str, launchers.categories), ""]
    rows = [
        (OPTIMIZER if of else kind_of(str(names.categories[name]), called[by]), operators[o], float(count), float(took))
        for name, by, o, of, count, took in zip(*np.unravel_index(alike, sizes), number, ns, strict=True)
    ]
    inside = host.is_kind(device_work, "set") | host.is_one_of(device_work["copy"], "DtoD")
    copies = device_work[inside & (launched_within >= 0) & (device_work["bytes"] >= 0)]
    rows.append((COPY, _COPIES, len(copies) / steps, float(copies["dur_ns"].sum()) / steps))
    # A copy reads and writes, a fill writes.
    size = float((copies["bytes"] * (1 + host.is_kind(copies, "copy"))).sum()) / steps
    limits[_COPIES] = (0.0, size, size * byte_ns)
    found, rest_ns, reached = _floors(rows, limits)
    fused = float(counted.get("chained_bytes", np.nan)) - float(counted.get("fused_bytes", np.nan))
    unlimited = "" if np.isfinite([least for _, _, least in limits.values()]).all() else device or "this device"
    return found.assign(rest_ns=rest_ns, fused_ns=fused * byte_ns * reached, unlimited=unlimited)


def _limits(rank: RankFacts, modules: pd.DataFrame | None, byte_ns: float) -> dict[str, tuple[float, float, float]]:
    """Return the flops and bytes of each operator in the counted step, and the least ns that they take, infinity where
    that is not known. _REST is what modules move beside products, where no operator's bytes were counted.
    """
    counted, matmul = rank.facts.get("flops") or {}, rank.facts.get("matmul") or {}
    peaks = device_peaks(rank.facts, rank.trace_facts)[1]
    shaped: list[dict[Any, Any]] = counted.get("shapes") or []
    moved = [row for row in counted.get("moved") or [] if row["device"] != "cpu"]
    # Each shape has its own limit. The shapes of an operator that are not kept share one.
    rest: dict[tuple[str, str], tuple[float, float]] = {}
    for row, sign in (
        *((row, 1) for row in (*(counted.get("operators") or ()), *moved)),
        *((row, -1) for row in shaped),
    ):
        flops, size = rest.get(key := (row["operator"], row["dtype"]), (0.0, 0.0))
        rest[key] = (flops + sign * row.get("flops", 0.0), size + sign * row.get("bytes", 0.0))
    every = [(row["operator"], row["dtype"], row["flops"], row["bytes"]) for row in shaped]
    every += [(*key, max(flops, 0.0), max(size, 0.0)) for key, (flops, size) in rest.items()]
    if not moved and modules is not None and (modules["moved_bytes"] > 0).any():
        beside = float(modules["moved_bytes"].sum()) - sum(row["bytes"] for row in shaped)
        every.append((_REST, "", 0.0, max(beside, 0.0)))
    # What computes by no known formula has more of a floor than its bytes.
    unknown, limits = {"others", *(counted.get("uncounted") or ())}, dict[str, tuple[float, float, float]]()
    for operator, dtype, flops, size in every:
        if operator not in unknown:
            least = flops / (peak_of(operator, dtype, matmul, peaks) or np.nan) * 1e9 if flops > 0 else 0.0
            before = limits.get(operator, (0.0, 0.0, 0.0))
            limits[operator] = (
                before[0] + flops,
                before[1] + size,
                before[2] + (np.inf if np.isnan(least) else np.fmax(least, size * byte_ns)),
            )
    return limits


def counted_operator(
    owner: NDArray[np.int64], spans: pd.DataFrame, outer_operators: NDArray[np.int64], counted: Collection[str]
) -> NDArray[np.object_]:
    """Return the outermost operator around each launch that was seen in the counted step, "" where there is none.

    `owner`: the row of the innermost operator. A dispatch mode sees an operator, and not those that it is made of.
    """
    codes = spans["name"].cat.codes.to_numpy()
    # The last place is that of no operator.
    named = np.array([*(n if n in counted else "" for n in map(str, spans["name"].cat.categories)), ""], dtype=object)
    at, place = np.unique(owner, return_inverse=True)
    found = np.full(len(at), "", dtype=object)
    while (at >= 0).any():
        met = named[np.where(at >= 0, codes[at], -1)]
        found, at = np.where(met != "", met, found), np.where(at >= 0, outer_operators[at], -1)
    return found[place]


def _floors(
    rows: Sequence[tuple[str, str, float, float]], limits: Mapping[str, tuple[float, float, float]]
) -> tuple[pd.DataFrame, float, float]:
    """Return the rows of `work_kinds`, the floor of _REST, and the share of their limits that operators' floors are.

    `rows`: kind, operator, kernels and ns. An operator is of the kind that multiplies in it, else of that of most of
    its time.
    """
    home: dict[str, str] = {}
    took, known, rest = (defaultdict[str, float](float) for _ in range(3))
    for kind, operator, _, ns in sorted(rows, key=lambda row: (row[0] in MULTIPLY, row[3]), reverse=True):
        home.setdefault(operator, kind)
        took[operator] += ns
        known[kind] += ns if operator in limits else 0.0
        rest[kind] += ns if operator == _REST else 0.0
    floors = {operator: min(limits[operator][2], took[operator]) for operator in took if operator in limits}
    found = []
    for kind in sorted(known):
        mine = [row for row in rows if row[0] == kind]
        own = [operator for operator in floors if home[operator] == kind and operator != _REST]
        ns, floor = sum(row[3] for row in mine), sum(floors[operator] for operator in own)
        flops, size = (float(sum(limits[operator][i] for operator in own)) for i in (0, 1))
        # What is not known is at its limit.
        floor_ns = floor + max(ns - known[kind], 0.0)
        found.append((kind, sum(row[2] for row in mine), ns, known[kind], rest[kind], floor_ns, flops, size))
    columns = ["kind", "kernels", "ns", "known_ns", "shared_ns", "floor_ns", "flops", "bytes"]
    least = sum(limits[operator][2] for operator in floors)
    return pd.DataFrame(found, columns=columns), floors.get(_REST, 0.0), sum(floors.values()) / max(least, 1.0)


@across_ranks
def kinds_of_work(work_kinds: Frame = needs(work_kinds)) -> DeviceWork:
    """Return the device's own time by kind, mean of the ranks, with its floor where that is known."""
    by_rank = work_kinds.drop_duplicates("rank")
    sums = work_kinds.drop(columns=["rank", "unlimited", "rest_ns", "fused_ns"]).groupby("kind", sort=False).sum()
    rows = (sums[sums["ns"] > 0] / len(by_rank)).sort_values("ns", ascending=False, kind="stable").reset_index()
    if rows.empty:
        raise NotMeasured("no kernel ran in the traced steps")
    known = rows.pop("known_ns")
    share, why = float(known.sum() / rows["ns"].sum()), ""
    if share < _KNOWN_SHARE:
        why = f"the bytes that operators read and write are known of {percent(share)} of their time alone"
    why = next((f"the limits of {name} are not known" for name in by_rank["unlimited"] if name), why)
    complete = (known >= _RATE_SHARE * rows["ns"]) & (rows["shared_ns"] == 0)
    rows[["flops", "bytes"]] = rows[["flops", "bytes"]].where(complete).replace(0.0, np.nan)
    rest_ns, fused_ns = by_rank[["rest_ns", "fused_ns"]].mean().tolist()
    floor = float(rows["floor_ns"].sum()) + rest_ns
    rows["floor_ns"] = np.nan if why else rows["floor_ns"]
    cells = rows.astype(object).where(rows.notna(), None).to_dict("records")
    kinds = tuple(WorkKind(**{str(name): value for name, value in row.items()}) for row in cells)
    if why:
        return DeviceWork(kinds, why=why)
    return DeviceWork(kinds, floor, rest_ns, None if np.isnan(fused_ns) else floor - fused_ns)
