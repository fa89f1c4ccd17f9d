"""Every picture of the report that belongs to no rule, in the order of the page: a file a subject."""

from dlprof.analysis.panel import Picture
from dlprof.analysis.panels import (
    communication,
    compute,
    experts,
    host,
    machine,
    memory,
    pipeline,
    precision,
    source,
    step,
)
from dlprof.analysis.panels import input as input_

PICTURES: tuple[Picture, ...] = (
    step.STEPS_PICTURE,
    step.WHOLE_JOB_PICTURE,
    precision.PICTURE,
    step.TIMELINE_PICTURE,
    host.SYNCS_PICTURE,
    host.QUEUE_PICTURE,
    communication.COLLECTIVES_PICTURE,
    experts.PICTURE,
    communication.FLIGHT_RECORDER_PICTURE,
    pipeline.PICTURE,
    compute.ARITHMETIC_PICTURE,
    compute.KERNELS_PICTURE,
    memory.MEMORY_PICTURE,
    memory.MEMORY_SNAPSHOT_PICTURE,
    source.PICTURE,
    host.STACKS_PICTURE,
    host.PROFILES_PICTURE,
    input_.PICTURE,
    machine.GPU_LOGS_PICTURE,
    machine.SAMPLES_PICTURE,
    host.LINES_PICTURE,
    machine.FILES_PICTURE,
)
