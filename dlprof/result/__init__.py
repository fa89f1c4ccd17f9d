"""The outcomes of the rules, and all else that a report may know: structs. SAVING defines what a saving is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from dlprof.result.figures import (
    DeviceWork,
    Footprint,
    GpuLog,
    InModule,
    LineWork,
    Member,
    Modules,
    Profile,
    Throughput,
)
from dlprof.result.figures import MemoryPeak as MemoryPeak
from dlprof.result.scale import Scaling
from dlprof.result.tried import Tried

# The exclusive parts of a step, in order of precedence, as the report draws them.
CATEGORIES = (
    "computation",
    "communication",
    "copy",
    "input_wait",
    "pipeline_bubble",
    "checkpoint",
    "validation",
    "garbage_collection",
    "compilation",
    "periodic_work",
    "optimizer_host",
    "host",
    "launch_latency",
    "queued_wait",
    "other",
)

SAVING = (
    "How much shorter the mean steady step of this run would be without this bottleneck. "
    "Each is estimated alone; savings overlap and do not add up. Validation and restarting loader workers lie outside "
    "the steady steps: what they cost is divided by the number of training steps."
)

QUANTILES = (0.05, 0.5, 0.95, 1.0)  # of a rank's steady steps, next to their mean

# Operators and kernels that are kept, the lightest far below a hundredth of a step; ranks with costs; lengths of steps.
MOST_WORK, MOST_RANKS, MOST_LENGTHS = 200, 512, 400

# What a finding is about. step: the mean steady step. job: time outside the steady steps; its saving is that time
# spread over the training steps, its share and speed-up are the training loop's. run: time that the loop does
# not hold either, as that of starting; its share and speed-up are the whole run's. risk: no time is saved, but the job
# may fail. failure: no time is saved, and the job did fail of it, or stands still; it comes before any saving.
Scope = Literal["step", "job", "run", "risk", "failure"]
TIMELESS = ("risk", "failure")
State = Literal["found", "clear", "not_measured", "does_not_apply", "error"]
# So begins the title of a panel with the time of each line of a function (--lines).
BY_LINE = "Line by line"

Shape = Literal["table", "bars", "lines", "areas", "timeline", "flame"]


class Panel(msgspec.Struct, frozen=True):
    """One piece of evidence, as data in one of six shapes; a renderer draws it, a rule never does.

    table: `columns` are headers, `rows` are rows of cells (text or number).
    bars: `rows` are [label, value] pairs, or [label, value, category]; `unit` is the value's.
    lines: `columns` are [x, y1, y2, ...] names, `rows` are points; `unit` is that of every y.
    areas: the same, stacked; the y columns are categories.
    timeline: `rows` are [lane, start_ns, dur_ns, name, category]; times from the panel's own zero.
    flame: `rows` are [depth, start, width, name, category]: a frame is below its caller; start and width in `unit`.

    Lines and areas whose first column is time_ns share that axis, from the run's beginning. `marks` are points on it:
    [x, label, category]. `steps`: the number of each row's step. `arrows` lead from one lane of a timeline to another:
    [at_ns, from, to, label].
    """

    shape: Shape
    title: str
    rows: tuple[tuple[Any, ...], ...]
    columns: tuple[str, ...] = ()
    unit: str = ""
    note: str = ""
    marks: tuple[tuple[float, str, str], ...] = ()
    steps: tuple[int, ...] = ()
    arrows: tuple[tuple[float, str, str, str], ...] = ()


class Forecast(msgspec.Struct, frozen=True):
    """What the mean steady step of the run would be, in ns, with a setting at another value, all else as it is."""

    setting: str  # its name in code: num_workers
    value: str
    step_ns: float


Scalar = str | int | float | bool | None


class Setting(msgspec.Struct, frozen=True):
    """A setting that a change sets, under the name that code and the run's facts give it; None: not known.

    An edit of code has the line as its name ("train.py:41"), and as its value what the line is known to be.
    """

    name: str
    now: Scalar = msgspec.field(default=None, name="from")
    to: Scalar = None


def is_line(setting: str) -> bool:
    """Return whether the name of a setting is the line of a file, so that an edit of code is meant."""
    return setting.rpartition(":")[2].isdigit()


class Place(msgspec.Struct, frozen=True):
    """A line of the user's, its file named from the job's working directory; of a library: its own file, `line` 0.

    `share`: of the stacks seen in a phase; None: of a call. `what`: the call's text, or the phase and what was called.
    """

    file: str
    line: int
    function: str = ""
    share: float | None = None
    what: str = ""


class Change(msgspec.Struct, frozen=True):
    """What a user can do: a sentence, with code as `code`, and the settings that it names.

    `numerics`: whether it changes the numbers that the job computes, as another batch size or 16 bits do. `training`:
    whether time is saved only because the job trains otherwise (larger batches, fewer validations or checkpoints), so
    that it cures nothing. `at`: the call that takes the settings, or the line that gives them to it; None: not known.
    `diff`: the edit, "": `no_diff` says why there is none, and what to set instead. `informs`: it gains nothing, but
    the next report can say what does. `peak_bytes`: the memory that the job needs at its peak, without and with it.
    """

    text: str
    settings: tuple[Setting, ...] = ()
    numerics: bool = False
    training: bool = False
    at: Place | None = None
    diff: str = ""
    no_diff: str = ""
    informs: bool = False
    peak_bytes: tuple[float, float] | None = None


def change(text: str, *, numerics: bool = False, training: bool = False, **settings: tuple[Scalar, Scalar]) -> Change:
    """Return a change that sets settings, each from one value to another: `num_workers=(0, 6)`; None: not known.

    `numerics` and `training` as in Change.
    """
    return Change(text, tuple(Setting(name, *values) for name, values in settings.items()), numerics, training)


class RankCost(msgspec.Struct, frozen=True):
    """What a bottleneck costs one rank, ns of the mean steady step."""

    rank: int
    ns: float


class Outcome(msgspec.Struct, frozen=True):
    """The outcome of one rule on one run: found, clear, or, with `why`, not_measured, does_not_apply or error.

    If it is found or clear, `saving_ns`, `share`, `noise_ns` and `by_rank` are what the rule estimated. `training`: all
    of its changes change the training, so that it is reported apart; else those that do are the last of its changes.
    """

    id: str
    state: State
    title: str
    summary: str = ""
    saving_ns: float = 0.0
    share: float = 0.0
    speedup: float = 1.0
    ranks: tuple[int, ...] = ()  # that it costs most
    changes: tuple[Change, ...] = ()
    why: str = ""
    evidence: Panel | None = None
    sure: str = ""
    verdict: str = ""
    manual: str = ""
    scope: Scope = "step"
    noise_ns: float = 0.0
    error_ns: float = 0.0  # nine of ten predicted steps are no further than this from the measured ones; 0: not known
    forecasts: tuple[Forecast, ...] = ()
    lost_share: float | None = None  # of the step, what the bottleneck takes; None: `share`
    at_most: bool = False  # whether the saving is the bottleneck gone, of which the change may give less
    by_rank: tuple[RankCost, ...] = ()  # the MOST_RANKS with the highest cost, by rank; () in format 1
    where: tuple[Place, ...] = ()  # of a finding: calls, then lines that were seen
    modules: tuple[InModule, ...] = ()  # of a finding: those that it is about, the largest share first
    training: bool = False

    @property
    def advice(self) -> tuple[str, ...]:
        """What to change, one sentence a change."""
        return tuple(change.text for change in self.changes)


class RunInfo(msgspec.Struct, frozen=True):
    """Which run this is and how it ended."""

    path: str
    command: tuple[str, ...] = ()
    world_size: int = 1
    ranks: tuple[int, ...] = ()
    missing_ranks: tuple[int, ...] = ()
    hosts: tuple[str, ...] = ()
    device: str = ""
    torch: str = ""
    exit: Mapping[str, int | None] = msgspec.field(default_factory=lambda: {"code": None, "signal": None})
    warnings: tuple[str, ...] = ()


class Window(msgspec.Struct, frozen=True):
    """The steps that the figures are of. `overhead`: mean profiled ÷ mean unprofiled step, None where one is missing.

    `source` is "steps" where the mean is the step log's, "trace" where it is the trace's. `unit` is "step", or "trace"
    where the trace has no step markers and is treated as one step.
    """

    steps: int
    source: Literal["steps", "trace"]
    step_ns: float
    overhead: float | None = None
    unit: Literal["step", "trace"] = "step"
    traced_steps: int = 0
    flops: float | None = None  # what one rank computes in a step, the mean of the ranks; None: not counted
    mfu: float | None = None  # share of the device's peak arithmetic that the steady steps use; None: not known
    noise_ns: float | None = None  # standard error of step_ns, with its drift over the run; None: not known
    lag_ns: float | None = None  # the device's behind the host as a traced step begins, mean of the ranks
    micro_batches: int = 1  # that a step takes one optimizer step for
    throughput: Throughput | None = None  # None: not known
    memory_bytes: float | None = None  # most of any rank's GPU (PyTorch's allocator), else its process; None: not known
    loop: Loop | None = None  # of a trace without step markers; None: nothing recurs
    lengths_ns: tuple[float, ...] = ()  # of steady steps in their order, MOST_LENGTHS drawn at most; the ranks' mean


class Loop(msgspec.Struct, frozen=True):
    """What recurs in a trace without step markers: so many kernels, the same each time, and how long a turn takes.

    `period_ns`: the mean turn, `noise_ns` its standard error, `median_ns` the median one; all are means of the ranks.
    The layers of a model recur, too: it may be less than a step.
    """

    kernels: int
    often: int
    period_ns: float
    median_ns: float
    noise_ns: float


class DeviceTime(msgspec.Struct, frozen=True):
    """Exact partition of one rank's device span: computation + exposed communication + exposed copy + idle = span."""

    rank: int
    span_ns: int
    computation_ns: int
    communication_ns: int
    exposed_communication_ns: int
    copy_ns: int
    exposed_copy_ns: int
    idle_ns: int


