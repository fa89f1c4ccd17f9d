"""`dlprof try`: run a job with and without each change in turns (A B A B) until the results are clear or time is up.

First each change is measured alone, one pair each per round, so that every change has a figure early. Then the changes
that helped are combined, the best first; each is kept if it makes the best so far faster still.

A pair is a run with the change and the runs without it just before and after, so that a drift of the machine affects
both. Its figure is the logarithm of the ratio of the mean steps; the confidence interval is Student's. Since two pairs
say little about how much pairs vary, the variation between the runs without a change is used as well.

Each run measures enough seconds and steps for a mean, and whole epochs if these are short.

Of changes that helped, the losses are compared with those of the job without them. One with which they differ is not
kept, unless the user allows other numbers.

Also here: how to keep what was found, as a patch of the job's files, and words for what no patch makes.
"""

from __future__ import annotations

import dataclasses
import math
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from dlprof.analysis.source.patches import Patch, patch_of
from dlprof.errors import DlprofError, NotMeasured
from dlprof.files import writing
from dlprof.overrides import Value
from dlprof.read.run import Rank, Run, open_run
from dlprof.result import Result, is_line
from dlprof.result.tried import Attempt, Gain, Of, State, Tried, Verdict, student
from dlprof.trial.copies import by_edit, made_by, to_link
from dlprof.trial.job import Job, keep, kept, merged, refuse_inside, repeatable
from dlprof.trial.measuring import (
    MOST_LOSSES,
    Compared,
    Losses,
    Steps,
    compared,
    epoch_of,
    epochs_log_ratio,
    log_ratio,
    losses_of,
)
from dlprof.trial.planning import WORTH, Candidate, Plan, named, plan
from dlprof.trial.running import QUICK, Failed, Runner, Stopped, limit_s

Settings = Mapping[str, Value]
Words = tuple[tuple[str, Value], ...]
RunSteps = Callable[[Settings, float], "Steps | Failed"]

# The share of the time for single changes if several of them promise a gain. The rest is for combinations.
SINGLE_SHARE = 0.7

# A change is seldom clear with fewer pairs.
LEAST_PAIRS = 2

# The job itself must reach its steps within this share of the time, or no change could be measured.
FIRST_SHARE = 0.5


@dataclass
class _Series:
    """The pairs of one change: a run with it, and the runs of the base (the settings without it) before and after."""

    candidate: Candidate
    spread: list[float]  # differences between successive runs of the base; shared, and grows
    logs: list[float] = field(default_factory=list)
    epochs: list[float] = field(default_factory=list)
    befores_ns: list[float] = field(default_factory=list)
    afters_ns: list[float] = field(default_factory=list)
    failed: str = ""
    losses: Compared = ""
    strict: bool = True  # a change with which losses differ is none

    def add(self, before: Steps, run: Steps, after: Steps | None) -> None:
        """Add a pair; raise NotMeasured if the runs cannot be compared."""
        bases = [before] if after is None else [before, after]
        self.logs.append(_mean([log_ratio(base, run, self.candidate.of) for base in bases]))
        whole = [w for base in bases if (w := epochs_log_ratio(base, run)) is not None]
        if len(whole) == len(bases) and self.candidate.of != "start":
            self.epochs.append(_mean(whole))
        self.befores_ns.append(_mean([base.ns(self.candidate.of) for base in bases]))
        self.afters_ns.append(run.ns(self.candidate.of))

    @property
    def gain(self) -> Gain | None:
        """How many times faster the change is; None before the first pair."""
        return gain_of(self.logs, self.spread) if self.logs else None

    @property
    def open(self) -> bool:
        """Whether another pair is needed."""
        return not self.failed and (self.gain is None or not answered(self.gain))

    def attempt(self) -> Attempt:
        """Return the result so far."""
        c, gain = self.candidate, self.gain
        # Epochs are comparable with steps only if every pair has whole epochs.
        epochs = gain_of(self.epochs, self.spread) if self.epochs and len(self.epochs) == len(self.logs) else None
        verdict: Verdict = "not_counted" if self.failed else verdict_of(gain) if gain else "not_tried"
        why = self.failed or ("" if gain else "the time was up")
        if verdict == "gain" and epochs is not None and verdict_of(epochs) in ("no_gain", "slower"):
            verdict, why = "no_gain", "steady steps are faster, and whole epochs are not: their start takes longer"
        if verdict == "gain" and self.losses == "differ" and self.strict:
            verdict, why = "not_counted", "its losses differ from those without it; --allow-numerics keeps it"
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
            losses=self.losses,
        )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


