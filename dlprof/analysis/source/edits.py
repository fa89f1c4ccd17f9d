"""Sets keyword arguments in one call of a Python source, and leaves every other byte of it as it is.

The call is found in the syntax tree. What comes out is parsed again and compared with the tree that it should have, so
that an edit is right or is not made. A file is edited as it was recorded, or not at all: its digest says whether it
still is.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import stat
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

MOST_FILE_BYTES = 2 << 20  # as the recorder reads

Value = bool | int | float | str | None


@dataclass(frozen=True)
class Span:
    """Where a call stands, as the syntax tree counts: lines from 1, columns in bytes of UTF-8.

    `end_line` 0: only its line is known.
    """

    line: int
    end_line: int = 0
    column: int = 0
    end_column: int = 0

    @classmethod
    def of(cls, node: ast.expr) -> Span:
        """Return where a node stands."""
        return cls(node.lineno, node.end_lineno or 0, node.col_offset, node.end_col_offset or 0)


@dataclass(frozen=True)
class Recorded:
    """What was recorded of a job's files and command line: the digest of each file, by name, and argparse's options.

    `device`: the type of its device, "cuda". `torch`: the version of its torch, (2, 9).
    """

    directory: str = ""
    device: str = ""
    torch: tuple[int, int] | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    options: Sequence[Mapping[str, Any]] = ()
    argv: Sequence[str] = ()

    def read(self, file: str) -> bytes:
        """Return the bytes of a file as they were when it was recorded; raise NotEditable where they are not."""
        check_name(file)
        return read_file(self.directory, file, self.files.get(file, ""))


@dataclass(frozen=True)
class Call:
    """A call of the user's that was recorded, in `directory` or below, or named whole; see record/calls.py.

    `model`, `takes`, `torch`, `whole`, `values`: as in record/calls.py. `job`: what the ranks recorded besides.
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
    model: str = ""
    takes: tuple[int, ...] = ()
    torch: bool = False
    whole: bool = False
    values: Mapping[str, Value] = field(default_factory=dict, compare=False)
    job: Recorded = field(default_factory=Recorded, compare=False, repr=False)


def read_file(directory: str, file: str, digest: str) -> bytes:
    """Return the bytes of a file of that digest; raise NotEditable where it holds others."""
    if not digest:
        raise NotEditable("what the file held was not recorded")
    try:
        # A pipe would be waited for, and a device has no end.
        fd = os.open(Path(directory) / file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise NotEditable("the file is not here")
            with open(fd, "rb", closefd=False) as opened:
                data = opened.read(MOST_FILE_BYTES + 1)
        finally:
            os.close(fd)
    except (OSError, ValueError):
        raise NotEditable("the file is not here") from None
    if hashlib.sha256(data).hexdigest() != digest:
        raise NotEditable("the file has changed since it was recorded")
    return data


def check_name(file: str) -> None:
    """Raise NotEditable where a patch must not, or cannot, name a file."""
    if Path(file).is_absolute() or ".." in file.split("/"):
        raise NotEditable("the file is not below the folder that the job was started in")
    if not file.isprintable() or '"' in file or "\\" in file:
        raise NotEditable("a patch cannot name the file")


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
    "threads": frozenset(("set_num_threads",)),
    "arguments": frozenset(("TrainingArguments", "Seq2SeqTrainingArguments")),  # of transformers
}

# Settings that are often given without their name: the place among the arguments.
_POSITIONS = {"batch_size": 1, "num_threads": 0}
# The number of leading positional arguments that no change sets otherwise.
_BY_POSITION = {"loader": 5, "ddp": 4, "fsdp": 1, "optimizer": 2, "compile": 1, "copy": 1, "threads": 1, "arguments": 1}

TRAINER = "dataloader_"  # before the settings of loaders, in transformers' TrainingArguments

# Keywords beside which a call refuses a setting, where both have a value that is not false.
_REFUSES: Mapping[str, tuple[str, ...]] = {
    "batch_size": ("batch_sampler",),
    "drop_last": ("batch_sampler",),
    "foreach": ("fused",),
    "forward_sync_buffers=0": ("broadcast_buffers",),
    "fused": ("foreach", "differentiable"),
    "mode": ("options",),
    "num_workers=0": ("persistent_workers", "prefetch_factor", "multiprocessing_context", "timeout"),
}
# Settings of a loader that one without workers refuses.
_OF_WORKERS = ("persistent_workers", "prefetch_factor", "multiprocessing_context")
# What these are of one without workers.
_OFF: Mapping[str, Any] = {
    "persistent_workers": False,
    "prefetch_factor": None,
    "multiprocessing_context": None,
    "timeout": 0,
}


