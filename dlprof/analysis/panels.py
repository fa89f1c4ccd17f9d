"""Every picture of the report that belongs to no rule, in the order of the page: one file each."""

from dlprof.analysis.communication.panels import collectives, flight_recorder
from dlprof.analysis.compute.panels import arithmetic, kernels
from dlprof.analysis.experts.panels import tokens
from dlprof.analysis.host.panels import lines, profiles, queue, stacks, syncs
from dlprof.analysis.input.panels import workers
from dlprof.analysis.machine.panels import files, gpu_logs, samples
from dlprof.analysis.memory.panels import memory, memory_snapshot
from dlprof.analysis.panel import Picture
from dlprof.analysis.pipeline.panels import pipeline
from dlprof.analysis.precision.panels import loss_scale
from dlprof.analysis.source.panels import time_by_line
from dlprof.analysis.step.panels import steps, timeline, whole_job

PICTURES: tuple[Picture, ...] = (
    steps.PICTURE,
    whole_job.PICTURE,
    loss_scale.PICTURE,
    timeline.PICTURE,
    syncs.PICTURE,
    queue.PICTURE,
    collectives.PICTURE,
    tokens.PICTURE,
    flight_recorder.PICTURE,
    pipeline.PICTURE,
    arithmetic.PICTURE,
    kernels.PICTURE,
    memory.PICTURE,
    memory_snapshot.PICTURE,
    time_by_line.PICTURE,
    stacks.PICTURE,
    profiles.PICTURE,
    workers.PICTURE,
    gpu_logs.PICTURE,
    samples.PICTURE,
    lines.PICTURE,
    files.PICTURE,
)
