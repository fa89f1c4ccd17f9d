"""The optimizer's step, fused, for all tensors together (foreach), or one after the other; and zero_grad()."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from simulator.hardware import US
from simulator.job import Job
from simulator.model import Shop
from simulator.program import Begin, End, Instruction, Kernel, Operator, Phase

RANGE = "Optimizer.step"

# What AdamW does, operator by operator, and how many values of 4 bytes each moves for a parameter
# (torch/optim/adamw.py, _multi_tensor_adamw).
ADAMW = (
    ("add_", 0.0),
    ("mul_", 2.0),
    ("lerp_", 3.0),
    ("mul_", 2.0),
    ("addcmul_", 3.0),
    ("sqrt", 2.0),
    ("div_", 2.0),
    ("add_", 2.0),
    ("addcdiv_", 4.0),
)
FUSED = 7.0  # reads parameter, gradient and two moments, writes three of them

# What its single-tensor form does for one tensor, with the operators in each that launch nothing: the count of steps is
# a tensor of the host, which is added to and read (as recorded of torch 2.11; _single_tensor_adam in torch/optim).
_ADDS, _READS = ("aten::to", "aten::_to_copy", "aten::empty_strided"), ("aten::_local_scalar_dense",)
SINGLE: tuple[tuple[str, float, tuple[str, ...]], ...] = (
    ("add_", -1, _ADDS), ("mul_", 2, ()), ("lerp_", 3, ()), ("mul_", 2, ()), ("addcmul_", 3, ()),
    ("item", -1, _READS), ("sqrt", 2, ()), ("div", 2, ()), ("add_", 2, ()), ("addcdiv_", 4, ()),
)  # fmt: skip

APPLY = "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
_FUSED = (
    f"{APPLY}FusedOptimizerTensorListMetadata<4>, at::native::(anonymous namespace)::FusedAdamMathFunctor<float, 4> >"
)

# What Python and the dispatcher take of an operator on one tensor in place, of what they take of a layer's function: on
# one H200 an AdamW in a loop took 7.6 µs a launch, the forward pass of the same model 16.
_IN_PLACE = 0.4

# Tensors in one kernel (torch's MultiTensorApply.cuh, depth_to_max_tensors: some 30 to 110).
TENSORS = 36


def optimizer_step(job: Job, shop: Shop, key_of: Callable[..., int]) -> Iterator[Instruction]:
    """Return optimizer.step() but for the end of PyTorch's range of it, which is around the recorder's."""
    model, kind = job.model, job.optimizer.kind
    launches = -(-model.tensors // TENSORS)
    yield Begin(f"{RANGE}#{job.optimizer.name}.step", 60 * US, key_of("optimizer"), "user_annotation")
    yield Phase("optimizer")
    if kind == "fused":
        made = shop.moved(_FUSED, model.parameters / launches, FUSED, 4)
        yield Operator(("aten::_fused_adamw_",), (made,) * launches, key_of("fused"), 20 * US, 5 * US)
    elif kind == "foreach":
        for n, (operator, passes) in enumerate(ADAMW):
            name = f"{APPLY}TensorListMetadata<1>, at::native::(anonymous namespace)::{operator}>"
            made = shop.moved(name, model.parameters / launches, passes, 4)
            yield Operator((f"aten::_foreach_{operator}",), (made,) * launches, key_of("foreach", n), 25 * US, 3 * US)
    else:
        each = model.parameters / model.tensors
        for tensor in range(model.tensors):
            for n, (operator, passes, within) in enumerate(SINGLE):
                key = key_of("single", tensor, n)
                if passes < 0:  # on the host
                    yield Operator((f"aten::{operator}", *within), (), key, 1 * US, 500)
                    continue
                name = f"void at::native::vectorized_elementwise_kernel<4, at::native::{operator}, 3>(int)"
                one = shop.moved(name, each, passes, 4)
                yield in_place(job, operator, one, key)
    yield Phase("")


def step_end(key_of: Callable[..., int]) -> Iterator[Instruction]:
    """Return the end of optimizer.step().

    Where the optimizer's step marks the recorder's steps, the next one begins before that, in the optimizer's hooks.
    """
    yield End(5 * US, key_of("optimizer", "end"), RANGE)


def in_place(job: Job, operator: str, kernel: Kernel, key: int) -> Operator:
    """Return an operator on one tensor."""
    before, after = (round(_IN_PLACE * ns) for ns in (job.host.before_op, job.host.after_op))
    return Operator((f"aten::{operator}",), (kernel,), key, before, after)


def zero_grad(job: Job, key_of: Callable[..., int]) -> Iterator[Instruction]:
    """Return optimizer.zero_grad(), which sets gradients to None."""
    model = job.model
    yield Begin(
        f"Optimizer.zero_grad#{job.optimizer.name}.zero_grad", model.tensors * 300, key_of("zero"), "user_annotation"
    )
    yield End(2 * US)
