"""Answers of ranks, kept on disk as they are known: a Parquet file a rank, so that no rank is read twice.

An answer is used only where it was made by the same code from the same files; else its rank is read again. Each file is
written under a temporary name and renamed, so that several processes may write, and any of them may be killed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from dlprof import marks
from dlprof.analysis.engine import frames
from dlprof.analysis.engine.needs import Measure
from dlprof.analysis.engine.ranks import Answer, Failure, RankAnswer
from dlprof.errors import DlprofError, DoesNotApply, NotMeasured
from dlprof.files import KEPT, whole, write
from dlprof.read.limits import limited
from dlprof.read.opening import Inside
from dlprof.read.run import Rank, Run
from dlprof.units import count

FORMAT = 1
_PACKAGE = Path(marks.__file__).parent

# Of a job of 16,384 ranks, 64 folders.
RANKS_A_FOLDER = 256

# A run of more than so many ranks, or unpacked bytes, takes long to read: its answers are kept without being asked.
LARGE_RANKS, LARGE_BYTES = 64, 16 << 30

_README = "What dlprof knows of each rank, so that it need not be read again. It may be deleted at any time.\n"

_SHARD = re.compile("[0-9]{1,5}/[1-9][0-9]{0,4}")
_DAMAGED = "what was kept of them is damaged"
_STATES: Mapping[type[NotMeasured], str] = {NotMeasured: "not_measured", DoesNotApply: "does_not_apply"}


@dataclass(frozen=True)
class Store:
    """Where the answers of a run's ranks are kept.

    `root`: what the names of the ranks' files are relative to, so that a run may be moved with what was kept of it.
    `shard`: which part of the ranks is being read ("3/16"), kept with each answer.
    """

    root: Path
    folder: Path
    shard: str = ""

    def path(self, rank: int) -> Path:
        """Return the file of a rank."""
        first = rank // RANKS_A_FOLDER * RANKS_A_FOLDER
        return self.folder / f"{first:05d}-{first + RANKS_A_FOLDER - 1:05d}" / f"{rank:05d}.parquet"

    @property
    def _within(self) -> Path:
        """The folder that no link may lead out of: a run may come from somebody else."""
        return self.root if self.folder.is_relative_to(self.root) else self.folder

    def make(self) -> None:
        """Make the folder, unless it is there; raise OSError where nothing can be written there."""
        if not self.folder.resolve().is_relative_to(self._within.resolve()):
            raise OSError(f"a link leads out of {self._within}")
        if not self.folder.is_dir():
            # Shards begin at the same moment: another one may make it meanwhile.
            self.folder.mkdir(parents=True, exist_ok=True)
            write(self.folder / "README", _README)

    def stamp(self, rank: Rank) -> str:
        """Identify what an answer is made from: the rank's files, its facts, and how much of them is read."""
        files = [
            (name, os.path.relpath(one, self.root), *_state(one), rank.pieces.get(name, ""))
            for name, path in sorted(rank.files.items())
            for one in _all_of(name, path)
        ]
        told = json.dumps([files, rank.facts, rank.resumed_ns, limited()], sort_keys=True, default=repr)
        return hashlib.sha256(told.encode()).hexdigest()

    def keep(self, rank: Rank, answer: RankAnswer, stamp: str) -> str:
        """Write the answer of a rank; return why that is not possible, "" where it is done."""
        footer = {
            "format": FORMAT,
            "code": code(),
            "files": stamp,
            "shard": self.shard,
            "warnings": list(answer.warnings),
            "tables": list(answer.tables),
        }
        try:
            footer["trace_facts"] = frames.to_json(dict(answer.trace_facts))
            footer["answers"] = {name: _told(one) for name, one in answer.answers.items()}
            known = {name: one for name, one in answer.answers.items() if isinstance(one, pd.DataFrame)}
            path = self.path(rank.index)
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.parent.is_symlink():
                return f"{path.parent} is a link"
            with whole(path) as part:
                frames.write(part, known, footer)
        except frames.NotPlain as e:
            return str(e)
        except OSError as e:
            return e.strerror or str(e)
        return ""

    def read(self, ranks: Iterable[Rank], measures: Sequence[Measure[Any]]) -> Kept:
        """Return what is kept of ranks and still holds, where it has all these measures."""
        kept, inside, names = Kept(), Inside(self._within), [m.name for m in measures]
        for rank in ranks:
            path = self.path(rank.index)
            if not inside.holds(path):
                continue
            try:
                stored = frames.Stored(path)
                why = _outdated(stored.footer, self.stamp(rank))
                if why:
                    kept.again[why] += 1
                elif stored.footer["answers"].keys() >= set(names):
                    kept.answers[rank.index] = _answer(rank, stored, names)
                    if _SHARD.fullmatch(stored.footer["shard"]):
                        kept.shards.add(stored.footer["shard"])
            except (DlprofError, KeyError, TypeError, ValueError, AttributeError):  # its JSON may be anyone's
                kept.again[_DAMAGED] += 1
        return kept


