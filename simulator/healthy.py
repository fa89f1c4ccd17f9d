"""Random healthy jobs: no change of one thing would make them 5 % faster.

A job is drawn and simulated; it counts as healthy where every rank's device computes for at least 95 % of the steady
step, and its kernels are what a tuned job runs: products in 16 bits and aligned, fused attention, a fused optimizer.
Then nothing that is not computation can save 5 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from simulator.habits import ADAMW, FUSED
from simulator.hardware import DEVICES, MS, US, Host
from simulator.job import Batch, Gradients, Job, Optimizer, Pauses, Recording, Script
from simulator.loading import Loader
from simulator.model import Model, Shop
from simulator.play import Truth, true
from simulator.program import Function

LEAST_COMPUTATION = 0.95

CUDA_FORMS = ("torch-2.13", "torch-2.13-syncs", "torch-2.8", "torch-2.4", "torch-2.0")
POOR_FORMS = ("no-correlations", "device-only")  # of which little can be said

# What the profiler costs the host for each event: as measured, with some room (recorder.Window).
EVENT_NS = (500, 2_500)

# Draws that are tried before a seed is given up; about two in three are healthy.
_MOST_TRIES = 50

# What a fused optimizer leaves of a healthy step: so much at least.
_LEFT_FUSED = 0.96


def compute_ns(model: Model, device: str) -> float:
    """Return what a step's kernels take of a device, without jitter."""
    shop = Shop(model, DEVICES[device])
    block = _sum(shop.block(model.tokens))
    rest = _sum([*shop.embedding(model.tokens), *shop.recurrent(model.tokens), *shop.head(model.tokens)])
    return block * model.blocks + rest


def _sum(functions: Sequence[Function]) -> float:
    return sum(sum(k.ns for k in f.kernels) + sum(k.ns for _, k in f.backward) for f in functions)


