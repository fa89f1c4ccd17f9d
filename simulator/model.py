"""A transformer as operators and kernels: what each multiplies or moves, and so how long it takes on a device.

A matrix product takes its FLOPs at a part of the peak, or its bytes at a part of the bandwidth, whichever is longer;
all else takes its bytes. Kernels bear names that the libraries of that device use.

What a script may write out where a kernel or two would do are the operators that PyTorch runs, forward and backward.
How often each moves its elements follows from its formula in PyTorch's derivatives.yaml; a reduction reads once, what
has a number a row is an empty kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from simulator.hardware import Device
from simulator.program import WIDTHS, Function, Kernel

# Tensor cores take rows of 16 bytes: 8 numbers of 16 bits (NVIDIA, Matrix Multiplication Background User's Guide). Off
# that a product takes longer; by how much depends on the library. This factor is an assumption.
MISALIGNED = 2.2


@dataclass(frozen=True)
class Model:
    """Sizes of a decoder-only transformer, and how its functions are computed."""

    blocks: int = 6
    hidden: int = 1_024
    tokens: int = 16_384  # of a batch on one rank
    sequence: int = 1_024
    heads: int = 16
    vocabulary: int = 32_000
    products: str = "bfloat16"  # element type that products are computed in: bfloat16, float16, tf32, float32
    attention: str = "fused"  # fused, unfused (softmax and products in memory)
    norms: str = "fused"  # fused, or as NORMS writes them
    loss: str = "fused"  # fused, as LOSSES writes it, or cast: of a float32 copy of the logits
    tokens_as: str = "indices"  # or one-hot rows, that a matrix is multiplied by
    parts: int = 1  # that the product with the vocabulary is cut into, and
    grows: bool = False  # whether each is added to those before, or all at once
    pieces: int = 1  # kernels that each elementwise function is cut into
    times: int = 0  # steps in time of an LSTM that stands in the place of the blocks; 0: there is none
    cell: str = "written"  # out by the script, time step by time step, or of the library

    @property
    def activations(self) -> str:
        """Element type of what passes between operators."""
        return "float32" if self.products in ("tf32", "float32") else self.products

    @property
    def block_parameters(self) -> int:
        """Parameters of one block: attention and the feed-forward layer, with biases and norms."""
        return 12 * self.hidden**2 + 13 * self.hidden

    @property
    def parameters(self) -> int:
        """All parameters; the embedding is also the head's matrix."""
        cell = 8 * self.hidden * (self.hidden + 1) if self.times else 0
        return self.blocks * self.block_parameters + cell + (self.vocabulary + self.sequence + 2) * self.hidden

    @property
    def tensors(self) -> int:
        """Parameter tensors."""
        return 12 * self.blocks + 4 * bool(self.times) + 4


