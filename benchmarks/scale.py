"""`dlprof report` on many ranks at once: 64 traces of 200,000 events, from process start to written report.

The traces are made here: a job of eight hosts whose clocks differ, that launches some thousand kernels a step and
reduces its gradients in buckets beside the backward pass. One rank computes longer than the others; the report must
name it.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.processes import peak_bytes, seconds

RANKS, RANKS_A_HOST = 64, 8
EVENTS = 200_000
STEPS = 5
LATE, LATE_BY = 37, 1.3  # this rank's kernels take so much longer

KERNELS = 6_650  # a step; each with its operator, the inner one, its launch, and the flow from it to the kernel
A_BUCKET = 95  # so many kernels to a reduced bucket of gradients
LAUNCH_US, KERNEL_US, REDUCE_US = 5.0, 20.0, 900.0
ELEMENTS = 6_553_600  # of a bucket
STEP_US = KERNELS * KERNEL_US * LATE_BY + REDUCE_US + 5_000.0
BASE_NS = 1735632360000000000


def kernel_times(late: float) -> list[tuple[float, float]]:
    """Return the start and the length in µs of each kernel of a step from 0 µs on, each `late` × as long."""
    rng, free, times = random.Random(0), 0.0, []
    for k in range(KERNELS):
        begins, lasts = max(free, _called(k) + LAUNCH_US), round(KERNEL_US * late * rng.uniform(0.6, 1.3), 3)
        times.append((round(begins, 3), lasts))
        free = begins + lasts
    return times


def _called(kernel: int) -> float:
    """Return when the host begins the operator of a kernel: it runs ahead of its device."""
    return 100.0 + kernel * 15.0


def reductions(kernels: list[tuple[float, float]], latest: list[tuple[float, float]]) -> dict[int, tuple[float, float]]:
    """Return reductions by the kernel that they follow: start and length in µs; they end when the last rank's can."""
    found, over = {}, 0.0
    for k in range(KERNELS):
        if k % A_BUCKET == A_BUCKET - 1 and k > KERNELS // 3:
            begins = max(sum(kernels[k]), over)
            over = max(sum(latest[k]), over) + REDUCE_US
            found[k] = (round(begins, 3), round(over - begins, 3))
    return found


