"""Samplers of GPUs against drivers that answer in the types, units and errors that NVML and amdsmi document.

`Nvml` stands where nvidia-ml-py calls the driver, `Amdsmi` for the module of amdsmi 7.0: no AMD GPU was at hand. Their
figures are made up. The last test asks a real driver, and is skipped where there is none.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from enum import IntEnum
from pathlib import Path
from types import ModuleType
from typing import Any

import pynvml
import pytest

import dlprof
from dlprof.record.samplers.gpu import AmdSampler, DriverSampler, GpuSampler, Traffic
from dlprof.record.samplers.sampling import Host, sample
from tests.fixtures.jobs import environment, noted, until
from tests.fixtures.sampling import host_with, rows

ONE, TWO = "11111111-2222-3333-4444-555555555555", "66666666-7777-8888-9999-000000000000"
SENT, RECEIVED = "pcie_sent_bytes_per_s", "pcie_received_bytes_per_s"
TIMES = {"at_ns", "perf_ns"}


class Driver:
    """Answers calls by name, and notes them. `refused`: calls that raise, and their errors."""

    def __init__(self, error: type[Exception], answers: dict[str, Callable[..., Any]]) -> None:
        self.error, self.answers = error, answers
        self.calls: list[str] = []
        self.refused: dict[Any, Any] = {}

    def call(self, name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.calls.append(name)
            if name in self.refused:
                raise self.error(self.refused[name])
            return self.answers[name](*args)

        return call


class Nvml(Driver):
    """NVML with GPUs that it knows by UUID; `refused` may name fields and GPM's metrics, too."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *known: str, gpm: int = 1, pcie: int = 5) -> None:
        self.known = known or (f"GPU-{ONE}",)
        self.handles: dict[str, Any] = {}
        self.slices: dict[int, tuple[Any, int]] = {}  # id of a handle → that of its GPU, and its number there
        self.sampled: list[tuple[int, int]] = []  # the GPUs and slices that GPM was asked about
        self.counted: dict[int, int] = {}  # by field, instead of figures made up
        self.wide = False  # PCIe's counters have 64 bits
        self.millijoules = 5_000_000
        answers: dict[str, Callable[..., Any]] = {
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: None,
            "nvmlDeviceGetHandleByUUID": self.handle,
            "nvmlDeviceGetUtilizationRates": lambda _: pynvml.c_nvmlUtilization_t(gpu=87, memory=41),
            "nvmlDeviceGetMemoryInfo": lambda _: pynvml.c_nvmlMemory_t(total=80 << 30, free=20 << 30, used=60 << 30),
            "nvmlDeviceGetPowerUsage": lambda _: 612_345,  # mW
            "nvmlDeviceGetEnforcedPowerLimit": lambda _: 700_000,
            "nvmlDeviceGetPowerManagementDefaultLimit": lambda _: 750_000,
            "nvmlDeviceGetTotalEnergyConsumption": self._energy,
            "nvmlDeviceGetClockInfo": lambda _, kind: {1: 1755, 2: 2619}[kind],
            "nvmlDeviceGetMaxClockInfo": lambda _, kind: {1: 1980, 2: 2619}[kind],
            "nvmlDeviceGetTemperature": lambda _, sensor: {0: 61}[sensor],
            "nvmlDeviceGetCurrentClocksEventReasons": lambda _: 0x24,
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda _: 0x4,
            "nvmlDeviceGetFieldValues": self._fields,
            "nvmlDeviceGetMaxPcieLinkGeneration": lambda _: pcie,
            "nvmlDeviceIsMigDeviceHandle": lambda handle: ctypes.c_uint(id(handle) in self.slices),
            "nvmlDeviceGetDeviceHandleFromMigDeviceHandle": lambda handle: self.slices[id(handle)][0],
            "nvmlDeviceGetGpuInstanceId": lambda handle: self.slices[id(handle)][1],
            "nvmlGpmMigSampleGet": lambda gpu, instance, _: self.sampled.append((id(gpu), instance)),
            "nvmlGpmQueryDeviceSupport": lambda _: pynvml.c_nvmlGpmSupport_t(version=1, isSupportedDevice=gpm),
            "nvmlGpmSampleAlloc": pynvml.c_nvmlGpmSample_t,
            "nvmlGpmSampleGet": lambda _, taken: taken,
            "nvmlGpmMetricsGet": self._gpm,
        }
        super().__init__(pynvml.NVMLError, answers)
        for name in answers:
            monkeypatch.setattr(pynvml, name, self.call(name))

    def handle(self, uuid: str) -> Any:
        if uuid not in self.known:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return self.handles.setdefault(uuid, pynvml.c_nvmlDevice_t())

    def _energy(self, _handle: Any) -> int:
        self.millijoules += 600_000
        return self.millijoules

    def _fields(self, _handle: Any, asked: list[tuple[int, int]]) -> Any:
        values = (pynvml.c_nvmlFieldValue_t * len(asked))()
        for value, (field, scope) in zip(values, asked, strict=True):
            value.fieldId, value.scopeId, value.nvmlReturn = field, scope, self.refused.get(field, pynvml.NVML_SUCCESS)
            made_up = 7 if scope == 0xFFFFFFFF else (1 << 40) + field
            number = self.counted.get(field, made_up)
            if field in (197, 198) and not self.wide:
                value.valueType, value.value.uiVal = pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, number % (1 << 32)
            else:
                value.valueType, value.value.ullVal = pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG, number
        return values

    def _gpm(self, asked: Any) -> Any:
        assert asked.version == 1
        measured = {2: 93.5, 3: 40.0, 5: 55.25, 10: 62.0, 20: 12.0, 21: 34.0, 60: 3.0, 61: float("nan")}
        for metric in asked.metrics[: asked.numMetrics]:
            metric.nvmlReturn = self.refused.get(f"gpm {metric.metricId}", 0)
            metric.value = measured[metric.metricId]
        return asked


