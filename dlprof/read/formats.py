"""Lists the formats of other tools' files, and recognises the format of a file by its content.

The name of a file does not decide its format: people rename, unpack and collect files. It may hold the rank, if the
file itself does not.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

from dlprof.errors import DlprofError
from dlprof.read.opening import as_utf8, gunzipped, open_file
from dlprof.read.sources import Reading

# Bytes of a file, unpacked, that a format may use to recognise it.
HEAD_BYTES = 256 << 10
_SNIFFED = 4 << 10


class Part(NamedTuple):
    """The part of a file that belongs to one rank. A file of several ranks has several.

    `rank`: None if neither the file nor its name has it. `piece`: `read` finds the part by it; "": the whole file.
    `began_ns`: when the part began, in Unix time or another clock that all such files of a job share; None: unknown.
    `host`: where it was recorded; "": unknown. `world_size`: how many ranks its job has; None: unknown.
    """

    rank: int | None = None
    piece: str = ""
    began_ns: int | None = None
    host: str = ""
    world_size: int | None = None


# What `recognise` returns for a file of one unknown rank.
WHOLE = (Part(),)


class Head:
    """The beginning of a file, unpacked, read once for all formats."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with open_file(path) as file:  # raises DlprofError if it cannot be opened
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
        return as_utf8(gunzipped(self._raw, _SNIFFED))

    @cached_property
    def first(self) -> bytes:
        """The first HEAD_BYTES, or all of a smaller file."""
        try:
            with open_file(self.path) as file:
                raw = file.read(HEAD_BYTES)
        except DlprofError:
            return self.start
        return as_utf8(gunzipped(raw, HEAD_BYTES))

    @cached_property
    def text(self) -> str:
        """The same as text; bytes that are no UTF-8 are replaced."""
        return self.first.decode(errors="replace")

    @cached_property
    def is_text(self) -> bool:
        """Whether the beginning holds no byte that text does not have."""
        return b"\0" not in self.start and bool(self.start.strip())

    @cached_property
    def opens(self) -> str:
        """The first character that is no space: "{" or "[" of JSON; "" of an empty file."""
        return self.start.lstrip(b"\xef\xbb\xbf \t\r\n")[:1].decode(errors="replace")


@dataclass(frozen=True, kw_only=True)
class Format:
    """A format of another tool.

    `recognise(head)` returns the parts of the file by rank; nothing if it has another format. It is called with
    any file, also hostile ones, and must be quick: it looks only at the head. If it raises, the format does not match.
    `read(path, piece)` returns the tables; it raises DlprofError if the file cannot be read. None: the format is known
    but not read, and `left` says why and what to do instead.
    """

    name: str
    title: str  # what it is, as in "8 files of …": "torch.profiler trace"
    recognised: str  # what it is recognised by, in words: "JSON with `traceEvents`"
    recognise: Callable[[Head], Sequence[Part]]
    read: Callable[[Path, str], Reading] | None = None
    tables: tuple[str, ...] = ()
    brings: str = ""  # what it adds to the report, in words
    record: str = ""  # how to record it: a command, or code
    left: str = ""
    precedence: int = 0  # if several formats have the same table for a rank, the highest is read
    of_host: bool = False  # it covers a whole host, named in its path, and is read with the host's first rank
    of_any_rank: bool = False  # it is also useful for ranks without a trace, beside traces of others
    seen: bool = True  # real files were read; else the reader follows the tool's documentation or source
    # Tables that a rule may need and this tool does not record by default: table → the tool's option that records it.
    lacks: Mapping[str, str] = field(default_factory=dict)

    @property
    def described(self) -> dict[str, str]:
        """Return its description by label, for `dlprof explain sources` and docs/sources.md."""
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
        """Return the result of `read`; raise DlprofError if the format is not read."""
        if self.read is None:
            raise DlprofError(f"{path}: {self.title}: {self.left}")
        return self.read(path, piece)


def beginning(
    begins: Callable[[bytes], bool], rank_of: Callable[[str], int | None] = lambda _: None
) -> Callable[[Head], Sequence[Part]]:
    """Return what recognises files by their first bytes: one part, of the rank that `rank_of` finds in the name."""
    return lambda head: (Part(rank_of(head.name)),) if begins(head.first) else ()


# The modules below dlprof.read with a FORMAT, or a tuple of several. The first that recognises a file reads it.
FORMATS: tuple[str, ...] = (
    "gpu_logs.nvidia_smi",
    "gpu_logs.dmon",
    "gpu_logs.amd_smi",
    "gpu_logs.readings",
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

# Tables that several files of one rank may contribute to.
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
    """Return the format with this name."""
    return next(one for one in formats() if one.name == name)


def recognised(head: Head) -> tuple[Format, Sequence[Part]] | None:
    """Return the format of a file and its parts by rank; None if no format recognises it."""
    for one in formats():
        try:
            if parts := one.recognise(head):
                return one, parts
        except Exception:  # noqa: BLE001, PERF203 - a hostile file must not keep the others from being opened
            continue
    return None
