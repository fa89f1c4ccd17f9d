"""What is run when: the job and each change in turn, A B A B, until the answers are clear or the time is up.

First every change alone, round by round, so that each has a figure soon; then those that helped together, the best
first, each kept where it makes the best so far still faster.

How many times faster a change makes a job, how sure that is, and what follows.

A pair is a run with the change, and the runs without it just before and after: what drifts from run to run, a clock or
a neighbour on the machine, is in both. A pair's figure is the logarithm of its ratio; the interval is Student's. Two
pairs alone say little of how much pairs differ: how much the runs without the change differ from each other counts too.

Tries what a result advises on its run, and says meanwhile what it does.

How many steps each run measures: enough seconds and steps for a mean, and whole epochs where these are short.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from dlprof.analysis.source.patches import edit_of
from dlprof.errors import DlprofError, NotMeasured
from dlprof.files import writing
from dlprof.overrides import Value
from dlprof.read.run import Rank, Run, open_run
from dlprof.result import Result
from dlprof.result.tried import Attempt, Gain, State, Tried, Verdict
from dlprof.trial.job import Job, keep, repeatable
from dlprof.trial.measuring import Steps, epoch_of, epochs_log_ratio, log_ratio
from dlprof.trial.planning import Candidate, Plan, plan
from dlprof.trial.running import Failed, Runner, Stopped

Settings = Mapping[str, Value]
Words = tuple[tuple[str, Value], ...]
RunSteps = Callable[[Settings, float], "Steps | Failed"]

# Of the time, what single changes may take where several of them promise a gain: the rest is for combinations.
SINGLE_SHARE = 0.7

# The job itself must reach its steps in this part of the time, or no change could be measured.
FIRST_SHARE = 0.5

# A change may take so many times as long as the job did, and so many seconds more (a compiler may be at work), before
# it counts as too slow.
_LONGER, _MORE_S = 3.0, 120.0


@dataclass
class _Series:
    """Pairs of one change: the run with it, and those of the base before and after."""

    candidate: Candidate
    spread: list[float]  # of the base's runs, from each to the next; more of them come in
    logs: list[float] = field(default_factory=list)
    epochs: list[float] = field(default_factory=list)
    befores_ns: list[float] = field(default_factory=list)
    afters_ns: list[float] = field(default_factory=list)
    failed: str = ""

    def add(self, before: Steps, run: Steps, after: Steps | None) -> None:
        """Add a pair; raise NotMeasured where the runs cannot be compared."""
        bases = [before] if after is None else [before, after]
        self.logs.append(_mean([log_ratio(base, run, self.candidate.of) for base in bases]))
        whole = [w for base in bases if (w := epochs_log_ratio(base, run)) is not None]
        if len(whole) == len(bases):
            self.epochs.append(_mean(whole))
        loop = self.candidate.of == "loop"
        self.befores_ns.append(_mean([base.loop_ns if loop else base.step_ns for base in bases]))
        self.afters_ns.append(run.loop_ns if loop else run.step_ns)

    @property
    def gain(self) -> Gain | None:
        """How many times faster the change is; None before the first pair."""
        return gain_of(self.logs, self.spread) if self.logs else None

    @property
    def open(self) -> bool:
        """Whether another pair would tell more."""
        return not self.failed and (self.gain is None or not answered(self.gain))

    def attempt(self) -> Attempt:
        """Return what is known so far."""
        c, gain = self.candidate, self.gain
        # Only where every pair held whole epochs are they comparable with the steps.
        epochs = gain_of(self.epochs, self.spread) if self.epochs and len(self.epochs) == len(self.logs) else None
        verdict: Verdict = "not_counted" if self.failed else verdict_of(gain) if gain else "not_tried"
        why = self.failed or ("" if gain else "the time was up")
        if verdict == "gain" and epochs is not None and verdict_of(epochs) in ("no_gain", "slower"):
            verdict, why = "no_gain", "steady steps are faster, and whole epochs are not: their start takes longer"
        return Attempt(
            c.settings,
            verdict,
            why,
            c.findings,
            c.of,
            c.predicted,
            gain,
            epochs,
            _mean(self.befores_ns) if gain else None,
            _mean(self.afters_ns) if gain else None,
            c.numerics,
        )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


class _OutOfTime(Exception):  # noqa: N818 - no error: what was found so far is the answer
    """The time is up."""


class _BaseFailed(Exception):  # noqa: N818
    """The job itself did not run."""


class Search:
    """A search for the fastest settings: `go` makes it, `tried` says at any time what it has found so far."""

    def __init__(
        self,
        run: RunSteps,
        candidates: Sequence[Candidate],
        seconds: float,
        *,
        tell: Callable[[Attempt | float], None] = lambda _found: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run, self._clock, self._tell = run, clock, tell
        self._begun = clock()
        self._seconds = seconds
        self._spreads: dict[Words, list[float]] = {}
        self._last_ns: dict[Words, float] = {}
        self._series = [_Series(c, self._spread({})) for c in candidates]
        self._combined: list[_Series] = []
        self._best: _Series | None = None
        self._base: tuple[Settings, Steps] | None = None  # the last run that the next one is compared with
        self._longest_s = 0.0
        self._state: State = "interrupted"  # unless it comes to an end
        self._why = ""
        self.runs = 0

    def go(self) -> None:
        """Search until every answer is clear, the time is up, or somebody asks for the end."""
        try:
            self._singles()
            self._together()
            self._state = "out_of_time" if any(s.open for s in self._series) else "complete"
        except _OutOfTime:
            self._state = "out_of_time"
        except _BaseFailed as e:
            self._state, self._why = "failed", str(e)
        except Stopped:
            self._state = "interrupted"

    def tried(self, steps: int, left_out: Sequence[Attempt] = (), warnings: Sequence[str] = ()) -> Tried:
        """Return what was found so far."""
        best = self._best or next(iter(self._gains()), None)
        return Tried(
            state=self._state,
            attempts=(*(s.attempt() for s in self._series), *left_out),
            combinations=tuple(s.attempt() for s in self._combined),
            best=best.attempt() if best else None,
            why=self._why,
            runs=self.runs,
            steps=steps,
            seconds=round(self._clock() - self._begun, 1),
            warnings=tuple(warnings),
        )

    def _gains(self) -> list[_Series]:
        """Return the changes that helped, the most first."""
        helped = [(a, s) for s in self._series if (a := s.attempt()).verdict == "gain"]
        return [s for a, s in sorted(helped, key=lambda pair: -_worth(pair[0]))]

    def _singles(self) -> None:
        self._one({}, FIRST_SHARE * self._seconds)
        while pending := [s for s in self._series if s.open]:
            promising = sum(1 for s in self._series if s.gain is not None and s.gain.ratio > WORTH)
            share = SINGLE_SHARE if promising > 1 and self._gains() else 1.0
            for series in pending:
                if self._left() < (1 - share) * self._seconds and share < 1:
                    return
                self._pair(series, {}, series.candidate.settings)

    def _together(self) -> None:
        """Add the changes that helped to the best, one by one; then measure them together against the job."""
        gains = self._gains()
        if len(gains) < 2:
            return
        kept = gains[0].candidate
        for series in gains[1:]:
            more = series.candidate
            if more.excludes(kept.settings):
                continue
            both = Candidate(
                {**kept.settings, **more.settings},
                tuple(dict.fromkeys((*kept.findings, *more.findings))),
                None,
                "step",
                kept.numerics or more.numerics,
            )
            step = _Series(both, self._spread(kept.settings))
            self._combined.append(step)
            while step.open:
                self._pair(step, kept.settings, both.settings)
            if step.attempt().verdict == "gain":
                kept = both
        if kept is gains[0].candidate:
            return
        whole = _Series(kept, self._spread({}))
        while whole.open:
            self._pair(whole, {}, kept.settings)
            if whole.attempt().verdict == "gain":
                self._best = whole

    def _pair(self, series: _Series, base: Settings, settings: Settings) -> None:
        """Run the base, where its last run is not the latest one, then the change, then the base again."""
        need = 2 if self._is_last(base) else 3
        if self._left() < need * self._longest_s:
            raise _OutOfTime
        before = self._one(base)
        run = self._timed(settings, min(self._left(), _LONGER * self._longest_s + _MORE_S), of_base=False)
        if isinstance(run, Failed):
            # The last run was this one, and yet the base's is as good as it was.
            if run.over and self._left() <= 0:
                raise _OutOfTime
            series.failed = run.why
            self._tell(series.attempt())
            return
        self._base = None
        after: Steps | None = None
        try:
            after = self._one(base)
        finally:  # time that is up, or a signal, does not cost the pair
            try:
                series.add(before, run, after)
            except NotMeasured as e:
                series.failed = str(e)
            self._tell(series.attempt())

    def _is_last(self, base: Settings) -> bool:
        return self._base is not None and self._base[0] == base

    def _one(self, base: Settings, limit_s: float | None = None) -> Steps:
        """Return the base's steps: those of its last run where nothing ran since, else of a new one."""
        if self._base is not None and self._base[0] == base:
            return self._base[1]
        first, why = self.runs == 0, ""
        for _ in range(1 if first else 2):
            limit = self._left() if limit_s is None else limit_s
            found = self._timed(base, limit, of_base=True)
            if isinstance(found, Steps):
                self._base = (base, found)
                if (before_ns := self._last_ns.get(_words(base))) is not None:
                    self._spread(base).append(math.log(found.step_ns / before_ns))
                self._last_ns[_words(base)] = found.step_ns
                if first:
                    self._tell(found.step_ns)
                return found
            why = found.why
            if self._left() <= 0 and not first:
                raise _OutOfTime
        raise _BaseFailed(why if first else f"it ran before, and now: {why}")

    def _timed(self, settings: Settings, limit_s: float, *, of_base: bool) -> Steps | Failed:
        self.runs += 1
        begun = self._clock()
        found = self._run(settings, max(limit_s, 0.0))
        if of_base and isinstance(found, Steps):
            self._longest_s = max(self._longest_s, self._clock() - begun)
        return found

    def _spread(self, base: Settings) -> list[float]:
        """Return the list that takes by how much the base's step differs from run to run."""
        return self._spreads.setdefault(_words(base), [])

    def _left(self) -> float:
        return self._seconds - (self._clock() - self._begun)


