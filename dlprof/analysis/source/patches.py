"""What changes look like in the user's files: unified diffs, for the page, the terminal and `git apply`.

A file is edited as it was recorded, or not at all: its digest says whether it still is.

Sets keyword arguments in one call of a Python source, and leaves every other byte of it as it is.

The call is found in the syntax tree. What comes out is parsed again and compared with the tree that it should have, so
that an edit is right or is not made.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import json
import os
import stat
import tokenize
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

from dlprof import redaction
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
# Kinds of calls that all take the setting; for the others only the first does.
_EACH = ("copy", "optimizer")


@dataclass(frozen=True)
class Span:
    """Where a call stands, as the syntax tree counts: lines from 1, columns in bytes of UTF-8.

    `end_line` 0: only its line is known.
    """

    line: int
    end_line: int = 0
    column: int = 0
    end_column: int = 0


@dataclass(frozen=True)
class Call:
    """A call of the user's that was recorded, in `directory` or below, or named whole; see record/calls/frames.py.

    `takes`, `torch`, `whole`: as in record/calls/seen.py.
    """

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
    takes: tuple[int, ...] = ()
    torch: bool = False
    whole: bool = False


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
    `files`: what each file holds, and what it is to hold.
    """

    text: str = ""
    shown: str = ""
    left_out: tuple[tuple[str, str, str], ...] = ()
    files: Mapping[str, tuple[bytes, bytes]] = field(default_factory=dict)


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


def patch(calls: Sequence[Call], requests: Iterable[Wanted]) -> Patch:
    """Return the diff that gives the calls these settings; the first of two values for one setting counts."""
    sources = _Sources()
    left_out: list[tuple[str, str, str]] = []
    taken: set[tuple[str, int, int, str]] = set()
    for wanted in requests:
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
    return Patch(sources.diff(), sources.diff(redaction.source), tuple(left_out), sources.edited)


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

    @property
    def edited(self) -> dict[str, tuple[bytes, bytes]]:
        """All files that are to be others than they are: as they are, and as they are to be."""
        return {name: texts for name, texts in sorted(self._files.items()) if texts[0] != texts[1]}

    def diff(self, kept: Callable[[str], str] = str) -> str:
        """Return the unified diff of all files that are to be others than they are, of what is `kept` of each."""
        edited = self.edited.items()
        return "".join(_diff(name, kept(old.decode()), kept(new.decode())) for name, (old, new) in edited)


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


Value = bool | int | float | str | None


# What the last word of a call's name must be, by the kind of call; a name that an import or an assignment made is
# followed back to its origin.
_OPTIMIZERS = "ASGD Adadelta Adagrad Adam AdamW Adamax NAdam RAdam RMSprop Rprop SGD"


CALLEES: Mapping[str, frozenset[str]] = {
    "loader": frozenset(("DataLoader", "StatefulDataLoader")),
    "ddp": frozenset(("DistributedDataParallel",)),
    "fsdp": frozenset(("FullyShardedDataParallel", "fully_shard")),
    "optimizer": frozenset(_OPTIMIZERS.split()),
    "compile": frozenset(("compile",)),
    "copy": frozenset(("to", "cuda")),
}


# The number of leading positional arguments that no change sets.
_BY_POSITION = {"loader": 5, "ddp": 4, "fsdp": 1, "optimizer": 2, "compile": 1, "copy": 1}


# Keywords beside which a call refuses a setting, where both have a value that is not false.
_REFUSES: Mapping[str, tuple[str, ...]] = {
    "batch_size": ("batch_sampler",),
    "drop_last": ("batch_sampler",),
    "foreach": ("fused",),
    "fused": ("foreach", "differentiable"),
    "mode": ("options",),
    "num_workers=0": ("persistent_workers", "prefetch_factor", "multiprocessing_context", "timeout"),
}
# Settings of a loader that one without workers refuses.
_OF_WORKERS = ("persistent_workers", "prefetch_factor", "multiprocessing_context")


class NotEditable(Exception):  # noqa: N818 - no error: a reason for the user
    """Why a call is left as it is: "num_workers is `args.workers` there"."""