class Shop:
    """Makes kernels for one model on one device."""

    def __init__(self, model: Model, device: Device, clock: float = 1.0) -> None:
        self.model, self.device, self.clock = model, device, clock  # clock: of the maximum; what computes feels it
        self.width = WIDTHS[model.activations]

    def product(self, m: int, k: int, n: int, count: int = 1, name: str = "") -> Kernel:
        """Return the kernel of `count` products of m × k by k × n."""
        model, device = self.model, self.device
        kind = model.products if model.products in device.peaks else model.activations
        flops = 2.0 * m * k * n * count
        moved = (m * k + k * n + m * n) * count * self.width
        ns = max(
            flops / (device.efficiency * device.peaks[kind] * self.clock),
            moved / (device.memory_efficiency * device.bandwidth),
        )
        if self.width == 2 and any(size % 8 for size in (k, n)):
            ns *= MISALIGNED
            name = name or _misaligned(device, kind)
        return Kernel(name or _product_name(device, kind), device.least_kernel + round(ns * 1e9))

    def moved(self, name: str, elements: float, passes: float, width: int = 0) -> Kernel:
        """Return the kernel that reads and writes so many elements as often."""
        rate = self.device.memory_efficiency * self.device.bandwidth
        ns = elements * passes * (width or self.width) / rate * 1e9
        return Kernel(name, self.device.least_kernel + round(ns))

    # -- functions

    def linear(self, name: str, inputs: int, outputs: int, tokens: int) -> Function:
        """Return a linear layer with its bias."""
        made = self.product(tokens, inputs, outputs)
        grad_input, grad_weight = self.product(tokens, outputs, inputs), self.product(inputs, tokens, outputs)
        bias = self.moved(_reduce("sum_functor"), tokens * outputs, 1)
        return Function(
            name, "aten::addmm", (made,),
            (("aten::mm", grad_input), ("aten::mm", grad_weight), ("aten::sum", bias)),
            "AddmmBackward0", inputs * outputs + outputs, ("aten::linear",),
            ((outputs,), (tokens, inputs), (inputs, outputs)), self.model.activations,
        )  # fmt: skip

    def elementwise(self, name: str, operator: str, functor: str, node: str, elements: int, passes: int) -> Function:
        """Return a function that goes through its elements once."""
        pieces = self.model.pieces
        made = tuple(self.moved(_elementwise(functor), elements / pieces, passes) for _ in range(pieces))
        back = tuple((operator, k) for k in made) if node != "AddBackward0" else ()
        return Function(name, operator, made, back, node, dtype=self.model.activations)

    def norm(self, name: str, tokens: int) -> Function:
        """Return a layer norm."""
        h = self.model.hidden
        made = self.moved(
            f"void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<{_c(self)}, float>", tokens * h, 2
        )
        back = self.moved(
            f"void at::native::(anonymous namespace)::layer_norm_grad_input_kernel_vectorized<{_c(self)}, float>",
            tokens * h,
            3,
        )
        weights = self.moved(
            f"void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernelTemplate<{_c(self)}, float>",
            tokens * h,
            2,
        )
        return Function(
            name, "aten::native_layer_norm", (made,),
            (("aten::native_layer_norm_backward", back), ("aten::native_layer_norm_backward", weights)),
            "NativeLayerNormBackward0", 2 * h, ("aten::layer_norm",),
        )  # fmt: skip

    def normed(self, name: str, tokens: int) -> list[Function]:
        """Return a normalisation, as one function or as the script writes it out."""
        return [self.norm(name, tokens)] if self.model.norms == "fused" else _written_norm(self, name, tokens)

    def attention(self, tokens: int) -> list[Function]:
        """Return attention over sequences: one fused kernel, or products and a softmax that pass through memory."""
        model = self.model
        width = model.hidden // model.heads
        count = tokens // model.sequence * model.heads
        s = model.sequence
        scores = count * s * s
        if model.attention == "fused":
            half = self.width == 2  # FlashAttention takes 16 bits only; else another fused kernel runs
            # Causal: half of the scores. The backward pass computes 2.5 times as much (Dao, FlashAttention-2, 2023).
            flops = 2 * 2.0 * scores * width / 2
            kind = model.products if model.products in self.device.peaks else model.activations
            ns = (
                round(flops / (0.8 * self.device.efficiency * self.device.peaks[kind] * self.clock) * 1e9)
                + self.device.least_kernel
            )
            forward = Kernel(_flash("fwd") if half else "fmha_cutlassF_f32_aligned_64x64_rf_sm80", ns)
            name = _flash("bwd_dq_dk_dv_loop_seqk_parallel") if half else "fmha_cutlassB_f32_aligned_64x64_k64_sm80"
            kind = "flash" if half else "efficient"
            back = ((f"aten::_{kind}_attention_backward", Kernel(name, round(2.5 * ns))),)
            outer = ("aten::scaled_dot_product_attention", f"aten::_scaled_dot_product_{kind}_attention")
            op, node = f"aten::_{kind}_attention_forward", f"ScaledDotProduct{kind.capitalize()}AttentionBackward0"
            return [Function("attention", op, (forward,), back, node, outer=outer)]
        first, second = self.product(s, width, s, count), self.product(s, s, width, count)
        softmax = f"void (anonymous namespace)::softmax_warp_forward<{_c(self)}, {_c(self)}, float, 10, false, false>"
        softback = f"void (anonymous namespace)::softmax_warp_backward<float, {_c(self)}, float, 10, false, false>"
        scaled = self.moved(_elementwise("MulFunctor<float>"), scores, 2)
        masked = self.moved(_elementwise("masked_fill_kernel"), scores, 2.5)
        return [
            Function("scores", "aten::bmm", (first,), (("aten::bmm", first), ("aten::bmm", first)), "BmmBackward0",
                     outer=("aten::matmul",), shapes=((count, s, width), (count, width, s)), dtype=model.activations),
            Function("scale", "aten::mul", (scaled,), (("aten::mul", scaled),), "MulBackward0"),
            Function("mask", "aten::masked_fill", (masked,), (("aten::masked_fill", masked),), "MaskedFillBackward0"),
            Function("softmax", "aten::_softmax", (self.moved(softmax, scores, 2),),
                     (("aten::_softmax_backward_data", self.moved(softback, scores, 3)),), "SoftmaxBackward0",
                     outer=("aten::softmax",)),
            Function("values", "aten::bmm", (second,), (("aten::bmm", second), ("aten::bmm", second)), "BmmBackward0",
                     outer=("aten::matmul",), shapes=((count, s, s), (count, s, width)), dtype=model.activations),
        ]  # fmt: skip

    def block(self, tokens: int, routed: int | None = None) -> list[Function]:
        """Return one block's functions, in order; `routed`: so many tokens come to the feed-forward layer's experts."""
        h = self.model.hidden
        fed = tokens if routed is None else routed
        add = "CUDAFunctor_add"
        return [
            *self.normed("norm1", tokens),
            self.linear("qkv", h, 3 * h, tokens),
            *self.attention(tokens),
            self.linear("proj", h, h, tokens),
            self.elementwise("add1", "aten::add", add, "AddBackward0", tokens * h, 3),
            *self.normed("norm2", tokens),
            self.linear("up", h, 4 * h, fed),
            self.elementwise("gelu", "aten::gelu", "GeluCUDAKernelImpl", "GeluBackward0", fed * 4 * h, 2),
            self.linear("down", 4 * h, h, fed),
            self.elementwise("add2", "aten::add", add, "AddBackward0", tokens * h, 3),
        ]

    def recurrent(self, tokens: int) -> list[Function]:
        """Return the LSTM that stands in the place of the blocks; nothing where there is none."""
        return _recurrent(self, tokens) if self.model.times else []

    def embedding(self, tokens: int) -> list[Function]:
        """Return what comes before the blocks."""
        if self.model.tokens_as != "indices":
            return _one_hot(self, tokens)
        h, v = self.model.hidden, self.model.vocabulary
        made = self.moved("void at::native::(anonymous namespace)::indexSelectLargeIndex", tokens * h, 2)
        back = self.moved("at::native::(anonymous namespace)::compute_grad_weight", tokens * h + v * h, 2)
        return [
            Function("embedding", "aten::index_select", (made,), (("aten::embedding_dense_backward", back),),
                     "EmbeddingBackward0", v * h, ("aten::embedding",)),
        ]  # fmt: skip

    def head(self, tokens: int) -> list[Function]:
        """Return what comes behind the blocks: norm, product with the vocabulary, loss."""
        h, v = self.model.hidden, self.model.vocabulary
        products = [replace(self.linear("head", h, v, tokens), parameters=0)]
        if self.model.parts > 1:
            products = _in_parts(self, tokens, self.model.parts, self.model.grows)
        if self.model.loss != "fused":
            return [*self.normed("norm", tokens), *products, *_written_loss(self, tokens)]
        soft = f"void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, {_c(self)}, float, float>"
        softback = f"void at::native::(anonymous namespace)::cunn_SoftMaxBackward<8, {_c(self)}, float, float>"
        nll = Kernel("void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d<float>", 9_000)
        nllback = self.moved(
            "void at::native::(anonymous namespace)::nll_loss_backward_reduce_cuda_kernel_2d<float>", tokens, 2
        )
        return [
            *self.normed("norm", tokens),
            *products,
            Function("log_softmax", "aten::_log_softmax", (self.moved(soft, tokens * v, 2),),
                     (("aten::_log_softmax_backward_data", self.moved(softback, tokens * v, 3)),),
                     "LogSoftmaxBackward0", outer=("aten::cross_entropy_loss", "aten::log_softmax")),
            Function("loss", "aten::nll_loss_forward", (nll,), (("aten::nll_loss_backward", nllback),),
                     "NllLossBackward0", outer=("aten::nll_loss_nd", "aten::nll_loss")),
        ]  # fmt: skip