def _words(settings: Settings) -> Words:
    return tuple(sorted(settings.items()))


def _worth(attempt: Attempt) -> float:
    measured = attempt.epochs or attempt.measured
    return measured.ratio if measured else 0.0


# Two recordings of the same job are up to 0.9 % apart on a quiet machine (docs/cost.md): from twice that on, a change
# is worth an edit.
WORTH = 1.02


# A gain is known well enough when it is known to 5 %.
KNOWN = 1.05


MOST_PAIRS = 8


# Student's t for a two-sided 95 % interval, by degrees of freedom from 1 on.
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


# Two pairs in a row share the run without the change that is between them: of a variance of 1 + 2 / 4 of single runs
# they have 1 / 4 in common.
_SHARED = 1 / 6


# Of the differences between runs without the change: one has 2 single runs' variances, and a pair 1.5. Each run is in
# two differences, so that they count as fewer; and never as more than a few, as runs with the change may differ more.
_OF_PAIR = 1.5 / 2


_COUNTS, _MOST_COUNT = 2 / 3, 2.0


def gain_of(logs: Sequence[float], spread: Sequence[float] = ()) -> Gain:
    """Return the gain that the logarithms of pairs' ratios show; raise ValueError without one.

    `spread`: by how much the logarithm of the step differs from each run without the change to the next.
    """
    n = len(logs)
    if not n:
        raise ValueError("no pair")
    mean = math.fsum(logs) / n
    if n == 1:
        return Gain(math.exp(mean))
    counts = min(_COUNTS * len(spread), _MOST_COUNT)
    of_base = _OF_PAIR * math.fsum(x * x for x in spread) / len(spread) if spread else 0.0
    known = n - 1 + counts
    variance = (math.fsum((x - mean) ** 2 for x in logs) + counts * of_base) / known
    shared = (1 + 2 * _SHARED * (n - 1) / n) / (1 - 2 * _SHARED / n)
    half = _student(known) * math.sqrt(shared * variance / n)
    return Gain(math.exp(mean), math.exp(mean - half), math.exp(mean + half), n)


