"""A transformer as operators and kernels: what each multiplies or moves, and so how long it takes on a device.

A matrix product takes its FLOPs at a part of the peak, or its bytes at a part of the bandwidth, whichever is longer;
all else takes its bytes. Kernels bear names that the libraries of that device use.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from simulator import written_out
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
    norms: str = "fused"  # fused, or as written_out.NORMS writes them
    loss: str = "fused"  # fused, as written_out.LOSSES writes it, or cast: of a float32 copy of the logits
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
        return [self.norm(name, tokens)] if self.model.norms == "fused" else written_out.norm(self, name, tokens)

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
        return written_out.recurrent(self, tokens) if self.model.times else []

    def embedding(self, tokens: int) -> list[Function]:
        """Return what comes before the blocks."""
        if self.model.tokens_as != "indices":
            return written_out.one_hot(self, tokens)
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
            products = written_out.in_parts(self, tokens, self.model.parts, self.model.grows)
        if self.model.loss != "fused":
            return [*self.normed("norm", tokens), *products, *written_out.loss(self, tokens)]
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
