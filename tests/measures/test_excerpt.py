"""The step that is drawn."""

from pathlib import Path

import pytest

from dlprof.errors import NotMeasured
from dlprof.measures.excerpt import excerpt
from tests import runs, traces
from tests.runs import MS


def test_the_middle_step_is_drawn_by_lane_and_category(tmp_path: Path) -> None:
    frame = runs.rank_of(tmp_path, traces.training(3)).once(excerpt.function)
    assert set(frame["step"]) == {1}
    device = frame[frame["lane"] == "device"]
    assert set(device["category"]) == {"computation", "communication", "copy"}
    assert "sm90_gemm" in set(device["name"])
    thread = frame[frame["lane"] == "thread"]
    assert dict(zip(thread["name"], thread["dur_ns"], strict=True)) == {"fetch": 100_000, "optimizer": 80_000}
    assert (frame["start_ns"] >= frame["begin_ns"]).all()


def test_thousands_of_kernels_become_what_a_screen_can_show(tmp_path: Path) -> None:
    kernels = [traces.kernel(f"k{n % 7}", n * 1_000, 900) for n in range(10_000)]
    frame = runs.rank_of(tmp_path, traces.trace(traces.step(1, 0, 10 * MS), *kernels)).once(excerpt.function)
    assert len(frame) < 700


def test_a_trace_without_steps_draws_none(tmp_path: Path) -> None:
    with pytest.raises(NotMeasured):
        runs.rank_of(tmp_path, traces.trace(traces.kernel("gemm", 0, MS))).once(excerpt.function)
