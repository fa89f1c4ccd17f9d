"""Sets keyword arguments in one call of a Python source, and leaves every other byte of it as it is.

The call is found in the syntax tree. What comes out is parsed again and compared with the tree that it should have, so
that an edit is right or is not made.
"""

from __future__ import annotations

import ast
import json
import tokenize
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from io import BytesIO

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
# So many arguments by position cannot be one of those that changes set.
_BY_POSITION = {"loader": 5, "ddp": 4, "fsdp": 1, "optimizer": 2, "compile": 1, "copy": 1}


class NotEditable(Exception):  # noqa: N818 - no error: the reason that the user is told
    """Why a call is left as it is: "num_workers is `args.workers` there"."""


@dataclass(frozen=True)
class Span:
    """Where a call stands, as the syntax tree counts: lines from 1, columns in bytes of UTF-8.

    `end_line` 0: only its line is known.
    """

    line: int
    end_line: int = 0
    column: int = 0
    end_column: int = 0


def edited(source: bytes, span: Span, kind: str, settings: Mapping[str, Value]) -> bytes:
    """Return a source in which the call of a kind has these keyword arguments; raise NotEditable where it cannot."""
    text = _utf8(source)
    tree = _parsed(text)
    call = _find(tree, span, kind)
    start, callee = (call.lineno, call.col_offset), ast.dump(call.func)
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
