"""The optimizer's step, fused, for all tensors together (foreach), or one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks.simulator.hardware import US
from benchmarks.simulator.job import Job
from benchmarks.simulator.model import Shop
from benchmarks.simulator.program import Begin, End, Instruction, Operator

# What AdamW does, operator by operator, and how many values of 4 bytes each moves for a parameter
# (torch/optim/adamw.py, _multi_tensor_adamw; its single-tensor form does the same for one tensor).
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

_APPLY = "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
_FUSED = (
    f"{_APPLY}FusedOptimizerTensorListMetadata<4>, at::native::(anonymous namespace)::FusedAdamMathFunctor<float, 4> >"
)

# Tensors in one kernel (torch's MultiTensorApply.cuh, depth_to_max_tensors: some 30 to 110).
_TENSORS = 36


def optimizer_step(job: Job, shop: Shop, key_of: Callable[..., int]) -> Iterator[Instruction]:
    """Return optimizer.step() and zero_grad()."""
    model, kind = job.model, job.optimizer.kind
    launches = -(-model.tensors // _TENSORS)
    yield Begin(f"Optimizer.step#{job.optimizer.name}.step", 60 * US, key_of("optimizer"), "user_annotation")
    if kind == "fused":
        made = shop.moved(_FUSED, model.parameters / launches, FUSED, 4)
        yield Operator(("aten::_fused_adamw_",), (made,) * launches, key_of("fused"), 20 * US, 5 * US)
    elif kind == "foreach":
        for n, (operator, passes) in enumerate(ADAMW):
            name = f"{_APPLY}TensorListMetadata<1>, at::native::(anonymous namespace)::{operator}>"
            made = shop.moved(name, model.parameters / launches, passes, 4)
            yield Operator((f"aten::_foreach_{operator}",), (made,) * launches, key_of("foreach", n), 25 * US, 3 * US)
    else:
        each = model.parameters / model.tensors
        for tensor in range(model.tensors):
            for n, (operator, passes) in enumerate(ADAMW):
                name = f"void at::native::vectorized_elementwise_kernel<4, at::native::{operator}, 3>(int)"
                one = shop.moved(name, each, passes, 4)
                yield Operator(
                    (f"aten::{operator}",), (one,), key_of("single", tensor, n), job.host.before_op, job.host.after_op
                )
    yield End(5 * US, key_of("optimizer", "end"))
    yield Begin(
        f"Optimizer.zero_grad#{job.optimizer.name}.zero_grad", model.tensors * 300, key_of("zero"), "user_annotation"
    )
    yield End(2 * US)
