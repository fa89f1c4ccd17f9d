"""What recording costs: the same script plain, under dlprof and under other tools, at steps of 1, 5 and 50 ms.

In a round all are started and wait; then each in turn goes on for a slice of time while the others are stopped, until
all have made their steps. So a machine that warms or slows, or that others use too, meets them alike. What is printed
is the median over the rounds of each tool's mean step divided by the plain one's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from dlprof import marks

STEPS_MS = (1, 5, 50)
PEERS = Path(".bench/bin")

# What a step of 5 ms sleeps, about, after its work.
PAUSE_S = 0.003

# What every recording adds to a step, in one process: the one line a step alone, and with all that is on by default.
PAIRED = {"the step log": ("Facts", "Steps"), "every source inside a rank": None}

# How long one goes on before it is another's turn, in seconds, and how many of its steps are then left out: the first
# held the others' turns, and those after it find the caches as the others left them. Not shorter: what samples once
# a second does so once more when it is resumed.
SLICE_S = 2.0
UNTIL_WARM = 4

# Steps before the window, which opens after 2 more to warm up, and how many it traces.
BEFORE, TRACED = 100, 30

# A step sleeps a fixed time after its work, not until a time: what a tool costs comes on top. 51 modules.
SCRIPT = """
import contextlib, json, os, sys, time
import torch
from torch.utils.data import DataLoader, TensorDataset

target_s, pause, out, tool = float(sys.argv[1]), float(sys.argv[2]), sys.argv[3], sys.argv[4]
steps, before, traced = map(int, sys.argv[5:])
torch.set_num_threads(1)
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

around, profiler = contextlib.nullcontext, None
if tool == "traceml":
    import traceml_ai as traceml
    traceml.init(mode="auto")
    around = lambda: traceml.trace_step(model)
if tool == "torch":
    schedule = torch.profiler.schedule(skip_first=before, wait=0, warmup=2, active=traced, repeat=1)
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], schedule=schedule)
    profiler.start()
feed = batches()
if pause < 0:
    bare = []
    for _ in range(50):
        began = time.perf_counter()
        step(next(feed))
        bare.append(time.perf_counter() - began)
    pause = max(target_s - sorted(bare)[25], 0.0)
    json.dump(pause, open(out, "w"))
    sys.exit()
open(out + ".ready", "w").close()
while not os.path.exists(os.environ["GO"]):
    time.sleep(0.01)
ended, took = time.perf_counter(), []
for _ in range(steps):
    batch = next(feed)
    with around():
        step(batch)
    if pause > 0:
        time.sleep(pause)
    if profiler:
        profiler.step()
    now = time.perf_counter()
    took.append(now - ended)
    ended = now