def _c(shop: Shop) -> str:
    """Return what C++ calls the activations' type."""
    return {"float32": "float", "bfloat16": "c10::BFloat16", "float16": "c10::Half"}[shop.model.activations]


def _elementwise(functor: str) -> str:
    return f"void at::native::vectorized_elementwise_kernel<4, at::native::{functor}, std::array<char*, 2ul> >(int)"


def _reduce(functor: str) -> str:
    return f"void at::native::reduce_kernel<128, 4, at::native::ReduceOp<float, at::native::{functor}<float> > >"


def _flash(direction: str) -> str:
    return f"void pytorch_flash::flash_{direction}_kernel<pytorch_flash::Flash_kernel_traits<64, 128, 128, 4> >"


def _misaligned(device: Device, kind: str) -> str:
    """Return the kernel that cuBLAS takes for operands of any alignment; "" where its name tells nothing."""
    if device.platform == "rocm" or device.capability < (8, 0):
        return ""
    short = {"bfloat16": "bf16", "float16": "f16"}[kind]
    whole = f"cutlass_80_tensorop_{short}_s16816gemm_{short}_128x128_32x5_nn_align1"
    return f"void cutlass::Kernel<{whole}>({whole}::Params)"


def _product_name(device: Device, kind: str) -> str:
    """Return what cuBLAS or hipBLASLt calls a product's kernel on a device, in an element type."""
    if device.platform == "rocm":
        types = {"bfloat16": "BBS_BH", "float16": "HHS_BH", "tf32": "S_B", "float32": "S_B"}[kind]
        return f"Cijk_Alik_Bljk_{types}_MT128x128x64_MI16x16x16x1_SN"
    if device.capability >= (9, 0):
        types = {
            "bfloat16": "bf16bf16_bf16f32_f32", "float16": "f16f16_f16f32_f32",
            "tf32": "f32f32_tf32f32_f32", "float32": "f32f32_f32f32_f32",
        }[kind]  # fmt: skip
        tail = (
            "ffma_aligna4_alignc4_execute_kernel__5x_cublas"
            if kind == "float32"
            else "warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas"
        )
        return f"sm{80 if kind == 'float32' else 90}_xmma_gemm_{types}_tn_n_tilesize128x128x64_{tail}"
    if device.capability >= (8, 0):
        return {
            "bfloat16": "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn",
            "float16": "ampere_fp16_s16816gemm_fp16_128x128_ldg8_f2f_stages_32x5_tn",
            "tf32": "ampere_sgemm_tf32_s1688gemm_128x128_ldg8_f2f_stages_32x5_tn",
            "float32": "ampere_sgemm_128x64_tn",
        }[kind]  # fmt: skip
    return {"float16": "volta_fp16_s884gemm_fp16_128x128_ldg8_f2f_tn"}.get(kind, "volta_sgemm_128x64_tn")


