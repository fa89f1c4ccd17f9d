"""Faults of what the device computes and how fast, of what its memory holds, and of the loop around the steps."""

from __future__ import annotations

from dataclasses import replace

from simulator import memory
from simulator.faults.fault import Fault, base, draws, small, step_of, with_loader
from simulator.hardware import DEVICES, PAGEABLE_SHARE
from simulator.job import Epochs, Job, Memory, Recording, Tables
from simulator.model import LOSSES, NORMS

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


def _epochs(job: Job) -> Recording:
    return Recording(steps=6 * (job.epochs.steps + job.epochs.validation), form="torch-2.8", device_step=True)


def _sampled(_: Job) -> Recording:
    return Recording(steps=150, form="torch-2.8", device_step=True)


def _written_norms(seed: int) -> Job:
    job = base(seed)
    forms = sorted(NORMS)
    return replace(job, model=replace(job.model, norms=forms[seed // 2 % len(forms)]))


def _fused_norms(job: Job) -> Job:
    return replace(job, model=replace(job.model, norms="fused"))


def _small_written_norms(seed: int) -> Job:
    job = small(seed, draws(seed).uniform(0.5, 0.9))
    forms = sorted(NORMS)
    return replace(job, model=replace(job.model, norms=forms[seed // 2 % len(forms)]))


def _resized(job: Job, **changed: object) -> Job:
    """Return a job with another model, and a loader that keeps up as before."""
    new = replace(job, model=replace(job.model, **changed))  # type: ignore[arg-type]
    assert job.loader is not None
    times = step_of(new) / step_of(job)
    return with_loader(new, fetch=round(job.loader.fetch * times), cpu=round(job.loader.cpu * times))


def _large_vocabulary(seed: int) -> Job:
    rng = draws(seed)
    sizes = {"blocks": int(rng.integers(2, 6)), "vocabulary": int(rng.choice((32_000, 50_304, 128_256)))}
    return _resized(base(seed), **sizes)


def _written_loss(seed: int) -> Job:
    job = _large_vocabulary(seed)
    forms = sorted(LOSSES)
    return replace(job, model=replace(job.model, loss=forms[seed // 2 % len(forms)]))


def _cast_loss(seed: int) -> Job:
    job = _large_vocabulary(seed)
    return replace(job, model=replace(job.model, loss="cast"))


def _fused_loss(job: Job) -> Job:
    return replace(job, model=replace(job.model, loss="fused"))


def _one_hot_tokens(seed: int) -> Job:
    rng = draws(seed)
    sizes = {"blocks": int(rng.integers(2, 5)), "vocabulary": int(rng.choice((4_096, 16_000, 32_000)))}
    job = _resized(base(seed), **sizes)
    return replace(job, model=replace(job.model, tokens_as="one_hot"))


def _looked_up(job: Job) -> Job:
    return replace(job, model=replace(job.model, tokens_as="indices"))


def _growing(seed: int) -> Job:
    job, rng = _large_vocabulary(seed), draws(seed)
    parts = int(rng.integers(12, 65))
    tokens = max(job.model.tokens // parts // 64, 1) * 64 * parts
    return replace(job, model=replace(job.model, parts=parts, grows=True, tokens=tokens))


def _in_a_list(job: Job) -> Job:
    return replace(job, model=replace(job.model, grows=False))


def _host_tables(seed: int) -> Job:
    job, rng = base(seed), draws(seed)
    count = int(rng.integers(1, 17))
    step = step_of(job)
    features = rng.uniform(0.05, 0.25) * step / count  # ns of PCIe from pageable memory, each way
    each = rng.uniform(0.05, 0.3) * step / count
    size = round(features / 1e9 * DEVICES[job.device].host_link * PAGEABLE_SHARE)
    return replace(job, tables=Tables(count, size, "host", round(each), round(each * rng.uniform(1, 3))))


def _device_tables(job: Job) -> Job:
    return replace(job, tables=replace(job.tables, on="device"))


# -- memory


# Of the memory, where tools warn that little is left.
_FULL = 0.92


def _room(seed: int) -> Job:
    return replace(small(seed, draws(seed).uniform(0.5, 0.8)), used_memory=0.15)


def _thin(seed: int, ratio: float) -> Job:
    """Return a job that its host holds up, of a model of few parameters, so that activations are most of its memory."""
    job = small(seed, ratio)
    return replace(job, model=replace(job.model, vocabulary=1_024), memory=Memory())


def _needs(job: Job) -> float:
    """Return the bytes that a job's tensors and its context need at most."""
    assert job.memory is not None
    ample = replace(job, memory=replace(job.memory, total=10**13))
    return memory.simulated(ample).allocator.peak_allocated + job.memory.context


def _counted(seed: int) -> Job:
    """Return a job on a device that holds a batch so many times as large, and none that is larger."""
    rng = draws(seed)
    job = _thin(seed, rng.uniform(0.3, 0.6))
    return _on_device_of(job, _needs(larger(job, rng.uniform(1.6, 6.0))) / _FULL)


def _full(seed: int) -> Job:
    """Return a job whose device holds its batch and no larger one, and waits for launches in every step."""
    job = _thin(seed, draws(seed).uniform(0.2, 0.4))
    # Narrow and deep: activations outweigh the parameters and CUDA's context.
    job = replace(job, model=replace(job.model, blocks=64, hidden=128, tokens=4 * job.model.tokens))
    return _on_device_of(job, 1.03 * _needs(job) / _FULL)


def _on_device_of(job: Job, total: float) -> Job:
    assert job.memory is not None
    return replace(job, memory=replace(job.memory, total=round(total)))


def larger(job: Job, times: float) -> Job:
    """Return the job with a batch so many times as large, in whole sequences, on a device without end."""
    assert job.loader is not None
    sequences = round(times * job.model.tokens / job.model.sequence)
    times = sequences * job.model.sequence / job.model.tokens
    loader = replace(job.loader, fetch=round(times * job.loader.fetch), cpu=round(times * job.loader.cpu))
    made = replace(job, model=replace(job.model, tokens=sequences * job.model.sequence), loader=loader)
    return replace(made, batch=replace(job.batch, size=round(times * job.batch.size)))


def checkpointed(job: Job, times: float) -> Job:
    """Return the job with checkpoints, and a batch so many times as large."""
    assert job.memory is not None
    return larger(replace(job, memory=replace(job.memory, checkpoints=True)), times)


def _long(_: Job) -> Recording:
    return Recording(steps=150, active=5, form="torch-2.13", device_step=True)


FAULTS = (
    Fault("float32", "fp32_matmul", "products in float32", _full_precision, _autocast),
    Fault("odd_vocabulary", "misaligned_shapes", "a vocabulary that is no multiple of 8", _odd_vocabulary, _padded),
    Fault("unfused_attention", "unfused_attention", "attention as softmax and products in memory", _unfused, _fused),
    Fault("written_norms", "unfused_norm", "normalisations by mean, variance and root", _written_norms, _fused_norms),
    Fault(
        "small_written_norms",
        "unfused_norm",
        "the same in small layers, whose host launches too slowly",
        _small_written_norms,
        _fused_norms,
        accepted=("host_bound",),
    ),
    Fault("written_loss", "unfused_loss", "a loss by softmax and logarithm, or such", _written_loss, _fused_loss),
    Fault("cast_loss", "unfused_loss", "a loss of a float32 copy of its logits", _cast_loss, _fused_loss),
    Fault("one_hot_tokens", "one_hot_input", "tokens as one-hot rows that are multiplied", _one_hot_tokens, _looked_up),
    Fault("growing_logits", "growing_cat", "logits that grow by cat in a loop", _growing, _in_a_list),
    Fault(
        "host_tables",
        "host_embedding",
        "tables of embeddings in the host's memory",
        _host_tables,
        _device_tables,
        accepted=("host_bound", "host_sync", "exposed_copy", "pageable_copy", "blocking_copy"),
    ),
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
        recorded=_epochs,
        steps=4 * (_EPOCH + _VALIDATION),
    ),
    Fault(
        "small_batch",
        "memory_headroom",
        "a job that its host holds up, with room for a larger batch",
        _room,
        advised=larger,
        accepted=("host_bound",),
    ),
    Fault(
        "small_batch_counted",
        "memory_headroom",
        "the same, of which it was counted what memory holds, with room for one and a half to six times the batch",
        _counted,
        advised=larger,
        recorded=_long,
        accepted=("host_bound",),
    ),
    Fault(
        "activations_fill",
        "activation_memory",
        "a job that its host holds up, and whose activations leave no room for a larger batch",
        _full,
        advised=checkpointed,
        recorded=_long,
        accepted=("host_bound",),
    ),
)
