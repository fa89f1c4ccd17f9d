"""The figures of a result that are structs of their own.

Where in the model the time goes, groups of ranks alike, a device's work against its floor, what memory is made of,
profiles and logs of other tools, and throughput.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class Module(msgspec.Struct, frozen=True):
    """One module with all modules inside it, or a repeated layer; in a mean traced step, mean of the ranks.

    `path`: "encoder.layer.*" for identical `modules`; "" is the model itself. `kind`: its class; "": a container that
    is never called. `depth`: 0 for the outermost; deeper rows after it are inside it. `ns`: its time of the step,
    `share` of it; `own_ns`: in none of the rows inside. `host_ns`: time that threads spend in it. `device_ns`: of all
    device work that it launched, overlapped or not. `rank`: the rank with the longest time, `rank_ns`. `slowest`: of a
    repeated layer, the module with a clearly longer time (`slowest_ns`) than the median one (`typical_ns`); "": none.
    `compiled`: torch.compile compiled it as one region. `fused`: the modules of its compiled kernels are known; a
    kernel that several modules share counts to the module around them. None: not known.
    """

    path: str
    kind: str
    depth: int
    modules: int
    calls: float
    ns: float
    own_ns: float
    share: float
    forward_ns: float
    recompute_ns: float
    backward_ns: float
    communication_ns: float
    host_ns: float
    device_ns: float
    rank: int
    rank_ns: float
    slowest: str = ""
    slowest_ns: float = 0.0
    typical_ns: float = 0.0
    compiled: bool = False
    fused: bool = False
    flops: float | None = None
    flops_per_s: float | None = None  # while it computes
    mfu: float | None = None  # the same over the device's peak
    copied_bytes: float | None = None
    moved_bytes: float | None = None  # that its operators read and write, each tensor whole
    parameter_bytes: float | None = None  # that a rank has of it
    held_bytes: float | None = None  # of parameters, gradients, the optimizer's state and activations


class Outside(msgspec.Struct, frozen=True):
    """What no module does: `part` of the step.

    optimizer; input (the loader); forward, backward and communication (of what is no module, as a loss that is a
    function); graphs (CUDA graphs); other; idle (the device does nothing).
    """

    part: str
    ns: float
    share: float


class Modules(msgspec.Struct, frozen=True):
    """The tree of the model's modules, each above those inside it, the largest first; and what is outside of them.

    The outermost modules and `outside` make up the mean traced step, `total_ns`, of `ranks`. `on_device`: time is that
    of the device, else that of the training thread. `naming_ns`: what a traced step takes to name them; None: unknown.
    `why`: no module is known.
    """

    on_device: bool = False
    total_ns: float = 0.0
    rows: tuple[Module, ...] = ()
    outside: tuple[Outside, ...] = ()
    ranks: int = 0
    naming_ns: float | None = None
    why: str = ""


class InModule(msgspec.Struct, frozen=True):
    """How much of what a finding is about is in a module: `share`. `path`: as of Module; "" and no class: outside."""

    path: str
    kind: str
    share: float


# Of a run of so many ranks nobody compares each with each.
MANY = 16


class Member(msgspec.Struct, frozen=True):
    """One rank of MANY or more: its host, the group of ranks that do the same, and what it does unlike them.

    `category`: the part of the mean step in which it differs most, "" where it is like its group; of that it spends
    `ns`, and the median of its group `usual_ns`, without waiting for others.
    """

    rank: int
    host: str
    group: str
    category: str = ""
    ns: float = 0.0
    usual_ns: float = 0.0


class WorkKind(msgspec.Struct, frozen=True):
    """One kind of a device's work in a mean traced step, mean of the ranks; None: not known.

    `floor_ns`: the least that the device needs for it, as far as that is known of the kind alone: of `shared_ns` of
    its time it is known only together with other kinds. `flops`, `bytes`: what it computes, and reads and writes.
    """

    kind: str
    kernels: float
    ns: float
    floor_ns: float | None = None
    shared_ns: float = 0.0
    flops: float | None = None
    bytes: float | None = None


class LineWork(msgspec.Struct, frozen=True):
    """What the operators that a line of the script calls take of a mean traced step, mean of the ranks.

    `ns`: with their part of the backward pass, `backward_ns`; on a device of the kernels that they launch. `share`: of
    what all operators take. `source`: the line's text.
    """

    file: str
    line: int
    function: str
    source: str
    calls: float
    ns: float
    backward_ns: float
    share: float


class DeviceWork(msgspec.Struct, frozen=True):
    """What a device's kernels, fills and copies within its memory take of a mean traced step, by kind, longest first.

    `floor_ns` is a bound and no prediction: the sum over operators of FLOPs ÷ peak or bytes ÷ bandwidth, whichever is
    longer, at the rates of the data sheet; what is not known counts as long as it takes. `shared_floor_ns` of it is
    for all `shared_ns` together. `fused_floor_ns`: the same if each chain of elementwise operators were one kernel
    that reads and writes once. None: not known, for the floor with `why`.
    """

    rows: tuple[WorkKind, ...]
    floor_ns: float | None = None
    shared_floor_ns: float = 0.0
    fused_floor_ns: float | None = None
    why: str = ""

    @property
    def ns(self) -> float:
        """The time of all kinds."""
        return sum(row.ns for row in self.rows)

    def above_ns(self, row: WorkKind) -> float:
        """Return how far a kind is above its floor; at the least, where it shares one."""
        return row.ns - (row.floor_ns or 0.0) - min(row.shared_ns, self.shared_floor_ns)


class MemoryPeak(msgspec.Struct, frozen=True):
    """The peak of allocated memory on one rank's device, within what a memory snapshot covers.

    `site`: the line with most of it; `whole`: the snapshot has the events before the peak.
    """

    rank: int
    device: int
    bytes: float
    reserved_bytes: float
    site: str = ""
    site_bytes: float = 0.0
    whole: bool = True


class MemoryPart(msgspec.Struct, frozen=True):
    """One part of a device's memory at the peak.

    `known`: the source: counted (tensor by tensor), allocator, driver, process (their own counters), or difference
    (between these).
    """

    part: str
    bytes: float
    known: str


class DeviceMemory(msgspec.Struct, frozen=True):
    """One rank's memory on one device at the peak; `total_bytes`: the device's memory, None: not known.

    `moment`: when the peak is: backward (a backward pass begins), gradients (the last one has ended).
    """

    rank: int
    device: str
    parts: tuple[MemoryPart, ...]
    moment: str = ""
    total_bytes: float | None = None

    @property
    def bytes(self) -> float:
        """All of it."""
        return sum(part.bytes for part in self.parts)


class ModuleMemory(msgspec.Struct, frozen=True):
    """The memory of identical modules together, with the modules inside them; `module`: their folded path."""

    module: str
    kind: str
    modules: int  # that fold into this path
    bytes: float
    parameter: float = 0.0
    gradient: float = 0.0
    optimizer: float = 0.0
    activation: float = 0.0
    other: float = 0.0


class MemoryChange(msgspec.Struct, frozen=True):
    """The predicted peak with one change, and the mean steady step for the present number of samples.

    `change`: batch (`value`: times the present one), autocast, 16_bits, checkpoint (the modules), checkpoint_only (one
    of several lists), fused_attention, shard (ZeRO's stage / the ranks; 3: FSDP), 8_bit, offload, microbatches,
    schedule. `times`: the largest batch that then fits ÷ the present one. `least_bytes` and `most_bytes`: of the peak,
    for any size of the allocator's cache; None: not known, or there is no cache. `then_ns` None: not known, `why`;
    `bound`: it is at most, or at least, that.
    """

    change: str
    value: str
    then_bytes: float
    times: float | None = None
    then_ns: float | None = None
    bound: Literal["", "most", "least"] = ""
    why: str = ""
    least_bytes: float | None = None
    most_bytes: float | None = None


class Footprint(msgspec.Struct, frozen=True):
    """Memory of each rank's devices, and of the rank with the highest peak its modules and predicted changes."""

    devices: tuple[DeviceMemory, ...]  # at most MOST_RANKS, the highest peaks first
    rank: int
    modules: tuple[ModuleMemory, ...] = ()  # the largest first
    changes: tuple[MemoryChange, ...] = ()
    now_ns: float | None = None  # the mean steady step


class Profile(msgspec.Struct, frozen=True):
    """What the profile of another tool shows on the whole, over the ranks that have it; and its hottest function.

    `unit`: of `total` (samples, ns, bytes). `share`: of the whole, in the function, and for the user's own also in what
    it calls of libraries. `own`: whether the function is the user's. `counted`: whether the tool counts calls, as
    cProfile and line_profiler do, and takes no samples.
    """

    name: str  # of the file
    tool: str
    unit: str
    total: float
    function: str = ""
    file: str = ""
    line: int = 0
    share: float = 0.0
    own: bool = False
    counted: bool = False


class GpuLog(msgspec.Struct, frozen=True):
    """What a log says of one GPU: means, the most of clock, memory and temperature; None: not logged.

    `at`: "run" where the readings are of the run's time, "log" where they are all that the log has. `held_by`: what
    holds its clock down (heat, power_brake, hardware, set, locked, limit), "": nothing, or not known.
    """

    gpu: str
    readings: int
    seconds: float
    at: Literal["run", "log"] = "log"
    busy_share: float | None = None
    idle_share: float | None = None  # of the readings
    power_w: float | None = None
    power_limit_w: float | None = None
    sm_clock_mhz: float | None = None
    sm_clock_max_mhz: float | None = None
    temperature_c: float | None = None
    memory_used_bytes: float | None = None
    memory_total_bytes: float | None = None
    held_by: str = ""
    clock_lost: float = 0.0  # share of the clock
    lacks: str = ""  # options of the tool that would bring what it lacks


class Cost(msgspec.Struct, frozen=True):
    """What a piece of training takes at the measured speed; None: the job has no GPUs, or their power is not known."""

    seconds: float
    gpu_hours: float | None = None
    joules: float | None = None


class Throughput(msgspec.Struct, frozen=True):
    """Samples and tokens of a mean steady step, and in a second; None: not known.

    `source`: what counted them: dlprof.step() of the script, the batches of its loaders, or the model's input. `of`:
    the job, or its mean rank where it is not known whether ranks train on the same batches (`why`). `gpus`: of the
    job. `power_w`: the mean of all of these together while training was steady. `epoch_samples`: what the training set
    holds; `epoch_s`: how long one pass over it takes, with validation and all else between the steps.
    """

    samples_per_s: float | None
    tokens_per_s: float | None
    samples_per_step: float | None
    source: Literal["script", "loader", "model"]
    tokens_per_step: float | None = None
    of: Literal["job", "rank"] = "job"
    why: str = ""
    gpus: int | None = None
    power_w: float | None = None
    epoch_samples: int | None = None
    epoch_s: float | None = None

    def cost(self, seconds: float) -> Cost:
        """Return what so many seconds of training take of GPUs and energy."""
        hours = None if self.gpus is None else self.gpus * seconds / 3600
        return Cost(seconds, hours, None if self.power_w is None else self.power_w * seconds)

    def of_samples(self, n: float) -> Cost | None:
        """Return what training on n samples takes; None: how many a second is not known."""
        return self.cost(n / self.samples_per_s) if self.samples_per_s else None

    def of_tokens(self, n: float) -> Cost | None:
        """Return the same for n tokens."""
        return self.cost(n / self.tokens_per_s) if self.tokens_per_s else None

    @property
    def epoch(self) -> Cost | None:
        """What one pass over the training set takes."""
        return self.cost(self.epoch_s) if self.epoch_s else None
