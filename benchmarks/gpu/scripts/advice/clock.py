"""What every script of this folder begins and ends with: its options, and its mean step, by its own clock."""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
import time
from pathlib import Path

import torch

# A script that hangs says where, and ends.
_MOST_S = 75


def options(steps: int) -> argparse.Namespace:
    """Read the command line; the libraries are imported by then.

    Where START is set, the script says in START.ready that it has come so far and has woken its GPU, and goes on once
    START.go is there: several scripts import at once, and train one after the other.
    """
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--fixed", action="store_true", help="with the change that the script is about")
    parser.add_argument("--tiny", action="store_true", help="so small that a CPU trains it in seconds")
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--device", choices=["cpu", "cuda"])
    args = parser.parse_args()
    if start := os.environ.get("START"):
        if torch.cuda.is_available() and args.device != "cpu":
            torch.ones(8, 8, device="cuda").mm(torch.ones(8, 8, device="cuda"))
        Path(f"{start}.ready").touch()
        while not Path(f"{start}.go").exists():
            time.sleep(0.02)
    faulthandler.dump_traceback_later(_MOST_S, exit=True)
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    return args


class Clock:
    """Times the steps from the `warm`-th to the last. It waits for the GPU at these two and at no other."""

    def __init__(self, args: argparse.Namespace, warm: int = 20) -> None:
        self.steps, self.warm = args.steps, min(warm, args.steps // 2)
        self._on_gpu = args.device == "cuda"
        self._done, self._began = 0, 0.0

    def step(self) -> bool:
        """Count a step; return whether it was not the last one. At the last one, print the mean step."""
        self._done += 1
        if self._done in (self.warm, self.steps):
            if self._on_gpu:
                torch.cuda.synchronize()
            if self._done == self.warm:
                self._began = time.perf_counter()
            else:
                took = time.perf_counter() - self._began
                print(f"STEP_MS {took / (self.steps - self.warm) * 1e3:.3f}")
        return self._done < self.steps
