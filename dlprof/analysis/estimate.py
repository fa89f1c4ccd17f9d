"""What a rule estimates: what its change would save, and from what. The diagnosis decides whether that is a finding."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any, Literal

import pandas as pd
from msgspec import Struct, field
from msgspec.structs import force_setattr

from dlprof.analysis.engine import check_needs
from dlprof.result import Change, Forecast, Panel, Place, Scope
from dlprof.result import change as change

# A finding saves at least this share of the step, and LEAST_NOISE times the standard error of what it was estimated
# from. Two per cent is where existing tools agree to be silent.
LEAST_SHARE = 0.02

# How far predicted steps are from those that were then measured: nine of ten of 189 trials of planted faults on CPUs
# within the sum of ERROR × the saving and MACHINE × the step (86 of 100 of the trials not used to choose them), 97 of
# 100 of simulated GPU jobs. Two plain runs of one script differ by up to MACHINE on a virtual machine with an H200.
ERROR, MACHINE = 0.2, 0.07


def error_of(saving_ns: float, step_ns: float, noise_ns: float = 0.0, error: float = ERROR) -> float:
    """Return how far, in nine of ten cases, a step with a predicted saving is from the measured one, ns.

    `noise_ns`: standard error of what the saving was estimated from. No range is wider than what it is of: the saving
    (or, where it is negative, the loss), and the step after it.
    """
    after = step_ns - saving_ns
    wide = math.hypot(2 * noise_ns, error * saving_ns, MACHINE * after)
    return max(min(wide, abs(saving_ns), after / 2), 0.0)


# A generic finding comes after the findings with a cause in the same time: a loop in one line comes before "the host
# is slow", although it gains less. On a GPU this holds if these save LEAST_CAUSE of the step, as the rest of the
# device's waiting comes last; on a CPU if they save this share of the generic finding's saving.
LEAST_CAUSE, BESIDES = 0.05, 0.25

# What a change says where the line to change is known, and no remedy. Half of its saving then counts in the order of
# the findings: nobody knows whether the line does needless work.
UNKNOWN = "what it does is not known to dlprof"
# The remedy of a host that is late for no line in particular: what it gives is least sure.
COMPILED = "`torch.compile(model)`"


class Explanation(Struct, frozen=True, kw_only=True):
    """How a finding is explained. `title` and `summary`: one sentence each; `sure`: how it was estimated.

    `verdict`: the report's first sentence where the finding is first; "": the estimate's `loses` with its share.
    `at_most`: the saving bounds what the changes give, and is no prediction for any of them. `where`: the lines that it
    is about, where the rule knows them.
    """

    title: str
    summary: str
    changes: tuple[Change, ...]
    evidence: Panel | None = None
    sure: str = ""
    verdict: str = ""
    forecasts: tuple[Forecast, ...] = ()
    at_most: bool = False
    where: tuple[Place, ...] = ()


class Estimate(Struct, frozen=True, kw_only=True):
    """What one bottleneck costs a run, also where that is nothing. All times in ns of the mean steady step.

    `gone_ns`: what each rank loses by itself; `saving_ns` and `by_rank_ns` are then made of it, and not given.
    `noise_of`, `least_of`: categories of time; `noise_ns` is then theirs, and `least_ns` the least of them in a step.
    `unknown`: why the saving is not known; what is given is then the most that it can be, and no finding.
    `loses` continues "12 % of each step": "waits for data". `summary`: one sentence instead, where nothing is found.
    `seen`: what the rule's `explain` needs of what `check` found.
    """

    saving_ns: float = 0.0  # how much shorter the step would be with the change, see result.SAVING
    by_rank_ns: Mapping[int, float] = field(default_factory=dict)  # ranks with at least half of the most are named
    gone_ns: Mapping[int, float] = field(default_factory=dict)
    noise_ns: float = 0.0  # standard error of what the saving was estimated from
    least_ns: float = 0.0  # the least saving in every measured step; 0: not known
    noise_of: tuple[str, ...] = ()
    least_of: tuple[str, ...] = ()
    lost_ns: float | None = None  # what the bottleneck takes, if that is not the saving; None: the saving
    scope: Scope = "step"
    within: Mapping[str, float] = field(default_factory=dict)  # the part of the saving in one category, ns
    notable: float | None = None  # the least share of a finding; None: the rule's
    loses: str = ""
    summary: str = ""
    seen: Any = None
    unknown: str = ""
    clear: bool = False  # nothing is found, whatever the saving

    @property
    def worst(self) -> int:
        """The rank that it costs most."""
        return worst(self.by_rank_ns)

    def rows(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Return that rank's rows of a frame."""
        return frame[frame["rank"] == self.worst]


def nothing(summary: str, scope: Scope = "step") -> Estimate:
    """Return the estimate of a bottleneck that the run shows nothing of, and what it shows: no copy is waited for."""
    return Estimate(summary=summary, clear=True, scope=scope)


def worst(by_rank_ns: Mapping[int, float]) -> int:
    """Return the rank with the most, the first of equal ones."""
    return max(by_rank_ns, key=lambda rank: by_rank_ns[rank])


class Rule(Struct, frozen=True):
    """One known bottleneck. `check` returns an Estimate, or raises NotMeasured or DoesNotApply; its parameters name
    what it needs.
    `explain` gets that estimate, and what its other parameters need, and explains a finding.

    `saves_from`: the categories of `time` that its saving comes out of; none if it is between the steady steps.
    `feeds`: its change makes the loader faster, whose speed bounds what other changes save. `notable`: the least share
    of the step that is a finding. `only_with`: it concerns only jobs that train on a GPU, or on
    the CPU, or read from a DataLoader. `error`: see ERROR.
    `of_host`: it finds a part of the time in which a device waits for its host. `generic`: it finds what is left of
    that, and no cause: see BESIDES. `weight`: how much of its saving counts in the order of the findings, less than 1
    where it is what others usually gain: of two that save about as much, needless work comes first.
    """

    title: str
    check: Callable[..., Estimate]
    explain: Callable[..., Explanation]
    saves_from: tuple[str, ...] = ()
    feeds: bool = False
    notable: float = LEAST_SHARE
    only_with: Literal["", "gpu", "cpu", "loader"] = ""
    error: float = ERROR
    of_host: bool = False
    generic: bool = False
    weight: float = 1.0
    id: str = ""  # the name of its file

    def __post_init__(self) -> None:
        check_needs(self.check)
        check_needs(self.explain, given=1)
        if not self.id:
            force_setattr(self, "id", self.check.__module__.rpartition(".")[2])

    @property
    def manual(self) -> str:
        """The docstring of the rule's file."""
        return inspect.cleandoc(sys.modules[self.check.__module__].__doc__ or "")
