"""`dlprof sweep`: run every point of a grid for some steps in several rounds, and save each reading at once.

Rounds go through the points forwards and backwards in turns, so that a machine that becomes slower or faster affects
all of them alike. A point that fails does not affect the others. An interrupted sweep continues where it stopped.

Also here: the axes and the grid, from the NAME=VALUES words of the command line; and the recordings of a job on several
numbers of ranks, in such rounds too.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from msgspec.structs import replace as changed

from dlprof import overrides
from dlprof.analysis.whatif import Request, predictions
from dlprof.errors import DlprofError, NotMeasured
from dlprof.files import compact, write, writing
from dlprof.overrides import Value
from dlprof.read.opening import read_file
from dlprof.read.run import open_run
from dlprof.redaction import words
from dlprof.result.sweep import FILE, Axis, Point, Reading, Sweep, from_json, to_json
from dlprof.trial.job import Job
from dlprof.trial.running import Failed, Runner, Stopped, limit_s
from dlprof.units import count, duration, few

# The only setting with predictions: they come from a replay of the loader's batches.
WORKERS = "loader.num_workers"

RECORDED, RUNS = "recorded", "runs"  # in the folder of a sweep

# Points that are not told apart are measured in so many times as many rounds.
_MOST_TIMES = 3

_TRACED = ("--no-sample", "--stacks", "off", "--flops", "off")
_TRACED_STEPS = 60  # at least, of the recording for predictions: its trace window is over by then


@dataclass(frozen=True)
class Options:
    """The options of `dlprof sweep`."""

    minutes: float = 30.0
    steps: int = 30
    rounds: int = 2
    predict: bool = True
    copy: bool = False
    allow_numerics: bool = False


def begun(command: Sequence[str], axes: Sequence[Axis], folder: Path, options: Options) -> Sweep:
    """Return the sweep in a folder, to continue it, or a new one.

    Raises DlprofError if the folder has a sweep of another command, or an axis is neither a setting nor in the command.
    """
    placeholders(axes, command)
    points = grid(axes)
    digest = _digest(command, secrets.token_hex(8))
    sweep = Sweep(
        tuple(words(command)), tuple(axes), tuple(map(Point, points)), options.rounds, options.steps, digest=digest
    )
    path = folder / FILE
    if not path.exists():
        return sweep
    try:
        before = from_json(json.loads(read_file(path)))
    except (ValueError, RecursionError) as e:
        raise DlprofError(f"{path} is broken ({str(e)[:120]}): remove it, or name another folder (-o)") from None
    if before.digest != _digest(command, before.digest.partition(":")[0]) or [a.name for a in before.axes] != [
        a.name for a in axes
    ]:
        raise DlprofError(f"{folder} holds a sweep of another command or other settings: name another folder (-o)")
    known = {_key(p.values): p for p in before.points}
    # Points that failed are tried again: the cause may have been the machine.
    kept = tuple(changed(known.get(_key(p.values), p), why="") for p in sweep.points)
    return changed(sweep, points=kept, seconds=before.seconds, digest=before.digest)


def _digest(command: Sequence[str], salt: str) -> str:
    """Return SALT:DIGEST, which identifies a command without revealing it; the digest is slow to compute."""
    data = "\0".join(command).encode(errors="surrogateescape")
    return f"{salt}:{hashlib.pbkdf2_hmac('sha256', data, salt.encode(), 200_000).hex()}"


def swept(
    sweep: Sweep,
    job: Job,
    folder: Path,
    options: Options,
    stopped: Callable[[], bool],
    tell: Callable[[str], None] = lambda _line: None,
) -> Sweep:
    """Run the missing points until all are done, the time is up or `stopped` returns True.

    sweep.json is valid at any time, and all processes have ended afterwards. Raises DlprofError if the folder cannot be
    written.
    """
    running = Running(sweep, job, folder, options, stopped, tell)
    with writing(str(folder)):
        (folder / RUNS).mkdir(parents=True, exist_ok=True)
    try:
        running.predict()
        running.measure()
    except Stopped:
        running.keep("interrupted")
    return running.sweep


@dataclass
class Running:
    """A sweep while it runs."""

    sweep: Sweep
    job: Job
    folder: Path
    options: Options
    stopped: Callable[[], bool]
    tell: Callable[[str], None]
    longest_s: float = 0.0

    def __post_init__(self) -> None:
        self.started = time.monotonic()
        self.earlier_s = self.sweep.seconds
        self.of_command = placeholders(self.sweep.axes, self.job.command)
        self.runs = 0

    def left(self) -> float:
        """Return how many seconds are left."""
        return 60 * self.options.minutes - (time.monotonic() - self.started)

    def measure(self) -> None:
        """Measure every point once in each round, and the best ones further, as long as they are not told apart.

        In one round nobody sees how much runs differ, so nothing is measured further.
        """
        places, once = range(len(self.sweep.points)), self.sweep.rounds == 1
        if not all(self._round(n, places) for n in range(self.sweep.rounds)):
            return
        for n in range(self.sweep.rounds, 1 if once else _MOST_TIMES * self.sweep.rounds):
            rivals = self.sweep.rivals
            if not rivals:
                break
            best = self.sweep.best
            contest = [place for place in places if (p := self.sweep.points[place]) in rivals or p is best]
            self.tell(f"the best {len(contest)} points are not told apart: once more")
            if not self._round(n, contest):
                return
        self.keep("complete")

    def _round(self, n: int, places: Sequence[int]) -> bool:
        """Measure each point of these that has no more than n readings; return False where the time is up."""
        for place in places if n % 2 == 0 else reversed(places):
            point = self.sweep.points[place]
            if point.why or len(point.readings) > n:
                continue
            if self.left() < self.longest_s or self.left() <= 0:
                self.keep("out_of_time")
                return False
            self.read(place, point)
        return True

    def read(self, place: int, point: Point) -> None:
        """Run a point, and keep its reading, or why it has none."""
        started = time.monotonic()
        limit = limit_s(self.left(), self.longest_s)
        found = self._runner(point.values)(settings(point.values, self.of_command), limit)
        if isinstance(found, Failed):
            if found.over and self.left() <= 0:
                return
            point = changed(point, why=found.why)
        else:
            self.longest_s = max(self.longest_s, time.monotonic() - started)
            point = changed(point, readings=(*point.readings, Reading(found.step_ns, found.samples)))
        points = self.sweep.points
        self.sweep = changed(self.sweep, points=(*points[:place], point, *points[place + 1 :]))
        self.keep("interrupted")
        name = " ".join(f"{n}={v}" for n, v in point.values.items())
        self.tell(f"{name}: {point.why or f'{duration(point.readings[-1].step_ns)} a step'}")

    def predict(self) -> None:
        """If only the number of workers varies, record the job once and predict all points from that."""
        alone = [a.name for a in self.sweep.axes] == [WORKERS]
        if not (self.options.predict and alone) or all(p.predicted_ns for p in self.sweep.points):
            return
        recorded = self.folder / RECORDED
        runner = replace(self._runner({}), recording=_TRACED, keep=recorded)
        runner.steps = max(self.options.steps, _TRACED_STEPS)
        self.tell("recording the job as it is, for the predictions")
        started = time.monotonic()
        found = runner({}, self.left())
        if isinstance(found, Failed):
            self._warn(f"nothing is predicted: the job as it is was not recorded: {found.why}")
            return
        self.longest_s = time.monotonic() - started
        values = [int(p.values[WORKERS]) for p in self.sweep.points]
        try:
            known = predictions(open_run(recorded), [Request(workers=n) for n in values])
        except (DlprofError, NotMeasured) as e:
            self._warn(f"nothing is predicted: {e}")
            return
        whys = {a.why for a in known if a.step_ns is None}
        if whys:
            self._warn(f"not all is predicted: {few(sorted(whys), 3)}")
        points = [changed(p, predicted_ns=_finite(a.step_ns)) for p, a in zip(self.sweep.points, known, strict=True)]
        self.sweep = changed(self.sweep, points=tuple(points))
        self.keep("interrupted")

    def _runner(self, values: Mapping[str, str]) -> Runner:
        self.runs += 1
        folder = self.folder / RUNS / f"{self.runs:04d}"
        folder.mkdir(parents=True, exist_ok=True)
        job = replace(self.job, command=filled(self.job.command, values))
        o = self.options
        return Runner(
            job, folder, o.steps, self.stopped, copy=o.copy, allow_numerics=o.allow_numerics, may_be_the_same=True
        )

    def _warn(self, text: str) -> None:
        self.sweep = changed(self.sweep, warnings=tuple(dict.fromkeys((*self.sweep.warnings, text))))
        self.tell(text)

    def keep(self, state: str) -> None:
        """Write sweep.json."""
        seconds = round(self.earlier_s + time.monotonic() - self.started, 1)
        self.sweep = changed(self.sweep, state=state, seconds=seconds)
        with writing(str(self.folder / FILE)):
            write(self.folder / FILE, compact(to_json(self.sweep)))


def _key(values: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(values.items()))


def _finite(ns: float | None) -> float | None:
    return ns if ns is not None and math.isfinite(ns) and ns > 0 else None


# The most points of a sweep: twice half a minute each takes more than an hour and a half.
MOST_POINTS = 100


_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)(?:(\*|\.\.)(\d+))?")


_PROCESSES = re.compile(r"--nproc[-_]per[-_]node[=\0]\{([^}]+)\}")


_NAME = re.compile(r"[A-Za-z][\w.-]*")


def axis(word: str) -> Axis:
    """Return the axis of NAME=VALUES: values by commas, and ranges A..B, A..B..STEP, A..B*FACTOR; raise DlprofError."""
    name, sign, text = word.partition("=")
    if not sign or not _NAME.fullmatch(name):
        raise DlprofError(f"{word!r} is no axis; write loader.num_workers=0,1,2,4 or batch=8..64*2")
    values = tuple(dict.fromkeys(v for part in text.split(",") for v in _values(part.strip())))
    if not values:
        raise DlprofError(f"{word!r} has no values")
    return Axis(name, values)


def _values(text: str) -> Iterator[str]:
    m = _RANGE.fullmatch(text)
    if not m:
        if text:
            yield text
        return
    first, last, by = int(m[1]), int(m[2]), int(m[4] or 1)
    if first > last or by < 1 or (m[3] == "*" and (by < 2 or first < 1)):
        raise DlprofError(f"{text!r} is no range; write 0..8, 0..16..4 or 1..64*2")
    at, many = first, 0
    while at <= last:
        yield str(at)
        many += 1
        if many > MOST_POINTS:
            raise DlprofError(f"{text!r} has more than {MOST_POINTS} values")
        at = at * by if m[3] == "*" else at + by


def grid(axes: Sequence[Axis]) -> list[dict[str, str]]:
    """Return all combinations, varying the last axis first; raise DlprofError for too many, or a name given twice."""
    names = [a.name for a in axes]
    if len(set(names)) < len(names):
        raise DlprofError("an axis is named twice")
    points = [
        dict(zip(names, values, strict=True))
        for values in itertools.islice(itertools.product(*(a.values for a in axes)), MOST_POINTS + 1)
    ]
    if len(points) > MOST_POINTS:
        raise DlprofError(f"the grid has more than {MOST_POINTS} points")
    return points


def placeholders(axes: Sequence[Axis], command: Sequence[str]) -> set[str]:
    """Return the axes that the command has as {NAME}; raise DlprofError if another one is not a setting of --set."""
    found = {a.name for a in axes if any(f"{{{a.name}}}" in word for word in command)}
    for a in axes:
        if a.name not in found:
            try:
                for value in a.values:
                    overrides.parse([f"{a.name}={value}"])
            except DlprofError as e:
                raise DlprofError(f"{e}; or write {{{a.name}}} where the command takes it") from None
    return found


def threads(axes: Sequence[Axis], command: Sequence[str], cores: int) -> int | None:
    """Return how many threads each process gets where an axis is torchrun's number of processes; None: none is.

    torchrun gives each of several processes one thread, and a single one all cores: these points do not compare.
    """
    names = {a.name: a for a in axes}
    if {"env.OMP_NUM_THREADS", "torch.num_threads"} & set(names):
        return None
    found = _PROCESSES.search("\0".join(command))
    values = names[found[1]].values if found and found[1] in names else ()
    most = max((int(v) for v in values if v.isdigit()), default=0)
    return max(cores // most, 1) if most else None


def filled(command: Sequence[str], values: Mapping[str, str]) -> tuple[str, ...]:
    """Return the command with each {NAME} replaced by its value."""
    words = []
    for word in command:
        for name, value in values.items():
            word = word.replace(f"{{{name}}}", value)
        words.append(word)
    return tuple(words)


def settings(values: Mapping[str, str], of_command: set[str]) -> dict[str, Value]:
    """Return those values of a point that are overrides."""
    return overrides.parse(f"{name}={value}" for name, value in values.items() if name not in of_command)


# A job on several numbers of ranks, for `dlprof scale`.

# Power and FLOPs are needed; Python's stacks are not.
_RECORDING = ("--stacks", "off")


@dataclass
class Recorded:
    """The recordings by number of ranks, why a size has none, and why the study is not complete ("" if it is)."""

    paths: dict[int, list[Path]] = field(default_factory=dict)
    failed: list[tuple[str, str]] = field(default_factory=list)
    lacking: str = ""


def record_sizes(
    jobs: Mapping[int, Job],
    folder: Path,
    stopped: Callable[[], bool],
    tell: Callable[[str], None] = lambda _line: None,
    *,
    minutes: float,
    steps: int,
    rounds: int,
) -> Recorded:
    """Record the job of each number of ranks until all are done, the time is up, or `stopped` returns True.

    Rounds go through the sizes as those of a sweep through its points. A size that fails does not affect the others.
    Recordings that exist already are not made again. All processes have ended afterwards. Raises DlprofError if the
    folder cannot be written.
    """
    with writing(str(folder)):
        (folder / RUNS).mkdir(parents=True, exist_ok=True)
    done, started, longest = Recorded(), time.monotonic(), 0.0
    failed = set[int]()
    for n in range(rounds):
        for ranks in list(jobs)[:: 1 if n % 2 == 0 else -1]:
            path = folder / f"ranks-{ranks:04d}-{n + 1}"
            if ranks in failed:
                continue
            if _holds_a_run(path):
                done.paths.setdefault(ranks, []).append(path)
                continue
            left = 60 * minutes - (time.monotonic() - started)
            if left <= longest:
                done.lacking = "the time was up before all sizes were recorded as often as asked"
                return done
            tell(f"{count(ranks, 'rank')}, round {n + 1} of {rounds}")
            shutil.rmtree(work := folder / RUNS / path.name, ignore_errors=True)
            work.mkdir()
            runner = Runner(jobs[ranks], work, steps, stopped, recording=_RECORDING, keep=path)
            began = time.monotonic()
            try:
                found = runner({}, limit_s(left, longest))
            except Stopped:
                done.lacking = "it was interrupted before all sizes were recorded as often as asked"
                return done
            longest = max(longest, time.monotonic() - began)
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
