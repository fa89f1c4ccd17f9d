"""What a rank did at each moment of its traced steps: exclusive parts, by what claims time first."""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof import schema
from dlprof.analysis import intervals as iv
from dlprof.analysis.engine import RANK, Frame, Maybe, RankFacts, maybe, needs, within_rank
from dlprof.analysis.pipeline.chunks import has_pipeline, outside_chunks
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.device import DeviceSets, Idle, device_sets, exchanges_on_host, has_device, idle
from dlprof.analysis.timeline.host import is_on_device, on_training_thread
from dlprof.analysis.timeline.stalls import KINDS
from dlprof.analysis.timeline.steady import device_type
from dlprof.analysis.timeline.steps import PHASES, Timing, timing
from dlprof.errors import NotMeasured

BUBBLE = "pipeline_bubble"

# What the engine itself takes between two operators is tens of µs at most; waiting for a collective takes longer.
_LEAST_WAIT_NS = 100_000

# Collectives between two stages of a pipeline.
_POINT_TO_POINT = ("send", "recv", "send_recv")

_EVERYTHING = np.array([[np.iinfo(np.int64).min, np.iinfo(np.int64).max]], dtype=np.int64)

RANGES = ("Optimizer.step#", "dlprof::optimizer")

_OF_CLOSURES = ("dlprof::forward", "dlprof::backward", host.CLOSURE)


@within_rank
def in_optimizer(on_training_thread: Frame = needs(on_training_thread)) -> iv.Intervals:
    """Return when the training thread was in its optimizer's step, as far as the trace marks it.

    A closure that the step calls, as Lightning's does, computes the loss and the gradients: that is none of it.
    """
    stepping = host.cover(on_training_thread, host.is_named(on_training_thread, *RANGES))
    return iv.subtract(stepping, host.cover(on_training_thread, host.is_named(on_training_thread, *_OF_CLOSURES)))


@within_rank
def stalled(stalls: Maybe[Frame] = maybe(schema.STALLS)) -> dict[str, iv.Intervals]:
    """Return when each of KINDS held up the training thread; empty sets if not recorded."""
    if not stalls:
        return dict.fromkeys(KINDS, iv.EMPTY)
    one = stalls.get()
    one = one[one["count"] == 1]  # a row that stands for many has no place in time
    return {kind: host.cover(one, host.is_kind(one, kind)) for kind in KINDS}


@within_rank
def pipeline_bubble(
    has_pipeline: bool = needs(has_pipeline),
    spans: Maybe[Frame] = maybe(schema.SPANS),
    is_on_device: Maybe[NDArray[np.bool_]] = maybe(is_on_device),
    exchanges_on_host: bool = needs(exchanges_on_host),
    outside_chunks: Maybe[iv.Intervals] = maybe(outside_chunks),
) -> iv.Intervals:
    """Return the time in which a stage may have nothing to work on; what is computed meanwhile claims it first.

    On a device that is where it only sends to and receives from the neighbours; else what schedule.step() spends
    outside its chunks and outside collectives of other kinds. Empty where no pipeline is known.
    """
    if not has_pipeline:
        return iv.EMPTY
    events = spans.get()
    exchanges = host.is_kind(events, "communication") & (is_on_device.get() != exchanges_on_host)
    between = host.is_one_of(events["collective"], *_POINT_TO_POINT)
    waits = outside_chunks.get() if exchanges_on_host else host.cover(events, exchanges & between)
    return iv.subtract(waits, host.cover(events, exchanges & ~between))


@within_rank
def communication(
    exchanges_on_host: bool = needs(exchanges_on_host),
    device_sets: Maybe[DeviceSets] = maybe(device_sets),
    spans: Maybe[Frame] = maybe(schema.SPANS),
) -> iv.Intervals:
    """Return the time in which a collective is in flight, on the host or on the device."""
    if exchanges_on_host:
        return host.cover(spans.get(), host.is_kind(spans.get(), "communication"))
    return device_sets.get().communication


@within_rank
def cpu_computation(
    on_training_thread: Frame = needs(on_training_thread), communication: iv.Intervals = needs(communication)
) -> iv.Intervals:
    """Return the time in which the training thread runs an operator, or code that torch.compile made.

    Hooks and autograd functions in Python wait for collectives inside what the profiler shows as an operator (FSDP's
    do): where nothing else runs in it while a collective is in flight, that is no computation.
    """
    thread = on_training_thread
    works = host.is_kind(thread, "op") | (host.is_kind(thread, "annotation") & host.is_named(thread, *host.COMPILED))
    # A call that blocks in a collective is an operator to the profiler, and may lie inside one.
    blocks = host.is_kind(thread, "communication") & host.is_named(thread, "c10d", "_c10d")
    frames = works & host.is_frame(thread)
    between = iv.subtract(host.cover(thread, frames), host.cover(thread, works & ~frames))
    waits = iv.intersect(between[between[:, 1] - between[:, 0] >= _LEAST_WAIT_NS], communication)
    others = iv.merge(host.cover(thread, host.is_kind(thread, "fetch") | blocks), waits)
    return iv.subtract(host.cover(thread, works), others)