def edited(source: bytes, span: Span, kind: str, settings: Mapping[str, Value]) -> bytes:
    """Return a source in which the call of a kind has these keyword arguments; raise NotEditable where it cannot."""
    text = _utf8(source)
    tree = _parsed(text)
    call = _find(tree, span, kind)
    start, callee = (call.lineno, call.col_offset), ast.dump(call.func)
    _check_together(call, settings)
    for name, value in settings.items():
        wanted = deepcopy(tree)
        text = _with(text, call, kind, name, value)
        _set(_again(wanted, start, callee), name, value)
        try:
            tree = ast.parse(text)
        except SyntaxError:
            tree = ast.Module([], [])
        if ast.dump(tree) != ast.dump(wanted):
            raise NotEditable("the call is written in a way that is not edited")
        call = _again(tree, start, callee)
    return text


def _check_together(call: ast.Call, settings: Mapping[str, Value]) -> None:
    """Raise NotEditable where the call would refuse the settings beside its other arguments."""
    given = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    given |= {name: ast.Constant(value) for name, value in settings.items()}

    def is_off(name: str) -> bool:
        return name not in given or (_is_literal(given[name]) and not ast.literal_eval(given[name]))

    for name, value in settings.items():
        for other in _REFUSES.get(name if value else f"{name}=0", ()):
            if not is_off(other):
                raise NotEditable(f"{name} cannot be set beside {other}")
        if value and name in _OF_WORKERS and is_off("num_workers"):
            raise NotEditable(f"{name} needs num_workers above 0")


def _utf8(source: bytes) -> bytes:
    try:
        encoding, _ = tokenize.detect_encoding(BytesIO(source).readline)
        source.decode("utf-8")
    except (SyntaxError, UnicodeDecodeError, LookupError):
        raise NotEditable("it is not written in UTF-8") from None
    if encoding != "utf-8":  # with a mark of byte order, too: it shifts the columns of the first line
        raise NotEditable("it is not written in plain UTF-8")
    if b"\r" in source.replace(b"\r\n", b""):
        raise NotEditable("its lines end in carriage returns")
    return source


def _parsed(text: bytes) -> ast.Module:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise NotEditable("it cannot be parsed") from None


def _calls(tree: ast.AST) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def _find(tree: ast.Module, span: Span, kind: str) -> ast.Call:
    """Return the call in that place; where its columns are not known, the only one of its kind in that line."""
    names = _origins(tree)

    def is_one(call: ast.Call) -> bool:
        return _name(call.func, names) in CALLEES.get(kind, frozenset())

    if span.end_line:
        at = (span.line, span.end_line, span.column, span.end_column)
        found = [c for c in _calls(tree) if (c.lineno, c.end_lineno, c.col_offset, c.end_col_offset) == at]
        if not found or not is_one(found[0]):
            raise NotEditable("there is no such call on that line")
        return found[0]
    found = [c for c in _calls(tree) if c.lineno <= span.line <= (c.end_lineno or 0) and is_one(c)]
    if len(found) != 1:
        raise NotEditable(
            "there is no such call on that line" if not found else "there are several such calls on that line"
        )
    return found[0]


def _again(tree: ast.Module, start: tuple[int, int], callee: str) -> ast.Call:
    """Return the call after an edit of its arguments: it begins where it did, with the same callee."""
    return next(c for c in _calls(tree) if (c.lineno, c.col_offset) == start and ast.dump(c.func) == callee)


def _origins(tree: ast.Module) -> dict[str, str]:
    """Return what names of imports and plain assignments stand for: DL → DataLoader."""
    origins: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            origins.update({alias.asname: alias.name for alias in node.names if alias.asname})
        elif isinstance(node, ast.Assign) and isinstance(node.value, (ast.Name, ast.Attribute)):
            last = node.value.id if isinstance(node.value, ast.Name) else node.value.attr
            origins.update({target.id: last for target in node.targets if isinstance(target, ast.Name)})
    return origins


def _name(callee: ast.expr, origins: Mapping[str, str]) -> str:
    """Return the last word of a callee's name, followed through aliases."""
    name = callee.id if isinstance(callee, ast.Name) else callee.attr if isinstance(callee, ast.Attribute) else ""
    for _ in range(8):
        if isinstance(callee, ast.Attribute) or origins.get(name, name) == name:
            break
        name = origins[name]
    return name


