"""Each span's module and part, on hand-made traces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dlprof.analysis.modules.frames import module_frames
from dlprof.analysis.modules.rows import module_rows
from tests.fixtures import layers, runs, traces
from tests.fixtures.traces import AUTOGRAD


def found(tmp_path: Path, made: dict[str, Any]) -> dict[str, tuple[str, str]]:
    """Return the path ("-": none) and the part of each span by its name."""
    data = runs.rank_of(tmp_path, made)
    paths, rows, names = data.once(module_frames).paths, data.once(module_rows), data.table("spans")["name"]
    return {
        str(name): (paths[module] if module >= 0 else "-", str(part))
        for name, module, part in zip(names, rows["module"], rows["part"], strict=True)
    }


def test_operators_belong_to_the_innermost_module(tmp_path: Path) -> None:
    told = found(tmp_path, layers.on_cpu(layers.two_layers()))
    assert told["aten::addmm"] == ("a", "forward")
    assert told["aten::tanh"] == ("b", "forward")
    assert told["aten::mse_loss"] == ("-", "other")
    assert told["aten::mm"] == ("a", "backward")


def test_device_work_belongs_to_the_module_whose_call_launched_it(tmp_path: Path) -> None:
    """However late it runs, and from whatever thread it was launched."""
    made = traces.trace(
        traces.step(0, 0, 5_000),
        layers.called("", "Net", 0, 1_000),
        layers.called("a", "Linear", 100, 300),
        layers.forward("addmm", 110, 200, 1),
        traces.call("cudaLaunchKernel", 150, 10, 1),
        traces.call("cudaMemsetAsync", 700, 10, 2),
        layers.function("AddmmBackward0", 1_500, 500, 1, AUTOGRAD),
        traces.call("cudaLaunchKernel", 1_600, 10, 3, tid=AUTOGRAD),
        traces.call("cudaGraphLaunch", 2_500, 10, 4),
        traces.kernel("forward", 4_000, 100, 1),
        traces.kernel("clear", 4_100, 100, 2),
        traces.kernel("backward", 4_200, 100, 3),
        traces.kernel("replayed", 4_300, 100, 4),
        traces.kernel("of nobody", 4_400, 100, 99),
        world_size=1,
    )
    told = found(tmp_path, made)
    assert told["forward"] == ("a", "forward")
    assert told["clear"] == ("", "forward")
    assert told["backward"] == ("a", "backward")
    assert told["replayed"] == told["of nobody"] == ("-", "other")


def test_gradients_of_all_modules_together_are_the_models(tmp_path: Path) -> None:
    made = traces.trace(
        layers.called("", "Net", 0, 1_000),
        layers.called("a", "Linear", 100, 300),
        layers.forward("addmm", 110, 200, 1),
        layers.function("AddmmBackward0", 1_500, 500, 1, AUTOGRAD),
        layers.accumulates(2_100, 500, AUTOGRAD),
        traces.op("c10d::allreduce_", 2_200, 100, AUTOGRAD),
        traces.call("cudaLaunchKernelExC", 2_250, 10, 1, tid=AUTOGRAD),
        traces.collective(3_000, 100, 1_000, correlation=1),
    )
    told = found(tmp_path, made)
    assert told["c10d::allreduce_"] == ("", "communication")
    assert next(value for name, value in told.items() if name.startswith("nccl")) == ("", "communication")


def test_what_a_module_exchanges_in_its_forward_pass_is_its_own(tmp_path: Path) -> None:
    made = traces.trace(
        layers.called("", "Net", 0, 1_000),
        layers.called("experts", "Router", 100, 300),
        traces.op("c10d::alltoall_", 150, 100),
        traces.annotation("FSDP::all_gather (head)", 500, 100),
        traces.op("c10d::_allgather_base_", 550, 10),
        layers.called("head", "Linear", 700, 100),
    )
    told = found(tmp_path, made)
    assert told["c10d::alltoall_"] == ("experts", "communication")
    assert told["c10d::_allgather_base_"] == ("head", "communication")
