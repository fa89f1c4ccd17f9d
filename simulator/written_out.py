"""What a kernel or two would do, as a script writes it out: the operators that PyTorch runs, forward and backward.

How often each moves its elements follows from its formula in PyTorch's derivatives.yaml; a reduction reads once, what
has a number a row is an empty kernel.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from simulator.program import Function, Kernel

if TYPE_CHECKING:
    from simulator.model import Shop

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


def norm(shop: Shop, name: str, tokens: int) -> list[Function]:
    """Return a normalisation as the model's script writes it."""
    steps, casts = NORMS[shop.model.norms], shop.model.norms == "cast squares"
    made = []
    for n, step in enumerate(steps):
        # All but the last product with the weight is in float32 then.
        width = 4 if casts and n < len(steps) - 1 else shop.width
        made.append(_function(shop, f"{name}.{n}", step, tokens, tokens * shop.model.hidden, width))
    return made


def loss(shop: Shop, tokens: int) -> list[Function]:
    """Return a loss as the model's script writes it, of its logits."""
    elements = tokens * shop.model.vocabulary
    if shop.model.loss == "cast":
        cast = _function(shop, "cast", _CAST, tokens, elements, 4)
        wide = [_function(shop, f"loss.{n}", s, tokens, elements, 4) for n, s in enumerate((_CROSS_ENTROPY, _NLL))]
        outer = (("aten::cross_entropy_loss", "aten::log_softmax"), ("aten::nll_loss_nd", "aten::nll_loss"))
        return [cast, *(replace(f, outer=o) for f, o in zip(wide, outer, strict=True))]
    steps = LOSSES[shop.model.loss]
    return [_function(shop, f"loss.{n}", s, tokens, elements, shop.width) for n, s in enumerate(steps)]


def one_hot(shop: Shop, tokens: int) -> list[Function]:
    """Return an embedding as a product with one-hot rows, which are made of integers and cast."""
    h, v = shop.model.hidden, shop.model.vocabulary
    rows = tokens * v
    made = [
        _function(shop, "one_hot", ("aten::one_hot", 1, "", ()), tokens, rows, 8),
        _function(shop, "cast", ("aten::to", 1 + shop.width / 8, "", ()), tokens, rows, 8),
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


def recurrent(shop: Shop, tokens: int) -> list[Function]:
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
            function = _function(shop, f"cell.{time}.{n}", step, rows, values * rows * h, shop.width)
            made.append(function if step[1] else replace(function, kernels=()))
    return made


def in_parts(shop: Shop, tokens: int, parts: int, grows: bool) -> list[Function]:
    """Return the product with the vocabulary part by part, each added to those before by `cat`, or all behind them."""
    v, part = shop.model.vocabulary, tokens // parts
    copied: _Step = ("aten::cat", 2, "CatBackward0", ())
    made = []
    for n in range(parts):
        made.append(replace(shop.linear(f"head.{n}", shop.model.hidden, v, part), parameters=0))
        if n and (grows or n == parts - 1):
            made.append(_function(shop, f"cat.{n}", copied, tokens, part * (n + 1) * v, shop.width))
    return made


def _function(shop: Shop, name: str, step: _Step, rows: int, elements: int, width: int) -> Function:
    operator, passes, node, backward = step

    def kernel(of: str, times: float) -> Kernel:
        named = f"void at::native::vectorized_elementwise_kernel<4, at::native::{of.removeprefix('aten::')}_kernel>"
        return shop.moved(named, elements if times else rows, times or 1, width)

    backs = tuple((of, kernel(of, times)) for of, times in backward)
    outer = _OUTER.get(operator, ())
    return Function(name, operator, (kernel(operator, passes),), backs, node, outer=outer, dtype=shop.model.activations)
