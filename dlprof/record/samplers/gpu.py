"""What NVIDIA's GPUs do, from the driver's own counters (NVML): nothing runs on a GPU for it.

For a slice of a GPU (MIG), memory and activity are its own. Clocks, their reasons and temperature are those of the
whole GPU; power, energy and links are left out, since they cannot be attributed. This was not tried on a real slice.

The bytes that a GPU sends and receives over PCIe come from counters that soon wrap around.

nvmlDeviceGetPcieThroughput would wait for 20 ms each time. The counters have 32 bits on the drivers seen so far, and
"can be wrapped" (nvml.h): 31.5 GB/s, which PCIe 4.0 carries over 16 lanes, fill them in 0.136 s. So they are read every
0.1 s, and what lies further apart is not counted. GPUs with faster links, Hopper and later, have GPM for it.

They count bytes on the link, with the headers of packets: on an H200 (driver 580), 276 for each 256 that were copied to
it. Copying 5,368,709,120 bytes moved the counter on by 1,493,196,000 and once around.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from dlprof.record.samplers.driver import DriverSampler, Fate, Gpu, Reading

_ALL_LINKS = 0xFFFFFFFF  # nvml.h: the scope that adds up a GPU's NVLinks

# Field → name, scale and scope, all of them counters that only grow. What heat and a power brake alone held down is not
# among them: drivers up to 580 count it as 251 to 253, later ones as 269 to 271, and under the other number each counts
# something else. The bits of the reasons say it.
_FIELDS: Mapping[int, tuple[str, float, int]] = {
    74: ("clocks_held_by_power_ns", 1, 0),  # NVML_FI_DEV_PERF_POLICY_POWER
    75: ("clocks_held_by_heat_ns", 1, 0),  # ..._THERMAL
    76: ("clocks_held_by_sync_boost_ns", 1, 0),
    77: ("clocks_held_by_board_ns", 1, 0),
    78: ("clocks_held_by_low_use_ns", 1, 0),
    79: ("clocks_held_by_reliability_ns", 1, 0),
    80: ("below_application_clocks_ns", 1, 0),
    81: ("below_base_clocks_ns", 1, 0),
    138: ("nvlink_sent_bytes", 1024, _ALL_LINKS),  # NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, KiB
    139: ("nvlink_received_bytes", 1024, _ALL_LINKS),
}

# Fields of a GPU that hold for each of its slices: what holds its clocks down.
_SHARED_FIELDS = range(74, 82)

# Errors that end the readings of one GPU, and of all; see nvmlReturn_t in nvml.h. Any other is one bad reading.
_GONE = ("GpuIsLost", "ResetRequired")
_OVER = ("Uninitialized", "DriverNotLoaded", "LibRmVersionMismatch")
# What a GPU does not have, or does not say to this user, it will not later either.
_REFUSED = ("NotSupported", "FunctionNotFound", "NoPermission", "InvalidArgument", "NotFound")

# GPM's metrics that are a slice's own: it is not known whose the traffic on the links is.
_OWN_ACTIVITY = range(2, 11)

# GPM metric → name and scale. Means over the time since the last reading, on Hopper and later.
_GPM: Mapping[int, tuple[str, float]] = {
    2: ("sm_busy_share", 0.01),
    3: ("sm_occupancy_share", 0.01),
    5: ("tensor_busy_share", 0.01),
    10: ("dram_share", 0.01),
    20: ("pcie_sent_bytes_per_s", 1 << 20),
    21: ("pcie_received_bytes_per_s", 1 << 20),
    60: ("nvlink_received_bytes_per_s", 1 << 20),
    61: ("nvlink_sent_bytes_per_s", 1 << 20),
}


class GpuSampler(DriverSampler):
    """Samples GPUs of NVIDIA's, and reads the counters of their links in between."""

    name = "gpu"
    library = "NVML"
    identity = "its UUID"

    def __init__(self) -> None:
        super().__init__()
        self._again = False  # the counters of links are to be read once more, shortly after the last reading

    def _name_of(self, device: Mapping[str, Any]) -> str | None:
        # Older recordings and torch's ROCm both say "cuda".
        is_ours = device.get("type") == "cuda" and device.get("vendor") != "amd"
        return device.get("slice") or device.get("uuid") or "" if is_ours else None

    def _load(self) -> Any:
        try:
            import pynvml
        except ImportError:
            raise OSError("nvidia-ml-py is not installed") from None
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as e:
            raise OSError(f"NVML: {e}") from None
        # An older nvidia-ml-py lacks functions: what they would tell is missing, as if the driver refused it.
        self.errors = (pynvml.NVMLError, AttributeError)
        self.ends = _errors(pynvml, (*_GONE, *_OVER))
        self.refusals = (*_errors(pynvml, _REFUSED), AttributeError)
        return pynvml

    def _unload(self) -> None:
        self.driver.nvmlShutdown()

    def _open(self, name: str, device: Mapping[str, Any]) -> Gpu:  # noqa: ARG002 - the name says all
        return _Gpu(self, name)

    def fate(self, error: Exception) -> Fate:
        """Return what an error of NVML's means, see nvmlReturn_t in nvml.h."""
        if isinstance(error, self.refusals):
            return Fate.REFUSED
        if isinstance(error, self.ends):
            return Fate.OVER if isinstance(error, _errors(self.driver, _OVER)) else Fate.LOST
        return Fate.ONCE

    @property
    def _counting(self) -> dict[str, Traffic]:
        return {name: gpu.traffic for name, gpu in self.gpus.items() if isinstance(gpu, _Gpu) and gpu.traffic}

    @property
    def period_s(self) -> float:
        """As long as the host says, but a second at least: NVML takes locks that the job's own calls may wait for.

        A link's counters that would overflow in that time are read twice, shortly one after the other.
        """
        whole = max(self.host.period_s, LEAST_S)
        return COUNT_S if self._again else whole - COUNT_S * bool(self._counting)

    def tick(self) -> None:
        """Read all that is due, or only what cannot wait so long."""
        if self._again:
            self._again = False
            for name, traffic in self._counting.items():
                self.safely(name, traffic.count)
            return
        super().tick()
        self._again = bool(self._counting)


