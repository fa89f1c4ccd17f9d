"""What a fault is: a job that one thing makes slow, and the same job without it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from zlib import crc32

import numpy as np

from simulator.hardware import DEVICES, US
from simulator.healthy import CUDA_FORMS, EVENT_NS, compute_ns, draw_model
from simulator.job import Batch, Gradients, Job, Recording, Script
from simulator.loading import Loader
from simulator.model import Shop


@dataclass(frozen=True)
class Fault:
    """One fault, and the change that the rule's advice names; nothing else differs between the two jobs.

    `scope`: what a fix shortens: the steady step, or the whole loop, spread over its training steps. `advised`: instead
    of `fix`, what makes the job with the batch that the finding names, so many times as large; its step counts for each
    sample. One that is `harmless` has what the rule looks for, but it costs nothing: the fixed job is no faster.
    """

    name: str
    rule: str
    what: str
    make: Callable[[int], Job]
    fix: Callable[[Job], Job] = lambda job: job
    scope: str = "step"
    recorded: Callable[[Job], Recording] | None = None
    steps: int = 60  # of the simulations that tell the truth, without those that warm up
    advised: Callable[[Job, float], Job] | None = None
    accepted: tuple[str, ...] = ()  # other rules that rightly find the same
    warm: int = 20  # steps until the job is in its steady state
    line: str = ""  # of the script that it stands in, by its name in simulator/script.py
    harmless: bool = False

    def record(self, job: Job) -> Recording:
        """Return how the job is recorded, with what the profiler costs the host for each event."""
        how = recording(job, self.name) if self.recorded is None else self.recorded(job)
        rng = np.random.default_rng((job.seed, crc32(self.name.encode()), 1))
        return replace(how, event=int(rng.uniform(*EVENT_NS)))


def draws(seed: int) -> np.random.Generator:
    """Return the draws of a faulty job."""
    return np.random.default_rng((seed, 99))


def base(seed: int, ranks: int = 1, device: str = "", low: float = 25e6, high: float = 120e6) -> Job:
    """Return a tuned job to plant a fault into: asynchronous, with a loader that keeps up."""
    rng = np.random.default_rng((seed, 98))
    chosen = str(rng.choice(("A100", "H100")))
    device = device or chosen
    model = draw_model(rng, device, low, high)
    step = compute_ns(model, device)
    workers = int(rng.integers(3, 9))
    fetch = rng.uniform(0.1, 0.5) * workers * step
    return Job(
        f"seed{seed}", seed, device, ranks,
        model=model,
        loader=Loader(workers, 2, round(fetch), round(0.8 * fetch), round(0.05 * fetch)),
        batch=Batch(round(0.002 * step / 1e9 * 24e9)),
        script=Script(round(rng.uniform(100, 400) * US), round(rng.uniform(50, 300) * US)),
        gradients=Gradients(bus=float(rng.uniform(150e9, 250e9))),
    )  # fmt: skip


def small(seed: int, ratio: float) -> Job:
    """Return a job of small kernels: its device takes `ratio` times as long as its host takes to launch them."""
    job = base(seed)
    model = replace(job.model, blocks=6, hidden=256, heads=4, sequence=256, vocabulary=2_048, tokens=512)
    launching = 2 * len(Shop(model, DEVICES[job.device]).block(512)) * model.blocks * 16 * US
    while compute_ns(model, job.device) < ratio * launching:
        model = replace(model, tokens=model.tokens + 256)
    loader = Loader(4, 2, round(0.8 * launching), round(0.4 * launching), 50 * US, receive=60 * US)
    return replace(job, model=model, loader=loader, script=Script(30 * US, 20 * US), batch=Batch(100_000))


def launching_ns(job: Job) -> float:
    """Return what the host takes to launch the forward and the backward pass, without a profiler and jitter."""
    model, host = job.model, job.host
    shop, tokens = Shop(model, DEVICES[job.device]), job.model.tokens
    functions = shop.embedding(tokens) + shop.block(tokens) * model.blocks + shop.recurrent(tokens) + shop.head(tokens)
    forward = sum(host.before_op + len(f.kernels) * host.launch + host.after_op for f in functions)
    each = host.launch + (host.backward_op + host.after_op) // 2
    return forward + sum(host.backward_op + 1_100 + len(f.backward) * each for f in functions if f.node)


def step_of(job: Job) -> float:
    """Return what a step's kernels take, ns."""
    return compute_ns(job.model, job.device)


def recording(job: Job, fault: str) -> Recording:
    """Draw how a job with a fault of that name is recorded, on CUDA."""
    rng = np.random.default_rng((job.seed, crc32(fault.encode())))
    return Recording(
        steps=int(rng.integers(60, 121)),
        active=int(rng.integers(3, 9)),
        form=str(rng.choice(CUDA_FORMS)),
        device_step=bool(rng.random() < 0.5),
        clock_offsets=tuple(int(x) for x in rng.normal(0, 3e6, job.hosts)) if job.hosts > 1 else (),
    )


def with_script(job: Job, **changed: object) -> Job:
    """Return a job whose script has other habits."""
    return replace(job, script=replace(job.script, **changed))  # type: ignore[arg-type]


def with_batch(job: Job, **changed: object) -> Job:
    """Return a job whose batches come in another way."""
    return replace(job, batch=replace(job.batch, **changed))  # type: ignore[arg-type]


def with_pauses(job: Job, **changed: object) -> Job:
    """Return a job with other pauses."""
    return replace(job, pauses=replace(job.pauses, **changed))  # type: ignore[arg-type]


def with_loader(job: Job, **changed: object) -> Job:
    """Return a job with another loader."""
    assert job.loader is not None
    return replace(job, loader=replace(job.loader, **changed))  # type: ignore[arg-type]
