"""What a rule figures: how much its change would save and what it stands on. The diagnosis decides what comes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from dlprof.result import Change, Forecast, Panel, Scalar, Scope, Setting

# So many standard errors a figure must be away from nothing: what comes and goes by chance is no finding.
LEAST_NOISE = 2.0


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What a reader is told of a finding. `title` and `summary`: one sentence each; `sure`: how it was estimated.

    `verdict`: the report's first sentence where the finding stands first; "": the estimate's `loses` with its share.
    """

    title: str
    summary: str
    changes: tuple[Change, ...]
    evidence: Panel | None = None
    sure: str = ""
    verdict: str = ""
    forecasts: tuple[Forecast, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What one bottleneck costs a run; also where that is nothing. All times in ns of the mean steady step.

    `loses` continues "12 % of each step": "waits for data". `summary`: one sentence instead, where nothing is found.
    `explain` is called only where something is found; without it nothing ever is.
    """

    saving_ns: float = 0.0  # how much shorter the step would be with the change, see result.SAVING
    by_rank_ns: Mapping[int, float] = field(
        default_factory=dict
    )  # what it costs each rank; those with half the most of
    # it or more are named
    noise_ns: float = 0.0  # standard error of what the saving was estimated from
    least_ns: float = 0.0  # what the saving is at least, as every measured step shows it; 0: not known
    lost_ns: float | None = None  # what the bottleneck takes, where the change saves another part; None: the saving
    scope: Scope = "step"
    within: Mapping[str, float] = field(default_factory=dict)  # of the saving, what lies in one category of `time`, ns
    notable: float | None = None  # from which share on it is found; None: the rule's
    loses: str = ""
    summary: str = ""
    explain: Callable[[], Explanation] | None = None


def nothing(summary: str) -> Estimate:
    """Return the estimate of a bottleneck that the run cannot have, with the reason: no loader has workers."""
    return Estimate(summary=summary)


def worst(by_rank_ns: Mapping[int, float]) -> int:
    """Return the rank with most; the first of them where several have as much."""
    return max(by_rank_ns, key=lambda rank: by_rank_ns[rank])


def change(text: str, *, numerics: bool = False, **settings: tuple[Scalar, Scalar]) -> Change:
    """Return a change that sets settings, each from one value to another: `num_workers=(0, 6)`; None: not known.

    `numerics`: whether the job then computes other numbers.
    """
    return Change(text, tuple(Setting(name, *values) for name, values in settings.items()), numerics)
