"""What a rank did at each moment of hand-made steps: exclusive parts, which together are the steps."""

from pathlib import Path

import pytest

from dlprof.analysis import intervals as iv
from dlprof.analysis.engine import RankData
from dlprof.analysis.step.partition import partition
from dlprof.analysis.timeline.steps import timing
from dlprof.errors import NotMeasured
from tests.fixtures import runs, traces
from tests.fixtures.runs import MS


def parts_of(rank: RankData) -> dict[str, int]:
    """Return how long each part is, ns, of those that take any time."""
    found = rank.once(partition)
    assert iv.merge(*found.values()).tolist() == iv.merge(rank.once(timing).windows).tolist()
    assert sum(map(iv.total, found.values())) == iv.total(iv.merge(*found.values()))
    return {category: iv.total(part) for category, part in found.items() if len(part)}


def on_cpu(*events: object, **keys: object) -> dict[str, object]:
    return traces.trace(*events, backend="gloo", device="", **keys)  # type: ignore[arg-type]


def test_a_step_on_a_device_is_divided_among_device_and_host(tmp_path: Path) -> None:
    rank = runs.rank_of(
        tmp_path,
        traces.trace(
            traces.step(1, 0, 1_000_000),
            traces.fetch(0, 200_000),
            # [300, 600) computes, [550, 700) communicates, [700, 750) copies.
            traces.launched("gemm", 250_000, 300_000, 300_000, 1),
            traces.collective(550_000, 150_000, 1_000),
            traces.copy(700_000, 50_000, 1_000_000),
            traces.annotation("Optimizer.step#SGD.step", 800_000, 150_000),
            traces.launched("late", 940_000, 960_000, 20_000, 2),
        ),
    )
    assert parts_of(rank) == {
        "computation": 320_000,
        "communication": 100_000,
        "copy": 50_000,
        "input_wait": 200_000,
        "optimizer_host": 145_000,
        "host": 125_000,  # [200, 255), [750, 800) and [980, 1000): the host launched too late, or nothing
        "launch_latency": 60_000,  # from the end of the two launches on
    }


def test_a_wait_behind_which_the_device_computes_is_no_wait(tmp_path: Path) -> None:
    rank = runs.rank_of(
        tmp_path,
        traces.trace(traces.step(1, 0, 1_000_000), traces.fetch(0, 400_000), traces.kernel("gemm", 0, 1_000_000)),
    )
    assert parts_of(rank) == {"computation": 1_000_000}


def test_waiting_inside_the_device_is_not_the_hosts(tmp_path: Path) -> None:
    rank = runs.rank_of(
        tmp_path,
        traces.trace(
            traces.step(1, 0, 1_000_000),
            traces.launched("a", 0, 5_000, 400_000, 1),
            traces.launched("b", 10_000, 600_000, 400_000, 2),
        ),
    )
    assert parts_of(rank)["queued_wait"] == 195_000


def test_on_the_cpu_operators_are_the_computation_and_the_loaders_are_not(tmp_path: Path) -> None:
    rank = runs.rank_of(
        tmp_path,
        on_cpu(
            traces.step(1, 0, 1_000_000),
            traces.fetch(0, 200_000, "_SingleProcessDataLoaderIter"),
            traces.op("aten::stack", 50_000, 100_000),  # the loader's collating
            traces.op("aten::conv2d", 250_000, 300_000),
            traces.op("aten::convolution", 260_000, 200_000),  # inside the one before
            traces.annotation("gloo:all_reduce", 500_000, 200_000, tid=traces.MAIN),
            traces.annotation("Optimizer.step#SGD.step", 800_000, 100_000),
            traces.op("aten::add_", 820_000, 30_000),
        ),
    )
    assert parts_of(rank) == {
        "computation": 330_000,
        "communication": 150_000,
        "input_wait": 200_000,
        "optimizer_host": 70_000,
        "host": 250_000,
    }


def test_a_call_that_blocks_in_a_collective_is_no_computation(tmp_path: Path) -> None:
    rank = runs.rank_of(
        tmp_path,
        on_cpu(
            traces.step(1, 0, 1_000_000),
            traces.op("aten::linear", 0, 800_000),
            traces.op("c10d::allreduce_", 300_000, 400_000),
        ),
    )
    assert parts_of(rank) == {"computation": 400_000, "communication": 400_000, "host": 200_000}


@pytest.mark.parametrize(
    ("frame", "computed"),
    [
        ("RegisterPostBackwardFunctionBackward", 400_000),  # a hook in Python, which waits
        ("autograd::engine::evaluate_function: AddmmBackward0", 400_000),
        ("AddmmBackward0", 800_000),  # an operator of torch's own computes what its parts do not show
        ("CompiledFunctionBackward", 800_000),  # and compiled code has no operators
    ],
)
def test_hooks_that_wait_for_a_collective_compute_nothing(tmp_path: Path, frame: str, computed: int) -> None:
    rank = runs.rank_of(
        tmp_path,
        on_cpu(
            traces.step(1, 0, 1_000_000),
            traces.op("aten::linear", 0, 200_000),
            traces.op(frame, 200_000, 600_000),
            traces.op("aten::cat", 200_000, 100_000),
            traces.op("c10d::_reduce_scatter_base_", 300_000, 50_000),
            traces.annotation("gloo:all_reduce", 300_000, 400_000, tid=traces.AUTOGRAD),
            traces.op("aten::div_", 790_000, 10_000),
        ),
    )
    found = parts_of(rank)
    blocked = 50_000  # the call itself
    assert found["computation"] == computed - (blocked if computed == 800_000 else 0)


@pytest.mark.parametrize("sign", ["runtime", "nccl", "backend"])
def test_a_gpu_job_traced_without_its_gpu_abstains(tmp_path: Path, sign: str) -> None:
    events = [traces.step(1, 0, MS), traces.op("aten::mm", 0, 1000)]
    if sign == "runtime":
        events.append(traces.call("cudaLaunchKernel", 2000, 100, 1))
    if sign == "nccl":
        events.append(traces.annotation("nccl:all_reduce", 2000, 100))
    made = traces.trace(*events, backend="nccl" if sign == "backend" else "", device="")
    with pytest.raises(NotMeasured, match="nothing of the GPU"):
        runs.rank_of(tmp_path, made).once(partition)
