"""Puts the recorder into ranks that run already, from where it leaves by itself.

The interpreter runs our code on its main thread, between two bytecodes: by its own remote execution (PEP 768,
sys.remote_exec) where this Python and the job's are 3.14, else as a pending call (Py_AddPendingCall) that gdb adds.

gdb stops the process for as long as it takes to read the symbols of Python and of the C library, calls mmap and
Py_AddPendingCall in it, and lets it go on. It sets no breakpoint, and finishes its work where this process is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlprof.errors import DlprofError
from dlprof.files import write
from dlprof.live.gather import ranks_below
from dlprof.live.look import Process, mine
from dlprof.plain import plain
from dlprof.record.joined import TOGETHER_S
from dlprof.record.launch import options
from dlprof.record.launch.folder import RunFolder, compress, opened
from dlprof.record.launch.supervisor import Samplers, recorded, whole_run

_PACKAGE = Path(__file__).absolute().parents[1]
_ENTERS_S = 15.0  # that a rank may take to come to its next bytecode
_LEAVES_S = 15.0
_GDB_S = 60.0
_EVERY_S = 0.1
_AT_ONCE = 8
_OLDEST = (3, 10)

# What gdb does in this order; it lets go of the process at its end in any case. Of the symbols it reads only those of
# two libraries: those of torch take seconds, in which the process stands still. The first of the two is not there where
# Python is one file, and is then passed over, as is what stands after an error. 3: to read and to write; 34: private
# and anonymous.
_GDB = (
    "set confirm off",
    "set pagination off",
    "set width 0",
    "set unwindonsignal on",
    "set auto-solib-add off",
    "attach {pid}",
    "sharedlibrary libpython3",
    "sharedlibrary /libc[.-]",
    "set $at = ((unsigned long (*)(long, unsigned long, int, int, int, long)) mmap)(0, {size}, 3, 34, -1, 0)",
    "restore {code} binary $at",
    "print ((int (*)(void *, void *)) Py_AddPendingCall)((void *) PyRun_SimpleString, (void *) $at)",
    "detach",
)

# The recorder by its path, as the hook of a recorded job loads it: the job may have no dlprof, or another version.
_CODE = """
try:
    import sys
    if "dlprof" not in sys.modules:
        import importlib.util
        spec = importlib.util.spec_from_file_location(
            "dlprof", {package!r} + "/__init__.py", submodule_search_locations=[{package!r}]
        )
        sys.modules["dlprof"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    from dlprof.record.joined import enter
    enter({asked!r})
except Exception as e:
    import json
    with open({answer!r}, "w") as file:
        json.dump({{"refused": "the recorder cannot be loaded there: " + repr(e)}}, file)
"""


@dataclass
class Inside:
    """A rank that the recorder is put into. `answer`: the file in which it says what became of that."""

    number: int
    process: Process
    answer: Path
    refused: str = ""

    def said(self) -> Mapping[str, Any]:
        """Return its last answer; {} before the first."""
        with contextlib.suppress(OSError, ValueError):
            found = json.loads(self.answer.read_bytes())
            return found if isinstance(found, dict) else {}
        return {}

    @property
    def runs(self) -> bool:
        """Return whether the process is still there."""
        return Path(f"/proc/{self.process.pid}").exists()


class Injected:
    """The recorder in the ranks of a job, from `enter` until `leave` has returned; the run folder is `path`."""

    def __init__(self, pids: Sequence[int], out: Path | None, seconds: float) -> None:
        """Find the ranks, and make the folder. Raises DlprofError where none can be recorded."""
        self._seconds = seconds
        ranks = _ranks(pids)
        for one in ranks.values():
            if why := why_not(one):
                raise DlprofError(f"process {one.pid}: {why}")
        first = Path("/proc", str(next(iter(ranks.values())).pid))
        words = first.joinpath("cmdline").read_bytes().rstrip(b"\0").decode(errors="replace").split("\0")
        self._cwd = str(first.joinpath("cwd").readlink())
        # As a recording by default.
        self._asked = options.asked(
            flops="auto",
            keep_arguments=False,
            lines=(),
            memory=False,
            nvtx=False,
            ranks="all",
            sample="auto",
            shapes=False,
            stacks=options.stacks("on"),
            window="",
        )
        written = {**self._asked, "attached": ",".join(str(one.pid) for one in ranks.values())}
        run, why = opened(out, _name(words), words, written, {})
        if run is None:
            raise DlprofError(why)
        self._run: RunFolder = run
        self.path, self.named = run.path, run.named
        folder = run.path / "injected"
        folder.mkdir()
        self._together = folder / "together"
        self.ranks = [Inside(n, one, folder / f"{one.pid}.json") for n, one in sorted(ranks.items())]
        self._entered_ns = time.time_ns()
        self._samplers = Samplers(run.path, {**os.environ, **options.variables(self._asked)})

    def enter(self) -> list[str]:
        """Put the recorder into the ranks; return why it is not in some. Raises DlprofError where it is in none."""
        # Not in the run's folder: what is handed over to an interpreter that does not come to it now stays there.
        scripts = Path(tempfile.mkdtemp(prefix="dlprof-"))
        variables = options.variables(self._asked) | {
            name: value for name, value in recorded({}, self.path).items() if name.startswith("DLPROF_")
        }

        def enter(one: Inside) -> None:
            asked = {
                "pid": one.process.pid,
                "run": str(self.path),
                "variables": variables,
                "answer": str(one.answer),
                "until": time.time() + _GDB_S + _ENTERS_S,
                "seconds": self._seconds,
                "together": str(self._together) if len(self.ranks) > 1 else "",
                "leads": one is self.ranks[0],
            }
            code = scripts / f"{one.process.pid}.py"
            write(code, _CODE.format(package=str(_PACKAGE), asked=asked, answer=str(one.answer)))
            one.refused = hand_over(one.process.pid, code)

        with ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(enter, self.ranks))
        given_up = time.monotonic() + _ENTERS_S
        waiting = [one for one in self.ranks if not one.refused]
        while waiting and time.monotonic() < given_up:
            time.sleep(_EVERY_S)
            waiting = [one for one in waiting if one.runs and not {"entered", "refused", "left"} & one.said().keys()]
        if not waiting:
            shutil.rmtree(scripts, ignore_errors=True)
        for one in self.ranks:
            said = one.said()
            if not (one.refused or {"entered", "left"} & said.keys()):
                busy = said.get("waits") or "its main thread has run no Python meanwhile: it may stand still"
                one.refused = plain(said.get("refused") or (busy if one.runs else "it has ended"), 200)
        refused = [f"rank {one.number} (process {one.process.pid}): {one.refused}" for one in self.ranks if one.refused]
        if len(refused) == len(self.ranks):
            shutil.rmtree(self.path, ignore_errors=True)
            raise DlprofError(f"nothing is recorded: {refused[0]}")
        self._together.touch()
        self._samplers.start()
        self._entered_ns = time.time_ns()
        return refused

    def leave(self) -> list[str]:
        """Wait until the recorder has left, which it does by itself, and at Ctrl-C at once.

        End the run, and return warnings.
        """
        inside = [one for one in self.ranks if not one.refused]
        try:
            try:
                _wait(inside, TOGETHER_S + self._seconds + _LEAVES_S)
            except KeyboardInterrupt:
                for one in inside:
                    one.answer.with_name(one.answer.name + ".stop").touch()
                _wait(inside, _LEAVES_S)
        finally:
            end_ns = time.time_ns()
            self._samplers.end()
            compress(self._run.ranks)
            warnings = self._samplers.wait()
            for one in inside:
                if problem := one.said().get("problem"):
                    warnings.append(f"rank {one.number}: {plain(problem, 200)}")
                elif "left" not in one.said() and one.runs:
                    warnings.append(f"rank {one.number}: the recorder leaves when its main thread runs Python again")
            # How the job will end is not known.
            end = {"end_ns": end_ns, "exit": {"code": 0, "signal": None}, "resumed_ns": [], "warnings": warnings}
            begun = {"start_ns": self._entered_ns, "cwd": self._cwd}
            more = self._run.end(lambda: whole_run(self.path, {}), **begun, **end)
        return [*warnings, *(more or ())]


def _wait(inside: Sequence[Inside], seconds: float) -> None:
    until = time.monotonic() + seconds
    while any(one.runs and "left" not in one.said() for one in inside) and time.monotonic() < until:
        time.sleep(_EVERY_S)


def why_not(process: Process) -> str:
    """Return why the recorder cannot be put into a process; "" if it can, as far as that is seen from outside."""
    place = Path(f"/proc/{process.pid}")
    if process.run:
        return f"it is recorded already, into {process.run}"
    tracer = _field(place, "TracerPid")
    if tracer not in ("", "0"):
        return f"process {tracer} traces it, as a debugger does"
    if process.state in "Tt":
        return "it is stopped"
    version = _python(place)
    if version is not None and version < _OLDEST:
        return f"it runs Python {version[0]}.{version[1]}, and the recorder needs {_OLDEST[0]}.{_OLDEST[1]} or later"
    if not Path(f"{place}/root{_PACKAGE}").exists():
        return f"it is in a container that has no {_PACKAGE}"
    if not _remote(version) and shutil.which("gdb") is None:
        return "this needs gdb (apt install gdb), or Python 3.14 for both dlprof and the job"
    level, able = ptrace_scope()
    if level == 3 or (level and not able):
        return f"no process may look into another one on this host ({_YAMA} is {level})"
    return ""


def _ranks(pids: Sequence[int]) -> dict[int, Process]:
    _, ranks = ranks_below(pids, mine())
    if why := next((one.unseen for one in ranks.values() if one.unseen), ""):
        raise DlprofError(f"which processes are ranks is not known: {why} (see `dlprof doctor`)")
    return ranks


def hand_over(pid: int, code: Path) -> str:
    """Have a process run that file's code; return why it cannot be, or "" if it will."""
    if _remote(_python(Path(f"/proc/{pid}"))):
        try:
            sys.remote_exec(pid, str(code))  # type: ignore[attr-defined]
        except (OSError, RuntimeError) as e:
            return f"its interpreter takes no code: {plain(e, 200)}"
        return ""
    # One expression that leaves no name in __main__, where it is run, and raises nothing.
    if shutil.which("gdb") is None:
        return "gdb is not installed"
    text = code.with_suffix(".code")
    text.write_bytes(f"exec({code.read_text()!r}, {{}})\n".encode() + b"\0")
    words = ["gdb", "-nx", "-batch", "-iex", "set debuginfod enabled off"]
    for line in _GDB:
        words += ["-ex", line.format(pid=pid, size=text.stat().st_size, code=text)]
    # In a session of its own: nothing that ends this process may end it half-way, while it calls a function there.
    with subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        cwd="/",
    ) as gdb:
        try:
            said = gdb.communicate(timeout=_GDB_S)[0].decode(errors="replace")
        except subprocess.TimeoutExpired:
            gdb.kill()
            gdb.wait()
            _let_go(pid)
            return "gdb took too long"
    if re.search(r"^\$\d+ = 0$", said, re.MULTILINE):
        return ""
    wrong = re.search(r"^(ptrace: .*|No symbol .*|.*(?:not permitted|annot).*)$", said, re.MULTILINE)
    return f"gdb: {plain(wrong[0] if wrong else said[-200:] or 'it said nothing', 200)}"


