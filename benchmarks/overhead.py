"""What recording costs: steps of 1, 5 and 50 ms, plain and with the light layer, and a step's hooks alone.

Runs alternate, so that a machine that warms or slows meets both kinds alike; what is printed is the median of the
ratios of neighbouring runs. `python -m benchmarks.overhead [PAIRS]`.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import dlprof

STEPS_MS = (1, 5, 50)
# A step sleeps a fixed time after its work, not until a time: what the hooks cost comes on top. 51 modules.
SCRIPT = """
import sys, time
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
target_s, seconds = float(sys.argv[1]) / 1e3, float(sys.argv[2])
data = TensorDataset(torch.randn(4096, 8), torch.randn(4096, 1))
layers = [torch.nn.Linear(8, 8) for _ in range(50)]
model = torch.nn.Sequential(*layers, torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

def batches():
    while True:
        yield from DataLoader(data, batch_size=8)

def step(batch):
    optimizer.zero_grad()
    (model(batch[0]) - batch[1]).square().mean().backward()
    optimizer.step()

feed = batches()
bare = []
for n in range(50):
    began = time.perf_counter()
    step(next(feed))
    bare.append(time.perf_counter() - began)
# The pause is given, or found here: both runs of a pair must sleep alike.
pause = float(sys.argv[3]) if len(sys.argv) > 3 else target_s - sorted(bare)[25]
ended, took = time.perf_counter(), []
for n in range(20 + int(seconds / target_s)):
    step(next(feed))
    if pause > 0:
        time.sleep(pause)
    now = time.perf_counter()
    took.append(now - ended)
    ended = now
took = sorted(took[20:])
print(took[len(took) // 2], pause)
"""


def measure(command: Sequence[str]) -> tuple[float, float]:
    """Run the script to its end and give the seconds of its median step and of the pause in each, as it tells them."""
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    step_s, pause_s = done.stdout.split()
    return float(step_s), float(pause_s)


def compare(script: Path, step_ms: int, pairs: int, seconds: float) -> tuple[float, list[float]]:
    """Give the plain step, in seconds, and the ratios of recorded to plain of neighbouring runs."""
    plain = [sys.executable, str(script), str(step_ms), str(seconds)]
    plain.append(str(measure(plain)[1]))
    plains, ratios = [], []
    for n in range(pairs):
        folder = script.parent / f"run-{step_ms}-{n}"
        options = ["-o", str(folder), "--no-trace", "--no-report", "--quiet"]
        recorded = [sys.executable, "-m", "dlprof", "wrap", *options, "--", *plain]
        # Who goes first changes from pair to pair.
        if n % 2:
            later, _ = measure(recorded)
            first, _ = measure(plain)
        else:
            first, _ = measure(plain)
            later, _ = measure(recorded)
        plains.append(first)
        ratios.append(later / first)
    return statistics.median(plains), ratios


def hooks_us(steps: int = 20_000) -> tuple[float, float]:
    """Give the µs that recording takes of a step (one fetch, forward, backward and optimizer step, and its line in the
    file), and of one call of an inner module. The work between the hooks is left out.
    """
    import torch

    from dlprof import hooks
    from dlprof.collectors import COLLECTORS
    from dlprof.recorder import BACKWARD

    class Iterator:
        _num_yielded = 1

    identity = torch.nn.Identity()
    plain_us = _each_us(lambda: identity(1), steps)
    os.environ["DLPROF_WINDOW"] = "off"
    with tempfile.TemporaryDirectory() as folder:
        hooks.install(folder, COLLECTORS)
        recorder = dlprof._recorder
        iterator, optimizer = Iterator(), torch.optim.SGD([torch.zeros(1)], lr=0.1)

        def step() -> None:
            if recorder.begin_fetch(iterator, first=not iterator._num_yielded):
                recorder.end()
            if recorder.begin_forward(identity):
                recorder.end()
            if recorder.begin(BACKWARD):
                recorder.end()
            recorder.begin_optimizer(optimizer)
            recorder.end_optimizer()

        step_us = _each_us(step, steps)
        recorder.begin_forward(identity)
        inner_us = _each_us(lambda: identity(1), steps)
        recorder.end()
        recorder.stop("exit")
    return step_us, inner_us - plain_us


def _each_us(call: Callable[[], object], times: int) -> float:
    """Give the µs of one call: the least of five rounds, which is the one that nobody disturbed."""
    rounds = []
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(times):
            call()
        rounds.append((time.perf_counter() - began) / times * 1e6)
    return min(rounds)


def main() -> None:
    """Print the table."""
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    print("step      plain     recorded/plain (median, of", pairs, "pairs: least … most)")
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.py"
        script.write_text(SCRIPT)
        for step_ms in STEPS_MS:
            plain_s, ratios = compare(script, step_ms, pairs, seconds=3)
            print(
                f"{step_ms:3d} ms  {plain_s * 1e3:7.3f} ms  {statistics.median(ratios):.4f}"
                f"   {min(ratios):.4f} … {max(ratios):.4f}",
                flush=True,
            )
    step_us, inner_us = hooks_us()
    print(f"hooks of one step: {step_us:.1f} µs; of each call of an inner module: {inner_us:.2f} µs")


if __name__ == "__main__":
    main()