class NotEditable(Exception):  # noqa: N818 - no error: a reason for the user
    """Why a call is left as it is: "num_workers is `args.workers` there"."""


def edited(source: bytes, span: Span, kind: str, settings: Mapping[str, Value]) -> bytes:
    """Return a source in which the call of a kind has these keyword arguments; raise NotEditable where it cannot."""
    text = utf8(source)
    tree = parsed(text)
    call = find(tree, span, kind)
    start, callee = (call.lineno, call.col_offset), ast.dump(call.func)
    settings = with_others(call, settings)
    workers = given_value(call, f"{TRAINER if kind == 'arguments' else ''}num_workers")
    for name, value in settings.items():
        wanted = deepcopy(tree)
        new = literal(value, text).decode()
        if (
            value
            and name.removeprefix(TRAINER) in _OF_WORKERS
            and isinstance(workers, (ast.Name, ast.Attribute, ast.Subscript))
        ):
            # The script may be started without workers.
            by = text[slice(*Lines(text).span(workers))].decode()
            by = ast.unparse(workers) if "\n" in by else by
            new = f"{by} > 0" if value is True else f"{new} if {by} else None"
        text = _with(text, call, kind, name, value, new.encode())
        _set(_again(wanted, start, callee), name, new)
        try:
            tree = ast.parse(text)
        except SyntaxError:
            tree = ast.Module([], [])
        if ast.dump(tree) != ast.dump(wanted):
            raise NotEditable("the call is written in a way that is not edited")
        call = _again(tree, start, callee)
    return text


def given_value(call: ast.Call, name: str) -> ast.expr | None:
    """Return the argument that a call has for a setting; of one `**values`: values[name]; None: it has none."""
    given = next((keyword.value for keyword in call.keywords if keyword.arg == name), None)
    if given is None and name in _POSITIONS and len(call.args) > _POSITIONS[name]:
        first = call.args[: _POSITIONS[name] + 1]
        return None if any(isinstance(arg, ast.Starred) for arg in first) else first[-1]
    unpacked = [keyword.value for keyword in call.keywords if keyword.arg is None]
    if given is None and len(unpacked) == 1:
        return ast.copy_location(ast.Subscript(unpacked[0], ast.Constant(name), ast.Load()), unpacked[0])
    return given


def with_others(call: ast.Call, settings: Mapping[str, Value]) -> dict[str, Value]:
    """Return the settings, and what a loader that is to have no workers must not have: `prefetch_factor=None`.

    Those that the call has once it has the others are left out: `persistent_workers=n > 0` beside `num_workers=n`.
    Raises NotEditable where the call would refuse them beside its other arguments.
    """
    trainer = TRAINER if any(name.startswith(TRAINER) for name in settings) else ""
    settings = {name.removeprefix(TRAINER): value for name, value in settings.items()}
    given = {keyword.arg.removeprefix(TRAINER): keyword.value for keyword in call.keywords if keyword.arg}
    workers, wanted = given.get("num_workers"), settings.get("num_workers")
    without = wanted == 0
    if workers is not None and wanted is not None and not is_literal(workers):
        settings = {
            name: value
            for name, value in settings.items()
            if name not in _OFF or name not in given or not _has(given[name], value, workers, bool(wanted))
        }
    if without:
        off = {name: value for name, value in _OFF.items() if name in given and is_literal(given[name])}
        settings = {**{name: v for name, v in off.items() if ast.literal_eval(given[name])}, **settings}
    given |= {name: ast.Constant(value) for name, value in settings.items()}

    def is_off(name: str) -> bool:
        if name not in given:
            return True
        if without and name != "num_workers" and workers is not None and _is_off_without(given[name], workers):
            return True
        return is_literal(given[name]) and not ast.literal_eval(given[name])

    for name, value in settings.items():
        for other in _REFUSES.get(name if value else f"{name}=0", ()):
            if not is_off(other):
                raise NotEditable(f"{name} cannot be set beside {other}")
        if value and name in _OF_WORKERS and is_off("num_workers"):
            raise NotEditable(f"{name} needs num_workers above 0")
    return {f"{trainer}{name}": value for name, value in settings.items()}


def _has(given: ast.expr, value: Value, workers: ast.expr, some: bool) -> bool:
    """Return whether an argument has this value where there are some of these workers, or none."""
    tests = _tests(workers)
    if isinstance(given, ast.IfExp) and ast.unparse(given.test) in tests:
        chosen = given.body if some else given.orelse
        return is_literal(chosen) and ast.literal_eval(chosen) == value
    return ast.unparse(given) == tests[1] and value is some


