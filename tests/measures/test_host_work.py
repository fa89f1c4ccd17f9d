"""What the host did while nothing was computed."""

from pathlib import Path

from dlprof.measures.host_work import PYTHON, host_work, launches
from tests import runs, traces
from tests.runs import MS


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
    # The kernel was launched at 280 µs and the device idle until 500 µs: all of it is the host's.
    frame = rank.once(host_work.function)
    found = {(n, p): ns for n, p, ns in frame.itertuples(index=False)}
    assert found == {
        (PYTHON, ""): 300_000,  # [400, 500) and [800, 1000)
        (PYTHON, "forward"): 200_000,
        ("aten::conv2d", "forward"): 200_000,
    }


def test_kernels_are_counted_per_step(tmp_path: Path) -> None:
    made = traces.training(3)
    frame = runs.rank_of(tmp_path, made).once(launches.function)
    assert frame["kernels"][0] == 3
