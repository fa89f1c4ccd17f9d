"""What changes look like in the user's files: unified diffs, for the page, the terminal and `git apply`.

A file is edited as it was recorded, or not at all: its digest says whether it still is.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dlprof import redaction
from dlprof.analysis.source.edits import NotEditable, Span, Value, edited
from dlprof.overrides import named

MOST_FILE_BYTES = 2 << 20  # as the recorder reads
_MOST_CALLS = 200  # of a rank

# The kind of call that takes a setting as a keyword, where it is not the group of the setting's override.
_KINDS = {
    "batch_size": "loader",
    "drop_last": "loader",
    "dynamic": "compile",
    "mode": "compile",
    "reshard_after_forward": "fsdp",
}
# Calls of which each takes the setting; of the others the first does.
_EACH = ("copy", "optimizer")


@dataclass(frozen=True)
class Call:
    """A call of the user's that was recorded, in `directory` or below, or named whole; see record/calls/frames.py."""

    kind: str
    file: str
    line: int
    function: str = ""
    source: str = ""
    digest: str = ""
    via: str = ""
    roles: tuple[str, ...] = ()
    count: int = 0
    span: Span = field(default_factory=lambda: Span(0))
    directory: str = ""


@dataclass(frozen=True)
class Wanted:
    """Settings that calls of one kind are to have; `role`: of loaders, what their batches are for."""

    kind: str
    settings: Mapping[str, Value]
    role: str = "train"


@dataclass(frozen=True)
class Patch:
    """A unified diff of the files that could be edited, and why others could not: (setting, place, reason).

    `shown`: the same diff for a report, with what is kept of the source; it does not apply where something is left out.
    """

    text: str = ""
    shown: str = ""
    left_out: tuple[tuple[str, str, str], ...] = ()


def kind_of(setting: str) -> str:
    """Return the kind of call that takes a setting of a change as a keyword; "": none does."""
    group = (named(setting) or "").partition(".")[0]
    return _KINDS.get(setting, group if group in ("loader", "ddp", "optimizer", "copy") else "")


def calls_of(facts: Iterable[Mapping[str, Any]]) -> list[Call]:
    """Return the calls that the facts of some ranks hold, each once, with what was recorded first."""
    found: dict[tuple[object, ...], Call] = {}
    for of_rank in facts:
        for row in (of_rank.get("calls") or ())[:_MOST_CALLS]:
            call = _call(row, str(of_rank.get("directory") or ""))
            if call is not None:
                found.setdefault((call.kind, call.file, call.line, call.span.column), call)
    return list(found.values())


def _call(row: Any, directory: str) -> Call | None:
    row = {name: value for name, value in row.items() if value is not None} if isinstance(row, Mapping) else {}
    if not {"kind", "file", "line"} <= row.keys():
        return None
    span = Span(row["line"], *(row.get(name, 0) for name in ("end_line", "column", "end_column")))
    texts = {name: row.get(name, "") for name in ("function", "source", "digest", "via")}
    roles = tuple(row.get("roles", ()))
    return Call(
        row["kind"],
        row["file"],
        row["line"],
        **texts,
        roles=roles,
        count=row.get("count", 0),
        span=span,
        directory=directory,
    )


def sites(calls: Sequence[Call], wanted: Wanted) -> list[Call]:
    """Return the calls that such settings stand in, or belong to."""
    found = [call for call in calls if call.kind == wanted.kind]
    if wanted.kind == "loader":
        found = [c for c in found if wanted.role in c.roles] or [
            c for c in found if not c.roles or "unknown" in c.roles
        ]
    # What a library makes for the script's line takes no keyword there.
    found.sort(key=lambda call: bool(call.via))
    return found if wanted.kind in _EACH else found[:1]


def patch(calls: Sequence[Call], asked: Iterable[Wanted]) -> Patch:
    """Return the diff that gives the calls these settings; the first of two values for one setting counts."""
    sources = _Sources()
    left_out: list[tuple[str, str, str]] = []
    taken: set[tuple[str, int, int, str]] = set()
    for wanted in asked:
        named_settings = ", ".join(wanted.settings)
        there = sites(calls, wanted)
        if not there:
            left_out.append(
                (named_settings, "", f"no call that takes it was recorded ({wanted.kind or 'no keyword sets it'})")
            )
        for call in there:
            mine = (call.file, call.line, call.span.column)
            settings = {name: v for name, v in wanted.settings.items() if (*mine, name) not in taken}
            try:
                sources.edit(call, settings)
            except NotEditable as e:
                left_out.append((named_settings, f"{call.file}:{call.line}", str(e)))
            else:
                taken |= {(*mine, name) for name in settings}
    return Patch(sources.diff(), sources.diff(redaction.source), tuple(left_out))


