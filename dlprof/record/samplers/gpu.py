"""What the GPUs of this host's ranks do, from the driver's own counters (NVML): nothing runs on a GPU for it.

Nothing is asked of NVML before a rank trains on a GPU. Each metric is tried once on each GPU: what this GPU, driver or
permission does not give is left out of the file from then on, and never a zero in it. What fails once is missing once.

Of a slice of a GPU (MIG) memory and activity are its own. Clocks, their reasons and temperature are its GPU's, which it
shares; power, energy and links are left out, since nobody tells whose they are. No slice was at hand to try this.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from dlprof.record.device.pcie import COUNT_S, MEMBERS, RATES, Traffic, is_countable
from dlprof.record.log import Log
from dlprof.record.samplers.sampling import Host, RankHere, line

Reading = Mapping[str, float]
T = TypeVar("T")

_ALL_LINKS = 0xFFFFFFFF  # nvml.h: the scope that adds up a GPU's NVLinks

# Field → name, scale and scope, all of them counters that only grow. What heat and a power brake alone held down is not
# among them: drivers up to 580 count it as 251 to 253, later ones as 269 to 271, and under the other number each tells
# something else. The bits of the reasons tell it.
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
# What a GPU does not have, or does not tell to this user, it will not later either.
_REFUSED = ("NotSupported", "FunctionNotFound", "NoPermission", "InvalidArgument", "NotFound")

# GPM's metrics of a slice's own: whose traffic on the links is, nobody tells.
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


class GpuSampler:
    """Writes gpu.jsonl of each rank here that trains on a GPU: keys as metrics of the table `samples`."""

    name = "gpu"

    def __init__(self) -> None:
        self._nvml: Any = None
        self._gpus: dict[str, _Gpu | None] = {}  # by UUID; None: it cannot be read, or no longer
        self._logs: dict[RankHere, Log] = {}
        self._over = False  # the driver has gone
        self._due_s = 0.0  # when everything is to be read again

    @property
    def period_s(self) -> float:
        """As long as the host says, or shorter where a GPU's counters must be read more often."""
        period = self._host.period_s
        return min(period, COUNT_S) if any(gpu is not None and gpu.traffic for gpu in self._gpus.values()) else period

    def start(self, host: Host) -> None:
        """Wait for a rank that has a GPU."""
        self._host = host

    def tick(self) -> None:
        """Read each GPU that ranks train on, and write a line for each of them; or only what cannot wait so long."""
        now = time.monotonic()
        if now < self._due_s - COUNT_S / 2:
            self._count()
            return
        self._due_s = now + self._host.period_s
        ranks = [rank for rank in self._host.ranks if _is_nvidia(rank.device)]
        if not ranks or self._over:
            return
        if self._nvml is None:
            self._nvml = _load()
        read: dict[str, Reading | None] = {}
        for rank in ranks:
            uuid = rank.device.get("slice") or rank.device.get("uuid")
            if not uuid:
                self._host.warn(f"the GPU of rank {rank.rank} is not sampled: this torch does not tell its UUID")
                continue
            if uuid not in read:
                read[uuid] = self._read(uuid)
            row = read[uuid]
            if row:
                if rank not in self._logs:
                    self._logs[rank] = self._host.log("gpu.jsonl", rank)
                self._logs[rank].write(line(row))

    def stop(self) -> None:
        """Leave the driver."""
        if self._nvml is not None:
            with contextlib.suppress(self._nvml.NVMLError):  # it may have gone before us
                self._nvml.nvmlShutdown()

    def _count(self) -> None:
        for uuid, gpu in self._gpus.items():
            if gpu is not None and gpu.traffic is not None and not self._over:
                self._safely(uuid, gpu.traffic.count)

    def _read(self, uuid: str) -> Reading | None:
        def read() -> Reading | None:
            if uuid not in self._gpus:
                self._gpus[uuid] = _Gpu(self._nvml, uuid)
            gpu = self._gpus[uuid]
            return gpu.read() if gpu is not None else None

        return None if self._over else self._safely(uuid, read)

    def _safely(self, uuid: str, ask: Callable[[], T]) -> T | None:
        """Return the answer; None, and a word, where the GPU or the driver has gone."""
        nvml = self._nvml
        try:
            return ask()
        except nvml.NVMLError as e:
            if isinstance(e, _errors(nvml, _OVER)):
                self._over = True
                self._host.warn(f"no GPU is sampled any more: NVML: {e}")
                return None
            # Lost, or to be reset: the others are read on.
            more = " any more" if uuid in self._gpus else ""
            self._gpus[uuid] = None
            self._host.warn(f"GPU {uuid} is not sampled{more}: {e}")
            return None


