"""What AMD's GPUs do, from the driver's own counters (amdsmi), under the names that the sampler of NVIDIA's uses.

Only where amdsmi is installed, which comes with ROCm. No such GPU was at hand: the calls, the shape and the units of
their answers are those of amdsmi 7.0's Python interface, its documentation, and of PyTorch's own use of them
(torch/cuda/__init__.py). A GPU is found by its place on the PCI bus or by its serial number, never by its index, which
amdsmi and HIP count differently. Traffic over xGMI and PCIe is left out: its units are written nowhere.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from typing import Any

from dlprof.plain import words_of
from dlprof.record.samplers.driver import DriverSampler, Fate, Gpu, Reading

# Statuses of amdsmi.h: what a GPU, driver or user lacks now it lacks for good; without a driver all GPUs do.
_REFUSED = ("NOT_SUPPORTED", "NOT_YET_IMPLEMENTED", "NO_PERM", "FAIL_LOAD_SYMBOL", "INVAL")
_OVER = ("NOT_INIT", "DRIVER_NOT_LOADED")

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
        return _Gpu(self, _handle(self.driver, device))

    def fate(self, error: Exception) -> Fate:
        """Return what an error of amdsmi's means, by the name of its status."""
        if not isinstance(error, self.driver.AmdSmiException):
            return Fate.REFUSED
        words = f"{error} "
        if any(f"AMDSMI_STATUS_{status} " in words for status in _OVER):
            return Fate.OVER
        return Fate.REFUSED if any(f"AMDSMI_STATUS_{status} " in words for status in _REFUSED) else Fate.ONCE


class _Gpu(Gpu):
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


def _handle(smi: Any, device: Mapping[str, Any]) -> Any:
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
