"""Rates of the GPU's parts, each kept busy by itself: tensor cores, memory, the link to the host; and nvidia-smi."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpu import jobs, judges, machine, reading, timing
from benchmarks.gpu.bench import SCRIPTS, Bench, oracle_of
from benchmarks.gpu.jobs import last_words, python
from benchmarks.gpu.judges import Recording
from benchmarks.gpu.outcome import Part, named, near, skipped

SCRIPT = SCRIPTS / "rates.py"

# Dense bf16 FLOP/s from NVIDIA's data sheets, by what torch calls the device: H100 SXM and H200 (989 TFLOPS, half of
# the sheets' figure with sparsity), H100 PCIe (756), A100 (312), HGX B200 (2.25 PFLOPS a GPU). No other is judged.
PEAKS: Mapping[str, float] = {
    "NVIDIA H200": 989e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA B200": 2.25e15,
}

# What is sampled from so long after the loop began until so long before it ended, in ns: sampling once a second, NVML's
# own figures are means of the time before, and the first ones of a time when the loop did not run yet.
SETTLE_NS = 2_000_000_000

# What is asked of nvidia-smi, dlprof's name of it and its factor, and how far two programs may be apart that do not
# look at the same instant: a share, or so much of the unit.
AGREE: tuple[tuple[str, str, float, float, float, str], ...] = (
    ("power.draw", "power_w", 1.0, 0.05, 15.0, "W"),
    ("clocks.sm", "sm_clock_mhz", 1.0, 0.03, 30.0, "MHz"),
    ("utilization.gpu", "busy_share", 0.01, 0.0, 0.05, "share"),
    ("temperature.gpu", "temperature_c", 1.0, 0.0, 4.0, "°C"),
)


def product(bench: Bench) -> None:
    """Multiply large bf16 matrices, with nvidia-smi beside."""
    fields = tuple(field for field, *_ in AGREE)
    with watched(bench, fields) as rows:
        folder, oracle = _record(bench, "product", "--size", str(bench.pick(8192, 256)))
    peak = PEAKS.get(str(bench.gpus[0]["name"])) if bench.gpus else None
    oracle |= {"peak_flops": peak}
    if peak is None:
        bench.add(skipped("MFU", "no data sheet's peak is known here for this device"))
    said = bench.report(folder)
    bench.add(*judges.product(Recording(folder, said, oracle)))
    bench.add(*agreement(reading.samples(folder), rows, *oracle["at_ns"]))
    bench.keep("rate-product", folder, "product", oracle)


def copies(bench: Bench) -> None:
    """Copy within the device's memory, and from pinned memory to it."""
    made = []
    for what, gib in (("copy", bench.pick(4.0, 0.01)), ("upload", bench.pick(1.0, 0.01))):
        made.append((what, *_record(bench, what, "--gib", str(gib))))
    # What NVML means by its figures of the link is written nowhere: what was seen comes home with the recording.
    link = bench.run(python(SCRIPTS / "counters.py", "--device", bench.device, "--link"), 20.0)
    said_of_link = json.loads(link.lines[-1][1]) if link.code == 0 and link.lines else last_words(link)
    print(f"  the link by NVML's ways: {said_of_link}", flush=True)
    made[-1][2]["link"] = said_of_link
    results = bench.reports([folder for _, folder, _ in made])
    for (what, folder, oracle), said in zip(made, results, strict=True):
        bench.add(*named(what, judges.JUDGES[what](Recording(folder, said, oracle))))
        bench.keep(f"rate-{what}", folder, what, oracle)


def agreement(
    samples: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]], begin: int, end: int
) -> list[Part]:
    """Judge dlprof's samples of a time against nvidia-smi's rows of the same time, by their medians.

    Both have at_ns (Unix time); a row's other keys are nvidia-smi's fields, as it prints them.
    """
    parts = []
    for field, key, factor, share, points, unit in AGREE:
        true = [n * factor for r in rows if begin <= r["at_ns"] <= end and (n := machine.number(r[field])) is not None]
        said = timing.middle(timing.inside(samples, key, "at_ns", begin, end))
        how = f"nvidia-smi's {field} in the same seconds, the median of {len(true)}"
        parts.append(near(key, said, median(true) if true else None, share=share, points=points, unit=unit, how=how))
    return parts


@contextlib.contextmanager
def watched(bench: Bench, fields: tuple[str, ...]) -> Iterator[list[dict[str, Any]]]:
    """Let nvidia-smi run beside, and give the list that its rows come into; none where there is no nvidia-smi."""
    rows: list[dict[str, Any]] = []

    def hear(text: str) -> None:
        rows.extend({**row, "at_ns": time.time_ns()} for row in machine.parse(text, fields)[:1])

    stop = threading.Event()

    def watch() -> None:
        while not stop.is_set() and not bench.rehearsal:
            # One call a reading: a program that is ended while it prints would leave half a row.
            ended = jobs.run(machine.query(fields), bench.work, 10.0, hear=hear)
            if ended.code != 0:
                return
            stop.wait(0.5)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield rows
    finally:
        stop.set()
        thread.join(15.0)


def _record(bench: Bench, what: str, *args: str) -> tuple[Path, dict[str, Any]]:
    """Record one of the loops; return its folder and what its own events and counts say."""
    out = bench.work / f"{what}.json"
    seconds = str(bench.pick(9.0, 3.0))
    folder = bench.recorded(
        what,
        SCRIPT,
        "--device",
        bench.device,
        "--what",
        what,
        "--seconds",
        seconds,
        *args,
        "--out",
        out,
        # A step of 10 GB takes a fifth of a second: a short window leaves enough steps beside it.
        options=("--window", "4,2,3", "--sample", "0.5"),
    )
    told = oracle_of(out)
    skip = min(20, len(told["began_ms"]) // 3)
    steady = timing.steady(told["began_ms"], told["busy_ms"], skip)
    begin, end = told["at_ns"]
    oracle = {
        "step_ms": steady.step_ms,
        "busy_share": steady.busy_share,
        "flops": told["flops"],
        "bytes_per_s": told["bytes"] / (steady.step_ms / 1e3),
        "at_ns": [begin + bench.pick(SETTLE_NS, 0), end - bench.pick(SETTLE_NS // 4, 0)],
    }
    print(f"  {what}: {oracle}", flush=True)
    return folder, oracle
