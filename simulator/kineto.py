"""Writes what a rank did while its profiler recorded, as PyTorch's profiler writes it: a Chrome trace in JSON.

The layout is that of Kineto's output_json.cpp; what an event's args say, that of its activities' metadata and of
torch/csrc/profiler/util.cpp (saveNcclMeta). Versions and platforms differ in the forms that real traces of them have.
"""

from __future__ import annotations

import gzip
import json
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal
from zlib import crc32

from simulator.job import Place, described
from simulator.machine import Simulated
from simulator.program import APART, COMPUTE, Exchange
from simulator.recorder import Call
from simulator.streams import Work


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


TAIL = '\n  ],\n  "traceName": "trace.json"\n}\n'
AUTOGRAD_TID = 97  # the autograd thread's distance from the main one

# Every kernel's; nothing depends on them.
_SHAPE = (
    '"registers per thread": 64, "shared memory": 16384, "blocks per SM": 8.0, "warps per SM": 32.0, '
    '"grid": [864, 1, 1], "block": [128, 1, 1], "est. achieved occupancy %": 50'
)
_CATEGORIES = {"kernel": "kernel", "communication": "kernel", "copy": "gpu_memcpy", "set": "gpu_memset"}
_CPP = {"float32": "float", "bfloat16": "c10::BFloat16", "float16": "c10::Half"}
_SYNCS = {
    "cudaDeviceSynchronize": "Context Sync",
    "cudaStreamSynchronize": "Stream Sync",
    "cudaEventSynchronize": "Event Sync",
}


def write(path: Path, rank: Simulated, place: Place, form: Form, shapes: bool = False) -> None:
    """Write a rank's trace, packed where the name ends in .gz; `shapes`: operators tell what they multiply."""
    data = Trace(rank, place, form, shapes).text().encode()
    path.write_bytes(gzip.compress(data, 1, mtime=0) if path.suffix == ".gz" else data)


