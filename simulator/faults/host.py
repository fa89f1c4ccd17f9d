"""Faults of the training thread: the device waits for Python, launches, results, pauses; or its queue for something."""

from __future__ import annotations

from dataclasses import replace

from simulator.faults.fault import Fault, base, draws, small, step_of, with_loader, with_pauses, with_script
from simulator.hardware import US
from simulator.healthy import compute_ns
from simulator.job import Job, Optimizer, Recording

# -- reading results


def _item(seed: int) -> Job:
    job = base(seed)
    return with_script(job, items=1, after=round(draws(seed).uniform(0.1, 0.3) * step_of(job)))


def _synchronized(seed: int) -> Job:
    job = base(seed)
    return with_script(job, waits=True, after=round(draws(seed).uniform(0.1, 0.3) * step_of(job)))


def _masked(seed: int) -> Job:
    job = base(seed)
    return with_script(job, masks=2, after=round(draws(seed).uniform(0.1, 0.3) * step_of(job)))


# -- Python and launches


def _python(seed: int) -> Job:
    job = base(seed)
    return with_script(job, after=round(draws(seed).uniform(1.1, 1.6) * step_of(job)))


def _launches(seed: int) -> Job:
    """Return a job of kernels of some 20 µs, launched by a slow host."""
    job, rng = small(seed, 1.0), draws(seed)
    slow = rng.uniform(1.5, 2.2)
    host = job.host
    return replace(
        job, host=replace(host, before_op=round(slow * host.before_op), after_op=round(slow * host.after_op),
                          launch=round(slow * host.launch), backward_op=round(slow * host.backward_op)),
    )  # fmt: skip


def _tiny(seed: int) -> Job:
    return small(seed, draws(seed).uniform(0.45, 0.6))


def _captured(job: Job) -> Job:
    """Return the job with forward and backward as graphs, as `torch.compile(mode="reduce-overhead")` makes them."""
    return with_script(job, captured="model")


# -- the optimizer


def _optimizer(seed: int, kind: str) -> Job:
    """Return a job with much to optimize: large for the tokens that it sees."""
    job, rng = base(seed), draws(seed)
    tokens = int(rng.choice((1_536, 2_048, 3_072)))
    model = replace(job.model, hidden=1_536, heads=24, blocks=6, tokens=tokens, sequence=512, vocabulary=32_000)
    assert job.loader is not None
    # Its loader keeps up with steps as short as these.
    job = with_loader(job, fetch=round(0.2 * job.loader.workers * compute_ns(model, job.device)))
    return replace(job, model=model, optimizer=Optimizer(kind=kind))


def _foreach(seed: int) -> Job:
    return _optimizer(seed, "foreach")


def _loop(seed: int) -> Job:
    return _optimizer(seed, "single")


def _fused(job: Job) -> Job:
    return replace(job, optimizer=Optimizer(kind="fused"))


# -- pauses


def _garbage(seed: int) -> Job:
    job = with_script(base(seed), items=1)
    return with_pauses(job, garbage=round(draws(seed).uniform(0.3, 0.8) * step_of(job)), garbage_every=2)


def _checkpoints(seed: int) -> Job:
    job = base(seed)
    return with_pauses(job, checkpoint=round(draws(seed).uniform(1.5, 4.0) * step_of(job)), checkpoint_every=10)


def _compiles(seed: int) -> Job:
    job = base(seed)
    return with_pauses(job, compile=round(draws(seed).uniform(5.0, 7.0) * step_of(job)), compile_every=4)


def _retries(seed: int) -> Job:
    job = replace(base(seed), used_memory=0.985)
    return with_pauses(job, retry=round(draws(seed).uniform(4.0, 9.0) * step_of(job)), retry_every=24)


# -- queued work that waits


def _host_function(seed: int) -> Job:
    job = base(seed)
    return with_script(job, waits_on_host=round(draws(seed).uniform(0.2, 0.6) * step_of(job)))


def _other_stream(seed: int) -> Job:
    job = base(seed)
    return with_script(job, waits_on_stream=round(draws(seed).uniform(0.2, 0.6) * step_of(job)))


def _graph_waits(seed: int) -> Job:
    job = base(seed)
    return with_script(job, captured="model", graph_waits=round(draws(seed).uniform(0.2, 0.6) * step_of(job)))


def _many(_: Job) -> Recording:
    return Recording(steps=160, device_step=True)


FAULTS = (
    Fault(
        "item_every_step",
        "host_sync",
        "the loss is read at every step, and Python follows",
        _item,
        lambda job: with_script(job, items=0),
        accepted=("host_bound",),
        line="values",
    ),
    Fault(
        "synchronize_every_step",
        "host_sync",
        "torch.cuda.synchronize() at every step, and Python follows",
        _synchronized,
        lambda job: with_script(job, waits=False),
        accepted=("host_bound",),
        line="values",
    ),
    Fault(
        "boolean_mask",
        "host_sync",
        "a boolean mask as an index at the end of the step, and Python follows",
        _masked,
        lambda job: with_script(job, masks=0),
        accepted=("host_bound",),
        line="values",
    ),
    Fault(
        "slow_python",
        "step_python",
        "the script's own Python takes longer than the device",
        _python,
        lambda job: with_script(job, after=100 * US),
        line="bookkeeping",
    ),
    Fault(
        "many_launches",
        "host_bound",
        "kernels of 10 to 50 µs, launched by a slow host",
        _launches,
        _captured,
    ),
    Fault("tiny_kernels", "host_bound", "kernels of some µs", _tiny, _captured),
    Fault("foreach_optimizer", "unfused_optimizer", "AdamW in a dozen passes", _foreach, _fused, line="optimizer"),
    Fault(
        "loop_optimizer",
        "unfused_optimizer",
        "AdamW parameter by parameter",
        _loop,
        _fused,
        line="optimizer",
        accepted=("host_bound",),
    ),
    Fault(
        "garbage",
        "gc_pauses",
        "Python looks for garbage in every second step, in a job that reads its loss",
        _garbage,
        lambda job: with_pauses(job, garbage=0),
    ),
    Fault(
        "checkpoints",
        "checkpoint_stall",
        "a checkpoint every ten steps",
        _checkpoints,
        lambda job: with_pauses(job, checkpoint=0),
        recorded=_many,
    ),
    Fault(
        "recompiles",
        "recompilation",
        "torch.compile compiles every fourth step anew",
        _compiles,
        lambda job: with_pauses(job, compile=0),
        recorded=_many,
    ),
    Fault(
        "cache_emptied",
        "allocator_retries",
        "memory runs out, and the allocator empties its cache",
        _retries,
        lambda job: with_pauses(job, retry=0),
        recorded=lambda job: Recording(steps=320, device_step=True),  # noqa: ARG005
        steps=6 * 24,
    ),
    Fault(
        "host_function",
        "queued_wait",
        "a host function in the computing stream",
        _host_function,
        lambda job: with_script(job, waits_on_host=0),
    ),
    Fault(
        "waits_for_stream",
        "queued_wait",
        "the computing stream waits for another, in which nothing runs",
        _other_stream,
        lambda job: with_script(job, waits_on_stream=0),
    ),
    Fault(
        "graph_waits",
        "queued_wait",
        "a node of a captured graph waits",
        _graph_waits,
        lambda job: with_script(job, graph_waits=0),
        recorded=_many,
    ),
)
