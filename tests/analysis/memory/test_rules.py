"""What the rules of memory make of jobs whose memory is known: retries, growth, a full GPU, room for a larger batch."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

from dlprof.analysis.estimate import Rule
from dlprof.analysis.memory.rules import (
    activation_memory,
    allocator_retries,
    copied_memory,
    device_allocations,
    fragmentation,
    memory_growth,
    memory_headroom,
    out_of_memory,
)
from tests.fixtures import dumps, holding, runs, traces
from tests.fixtures.allocator import GB, GPU, reading, write
from tests.fixtures.dumps import Allocator
from tests.fixtures.holding import row
from tests.fixtures.ruled import Case, check, clear, found, inapplicable, jobs, table, unmeasured
from tests.fixtures.runs import MS, light

MB, SECOND = 10**6, 1_000 * MS
CONF, EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"


def on_cpu(folder: Path) -> Path:
    return runs.cpu_run(folder, 5 * MS, 5 * MS)


def without(job: Callable[[Path], Path], *files: str) -> Callable[[Path], Path]:
    """Return a job that lacks files of its first rank."""

    def made(folder: Path) -> Path:
        path = job(folder)
        for file in files:
            (path / "ranks/00000" / file).unlink()
        return path

    return made


def sampled_rank(path: Path, rank: int, lines: Sequence[dict[str, Any]]) -> None:
    file = path / f"ranks/{rank:05d}/processes.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def sampled_host(path: Path, left: int, seconds: Sequence[int]) -> None:
    (path / "hosts/node-1").mkdir(parents=True)
    lines = [{"at_ns": traces.BASE_NS + k * SECOND, "memory_available_bytes": left} for k in seconds]
    (path / "hosts/node-1/host.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


# -- retries


def retried(folder: Path, at: Sequence[int], *, longer: int = 10, facts: dict[str, Any] = GPU, **more: Any) -> Path:
    """Record 60 steps of 20 ms, and a reading each two; those in `at` retry and last longer, by so many ms."""
    steps = [light(n, (20 + longer * (n in at) + n % 2) * MS) for n in range(60)]
    path = runs.recorded(folder, (None, steps, facts))
    write(path, [reading(n, 40 * GB) | {"retries": sum(r <= n for r in at)} | more for n in range(1, 60, 2)])
    return path


retries, OFTEN = jobs(retried), range(10, 60, 4)
TORCH, SET = {"versions": {"torch": "2.9.0+cu128"}}, {"env": {CONF: EXPANDABLE}}
RETRIES = {
    # 13 of the steps that are steady (from the fourth on) last 10 ms longer.
    "what steps around retries take longer": found(
        retries(OFTEN),
        13 * 10 * MS / 57,
        "13 allocations succeeded only after the cache was emptied, with 42 GB of 100 GB",
        sharp=0.02,
        share=pytest.approx(13 * 10 / 57 / (20.5 + 130 / 57), rel=0.03),
        settings=[[(CONF, None, EXPANDABLE)], [], [], []],
        rows=[(0, 13, 0, 26, 31)],
        numerics=[False, True, False, False],
        ranks=[0],
    ),
    "the variable by its name of torch 2.9": found(
        retries(OFTEN, facts=GPU | TORCH), settings=[[("PYTORCH_ALLOC_CONF", None, EXPANDABLE)], [], [], []]
    ),
    "where it is set": found(
        retries(OFTEN, facts=GPU | SET | {"loaders": [{"role": "train", "batch_size": 32}]}),
        None,
        "a smaller batch (is 32)",
        settings=[[], [], []],
    ),
    "cost nothing": clear(retries([20, 40], longer=0), 0, "2 allocations"),
    "there are none": clear(retries([]), 0, "no allocation had to be tried again"),
    "while it starts up": clear(retries([0]), 0, "no allocation had to be tried again"),
    "in every step": unmeasured(retries(range(60)), "58 allocations had to be tried again"),
    "without cuda": inapplicable(retries([20], facts=dict(runs.CPU)), "on the CPU"),
    "an old PyTorch": unmeasured(retries([20], retries=None), "does not count"),
}

# -- memory from the device in every step


def allocating(folder: Path, *calls: tuple[str, int], thread: Any = traces.MAIN) -> Path:
    """Trace steps of 10 ms: ten kernels of 0.2 ms, then some calls of 1 or 2 ms that the device waits for."""
    events: list[Any] = []
    for n in range(4):
        at, ids = 10 * n * MS, 100 * n
        events.append(traces.step(n, at, 10 * MS))
        for k in range(10):
            events += traces.launched("gemm", at + k * 250_000, at + k * 250_000 + 8_000, 200_000, ids + k + 1)
        begin = at + 3 * MS
        for k, (name, dur) in enumerate(calls):
            tid = traces.MAIN if name == "cudaFree" else thread
            events.append(traces.call(name, begin, dur, ids + 50 + k, tid=tid))
            begin += dur + 10_000
        events += traces.launched("last", at + 9 * MS, at + 9 * MS + 8_000, 100_000, ids + 99)
    return runs.foreign(folder, traces.trace(*events, world_size=1))


allocates = jobs(allocating)
BOTH = [("cudaFree", 2 * MS), ("cudaMalloc", 1 * MS)]
EMPTIED = "torch.cuda.empty_cache()", "Twice a step rank 0 asks", "takes 3.00 ms"
ALLOCATIONS = {
    "a cache that every step empties": found(allocates(*BOTH), 3 * MS, *EMPTIED, sharp=0.05),
    # The backward pass requests most of what it needs, on its own thread.
    "in the backward pass": found(allocates(*BOTH, thread=traces.AUTOGRAD), 3 * MS, *EMPTIED, sharp=0.05),
    "none": clear(allocates(), None),
    "memory that grows": clear(allocates(("cudaMalloc", MS)), None),
    "memory that is given back": clear(allocates(("cudaFree", MS)), None),
}

# -- growth


def sampled(
    folder: Path,
    held: Callable[[int], int],
    *,
    children: Callable[[int], int] = lambda _: 0,
    mapped: Callable[[int], int] = lambda _: 0,
    left: int | None = 2 * GB,
    ranks: int = 1,
    n: int = 60,
    profiled: range = range(0),
    read: Sequence[int] | None = None,
) -> Path:
    """Record a step a second; in second n each rank's process holds held(n) bytes, and maps so much of files beside.

    They are read in each second, or in these.
    """
    steps = [light(k, 900 * MS, profiled=int(k in profiled)) for k in range(n)]
    runs.recorded(folder, *((None, steps, runs.CPU) for _ in range(ranks)))
    lines = [
        {"at_ns": traces.BASE_NS + k * SECOND, "rss_bytes": held(k) + mapped(k), "anonymous_bytes": held(k)}
        | {"children_rss_bytes": children(k), "children_anonymous_bytes": children(k)}
        for k in read or range(n)
    ]
    for rank in range(ranks):
        sampled_rank(folder, rank, lines)
    if left is not None:
        sampled_host(folder, left, range(n))
    return folder


def kept_on_gpu(folder: Path) -> Path:
    path = runs.recorded(folder / "run", (None, [light(n, 900 * MS) for n in range(60)], GPU))
    write(path, [reading(n, (20 * GB) + n * GB // 10) for n in range(60)])
    return path


def leak(n: int) -> int:
    return GB + n * 10 * MB


def same(_: int) -> int:
    return GB


def refills(n: int) -> int:
    """Hold 200 MB more while profiled; ten readings long it needs no more then: all fits into what was freed."""
    return GB + (200 * MB if n in range(5, 10) else max(100, 10 * (n - 10)) * MB * (n >= 10))


grows = jobs(sampled)
RARELY = [*range(60), *(round(60 * 1.02**k) for k in range(1, 140))]  # the less often the older the job is
LONG: dict[str, Any] = {"n": RARELY[-1] + 1, "read": RARELY}
SWOLLEN, PROFILED = range(15, 25), {"n": 55, "profiled": range(5, 10)}
FEW: dict[str, Any] = {"n": 17, "left": 22 * GB}
SLOW: dict[str, Any] = {"children": lambda n: 300 * MB + n * 2 * MB, "left": 22 * GB}
GROWTH = {
    # 10 MB a step of 0.9 s, and 2 GB left.
    "a process, until the host is full": found(
        grows(leak),
        0,
        "Memory grows, and is used up in 3.0 min",
        "by 10 MB a step of 900.0 ms; 2 GB are left on the host, enough for 200 steps",
        scope="risk",
        last=(59 * SECOND, GB + 590 * MB),
        ranks=[0],
    ),
    "tensors that stay on the GPU": found(kept_on_gpu, 0, "on the GPU", "--memory", last=(59, 20 * GB + 59 * GB // 10)),
    "ranks of a host use up the same memory": found(grows(leak, ranks=2), 0, "is used up in 90 s", ranks=[0, 1]),
    "workers grow": found(
        grows(same, children=lambda n: GB // 2 + n * 10 * MB),
        0,
        *("its workers' memory grew", "data set"),
        settings=[[]],
        numerics=[False],
        ranks=[0],
    ),
    "it stays the same": clear(grows(same), None),
    "once, for a buffer": clear(grows(lambda n: GB + 500 * MB * (n > 30)), None),
    "a cache fills": clear(grows(lambda n: GB + int(500 * MB * (1 - 0.8**n))), None),
    "garbage is collected": clear(grows(lambda n: GB + n % 10 * 50 * MB), None),
    "an interpreter's own": clear(grows(lambda n: GB + n * 10_000), None),
    "read rarely, it slows down": clear(grows(lambda n: GB + int(200 * MB * math.log(n + 60)), **LONG), None),
    "read rarely, it goes on": found(grows(leak, **LONG, left=10 * GB), 0, "by 10 MB a step"),
    "mapped from files": clear(grows(same, mapped=lambda n: n * 20 * MB), None),
    "it lasts for days": clear(grows(lambda n: 100 * MB + n * 200_000, left=1_000 * GB), None, "would last for"),
    # An allocator that finds no use for what was freed: 2 MB a step, and 22 GB left. In ten minutes, it is growth.
    "a minute of what may last for hours": unmeasured(
        grows(same, **SLOW),
        "its workers' memory grew by 94 MB in 47 steps, which may be what its allocator keeps",
        numerics=[],
    ),
    "ten minutes of it": found(grows(same, **SLOW, n=600), 0),
    "too few readings": unmeasured(grows(leak, n=15), "fewer than 18 readings"),
    "an unknown end": unmeasured(grows(leak, left=None), "was not read"),
    "what the profiler freed is filled first": found(grows(refills, **PROFILED), 0, "by 10 MB a step"),
    "it never holds more than the profiler did": clear(
        grows(lambda n: min(refills(n), GB + 200 * MB), **PROFILED), None
    ),
    "the profiler holds more meanwhile": found(
        grows(lambda n: leak(n) + (n in SWOLLEN) * GB + (n < 15) * GB, profiled=SWOLLEN), 0, "is used up in 3.0 min"
    ),
    "few readings beside the profiler's": unmeasured(grows(same, n=30, profiled=range(10, 20)), "fewer than 18"),
    # 3 GB in 17 s, with 22 GB left.
    "few, much and even": found(grows(lambda n: GB + n * 176 * MB, **FEW), 0, "used up in 112 s"),
    "few, much and noisy": found(grows(lambda n: GB + n * 176 * MB + n % 3 * 60 * MB, **FEW), 0),
    "few, once": unmeasured(grows(lambda n: GB + 3 * GB * (n > 8), **FEW)),
    "few, a cache fills": unmeasured(grows(lambda n: GB + int(3 * GB * (1 - 0.8**n)), **FEW)),
    "few, garbage": unmeasured(grows(lambda n: GB + n % 5 * 700 * MB, **FEW)),
    "few, little": unmeasured(grows(lambda n: GB + n * 20 * MB, **FEW)),
}

# -- workers that copy what they read


def copying(
    folder: Path,
    own: Callable[[int], int],
    every: Callable[[int], int] = lambda _: 4 * GB,
    left: int = 10 * GB,
    **facts: Any,
) -> Path:
    """Record a step a second; in second n the two workers hold so much of their own, and in all."""
    objects = [{"class": "Rows", "name": "rows", "kind": "list", "length": 3_000_000}]
    loaders = [{"role": "train", "num_workers": 2, "objects": objects, "dataset": "Rows"}]
    steps = [light(k, 900 * MS) for k in range(40)]
    path = runs.recorded(folder, (None, steps, {**runs.CPU, "loaders": loaders, **facts}))
    lines = [
        {"at_ns": traces.BASE_NS + k * SECOND, "children": 2, "anonymous_bytes": 2 * GB}
        | {"children_anonymous_bytes": every(k)}
        | ({"children_private_bytes": own(k)} if own(k) and not k % 2 else {})
        for k in range(40)
    ]
    sampled_rank(path, 0, lines)
    sampled_host(path, left, [1])
    return path


def copied(n: int) -> int:
    return 100 * MB + n * 50 * MB


copies = jobs(copying)
COPIED = {
    "copied": found(
        copies(copied),
        0.0,
        *("each of 2 workers has copied 950 MB", "all of them 50 MB a step", "Up to 2 GB more", "fits as well"),
        "hold the list `rows` of `Rows`, 3,000,000 objects, in an array",
        scope="risk",
        ranks=[0],
    ),
    "more than fits": found(copies(copied, left=GB), 0, "enough for 20 steps: it may not fit"),
    "more than the container has": found(copies(copied, cpu={"memory_limit_bytes": 5 * GB}), 0, "enough for 20"),
    "workers grow by themselves": clear(copies(copied, lambda n: 4 * GB + n * 50 * MB), None),
    "little of a large host": clear(
        copies(copied, left=200 * GB), None, "the workers have copied 1.90 GB of shared memory"
    ),
    "copied and let go": clear(copies(lambda n: copied(n % 6)), None),
    "copied at the start alone": clear(copies(lambda n: copied(min(n, 12))), None),
    "not read": unmeasured(copies(lambda _: 0)),
}

# -- a larger batch


def waiting(
    folder: Path,
    *,
    busy: int,
    kept: int = 10,
    peak: int = 30,
    facts: dict[str, Any] | None = None,
    host: Literal["calls", "python", "fetch"] = "calls",
) -> Path:
    """Record steps of 1 ms in which the GPU computes for `busy` µs, then waits for a late launch; sizes in GB.

    `host`: what it does meanwhile: call operators, run the script's own Python, or wait for data.
    """
    events: list[Any] = []
    for n in range(4):
        t = n * MS
        late = t + MS - busy * 500
        events += [traces.step(n, t, MS)]
        events += traces.launched("gemm", t, t, busy * 500, 10 * n + 1)
        events += [traces.op("aten::linear", t + 6_000, MS - 8_000)] if host == "calls" else []
        events += [traces.fetch(t + 6_000, late - t - 10_000)] if host == "fetch" else []
        events += traces.launched("gemm", late, late, busy * 500, 10 * n + 2)
    facts = {**GPU, "loaders": [{"role": "train", "batch_size": 32}]} if facts is None else facts
    path = runs.recorded(folder, (traces.trace(*events, world_size=1), [], facts))
    peaks = {"peak_allocated_bytes": peak * GB, "peak_reserved_bytes": (peak + 2) * GB}
    write(path, [reading(n, kept * GB, **peaks) for n in range(9)])
    return path


waits = jobs(waiting)
UNFILLED = "up to 8 times the batch the GPU would still"
HEADROOM = {
    # The host takes 1 ms for any batch. With 1.5 times the batch the GPU works for 0.9 ms of it: 48 samples. 10 GB stay
    # and 20 come and go: 40 GB with 1.5 times the batch.
    "the batch that fills the GPU, and no larger one": found(
        waits(busy=600),
        MS / 3,
        "For 40 % of the 1.00 ms step the GPU waits.",
        "1.5 times as large, which needs 40 % of its memory, it works for nine tenths of the step",
        settings=[[("batch_size", 32, 48)]],
        rows=[
            (1, pytest.approx(MS, rel=0.01), 0.3, pytest.approx(1, rel=0.01)),
            (1.5, pytest.approx(MS / 1.5, rel=0.01), 0.4, pytest.approx(1.5, rel=0.01)),
        ],
        numerics=[True],
        training=[True],
        ranks=[0],
        scope="step",
    ),
    "of a batch that no loader has the multiple": found(
        waits(busy=400, facts=GPU), None, "a batch 2.25 times as large, ", settings=[[]], training=[True]
    ),
    "it works nearly all the time": clear(waits(busy=980), 0, "a larger batch would save little"),
    "it works for nine tenths": clear(waits(busy=905), 0, "a larger batch would save little"),
    "eight times the batch would not fill it": clear(waits(busy=100), 0, UNFILLED),
    "its data come as late with any batch": clear(waits(busy=600, host="fetch"), 0, UNFILLED),
    "the script's Python may grow": clear(waits(busy=600, host="python"), 0, UNFILLED),
    "the batch that fills it does not fit": clear(waits(busy=600, peak=80), 0, "1.5 times as large, needs 115 %"),
    "some of its memory is left": clear(waits(busy=980, kept=40, peak=90)),
    "there is none": inapplicable(waits(busy=600, facts=dict(runs.CPU)), "on the CPU"),
    "its memory is unknown": unmeasured(waits(busy=600, facts={"device": {"type": "cuda"}}), "not recorded"),
    "no trace": unmeasured(without(waits(busy=600), "trace.json.gz")),
    "no readings": unmeasured(without(waits(busy=600), "memory.jsonl")),
    "nearly used up": found(
        waits(busy=980, kept=40, peak=94),
        0,
        *("94 GB of 100 GB allocated", "(is 32)"),
        scope="risk",
        settings=[[], [], [(CONF, None, EXPANDABLE)]],
        rows=[(0, 94 * GB, 96 * GB, 100 * GB, 0.96)],
        numerics=[True, False, False],
        ranks=[0],
    ),
}


def layered(folder: Path, *, busy: int, activations: int = 60, states: int = 20, peak: int = 84) -> Path:
    """Record the same steps of a job with counted memory; sizes in GB.

    Ten layers have all activations, of which a tenth are their inputs, and all of the model and its optimizer.
    """
    path = waiting(folder, busy=busy)
    rows = []
    for n in range(10):
        model, name = states * GB // 30, f"layers.{n}.up"
        rows += [row("parameter", name, model), row("gradient", name, model), row("optimizer", name, 2 * model)]
        rows += [row("activation", f"layers.{n}.norm", activations * GB // 100, "LayerNorm")]
        rows += [row("activation", name, 9 * activations * GB // 100, dtype="bfloat16")]
    moments = [{"moment": "backward", "gradient_bytes": 0, "activation_bytes": activations * GB}]
    moments += [{"moment": "gradients", "gradient_bytes": states * GB // 3, "activation_bytes": 0}]
    holding.write(path, rows, moments)
    read = {"peak_allocated_bytes": peak * GB, "reserved_bytes": peak * GB, "peak_reserved_bytes": peak * GB}
    write(path, [reading(n, states * GB, **read) for n in range(9)])
    return path


layers = jobs(layered)
ACTIVATIONS = {
    # With checkpoints 6 GB stay of 60, which grow with 4 of temporary memory; the layer that computes again has 5.4 and
    # what flows through it on top, when the temporary memory is gone. More would fit; thrice the batch fill the GPU.
    # The host launches a forward pass again: 1.33 ms for three batches of now. The device computes for 1.2 ms.
    "checkpoints let a larger batch fit": found(
        layers(busy=300),
        (1 - 4 / 9) * MS,
        "`torch.utils.checkpoint` around `layers.*`, and `batch_size=",
        settings=[[("batch_size", 32, 96)]],
        numerics=[True],
        training=[True],
        ranks=[0],
        scope="step",
    ),
    "the GPU limits the step": clear(layers(busy=980), None, "the GPU limits the step"),
    "no batch fills it": clear(layers(busy=100), None, "no batch is known to fill"),
    "a larger batch fits": clear(layers(busy=300, activations=20, states=15, peak=36), None, "memory_headroom"),
    "the model fills it itself": clear(layers(busy=300, activations=15, states=66), None, "not its largest part"),
    "not counted": unmeasured(without(layers(busy=300), "held.json")),
    "a CPU": inapplicable(on_cpu),
}

# -- a snapshot of the allocator: full of tensors, or in pieces

FORWARD, OPTIMIZER = "forward (model.py:10)", "step (optimizer.py:7)"


def of_pieces(*, growing: bool = False, expandable: bool = False) -> Callable[[Path], Path]:
    """Return a job that runs out of memory with enough of it free, in pieces; with segments that grow, not followed."""
    made = dumps.ran_out(pieces=True)
    if growing:
        for event in made.events:
            event["action"] = event["action"].replace("segment_alloc", "segment_map")
        made.note("segment_unmap", addr=dumps.BASE, size=1)
    held = made.snapshot()
    held["allocator_settings"] |= {"expandable_segments": True} if expandable else {}
    return lambda folder: dumps.write(folder / "rank3.pickle", held)


def snapshot(made: Allocator) -> Callable[[Path], Path]:
    return lambda folder: dumps.write(folder / "rank3.pickle", made.snapshot())


def foreign(folder: Path) -> Path:
    return runs.foreign(folder / "gpu", traces.training())


FULL = {
    "nothing was left for a request": found(
        snapshot(dumps.ran_out(pieces=False)),
        0.0,
        scope="failure",
        rows=[(FORWARD,), (OPTIMIZER,)],
        numerics=[True, False, False],
        ranks=[3],
    ),
    "in pieces": clear(of_pieces(), None, "fragmentation"),
    "healthy": clear(snapshot(dumps.training()), None),
    "no snapshot": unmeasured(foreign, "_dump_snapshot"),
    "a CPU": inapplicable(on_cpu),
}
PIECES = {
    "enough, in pieces": found(
        of_pieces(),
        0.0,
        "were free, the largest block 10",
        scope="failure",
        settings=[[(CONF, None, EXPANDABLE)], [], []],
        ranks=[3],
    ),
    # Of segments that grow the largest block is not known; where they do already, that is not advised.
    "segments that grow": found(
        of_pieces(growing=True, expandable=True), 0.0, settings=[[], []], never=["largest block"]
    ),
    "full": clear(snapshot(dumps.ran_out(pieces=False)), None, "largest free block"),
    "enough": clear(snapshot(dumps.training()), None, "75 % of the 41.9 MB reserved on rank 3 is fragmented"),
    "no snapshot": unmeasured(foreign, "_dump_snapshot"),
    "a CPU": inapplicable(on_cpu),
}


@table(
    {
        allocator_retries: RETRIES,
        device_allocations: ALLOCATIONS,
        memory_growth: GROWTH,
        copied_memory: COPIED,
        memory_headroom: HEADROOM,
        activation_memory: ACTIVATIONS,
        out_of_memory: FULL,
        fragmentation: PIECES,
    }
)
def test_what_a_rule_says(tmp_path: Path, rule: Rule, case: Case) -> None:
    check(rule, case, tmp_path)
