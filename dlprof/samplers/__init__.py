"""The sources of measurements beside the ranks of a host. Each starts once, ticks at its own pace, and stops once."""

from __future__ import annotations

from collections.abc import Callable

from dlprof.samplers.amd import AmdSampler
from dlprof.samplers.gpu import GpuSampler
from dlprof.samplers.host import HostSampler
from dlprof.samplers.stacks import StacksSampler
from dlprof.sampling import Sampler

SAMPLERS: tuple[Callable[[], Sampler], ...] = (
    AmdSampler,
    GpuSampler,
    HostSampler,
    StacksSampler,
)
