"""Faults of the training thread: the device waits for Python, launches, results, pauses; or its queue for something.

Those of the script's own lines (waits in several places, loops over parameters, a cell by hand, Python between) mostly
stand in jobs that their host holds up as much as their device, as PyTorch's models of many small layers do on a fast
GPU: there each of them is a part of the same time, and what one's fix gains depends on what is left.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from simulator.faults.fault import (
    Fault,
    base,
    draws,
    launching_ns,
    small,
    step_of,
    with_loader,
    with_pauses,
    with_script,
)
from simulator.hardware import US, Host
from simulator.healthy import compute_ns
from simulator.job import Batch, Job, Optimizer, Recording, Script
from simulator.loading import Loader

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


# -- jobs of many small layers


def _host(rng: np.random.Generator) -> Host:
    """Draw what calls cost: on one H200 some 16 µs for each launch of a model's layers, in Python and in autograd."""
    return Host(
        launch=round(rng.uniform(2.5, 4) * US), before_op=round(rng.uniform(6, 12) * US),
        after_op=round(rng.uniform(1, 2.5) * US), backward_op=round(rng.uniform(6, 12) * US),
        views=int(rng.integers(2, 5)),
    )  # fmt: skip


def _layers(seed: int, low: float, high: float, blocks: tuple[int, int] = (8, 21), hidden: int = 256) -> Job:
    """Return a job of many small layers: its device takes `low` to `high` of what its host takes to launch them.

    Half of the jobs have no loader: then the recorder's steps end with the optimizer's, and what follows is the next's.
    """
    job, rng = base(seed), draws(seed)
    host, ratio = _host(rng), rng.uniform(low, high)
    model = replace(
        job.model, blocks=int(rng.integers(*blocks)), hidden=hidden, heads=4, sequence=256, vocabulary=2_048, tokens=256
    )
    job = replace(job, model=model, host=host, modules=True, script=Script(30 * US, 20 * US), batch=Batch(100_000))
    while step_of(job) < ratio * launching_ns(job):
        job = replace(job, model=replace(job.model, tokens=job.model.tokens + 256))
    step = max(step_of(job), launching_ns(job))
    fetch = rng.uniform(0.5, 2.0) * step
    loader = Loader(4, 2, round(fetch), round(0.8 * fetch), round(0.05 * fetch), receive=60 * US)
    return _without_loader(job) if rng.random() < 0.5 else replace(job, loader=loader)


def _without_loader(job: Job) -> Job:
    return replace(job, loader=None, batch=Batch(0))


def _script(job: Job, low: float, high: float, **habits: object) -> Job:
    """Return a job with such habits, and Python behind the optimizer for `low` to `high` of its step."""
    step = max(step_of(job), launching_ns(job))
    rng = np.random.default_rng((job.seed, 97))
    return with_script(job, after=round(rng.uniform(low, high) * step), **habits)


# -- waits in several places


def _laps(seed: int) -> Job:
    return _script(_layers(seed, 1.0, 1.5), 0.1, 0.3, laps=True)


def _few_laps(seed: int) -> Job:
    return with_script(_layers(seed, 4.0, 6.0), laps=True, after=10 * US)


def _norms(seed: int) -> Job:
    return with_script(_layers(seed, 0.6, 1.3, blocks=(4, 25)), norms="items")


def _hooks(seed: int) -> Job:
    return with_script(_layers(seed, 0.6, 1.3, blocks=(4, 25)), hooks=True)


def _total(job: Job) -> Job:
    return with_script(job, norms="total")


def _values(seed: int) -> Job:
    return _script(_layers(seed, 1.0, 1.5), 0.1, 0.3, values="read")


# -- loops over parameters


def _small_optimizer(seed: int) -> Job:
    return replace(_layers(seed, 0.8, 1.3), optimizer=Optimizer(kind="single"))


def _averages(seed: int) -> Job:
    return with_script(_layers(seed, 0.5, 0.9), ema="loop")


def _together(job: Job) -> Job:
    return with_script(job, ema="foreach")


def _both_loops(seed: int) -> Job:
    return with_script(_small_optimizer(seed), norms="items", ema="loop")


def _large(seed: int, **habits: object) -> Job:
    """Return a job of few large layers, whose device has work for longer than any loop over them takes."""
    job = base(seed, low=100e6, high=160e6)
    job = replace(job, model=replace(job.model, blocks=3, hidden=512, heads=8, vocabulary=8_000), modules=True)
    times = 120e6 / step_of(job)
    tokens = round(times * job.model.tokens / job.model.sequence) * job.model.sequence
    return with_script(replace(job, model=replace(job.model, tokens=tokens)), **habits)


def _wide(seed: int) -> Job:
    job = _without_loader(_large(seed, ema="loop"))
    return replace(job, model=replace(job.model, blocks=6, hidden=1_536, heads=24, vocabulary=16_000, tokens=6_656))


# -- many small operators


