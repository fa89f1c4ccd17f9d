"""What a kernel does, by its name: the kinds among which a device's own time is divided.

Names are those of PyTorch's own kernels, cuBLAS, cuDNN, CUTLASS, FlashAttention, Inductor's and other Triton kernels,
fbgemm, apex, MIOpen, rocBLAS, hipBLASLt and Composable Kernel. A name shows no more than what runs: a convolution of
1 × 1 is a matrix product by its kernel, so the operator that launched it decides where one is known. What launches in
the optimizer's step is the optimizer's, whatever its name is.
"""

from __future__ import annotations

import re
from functools import lru_cache

from dlprof.analysis.compute.kernel_names import unit_of

# Each kind, in the words of a report.
KINDS = {
    "product": "matrix products",
    "convolution": "convolution",
    "attention": "attention",
    "norm": "normalization",
    "elementwise": "elementwise",
    "reduction": "reductions",
    "loss": "softmax and loss",
    "layout": "layout and type conversion",
    "pooling": "pooling and resizing",
    "gather": "embedding, gather, sort",
    "copy": "copies and fills",
    "optimizer": "optimizer",
    "other": "other",
}

_ATTENTION = re.compile(r"attn|attention|sdpa|fmha|flash|flex|bwd_kernel_d[kq]|sage_fwd", re.IGNORECASE)
_CONVOLUTION = re.compile(
    r"conv|fprop|dgrad|wgrad|winograd|igemm|scudnn|im2d?2?col|col2im|vol2col|fft2d|gcgemm|Offsets?Kernel", re.IGNORECASE
)
_NORM = r"(?:batch|layer|group|rms|instance)_?norm|\bln_(?:fwd|bwd)|bn_(?:fw|bw)|GammaBeta|RowwiseMoments"
_LOSS = r"soft_?max|nll_?loss|NLLCriterion|cross_?entropy|[a-z]loss|mse_(?:kernel|backward)|smooth_l1|(?:^|_)bce"

# Of what multiplies nothing, the first that matches. A sum or a conversion that a product, a convolution or attention
# needs (split-K, im2col, the sums before FlashAttention's backward pass) is part of it, but for changes of layout,
# which another layout of the tensors saves.
_OTHERS = tuple(
    (kind, re.compile(pattern, re.IGNORECASE))
    for kind, pattern in (
        ("layout", r"nchw2?To2?nhwc|nhwc2?To2?nchw|transpose|permute_?(?!.*embs)kernel|convertTensor|tensorTransform"),
        ("optimizer", r"Fused(?:Optimizer|Adam|Sgd|Adagrad|Lion|Lamb)|(?:Adam|SGD|Lamb|Adagrad)Functor"),
        ("attention", r"dot_do_o|convert_d[qkv]|unpack_cudnn|splitkv|" + _ATTENTION.pattern),
        ("norm", _NORM),
        ("loss", _LOSS),
        ("product", r"split_?k_?reduce|ReduceSplitK|PostGSU|reduce_1Block|\bdot_kernel|epilogue::impl"),
        (
            "gather",
            r"embedding|pooled_embs|indices|indexing|recat_|gather|scatter|index_(?!t)|indexSelect|indexFunc|index_kernel|compute_grad_weight"
            r"|radix|sort|unique|segment|topk|bucketize|nonzero|masked_(?:select|scatter)|krn_partial|RunLength|ByKey"
            r"|Compact|DeviceSelect|offsets_range|permute_\dD|sparse|histogram|lengths_range|lookup",
        ),
        ("convolution", _CONVOLUTION.pattern),
        ("pooling", r"pool|upsample|interp|grid_sampl"),
        ("layout", r"direct_copy|copy_kernel|CatArray|SubTensorOp|FP8rowwise|repeat_"),
        ("copy", r"Memcpy|Memset|fillBuffer|copyBuffer|FillFunctor|fill_kernel|CopyDevice"),
        ("reduction", r"reduce|reduction|LpNorm|MeanOps|cumsum|cumprod|scan|argm(?:ax|in)|Reduce"),
        (
            "elementwise",
            r"elementwise|pointwise|Functor|dropout|philox|distribution|activation|[a-z]lu(?:$|\W|_)|OpTensor|add_tensor"
            r"|scaletensor|scalepacked|bias|rotary|rope|where|clamp|triu_tril|arange|rnn|lstm|gru_|quantize|addcmul",
        ),
    )
)

# Inductor names a kernel by the operators that it was made of, `native_` and so on; those of them that only move.
_TRITON = re.compile(r"triton_(poi|per|red|for|unk|mix)?_(?:fused_)?(.*?)_?\d*d?(?:e\d*)?$")
_MOVES_ALONE = re.compile(r"(?:(?:_?(?:to_copy|clone|copy|transpose|permute|view|cat|t|unsafe_view|expand|slice))+)")


@lru_cache(1 << 14)  # the ranks of a job run the same kernels
def kind_of(name: str, operator: str = "") -> str:
    """Return the kind of a kernel, one of KINDS, by its name and by the operator that launched it; "": not known."""
    found = _by_name(name)
    if found == "product":
        # Of a convolution or of attention the kernel may be a plain product.
        if "conv" in operator:
            return "convolution"
        return "attention" if "attention" in operator else found
    return found


def _by_name(name: str) -> str:
    triton = _TRITON.match(name)
    if triton and triton[1]:
        return _of_inductor(triton[1], triton[2])
    if unit_of(name):
        kinds = (("attention", _ATTENTION), ("convolution", _CONVOLUTION))
        return next((kind for kind, pattern in kinds if pattern.search(name)), "product")
    return next((kind for kind, pattern in _OTHERS if pattern.search(name)), "other")


def _of_inductor(form: str, made_of: str) -> str:
    """Return the kind of Inductor's kernel: of its form (pointwise, persistent or looping reduction) and operators."""
    if form not in ("per", "red", "mix"):
        return "layout" if _MOVES_ALONE.fullmatch(made_of) else "elementwise"
    if re.search(_NORM, made_of) or ("rsqrt" in made_of and re.search("mean|pow", made_of)):
        return "norm"
    return "loss" if re.search(_LOSS, made_of) else "reduction"
