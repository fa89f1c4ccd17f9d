"""What the host does while its device waits: loops, waits, the optimizer, Python and launches, each with its gain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from dlprof.analysis.host import parts
from dlprof.analysis.host.parts import host_parts
from tests.fixtures import runs, traces
from tests.fixtures.phases import STEPS, US, called_again, loop, one_by_one, trained
from tests.fixtures.runs import MS


def measured(folder: Path, *between: Any, length: int) -> pd.DataFrame:
    run = runs.foreign(folder / "traces", trained(*between, length=length))
    return runs.measured(run, host_parts).frame(host_parts).set_index("part")


def norms(at: int, ids: int, turns: int, *, reads: bool) -> list[Any]:
    return loop(at, ids, turns, "linalg_vector_norm", reads=reads)


@pytest.mark.parametrize("reads", [False, True])
def test_a_loop_between_the_phases_gains_nearly_all_of_it(tmp_path: Path, reads: bool) -> None:
    frame = measured(tmp_path, lambda at, ids: norms(at, ids, 40, reads=reads), length=4_100 * US)
    loop = frame.loc[parts.LOOP]
    assert (loop["after"], loop["turns"]) == ("backward", 40)
    assert loop["waits"] == (40 if reads else 0)
    assert set(loop["names"].split()) == {"aten::linalg_vector_norm", *(["aten::item"] if reads else [])}
    # The loop is 2 ms of the 4.1; the device computes for 0.5 ms of the step.
    assert loop["gain_ns"] == pytest.approx((1 - parts.LOOP_LEFT) * 2 * MS, rel=0.06)
    # Its waits are its own, and told by it alone.
    assert frame.loc[parts.WAITS, "gain_ns"] == 0


def test_a_few_operators_are_no_loop(tmp_path: Path) -> None:
    frame = measured(tmp_path, lambda at, ids: norms(at, ids, 10, reads=False), length=2_600 * US)
    assert parts.LOOP not in frame.index
    # What the host does there holds the device up all the same.
    assert frame.loc[parts.BETWEEN, "gain_ns"] == pytest.approx(500 * US, rel=0.2)


def test_operators_that_launch_nothing_are_no_loop(tmp_path: Path) -> None:
    frame = measured(tmp_path, lambda at, ids: loop(at, ids, 40, "detach", launches=False), length=4_100 * US)
    assert parts.LOOP not in frame.index
    assert frame.loc[parts.BETWEEN, "gain_ns"] == pytest.approx(2 * MS, rel=0.06)


def test_what_the_backward_pass_does_for_a_loop_is_part_of_it(tmp_path: Path) -> None:
    run = runs.foreign(tmp_path / "traces", one_by_one())
    row = runs.measured(run, host_parts).frame(host_parts).set_index("part").loc[parts.LOOP]
    assert (row["after"], row["turns"], row["in_graph"]) == ("forward", 20, 1)
    # 1 ms of the loss, and 20 × 80 µs of the backward pass.
    assert row["host_ns"] == pytest.approx(2.6 * MS, rel=0.05)
    assert row["gain_ns"] == pytest.approx((1 - parts.LOOP_LEFT) * 2.6 * MS, rel=0.1)


@pytest.mark.parametrize(("calls", "same", "gain"), [(5, True, 1.6), (5, False, 1.7), (3, True, 1.7)])
def test_a_model_that_is_called_again_and_again_might_be_called_once(
    tmp_path: Path, calls: int, same: bool, gain: float
) -> None:
    run = runs.foreign(tmp_path / "traces", called_again(calls, same=same))
    row = runs.measured(run, host_parts).frame(host_parts).set_index("part").loc[parts.LAUNCHES]
    # Of 2 ms a fifth is left of the calls of one model; of those of several 0.3 ms for calling graphs.
    assert row["gain_ns"] == pytest.approx(gain * MS, rel=0.02)


def test_python_between_the_phases_is_gained_where_the_device_waits_for_it(tmp_path: Path) -> None:
    frame = measured(tmp_path, length=3_100 * US)
    assert frame.loc[parts.BETWEEN, "gain_ns"] == pytest.approx(1 * MS, rel=0.05)


def test_waits_that_follow_each_other_are_removed_together(tmp_path: Path) -> None:
    def waits(at: int, ids: int) -> list[Any]:
        """Queue 1 ms of work, wait for it in three places, and compute in Python for 0.5 ms."""
        return [
            *traces.launched("long", at - 20 * US, at, MS, ids),
            traces.call("cudaDeviceSynchronize", at + 10 * US, 995 * US, ids + 1),
            traces.call("cudaDeviceSynchronize", at + 1_010 * US, 6 * US, ids + 2),
            traces.call("cudaDeviceSynchronize", at + 1_020 * US, 6 * US, ids + 3),
        ]

    frame = measured(tmp_path, waits, length=3_600 * US)
    assert frame.loc[parts.WAITS, "waits"] == 3
    # Without one alone the host waits in the next; without all three it launches for the 1 ms that the device computes.
    assert frame.loc[parts.WAITS, "gain_ns"] == pytest.approx(MS, rel=0.1)


def test_launches_are_those_of_forward_and_backward(tmp_path: Path) -> None:
    frame = measured(tmp_path, lambda at, ids: norms(at, ids, 40, reads=False), length=4_100 * US)
    # Their 2 ms are gone, but for 0.3 that calling graphs takes, and the host goes on with the loop meanwhile.
    assert frame.loc[parts.LAUNCHES, "gain_ns"] == pytest.approx(1.7 * MS, rel=0.05)
    assert frame.loc[parts.ALL, "gain_ns"] > frame["gain_ns"].drop(parts.ALL).max()


def test_a_trace_of_others_has_launches_and_no_loops(tmp_path: Path) -> None:
    events: list[Any] = []
    for n in range(STEPS):
        events.append(traces.step(n, n * 4 * MS, 4 * MS))
        events += norms(n * 4 * MS, 1_000 * (n + 1), 40, reads=False)
    run = runs.foreign(tmp_path / "traces", traces.trace(*events, world_size=1))
    frame = runs.measured(run, host_parts).frame(host_parts)
    # Nothing marks the phases: these may be the layers of a model.
    assert parts.LOOP not in set(frame["part"])
    assert float(frame.loc[frame["part"] == parts.LAUNCHES, "gain_ns"].iloc[0]) > MS


@pytest.mark.parametrize(("workers", "gain"), [(0, 1.0 * MS), (4, 0.03 * MS)])
def test_freeing_the_memory_of_batches_is_not_the_scripts_python(tmp_path: Path, workers: int, gain: float) -> None:
    events: list[Any] = []
    for n in range(3):
        t, c = n * 2 * MS, 10 * n + 1
        # For the first half of a step nothing is called; of 10 MB from workers, 0.97 ms of that is freeing them.
        events += [
            traces.step(n, t, 2 * MS),
            traces.call("cudaMemcpyAsync", t + MS, 406_000, c),
            traces.copy(t + MS + 5_000, 400_000, 10_000_000, correlation=c),
            traces.launched("gemm", t + MS + 410_000, t + MS + 416_000, 500_000, c + 1),
            traces.call("cudaDeviceSynchronize", t + MS + 416_000, 502_000, c + 2),
            traces.op("aten::mm", t + MS + 920_000, 80_000),
        ]
    facts = {"device": {"type": "cuda", "name": "NVIDIA H100"}, "loaders": [{"role": "train", "num_workers": workers}]}
    path = runs.recorded(tmp_path / "run", (traces.trace(*events, world_size=1), [], facts))
    frame = runs.measured(path, host_parts).frame(host_parts).set_index("part")
    assert frame.loc[parts.BETWEEN, "gain_ns"] == pytest.approx(gain, rel=0.1)
