"""What the result tells of memory: parts of each rank, alike layers as one, and what changes would make."""

from __future__ import annotations

from pathlib import Path

from dlprof.analysis.memory.composition import held_by_module, held_names
from dlprof.analysis.memory.holdings import OF_NONE, OUTSIDE, memory_footprint, modules
from tests.fixtures import allocator, holding, runs
from tests.fixtures.holding import row

ROWS = [
    *(row("parameter", f"encoder.layer.{n}.fc", 100) for n in range(12)),
    *(row("activation", f"encoder.layer.{n}.fc", 400) for n in range(12)),
    *(row("activation", f"encoder.layer.{n}", 50, "Layer") for n in range(12)),
    row("parameter", "head", 700),
    row("gradient", "head", 700),
    row("activation", "", 30, "Model"),
]


def recorded(folder: Path) -> Path:
    path = holding.recorded(folder, ROWS)
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