json.dump(took, open(out + ".part", "w"))
os.rename(out + ".part", out)
"""


@dataclass(frozen=True)
class Tool:
    """One way to run the script. In its words, {folder} is a folder of its own and {script} the script."""

    name: str
    words: tuple[str, ...]
    says: str = "none"  # what the script is told to do for the tool
    inside: bool = False  # its traced steps are meant, not all of them


def tools(python: Path) -> list[Tool]:
    """List the plain script, dlprof in its parts, and the peers that are installed beside that Python."""
    plain = (str(python), "{script}")
    wrap = (sys.executable, "-m", "dlprof", "wrap", "--no-report", "--quiet", "-o", "{folder}/run")
    untraced = (*wrap, "--no-trace", "--flops", "off")
    window = ("--window", f"{BEFORE},2,{TRACED}", "--flops", "off", "--stacks", "off", "--no-sample")
    peers = python.parent
    found = [
        Tool("plain", plain),
        Tool("dlprof: every step", (*untraced, "--stacks", "off", "--no-sample", "--", *plain)),
        Tool("dlprof: every step, stacks", (*untraced, "--sample", "3600", "--", *plain)),
        Tool("dlprof: every step, stacks, host and GPU", (*untraced, "--", *plain)),
        Tool("py-spy record", (f"{peers}/py-spy", "record", "-o", "{folder}/spy.svg", "--", *plain)),
        Tool(
            "traceml run",
            (f"{peers}/traceml", "run", "--logs-dir", "{folder}/logs", "{script}", "--args"),
            says="traceml",
        ),
        Tool(
            "scalene run", (f"{peers}/scalene", "run", "--cpu-only", "-o", "{folder}/scalene.json", "{script}", "---")
        ),
        Tool("viztracer", (f"{peers}/viztracer", "--quiet", "-o", "{folder}/viztracer.json", "--", "{script}")),
        Tool("dlprof: inside the window", (*wrap, *window, "--", *plain), inside=True),
        Tool("torch.profiler: inside the same window", plain, says="torch", inside=True),
    ]
    return [tool for tool in found if Path(tool.words[0]).exists()]


class Run:
    """The script under a tool, stopped whenever it is not its turn."""

    def __init__(self, tool: Tool, script: Path, told: Sequence[object], folder: Path) -> None:
        self.tool = tool
        self._out = folder / "took.json"
        self._said = folder / "said"
        target_s, pause_s, steps = told
        words = [word.format(folder=folder, script=script) for word in tool.words]
        words += map(str, (target_s, pause_s, self._out, tool.says, steps, BEFORE, TRACED))
        env = {**os.environ, "GO": str(script.with_suffix(".go"))}
        with self._said.open("wb") as said:
            self._process = subprocess.Popen(words, stdout=said, stderr=subprocess.STDOUT, cwd=folder, env=env)

    def is_ready(self) -> bool:
        """Return whether it is about to make its first step; raises RuntimeError where it never will be."""
        ready = self._out.with_name("took.json.ready").exists()
        if not ready and self._process.poll() is not None:
            raise RuntimeError(
                f"{self.tool.name} did not run the script ({self._process.returncode}):\n{self._said.read_text()}"
            )
        return ready

    def is_done(self) -> bool:
        """Return whether all steps are made; raises RuntimeError where they never will be."""
        if not self._out.exists() and self._process.poll() is not None and not self._out.exists():
            raise RuntimeError(
                f"{self.tool.name} did not end the script ({self._process.returncode}):\n{self._said.read_text()}"
            )
        return self._out.exists()

    def send(self, number: signal.Signals) -> None:
        """Signal every process of it: samplers and servers stop and go on together with what they watch."""
        with contextlib.suppress(psutil.Error):
            tree = psutil.Process(self._process.pid)
            for process in (*tree.children(recursive=True), tree):
                with contextlib.suppress(psutil.Error):
                    process.send_signal(number)

    def end(self) -> None:
        """End every process of it."""
        self.send(signal.SIGKILL)
        self._process.wait()

    def mean_step(self) -> float:
        """Return the seconds of its mean step, without the slowest hundredth and those in which it was stopped."""
        took: list[float] = json.loads(self._out.read_text())
        first, last = (BEFORE + 3, BEFORE + TRACED + 1) if self.tool.inside else (20, len(took))
        usual = statistics.median(took)
        cold = {n + m for n, t in enumerate(took) if t > usual + SLICE_S / 2 for m in range(UNTIL_WARM)}
        kept = sorted(t for n, t in enumerate(took[first:last], first) if n not in cold)
        kept = kept[: max(1, round(len(kept) * 0.99))]
        return sum(kept) / len(kept)


def mean_steps(ways: Sequence[Tool], script: Path, told: Sequence[object]) -> dict[str, float]:
    """Run the script under each of the tools, in slices, and give the seconds of their mean steps."""
    go = script.with_suffix(".go")
    go.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(dir=script.parent) as temporary:
        runs: list[Run] = []
        try:
            for n, tool in enumerate(ways):
                folder = Path(temporary, str(n))
                folder.mkdir()
                runs.append(Run(tool, script, told, folder))
            while not all(run.is_ready() for run in runs):
                time.sleep(0.1)
            for run in runs:
                run.send(signal.SIGSTOP)
            go.touch()
            going = runs
            while going:
                for run in going:
                    run.send(signal.SIGCONT)
                    time.sleep(SLICE_S)
                    run.send(signal.SIGSTOP)
                # Who comes after whom changes from turn to turn.
                going = [run for run in (*going[1:], going[0]) if not run.is_done()]
            return {run.tool.name: run.mean_step() for run in runs}
        finally:
            for run in runs:
                run.end()


def pause(script: Path, python: Path, step_ms: int) -> float:
    """Return the seconds that a step must sleep to be so long; all runs of a length sleep alike."""
    out = script.parent / "pause.json"
    words = (python, script, step_ms / 1e3, -1, out, "none", 0, 0, 0)
    subprocess.run(list(map(str, words)), check=True, capture_output=True)
    return float(json.loads(out.read_text()))


def paired_us(
    pause_s: float, only: Sequence[str] | None, blocks: int = 1000, steps: int = 8
) -> tuple[float, float, float, float]:
    """Return the µs of a step without recording, those that recording adds to it, their standard error, and a share.

    The last is that of each step in what is done once in a while for many: the collectors' writing. It is not part of
    the second, which is a median.

    `only` names the collectors that record; None: all.

    In one process, which alternates between blocks of steps with all that recording has put into torch in its place,
    and blocks with what was there before: two processes that run the same script differ by more than what is measured,
    and so does one process from one quarter of a second to the next, which is why blocks are short.
    """
    import gc

    import torch
    from torch.optim import optimizer as optimizers
    from torch.utils.data import DataLoader, TensorDataset

    from dlprof.record import hooks
    from dlprof.record.collectors import COLLECTORS
    from dlprof.record.recorder import Recorder

    torch.set_num_threads(1)
    data = TensorDataset(torch.randn(4096, 8), torch.randn(4096, 1))
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(50)), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def batches() -> Iterator[Any]:
        while True:
            yield from DataLoader(data, batch_size=8)

    feed = batches()

    def step() -> float:
        began = time.perf_counter()
        batch = next(feed)
        optimizer.zero_grad()
        (model(batch[0]) - batch[1]).square().mean().backward()
        optimizer.step()
        took = time.perf_counter() - began
        time.sleep(pause_s)
        return took

    for _ in range(20):
        step()
    os.environ["DLPROF_WINDOW"] = "off"
    before = _attributes()
    called: list[Any] = [gc.callbacks]
    hooked: list[dict[Any, Any]] = [
        optimizers._global_optimizer_pre_hooks,
        optimizers._global_optimizer_post_hooks,
    ]
    telling: Any = Recorder.pass_on
    told_s = 0.0

    def timed(recorder: Recorder) -> None:
        nonlocal told_s
        began = time.perf_counter()
        telling(recorder)
        told_s += time.perf_counter() - began

    setattr(Recorder, "pass_on", timed)  # noqa: B010 - mypy knows it as no variable
    with tempfile.TemporaryDirectory() as folder:
        hooks.install(folder, [c for c in COLLECTORS if only is None or c.__name__ in only])
        for _ in range(50):
            step()
        now = _attributes()
        patches = [(*at, before[at], value) for at, value in now.items() if before.get(at, value) is not value]
        ours = [*(list(c) for c in called), *(dict(h) for h in hooked)]

        def put(place: int) -> None:
            for owner, name, *values in patches:
                setattr(owner, name, values[place])
            for container, content in zip((*called, *hooked), ours, strict=True):
                container.clear()
                if place:
                    (container.update if isinstance(content, dict) else container.extend)(content)

        pairs: list[tuple[float, float]] = []
        told_s = 0.0
        for n in range(blocks):
            pair = [0.0, 0.0]
            for place in (0, 1) if n % 2 else (1, 0):
                put(place)
                step()  # these two pay for the change itself
                step()
                pair[place] = statistics.median(step() for _ in range(steps)) * 1e6
            pairs.append((pair[0], pair[1]))
        told_us = told_s / blocks / (steps + 2) * 1e6
        put(1)
        marks.recorder.stop("exit")
    added = [ours_us - plain_us for plain_us, ours_us in pairs]
    low, middle, high = statistics.quantiles(added)
    # The standard error of a median is that of a mean times 1.25, and a normal spread is 0.74 of that of the quartiles.
    error = 1.25 * 0.74 * (high - low) / len(added) ** 0.5
    return statistics.median(plain_us for plain_us, _ in pairs), middle, error, told_us


def _attributes() -> dict[tuple[Any, str], Any]:
    """Return every attribute of torch's modules, and of their classes, but for what they count."""
    found: dict[tuple[Any, str], Any] = {}
    warnings.simplefilter("ignore", FutureWarning)  # of names that torch keeps for old scripts
    for module_name, module in list(sys.modules.items()):
        if module_name.split(".")[0] == "torch":
            for name, value in list(vars(module).items()):
                found[module, name] = value
                if isinstance(value, type) and value.__module__ == module_name:
                    found |= {(value, n): v for n, v in list(vars(value).items()) if not isinstance(v, int)}
    return found


