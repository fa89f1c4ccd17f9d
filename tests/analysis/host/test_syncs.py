"""Waits for the device: each counted once, with what the script called and how long the device then had nothing."""

from pathlib import Path

import pandas as pd
import pytest

from dlprof.analysis.engine import RankData
from dlprof.analysis.host.syncs import grad_scaler_reads, syncs
from dlprof.analysis.timeline import host
from dlprof.errors import NotMeasured
from dlprof.read.run import TRACE, Rank
from tests.fixtures import runs, traces
from tests.fixtures.hosts import US, item
from tests.fixtures.places import TRACES
from tests.fixtures.runs import MS


def measure(folder: Path, *events: object, **more: object) -> pd.DataFrame:
    made = traces.trace(*events, world_size=1, **more)  # type: ignore[arg-type]
    return runs.measured(runs.foreign(folder / "traces", made), syncs).frame(syncs)


def test_an_item_waits_once_and_leaves_the_device_with_nothing(tmp_path: Path) -> None:
    # A kernel of 5 ms; .item() asks at 1 ms; the next kernel is launched at 7 ms.
    frame = measure(
        tmp_path,
        traces.step(1, 0, 10 * MS),
        traces.launched("gemm", 0, 10 * US, 5 * MS, 1),
        *item(1 * MS, 5 * MS + 12 * US, 2),
        traces.launched("gemm", 7 * MS, 7 * MS + 10 * US, 2 * MS, 5),
    )
    (row,) = frame.to_dict("records")
    assert (row["asked"], row["call"], row["calls"]) == ("aten::item", "cudaMemcpyAsync", 1)
    assert row["ns"] == pytest.approx(4.02 * MS, rel=0.01)
    assert row["idle_ns"] == pytest.approx(2 * MS, rel=0.01)


def test_waits_of_one_kind_are_added_up_and_the_longest_come_first(tmp_path: Path) -> None:
    frame = measure(
        tmp_path,
        traces.step(1, 0, 20 * MS),
        traces.launched("gemm", 0, 10 * US, 1 * MS, 1),
        traces.call("cudaDeviceSynchronize", 2 * MS, 1 * MS, 2),
        traces.call("cudaStreamSynchronize", 4 * MS, 2 * MS, 3),
        traces.call("cudaDeviceSynchronize", 7 * MS, 3 * MS, 4),
        traces.call("cudaEventSynchronize", 12 * MS, 1 * MS, 5),
    )
    assert frame[["call", "calls", "ns"]].to_numpy().tolist() == [
        ["cudaDeviceSynchronize", 2, 4 * MS],
        ["cudaStreamSynchronize", 1, 2 * MS],
        ["cudaEventSynchronize", 1, 1 * MS],
    ]


def test_a_wait_for_a_device_that_is_idle_anyway_is_not_why(tmp_path: Path) -> None:
    frame = measure(
        tmp_path,
        traces.step(1, 0, 10 * MS),
        traces.launched("gemm", 0, 10 * US, 1 * MS, 1),
        traces.call("cudaEventSynchronize", 3 * MS, 5 * US, 2),
        traces.launched("gemm", 7 * MS, 7 * MS + 10 * US, 2 * MS, 5),
    )
    (row,) = frame.to_dict("records")
    assert (row["asked"], row["call"], row["idle_ns"]) == ("", "cudaEventSynchronize", 0)


def test_what_does_not_block_is_no_wait(tmp_path: Path) -> None:
    frame = measure(
        tmp_path,
        traces.step(1, 0, 10 * MS),
        traces.launched("gemm", 0, 10 * US, 5 * MS, 1),
        traces.call("cudaMemcpyAsync", 1 * MS, 5 * US, 2),
        traces.copy(6 * MS, 1 * MS, 1 << 20, "DtoH (Device -> Pinned)", 2),
    )
    assert len(frame) == 0


def test_on_the_cpu_reads_are_counted_and_cost_is_not_known(tmp_path: Path) -> None:
    frame = measure(
        tmp_path,
        traces.step(1, 0, 10 * MS),
        traces.step(2, 10 * MS, 10 * MS),
        *(traces.op("aten::item", n * MS, 10 * US) for n in (1, 2, 11)),
        *(traces.op("aten::_local_scalar_dense", n * MS + US, 5 * US) for n in (1, 2, 11)),
        traces.op("aten::mm", 3 * MS, MS),
        device="",
        backend="",
    )
    assert frame[["asked", "calls"]].to_numpy().tolist() == [["aten::item", 1.5]]
    assert frame["ns"].isna().all()


def test_without_a_trace_it_abstains(tmp_path: Path) -> None:
    path = runs.recorded(tmp_path / "run", (None, [runs.light(n, MS) for n in range(30)], runs.CPU))
    with pytest.raises(NotMeasured):
        runs.measured(path, syncs).frame(syncs)


@pytest.mark.skipif(not TRACES.is_dir(), reason="the reference traces are not here (../shared/traces)")
@pytest.mark.parametrize(
    ("name", "asked", "calls"),
    [
        ("dlrm_a100_rank3_of_8", "aten::item", 3.0),
        ("resnet50_v100_workers0", "aten::to", 2.0),  # pictures and labels, from pageable memory
        ("resnet_rtx2080ti", "aten::to", 2.0),
    ],
)
def test_reference_traces_wait_where_their_scripts_do(name: str, asked: str, calls: float) -> None:
    frame = runs.measured(TRACES / name, syncs).frame(syncs).set_index("asked")
    assert frame.loc[asked, "calls"] == pytest.approx(calls)


STEPS = 3


def read(rank: RankData) -> tuple[int, int]:
    """Return how many readings are GradScaler's, and how many values are read at all."""
    thread = rank.once(host.on_training_thread)
    ops = host.outermost(thread[["name", "start_ns", "dur_ns"]][host.is_kind(thread, "op")])
    return len(grad_scaler_reads(thread, ops)), int(host.is_named(ops, "aten::item").sum())


def trained(folder: Path, fused: bool, asks: str, scales: bool = True) -> RankData:
    """Trace three steps; the script itself reads nothing, its loss, or the norm of unscaled gradients."""
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    scaler = torch.amp.GradScaler("cpu", enabled=scales)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = model(torch.randn(8, 16)).square().mean()
            scaler.scale(loss).backward()
            if asks == "norm":
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
            elif asks == "loss":
                loss.item()
            scaler.step(optimizer)
            scaler.update()
            profile.step()
    path = folder / "trace.json"
    profile.export_chrome_trace(str(path))
    return RankData(Rank(0, {TRACE: path}))


@pytest.mark.parametrize(
    ("fused", "asks", "own"),
    [
        (False, "nothing", STEPS),
        (False, "loss", STEPS),
        (False, "norm", STEPS),
        (True, "nothing", 0),
        (True, "loss", 0),
        (True, "norm", 0),
    ],
)
def test_only_what_gradscaler_reads_is_its_own(tmp_path: Path, fused: bool, asks: str, own: int) -> None:
    found, items = read(trained(tmp_path, fused, asks))
    assert found == own
    # A fused AdamW reads its own step counters on the CPU: at least the script's and GradScaler's are there.
    assert items >= own + (STEPS if asks != "nothing" else 0)


def test_without_a_scale_what_stands_before_the_optimizer_is_the_scripts(tmp_path: Path) -> None:
    found, items = read(trained(tmp_path, False, "loss", scales=False))
    assert (found, items >= STEPS) == (0, True)