def wanted_of(overrides: Mapping[str, Value]) -> Iterator[Wanted]:
    """Yield what overrides, as `--set` takes them, want of the script's calls: {"loader.num_workers": 4}."""
    by_kind: dict[str, dict[str, Value]] = {}
    for name, value in overrides.items():
        _, _, setting = name.partition(".")
        by_kind.setdefault(kind_of(setting), {})[setting] = value
    return (Wanted(kind, settings) for kind, settings in by_kind.items())


def edit_of(facts: Iterable[Mapping[str, Any]], overrides: Mapping[str, Value]) -> str:
    """Return the diff that makes overrides permanent, by the facts of the ranks; "": not all of them are such edits."""
    made = patch(calls_of(facts), wanted_of(overrides))
    return "" if made.left_out else made.shown


class _Sources:
    """The files that are edited: as they were recorded, and as they are to be."""

    def __init__(self) -> None:
        self._files: dict[str, tuple[bytes, bytes]] = {}
        self._done: dict[str, list[tuple[Call, dict[str, Value]]]] = {}

    def edit(self, call: Call, settings: Mapping[str, Value]) -> None:
        """Give a call these settings; raise NotEditable where that cannot be done, and change nothing."""
        if not settings:
            return
        if call.via:
            raise NotEditable(f"{call.via} makes the call")
        _check_name(call.file)
        before = self._files[call.file][0] if call.file in self._files else read(call)
        # From the last line to the first, each time anew: an edit moves what stands below it.
        done = [(c, dict(s)) for c, s in self._done.get(call.file, [])]
        same = next((s for c, s in done if c.span == call.span), None)
        if same is None:
            done.append((call, dict(settings)))
        else:
            same.update(settings)
        after = before
        for one, its in sorted(done, key=lambda pair: (pair[0].line, pair[0].span.column), reverse=True):
            after = edited(after, one.span, one.kind, its)
        self._files[call.file] = before, after
        self._done[call.file] = done

    def diff(self, kept: Callable[[str], str] = str) -> str:
        """Return the unified diff of all files that are to be others than they are, of what is `kept` of each."""
        edited = ((name, *texts) for name, texts in sorted(self._files.items()) if texts[0] != texts[1])
        return "".join(_diff(name, kept(old.decode()), kept(new.decode())) for name, old, new in edited)


def read(call: Call) -> bytes:
    """Return the bytes of a call's file, as they were when it was recorded; raise NotEditable where they are not."""
    if not call.digest:
        raise NotEditable("what the file held was not recorded")
    try:
        # A pipe would be waited for, and a device has no end.
        fd = os.open(Path(call.directory) / call.file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise NotEditable("the file is not here")
            with open(fd, "rb", closefd=False) as file:
                data = file.read(MOST_FILE_BYTES + 1)
        finally:
            os.close(fd)
    except (OSError, ValueError):
        raise NotEditable("the file is not here") from None
    if hashlib.sha256(data).hexdigest() != call.digest:
        raise NotEditable("the file has changed since it was recorded")
    return data


def _check_name(file: str) -> None:
    """Raise NotEditable where a patch must not, or cannot, name a file."""
    if Path(file).is_absolute() or ".." in file.split("/"):
        raise NotEditable("the file is not below the folder that the job was started in")
    if not file.isprintable() or '"' in file or "\\" in file:
        raise NotEditable("a patch cannot name the file")


def _diff(name: str, before: str, after: str) -> str:
    old, new = (text.split("\n") for text in (before, after))
    # A name with a space ends at the tab.
    end = "\t" if " " in name else ""
    made = [*difflib.unified_diff(_lines(old), _lines(new))][2:]
    lines = (line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in made)
    return "".join((f"--- a/{name}{end}\n", f"+++ b/{name}{end}\n", *lines))


def _lines(parts: Sequence[str]) -> list[str]:
    whole = [f"{part}\n" for part in parts[:-1]]
    return [*whole, parts[-1]] if parts[-1] else whole
