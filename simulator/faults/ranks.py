"""Faults between ranks: one that the others wait for, exchanges that nothing hides, pipelines with bubbles."""

from __future__ import annotations

from dataclasses import replace

from simulator.faults.fault import Fault, base, draws, small, step_of
from simulator.hardware import DEVICES
from simulator.job import Batch, Gradients, Job, Pipeline, Recording

# -- one late rank


def _sleep(seed: int) -> Job:
    job, rng = base(seed, ranks=4), draws(seed)
    return replace(job, sleeps=((int(rng.integers(0, 4)), round(rng.uniform(1.1, 1.5) * step_of(job))),))


def _more_work(seed: int) -> Job:
    job, rng = base(seed, ranks=4), draws(seed)
    return replace(job, work=((int(rng.integers(0, 4)), float(rng.uniform(1.2, 1.6))),))


def _slower(seed: int) -> Job:
    job, rng = base(seed, ranks=4), draws(seed)
    return replace(job, speeds=((int(rng.integers(0, 4)), float(rng.uniform(1.15, 1.5))),))


# -- exchanges


def _gradients(job: Job, **changed: object) -> Job:
    return replace(job, gradients=replace(job.gradients, **changed))  # type: ignore[arg-type]


def _bus_for(job: Job, share: float) -> float:
    """Return the bandwidth at which exchanging all gradients takes such a share of computing."""
    size = 4 * job.model.parameters * 2 * (job.ranks - 1) / job.ranks
    return size / (share * step_of(job) / 1e9)


def _networked(seed: int) -> Job:
    """Return a job on four hosts with a GPU each: what joins them is as slow as networks are."""
    return replace(base(seed, ranks=4), hosts=4)


def _after_backward(seed: int) -> Job:
    job, rng = _networked(seed), draws(seed)
    job = replace(job, model=replace(job.model, vocabulary=8_000))  # the embedding's gradient comes last of all
    return replace(
        job, gradients=Gradients("after", flat=True, slowdown=0.03, bus=_bus_for(job, rng.uniform(0.2, 0.5)))
    )


def _overlapped(job: Job) -> Job:
    return _gradients(job, how="ddp")


def _every_batch(seed: int) -> Job:
    job, rng = _networked(seed), draws(seed)
    return replace(
        job, gradients=Gradients("ddp", accumulate=4, seldom=False, bus=_bus_for(job, rng.uniform(0.9, 1.3)))
    )


def _seldom(job: Job) -> Job:
    return _gradients(job, seldom=True)


def _bytes(seed: int) -> Job:
    job, rng = _networked(seed), draws(seed)
    return replace(job, gradients=Gradients("ddp", bus=_bus_for(job, rng.uniform(1.0, 1.4))))


def _halves(job: Job) -> Job:
    return _gradients(job, dtype="float16")


def _one_by_one(seed: int) -> Job:
    job, rng = base(seed, ranks=4, low=8e6, high=15e6), draws(seed)
    model = replace(job.model, hidden=512, heads=8, blocks=8, vocabulary=8_000)
    start = round(rng.uniform(40_000, 80_000))
    return replace(job, model=model, gradients=Gradients("after", start=start, bus=250e9))


def _flat(job: Job) -> Job:
    return _gradients(job, flat=True)


def _tiny_buckets(seed: int) -> Job:
    job = _one_by_one(seed)
    return _gradients(job, how="ddp", bucket=1_024, start=round(4.0 * job.gradients.start))


def _large_buckets(job: Job) -> Job:
    return _gradients(job, bucket=25 << 20)


def _slow_link(seed: int) -> Job:
    job, rng = base(seed, ranks=4), draws(seed)
    return replace(job, gradients=Gradients("ddp", bucket=50 << 20, bus=_bus_for(job, rng.uniform(1.1, 1.6))))


def _fast_link(job: Job) -> Job:
    return _gradients(job, bus=0.75 * DEVICES[job.device].link)


def _searched(seed: int) -> Job:
    return _gradients(replace(small(seed, 1.0), ranks=2), search=True)


def _not_searched(job: Job) -> Job:
    return _gradients(job, search=False)


def _full_experts(seed: int) -> Job:
    """Return a job of four or eight ranks of which one's experts get up to twice the mean rank's tokens."""
    rng = draws(seed)
    ranks = int(rng.choice((4, 8)))
    job = replace(base(seed, ranks=ranks, low=25e6, high=60e6), experts=True)
    shares = [1.0] * ranks
    shares[int(rng.integers(0, ranks))] = float(rng.uniform(1.6, 2.6))
    return replace(job, routing=tuple(shares), gradients=replace(job.gradients, bus=0.75 * DEVICES[job.device].link))


def _changing_experts(seed: int) -> Job:
    """Return the same, but the fullest rank is another one in each layer and step."""
    job = _full_experts(seed)
    return replace(job, routing=(1.0,) * job.ranks, routing_spread=float(draws(seed).uniform(0.3, 0.5)))


def _even_experts(job: Job) -> Job:
    return replace(job, routing=(1.0,) * job.ranks, routing_spread=0.0)


# -- other kinds of parallelism


