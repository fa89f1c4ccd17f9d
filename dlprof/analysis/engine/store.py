"""Answers of ranks, kept on disk as they are known: a file a rank, so that no rank is read twice.

An answer is used only where it was made by the same code from the same files; else its rank is read again. Each file is
written under a temporary name and renamed, so that several processes may write, and any of them may be killed: those of
one machine, or shards, which know nothing of each other.

A file is numpy's .npz with three arrays. `whole` and `real` hold the numbers of all columns of all frames, one column
after the other. `header` is JSON: what stands beside the frames, how they are made of the numbers, each text once, and
what is neither number nor text. Nothing in such a file is ever run.
"""

from __future__ import annotations

import hashlib
import heapq
import io
import json
import os
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from dlprof import marks
from dlprof.analysis.engine.needs import Measure
from dlprof.analysis.engine.ranks import Answer, Failure, RankAnswer
from dlprof.errors import DlprofError, DoesNotApply, NotMeasured
from dlprof.files import KEPT, whole, write
from dlprof.read.limits import MOST_ROWS, limited, most_unpacked
from dlprof.read.opening import Inside, read_file
from dlprof.read.run import Rank, Run
from dlprof.units import count, few, listed

FORMAT = 2
_PACKAGE = Path(marks.__file__).parent

# A job of 16,384 ranks has 64 folders.
RANKS_A_FOLDER = 256

# A run of more than so many ranks, or unpacked bytes, takes long to read: its answers are kept without a request.
LARGE_RANKS, LARGE_BYTES = 64, 16 << 30

_README = "What dlprof knows of each rank, so that it need not be read again. It may be deleted at any time.\n"

_SHARD = re.compile("[0-9]{1,5}/[1-9][0-9]{0,4}")
_DAMAGED = "what was kept of them is damaged"
_STATES: Mapping[type[NotMeasured], str] = {NotMeasured: "not_measured", DoesNotApply: "does_not_apply"}

# Shards that one line names.
_MOST_NAMED = 8

# The dtypes that come back. Others are refused, on reading too: one that somebody else chose may take any memory.
_NUMBERS = ("Int8", "Int16", "Int32", "Int64", "UInt8", "UInt16", "UInt32", "UInt64", "Float32", "Float64")
_MASKED = {name: name.lower() for name in _NUMBERS} | {"boolean": "bool"}
_TEXTS = ("object", "str", "string")
_LABELS = (*_TEXTS, "category", "int64")  # dtypes of columns' names; int64 where there is no column


class NotPlain(Exception):  # noqa: N818 - what keeps a frame from being stored
    """A value that would not come back as it is."""


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
        return self.folder / f"{first:05d}-{first + RANKS_A_FOLDER - 1:05d}" / f"{rank:05d}.npz"

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
            (name, os.path.relpath(one, self.root), *_state(one), rank.pieces.get(name, ""), rank.begins.get(name, ""))
            for name, path in sorted(rank.files.items())
            for one in _all_of(name, path)
        ]
        parts = json.dumps([files, rank.facts, rank.resumed_ns, limited()], sort_keys=True, default=repr)
        return hashlib.sha256(parts.encode()).hexdigest()

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
            footer["trace_facts"] = _to_json(dict(answer.trace_facts))
            footer["answers"] = {name: _footer_entry(one) for name, one in answer.answers.items()}
            known = {name: one for name, one in answer.answers.items() if isinstance(one, pd.DataFrame)}
            path = self.path(rank.index)
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.parent.is_symlink():
                return f"{path.parent} is a link"
            with whole(path) as part:
                _write(part, known, footer)
        except NotPlain as e:
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
                stored = _Stored(path)
                why = _outdated(stored.footer, self.stamp(rank))
                if why:
                    kept.again[why] += 1
                elif stored.footer["answers"].keys() >= set(names):
                    kept.answers[rank.index] = _answer(rank, stored, names)
                    if _SHARD.fullmatch(stored.footer["shard"]):
                        kept.shards.add(stored.footer["shard"])
            except Exception:  # noqa: BLE001 - its JSON may be anyone's
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
    """Return the store of a run: below `cache`, a folder for any number of runs; by default in a recorded run, and of
    traces from elsewhere, into whose folder nothing is written, below the user's cache folder. Nothing is written yet.

    Raises DlprofError where the user has no home, and so no cache folder.
    """
    root = run.path if run.path.is_dir() else run.path.parent
    if cache is None and run.recorded:
        return Store(root, root / KEPT / "ranks", shard)
    where = run.path.resolve()
    name = f"{where.name[:64]}-{hashlib.sha256(os.fsencode(where)).hexdigest()[:12]}"
    return Store(root, (cache or _of_user()) / name / "ranks", shard)


