"""What calls, copies, kernels, links and clocks cost on the simulated machines, and where each number comes from.

All times are nanoseconds. Where a trace is named, it is Holistic Trace Analysis's tests/data/ns_resolution_trace: a
ResNet on a V100, whose device lags its host by 70 ms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

US = 1_000
MS = 1_000_000
MB = 1_000_000

# A stream takes so many launches before the next one blocks, and each stream has its own queue:
# forums.developer.nvidia.com/t/68937 ("CUDA stream are blocked when launch lots of kernels"). The trace says 1,024 to
# within one: its host steps follow from its first one with that number of kernels, copies and sets, and of no events
# (tests/simulator/test_reference.py).
QUEUE_LENGTH = 1_024


@dataclass(frozen=True)
class Host:
    """What a call costs the thread that makes it, ns.

    The calls' lengths are the medians of the V100 trace; what operators take of Python is an assumption.
    """

    launch: int = 5_000  # cudaLaunchKernel: 5.2 µs in the trace, 4 to 5 µs in the thread named above
    graph_launch: int = 15_000  # cudaGraphLaunch: 15 µs in HolisticTraceAnalysis's negative_queue_length trace
    copy_call: int = 4_600  # cudaMemcpyAsync
    set_call: int = 3_500  # cudaMemsetAsync
    event_call: int = 1_000  # cudaEventRecord
    wait_call: int = 1_400  # cudaStreamWaitEvent
    query_call: int = 600  # cudaEventQuery
    sync_call: int = 3_000  # cudaStreamSynchronize of an idle stream; 2 to 4 µs in the DLRM traces on A100
    wake: int = 4_000  # from the end of the work that a thread waits for until that thread runs
    before_op: int = 4_000  # Python and the dispatcher until an operator launches: with the launch, some 10 µs
    after_op: int = 1_500
    backward_op: int = 3_000  # the autograd engine needs no Python
    # Operators that launch nothing in each operator of a layer (views, empty tensors): a part of its time, with
    # what the profiler adds for each. In recordings of torch 2.11 there are 1.5 to 4.9 operators for each call of the
    # runtime in forward passes, 2.3 to 5.7 in backward passes, the more the smaller the layers.
    views: int = 0
    jitter: float = 0.12  # standard deviation of the logarithm of one call's cost
    step_jitter: float = 0.02  # of what all calls of a step have in common


@dataclass(frozen=True)
class Device:
    """One kind of GPU. Rates are the makers' data sheets', dense; peaks in FLOP/s, bandwidth in bytes/s."""

    name: str
    memory_bytes: int
    capability: tuple[int, int]
    sms: int
    peaks: Mapping[str, float]  # by element type; "tf32" where there is one
    bandwidth: float
    link: float  # bytes/s that one GPU sends to its neighbours at once (NVLink, Infinity Fabric), one direction
    host_link: float = 24e9  # PCIe 4.0 × 16 in practice
    max_clock_mhz: int = 1_410
    power_w: int = 400
    platform: str = "cuda"
    # From the end of a launching call until an idle device begins: 2.2 µs is the shortest in the trace.
    launch_latency: int = 2_500
    kernel_gap: int = 900  # between two kernels queued in one stream: 0.8 µs is the median in the trace
    graph_gap: int = 900  # between two nodes of a graph: an assumption, the same as between two launches
    wait_latency: int = 1_500  # from an event of another stream until the stream that waits for it goes on
    jitter: float = 0.01
    step_jitter: float = 0.003
    # Assumptions: of the peak that a large matrix product reaches, of the bandwidth that an elementwise kernel does.
    efficiency: float = 0.62
    memory_efficiency: float = 0.80
    least_kernel: int = 2_200  # an empty kernel's length


# Data sheets: V100 SXM2, A100 SXM4 80 GB, H100 SXM5, MI300X.
V100 = Device(
    "Tesla V100-SXM2-32GB", 34_079_637_504, (7, 0), 80,
    {"float16": 125e12, "float32": 15.7e12}, 0.9e12, 150e9, host_link=12e9, max_clock_mhz=1_530, power_w=300,
)  # fmt: skip
A100 = Device(
    "NVIDIA A100-SXM4-80GB", 84_990_623_744, (8, 0), 108,
    {"float16": 312e12, "bfloat16": 312e12, "tf32": 156e12, "float32": 19.5e12}, 2.039e12, 300e9,
)  # fmt: skip
H100 = Device(
    "NVIDIA H100 80GB HBM3", 84_920_000_000, (9, 0), 132,
    {"float16": 989e12, "bfloat16": 989e12, "tf32": 494e12, "float32": 67e12}, 3.35e12, 450e9,
    host_link=50e9, max_clock_mhz=1_980, power_w=700, efficiency=0.55,
)  # fmt: skip
MI300X = Device(
    "AMD Instinct MI300X", 206_141_652_992, (9, 4), 304,
    {"float16": 1307e12, "bfloat16": 1307e12, "tf32": 653e12, "float32": 163.4e12}, 5.3e12, 448e9,
    host_link=50e9, max_clock_mhz=2_100, power_w=750, platform="rocm", efficiency=0.45,
    launch_latency=6_000, kernel_gap=2_500, wait_latency=6_000,
)  # fmt: skip

DEVICES: Mapping[str, Device] = {"V100": V100, "A100": A100, "H100": H100, "MI300X": MI300X}

# What copying from pageable memory reaches of what pinned memory does: 3.7 GB/s against 12 GB/s on PCIe 3.0 in
# facebookresearch/param's resnet_kineto trace (RTX 2080 Ti).
PAGEABLE_SHARE = 0.31
PINNED_COPY_START = 1_300  # ns that a copy takes for its first byte: 1.3 µs for 256 bytes in the trace


@dataclass(frozen=True)
class Link:
    """What collectives run over: ns to start one, and bytes/s of one rank's bus bandwidth (nccl-tests' busbw)."""

    start: int = 18_000
    hop: int = 2_000  # for every further rank
    bandwidth: float = 200e9


# Part of the bytes that each rank moves over its link, as nccl-tests counts them (doc/PERFORMANCE.md).
def bus_factor(kind: str, ranks: int) -> float:
    """Return the bytes that cross a rank's link for each byte of a collective over so many ranks."""
    if kind in ("send", "recv", "send_recv", "broadcast", "reduce"):  # both ways at once take no longer than one
        return 1.0
    return (2.0 if kind == "all_reduce" else 1.0) * (ranks - 1) / ranks


def transfer_ns(kind: str, size: int, ranks: int, link: Link) -> int:
    """Return how long a collective takes once all its ranks are there: the alpha-beta model."""
    return round(link.start + link.hop * (ranks - 1) + bus_factor(kind, ranks) * size / link.bandwidth * 1e9)


# What a busy GPU takes of its limit at its highest clock (as the logs have it), and how much of that switches: the rest
# leaks, or is the memory's. Switching takes c·f·V²; the voltage falls with the clock until it is at its least.
BUSY = 0.8
_SWITCHING = 0.7
_LEAST_VOLTAGE = 0.75  # of that at the highest clock


def power_w(device: Device, clock: float) -> float:
    """Return what a busy GPU takes at a share of its highest clock, W."""
    voltage = max(clock, _LEAST_VOLTAGE)
    return BUSY * device.power_w * (1 - _SWITCHING + _SWITCHING * clock * voltage**2)
