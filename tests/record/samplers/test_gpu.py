"""The GPU sampler against NVML's answers as its documentation has them: their units and types are not recorded.

No GPU was at hand: `Documented` stands where nvidia-ml-py calls the driver and answers in the types of the real module,
by default with figures made up. `PRINTED`, `CONSUMED` and `CAPPED` are those of real GPUs, as tools that stand on NVML
told them: nvidia-smi and dcgm-exporter.
The last test asks a real driver, and is skipped where there is none.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pynvml
import pytest

import dlprof
from dlprof.analysis.machine.clocks import REASONS
from dlprof.record.samplers.gpu import GpuSampler
from dlprof.record.samplers.sampling import Host, sample
from tests.fixtures.jobs import environment, until
from tests.fixtures.sampling import host_with, rows

ONE, TWO = "11111111-2222-3333-4444-555555555555", "66666666-7777-8888-9999-000000000000"


class Documented:
    """A driver with GPUs that NVML knows by UUID. `refused` are functions and fields that answer with an error."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, known: tuple[str, ...] = (f"GPU-{ONE}",)) -> None:
        self.known = known
        self.calls: list[str] = []
        self.refused: dict[str | int, int] = {}
        self.millijoules = 5_000_000
        self.counted: dict[int, int] = {}  # by field, instead of figures made up
        self.slices: dict[int, tuple[Any, int]] = {}  # id of a handle → that of its GPU, and its number there
        self.handles: dict[str, Any] = {}
        self.sampled: list[tuple[int, int]] = []  # of which GPU and slice GPM was asked
        self.answers: dict[str, Callable[..., Any]] = {
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: None,
            "nvmlDeviceGetHandleByUUID": self._handle,
            "nvmlDeviceGetUtilizationRates": lambda _: pynvml.c_nvmlUtilization_t(gpu=87, memory=41),
            "nvmlDeviceGetMemoryInfo": lambda _: pynvml.c_nvmlMemory_t(total=80 << 30, free=20 << 30, used=60 << 30),
            "nvmlDeviceGetPowerUsage": lambda _: 612_345,  # mW
            "nvmlDeviceGetEnforcedPowerLimit": lambda _: 700_000,  # mW
            "nvmlDeviceGetPowerManagementDefaultLimit": lambda _: 750_000,  # mW
            "nvmlDeviceGetTotalEnergyConsumption": self._energy,  # mJ
            "nvmlDeviceGetClockInfo": lambda _, kind: {1: 1755, 2: 2619}[kind],
            "nvmlDeviceGetMaxClockInfo": lambda _, kind: {1: 1980, 2: 2619}[kind],
            "nvmlDeviceGetTemperature": lambda _, sensor: {0: 61}[sensor],
            "nvmlDeviceGetCurrentClocksEventReasons": lambda _: 0x24,
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda _: 0x4,
            "nvmlDeviceGetFieldValues": self._fields,
            "nvmlDeviceGetMaxPcieLinkGeneration": lambda _: 5,
            "nvmlDeviceIsMigDeviceHandle": lambda handle: ctypes.c_uint(id(handle) in self.slices),
            "nvmlDeviceGetDeviceHandleFromMigDeviceHandle": lambda handle: self.slices[id(handle)][0],
            "nvmlDeviceGetGpuInstanceId": lambda handle: self.slices[id(handle)][1],
            "nvmlGpmMigSampleGet": self._sample_of_slice,
            "nvmlGpmQueryDeviceSupport": lambda _: pynvml.c_nvmlGpmSupport_t(version=1, isSupportedDevice=1),
            "nvmlGpmSampleAlloc": pynvml.c_nvmlGpmSample_t,
            "nvmlGpmSampleGet": lambda _, taken: taken,
            "nvmlGpmMetricsGet": self._gpm,
        }
        for name in self.answers:
            monkeypatch.setattr(pynvml, name, self._asked(name))

    def _asked(self, name: str) -> Callable[..., Any]:
        def ask(*args: Any) -> Any:
            self.calls.append(name)
            if name in self.refused:
                raise pynvml.NVMLError(self.refused[name])
            return self.answers[name](*args)

        return ask

    def _handle(self, uuid: str) -> Any:
        if uuid not in self.known:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return self.handles.setdefault(uuid, pynvml.c_nvmlDevice_t())

    def _sample_of_slice(self, gpu: Any, instance: int, taken: Any) -> Any:
        self.sampled.append((id(gpu), instance))
        return taken

    def _energy(self, _handle: Any) -> int:
        self.millijoules += 600_000
        return self.millijoules

    def _fields(self, _handle: Any, asked: list[tuple[int, int]]) -> Any:
        values = (pynvml.c_nvmlFieldValue_t * len(asked))()
        for value, (field, scope) in zip(values, asked, strict=True):
            value.fieldId, value.scopeId = field, scope
            value.nvmlReturn = self.refused.get(field, pynvml.NVML_SUCCESS)
            if field in (197, 198):
                value.valueType = pynvml.NVML_VALUE_TYPE_UNSIGNED_INT
                value.value.uiVal = self.counted.get(field, 1000 + field) % (1 << 32)
                continue
            if field in (138, 139) and scope == 0xFFFFFFFF:
                value.valueType, value.value.ullVal = pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG, 7
            else:
                value.valueType, value.value.ullVal = pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG, (1 << 40) + field
            if field in self.counted:
                value.value.ullVal = self.counted[field]
        return values

    def _gpm(self, asked: Any) -> Any:
        assert asked.version == 1
        for slot in range(asked.numMetrics):
            metric = asked.metrics[slot]
            metric.nvmlReturn = self.refused.get(f"gpm {metric.metricId}", 0)
            metric.value = {2: 93.5, 3: 40.0, 5: 55.25, 10: 62.0, 20: 12.0, 21: 34.0, 60: 3.0, 61: float("nan")}[
                metric.metricId
            ]
        return asked


