"""Prints a job's mean step from the 20th to the last; it waits for the GPU at these two and at no other."""

import time

import torch


class Clock:
    def __init__(self, steps: int) -> None:
        self.steps, self.warm, self.done, self.began = steps, min(20, steps // 2), 0, 0.0

    def step(self) -> None:
        self.done += 1
        if self.done in (self.warm, self.steps):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            now = time.perf_counter()
            if self.done == self.steps:
                print(f"STEP_MS {(now - self.began) / (self.steps - self.warm) * 1e3:.3f}", flush=True)
            self.began = now
