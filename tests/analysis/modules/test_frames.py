"""Which module each span of a trace belongs to, in which part of its work, and which operator made what is run back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlprof.analysis.modules.frames import (
    FORWARD,
    PARTS,
    forward_rows,
    module_frames,
    module_rows,
)
from dlprof.analysis.modules.work import MOST_MODULES, sums, table
from dlprof.analysis.timeline.host import is_on_device
from dlprof.errors import NotMeasured
from tests.fixtures import layers, runs, traces
from tests.fixtures.traces import AUTOGRAD, MAIN

OTHER_THREAD = 4200


def found(tmp_path: Path, *events: Any) -> list[tuple[str, str, str]]:
    """Return of each frame the name, the path of its module ("-": none) and its part, in order of start."""
    data = runs.rank_of(tmp_path, layers.on_cpu(*events))
    frames, spans = data.once(module_frames), data.table("spans")
    rows = []
    for n in frames.row.argsort().tolist():
        path = frames.paths[frames.module[n]] if frames.module[n] >= 0 else "-"
        rows.append((str(spans["name"].iloc[frames.row[n]]), path, PARTS[frames.part[n]]))
    return rows


@pytest.mark.parametrize("tid", [MAIN, AUTOGRAD])
def test_functions_belong_to_the_modules_that_made_them(tmp_path: Path, tid: int) -> None:
    assert found(tmp_path, layers.two_layers(tid)) == [
        ("nn.Module:  (Net)", "", "forward"),
        ("nn.Module: a (Linear)", "a", "forward"),
        ("nn.Module: b (Tanh)", "b", "forward"),
        (f"{layers.ENGINE}MseLossBackward0", "-", "backward"),
        (f"{layers.ENGINE}TanhBackward0", "b", "backward"),
        (f"{layers.ENGINE}AddmmBackward0", "a", "backward"),
        (f"{layers.ENGINE}{layers.ACCUMULATE}", "a", "backward"),  # follows the one that gave it its gradient
    ]


def test_what_runs_again_within_the_backward_pass_is_recomputed(tmp_path: Path) -> None:
    events = [
        layers.called("", "Net", 0, 100), layers.called("a", "Block", 10, 80), layers.called("a.0", "ReLU", 20, 60),
        layers.forward("relu", 30, 40, 3), layers.function("ReluBackward0", 200, 200, 3),
        layers.called("a", "Block", 210, 100), layers.called("a.0", "ReLU", 220, 80),
        layers.forward("relu", 230, 60, 4),
    ]  # fmt: skip
    assert found(tmp_path, *events)[3:] == [
        (f"{layers.ENGINE}ReluBackward0", "a.0", "backward"),
        ("nn.Module: a (Block)", "a", "recompute"),
        ("nn.Module: a.0 (ReLU)", "a.0", "recompute"),
    ]


def python(name: str, start: int, dur: int) -> traces.Event:
    return traces.event("python_function", f"nn.Module: {name}", start, dur)


def test_stacks_name_modules_by_their_classes(tmp_path: Path) -> None:
    events = [
        python("DistributedDataParallel_0", 0, 100), python("Net_0", 10, 80), python("CheckpointWrapper_0", 15, 30),
        python("Linear_0", 20, 20), traces.event("python_function", "torch/nn/functional.py(1): linear", 22, 10),
        python("Sequential_0", 50, 30), python("Linear_1", 60, 10), python("MSELoss_0", 200, 10),
    ]  # fmt: skip
    assert [path for _, path, _ in found(tmp_path, *events)] == [
        "", "", "Linear_0", "Linear_0", "Sequential_0", "Sequential_0.Linear_1", "(MSELoss_0)",
    ]  # fmt: skip
    frames = runs.rank_of(tmp_path, layers.on_cpu(*events)).once(module_frames)
    assert dict(zip(frames.paths, frames.classes, strict=True))[""] == "Net"
    # Where dlprof's names are there too, stacks do not count.
    both = found(tmp_path, layers.called("a", "Linear", 5, 80), python("Linear_0", 0, 90))
    assert both == [("nn.Module: a (Linear)", "a", "forward")]


def test_other_ranges_are_no_modules(tmp_path: Path) -> None:
    strategy = traces.annotation("[pl][profile][Strategy]SingleDeviceStrategy.training_step", 0, 100)
    with pytest.raises(NotMeasured, match="no names of modules"):
        found(tmp_path, strategy, traces.annotation("nn.Linear", 10, 10), traces.op("aten::linear", 12, 5))


EXCHANGES = {
    "FSDP::all_gather (layers.0)": "layers.0",
    "FSDP::pre_forward": "",
    "FSDP::backward_prefetch for layers.0": "layers.0",
    "FSDP::post_backward_reduce (layers.0, layers.1)": "layers.0",
    "FSDP::all_gather (layers.0) [pg=4]": "layers.0",
    "FSDP::all_gather (layers.0._checkpoint_wrapped_module)": "layers.0",
    "FSDP::all_gather (_orig_mod.layers.0)": "layers.0",
    "FSDP::all_gather (of.another.model)": "-",
    "dlprof::all_gather nn.Module: layers.0 (Block)": "layers.0",
    "dlprof::reduce nn.Module:  (Net)": "",
}


def test_what_fsdp_does_is_for_the_module_that_it_names(tmp_path: Path) -> None:
    net = [layers.called("", "Net", 0, 100), layers.called("layers.0", "Block", 10, 50)]
    ranges = [traces.annotation(name, 70 + 2 * n, 1) for n, name in enumerate(EXCHANGES)]
    told = found(tmp_path, *net, *ranges)
    assert told[2:] == [(name, path, "communication") for name, path in EXCHANGES.items()]
    older = "FullyShardedDataParallel._pre_forward_prefetch"  # names no module
    assert found(tmp_path, *net, traces.annotation(older, 70, 10))[-1] == (older, "-", "communication")


def test_a_frame_does_not_outlast_the_one_around_it(tmp_path: Path) -> None:
    made = layers.on_cpu(layers.called("a", "Net", 0, 100), layers.called("a.0", "Net", 50, 100))
    frames = runs.rank_of(tmp_path, made).once(module_frames)
    assert (frames.end - frames.end[0]).tolist() == [0, 0]


def test_a_hostile_trace_of_very_deep_calls_ends(tmp_path: Path) -> None:
    deep = [layers.called(f"m{n % 7}", "Net", n, 10_000 - 2 * n) for n in range(3_000)]
    assert len(found(tmp_path, deep)) == 3_000


# -- which operator made a function of the backward pass


def unnumbered(start: int, name: str = "AddmmBackward0") -> Any:
    return traces.op(f"{layers.ENGINE}{name}", start, 50)


def runs_at(start: int, number: int) -> Any:
    return traces.op("AddmmBackward0", start, 10, **traces.made_by(number, 1))


HOOKED = [layers.forward("addmm", 0, 10, 3), layers.forward("relu", 20, 10, 4), unnumbered(100)]
HOOKED += [traces.op("aten::mul", 110, 10)]

# Events → each function and the operator that made it ("": none is known).
MAKERS: dict[str, tuple[list[Any], dict[str, str]]] = {
    "the last operator with its number": (
        [
            layers.forward("linear", 0, 100, 3), layers.forward("t", 10, 20, 3), layers.forward("addmm", 40, 50, 4),
            layers.forward("relu", 120, 10, 5), layers.function("ReluBackward0", 200, 10, 5),
            layers.function("AddmmBackward0", 220, 10, 4), layers.function("TBackward0", 240, 10, 3),
        ],
        {"ReluBackward0": "relu", "AddmmBackward0": "addmm", "TBackward0": "t"},
    ),
    # As a block that is computed again in the autograd thread, whose numbers begin anew.
    "one of the same thread": (
        [
            layers.forward("mul", 0, 10, 1), layers.forward("add", 20, 10, 2), layers.forward("div", 40, 10, 3),
            layers.function("CheckpointFunctionBackward", 100, 200, 3),
            layers.forward("tanh", 110, 10, 1, OTHER_THREAD), layers.forward("exp", 130, 10, 2, OTHER_THREAD),
            layers.function("ExpBackward0", 150, 10, 2, OTHER_THREAD, thread=7),
            layers.function("TanhBackward0", 170, 10, 1, OTHER_THREAD, thread=7),
            layers.function("AddBackward0", 320, 10, 2), layers.function("MulBackward0", 340, 10, 1),
        ],
        {
            "CheckpointFunctionBackward": "div", "ExpBackward0": "exp",
            "TanhBackward0": "tanh", "AddBackward0": "add",
            "MulBackward0": "mul",
        },
    ),
    "of a range without a number, that of the function behind the hooks": (
        [*HOOKED, runs_at(130, 3)], {"AddmmBackward0": "addmm"},
    ),
    "and not of one behind the range": ([*HOOKED, runs_at(160, 3)], {"AddmmBackward0": ""}),
    "the later one, of a thread that begins anew": (
        [
            layers.forward("mul", 0, 10, 1), layers.function("First", 20, 10, 1), layers.forward("add", 40, 10, 1),
            layers.function("Second", 60, 10, 1),
        ],
        {"First": "mul", "Second": "add"},
    ),
    "the one before, of an operator that is not looked at": (
        [
            layers.forward("mul", 0, 10, 1), layers.forward("as_strided", 20, 10, 2),
            layers.forward("add", 40, 10, 3), layers.function("AsStridedBackward0", 60, 10, 2),
        ],
        {"AsStridedBackward0": "mul"},
    ),
    "none, of what was made before the trace": (
        [
            layers.function("Early", 0, 10, 90), layers.forward("mul", 20, 10, 100),
            layers.function("Earlier", 40, 10, 99), layers.function("Much later", 60, 10, 10_000),
        ],
        {"Early": "", "Earlier": "", "Much later": ""},
    ),
    "none, in a trace without numbers": ([traces.op("aten::mul", 0, 10), unnumbered(20, "X")], {"X": ""}),
}  # fmt: skip


@pytest.mark.parametrize("name", MAKERS)
def test_the_maker_of_a_function_is(name: str, tmp_path: Path) -> None:
    events, made = MAKERS[name]
    model = layers.called("", "Model", 1_000, 10)  # without one autograd's numbers are not read
    data = runs.rank_of(tmp_path, layers.on_cpu(*events, model))
    spans = data.table("spans")
    names = spans["name"].astype(str)
    rows = np.flatnonzero(names.str.startswith(layers.ENGINE))
    makers = forward_rows(spans, data.once(is_on_device), rows).tolist()
    assert {
        names.iloc[row].removeprefix(layers.ENGINE): names.iloc[maker].removeprefix("aten::") if maker >= 0 else ""
        for row, maker in zip(rows.tolist(), makers, strict=True)
    } == made


# -- each span's module and part

# A model with one layer, on a device or not, and the events beside them → path ("-": none) and part of spans, by name.
NET = [layers.called("", "Net", 0, 1_000), layers.called("a", "Linear", 100, 300), layers.forward("addmm", 110, 200, 1)]
BACK = layers.function("AddmmBackward0", 1_500, 500, 1, AUTOGRAD)
SPANS: dict[str, tuple[list[Any], dict[str, tuple[str, str]]]] = {
    "operators are of the innermost module": (
        layers.two_layers(),
        {
            "aten::addmm": ("a", "forward"), "aten::tanh": ("b", "forward"),
            "aten::mse_loss": ("-", "other"), "aten::mm": ("a", "backward"),
        },
    ),
    # However late it runs, and from whatever thread it was launched.
    "device work is of the module whose call launched it": (
        [
            traces.step(0, 0, 5_000), *NET, traces.call("cudaLaunchKernel", 150, 10, 1),
            traces.call("cudaMemsetAsync", 700, 10, 2), BACK,
            traces.call("cudaLaunchKernel", 1_600, 10, 3, tid=AUTOGRAD), traces.call("cudaGraphLaunch", 2_500, 10, 4),
            traces.kernel("forward", 4_000, 100, 1), traces.kernel("clear", 4_100, 100, 2),
            traces.kernel("backward", 4_200, 100, 3), traces.kernel("replayed", 4_300, 100, 4),
            traces.kernel("of nobody", 4_400, 100, 99),
        ],
        {
            "forward": ("a", "forward"), "clear": ("", "forward"),
            "backward": ("a", "backward"), "replayed": ("-", "other"),
            "of nobody": ("-", "other"),
        },
    ),
    "gradients of all modules together are the model's": (
        [
            *NET, BACK, layers.accumulates(2_100, 500, AUTOGRAD), traces.op("c10d::allreduce_", 2_200, 100, AUTOGRAD),
            traces.call("cudaLaunchKernelExC", 2_250, 10, 1, tid=AUTOGRAD),
            traces.collective(3_000, 100, 1_000, correlation=1),
        ],
        {"c10d::allreduce_": ("", "communication"), "nccl": ("", "communication")},
    ),
    "what a module exchanges in its forward pass is its own": (
        [
            layers.called("", "Net", 0, 1_000), layers.called("experts", "Router", 100, 300),
            traces.op("c10d::alltoall_", 150, 100), traces.annotation("FSDP::all_gather (head)", 500, 100),
            traces.op("c10d::_allgather_base_", 550, 10), layers.called("head", "Linear", 700, 100),
        ],
        {"c10d::alltoall_": ("experts", "communication"), "c10d::_allgather_base_": ("head", "communication")},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SPANS)
def test_spans_of_modules(name: str, tmp_path: Path) -> None:
    events, told = SPANS[name]
    data = runs.rank_of(tmp_path, traces.trace(*events, world_size=1))
    paths, rows, names = data.once(module_frames).paths, data.once(module_rows), data.table("spans")["name"]
    every = {
        "nccl" if str(of).startswith("nccl") else str(of): (paths[module] if module >= 0 else "-", str(part))
        for of, module, part in zip(names, rows["module"], rows["part"], strict=True)
    }
    assert {of: every[of] for of in told} == told


# -- sums by module and part


def test_very_many_modules_count_to_those_around_them(tmp_path: Path) -> None:
    paths = ["", "layers.0", *(f"layers.0.experts.{n}" for n in range(MOST_MODULES + 10))]
    made = layers.on_cpu([layers.called(path, "Linear", 10 * n, 5) for n, path in enumerate(paths)])
    frames = runs.rank_of(tmp_path, made).once(module_frames)
    every = np.arange(len(frames.paths))
    found = table(frames, {}, ns=sums(frames, every, np.full(len(every), FORWARD), np.ones(len(every))))
    assert found.set_index("path")["ns"].to_dict() == {"": 1.0, "layers.0": 1.0, "layers.0.experts": MOST_MODULES + 10}