class TimePart(msgspec.Struct, frozen=True):
    """One exclusive part of one rank's mean steady step."""

    rank: int
    category: str
    ns: float
    share: float
    noise_ns: float = 0.0  # standard error of ns over the measured steps; 0: not known


class RankStep(msgspec.Struct, frozen=True):
    """One rank's steady steps: number, mean, its standard error (None: not known), and QUANTILES."""

    rank: int
    steps: int
    step_ns: float
    noise_ns: float | None = None
    quantiles_ns: tuple[float, ...] = ()  # (): not known


class Work(msgspec.Struct, frozen=True):
    """What one operator, one kernel of a device, or the ranges of one name take of a mean traced step.

    The mean over the ranks. `ns` is its own time, of ranges with what lies in them; `noise_ns` the standard error over
    the traced steps, 0: not known.
    """

    kind: Literal["operator", "kernel", "range"]
    name: str
    calls: float
    ns: float
    noise_ns: float = 0.0


class Exchange(msgspec.Struct, frozen=True):
    """Collectives of one kind, number of ranks and class of size, of a mean traced step and rank; None: not known."""

    collective: str
    ranks: int
    size: str
    count: float
    transfer_ns: float
    wait_ns: float | None = None
    busbw: float | None = None  # bytes/s


class Blame(msgspec.Struct, frozen=True):
    """How long one rank's communication waits for another rank in the mean steady step, and what makes that one late.

    `category` is what the culprit spends more time on than the waiting rank. Culprit −1: several small ones.
    """

    rank: int
    culprit: int
    category: str
    ns: float
    share: float


