"""The formats of other tools' files: the list of them, and which one a file has, by what is in it.

A file's name decides nothing here: people rename, unpack and collect files. It may tell a rank, where nothing in the
file does.
"""

from __future__ import annotations

import importlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

from dlprof.errors import DlprofError
from dlprof.read.opening import open_file
from dlprof.read.sources import Reading

# What of a file a format may judge it by, unpacked.
HEAD_BYTES = 256 << 10
_SNIFFED = 4 << 10


class Part(NamedTuple):
    """What a file holds of one rank. A file of several ranks has several.

    `rank`: None where neither the file nor its name tells it. `piece`: what `read` gets to find it in the file, ""
    where it is all of the file. `began_ns`: when it began, Unix time or any other clock that all such files of a job
    share; None: not known. `host`: where it was recorded; "": not known.
    """

    rank: int | None = None
    piece: str = ""
    began_ns: int | None = None
    host: str = ""


# What `recognise` returns of a file that is one rank's, and nothing in it says which.
WHOLE = (Part(),)


class Head:
    """The beginning of a file, read once for all who are asked about it; of a gzip file, of what it holds."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with open_file(path) as file:  # raises DlprofError where it cannot be opened
            self._raw = file.read(_SNIFFED)
            self.size = file.seek(0, 2)

    @property
    def name(self) -> str:
        """The file's name."""
        return self.path.name

    @property
    def is_packed(self) -> bool:
        """Whether it is a gzip file."""
        return self._raw.startswith(b"\x1f\x8b")

    @cached_property
    def start(self) -> bytes:
        """The first few kilobytes, enough for a magic number or a header line."""
        return _unpacked(self._raw, _SNIFFED) if self.is_packed else self._raw

    @cached_property
    def first(self) -> bytes:
        """The first HEAD_BYTES, or all of a smaller file."""
        try:
            with open_file(self.path) as file:
                raw = file.read(HEAD_BYTES)
        except DlprofError:
            return self.start
        return _unpacked(raw, HEAD_BYTES) if self.is_packed else raw

    @cached_property
    def text(self) -> str:
        """The same as text; bytes that are no UTF-8 are replaced."""
        return self.first.decode(errors="replace")

    @property
    def lines(self) -> list[str]:
        """The first lines, the last of them perhaps cut."""
        return self.text.splitlines()

    @cached_property
    def is_text(self) -> bool:
        """Whether the beginning holds no byte that text does not have."""
        return b"\0" not in self.start and bool(self.start.strip())

    @cached_property
    def opens(self) -> str:
        """The first character that is no space: "{" or "[" of JSON; "" of an empty file."""
        return self.start.lstrip(b"\xef\xbb\xbf \t\r\n")[:1].decode(errors="replace")


def _unpacked(raw: bytes, most: int) -> bytes:
    try:
        return zlib.decompressobj(wbits=31).decompress(raw, most)
    except zlib.error:
        return b""


@dataclass(frozen=True, kw_only=True)
class Format:
    """A format of another tool.

    `recognise(head)` returns what the file holds of which ranks; nothing where it is another format. It is asked about
    any file, hostile ones too, and is quick: it judges by the head. What it raises counts as nothing.
    `read(path, piece)` returns the tables; it raises DlprofError where the file cannot be read. None: the format is
    known and not read, and `left` says why, and what to do instead.
    """

    name: str
    title: str  # what it is, as in "8 files of …": "torch.profiler trace"
    recognised: str  # by what, in words: "JSON with `traceEvents`"
    recognise: Callable[[Head], Sequence[Part]]
    read: Callable[[Path, str], Reading] | None = None
    tables: tuple[str, ...] = ()
    brings: str = ""  # to the report, in words
    record: str = ""  # how to record it: a command, or code
    left: str = ""
    precedence: int = 0  # of formats with the same table for one rank, that with the highest is read
    of_host: bool = False  # it is of all ranks of a host, and is read with the first of them: of the host in its path
    of_any_rank: bool = False  # it is of use also of ranks without a trace, beside traces of others
    seen: bool = True  # real files were read with it; else it follows the tool's documentation or source
    # Of tables that a rule may ask for and this tool does not give: table → which option of the tool would bring it.
    lacks: Mapping[str, str] = field(default_factory=dict)

    @property
    def described(self) -> dict[str, str]:
        """Return what is said of it, by label: for `dlprof explain sources` and for docs/sources.md."""
        real = "yes" if self.seen else "no: it follows the tool's documentation or source"
        texts = {
            "What it is": self.title,
            "Recognised by": self.recognised,
            "Brings": self.brings,
            "Not read": self.left,
            "How to record it": self.record,
            "Lacks": "; ".join(f"{table}: {how}" for table, how in self.lacks.items()),
            "Real files seen": real if self.read else "",
        }
        return {label: text for label, text in texts.items() if text}

    def tables_of(self, path: Path, piece: str) -> Reading:
        """Return what `read` does; raise DlprofError where the format is not read."""
        if self.read is None:
            raise DlprofError(f"{path}: {self.title}: {self.left}")
        return self.read(path, piece)


# The modules below dlprof.read that have a FORMAT, or a tuple of several, in the order in which they are asked: the
# first that recognises a file has it.
FORMATS: tuple[str, ...] = (
    "gpu_logs.nvidia_smi",
    "gpu_logs.nvidia_dmon",
    "gpu_logs.amd_smi",
    "gpu_logs.sampled",
    "dumps.flight_recorder",
    "dumps.memory_snapshot",
    "nsys.format",
    "profiles.pstats",
    "profiles.line_profiler",
    "profiles.speedscope",
    "profiles.folded",
    "rocprof.format",
    "foreign.left",
    "foreign.horovod",
    "kineto.format",  # any other Chrome trace
)

# Tables that several files of one rank may add to.
JOINED = frozenset({"samples", "stacks", "lines"})


@cache
def formats() -> tuple[Format, ...]:
    """Return all formats in the order of FORMATS."""
    found: list[Format] = []
    for module in FORMATS:
        one = importlib.import_module(f"dlprof.read.{module}").FORMAT
        found += one if isinstance(one, tuple) else (one,)
    return tuple(found)


def format_named(name: str) -> Format:
    """Return the format of a name."""
    return next(one for one in formats() if one.name == name)


def recognised(head: Head) -> tuple[Format, Sequence[Part]] | None:
    """Return the format of a file and what it holds of which ranks; None where no format knows it."""
    for one in formats():
        try:
            if parts := one.recognise(head):
                return one, parts
        except Exception:  # noqa: BLE001, PERF203 - a stranger's file must not keep the others from being opened
            continue
    return None
