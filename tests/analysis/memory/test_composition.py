"""What memory is made of at its fullest, by part and by module, and what the result tells of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.memory.changes import OF_NONE, OUTSIDE, memory_footprint, modules
from dlprof.analysis.memory.memory import MOST_MODULE_ROWS, held_by_module, held_names, memory_composition
from dlprof.errors import NotMeasured
from tests.fixtures import allocator, holding, runs
from tests.fixtures.holding import MOMENTS, row
from tests.fixtures.traces import BASE_NS

# 100 of parameters, twice as much of state, 500 of activations, which are gone when the gradients are there.
ROWS = [
    row("parameter", "a", 60), row("parameter", "b", 40), row("gradient", "a", 60), row("gradient", "b", 40),
    row("optimizer", "a", 120), row("optimizer", "b", 80), row("activation", "a", 500), row("buffer", "b", 5),
]  # fmt: skip


def parts(path: Path, device: str = "cuda:0") -> dict[str, tuple[float, str]]:
    frame = runs.measured(path, memory_composition).frame(memory_composition)
    mine = frame[frame["device"] == device]
    return dict(zip(mine["part"], zip(mine["bytes"], mine["known"], strict=True), strict=True))


def reading(allocated: int, peak: int, reserved: int) -> dict[str, Any]:
    more = {"peak_allocated_bytes": peak, "reserved_bytes": reserved, "peak_reserved_bytes": reserved}
    return allocator.reading(5, allocated, **more)


def test_what_a_backward_pass_begins_with(tmp_path: Path) -> None:
    path = holding.recorded(tmp_path, ROWS)
    allocator.write(path, [reading(400, 950, 1_200)])
    gpu = [{"at_ns": BASE_NS + 6_000_000_000 + n, "memory_used_bytes": 1_200 + 300 + 10 * n} for n in range(3)]
    (path / "ranks/00000/gpu.jsonl").write_text("".join(json.dumps(r) + "\n" for r in gpu))
    assert parts(path) == {
        "parameter": (100, "counted"), "optimizer": (200, "counted"),
        "activation": (500, "counted"), "buffer": (5, "counted"),
        "temporary": (950 - 805, "difference"), "cache": (1_200 - 950, "allocator"),
        "libraries": (310, "driver"),
    }  # fmt: skip


LASTING = {"parameter": (100, "counted"), "optimizer": (200, "counted"), "buffer": (5, "counted")}
ACTIVATIONS = {**LASTING, "activation": (500, "counted")}
GRADIENTS = {**LASTING, "gradient": (100, "counted")}
OF_HOST = {"device": "cpu"}
# Rows, what else was told, and the allocator's reading → the parts of a device.
COMPOSED: dict[str, tuple[list[Any], dict[str, Any], tuple[int, int, int] | None, dict[str, tuple[float, str]]]] = {
    "gradients outweigh activations": (
        [*ROWS[:6], row("activation", "a", 50), ROWS[7]], {},
        (400, 450, 450),
        {**GRADIENTS, "temporary": (450 - 405, "difference")},
    ),
    # The allocator was not asked: nothing is temporary.
    "gradients are there when the backward pass begins": (
        ROWS, {"moments": [MOMENTS[0] | {"gradient_bytes": 90}, MOMENTS[1]]}, None,
        {**ACTIVATIONS, "gradient": (90, "counted")},
    ),
    "more was counted than there was": (
        ROWS, {},
        (400, 700, 700),
        {**ACTIVATIONS, "unexplained": (-105, "difference")},
    ),
    # The gradients are more than nothing; what was not counted is not called temporary.
    "activations were not counted": (
        [r for r in ROWS if r["part"] != "activation"],
        {"activations": {"state": "abstained", "why": "an old PyTorch"}},
        (400, 950, 950),
        {**GRADIENTS, "unexplained": (950 - 405, "difference")},
    ),
    "the host by its process": (
        [r | OF_HOST for r in ROWS],
        {"moments": [m | OF_HOST for m in MOMENTS], "process": {"before_bytes": 1_000, "anonymous_bytes": 2_000}},
        None, {**ACTIVATIONS, "process": (1_000, "process"), "unexplained": (1_000 - 805, "difference")},
    ),
    "state that was offloaded is the host's": (
        [*ROWS[:2], row("optimizer", "a", 120) | OF_HOST], {}, None, {"optimizer": (120, "counted")},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", COMPOSED)
def test_memory_is_made_of(name: str, tmp_path: Path) -> None:
    rows, told, read, found = COMPOSED[name]
    path = holding.recorded(tmp_path, rows, **told)
    if read is not None:
        allocator.write(path, [reading(*read)])
    assert parts(path, "cpu" if "host" in name else "cuda:0") == found


def test_modules_by_what_they_hold_the_largest_first(tmp_path: Path) -> None:
    rows = [*ROWS, row("parameter", "a", 3, dtype="int64", full_bytes=6)]
    frame = runs.measured(holding.recorded(tmp_path, rows), held_by_module).frame(held_by_module)
    assert frame.iloc[0][["module", "kind", "part", "bytes"]].to_list() == ["a", "Linear", "activation", 500]
    (both,) = frame[(frame["module"] == "a") & (frame["part"] == "parameter")].to_dict("records")
    assert (both["tensors"], both["bytes"], both["full_bytes"]) == (2, 63, 66)
    assert frame["bytes"].sum() == sum(r["bytes"] for r in rows)


FLOPS = {f"{part}_flops": -1 for part in ("forward", "backward", "recompute")}


def test_layers_fold_by_all_that_is_in_them_and_not_by_what_holds_something(tmp_path: Path) -> None:
    # Nothing is trained before the first layer: its own layer keeps no input for a backward pass.
    rows = [row("activation", f"layers.{n}.q.lora", 100) for n in range(4)]
    rows += [row("activation", f"layers.{n}.q.base", 100) for n in range(1, 4)]
    path = holding.recorded(tmp_path, rows)
    names = runs.measured(path, held_names).frame(held_names).set_index("module")["name"]
    assert names["layers.0.q.lora"] == "layers.0.q.lora"
    every = [("", "Net"), ("layers", "ModuleList")]
    every += [(f"layers.{n}", "Layer") for n in range(4)] + [(f"layers.{n}.q", "Adapted") for n in range(4)]
    every += [(f"layers.{n}.q.{name}", "Linear") for n in range(4) for name in ("base", "lora")]
    told = [
        {"path": p, "kind": kind, "parameters": 0, "parameter_bytes": 0, "bucket": -1, "sharded": 0, **FLOPS}
        for p, kind in every
    ]
    (path / "ranks/00000/modules.jsonl").write_text("".join(json.dumps(one) + "\n" for one in told))
    frame = runs.measured(path, held_names).frame(held_names).set_index("module")
    assert set(frame["name"]) == {"layers", "layers.*", "layers.*.q", "layers.*.q.lora", "layers.*.q.base"}
    assert frame["kind"]["layers.0"] == "Layer"


def test_of_very_many_modules_the_small_ones_are_one_row(tmp_path: Path) -> None:
    rows = [row("parameter", f"layer.{n}", 10_000 - n) for n in range(MOST_MODULE_ROWS + 50)]
    frame = runs.measured(holding.recorded(tmp_path, rows), held_by_module).frame(held_by_module)
    assert len(frame) == MOST_MODULE_ROWS + 1
    assert frame["module"].iloc[-1] == "…"
    assert frame["bytes"].sum() == sum(r["bytes"] for r in rows)


@pytest.mark.parametrize("measure", [memory_composition, held_by_module])
def test_why_nothing_was_counted(measure: Any, tmp_path: Path) -> None:
    path = holding.recorded(tmp_path, [], state="the step is a CUDA graph")
    with pytest.raises(NotMeasured, match="the step is a CUDA graph"):
        runs.measured(path, measure).frame(measure)
    (path / "ranks/00000/held.json").unlink()
    with pytest.raises(NotMeasured, match="was not counted"):
        runs.measured(path, measure).frame(measure)


# -- what the result tells: parts of each rank, alike layers as one, and what changes would make

ENCODER = [
    *(row("parameter", f"encoder.layer.{n}.fc", 100) for n in range(12)),
    *(row("activation", f"encoder.layer.{n}.fc", 400) for n in range(12)),
    *(row("activation", f"encoder.layer.{n}", 50, "Layer") for n in range(12)),
    row("parameter", "head", 700),
    row("gradient", "head", 700),
    row("activation", "", 30, "Model"),
]


def recorded(folder: Path) -> Path:
    path = holding.recorded(folder, ENCODER)
    read = {"peak_allocated_bytes": 8_000, "reserved_bytes": 9_000, "peak_reserved_bytes": 9_000}
    allocator.write(path, [allocator.reading(5, 2_000, **read)])
    return path


def test_layers_that_are_built_alike_are_one_row_with_all_inside(tmp_path: Path) -> None:
    measured = runs.measured(recorded(tmp_path), held_by_module, held_names)
    rows = {m.module: m for m in modules(measured.frame(held_by_module), measured.frame(held_names))}
    layer = rows["encoder.layer.*"]
    assert (layer.kind, layer.modules, layer.bytes) == ("Layer", 12, 12 * 550)
    assert (layer.parameter, layer.activation) == (1_200, 5_400)
    assert (rows["encoder.layer.*.fc"].modules, rows["encoder.layer.*.fc"].bytes) == (12, 6_000)
    assert (rows["head"].parameter, rows["head"].gradient) == (700, 700)
    assert rows[OUTSIDE].bytes == 30
    # What is around the layers holds them alone: one row is enough, that of the layers.
    assert [name for name in rows if name in ("encoder", "encoder.layer")] == []


def test_of_several_models_the_batch_is_no_ones(tmp_path: Path) -> None:
    rows = [row("parameter", "(Net).fc", 100), row("parameter", "(Critic).fc", 60), row("input", "", 30, "")]
    measured = runs.measured(holding.recorded(tmp_path, rows), held_by_module, held_names)
    found = {m.module: m.bytes for m in modules(measured.frame(held_by_module), measured.frame(held_names))}
    assert found == {"(Net).fc": 100, "(Critic).fc": 60, OF_NONE: 30}


def test_the_fullest_device_and_its_changes(tmp_path: Path) -> None:
    path = recorded(tmp_path)
    found = runs.measured(path, memory_footprint).frame(memory_footprint)
    (device,) = found.devices
    assert (device.rank, device.device, device.total_bytes) == (0, "cuda:0", 100_000)
    assert device.bytes == 9_000
    assert [p.part for p in device.parts] == ["parameter", "activation", "temporary", "cache"]
    assert {c.change for c in found.changes} >= {"batch", "autocast"}
    # A layer keeps little more than its input: it saves nothing to compute it again.
    assert "checkpoint" not in {c.change for c in found.changes}
    assert all(c.change for c in found.changes)
