"""Where the ranks of a job run, and what their hosts' clocks show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from simulator.hardware import DEVICES, Device
from simulator.job import Job, Recording

# Kineto's bases are whole multiples of three months since 1970 (ChromeTraceBaseTime).
BASE_NS = 1_735_632_360_000_000_000
# When simulated time is 0: some weeks later.
EPOCH_NS = BASE_NS + 40 * 86_400 * 1_000_000_000


@dataclass(frozen=True)
class Clock:
    """A host's clock against the true one."""

    offset: int = 0
    drift: float = 0.0

    def at(self, ns: int) -> int:
        """Return the Unix time, in ns, that the host's clock shows at a true time."""
        return EPOCH_NS + self.offset + ns + round(ns * self.drift)


@dataclass(frozen=True)
class Place:
    """Where a rank runs, and what its trace says of the job."""

    rank: int
    world_size: int
    host: str
    pid: int
    device_index: int
    devices: int  # of the host
    device: Device
    clock: Clock
    groups: Mapping[str, tuple[int, ...]]
    base_ns: int = BASE_NS  # that relative times count from


def places(job: Job, recording: Recording, groups: Mapping[str, tuple[int, ...]]) -> list[Place]:
    """Return where each rank runs."""
    made: list[Place] = []
    per_host = max(-(-job.ranks // job.hosts), job.devices)
    for rank in range(job.ranks):
        host = job.host_of(rank)
        index = sum(job.host_of(r) == host for r in range(rank))
        offset = recording.clock_offsets[host] if recording.clock_offsets else 0
        drift = recording.clock_drift[host] if recording.clock_drift else 0.0
        made.append(
            Place(
                rank, job.ranks, f"node-{host + 1}", 4_000 + 1_000 * rank, index, per_host, DEVICES[job.device],
                Clock(offset, drift), groups,
            )
        )  # fmt: skip
    return made
