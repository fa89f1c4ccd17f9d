"""Which `.item()` is GradScaler's: told on traces that torch itself makes, on the CPU, where the order is the same."""

from pathlib import Path

import pytest

from dlprof.analysis.engine import RankData
from dlprof.analysis.host import grad_scaler
from dlprof.analysis.timeline import host
from dlprof.read.run import TRACE, Rank

STEPS = 3


def read(rank: RankData) -> tuple[int, int]:
    """Return how many readings are GradScaler's, and how many values are read at all."""
    thread = rank.once(host.on_training_thread)
    ops = host.outermost(thread[["name", "start_ns", "dur_ns"]][host.is_kind(thread, "op")])
    return len(grad_scaler.reads(thread, ops)), int(host.is_named(ops, "aten::item").sum())


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
