"""A caching allocator as PyTorch's is for CUDA, and what a training step asks of it.

The rules are those of c10/cuda/CUDACachingAllocator.cpp: sizes are multiples of 512 bytes; up to 1 MiB is cut from
segments of 2 MiB, below 10 MiB from segments of 20 MiB, larger requests have segments of their own in multiples of
2 MiB; the smallest free block that is large enough serves a request; what is left of a block is split off where it is
at least 512 bytes (of the small) or more than 1 MiB (of the large); neighbours that are free are joined; and where the
device has no more, all segments that are free are given back before the request fails.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

ROUND = 512
SMALL, SMALL_SEGMENT = 1 << 20, 2 << 20
MIDDLE, MIDDLE_SEGMENT = 10 << 20, 20 << 20
LARGE_ROUND = 2 << 20


class OutOfMemoryError(Exception):
    """A request that could not be served; with its bytes."""

    def __init__(self, size: int, part: str) -> None:
        super().__init__(f"CUDA out of memory. Tried to allocate {size} bytes.")
        self.size, self.part = size, part


@dataclass
class _Block:
    segment: int
    start: int
    size: int
    small: bool
    part: str = ""  # "": free
    before: _Block | None = None
    after: _Block | None = None


@dataclass
class Allocator:
    """Serves requests, and counts; all in bytes. `total`: that the device leaves PyTorch."""

    total: int
    allocated: int = 0
    reserved: int = 0
    peak_allocated: int = 0
    peak_reserved: int = 0
    retries: int = 0
    device_allocs: int = 0
    device_frees: int = 0
    at_peak: dict[str, int] = field(default_factory=dict)  # part → bytes, when most was allocated
    _parts: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    _free: list[_Block] = field(default_factory=list)
    _segments: int = 0

    def take(self, size: int, part: str) -> _Block:
        """Serve a request; raise OutOfMemoryError where nothing is left."""
        rounded = max(-(-size // ROUND), 1) * ROUND
        small = rounded <= SMALL
        fitting = [b for b in self._free if b.small == small and b.size >= rounded]
        block = (
            min(fitting, key=lambda b: (b.size, b.segment, b.start)) if fitting else self._segment(rounded, small, part)
        )
        self._free.remove(block)
        left = block.size - rounded
        if left >= ROUND if small else left > SMALL:
            rest = _Block(block.segment, block.start + rounded, left, small, before=block, after=block.after)
            if block.after is not None:
                block.after.before = rest
            block.after, block.size = rest, rounded
            self._free.append(rest)
        block.part = part
        self.allocated += block.size
        self._parts[part] += block.size
        if self.allocated > self.peak_allocated:
            self.peak_allocated = self.allocated
            self.at_peak = dict(self._parts)
        return block

    def give(self, block: _Block) -> None:
        """Free a block, and join it with free neighbours."""
        self.allocated -= block.size
        self._parts[block.part] -= block.size
        block.part = ""
        before, after = block.before, block.after
        if after is not None and after in self._free:
            self._free.remove(after)
            block.size, block.after = block.size + after.size, after.after
            if after.after is not None:
                after.after.before = block
        if before is not None and before in self._free:
            before.size, before.after = before.size + block.size, block.after
            if block.after is not None:
                block.after.before = before
        else:
            self._free.append(block)

    def _segment(self, rounded: int, small: bool, part: str) -> _Block:
        """Take a segment from the device, after the cache was emptied where that is needed."""
        size = (
            SMALL_SEGMENT if small else MIDDLE_SEGMENT if rounded < MIDDLE else -(-rounded // LARGE_ROUND) * LARGE_ROUND
        )
        if self.reserved + size > self.total:
            self.retries += 1
            for whole in [b for b in self._free if b.before is None and b.after is None]:
                self._free.remove(whole)
                self.reserved -= whole.size
                self.device_frees += 1
        if self.reserved + size > self.total:
            raise OutOfMemoryError(rounded, part)
        self._segments += 1
        self.device_allocs += 1
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        block = _Block(self._segments, 0, size, small)
        self._free.append(block)
        return block