class HostPart(msgspec.Struct, frozen=True):
    """What a host does in a step while its device waits for it; `gain_ns`: without it alone, of the mean steady step.

    `part`: "loop" (over parameters, between the phases), "waits" (for the device), "optimizer", "between" (the phases),
    "launches" (of the forward and backward pass). `rule`: whose finding it is. `host_ns`: how long the host is in it.
    """

    part: str
    rule: str
    host_ns: float
    gain_ns: float
    names: str = ""  # a loop's operators


class HostLimited(msgspec.Struct, frozen=True):
    """How a device waits for its host on the rank that gains most without; `gain_ns`: all parts gone together.

    Each part's gain is alone, and they do not add up: without one the host may be late for another.
    """

    rank: int
    gain_ns: float
    parts: tuple[HostPart, ...]  # the largest gain first


class ForeignLoad(msgspec.Struct, frozen=True):
    """What programs outside the job used of a host's cores while training was steady, on the host that felt it most."""

    host: str
    cores: float  # of the host
    used: float  # cores in use
    foreign: float  # of these, by programs outside the job
    waited: float | None = None  # share of the time that a training thread was ready and had no core; None: not known
    disturbs: bool = False  # they took what the job would have used: this run clears it of nothing


class RunPart(msgspec.Struct, frozen=True):
    """One part of the run's time, the mean over the ranks; the parts add up to the run. `steps`: how many are in it.

    `part`: "launch" (until PyTorch is there), "setup" (until the first step), "first_batch" (its wait for data),
    "warmup", "steady", "traced" (steps that recording made longer), "epoch_ends" (steps with an epoch's first batch or
    end), "validation", "other" (steps that neither train nor validate), "stalled" (the few in which training stood
    still), "suspended", "end" (after the last step). `most_ns`: on the rank on which it took longest, `most_rank`; −1:
    it is known of the whole run alone.
    """

    part: str
    steps: float
    ns: float
    share: float
    most_ns: float = 0.0
    most_rank: int = -1