def _replicas(seed: int) -> Job:
    job, rng = base(seed), draws(seed)
    job = replace(job, devices=int(rng.choice((2, 4))), gradients=Gradients(bus=float(rng.uniform(20e9, 60e9))))
    return replace(job, model=replace(job.model, tokens=job.model.tokens // job.devices * job.devices))


def _processes(job: Job) -> Job:
    """Return the same batch, shared out over a process for each device."""
    model = replace(job.model, tokens=job.model.tokens // job.devices)
    batch = Batch(job.batch.size // job.devices)
    return replace(job, ranks=job.devices, devices=1, model=model, batch=batch)


def _in_turn(seed: int) -> Job:
    job, rng = base(seed), draws(seed)
    model = replace(job.model, hidden=2_048, blocks=8, vocabulary=2_048, tokens=int(rng.choice((32, 48))) * 1_024)
    return replace(job, devices=2, cut=1, model=model)


def _in_pieces(job: Job) -> Job:
    return replace(job, cut=4 * job.devices)


def _pipeline(seed: int, schedule: str, microbatches: int, split: tuple[int, ...]) -> Job:
    job, rng = base(seed), draws(seed)
    model = replace(
        job.model, hidden=1_024, heads=16, blocks=sum(split), vocabulary=2_048, sequence=512,
        tokens=int(rng.choice((32, 48, 64))) * 1_024,
    )  # fmt: skip
    return replace(job, ranks=len(split), model=model, pipeline=Pipeline(schedule, microbatches, split), loader=None)


def _gpipe(seed: int) -> Job:
    return _pipeline(seed, "GPipe", 4, (2, 2, 2, 2))


def _one_forward(seed: int) -> Job:
    return _pipeline(seed, "1F1B", 4, (2, 2, 2, 2))


def _more_microbatches(job: Job) -> Job:
    assert job.pipeline is not None
    return replace(job, pipeline=replace(job.pipeline, microbatches=4 * job.pipeline.microbatches))


def _uneven(seed: int) -> Job:
    split = [2, 2, 2, 2]
    split[int(draws(seed).integers(0, 4))] = 4
    return _pipeline(seed, "1F1B", 8, tuple(split))


def _even(job: Job) -> Job:
    """Return the same model, cut evenly: as near as whole blocks allow, the rest as parts of blocks."""
    assert job.pipeline is not None
    blocks = sum(job.pipeline.split)
    per = blocks / job.ranks
    model = replace(job.model, tokens=round(job.model.tokens * per / int(per)), blocks=int(per) * job.ranks)
    return replace(job, model=model, pipeline=replace(job.pipeline, split=(int(per),) * job.ranks))


def _sized(_: Job) -> Recording:
    """Record in a form that tells how large collectives are."""
    return Recording(steps=90, form="torch-2.8", device_step=True)


FAULTS = (
    Fault(
        "rank_sleeps",
        "straggler",
        "one of four ranks sleeps in every step",
        _sleep,
        lambda j: replace(j, sleeps=()),
        accepted=("host_bound",),
    ),
    Fault("more_work", "straggler", "one of four ranks has more tokens", _more_work, lambda j: replace(j, work=())),
    Fault(
        "slower_gpu",
        "straggler",
        "all kernels of one of four ranks take longer",
        _slower,
        lambda j: replace(j, speeds=()),
    ),
    Fault(
        "full_experts",
        "expert_imbalance",
        "one rank's experts get up to 2.6 times the others' tokens",
        _full_experts,
        _even_experts,
        recorded=_sized,
        accepted=("exposed_communication",),
    ),
    Fault(
        "changing_experts",
        "expert_imbalance",
        "a router is uneven in each layer and step, now for one rank and then for another",
        _changing_experts,
        _even_experts,
        recorded=_sized,
        accepted=("exposed_communication",),
    ),
    Fault(
        "after_backward",
        "exposed_communication",
        "the script reduces all gradients behind the backward pass",
        _after_backward,
        _overlapped,
    ),
    Fault(
        "sync_every_batch",
        "exposed_communication",
        "gradients that accumulate are exchanged with every batch",
        _every_batch,
        _seldom,
    ),
    Fault("many_bytes", "exposed_communication", "gradients take longer than the backward pass", _bytes, _halves),
    Fault(
        "one_by_one",
        "small_collectives",
        "the script reduces each gradient by itself",
        _one_by_one,
        _flat,
        recorded=_sized,
        accepted=("exposed_communication",),
    ),
    Fault(
        "tiny_buckets",
        "small_collectives",
        "DDP's buckets hold one tensor each, over a link that is slow to start",
        _tiny_buckets,
        _large_buckets,
        recorded=_sized,
        accepted=("exposed_communication",),
    ),
    Fault(
        "slow_link",
        "slow_link",
        "NVLink is not used",
        _slow_link,
        _fast_link,
        recorded=_sized,
        accepted=("exposed_communication",),
    ),
    Fault(
        "searches",
        "unused_parameters",
        "DDP looks for unused parameters, in a job that its host holds up",
        _searched,
        _not_searched,
        accepted=("host_bound", "straggler"),  # the hosts differ, and then one of them is late
    ),
    Fault("replicas", "data_parallel", "one process drives two or four GPUs", _replicas, _processes),
    Fault(
        "layers_apart",
        "devices_in_turn",
        "a model's halves lie on two devices, in turn",
        _in_turn,
        _in_pieces,
        accepted=("exposed_copy",),  # what is handed over from one to the other
    ),
    Fault("gpipe", "pipeline_bubble", "GPipe, four stages, four micro-batches", _gpipe, _more_microbatches, steps=20),
    Fault(
        "one_forward",
        "pipeline_bubble",
        "1F1B, four stages, four micro-batches",
        _one_forward,
        _more_microbatches,
        steps=20,
    ),
    Fault(
        "uneven_stages",
        "stage_imbalance",
        "one stage has twice the others' blocks",
        _uneven,
        _even,
        accepted=("pipeline_bubble",),
        steps=20,
    ),
)
