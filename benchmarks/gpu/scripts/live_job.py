"""Train a small network at a steady step until a file is there, for commands that look at a job while it runs.

A step gives the device 24 ms of work, reads its loss behind that, and sleeps for 6 ms. With --stuck the step of that
number gives the device many seconds of work, so that the job stands still where it reads its loss. Every so many steps
the job prints, as JSON, what it has measured itself: its mean step, the share of it that waits, its loss.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

DEVICE_S, HOST_S = 0.024, 0.006  # of a step
EVERY = 20  # steps, after which the job prints

# torch.cuda._sleep takes no more clocks than this at once.
MOST_CLOCKS = 1_000_000_000


def sleeper(device: str) -> Callable[[float], float]:
    """Return what gives the device so many seconds of work; it returns how long the host must stand in for it."""
    if device == "cpu":
        return lambda seconds: seconds
    cuda: Any = torch.cuda
    # The clock of a device that was idle is slow at first.
    for _ in range(5):
        began, ended = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        began.record()
        cuda._sleep(100_000_000)
        ended.record()
        cuda.synchronize()
    rate = 100_000_000 / (began.elapsed_time(ended) / 1e3)

    def sleep(seconds: float) -> float:
        clocks = int(rate * seconds)
        while clocks > 0:
            cuda._sleep(min(clocks, MOST_CLOCKS))
            clocks -= MOST_CLOCKS
        return 0.0

    return sleep


def main() -> None:
    """Train until told to stop."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--begin", type=Path, help="train when this file is there")
    parser.add_argument("--stop", type=Path, help="end when this file is there")
    parser.add_argument("--seconds", type=float, default=120.0, help="end after so long in any case")
    parser.add_argument("--stuck", type=int, default=0, metavar="STEP", help="the step that stands still; 0: none")
    parser.add_argument("--stuck-s", type=float, default=30.0, help="for so long")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)).to(args.device)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    give = sleeper(args.device)
    rest: Any = time.sleep  # called in the line that waits: on a CPU it stands in for the device
    loader = DataLoader(TensorDataset(torch.randn(16_384, 256)), 16)
    print(json.dumps({"pid": os.getpid(), "step": 0}), flush=True)
    ends = time.monotonic() + args.seconds
    while args.begin and not args.begin.exists() and time.monotonic() < ends:
        time.sleep(0.1)
    waited, since = 0.0, time.perf_counter()
    for step, (x,) in enumerate(itertools.chain.from_iterable(itertools.repeat(loader)), 1):
        x = x.to(args.device)
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step == args.stuck:
            print(json.dumps({"stuck": step}), flush=True)
        before = time.perf_counter()
        here_s = give(args.stuck_s if step == args.stuck else DEVICE_S)
        value = (rest(here_s) or loss.detach()).item()  # the wait
        now = time.perf_counter()
        waited += now - before
        time.sleep(HOST_S)
        if step % EVERY == 0:
            mean = (time.perf_counter() - since) / EVERY
            told = {"step": step, "step_s": mean, "waits": waited / EVERY / mean, "loss": value}
            print(json.dumps(told), flush=True)
            waited, since = 0.0, time.perf_counter()
            if (args.stop and args.stop.exists()) or time.monotonic() > ends:
                break


if __name__ == "__main__":
    main()
