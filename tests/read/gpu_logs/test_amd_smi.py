"""What rocm-smi and amd-smi print, as CSV and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dlprof.errors import DlprofError
from dlprof.read.formats import Head
from dlprof.read.gpu_logs.amd_smi import read, recognise

WATCHED = """timestamp,gpu,gfx_activity,umc_activity,vcn_activity,socket_power,gfx_0_clk,gfx_0_max_clk,edge,hotspot
1772939616,0,95,80,"['N/A', 'N/A']",350,1980,2100,38,72
1772939617,0,85,80,"['N/A', 'N/A']",N/A,1980,2100,38,73
1772939616,1,20,5,"['N/A', 'N/A']",300,1950,2100,36,68
"""
ROCM_CSV = """device,Average Graphics Package Power (W),GPU use (%),VRAM Total Used Memory (B)
card0,19.0,0,27947008
card1,18.0,50,27947008
"""
ROCM = {
    "card0": {"GPU use (%)": "19", "Current Socket Graphics Package Power (W)": "7", "sclk clock speed:": "(800Mhz)"},
    "system": {"Driver version": "6.8"},
}
GPU = {
    "gpu": 0,
    "usage": {"gfx_activity": {"value": 40, "unit": "%"}, "umc_activity": "N/A"},
    "power": {"socket_power": {"value": 120, "unit": "W"}},
    "clock": {"gfx_0": {"clk": {"value": 1980, "unit": "MHz"}, "max_clk": {"value": 2100, "unit": "MHz"}}},
    "mem_usage": {"used_vram": {"value": 8, "unit": "GB"}, "total_vram": {"value": 16384, "unit": "MB"}},
}


def series(folder: Path, text: str) -> dict[tuple[str, str], list[float]]:
    (folder / "log").write_text(text)
    assert recognise(Head(folder / "log"))
    frame = read(folder / "log").tables["samples"]
    groups = frame.groupby(["source", "metric"], observed=True)
    return {(str(source), str(metric)): part["value"].tolist() for (source, metric), part in groups}


def test_what_amd_smi_watches(tmp_path: Path) -> None:
    found = series(tmp_path, WATCHED)
    assert found["amd-smi 0", "busy_share"] == pytest.approx([0.95, 0.85])
    assert found["amd-smi 0", "power_w"] == [350]
    assert found["amd-smi 0", "temperature_c"] == [72, 73]  # the hotspot's, before the edge's
    assert found["amd-smi 1", "sm_clock_max_mhz"] == [2100]
    assert read(tmp_path / "log").facts["log log"]["times"] == "zone"


def test_what_rocm_smi_prints_again_and_again(tmp_path: Path) -> None:
    found = series(tmp_path, ROCM_CSV * 2)
    assert found["rocm-smi 1", "busy_share"] == [0.5, 0.5]
    assert found["rocm-smi 0", "memory_used_bytes"] == [27947008, 27947008]
    assert read(tmp_path / "log").facts["log log"]["times"] == "none"


def test_several_tables_are_told_apart_and_what_comes_before_is_skipped(tmp_path: Path) -> None:
    blocks = "device,GPU use (%)\ncard0,40\n\ndevice,GPU memory use (%)\ncard0,60\n\ndevice,Fan speed (%)\ncard0,90\n"
    found = series(tmp_path, f"WARNING: a device is in a low-power state\n\n{blocks}")
    assert found == {
        ("rocm-smi 0", "busy_share"): [pytest.approx(0.4)],
        ("rocm-smi 0", "memory_busy_share"): [pytest.approx(0.6)],
    }


def test_json_of_rocm_smi(tmp_path: Path) -> None:
    found = series(tmp_path, "\n".join([json.dumps(ROCM)] * 2))
    assert found["rocm-smi 0", "busy_share"] == [0.19, 0.19]
    assert found["rocm-smi 0", "sm_clock_mhz"] == [800, 800]


@pytest.mark.parametrize("wrap", [lambda gpu: [gpu], lambda gpu: {"gpu_data": [gpu]}, lambda gpu: gpu])
def test_json_of_amd_smi_in_every_release(wrap: object, tmp_path: Path) -> None:
    found = series(tmp_path, json.dumps(wrap(GPU)))  # type: ignore[operator]
    assert found["amd-smi 0", "busy_share"] == [0.4]
    assert found["amd-smi 0", "sm_clock_mhz"] == [1980]
    assert found["amd-smi 0", "memory_used_bytes"] == [8 << 30]
    assert found["amd-smi 0", "memory_total_bytes"] == [1 << 34]


def test_a_cut_document_loses_itself_alone(tmp_path: Path) -> None:
    assert series(tmp_path, json.dumps([GPU]) + json.dumps([GPU])[:-30])["amd-smi 0", "power_w"] == [120]


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"gpu": 0}', "gpu,name\n0,x\n", "[" * 5000])
def test_other_files_are_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "log").write_text(text)
    assert not recognise(Head(tmp_path / "log"))
    with pytest.raises(DlprofError):
        read(tmp_path / "log")