# -- what a script writes out


# Makes a function of a name, an operator, its forward passes (of how many bytes an element; 0: one number a row), its
# backward function and what that runs.
_Step = tuple[str, float, str, tuple[tuple[str, float], ...]]

_MEAN: _Step = ("aten::mean", 1, "MeanBackward1", (("aten::div", 1),))
_VARIANCE: _Step = (
    "aten::var",
    1,
    "VarBackward0",
    (("aten::mean", 1), ("aten::sub", 2), ("aten::mul", 2), ("aten::add", 3)),
)
_LESS_MEAN: _Step = ("aten::sub", 2, "SubBackward0", (("aten::neg", 2), ("aten::sum", 1)))
_EPS: _Step = ("aten::add", 0, "AddBackward0", ())
_ROOT: _Step = ("aten::sqrt", 0, "SqrtBackward0", (("aten::mul", 0), ("aten::div", 0)))
_ONE_OVER_ROOT: _Step = ("aten::rsqrt", 0, "RsqrtBackward0", (("aten::pow", 0), ("aten::mul", 0), ("aten::mul", 0)))
_OVER: _Step = (
    "aten::div", 2, "DivBackward0",
    (("aten::div", 2), ("aten::neg", 2), ("aten::div", 2), ("aten::div", 2), ("aten::mul", 3), ("aten::sum", 1)),
)  # fmt: skip
_TIMES: _Step = ("aten::mul", 2, "MulBackward0", (("aten::mul", 2), ("aten::mul", 3), ("aten::sum", 1)))
_BIAS: _Step = ("aten::add", 2, "AddBackward0", (("aten::sum", 1),))
_SQUARE: _Step = (
    "aten::pow",
    2,
    "PowBackward0",
    (("aten::pow", 2), ("aten::mul", 2), ("aten::mul", 3), ("aten::add", 3)),
)
_CAST: _Step = ("aten::to", 1.5, "ToCopyBackward0", (("aten::copy_", 1.5),))  # half of it is half as wide