class Kind(IntEnum):
    """Clocks, temperatures and which of their values, as amdsmi names them."""

    GFX, MEM, JUNCTION, CURRENT = range(4)


class AmdSmiException(Exception):  # noqa: N818 - its name
    """As amdsmi's: its text has the name of the status."""

    def __init__(self, status: str) -> None:
        super().__init__(f"Error code:\n\t2 | AMDSMI_STATUS_{status} - in words")


PLACES = {"five": "0000:05:00.0", "c1": "0000:c1:00.0"}
SERIAL = "98b61aaf1e1d4b21"
CLOCKS = {Kind.GFX: {"clk": 1755, "max_clk": 2100}, Kind.MEM: {"clk": 1300, "max_clk": 1300}}


class Amdsmi(Driver, ModuleType):
    """amdsmi with two GPUs, in another order than HIP's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ModuleType.__init__(self, "amdsmi")
        self.counter = 1000
        self.AmdSmiException = AmdSmiException
        self.AmdSmiClkType = self.AmdSmiTemperatureType = self.AmdSmiTemperatureMetric = Kind
        serials = {"five": "0x00000000000000AB", "c1": f"0x{SERIAL.upper()}"}
        answers: dict[str, Callable[..., Any]] = {
            "init": lambda: None,
            "shut_down": lambda: None,
            "get_processor_handles": lambda: ["five", "c1"],
            "get_gpu_device_bdf": lambda handle: PLACES[handle].upper(),
            "get_gpu_asic_info": lambda handle: {"asic_serial": serials[handle]},
            "get_gpu_activity": lambda _: {"gfx_activity": 87, "umc_activity": 41, "mm_activity": "N/A"},
            "get_gpu_vram_usage": lambda h: {"vram_total": 196592, "vram_used": {"five": 300, "c1": 60000}[h]},
            "get_power_info": lambda _: {"current_socket_power": 612, "average_socket_power": "N/A"},
            "get_power_cap_info": lambda _: {"power_cap": 700_000_000, "default_power_cap": 750_000_000},
            "get_energy_count": lambda _: {"energy_accumulator": 40_000_000_000, "counter_resolution": 15.25},
            "get_clock_info": lambda _, kind: CLOCKS[kind],
            "get_temp_metric": lambda _, *asked: {(Kind.JUNCTION, Kind.CURRENT): 61}[asked],
            "get_gpu_metrics_info": self._metrics,
        }
        Driver.__init__(self, AmdSmiException, {f"amdsmi_{name}": answer for name, answer in answers.items()})
        for name in self.answers:
            setattr(self, name, self.call(name))
        monkeypatch.setitem(sys.modules, "amdsmi", self)

    def _metrics(self, _handle: Any) -> dict[str, Any]:
        self.counter += 1000
        residencies = {"ppt": self.counter // 4, "socket_thm": self.counter // 10, "vr_thm": 3, "hbm_thm": 0}
        return {f"{what}_residency_acc": n for what, n in residencies.items()} | {"accumulation_counter": self.counter}


def cuda(uuid: str | None = ONE) -> dict[str, Any]:
    return {"type": "cuda", "uuid": uuid, "name": "NVIDIA H100"}


def amd(pci: str | None = PLACES["c1"], uuid: str | None = None) -> dict[str, Any]:
    return {"type": "cuda", "vendor": "amd", "pci": pci, "uuid": uuid, "name": "AMD Instinct MI300X"}


class Sampler(GpuSampler):
    """Reads everything at each tick."""

    def tick(self) -> None:
        self._due_s = 0.0
        super().tick()


def ticks(host: Host, times: int = 2, sampler: DriverSampler | None = None) -> DriverSampler:
    sampler = sampler or Sampler()
    sampler.start(host)
    for _ in range(times):
        sampler.tick()
    return sampler


def figures(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in TIMES}


def test_nvidias_metrics_have_the_units_of_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Nvml(monkeypatch)
    host = host_with(tmp_path, cuda())
    ticks(host).stop()
    first, second = rows(host)
    assert "sm_busy_share" not in first  # GPM measures between two readings
    held = ("power", "heat", "sync_boost", "board", "low_use", "reliability")
    names = [f"clocks_held_by_{what}_ns" for what in held] + ["below_application_clocks_ns", "below_base_clocks_ns"]
    assert figures(second) == {
        "busy_share": 0.87,
        "memory_busy_share": 0.41,
        "memory_used_bytes": 60 << 30,
        "memory_total_bytes": 80 << 30,
        "power_w": 612.345,
        "power_limit_w": 700.0,
        "power_limit_default_w": 750.0,
        "energy_j": 6200.0,
        "sm_clock_mhz": 1755,
        "memory_clock_mhz": 2619,
        "sm_clock_max_mhz": 1980,
        "temperature_c": 61,
        "clock_reasons_bits": 0x24,
        "nvlink_sent_bytes": 7 * 1024,
        "nvlink_received_bytes": 7 * 1024,
        SENT: 12 << 20,
        RECEIVED: 34 << 20,
        "sm_busy_share": 0.935,
        "sm_occupancy_share": 0.4,
        "tensor_busy_share": 0.5525,
        "dram_share": 0.62,
        "nvlink_received_bytes_per_s": 3 << 20,
        **{name: (1 << 40) + 74 + n for n, name in enumerate(names)},
    }


def test_amds_metrics_have_the_same_names_and_units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = Amdsmi(monkeypatch)
    host = host_with(tmp_path, amd())
    ticks(host, sampler=AmdSampler()).stop()
    first, second = rows(host)
    assert "clocks_held_by_power_share" not in first
    assert figures(second) == pytest.approx(
        {
            "busy_share": 0.87,
            "memory_busy_share": 0.41,
            "memory_used_bytes": 60000 << 20,
            "memory_total_bytes": 196592 << 20,
            "power_w": 612,
            "power_limit_w": 700,
            "power_limit_default_w": 750,
            "energy_j": 610_000,
            "sm_clock_mhz": 1755,
            "sm_clock_max_mhz": 2100,
            "memory_clock_mhz": 1300,
            "temperature_c": 61,
            "clocks_held_by_power_share": 0.25,
            "clocks_held_by_heat_share": 0.1,
        }
    )
    assert smi.calls[-1] == "amdsmi_shut_down"


def test_an_older_amd_gpu_has_fewer_metrics_and_no_zeros(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a MI250 with ROCm 6.0: an average of power, watts, another name of the clock, and no residencies."""
    smi = Amdsmi(monkeypatch)
    residencies = [f"{what}_residency_acc" for what in ("ppt", "socket_thm", "vr_thm", "hbm_thm")]
    smi.answers |= {
        "amdsmi_get_power_info": lambda _: {"current_socket_power": "N/A", "average_socket_power": 300},
        "amdsmi_get_power_cap_info": lambda _: {"power_cap": 500, "default_power_cap": 0},
        "amdsmi_get_clock_info": lambda *_: {"cur_clk": 1700, "max_clk": 1700},
        "amdsmi_get_gpu_metrics_info": lambda _: dict.fromkeys([*residencies, "accumulation_counter"], "N/A"),
    }
    host = host_with(tmp_path, amd())
    ticks(host, 3, AmdSampler())
    row = rows(host)[-1]
    names = ("power_w", "power_limit_w", "power_limit_default_w", "sm_clock_mhz", "memory_clock_mhz")
    assert [row.get(name) for name in names] == [300, 500, None, 1700, 1700]
    assert not [name for name in row if name.startswith("clocks_held")]
    assert smi.calls.count("amdsmi_get_gpu_metrics_info") == 1


