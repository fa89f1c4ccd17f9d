"""What the CUDA allocator took and what its retries cost; memory that grows, is full, or leaves room for a batch."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest

from dlprof.analysis.diagnosis import diagnose
from dlprof.analysis.memory.memory import memory_series, memory_use
from dlprof.analysis.memory.rules import (
    activation_memory,
    allocator_retries,
    device_allocations,
    memory_growth,
    memory_headroom,
)
from dlprof.errors import NotMeasured
from dlprof.read.run import open_run
from dlprof.result import Outcome, Setting
from tests.fixtures import holding, runs, traces
from tests.fixtures.allocator import GB, GPU, reading, recorded, write
from tests.fixtures.asking import ask
from tests.fixtures.holding import row
from tests.fixtures.runs import MS, light

MB = 1_000_000
SECOND = 1_000 * MS
EXPANDABLE = "expandable_segments:True"


def test_peaks_headroom_and_what_the_cache_could_not_serve(tmp_path: Path) -> None:
    readings = [reading(n, (20 + n) * GB) for n in range(10)] + [reading(10, 5 * GB, retries=3, ooms=1)]
    path = recorded(tmp_path, readings)
    (found,) = runs.measured(path, memory_use).frame(memory_use).to_dict("records")
    assert found == {
        "peak_allocated_bytes": 29 * GB + GB // 2, "peak_reserved_bytes": 31 * GB,
        "kept_bytes": 5 * GB, "total_bytes": 100 * GB,
        "retries": 3, "ooms": 1, "late": 5, "rank": 0,
    }  # fmt: skip
    (path / "ranks/00000/memory_snapshot.pickle").touch()
    result = diagnose(open_run(path), (), jobs=1)
    told = {fact.name: fact.value for fact in result.facts if fact.section == "Memory"}
    assert told["most allocated"] == "29.5 GB of 100 GB (30 %)"
    assert told["allocations retried after emptying the cache"] == "3"
    assert told["for pytorch.org/memory_viz"] == "ranks/00000/memory_snapshot.pickle"
    (panel,) = [p for p in result.panels if p.title == "GPU memory of PyTorch"]
    assert panel.columns == ("time_ns", "rank 0 reserved", "rank 0 allocated")
    assert panel.rows[-1] == (10 * SECOND, 6 * GB, 5 * GB)


def test_a_long_job_is_thinned_and_an_older_pytorch_tells_less(tmp_path: Path) -> None:
    readings = [reading(n, GB) | {"device_allocs": None} for n in range(1_001)]
    run = runs.measured(recorded(tmp_path, readings), memory_use, memory_series)
    assert run.frame(memory_use)["late"].to_list() == [-1]
    assert run.frame(memory_series)["step"].to_list() == list(range(0, 1_001, 3))


def test_a_job_without_cuda_is_not_measured(tmp_path: Path) -> None:
    path = recorded(tmp_path, [])
    for why in ("was not sampled", "CUDA allocator"):
        with pytest.raises(NotMeasured, match=why):
            runs.measured(path, memory_use).frame(memory_use)
        (path / "ranks/00000/memory.jsonl").unlink(missing_ok=True)


# -- retries


def retried(folder: Path, at: Sequence[int], *, longer: int = 10, facts: dict[str, Any] = GPU, **said: Any) -> Outcome:
    """Record 60 steps of 20 ms, and a reading each two; those in `at` retry and last longer, by so many ms."""
    steps = [light(n, (20 + longer * (n in at) + n % 2) * MS) for n in range(60)]
    path = runs.recorded(folder, (None, steps, facts))
    write(path, [reading(n, 40 * GB) | {"retries": sum(r <= n for r in at)} | said for n in range(1, 60, 2)])
    return ask(allocator_retries.RULE, path)


OFTEN = range(10, 60, 4)


def test_what_steps_around_retries_take_longer_is_the_saving(tmp_path: Path) -> None:
    found = retried(tmp_path, OFTEN)
    assert found.state == "found"
    # 13 of the steps that are steady (from the fourth on) last 10 ms longer.
    assert found.saving_ns == pytest.approx(13 * 10 * MS / 57, rel=0.02)
    assert found.share == pytest.approx(found.saving_ns / ((20.5 + 130 / 57) * MS), rel=0.01)
    assert (found.ranks, [cost.ns for cost in found.by_rank]) == ((0,), [found.saving_ns])
    assert "13 allocations succeeded only after the cache was emptied, with 42 GB of 100 GB" in found.summary
    assert [c.numerics for c in found.changes] == [False, True, False, False]
    assert found.evidence is not None
    assert found.evidence.columns[-1] == "longer, a mean step_ns"
    assert found.evidence.rows == ((0, 13, 0, 26, 31, found.saving_ns),)


CONF = "PYTORCH_CUDA_ALLOC_CONF"
ADVISED: dict[str, tuple[dict[str, Any], str, tuple[Setting, ...]]] = {
    "before torch 2.9": ({}, "", (Setting(CONF, None, EXPANDABLE),)),
    "the job's torch": ({"versions": {"torch": "2.9.0+cu128"}}, "", (Setting("PYTORCH_ALLOC_CONF", None, EXPANDABLE),)),
    "it is set": (
        {"env": {CONF: EXPANDABLE}, "loaders": [{"role": "train", "batch_size": 32}]},
        "a smaller batch (is 32)",
        (),
    ),
}


@pytest.mark.parametrize("name", ADVISED)
def test_retries_name_the_variable_and_what_it_is(name: str, tmp_path: Path) -> None:
    facts, first, settings = ADVISED[name]
    found = retried(tmp_path, OFTEN, facts=GPU | facts)
    assert (found.changes[0].settings, found.advice[0].startswith(first)) == (settings, True)


RETRIES: dict[str, tuple[Sequence[int], dict[str, Any], str, str]] = {
    "cost nothing": ([20, 40], {"longer": 0}, "clear", "2 allocations"),
    "there are none": ([], {}, "clear", "no allocation had to be tried again"),
    "while it starts up": ([0], {}, "clear", "no allocation had to be tried again"),
    "in every step": (range(60), {}, "not_measured", "58 allocations had to be tried again"),
    "without cuda": ([20], {"facts": dict(runs.CPU)}, "does_not_apply", "on the CPU"),
    "an old PyTorch": ([20], {"retries": None}, "not_measured", "does not count"),
}


@pytest.mark.parametrize("name", RETRIES)
def test_retries_are_left_alone_where(name: str, tmp_path: Path) -> None:
    at, how, state, why = RETRIES[name]
    found = retried(tmp_path, at, **how)
    assert (found.state, found.share or 0, why in (found.summary or found.why)) == (state, 0, True), found


# -- memory from the device in every step


def asking(folder: Path, *calls: tuple[str, int], thread: Any = traces.MAIN) -> Outcome:
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
    return ask(device_allocations.RULE, runs.foreign(folder, traces.trace(*events, world_size=1)))


@pytest.mark.parametrize("thread", [traces.MAIN, traces.AUTOGRAD])
def test_a_cache_that_every_step_empties_is_found(tmp_path: Path, thread: Any) -> None:
    # The backward pass asks for most of what it needs, on its own thread.
    found = asking(tmp_path, ("cudaFree", 2 * MS), ("cudaMalloc", 1 * MS), thread=thread)
    assert found.state == "found"
    assert found.saving_ns == pytest.approx(3 * MS, rel=0.05)
    assert "torch.cuda.empty_cache()" in found.advice[0]
    assert found.summary.startswith("Twice a step rank 0 asks")
    assert "takes 3.00 ms" in found.summary


@pytest.mark.parametrize("calls", [[], [("cudaMalloc", MS)], [("cudaFree", MS)]])
def test_growing_memory_and_none_at_all_are_left_alone(tmp_path: Path, calls: list[tuple[str, int]]) -> None:
    assert asking(tmp_path, *calls).state == "clear"


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
) -> Outcome:
    """Record a step a second; in second n each rank's process holds held(n) bytes, and maps so much of files beside.

    They are read in each second, or in these.
    """
    steps = [light(k, 900 * MS, profiled=int(k in profiled)) for k in range(n)]
    runs.recorded(folder, *((None, steps, runs.CPU) for _ in range(ranks)))
    for rank in range(ranks):
        lines = [
            {"at_ns": traces.BASE_NS + k * SECOND, "rss_bytes": held(k) + mapped(k), "anonymous_bytes": held(k)}
            | {"children_rss_bytes": children(k), "children_anonymous_bytes": children(k)}
            for k in read or range(n)
        ]
        at = folder / f"ranks/{rank:05d}/processes.jsonl"
        at.write_text("".join(json.dumps(row) + "\n" for row in lines))
    if left is not None:
        (folder / "hosts/node-1").mkdir(parents=True)
        host = [{"at_ns": traces.BASE_NS + k * SECOND, "memory_available_bytes": left} for k in range(n)]
        (folder / "hosts/node-1/host.jsonl").write_text("".join(json.dumps(row) + "\n" for row in host))
    return ask(memory_growth.RULE, folder)


def test_a_process_that_grows_is_told_when_the_host_is_full(tmp_path: Path) -> None:
    found = sampled(tmp_path, lambda n: GB + n * 10 * MB)
    assert (found.state, found.scope, found.saving_ns, found.ranks) == ("found", "risk", 0, (0,))
    # 10 MB a step of 0.9 s, and 2 GB left.
    assert found.title == "Memory grows, and is used up in 3.0 min"
    assert "by 10 MB a step of 900.0 ms; 2 GB are left on the host, enough for 200 steps" in found.summary
    assert found.evidence is not None
    assert found.evidence.columns == ("time_ns", "held")
    assert found.evidence.rows[-1] == (59 * SECOND, GB + 590 * MB)


def test_tensors_that_stay_on_the_gpu_are_told_with_the_gpus_memory(tmp_path: Path) -> None:
    path = runs.recorded(tmp_path / "run", (None, [light(n, 900 * MS) for n in range(60)], GPU))
    write(path, [reading(n, (20 * GB) + n * GB // 10) for n in range(60)])
    found = ask(memory_growth.RULE, path)
    assert (found.state, "on the GPU" in found.summary) == ("found", True)
    assert any("--memory" in a for a in found.advice)
    assert found.evidence is not None
    assert found.evidence.columns == ("step", "held")


def leak(n: int) -> int:
    return GB + n * 10 * MB


def same(_: int) -> int:
    return GB


def refills(n: int) -> int:
    """Hold 200 MB more while profiled; ten readings long nothing is asked for then: it fits into what was freed."""
    return GB + (200 * MB if n in range(5, 10) else max(100, 10 * (n - 10)) * MB * (n >= 10))


RARELY = [*range(60), *(round(60 * 1.02**k) for k in range(1, 140))]  # the less often the older the job is
LONG: dict[str, Any] = {"n": RARELY[-1] + 1, "read": RARELY}
SWOLLEN = range(15, 25)
FEW: dict[str, Any] = {"n": 17, "left": 22 * GB}

# What processes hold → what is found, and words of its title, summary or reason.
GROWTH: dict[str, tuple[Callable[[int], int], dict[str, Any], str, str]] = {
    "ranks of a host use up the same memory": (leak, {"ranks": 2}, "found", "is used up in 90 s"),
    "workers grow": (same, {"children": lambda n: GB // 2 + n * 10 * MB}, "found", "its workers' memory grew"),
    "it stays the same": (same, {}, "clear", ""),
    "once, for a buffer": (lambda n: GB + 500 * MB * (n > 30), {}, "clear", ""),
    "a cache fills": (lambda n: GB + int(500 * MB * (1 - 0.8**n)), {}, "clear", ""),
    "garbage is collected": (lambda n: GB + n % 10 * 50 * MB, {}, "clear", ""),
    "an interpreter's own": (lambda n: GB + n * 10_000, {}, "clear", ""),
    "read rarely, it slows down": (lambda n: GB + int(200 * MB * math.log(n + 60)), LONG, "clear", ""),
    "read rarely, it goes on": (leak, {**LONG, "left": 10 * GB}, "found", "by 10 MB a step"),
    "mapped from files": (same, {"mapped": lambda n: n * 20 * MB}, "clear", ""),
    "it lasts for days": (lambda n: 100 * MB + n * 200_000, {"left": 1_000 * GB}, "clear", "would last for"),
    # An allocator that finds no use for what was freed: 2 MB a step, and 22 GB left. In ten minutes, it is growth.
    "a minute of what may last for hours": (
        same, {"children": lambda n: 300 * MB + n * 2 * MB, "left": 22 * GB}, "not_measured",
        "its workers' memory grew by 94 MB in 47 steps, which may be what its allocator keeps",
    ),
    "ten minutes of it": (same, {"children": lambda n: 300 * MB + n * 2 * MB, "left": 22 * GB, "n": 600}, "found", ""),
    "too few readings": (leak, {"n": 15}, "not_measured", "fewer than 18 readings"),
    "an unknown end": (leak, {"left": None}, "not_measured", "was not read"),
    "what the profiler freed is filled first": (
        refills, {"n": 55, "profiled": range(5, 10)}, "found", "by 10 MB a step",
    ),
    "it never holds more than the profiler did": (
        lambda n: min(refills(n), GB + 200 * MB), {"n": 55, "profiled": range(5, 10)}, "clear", "",
    ),
    "the profiler holds more meanwhile": (
        lambda n: leak(n) + (n in SWOLLEN) * GB + (n < 15) * GB, {"profiled": SWOLLEN}, "found",
        "is used up in 3.0 min",
    ),
    "few readings beside the profiler's": (same, {"n": 30, "profiled": range(10, 20)}, "not_measured", "fewer than 18"),
    # 3 GB in 17 s, with 22 GB left.
    "few, much and even": (lambda n: GB + n * 176 * MB, FEW, "found", "used up in 112 s"),
    "few, much and noisy": (lambda n: GB + n * 176 * MB + n % 3 * 60 * MB, FEW, "found", ""),
    "few, once": (lambda n: GB + 3 * GB * (n > 8), FEW, "not_measured", ""),
    "few, a cache fills": (lambda n: GB + int(3 * GB * (1 - 0.8**n)), FEW, "not_measured", ""),
    "few, garbage": (lambda n: GB + n % 5 * 700 * MB, FEW, "not_measured", ""),
    "few, little": (lambda n: GB + n * 20 * MB, FEW, "not_measured", ""),
}  # fmt: skip


@pytest.mark.parametrize("name", GROWTH)
def test_memory_grows_or_not_where(name: str, tmp_path: Path) -> None:
    held, how, state, words = GROWTH[name]
    found = sampled(tmp_path, held, **how)
    assert (found.state, words in f"{found.title} {found.summary} {found.why}") == (state, True), found
    if state == "found":
        assert found.ranks == tuple(range(how.get("ranks", 1)))
    if "workers" in name:
        assert [(c.settings, c.numerics, "data set" in c.text) for c in found.changes] == [((), False, True)]


# -- room for a larger batch


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
    told = {**GPU, "loaders": [{"role": "train", "batch_size": 32}]} if facts is None else facts
    path = runs.recorded(folder, (traces.trace(*events, world_size=1), [], told))
    peaks = {"peak_allocated_bytes": peak * GB, "peak_reserved_bytes": (peak + 2) * GB}
    write(path, [reading(n, kept * GB, **peaks) for n in range(9)])
    return path


def test_the_batch_that_fills_the_gpu_is_named_and_no_larger_one(tmp_path: Path) -> None:
    found = ask(memory_headroom.RULE, waiting(tmp_path, busy=600))
    assert (found.state, found.scope, found.training) == ("found", "step", True)
    # The host takes 1 ms for any batch. With 1.5 times the batch the GPU works for 0.9 ms of it: 48 samples.
    assert found.changes[0].settings == (Setting("batch_size", 32, 48),)
    assert (found.changes[0].numerics, found.changes[0].training) == (True, True)
    assert found.saving_ns == pytest.approx(MS / 3, rel=0.01)
    assert (found.ranks, found.verdict) == ((0,), "33 % of each step would be saved by a batch 1.5 times as large.")
    assert found.evidence is not None
    # 10 GB stay and 20 come and go: 40 GB with 1.5 times the batch.
    assert [row[::2] for row in found.evidence.rows] == [(1, 0.3), (1.5, 0.4)]
    times, speeds = zip(*(row[1::2] for row in found.evidence.rows), strict=True)
    assert "For 40 % of the 1.00 ms step the GPU waits." in found.summary
    assert "1.5 times as large, which needs 40 % of its memory, it works for nine tenths of the step" in found.summary
    assert times == pytest.approx((MS, MS / 1.5), rel=0.01)
    assert speeds == pytest.approx((1, 1.5), rel=0.01)


def test_of_a_batch_that_no_loader_has_the_multiple_is_told(tmp_path: Path) -> None:
    found = ask(memory_headroom.RULE, waiting(tmp_path, busy=400, facts=GPU))
    assert found.changes[0].text.startswith("a batch 2.25 times as large, ")
    assert (found.changes[0].settings, found.changes[0].training) == ((), True)


ROOM: dict[str, tuple[dict[str, Any], str, str]] = {
    "it works nearly all the time": ({"busy": 980}, "clear", "a larger batch would save little"),
    "it works for nine tenths": ({"busy": 905}, "clear", "a larger batch would save little"),
    "eight times the batch would not fill it": ({"busy": 100}, "clear", "up to 8 times the batch the GPU would still"),
    "its data come as late with any batch": ({"busy": 600, "host": "fetch"}, "clear", "up to 8 times the batch"),
    "the script's Python may grow": ({"busy": 600, "host": "python"}, "clear", "up to 8 times the batch"),
    "the batch that fills it does not fit": ({"busy": 600, "peak": 80}, "clear", "1.5 times as large, needs 115 %"),
    "some of its memory is left": ({"busy": 980, "kept": 40, "peak": 90}, "clear", ""),
    "there is none": ({"busy": 600, "facts": dict(runs.CPU)}, "does_not_apply", "on the CPU"),
    "its memory is unknown": ({"busy": 600, "facts": {"device": {"type": "cuda"}}}, "not_measured", "not recorded"),
}


@pytest.mark.parametrize("name", ROOM)
def test_a_gpu_is_left_alone_where(name: str, tmp_path: Path) -> None:
    given, state, why = ROOM[name]
    found = ask(memory_headroom.RULE, waiting(tmp_path, **given))
    assert (found.state, found.share or 0, why in (found.summary or found.why)) == (state, 0, True), found


@pytest.mark.parametrize("missing", ["trace.json.gz", "memory.jsonl"])
def test_steps_that_cannot_be_replayed_or_memory_that_was_not_read_tell_nothing(tmp_path: Path, missing: str) -> None:
    path = waiting(tmp_path, busy=600)
    (path / "ranks/00000" / missing).unlink()
    assert ask(memory_headroom.RULE, path).state == "not_measured"


def test_memory_that_is_nearly_used_up_is_a_risk(tmp_path: Path) -> None:
    found = ask(memory_headroom.RULE, waiting(tmp_path, busy=980, kept=40, peak=94))
    assert (found.state, found.scope, found.saving_ns, found.ranks) == ("found", "risk", 0, (0,))
    assert ("94 GB of 100 GB allocated" in found.summary, "(is 32)" in found.changes[0].text) == (True, True)
    assert [(c.settings, c.numerics) for c in found.changes] == [
        ((), True),
        ((), False),
        ((Setting(CONF, None, EXPANDABLE),), False),
    ]
    assert found.evidence is not None
    columns = ("rank", "peak allocated_bytes", "peak reserved_bytes", "GPU memory_bytes", "reserved_share")
    assert found.evidence.columns == columns
    assert found.evidence.rows == ((0, 94 * GB, 96 * GB, 100 * GB, 0.96),)


# -- activations that leave no room


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


def test_checkpoints_that_make_room_for_a_batch_are_found(tmp_path: Path) -> None:
    found = ask(activation_memory.RULE, layered(tmp_path, busy=300))
    assert (found.state, found.scope, found.ranks, found.training) == ("found", "step", (0,), True)
    # With checkpoints 6 GB stay of 60, which grow with 4 of temporary memory; the layer that computes again has 5.4 and
    # what flows through it on top, when the temporary memory is gone. More would fit; thrice the batch fill the GPU.
    assert found.changes[0].settings == (Setting("batch_size", 32, 96),)
    assert found.changes[0].text.startswith("`torch.utils.checkpoint` around `layers.*`, and `batch_size=")
    assert found.changes[0].numerics
    # The host launches a forward pass again: 1.33 ms for three batches of now. The device computes for 1.2 ms.
    assert found.saving_ns == pytest.approx((1 - 4 / 9) * MS, rel=0.01)


ACTIVATIONS: dict[str, tuple[dict[str, Any], str]] = {
    "the GPU limits the step": ({"busy": 980}, "the GPU limits the step"),
    "no batch fills it": ({"busy": 100}, "no batch is known to fill"),
    "there is room": ({"busy": 300, "activations": 20, "states": 15, "peak": 36}, "memory_headroom"),
    "the model fills it itself": ({"busy": 300, "activations": 15, "states": 66}, "not its largest part"),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_left_alone_where(name: str, tmp_path: Path) -> None:
    how, why = ACTIVATIONS[name]
    clear = ask(activation_memory.RULE, layered(tmp_path, **how))
    assert (clear.state, why in clear.summary) == ("clear", True)


def test_without_a_count_of_memory_or_a_gpu_activations_tell_nothing(tmp_path: Path) -> None:
    path = layered(tmp_path / "gpu", busy=300)
    (path / "ranks/00000/held.json").unlink()
    assert ask(activation_memory.RULE, path).state == "not_measured"
    assert ask(activation_memory.RULE, runs.cpu_run(tmp_path, 5 * MS, 5 * MS)).state == "does_not_apply"
