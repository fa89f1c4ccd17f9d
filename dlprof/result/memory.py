"""Memory by part and by module, and the predicted peak with changes: structs of the result."""

from __future__ import annotations

from typing import Literal

import msgspec


class MemoryPeak(msgspec.Struct, frozen=True):
    """The peak of allocated memory on one rank's device, within what a memory snapshot covers.

    `site`: the line with most of it; `whole`: the snapshot has the events before the peak.
    """

    rank: int
    device: int
    bytes: float
    reserved_bytes: float
    site: str = ""
    site_bytes: float = 0.0
    whole: bool = True


class MemoryPart(msgspec.Struct, frozen=True):
    """One part of a device's memory at the peak.

    `known`: the source: counted (tensor by tensor), allocator, driver, process (their own counters), or difference
    (between these).
    """

    part: str
    bytes: float
    known: str


class DeviceMemory(msgspec.Struct, frozen=True):
    """One rank's memory on one device at the peak; `total_bytes`: the device's memory, None: not known.

    `moment`: when the peak is: backward (a backward pass begins), gradients (the last one has ended).
    """

    rank: int
    device: str
    parts: tuple[MemoryPart, ...]
    moment: str = ""
    total_bytes: float | None = None

    @property
    def bytes(self) -> float:
        """All of it."""
        return sum(part.bytes for part in self.parts)


class ModuleMemory(msgspec.Struct, frozen=True):
    """The memory of identical modules together, with the modules inside them; `module`: their folded path."""

    module: str
    kind: str
    modules: int  # that fold into this path
    bytes: float
    parameter: float = 0.0
    gradient: float = 0.0
    optimizer: float = 0.0
    activation: float = 0.0
    other: float = 0.0


class MemoryChange(msgspec.Struct, frozen=True):
    """The predicted peak with one change, and the mean steady step for the present number of samples.

    `change`: batch (`value`: times the present one), autocast, 16_bits, checkpoint (the modules), checkpoint_only (one
    of several lists), fused_attention, shard (ZeRO's stage / the ranks; 3: FSDP), 8_bit, offload, microbatches,
    schedule. `times`: the largest batch that then fits ÷ the present one. `least_bytes` and `most_bytes`: of the peak,
    for any size of the allocator's cache; None: not known, or there is no cache. `then_ns` None: not known, `why`;
    `bound`: it is at most, or at least, that.
    """

    change: str
    value: str
    then_bytes: float
    times: float | None = None
    then_ns: float | None = None
    bound: Literal["", "most", "least"] = ""
    why: str = ""
    least_bytes: float | None = None
    most_bytes: float | None = None


class Footprint(msgspec.Struct, frozen=True):
    """Memory of each rank's devices, and of the rank with the highest peak its modules and predicted changes."""

    devices: tuple[DeviceMemory, ...]  # at most MOST_RANKS, the highest peaks first
    rank: int
    modules: tuple[ModuleMemory, ...] = ()  # the largest first
    changes: tuple[MemoryChange, ...] = ()
    now_ns: float | None = None  # the mean steady step