def _of_user() -> Path:
    """Return dlprof's folder in the user's cache folder, as XDG has it: a relative path there counts as none."""
    set_to = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        return (set_to if set_to.is_absolute() else Path("~/.cache").expanduser()) / "dlprof"
    except RuntimeError:
        raise DlprofError("this user has no home for what is known of each rank; --cache names a folder") from None


def find(run: Run, cache: Path | None, *, requested: bool, tell: Callable[[str], None]) -> Store | None:
    """Return the store of a run that exists, is `requested`, or is worth it; None where it is not possible."""
    try:
        store = open_store(run, cache)
        if not (store.folder.is_dir() or requested or cache or is_large(run)):
            return None
        store.make()
    except DlprofError as e:
        if requested or is_large(run):
            tell(f"what is known of each rank is not kept: {e}")
        return None
    except OSError as e:
        tell(
            f"what is known of each rank is not kept: {e.strerror or e}: {store.folder} (--cache names another folder)"
        )
        return None
    return store


def shares(run: Run, shards: int) -> list[list[Rank]]:
    """Divide the ranks so that all shards have about as many bytes: the same shares wherever it is computed."""
    ranks = sorted(run.ranks, key=lambda rank: (-rank.unpacked_bytes, rank.index))
    least = [(0, 0, k) for k in range(shards)]
    found: list[list[Rank]] = [[] for _ in range(shards)]
    for rank in ranks:
        used, many, k = least[0]
        heapq.heapreplace(least, (used + rank.unpacked_bytes, many + 1, k))
        found[k].append(rank)
    return found


def not_there(run: Run, kept: Kept, only_kept: bool) -> list[str]:
    """Say how many ranks are not kept, and which shards they belong to; "" if all are kept, or none."""
    missing = [rank for rank in run.ranks if rank.index not in kept.answers]
    if not missing or not kept.answers:
        return []
    of = count(len(run.ranks), "rank")
    divided = {int(shard.partition("/")[2]) for shard in kept.shards if shard}
    if not divided:
        is_or_are = "is" if len(kept.answers) == 1 else "are"
        return [f"{len(kept.answers):,} of {of} {is_or_are} known from before"]
    undone = f" ({_undone(run, divided.pop(), missing)})" if len(divided) == 1 else ""
    one = len(missing) == 1
    then = "left out" if only_kept else "reading it now" if one else "reading them now"
    return [f"{len(missing):,} of {of} {'was' if one else 'were'} read by no shard{undone}: {then}"]


def left_out(run: Run, known: Collection[int]) -> Run:
    """Return the run with a warning of the ranks that no shard has read; raise DlprofError where none is kept."""
    if not known and run.ranks:
        raise DlprofError(f"{run.path}: no rank of it was read by a shard (dlprof report {run.path} --shard K/N)")
    missing = [rank.index for rank in run.ranks if rank.index not in known]
    if not missing:
        return run
    was, are = ("was", "is") if len(missing) == 1 else ("were", "are")
    of = count(len(run.ranks), "rank")
    text = f"{len(missing):,} of {of} {was} read by no shard and {are} left out: {listed(missing)}"
    return replace(run, warnings=(*run.warnings, text))


def _undone(run: Run, shards: int, missing: Collection[Rank]) -> str:
    """Name the shards that these ranks are of, and whether all of each is missing."""
    gone = {rank.index for rank in missing}
    states: dict[str, list[str]] = {"missing": [], "incomplete": []}
    for k, share in enumerate(shares(run, shards)):
        mine = {rank.index for rank in share}
        if mine & gone:
            states["missing" if mine <= gone else "incomplete"].append(f"{k}/{shards}")
    parts = []
    for state, names in states.items():
        if names:
            one = len(names) == 1
            parts.append(f"{'shard' if one else 'shards'} {few(names, _MOST_NAMED)} {'is' if one else 'are'} {state}")
    return "; ".join(parts)


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
    from dlprof.read.rocprof.process import beside

    return [path, *beside(path)]