@within_rank
def claims(
    on_training_thread: Frame = needs(on_training_thread),
    has_device: bool = needs(has_device),
    in_optimizer: iv.Intervals = needs(in_optimizer),
    stalled: dict[str, iv.Intervals] = needs(stalled),
    pipeline_bubble: Maybe[iv.Intervals] = maybe(pipeline_bubble),
    device_sets: Maybe[DeviceSets] = maybe(device_sets),
    idle: Maybe[Idle] = maybe(idle),
    spans: Maybe[Frame] = maybe(schema.SPANS),
    cpu_computation: Maybe[iv.Intervals] = maybe(cpu_computation),
    communication: Maybe[iv.Intervals] = maybe(communication),
    rank: RankFacts = needs(RANK),
) -> list[tuple[str, iv.Intervals]]:
    """List the time that each category claims, first come first served; what nothing claims is "other".

    Raises NotMeasured where the job trains on a device that the trace does not hold.
    """
    fetch = host.cover(on_training_thread, host.is_kind(on_training_thread, "fetch"))
    if has_device:
        sets, why = device_sets.get(), idle.get()
        return [
            ("computation", sets.computation),
            ("communication", iv.subtract(communication.get(), pipeline_bubble.get())),
            ("copy", sets.copy),
            (BUBBLE, pipeline_bubble.get()),
            ("queued_wait", why.queued),
            ("launch_latency", why.latency),
            # The host was late from here on.
            *stalled.items(),
            ("input_wait", fetch),
            ("optimizer_host", in_optimizer),
            ("host", why.late),
        ]
    if other := rank.trace_facts.get("accelerator"):
        raise NotMeasured(f"the job runs on {other}, and of its trace only what the host does is read")
    if _belongs_to_a_device(spans.get(), rank):
        raise NotMeasured(f"the job runs on a GPU, but the trace holds nothing of the GPU's work ({_why_none(rank)})")
    if rank.trace_facts.get("operators") is False:
        raise NotMeasured("nsys does not see what a CPU computes (torch.profiler does: `dlprof wrap` without --nsys)")
    return [
        *stalled.items(),
        # The loader's own operators (decoding, collating) are no computation of the model's.
        ("input_wait", fetch),
        ("computation", cpu_computation.get()),
        (BUBBLE, pipeline_bubble.get()),
        ("communication", communication.get()),
        ("optimizer_host", in_optimizer),
        ("host", _EVERYTHING),
    ]


@within_rank
def partition(
    timing: Timing = needs(timing), claims: list[tuple[str, iv.Intervals]] = needs(claims)
) -> dict[str, iv.Intervals]:
    """Return the parts of the steady traced steps: category → time; disjoint, and they cover these steps exactly."""
    left = iv.merge(timing.windows)
    parts: dict[str, iv.Intervals] = {}
    for category, claim in [*claims, ("other", _EVERYTHING)]:
        parts[category] = iv.intersect(left, claim)
        left = iv.subtract(left, claim)
    return parts


def _belongs_to_a_device(spans: pd.DataFrame, rank: RankFacts) -> bool:
    """Return whether the job trains on a device, as far as its record, its backend or its runtime calls show."""
    recorded = device_type(rank)
    if recorded:
        return recorded != "cpu"
    shows = host.is_kind(spans, "runtime") | host.is_named(spans, "nccl:")
    return rank.trace_facts.get("backend") == "nccl" or bool(shows.any())


def _why_none(rank: RankFacts) -> str:
    """Say why a trace holds no GPU work: the profiler's error, or that the profiler was not set to record it."""
    errors = (rank.facts.get("window") or {}).get("errors") or rank.trace_facts.get("errors")
    if errors:
        return f"the profiler said: {errors[0]}"
    return "`dlprof doctor` tells what is in the way" if rank.facts else "record ProfilerActivity.CUDA"


@within_rank
def exposed_communication(partition: dict[str, iv.Intervals] = needs(partition)) -> iv.Intervals:
    """Return the time of the steady traced steps in which a collective is in flight and nothing is computed."""
    return partition.get("communication", iv.EMPTY)


@within_rank
def host_phases(
    on_training_thread: Frame = needs(on_training_thread), timing: Timing = needs(timing)
) -> dict[str, iv.Intervals]:
    """Return the training thread's phases within the steady traced steps, on the host's clock.

    Disjoint; "rest" is what remains.
    """
    thread, left, found = on_training_thread, iv.merge(timing.host_windows), {}
    for phase in PHASES:
        of = host.is_kind(thread, "fetch") if phase == "fetch" else host.is_named(thread, f"dlprof::{phase}")
        during = host.cover(thread, of)
        found[phase] = iv.intersect(left, during)
        left = iv.subtract(left, during)
    return {**found, "rest": left}
