"""Which modules the device's steps consist of, on hand-made traces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis import intervals as iv
from dlprof.analysis.modules.work import module_work
from dlprof.analysis.timeline.device import device_sets
from dlprof.analysis.timeline.steps import timing
from tests.fixtures import layers, runs, traces


def job(steps: int, ahead: int) -> dict[str, Any]:
    """Make a job of two modules whose device is so far behind the host, with an exchange and a copy beside them."""
    events: list[Any] = []
    for n in range(steps):
        t, c = 10_000 * n, 10 * n + 1
        d = t + ahead
        events += [
            traces.step(n, t, 10_000),
            layers.called("", "Net", t + 10, 3_000),
            layers.called("a", "Linear", t + 100, 1_000),
            traces.call("cudaLaunchKernel", t + 200, 10, c),
            traces.kernel("a", d + 300, 3_000, c),
            layers.called("b", "Linear", t + 1_200, 1_000),
            traces.call("cudaLaunchKernel", t + 1_300, 10, c + 1),
            traces.kernel("b", d + 3_300, 2_000, c + 1),
            traces.call("cudaLaunchKernel", t + 1_500, 10, c + 2),
            traces.kernel("b beside a", d + 2_000, 2_500, c + 2, stream=9),
            traces.call("cudaLaunchKernelExC", t + 4_000, 10, c + 3),
            traces.collective(d + 5_000, 2_000, 1_000, correlation=c + 3),
            traces.call("cudaMemcpyAsync", t + 5_000, 10, c + 4),
            traces.copy(d + 6_500, 1_000, 1_000, correlation=c + 4, stream=12),
        ]
    return traces.trace(*events)


@pytest.mark.parametrize("ahead", [0, 25_000])
def test_the_work_that_overlaps_counts_once_and_makes_up_the_busy_time(tmp_path: Path, ahead: int) -> None:
    data = runs.rank_of(tmp_path, job(6, ahead))
    rows = data.once(module_work)
    exposed = rows.set_index(["path", "part"])["exposed_ns"].to_dict()
    assert exposed["a", "forward"] == 3_000
    assert exposed["b", "forward"] == 2_000
    outside = rows.loc[rows["path"].str.startswith("("), "exposed_ns"].sum()
    assert outside == 1_700 + 500  # the exchange behind the kernels, and the copy behind that
    windows = data.once(timing).windows
    busy = iv.intersect(data.once(device_sets).busy, iv.merge(windows))
    assert rows["exposed_ns"].sum() == pytest.approx(iv.total(busy) / len(windows))
    assert rows["device_ns"].sum() == 3_000 + 2_000 + 2_500 + 2_000 + 1_000
