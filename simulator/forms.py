"""The forms in which PyTorch's profiler has written traces: what differs between its versions and platforms.

As Kineto's output_json.cpp, its activities' metadata and torch/csrc/profiler/util.cpp (saveNcclMeta) write them, and as
real traces of those versions look.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal
from zlib import crc32

from simulator.groups import described
from simulator.program import Exchange


@dataclass(frozen=True)
class Form:
    """How a trace is written.

    times: absolute whole µs; absolute µs with three digits; three digits behind a base that stands in the header.
    metadata of collectives on their kernels: none, group (torch 2.4), full (with Seq and Comms Id).
    """

    name: str
    times: Literal["whole", "absolute", "relative"] = "relative"
    metadata: Literal["none", "group", "full"] = "full"
    nccl: Literal["ncclKernel", "ncclDevKernel", "generic"] = "ncclDevKernel"
    hip: bool = False
    calls: bool = True  # the runtime's calls are there
    correlations: bool = True
    operators: bool = True
    syncs: bool = False  # cuda_sync events are there
    arrows: bool = False
    gpu_annotations: bool = True


FORMS: Mapping[str, Form] = {
    form.name: form
    for form in (
        Form("torch-2.13", arrows=True),
        Form("torch-2.13-syncs", syncs=True),
        Form("torch-2.8"),
        Form("torch-2.4", times="absolute", metadata="group"),
        Form("torch-2.0", times="whole", metadata="none", nccl="ncclKernel", gpu_annotations=False),
        Form("rocm-6", metadata="none", nccl="generic", hip=True),
        Form("no-correlations", correlations=False),
        Form("device-only", calls=False, operators=False, metadata="none"),
    )
}

# The profiler's names of HIP's calls, by those of CUDA (hip_runtime_api.h).
HIP_CALLS: Mapping[str, str] = {
    "cudaLaunchKernel": "hipLaunchKernel",
    "cudaLaunchKernelExC": "hipExtLaunchKernel",
    "cudaMemcpyAsync": "hipMemcpyAsync",
    "cudaMemsetAsync": "hipMemsetAsync",
    "cudaEventRecord": "hipEventRecord",
    "cudaStreamWaitEvent": "hipStreamWaitEvent",
    "cudaStreamSynchronize": "hipStreamSynchronize",
    "cudaDeviceSynchronize": "hipDeviceSynchronize",
    "cudaEventSynchronize": "hipEventSynchronize",
    "cudaGraphLaunch": "hipGraphLaunch",
    "cudaLaunchHostFunc": "hipLaunchHostFunc",
    "cudaMalloc": "hipMalloc",
    "cudaFree": "hipFree",
}

# CUPTI's numbers of callbacks (cupti_runtime_cbid.h), as they stand in real traces.
CALLBACKS: Mapping[str, int] = {
    "cudaLaunchKernel": 211,
    "cudaLaunchKernelExC": 430,
    "cudaMemcpyAsync": 41,
    "cudaMemsetAsync": 51,
    "cudaEventRecord": 135,
    "cudaStreamWaitEvent": 147,
    "cudaStreamSynchronize": 131,
    "cudaDeviceSynchronize": 165,
    "cudaEventSynchronize": 137,
    "cudaGraphLaunch": 311,
    "cudaLaunchHostFunc": 338,
    "cudaMalloc": 20,
    "cudaFree": 22,
}

_TYPES = {
    "float32": "Float",
    "bfloat16": "BFloat16",
    "float16": "Half",
    "int64": "Long",
    "int32": "Int",
    "uint8": "Byte",
}
_SHORT = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "int64": "i64", "int32": "i32", "uint8": "u8"}
_OLD = {
    "float32": "float",
    "bfloat16": "__nv_bfloat16",
    "float16": "half",
    "int64": "int64_t",
    "int32": "int32_t",
    "uint8": "uint8_t",
}

# What ProcessGroupNCCL calls its collectives in RECORD_PARAM_COMMS_DATA.
NAMES: Mapping[str, str] = {
    "all_reduce": "allreduce",
    "all_gather": "_allgather_base",
    "reduce_scatter": "_reduce_scatter_base",
    "broadcast": "broadcast",
    "all_to_all": "all_to_all",
    "send": "send",
    "recv": "recv",
}
_KERNELS = {
    "all_reduce": "AllReduce",
    "all_gather": "AllGather",
    "reduce_scatter": "ReduceScatter",
    "broadcast": "Broadcast",
}


# Of longer lists the profiler writes so many values (kTruncatLength in torch/csrc/profiler/util.cpp).
MOST_LISTED = 30


def kernel_name(form: Form, exchange: Exchange) -> str:
    """Return what NCCL or RCCL calls the kernel of a collective."""
    if form.nccl == "generic":
        return "ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)"
    kind = _KERNELS.get(exchange.kind)
    reduces = exchange.kind in ("all_reduce", "reduce_scatter")
    if form.nccl == "ncclKernel":
        tail = "(ncclDevComm*, unsigned long, ncclWork*)"
        if kind is None:
            return f"ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t{tail}"
        return f"ncclKernel_{kind}_RING_LL_Sum_{_OLD[exchange.dtype] if reduces else 'int8_t'}{tail}"
    tail = "(ncclDevKernelArgsStorage<4096ul>)"
    if kind is None:
        return f"ncclDevKernel_SendRecv{tail}"
    return f"ncclDevKernel_{kind}_{f'Sum_{_SHORT[exchange.dtype]}_' if reduces else ''}RING_LL{tail}"


def _listed(ranks: tuple[int, ...]) -> str:
    first = ", ".join(map(str, ranks[:MOST_LISTED]))
    return f"[{first}, ...]" if len(ranks) > MOST_LISTED else f"[{first}]"


def metadata(form: Form, exchange: Exchange, group: str, ranks: tuple[int, ...], number: int) -> dict[str, Any]:
    """Return what the profiler says of a collective of a group; `number`: how many there were before it."""
    size = len(ranks)
    made: dict[str, Any] = {
        "Collective name": NAMES[exchange.kind],
        "In msg nelems": exchange.elements // (size if exchange.kind == "all_gather" else 1),
        "Out msg nelems": exchange.elements // (size if exchange.kind == "reduce_scatter" else 1),
        "Group size": size,
        "dtype": _TYPES[exchange.dtype],
        "In split size": "[]",
        "Out split size": "[]",
        "Process Group Name": group,
        "Process Group Description": described(group),
        "Process Group Ranks": _listed(ranks),
    }
    if exchange.give:
        row = exchange.elements // sum(exchange.give)
        made |= {"In msg nelems": sum(exchange.give) * row, "Out msg nelems": sum(exchange.take) * row}
        made |= {"In split size": _listed(exchange.give), "Out split size": _listed(exchange.take)}
    if exchange.peer >= 0:
        made["Dst Rank" if exchange.kind == "send" else "Src Rank"] = exchange.peer
    if form.metadata == "full":
        made["Seq"] = number + 1
        # A hash of group, number and ranks, alike on all of them.
        text = f"{exchange.group}.{number}.{ranks}.{exchange.kind in ('send', 'recv')}"
        made["Comms Id"] = crc32(text.encode()) << 31 | crc32(text[::-1].encode()) >> 1
    return made
