"""Where the script makes and calls what training consists of: the lines that findings name, and the files they are in.

A line is that of the innermost frame that is not Python's, a package's or dlprof's. Of files that a job's values may
stand in, which are modules, configuration that the script opened, and lines of shells, names and digests are kept, so
that a report edits only what is still as it was.
"""

from __future__ import annotations

import functools
import hashlib
import linecache
import os
import re
import stat
import sys
import sysconfig
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from dlprof import redaction
from dlprof.plain import words_of
from dlprof.record import guarded
from dlprof.record.model.names import parameters_of

if TYPE_CHECKING:
    from dlprof.record.loaders import LoaderSeen

MOST_FRAMES = 64  # that are walked: a script deeper in libraries is not named
MOST_FILE_BYTES = 2 << 20
MOST_SOURCE = 300  # characters of a call's text
_MOST_LINES = 12
_OURS = __file__.rpartition("record/")[0]  # as co_filename is written


@dataclass(frozen=True)
class Place:
    """A call in the user's code. `file` is relative to the working directory if it is below it.

    `end_line`, `column`, `end_column`: the last line and the columns of the call's text, in bytes of UTF-8; 0: unknown.
    `source`: what is kept of that text. `digest`: SHA-256 of the whole file; "": unknown. `via`: the function of a
    library that made the call for the user's line; "": that line made it.
    """

    file: str
    line: int
    function: str
    end_line: int = 0
    column: int = 0
    end_column: int = 0
    source: str = ""
    digest: str = ""
    via: str = ""

    @property
    def quoted(self) -> dict[str, Any]:
        """What names and quotes its line in the facts of a counted step."""
        return {"file": self.file, "line": self.line, "function": self.function, "source": self.source}


class Frames:
    """Finds the user's frame below a call, and names it.

    `directory`: the one that files are named from, with its slash. `since`: when the process had not yet imported most
    of its files (Unix time, s): one that was written later may not be what it runs.
    """

    def __init__(self, directory: str, since: float) -> None:
        self._here = directory
        self._since = since
        self._is_own = own_files()
        self._read: dict[str, tuple[str, list[bytes]]] = {}  # file → its digest and lines

    def forget_sources(self) -> None:
        """Drop the text of the files, which is read anew where another call is seen."""
        self._read.clear()

    def find(self, frame: FrameType | None) -> tuple[FrameType | None, FrameType | None]:
        """Return the innermost frame of the user's at or below this one, and the innermost of a library above it."""
        library = None
        for _ in range(MOST_FRAMES):
            if frame is None:
                break
            file = frame.f_code.co_filename
            if self._is_own(file):
                return (None, None) if _is_compiled(frame) else (frame, library)
            if "/torch/_dynamo/symbolic_convert.py" in file:
                break  # a call that is read, and not made
            if library is None and "-packages/" in file and "/torch/" not in file and not file.startswith(_OURS):
                library = frame
            frame = frame.f_back
        return None, None

    def calls_module(self, frame: FrameType | None) -> bool:
        """Return whether the user's line below a frame of ours calls the module itself, with no function between."""
        while frame is not None and (
            (file := frame.f_code.co_filename).startswith(_OURS) or file.endswith("/torch/nn/modules/module.py")
        ):
            frame = frame.f_back
        return frame is not None and self._is_own(frame.f_code.co_filename)

    def place(self, frame: FrameType, library: FrameType | None = None, *, is_call: bool = True) -> Place:
        """Return where a frame of the user's is now; `is_call`: in a call, and not in the first line of a loop."""
        code = frame.f_code
        line, end_line, column, end_column = _position(frame) if is_call else (frame.f_lineno, 0, 0, 0)
        path = os.path.join(self._here, code.co_filename)  # noqa: PTH118
        digest, lines = self._source(path)
        if not lines and code.co_filename in linecache.cache:  # of a cell of a notebook, which is no file
            lines, end_line = _kept("".join(linecache.getlines(code.co_filename))), line
        text = b"".join(lines[line - 1 : min(max(line, end_line), line + _MOST_LINES)]).decode()
        return Place(
            file=path.removeprefix(self._here),
            line=line,
            function=_name(frame),
            end_line=end_line,
            column=column,
            end_column=end_column,
            source=" ".join(text.split())[:MOST_SOURCE],
            digest=digest,
            via=f"{_name(library)} ({library.f_code.co_filename.rpartition('-packages/')[2]}:{library.f_lineno})"
            if library is not None
            else "",
        )

    def written(self, path: str, pattern: str) -> list[Place]:
        """Return the lines of a file that match a regular expression, comments aside."""
        path = os.path.join(self._here, path)  # noqa: PTH118
        digest, lines = self._source(path)
        # What is kept of them lacks strings.
        whole = Path(path).read_text(errors="replace").splitlines() if lines else []
        return [
            Place(
                path.removeprefix(self._here), n, "<module>", source=kept.decode().strip()[:MOST_SOURCE], digest=digest
            )
            for n, (text, kept) in enumerate(zip(whole, lines, strict=False), start=1)
            if re.search(pattern, text.partition("#")[0])
        ]

    def _source(self, path: str) -> tuple[str, list[bytes]]:
        """Return digest of a file as Python read it, and what is kept of its lines; none where it may differ."""
        if path not in self._read:
            data = read_source(path, self._since)
            digest = "" if data is None else hashlib.sha256(data).hexdigest()
            self._read[path] = digest, [] if data is None else _kept(data.decode(errors="replace"))
        return self._read[path]