def draw_model(rng: np.random.Generator, device: str, low: float = 15e6, high: float = 150e6) -> Model:
    """Draw a model whose step takes about `low` to `high` ns of a device."""
    wanted = np.exp(rng.uniform(np.log(low), np.log(high)))
    model = Model(
        blocks=int(rng.integers(3, 9)),
        hidden=int(rng.choice((512, 768, 1_024, 1_536, 2_048))),
        sequence=int(rng.choice((256, 512, 1_024))),
        vocabulary=int(rng.choice((8_000, 16_000, 32_000))),
        products="float16" if device == "V100" or rng.random() < 0.2 else "bfloat16",
    )
    model = replace(model, heads=model.hidden // 64)
    tokens = model.tokens * wanted / compute_ns(model, device)
    return replace(model, tokens=max(round(tokens / model.sequence), 1) * model.sequence)


def draw(seed: int, ranks: int | None = None) -> Job:
    """Draw a job that is mostly healthy."""
    rng = np.random.default_rng((seed, 77))
    device = str(rng.choice(("A100", "H100", "V100", "MI300X"), p=(0.4, 0.35, 0.15, 0.1)))
    count = int(rng.choice((1, 2, 4, 8), p=(0.4, 0.25, 0.25, 0.1))) if ranks is None else ranks
    model = draw_model(rng, device, low=25e6 if count > 1 else 15e6)
    model = replace(model, pieces=int(rng.choice((1, 1, 1, 4))))
    step = compute_ns(model, device)
    workers = int(rng.integers(1, 9))
    # Workers keep up: each has n steps for a batch, and takes up to 70 % of that.
    fetch = rng.uniform(0.1, 0.7) * workers * step
    if rng.random() < 0.15:
        workers, fetch = 0, rng.uniform(0.05, 0.4) * step  # the training thread fetches while the device computes
    loader = Loader(
        workers, int(rng.integers(2, 5)), round(fetch), round(fetch * rng.uniform(0.2, 1.0)), round(0.05 * fetch)
    )
    reads = bool(rng.random() < 0.4) and workers > 0
    small = rng.uniform(0.0, 0.01) * step  # of Python behind a sync, which the device waits for
    script = Script(
        before=round(rng.uniform(0.2, 0.6) * small) if reads else round(rng.uniform(0.1, 2.0) * MS),
        after=round(rng.uniform(0.2, 0.6) * small) if reads else round(rng.uniform(0.05, 1.0) * MS),
        items=int(reads),
        every=int(rng.choice((1, 1, 4, 10))),
        item_memory=str(rng.choice(("pinned", "pageable"))),
        waits=bool(rng.random() < 0.3) and reads,
        readers=(0,) if rng.random() < 0.3 else (),
        captured=str(rng.choice(("all", "model"))) if count == 1 and rng.random() < 0.1 else "",
        skips=int(rng.integers(5, 20)) if rng.random() < 0.05 else 0,
    )
    host = Host(
        before_op=round(rng.uniform(2, 6) * US), after_op=round(rng.uniform(0.8, 2.0) * US),
        jitter=float(rng.uniform(0.05, 0.3)), step_jitter=float(rng.uniform(0.01, 0.08)),
    )  # fmt: skip
    tensor = 2 if count >= 4 and rng.random() < 0.2 else 1
    hidden_pauses = rng.uniform(0.05, 0.5) * step if not reads and rng.random() < 0.3 else 0.0
    return Job(
        f"healthy{seed}", seed, device, count,
        hosts=2 if count >= 4 and rng.random() < 0.4 else 1,
        host=host, model=model, loader=loader,
        host_speeds=tuple((r, float(rng.uniform(0.8, 1.25))) for r in range(count)) if count > 1 else (),
        batch=Batch(
            int(rng.uniform(0.0005, 0.004) * step / 1e9 * DEVICES[device].host_link), ahead=bool(rng.random() < 0.3)
        ),
        tensor=tensor, experts=tensor == 1 and count > 1 and bool(rng.random() < 0.1),
        pauses=Pauses(garbage=round(hidden_pauses), garbage_every=int(rng.integers(2, 6))),
        script=script, optimizer=_optimizer(rng, model, device, step), gradients=_gradients(rng, device),
    )  # fmt: skip


def _optimizer(rng: np.random.Generator, model: Model, device: str, step: float) -> Optimizer:
    """Draw an optimizer: any kind where a fused one would save little."""
    passes = sum(moved for _, moved in ADAMW)
    rate = DEVICES[device].memory_efficiency * DEVICES[device].bandwidth
    gain = (passes - FUSED) * 4 * model.parameters / rate * 1e9
    cheap = gain < 0.025 * step
    return Optimizer(kind=str(rng.choice(("fused", "foreach", "single"))) if cheap else "fused")


def _gradients(rng: np.random.Generator, device: str) -> Gradients:
    how = "fsdp" if rng.random() < 0.25 else "ddp"
    buffers = bool(rng.random() < 0.2)
    bus = float(rng.uniform(0.5, 0.85)) * DEVICES[device].link
    return Gradients(
        how,
        bucket=int(rng.choice((10, 25, 50))) << 20,
        bus=bus,
        buffers=buffers,
        slowdown=float(rng.choice((0.0, 0.04, 0.08))),
    )


def recording_of(job: Job) -> Recording:
    """Draw how a job is recorded."""
    rng = np.random.default_rng((job.seed, 78))
    if job.device == "MI300X":
        form = "rocm-6"
    elif job.device == "V100":
        form = str(rng.choice(("torch-2.4", "torch-2.0")))
    else:
        form = str(rng.choice(CUDA_FORMS if rng.random() < 0.92 else POOR_FORMS))
    return Recording(
        steps=int(rng.integers(60, 201)),
        active=int(rng.integers(3, 9)),
        form=form,
        light=bool(rng.random() < 0.8),
        device_step=bool(rng.random() < 0.5),
        clock_offsets=tuple(int(x) for x in rng.normal(0, 3 * MS, job.hosts)) if job.hosts > 1 else (),
        clock_drift=tuple(float(x) for x in rng.normal(0, 2e-6, job.hosts)) if job.hosts > 1 else (),
        event=int(rng.uniform(*EVENT_NS)),
    )


def is_healthy(job: Job, result: Truth) -> bool:
    """Return whether nothing but computing could make a job 5 % faster, a fused optimizer neither."""
    if any(rank.parts["computation"] < LEAST_COMPUTATION * result.period_ns for rank in result.ranks):
        return False
    if job.optimizer.kind == "fused":
        return True
    fused = true(replace(job, optimizer=replace(job.optimizer, kind="fused")))
    return fused.period_ns >= _LEFT_FUSED * result.period_ns


def _with_habits(job: Job) -> Job:
    """Return the job, in half of the cases with named modules and what a script does between its phases, done well."""
    rng = np.random.default_rng((job.seed, 80))
    if job.script.captured or rng.random() < 0.5:
        return job
    script = replace(
        job.script,
        laps=bool(job.script.waits and rng.random() < 0.5),
        values=str(rng.choice(("", "kept"))),
        norms=str(rng.choice(("", "total"))),
        ema=str(rng.choice(("", "foreach", "loop"), p=(0.6, 0.3, 0.1))),
    )
    return replace(job, script=script, modules=True, host=replace(job.host, views=int(rng.integers(0, 5))))


def healthy(seed: int, ranks: int | None = None) -> tuple[Job, Recording, Truth]:
    """Return a healthy job, how it is recorded, and its truth; raises ValueError where none is found."""
    for n in range(_MOST_TRIES):
        job = _with_habits(replace(draw(seed * _MOST_TRIES + n, ranks), name=f"healthy{seed}"))
        result = true(job)
        if is_healthy(job, result):
            return job, recording_of(job), result
    raise ValueError(f"seed {seed} makes no healthy job")
