"""Autocast is named for the device that the job trains on, with the value that was recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.compute.products import autocast, tf32
from dlprof.result import Setting
from tests.fixtures import runs


def job(folder: Path, **facts: Any) -> Any:
    return runs.measured(runs.recorded(folder, (None, [runs.light(n, runs.MS) for n in range(9)], facts))).job


@pytest.mark.parametrize(("device", "half", "scaler"), [("cpu", "bfloat16", False), ("cuda", "float16", True)])
def test_autocast_is_of_the_jobs_device(tmp_path: Path, device: str, half: str, scaler: bool) -> None:
    made = autocast(job(tmp_path, device={"type": device}, autocast={"enabled": False}), 0, half)
    assert f'torch.autocast("{device}", torch.{half})' in made.text
    assert ("GradScaler" in made.text) is scaler
    assert made.numerics
    assert made.settings == (Setting("autocast_enabled", False, True), Setting("autocast_dtype", None, half))


def test_convolutions_that_have_tf32_need_no_change(tmp_path: Path) -> None:
    matmul = {"float32_precision": "highest", "cudnn_allow_tf32": True}
    (product,) = tf32(job(tmp_path, matmul=matmul), 0, "NVIDIA A100")
    assert product.settings == (Setting("float32_precision", "highest", "high"),)