def read_source(path: str, since: float) -> bytes | None:
    """Return a file as Python read it; None where it may differ, as it is newer than `since` (Unix time, s)."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        known = os.fstat(fd)
        if not stat.S_ISREG(known.st_mode) or known.st_size > MOST_FILE_BYTES or known.st_mtime > since:
            return None
        with open(fd, "rb", closefd=False) as file:
            return file.read(MOST_FILE_BYTES)
    finally:
        os.close(fd)


def _kept(text: str) -> list[bytes]:
    """Return the lines that are kept of a whole source: one line alone does not show whether it is inside a string."""
    return redaction.source(text).encode(errors="replace").splitlines(keepends=True)


def _position(frame: FrameType) -> tuple[int, int, int, int]:
    """Return the lines and columns of what a frame is at; (line, 0, 0, 0) where Python knows no more."""
    line = frame.f_lineno
    positions = getattr(frame.f_code, "co_positions", None)
    if positions is not None:
        known: tuple[Any, ...] = next(islice(positions(), frame.f_lasti // 2, None), (None,))
        if None not in known:
            first, last, column, end = known
            return first, last, column, end
    return line, 0, 0, 0


def _is_compiled(frame: FrameType) -> bool:
    """Return whether a frame runs what Dynamo made of the user's function: it has the first line, and no columns."""
    code = frame.f_code
    return code.co_name != "<module>" and frame.f_lineno == code.co_firstlineno and _position(frame)[1:] == (0, 0, 0)


def _name(frame: FrameType) -> str:
    """Return the function that a frame is of, with its class where this Python knows it (3.11)."""
    return str(getattr(frame.f_code, "co_qualname", frame.f_code.co_name).replace(".<locals>", ""))


# The last one is where torch.compile keeps what it generates.
_INSTALLED = ("/site-packages/", "/dist-packages/", "/torchinductor_")


