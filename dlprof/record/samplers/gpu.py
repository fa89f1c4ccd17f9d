"""What the GPUs of this host's ranks do, from the driver's own counters: nothing runs on a GPU for it.

Nothing is queried before a rank trains on such a GPU. Each query is tried once on each GPU: what this GPU, driver or
permission does not give is left out of the file from then on, and never a zero in it. What fails once is missing once.

NVIDIA's (NVML). For a slice of a GPU (MIG), memory and activity are its own. Clocks, their reasons and temperature are
those of the whole GPU; power, energy and links are left out, since they cannot be attributed. This was not tried on a
real slice.

The bytes that such a GPU sends and receives over PCIe come from counters that soon wrap around:
nvmlDeviceGetPcieThroughput would wait for 20 ms each time. The counters have 32 bits on the drivers seen so far, and
"can be wrapped" (nvml.h): 31.5 GB/s, which PCIe 4.0 carries over 16 lanes, fill them in 0.136 s. So they are read every
0.1 s, and what lies further apart is not counted. GPUs with faster links, Hopper and later, have GPM for it. They count
bytes on the link, with the headers of packets: on an H200 (driver 580), 276 for each 256 that were copied to it.
Copying 5,368,709,120 bytes moved the counter on by 1,493,196,000 and once around.

AMD's (amdsmi), under the same names, where amdsmi is installed, which comes with ROCm. No such GPU was at hand: the
calls, the shape and the units of their answers are those of amdsmi 7.0's Python interface, its documentation, and of
PyTorch's own use of them (torch/cuda/__init__.py). A GPU is found by its place on the PCI bus or by its serial number,
never by its index, which amdsmi and HIP count differently. Traffic over xGMI and PCIe is left out: its units are
written nowhere.
"""

from __future__ import annotations

import contextlib
import io
import math
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any, TypeVar

from dlprof.plain import words_of
from dlprof.record.log import Part
from dlprof.record.samplers.sampling import RankHere, Sampler, line

Reading = Mapping[str, float]
T = TypeVar("T")


class Fate(Enum):
    """What an error of a driver's means."""

    ONCE = "one reading is missing"
    REFUSED = "this GPU will not answer this query later either"
    LOST = "this GPU cannot be read any more"
    OVER = "no GPU can be read any more"


class Gpu:
    """One GPU, and the queries that it answers."""

    def __init__(self, sampler: DriverSampler, *queries: Callable[[], Reading]) -> None:
        self.sampler = sampler
        self.queries = list(queries)

    def read(self) -> Reading:
        """Return what can be read now. Raises one of the driver's errors where the GPU or the driver has gone."""
        row: dict[str, float] = {}
        for query in tuple(self.queries):
            try:
                row.update(query())
            except self.sampler.errors as e:  # noqa: PERF203 - each may refuse
                fate = self.sampler.fate(e)
                if fate in (Fate.LOST, Fate.OVER):
                    raise
                if fate is Fate.REFUSED:
                    self.queries.remove(query)
        return row


class DriverSampler(Sampler):
    """Writes the log `gpu` of each rank here on a GPU of one vendor: keys as metrics of the table `samples`."""

    name: str
    library: str  # the driver's, in messages
    identity: str  # what torch must say of a GPU
    errors: tuple[type[Exception], ...] = ()  # the driver's, once it is loaded

    def __init__(self) -> None:
        self.driver: Any = None
        self.gpus: dict[str, Gpu | None] = {}  # by its name for the driver; None: it cannot be read, or no longer
        self._logs: dict[RankHere, Part] = {}
        self._over = False  # the driver has gone

    @abstractmethod
    def _name_of(self, device: Mapping[str, Any]) -> str | None:
        """Return the driver's name for a rank's GPU; "": this torch does not report it, None: another vendor's."""

    @abstractmethod
    def _load(self) -> Any:
        """Return the driver, ready, and set `errors`; raise OSError with a message if this host has none that works."""

    @abstractmethod
    def _unload(self) -> None:
        """Leave the driver; may raise its errors."""

    @abstractmethod
    def _open(self, name: str, device: Mapping[str, Any]) -> Gpu:
        """Find a GPU; raise one of the driver's errors if there is none."""

    @abstractmethod
    def fate(self, error: Exception) -> Fate:
        """Return what one of the driver's errors means."""

    def tick(self) -> None:
        """Read each GPU that ranks train on, and write a line for each of these ranks."""
        read: dict[str, Reading | None] = {}
        for rank in self.host.ranks:
            name = self._name_of(rank.device)
            if name is None or self._over:
                continue
            if self.driver is None:
                self.driver = self._load()
            if not name:
                self.host.warn(f"the GPU of rank {rank.rank} is not sampled: this torch does not tell {self.identity}")
                continue
            if name not in read:
                read[name] = self.safely(name, lambda: self._read(name, rank.device))  # noqa: B023 - called here
            if row := read[name]:
                if rank not in self._logs:
                    self._logs[rank] = self.host.log("gpu", rank)
                self._logs[rank].write(line(row))

    def stop(self) -> None:
        """Leave the driver, which may have gone before us."""
        if self.driver is not None:
            with contextlib.suppress(*self.errors):
                self._unload()

    def safely(self, name: str, ask: Callable[[], T]) -> T | None:
        """Return the answer; None, after one warning, where the GPU or the driver has gone."""
        if self._over:
            return None
        try:
            return ask()
        except self.errors as e:
            words = " ".join(str(e.args[0] if isinstance(e, LookupError) else e).split())
            if self.fate(e) is Fate.OVER:
                self._over = True
                self.host.warn(f"no GPU is sampled any more: {self.library}: {words}")
            else:
                more = " any more" if name in self.gpus else ""
                self.gpus[name] = None  # lost, or to be reset: the others are read on
                self.host.warn(f"GPU {name} is not sampled{more}: {words}")
            return None

    def _read(self, name: str, device: Mapping[str, Any]) -> Reading | None:
        if name not in self.gpus:
            self.gpus[name] = self._open(name, device)
        gpu = self.gpus[name]
        return gpu.read() if gpu is not None else None


