"""Record a job on several numbers of ranks in several rounds, and keep each recording (`dlprof scale`).

Rounds go through the sizes forwards and backwards in turns, so that a machine that becomes slower or faster affects all
of them alike. A size that fails does not affect the others. Recordings that exist already are not made again.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dlprof.errors import DlprofError
from dlprof.files import writing
from dlprof.read.run import open_run
from dlprof.trial.job import Job
from dlprof.trial.running import Failed, Runner, Stopped
from dlprof.units import count

RUNS = "runs"  # in the folder of a study: the output of failed runs

# The trace window is over by then.
LEAST_STEPS = 60

# Power and FLOPs are needed; Python's stacks are not.
_RECORDING = ("--stacks", "off")

# A size is ended after this many times the longest one so far plus these seconds.
_LONGER, _MORE_S = 3.0, 120.0


@dataclass(frozen=True)
class Options:
    """The options of a study."""

    minutes: float = 30.0
    steps: int = LEAST_STEPS
    rounds: int = 2
    copy: bool = False


@dataclass
class Recorded:
    """The recordings by number of ranks, why a size has none, and why the study is not complete ("" if it is)."""

    paths: dict[int, list[Path]] = field(default_factory=dict)
    failed: list[tuple[str, str]] = field(default_factory=list)
    lacking: str = ""


def record_sizes(
    jobs: Mapping[int, Job],
    folder: Path,
    options: Options,
    stopped: Callable[[], bool],
    tell: Callable[[str], None] = lambda _line: None,
) -> Recorded:
    """Record the job of each number of ranks until all are done, the time is up, or `stopped` returns True.

    All processes have ended afterwards. Raises DlprofError if the folder cannot be written.
    """
    with writing(str(folder)):
        (folder / RUNS).mkdir(parents=True, exist_ok=True)
    done, begun, longest = Recorded(), time.monotonic(), 0.0
    failed = set[int]()
    for n in range(options.rounds):
        for ranks in list(jobs)[:: 1 if n % 2 == 0 else -1]:
            path = folder / f"ranks-{ranks:04d}-{n + 1}"
            if ranks in failed:
                continue
            if _holds_a_run(path):
                done.paths.setdefault(ranks, []).append(path)
                continue
            left = 60 * options.minutes - (time.monotonic() - begun)
            if left <= longest:
                done.lacking = "the time was up before all sizes were recorded as often as asked"
                return done
            tell(f"{count(ranks, 'rank')}, round {n + 1} of {options.rounds}")
            shutil.rmtree(work := folder / RUNS / path.name, ignore_errors=True)
            work.mkdir()
            runner = Runner(
                jobs[ranks], work, max(options.steps, LEAST_STEPS), stopped, copy=options.copy,
                recording=_RECORDING, keep=path,
            )  # fmt: skip
            started = time.monotonic()
            limit = min(left, _LONGER * longest + _MORE_S) if longest else left
            try:
                found = runner({}, limit)
            except Stopped:
                done.lacking = "it was interrupted before all sizes were recorded as often as asked"
                return done
            longest = max(longest, time.monotonic() - started)
            if isinstance(found, Failed):
                failed.add(ranks)
                done.failed.append((count(ranks, "rank"), found.why))
                tell(f"{count(ranks, 'rank')}: {found.why}")
            else:
                done.paths.setdefault(ranks, []).append(path)
    return done


def _holds_a_run(path: Path) -> bool:
    if not path.is_dir():
        return False
    try:
        return bool(open_run(path).ranks)
    except DlprofError:
        return False


def filled_for(command: Sequence[str], ranks: int, batch: int | None, *, strong: bool) -> tuple[str, ...]:
    """Return the command for a number of ranks, with {ranks} replaced by it and {batch} by the batch of each rank.

    `batch`: of each rank, or with `strong` of all ranks together. Raises DlprofError if it cannot be divided evenly.
    """
    each = batch
    if batch is not None and strong:
        if batch % ranks:
            raise DlprofError(f"a batch of {batch} is not a multiple of {ranks} ranks")
        each = batch // ranks
    words = [word.replace("{ranks}", str(ranks)) for word in command]
    if any("{batch}" in word for word in words):
        if each is None:
            raise DlprofError("the command asks for {batch}: name it with --batch")
        words = [word.replace("{batch}", str(each)) for word in words]
    return tuple(words)
