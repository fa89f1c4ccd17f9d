"""What one rank does in a step, as data: the instructions that its host executes one after the other.

Times are nanoseconds before jitter. `key` names an instruction's place in the model: the same key of the same rank and
step always draws the same jitter, so that a job and its fixed twin differ in nothing but the fix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias
from zlib import crc32

COMPUTE = 7  # CUDA's default stream, as CUPTI numbers it
EXCHANGE = 20  # NCCL's
SIDE = 24  # a stream that copies batches ahead
APART = 1_000  # what tells the streams of a process's second device from those of its first

MAIN, AUTOGRAD = 0, 1  # threads

Args: TypeAlias = Mapping[str, Any]


def key_of(*names: object) -> int:
    """Return the key of an instruction: the same whatever else the program holds."""
    return crc32(".".join(map(str, names)).encode()) % 65_536


@dataclass(frozen=True)
class Kernel:
    """Work of a device: kind is kernel, set or copy (then name says from where to where)."""

    name: str
    ns: int
    kind: str = "kernel"
    size: int = 0  # bytes of a copy or set


@dataclass(frozen=True)
class Function:
    """One operator of the model: names from the outermost in, kernels, and what its backward pass runs."""

    name: str
    operator: str
    kernels: tuple[Kernel, ...]
    backward: tuple[tuple[str, Kernel], ...]  # operator and kernel, in order
    node: str  # the autograd engine's
    parameters: int = 0
    outer: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    dtype: str = "bfloat16"


@dataclass(frozen=True)
class Operator:
    """An operator, or several nested ones, outermost first; the innermost launches its kernels in turn."""

    names: tuple[str, ...]
    kernels: tuple[Kernel, ...]
    key: int
    before: int
    after: int
    stream: int = COMPUTE
    args: Args | None = None
    call: str = "cudaLaunchKernel"
    views: int = 0  # operators within that launch nothing


@dataclass(frozen=True)
class Begin:
    """Open a named range or operator, and spend `ns` in it before what follows.

    category: cpu_op, user_annotation, or module: the range of a module, which a trace shows as an operator.
    """

    name: str
    ns: int = 0
    key: int = 0
    category: str = "cpu_op"
    args: Args | None = None


@dataclass(frozen=True)
class End:
    """Close the innermost open range, or the one of a name, after `ns`."""

    ns: int = 0
    key: int = 0
    name: str = ""


@dataclass(frozen=True)
class Spend:
    """Let the training thread do something that no trace shows. what: python, sleep, search, …"""

    ns: int
    what: str = "python"
    key: int = 0


@dataclass(frozen=True)
class Record:
    """cudaEventRecord: the event completes when the stream has done all that was launched before."""

    event: str
    stream: int = COMPUTE


@dataclass(frozen=True)
class WaitFor:
    """cudaStreamWaitEvent: what is launched into the stream from now on waits for the event."""

    event: str
    stream: int = COMPUTE


@dataclass(frozen=True)
class Synchronize:
    """Wait on the host for a stream ("stream"), an event ("event") or all of the device ("device")."""

    scope: str = "stream"
    stream: int = COMPUTE
    event: str = ""


@dataclass(frozen=True)
class Copy:
    """cudaMemcpyAsync. direction: HtoD, DtoH, DtoD. memory of the host's side: pageable, pinned.

    From pageable memory the call waits for the stream, then copies through a pinned buffer, and returns when all is
    staged; into pageable memory it returns when the copy is done (CUDA Runtime API, "API synchronization behavior").
    """

    direction: str
    size: int
    memory: str = "pinned"
    stream: int = COMPUTE
    key: int = 0


@dataclass(frozen=True)
class Exchange:
    """One rank's part in a collective or point-to-point exchange: an NCCL kernel on a stream.

    It begins on each rank when its stream reaches it, and ends on all when the last has begun and the bytes are over.
    """

    kind: str  # all_reduce, all_gather, reduce_scatter, broadcast, all_to_all, send, recv
    group: str
    elements: int  # of what is counted: an all-gather's output, a reduce-scatter's input
    dtype: str = "float32"
    stream: int = EXCHANGE
    key: int = 0
    peer: int = -1  # of a send or a recv: the other rank
    within: str = ""  # the process group that the trace names, where it is another
    give: tuple[int, ...] = ()  # of an all-to-all of unequal pieces: the rows for each rank, and from each
    take: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """Bytes."""
        return self.elements * WIDTHS[self.dtype]


WIDTHS: Mapping[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int32": 4, "uint8": 1}


@dataclass(frozen=True)
class Graph:
    """cudaGraphLaunch: one call, one correlation id, many kernels. A node may wait: kind "wait", for `ns`."""

    nodes: tuple[Kernel, ...]
    key: int = 0
    stream: int = COMPUTE


@dataclass(frozen=True)
class HostFunction:
    """cudaLaunchHostFunc: the stream stands still until a thread of the driver has run a function of `ns`."""

    ns: int
    key: int = 0
    stream: int = COMPUTE


@dataclass(frozen=True)
class Allocate:
    """cudaMalloc or cudaFree for `ns`; `waits`: it waits for the device first, as cudaFree does."""

    call: str
    ns: int
    waits: bool = False
    key: int = 0


@dataclass(frozen=True)
class Fetch:
    """next() on a loader: the training one, or another whose batches are always ready (HIDDEN)."""

    loader: int = 0


HIDDEN = -1
HIDDEN_NS = 200_000  # that a batch takes to receive


@dataclass(frozen=True)
class Stall:
    """What holds the thread up and dlprof's recorder notes: garbage_collection, checkpoint, compilation."""

    kind: str
    ns: int
    key: int = 0
    path: str = ""
    reason: str = ""
    blocks: bool = False  # waits for the device first, as reading a state does


@dataclass(frozen=True)
class Thread:
    """Go on in another thread, while the first one waits."""

    number: int


@dataclass(frozen=True)
class Phase:
    """Enter ("forward", "backward", "optimizer") or leave ("") a part of the step that the recorder times.

    "replay" is left at once: a captured graph follows, which holds all three.
    """

    name: str


@dataclass(frozen=True)
class Line:
    """Note which line of the script the training thread comes to, by its name in script.py."""

    name: str


@dataclass(frozen=True)
class Belongs:
    """Note what the work that is launched from now on is for: a module's path, and a part of the step."""

    path: str
    part: str


@dataclass(frozen=True)
class Chunk:
    """Begin or end ("") a pipeline stage's work on a micro-batch: events around it on the compute stream."""

    action: str
    stage: int = 0
    microbatch: int = 0


Instruction: TypeAlias = (
    Operator | Begin | End | Spend | Record | WaitFor | Synchronize | Copy | Exchange | Graph | HostFunction
    | Allocate | Fetch | Stall | Thread | Phase | Chunk | Belongs | Line
)  # fmt: skip

Program: TypeAlias = tuple[Instruction, ...]


@dataclass(frozen=True)
class Step:
    """One step of one rank. kind: train, validation, other (it only fetches). `first`, `last`: of an epoch."""

    program: Program
    kind: str = "train"
    first: bool = False
    last: bool = False
