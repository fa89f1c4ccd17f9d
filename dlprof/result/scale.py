"""What a run tells of how its job scales, and a study of runs on several numbers of ranks, which scale.json holds.

What a run's step would be with something changed: structs that `dlprof whatif` prints.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from dlprof.result.figures import Throughput

FILE = "scale.json"
FORMAT = 1

# Parts of a step that a study tells apart, next to the categories of a step: exposed communication is either.
TRANSFER, WAITING = "communication", "waiting"

Mode = Literal["weak", "strong", "mixed", ""]


class Transfers(msgspec.Struct, frozen=True):
    """Collectives of one kind, group and size, of a mean traced step and rank.

    `ranks`: of the group; `hosts`: that the group lies on. `bytes`: of each, None: unknown. `transfer_ns`: the mean
    length of one without waiting.
    """

    collective: str
    ranks: int
    hosts: int
    count: float
    transfer_ns: float
    bytes: float | None = None


class Scaling(msgspec.Struct, frozen=True):
    """What of one run tells how its job scales: its collectives, and how far its ranks are apart.

    `transfer_ns` and `wait_ns`: exposed transfer, and exposed waiting for other ranks, of a mean steady step and rank;
    None: unknown. `uneven_ns`: how much longer than the mean of the ranks each rank's mean own time is, ascending, of
    many ranks evenly spaced quantiles. `late_ns`: the same of single steps against what the rank usually takes. (): not
    known.
    """

    transfers: tuple[Transfers, ...] = ()
    transfer_ns: float | None = None
    wait_ns: float | None = None
    uneven_ns: tuple[float, ...] = ()
    late_ns: tuple[float, ...] = ()


class Size(msgspec.Struct, frozen=True):
    """A number of ranks, and the mean of what its runs measured. None: unknown.

    `noise_ns`: standard error of step_ns, with what the runs differ by. `samples`: of a step of the whole job.
    `efficiency`: work a second and rank over that of the smallest size; `efficiency_noise`: its standard error.
    `parts`: ns of the mean step and rank. `joules`: of the GPUs, for each sample.
    """

    ranks: int
    runs: tuple[str, ...]
    step_ns: float
    noise_ns: float | None = None
    samples: float | None = None
    speedup: float = 1.0
    efficiency: float = 1.0
    efficiency_noise: float | None = None
    hosts: int = 1
    parts: Mapping[str, float] = msgspec.field(default_factory=dict)
    mfu: float | None = None
    joules: float | None = None

    @property
    def work_per_s(self) -> float:
        """Samples a second of the whole job; steps of all ranks together where samples are not known."""
        return 1e9 / self.step_ns * (self.samples or float(self.ranks))


class Fit(msgspec.Struct, frozen=True):
    """What one collective takes, by least squares over all sizes: start_ns + hop_ns × hops + ns_per_byte × bus bytes.

    `hops`: of the group's ranks n, n − 1 ("ring") or log2 n ("tree"); "": measured with one number of ranks only.
    `off`: how far single measurements are from the fit (root mean square, relative). `hosts`: whether of groups on
    several hosts.
    """

    collective: str
    start_ns: float
    hop_ns: float
    ns_per_byte: float
    hops: Literal["ring", "tree", ""]
    off: float
    several_hosts: bool = False


class Prediction(msgspec.Struct, frozen=True):
    """The mean step on so many ranks, with its 95 % interval, and what the efficiency then is."""

    ranks: int
    step_ns: float
    low_ns: float
    high_ns: float
    efficiency: float
    efficiency_low: float
    efficiency_high: float
    transfer_ns: float
    wait_ns: float
    samples_per_s: float | None = None


class Study(msgspec.Struct, frozen=True):
    """Sizes in ascending order, the predictions for other sizes, and the largest size predicted from the others.

    `mode`: weak: each rank has the same batch; strong: all ranks share one; mixed: neither; "": not known.
    `left_out`: runs that are in no size, and why. `doubts`: what a reader must know. `why`: why nothing is predicted.
    """

    name: str
    mode: Mode
    sizes: tuple[Size, ...]
    fits: tuple[Fit, ...] = ()
    predictions: tuple[Prediction, ...] = ()
    check: Prediction | None = None
    left_out: tuple[tuple[str, str], ...] = ()
    doubts: tuple[str, ...] = ()
    why: str = ""


def to_json(study: Study) -> dict[str, Any]:
    """Return a study as plain data."""
    return {"format": FORMAT, **msgspec.to_builtins(study)}


class Answer(msgspec.Struct, frozen=True):
    """What becomes of the mean steady step with some changes, ns; None: not known, and `why`. `unknown`: its limits.

    `error_ns`: nine of ten such predictions are no further than this from the measured step; 0: not known.
    """

    changes: tuple[str, ...]
    step_ns: float | None
    why: str = ""
    error_ns: float = 0.0
    unknown: tuple[str, ...] = ()


class Answers(msgspec.Struct, frozen=True):
    """The run as it is, each change alone, and, of several, all of them together."""

    step_ns: float
    alone: tuple[Answer, ...]
    together: Answer | None
    throughput: Throughput | None
