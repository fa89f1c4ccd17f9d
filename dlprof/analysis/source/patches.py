"""What changes look like in the user's files: unified diffs, for the page, the terminal and `git apply`.

A setting is edited in the call that takes it, or where its value begins: origins.py follows it there. A file is edited
as it was recorded, or not at all: its digest says whether it still is.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct, field

from dlprof import redaction
from dlprof.analysis.settings import buffers_argument, version_of
from dlprof.analysis.source import insertions
from dlprof.analysis.source.edits import (
    Call,
    Lines,
    NotEditable,
    Recorded,
    Span,
    Value,
    call_at,
    check_name,
    edited,
    find,
    given_value,
    is_literal,
    parsed,
    read_file,
    utf8,
    with_others,
)
from dlprof.analysis.source.origins import Change, Origins, of_trainer
from dlprof.analysis.source.rewriting import rewritten
from dlprof.overrides import named
from dlprof.result import is_line

__all__ = ["Call", "NotEditable", "Patch", "Recorded", "Span", "Wanted", "calls_of", "edit_of", "edited", "patch"]

_MOST_CALLS = 200  # of a rank

# The kind of call that takes a setting as a keyword, where it is not the group of the setting's override.
_KINDS = {
    "autocast": "autocast",
    "autocast_dtype": "autocast",
    "batch_size": "loader",
    "drop_last": "loader",
    "dynamic": "compile",
    "memory_format": "format",
    "mode": "compile",
    "num_threads": "threads",
    "reshard_after_forward": "fsdp",
}
# Kinds of calls that all take the setting; for the others only the first does.
_EACH = ("copy", "optimizer")


class Wanted(Struct, frozen=True):
    """Settings that calls of one kind are to have; `role`: of loaders, what their batches are for."""

    kind: str
    settings: Mapping[str, Value]
    role: str = "train"


class Patch(Struct, frozen=True):
    """A unified diff of the files that could be edited, and why others could not: (setting, place, reason).

    `shown`: the same diff for a report, with what is kept of the source; it does not apply where something is left out.
    `elsewhere`: file, line and kept text of values that do not stand in the call.
    `files`: what each file holds, and what it is to hold.
    """

    text: str = ""
    shown: str = ""
    left_out: tuple[tuple[str, str, str], ...] = ()
    elsewhere: tuple[tuple[str, int, str], ...] = ()
    files: Mapping[str, tuple[bytes, bytes]] = field(default_factory=dict)


def kind_of(setting: str) -> str:
    """Return the kind of call that takes a setting of a change as a keyword; "": none does.

    A setting that is a line of a file ("train.py:41") is of no call: it is "code", and its value the name of an idiom.
    """
    if is_line(setting):
        return "code"
    group = (named(setting) or "").partition(".")[0]
    return _KINDS.get(setting, group if group in ("loader", "ddp", "optimizer", "copy") else "")


def calls_of(facts: Iterable[Mapping[str, Any]]) -> list[Call]:
    """Return the calls that the facts of some ranks hold, each once, with what was recorded first."""
    facts = [*facts]
    job = _recorded(next((one for one in facts if one.get("files")), {}))
    found: dict[tuple[object, ...], Call] = {}
    for of_rank in facts:
        for row in (of_rank.get("calls") or ())[:_MOST_CALLS]:
            call = _call(row, str(of_rank.get("directory") or ""), job)
            if call is not None:
                found.setdefault((call.kind, call.file, call.line, call.span.column), call)
    return list(found.values())


def _recorded(facts: Mapping[str, Any]) -> Recorded:
    files = {str(row["file"]): str(row.get("digest") or "") for row in facts.get("files") or () if row.get("file")}
    options = [row for row in facts.get("options") or () if isinstance(row, Mapping)]
    device = facts.get("device")
    kind = str(device.get("type") or "") if isinstance(device, Mapping) else ""
    torch, argv = version_of(facts), [*map(str, facts.get("argv") or ())]
    return Recorded(str(facts.get("directory") or ""), kind, torch, files, options, argv)


def _call(row: Any, directory: str, job: Recorded) -> Call | None:
    row = {name: value for name, value in row.items() if value is not None} if isinstance(row, Mapping) else {}
    if not {"kind", "file", "line"} <= row.keys():
        return None
    span = Span(row["line"], *(row.get(name, 0) for name in ("end_line", "column", "end_column")))
    texts = {name: row.get(name, "") for name in ("function", "source", "digest", "via", "model")}
    return Call(
        row["kind"],
        row["file"],
        row["line"],
        **texts,
        roles=tuple(row.get("roles", ())),
        count=row.get("count", 0),
        span=span,
        directory=directory,
        takes=tuple(row.get("takes", ())),
        torch=row.get("torch", False),
        whole=row.get("whole", False),
        values=row.get("values", {}),
        job=job,
    )


def sites(calls: Sequence[Call], wanted: Wanted) -> list[Call]:
    """Return the calls that such settings stand in, or belong to."""
    if wanted.kind == "format":
        return insertions.sites(calls)
    if wanted.kind == "autocast":
        return [*(insertions.pair(calls) or ())[:1]]
    if wanted.kind == "code" and calls:
        return [_of_line(calls[0].job, setting) for setting in wanted.settings]
    found = [call for call in calls if call.kind == wanted.kind]
    if wanted.kind == "loader":
        found = [c for c in found if wanted.role in c.roles] or [
            c for c in found if not c.roles or "unknown" in c.roles
        ]
    # What a library makes for the script's line takes no keyword there.
    found.sort(key=lambda call: bool(call.via))
    if wanted.kind == "threads":
        return found[-1:]  # the last one counts
    return found if wanted.kind in _EACH else found[:1]


def _of_line(job: Recorded, setting: str) -> Call:
    file, _, line = setting.rpartition(":")
    return Call("code", file, int(line), digest=job.files.get(file, ""), directory=job.directory, job=job)


def patch(calls: Sequence[Call], requests: Iterable[Wanted]) -> Patch:
    """Return the diff that gives the calls these settings; the first of two values for one setting counts."""
    sources = _Sources(calls)
    left_out: list[tuple[str, str, str]] = []
    taken: set[tuple[str, int, int, str]] = set()
    for wanted in requests:
        named_settings = ", ".join(wanted.settings)
        there = sites(calls, wanted)
        if not there:
            why = f"no call that takes it was recorded ({wanted.kind or 'no keyword sets it'})"
            if wanted.kind == "format":
                why = "it is not sure which expressions are the model and its images"
            if wanted.kind == "autocast":
                why = "it is not sure where the forward pass begins and ends"
            left_out.append((named_settings, "", why))
        for call in there:
            mine = (call.file, call.line, call.span.column)
            settings = {name: v for name, v in wanted.settings.items() if (*mine, name) not in taken}
            try:
                sources.edit(call, settings)
            except NotEditable as e:
                left_out.append((named_settings, f"{call.file}:{call.line}", str(e)))
            else:
                taken |= {(*mine, name) for name in settings}
    return Patch(sources.diff(), sources.diff(shown=True), tuple(left_out), sources.elsewhere(), sources.edited)


def wanted_of(overrides: Mapping[str, Value]) -> Iterator[Wanted]:
    """Yield what overrides, as `--set` takes them, want of the script's calls: {"loader.num_workers": 4}."""
    by_kind: dict[str, dict[str, Value]] = {}
    for name, value in overrides.items():
        _, _, setting = name.partition(".")
        by_kind.setdefault(kind_of(setting), {})[setting] = value
    return (Wanted(kind, settings) for kind, settings in by_kind.items())


