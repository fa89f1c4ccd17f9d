"""Which module the host's threads are in, on hand-made traces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.modules.frames import PARTS, module_frames
from dlprof.errors import NotMeasured
from tests.fixtures import layers, runs, traces
from tests.fixtures.traces import AUTOGRAD, MAIN

STACK = "python_function"


def found(tmp_path: Path, made: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return of each frame the name, the path of its module ("-": none) and its part, in order of start."""
    data = runs.rank_of(tmp_path, made)
    frames, spans = data.once(module_frames), data.table("spans")
    rows = []
    for n in frames.row.argsort().tolist():
        path = frames.paths[frames.module[n]] if frames.module[n] >= 0 else "-"
        rows.append((str(spans["name"].iloc[frames.row[n]]), path, PARTS[frames.part[n]]))
    return rows


@pytest.mark.parametrize("tid", [MAIN, AUTOGRAD])
def test_functions_belong_to_the_modules_that_made_them(tmp_path: Path, tid: int) -> None:
    assert found(tmp_path, layers.on_cpu(layers.two_layers(tid))) == [
        ("nn.Module:  (Net)", "", "forward"),
        ("nn.Module: a (Linear)", "a", "forward"),
        ("nn.Module: b (Tanh)", "b", "forward"),
        (f"{layers.ENGINE}MseLossBackward0", "-", "backward"),
        (f"{layers.ENGINE}TanhBackward0", "b", "backward"),
        (f"{layers.ENGINE}AddmmBackward0", "a", "backward"),
        (f"{layers.ENGINE}{layers.ACCUMULATE}", "a", "backward"),  # follows the one that gave it its gradient
    ]


def test_what_runs_again_within_the_backward_pass_is_recomputed(tmp_path: Path) -> None:
    made = layers.on_cpu(
        layers.called("", "Net", 0, 100),
        layers.called("a", "Block", 10, 80),
        layers.called("a.0", "ReLU", 20, 60),
        layers.forward("relu", 30, 40, 3),
        layers.function("ReluBackward0", 200, 200, 3),
        layers.called("a", "Block", 210, 100),
        layers.called("a.0", "ReLU", 220, 80),
        layers.forward("relu", 230, 60, 4),
    )
    assert found(tmp_path, made)[3:] == [
        (f"{layers.ENGINE}ReluBackward0", "a.0", "backward"),
        ("nn.Module: a (Block)", "a", "recompute"),
        ("nn.Module: a.0 (ReLU)", "a.0", "recompute"),
    ]


def test_stacks_name_modules_by_their_classes(tmp_path: Path) -> None:
    def python(name: str, start: int, dur: int) -> traces.Event:
        return traces.event(STACK, f"nn.Module: {name}", start, dur)

    made = layers.on_cpu(
        python("DistributedDataParallel_0", 0, 100),
        python("Net_0", 10, 80),
        python("CheckpointWrapper_0", 15, 30),
        python("Linear_0", 20, 20),
        traces.event(STACK, "torch/nn/functional.py(1): linear", 22, 10),
        python("Sequential_0", 50, 30),
        python("Linear_1", 60, 10),
        python("MSELoss_0", 200, 10),
    )
    assert [path for _, path, _ in found(tmp_path, made)] == [
        "", "", "Linear_0", "Linear_0", "Sequential_0", "Sequential_0.Linear_1", "(MSELoss_0)",
    ]  # fmt: skip
    frames = runs.rank_of(tmp_path, made).once(module_frames)
    assert dict(zip(frames.paths, frames.classes, strict=True))[""] == "Net"


def test_where_both_are_there_stacks_do_not_count(tmp_path: Path) -> None:
    stack = traces.event(STACK, "nn.Module: Linear_0", 0, 90)
    made = layers.on_cpu(layers.called("a", "Linear", 5, 80), stack)
    assert found(tmp_path, made) == [("nn.Module: a (Linear)", "a", "forward")]


def test_other_ranges_are_no_modules(tmp_path: Path) -> None:
    made = layers.on_cpu(
        traces.annotation("[pl][profile][Strategy]SingleDeviceStrategy.training_step", 0, 100),
        traces.annotation("nn.Linear", 10, 10),
        traces.op("aten::linear", 12, 5),
    )
    with pytest.raises(NotMeasured, match="no names of modules"):
        found(tmp_path, made)


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("FSDP::all_gather (layers.0)", "layers.0"),
        ("FSDP::pre_forward", ""),
        ("FSDP::backward_prefetch for layers.0", "layers.0"),
        ("FSDP::post_backward_reduce (layers.0, layers.1)", "layers.0"),
        ("FSDP::all_gather (layers.0) [pg=4]", "layers.0"),
        ("FSDP::all_gather (layers.0._checkpoint_wrapped_module)", "layers.0"),
        ("FSDP::all_gather (_orig_mod.layers.0)", "layers.0"),
        ("FSDP::all_gather (of.another.model)", "-"),
        ("dlprof::all_gather nn.Module: layers.0 (Block)", "layers.0"),
        ("dlprof::reduce nn.Module:  (Net)", ""),
        ("FullyShardedDataParallel._pre_forward_prefetch", "-"),
    ],
)
def test_what_fsdp_does_is_for_the_module_that_it_names(tmp_path: Path, name: str, path: str) -> None:
    made = layers.on_cpu(
        layers.called("", "Net", 0, 100), layers.called("layers.0", "Block", 10, 50), traces.annotation(name, 70, 10)
    )
    assert found(tmp_path, made)[-1] == (name, path, "communication")


def test_a_frame_does_not_outlast_the_one_around_it(tmp_path: Path) -> None:
    made = layers.on_cpu(layers.called("a", "Net", 0, 100), layers.called("a.0", "Net", 50, 100))
    frames = runs.rank_of(tmp_path, made).once(module_frames)
    assert (frames.end - frames.end[0]).tolist() == [0, 0]


def test_the_innermost_frame_of_an_instant(tmp_path: Path) -> None:
    made = layers.on_cpu(
        layers.called("a", "Net", 0, 100),
        layers.called("a.0", "ReLU", 0, 40),
        layers.called("a.1", "ReLU", 40, 60),
        layers.called("b", "Net", 100, 10),
    )
    frames = runs.rank_of(tmp_path, made).once(module_frames)
    at = frames.start[0] + [-1, 0, 39, 40, 99, 100, 110]
    inner = frames.at(frames.lane[:1].repeat(len(at)), at)
    assert [frames.paths[frames.module[n]] if n >= 0 else "-" for n in inner] == [
        "-", "a.0", "a.0", "a.1", "a.1", "b", "-",
    ]  # fmt: skip


def test_a_hostile_trace_of_very_deep_calls_ends(tmp_path: Path) -> None:
    deep = [layers.called(f"m{n % 7}", "Net", n, 10_000 - 2 * n) for n in range(3_000)]
    assert len(found(tmp_path, layers.on_cpu(deep))) == 3_000