class _Gpu(Gpu):
    """A GPU or a slice of one, by its handle."""

    def __init__(self, sampler: GpuSampler, uuid: str) -> None:
        self._nvml = nvml = sampler.driver
        self._handle = self._whole = handle = _handle(nvml, uuid)
        self._instance: int | None = None  # of a slice, within its GPU
        if _is_slice(nvml, handle):
            self._whole = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
            self._instance = nvml.nvmlDeviceGetGpuInstanceId(handle)
        whole, is_slice = self._whole, self._instance is not None

        def thousandths(name: str, ask: str) -> Callable[[], Reading]:
            return lambda: {name: getattr(nvml, ask)(handle) / 1000}

        own = (
            thousandths("power_w", "nvmlDeviceGetPowerUsage"),
            thousandths("power_limit_w", "nvmlDeviceGetEnforcedPowerLimit"),
            thousandths("power_limit_default_w", "nvmlDeviceGetPowerManagementDefaultLimit"),
            thousandths("energy_j", "nvmlDeviceGetTotalEnergyConsumption"),
        )
        super().__init__(
            sampler,
            self._utilization,
            self._memory,
            *(() if is_slice else own),
            self._clocks,
            lambda: {"sm_clock_max_mhz": nvml.nvmlDeviceGetMaxClockInfo(whole, nvml.NVML_CLOCK_SM)},
            lambda: {"temperature_c": nvml.nvmlDeviceGetTemperature(whole, nvml.NVML_TEMPERATURE_GPU)},
            self._reasons,
            self._counters,
            self._activity,
        )
        self._fields = {f: of for f, of in _FIELDS.items() if not is_slice or f in _SHARED_FIELDS}
        self._gpm: list[Any] = []  # the sample before, and one to fill
        self._activities = {m: of for m, of in _GPM.items() if not is_slice or m in _OWN_ACTIVITY}
        # Until GPM has it.
        countable = not is_slice and is_countable(nvml, handle)
        self.traffic = Traffic(nvml, handle, sampler.refusals, sampler.ends) if countable else None

    def read(self) -> Reading:
        """Return what can be read now, with what has gone over the link since."""
        row = super().read()
        if self.traffic is not None and self.traffic.count():
            return {**row, **self.traffic.rates()}
        self.traffic = None
        return row

    def _utilization(self) -> Reading:
        now = self._nvml.nvmlDeviceGetUtilizationRates(self._handle)
        return {"busy_share": now.gpu / 100, "memory_busy_share": now.memory / 100}

    def _memory(self) -> Reading:
        # Used is what no process can get: also what the driver keeps for itself, which nvidia-smi shows separately.
        now = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
        return {"memory_used_bytes": now.used, "memory_total_bytes": now.total}

    def _clocks(self) -> Reading:
        clock, nvml = self._nvml.nvmlDeviceGetClockInfo, self._nvml
        return {
            "sm_clock_mhz": clock(self._whole, nvml.NVML_CLOCK_SM),
            "memory_clock_mhz": clock(self._whole, nvml.NVML_CLOCK_MEM),
        }

    def _reasons(self) -> Reading:
        nvml = self._nvml
        # Its name since driver 535, and the one before; the bits are the same.
        try:
            bits = nvml.nvmlDeviceGetCurrentClocksEventReasons(self._whole)
        except (nvml.NVMLError_FunctionNotFound, AttributeError):
            bits = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._whole)
        return {"clock_reasons_bits": bits}

    def _counters(self) -> Reading:
        asked = [(field, scope) for field, (_, _, scope) in self._fields.items()]
        row = {}
        for value in self._nvml.nvmlDeviceGetFieldValues(self._whole, asked):
            name, scale, _ = _FIELDS[value.fieldId]
            if value.nvmlReturn == self._nvml.NVML_SUCCESS:
                row[name] = getattr(value.value, MEMBERS[value.valueType]) * scale
                continue
            error = self._nvml.NVMLError(value.nvmlReturn)
            fate = self.sampler.fate(error)
            if fate in (Fate.LOST, Fate.OVER):
                raise error
            if fate is Fate.REFUSED:
                del self._fields[value.fieldId]
        if not self._fields:
            self.queries.remove(self._counters)
        return row

    def _activity(self) -> Reading:
        nvml = self._nvml
        if not self._gpm:
            if not nvml.nvmlGpmQueryDeviceSupport(self._whole).isSupportedDevice:
                raise nvml.NVMLError_NotSupported
            self._gpm = [self._sampled(nvml.nvmlGpmSampleAlloc()), nvml.nvmlGpmSampleAlloc()]
            return {}
        before, now = self._gpm
        self._sampled(now)
        asked = nvml.c_nvmlGpmMetricsGet_t()
        asked.version = nvml.NVML_GPM_METRICS_GET_VERSION
        asked.sample1, asked.sample2 = before, now
        asked.numMetrics = len(self._activities)
        for slot, metric in enumerate(self._activities):
            asked.metrics[slot].metricId = metric
        answers = nvml.nvmlGpmMetricsGet(asked).metrics
        self._gpm = [now, before]
        row = {
            name: round(answers[slot].value * scale, 4)
            for slot, (name, scale) in enumerate(self._activities.values())
            if answers[slot].nvmlReturn == nvml.NVML_SUCCESS and math.isfinite(answers[slot].value)
        }
        if row.keys() & RATES:
            self.traffic = None
        return row

    def _sampled(self, sample: Any) -> Any:
        """Fill a sample of GPM's, and return it. A slice's is read from its GPU, by its number there."""
        if self._instance is None:
            self._nvml.nvmlGpmSampleGet(self._whole, sample)
        else:
            self._nvml.nvmlGpmMigSampleGet(self._whole, self._instance, sample)
        return sample