def _outdated(footer: Mapping[str, Any], stamp: str) -> str:
    """Return why a rank must be read again, "" where what is kept of it holds."""
    if (footer["format"], footer["code"]) != (FORMAT, code()):
        return "another version of dlprof kept what is known of them"
    return "" if footer["files"] == stamp else "their files have changed since"


def _footer_entry(answer: Answer) -> Any:
    """Return what the footer says of a measure: None where it is a frame."""
    if isinstance(answer, pd.DataFrame):
        return None
    if isinstance(answer, Failure):
        return {"failed": answer.text}
    if type(answer) in (NotMeasured, DoesNotApply):
        return {_STATES[type(answer)]: _to_json(list(answer.args))}
    raise NotPlain(f"an answer of type {type(answer).__name__}")


def _answer(rank: Rank, stored: _Stored, names: Iterable[str]) -> RankAnswer:
    known, kept = stored.frames(), stored.footer["answers"]
    return RankAnswer(
        {name: known[name] if kept[name] is None else _answered(kept[name]) for name in names},
        dict(rank.facts),
        _from_json(stored.footer["trace_facts"]),
        tuple(map(str, stored.footer["warnings"])),
        tuple(map(str, stored.footer["tables"])),
    )


def _answered(stored: Mapping[str, Any]) -> Answer:
    ((state, content),) = stored.items()
    if state == "failed":
        return Failure(str(content))
    (kind,) = (kind for kind, name in _STATES.items() if name == state)
    return kind(*_from_json(content))


class _Laid:
    """What the columns of frames are laid out into: whole numbers, real ones, and each text once."""

    def __init__(self) -> None:
        self.whole: list[NDArray[np.int64]] = [np.empty(0, dtype=np.int64)]
        self.real: list[NDArray[np.float64]] = [np.empty(0, dtype=np.float64)]
        self.texts: dict[str, int] = {}

    def frame(self, name: str, frame: pd.DataFrame) -> dict[str, Any]:
        """Lay out a frame; return how it becomes one again, as JSON. Raises NotPlain where it would not be the same."""
        labels = str(frame.columns.dtype)
        if labels not in _LABELS or not all(type(label) is str for label in frame.columns):
            raise NotPlain(f"{name}: a column that is named by no text")
        index = frame.index
        if type(index) is pd.RangeIndex and index.name is None:
            rows: list[Any] = [index.start, index.stop, index.step]
        elif isinstance(index, pd.MultiIndex):
            raise NotPlain(f"{name}: an index of several levels")
        else:
            rows = [_to_json(index.name), self._column(index.to_series())]
        columns = [[label, *self._column(frame.iloc[:, n])] for n, label in enumerate(frame.columns)]
        return {"index": rows, "columns": columns, "labels": labels}

    def _column(self, column: pd.Series[Any]) -> list[Any]:
        """Lay out a column; return its kind, how many values it has, and what else `_Cut.column` needs."""
        dtype, name, rows = column.dtype, str(column.dtype), len(column)
        if isinstance(dtype, pd.CategoricalDtype):
            self.whole.append(column.cat.codes.to_numpy().astype(np.int64))
            return ["category", rows, bool(dtype.ordered), self._column(dtype.categories.to_series())]
        if isinstance(dtype, np.dtype):
            values = column.to_numpy()
            if dtype.kind in "iub":
                self.whole.append(values.astype(np.int64))  # the bits of an uint64 are kept
                return ["whole", rows, name]
            if dtype.kind in "mM":
                self.whole.append(values.view(np.int64))
                return ["whole", rows, name]
            if dtype.kind == "f" and dtype.itemsize <= 8:
                self.real.append(values.astype(np.float64))
                return ["real", rows, name]
            if dtype.kind == "O" and all(type(value) is str for value in values):
                return self._text(values, name)
            if dtype.kind == "O":
                return ["json", rows, [_to_json(value) for value in values]]
        elif isinstance(dtype, pd.StringDtype) and name in _TEXTS:
            return self._text(column.to_numpy(dtype=object, na_value=None), name)  # type: ignore[call-overload]
        elif name in _MASKED:
            if name.startswith("Float"):
                self.real.append(column.to_numpy(np.dtype(np.float64), na_value=0))
            else:
                self.whole.append(column.to_numpy(np.dtype(np.int64), na_value=0))
            self.whole.append(column.isna().to_numpy().astype(np.int64))
            return ["masked", rows, name]
        raise NotPlain(f"a column of dtype {name}")

    def _text(self, values: NDArray[np.object_], dtype: str) -> list[Any]:
        places = self.texts
        codes = [-1 if value is None else places.setdefault(value, len(places)) for value in values]
        self.whole.append(np.array(codes, dtype=np.int64))
        return ["text", len(values), dtype]