# What fails in the third of four readings, and in which of them there is a metric: while the GPU and its driver are
# there, one bad reading is one gap, and what is refused is asked no more.
FAILS = {
    "one bad reading": ("nvmlDeviceGetPowerUsage", "UNKNOWN", "power_w", "yy-y", ""),
    "one bad reading of a field": (76, "UNKNOWN", "clocks_held_by_sync_boost_ns", "yy-y", ""),
    "one bad reading of GPM": ("nvmlGpmSampleGet", "UNKNOWN", "sm_busy_share", "-y-y", ""),
    "not supported": ("nvmlDeviceGetTotalEnergyConsumption", "NOT_SUPPORTED", "energy_j", "yy--", ""),
    "not in this driver": ("nvmlDeviceGetUtilizationRates", "FUNCTION_NOT_FOUND", "busy_share", "yy--", ""),
    "not for this user": (81, "NO_PERMISSION", "below_base_clocks_ns", "yy--", ""),
    "an activity that this GPU lacks": ("gpm 5", "NOT_SUPPORTED", "tensor_busy_share", "-y-y", ""),
    "a lost GPU": ("nvmlDeviceGetMemoryInfo", "GPU_IS_LOST", "power_w", "yy", f"GPU {ONE} is not sampled any more: "),
    "to be reset": ("nvmlDeviceGetTemperature", "RESET_REQUIRED", "power_w", "yy", f"GPU {ONE} is not sampled any "),
    "to be reset, by a field": (74, "RESET_REQUIRED", "power_w", "yy", f"GPU {ONE} is not sampled any more: "),
    "to be reset, by GPM": ("nvmlGpmSampleGet", "RESET_REQUIRED", "power_w", "yy", f"GPU {ONE} is not sampled any "),
    "no driver any more": ("nvmlDeviceGetMemoryInfo", "UNINITIALIZED", "power_w", "yy", "no GPU is sampled any more: "),
    # amdsmi
    "a bad reading of AMD's": ("amdsmi_get_power_info", "BUSY", "power_w", "yy-y", ""),
    "not supported by AMD's": ("amdsmi_get_energy_count", "NOT_SUPPORTED", "energy_j", "yy--", ""),
    "not for this user of AMD's": ("amdsmi_get_temp_metric", "NO_PERM", "temperature_c", "yy--", ""),
    "AMD's driver has gone": (
        *("amdsmi_get_gpu_activity", "DRIVER_NOT_LOADED", "power_w", "yy"),
        "no GPU is sampled any more: amdsmi: Error code: 2 | AMDSMI_STATUS_DRIVER_NOT_LOADED",
    ),
}


