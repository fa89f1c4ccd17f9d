"""What every script of this folder begins and ends with: its option, and its mean step, by its own clock."""

from __future__ import annotations

import sys
import time

import torch

FIXED = "--fixed" in sys.argv
torch.manual_seed(0)
torch.set_num_threads(1)  # a worker has the other of two cores, as it has where training is on a GPU
START = time.perf_counter()


class Clock:
    """Times the steps from the `warm`-th to the last; with `warm` 0, all that the script did, its start with it."""

    def __init__(self, steps: int, warm: int = 10) -> None:
        self.steps, self.warm = steps, warm
        self.done, self._began = 0, START

    def step(self) -> bool:
        """Count a step; return whether it was not the last one. At the last one, print the mean step."""
        self.done += 1
        if self.done == self.warm:
            self._began = time.perf_counter()
        if self.done == self.steps:
            print(f"STEP_MS {(time.perf_counter() - self._began) / (self.steps - self.warm) * 1e3:.3f}", flush=True)
        return self.done < self.steps
