"""Makes torch-profiler traces by hand for any test: events from a few words each, files in every shape that exists.

All times are whole nanoseconds from the trace's base, BASE_NS. An event is a plain dict as it stands in the file, so a
test may change any field before writing it.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any, Literal

Event = dict[str, Any]
Layout = Literal["kineto", "compact", "pretty", "list"]

# Kineto's bases are whole multiples of three months (7,889,238 s) since 1970.
BASE_NS = 1735632360000000000
PROCESS = 4000
MAIN = 4000  # the training thread
AUTOGRAD = 4100  # the thread that runs the backward pass


def event(cat: str, name: str, start: int, dur: int, pid: Any = PROCESS, tid: Any = MAIN, **args: Any) -> Event:
    """Return one complete event; keyword names become args with their underscores as they are."""
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "pid": pid,
        "tid": tid,
        "ts": start / 1000,
        "dur": dur / 1000,
        "args": args,
    }


def op(name: str, start: int, dur: int, tid: Any = MAIN, **args: Any) -> Event:
    """Return an operator on the host, e.g. aten::mm."""
    return event("cpu_op", name, start, dur, tid=tid, **args)


def annotation(name: str, start: int, dur: int, tid: Any = MAIN, **args: Any) -> Event:
    """Return a named range on the host."""
    return event("user_annotation", name, start, dur, tid=tid, **args)


def step(number: int, start: int, dur: int) -> Event:
    """Return the profiler's mark of one step."""
    return annotation(f"ProfilerStep#{number}", start, dur)


def fetch(start: int, dur: int, loader: str = "_MultiProcessingDataLoaderIter") -> Event:
    """Return one next() of a DataLoader."""
    return annotation(f"enumerate(DataLoader)#{loader}.__next__", start, dur)


def call(name: str, start: int, dur: int, correlation: int, tid: Any = MAIN) -> Event:
    """Return a call of the device's runtime, e.g. cudaLaunchKernel."""
    return event("cuda_runtime", name, start, dur, tid=tid, cbid=211, correlation=correlation)


def on_device(cat: str, name: str, start: int, dur: int, stream: Any, device: int, **args: Any) -> Event:
    """Return an event on a device's stream."""
    return event(cat, name, start, dur, pid=device, tid=stream, device=device, stream=stream, **args)


def kernel(name: str, start: int, dur: int, correlation: int = 0, stream: Any = 7, device: int = 0) -> Event:
    """Return a kernel on a stream."""
    return on_device("kernel", name, start, dur, stream, device, correlation=correlation)


def launched(name: str, at: int, start: int, dur: int, correlation: int, stream: int = 7) -> list[Event]:
    """Return a launch of 5 µs at `at` and the kernel that it launched."""
    return [call("cudaLaunchKernel", at, 5_000, correlation), kernel(name, start, dur, correlation, stream)]


def copy(
    start: int, dur: int, size: int, kinds: str = "HtoD (Pageable -> Device)", correlation: int = 0, stream: int = 7
) -> Event:
    """Return a copy of `size` bytes, e.g. of kinds "DtoH (Device -> Pinned)"."""
    return on_device(
        "gpu_memcpy", f"Memcpy {kinds}", start, dur, stream, 0, correlation=correlation, bytes=size, context=1
    )


def clear(start: int, dur: int, size: int, stream: int = 7) -> Event:
    """Return a memset."""
    return on_device("gpu_memset", "Memset (Device)", start, dur, stream, 0, bytes=size)


def collective(
    start: int,
    dur: int,
    elements: int,
    name: str = "allreduce",
    group: str = "0",
    ranks: tuple[int, ...] = (0, 1),
    kernel_name: str = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    correlation: int = 0,
    stream: int = 21,
) -> Event:
    """Return an NCCL kernel with the metadata that torch writes since 2.4."""
    grown, shrunk = name.startswith(("_allgather", "all_gather")), "reduce_scatter" in name
    made = kernel(kernel_name, start, dur, correlation, stream)
    made["args"] |= {
        "Collective name": name,
        "In msg nelems": elements if not grown else elements // len(ranks),
        "Out msg nelems": elements if not shrunk else elements // len(ranks),
        "Group size": len(ranks),
        "dtype": "Float",
        "Process Group Name": group,
        "Process Group Description": "default_pg" if group == "0" else f"mesh_{group}",
        "Process Group Ranks": str(list(ranks)),
    }
    return made


def sent(
    name: str,
    peer: int,
    start: int,
    dur: int,
    elements: int = 1_000,
    group: str = "0",
    ranks: tuple[int, ...] = (0, 1),
    told: bool = True,
    **where: Any,
) -> Event:
    """Return an NCCL kernel of "send" to or a "recv" from a peer, which torch writes there where it knows (`told`)."""
    made = collective(start, dur, elements, name, group, ranks, "ncclDevKernel_SendRecv(ncclDevKernelArgs)", **where)
    if told:
        made["args"]["Dst Rank" if name == "send" else "Src Rank"] = peer
    return made