def edit_of(facts: Iterable[Mapping[str, Any]], overrides: Mapping[str, Value]) -> str:
    """Return the diff that makes overrides permanent, by the facts of the ranks; "": not all of them are such edits."""
    made = patch_of(facts, overrides)
    return "" if made.left_out else made.shown


def patch_of(facts: Iterable[Mapping[str, Any]], overrides: Mapping[str, Value]) -> Patch:
    """Return the patch that makes overrides permanent: `text` for `git apply` in the folder that the job started in.

    `left_out` holds those that it does not make, with what to set instead.
    """
    return patch(calls_of(facts), wanted_of(overrides))


_Edit = (
    Change | tuple[Span, str, dict[str, Value]]
)  # of a value that stands elsewhere; of a call: place, kind, settings


class _Sources:
    """The files that are edited: each as it was recorded, and its edits by their places."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = calls
        self._files: dict[str, tuple[bytes, dict[object, _Edit]]] = {}

    def edit(self, call: Call, settings: Mapping[str, Value]) -> None:
        """Give a call these settings; raise NotEditable where that cannot be done, and change nothing."""
        if not settings:
            return
        if call.via:
            call, settings = of_trainer(call, settings)
        if "broadcast_buffers" in settings:
            of_torch = buffers_argument(call.job.torch)
            settings = {of_torch if name == "broadcast_buffers" else name: v for name, v in settings.items()}
        check_name(call.file)
        files = {file: (text, dict(edits)) for file, (text, edits) in self._files.items()}
        if call.file not in files:
            files[call.file] = read_file(call.directory, call.file, call.digest), {}
        text, edits = files[call.file]
        made: list[Change] = []
        if call.kind == "code":
            made = rewritten(text, call.file, call.line, str(settings[f"{call.file}:{call.line}"]))
        elif "memory_format" in settings:
            made = [_appended(call, text)]
        elif both := insertions.pair(self._calls) if "autocast" in settings or "autocast_dtype" in settings else None:
            if not {*settings.values()} <= {"bf16", "bfloat16"} or not call.job.device:
                raise NotEditable("only autocast to bfloat16 is an edit: float16 needs a GradScaler, too")
            made = insertions.autocast(*both, text)
        if made:
            edits.update(((one.begin, one.end), one) for one in made)
            _after(text, edits)
            self._files = files
            return
        node = find(parsed(utf8(text)), call.span, call.kind) if call.line else None
        if node is not None:
            settings = with_others(node, settings)
        inside = {}
        for name, value in settings.items():
            given = given_value(node, name) if node is not None else ast.Name(name)
            if given is None or is_literal(given):
                inside[name] = value
                continue
            change = Origins(call, name, value).change(given)
            _, those = files.setdefault(change.file, (call.job.read(change.file), {}))
            if those.setdefault((change.begin, change.end), change) != change:
                raise NotEditable("another change sets the same value")
        if inside:
            before = edits.get(call.span)
            edits[call.span] = call.span, call.kind, {**(before[2] if isinstance(before, tuple) else {}), **inside}
        for one in files.values():
            _after(*one)
        self._files = files

    @property
    def edited(self) -> dict[str, tuple[bytes, bytes]]:
        """All files that are to be others than they are: as they are, and as they are to be."""
        both = {name: (text, _after(text, edits)) for name, (text, edits) in sorted(self._files.items())}
        return {name: texts for name, texts in both.items() if texts[0] != texts[1]}

    def diff(self, *, shown: bool = False) -> str:
        """Return the unified diff of all files that are to be others; `shown`: of what is kept of each."""
        made = []
        for file, (text, edits) in sorted(self._files.items()):
            is_source = file.endswith(".py")
            old, new = text.decode(), _after(text, edits).decode()
            if shown and old != new:
                old, new = map(redaction.source, (old, new)) if is_source else _only_changed(old, new)
            made += [_diff(file, old, new, 3 if is_source or not shown else 0)] if old != new else []
        return "".join(made)

    def elsewhere(self) -> tuple[tuple[str, int, str], ...]:
        """Return file, line and kept text of the values that do not stand in a call."""
        found = []
        for file, (text, edits) in self._files.items():
            old, new = text.decode(), _after(text, edits).decode()
            lines = (redaction.source(old) if file.endswith(".py") else _only_changed(old, new)[0]).split("\n")
            changes = [one for one in edits.values() if isinstance(one, Change)]
            found += [(file, one.line, " ".join(lines[one.line - 1].split())) for one in changes]
        return tuple(found)


def _appended(call: Call, text: bytes) -> Change:
    """Return the edit that lays out the model, or its images, in a call: see insertions.py."""
    node = call_at(parsed(utf8(text)), call.span)
    given = None if node is None else insertions.target(call, node)
    name = insertions.format_of(call)
    if given is None or not name:
        raise NotEditable("there is no such call on that line")
    end = Lines(text).span(given)[1]
    return Change(call.file, end, end, f".to(memory_format=torch.{name})".encode(), given.lineno)


def _after(text: bytes, edits: Mapping[object, _Edit]) -> bytes:
    """Return a file as it is to be. From its end to its begin: an edit moves what stands below it."""
    at = Lines(text).at
    places = ((one.begin if isinstance(one, Change) else at(one[0].line, one[0].column), one) for one in edits.values())
    for _, one in sorted(places, key=lambda pair: pair[0], reverse=True):
        text = text[: one.begin] + one.new + text[one.end :] if isinstance(one, Change) else edited(text, *one)
    return text


def _only_changed(old: str, new: str) -> tuple[str, str]:
    """Return two texts of as many lines, with name and value of what differs, and nothing else."""
    pairs = [*zip(old.split("\n"), new.split("\n"), strict=True)]
    kept = []
    for before, after in pairs:
        same = next(
            (n for n, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), min(len(before), len(after))
        )
        name = re.search(r"""["']?[\w.-]+["']?\s*[:= ]\s*\S*$""", before[:same])
        begin = name.start() if name else same
        indent = before[: len(before) - len(before.lstrip())]
        told = [re.match(r"""["']?[\w.-]*["']?\s*[:= ]\s*[^\s,\]}]*""", line[begin:]) for line in (before, after)]
        kept.append([f"{indent}{'' if len(indent) == begin else '… '}{t[0] if t else ''}" for t in told])
    texts = [[pair[n] if a != b else "" for pair, (a, b) in zip(kept, pairs, strict=True)] for n in (0, 1)]
    return "\n".join(texts[0]), "\n".join(texts[1])


def _diff(name: str, before: str, after: str, around: int) -> str:
    old, new = (text.split("\n") for text in (before, after))
    # A name with a space ends at the tab.
    end = "\t" if " " in name else ""
    made = [*difflib.unified_diff(_lines(old), _lines(new), n=around)][2:]
    lines = (line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in made)
    return "".join((f"--- a/{name}{end}\n", f"+++ b/{name}{end}\n", *lines))


def _lines(parts: Sequence[str]) -> list[str]:
    whole = [f"{part}\n" for part in parts[:-1]]
    return [*whole, parts[-1]] if parts[-1] else whole