class _Cut:
    """The frames of a file, cut from its arrays. Raises anything where header and arrays are not of one file."""

    def __init__(self, whole: NDArray[np.int64], real: NDArray[np.float64], texts: Sequence[str]) -> None:
        self._left: dict[str, NDArray[Any]] = {"whole": whole, "real": real}
        self._texts = np.array([*map(str, texts), None], dtype=object)  # a code of −1 is None: missing

    def frames(self, specs: Mapping[str, Any]) -> dict[str, pd.DataFrame]:
        """Return the frames that `_Laid.frame` got."""
        frames = {name: self._frame(spec) for name, spec in specs.items()}
        if any(map(len, self._left.values())):
            raise ValueError("more values than its header says")
        return frames

    def _frame(self, spec: Mapping[str, Any]) -> pd.DataFrame:
        if len(spec["index"]) == 3:
            index: Any = pd.RangeIndex(*spec["index"])
        else:
            name, column = spec["index"]
            index = pd.Index(self._column(*column), name=_from_json(name))
        columns = [self._column(*column) for _, *column in spec["columns"]]
        if spec["labels"] not in _LABELS or (not columns and len(index) > MOST_ROWS):
            raise ValueError("names of no dtype, or rows of nothing")
        frame = pd.DataFrame(dict(enumerate(columns)), index=pd.RangeIndex(len(index)))
        frame.index = index
        frame.columns = pd.Index([label for label, *_ in spec["columns"]], dtype=spec["labels"])
        return frame

    def _next(self, of: str, rows: int) -> NDArray[Any]:
        left = self._left[of]
        if not 0 <= rows <= len(left):
            raise ValueError("fewer values than its header says")
        self._left[of] = left[rows:]
        return left[:rows]

    def _column(self, kind: str, rows: int, *arguments: Any) -> Any:
        if kind == "json":
            cells = np.empty(len(arguments[0]), dtype=object)
            for n, value in enumerate(arguments[0]):
                cells[n] = _from_json(value)
            return pd.Series(cells, dtype=object)  # else pandas guesses that it is text
        if kind == "category":
            ordered, categories = arguments
            return pd.Categorical.from_codes(self._next("whole", rows), self._column(*categories), ordered=ordered)
        (dtype,) = arguments
        if kind == "text" and dtype in _TEXTS:
            texts = self._texts[self._next("whole", rows)]
            return pd.Series(texts, dtype=object) if dtype == "object" else pd.array(texts, dtype=dtype)
        if kind == "masked":
            values = self._next("real" if dtype.startswith("Float") else "whole", rows).astype(_MASKED[dtype])
            made = pd.array(values, dtype=dtype)
            made[self._next("whole", rows).astype(bool)] = pd.NA
            return made
        plain = np.dtype(dtype)
        if (kind == "real" and plain.kind == "f") or (kind == "whole" and plain.kind in "iub"):
            return self._next(kind, rows).astype(plain)
        if kind == "whole" and plain.kind in "mM":
            return self._next(kind, rows).copy().view(plain)
        raise ValueError(f"a column of kind {kind!r} and dtype {dtype!r}")