class Trace:
    """One rank's trace."""

    def __init__(self, rank: Simulated, place: Place, form: Form, shapes: bool) -> None:
        self.rank, self.place, self.form, self.shapes = rank, place, form, shapes

    def text(self) -> str:
        """Return the whole file."""
        return self.head() + self.body() + TAIL

    def head(self) -> str:
        """Return what stands before the events."""
        head = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in self._header().items())
        return f'{{\n{head},\n  "traceEvents": [\n'

    def body(self) -> str:
        """Return the events."""
        return ",\n".join((*self._host(), *self._device(), *self._annotations(), *self._frame()))

    # -- pieces of an event

    def _at(self, ns: int) -> str:
        """Return a true time in the form's digits."""
        unix = self.place.clock.at(ns)
        if self.form.times == "whole":
            return str(unix // 1000)
        if self.form.times == "relative":
            unix -= self.place.base_ns
        return f"{unix // 1000}.{unix % 1000:03}"

    def _complete(self, category: str, name: str, pid: int, tid: int, start: int, end: int, args: str) -> str:
        """Return a complete event; `args` is what stands between the braces."""
        if self.form.times == "whole":
            dur = str(self.place.clock.at(end) // 1000 - self.place.clock.at(start) // 1000)
        else:
            dur = f"{(end - start) // 1000}.{(end - start) % 1000:03}"
        return (
            f'  {{"ph": "X", "cat": "{category}", "name": {json.dumps(name)}, "pid": {pid}, "tid": {tid}, '
            f'"ts": {self._at(start)}, "dur": {dur}, "args": {{{args}}}}}'
        )

    def _arrow(self, phase: str, number: int, pid: int, tid: int, at: int) -> str:
        bind = ', "bp": "e"' if phase == "f" else ""
        return (
            f'  {{"ph": "{phase}", "id": {number}, "pid": {pid}, "tid": {tid}, "ts": {self._at(at)}, '
            f'"cat": "ac2g", "name": "ac2g"{bind}}}'
        )

    def _tid(self, thread: int) -> int:
        return self.place.pid + AUTOGRAD_TID * thread

    def _lane(self, stream: int) -> tuple[int, int]:
        """Return the device and the number of a stream."""
        device = self.place.device_index + stream // APART
        number = stream % APART
        if self.form.hip:  # HIP numbers its streams from 0
            number = 0 if number == COMPUTE else number - 16
        return device, number

    # -- the head

    def _header(self) -> dict[str, Any]:
        place, form, device = self.place, self.form, self.place.device
        one = {
            "name": device.name,
            "totalGlobalMem": device.memory_bytes,
            "computeMajor": device.capability[0],
            "computeMinor": device.capability[1],
            "warpSize": 64 if form.hip else 32,
            "numSms": device.sms,
        }
        head: dict[str, Any] = {"schemaVersion": 1}
        head["deviceProperties"] = [{"id": n, **one} for n in range(place.devices)]
        if place.world_size > 1:
            head["distributedInfo"] = info = {"backend": "nccl", "rank": place.rank, "world_size": place.world_size}
            if form.metadata != "none" or form.hip:
                info |= {"pg_count": len(place.groups), "nccl_version": "2.27.5"}
                info["pg_config"] = [
                    {"pg_name": name, "pg_desc": described(name), "pg_size": len(ranks), "ranks": list(ranks)}
                    for name, ranks in place.groups.items()
                ]
        if form.times != "whole":
            head |= {"host_name": place.host, "displayTimeUnit": "ms"}
        if form.times == "relative":
            head["baseTimeNanoseconds"] = place.base_ns
        return head

    def _frame(self) -> Iterator[str]:
        begin, end = self.rank.records.traced
        yield (
            f'  {{"name": "process_name", "ph": "M", "ts": {self._at(begin)}, "pid": {self.place.pid}, "tid": 0, '
            '"args": {"name": "python"}}'
        )
        name = "PyTorch Profiler"
        made = self._complete("Trace", f"{name} (0)", 0, 0, begin, end, '"Op count": 0')
        yield made.replace('"pid": 0, "tid": 0', f'"pid": "Spans", "tid": "{name}"', 1)

    # -- the host

    def _host(self) -> Iterator[str]:
        form, pid = self.form, self.place.pid
        for call in self.rank.records.calls:
            if call.category == "cuda_runtime":
                if form.calls:
                    yield self._runtime(call)
                    if form.arrows:
                        yield self._arrow("s", call.correlation, pid, self._tid(call.thread), call.start)
            elif form.operators or call.name.startswith("ProfilerStep"):
                yield self._range(call)

    def _runtime(self, call: Call) -> str:
        name, number = (HIP_CALLS[call.name], "cid") if self.form.hip else (call.name, "cbid")
        args = f'"External id": {call.external}, ' if call.external else ""
        args += f'"{number}": {CALLBACKS[call.name]}'
        if self.form.correlations:
            args += f', "correlation": {call.correlation}'
        tid = self._tid(call.thread)
        return self._complete("cuda_runtime", name, self.place.pid, tid, call.start, call.end, args)

    def _range(self, call: Call) -> str:
        args: dict[str, Any] = {"External id": call.external, "Record function id": 0}
        said = call.args or {}
        if "exchange" in said and (self.form.metadata != "none" or self.form.hip):
            args |= self._of_call(call.external, said["exchange"])
        for thread, kind in enumerate(("made", "of")):
            if kind in said:  # each step goes on counting
                args |= {"Sequence number": 100_000 * said["step"] + said[kind], "Fwd thread id": thread}
        if self.shapes and "shapes" in said:
            args["Input Dims"] = [list(shape) for shape in said["shapes"]]
            args["Input type"] = [_CPP[said["dtype"]]] * len(said["shapes"])
        tid, text = self._tid(call.thread), json.dumps(args)[1:-1]
        category = "cpu_op" if call.category == "module" else call.category
        return self._complete(category, call.name, self.place.pid, tid, call.start, call.end, text)

    @cached_property
    def _exchanges(self) -> Mapping[int, Work]:
        """The collectives' work, by the number of the record_param_comms around its launch.

        The innermost range there is nccl:…, whose number is the next one.
        """
        return {w.external - 1: w for w in self._works if w.exchange is not None}

    def _of_call(self, external: int, exchange: Exchange) -> dict[str, Any]:
        """Return what a call says of its exchange, whose kernel it launched, or the end of its batch did."""
        made = self._exchanges
        at = bisect_left(self._numbers, external)
        return self.metadata(exchange, made[self._numbers[at]]) if at < len(self._numbers) else {}

    @cached_property
    def _numbers(self) -> list[int]:
        return sorted(self._exchanges)

    def metadata(self, exchange: Exchange, work: Work) -> dict[str, Any]:
        """Return what the trace says of an exchange, on its kernel and on the call that made it."""
        assert work.meeting is not None
        name = exchange.within or exchange.group
        return metadata(self.form, exchange, name, self.place.groups[name], work.meeting.number)

    # -- the device

    @cached_property
    def _works(self) -> list[Work]:
        """What was launched while the profiler recorded."""
        first, last = self.rank.records.counted
        streams = [self.rank.work[number] for number in sorted(self.rank.work)]
        return [w for stream in streams for w in stream if first < w.correlation <= last]

    def _device(self) -> Iterator[str]:
        for work in self._works:
            device, stream = self._lane(work.stream)
            if work.kind == "graph":
                for at, took, node in work.parts:
                    if node.kind != "wait":
                        start = work.start + at
                        yield self._work(work, node.name, node.kind, start, start + took, node.size)
            elif work.kind in _CATEGORIES:
                name = kernel_name(self.form, work.exchange) if work.exchange is not None else work.name
                yield self._work(work, name, work.kind, work.start, work.end, work.size)
            elif work.kind == "wait" and self.form.syncs and work.event is not None:
                args = (
                    f'"cuda_sync_kind": "Stream Wait Event", "wait_on_stream": {work.event.stream}, '
                    f'"wait_on_cuda_event_record_corr_id": {work.event.correlation}, '
                    f'"wait_on_cuda_event_id": {work.event.correlation % 64}, "stream": {stream}, '
                    f'"correlation": {work.correlation}, "device": {device}, "context": 1'
                )
                until = work.called + 1_500  # CUPTI tells of the call, not of the wait
                yield self._complete("cuda_sync", "Stream Wait Event", device, stream, work.called, until, args)
            if self.form.arrows and self.form.correlations and (work.kind in _CATEGORIES or work.kind == "graph"):
                yield self._arrow("f", work.correlation, device, stream, work.start)
        if self.form.syncs:
            for call in self.rank.records.calls:
                if call.name in _SYNCS:
                    args = (
                        f'"cuda_sync_kind": "{_SYNCS[call.name]}", "stream": -1, "correlation": {call.correlation}, '
                        f'"device": {self.place.device_index}, "context": 1'
                    )
                    device = self.place.device_index
                    yield self._complete("cuda_sync", _SYNCS[call.name], device, 1, call.start, call.end, args)

    def _work(self, work: Work, name: str, kind: str, start: int, end: int, size: int) -> str:
        device, stream = self._lane(work.stream)
        place = f'"device": {device}, "stream": {stream}'
        correlation = f', "correlation": {work.correlation}' if self.form.correlations else ""
        if self.form.hip:
            said = "Dispatch Kernel" if _CATEGORIES[kind] == "kernel" else "Device"
            if kind == "copy":  # ROCm does not tell what memory a copy is from
                said = name.split()[1]
                ends = ["Host" if side == "H" else "Device" for side in (said[0], said[-1])]
                name = f"Memcpy {said} ({' -> '.join(ends)})"
            args = f'{place}{correlation}, "kind": "{said}"'
        else:
            args = f'"External id": {work.external}, ' if work.external else ""
            if _CATEGORIES[kind] == "kernel":
                args += f'"queued": 0, {place}, "context": 1{correlation}, {_SHAPE}'
            else:
                rate = size / max(end - start, 1)
                args += f'{place}, "context": 1{correlation}, "bytes": {size}, "memory bandwidth (GB/s)": {rate:.3f}'
        if work.exchange is not None and self.form.metadata != "none" and work.exchange.kind != "send_recv":
            args += f", {json.dumps(self.metadata(work.exchange, work))[1:-1]}"
        return self._complete(_CATEGORIES[kind], name, device, stream, start, end, args)

    def _annotations(self) -> Iterator[str]:
        """Return the host's ranges as Kineto draws them on a stream: from the first to the last that they launched."""
        if not self.form.gpu_annotations:
            return
        names = {c.external: c.name for c in self.rank.records.calls if c.category == "user_annotation"}
        spans: dict[tuple[int, int], tuple[int, int]] = {}
        for work in self._works:
            if work.kind in _CATEGORIES and work.annotation in names:
                key = (work.annotation, work.stream)
                start, end = spans.get(key, (work.start, work.end))
                spans[key] = min(start, work.start), max(end, work.end)
        for (external, number), (start, end) in spans.items():
            device, stream = self._lane(number)
            args = f'"External id": {external}'
            yield self._complete("gpu_user_annotation", names[external], device, stream, start - 1, end + 1, args)
