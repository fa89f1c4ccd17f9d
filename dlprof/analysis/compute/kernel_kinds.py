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

_OF_ATTENTION = re.compile(r"attn|attention|sdpa|fmha|flash|flex|bwd_kernel_d[kq]|sage_fwd", re.IGNORECASE)
_OF_CONVOLUTION = re.compile(
    r"conv|[fd]prop|[dw]grad|winograd|igemm|scudnn|im2d?2?col|col2im|vol2col|fft2d|gcgemm|Offsets?Kernel", re.IGNORECASE
)

# Of what multiplies nothing the first that matches: Inductor's names, by form and the operators that it fused; those of
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