def trace(
    *events: Event | list[Event],
    rank: int | None = 0,
    world_size: int = 2,
    base_ns: int | None = BASE_NS,
    backend: str = "nccl",
    device: str = "NVIDIA H100 80GB HBM3",
    host: str = "node-1",
    **keys: Any,
) -> dict[str, Any]:
    """Return a trace as torch 2.13 writes it: its base and its process groups stand before the events."""
    flat: list[Event] = []
    for one in events:
        flat += one if isinstance(one, list) else [one]
    header: dict[str, Any] = {"schemaVersion": 1, "deviceProperties": []}
    if device:
        header["deviceProperties"] = [{"id": 0, "name": device, "totalGlobalMem": 85_000_000_000}]
        if "H100" in device:  # how many another device has tells what it can do, so nobody makes it up here
            header["deviceProperties"][0]["numSms"] = 132
    if rank is not None:
        group = {"pg_name": "0", "pg_desc": "default_pg", "pg_size": world_size, "ranks": list(range(world_size))}
        header["distributedInfo"] = {
            "backend": backend,
            "rank": rank,
            "world_size": world_size,
            "pg_count": 1,
            "pg_config": [group],
        }
    header["host_name"] = host
    header["displayTimeUnit"] = "ms"
    if base_ns is not None:
        header["baseTimeNanoseconds"] = base_ns
    return {**header, **keys, "traceEvents": flat, "traceName": "trace.json"}


def dump(made: dict[str, Any], layout: Layout = "kineto") -> bytes:
    """Return a trace as a file's bytes: as Kineto lays it out, compact, indented, or its bare list of events."""
    if layout == "compact":
        return json.dumps(made, separators=(",", ":")).encode()
    if layout == "pretty":
        return json.dumps(made, indent=4).encode()
    if layout == "list":
        return json.dumps(made["traceEvents"]).encode()
    parts = [f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in made.items() if k not in ("traceEvents", "traceName")]
    events = ",\n".join(
        "  {\n    "
        + json.dumps({k: v for k, v in e.items() if k != "args"})[1:-1]
        # Kineto leaves args out where there are none, and breaks the line before and within them.
        + (',\n    "args": {\n      ' + json.dumps(e["args"])[1:-1] + "\n    }" if e.get("args") else "")
        + "\n  }"
        for e in made["traceEvents"]
    )
    parts.append(f'  "traceEvents": [\n{events}\n  ]')
    parts.append(f'  "traceName": {json.dumps(made.get("traceName", ""))}')
    return ("\n{\n" + ",\n".join(parts) + "\n}\n").encode()


def write(path: Path, content: dict[str, Any] | bytes, layout: Layout = "kineto", cut: int | None = None) -> Path:
    """Write a trace, packed where the name ends in .gz, and cut the file off after `cut` bytes; give the path."""
    data = content if isinstance(content, bytes) else dump(content, layout)
    if path.suffix == ".gz":
        data = gzip.compress(data, mtime=0)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data[:cut])
    return path


def training(steps: int = 3, **keys: Any) -> dict[str, Any]:
    """Return a small whole training job on one device: each step of 1 ms fetches, copies, computes and reduces."""
    events: list[Event | list[Event]] = []
    for n in range(steps):
        t, c = 10_000_000 + n * 1_000_000, 1 + 10 * n
        events += [
            step(n, t, 990_000),
            fetch(t + 5_000, 100_000),
            op("aten::copy_", t + 110_000, 40_000),
            call("cudaMemcpyAsync", t + 115_000, 30_000, c),
            copy(t + 120_000, 25_000, 4_000_000, correlation=c),
            op("aten::mm", t + 160_000, 30_000),
            launched("sm90_gemm", t + 170_000, t + 180_000, 300_000, c + 1),
            op("aten::mm_backward", t + 200_000, 30_000, tid=AUTOGRAD),
            launched("sm90_gemm_backward", t + 210_000, t + 480_000, 200_000, c + 2),
            op("c10d::allreduce_", t + 240_000, 20_000, tid=AUTOGRAD),
            call("cudaLaunchKernelExC", t + 245_000, 5_000, c + 3, tid=AUTOGRAD),
            collective(t + 600_000, 200_000, 1_000_000, correlation=c + 3),
            annotation("Optimizer.step#SGD.step", t + 300_000, 80_000),
            launched("multi_tensor_apply", t + 310_000, t + 810_000, 50_000, c + 4),
        ]
    return trace(*events, **keys)