NORMS: dict[str, tuple[_Step, ...]] = {
    "variance": (_MEAN, _VARIANCE, _LESS_MEAN, _EPS, _ROOT, _OVER, _TIMES, _BIAS),
    "deviation": (_MEAN, _LESS_MEAN, _SQUARE, _MEAN, _LESS_MEAN, _EPS, _ONE_OVER_ROOT, _TIMES, _TIMES, _BIAS),
    "squares": (_SQUARE, _MEAN, _EPS, _ONE_OVER_ROOT, _TIMES, _TIMES),
    # As in Llama: float32 between two casts, and the weight in 16 bits behind them.
    "cast squares": (_CAST, _SQUARE, _MEAN, _EPS, _ONE_OVER_ROOT, _TIMES, _CAST, _TIMES),
}

_INDEX: _Step = ("aten::index", 0, "IndexBackward0", (("aten::new_zeros", 1), ("aten::_index_put_impl_", 0)))
_SOFTMAX: _Step = ("aten::_softmax", 2, "SoftmaxBackward0", (("aten::_softmax_backward_data", 3),))
_LOG_SOFTMAX: _Step = ("aten::_log_softmax", 2, "LogSoftmaxBackward0", (("aten::_log_softmax_backward_data", 3),))
_LOG: _Step = ("aten::log", 2, "LogBackward0", (("aten::div", 3),))
_CROSS_ENTROPY: _Step = _LOG_SOFTMAX
_NLL: _Step = ("aten::nll_loss_forward", 0, "NllLossBackward0", (("aten::nll_loss_backward", 1),))
_NEGATED: _Step = ("aten::neg", 0, "NegBackward0", (("aten::neg", 0),))

