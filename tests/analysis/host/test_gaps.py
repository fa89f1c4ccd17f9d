"""Idle time by its cause on hand-made traces, known to the nanosecond."""

from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.host.gaps import (
    LAUNCHES,
    ON_CPU,
    PYTHON,
    SCRIPT,
    check_launches,
    gaps,
    host_gains,
    host_work,
    launch_means,
    small_kernels,
)
from dlprof.errors import NotMeasured
from tests.fixtures import runs, traces
from tests.fixtures.runs import MS, asked


def test_each_gap_has_its_cause(tmp_path: Path) -> None:
    made = traces.trace(
        traces.step(0, 0, MS),
        traces.op("aten::mm", 0, 200_000),
        traces.launched("first", 0, 0, 100_000, 1),
        # Launched 30 µs after the first had ended, by a host that was in operators all along: late.
        traces.launched("late", 130_000, 140_000, 60_000, 2),
        # Launched while that ran, and begun 5 µs after it: what starting a kernel takes.
        traces.launched("queued", 150_000, 205_000, 95_000, 3),
        # Launched in time, and begun 50 µs late: a dependency.
        traces.launched("dependent", 180_000, 350_000, 50_000, 4),
        # The host was in nothing that is traced from 200 to 600 µs: Python.
        traces.op("aten::mm", 600_000, 390_000),
        traces.launched("last", 600_000, 610_000, 390_000, 5),
    )
    (row,) = runs.rank_of(tmp_path, made).once(gaps).to_dict("records")
    graph_ns, python_ns = row.pop("graph_gain_ns"), row.pop("python_gain_ns")
    # A host without its Python has the lead, and is not late elsewhere either; without its calls it is in Python while
    # the device works. Neither gains more than the host is late, and its launches take.
    assert 200_000 <= python_ns <= 240_000
    assert 40_000 < graph_ns <= 240_000 + 15_000
    assert row == {
        "launching_ns": 35_000 + 5_000,  # [100, 135) and, after Python, [600, 605)
        "python_ns": 200_000,  # [400, 600)
        "latency_ns": 15_000,  # 5 µs each of late, queued and last
        "queued_ns": 50_000,
        "small_ns": 0,
    }


@pytest.mark.parametrize(("workers", "mb", "python"), [(0, 10, 1.0), (4, 10, 0.03), (4, 5, 0.515)])
def test_freeing_the_memory_of_batches_is_not_the_scripts_python(
    tmp_path: Path, workers: int, mb: int, python: float
) -> None:
    events: list[Any] = []
    for n in range(3):
        t, c = n * 2 * MS, 10 * n + 1
        # For the first half of a step nothing is called; 0.097 ms of that frees a MB from workers.
        events += [
            traces.step(n, t, 2 * MS),
            traces.call("cudaMemcpyAsync", t + MS, 406_000, c),
            traces.copy(t + MS + 5_000, 400_000, mb * 1_000_000, correlation=c),
            traces.launched("gemm", t + MS + 410_000, t + MS + 416_000, 500_000, c + 1),
            traces.call("cudaDeviceSynchronize", t + MS + 416_000, 502_000, c + 2),
            traces.op("aten::mm", t + MS + 920_000, 80_000),
        ]
    facts = {"device": {"type": "cuda", "name": "NVIDIA H100"}, "loaders": [{"role": "train", "num_workers": workers}]}
    path = runs.recorded(tmp_path / "run", (traces.trace(*events, world_size=1), [], facts))
    assert runs.measured(path, gaps).frame(gaps)["python_gain_ns"][0] == pytest.approx(python * MS, rel=0.1)