class _OutOfTime(Exception):  # noqa: N818 - not an error: the results so far are the answer
    """The time is up."""


class _BaseFailed(Exception):  # noqa: N818
    """The job itself did not run."""


class Search:
    """A search for the fastest settings: `go` runs it, `tried` returns the results so far at any time."""

    def __init__(
        self,
        run: RunSteps,
        candidates: Sequence[Candidate],
        seconds: float,
        *,
        tell: Callable[[Attempt | float], None] = lambda _found: None,
        clock: Callable[[], float] = time.monotonic,
        losses: Callable[[Settings, float], Compared] | None = None,
        strict: bool = True,
    ) -> None:
        self._run, self._clock, self._tell = run, clock, tell
        self._started = clock()
        self._seconds = seconds
        self._spreads: dict[tuple[Words, bool], list[float]] = {}  # of the base's steps, and of its starts
        self._last: dict[Words, Steps] = {}
        self._losses, self._strict = losses, strict
        self._series = [_Series(c, self._spread({}, c.of), strict=strict) for c in candidates]
        self._combined: list[_Series] = []
        self._best: _Series | None = None
        self._base: tuple[Settings, Steps] | None = None  # the last run of a base, which the next run is compared with
        self._longest_s = 0.0
        self._state: State = "interrupted"  # until it is over
        self._why = ""
        self.runs = 0

    def go(self) -> None:
        """Search until every result is clear, the time is up, or it is interrupted."""
        try:
            with suppress(_OutOfTime):
                self._singles()
            for series in self._gains():
                self._compare(series)
            self._together()
            self._state = "out_of_time" if any(s.open for s in self._series) else "complete"
        except _OutOfTime:
            self._state = "out_of_time"
        except _BaseFailed as e:
            self._state, self._why = "failed", str(e)
        except Stopped:
            self._state = "interrupted"

    def tried(self, steps: int, left_out: Sequence[Attempt] = (), warnings: Sequence[str] = ()) -> Tried:
        """Return the results so far."""
        best = self._best or next(iter(self._gains()), None)
        return Tried(
            state=self._state,
            attempts=(*(s.attempt() for s in self._series), *left_out),
            combinations=tuple(s.attempt() for s in self._combined),
            best=best.attempt() if best else None,
            why=self._why,
            runs=self.runs,
            steps=steps,
            seconds=round(self._clock() - self._started, 1),
            warnings=tuple(warnings),
        )

    def _gains(self) -> list[_Series]:
        """Return the changes that helped, the largest gain first."""
        helped = [(a, s) for s in self._series if (a := s.attempt()).verdict == "gain"]
        return [s for a, s in sorted(helped, key=lambda pair: -_worth(pair[0]))]

    def _singles(self) -> None:
        self._one({}, FIRST_SHARE * self._seconds)
        while pending := [s for s in self._series if s.open]:
            promising = sum(1 for s in self._series if s.gain is not None and s.gain.ratio > WORTH)
            share = SINGLE_SHARE if promising > 1 and self._gains() else 1.0
            # If the time does not suffice for all, the most promising ones are made clear first.
            fit = max(int(self._left() // (2 * LEAST_PAIRS * self._longest_s or 1)), 1)
            for series in pending[:fit]:
                if self._left() < (1 - share) * self._seconds and share < 1:
                    return
                self._pair(series, {}, series.candidate.settings)

    def _compare(self, series: _Series) -> None:
        """Compare the losses with a change to those without, if there is time for that."""
        if self._losses is not None and not series.losses and self._left() > self._longest_s:
            series.losses = self._losses(series.candidate.settings, self._left())
            self._tell(series.attempt())

    def _together(self) -> None:
        """Combine the changes that helped, one after the other; then measure the combination against the job."""
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
                "start" if more.of == "start" else "step",
                kept.numerics or more.numerics,
            )
            step = _Series(both, self._spread(kept.settings, both.of), strict=self._strict)
            self._combined.append(step)
            while step.open:
                self._pair(step, kept.settings, both.settings)
            if step.attempt().verdict == "gain":
                kept = both
        if kept is gains[0].candidate:
            return
        of: Of = "start" if all(one.candidate.of == "start" for one in gains) else "step"
        kept = dataclasses.replace(kept, of=of)
        whole = _Series(kept, self._spread({}, of), strict=self._strict)
        while whole.open:
            self._pair(whole, {}, kept.settings)
            if whole.attempt().verdict == "gain":
                self._best = whole
        if self._best is not None:
            self._compare(whole)
            self._best = whole if whole.attempt().verdict == "gain" else None

    def _pair(self, series: _Series, base: Settings, settings: Settings) -> None:
        """Run the base (unless its last run was the latest of all), the change, and the base again."""
        need = 2 if self._base is not None and self._base[0] == base else 3
        if self._losses is not None and any(s.attempt().verdict == "gain" and not s.losses for s in self._series):
            need += 3  # to compare the losses of what was found already
        if self._left() < need * self._longest_s:
            raise _OutOfTime
        before = self._one(base)
        run = self._timed(settings, limit_s(self._left(), self._longest_s), of_base=False)
        if isinstance(run, Failed):
            # The base's last run can still be used, although this run came after it.
            if run.over and self._left() <= 0:
                raise _OutOfTime
            series.failed = run.why
            self._tell(series.attempt())
            return
        self._base = None
        after: Steps | None = None
        try:
            after = self._one(base)
        finally:  # keep the pair if the time is up or a signal arrives
            try:
                series.add(before, run, after)
            except NotMeasured as e:
                series.failed = str(e)
            self._tell(series.attempt())

    def _one(self, base: Settings, limit_s: float | None = None) -> Steps:
        """Return the base's steps: of its last run if nothing ran since, else of a new run."""
        if self._base is not None and self._base[0] == base:
            return self._base[1]
        first, why = self.runs == 0, ""
        for _ in range(1 if first else 2):
            limit = self._left() if limit_s is None else limit_s
            found = self._timed(base, limit, of_base=True)
            if isinstance(found, Steps):
                self._base = (base, found)
                if (before := self._last.get(_words(base))) is not None:
                    self._spread(base, "step").append(math.log(found.step_ns / before.step_ns))
                    if found.start_ns and before.start_ns:
                        self._spread(base, "start").append(math.log(found.start_ns / before.start_ns))
                self._last[_words(base)] = found
                if first:
                    self._tell(found.step_ns)
                return found
            why = found.why
            if self._left() <= 0 and not first:
                raise _OutOfTime
        raise _BaseFailed(why if first else f"it ran before, and now: {why}")

    def _timed(self, settings: Settings, limit_s: float, *, of_base: bool) -> Steps | Failed:
        self.runs += 1
        started = self._clock()
        found = self._run(settings, max(limit_s, 0.0))
        if of_base and isinstance(found, Steps):
            self._longest_s = max(self._longest_s, self._clock() - started)
        return found

    def _spread(self, base: Settings, of: Of) -> list[float]:
        """Return the list of differences between successive runs of a base."""
        return self._spreads.setdefault((_words(base), of == "start"), [])

    def _left(self) -> float:
        return self._seconds - (self._clock() - self._started)


def _words(settings: Settings) -> Words:
    return tuple(sorted(settings.items()))


# A gain is known well enough to 5 %.
KNOWN = 1.05

MOST_PAIRS = 8

# Two successive pairs share the run without the change between them: of their variance of 1 + 2 / 4 of single runs they
# have 1 / 4 in common.
_SHARED = 1 / 6

# A difference between runs without the change has 2 single runs' variances, and a pair has 1.5. Each run is in two
# differences, so these count as fewer observations, and as two at most since runs with the change may vary more.
_OF_PAIR = 1.5 / 2
_COUNTS, _MOST_COUNT = 2 / 3, 2.0


def gain_of(logs: Sequence[float], spread: Sequence[float] = ()) -> Gain:
    """Return the gain from the logarithms of the pairs' ratios; raise ValueError without a pair.

    `spread`: differences of the logarithm of the step between successive runs without the change.
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
    half = student(known) * math.sqrt(shared * variance / n)
    return Gain(math.exp(mean), math.exp(mean - half), math.exp(mean + half), n)


def _worth(attempt: Attempt) -> float:
    measured = attempt.epochs or attempt.measured
    return measured.ratio if measured else 0.0


def verdict_of(g: Gain) -> Verdict:
    """Return the verdict on a gain by its interval: above WORTH, or below; unclear after a single pair."""
    if g.low is None or g.high is None:
        return "unclear"
    if g.low > WORTH:
        return "gain"
    if g.high < 1 / WORTH:
        return "slower"
    return "no_gain" if g.high < WORTH else "unclear"


def answered(g: Gain) -> bool:
    """Return whether no further pair is needed: there is no gain, or it is known to 5 %.

    What seems to gain more is measured on as long as that is not clear.
    """
    found = verdict_of(g)
    if found == "gain" and g.low is not None:
        return g.ratio / g.low <= KNOWN or g.pairs >= MOST_PAIRS
    return found != "unclear" or (g.pairs >= MOST_PAIRS and g.ratio < KNOWN)


FOLDER = "try"  # in the run folder: the current run, and the output of failed ones


@dataclass(frozen=True)
class Options:
    """The options of `dlprof try`."""

    minutes: float = 10.0
    steps: int | None = None
    asked: tuple[str, ...] = ()  # further candidates, each NAME=VALUE words
    obvious: bool = False
    allow_numerics: bool = False
    in_place: bool = False  # no copy of the job's folder
    changes: tuple[int, ...] = ()  # of the result's, by their places from 1: only these are tried
    command: tuple[str, ...] = ()  # instead of the recorded one
    only: bool = False  # nothing but `asked`, and what `obvious` adds


@dataclass(frozen=True)
class Trial:
    """What is known before the first run."""

    run: Run
    job: Job
    plan: Plan
    steps: int
    seconds: float  # that the steps must take at least
    options: Options
    not_copied: str = ""  # why the job runs in its own folder
    run_s: float = 0.0  # how long a run takes, by the recording; 0: not known

    @property
    def warnings(self) -> tuple[str, ...]:
        """Differences from the recording."""
        return self.job.warnings

    @property
    def least_minutes(self) -> float:
        """How long LEAST_PAIRS of one change take, by the recording; 0: not known, or nothing is tried."""
        return (1 + 2 * LEAST_PAIRS) * self.run_s / 60 if self.plan.candidates else 0.0

    def patch_of(self, settings: Settings) -> Patch:
        """Return the edit of the job's files that makes settings."""
        return patch_of((rank.facts for rank in self.run.ranks), settings)

    def with_edit(self, attempt: Attempt) -> Attempt:
        """Return an attempt with the edit that it was tried by."""
        edit = {name: value for name, value in attempt.settings.items() if by_edit(name)}
        return replace(attempt, edit=self.patch_of(edit).shown) if edit else attempt


def prepared(path: Path, result: Result, options: Options, environ: Mapping[str, str]) -> Trial:
    """Return what will be tried on a run, and how; raise DlprofError if its job cannot be started again."""
    refuse_inside(environ)
    run = open_run(path)
    if not run.recorded or not path.is_dir():
        raise DlprofError(f"{path}: no run that `dlprof wrap` or `dlprof run` recorded, so it cannot be run again")
    job = repeatable(run, environ, options.command)
    rank: Rank | None = next(iter(run.ranks), None)
    chosen = plan(
        result,
        rank.facts if rank else {},
        lambda settings: not patch_of((rank.facts for rank in run.ranks), settings).left_out,
        asked=options.asked,
        numbers=options.changes,
        only=options.only,
        obvious=options.obvious,
        allow_numerics=options.allow_numerics,
    )
    window = result.window if result.window and result.window.unit == "step" else None
    seconds = 60 * options.minutes
    took: dict[str, float] = {}
    for part in result.budget:
        took[part.part] = took.get(part.part, 0.0) + part.ns
    # Short epochs spend more between their steps, as on starting workers, than in them.
    between = sum(took.get(name, 0.0) for name in ("epoch_ends", "validation", "other")) / took.get("steady", math.inf)
    loop_ns = window.step_ns * (1 + between) if window else None
    steps = options.steps or steps_of_window(loop_ns, epoch_of(rank) if rank else None, seconds)
    starts = bool(chosen.candidates) and all(one.of == "start" for one in chosen.candidates)
    steps = min(steps, FEWEST_STEPS) if starts and not options.steps else steps
    least_s = 0.0 if options.steps or starts else min(LEAST_S, SHARE * seconds)
    not_copied = "--in-place" if options.in_place else ""
    try:
        to_link(job.cwd, path.resolve() / FOLDER, job.started_s)
    except (DlprofError, OSError) as e:
        not_copied = not_copied or str(e)
    starts_ns = sum(took.get(name, 0.0) for name in ("launch", "setup", "first_batch", "warmup"))
    run_s = (starts_ns + steps * loop_ns) / 1e9 if loop_ns and starts_ns else 0.0
    return Trial(run, job, chosen, steps, least_s, options, not_copied, run_s)


@dataclass
class LossComparison:
    """Compares the losses with settings to those of the job without, running it by a copy of a trial's runner.

    As far as edits make the settings, the run has these, so that they are tested, too.
    """

    runner: Runner
    why: dict[str, None] = field(default_factory=dict)  # why runs failed
    _plain: list[Losses] = field(default_factory=list)  # of two seeds

    def __call__(self, settings: Mapping[str, Value], limit_s: float) -> Compared:
        """Return the verdict; "" if a run fails, or there is no time for all of them."""
        until = time.monotonic() + limit_s
        for seed in range(len(self._plain), 2):
            if (found := self._losses({}, seed, until)) is None:
                return ""
            self._plain.append(found)
        changed = self._losses(settings, 0, until)
        return "" if changed is None else compared(self._plain[0], changed, self._plain[1])

    def _losses(self, settings: Mapping[str, Value], seed: int, until: float) -> Losses | None:
        folder = self.runner.folder / "losses"
        folder.mkdir(exist_ok=True)
        kept = folder / "kept"
        recording = (*QUICK, "--losses", str(seed))
        once = dataclasses.replace(
            self.runner,
            folder=folder,
            recording=recording,
            keep=kept,
            steps=min(self.runner.steps, MOST_LOSSES),
            seconds=0.0,
            may_be_the_same=True,
            edits=self.runner.copy,
        )
        try:
            done = once(settings, max(until - time.monotonic(), 0.0))
            if isinstance(done, Failed):
                self.why[f"losses were not compared: {done.why}"] = None
                return None
            return losses_of(kept)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def tried(
    trial: Trial, stopped: Callable[[], bool], tell: Callable[[Attempt | float], None] = lambda _found: None
) -> Tried:
    """Run the trial to its end or until `stopped` returns True, and end all its processes. Raises DlprofError."""
    before: Tried | None = None
    with suppress(DlprofError):  # a broken file, of which the report warns, is replaced
        before = kept(trial.run.path)
    if not trial.plan.candidates:
        nothing = Tried("complete", trial.plan.left_out, warnings=trial.warnings)
        keep(trial.run.path, nothing := merged(before, nothing))
        return nothing
    folder = trial.run.path.resolve() / FOLDER
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier trial
    with writing(str(folder)):
        folder.mkdir()
    options = trial.options
    runner = Runner(
        trial.job,
        folder,
        trial.steps,
        stopped,
        trial.seconds,
        not trial.not_copied,
        options.allow_numerics,
        patch_of=trial.patch_of,
    )

    losses = LossComparison(runner)

    def result() -> Tried:
        wrote = [f"a run wrote into {path}, which its copy of the folder only links to" for path in runner.linked]
        found = search.tried(trial.steps, trial.plan.left_out, (*trial.warnings, *wrote, *losses.why))
        if found.why and not trial.not_copied:
            found = replace(
                found, why=f"{found.why} (in a copy of its folder; --in-place runs it in the folder itself)"
            )
        best = found.best and trial.with_edit(found.best)
        attempts, combinations = (tuple(map(trial.with_edit, of)) for of in (found.attempts, found.combinations))
        return merged(before, replace(found, attempts=attempts, combinations=combinations, best=best))

    def save_and_tell(found: Attempt | float) -> None:
        # The results so far are kept however this process ends.
        keep(trial.run.path, result())
        tell(found)

    search = Search(
        runner,
        trial.plan.candidates,
        60 * options.minutes,
        tell=save_and_tell,
        losses=losses,
        strict=not options.allow_numerics,
    )
    try:
        search.go()
    finally:
        if not any(folder.iterdir()):
            folder.rmdir()
    found = result()
    if found.best is not None:
        made = trial.patch_of(found.best.settings)
        found = replace(found, diff="" if made.left_out else made.shown, no_effect=tuple(sorted(runner.no_effect)))
    keep(trial.run.path, found)
    return found


# Long enough for batches of all workers, and longer than a disturbance by other guests of the host (a second or two).
# Starting a run takes five to ten seconds: a shorter window would spend most of the time on that.
WINDOW_S = 8.0

LEAST_STEPS, MOST_STEPS = 30, 2_000

# Steps that a change makes much shorter must take this long in total, too.
LEAST_S = 2.0

FEWEST_STEPS = 8  # if steps are so long that no more fit

# A window takes at most this share of the time, or too few runs would fit.
SHARE = 1 / 16

# Whole epochs are counted after the warm-up: this many steps of epochs contain two whole ones.
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


@dataclass(frozen=True)
class Fix:
    """The patch, the lines that it changes ("train.py:14"), and what to do besides, a sentence each."""

    patch: Patch
    words: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()


def fixed(trial: Trial, result: Result, found: Tried) -> Fix:
    """Return how to keep the best that a trial found. What an edit was seen not to make is left to words."""
    settings = found.best.settings if found.best else {}
    patch = trial.patch_of({name: value for name, value in settings.items() if name not in found.no_effect})
    left = {name: value for name, value in settings.items() if name not in made_by(patch, settings)}
    left |= {name: settings[name] for name in found.no_effect if name in settings}
    return Fix(patch, tuple(_by_hand_words(left, patch, result)), tuple(_lines(patch.text)))


def _by_hand_words(settings: Mapping[str, Value], patch: Patch, result: Result) -> Iterator[str]:
    why = {name: why for names, _, why in patch.left_out for name in names.split(", ")}
    changes = [p.change for p in result.changes] + [c for o in result.found for c in o.changes]
    said: dict[str, list[str]] = {}
    for name, value in settings.items():
        group, _, setting = name.partition(".")
        if group == "env":
            yield f"{setting}={value} before the command"
            continue
        if is_line(setting):
            text = next((c.text for c in changes if setting in {s.name for s in c.settings}), setting)
            yield f"{text} ({why.get(setting, 'the edit was not seen to take effect')})"
            continue
        change = next((c for c in changes if (named(c) or {}).get(name) == str(value)), None)
        because = f" (no edit makes it: {why[setting]})" if setting in why else ""
        said.setdefault(f"{change.text if change else f'{name}={value}'}{because}", []).append(f"--set {name}={value}")
    for text, words in said.items():
        yield f"{text}; until then: dlprof wrap {' '.join(words)}"


def _lines(patch: str) -> Iterator[str]:
    """Yield the lines that a patch puts in, by the numbers that they then have."""
    file, number = "", 0
    for line in patch.split("\n"):
        if line.startswith("+++ b/"):
            file = line[6:].rstrip("\t")
        elif begins := re.match(r"@@ -\d+(?:,\d+)? \+(\d+)", line):
            number = int(begins[1])
        elif line[:1] in ("+", " "):
            if line[0] == "+":
                yield f"{file}:{number}"
            number += 1
