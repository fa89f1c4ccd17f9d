"""Records on a disk of the node, and puts what was recorded there into the run folder when the command has ended.

Shared disks of clusters are slow to make files, and a trace is written while the ranks wait for each other. Several
tasks of a node have one folder there, as they have one run folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dlprof import run_folder
from dlprof.errors import reason
from dlprof.files import BOOT, boot, longer, make_ours, write

_HERE = "supervisors"  # a file for each that records here


class Local:
    """The folder on this node's disk that the ranks of a run record into, below a place such as $TMPDIR."""

    def __init__(self, run: Path, place: str, record: Mapping[str, Any]) -> None:
        """Make it, with the run.json that commands need that watch the job. Raises OSError, ValueError."""
        base = os.path.expandvars(place)
        if "$" in base:
            raise ValueError(f"{place} is not set")
        self.run, name = run, f"{run.name}-{zlib.crc32(os.fsencode(run)):08x}"
        self.folder = Path(base).absolute() / name
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        make_ours(self.folder)
        with self._alone():
            for folder in ("ranks", _HERE):
                (self.folder / folder).mkdir(exist_ok=True)
            self._sign = self.folder / _HERE / str(os.getpid())
            self._sign.touch()
            if not (self.folder / "run.json").exists():
                write(self.folder / "run.json", json.dumps(record))

    def end(self, ranks: Iterable[Path]) -> list[str]:
        """Put these ranks' folders and this host's into the run folder; return a line where that cannot be done."""
        host = os.uname().nodename
        try:
            with self._alone():
                for rank in ranks:
                    _move(rank, self.run / "ranks" / rank.relative_to(self.folder / "ranks"))
                _copy(run_folder.host_folder(self.folder, host), _host_of(self.run, host))
                self._sign.unlink(missing_ok=True)
                if not any((self.folder / _HERE).iterdir()) and not any(run_folder.in_ranks(self.folder)):
                    shutil.rmtree(self.folder, ignore_errors=True)
        except OSError as e:
            why = reason(e) if e.errno else "some files cannot be copied"  # a list of them, of shutil
            left = f"what {host} recorded could not be copied ({why}): it is still there, in {self.folder}"
            return [f"{left}; copy its folders `ranks` and `hosts` into the run folder"]
        return []

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep the other supervisors of this node from their folder: its disk is no network's, and has locks."""
        with (self.folder / ".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _host_of(run: Path, host: str) -> Path:
    """Return this host's folder of a run; another one may have its name."""
    folder = run_folder.host_folder(run, host)
    with contextlib.suppress(OSError):
        if (folder / BOOT).read_text().strip() != boot():
            return folder.with_name(longer(folder.name, boot()))
    return folder


def _move(source: Path, target: Path) -> None:
    """Move a folder to another disk: what is there is whole, or is still here."""
    _copy(source, target)
    shutil.rmtree(source, ignore_errors=True)


def _copy(source: Path, target: Path) -> None:
    """Copy what is in a folder; nothing where there is none. Raises OSError."""
    if source.is_dir():
        shutil.copytree(source, target, dirs_exist_ok=True, copy_function=shutil.copyfile)