def _with(text: bytes, call: ast.Call, kind: str, name: str, value: Value) -> bytes:
    """Return the text in which a call has a keyword argument."""
    given = next((keyword for keyword in call.keywords if keyword.arg == name), None)
    lines = _Lines(text)
    if given is not None:
        if not _is_literal(given.value):
            raise NotEditable(f"{name} is `{ast.unparse(given.value)[:60]}` there")
        if ast.literal_eval(given.value) == value:
            raise NotEditable(f"{name} is {value!r} there already")
        return lines.replaced(*lines.span(given.value), _literal(value, text))
    if any(isinstance(arg, ast.Starred) for arg in call.args) or any(k.arg is None for k in call.keywords):
        raise NotEditable(f"{name} may be among the arguments that `*` or `**` passes there")
    if len(call.args) > _BY_POSITION[kind]:
        raise NotEditable(f"{name} may be one of the positional arguments there")
    return _inserted(lines, call, f"{name}={_literal(value, text).decode()}".encode())


def _is_literal(node: ast.expr) -> bool:
    inner = node.operand if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) else node
    return isinstance(inner, ast.Constant)


def _literal(value: Value, text: bytes) -> bytes:
    """Write a value as the source would: its strings in the quotes that it uses most."""
    if isinstance(value, str):
        return (json.dumps(value) if text.count(b'"') >= text.count(b"'") else repr(value)).encode()
    return repr(int(value) if isinstance(value, float) and value.is_integer() else value).encode()


def _inserted(lines: _Lines, call: ast.Call, argument: bytes) -> bytes:
    """Return the text with one more argument at the end of a call, in the call's own layout."""
    text, close = lines.text, lines.span(call)[1] - 1
    given: list[ast.expr | ast.keyword] = [*call.args, *call.keywords]
    arguments = [lines.span(node) for node in given]
    if not arguments:
        opened = text.index(b"(", lines.span(call.func)[1]) + 1
        return lines.replaced(opened, opened, argument)
    begin, end = max(arguments, key=lambda one: one[1])
    last, comma = _last(text, end, close)
    line = text.rfind(b"\n", 0, begin) + 1
    indent = text[line:begin]
    if b"\n" not in text[last:close] or indent.strip():
        return lines.replaced(last, last, b", " + argument)
    # Each argument has a line of its own.
    end_of_line = text.index(b"\n", max(last, comma))
    newline = b"\r\n" if text[end_of_line - 1 : end_of_line] == b"\r" else b"\n"
    added = indent + argument + (b"," if comma >= 0 else b"") + newline
    text = lines.replaced(end_of_line + 1, end_of_line + 1, added)
    return text if comma >= 0 else text[:last] + b"," + text[last:]


def _last(text: bytes, after: int, close: int) -> tuple[int, int]:
    """Return where the last argument ends with its own brackets, and the comma after it; −1: there is none."""
    at, last, comma = after, after, -1
    while at < close:
        char = text[at : at + 1]
        if char == b"#":
            at = text.index(b"\n", at)
        elif char == b")":
            last = at + 1
        elif char == b",":
            comma = at
        at += 1
    return last, comma


def _set(call: ast.Call, name: str, value: Value) -> None:
    whole = int(value) if isinstance(value, float) and value.is_integer() else value
    node = ast.parse(repr(whole), mode="eval").body
    given = next((keyword for keyword in call.keywords if keyword.arg == name), None)
    if given is not None:
        given.value = node
    else:
        call.keywords.append(ast.keyword(name, node))


class _Lines:
    """A source with the places of its lines."""

    def __init__(self, text: bytes) -> None:
        self.text = text
        self._starts = [0]
        for line in text.split(b"\n"):
            self._starts.append(self._starts[-1] + len(line) + 1)

    def at(self, line: int, column: int) -> int:
        """Return the place of a line and column of the syntax tree."""
        return self._starts[line - 1] + column

    def span(self, node: ast.expr | ast.keyword) -> tuple[int, int]:
        """Return where a node begins and ends."""
        return self.at(node.lineno, node.col_offset), self.at(node.end_lineno or 0, node.end_col_offset or 0)

    def replaced(self, begin: int, end: int, by: bytes) -> bytes:
        """Return the text with another part in the place of this one."""
        return self.text[:begin] + by + self.text[end:]
