"""The verdict on a profile alone, and on a log of GPUs alone: by its figures."""

from __future__ import annotations

import msgspec
import pytest

from dlprof.report import logged, verdict
from dlprof.result import Result, RunInfo
from dlprof.result.figures import GpuLog, Profile

PROFILE = Profile("p.json", "py-spy", "samples", 400.0, "decode", "/me/data.py", 41, 0.5, own=True)
GPU = GpuLog("nvidia-smi 3", 100, 99.0, busy_share=0.63, power_w=412.0, memory_used_bytes=1e9, memory_total_bytes=8e9)


def result(*found: Profile | GpuLog) -> Result:
    return Result(
        RunInfo("x"),
        None,
        profiles=tuple(f for f in found if isinstance(f, Profile)),
        gpu_logs=tuple(f for f in found if isinstance(f, GpuLog)),
    )


@pytest.mark.parametrize(
    ("one", "parts", "share"),
    [
        (PROFILE, ("decode", "data.py:41", "py-spy", "400"), "50"),
        (GPU, ("GPU 3", "412"), "63"),
        (msgspec.structs.replace(GPU, held_by="heat", clock_lost=0.25, sm_clock_mhz=1300.0), ("GPU 3", "hot"), "25"),
        (msgspec.structs.replace(GPU, busy_share=0.95, memory_used_bytes=7.9e9), ("memory", "GPU 3"), "99"),
    ],
)
def test_the_headline_is_about_what_matters_most(one: Profile | GpuLog, parts: tuple[str, ...], share: str) -> None:
    said = verdict.headline(result(one))
    assert all(part in said.diagnosis for part in parts)
    assert said.share.startswith(share)
    assert said.share in said.diagnosis


def test_hostile_values_say_nothing_wrong() -> None:
    odd = Profile("p", "t", "ns", 1.0, "f", "", 0, 7.0)
    assert logged.of_logs(result(odd)) is None
    assert logged.of_logs(result()) is None
    empty = GpuLog("x", 0, 0.0, memory_used_bytes=9e9, memory_total_bytes=1e9)
    assert logged.of_logs(result(empty)) is not None


def test_what_was_read_is_described() -> None:
    said = logged.described(result(PROFILE, GPU))
    assert "400" in said
    assert "1" in said