# Of nvidia_gpu_exporter's captures of 2026, made idle and with gpu-burn or ffmpeg running: how busy the GPU and its
# memory were (%), memory total, free, used and reserved (MiB), power, its limit and default (W), SM, memory and largest
# SM clock (MHz), °C, clocks_event_reasons.active, and which of the named reasons was "Active". N/A: MIG mode is on.
PRINTED = """
H100-80GB-HBM3  590.48.01  100  11   81559   61263  19818  479  631.95  700  700  1980   2619  1980  59  0x0  none
H100-80GB-HBM3  590.48.01    0   0   81559   81081      0  479   69.85  700  700   345   2619  1980  41  0x1  idle
H100-MIG        590.48.01  N/A N/A   81559   69956  11125  479  433.78  700  700  1980   2619  1980  53  0x0  none
H200            590.48.01  100   7  143771  110796  32362  614  627.40  700  700  1980   3201  1980  52  0x0  none
L40S            595.80       9   2   46068   44225   1235  609  110.23  350  350  2520   9001  2520  54  0x0  none
RTX-4080-SUPER  595.71.05    7   2   16376   14470   1474  434   84.24  320  320  2805  11251  3165  46  0x0  none
RTX-2080-SUPER  595.71.05    0   9    8192    7571    214  408   39.32  250  250   765    810  2145  40  0x4  power_cap
"""
# What the measure of the clocks calls what held them down; an idle GPU's clock nothing did.
NAMED: dict[str, set[str]] = {"none": set(), "idle": set(), "power_cap": {"power_cap"}}

# Of public scrapes of dcgm-exporter, which hands on what NVML counts: power (W) and energy (mJ) of the same moment.
CONSUMED = """
A800-SXM4-80GB  535.129.03   58.643    196329125
T4              590.48.01    68.244  15152422938
L40S            595.58.03    35.686   5551899580
"""

# Of the first captures too: the microseconds of "SW Power Capping" before a load and under it. NVML has nanoseconds.
CAPPED = """
RTX-2080-SUPER   595.71.05    212288427    221310321
RTX-2080-SUPER   610.57.04  15814235622  15820333506
L40S             595.80       200740215    204642816
H100-80GB-HBM3   590.48.01            0            0
"""


