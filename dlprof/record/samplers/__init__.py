"""The sources of measurements beside the ranks of a host. Each starts once, ticks at its own pace, and stops once."""

from __future__ import annotations

from collections.abc import Callable

from dlprof.record.samplers.gpu import AmdSampler, GpuSampler
from dlprof.record.samplers.host import HostSampler
from dlprof.record.samplers.sampling import Sampler
from dlprof.record.samplers.stacks import StacksSampler

SAMPLERS: tuple[Callable[[], Sampler], ...] = (
    AmdSampler,
    GpuSampler,
    HostSampler,
    StacksSampler,
)
