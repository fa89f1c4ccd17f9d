"""Misaligned sizes: found by their cost, silent on good ones and any batch, abstaining without shapes."""

from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.compute.rules.misaligned_shapes import RULE
from tests.fixtures import runs, traces
from tests.fixtures.asking import ask
from tests.fixtures.runs import MS

KERNEL = "ampere_bf16_s16816gemm_bf16_128x128"


def trained(
    folder: Path,
    *shapes: list[int],
    took: int = 6 * MS,
    dtype: str = "c10::BFloat16",
    operator: str = "aten::mm",
    device: str = "NVIDIA A100-SXM4-80GB",
) -> Path:
    """Write three steps of 10 ms, of which so many ns are one product; the host waits for it."""
    events: list[Any] = []
    told = {"Input Dims": [*shapes], "Input type": [dtype] * len(shapes)} if shapes else {}
    for n in range(3):
        t = n * 10 * MS
        events += [traces.step(n, t, 10 * MS), traces.op(operator, t, 40_000, **told)]
        events += traces.launched(KERNEL, t, t + 10_000, took, 3 * n + 1)
        events += traces.launched("elementwise", t + 50_000, t + took + 10_000, 9 * MS - took, 3 * n + 2)
        events += [traces.call("cudaStreamSynchronize", t + 100_000, 9 * MS, 3 * n + 3)]
    return runs.foreign(folder, traces.trace(*events, world_size=1, device=device))


def test_found_with_what_a_good_shape_would_take(tmp_path: Path) -> None:
    found = ask(RULE, trained(tmp_path, [4096, 1022], [1022, 4099]))
    assert found.state == "found"
    assert found.saving_ns == pytest.approx(6 * MS - 2 * 4096 * 1022 * 4099 / 156e12 * 1e9, rel=1e-6)
    assert (found.ranks, [cost.ns for cost in found.by_rank]) == ((0,), [found.saving_ns])
    assert found.evidence is not None
    assert found.evidence.columns[-1] == "takes_ns"
    assert found.evidence.rows == (("aten::mm", "4096x1022 1022x4099", "bfloat16", 1, 6 * MS),)
    assert [(change.settings, change.numerics) for change in found.changes] == [((), True)]
    assert found.advice[0].endswith(": 4099 → 4104 or 4160")


def test_good_sizes_and_any_batch_are_left_alone(tmp_path: Path) -> None:
    clear = ask(RULE, trained(tmp_path, [4091, 1024], [1024, 4096]))
    assert (clear.state, clear.share) == ("clear", 0)


def test_an_odd_one_that_is_fast_is_left_alone(tmp_path: Path) -> None:
    clear = ask(RULE, trained(tmp_path, [4096, 1022], [1022, 4099], took=220_000))
    assert clear.state == "clear"
    assert 0 < clear.share < 1e-4


def test_on_an_unknown_device_a_long_one_is_not_judged_and_a_short_one_has_all_of_its_time(tmp_path: Path) -> None:
    shapes: tuple[list[int], ...] = ([4096, 1022], [1022, 4099])
    answer = ask(RULE, trained(tmp_path / "long", *shapes, device="Some GPU 9"))
    assert (answer.state, "the peaks of Some GPU 9" in answer.why) == ("not_measured", True)
    clear = ask(RULE, trained(tmp_path / "short", *shapes, device="Some GPU 9", took=MS // 10))
    assert clear.state == "clear"
    assert clear.share == pytest.approx(0.01)


def test_ten_classes_and_three_channels_are_left_alone(tmp_path: Path) -> None:
    assert ask(RULE, trained(tmp_path, [4096, 1024], [1024, 10])).state == "clear"


def test_eight_bits_want_multiples_of_16(tmp_path: Path) -> None:
    # Twice the rate of 16 bits, which only devices with such tensor cores have.
    shapes = ([16384, 1024], [1024, 4104], [1], [1])
    eight: dict[str, Any] = {
        "dtype": "c10::Float8_e4m3fn",
        "operator": "aten::_scaled_mm",
        "device": "NVIDIA H100 80GB HBM3",
    }
    found = ask(RULE, trained(tmp_path / "8", *shapes, **eight))
    assert found.saving_ns == pytest.approx(6 * MS - 2 * 16384 * 1024 * 4104 / (1979e12 / 2) * 1e9, rel=1e-6)
    assert found.advice[0].endswith("a multiple of 16, better of 64: 4104 → 4112 or 4160")
    assert ask(RULE, trained(tmp_path / "16", *shapes[:2])).state == "clear"


def test_float32_is_left_alone(tmp_path: Path) -> None:
    assert ask(RULE, trained(tmp_path, [4096, 1022], [1022, 4099], dtype="float")).state != "found"


def test_without_shapes_it_abstains(tmp_path: Path) -> None:
    answer = ask(RULE, trained(tmp_path))
    assert (answer.state, "record_shapes=True" in answer.why) == ("not_measured", True)