@pytest.mark.parametrize(("what", "status", "metric", "there", "said"), FAILS.values(), ids=FAILS)
def test_an_error_costs_what_it_means(
    what: Any, status: str, metric: str, there: str, said: str, tmp_path: Path, monkeypatch: Any, capfd: Any
) -> None:
    sampler: DriverSampler
    if is_amd := str(what).startswith("amdsmi"):
        driver: Driver = Amdsmi(monkeypatch)
        host, sampler, error = host_with(tmp_path, amd()), AmdSampler(), status
    else:
        driver = Nvml(monkeypatch)
        host, sampler, error = host_with(tmp_path, cuda()), Sampler(), getattr(pynvml, f"NVML_ERROR_{status}")
    ticks(host, 2, sampler)
    driver.refused = {what: error}
    sampler.tick()
    asked = driver.calls.count(what)
    driver.refused = {}
    sampler.tick()
    assert "".join("y" if metric in row else "-" for row in rows(host)) == there
    assert [line.startswith(f"dlprof: {said}") for line in capfd.readouterr().err.splitlines()] == [True] * bool(said)
    if there.endswith("--"):
        assert driver.calls.count(what) == asked
    driver.refused = {"amdsmi_shut_down": "NOT_INIT"} if is_amd else {"nvmlShutdown": pynvml.NVML_ERROR_UNINITIALIZED}
    sampler.stop()