def main() -> None:
    """Print the table."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--seconds", type=float, default=8.0, help="of training in each run")
    options.add_argument("--steps", type=int, nargs="*", default=STEPS_MS, help="lengths of a step, in ms")
    options.add_argument("--paired", choices=list(PAIRED), help="only what recording adds to a step in one process")
    args = options.parse_args()
    if args.paired:
        plain_us, added_us, error_us, told_us = paired_us(PAUSE_S, PAIRED[args.paired])
        print(f"in one process, {args.paired} adds {added_us:.0f} ± {error_us:.0f} µs to {plain_us:.0f} µs", end="")
        print(f" of work in 51 modules, and {told_us:.0f} µs of writing: {(added_us + told_us) / 50:.2f} % of 5 ms")
        return
    python = PEERS / "python"
    if not python.exists():
        python = Path(sys.executable)
        print(f"the peers are not installed in {PEERS}: `make bench` installs them")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        script = folder / "script.py"
        script.write_text(SCRIPT)
        ways = tools(python.absolute())
        for step_ms in args.steps:
            ratios: dict[str, list[float]] = {}
            steps = BEFORE + TRACED + 20 + int(args.seconds * 1e3 / step_ms)
            pause_s = pause(script, python.absolute(), step_ms)
            for n in range(args.rounds):
                order = ways[n % len(ways) :] + ways[: n % len(ways)]
                took = mean_steps(order, script, (step_ms / 1e3, pause_s, steps))
                for name, seconds in took.items():
                    ratios.setdefault(name, []).append(seconds / took["plain"])
            print(f"\nstep of {step_ms} ms: mean step ÷ plain (least … most of {args.rounds} rounds)")
            for name, found in ratios.items():
                print(f"{name:44}{statistics.median(found):.3f} ({min(found):.3f} … {max(found):.3f})", flush=True)
    for what in PAIRED:
        # Each in a process of its own: what hangs on PyTorch is hung there once.
        subprocess.run([sys.executable, "-m", "benchmarks.overhead", "--paired", what], check=True)


if __name__ == "__main__":
    main()
