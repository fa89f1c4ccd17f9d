"""What memory is made of at its fullest, by part and by module, from figures made by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.memory.composition import MOST_ROWS, held_by_module, held_names, memory_composition
from dlprof.errors import NotMeasured
from tests.fixtures import allocator, holding, runs
from tests.fixtures.holding import MOMENTS, row
from tests.fixtures.traces import BASE_NS

# 100 of parameters, twice as much of state, 500 of activations, which are gone when the gradients are there.
ROWS = [
    row("parameter", "a", 60),
    row("parameter", "b", 40),
    row("gradient", "a", 60),
    row("gradient", "b", 40),
    row("optimizer", "a", 120),
    row("optimizer", "b", 80),
    row("activation", "a", 500),
    row("buffer", "b", 5),
]


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
        "parameter": (100, "counted"),
        "optimizer": (200, "counted"),
        "activation": (500, "counted"),
        "buffer": (5, "counted"),
        "temporary": (950 - 805, "difference"),
        "cache": (1_200 - 950, "allocator"),
        "libraries": (310, "driver"),
    }


def test_gradients_that_outweigh_activations(tmp_path: Path) -> None:
    path = holding.recorded(tmp_path, [*ROWS[:6], row("activation", "a", 50), ROWS[7]])
    allocator.write(path, [reading(400, 450, 450)])
    found = parts(path)
    assert found["gradient"] == (100, "counted")
    assert found["temporary"] == (450 - 405, "difference")
    assert "activation" not in found
    assert "cache" not in found


def test_gradients_that_are_there_when_the_backward_pass_begins(tmp_path: Path) -> None:
    path = holding.recorded(tmp_path, ROWS, moments=[MOMENTS[0] | {"gradient_bytes": 90}, MOMENTS[1]])
    found = parts(path)
    assert found["gradient"] == (90, "counted")
    assert found["activation"] == (500, "counted")
    assert "temporary" not in found  # the allocator was not asked


def test_more_counted_than_there_was_is_not_hidden(tmp_path: Path) -> None:
    path = holding.recorded(tmp_path, ROWS)
    allocator.write(path, [reading(400, 700, 700)])
    found = parts(path)
    assert found["unexplained"] == (-105, "difference")
    assert "temporary" not in found


def test_what_was_not_counted_is_not_called_temporary(tmp_path: Path) -> None:
    rows = [r for r in ROWS if r["part"] != "activation"]
    path = holding.recorded(tmp_path, rows, activations={"state": "abstained", "why": "an old PyTorch"})
    allocator.write(path, [reading(400, 950, 950)])
    found = parts(path)
    assert found["unexplained"] == (950 - 405, "difference")  # the gradients are more than nothing
    assert "temporary" not in found


def test_the_host_by_its_process(tmp_path: Path) -> None:
    rows = [row(r["part"], r["module"], r["bytes"], device="cpu") for r in ROWS]
    moments = [m | {"device": "cpu"} for m in MOMENTS]
    process = {"before_bytes": 1_000, "anonymous_bytes": 2_000}
    path = holding.recorded(tmp_path, rows, moments=moments, process=process)
    found = parts(path, "cpu")
    assert found["process"] == (1_000, "process")
    assert found["unexplained"] == (1_000 - 805, "difference")
    assert sum(size for size, _ in found.values()) == 2_000


def test_state_that_was_offloaded_is_the_hosts(tmp_path: Path) -> None:
    path = holding.recorded(tmp_path, [*ROWS[:2], row("optimizer", "a", 120, device="cpu")])
    assert parts(path, "cpu") == {"optimizer": (120, "counted")}
    assert "optimizer" not in parts(path)


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
    rows = [row("parameter", f"layer.{n}", 10_000 - n) for n in range(MOST_ROWS + 50)]
    frame = runs.measured(holding.recorded(tmp_path, rows), held_by_module).frame(held_by_module)
    assert len(frame) == MOST_ROWS + 1
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