def step_events(late: float) -> list[dict[str, Any]]:
    """Return the events of one step from 0 µs on, of a rank whose kernels take `late` × as long."""
    events: list[dict[str, Any]] = []

    def add(cat: str, name: str, pid: int, tid: int, ts: float, dur: float, **args: Any) -> None:
        events.append({"ph": "X", "cat": cat, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args})

    def launch(number: int, name: str, stream: int, at: float, when: tuple[float, float], **args: Any) -> None:
        add("cuda_runtime", "cudaLaunchKernel", 4000, 4000, at, 3.0, cbid=211, correlation=number)
        flow = {"cat": "ac2g", "name": "ac2g", "id": number}
        events.append({"ph": "s", **flow, "pid": 4000, "tid": 4000, "ts": at})
        args |= {"device": 0, "stream": stream, "correlation": number, "registers per thread": 64}
        args |= {"grid": [number % 4096, 1, 1], "block": [256, 1, 1]}
        add("kernel", name, 0, stream, when[0], when[1], **args)
        events.append({"ph": "f", "bp": "e", **flow, "pid": 0, "tid": stream, "ts": when[0]})

    add("user_annotation", "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", 4000, 4000, 1.0, 80.0)
    kernels = kernel_times(late)
    reduced = reductions(kernels, kernel_times(LATE_BY))
    for k, when in enumerate(kernels):
        at, thread = _called(k), 4000 if k < KERNELS // 3 else 4100
        name = ("aten::linear", "aten::layer_norm", "aten::gelu", "aten::add_")[k % 4]
        dims = [[8, 1024, 4096], [4096, 4096]]
        add("cpu_op", name, 4000, thread, at, 14.0, **{"External id": k, "Input Dims": dims, "Ev Idx": 2 * k})
        add("cpu_op", f"{name}_out", 4000, thread, at + 1, 12.0, **{"External id": k, "Ev Idx": 2 * k + 1})
        launch(k + 1, f"sm90_kernel_{k % 40}", 7, at + 2, when)
        if k in reduced:
            told: dict[str, Any] = {
                "Collective name": "allreduce",
                "In msg nelems": ELEMENTS,
                "Out msg nelems": ELEMENTS,
            }
            told |= {"dtype": "Float", "Group size": RANKS, "Process Group Name": "0"}
            launch(KERNELS + k, "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 21, at + 8, reduced[k], **told)
    return sorted(events, key=lambda e: float(e["ts"]))


def write(folder: Path, rank: int, steps: int) -> int:
    """Write one rank's trace, packed, as Kineto lays it out; give the number of its events."""
    events = step_events(LATE_BY if rank == LATE else 1.0)
    skew_us = 50_000.0 * ((rank // RANKS_A_HOST) % 3 - 1)
    group = {"pg_name": "0", "pg_desc": "default_pg", "pg_size": RANKS, "ranks": list(range(RANKS))}
    header = {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3", "totalGlobalMem": 85_000_000_000}],
        "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": RANKS, "pg_count": 1, "pg_config": [group]},
        "host_name": f"node-{rank // RANKS_A_HOST}",
        "baseTimeNanoseconds": BASE_NS,
    }
    count = 0
    with gzip.open(folder / f"rank{rank}.json.gz", "wt", compresslevel=1) as f:
        f.write(json.dumps(header, indent=2)[:-2] + ',\n  "traceEvents": [\n')
        for n in range(steps):
            begins = n * STEP_US + skew_us + 1_000_000
            marked = {"cat": "user_annotation", "name": f"ProfilerStep#{n}", "pid": 4000, "tid": 4000, "ts": 0.0}
            all_of = [{"ph": "X", **marked, "dur": STEP_US - 1.0, "args": {}}, *events]
            f.write("" if n == 0 else ",\n")
            f.write(",\n".join(_text(e, n, begins) for e in all_of))
            count += len(all_of)
        f.write("\n  ]\n}\n")
    return count


def _text(event: dict[str, Any], step: int, begins: float) -> str:
    """Lay an event out as Kineto does, in a step of its own."""
    moved = {**event, "ts": round(event["ts"] + begins, 3)}
    if "id" in moved:
        moved["id"] += step * 10_000_000
    args = moved.pop("args", None)
    if args and "correlation" in args:
        args = {**args, "correlation": args["correlation"] + step * 10_000_000}
    told = ',\n    "args": {\n      ' + json.dumps(args)[1:-1] + "\n    }" if args else ""
    return "  {\n    " + json.dumps(moved)[1:-1] + told + "\n  }"


def make(folder: Path, ranks: int = RANKS, steps: int = STEPS) -> int:
    """Write one trace a rank into the folder; give the events of the largest."""
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return max(pool.map(write, repeat(folder), range(ranks), repeat(steps)))


def main() -> None:
    """Make the traces, time the report, and print what it took and whom it names."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--keep", type=Path, help="make the traces here and leave them")
    args = options.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.keep or Path(temporary) / "traces"
        if not folder.exists():
            folder.mkdir(parents=True)
            events = make(folder)
            print(f"{events:,} events a rank", flush=True)
        size = sum(f.stat().st_size for f in folder.iterdir()) / 1e6
        print(f"{RANKS} ranks, {size:.0f} MB packed, {len(os.sched_getaffinity(0))} cores", flush=True)
        out = Path(temporary) / "out"
        command = [sys.executable, "-m", "dlprof", "report", str(folder), "--quiet", "-o", str(out)]
        took = [seconds(command) for _ in range(args.rounds)]
        print(f"dlprof report   {median(took):.1f} s ({min(took):.1f} to {max(took):.1f})", flush=True)
        print(f"peak memory     {peak_bytes(command) / 1e6:.0f} MB, of all its processes together")
        result = json.loads((out / "result.json").read_text())
        for found in (o for o in result["outcomes"] if o["state"] == "found"):
            print(f"found           {found['id']}, {found['share']:.1%}, ranks {found['ranks'][:8]}")
        late = next(o for o in result["outcomes"] if o["id"] == "straggler")
        print(f"the late rank   {LATE}, {'named' if late['ranks'] == [LATE] else 'not named: ' + str(late['why'])}")


if __name__ == "__main__":
    main()