# -- NVIDIA

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
        return _NvidiaGpu(self, name)

    def fate(self, error: Exception) -> Fate:
        """Return what an error of NVML's means, see nvmlReturn_t in nvml.h."""
        if isinstance(error, self.refusals):
            return Fate.REFUSED
        if isinstance(error, self.ends):
            return Fate.OVER if isinstance(error, _errors(self.driver, _OVER)) else Fate.LOST
        return Fate.ONCE

    @property
    def _counting(self) -> dict[str, Traffic]:
        return {name: gpu.traffic for name, gpu in self.gpus.items() if isinstance(gpu, _NvidiaGpu) and gpu.traffic}

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


class _NvidiaGpu(Gpu):
    """A GPU or a slice of one, by its handle."""

    def __init__(self, sampler: GpuSampler, uuid: str) -> None:
        self._nvml = nvml = sampler.driver
        self._handle = self._whole = handle = _handle(nvml, uuid)
        self._instance: int | None = None  # of a slice, within its GPU
        if _is_slice(nvml, handle, sampler.refusals):
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


def _is_slice(nvml: Any, handle: Any, refusals: Errors) -> bool:
    """Return whether a handle is of a slice; before drivers had slices none is."""
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


# -- AMD

# Statuses of amdsmi.h: what a GPU, driver or user lacks now it lacks for good; without a driver all GPUs do.
_AMD_REFUSED = ("NOT_SUPPORTED", "NOT_YET_IMPLEMENTED", "NO_PERM", "FAIL_LOAD_SYMBOL", "INVAL")
_AMD_OVER = ("NOT_INIT", "DRIVER_NOT_LOADED")

# Limits come in microwatts on bare metal, and came in watts before: no GPU may take this many watts.
_LEAST_MICROWATTS = 100_000


class AmdSampler(DriverSampler):
    """Samples GPUs of AMD's."""

    name = "amd"
    library = "amdsmi"
    identity = "which it is"

    def _name_of(self, device: Mapping[str, Any]) -> str | None:
        return device.get("pci") or device.get("uuid") or "" if device.get("vendor") == "amd" else None

    def _load(self) -> Any:
        try:
            # Without its library it prints, and fails with a KeyError.
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                import amdsmi
        except ImportError:
            raise OSError("amdsmi, which reports what a ROCm GPU does, is not installed") from None
        except Exception as e:  # noqa: BLE001 - see above
            raise OSError(f"amdsmi does not find its library ({words_of(e)})") from None
        try:
            amdsmi.amdsmi_init()
        except amdsmi.AmdSmiException as e:
            raise OSError(f"amdsmi: {' '.join(str(e).split())}") from None
        # Of an older or a newer amdsmi: a function, a key or a number that is not as we know it.
        self.errors = (amdsmi.AmdSmiException, AttributeError, LookupError, TypeError)
        return amdsmi

    def _unload(self) -> None:
        self.driver.amdsmi_shut_down()

    def _open(self, name: str, device: Mapping[str, Any]) -> Gpu:  # noqa: ARG002 - torch says more than a name
        return _AmdGpu(self, _amd_handle(self.driver, device))

    def fate(self, error: Exception) -> Fate:
        """Return what an error of amdsmi's means, by the name of its status."""
        if not isinstance(error, self.driver.AmdSmiException):
            return Fate.REFUSED
        words = f"{error} "
        if any(f"AMDSMI_STATUS_{status} " in words for status in _AMD_OVER):
            return Fate.OVER
        return Fate.REFUSED if any(f"AMDSMI_STATUS_{status} " in words for status in _AMD_REFUSED) else Fate.ONCE


