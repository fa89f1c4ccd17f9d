"""Which unit of the device a kernel multiplies on, and of which kind it is, as far as its name shows.

A trace has only the names of kernels, and they show less every year: a fused Triton kernel has any name that its author
chose. So there are four answers and none of them is a guess: tensor cores on 16- or 8-bit numbers, tensor cores on
float32 (TF32, AMD's XF32), float32 without tensor cores, and "it multiplies, on what is not known". How busy the tensor
cores are is measured by the device's own counters (`tensor_busy_share` of the samples) and by nothing else.
"""

from __future__ import annotations

import re
from functools import lru_cache

# What a kernel's kind says of it, for people; "" multiplies nothing.
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

# It multiplies matrices or convolves, says its name, and no more.
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
    return "float32" if re.search(r"fmha_cutlass[FB]_f32_", name) else "tensor"


# Kinds of kernels. A convolution of 1 × 1 is a matrix product by its name, so the operator that launched it decides.
PRODUCT, CONVOLUTION, ATTENTION = MULTIPLY = ("matrix products", "convolution", "attention")
NORM, LOSS, REDUCTION, COPY = "normalization", "softmax and loss", "reductions", "copies and fills"
ELEMENTWISE, LAYOUT, OPTIMIZER = "elementwise operators", "layout and type changes", "optimizer kernels"

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