def moving(monkeypatch: pytest.MonkeyPatch, *seconds: float) -> Callable[[], None]:
    """Set the sampler's clocks, and return what moves them on by the next of these."""
    now = [1000.0]
    left = list(seconds)
    monkeypatch.setattr("dlprof.record.samplers.gpu.time.monotonic", lambda: now[0])
    monkeypatch.setattr("dlprof.record.samplers.gpu.time.perf_counter_ns", lambda: round(now[0] * 1e9))

    def move() -> None:
        now[0] += left.pop(0)

    return move


class Sampler(GpuSampler):
    """Reads everything at each tick."""

    def tick(self) -> None:
        self._due_s = 0.0
        super().tick()


def ticks(host: Host, times: int = 2) -> GpuSampler:
    sampler = Sampler()
    sampler.start(host)
    for _ in range(times):
        sampler.tick()
    return sampler


def cuda(uuid: str | None = ONE) -> dict[str, Any]:
    return {"type": "cuda", "uuid": uuid, "name": "NVIDIA H100"}


def test_every_metric_has_the_unit_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Documented(monkeypatch)
    host = host_with(tmp_path, cuda())
    ticks(host).stop()
    first, second = rows(host)
    # GPM tells of the time between two readings.
    assert "sm_busy_share" not in first
    told = {k: v for k, v in second.items() if k not in ("at_ns", "perf_ns") and not k.endswith("_ns")}
    assert told == {
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
        "pcie_sent_bytes_per_s": 12 << 20,
        "pcie_received_bytes_per_s": 34 << 20,
        "sm_busy_share": 0.935,
        "sm_occupancy_share": 0.4,
        "tensor_busy_share": 0.5525,
        "dram_share": 0.62,
        "nvlink_received_bytes_per_s": 3 << 20,
    }
    held = {k: v for k, v in second.items() if k.endswith("_ns") and k not in ("at_ns", "perf_ns")}
    assert len(held) == 8
    assert held["clocks_held_by_power_ns"] == (1 << 40) + 74
    assert held["below_base_clocks_ns"] == (1 << 40) + 81
    assert second["energy_j"] - first["energy_j"] == 600


