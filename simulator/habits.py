"""What a step does beside its model: the optimizer, tables of embeddings, and the script's habits between its phases.

The optimizer is fused, for all tensors together (foreach), or for one after the other. Tables are in the host's memory,
from where features are copied, or in the device's. A script reads values, goes over parameters, averages them:
operators, their nesting and their calls are as PyTorch 2.11 was recorded with such scripts.
"""

from __future__ import annotations

from collections.abc import Iterator

from simulator.hardware import US
from simulator.job import Job, Tables
from simulator.model import Shop
from simulator.program import (
    AUTOGRAD,
    COMPUTE,
    MAIN,
    Begin,
    Copy,
    End,
    Function,
    Instruction,
    Kernel,
    Line,
    Operator,
    Phase,
    Spend,
    Synchronize,
    Thread,
    key_of,
)

# -- the optimizer


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


def optimizer_step(job: Job, shop: Shop) -> Iterator[Instruction]:
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


def step_end() -> Iterator[Instruction]:
    """Return the end of optimizer.step().

    Where the optimizer's step marks the recorder's steps, the next one begins before that, in the optimizer's hooks.
    """
    yield End(5 * US, key_of("optimizer", "end"), RANGE)


def in_place(job: Job, operator: str, kernel: Kernel, key: int) -> Operator:
    """Return an operator on one tensor."""
    before, after = (round(_IN_PLACE * ns) for ns in (job.host.before_op, job.host.after_op))
    return Operator((f"aten::{operator}",), (kernel,), key, before, after)


def zero_grad(job: Job) -> Iterator[Instruction]:
    """Return optimizer.zero_grad(), which sets gradients to None."""
    model = job.model
    yield Begin(
        f"Optimizer.zero_grad#{job.optimizer.name}.zero_grad", model.tensors * 300, key_of("zero"), "user_annotation"
    )
    yield End(2 * US)


# -- tables of embeddings


_ENGINE = "autograd::engine::evaluate_function:"


def lookups_on_device(shop: Shop, tables: Tables) -> list[Function]:
    """Return lookups as the device does them: rows are read and written, backward added to the gradients."""
    made = []
    for n in range(tables.count):
        lookup = shop.moved("void at::native::(anonymous namespace)::indexSelectLargeIndex", tables.size, 2, 1)
        gradient = shop.moved("at::native::(anonymous namespace)::compute_grad_weight", tables.size, 3, 1)
        backward = (("aten::embedding_dense_backward", gradient),)
        outer = ("aten::embedding",)
        made.append(Function(f"table{n}", "aten::index_select", (lookup,), backward, "EmbeddingBackward0", outer=outer))
    return made


def lookups_on_host(tables: Tables) -> Iterator[Instruction]:
    """Return lookups on the host, each copied to the device at once."""
    for n in range(tables.count):
        key = key_of("table", n)
        yield Begin("aten::embedding", tables.lookup, key)
        yield End(1 * US, key)
        yield from _copied("HtoD", tables.size, key)


def gradients_on_host(tables: Tables) -> Iterator[Instruction]:
    """Return how gradients come back to the host, and are added up there; the last thread is autograd's."""
    for n in reversed(range(tables.count)):
        key = key_of("table", n, "backward")
        for name in (f"{_ENGINE} ToCopyBackward0", "ToCopyBackward0"):
            yield Begin(name, 1 * US, key)
        yield from _copied("DtoH", tables.size, key)
        for _ in range(2):
            yield End(300, key)
        yield Thread(MAIN)
        for name in (f"{_ENGINE} EmbeddingBackward0", "EmbeddingBackward0"):
            yield Begin(name, 1 * US, key)
        yield Begin("aten::embedding_dense_backward", tables.gradient, key)
        for _ in range(3):
            yield End(500, key)
        yield Thread(AUTOGRAD)


def _copied(way: str, size: int, key: int) -> Iterator[Instruction]:
    for name in ("aten::to", "aten::_to_copy", "aten::copy_"):
        yield Begin(name, 2 * US, key)
    yield Copy(way, size, "pageable", COMPUTE, key)
    for _ in range(3):
        yield End(1 * US, key)


# -- between the phases


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


def loss_value(job: Job) -> Iterator[Instruction]:
    """Return how the loss is read, or added to a tensor."""
    if job.script.values:
        yield Line("loss value")
        yield from _value(job, key_of("loss value"))


def accuracy_value(job: Job, shop: Shop) -> Iterator[Instruction]:
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


def norms(job: Job, shop: Shop) -> Iterator[Instruction]:
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


def average(job: Job, shop: Shop) -> Iterator[Instruction]:
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