def own_files() -> Callable[[str], bool]:
    """Return whether a file is the user's own, and not Python's, an installed package's or dlprof's, as a function."""
    paths = sysconfig.get_paths()
    places = {paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    places.add(_OURS)
    installed = ("<", *(os.path.join(place, "") for place in places))  # noqa: PTH118

    @functools.cache
    def is_own(file: str) -> bool:
        return not (file.startswith(installed) or any(part in file for part in _INSTALLED))

    return is_own


CONFIGURATION = (".yaml", ".yml", ".json", ".toml")
_SHELL = (".sh", ".sbatch", ".slurm")
_FOLDERS = ("", "scripts", "slurm", "jobs")  # where those are looked for
_MOST, _MOST_LISTED = 400, 2000
_MOST_BYTES = 256 << 10


class Files:
    """Keeps which files the script opened; the digests are taken when the facts are written.

    `directory`: the one that the job was started in, with its slash. `since`: when the process began to be recorded.
    """

    def __init__(self, directory: str, since: float) -> None:
        self.off = False  # files are not known
        self._watching = True
        self._ours = ""  # the run folder
        self._here = directory
        self._since = since
        self._opened: dict[str, float | None] = {}  # when; None: the script writes it
        self._known: dict[str, str] = {}  # name → digest
        self._is_own = own_files()
        self._seen = (0, 0)

    def watch(self, at_uninstall: Callable[[Callable[[], object]], None], run: Path) -> None:
        """See what is opened from now on, but for the recorder's own files, below `run`.

        Python keeps an audit hook for good: it is switched off in the end.
        """
        self._ours = os.path.join(run, "")  # noqa: PTH118
        sys.addaudithook(self.see)
        at_uninstall(self.leave)

    def leave(self) -> None:
        """Look at nothing any more."""
        self._watching = False

    def see(self, event: str, args: tuple[Any, ...]) -> None:
        """Keep the name of a file of configuration that is opened. Python calls this at each of its audit events."""
        if event != "open" or not self._watching:
            return
        try:
            path, _, flags = args
            if type(path) is str and path.endswith(CONFIGURATION) and len(self._opened) < _MOST:
                writes = flags & (os.O_WRONLY | os.O_RDWR)
                path = os.path.join(os.getcwd(), path)  # noqa: PTH109, PTH118 - it is opened in a moment
                if self._ours and path.startswith(self._ours):
                    return
                if writes or path not in self._opened:
                    self._opened[path] = None if writes else time.time()
        except Exception:  # noqa: BLE001 - the script opens its file
            self.off, self._watching = True, False

    def facts(self) -> list[dict[str, str]]:
        """Return name and digest of each file; [] where there are too many to know all."""
        seen = len(sys.modules), len(self._opened)
        try:
            if self._seen != seen and not self.off:
                self._seen = seen
                paths = [*islice(self._paths(), _MOST + 1)]
                self.off = len(paths) > _MOST
                for path, before in paths:
                    name = self._name(path)
                    if not os.path.isabs(name) and name not in self._known and self._is_own(path):  # noqa: PTH117
                        digest = _digest(path, before)
                        self._known |= {name: digest} if digest is not None else {}
        except Exception:  # noqa: BLE001 - no file is edited then
            self.off = True
        written = {self._name(path) for path, opened in tuple(self._opened.items()) if opened is None}
        return [] if self.off else [{"file": f, "digest": d} for f, d in self._known.items() if f not in written]

    def _name(self, path: str) -> str:
        return os.path.normpath(path).removeprefix(self._here)

    def _paths(self) -> Iterator[tuple[str, float]]:
        """Yield files, and when each was last read."""
        for module in tuple(sys.modules.values()):
            # Asked for it, a module that is loaded later would be loaded.
            file = (getattr(module, "__dict__", None) or {}).get("__file__")
            if type(file) is str and file.endswith(".py") and self._is_own(path := os.path.join(self._here, file)):  # noqa: PTH118
                yield path, self._since
        for path, opened in tuple(self._opened.items()):
            if opened is not None:
                yield path, opened
        for folder in _FOLDERS:
            at = os.path.join(self._here, folder)  # noqa: PTH118
            if os.path.isdir(at):  # noqa: PTH112
                with os.scandir(at) as entries:
                    names = [entry.name for entry in islice(entries, _MOST_LISTED)]
                for name in names:
                    if name == "Makefile" or name.endswith(_SHELL):
                        yield os.path.join(at, name), self._since  # noqa: PTH118


def _digest(path: str, before: float) -> str | None:
    """Return the SHA-256 of a file; "": it is no file, or was written after that time; None: it is large."""
    fd = -1
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        known = os.fstat(fd)
        if known.st_size > _MOST_BYTES:
            return None
        if not stat.S_ISREG(known.st_mode) or known.st_mtime > before:
            return ""
        with open(fd, "rb", closefd=False) as file:
            return hashlib.sha256(file.read(_MOST_BYTES)).hexdigest()
    except OSError:
        return ""
    finally:
        if fd >= 0:
            os.close(fd)


# A call of a kind is looked at so often, and so many places of it are kept: a look costs microseconds, and a script
# may make a loader, or take a step, a million times.
LOOKS = 64
PLACES = 12

# What is moved is a model if it has more than this share of its parameters: a loss may have a few of its own.
_MOST_OF = 0.9
_VALUES = ("batch_size", "drop_last", "num_workers", "persistent_workers", "pin_memory", "prefetch_factor")


class Call:
    """A place that calls of one kind came from, how many of the looks saw it, and the loaders that it is about.

    `trained`: whether a backward pass came after a forward pass from there, and no other forward pass of the model.
    `model`: the class of the model that is called there. `takes`: of a line that calls the model itself, the dimensions
    of each positional argument, 0 where it is no tensor. `whole`: what is moved there has most parameters of a model.
    `torch`: the name `torch` is known there. `values`: what all loaders from there were made with, without those that
    differ.
    """

    __slots__ = ("count", "kind", "loaders", "model", "moved", "place", "takes", "torch", "trained", "values", "whole")

    def __init__(self, kind: str, place: Place) -> None:
        self.kind = kind
        self.place = place
        self.model = ""
        self.count = 0
        self.trained = self.torch = self.whole = False
        self.loaders: list[LoaderSeen] = []
        self.moved: weakref.ref[Any] | None = None
        self.takes: list[int] = []
        self.values: dict[str, Any] | None = None

    def fact(self) -> dict[str, Any]:
        """Return it as the facts have it."""
        known = {
            "kind": self.kind,
            **{name: getattr(self, name) for name in ("model", "takes", "torch", "values", "whole", "count")},
            "roles": sorted({seen.role for seen in self.loaders}),
            **vars(self.place),
        }
        return {name: value for name, value in known.items() if value or name == "line"}


class Calls:
    """Keeps the places that calls of each kind came from.

    Of objects that are made: loader, ddp, fsdp, data_parallel, optimizer, autocast, grad_scaler, anomaly (autograd's
    anomaly mode), deterministic (algorithms), compile, profiler
    (torch's own). Of the process: affinity (its cores), threads. Of calls: model (`to`
    or `cuda` of a module with parameters), iteration (a loop over a loader), forward (of an outermost module;
    unused_forward where no backward pass followed on any), backward, optimizer_step, save (of a checkpoint),
    synchronize and empty_cache (torch.cuda's). In the step whose operators are counted also: sync (the host gets a
    value), copy (to a device), and in the forward pass and the loss: norm (a variance, a root), softmax, loss (a
    logarithm), one_hot, cat, embedding. `looks` are those left for backward passes, of which there are many: the caller
    checks it before it calls.
    """

    def __init__(self) -> None:
        self.looks = LOOKS
        self.off = False
        self.problem = ""  # why calls are no longer looked at, until that was reported
        self.news = False
        self._looks: Counter[str] = Counter()
        self._calls: dict[tuple[str, str, int, int], Call] = {}
        self._places: Counter[str] = Counter()
        self.directory = os.path.join(_working_directory(), "")  # noqa: PTH118 - that files are named from
        since = time.time()
        self.files = Files(self.directory, since)
        self._frames = Frames(self.directory, since)
        # Loaders by their id: a reference, where it was made, and the id of its data set.
        self._loaders: dict[int, tuple[weakref.ref[Any], Call, int]] = {}
        self._forwards: dict[int, Call] = {}  # the last one of each model, by its id, since the last backward pass

    def facts(self, models: Iterable[weakref.ref[Any]] = ()) -> list[dict[str, Any]]:
        """Return what was seen, as the facts have it; `models`: those that are trained."""
        self._frames.forget_sources()
        calls = tuple(self._calls.values())
        for call in calls:
            if call.moved is not None and (moved := call.moved()) is not None and not call.whole:
                inside = {id(parameter) for parameter in parameters_of(moved)}
                alive = (parameters_of(model) for model in (reference() for reference in models) if model is not None)
                call.whole = any(sum(id(p) in inside for p in all_of) > _MOST_OF * len(all_of) for all_of in alive)
        # A model may first be called by a check before training, an evaluation or a drawing of its graph.
        trains = any(call.trained for call in calls)
        facts = [call.fact() for call in calls]
        for call, fact in zip(calls, facts, strict=True):
            if call.kind == "forward" and trains and not call.trained:
                fact["kind"] = "unused_forward"
        return facts

    def see_forward(self, model: Any, args: Sequence[Any]) -> None:
        """Keep where a model was called, and with what if the line calls it without a function between."""
        if (call := self.see("forward")) is None:
            return
        self._forwards[id(model)] = call
        call.model = type(model).__name__
        if call.count == 1 and self._frames.calls_module(sys._getframe(1)):
            tensor = sys.modules["torch"].Tensor
            call.takes = [arg.dim() if isinstance(arg, tensor) else 0 for arg in args]

    def see(self, kind: str) -> Call | None:
        """Keep the user's line that the caller's caller was called from, and return it; None: there is none.

        It must not fail the script: what goes wrong here ends it.
        """
        if self.off or self._looks[kind] >= LOOKS:
            return None
        self._looks[kind] += 1
        try:
            frame, library = self._frames.find(sys._getframe(1))
            if frame is None:
                return None
            # The same instruction is the same call: its place is made once.
            key = (kind, frame.f_code.co_filename, frame.f_lineno, frame.f_lasti)
            call = self._calls.get(key)
            if call is None:
                if self._places[kind] >= PLACES:
                    return None
                self._places[kind] += 1
                call = self._calls[key] = Call(kind, self._frames.place(frame, library, is_call=kind != "iteration"))
                call.torch = "torch" in frame.f_globals
                self.news = True
            call.count += 1
        except Exception as e:  # noqa: BLE001 - the script goes on
            self.fail(e)
            return None
        return call

    def line(self, frame: FrameType | None) -> tuple[FrameType, Callable[[], Place]] | None:
        """Return the script's own frame at or below this one, and what makes its place; None: there is none."""
        if self.off:
            return None
        own, library = self._frames.find(frame)
        return None if own is None else (own, lambda: self._frames.place(own, library))

    def see_written(self, kind: str, path: str, pattern: str) -> None:
        """Keep the first lines of a file that match: of what the script did before calls were looked at."""
        if self.off or self._places[kind]:
            return
        try:
            for place in self._frames.written(path, pattern)[:PLACES]:
                self._places[kind] += 1
                call = self._calls[kind, path, place.line, 0] = Call(kind, place)
                call.count = 1
        except Exception as e:  # noqa: BLE001 - the script goes on
            self.fail(e)

    def see_backward(self) -> None:
        """Keep where a backward pass was called."""
        self.looks -= 1
        for call in self._forwards.values():
            call.trained = True
        self._forwards.clear()
        self.see("backward")

    @guarded
    def see_made(self, loader: Any) -> None:
        """Keep where a loader was made."""
        call = self.see("loader")
        if call is not None:
            self._loaders[id(loader)] = weakref.ref(loader), call, id(getattr(loader, "dataset", None))
            made = {name: vars(loader)[name] for name in _VALUES if type(vars(loader).get(name)) in (int, bool)}
            call.values = dict(made.items() & (made if call.values is None else call.values).items())

    def see_moved(self, module: Any) -> None:
        """Keep where a module with parameters is moved."""
        if not self.off and self._looks["model"] < LOOKS and parameters_of(module):
            call = self.see("model")
            if call is not None and call.moved is None:
                call.moved = weakref.ref(module)

    def see_iteration(self, loader: Any, seen: LoaderSeen) -> None:
        """Keep where a loader is iterated, and what the calls that made it are about.

        A library may have made it of one of the script's (accelerate's `prepare`): that has the same data set.
        """
        known = [self.see("iteration")]
        reference, made, data = self._loaders.get(id(loader), (None, None, 0))
        if made is not None and reference is not None and reference() is loader:
            known.append(made)
            if made.place.via:
                known += [call for _, call, of in self._loaders.values() if of == data and not call.place.via]
        for call in known:
            if call is not None and seen not in call.loaders and len(call.loaders) < LOOKS:
                call.loaders.append(seen)

    def fail(self, error: Exception) -> None:
        """Look at no call any more, since that failed."""
        self.off = True
        self.looks = 0
        self.problem = f"lines of the script are not named: {words_of(error)}"
        self.news = True


def _working_directory() -> str:
    try:
        return os.getcwd()  # noqa: PTH109 - no cost at the start of a job
    except OSError:  # it was removed
        return os.sep
