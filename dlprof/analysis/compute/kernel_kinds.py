"""What a kernel does, by its name: the kinds among which the device's own time is divided.

A name shows what runs: a convolution of 1 × 1 is a matrix product by its kernel, so the operator that launched it
decides. What the optimizer launches is the optimizer's, whatever its name is.
"""

from __future__ import annotations

import re
from functools import lru_cache

from dlprof.analysis.compute.kernel_names import unit_of

PRODUCT, CONVOLUTION, ATTENTION = MULTIPLY = ("matrix products", "convolution", "attention")
NORM, LOSS, ELEMENTWISE, LAYOUT = (
    "normalization",
    "softmax and loss",
    "elementwise operators",
    "layout and type changes",
)
OPTIMIZER, COPY, REDUCTION = "optimizer kernels", "copies and fills", "reductions"

# Names of PyTorch's own kernels, cuDNN, cuBLAS, FlashAttention, fbgemm, apex, MIOpen, rocBLAS and hipBLASLt; of those
# that multiply nothing the first that matches. A sum or a conversion that a product, a convolution or attention needs
# (split-K, im2col, what FlashAttention does before its backward pass) is part of it; a change of layout is not: it
# goes with tensors in another layout.
_KINDS = tuple(
    (kind, re.compile(pattern, re.IGNORECASE))
    for kind, pattern in (
        (LAYOUT, r"nchw2?To2?nhwc|nhwc2?To2?nchw|transpose|permute_?(?!.*embs)kernel|convertTensor|tensorTransform"),
        (OPTIMIZER, r"Fused(?:Optimizer|Adam|Sgd|Adagrad|Lion|Lamb)|(?:Adam|SGD|Lamb|Adagrad)Functor"),
        (ATTENTION, r"attn|attention|sdpa|fmha|flash|flex|bwd_kernel_d[kq]|sage_fwd|dot_do_o|convert_d[qkv]|splitkv"),
        (NORM, r"(?:batch|layer|group|rms|instance)_?norm|\bln_(?:fwd|bwd)|bn_(?:fw|bw)|GammaBeta|RowwiseMoments"),
        (LOSS, r"soft_?max|nll_?loss|NLLCrit|cross_?entropy|[a-z]loss|mse_(?:kernel|backward)|smooth_l1|(?:^|_)bce"),
        (PRODUCT, r"split_?k_?reduce|ReduceSplitK|PostGSU|reduce_1Block|\bdot_kernel|epilogue::impl"),
        (
            "embedding, gather and sort",
            r"embedding|embs|indices|indexing|recat_|gather|scatter|index_(?!t)|indexSelect|indexFunc|index_kernel|topk"
            r"|compute_grad_weight|radix|sort|unique|segment|bucketize|nonzero|masked_(?:select|scatter)|krn_partial"
            r"|RunLength|ByKey|Compact|DeviceSelect|offsets_range|permute_\dD|sparse|histogram|lengths_range|lookup",
        ),
        (
            CONVOLUTION,
            r"conv|[fd]prop|[dw]grad|winograd|igemm|scudnn|im2d?2?col|(?:col2im|vol2col)|fft2d|gcgemm|Offsets?Kernel",
        ),
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
_PATTERN = dict(reversed(_KINDS))  # the first of each

# Inductor names a kernel by its form (pointwise, reduction, …) and the operators that it was made of.
_INDUCTOR = re.compile(r"triton_(poi|per|red|for|unk|mix)_(?:fused_)?(.*?)_?\d*$")
_MOVES_ALONE = re.compile(
    r"(?:_?(?:to_copy|clone|copy|transpose|permute|unsafe_view|view|cat|convert_element_type|t))+"
)
_RMS_NORM = re.compile("(?:mean|pow).*rsqrt")


@lru_cache(1 << 14)  # the ranks of a job run the same kernels
def kind_of(name: str, operator: str = "") -> str:
    """Return the kind of a kernel by its name and that of the operator which launched it; "other" where none shows."""
    if made := _INDUCTOR.match(name):
        if made[1] not in ("per", "red", "mix"):
            return LAYOUT if _MOVES_ALONE.fullmatch(made[2]) else ELEMENTWISE
        of_norm = _PATTERN[NORM].search(made[2]) or _RMS_NORM.search(made[2])
        return NORM if of_norm else LOSS if _PATTERN[LOSS].search(made[2]) else REDUCTION
    among = [(kind, _PATTERN[kind]) for kind in (ATTENTION, CONVOLUTION)] if unit_of(name) else _KINDS
    kind = next((kind for kind, pattern in among if pattern.search(name)), PRODUCT if unit_of(name) else "other")
    if kind == PRODUCT:
        return CONVOLUTION if "conv" in operator else ATTENTION if "attention" in operator else PRODUCT
    return kind
