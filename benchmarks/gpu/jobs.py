"""Starts jobs and ends them, whatever they have started: no check waits for longer than it was given."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

# Every process that a check starts has a variable of this name. By it they are found again where they have left their
# process group (torchrun's ranks do) or lost their parent.
MARK = "GPU_CHECK_MARK"

# What a job may take to end by itself once it was asked to.
_GRACE_S = 3.0

# What would make a job think that it is recorded already, or a rank of something.
_HIDDEN = ("DLPROF_", "SLURM_", "OMPI_", "PMIX_", "PMI_", "TORCHELASTIC_")
_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code (None: it was ended), its stdout with times of arrival, its stderr."""

    words: tuple[str, ...]
    code: int | None
    took_s: float
    lines: tuple[tuple[float, str], ...]  # time.monotonic() of each line's arrival, and the line
    errors: str

    @property
    def out(self) -> str:
        """The whole stdout."""
        return "\n".join(text for _, text in self.lines)


class JobFailedError(Exception):
    """A job that ended otherwise than it should; its message is one line, `tail` is the end of what it printed."""

    def __init__(self, message: str, tail: str) -> None:
        super().__init__(message)
        self.tail = tail


def environment(base: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a job: that of this process without an outer recording or launcher, dlprof found in it.

    Python finds dlprof by PYTHONPATH, since nothing is installed where it runs for ten minutes. Programs of
    packages that lie in a folder of PYTHONPATH (py-spy) are in its folder bin.
    """
    env = {k: v for k, v in base.items() if not k.startswith(_HIDDEN) and k not in _RANKS}
    if MARK in base:
        env[MARK] = base[MARK]
    paths = [p for p in (str(ROOT), *base.get("PYTHONPATH", "").split(os.pathsep)) if p]
    programs = [str(Path(p, "bin")) for p in paths if Path(p, "bin").is_dir()]
    env["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    env["PATH"] = os.pathsep.join(dict.fromkeys([*base.get("PATH", "").split(os.pathsep), *programs]))
    # Lines must come when they are printed: their arrival is what a step's length is taken from.
    env["PYTHONUNBUFFERED"] = "1"
    return env


def run(
    words: Sequence[str | Path],
    cwd: Path,
    limit_s: float,
    changes: Mapping[str, str] | None = None,
    hear: Callable[[str], None] | None = None,
) -> Ended:
    """Run a command to its end, or end it and everything that it started after `limit_s`.

    `changes` are to its environment; `hear` gets each line of its stdout as it comes, in another thread.
    """
    mark = uuid.uuid4().hex
    env = environment(os.environ) | dict(changes or {})
    env[MARK] = f"{env.get(MARK, '')} {mark}".strip()
    began = time.monotonic()
    lines: list[tuple[float, str]] = []
    errors: list[str] = []
    command = tuple(map(str, words))
    try:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as e:
        return Ended(command, 127, 0.0, (), f"{command[0]}: {e.strerror or e}")
    assert process.stdout is not None
    assert process.stderr is not None
    out, err = process.stdout, process.stderr

    def read_out() -> None:
        for text in out:
            lines.append((time.monotonic(), text.rstrip("\n")))
            if hear is not None:
                hear(lines[-1][1])

    def read_err() -> None:
        errors.extend(err)

    readers = [threading.Thread(target=read, daemon=True) for read in (read_out, read_err)]
    for reader in readers:
        reader.start()
    code: int | None
    try:
        code = process.wait(max(limit_s, 0.1))
    except subprocess.TimeoutExpired:
        code = None
    finally:
        # Where it ended well, too: what it left running would disturb the next one. And on the way out of an exception.
        end_marked(mark)
        if process.poll() is None:  # where /proc tells no environment, its group is all that is known
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
    for reader in readers:
        reader.join(_GRACE_S)
    said = "".join(errors)
    if code is None:
        said += f"\nended after {limit_s:.0f} s"
    return Ended(command, code, time.monotonic() - began, tuple(lines), said)


class Beside:
    """A job that runs beside, in a thread of its own; the JSON objects that it prints come into `rows`."""

    def __init__(
        self, words: Sequence[str | Path], cwd: Path, limit_s: float, changes: Mapping[str, str] | None = None
    ) -> None:
        self.rows: list[dict[str, Any]] = []
        self._ended: list[Ended] = []

        def work() -> None:
            self._ended.append(run(words, cwd, limit_s, changes, self._hear))

        self._thread = threading.Thread(target=work, daemon=True)
        self._thread.start()

    def _hear(self, text: str) -> None:
        if text.startswith("{"):
            self.rows.append(json.loads(text))

    def until(self, key: str, least: float = 0) -> dict[str, Any]:
        """Wait for a row in which this is so much, and return it; raise JobFailedError where the job ends before."""
        while True:
            ended = list(self._ended)  # looked at first: what it printed last is there by then
            for row in list(self.rows):
                if row.get(key, least - 1) >= least:
                    return row
            if ended:
                raise JobFailedError(f"a job ended before its {key} was {least:g}", tail(ended[0]))
            time.sleep(0.05)

    def goes_on(self, steps: int) -> bool:
        """Whether it makes so many more steps."""
        try:
            self.until("step", steps + max((row.get("step", 0) for row in list(self.rows)), default=0))
        except JobFailedError:
            return False
        return True

    def end(self) -> Ended:
        """Wait for its end, and return how it ended."""
        self._thread.join()
        return self._ended[0]


def must(what: str, ended: Ended, code: int = 0) -> Ended:
    """Return how a command ended; raise JobFailedError where that is not with this code."""
    if ended.code != code:
        raise JobFailedError(f"{what}: {how(ended)}", tail(ended))
    return ended


def how(ended: Ended) -> str:
    """Return in words how a command ended that should have ended otherwise."""
    if ended.code is None:
        return f"it was not done after {ended.took_s:.0f} s and was ended"
    if ended.code < 0:
        return f"it was ended by {signal.Signals(-ended.code).name}: {last_words(ended)}"
    return f"exit code {ended.code}: {last_words(ended)}"


def last_words(ended: Ended) -> str:
    """Return the line of stderr, else stdout, that tells most of why a command failed: the last that names an error."""
    texts = [t.strip() for t in (ended.errors or ended.out).splitlines() if t.strip()]
    named = [t for t in texts if "Error" in t or "error:" in t or "FAILED" in t]
    return (named or texts or ["it said nothing"])[-1][:300]


def tail(ended: Ended, most: int = 30) -> str:
    """Return the last lines of what a command printed, stdout first."""
    out = [f"  | {text}" for _, text in ended.lines[-most:]]
    err = [f"  ! {text}" for text in ended.errors.splitlines()[-most:]]
    return "\n".join([f"  $ {' '.join(ended.words)}", *out, *err])


def end_marked(mark: str) -> None:
    """End every process whose environment has this mark: asked to first, and killed where it does not."""
    pids = marked(mark)
    if not pids:
        return
    _signal(pids, signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_S
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    # What was forked meanwhile, too: until none is left, or those that are cannot be killed.
    for _ in range(20):
        pids = marked(mark)
        if not pids:
            return
        _signal(pids, signal.SIGKILL)
        time.sleep(0.05)


def marked(mark: str) -> list[int]:
    """List the processes that have this mark in their environment and still run, this one excepted."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            if mark.encode() in (entry / "environ").read_bytes() and _runs(entry):
                found.append(int(entry.name))
    return found


def _runs(entry: Path) -> bool:
    """Whether a process is more than a zombie, which nobody can end."""
    return (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z"


def _signal(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def python(*words: str | Path) -> list[str]:
    """Return the words that run Python as this process does."""
    return [sys.executable, *map(str, words)]
