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

    Where START is set, several scripts begin at once and train one after the other: see `_wait`. Where START_WARM is
    set as well, this one's turn comes shortly before its clock begins, else before its first step.
    """
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--fixed", action="store_true", help="with the change that the script is about")
    parser.add_argument("--tiny", action="store_true", help="so small that a CPU trains it in seconds")
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--device", choices=["cpu", "cuda"])
    args = parser.parse_args()
    args.device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if args.device == "cuda":
        torch.ones(8, 8, device="cuda").mm(torch.ones(8, 8, device="cuda"))
    if not os.environ.get("START_WARM"):
        _wait(args.device)
    torch.manual_seed(0)
    return args


def _wait(device: str) -> None:
    """Say in START.ready that this script has come so far, and wait for START.go; what that says ends the script."""
    if start := os.environ.get("START"):
        if device == "cuda":
            torch.cuda.synchronize()
        Path(f"{start}.ready").touch()
        while not Path(f"{start}.go").exists():
            time.sleep(0.02)
        if why := Path(f"{start}.go").read_text():
            sys.exit(why)
    faulthandler.dump_traceback_later(_MOST_S, exit=True)


class Clock:
    """Times the steps from the `warm`-th to the last. It waits for the GPU at these two and at no other."""

    def __init__(self, args: argparse.Namespace, warm: int = 20) -> None:
        self.steps, self.warm = args.steps, min(warm, args.steps // 2)
        self._turn = max(1, self.warm - 8) if os.environ.get("START_WARM") else 0
        self._device = args.device
        self._done, self._began = 0, 0.0

    def step(self) -> bool:
        """Count a step; return whether it was not the last one. At the last one, print the mean step."""
        self._done += 1
        if self._done == self._turn:
            _wait(self._device)
        if self._done in (self.warm, self.steps):
            if self._device == "cuda":
                torch.cuda.synchronize()
            if self._done == self.warm:
                self._began = time.perf_counter()
            else:
                took = time.perf_counter() - self._began
                print(f"STEP_MS {took / (self.steps - self.warm) * 1e3:.3f}", flush=True)
                if start := os.environ.get("START"):
                    Path(f"{start}.done").touch()
        return self._done < self.steps