def test_gaps_behind_small_kernels_are_told_apart(tmp_path: Path) -> None:
    made = traces.trace(
        traces.step(0, 0, 200_000),
        traces.op("aten::add", 0, 200_000),
        traces.launched("large", 0, 0, 50_000, 1),
        traces.launched("small", 60_000, 70_000, 4_000, 2),
        traces.launched("small", 90_000, 100_000, 4_000, 3),
        traces.launched("large", 101_000, 106_000, 94_000, 4),
    )
    rank = runs.rank_of(tmp_path, made)
    (row,) = rank.once(gaps).to_dict("records")
    # Late until the launches have returned, and 5 µs each to start.
    assert (row["launching_ns"], row["latency_ns"]) == (15_000 + 21_000 + 2_000, 10_000)
    assert row["small_ns"] == 21_000 + 5_000 + 2_000
    (small,) = rank.once(small_kernels).to_dict("records")
    assert small == {"name": "small", "count": 2, "mean_ns": 4_000, "small": 2, "kernels": 4}


def test_what_the_host_waits_for_is_not_launching(tmp_path: Path) -> None:
    made = traces.trace(
        traces.step(0, 0, MS),
        traces.launched("first", 0, 10_000, 90_000, 1),
        traces.fetch(100_000, 500_000),
        traces.launched("second", 600_000, 610_000, 390_000, 2),
    )
    (row,) = runs.rank_of(tmp_path, made).once(gaps).to_dict("records")
    assert row["launching_ns"] + row["python_ns"] == 10_000  # the launches of the first and the second kernel


def test_without_a_device_it_abstains(tmp_path: Path) -> None:
    rank = runs.rank_of(tmp_path, traces.trace(traces.op("aten::mm", 0, 10), device="", backend=""))
    with pytest.raises(NotMeasured):
        rank.once(gaps)


def test_the_hosts_time_is_split_by_what_ran(tmp_path: Path) -> None:
    rank = runs.rank_of(
        tmp_path,
        traces.trace(
            traces.step(1, 0, MS),
            traces.annotation("dlprof::forward", 0, 400_000),
            traces.op("aten::conv2d", 100_000, 200_000),
            traces.op("aten::convolution", 110_000, 100_000),
            traces.call("cudaLaunchKernel", 280_000, 10_000, 1),
            traces.kernel("gemm", 500_000, 300_000, 1),
        ),
    )
    # The kernel was launched until 290 µs, and waited until 500 µs for something that is not the host's.
    frame = rank.once(host_work)
    found = {(n, p): ns for n, p, ns in frame.itertuples(index=False)}
    assert found == {
        (PYTHON, ""): 200_000,  # [800, 1000)
        (PYTHON, "forward"): 100_000,
        ("aten::conv2d", "forward"): 190_000,
    }


@pytest.mark.parametrize(("kernels", "why"), [(0, "no kernels"), (1, "1 kernel a step"), (7, "7 kernels a step")])
def test_a_device_with_next_to_nothing_to_do_does_not_train(tmp_path: Path, kernels: int, why: str) -> None:
    events = [traces.launched("gemm", i * 9_000, i * 9_000 + 6_000, 2_000, 1 + i) for i in range(kernels)]
    run = runs.foreign(tmp_path, traces.trace(traces.step(0, 0, MS), *events, world_size=1))
    with pytest.raises(NotMeasured, match=why):
        asked(runs.measured(run, launch_means), check_launches)


def test_kernels_are_counted_per_step(tmp_path: Path) -> None:
    made = traces.training(3)
    frame = runs.rank_of(tmp_path, made).once(launch_means)
    assert frame["kernels"][0] == 3


def test_a_faster_host_gains_by_its_cause(tmp_path: Path) -> None:
    step = [traces.step(0, 0, MS)]
    for i in range(10):  # each is launched 40 µs after the one before had ended
        at = i * 100_000
        step += traces.launched("small", at + 35_000, at + 40_000, 60_000, 1 + i)
    run = runs.foreign(tmp_path / "device", traces.trace(*step, world_size=1))
    gains = runs.measured(run, host_gains).frame(host_gains)
    assert gains == {SCRIPT: 0, LAUNCHES: pytest.approx(400_000, rel=0.05)}
    on_cpu = traces.trace(traces.step(0, 0, MS), traces.op("aten::mm", 0, 600_000), device="", backend="", world_size=1)
    run = runs.foreign(tmp_path / "cpu", on_cpu)
    assert runs.measured(run, host_gains).frame(host_gains) == {ON_CPU: 400_000}
