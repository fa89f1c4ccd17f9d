"""What AMD's GPUs do, from the driver's own counters (amdsmi), under the names that the sampler of NVIDIA's uses.

Only where amdsmi is installed, which comes with ROCm. No such GPU was at hand: the calls, the shape and the units of
their answers are those of amdsmi 7.0's Python interface, its documentation, and of PyTorch's own use of them
(torch/cuda/__init__.py). A GPU is found by its place on the PCI bus or by its serial number, never by its index, which
amdsmi and HIP count differently. Traffic over xGMI and PCIe is left out: its units are told nowhere.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Mapping
from typing import Any

from dlprof.record.log import Log
from dlprof.record.samplers.sampling import Host, RankHere, line

Reading = Mapping[str, float]

# Statuses of amdsmi.h: what a GPU, driver or user does not have now it will not later; without a driver nobody does.
_REFUSED = ("NOT_SUPPORTED", "NOT_YET_IMPLEMENTED", "NO_PERM", "FAIL_LOAD_SYMBOL", "INVAL")
_OVER = ("NOT_INIT", "DRIVER_NOT_LOADED")

# Limits come in microwatts on bare metal, and came in watts before: no GPU may take this many watts.
_LEAST_MICROWATTS = 100_000


class AmdSampler:
    """Writes gpu.jsonl of each rank here that trains on a GPU of AMD's: keys as metrics of the table `samples`."""

    name = "amd"

    def __init__(self) -> None:
        self._smi: Any = None
        self._gpus: dict[str, _Gpu | None] = {}  # by the place or the UUID; None: it cannot be read, or no longer
        self._logs: dict[RankHere, Log] = {}
        self._over = False  # the driver has gone

    @property
    def period_s(self) -> float:
        """As long as the host says."""
        return self._host.period_s

    def start(self, host: Host) -> None:
        """Wait for a rank that has a GPU."""
        self._host = host

    def tick(self) -> None:
        """Read each GPU that ranks train on, and write a line for each of them."""
        ranks = [rank for rank in self._host.ranks if rank.device.get("vendor") == "amd"]
        if not ranks or self._over:
            return
        if self._smi is None:
            self._smi = _load()
        read: dict[str, Reading | None] = {}
        for rank in ranks:
            name = rank.device.get("pci") or rank.device.get("uuid")
            if not name:
                self._host.warn(f"the GPU of rank {rank.rank} is not sampled: this torch does not tell which it is")
                continue
            if name not in read:
                read[name] = self._read(name, rank.device)
            row = read[name]
            if row:
                if rank not in self._logs:
                    self._logs[rank] = self._host.log("gpu.jsonl", rank)
                self._logs[rank].write(line(row))

    def stop(self) -> None:
        """Leave the driver."""
        if self._smi is not None:
            with contextlib.suppress(self._smi.AmdSmiException):
                self._smi.amdsmi_shut_down()

    def _read(self, name: str, device: Mapping[str, Any]) -> Reading | None:
        if self._over:
            return None
        try:
            if name not in self._gpus:
                self._gpus[name] = _Gpu(self._smi, _handle(self._smi, device))
            gpu = self._gpus[name]
            return gpu.read() if gpu is not None else None
        except self._smi.AmdSmiException as e:
            if _is(e, _OVER):
                self._over = True
                self._host.warn(f"no GPU is sampled any more: amdsmi: {_words(e)}")
                return None
            more = " any more" if name in self._gpus else ""
            self._gpus[name] = None
            self._host.warn(f"GPU {name} is not sampled{more}: {_words(e)}")
        except LookupError as e:
            self._gpus[name] = None
            self._host.warn(f"GPU {name} is not sampled: {e.args[0]}")
        return None


