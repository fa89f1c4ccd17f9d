"""Every picture of the report that belongs to no rule, in the order of the page."""

from dlprof.analysis.panel import Picture
from dlprof.analysis.panels import communication, compute, host, machine, step

PICTURES: tuple[Picture, ...] = (
    step.STEPS_PICTURE,
    step.WHOLE_JOB_PICTURE,
    compute.LOSS_SCALE_PICTURE,
    step.TIMELINE_PICTURE,
    host.SYNCS_PICTURE,
    host.QUEUE_PICTURE,
    communication.COLLECTIVES_PICTURE,
    communication.EXPERTS_PICTURE,
    communication.FLIGHT_RECORDER_PICTURE,
    communication.PIPELINE_PICTURE,
    compute.ARITHMETIC_PICTURE,
    compute.KERNELS_PICTURE,
    compute.MEMORY_PICTURE,
    compute.MEMORY_SNAPSHOT_PICTURE,
    host.LINE_SHARES_PICTURE,
    host.STACKS_PICTURE,
    host.PROFILES_PICTURE,
    host.WORKERS_PICTURE,
    machine.GPU_LOGS_PICTURE,
    machine.SAMPLES_PICTURE,
    host.LINES_PICTURE,
    machine.FILES_PICTURE,
)
