"""What nvidia-smi and torch say of a machine, and the one line where there is no GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import jobs, machine
from dlprof.commands.run import count_gpus

FIELDS = ("index", "name", "power.draw", "clocks.sm")


def test_nvidia_smi_rows_with_what_it_does_not_know_and_what_is_no_row() -> None:
    text = (
        "0, NVIDIA H200, 627.40, 1980\n"
        "1, NVIDIA H100 PCIe, [N/A], N/A\n"
        "\n"
        "Unable to determine the device handle for GPU 0000:5E:00.0: Unknown Error\n"
        '2, "NVIDIA A100, made up", [Unknown Error], 1410\n'
    )
    rows = machine.parse(text, FIELDS)
    assert [row["name"] for row in rows] == ["NVIDIA H200", "NVIDIA H100 PCIe", "NVIDIA A100, made up"]
    assert [machine.number(row["power.draw"]) for row in rows] == [627.4, None, None]
    assert [machine.number(row["clocks.sm"]) for row in rows] == [1980.0, None, 1410.0]
    assert (rows[1]["power.draw"], rows[1]["clocks.sm"]) == (None, None)
    assert machine.number("some W") is None


def test_a_device_as_part_of_a_files_name() -> None:
    assert machine.label("NVIDIA H200") == "nvidia_h200"
    assert machine.label("NVIDIA A100-SXM4-80GB (MIG 1g.10gb)") == "nvidia_a100_sxm4_80gb_mig_1g_10gb"
    assert machine.label("???") == "unknown"


@pytest.mark.parametrize(
    ("torch", "driver", "said"),
    [
        (
            "torch cannot be asked: No module named 'torch'",
            [],
            "no GPU: torch cannot be asked: No module named 'torch'",
        ),
        ({"torch": "2.13.0+cpu", "gpus": []}, "nvidia-smi is not on the PATH", "sees none; nvidia-smi is not on the"),
        ({"torch": "2.11.0+cu130", "gpus": []}, [{"name": "NVIDIA H200"}], "sees none; nvidia-smi lists 1"),
        ({"torch": "2.11.0+cu130", "gpus": [{"name": "NVIDIA H200"}]}, "nvidia-smi is not on the PATH", ""),
    ],
)
def test_why_there_is_no_gpu(torch: dict[str, Any] | str, driver: list[dict[str, str | None]] | str, said: str) -> None:
    why = machine.no_gpu(torch, driver)
    assert said in why
    assert bool(why) == bool(said)
    assert "\n" not in why


def test_torch_is_asked_in_a_process_of_its_own(tmp_path: Path) -> None:
    told = machine.ask_torch(tmp_path)
    assert isinstance(told, dict)
    assert told["python"] == ".".join(map(str, sys.version_info[:3]))
    assert len(told["gpus"]) == count_gpus()


@pytest.mark.skipif(count_gpus() > 0, reason="there is a GPU here")
def test_without_a_gpu_the_command_says_so_in_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--out", str(out)],
        cwd=jobs.ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("no GPU: torch ")
    assert done.stderr.count("\n") == 1
    assert not out.exists()
