"""FLOPs of a step over its time and over the device's peak, each precision against its own."""

from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.compute.peaks import allows_tf32, arithmetic
from dlprof.analysis.diagnosis import diagnose
from dlprof.analysis.engine import Measured
from dlprof.errors import NotMeasured
from dlprof.plain import NBSP
from dlprof.read.run import open_run
from dlprof.report import formatting
from tests.fixtures import runs
from tests.fixtures.runs import A100, MS


def row(operator: str, dtype: str, flops: float) -> dict[str, Any]:
    return {"operator": operator, "dtype": dtype, "flops": int(flops), "calls": 1}


def recorded(folder: Path, device: dict[str, Any], *operators: dict[str, Any], **more: Any) -> Path:
    """Write 30 steps of 10 ms, of which one was counted."""
    total = sum(r["flops"] for r in operators)
    told = {"state": "counted", "step": 9, "total": total, "backward": total // 2, "operators": list(operators)}
    facts = {"device": device, "flops": told, **more}
    return runs.recorded(folder / "run", (None, [runs.light(n, 10 * MS) for n in range(30)], facts))


def measured(folder: Path, *given: Any, **more: Any) -> Measured:
    return runs.measured(recorded(folder, *given, **more), arithmetic)


def test_a_known_share_of_a_known_peak(tmp_path: Path) -> None:
    path = recorded(tmp_path, A100, row("aten::mm", "bfloat16", 1.56e12))
    run = runs.measured(path, arithmetic)
    (found,) = run.frame(arithmetic).to_dict("records")
    assert found["flops_per_s"] == pytest.approx(156e12)
    assert found["mfu"] == pytest.approx(0.5)
    assert found["peak"] == 312e12
    assert found["backward"] == pytest.approx(0.5)
    result = diagnose(open_run(path), (), jobs=1)
    assert result.window is not None
    assert result.window.flops == 1.56e12
    assert result.window.mfu == pytest.approx(0.5)
    assert formatting.steps(result).endswith(f" of 10.0{NBSP}ms · 50{NBSP}% MFU")


def test_each_precision_counts_against_its_own_peak(tmp_path: Path) -> None:
    # Half of the step at the peak of bfloat16, a quarter at TF32's, an eighth at float32's.
    mixed = (
        row("aten::mm", "bfloat16", 1.56e12),
        row("aten::convolution", "float32", 0.39e12),
        row("aten::addmm", "float32", 19.5e12 * 0.01 / 8),
    )
    matmul = {"allow_tf32": False, "cudnn_allow_tf32": True}
    (found,) = measured(tmp_path, A100, *mixed, matmul=matmul).frame(arithmetic).to_dict("records")
    assert found["mfu"] == pytest.approx(0.875)
    assert found["peak"] != found["peak"]


@pytest.mark.parametrize(
    ("device", "dtype", "why"),
    [
        ({"type": "cpu", "name": "AMD EPYC"}, "float32", "peak of a CPU"),
        (
            {"type": "cuda", "name": "NVIDIA GeForce RTX 4090 Laptop GPU"},
            "float16",
            "peak of NVIDIA GeForce RTX 4090 L",
        ),
        ({"type": "cuda", "name": "AMD Radeon Graphics"}, "float16", "peak of AMD Radeon Graphics"),
        ({"type": "cuda", "name": "Tesla T4"}, "bfloat16", "one of the step's precisions"),
        (A100, "float32", "not a typical one"),
    ],
)
def test_no_share_of_a_peak_that_is_not_known_or_exceeded(
    tmp_path: Path, device: dict[str, Any], dtype: str, why: str
) -> None:
    path = recorded(tmp_path, device, row("aten::mm", dtype, 1e12))
    (found,) = runs.measured(path, arithmetic).frame(arithmetic).to_dict("records")
    assert found["mfu"] != found["mfu"]
    assert why in found["why"]
    assert found["flops_per_s"] == pytest.approx(1e14)
    result = diagnose(open_run(path), (), jobs=1)
    assert result.window is not None
    assert (result.window.flops, result.window.mfu) == (1e12, None)
    assert "MFU" not in formatting.steps(result)
    assert any(f.section == "Arithmetic" and f.name == "MFU" and why in f.value for f in result.facts)


def test_a_trace_of_unsteady_precision_below_one_per_cent_does_no_harm(tmp_path: Path) -> None:
    found = measured(tmp_path, A100, row("aten::mm", "bfloat16", 3.12e11), row("aten::mm", "float64", 1e6))
    assert found.frame(arithmetic)["mfu"][0] == pytest.approx(0.1, rel=1e-4)


@pytest.mark.parametrize(
    ("flops", "why"),
    [
        ({"state": "off"}, "--flops off"),
        ({"state": "waiting"}, "ended before"),
        ({"state": "abstained", "why": "the script uses torch.compile"}, "torch.compile"),
        ({}, "not counted"),
        ({"state": "counted", "total": 0, "operators": []}, "not counted"),
    ],
)
def test_what_was_not_counted_is_not_measured(tmp_path: Path, flops: dict[str, Any], why: str) -> None:
    steps = [runs.light(n, 10 * MS) for n in range(30)]
    path = runs.recorded(tmp_path / "run", (None, steps, {"device": A100, "flops": flops}))
    with pytest.raises(NotMeasured, match=why):
        runs.measured(path, arithmetic).frame(arithmetic)


@pytest.mark.parametrize(
    ("matmul", "product", "convolution"),
    [
        ({"allow_tf32": True, "cudnn_allow_tf32": False}, True, False),
        ({"allow_tf32": None, "matmul_fp32_precision": "tf32", "conv_fp32_precision": "ieee"}, True, False),
        ({"matmul_fp32_precision": "none", "conv_fp32_precision": "none", "fp32_precision": "tf32"}, True, True),
        ({"matmul_fp32_precision": "none", "conv_fp32_precision": "tf32", "fp32_precision": "none"}, False, True),
        ({}, False, False),
    ],
)
def test_tf32_is_what_the_job_set_by_either_of_torchs_ways(
    matmul: dict[str, Any], product: bool, convolution: bool
) -> None:
    assert (allows_tf32(matmul, False), allows_tf32(matmul, True)) == (product, convolution)
