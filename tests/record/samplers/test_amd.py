"""The sampler of AMD's GPUs against answers of the shape that amdsmi's Python interface documents. None is recorded.

No such GPU was at hand: `Documented` stands for the module, with the keys, units and errors of amdsmi 7.0, and figures
made up. What a real one answers is not seen yet.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dlprof.record.samplers.amd import AmdSampler
from dlprof.record.samplers.sampling import Host, sample
from tests.fixtures.sampling import host_with, rows

ONE, TWO = "0000:c1:00.0", "0000:05:00.0"
SERIAL = "98b61aaf1e1d4b21"


class Kind(IntEnum):
    """Clocks, temperatures and what of them is asked, as amdsmi names them."""

    GFX, MEM, JUNCTION, CURRENT = range(4)


class AmdSmiException(Exception):  # noqa: N818 - its name
    """As amdsmi's: its text has the name of the status."""

    def __init__(self, status: str) -> None:
        super().__init__(f"Error code:\n\t2 | AMDSMI_STATUS_{status} - in words")


class Documented(ModuleType):
    """amdsmi with two GPUs, in another order than HIP's. `refused` are functions that answer with a status."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__("amdsmi")
        self.calls: list[str] = []
        self.refused: dict[str, str] = {}
        self.counter = 1000
        self.AmdSmiException = AmdSmiException
        self.AmdSmiClkType = self.AmdSmiTemperatureType = self.AmdSmiTemperatureMetric = Kind
        self.answers: dict[str, Callable[..., Any]] = {
            "amdsmi_init": lambda: None,
            "amdsmi_shut_down": lambda: None,
            "amdsmi_get_processor_handles": lambda: ["five", "c1"],
            "amdsmi_get_gpu_device_bdf": lambda handle: {"five": TWO, "c1": ONE.upper()}[handle],
            "amdsmi_get_gpu_asic_info": lambda handle: {
                "asic_serial": {"five": "0x00000000000000AB", "c1": f"0x{SERIAL.upper()}"}[handle]
            },
            "amdsmi_get_gpu_activity": lambda _: {"gfx_activity": 87, "umc_activity": 41, "mm_activity": "N/A"},
            "amdsmi_get_gpu_vram_usage": lambda handle: {
                "vram_total": 196592,
                "vram_used": {"five": 300, "c1": 60000}[handle],
            },
            "amdsmi_get_power_info": lambda _: {
                "socket_power": 612,
                "current_socket_power": 612,
                "average_socket_power": "N/A",
                "power_limit": 750,
            },
            "amdsmi_get_power_cap_info": lambda _: {
                "power_cap": 700_000_000,
                "default_power_cap": 750_000_000,
                "dpm_cap": 2100,
            },
            "amdsmi_get_energy_count": lambda _: {
                "energy_accumulator": 40_000_000_000,
                "counter_resolution": 15.25,
                "timestamp": 1,
            },
            "amdsmi_get_clock_info": self._clock,
            "amdsmi_get_temp_metric": lambda _, kind, metric: {(Kind.JUNCTION, Kind.CURRENT): 61}[kind, metric],
            "amdsmi_get_gpu_metrics_info": self._metrics,
        }
        for name in self.answers:
            setattr(self, name, self._asked(name))
        monkeypatch.setitem(sys.modules, "amdsmi", self)

    def _asked(self, name: str) -> Callable[..., Any]:
        def ask(*args: Any) -> Any:
            self.calls.append(name)
            if name in self.refused:
                raise AmdSmiException(self.refused[name])
            return self.answers[name](*args)

        return ask

    def _clock(self, _handle: Any, kind: Kind) -> dict[str, Any]:
        clock, most = {Kind.GFX: (1755, 2100), Kind.MEM: (1300, 1300)}[kind]
        return {"clk": clock, "min_clk": 132, "max_clk": most, "clk_locked": False, "clk_deep_sleep": 0}

    def _metrics(self, _handle: Any) -> dict[str, Any]:
        self.counter += 1000
        return {
            "accumulation_counter": self.counter,
            "ppt_residency_acc": self.counter // 4,
            "socket_thm_residency_acc": self.counter // 10,
            "vr_thm_residency_acc": 3,
            "hbm_thm_residency_acc": 0,
            "prochot_residency_acc": 0,
        }


def amd(pci: str | None = ONE, uuid: str | None = None) -> dict[str, Any]:
    return {"type": "cuda", "vendor": "amd", "pci": pci, "uuid": uuid, "name": "AMD Instinct MI300X"}


def ticks(host: Host, times: int = 2) -> AmdSampler:
    sampler = AmdSampler()
    sampler.start(host)
    for _ in range(times):
        sampler.tick()
    return sampler


def figures(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in ("at_ns", "perf_ns")}


def test_every_metric_has_the_unit_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = Documented(monkeypatch)
    host = host_with(tmp_path, amd())
    ticks(host).stop()
    first, second = rows(host)
    assert "clocks_held_by_power_share" not in first  # of the time between two readings
    assert figures(second) == {
        "busy_share": 0.87,
        "memory_busy_share": pytest.approx(0.41),
        "memory_used_bytes": 60000 << 20,
        "memory_total_bytes": 196592 << 20,
        "power_w": 612,
        "power_limit_w": pytest.approx(700),
        "power_limit_default_w": pytest.approx(750),
        "energy_j": pytest.approx(610_000),
        "sm_clock_mhz": 1755,
        "sm_clock_max_mhz": 2100,
        "memory_clock_mhz": 1300,
        "temperature_c": 61,
        "clocks_held_by_power_share": 0.25,
        "clocks_held_by_heat_share": 0.1,
    }
    assert smi.calls[-1] == "amdsmi_shut_down"


@pytest.mark.parametrize(
    ("pci", "uuid", "used"),
    [
        (ONE, None, 60000),
        (TWO, None, 300),
        # As HIP has it: 16 bytes, each a digit of the serial number, which torch writes as a UUID.
        (None, "39386236-3161-6166-3165-316434623231", 60000),
        (None, f"GPU-{SERIAL}", 60000),
    ],
)
def test_a_gpu_is_found_by_its_place_or_its_number_and_not_by_its_index(
    pci: str | None, uuid: str | None, used: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Documented(monkeypatch)
    host = host_with(tmp_path, amd(pci, uuid))
    ticks(host, 1)
    assert rows(host)[0]["memory_used_bytes"] == used << 20


def test_a_gpu_that_amdsmi_does_not_know_or_knows_twice_is_not_guessed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    smi = Documented(monkeypatch)
    host = host_with(tmp_path, amd("0000:99:00.0"), amd(None, None), amd())
    sampler = ticks(host)
    assert [len(rows(host, rank)) for rank in range(3)] == [0, 0, 2]
    said = capfd.readouterr().err
    assert said.count("\n") == 2
    assert "GPU 0000:99:00.0 is not sampled: amdsmi does not know it" in said
    assert "does not tell which it is" in said
    sampler.stop()
    # A GPU in several partitions has one place.
    smi.answers["amdsmi_get_gpu_device_bdf"] = lambda _: ONE
    ticks(host)
    assert "knows several parts of it" in capfd.readouterr().err


@pytest.mark.parametrize("status", ["NOT_SUPPORTED", "NOT_YET_IMPLEMENTED", "NO_PERM"])
def test_what_a_gpu_refuses_is_absent_and_asked_once(
    status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    smi = Documented(monkeypatch)
    refused = ["amdsmi_get_energy_count", "amdsmi_get_gpu_metrics_info"]
    smi.refused = dict.fromkeys(refused, status)
    host = host_with(tmp_path, amd())
    ticks(host, 3)
    assert all({"power_w", "busy_share"} <= set(row) and "energy_j" not in row for row in rows(host))
    assert [smi.calls.count(name) for name in refused] == [1, 1]
    assert capfd.readouterr().err == ""


def test_one_bad_reading_is_one_gap_and_no_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    smi = Documented(monkeypatch)
    host = host_with(tmp_path, amd())
    sampler = ticks(host)
    smi.refused = {"amdsmi_get_power_info": "BUSY"}
    sampler.tick()
    smi.refused = {}
    sampler.tick()
    assert ["power_w" in row for row in rows(host)] == [True, True, False, True]
    assert capfd.readouterr().err == ""


def test_an_older_gpu_says_less_and_nothing_is_zero_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a MI250 with ROCm 6.0: an average of power, watts, another name of the clock, and no residencies."""
    smi = Documented(monkeypatch)
    smi.answers |= {
        "amdsmi_get_power_info": lambda _: {"current_socket_power": "N/A", "average_socket_power": 300},
        "amdsmi_get_power_cap_info": lambda _: {"power_cap": 500, "default_power_cap": 560},
        "amdsmi_get_clock_info": lambda *_: {"cur_clk": 1700, "max_clk": 1700},
        "amdsmi_get_gpu_metrics_info": lambda _: dict.fromkeys(
            [f"{what}_residency_acc" for what in ("ppt", "socket_thm", "vr_thm", "hbm_thm")] + ["accumulation_counter"],
            "N/A",
        ),
    }
    host = host_with(tmp_path, amd())
    ticks(host, 3)
    told = figures(rows(host)[-1])
    assert (told["power_w"], told["power_limit_w"], told["power_limit_default_w"]) == (300, 500, 560)
    assert (told["sm_clock_mhz"], told["memory_clock_mhz"]) == (1700, 1700)
    assert not [name for name in told if name.startswith("clocks_held")]
    assert smi.calls.count("amdsmi_get_gpu_metrics_info") == 1


