"""Logs of nvidia-smi dmon and pmon, in the layouts of their options."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlprof.errors import DlprofError
from dlprof.read.formats import Head
from dlprof.read.gpu_logs.nvidia_dmon import read, recognise

PLAIN = """# gpu   pwr gtemp mtemp    sm   mem   enc   dec  mclk  pclk    fb
# Idx     W     C     C     %     %     %     %   MHz   MHz    MB
    0   400    60     -    90    40     0     0  2619  1980  1024
    1    90    40     -     0     0     -     -  2619   345     0
# gpu   pwr gtemp mtemp    sm   mem   enc   dec  mclk  pclk    fb
# Idx     W     C     C     %     %     %     %   MHz   MHz    MB
    0   410    60     -   100    40     0     0  2619  1980  1024
    1    9"""
DATED = """#Date       Time        gpu   pwr gtemp mtemp    sm
#YYYYMMDD   HH:MM:SS    Idx     W     C     C     %
 20260304   05:06:07      0   400    60     -    90
"""
TIMED = DATED.replace("#Date       ", "#").replace("#YYYYMMDD   ", "#").replace(" 20260304   ", " ")
CSV = "#gpu, pwr, gtemp, sm\n#Idx, W, C, %\n0, 400, 60, 90\n"
PROCESSES = """# gpu         pid   type     sm    mem    enc    dec    command
# Idx           #    C/G      %      %      %      %    name
    0       1234     C     40      5      -      -    python train.py
    0       1235     C     30      -      -      -    python
    1          -     -      -      -      -      -    -
    0       1234     C     20      5      -      -    python
    1          -     -      -      -      -      -    -
"""


def series(folder: Path, text: str) -> dict[tuple[str, str], list[float]]:
    (folder / "log").write_text(text)
    assert recognise(Head(folder / "log"))
    frame = read(folder / "log").tables["samples"]
    groups = frame.groupby(["source", "metric"], observed=True)
    return {(str(source), str(metric)): part["value"].tolist() for (source, metric), part in groups}


def test_each_gpu_is_a_source_and_a_dash_is_no_value(tmp_path: Path) -> None:
    found = series(tmp_path, PLAIN)
    assert found["nvidia-smi 0", "busy_share"] == [0.9, 1.0]
    assert found["nvidia-smi 0", "memory_used_bytes"] == [1 << 30, 1 << 30]
    assert found["nvidia-smi 1", "sm_clock_mhz"] == [345]
    assert ("nvidia-smi 0", "memory_temperature_c") not in found
    assert read(tmp_path / "log").facts["log log"]["times"] == "none"
    assert read(tmp_path / "log").warnings == ()  # the cut last line is not worth a word


@pytest.mark.parametrize(("text", "times"), [(DATED, "local"), (TIMED, "day"), (CSV, "none")])
def test_times_are_there_where_they_were_asked_for(text: str, times: str, tmp_path: Path) -> None:
    assert series(tmp_path, text)["nvidia-smi 0", "power_w"] == [400]
    assert read(tmp_path / "log").facts["log log"]["times"] == times


def test_the_processes_of_a_gpu_are_added_up(tmp_path: Path) -> None:
    found = series(tmp_path, PROCESSES)
    assert found["nvidia-smi 0", "busy_share"] == pytest.approx([0.7, 0.2])
    assert found["nvidia-smi 1", "busy_share"] == [0.0, 0.0]


@pytest.mark.parametrize("text", ["", "# gpu\n0\n", "gpu pwr\n0 1\n", "\x00\x01"])
def test_other_files_are_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "log").write_text(text)
    assert not recognise(Head(tmp_path / "log"))
    with pytest.raises(DlprofError):
        read(tmp_path / "log")
