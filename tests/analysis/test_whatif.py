"""What a run's step would be with something changed: asked in words, replayed, with known answers or none."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.input.rules import input_wait
from dlprof.analysis.whatif import COLUMNS, PERFECT, Request, answers, factor, predictions, replays
from dlprof.errors import DlprofError, NotMeasured
from dlprof.read.run import open_run
from tests.fixtures import loaders, pipelines, runs, traces
from tests.fixtures.asking import ask
from tests.fixtures.runs import MS

GEMM, COPY = 600_000, 200_000


@pytest.mark.parametrize(
    ("text", "value"), [("2x", 2.0), ("x2", 2.0), ("1.5", 1.5), (" 1.5× ", 1.5), ("perfect", PERFECT), ("0.5x", 0.5)]
)
def test_speeds(text: str, value: float) -> None:
    assert factor(text) == value


@pytest.mark.parametrize("text", ["", "fast", "-2x", "0", "1e9x", "2 2"])
def test_no_speed(text: str) -> None:
    with pytest.raises(DlprofError, match=r"write 2x, 1\.5x or perfect"):
        factor(text)


def test_each_change_alone_and_in_words() -> None:
    asked = Request(input=PERFECT, workers=0, device=1.5, stages=True, microbatches=8)
    assert asked.named == ("perfect input", "workers 0", "device 1.5 × as fast", "even stages", "microbatches 8")
    assert [one.named for one in asked.singles] == [(name,) for name in asked.named]
    assert (asked.of_pipeline, asked.of_input, Request().named) == (True, True, ())
    assert not Request(network=2.0).of_pipeline


def job(fetch: int = 0) -> dict[str, Any]:
    """Steps of 1 ms: the host may fetch, then launches a copy and a kernel, and waits for both."""
    events: list[Any] = []
    for n in range(5):
        t = n * MS
        events += [traces.step(n, t, MS)]
        events += [traces.fetch(t, fetch)] if fetch else []
        at = t + fetch
        copied = traces.copy(at + 2_000, COPY, 4096, "HtoD (Pinned -> Device)", 10 * n + 1)
        events += [traces.call("cudaMemcpyAsync", at + 1_000, 1_000, 10 * n + 1), copied]
        events += traces.launched("gemm", at + 3_000, at + 2_000 + COPY, GEMM, 10 * n + 2)
        events += [traces.call("cudaStreamSynchronize", at + 5_000, GEMM + COPY, 10 * n + 3)]
    return traces.trace(*events, world_size=1)


@pytest.mark.parametrize(
    ("asked", "fetch", "ratio"),
    [
        (Request(), 0, 1.0),
        (Request(device=2.0), 0, 1 - 0.3),
        (Request(copies=2.0), 0, 1 - 0.1),
        (Request(device=2.0, copies=2.0), 0, 1 - 0.4),
        (Request(device=0.5), 0, 1.6),
        (Request(), 150_000, 1 - 0.15),
    ],
)
def test_traced_steps_are_replayed(tmp_path: Path, asked: Request, fetch: int, ratio: float) -> None:
    frame = replays((Request(), asked), runs.rank_of(tmp_path, job(fetch)))
    assert tuple(frame.columns) == COLUMNS
    (found,) = frame[(frame["change"] == 1) & (frame["fetch"] == (0.0 if fetch else 1.0))]["ratio"]
    assert found == pytest.approx(ratio, abs=0.02)


def test_a_rank_without_a_device_has_no_replay(tmp_path: Path) -> None:
    rank = runs.rank_of(tmp_path, traces.trace(traces.step(1, 0, MS), traces.op("aten::mm", 0, MS), world_size=1))
    assert len(replays((Request(),), rank)) == 0


def waiting(folder: Path) -> Path:
    """Record steps of 60 ms, 20 of them the loop's own, that wait for a worker's storage."""
    return loaders.recorded(folder, fetch=60, cpu=1, workers=1)


def computing(folder: Path) -> Path:
    """Record steps of 1 ms in which a device computes, and the host waits for it."""
    events: list[Any] = []
    for n in range(6):
        events += [traces.step(n, n * MS, MS), *traces.launched("gemm", n * MS, n * MS + 1_000, 990_000, n + 1)]
        events += [traces.call("cudaDeviceSynchronize", n * MS + 2_000, 989_000, 100 + n)]
    return runs.foreign(folder / "traces", traces.trace(*events, world_size=1))


def exchanging(folder: Path) -> Path:
    """Record steps of 14 ms on two CPUs, which compute for 10 and 12 ms; 2 ms are their all-reduce."""
    return runs.cpu_run(folder, 8 * MS, 8 * MS, extra_backward=(2 * MS, 2 * MS, 2 * MS))


# What is asked of a job, and the step then, ms; NaN: nobody knows.
REQUESTS: dict[str, tuple[Any, list[tuple[Request, float]]]] = {
    "a loader that waits for storage": (
        waiting,
        [
            *((Request(workers=n), ms) for n, ms in ((0, 80.0), (1, 60.0), (2, 30.0), (3, 20.0), (8, 20.0))),
            *((Request(input=2.0), 30), (Request(input=PERFECT), 20)),
            *((asked, math.nan) for asked in (Request(microbatches=4), Request(host=2.0), Request(copies=2.0))),
        ],
    ),
    "a device": (computing, [(Request(device=2.0), 0.505), (Request(host=2.0), 1), (Request(workers=4), math.nan)]),
    # A stage computes for 60 ms, and idles for an eighth of that with 8 micro-batches, for half of it with 2.
    "a pipeline of two stages": (
        pipelines.two_stages,
        [
            *((Request(microbatches=2), 100), (Request(microbatches=8), 77.5), (Request(schedule="GPipe"), 100)),
            *((Request(stages=True), 100), (Request(schedule="ZBVZeroBubble"), math.nan)),
        ],
    ),
    "two CPUs": (exchanging, [(Request(device=2.0), 8), (Request(network=2.0), 13), (Request(network=PERFECT), 12)]),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_what_a_step_would_be(tmp_path: Path, name: str) -> None:
    recorded, asked = REQUESTS[name]
    found = predictions(open_run(recorded(tmp_path)), [one for one, _ in asked])
    steps = [math.nan if one.step_ns is None else one.step_ns / MS for one in found]
    assert steps == pytest.approx([ms for _, ms in asked], rel=0.06, nan_ok=True)
    assert all(one.step_ns is not None or one.why for one in found)


def test_changes_together_show_the_loader_that_cannot_keep_up(tmp_path: Path) -> None:
    """With two workers the loop is the limit no more than the loader: twice as fast, it waits for data."""
    each = [
        [traces.step(n, n * 1_000 * MS, 20 * MS), traces.op("aten::mm", n * 1_000 * MS, 20 * MS)] for n in range(30)
    ]
    path = loaders.recorded(tmp_path, fetch=36, cpu=1, workers=2)
    traces.write(path / "ranks/00000/trace.json.gz", traces.trace(*each, world_size=1))
    found = answers(open_run(path), Request(device=2.0, workers=4))
    steps = [one.step_ns for one in (*found.alone, found.together) if one is not None]
    # More workers change nothing; two of them make a batch in 18 ms.
    assert steps == [pytest.approx(ms * MS, rel=0.15) for ms in (20, 18, 10)]


def test_what_has_no_answer_is_left_out_of_changes_together(tmp_path: Path) -> None:
    both = answers(open_run(waiting(tmp_path)), Request(input=PERFECT, microbatches=4))
    assert [a.step_ns is None for a in both.alone] == [False, True]
    assert both.together is not None
    assert both.together.changes == ("perfect input",)
    assert both.together.step_ns == both.alone[0].step_ns


def test_a_run_without_steps_has_no_answer(tmp_path: Path) -> None:
    with pytest.raises(NotMeasured):
        answers(open_run(runs.recorded(tmp_path / "run", (None, [], runs.CPU))), Request(device=2.0))


def test_the_report_predicts_the_same_with_the_same_range(tmp_path: Path) -> None:
    run = open_run(waiting(tmp_path))
    finding = ask(input_wait.RULE, run.path)
    forecasts = {int(one.value): one.step_ns for one in finding.forecasts}
    answered = predictions(run, [Request(workers=n) for n in forecasts])
    assert [one.step_ns for one in answered] == pytest.approx([*forecasts.values()])
    proposed = next(int(str(s.to)) for s in finding.changes[0].settings if s.name == "num_workers")
    (same,) = predictions(run, [Request(workers=proposed)])
    assert same.error_ns == pytest.approx(finding.error_ns) != 0