class Fact(msgspec.Struct, frozen=True):
    """One line of the report's facts of the run."""

    section: str
    name: str
    value: str


class Proposal(msgspec.Struct, frozen=True):
    """A change to make, and what it gains once those above it are made.

    `findings`: the ids of what it cures. `before_ns`, `after_ns`: the mean step (of scope "job" the loop's time of each
    training step, of "run" the run's) with those above it, and with it as well. `speedup` is their ratio, nine of ten
    times between `low` and `high`; None: not known, as of a bound (`at_most`). `job_before_ns`, `job_after_ns`: the
    whole run, None: not known. `known`: how the figures are known; "losses": tried, and the losses are the same.
    """

    change: Change
    findings: tuple[str, ...]
    scope: Scope
    before_ns: float
    after_ns: float
    speedup: float
    low: float | None = None
    high: float | None = None
    at_most: bool = False
    job_before_ns: float | None = None
    job_after_ns: float | None = None
    known: Literal["predicted", "tried", "losses"] = "predicted"
    takes: Mapping[str, float] = {}  # ns of the step by category that it saves; {}: not known

    @property
    def training(self) -> bool:
        """Whether the job then trains otherwise: such changes come last, and count in no other."""
        return self.change.training


class Together(msgspec.Struct, frozen=True):
    """The most that all cures save together of the mean steady step; less than the sum where they overlap."""

    saving_ns: float
    share: float
    speedup: float


class Result(msgspec.Struct, frozen=True):
    """Everything that a renderer may know."""

    run: RunInfo
    window: Window | None
    device: tuple[DeviceTime, ...] = ()
    time: tuple[TimePart, ...] = ()
    outcomes: tuple[Outcome, ...] = ()  # exactly one per rule: `found`, `if_training_may_change`, then the others
    panels: tuple[Panel, ...] = ()  # of the run as a whole: steps over the run, one step's timeline
    facts: tuple[Fact, ...] = ()
    dlprof: str = ""
    blame: tuple[Blame, ...] = ()  # of each rank the most first; () where waiting is not known
    together: Together | None = None  # None: nothing was found, or there is no bound
    steps: tuple[RankStep, ...] = ()
    work: tuple[Work, ...] = ()  # the heaviest of each kind, MOST_WORK at most, heaviest first
    exchanges: tuple[Exchange, ...] = ()
    tried: Tried | None = None  # what `dlprof try` measured; None: nothing was tried
    foreign_load: ForeignLoad | None = None  # None: not known
    memory: tuple[MemoryPeak, ...] = ()  # by snapshots of PyTorch's allocator; the largest of each rank first
    profiles: tuple[Profile, ...] = ()  # of other tools
    gpu_logs: tuple[GpuLog, ...] = ()
    scaling: Scaling | None = None  # None: one rank, or not known
    footprint: Footprint | None = None  # what memory is made of; None: not counted
    members: tuple[Member, ...] = ()  # by rank; () where so few ranks are here that each is looked at
    modules: Modules | None = None  # None: nothing was traced
    host_limited: HostLimited | None = None  # None: no device was traced, or its launches are not known
    device_work: DeviceWork | None = None  # None: no device was traced
    lines: tuple[LineWork, ...] = ()  # the longest first; () where no step's operators were counted by line
    budget: tuple[RunPart, ...] = ()  # in the order of time; () where the run's beginning and end are not known
    changes: tuple[
        Proposal, ...
    ] = ()  # what to do, the largest gain first; `dlprof try RUN --change 1` tries the first

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain data, as result.json holds it: times in ns, what is not known None."""
        from dlprof.result.stored import to_json

        return to_json(self)

    @property
    def found(self) -> tuple[Outcome, ...]:
        """The findings that leave the training as it is, the largest saving first."""
        return tuple(o for o in self.outcomes if o.state == "found" and not o.training)

    @property
    def if_training_may_change(self) -> tuple[Outcome, ...]:
        """What is saved only if the job trains otherwise, the largest saving first."""
        return tuple(o for o in self.outcomes if o.state == "found" and o.training)
