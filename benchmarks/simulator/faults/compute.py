"""Faults of what the device computes and how fast, and of the loop around the steps."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.simulator.faults.fault import Fault, base, draws
from benchmarks.simulator.job import Epochs, Job, Recording

_EPOCH, _VALIDATION = 20, 10  # steps, batches


def _full_precision(seed: int) -> Job:
    job = base(seed, low=60e6, high=120e6)
    # As long in float32 as others are in 16 bits.
    tokens = max(job.model.tokens // 6 // job.model.sequence, 1) * job.model.sequence
    return replace(job, model=replace(job.model, products="float32", tokens=tokens))


def _autocast(job: Job) -> Job:
    return replace(job, model=replace(job.model, products="bfloat16"))


def _odd_vocabulary(seed: int) -> Job:
    job, rng = base(seed), draws(seed)
    model = replace(job.model, blocks=3, vocabulary=int(rng.choice((50_257, 32_003, 30_523))), products="bfloat16")
    return replace(job, model=model)


def _padded(job: Job) -> Job:
    return replace(job, model=replace(job.model, vocabulary=-(-job.model.vocabulary // 64) * 64))


def _unfused(seed: int) -> Job:
    job = base(seed)
    return replace(job, model=replace(job.model, attention="unfused", sequence=1_024))


def _fused(job: Job) -> Job:
    return replace(job, model=replace(job.model, attention="fused"))


def _hot(seed: int) -> Job:
    return replace(base(seed), clocks=((0, float(draws(seed).uniform(0.6, 0.85))),))


def _one_hot(seed: int) -> Job:
    job, rng = base(seed, ranks=4), draws(seed)
    return replace(job, clocks=((int(rng.integers(0, 4)), float(rng.uniform(0.6, 0.85))),))


def _cool(job: Job) -> Job:
    return replace(job, clocks=())


def _validates(seed: int) -> Job:
    return replace(base(seed, high=60e6), epochs=Epochs(_EPOCH, _VALIDATION))


def _half_as_often(job: Job) -> Job:
    return replace(job, epochs=Epochs(_EPOCH, _VALIDATION // 2))


def _long(job: Job) -> Recording:
    return Recording(steps=6 * (job.epochs.steps + job.epochs.validation), form="torch-2.8", device_step=True)


def _sampled(_: Job) -> Recording:
    return Recording(steps=150, form="torch-2.8", device_step=True)


FAULTS = (
    Fault("float32", "fp32_matmul", "products in float32", _full_precision, _autocast),
    Fault("odd_vocabulary", "misaligned_shapes", "a vocabulary that is no multiple of 8", _odd_vocabulary, _padded),
    Fault("unfused_attention", "unfused_attention", "attention as softmax and products in memory", _unfused, _fused),
    Fault("hot_gpu", "throttled_clock", "a GPU too hot for its clock", _hot, _cool, recorded=_sampled),
    Fault(
        "one_hot_gpu",
        "throttled_clock",
        "one of four GPUs too hot for its clock",
        _one_hot,
        _cool,
        recorded=_sampled,
        accepted=("straggler",),
    ),
    Fault(
        "long_validation",
        "validation_share",
        "ten batches of validation after every twenty steps",
        _validates,
        _half_as_often,
        scope="loop",
        recorded=_long,
        steps=4 * (_EPOCH + _VALIDATION),
    ),
)