def test_a_driver_that_goes_takes_all_gpus_along_with_one_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    smi = Documented(monkeypatch)
    host = host_with(tmp_path, amd(ONE), amd(TWO))
    sampler = ticks(host)
    smi.refused = {"amdsmi_get_gpu_activity": "DRIVER_NOT_LOADED"}
    sampler.tick()
    sampler.tick()
    assert [len(rows(host, rank)) for rank in (0, 1)] == [2, 2]
    said = capfd.readouterr().err
    assert said.startswith(
        "dlprof: no GPU is sampled any more: amdsmi: Error code: 2 | AMDSMI_STATUS_DRIVER_NOT_LOADED"
    )
    assert said.count("\n") == 1


def test_a_gpu_of_nvidias_is_none_of_amdsmis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = Documented(monkeypatch)
    host = host_with(tmp_path, {"type": "cuda", "vendor": "nvidia", "pci": ONE}, {"type": "cuda", "uuid": "x"})
    ticks(host).stop()
    assert (smi.calls, rows(host, 0), rows(host, 1)) == ([], [], [])


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "amdsmi, which reports what a ROCm GPU does, is not installed"),
        ("print('no library')\nraise KeyError('libamd_smi.so')", "amdsmi does not find its library"),
    ],
)
def test_without_amdsmi_or_its_library_one_line_says_so(
    content: str | None,
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Its own words, without its library, are for nobody."""
    monkeypatch.delitem(sys.modules, "amdsmi", raising=False)
    if content is None:
        monkeypatch.setitem(sys.modules, "amdsmi", None)
    else:
        (tmp_path / "amdsmi.py").write_text(content)
        monkeypatch.syspath_prepend(str(tmp_path))
    run = tmp_path / "run"
    host = host_with(run, amd())
    reading, writing = os.pipe()

    class Ends(AmdSampler):
        """Ends the job at its first tick."""

        def tick(self) -> None:
            os.close(writing)
            super().tick()

    sample(run, [Ends], reading)
    os.close(reading)
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith(f"dlprof: the amd sampler is off: {why}")
    assert err.count("\n") == 1
    assert rows(host) == []
