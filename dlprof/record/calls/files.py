"""The user's files that a job's values may stand in: its modules, configuration that it opened, and lines of shells.

Kept are their names and digests, so that a report edits only what is still as it was.
"""

from __future__ import annotations

import hashlib
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from dlprof.record.calls.frames import own_files

CONFIGURATION = (".yaml", ".yml", ".json", ".toml")
_SHELL = (".sh", ".sbatch", ".slurm")
_FOLDERS = ("", "scripts", "slurm", "jobs")  # where those are looked for
_MOST, _MOST_LISTED = 400, 2000
_MOST_BYTES = 256 << 10


class Files:
    """Keeps which files the script opened; the digests are taken when the facts are written.

    `directory`: the one that the job was started in, with its slash. `since`: when the process started to be watched.
    """

    def __init__(self, directory: str, since: float) -> None:
        self.off = False  # files are not known
        self._watching = True
        self._here = directory
        self._since = since
        self._opened: dict[str, float | None] = {}  # when; None: the script writes it
        self._known: dict[str, str] = {}  # name → digest
        self._is_own = own_files()
        self._seen = (0, 0)

    def watch(self, at_uninstall: Callable[[Callable[[], object]], None]) -> None:
        """See what is opened from now on. Python keeps an audit hook for good: it is switched off in the end."""
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