@dataclass
class Kept:
    """What a store had: the answers by rank, which shards they are of, and how many ranks must be read again, why."""

    answers: dict[int, RankAnswer] = field(default_factory=dict)
    shards: set[str] = field(default_factory=set)
    again: Counter[str] = field(default_factory=Counter)

    def warnings(self) -> list[str]:
        """Say which ranks are read again though something of them was kept."""
        return [f"{count(n, 'rank')} {'is' if n == 1 else 'are'} read again: {why}" for why, n in self.again.items()]


@cache
def code() -> str:
    """Identify the code that reads ranks and computes their measures, and the pandas that it runs on."""
    made = hashlib.sha256(f"{marks.__version__} {pd.__version__}".encode())
    for part in ("*.py", "analysis/**/*.py", "read/**/*.py"):
        for path in sorted(_PACKAGE.glob(part)):
            made.update(path.relative_to(_PACKAGE).as_posix().encode() + b"\0" + path.read_bytes())
    return made.hexdigest()


def is_large(run: Run) -> bool:
    """Return whether reading a run takes so long that its answers are worth keeping."""
    return len(run.ranks) > LARGE_RANKS or sum(rank.unpacked_bytes for rank in run.ranks) > LARGE_BYTES


def open_store(run: Run, cache: Path | None = None, shard: str = "") -> Store:
    """Return the store of a run: in it, or below `cache`, a folder for any number of runs. Nothing is written yet."""
    root = run.path if run.path.is_dir() else run.path.parent
    if cache is not None:
        where = run.path.resolve()
        folder = cache / f"{where.name[:64]}-{hashlib.sha256(os.fsencode(where)).hexdigest()[:12]}"
    else:
        folder = root / KEPT if run.path.is_dir() else root / KEPT / run.path.name
    return Store(root, folder / "ranks", shard)


def find(run: Run, cache: Path | None, *, asked: bool, tell: Callable[[str], None]) -> Store | None:
    """Return the store of a run that is there already, is asked for, or is worth having; None where none can be."""
    store = open_store(run, cache)
    there = store.folder.is_dir()
    if not (there or asked or cache or is_large(run)):
        return None
    try:
        store.make()
    except OSError as e:
        tell(
            f"what is known of each rank is not kept: {e.strerror or e}: {store.folder} (--cache names another folder)"
        )
        return None
    return store


def _state(path: Path) -> tuple[int, int]:
    try:
        at = path.stat()
    except OSError:
        return -1, -1
    return at.st_size, at.st_mtime_ns


def _all_of(name: str, path: Path) -> list[Path]:
    """Return a file and those beside it that are read with it."""
    if name != "rocprofv3":
        return [path]
    from dlprof.read.rocprof.text import beside

    return [path, *beside(path)]


def _outdated(footer: Mapping[str, Any], stamp: str) -> str:
    """Return why a rank must be read again, "" where what is kept of it holds."""
    if (footer["format"], footer["code"]) != (FORMAT, code()):
        return "another version of dlprof kept what is known of them"
    return "" if footer["files"] == stamp else "their files have changed since"


def _told(answer: Answer) -> Any:
    """Return what the footer says of a measure: None where it is a frame."""
    if isinstance(answer, pd.DataFrame):
        return None
    if isinstance(answer, Failure):
        return {"failed": answer.text}
    if type(answer) in (NotMeasured, DoesNotApply):
        return {_STATES[type(answer)]: frames.to_json(list(answer.args))}
    raise frames.NotPlain(f"an answer of type {type(answer).__name__}")


def _answer(rank: Rank, stored: frames.Stored, names: Iterable[str]) -> RankAnswer:
    known, told = stored.frames(), stored.footer["answers"]
    return RankAnswer(
        {name: known[name] if told[name] is None else _answered(told[name]) for name in names},
        dict(rank.facts),
        frames.from_json(stored.footer["trace_facts"]),
        tuple(map(str, stored.footer["warnings"])),
        tuple(map(str, stored.footer["tables"])),
    )


def _answered(told: Mapping[str, Any]) -> Answer:
    ((state, said),) = told.items()
    if state == "failed":
        return Failure(str(said))
    (kind,) = (kind for kind, name in _STATES.items() if name == state)
    return kind(*frames.from_json(said))