def _tests(workers: ast.expr) -> tuple[str, str]:
    """Return what says that there are some of these workers."""
    return ast.unparse(workers), ast.unparse(ast.Compare(workers, [ast.Gt()], [ast.Constant(0)]))


def _is_off_without(value: ast.expr, workers: ast.expr) -> bool:
    """Return whether a value is false where these workers are none: `4 if workers > 0 else None`, `workers > 0`."""
    some = _tests(workers)
    if isinstance(value, ast.IfExp):
        return ast.unparse(value.test) in some and is_literal(value.orelse) and not ast.literal_eval(value.orelse)
    parts = value.values if isinstance(value, ast.BoolOp) and isinstance(value.op, ast.And) else [value]
    return any(ast.unparse(part) in some for part in parts)


def utf8(source: bytes) -> bytes:
    """Return a source; raise NotEditable where it is not plain UTF-8."""
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


def parsed(text: bytes) -> ast.Module:
    """Return the tree of a source; raise NotEditable where it has none."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise NotEditable("it cannot be parsed") from None


def nodes_of_line(source: str) -> list[ast.AST]:
    """Return the syntax of a line, also of one that opens a block; []: it cannot be parsed by itself."""
    for text in (source, f"{source} pass"):
        with suppress(SyntaxError, ValueError):
            return [*ast.walk(ast.parse(text))]
    return []


def _calls(tree: ast.AST) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def call_at(tree: ast.Module, span: Span) -> ast.Call | None:
    """Return the call that stands exactly there; None: there is none."""
    return next((call for call in _calls(tree) if Span.of(call) == span), None)


def find(tree: ast.Module, span: Span, kind: str) -> ast.Call:
    """Return the call in that place; where its columns are not known, the only one of its kind in that line."""
    names = _origins(tree)

    def is_one(call: ast.Call) -> bool:
        return _name(call.func, names) in CALLEES.get(kind, frozenset())

    if span.end_line:
        call = call_at(tree, span)
        if call is None or not is_one(call):
            raise NotEditable("there is no such call on that line")
        return call
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
            last = last_word(node.value)
            origins.update({target.id: last for target in node.targets if isinstance(target, ast.Name)})
    return origins


def last_word(node: ast.AST) -> str:
    """Return a variable's name, or that of the last attribute; "": it has none."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _name(callee: ast.expr, origins: Mapping[str, str]) -> str:
    """Return the last word of a callee's name, followed through aliases."""
    name = last_word(callee)
    for _ in range(8):
        if isinstance(callee, ast.Attribute) or origins.get(name, name) == name:
            break
        name = origins[name]
    return name


def _with(text: bytes, call: ast.Call, kind: str, name: str, value: Value, new: bytes) -> bytes:
    """Return the text in which a call has an argument, written so."""
    lines = Lines(text)
    given = given_value(call, name)
    if any(given is one for one in (*call.args, *(keyword.value for keyword in call.keywords))):
        assert given is not None
        if not is_literal(given):
            raise NotEditable(f"{name} is `{ast.unparse(given)[:60]}` there")
        if ast.literal_eval(given) == value:
            raise NotEditable(f"{name} is {value!r} there already")
        return lines.replaced(*lines.span(given), new)
    if any(isinstance(arg, ast.Starred) for arg in call.args) or any(k.arg is None for k in call.keywords):
        raise NotEditable(f"{name} may be among the arguments that `*` or `**` passes there")
    if len(call.args) > _BY_POSITION[kind]:
        raise NotEditable(f"{name} may be one of the positional arguments there")
    return _inserted(lines, call, name.encode() + b"=" + new)


def is_literal(node: ast.expr) -> bool:
    """Return whether an expression is a constant, or a number with its sign."""
    inner = node.operand if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) else node
    return isinstance(inner, ast.Constant)


def literal(value: Value, text: bytes) -> bytes:
    """Write a value as the source would: its strings in the quotes that it uses most."""
    if isinstance(value, str):
        return (json.dumps(value) if text.count(b'"') >= text.count(b"'") else repr(value)).encode()
    return repr(int(value) if isinstance(value, float) and value.is_integer() else value).encode()


def _inserted(lines: Lines, call: ast.Call, argument: bytes) -> bytes:
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


def _set(call: ast.Call, name: str, new: str) -> None:
    node = ast.parse(new, mode="eval").body
    given = next((keyword for keyword in call.keywords if keyword.arg == name), None)
    if given is not None:
        given.value = node
    elif name in _POSITIONS and len(call.args) > _POSITIONS[name]:
        call.args[_POSITIONS[name]] = node
    else:
        call.keywords.append(ast.keyword(name, node))


class Lines:
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