LOSSES: dict[str, tuple[_Step, ...]] = {
    "logarithm": (_SOFTMAX, _LOG, _INDEX, ("aten::mean", 0, "MeanBackward0", (("aten::div", 0),)), _NEGATED),
    # One-hot targets are integers of 8 bytes, 2 to 4 times as wide as the logits.
    "one-hot": (
        ("aten::one_hot", 3, "", ()), _LOG_SOFTMAX,
        ("aten::mul", 5, "MulBackward0", (("aten::mul", 4),)),
        ("aten::sum", 1, "SumBackward1", ()), ("aten::mean", 0, "MeanBackward0", (("aten::div", 0),)), _NEGATED,
    ),
    "logsumexp": (
        (
            "aten::logsumexp", 6, "LogsumexpBackward0",
            (("aten::sub", 2), ("aten::exp", 2), ("aten::mul", 2), ("aten::add", 3)),
        ),
        ("aten::gather", 0, "GatherBackward0", (("aten::new_zeros", 1), ("aten::scatter_add_", 0))),
        ("aten::sub", 0, "SubBackward0", (("aten::neg", 0),)),
        ("aten::mean", 0, "MeanBackward0", (("aten::div", 0),)),
    ),
}  # fmt: skip
# One time step of an LSTM's cell behind its two products: operator, name, values of the hidden size for each sequence,
# passes, backward function and what that runs. A state that two functions use gets its gradient from both, added.
_CELL: tuple[tuple[int, _Step], ...] = (
    (4, ("aten::add", 3, "AddBackward0", ())),
    (4, ("aten::split", 0, "SplitBackward0", (("aten::cat", 2),))),
    (1, ("aten::sigmoid", 2, "SigmoidBackward0", (("aten::sigmoid_backward", 3),))),
    (1, ("aten::mul", 3, "MulBackward0", (("aten::mul", 3), ("aten::mul", 3)))),
    (1, ("aten::sigmoid", 2, "SigmoidBackward0", (("aten::sigmoid_backward", 3),))),
    (1, ("aten::tanh", 2, "TanhBackward0", (("aten::tanh_backward", 3),))),
    (1, ("aten::mul", 3, "MulBackward0", (("aten::mul", 3), ("aten::mul", 3)))),
    (1, ("aten::add", 3, "AddBackward0", (("aten::add", 3),))),
    (1, ("aten::sigmoid", 2, "SigmoidBackward0", (("aten::sigmoid_backward", 3),))),
    (1, ("aten::tanh", 2, "TanhBackward0", (("aten::tanh_backward", 3),))),
    (1, ("aten::mul", 3, "MulBackward0", (("aten::mul", 3), ("aten::mul", 3)))),
)
# What a time step takes in cuDNN's kernels for a whole sequence, forward and backward, ns: an assumption, with which a
# model is some ten times as fast with nn.LSTM as written out. It was 9.3 times with 96 time steps on one H200.
_LIBRARY = 10_000, 15_000

# What the outermost operator of one is called.
_OUTER = {"aten::_softmax": ("aten::softmax",), "aten::_log_softmax": ("aten::log_softmax",)}


def _written_norm(shop: Shop, name: str, tokens: int) -> list[Function]:
    """Return a normalisation as the model's script writes it."""
    steps, casts = NORMS[shop.model.norms], shop.model.norms == "cast squares"
    made = []
    for n, step in enumerate(steps):
        # All but the last product with the weight is in float32 then.
        width = 4 if casts and n < len(steps) - 1 else shop.width
        made.append(_written(shop, f"{name}.{n}", step, tokens, tokens * shop.model.hidden, width))
    return made


def _written_loss(shop: Shop, tokens: int) -> list[Function]:
    """Return a loss as the model's script writes it, of its logits."""
    elements = tokens * shop.model.vocabulary
    if shop.model.loss == "cast":
        cast = _written(shop, "cast", _CAST, tokens, elements, 4)
        wide = [_written(shop, f"loss.{n}", s, tokens, elements, 4) for n, s in enumerate((_CROSS_ENTROPY, _NLL))]
        outer = (("aten::cross_entropy_loss", "aten::log_softmax"), ("aten::nll_loss_nd", "aten::nll_loss"))
        return [cast, *(replace(f, outer=o) for f, o in zip(wide, outer, strict=True))]
    steps = LOSSES[shop.model.loss]
    return [_written(shop, f"loss.{n}", s, tokens, elements, shop.width) for n, s in enumerate(steps)]