def _errors(nvml: Any, names: Iterable[str]) -> tuple[type[Exception], ...]:
    """Return NVML's errors of these names, as far as this nvidia-ml-py has them."""
    found = (getattr(nvml, f"NVMLError_{name}", None) for name in names)
    return tuple(error for error in found if error is not None)


def _is_slice(nvml: Any, handle: Any) -> bool:
    """Return whether a handle is of a slice; before drivers had slices none is."""
    refusals: tuple[type[Exception], ...] = (*_errors(nvml, _REFUSED), AttributeError)
    try:
        answer = nvml.nvmlDeviceIsMigDeviceHandle(handle)
    except refusals:
        return False
    return bool(getattr(answer, "value", answer))


def _handle(nvml: Any, uuid: str) -> Any:
    """Find a GPU, or a part of one; torch leaves out the prefix that NVML needs."""
    if uuid.startswith(("GPU-", "MIG-")):
        return nvml.nvmlDeviceGetHandleByUUID(uuid)
    try:
        return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except nvml.NVMLError:
        with contextlib.suppress(nvml.NVMLError):
            return nvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}")
        raise


# From one reading to the next, and to the second look at counters of links.
LEAST_S, COUNT_S = 1.0, 0.1


_LONGEST_NS = 130_000_000


_FASTEST_GENERATION = 4