@pytest.mark.parametrize("printed", PRINTED.strip().splitlines(), ids=lambda line: "-".join(line.split()[::15]))
def test_what_real_gpus_said_is_told_as_nvidia_smi_prints_it(
    printed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words: list[Any] = [int(word) if word.isdigit() else word for word in printed.split()]
    _, _, *shares, total, free, used, reserved, watts, limit, default, sm, memory, most, celsius, mask, active = words
    busy, memory_busy = shares
    power, bits = float(watts), int(mask, 16)
    driver = Documented(monkeypatch)
    # Megabytes are rounded, each for itself.
    assert abs(total - free - used - reserved) <= 2
    driver.answers |= {
        "nvmlDeviceGetUtilizationRates": lambda _: pynvml.c_nvmlUtilization_t(gpu=busy, memory=memory_busy),
        "nvmlDeviceGetMemoryInfo": lambda _: pynvml.c_nvmlMemory_t(
            total=total << 20, free=free << 20, used=(total - free) << 20
        ),
        "nvmlDeviceGetPowerUsage": lambda _: round(1000 * power),
        "nvmlDeviceGetEnforcedPowerLimit": lambda _: 1000 * limit,
        "nvmlDeviceGetPowerManagementDefaultLimit": lambda _: 1000 * default,
        "nvmlDeviceGetClockInfo": lambda _, kind: {pynvml.NVML_CLOCK_SM: sm, pynvml.NVML_CLOCK_MEM: memory}[kind],
        "nvmlDeviceGetMaxClockInfo": lambda _, kind: {pynvml.NVML_CLOCK_SM: most}[kind],
        "nvmlDeviceGetTemperature": lambda _, sensor: {pynvml.NVML_TEMPERATURE_GPU: celsius}[sensor],
        "nvmlDeviceGetCurrentClocksEventReasons": lambda _: bits,
    }
    if busy == "N/A":
        driver.refused["nvmlDeviceGetUtilizationRates"] = pynvml.NVML_ERROR_NOT_SUPPORTED
    host = host_with(tmp_path, cuda())
    ticks(host).stop()
    row = rows(host)[-1]
    told = (None, None) if busy == "N/A" else (busy / 100, memory_busy / 100)
    assert (row.get("busy_share"), row.get("memory_busy_share")) == told
    assert (row["power_w"], row["power_limit_w"], row["power_limit_default_w"]) == (power, limit, default)
    assert (row["sm_clock_mhz"], row["memory_clock_mhz"], row["sm_clock_max_mhz"]) == (sm, memory, most)
    assert row["temperature_c"] == celsius
    # What the driver keeps for itself is used as well: nobody else can have it.
    assert row["memory_used_bytes"] >> 20 == pytest.approx(used + reserved, abs=2)
    assert row["memory_used_bytes"] + (free << 20) == row["memory_total_bytes"]
    assert {name for name, mask in REASONS.items() if row["clock_reasons_bits"] & mask} == NAMED[active]
    assert bool(row["clock_reasons_bits"] & 0x1) == (active == "idle")


def named(line: str) -> str:
    """Name a line of real answers: its GPU and its driver."""
    return "-".join(line.split()[:2])


@pytest.mark.parametrize("line", CONSUMED.strip().splitlines(), ids=named)
def test_energy_that_real_gpus_counted_is_in_joules(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    power_w, energy_mj = float(line.split()[2]), int(line.split()[3])
    driver = Documented(monkeypatch)
    driver.answers["nvmlDeviceGetPowerUsage"] = lambda _: round(1000 * power_w)
    driver.answers["nvmlDeviceGetTotalEnergyConsumption"] = lambda _: energy_mj
    host = host_with(tmp_path, cuda())
    ticks(host)
    row = rows(host)[-1]
    assert (row["power_w"], row["energy_j"]) == (power_w, energy_mj / 1000)
    # The driver has been up for minutes or days: in another unit these GPUs would have run for a second, or a century.
    assert 600 < row["energy_j"] / row["power_w"] < 30 * 86400


@pytest.mark.parametrize("line", CAPPED.strip().splitlines(), ids=named)
def test_time_that_power_held_real_clocks_down_is_in_nanoseconds(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Documented(monkeypatch)
    host = host_with(tmp_path, cuda())
    sampler = Sampler()
    sampler.start(host)
    printed = [int(word) for word in line.split()[2:]]
    for microseconds in printed:
        driver.counted[74] = 1000 * microseconds
        sampler.tick()
    assert [row["clocks_held_by_power_ns"] // 1000 for row in rows(host)] == printed


def test_a_v100_tells_nothing_of_its_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As its driver 580 was found to answer, links and all: neither these counters, nor GPM, which is for Hopper."""
    driver = Documented(monkeypatch)
    driver.refused = dict.fromkeys([138, 139], pynvml.NVML_ERROR_NOT_SUPPORTED)
    driver.answers["nvmlGpmQueryDeviceSupport"] = lambda _: pynvml.c_nvmlGpmSupport_t(version=1, isSupportedDevice=0)
    host = host_with(tmp_path, cuda())
    ticks(host, 3)
    assert not [name for row in rows(host) for name in row if name.startswith(("nvlink", "sm_busy", "dram"))]
    assert [driver.calls.count(name) for name in ("nvmlGpmQueryDeviceSupport", "nvmlGpmSampleAlloc")] == [1, 0]


@pytest.mark.parametrize(
    "error",
    [pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, pynvml.NVML_ERROR_NO_PERMISSION],
)
def test_what_a_gpu_refuses_is_absent_and_asked_once(
    error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    driver = Documented(monkeypatch)
    refused = ["nvmlDeviceGetTotalEnergyConsumption", "nvmlDeviceGetUtilizationRates", "nvmlGpmQueryDeviceSupport"]
    driver.refused = dict.fromkeys([*refused, 76, 81, "gpm 5"], error)
    host = host_with(tmp_path, cuda())
    ticks(host, 3)
    for row in rows(host):
        absent = {"energy_j", "busy_share", "memory_busy_share", "below_base_clocks_ns"}
        absent |= {"clocks_held_by_sync_boost_ns"}
        assert not absent & set(row)
        assert {"power_w", "below_application_clocks_ns", "temperature_c"} <= set(row)
    assert [driver.calls.count(name) for name in refused] == [1, 1, 1]
    assert capfd.readouterr().err == ""


def test_activity_that_some_gpus_lack_is_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Documented(monkeypatch)
    driver.refused = {"gpm 5": pynvml.NVML_ERROR_NOT_SUPPORTED}
    host = host_with(tmp_path, cuda())
    ticks(host)
    row = rows(host)[-1]
    assert "tensor_busy_share" not in row
    assert row["sm_busy_share"] == 0.935


def test_an_older_driver_tells_the_reasons_by_their_older_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Documented(monkeypatch)
    driver.refused = {"nvmlDeviceGetCurrentClocksEventReasons": pynvml.NVML_ERROR_FUNCTION_NOT_FOUND}
    host = host_with(tmp_path, cuda())
    ticks(host)
    assert rows(host)[-1]["clock_reasons_bits"] == 0x4


def test_a_lost_gpu_is_told_of_once_and_the_others_are_read_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    driver = Documented(monkeypatch, (f"GPU-{ONE}",))
    host = host_with(tmp_path, cuda(TWO), cuda(ONE))
    sampler = ticks(host)
    assert capfd.readouterr().err == f"dlprof: GPU {TWO} is not sampled: Not Found\n"
    assert (len(rows(host, 0)), len(rows(host, 1))) == (0, 2)
    driver.refused = {"nvmlDeviceGetMemoryInfo": pynvml.NVML_ERROR_GPU_IS_LOST}
    sampler.tick()
    sampler.tick()
    assert capfd.readouterr().err == f"dlprof: GPU {ONE} is not sampled any more: GPU is lost\n"
    assert len(rows(host, 1)) == 2
    driver.refused = {"nvmlShutdown": pynvml.NVML_ERROR_UNINITIALIZED}
    sampler.stop()


def test_counters_of_32_bits_are_read_before_they_begin_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an A100's: no GPM, and a link that fills the counter several times between two readings."""
    driver = Documented(monkeypatch)
    driver.answers["nvmlGpmQueryDeviceSupport"] = lambda _: pynvml.c_nvmlGpmSupport_t(version=1, isSupportedDevice=0)
    driver.answers["nvmlDeviceGetMaxPcieLinkGeneration"] = lambda _: 4
    steps = [0.1] * 20
    move = moving(monkeypatch, *steps)
    monkeypatch.setenv("DLPROF_SAMPLE", "1")
    host = host_with(tmp_path, cuda())
    sampler = GpuSampler()
    sampler.start(host)
    sent = 0
    for _ in steps:
        driver.counted |= {197: sent, 198: sent // 2}
        sampler.tick()
        assert sampler.period_s == 0.1
        sent += 2_500_000_000  # 25 GB/s
        move()
    first, second = rows(host)
    assert "pcie_sent_bytes_per_s" not in first
    assert second["pcie_sent_bytes_per_s"] == pytest.approx(25e9)
    assert second["pcie_received_bytes_per_s"] == pytest.approx(12.5e9)
    assert second["power_w"] == 612.345


def test_what_lay_too_far_apart_is_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Documented(monkeypatch)
    driver.refused = {"nvmlGpmQueryDeviceSupport": pynvml.NVML_ERROR_NOT_SUPPORTED}
    driver.answers["nvmlDeviceGetMaxPcieLinkGeneration"] = lambda _: 3
    move = moving(monkeypatch, 0.1, 0.7, 0.1, 0.1)
    monkeypatch.setenv("DLPROF_SAMPLE", "1")
    host = host_with(tmp_path, cuda())
    sampler = GpuSampler()
    sampler.start(host)
    # The process was held up for 0.7 s: nobody knows how often the counter began again.
    for sent in (0, 1 << 28, 1 << 20, 1 << 28):
        driver.counted[197] = sent
        sampler.tick()
        move()
    driver.counted[197] = 1 << 29
    sampler.tick()
    *_, last = rows(host)
    counted = (1 << 28) + ((1 << 28) - (1 << 20)) + (1 << 28)
    assert last["pcie_sent_bytes_per_s"] == pytest.approx(counted / 0.3)


def test_a_bad_reading_of_the_traffic_is_one_reading_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    driver = Documented(monkeypatch)
    driver.answers["nvmlGpmQueryDeviceSupport"] = lambda _: pynvml.c_nvmlGpmSupport_t(version=1, isSupportedDevice=0)
    driver.answers["nvmlDeviceGetMaxPcieLinkGeneration"] = lambda _: 4
    move = moving(monkeypatch, *[0.05] * 4)
    host = host_with(tmp_path, cuda())
    sampler = ticks(host, 1)
    for fails in (False, True, False):
        move()
        driver.refused = {"nvmlDeviceGetFieldValues": pynvml.NVML_ERROR_UNKNOWN} if fails else {}
        sampler.tick()
    move()
    assert [("pcie_sent_bytes_per_s" in row, "power_w" in row) for row in rows(host)] == [
        (False, True),
        (True, True),
        (False, True),
        (True, True),
    ]
    driver.refused = {197: pynvml.NVML_ERROR_NOT_SUPPORTED, 198: pynvml.NVML_ERROR_NOT_SUPPORTED}
    sampler.tick()
    assert sampler.period_s == host.period_s
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("generation", [5, 6])
def test_a_faster_link_without_gpm_is_not_guessed(
    generation: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Documented(monkeypatch)
    driver.refused = {"nvmlGpmQueryDeviceSupport": pynvml.NVML_ERROR_NOT_SUPPORTED}
    driver.answers["nvmlDeviceGetMaxPcieLinkGeneration"] = lambda _: generation
    host = host_with(tmp_path, cuda())
    sampler = ticks(host, 3)
    assert not [name for row in rows(host) for name in row if name.startswith("pcie")]
    assert sampler.period_s == host.period_s


def test_one_bad_reading_is_one_gap_and_no_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    driver = Documented(monkeypatch)
    host = host_with(tmp_path, cuda())
    sampler = ticks(host)
    for name in ("nvmlDeviceGetPowerUsage", 76, "nvmlGpmSampleGet"):
        driver.refused = {name: pynvml.NVML_ERROR_UNKNOWN}
        sampler.tick()
    driver.refused = {}
    sampler.tick()
    told = [("power_w" in row, "clocks_held_by_sync_boost_ns" in row, "sm_busy_share" in row) for row in rows(host)[1:]]
    assert told == [
        (True, True, True),
        (False, True, True),
        (True, False, True),
        (True, True, False),
        (True, True, True),
    ]
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("name", ["nvmlDeviceGetTemperature", 74, "nvmlGpmSampleGet"])
def test_a_gpu_that_must_be_reset_is_given_up_wherever_it_says_so(
    name: str | int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    driver = Documented(monkeypatch)
    host = host_with(tmp_path, cuda())
    sampler = ticks(host)
    driver.refused = {name: pynvml.NVML_ERROR_RESET_REQUIRED}
    sampler.tick()
    driver.refused = {}
    sampler.tick()
    assert len(rows(host)) == 2
    assert capfd.readouterr().err.startswith(f"dlprof: GPU {ONE} is not sampled any more: ")


def test_a_driver_that_goes_takes_all_gpus_along_with_one_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    driver = Documented(monkeypatch, (f"GPU-{ONE}", f"GPU-{TWO}"))
    host = host_with(tmp_path, cuda(ONE), cuda(TWO))
    sampler = ticks(host)
    driver.refused = {"nvmlDeviceGetMemoryInfo": pynvml.NVML_ERROR_UNINITIALIZED}
    asked = len(driver.calls)
    sampler.tick()
    assert driver.calls[asked:].count("nvmlDeviceGetMemoryInfo") == 1
    sampler.tick()
    assert [len(rows(host, rank)) for rank in (0, 1)] == [2, 2]
    assert capfd.readouterr().err == "dlprof: no GPU is sampled any more: NVML: Uninitialized\n"


def test_a_slice_has_its_own_activity_and_memory_and_its_gpus_clocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Documented(monkeypatch, (f"MIG-{TWO}", f"GPU-{ONE}"))
    whole, part = driver._handle(f"GPU-{ONE}"), driver._handle(f"MIG-{TWO}")
    driver.slices = {id(part): (whole, 9)}
    driver.refused = {"nvmlDeviceGetUtilizationRates": pynvml.NVML_ERROR_NOT_SUPPORTED}
    used = {id(whole): 60 << 30, id(part): 7 << 30}
    driver.answers["nvmlDeviceGetMemoryInfo"] = lambda handle: pynvml.c_nvmlMemory_t(
        total=10 << 30, used=used[id(handle)]
    )
    clocks = {id(whole): 1755}
    driver.answers["nvmlDeviceGetClockInfo"] = lambda handle, _: clocks[id(handle)]
    # torch tells the whole GPU, and the script was given the slice by name.
    host = host_with(tmp_path, cuda(ONE) | {"slice": f"MIG-{TWO}"})
    ticks(host).stop()
    row = rows(host)[-1]
    assert (row["memory_used_bytes"], row["sm_clock_mhz"], row["sm_busy_share"]) == (7 << 30, 1755, 0.935)
    assert driver.sampled == [(id(whole), 9)] * 2
    assert "clocks_held_by_heat_ns" in row
    assert not {"power_w", "energy_j", "busy_share", "pcie_sent_bytes_per_s", "nvlink_sent_bytes"} & set(row)


def test_a_gpu_of_another_maker_is_none_of_nvmls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    driver = Documented(monkeypatch)
    host = host_with(tmp_path, cuda() | {"vendor": "amd"})
    ticks(host).stop()
    assert (driver.calls, rows(host), capfd.readouterr().err) == ([], [], "")


def test_ranks_that_share_a_gpu_both_have_it_and_a_part_of_one_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Documented(monkeypatch, (f"MIG-{TWO}", f"GPU-{ONE}"))
    host = host_with(tmp_path, cuda(), cuda(), cuda(TWO), {"type": "cpu", "uuid": None})
    ticks(host, 1)
    assert [len(rows(host, rank)) for rank in range(4)] == [1, 1, 1, 0]
    assert {k: v for k, v in rows(host, 0)[0].items() if not k.endswith("_ns")} == {
        k: v for k, v in rows(host, 1)[0].items() if not k.endswith("_ns")
    }
    assert driver.calls.count("nvmlDeviceGetPowerUsage") == 2


def test_a_gpu_without_a_uuid_is_not_guessed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    Documented(monkeypatch)
    host = host_with(tmp_path, cuda(None))
    ticks(host)
    assert rows(host) == []
    assert capfd.readouterr().err.count("does not tell its UUID") == 1


def no_driver() -> bool:
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
        pynvml.nvmlInit()
    except (OSError, pynvml.NVMLError):
        return True
    return False


@pytest.mark.skipif(not no_driver(), reason="this machine has an NVIDIA driver")
def test_without_a_driver_one_line_says_so_and_no_file_is_made(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nothing stands in for the driver here."""
    host = host_with(tmp_path, cuda())
    reading, writing = os.pipe()

    class Ends(GpuSampler):
        """Ends the job at its first tick."""

        def tick(self) -> None:
            os.close(writing)
            super().tick()

    sample(tmp_path, [Ends], reading)
    os.close(reading)
    said = capfd.readouterr().err
    # No library, or one without its driver.
    whys = ("NVML Shared Library Not Found", "Driver Not Loaded")
    assert said in [f"dlprof: the gpu sampler is off: NVML: {why}; the job goes on without it\n" for why in whys]
    assert rows(host) == []


def test_a_job_on_the_cpu_never_asks_for_nvml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    driver = Documented(monkeypatch)
    host = host_with(tmp_path, {"type": "cpu", "uuid": None})
    ticks(host).stop()
    assert driver.calls == []
    assert capfd.readouterr().err == ""


# A driver in C, loaded in NVML's place: it answers as an H200 did (the first captures), as far as that is known. It has
# gone once a file is there, and lacks functions, as older drivers do.
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
    told, beside = host.folder / "warnings.txt", host.folder / "host.jsonl"
    try:
        assert until(lambda: len(rows(host)) > 2)
        gone.touch()
        assert until(told.exists)
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
