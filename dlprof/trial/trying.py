"""Tries what a result advises on its run, and says meanwhile what it does.

How many steps each run measures: enough seconds and steps for a mean, and whole epochs where these are short.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from dlprof.analysis.source.patches import edit_of
from dlprof.errors import DlprofError
from dlprof.files import writing
from dlprof.read.run import Rank, Run, open_run
from dlprof.result import Result
from dlprof.result.tried import Attempt, Tried
from dlprof.trial.job import Job, repeatable
from dlprof.trial.kept import keep
from dlprof.trial.measuring import epoch_of
from dlprof.trial.planning import Plan, plan
from dlprof.trial.running import Runner
from dlprof.trial.search import Search

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
