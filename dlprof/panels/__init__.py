"""Every picture of the report that belongs to no rule, in the order of the page: one file each."""

from dlprof.overview import Picture
from dlprof.panels import (
    arithmetic,
    bubbles,
    collectives,
    kernels,
    lines,
    memory,
    pipeline,
    queue,
    samples,
    stacks,
    steps,
    syncs,
    timeline,
    whole_job,
    workers,
)

PICTURES: tuple[Picture, ...] = (
    steps.PICTURE,
    whole_job.PICTURE,
    timeline.PICTURE,
    syncs.PICTURE,
    queue.PICTURE,
    collectives.PICTURE,
    pipeline.PICTURE,
    bubbles.PICTURE,
    arithmetic.PICTURE,
    kernels.PICTURE,
    memory.PICTURE,
    stacks.PICTURE,
    workers.PICTURE,
    samples.PICTURE,
    lines.PICTURE,
)
