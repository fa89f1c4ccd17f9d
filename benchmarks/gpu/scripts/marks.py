"""When things happen on the device: CUDA events on a GPU, and the host's clock on a CPU."""

from __future__ import annotations

import time
from typing import Any

import torch


class Marks:
    """Makes marks on the device's own timeline, and tells the time between them."""

    def __init__(self, device: str) -> None:
        self.on_gpu = device.startswith("cuda")

    def mark(self) -> Any:
        """Mark this place in the current stream; it is reached when all work before it is done."""
        if not self.on_gpu:
            return time.perf_counter()
        cuda: Any = torch.cuda
        event = cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self, mark: Any) -> None:
        """Wait on the host until the device has reached a mark."""
        if self.on_gpu:
            mark.synchronize()

    def between_ms(self, first: Any, second: Any) -> float:
        """Return the time between two marks that the device has reached."""
        return float(first.elapsed_time(second)) if self.on_gpu else 1e3 * float(second - first)

    def finish(self) -> None:
        """Wait until the device has done everything."""
        if self.on_gpu:
            torch.cuda.synchronize()


def spin(seconds: float) -> int:
    """Run Python for so long, as a script's own bookkeeping does; return how often it went round."""
    ends, rounds = time.perf_counter() + seconds, 0
    while time.perf_counter() < ends:
        rounds += 1
    return rounds