class _Gpu:
    """One GPU: its handle, and what of it can be read."""

    def __init__(self, smi: Any, handle: Any) -> None:
        self._smi = smi
        self._handle = handle
        self._held: tuple[int, int, int] | None = None  # the counters of what holds the clocks down, as read last
        self._queries: list[Callable[[], Reading]] = [
            self._activity,
            self._memory,
            self._power,
            self._power_limit,
            self._energy,
            self._clocks,
            self._temperature,
            self._clocks_held,
        ]

    def read(self) -> Reading:
        """Return what can be read now; raise AmdSmiException where there is no driver any more."""
        row: dict[str, float] = {}
        for query in tuple(self._queries):
            try:
                row.update(query())
            except self._smi.AmdSmiException as e:  # noqa: PERF203 - each may refuse
                if _is(e, _OVER):
                    raise
                if _is(e, _REFUSED):
                    self._queries.remove(query)
            except (AttributeError, KeyError, TypeError):  # an older or a newer amdsmi
                self._queries.remove(query)
        return row

    def _activity(self) -> Reading:
        now = self._smi.amdsmi_get_gpu_activity(self._handle)
        return _known(busy_share=(now["gfx_activity"], 0.01), memory_busy_share=(now["umc_activity"], 0.01))

    def _memory(self) -> Reading:
        now = self._smi.amdsmi_get_gpu_vram_usage(self._handle)
        return _known(memory_used_bytes=(now["vram_used"], 1 << 20), memory_total_bytes=(now["vram_total"], 1 << 20))

    def _power(self) -> Reading:
        # MI300 and later tell the current power, those before an average.
        now = self._smi.amdsmi_get_power_info(self._handle)
        told = _known(power_w=(now.get("average_socket_power"), 1)) | _known(power_w=(now["current_socket_power"], 1))
        return told if told.get("power_w") else {}

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


def _known(**told: tuple[Any, float]) -> dict[str, float]:
    """Return what has a value, times its scale; amdsmi says "N/A" where it has none."""
    return {name: value * scale for name, (value, scale) in told.items() if type(value) in (int, float) and value >= 0}


def _load() -> Any:
    """Return amdsmi, ready; raise OSError, in words, where this host has none that works."""
    try:
        # Without its library it prints, and fails with a KeyError.
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            import amdsmi
    except ImportError:
        raise OSError("amdsmi is not installed, with which ROCm tells what a GPU does") from None
    except Exception as e:  # noqa: BLE001 - see above
        raise OSError(f"amdsmi does not find its library ({type(e).__name__}: {e})") from None
    try:
        amdsmi.amdsmi_init()
    except amdsmi.AmdSmiException as e:
        raise OSError(f"amdsmi: {_words(e)}") from None
    return amdsmi


def _handle(smi: Any, device: Mapping[str, Any]) -> Any:
    """Find a rank's GPU by its place on the PCI bus, else by its serial number; raise LookupError where none is it."""
    handles = smi.amdsmi_get_processor_handles()
    place = str(device.get("pci") or "").lower()
    if place:
        found = [handle for handle in handles if smi.amdsmi_get_gpu_device_bdf(handle).lower() == place]
    else:
        serial = _serial(str(device.get("uuid") or ""))
        found = [handle for handle in handles if _serial_of(smi, handle) == serial]
    if len(found) == 1:
        return found[0]
    raise LookupError("amdsmi knows several parts of it, and not which one" if found else "amdsmi does not know it")


def _serial_of(smi: Any, handle: Any) -> str:
    told = str(smi.amdsmi_get_gpu_asic_info(handle)["asic_serial"]).lower()
    return told.removeprefix("0x").zfill(16)


def _serial(uuid: str) -> str:
    """Return the serial number in torch's UUID: HIP's 16 bytes are the digits of it, which torch writes as bytes."""
    digits = uuid.removeprefix("GPU-").replace("-", "")
    with contextlib.suppress(ValueError):
        text = bytes.fromhex(digits).decode("ascii")
        if all(c in "0123456789abcdefABCDEF" for c in text):
            return text.lower().zfill(16)
    return digits.lower().zfill(16)


def _is(error: Exception, statuses: tuple[str, ...]) -> bool:
    said = str(error)
    return any(f"AMDSMI_STATUS_{status} " in f"{said} " for status in statuses)


def _words(error: Exception) -> str:
    return " ".join(str(error).split())