class _AmdGpu(Gpu):
    """A GPU of AMD's, by its handle."""

    def __init__(self, sampler: AmdSampler, handle: Any) -> None:
        self._smi = sampler.driver
        self._handle = handle
        self._held: tuple[int, int, int] | None = None  # the counters of what holds the clocks down, as read last
        super().__init__(
            sampler,
            self._activity,
            self._memory,
            self._power,
            self._power_limit,
            self._energy,
            self._clocks,
            self._temperature,
            self._clocks_held,
        )

    def _activity(self) -> Reading:
        now = self._smi.amdsmi_get_gpu_activity(self._handle)
        return _known(busy_share=(now["gfx_activity"], 0.01), memory_busy_share=(now["umc_activity"], 0.01))

    def _memory(self) -> Reading:
        now = self._smi.amdsmi_get_gpu_vram_usage(self._handle)
        return _known(memory_used_bytes=(now["vram_used"], 1 << 20), memory_total_bytes=(now["vram_total"], 1 << 20))

    def _power(self) -> Reading:
        # MI300 and later say the current power, those before an average.
        now = self._smi.amdsmi_get_power_info(self._handle)
        power = _known(power_w=(now.get("average_socket_power"), 1)) | _known(power_w=(now["current_socket_power"], 1))
        return power if power.get("power_w") else {}

    def _power_limit(self) -> Reading:
        now = self._smi.amdsmi_get_power_cap_info(self._handle)
        limits = {"power_limit_w": now["power_cap"], "power_limit_default_w": now["default_power_cap"]}
        return {
            name: watts * 1e-6 if watts >= _LEAST_MICROWATTS else watts
            for name, watts in limits.items()
            if type(watts) in (int, float) and watts > 0
        }

    def _energy(self) -> Reading:
        now = self._smi.amdsmi_get_energy_count(self._handle)
        return _known(energy_j=(now["energy_accumulator"], now["counter_resolution"] * 1e-6))  # µJ a count

    def _clocks(self) -> Reading:
        kinds = self._smi.AmdSmiClkType
        compute = self._smi.amdsmi_get_clock_info(self._handle, kinds.GFX)
        memory = self._smi.amdsmi_get_clock_info(self._handle, kinds.MEM)
        # Before ROCm 6.2 a clock was called cur_clk.
        return _known(
            sm_clock_mhz=(compute.get("clk", compute.get("cur_clk")), 1),
            sm_clock_max_mhz=(compute["max_clk"], 1),
            memory_clock_mhz=(memory.get("clk", memory.get("cur_clk")), 1),
        )

    def _temperature(self) -> Reading:
        smi = self._smi
        kind, metric = smi.AmdSmiTemperatureType.JUNCTION, smi.AmdSmiTemperatureMetric.CURRENT
        return _known(temperature_c=(smi.amdsmi_get_temp_metric(self._handle, kind, metric), 1))

    def _clocks_held(self) -> Reading:
        """Return the shares of the time since the last reading in which power, and heat, held the clocks down.

        As amdsmi counts its violations: what a residency has grown by, of what the accumulation counter has. That call
        itself (amdsmi_get_violation_status) takes two readings with a pause between them.
        """
        now = self._smi.amdsmi_get_gpu_metrics_info(self._handle)
        heat = [now[f"{what}_residency_acc"] for what in ("socket_thm", "vr_thm", "hbm_thm")]
        power, counter = now["ppt_residency_acc"], now["accumulation_counter"]
        if not all(type(value) is int for value in (power, counter, *heat)):
            raise KeyError("residencies")  # "N/A": before MI300
        before, self._held = self._held, (power, max(heat), counter)
        if before is None or counter <= before[2]:
            return {}
        passed = counter - before[2]
        shares = [(now - was) / passed for now, was in zip(self._held[:2], before[:2], strict=True)]
        if not all(0 <= share <= 1 for share in shares):
            return {}  # the driver was loaded anew
        return {"clocks_held_by_power_share": round(shares[0], 4), "clocks_held_by_heat_share": round(shares[1], 4)}


def _known(**values: tuple[Any, float]) -> dict[str, float]:
    """Return what has a value, times its scale; amdsmi says "N/A" where it has none."""
    return {
        name: value * scale for name, (value, scale) in values.items() if type(value) in (int, float) and value >= 0
    }


def _amd_handle(smi: Any, device: Mapping[str, Any]) -> Any:
    """Find a rank's GPU by its place on the PCI bus, else by its serial number; raise LookupError where none is it."""
    handles = smi.amdsmi_get_processor_handles()
    place = str(device.get("pci") or "").lower()
    if place:
        found = [handle for handle in handles if smi.amdsmi_get_gpu_device_bdf(handle).lower() == place]
    else:
        serial = _serial(str(device.get("uuid") or ""))
        asic = smi.amdsmi_get_gpu_asic_info
        found = [h for h in handles if str(asic(h)["asic_serial"]).lower().removeprefix("0x").zfill(16) == serial]
    if len(found) == 1:
        return found[0]
    raise LookupError("amdsmi knows several parts of it, and not which one" if found else "amdsmi does not know it")


def _serial(uuid: str) -> str:
    """Return the serial number in torch's UUID: HIP's 16 bytes are the digits of it, which torch writes as bytes."""
    digits = uuid.removeprefix("GPU-").replace("-", "")
    with contextlib.suppress(ValueError):
        text = bytes.fromhex(digits).decode("ascii")
        if all(c in "0123456789abcdefABCDEF" for c in text):
            return text.lower().zfill(16)
    return digits.lower().zfill(16)
