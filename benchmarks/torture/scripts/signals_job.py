"""A loop of short steps that the handler of a signal interrupts with an exception, at random moments.

Prints a JSON object: how often the handler has raised (`raised`), how often no `except` has seen that (`lost`), the
steps that were begun and those that ended, and how often each frame stood in a traceback, by "file:function".
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import signal
import traceback
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

# Passes over the data before the first signal: torch imports some of itself late, and catches what fails then.
WARM = 4

# Steps that must have ended at the end: on a slow machine few do between two signals.
STEPS = 100


class StopError(Exception):
    """An exception that none of Python's own classes but the first is a base of."""


# Hooks that catch OSError, AttributeError or LookupError by name would catch such ones as well.
ERRORS: dict[str, type[BaseException]] = {
    "StopError": StopError,
    **{error.__name__: error for error in (TimeoutError, AttributeError, KeyError, RuntimeError, KeyboardInterrupt)},
}


class Raising:
    """What raises, as an object, by a method or from a function, and counts how often."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error
        self.count = 0

    def __call__(self, *_: object) -> None:
        """Raise the error."""
        self.count += 1
        raise self.error(f"signal {self.count}")

    def method(self, number: int, frame: FrameType | None) -> None:
        """Raise the error, with nothing left of what the handler was called with."""
        del number, frame
        self()

    def once(self, number: int, _frame: FrameType | None) -> None:
        """Raise the error as what is in place for one block: it is gone when the exception is caught."""
        signal.signal(number, signal.SIG_DFL)
        self()


HANDLERS: dict[str, Callable[[Raising], Callable[..., Any]]] = {
    "function": lambda raising: lambda _number, _frame: raising(),
    "method": lambda raising: raising.method,
    "once": lambda raising: raising.once,
    "object": lambda raising: raising,
    "partial": functools.partial,  # of C, as what calls it
}


def main() -> None:
    """Train until so many signals have come and the least number of steps has ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--handler", choices=HANDLERS, default="function")
    parser.add_argument("--error", choices=ERRORS, default="StopError")
    parser.add_argument("--loop", choices=("loader", "optimizer", "made"), default="loader")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    draw, raising = random.Random(args.seed), Raising(ERRORS[args.error])
    handler = HANDLERS[args.handler](raising)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(torch.ones(64, 8)), batch_size=4)
    began = ended = caught = lost = 0
    frames: Counter[str] = Counter()

    def train() -> None:
        nonlocal began, ended, lost, model, optimizer, loader
        if args.loop == "made":  # anew, as `--set` changes what constructors get, and models at their first call
            model = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.Flatten(), torch.nn.Linear(16, 1))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            loader = DataLoader(TensorDataset(torch.ones(16, 1, 4, 4)), batch_size=4)
            [batch.to("cpu") for (batch,) in loader]
        for (batch,) in loader if args.loop != "optimizer" else [(torch.ones(4, 8),)] * 16:
            began += 1
            loss = model(batch).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            ended += 1
            if raising.count > caught + lost:
                lost += 1
                return

    for _ in range(WARM):
        train()
    while raising.count < args.count:
        try:
            while raising.count < args.count:  # within, as the signal may come between two passes
                signal.setitimer(signal.ITIMER_REAL, 0)  # the last one's signal comes before the next one's time begins
                signal.signal(signal.SIGALRM, handler)
                signal.setitimer(signal.ITIMER_REAL, draw.uniform(20e-6, 2e-3))
                train()
        except raising.error as e:  # noqa: PERF203 - that is what it is about
            caught += 1
            torch.set_grad_enabled(True)  # an exception may leave torch's no_grad without its end
            frames.update({f"{at.filename}:{at.name}" for at in traceback.extract_tb(e.__traceback__)})
    signal.setitimer(signal.ITIMER_REAL, 0)
    while ended < STEPS:
        train()
    told = {"raised": raising.count, "lost": lost, "caught": caught, "began": began, "ended": ended, "frames": frames}
    print(json.dumps(told))


if __name__ == "__main__":
    main()
