"""Ask the GPU's three sources of figures whether they answer: CUPTI for a kernel, NVML, and GPM while it works.

Prints what each says as JSON: a figure, or why there is none. With --link, what each way of NVML says of the link to
the host while a known number of bytes goes over it: their units and directions are told nowhere.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any, cast

import torch

# nvml.h: of all warps' room, of tensor cores' cycles and of the memory's bandwidth, in per cent.
GPM = {"sm_busy": 2, "tensor_busy": 5, "dram": 10}


def kernels(device: str) -> dict[str, Any]:
    """Profile a product, and return how many kernels and operators the trace holds."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    x = torch.randn(1024, 1024, device=device)
    with torch.profiler.profile(activities=kinds) as profiler:
        torch.mm(x, x).sum().item()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return {kind: sum(e.get("cat") == kind for e in events) for kind in ("kernel", "cuda_runtime", "cpu_op")}


def work(seconds: float) -> None:
    """Multiply in bf16 for so long."""
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        for _ in range(20):
            torch.mm(x, x)
        torch.cuda.synchronize()


def nvml(uuid: str) -> dict[str, Any]:
    """Return what NVML says of the GPU with this UUID, and what GPM says of half a second of work on it."""
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")
    told: dict[str, Any] = {
        "power_w": pynvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
        "memory_used_bytes": pynvml.nvmlDeviceGetMemoryInfo(handle).used,
        "temperature_c": pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
    }
    try:
        told["gpm"] = gpm(pynvml, handle)
    except pynvml.NVMLError as e:
        told["gpm"] = str(e)
    pynvml.nvmlShutdown()
    return told


def gpm(pynvml: Any, handle: Any) -> dict[str, float] | str:
    """Return GPM's figures over half a second of work, each a share; a sentence where this GPU has none."""
    if not pynvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
        return "not supported by this GPU: GPM needs Hopper or later"
    before, after = pynvml.nvmlGpmSampleAlloc(), pynvml.nvmlGpmSampleAlloc()
    work(0.2)
    pynvml.nvmlGpmSampleGet(handle, before)
    work(0.5)
    pynvml.nvmlGpmSampleGet(handle, after)
    asked = pynvml.c_nvmlGpmMetricsGet_t()
    asked.version = pynvml.NVML_GPM_METRICS_GET_VERSION
    asked.numMetrics = len(GPM)
    asked.sample1, asked.sample2 = before, after
    for slot, number in enumerate(GPM.values()):
        asked.metrics[slot].metricId = number
    metrics = pynvml.nvmlGpmMetricsGet(asked).metrics
    return {name: metrics[slot].value / 100 for slot, name in enumerate(GPM) if metrics[slot].nvmlReturn == 0}


# nvml.h: NVML_FI_DEV_PCIE_COUNT_TX_BYTES and ..._RX_BYTES; NVML_GPM_METRIC_PCIE_TX_PER_SEC and ..._RX_PER_SEC (MiB/s).
LINK_FIELDS = {"field 197 (TX)": 197, "field 198 (RX)": 198}
LINK_GPM = {"gpm 20 (PCIE_TX)": 20, "gpm 21 (PCIE_RX)": 21}
VALUES = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")  # of nvmlValue_t, by nvmlValueType_t


def link(uuid: str, seconds: float) -> dict[str, Any]:
    """Send pinned memory to the device for so long; return the true rate and what NVML said meanwhile, all in GB/s."""
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")
    size, cuda = 1 << 28, cast("Any", torch.cuda)
    here, there = torch.empty(size, dtype=torch.uint8, pin_memory=True), torch.empty(size, dtype=torch.uint8).cuda()

    def counters() -> dict[str, Any]:
        values = pynvml.nvmlDeviceGetFieldValues(handle, list(LINK_FIELDS.values()))
        return {
            name: getattr(v.value, VALUES[v.valueType]) if v.nvmlReturn == 0 else f"error {v.nvmlReturn}"
            for name, v in zip(LINK_FIELDS, values, strict=True)
        }

    samples = [pynvml.nvmlGpmSampleAlloc() for _ in range(2)]
    begin, end = (cuda.Event(enable_timing=True) for _ in range(2))
    read, copies, began = [counters()], 0, time.monotonic()
    begin.record()
    pynvml.nvmlGpmSampleGet(handle, samples[0])
    while time.monotonic() < began + seconds:
        for _ in range(20):
            there.copy_(here, non_blocking=True)
        copies += 20
        torch.cuda.synchronize()
        read.append(counters())
    pynvml.nvmlGpmSampleGet(handle, samples[1])
    end.record()
    end.synchronize()
    took_s = begin.elapsed_time(end) / 1e3
    asked = pynvml.c_nvmlGpmMetricsGet_t()
    asked.version, asked.numMetrics = pynvml.NVML_GPM_METRICS_GET_VERSION, len(LINK_GPM)
    asked.sample1, asked.sample2 = samples
    for slot, number in enumerate(LINK_GPM.values()):
        asked.metrics[slot].metricId = number
    metrics = pynvml.nvmlGpmMetricsGet(asked).metrics
    told: dict[str, Any] = {"true, to the device": copies * size / took_s / 1e9, "seconds": took_s}
    told |= {name: metrics[slot].value * 2**20 / 1e9 for slot, name in enumerate(LINK_GPM)}
    for name in LINK_FIELDS:
        first, last = read[0][name], read[-1][name]
        numbers = isinstance(first, (int, float)) and isinstance(last, (int, float))
        told[name] = (last - first) / took_s / 1e9 if numbers else last
        told[f"{name}, as read"] = [row[name] for row in read[:5]]
    pynvml.nvmlShutdown()
    return told


def main() -> None:
    """Ask, and print the answers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--link", action="store_true", help="ask about the link to the host, and nothing else")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    uuid = str(getattr(torch.cuda.get_device_properties(0), "uuid", "")) if args.device == "cuda" else ""
    if args.link:
        print(json.dumps(link(uuid, 2.0)), flush=True)
        return
    told: dict[str, Any] = {"events": kernels(args.device)}
    if args.device == "cuda":
        try:
            told["nvml"] = nvml(uuid)
        except ImportError:
            told["nvml"] = "nvidia-ml-py is not installed"
        except Exception as e:  # noqa: BLE001 - what is in the way is the answer
            told["nvml"] = f"{type(e).__name__}: {e}"
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