def _let_go(pid: int) -> None:
    """Have a process go on that a gdb which was killed has left stopped; it was not stopped before."""
    with contextlib.suppress(OSError):
        if _field(Path(f"/proc/{pid}"), "State").startswith("T"):
            os.kill(pid, signal.SIGCONT)


def _python(place: Path) -> tuple[int, int] | None:
    """Return the version of a process's Python by the files that it has mapped; None: they do not say."""
    with contextlib.suppress(OSError):
        found = re.search(r"/(?:lib)?python(3)\.(\d+)[\w.]*$", place.joinpath("maps").read_text(), re.MULTILINE)
        return (int(found[1]), int(found[2])) if found else None
    return None


def _remote(version: tuple[int, int] | None) -> bool:
    """Return whether the interpreters of this process and of the job can do it themselves: they must be alike."""
    return hasattr(sys, "remote_exec") and version == sys.version_info[:2]


_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_CAP_SYS_PTRACE = 19  # <linux/capability.h>


def ptrace_scope() -> tuple[int, bool]:
    """Return who may trace whom on this host, 0 where nothing is said, and whether this process may nevertheless."""
    with contextlib.suppress(OSError, ValueError):
        able = int(_field(Path("/proc/self"), "CapEff") or "0", 16) >> _CAP_SYS_PTRACE & 1
        return int(_YAMA.read_text()), bool(able)
    return 0, True


def _field(place: Path, name: str) -> str:
    with contextlib.suppress(OSError):
        for line in place.joinpath("status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return line.partition(":")[2].strip()
    return ""


def _name(words: Sequence[str]) -> str:
    script = next((word for word in words if word.endswith(".py")), words[0] if words else "job")
    return Path(script).stem or "job"