def _student(freedom: float) -> float:
    at = int(freedom) - 1
    return _STUDENT[at] if at < len(_STUDENT) else 1.96 + 2.5 / freedom


def verdict_of(g: Gain) -> Verdict:
    """Return what a gain says: the interval is all above WORTH, or all below; of a single pair nothing."""
    if g.low is None or g.high is None:
        return "unclear"
    if g.low > WORTH:
        return "gain"
    if g.high < 1 / WORTH:
        return "slower"
    return "no_gain" if g.high < WORTH else "unclear"


def answered(g: Gain) -> bool:
    """Return whether further pairs would tell nothing that matters: no gain, or one that is known to 5 %."""
    found = verdict_of(g)
    if found == "gain" and g.low is not None:
        return g.ratio / g.low <= KNOWN or g.pairs >= MOST_PAIRS
    return found != "unclear" or g.pairs >= MOST_PAIRS


FOLDER = "try"  # of a run folder: what runs, and what failed runs have printed


@dataclass(frozen=True)
class Options:
    """The options of `dlprof try`."""

    minutes: float = 10.0
    steps: int | None = None
    asked: tuple[str, ...] = ()  # further candidates, each NAME=VALUE words
    obvious: bool = False
    allow_numerics: bool = False
    copy: bool = False
    command: tuple[str, ...] = ()  # instead of the recorded one


