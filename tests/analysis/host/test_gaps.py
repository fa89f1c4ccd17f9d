"""What a host did while its device idled, and what faster launches would give, on hand-made traces."""

from pathlib import Path

import pytest

from dlprof.analysis.host.gaps import PYTHON, check_launches, host_work, launch_means
from dlprof.analysis.host.parts import ON_CPU, ON_DEVICE, host_gains
from dlprof.errors import NotMeasured
from tests.fixtures import runs, traces
from tests.fixtures.runs import MS, asked


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


def test_a_faster_host_gains_what_its_launches_cost(tmp_path: Path) -> None:
    step = [traces.step(0, 0, MS)]
    for i in range(10):  # each is launched 40 µs after the one before had ended
        at = i * 100_000
        step += traces.launched("small", at + 35_000, at + 40_000, 60_000, 1 + i)
    run = runs.foreign(tmp_path / "device", traces.trace(*step, world_size=1))
    gains = runs.measured(run, host_gains).frame(host_gains)
    assert gains == {ON_DEVICE: pytest.approx(400_000, rel=0.05)}
    on_cpu = traces.trace(traces.step(0, 0, MS), traces.op("aten::mm", 0, 600_000), device="", backend="", world_size=1)
    run = runs.foreign(tmp_path / "cpu", on_cpu)
    assert runs.measured(run, host_gains).frame(host_gains) == {ON_CPU: 400_000}
