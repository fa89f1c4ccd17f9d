"""Logs of nvidia-smi that people have, in the layouts that its options give; no GPU was at hand to log one here."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path

import pytest

from dlprof.analysis.panel import drawn
from dlprof.analysis.panels.machine import SAMPLES_PICTURE
from dlprof.errors import DlprofError
from dlprof.read.formats import Head
from dlprof.read.gpu_logs.nvidia_smi import read, recognise
from dlprof.read.run import open_run
from tests.fixtures import runs, traces

LOG = """timestamp, pci.bus_id, utilization.gpu [%], utilization.memory [%]
2026/03/04 05:06:07.250, 00000000:3B:00.0, 87 %, 41 %
2026/03/04 05:06:07.251, 00000000:86:00.0, [N/A], 3 %
2026/03/04 05:06:08.250, 00000000:3B:00.0, 0 %, 0 %
2026/03/04 05:06:08.251, 00000000:86:00.0, 55 %, 4
2026/03/04 05:06:09.2"""


def test_each_gpu_is_a_source_and_what_it_does_not_tell_has_no_row(tmp_path: Path) -> None:
    (tmp_path / "gpus.csv").write_text(LOG)
    reading = read(tmp_path / "gpus.csv")
    frame = reading.tables["samples"]
    # As its clock shows it: whose zone that is, is judged with the run beside it.
    at = int(datetime(2026, 3, 4, 5, 6, 7, 250_000, tzinfo=timezone.utc).timestamp() * 1e3) * 1_000_000
    busy = frame[frame["metric"] == "busy_share"]
    assert [tuple(row) for row in busy[["source", "at_ns", "value"]].itertuples(index=False)] == [
        ("nvidia-smi 00000000:3B:00.0", at, 0.87),
        ("nvidia-smi 00000000:3B:00.0", at + 1_000_000_000, 0.0),
        ("nvidia-smi 00000000:86:00.0", at + 1_001_000_000, 0.55),
    ]
    assert reading.facts["log gpus.csv"]["times"] == "local"
    assert reading.warnings == ()  # the cut last line is not worth a word


def test_other_properties_and_bare_numbers(tmp_path: Path) -> None:
    (tmp_path / "gpus.csv").write_text(
        "index, timestamp, memory.used [MiB], power.draw [W], clocks.current.sm [MHz], name, fan.speed [%]\n"
        "0, 2026/03/04 05:06:07.250, 1024, 612.5, 1755, NVIDIA H100, [N/A]\nnonsense\nmore, nonsense\n"
    )
    reading = read(tmp_path / "gpus.csv")
    frame = reading.tables["samples"]
    assert set(frame["source"]) == {"nvidia-smi 0"}
    told = dict(zip(frame["metric"], frame["value"], strict=True))
    assert told == {"memory_used_bytes": 1 << 30, "power_w": 612.5, "sm_clock_mhz": 1755}
    assert any("2 malformed lines" in w for w in reading.warnings)


@pytest.mark.parametrize("text", ["", "timestamp\n", "a,b\n1,2\n", "\x00\xff\n"])
def test_other_files_are_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "other.csv").write_text(text)
    assert not recognise(Head(tmp_path / "other.csv"))
    if "timestamp" not in text:
        with pytest.raises(DlprofError):
            read(tmp_path / "other.csv")


def test_a_log_beside_traces_or_in_a_run_is_drawn_a_line_a_gpu(tmp_path: Path) -> None:
    later = "".join(
        f"2026/03/04 05:06:{s:02d}.000, 00000000:3B:00.0, {s} %, 0 %\n"
        f"2026/03/04 05:06:{s:02d}.000, 00000000:86:00.0, 9 %, 0 %\n"
        for s in range(10, 40)
    )
    log = LOG.partition("\n")[0] + "\n" + later
    foreign = runs.foreign(tmp_path / "foreign", traces.training(), traces.training())
    recorded = runs.recorded(tmp_path / "run", (traces.training(), [], runs.CPU))
    for folder in (foreign, recorded):
        (folder / "loss.csv").write_text("step,loss\n1,2\n")
        (folder / "smi.csv").write_text(log)
        assert ["nvidia_smi" in rank.files for rank in open_run(folder).ranks][:2] in ([True], [True, False])
        run = runs.measured(folder, SAMPLES_PICTURE.draw)
        (panel,) = (p for p in drawn(run, [SAMPLES_PICTURE]) if p.title == "GPU: some kernel ran")
        assert panel.columns == ("time_ns", "nvidia-smi 00000000:3B:00.0", "nvidia-smi 00000000:86:00.0")
        assert all(row[2] == pytest.approx(0.09) for row in panel.rows)


def read_text(folder: Path, text: str) -> dict[tuple[str, str], list[float]]:
    (folder / "log").write_text(text)
    assert recognise(Head(folder / "log"))
    frame = read(folder / "log").tables["samples"]
    groups = frame.groupby(["source", "metric"], observed=True)
    return {(str(source), str(metric)): part["value"].tolist() for (source, metric), part in groups}


def test_a_header_that_a_script_repeats_and_no_units(tmp_path: Path) -> None:
    once = "index, utilization.gpu [%], power.draw [W]\n0, 50, [Not Supported]\n1, 75, 300.5\n"
    found = read_text(tmp_path, once + once)
    assert found == {
        ("nvidia-smi 0", "busy_share"): [0.5, 0.5],
        ("nvidia-smi 1", "busy_share"): [0.75, 0.75],
        ("nvidia-smi 1", "power_w"): [300.5, 300.5],
    }
    assert read(tmp_path / "log").facts["log log"]["times"] == "none"


def test_reasons_one_by_one_are_the_mask_of_all(tmp_path: Path) -> None:
    names = ("hw_thermal_slowdown", "sw_power_cap", "hw_slowdown")
    header = ", ".join(["timestamp", "index", "clocks.sm [MHz]", *(f"clocks_throttle_reasons.{n}" for n in names)])
    row = "2026/03/04 05:06:07.250, 0, 1300 MHz, Active, Active, Not Active"
    assert read_text(tmp_path, f"{header}\n{row}\n")["nvidia-smi 0", "clock_reasons_bits"] == [0x44]


def test_without_a_header_units_and_a_time_say_what_the_columns_are(tmp_path: Path) -> None:
    row = "2026/03/04 05:06:07.250, 00000000:3B:00.0, 87 %, 41 %, 412.20 W\n"
    found = read_text(tmp_path, row * 3)
    assert found["nvidia-smi 00000000:3B:00.0", "busy_share"] == [0.87] * 3
    assert found["nvidia-smi 00000000:3B:00.0", "power_w"] == [412.2] * 3
    assert any("no header" in w for w in read(tmp_path / "log").warnings)


def test_without_header_and_units_it_is_none(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("2026/03/04 05:06:07.250, 0, 87, 41\n")
    assert not recognise(Head(tmp_path / "log"))