def _write(path: Path, frames: Mapping[str, pd.DataFrame], footer: Mapping[str, Any]) -> None:
    """Write frames, and JSON that stands beside them. Raises NotPlain for what would not come back, and OSError."""
    laid = _Laid()
    specs = {name: laid.frame(name, frame) for name, frame in frames.items()}
    header = json.dumps({"footer": footer, "frames": specs, "texts": list(laid.texts)}, ensure_ascii=False)
    made = io.BytesIO()
    np.savez_compressed(
        made,
        header=np.frombuffer(header.encode(errors="surrogatepass"), dtype=np.uint8),
        whole=np.concatenate(laid.whole),
        real=np.concatenate(laid.real),
    )
    path.write_bytes(made.getvalue())


class _Stored:
    """A file that `_write` wrote; `footer` is what stands beside the frames. Raises DlprofError where it is damaged."""

    def __init__(self, path: Path) -> None:
        self._path = path
        data = read_file(path)
        with self._damage():
            self._archive = zipfile.ZipFile(io.BytesIO(data))
            if sum(part.file_size for part in self._archive.infolist()) > most_unpacked(len(data)):
                raise ValueError("unpacks to too much")
            header = json.loads(self._array("header", np.uint8).tobytes().decode(errors="surrogatepass"))
            self.footer: dict[str, Any] = dict(header["footer"])
            self._specs, self._texts = header["frames"], header["texts"]

    def frames(self) -> dict[str, pd.DataFrame]:
        """Read the frames; raise DlprofError where they are damaged."""
        with self._damage():
            return _Cut(self._array("whole", np.int64), self._array("real", np.float64), self._texts).frames(
                self._specs
            )

    @contextmanager
    def _damage(self) -> Iterator[None]:
        try:
            yield
        except Exception as e:  # noqa: BLE001 - zipfile, numpy and pandas raise anything on what is nonsense
            raise DlprofError(f"{self._path}: damaged: {' '.join(f'{type(e).__name__}: {e}'.split())}") from None

    def _array(self, name: str, dtype: type[np.generic]) -> NDArray[Any]:
        """Return an array of one dimension; no more is unpacked or allocated than the directory of the file says."""
        part = self._archive.getinfo(f"{name}.npy")
        if part.compress_type != zipfile.ZIP_DEFLATED:
            raise ValueError(f"{name}: packed otherwise")
        with self._archive.open(part) as file:
            data = file.read(part.file_size)  # without the number it unpacks more; at its end it checks the CRC
        head = io.BytesIO(data)
        version = np.lib.format.read_magic(head)
        shape, _, found = np.lib.format.read_array_header_1_0(head)
        values = np.frombuffer(data, dtype, offset=head.tell())
        if (len(data), version, found, shape) != (part.file_size, (1, 0), np.dtype(dtype), values.shape):
            raise ValueError(f"{name}: another array")
        return values


def _to_json(value: Any) -> Any:
    """Return a value as JSON has it, what JSON does not have as an object that names its type; raise NotPlain."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [_to_json(one) for one in value]
    if kind is dict and all(type(key) is str for key in value):
        return {"dict": {key: _to_json(one) for key, one in value.items()}}
    if kind is dict:
        return {"pairs": [[_to_json(key), _to_json(one)] for key, one in value.items()]}
    if kind is tuple:
        return {"tuple": [_to_json(one) for one in value]}
    if isinstance(value, (np.bool_, np.integer, np.floating)) and value.dtype.itemsize <= 8:
        return {"numpy": [value.dtype.name, value.item()]}
    if value is pd.NA:
        return {"NA": None}
    raise NotPlain(f"a value of type {kind.__name__}")


def _from_json(data: Any) -> Any:
    """Return the value that `_to_json` made JSON of; raise DlprofError for what it did not make."""
    if isinstance(data, list):
        return [_from_json(one) for one in data]
    if not isinstance(data, dict):
        return data
    ((kind, inner),) = data.items()
    if kind == "dict":
        return {key: _from_json(one) for key, one in inner.items()}
    if kind == "pairs":
        return {_from_json(key): _from_json(one) for key, one in inner}
    if kind == "tuple":
        return tuple(_from_json(one) for one in inner)
    if kind == "numpy" and np.dtype(inner[0]).kind in "biuf":
        return np.dtype(inner[0]).type(inner[1])
    if kind == "NA":
        return pd.NA
    raise DlprofError(f"a value of no known type: {kind!r}")
