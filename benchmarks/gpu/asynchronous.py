"""Jobs whose host runs ahead of the device, and the same job made to wait for it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from benchmarks.gpu import judges, reading, timing
from benchmarks.gpu.bench import SCRIPTS, Bench, oracle_of
from benchmarks.gpu.judges import Recording
from benchmarks.gpu.outcome import holds, named
from benchmarks.gpu.timing import Steps

SCRIPT = SCRIPTS / "async_job.py"
STEPS_AHEAD = (1, 3, 8)
PYTHON_MS = 10.0

# Steps that the oracle leaves out: the first ones fill the queue.
WARM = 10


def run_ahead(bench: Bench) -> None:
    """Record the job one, three and eight steps ahead, each beside a plain run of it."""
    folders, plains = [], []
    for ahead in bench.pick(STEPS_AHEAD, STEPS_AHEAD[1:2]):
        plains.append(events(bench, f"plain-{ahead}", "--ahead", str(ahead)))
        folders.append(_recorded(bench, f"ahead-{ahead}", "--ahead", str(ahead)))
    for folder, said, plain in zip(folders, bench.reports(folders), plains, strict=True):
        oracle = _oracle(plain) | {"traced_to_plain": _traced(folder, plain)}
        print(f"  {folder.name}: {oracle}", flush=True)
        bench.add(*named(folder.name, judges.asynchronous(Recording(folder, said, oracle))))
        trace = reading.trace_path(folder)
        kernels = reading.device_events(trace)["kernel"] if trace else 0
        bench.add(holds(f"{folder.name}: kernels in the trace", kernels > 0, "dlprof's trace holds no kernel"))
        bench.keep(f"async-{folder.name}", folder, "asynchronous", oracle)


def wait_each_step(bench: Bench) -> None:
    """Record the job with .item() and Python after it, and measure what leaving both out gives."""
    changed = ("--item", "--python-ms", str(PYTHON_MS))
    without = events(bench, "without", "--ahead", str(STEPS_AHEAD[1]))
    plain = events(bench, "with", *changed)
    folder = _recorded(bench, "item", *changed)
    oracle = _oracle(plain) | {"gain_ms": plain.step_ms - without.step_ms, "without_ms": without.step_ms}
    print(f"  {folder.name}: {oracle}", flush=True)
    bench.add(*judges.waiting(Recording(folder, bench.report(folder), oracle)))
    bench.keep("async-item", folder, "waiting", oracle)


def events(bench: Bench, name: str, *args: str) -> Steps:
    """Run the job without dlprof and return what its CUDA events say of its steady steps."""
    out = bench.work / f"{name}.json"
    bench.plain(SCRIPT, *_size(bench), *args, "--out", out)
    told = oracle_of(out)
    return timing.steady(told["began_ms"], told["busy_ms"], bench.pick(WARM, 2))


def _recorded(bench: Bench, name: str, *args: str) -> Path:
    return bench.recorded(name, SCRIPT, *_size(bench), *args, "--out", bench.work / f"{name}-events.json")


def _size(bench: Bench) -> tuple[str, ...]:
    small = ("--steps", "30", "--device-ms", "10", "--host-ms", "1")
    return ("--device", bench.device, *bench.pick(("--steps", "100"), small))


def _oracle(plain: Steps) -> dict[str, Any]:
    return {"step_ms": plain.step_ms, "busy_ms": plain.busy_ms, "busy_share": plain.busy_share, "steps": plain.steps}


def _traced(folder: Path, plain: Steps) -> float | None:
    """Return the traced steps' length by the recorded run's own events ÷ the plain run's; None where it is not told."""
    window = reading.facts(folder).get("window") or {}
    told = oracle_of(folder.parent / f"{folder.name}-events.json")
    if window.get("first_step") is None or window.get("last_step") is None:
        return None
    traced = timing.mean_period_ms(told["began_ms"], int(window["first_step"]), int(window["last_step"]))
    return None if math.isnan(traced) else traced / plain.step_ms