def _written(seed: int) -> Job:
    """Return a job of an LSTM that the script writes out, time step by time step."""
    job, rng = base(seed), draws(seed)
    times, rows = int(rng.integers(48, 129)), int(rng.choice((16, 32, 64)))
    model = replace(
        job.model, blocks=0, hidden=int(rng.choice((128, 256, 384))), heads=4, sequence=times, times=times,
        tokens=times * rows, vocabulary=2_048, products="float32" if rng.random() < 0.5 else "bfloat16",
    )  # fmt: skip
    job = replace(job, model=model, host=_host(rng), modules=True, script=Script(30 * US, 20 * US))
    return _without_loader(job)


def _library(job: Job) -> Job:
    return replace(job, model=replace(job.model, cell="library"))


def _many_layers(seed: int) -> Job:
    return _layers(seed, 0.4, 0.7)


# -- Python between the phases


def _bookkeeping(seed: int) -> Job:
    return _script(_layers(seed, 0.5, 0.9), 0.2, 0.6)


def _hidden(seed: int) -> Job:
    return _script(_layers(seed, 2.5, 4.0), 0.2, 0.5)


def _no_python(job: Job) -> Job:
    return with_script(job, after=20 * US)


def _long(job: Job) -> Recording:
    """Record for three seconds or more, in which py-spy takes some 140 samples."""
    step = max(step_of(job), launching_ns(job)) + job.script.after
    return Recording(steps=int(np.clip(3.3e9 / step, 120, 400)), device_step=True)


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
    Fault(
        "laps", "host_sync", "torch.cuda.synchronize() behind each phase, to time it", _laps,
        lambda job: with_script(job, laps=False), recorded=_long, accepted=("host_bound",), line="lap forward",
    ),
    Fault(
        "norm_items", "parameter_loop", "the norm of each gradient is read by itself", _norms, _total,
        recorded=_long, accepted=("host_bound",), line="norm",
    ),
    Fault(
        "read_hooks", "parameter_loop", "a hook on each gradient reads its norm", _hooks,
        lambda job: with_script(job, hooks=False), recorded=_long, accepted=("host_bound",), line="each gradient",
    ),
    Fault(
        "values_read", "host_sync", "loss and accuracy are read where they come to be", _values,
        lambda job: with_script(job, values="kept"), recorded=_long, accepted=("host_bound",), line="loss value",
    ),
    Fault(
        "optimizer_loop", "unfused_optimizer", "AdamW parameter by parameter, in a model of many small layers",
        _small_optimizer, _fused, recorded=_long, accepted=("host_bound",), line="optimizer",
    ),
    Fault(
        "average_loop", "parameter_loop", "an average of the parameters, one by one", _averages, _together,
        recorded=_long, accepted=("host_bound",), line="average",
    ),
    Fault(
        "loops_optimizer", "unfused_optimizer", "the optimizer's loop among two others", _both_loops, _fused,
        recorded=_long, accepted=("host_bound", "parameter_loop"), line="optimizer",
    ),
    Fault(
        "loops_parameters", "parameter_loop", "the loops of norms and of an average beside the optimizer's",
        _both_loops, lambda job: _total(_together(job)), recorded=_long, accepted=("host_bound", "unfused_optimizer"),
        line="norm",
    ),
    Fault(
        "written_cell", "recurrent_loop", "an LSTM written out, time step by time step", _written, _library,
        recorded=_long, line="forward",
    ),
    Fault(
        "launches_left", "host_bound", "small layers, of which nothing but the launches holds up the device",
        _many_layers, _captured, recorded=_long, line="forward",
    ),
    Fault(
        "bookkeeping", "step_python", "Python behind the optimizer, in a job that its host holds up", _bookkeeping,
        _no_python, recorded=_long, accepted=("host_bound",), line="bookkeeping",
    ),
    Fault(
        "laps_of_a_full_device", "host_sync", "torch.cuda.synchronize() behind phases that keep the device busy",
        _few_laps, lambda job: with_script(job, laps=False), recorded=_long, harmless=True,
    ),
    Fault(
        "hidden_bookkeeping", "step_python", "Python behind the optimizer, while the device has work for longer",
        _hidden, _no_python, recorded=_long, harmless=True,
    ),
    Fault(
        "hidden_optimizer_loop", "unfused_optimizer", "AdamW parameter by parameter, while the device has work",
        lambda seed: replace(_large(seed), optimizer=Optimizer(kind="single")), _fused, recorded=_long, harmless=True,
    ),
    Fault(
        "hidden_average_loop", "parameter_loop", "an average of the parameters, one by one, while the device has work",
        lambda seed: _large(seed, ema="loop"), _together, recorded=_long, harmless=True,
    ),
    Fault(
        "wide_average_loop", "parameter_loop", "an average of large parameters: the bytes take as long in one go",
        _wide, _together, recorded=_long, harmless=True,
    ),
)  # fmt: skip