class _Gpu:
    """One GPU or slice of one: its handle, and what of it can be read."""

    def __init__(self, nvml: Any, uuid: str) -> None:
        self._nvml = nvml
        self._handle = _handle(nvml, uuid)
        self._refusals = _errors(nvml, _REFUSED)
        self._ends = _errors(nvml, (*_GONE, *_OVER))
        self._instance: int | None = None  # of a slice, within its GPU
        self._whole = self._handle
        if _is_slice(nvml, self._handle):
            self._whole = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self._handle)
            self._instance = nvml.nvmlDeviceGetGpuInstanceId(self._handle)
        is_slice = self._instance is not None
        self._queries: list[Callable[[], Reading]] = [
            self._utilization,
            self._memory,
            *(() if is_slice else (self._power, self._power_limit, self._power_limit_default, self._energy)),
            self._clocks,
            self._clock_limit,
            self._temperature,
            self._reasons,
            self._counters,
            self._activity,
        ]
        self._fields = {f: told for f, told in _FIELDS.items() if not is_slice or f in _SHARED_FIELDS}
        self._gpm: list[Any] = []  # the sample before, and one to fill
        self._activities = {m: told for m, told in _GPM.items() if not is_slice or m in _OWN_ACTIVITY}
        # Until GPM has told it.
        countable = not is_slice and is_countable(nvml, self._handle)
        self.traffic = Traffic(nvml, self._handle, self._refusals, self._ends) if countable else None

    def read(self) -> Reading:
        """Return what can be read now; raise NVMLError where the GPU has gone."""
        row: dict[str, float] = {}
        for query in tuple(self._queries):
            try:
                row.update(query())
            except self._refusals:  # noqa: PERF203 - each may refuse
                self._queries.remove(query)
            except self._nvml.NVMLError as e:
                if isinstance(e, self._ends):
                    raise
        if self.traffic is not None and self.traffic.count():
            row.update(self.traffic.rates())
        else:
            self.traffic = None
        return row

    def _utilization(self) -> Reading:
        now = self._nvml.nvmlDeviceGetUtilizationRates(self._handle)
        return {"busy_share": now.gpu / 100, "memory_busy_share": now.memory / 100}

    def _memory(self) -> Reading:
        # Used is what nobody else can have: also what the driver keeps for itself, which nvidia-smi tells apart.
        now = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
        return {"memory_used_bytes": now.used, "memory_total_bytes": now.total}

    def _power(self) -> Reading:
        return {"power_w": self._nvml.nvmlDeviceGetPowerUsage(self._handle) / 1000}

    def _power_limit(self) -> Reading:
        return {"power_limit_w": self._nvml.nvmlDeviceGetEnforcedPowerLimit(self._handle) / 1000}

    def _power_limit_default(self) -> Reading:
        return {"power_limit_default_w": self._nvml.nvmlDeviceGetPowerManagementDefaultLimit(self._handle) / 1000}

    def _energy(self) -> Reading:
        return {"energy_j": self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1000}

    def _clocks(self) -> Reading:
        nvml = self._nvml
        return {
            "sm_clock_mhz": nvml.nvmlDeviceGetClockInfo(self._whole, nvml.NVML_CLOCK_SM),
            "memory_clock_mhz": nvml.nvmlDeviceGetClockInfo(self._whole, nvml.NVML_CLOCK_MEM),
        }

    def _clock_limit(self) -> Reading:
        nvml = self._nvml
        return {"sm_clock_max_mhz": nvml.nvmlDeviceGetMaxClockInfo(self._whole, nvml.NVML_CLOCK_SM)}

    def _temperature(self) -> Reading:
        nvml = self._nvml
        return {"temperature_c": nvml.nvmlDeviceGetTemperature(self._whole, nvml.NVML_TEMPERATURE_GPU)}

    def _reasons(self) -> Reading:
        nvml = self._nvml
        # Its name since driver 535, and the one before; the bits are the same.
        try:
            bits = nvml.nvmlDeviceGetCurrentClocksEventReasons(self._whole)
        except nvml.NVMLError_FunctionNotFound:
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
            if isinstance(error, self._ends):
                raise error
            if isinstance(error, self._refusals):
                del self._fields[value.fieldId]
        if not self._fields:
            self._queries.remove(self._counters)
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
        told = nvml.nvmlGpmMetricsGet(asked).metrics
        self._gpm = [now, before]
        row = {
            name: round(told[slot].value * scale, 4)
            for slot, (name, scale) in enumerate(self._activities.values())
            if told[slot].nvmlReturn == nvml.NVML_SUCCESS and math.isfinite(told[slot].value)
        }
        if row.keys() & RATES:
            self.traffic = None
        return row

    def _sampled(self, sample: Any) -> Any:
        """Fill a sample of GPM's, and return it. A slice is asked of its GPU, by its number there."""
        if self._instance is None:
            self._nvml.nvmlGpmSampleGet(self._whole, sample)
        else:
            self._nvml.nvmlGpmMigSampleGet(self._whole, self._instance, sample)
        return sample


def _is_nvidia(device: Mapping[str, Any]) -> bool:
    """Return whether a rank's device is a GPU of NVIDIA's; older recordings and torch's ROCm both say "cuda"."""
    return device.get("type") == "cuda" and device.get("vendor") != "amd"


def _errors(nvml: Any, names: Iterable[str]) -> tuple[type[Exception], ...]:
    """Return NVML's errors of these names, as far as this nvidia-ml-py has them."""
    found = (getattr(nvml, f"NVMLError_{name}", None) for name in names)
    return tuple(error for error in found if error is not None)


def _is_slice(nvml: Any, handle: Any) -> bool:
    """Return whether a handle is of a slice; before drivers had slices none is."""
    try:
        asked = nvml.nvmlDeviceIsMigDeviceHandle(handle)
    except _errors(nvml, _REFUSED):
        return False
    return bool(getattr(asked, "value", asked))


def _load() -> Any:
    """Return NVML, ready; raises OSError, in words, where this host has none that works."""
    try:
        import pynvml
    except ImportError:
        raise OSError("nvidia-ml-py is not installed") from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as e:
        raise OSError(f"NVML: {e}") from None
    return pynvml


def _handle(nvml: Any, uuid: str) -> Any:
    """Find a GPU, or a part of one; torch leaves out the word in front that NVML wants."""
    names: Iterable[str] = [uuid] if uuid.startswith(("GPU-", "MIG-")) else [f"GPU-{uuid}", f"MIG-{uuid}"]
    error = None
    for name in names:
        try:
            return nvml.nvmlDeviceGetHandleByUUID(name)
        except nvml.NVMLError as e:  # noqa: PERF203 - there are two names
            error = error or e
    assert error is not None
    raise error