def test_without_a_driver_for_one_gpu_the_others_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of two ranks on one GPU both have its reading; a slice is found by its number, and another one is not known."""
    driver = Nvml(monkeypatch, f"GPU-{ONE}", f"MIG-{TWO}")
    other = {"type": "cuda", "uuid": "other", "vendor": "amd"}
    host = host_with(
        tmp_path, cuda("lost"), cuda(), cuda(), cuda(TWO), {"type": "cpu", "uuid": None}, other, cuda(None)
    )
    ticks(host)
    assert [len(rows(host, rank)) for rank in range(7)] == [0, 2, 2, 2, 0, 0, 0]
    assert figures(rows(host, 1)[0]) == figures(rows(host, 2)[0])
    assert driver.calls.count("nvmlDeviceGetPowerUsage") == 4
    assert capfd.readouterr().err.splitlines() == [
        "dlprof: GPU lost is not sampled: Not Found",
        "dlprof: the GPU of rank 6 is not sampled: this torch does not tell its UUID",
    ]
    driver.refused = {"nvmlDeviceGetMemoryInfo": pynvml.NVML_ERROR_UNINITIALIZED}
    before = driver.calls.count("nvmlDeviceGetMemoryInfo")
    ticks(host)
    assert driver.calls.count("nvmlDeviceGetMemoryInfo") == before + 1  # the driver has gone for all of them
    assert capfd.readouterr().err.count("no GPU is sampled any more") == 1


def test_no_driver_is_loaded_for_gpus_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    drivers = Nvml(monkeypatch), Amdsmi(monkeypatch)
    for name, device, sampler in (("a", amd(), Sampler()), ("n", cuda(), AmdSampler()), ("c", {}, Sampler())):
        host = host_with(tmp_path / name, device)
        ticks(host, 1, sampler).stop()
        assert rows(host) == []
    assert [driver.calls for driver in drivers] == [[], []]
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("pci", "uuid", "used"),
    [
        (PLACES["c1"], None, 60000),
        (PLACES["five"], None, 300),
        # As HIP has it: 16 bytes, each a digit of the serial number, which torch writes as a UUID.
        (None, "39386236-3161-6166-3165-316434623231", 60000),
        (None, f"GPU-{SERIAL}", 60000),
    ],
)
def test_amds_gpu_is_found_by_its_place_or_serial_number(
    pci: str | None, uuid: str | None, used: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Amdsmi(monkeypatch)
    host = host_with(tmp_path, amd(pci, uuid))
    ticks(host, 1, AmdSampler())
    assert rows(host)[0]["memory_used_bytes"] == used << 20


def test_amds_gpu_that_is_unknown_or_known_twice_is_not_guessed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    smi = Amdsmi(monkeypatch)
    host = host_with(tmp_path, amd("0000:99:00.0"), amd(None, None), amd())
    ticks(host, sampler=AmdSampler())
    assert [len(rows(host, rank)) for rank in range(3)] == [0, 0, 2]
    first, second = capfd.readouterr().err.splitlines()
    assert "GPU 0000:99:00.0 is not sampled: amdsmi does not know it" in first
    assert "rank 1" in second
    smi.answers["amdsmi_get_gpu_device_bdf"] = lambda _: PLACES["c1"]  # several partitions have one place
    ticks(host, sampler=AmdSampler())
    assert "knows several parts of it" in capfd.readouterr().err


def test_an_older_driver_has_the_reasons_under_their_older_name(tmp_path: Path, monkeypatch: Any) -> None:
    driver = Nvml(monkeypatch)
    driver.refused = {"nvmlDeviceGetCurrentClocksEventReasons": pynvml.NVML_ERROR_FUNCTION_NOT_FOUND}
    host = host_with(tmp_path, cuda())
    ticks(host)
    assert rows(host)[-1]["clock_reasons_bits"] == 0x4


def test_a_slice_has_its_own_activity_and_memory_and_its_gpus_clocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Nvml(monkeypatch, f"MIG-{TWO}", f"GPU-{ONE}")
    whole, part = driver.handle(f"GPU-{ONE}"), driver.handle(f"MIG-{TWO}")
    driver.slices = {id(part): (whole, 9)}
    driver.refused = {"nvmlDeviceGetUtilizationRates": pynvml.NVML_ERROR_NOT_SUPPORTED}
    used, clocks = {id(whole): 60 << 30, id(part): 7 << 30}, {id(whole): 1755}
    driver.answers["nvmlDeviceGetMemoryInfo"] = lambda h: pynvml.c_nvmlMemory_t(total=10 << 30, used=used[id(h)])
    driver.answers["nvmlDeviceGetClockInfo"] = lambda h, _: clocks[id(h)]
    # torch names the whole GPU, and the script was given the slice by name.
    host = host_with(tmp_path, cuda(ONE) | {"slice": f"MIG-{TWO}"})
    ticks(host).stop()
    row = rows(host)[-1]
    assert (row["memory_used_bytes"], row["sm_clock_mhz"], row["sm_busy_share"]) == (7 << 30, 1755, 0.935)
    assert driver.sampled == [(id(whole), 9)] * 2
    assert "clocks_held_by_heat_ns" in row
    assert not {"power_w", "energy_j", "busy_share", SENT, "nvlink_sent_bytes"} & set(row)


# Of PCIe's counters: bytes sent and received and ms of each reading after the first, what the first had, whether they
# have 64 bits, what is refused, and the rates then.
TRAFFIC: dict[str, tuple[list[tuple[int, int, int]], int, bool, Iterable[int], dict[str, float]]] = {
    "nothing": ([], 0, False, (), {}),
    "a mean over time": ([(1_000, 500, 100), (2_000, 500, 100)], 0, False, (), {SENT: 15_000.0, RECEIVED: 5_000.0}),
    "begins again": ([(3_000, 0, 100)], (1 << 32) - 1000, False, (), {SENT: 30_000.0, RECEIVED: 0.0}),
    "just close enough": ([(1_300, 0, 130)], 0, False, (), {SENT: 10_000.0, RECEIVED: 0.0}),
    "too far apart, once": ([(9, 9, 131), (1_000, 0, 100)], 0, False, (), {SENT: 10_000.0, RECEIVED: 0.0}),
    "64 bits, read seldom": ([(1 << 40, 0, 1000)], 0, True, (), {SENT: float(1 << 40), RECEIVED: 0.0}),
    "64 bits, loaded anew": ([(-5, 0, 100)], 9, True, (), {RECEIVED: 0.0}),
    "one counter": ([(100, 100, 100)], 0, False, (197,), {RECEIVED: 1000.0}),
    "none": ([(100, 100, 100)], 0, False, (197, 198), {}),
}


@pytest.mark.parametrize(("moves", "first", "wide", "refused", "rates"), TRAFFIC.values(), ids=TRAFFIC)
def test_traffic_is_what_counters_differ_by(
    moves: Any, first: int, wide: bool, refused: Iterable[int], rates: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Nvml(monkeypatch)
    driver.counted, driver.wide = {197: first, 198: 0}, wide
    driver.refused = dict.fromkeys(refused, pynvml.NVML_ERROR_NOT_SUPPORTED)
    now_ms = [0]
    monkeypatch.setattr("dlprof.record.samplers.gpu.time.perf_counter_ns", lambda: now_ms[0] * 1_000_000)
    not_supported: Any = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    traffic = Traffic(pynvml, driver.handle(f"GPU-{ONE}"), (type(not_supported),), ())
    traffic.count()
    for sent, received, ms in moves:
        driver.counted = {197: driver.counted[197] + sent, 198: driver.counted[198] + received}
        now_ms[0] += ms
        assert traffic.count() == (tuple(refused) != (197, 198))
    assert traffic.rates() == rates
    assert traffic.rates() == {}


@pytest.mark.parametrize(
    ("lacks", "metrics"),
    [
        (["nvmlDeviceGetTotalEnergyConsumption"], ["energy_j"]),
        (["nvmlDeviceGetUtilizationRates", "nvmlDeviceIsMigDeviceHandle"], ["busy_share", "memory_busy_share"]),
        (["nvmlDeviceGetFieldValues", "nvmlDeviceGetMaxPcieLinkGeneration"], ["nvlink_sent_bytes"]),
        (["nvmlGpmQueryDeviceSupport"], ["sm_busy_share", "tensor_busy_share"]),
        (["nvmlDeviceGetCurrentClocksEventReasons"], []),  # its older name is there
    ],
)
def test_of_an_old_nvidia_ml_py_only_what_it_lacks_is_missing(
    lacks: list[str], metrics: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    Nvml(monkeypatch)
    whole = host_with(tmp_path / "whole", cuda())
    ticks(whole, 3)
    for name in lacks:
        monkeypatch.delattr(pynvml, name)
    host = host_with(tmp_path / "old", cuda())
    ticks(host, 3)
    assert set(rows(whole)[-1]) - set(rows(host)[-1]) >= set(metrics)
    assert "power_w" in rows(host)[-1]
    assert capfd.readouterr().err == ""


def test_counters_of_32_bits_are_looked_at_twice(tmp_path: Path, monkeypatch: Any, capfd: Any) -> None:
    """As an A100's: no GPM, and a link that fills the counter several times between two lines."""
    driver = Nvml(monkeypatch, gpm=0, pcie=4)
    now = [1000.0]
    monkeypatch.setattr("dlprof.record.samplers.gpu.time.perf_counter_ns", lambda: round(now[0] * 1e9))
    monkeypatch.setenv("DLPROF_SAMPLE", "0.2")
    host = host_with(tmp_path, cuda())
    sampler = ticks(host, 0, GpuSampler())
    periods = []
    for n in range(7):
        sent = round((now[0] - 1000) * 25e9)
        driver.counted |= {197: sent, 198: sent // 2}
        # A bad reading of the counters costs that one.
        driver.refused = {"nvmlDeviceGetFieldValues": pynvml.NVML_ERROR_UNKNOWN} if n == 3 else {}
        sampler.tick()
        periods.append(sampler.period_s)
        now[0] += sampler.period_s
    assert periods == pytest.approx([0.1, 0.9] * 3 + [0.1])  # once a second, and as soon again
    first, second, third, fourth = rows(host)
    assert SENT not in first
    assert SENT not in third
    assert (second[SENT], second[RECEIVED], second["power_w"]) == (pytest.approx(25e9), pytest.approx(12.5e9), 612.345)
    assert fourth[SENT] == pytest.approx(25e9)
    driver.refused = {"nvmlDeviceGetFieldValues": pynvml.NVML_ERROR_GPU_IS_LOST}
    sampler.tick()
    assert capfd.readouterr().err == f"dlprof: GPU {ONE} is not sampled any more: GPU is lost\n"


@pytest.mark.parametrize(
    ("generation", "period_s", "refused"),
    [
        (4, 0.1, ()),
        (5, 1.0, ()),
        (4, 1.0, (197, 198)),
        (4, 1.0, ("fields",)),
        (5, 0.1, ("generation",)),
    ],
)
def test_only_links_up_to_pcie_4_are_counted(
    generation: int, period_s: float, refused: Iterable[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor are they on a V100, whose driver 580 answers neither these counters nor GPM."""
    driver = Nvml(monkeypatch, gpm=0, pcie=generation)
    names = {"generation": "nvmlDeviceGetMaxPcieLinkGeneration", "fields": "nvmlDeviceGetFieldValues"}
    driver.refused = dict.fromkeys([names.get(n, n) for n in (*refused, 138, 139)], pynvml.NVML_ERROR_NOT_SUPPORTED)
    monkeypatch.setenv("DLPROF_SAMPLE", "1")
    host = host_with(tmp_path, cuda())
    sampler = ticks(host, 3)
    assert sampler.period_s == period_s
    assert any(SENT in row for row in rows(host)) == (period_s < 1)
    assert not [name for row in rows(host) for name in row if name.startswith(("nvlink", "sm_busy", "dram"))]
    assert [driver.calls.count(name) for name in ("nvmlGpmQueryDeviceSupport", "nvmlGpmSampleAlloc")] == [1, 0]


def no_driver() -> bool:
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
        pynvml.nvmlInit()
    except (OSError, pynvml.NVMLError):
        return True
    return False


# Where a driver's library is not, or its module is not installed. Nothing stands in for NVML here.
ABSENT: dict[str, tuple[type[DriverSampler], str | None, tuple[str, ...]]] = {
    "NVML": (GpuSampler, None, ("NVML: NVML Shared Library Not Found", "NVML: Driver Not Loaded")),
    "amdsmi": (AmdSampler, None, ("amdsmi, which reports what a ROCm GPU does, is not installed",)),
    "amdsmi's library": (
        *(AmdSampler, "print('no library')\nraise KeyError('libamd_smi.so')"),
        ("amdsmi does not find its library (KeyError: 'libamd_smi.so')",),
    ),
}


@pytest.mark.parametrize(("kind", "module", "whys"), ABSENT.values(), ids=ABSENT)
def test_without_a_driver_one_line_says_so(
    kind: type[DriverSampler], module: str | None, whys: Any, tmp_path: Path, monkeypatch: Any, capfd: Any
) -> None:
    if kind is GpuSampler and not no_driver():
        pytest.skip("this machine has an NVIDIA driver")
    monkeypatch.delitem(sys.modules, "amdsmi", raising=False)
    if module is None:
        monkeypatch.setitem(sys.modules, "amdsmi", None)
    else:
        (tmp_path / "amdsmi.py").write_text(module)
        monkeypatch.syspath_prepend(str(tmp_path))
    run = tmp_path / "run"
    host = host_with(run, amd() if kind is AmdSampler else cuda())
    reading, writing = os.pipe()

    class Ends(kind):  # type: ignore[valid-type, misc]
        """Ends the job at its first tick."""

        def tick(self) -> None:
            os.close(writing)
            super().tick()

    sample(run, [Ends], reading)
    os.close(reading)
    out, err = capfd.readouterr()
    assert out == ""
    assert err in [f"dlprof: the {kind.name} sampler is off: {why}; the job goes on without it\n" for why in whys]
    assert rows(host) == []


# A driver in C, loaded in NVML's place: it answers as an H200 did, as far as that is known. It has gone once a file is
# there, and lacks functions, as older drivers do.
DRIVER = r"""
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
typedef unsigned u;
typedef unsigned long long ull;
typedef union { double d; u ui; ull ull; } Value;
typedef struct { u field, scope; long long at, took; int type, status; Value value; } Field;
typedef struct { u id; int status; double value; char *names[3]; } Metric;
typedef struct { u version, count; void *before, *now; Metric metrics[]; } Metrics;
enum { GOOD = 0, NOT_SUPPORTED = 3, NOT_FOUND = 6, LOST = 15 };
static int now(void) { return access(getenv("NVML_GONE"), F_OK) ? GOOD : LOST; }
int nvmlInitWithFlags(u flags) { return GOOD; }
int nvmlShutdown(void) { return GOOD; }
int nvmlDeviceGetHandleByUUID(const char *id, void **g) { *g = g; return strncmp(id, "GPU-", 4) ? NOT_FOUND : now(); }
int nvmlDeviceGetUtilizationRates(void *g, u *percent) { percent[0] = 100; percent[1] = 7; return now(); }
int nvmlDeviceGetMemoryInfo(void *g, ull *b) {
    b[0] = 143771ull << 20; b[1] = 32362ull << 20; b[2] = b[0] - b[1];
    return now();
}
int nvmlDeviceGetPowerUsage(void *g, u *mw) { *mw = 627400; return now(); }
static ull all = 5551899580;
int nvmlDeviceGetTotalEnergyConsumption(void *g, ull *mj) { *mj = all += 62740; return now(); }
int nvmlDeviceGetClockInfo(void *g, int kind, u *mhz) { *mhz = kind == 1 ? 1980 : 3201; return now(); }
int nvmlDeviceGetTemperature(void *g, int sensor, u *celsius) { *celsius = 52; return now(); }
int nvmlDeviceGetCurrentClocksEventReasons(void *g, ull *bits) { *bits = 0; return now(); }
int nvmlDeviceGetFieldValues(void *g, int n, Field *f) {
    for (; n--; f++) {
        f->status = f->field == 74 || f->field == 197 ? GOOD : NOT_SUPPORTED;
        f->type = f->field == 74 ? 3 : 1;
        if (f->field == 74) f->value.ull = 15820333506000; else f->value.ui = 4217;
    }
    return now();
}
int nvmlGpmQueryDeviceSupport(void *g, u *support) { support[1] = 1; return now(); }
int nvmlGpmSampleAlloc(void **sample) { *sample = malloc(1); return GOOD; }
int nvmlGpmSampleGet(void *g, void *sample) { return now(); }
int nvmlGpmMetricsGet(Metrics *m) {
    for (u n = 0; n < m->count; n++) {
        m->metrics[n].status = m->metrics[n].id < 60 ? GOOD : NOT_SUPPORTED;
        m->metrics[n].value = 10 * m->metrics[n].id;
    }
    return m->before && m->now ? now() : NOT_SUPPORTED;
}
"""


@pytest.mark.long
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_a_gpu_that_vanishes_takes_its_readings_along_and_nothing_else(tmp_path: Path) -> None:
    """The samplers' real process, and nvidia-ml-py, on a library that stands where the driver's would."""
    (tmp_path / "driver.c").write_text(DRIVER)
    built = ["cc", "-shared", "-fPIC", "-o", str(tmp_path / "libnvidia-ml.so.1"), str(tmp_path / "driver.c")]
    subprocess.run(built, check=True)
    run, gone = tmp_path / "run", tmp_path / "gone"
    host = host_with(run, cuda())
    env = environment(LD_LIBRARY_PATH=str(tmp_path), NVML_GONE=str(gone), DLPROF_SAMPLE="0.1", DLPROF_STACKS="off")
    process = subprocess.Popen(
        [sys.executable, Path(dlprof.__file__).parent / "record/samplers/__main__.py", run, str(os.getpid())],
        env=env,
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    beside = host.folder / "samples.jsonl"
    try:
        assert until(lambda: len(rows(host)) > 2)
        gone.touch()
        assert until(lambda: noted(host.folder, "warning"))
        read, others = len(rows(host)), beside.read_text().count("\n")
        assert until(lambda: beside.read_text().count("\n") > others + 2)
        assert len(rows(host)) == read
    finally:
        said = process.communicate(timeout=60)[1]
    assert process.returncode == 0
    assert said == f"dlprof: GPU {ONE} is not sampled any more: GPU is lost\n"
    first, second = rows(host)[:2]
    assert second["energy_j"] - first["energy_j"] == pytest.approx(62.74)
    assert {name: value for name, value in second.items() if name not in ("at_ns", "perf_ns", "energy_j")} == {
        "busy_share": 1.0,
        "memory_busy_share": 0.07,
        "memory_used_bytes": (143771 - 32362) << 20,
        "memory_total_bytes": 143771 << 20,
        "power_w": 627.4,
        "sm_clock_mhz": 1980,
        "memory_clock_mhz": 3201,
        "temperature_c": 52,
        "clock_reasons_bits": 0,
        "clocks_held_by_power_ns": 15820333506000,
        "pcie_sent_bytes_per_s": 200 << 20,
        "pcie_received_bytes_per_s": 210 << 20,
        "sm_busy_share": 0.2,
        "sm_occupancy_share": 0.3,
        "tensor_busy_share": 0.5,
        "dram_share": 1.0,
    }


@pytest.mark.gpu
@pytest.mark.skipif(no_driver(), reason="no NVIDIA driver on this machine")
def test_a_real_gpu_is_read_by_its_uuid(tmp_path: Path) -> None:
    pynvml.nvmlInit()
    uuid = pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(0))
    host = host_with(tmp_path, cuda(uuid.removeprefix("GPU-")))
    ticks(host, 3).stop()
    first, _, last = rows(host)
    assert 0 < last["memory_total_bytes"] < 1 << 42
    assert 0 <= last["memory_used_bytes"] <= last["memory_total_bytes"]
    assert 0 <= last["busy_share"] <= 1
    assert last.get("energy_j", 0) >= first.get("energy_j", 0)
    assert 0 < last["temperature_c"] < 120
