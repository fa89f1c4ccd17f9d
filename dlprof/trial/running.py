"""Run a job for some steps with settings overridden (`dlprof wrap --set`), then end it and all of its processes.

A run is followed by reading its step log. It has a session of its own (setsid), so that Ctrl-C at the terminal reaches
only dlprof. If dlprof is killed, the kernel sends the run a SIGTERM, and the run ends its own processes.

Also here: catching the signals that interrupt a trial.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from dlprof import overrides
from dlprof.analysis.settings import loader_of
from dlprof.analysis.source.patches import Patch, calls_of
from dlprof.analysis.timeline.steady import SETTLED, WARMUP_STEPS
from dlprof.errors import DlprofError, NotMeasured
from dlprof.overrides import Value
from dlprof.read.run import open_run
from dlprof.record.launch.process import tied
from dlprof.record.launch.supervisor import outcomes
from dlprof.record.launch.watching import StepLog, end, trained
from dlprof.redaction import said
from dlprof.trial.copies import by_edit, copied, edit_in, is_changed, made_by, moved, quiet_trackers
from dlprof.trial.job import Job
from dlprof.trial.measuring import Steps, ahead, steps_of

_POLL_S = 0.05

# A run that is only timed records steps and nothing else.
QUICK = ("--no-trace", "--no-sample", "--stacks", "off", "--flops", "off")

# How many folders of failed runs are kept, with their output.
KEPT = 3

# `python -m` and -c put the working directory first on the path: a user's random.py would then be imported by dlprof.
_START = "import sys; sys.path[0] = sys.argv.pop(1); from dlprof.cli import main; main()"
# These words start a command of dlprof.
DLPROF = (sys.executable, "-c", _START, str(Path(__file__).resolve().parents[2]))

_NAN = re.compile(rb"\bnan\b", re.IGNORECASE)
_MOST_READ = 1 << 20  # bytes from the end of a run's output


# A run is ended as too slow after this many times the longest one so far plus these seconds (for a compiler).
_LONGER, _MORE_S = 3.0, 120.0


def limit_s(left_s: float, longest_s: float) -> float:
    """Return how long a run may take, of the time that is left; `longest_s`: of those before it, 0 for the first."""
    return min(left_s, _LONGER * longest_s + _MORE_S) if longest_s else left_s


@dataclass(frozen=True)
class Failed:
    """A run without a measurement: the reason, the file with its output, and whether it ran out of time (`over`)."""

    why: str
    output: Path | None = None
    over: bool = False


class Stopped(Exception):  # noqa: N818 - not an error
    """The trial was interrupted by a signal."""


@dataclass
class Runner:
    """Runs a job repeatedly, each run in a new folder below `folder`, which must exist.

    A run is ended after `steps` steady steps that take at least `seconds`. `stopped` is called many times a second and
    says whether to give up. `copy`: each run gets a copy of the working directory. `may_be_the_same`: settings that the
    job already has are not a failure. `recording`: options of the recording. `keep`: where to move a run's recording.
    `patch_of`: the edit that makes settings; in a copy, those that `--set` does not have are made so. `edits`: the
    others are, too, and those whose edit had no effect are added to `no_effect`.
    """

    job: Job
    folder: Path
    steps: int
    stopped: Callable[[], bool]
    seconds: float = 0.0
    copy: bool = False
    allow_numerics: bool = False
    may_be_the_same: bool = False
    recording: tuple[str, ...] = QUICK
    keep: Path | None = None
    patch_of: Callable[[Mapping[str, Value]], Patch] = lambda _settings: Patch()
    edits: bool = False
    no_effect: set[str] = field(default_factory=set)
    linked: set[Path] = field(default_factory=set)  # what a copy links to, and a run wrote into
    runs: int = 0
    _failures: list[Path] = field(default_factory=list)
    _printed_nan: bool = False  # a run without changes printed one

    def __call__(self, settings: Mapping[str, Value], limit_s: float) -> Steps | Failed:
        """Run the job with these overrides until it has enough steps, ends, or is out of time; return its steps.

        Raises Stopped if `stopped` returns True. In every case all of its processes have ended.
        """
        self.runs += 1
        folder = self.folder / f"{self.runs:04d}"
        cwd, links, edit = self.job.cwd, set[Path](), Patch()
        if self.edits or any(map(by_edit, settings)):
            edit = self.patch_of({n: v for n, v in settings.items() if self.edits or by_edit(n)})
        if missing := [why for _, _, why in edit.left_out if not self.edits]:
            return Failed(f"the edit cannot be made: {missing[0]}")
        try:
            if self.copy:
                cwd, links = copied(cwd, folder.with_name(f"{folder.name}-copy") / cwd.name, self.job.started_s)
            if why := edit_in(cwd, edit) if self.copy or not edit.files else "only a copy of the folder is edited":
                return Failed(why)
            done = self._run(settings, folder, cwd, edit, limit_s)
        except DlprofError as e:
            return Failed(str(e))
        except Stopped:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        finally:
            shutil.rmtree(folder.with_name(f"{folder.name}-copy"), ignore_errors=True)
            self.linked |= {path for path in links if is_changed(path, self.job.started_s)}
        if isinstance(done, Failed) and done.output is not None:
            self._failures.append(folder)
            for old in self._failures[:-KEPT]:
                shutil.rmtree(old, ignore_errors=True)
        else:
            if self.keep is not None:
                shutil.rmtree(self.keep, ignore_errors=True)
                shutil.move(folder / "run", self.keep)
            shutil.rmtree(folder, ignore_errors=True)
        return done

    def _run(
        self, settings: Mapping[str, Value], folder: Path, cwd: Path, edit: Patch, limit_s: float
    ) -> Steps | Failed:
        trackers = folder / "trackers"
        trackers.mkdir(parents=True)
        output = folder / "output.txt"
        run = folder / "run"
        overridden = {n: v for n, v in settings.items() if not by_edit(n)}
        env = {**self.job.env, "PWD": str(cwd), **quiet_trackers(self.job.env, trackers), "DLPROF_TRIAL": "1"}
        if "PYTHONPATH" in env:
            env["PYTHONPATH"] = moved(env["PYTHONPATH"], self.job.cwd, cwd)
        with output.open("wb") as file:
            process = subprocess.Popen(
                self._words({**self.job.settings, **overridden}, run, cwd),
                env=env,
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=tied(signal.SIGTERM),
            )
        watch = Watch(run, self.steps, self.seconds)
        started = time.monotonic()
        try:
            while process.poll() is None and not watch.enough():
                if self.stopped():
                    raise Stopped
                if time.monotonic() - started > limit_s:
                    break
                time.sleep(_POLL_S)
            ended = process.poll()
        finally:
            end(process.pid, run)
            process.wait()
        if self.stopped():
            raise Stopped
        return self._judged(overridden, edit, run, output, ended, time.monotonic() - started > limit_s)

    def _words(self, settings: Mapping[str, Value], run: Path, cwd: Path) -> list[str]:
        words = [*DLPROF, "wrap", "-o", str(run), "--quiet", "--no-report", *self.recording]
        for name, value in settings.items():
            words += ["--set", f"{name}={value}"]
        allowed = self.allow_numerics or overrides.changes_numbers(self.job.settings)
        command = [moved(word, self.job.cwd, cwd) for word in self.job.command]
        program = Path(command[0])
        if len(program.parts) > 1 and not program.is_absolute() and not (cwd / program).exists():
            command[0] = os.path.abspath(self.job.cwd / program)  # noqa: PTH100 - a link in an environment stays one
        return [*words, *(["--allow-numerics"] if allowed else []), "--", *command]

    def _judged(
        self, settings: Mapping[str, Value], edit: Patch, run: Path, output: Path, ended: int | None, over: bool
    ) -> Steps | Failed:
        """Return the steps of a run, or why it does not count."""
        if ended and ended != self.job.exit_code:
            how = f"was ended by signal {-ended}" if ended < 0 else f"ended with exit code {ended}"
            return Failed(f"the job {how}{said(_last_line(output), self.job.command)}", output)
        effects = outcomes(run, settings)
        for name, effect in effects.items():
            if not effect.applied:
                late = ": its time was up before that" if over else ""
                why = f": {effect.error}" if effect.error else late
                return Failed(f"{name} never took effect{why}", output)
        same = {n for n in settings if effects[n].before == (settings[n],)}
        if len(same) == len(settings) > 0 and not self.may_be_the_same and not edit.files:
            return Failed("the job has these settings already")
        if self.edits:
            self.no_effect |= {n for n in made_by(edit, settings) if n not in same}
        try:
            if unused := _unused(edit, run):
                return Failed(f"the edit of {unused[0]} never took effect: the job runs another copy of it", output)
            steps = steps_of(run)
        except NotMeasured as e:
            when = ", and its time was up" if over else ", and the job had ended" if ended == 0 else ""
            return Failed(f"{e}{when}", output, over)
        nan = _NAN.search(_end_of(output)) is not None
        changed = bool(settings or edit.files)
        if nan and changed and not self._printed_nan:
            return Failed("it prints nan, and the job without changes does not", output)
        self._printed_nan |= nan and not changed
        return steps


class Watch:
    """Reads the step log of a run's rank 0 while it is written, until it has enough steady steps.

    These must also take some seconds: a change that makes steps ten times shorter needs more of them.
    """

    def __init__(self, run: Path, steps: int, seconds: float = 0.0) -> None:
        self._steps, self._least_ns = steps, seconds * 1e9
        self._log = StepLog(run)
        self._lengths: list[int] = []
        self._ahead: int | None = None

    def enough(self) -> bool:
        """Read the new lines and return whether there are enough steps after the warm-up."""
        rows, anew = self._log.follow()
        if anew:  # restarted by its launcher: count from the start
            self._lengths = []
        before = len(self._lengths)
        for row in rows:
            n, dur = trained(row), row.get("dur_ns")
            if n and not row.get("first") and isinstance(dur, int):
                self._lengths += [dur // n] * n
        if len(self._lengths) == before or len(self._lengths) < self._steps + WARMUP_STEPS:
            return False
        if self._ahead is None:
            self._ahead = _ahead(self._log.path)
        calm = SETTLED * statistics.median(self._lengths)
        settled = next((i for i, x in enumerate(self._lengths) if i >= WARMUP_STEPS and x <= calm), WARMUP_STEPS)
        # The warm-up is at most a third of the steps.
        settled = max(min(settled, len(self._lengths) // 3), 1)
        measured = self._lengths[settled + self._ahead :]
        return len(measured) >= self._steps and sum(measured) >= self._least_ns


def _ahead(steps: Path | None) -> int:
    try:
        facts = json.loads((steps or Path()).with_name("facts.json").read_bytes())
        return ahead(loader_of(facts))
    except (OSError, ValueError, AttributeError, TypeError):
        return 0


def _last_line(output: Path) -> str:
    """Return ": " and the last line of a run's output, preferring lines that are not dlprof's; "" without output."""
    lines = [line.strip() for line in _end_of(output).decode(errors="replace").splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith("dlprof: ")] or lines
    return f": {lines[-1][:200]}" if lines else ""


def _end_of(output: Path) -> bytes:
    with output.open("rb") as file:
        file.seek(max(0, output.stat().st_size - _MOST_READ))
        return file.read()


def _unused(edit: Patch, run: Path) -> list[str]:
    """Return the files that were edited and that a run did not use as they are then."""
    try:
        facts = [rank.facts for rank in open_run(run).ranks] if edit.files else []
    except DlprofError as e:
        raise NotMeasured(str(e)) from None
    used = {call.digest for call in calls_of(facts)} | {
        file.get("digest") for of in facts for file in of.get("files", ())
    }
    after = {name: hashlib.sha256(texts[1]).hexdigest() for name, texts in edit.files.items()}
    return [name for name, digest in after.items() if digest not in used]


_INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class Interruption:
    """`by`: the signal that interrupted the trial; 0: none yet."""

    by: int = 0

    def __call__(self) -> bool:
        """Return whether a signal has arrived."""
        return self.by != 0


@contextmanager
def stopping() -> Iterator[Interruption]:
    """Record SIGINT, SIGTERM and SIGHUP instead of ending the process; a signal that is ignored stays ignored."""
    interruption = Interruption()

    def note(number: int, _frame: FrameType | None) -> None:
        interruption.by = interruption.by or number

    before = {number: signal.getsignal(number) for number in _INTERRUPTS}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:
            signal.signal(number, note)
    try:
        yield interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