_PCIE_FIELDS = {
    197: "pcie_sent_bytes_per_s",
    198: "pcie_received_bytes_per_s",
}  # NVML_FI_DEV_PCIE_COUNT_TX_BYTES, RX_BYTES


RATES = frozenset(_PCIE_FIELDS.values())


# The member of nvmlValue_t that holds a value, by nvmlValueType_t.
MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")


Errors = tuple[type[Exception], ...]


class Traffic:
    """The bytes over one GPU's link, as differences of its counters add up."""

    def __init__(self, nvml: Any, handle: Any, refusals: Errors, ends: Errors) -> None:
        """Take NVML's errors that mean that there are no counters, and that there is no GPU any more."""
        self._nvml = nvml
        self._handle = handle
        self._refusals = refusals
        self._ends = ends
        self._last: dict[int, tuple[int, int]] = {}  # field → what it was, and when
        self._counted: dict[int, tuple[int, int]] = {}  # field → bytes, and the ns that they took

    def count(self) -> bool:
        """Count on from the last reading; False: this GPU or driver has no such counters. Raises NVMLError: it is gone.

        Any other failure is one reading less.
        """
        try:
            values = self._nvml.nvmlDeviceGetFieldValues(self._handle, [(field, 0) for field in _PCIE_FIELDS])
        except self._refusals:
            return False
        except self._ends:
            raise
        except self._nvml.NVMLError:
            return True
        now = time.perf_counter_ns()
        refused = 0
        for value in values:
            if value.nvmlReturn == self._nvml.NVML_SUCCESS:
                wraps = value.valueType == self._nvml.NVML_VALUE_TYPE_UNSIGNED_INT
                self._add(value.fieldId, getattr(value.value, MEMBERS[value.valueType]), now, wraps)
            else:
                refused += isinstance(self._nvml.NVMLError(value.nvmlReturn), self._refusals)
        return refused < len(_PCIE_FIELDS)

    def _add(self, field: int, is_now: int, now: int, wraps: bool) -> None:
        was, at = self._last.get(field, (is_now, now))
        self._last[field] = is_now, now
        sound = now - at <= _LONGEST_NS if wraps else is_now >= was
        if now > at and sound:
            counted, took = self._counted.get(field, (0, 0))
            self._counted[field] = counted + (is_now - was) % (1 << 32 if wraps else 1 << 64), took + now - at

    def rates(self) -> Mapping[str, float]:
        """Return the bytes a second since the last call, over the time that could be counted."""
        counted, self._counted = self._counted, {}
        return {_PCIE_FIELDS[field]: round(sent / took * 1e9, 1) for field, (sent, took) in counted.items()}


def is_countable(nvml: Any, handle: Any) -> bool:
    """Return whether a GPU's link is slow enough for counters of 32 bits that are read every 0.1 s."""
    try:
        generation: int = nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)
    except (nvml.NVMLError, AttributeError):
        return True
    return generation <= _FASTEST_GENERATION
