"""What a training script does between the phases of its step: reads values, goes over parameters, averages them.

Operators, their nesting and their calls are as PyTorch 2.11 was recorded with such scripts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from simulator.hardware import US
from simulator.job import Job
from simulator.model import Shop
from simulator.optimizers import APPLY, TENSORS, in_place
from simulator.program import (
    COMPUTE,
    Begin,
    Copy,
    End,
    Instruction,
    Kernel,
    Line,
    Operator,
    Spend,
    Synchronize,
)

_Keys = Callable[..., int]

_LOOP = 1_500  # ns of Python for one turn of a loop: an assumption


def item(job: Job, key: int) -> Iterator[Instruction]:
    """Return tensor.item(): a copy to the host, and a wait until the stream has done it."""
    yield Begin("aten::item", 1 * US, key)
    yield Begin("aten::_local_scalar_dense", 2 * US, key)
    yield Copy("DtoH", 4, job.script.item_memory, COMPUTE, key)
    yield Synchronize("stream")
    yield End(1 * US)
    yield End(500)


def lap(job: Job, phase: str) -> Iterator[Instruction]:
    """Return torch.cuda.synchronize() behind a phase, where the script times its phases."""
    if job.script.laps:
        yield Line(f"lap {phase}")
        yield Synchronize("device")


def loss_value(job: Job, key_of: _Keys) -> Iterator[Instruction]:
    """Return how the loss is read, or added to a tensor."""
    if job.script.values:
        yield Line("loss value")
        yield from _value(job, key_of("loss value"))


def accuracy_value(job: Job, shop: Shop, key_of: _Keys) -> Iterator[Instruction]:
    """Return how the accuracy is computed of the logits, and read or added to a tensor."""
    if job.script.values:
        yield Line("accuracy value")
        tokens, key = job.model.tokens, key_of("accuracy")
        for n, (operator, kernel) in enumerate(
            (
                ("aten::argmax", shop.moved("ArgMaxOps_reduce_kernel", tokens * job.model.vocabulary, 1)),
                ("aten::eq", shop.moved("CompareEqFunctor_elementwise_kernel", tokens, 3, 8)),
                ("aten::mean", shop.moved("MeanOps_reduce_kernel", tokens, 1, 1)),
            )
        ):
            yield Operator((operator,), (kernel,), key + n, job.host.before_op, job.host.after_op)
        yield from _value(job, key_of("accuracy value"))


def _value(job: Job, key: int) -> Iterator[Instruction]:
    if job.script.values == "read":
        yield from item(job, key)
        return
    one = Kernel("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, 3>(int)", 2_200)
    yield Operator(("aten::add_",), (one,), key, job.host.before_op, job.host.after_op)


def norms(job: Job, shop: Shop, key_of: _Keys) -> Iterator[Instruction]:
    """Return the norm of the gradients: of each by itself, read at once, or of all together, which is not read."""
    model, host = job.model, job.host
    if not job.script.norms:
        return
    yield Line("norm")
    if job.script.norms == "total":  # torch.nn.utils.get_total_norm
        launches = -(-model.tensors // TENSORS)
        name = f"{APPLY}TensorListMetadata<1>, at::native::(anonymous namespace)::LpNormFunctor<float> >"
        made = shop.moved(name, model.parameters / launches, 1, 4)
        yield Operator(("aten::_foreach_norm",), (made,) * launches, key_of("norms"), 25 * US, 3 * US)
        for operator in ("stack", "linalg_vector_norm"):
            one = Kernel(f"void at::native::{operator}_kernel", 3_000)
            yield Operator((f"aten::{operator}",), (one,), key_of("norms", operator), host.before_op, host.after_op)
        return
    each = shop.moved("void at::native::reduce_kernel<512, 1, NormTwoOps>", model.parameters / model.tensors, 1, 4)
    for tensor in range(model.tensors):
        key = key_of("norm", tensor)
        yield Spend(_LOOP, "python", key)
        yield Operator(("aten::detach", "detach"), (), key, 500, 300)
        yield in_place(job, "linalg_vector_norm", each, key)
        yield from item(job, key)


def hook(job: Job, shop: Shop, key: int) -> Iterator[Instruction]:
    """Return what a hook on a gradient does: it reads its norm."""
    if job.script.hooks:
        size = job.model.parameters / job.model.tensors
        yield Spend(_LOOP, "python", key)
        yield in_place(job, "linalg_vector_norm", shop.moved("void reduce_kernel<512, 1, NormTwoOps>", size, 1, 4), key)
        yield from item(job, key)


def average(job: Job, shop: Shop, key_of: _Keys) -> Iterator[Instruction]:
    """Return the update of the parameters' average: `e.mul_(d).add_(p, alpha=1 - d)` for each, or `_foreach_lerp_`."""
    model = job.model
    if not job.script.ema:
        return
    yield Line("average")
    if job.script.ema == "foreach":
        launches = -(-model.tensors // TENSORS)
        name = f"{APPLY}TensorListScalarListMetadata<2>, at::native::(anonymous namespace)::TernaryOpScalarFunctor>"
        made = shop.moved(name, model.parameters / launches, 3, 4)
        yield Operator(("aten::_foreach_lerp_",), (made,) * launches, key_of("average"), 25 * US, 3 * US)
        return
    for tensor in range(model.tensors):
        yield Spend(_LOOP, "python", key_of("average", tensor))
        for n, (operator, passes) in enumerate((("mul_", 2), ("add_", 3))):
            name = f"void at::native::vectorized_elementwise_kernel<4, at::native::{operator}, 3>(int)"
            one = shop.moved(name, model.parameters / model.tensors, passes, 4)
            yield in_place(job, operator, one, key_of("average", tensor, n))
