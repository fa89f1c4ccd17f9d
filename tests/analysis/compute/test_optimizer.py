"""What the optimizer takes, on hand-made runs of a CPU and of a GPU."""

from pathlib import Path

import numpy as np
import pytest

from dlprof.analysis.compute.optimizer import optimizer_work
from dlprof.analysis.engine import RankData
from dlprof.analysis.step.partition import in_optimizer
from dlprof.errors import NotMeasured
from dlprof.read.run import open_run
from tests.fixtures import runs, traces
from tests.fixtures.runs import MS


def test_on_a_cpu_it_is_the_mean_of_all_steady_steps(tmp_path: Path) -> None:
    steps = [runs.light(n, 10 * MS, optimizer_ns=2 * MS + n % 2 * 1_000) for n in range(30)]
    rank = RankData(open_run(runs.recorded(tmp_path / "run", (None, steps, runs.CPU))).ranks[0])
    (row,) = rank.once(optimizer_work).to_dict("records")
    assert row["ns"] == pytest.approx(2 * MS + 500, rel=1e-3)
    assert 0 < row["noise_ns"] < 500
    assert row["idle_ns"] == 0
    assert np.isnan(row["calls"])


def test_a_foreign_trace_of_a_cpu_tells_its_ranges_and_operators(tmp_path: Path) -> None:
    events = [
        e
        for n in range(2)
        for e in (
            traces.step(n, n * MS, MS),
            traces.op("aten::mm", n * MS, 100_000),
            traces.annotation("Optimizer.step#SGD.step", n * MS + 200_000, 300_000),
            traces.op("aten::add_", n * MS + 210_000, 50_000),
            traces.op("aten::mul_", n * MS + 270_000, 50_000),
        )
    ]
    rank = runs.rank_of(tmp_path, traces.trace(*events, device="", backend="", world_size=1))
    (row,) = rank.once(optimizer_work).to_dict("records")
    assert (row["ns"], row["calls"]) == (300_000, 2)


def waiting(folder: Path, mark: str, untraced: int) -> float:
    """Return what an optimizer takes that waits for 3 of its 4 traced ms until something is exchanged."""
    events = [
        e
        for n in range(3)
        for e in (
            traces.step(20 + n, n * 10 * MS, 10 * MS),
            traces.op("aten::mm", n * 10 * MS, 6 * MS),
            traces.annotation("dlprof::optimizer", n * 10 * MS + 6 * MS, 4 * MS),
            traces.annotation(mark, n * 10 * MS + 6 * MS, 3 * MS),
            traces.op("aten::add_", n * 10 * MS + 9 * MS, 1 * MS),
        )
    ]
    steps = [runs.light(n, 6 * MS + untraced, optimizer_ns=untraced, profiled=int(n > 19)) for n in range(23)]
    run = runs.recorded(folder, (traces.trace(*events, device="", backend=""), steps, runs.CPU))
    (row,) = RankData(open_run(run).ranks[0]).once(optimizer_work).to_dict("records")
    assert row["calls"] == 1
    return float(row["ns"])


@pytest.mark.parametrize("mark", ["horovod:all_reduce", "gloo:broadcast"])
def test_what_it_exchanges_is_none_of_it(tmp_path: Path, mark: str) -> None:
    # Gradients, as Horovod's does within its step, or parameters (ZeRO).
    assert waiting(tmp_path / "same", mark, 4 * MS) == pytest.approx(1 * MS, rel=1e-3)
    # In the other steps it waits for longer: what it computes takes no longer for that.
    assert waiting(tmp_path / "longer", mark, 24 * MS) == pytest.approx(1 * MS, rel=1e-3)
    assert waiting(tmp_path / "shorter", mark, 2 * MS) == pytest.approx(0.5 * MS, rel=1e-3)


def test_on_a_gpu_it_is_its_kernels_and_the_idle_time_before_them(tmp_path: Path) -> None:
    made = traces.trace(
        traces.step(1, 0, MS),
        traces.launched("gemm", 0, 10_000, 190_000, 1),
        traces.annotation("Optimizer.step#Adam.step", 250_000, 400_000),
        # The device ran dry at 200 µs: 50 µs of that are before the optimizer, 55 µs within, and 5 µs the launch's own.
        traces.launched("multi_tensor_apply", 300_000, 310_000, 40_000, 2),
        traces.launched("multi_tensor_apply", 320_000, 350_000, 50_000, 3),
        traces.launched("elsewhere", 700_000, 710_000, 290_000, 4),
    )
    (row,) = runs.rank_of(tmp_path, made).once(optimizer_work).to_dict("records")
    # From 400 to 650 µs the device idles, too, while the thread is in the optimizer.
    assert row["idle_ns"] == 55_000 + 250_000
    assert row["ns"] == 90_000 + row["idle_ns"]
    assert row["calls"] == 2


def test_the_closure_of_a_step_is_none_of_it(tmp_path: Path) -> None:
    """LBFGS and Lightning compute the loss inside of the optimizer's step."""
    events = [
        traces.annotation("Optimizer.step#AdamW.step", 0, 1_000),
        traces.annotation("dlprof::forward", 100, 300),
        traces.annotation("dlprof::backward", 500, 200),
        traces.op("aten::mm", 150, 100),
    ]
    rank = runs.rank_of(tmp_path, traces.trace(*events, device="", backend="", world_size=1))
    first = rank.once(in_optimizer)[0, 0]
    assert (rank.once(in_optimizer) - first).tolist() == [[0, 100], [400, 500], [700, 1_000]]


def test_without_an_optimizer_it_abstains(tmp_path: Path) -> None:
    made = traces.trace(traces.step(1, 0, MS), traces.op("aten::mm", 0, MS), device="", backend="", world_size=1)
    with pytest.raises(NotMeasured, match="no optimizer"):
        runs.rank_of(tmp_path, made).once(optimizer_work)
