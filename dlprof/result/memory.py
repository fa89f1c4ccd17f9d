"""What a rank's memory is made of, which modules hold it, and what changes would make of it: structs of the result."""

from __future__ import annotations

from typing import Literal

import msgspec


class MemoryPeak(msgspec.Struct, frozen=True):
    """What tensors held on one rank's device when they held most, of those moments that a memory snapshot covers.

    `site`: the line whose memory that was more than any other's; `whole`: the snapshot has the events before it.
    """

    rank: int
    device: int
    bytes: float
    reserved_bytes: float
    site: str = ""
    site_bytes: float = 0.0
    whole: bool = True


class MemoryPart(msgspec.Struct, frozen=True):
    """One part of what a device's memory holds when it is fullest.

    `known`: how: counted (tensor by tensor), allocator, driver, process (by their own counters), or difference (of what
    these say).
    """

    part: str
    bytes: float
    known: str


class DeviceMemory(msgspec.Struct, frozen=True):
    """What one rank holds on one device when it is fullest; `total_bytes`: that there are, None: not known.

    `moment`: when that is: backward (a backward pass begins), gradients (the last one has ended).
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
    """What modules that are built alike hold together, with the modules inside them; `module`: their folded path."""

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
    """What one change of the script would make of the peak, and of the mean steady step for as many samples as now.

    `change`: batch (`value`: times the present one), autocast, 16_bits, checkpoint (the modules), fused_attention,
    shard (ZeRO's stage / the ranks; 3: FSDP), 8_bit, offload, microbatches, schedule. `times`: how many times as large
    a batch then fits. `then_ns` None: not known, `why`; `bound`: it is at most, or at least, that.
    """

    change: str
    value: str
    then_bytes: float
    times: float | None = None
    then_ns: float | None = None
    bound: Literal["", "most", "least"] = ""
    why: str = ""


class Footprint(msgspec.Struct, frozen=True):
    """What memory is made of: each rank's devices, and of the rank that holds most its modules, and the changes."""

    devices: tuple[DeviceMemory, ...]  # MOST_RANKS at most, the fullest first
    rank: int
    modules: tuple[ModuleMemory, ...] = ()  # the largest first
    changes: tuple[MemoryChange, ...] = ()
    now_ns: float | None = None  # the mean steady step