def _one_hot(shop: Shop, tokens: int) -> list[Function]:
    """Return an embedding as a product with one-hot rows, which are made of integers and cast."""
    h, v = shop.model.hidden, shop.model.vocabulary
    rows = tokens * v
    made = [
        _written(shop, "one_hot", ("aten::one_hot", 1, "", ()), tokens, rows, 8),
        _written(shop, "cast", ("aten::to", 1 + shop.width / 8, "", ()), tokens, rows, 8),
    ]
    product, gradient = shop.product(tokens, v, h), shop.product(v, tokens, h)
    shapes = ((tokens, v), (v, h))
    return [
        *made,
        Function(
            "embedding", "aten::mm", (product,), (("aten::mm", gradient),), "MmBackward0", v * h, ("aten::matmul",),
            shapes, shop.model.activations,
        ),
    ]  # fmt: skip


def _recurrent(shop: Shop, tokens: int) -> list[Function]:
    """Return an LSTM over sequences of `times` tokens: its cell's operators for each, or the library's kernels."""
    model, h = shop.model, shop.model.hidden
    times, rows = model.times, tokens // model.times
    parameters = 4 * h * (h + 1)
    if model.cell == "library":
        inputs, back = shop.product(tokens, h, 4 * h), shop.product(tokens, 4 * h, h)
        weights, state = shop.product(h, tokens, 4 * h), Kernel("RNN_blockPersist_fp_LSTM<float>", times * _LIBRARY[0])
        backward = (Kernel("RNN_blockPersist_bp_LSTM<float>", times * _LIBRARY[1]), back, weights, weights)
        named = tuple(("aten::_cudnn_rnn_backward", kernel) for kernel in backward)
        return [
            Function("lstm", "aten::_cudnn_rnn", (inputs, state), named, "CudnnRnnBackward0", 2 * parameters,
                     ("aten::lstm",), dtype=model.activations),
        ]  # fmt: skip
    made = []
    for time in range(times):
        for name in ("ih", "hh"):
            product = shop.linear(f"{name}.{time}", h, 4 * h, rows)
            made.append(product if not time else replace(product, parameters=0))
        for n, (values, step) in enumerate(_CELL):
            function = _written(shop, f"cell.{time}.{n}", step, rows, values * rows * h, shop.width)
            made.append(function if step[1] else replace(function, kernels=()))
    return made


def _in_parts(shop: Shop, tokens: int, parts: int, grows: bool) -> list[Function]:
    """Return the product with the vocabulary part by part, each added to those before by `cat`, or all behind them."""
    v, part = shop.model.vocabulary, tokens // parts
    copied: _Step = ("aten::cat", 2, "CatBackward0", ())
    made = []
    for n in range(parts):
        made.append(replace(shop.linear(f"head.{n}", shop.model.hidden, v, part), parameters=0))
        if n and (grows or n == parts - 1):
            made.append(_written(shop, f"cat.{n}", copied, tokens, part * (n + 1) * v, shop.width))
    return made


def _written(shop: Shop, name: str, step: _Step, rows: int, elements: int, width: int) -> Function:
    operator, passes, node, backward = step

    def kernel(of: str, times: float) -> Kernel:
        named = f"void at::native::vectorized_elementwise_kernel<4, at::native::{of.removeprefix('aten::')}_kernel>"
        return shop.moved(named, elements if times else rows, times or 1, width)

    backs = tuple((of, kernel(of, times)) for of, times in backward)
    outer = _OUTER.get(operator, ())
    return Function(name, operator, (kernel(operator, passes),), backs, node, outer=outer, dtype=shop.model.activations)