@dataclass(frozen=True)
class Trial:
    """All that is known before the first run."""

    run: Run
    job: Job
    plan: Plan
    steps: int
    seconds: float  # that they must last at least
    options: Options

    @property
    def warnings(self) -> tuple[str, ...]:
        """What differs from the recording."""
        return self.job.warnings


def prepared(path: Path, result: Result, options: Options, environ: Mapping[str, str]) -> Trial:
    """Return what will be tried on a run, and how; raise DlprofError where its job cannot be started again."""
    if environ.get("DLPROF_RUN"):
        raise DlprofError(f"this already runs under dlprof, which records into {environ['DLPROF_RUN']}")
    run = open_run(path)
    if not run.recorded or not path.is_dir():
        raise DlprofError(f"{path}: no run that `dlprof wrap` or `dlprof run` recorded, so it cannot be run again")
    job = repeatable(run, environ, options.command)
    rank: Rank | None = next(iter(run.ranks), None)
    chosen = plan(
        result,
        rank.facts if rank else {},
        asked=options.asked,
        obvious=options.obvious,
        allow_numerics=options.allow_numerics,
    )
    window = result.window if result.window and result.window.unit == "step" else None
    seconds = 60 * options.minutes
    steps = options.steps or steps_of_window(
        window.step_ns if window else None, epoch_of(rank) if rank else None, seconds
    )
    least_s = 0.0 if options.steps else min(LEAST_S, SHARE * seconds)
    return Trial(run, job, chosen, steps, least_s, options)


def tried(
    trial: Trial, stopped: Callable[[], bool], tell: Callable[[Attempt | float], None] = lambda _found: None
) -> Tried:
    """Run the trial to its end, or until `stopped` says so; no process of it is left. Raises DlprofError."""
    if not trial.plan.candidates:
        nothing = Tried("complete", trial.plan.left_out, warnings=trial.warnings)
        keep(trial.run.path, nothing)
        return nothing
    folder = trial.run.path.resolve() / FOLDER
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier trial
    with writing(str(folder)):
        folder.mkdir()
    options = trial.options
    runner = Runner(trial.job, folder, trial.steps, stopped, trial.seconds, options.copy, options.allow_numerics)

    def told(found: Attempt | float) -> None:
        # However this process ends, what it has found is kept.
        keep(trial.run.path, search.tried(trial.steps, trial.plan.left_out, trial.warnings))
        tell(found)

    search = Search(runner, trial.plan.candidates, 60 * options.minutes, tell=told)
    try:
        search.go()
    finally:
        if not any(folder.iterdir()):
            folder.rmdir()
    found = search.tried(trial.steps, trial.plan.left_out, trial.warnings)
    if found.best is not None:
        found = replace(found, diff=edit_of((rank.facts for rank in trial.run.ranks), found.best.settings))
    keep(trial.run.path, found)
    return found


# A window so long holds the batches of all workers, and outlasts what other guests of a host disturb: a second or two.
# A run takes five to ten seconds more to start, so that a shorter one would spend most of the time on starting.
WINDOW_S = 8.0


LEAST_STEPS, MOST_STEPS = 30, 2_000


# Steps that a change has made much shorter must last for so long too.
LEAST_S = 2.0


FEWEST_STEPS = 8  # where steps are so long that no more fit


# A window may take this part of the time at most, or too few runs fit into it.
SHARE = 1 / 16


# Whole epochs are measured from the first one after the warm-up: so many of them hold two whole ones.
EPOCHS = 3.2


def steps_of_window(step_ns: float | None, epoch: int | None, seconds: float) -> int:
    """Return how many steady steps each run measures, by the recorded step, and steps of an epoch (None: not known)."""
    if not step_ns or step_ns <= 0:
        return LEAST_STEPS
    most = max(int(SHARE * seconds * 1e9 / step_ns), FEWEST_STEPS)
    wanted = min(max(math.ceil(WINDOW_S * 1e9 / step_ns), LEAST_STEPS), MOST_STEPS)
    if epoch is not None:
        whole = math.ceil(EPOCHS * epoch)
        wanted = max(wanted, whole) if whole <= most else wanted
    return min(wanted, most)
