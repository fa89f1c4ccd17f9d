"""What memory is made of, as the result keeps it."""

from __future__ import annotations

from msgspec.structs import replace

from dlprof.result.figures import DeviceMemory, Footprint, MemoryChange, MemoryPart, ModuleMemory
from dlprof.result.stored import from_json, to_json
from tests.fixtures import results


def test_a_device_holds_all_of_its_parts() -> None:
    parts = (MemoryPart("parameter", 3.0, "counted"), MemoryPart("unexplained", -1.0, "difference"))
    assert DeviceMemory(0, "cuda:0", parts).bytes == 2


def test_it_comes_back_as_it_was_and_a_result_may_lack_it() -> None:
    device = DeviceMemory(3, "cpu", (MemoryPart("process", 5.0, "process"),), "gradients")
    kept = Footprint((device,), 3, (ModuleMemory("a.*", "A", 2, 4.0),), (MemoryChange("batch", "2", 9.0),), None)
    result = replace(results.ddp(), footprint=kept)
    assert from_json(to_json(result)).footprint == kept
    older = {name: value for name, value in to_json(result).items() if name != "footprint"}
    assert from_json(older).footprint is None
