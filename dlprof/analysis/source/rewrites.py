"""Edits of code that cure a known idiom: what is looked for in the statement of a line, and what takes its place.

Both are written as Python. A name that begins with an underscore stands for any expression (`_x_text`: for a string,
`_x_loader`: for what is called so), `*_x` and `**_x` for further arguments. Names of modules are whole: `numpy.stack`
finds `np.stack` where numpy was imported as np. What comes out is parsed again and compared with the tree it should
have. Whether the training stays as it is, a trial shows: each is run, and its losses are compared.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from dlprof.analysis.source.edits import Lines, NotEditable, parsed, utf8
from dlprof.analysis.source.origins import Change


@dataclass(frozen=True)
class Rewrite:
    """One edit: `find` is an expression or statement, `put` is what takes its place."""

    find: str
    put: str

    @property
    def shown(self) -> str:
        """Both in one line, with names as a user writes them: "len(list(x)) → len(x)"."""
        return " → ".join(re.sub(r"(?<![\w.])_(?=[a-z])", "", " ".join(code.split())) for code in (self.find, self.put))


@dataclass(frozen=True)
class Wrapped:
    """A loop that is put into a block, unless it calls a method of these names."""

    block: str
    without: tuple[str, ...]

    @property
    def shown(self) -> str:
        """As of a Rewrite."""
        return f"for … in loader: … → {self.block} for …"


@dataclass(frozen=True)
class Decorated:
    """A method that gets a decorator, unless it has one or other arguments than these."""

    method: str
    args: int
    decorator: str  # a function of a module that is imported where it is not

    @property
    def shown(self) -> str:
        """As of a Rewrite."""
        return f"def {self.method}(…) → @{self.decorator} def {self.method}(…)"


# Each parameter in a loop, and all of them in one call; within `torch.no_grad()`, as tensors that want gradients are
# changed in place.
_PAIRS = (
    "for _e, _p in zip(_a.parameters(), _b.parameters(), **_k):\n    ",
    "for _p, _e in zip(_b.parameters(), _a.parameters(), **_k):\n    ",
)
_AVERAGED = """
with torch.no_grad():
    torch._foreach_mul_([*_a.parameters()], _d)
    torch._foreach_add_([*_a.parameters()], [*_b.parameters()], alpha=_w)
"""
_DRAWN_NEAR = """
with torch.no_grad():
    torch._foreach_lerp_([*_a.parameters()], [*_b.parameters()], _w)
"""
_ONE_DRAWN_NEAR = ("_e.lerp_(_p, _w)", "_e.data.lerp_(_p.data, _w)", "_e.lerp_(_p.data, _w)")
_ONE_AVERAGE = (
    "_e.data.mul_(_d).add_(_p.data, alpha=_w)",
    "_e.mul_(_d).add_(_p.data, alpha=_w)",
    "_e.mul_(_d).add_(_p.detach(), alpha=_w)",
    "_e.mul_(_d).add_(_p, alpha=_w)",
    "_e.data.mul_(_d).add_(_w * _p.data)",
    "_e.mul_(_d).add_(_w * _p)",
    "_e.data = _d * _e.data + _w * _p.data",
    "_e.data.copy_(_d * _e.data + _w * _p.data)",
    "_e.copy_(_d * _e + _w * _p)",
)

# Samples that are the same in every epoch: what the data set's method makes is kept. What the change then begins with.
KEPT, KEEP = "samples_kept", "make each sample once and keep it"

# By the name of the idiom, or of what a rule has found.
REWRITES: Mapping[str, tuple[Rewrite | Wrapped | Decorated, ...]] = {
    "anomaly_mode": (
        Rewrite("torch.autograd.set_detect_anomaly(True, *_a, **_k)", "torch.autograd.set_detect_anomaly(False)"),
        Rewrite("torch.autograd.set_detect_anomaly(mode=True, **_k)", "torch.autograd.set_detect_anomaly(False)"),
        Rewrite("torch.autograd.detect_anomaly(*_a, **_k)", "torch.autograd.set_detect_anomaly(False)"),
    ),
    "average_of_weights": (
        # One operation instead of two, where the weights add up to one: other roundings of the average alone.
        *(
            Rewrite(f"{pairs}{one.replace('_w', '(1 - _d)')}", _DRAWN_NEAR.replace("_w", "1 - _d"))
            for pairs in _PAIRS
            for one in _ONE_AVERAGE
        ),
        *(Rewrite(f"{pairs}{one}", _AVERAGED) for pairs in _PAIRS for one in _ONE_AVERAGE),
        *(Rewrite(f"{pairs}{one}", _DRAWN_NEAR) for pairs in _PAIRS for one in _ONE_DRAWN_NEAR),
    ),
    "cache_emptied": (Rewrite("torch.cuda.empty_cache()", "pass"),),
    "collected_by_hand": (Rewrite("gc.collect(*_a)", "pass"),),
    # The whole row is made for one value of it.
    "dataframe_rows": (Rewrite("_f.iloc[_i][_c_text]", "_f[_c_text].iat[_i]"),),
    # Only with the type: NumPy's and PyTorch's of numbers of Python are others.
    "list_of_arrays": (Rewrite("torch.tensor(_x, dtype=_d)", "torch.from_numpy(numpy.array(_x)).to(_d)"),),
    # Each worker keeps those that it made, as long as it lives.
    KEPT: (Decorated("__getitem__", 2, "functools.cache"),),
    "loader_counted": (
        Rewrite("len(list(_x_loader))", "len(_x_loader)"),
        Rewrite("sum(1 for _e in _x_loader)", "len(_x_loader)"),
    ),
    # A tensor that was made in inference mode is refused in training, as one that a module keeps: so not that.
    "validation_share": (Wrapped("with torch.no_grad():", ("backward", "step")),),
}
_ROOTS = ("torch", "numpy", "gc", "functools")
# Fields of the syntax tree that say nothing of what a program does, or that differ by where an expression stands.
_IGNORED = ("ctx", "type_comment", "type_ignores", "kind")


def rewritten(source: bytes, file: str, line: int, name: str) -> list[Change]:
    """Return the edits of a line's statement that cure an idiom; raise NotEditable where none is known that fits."""
    text = utf8(source)
    tree = parsed(text)
    try:
        imports = _imports(tree)
        for one in REWRITES.get(name, ()):
            if isinstance(one, Wrapped):
                return [_wrapped(text, tree, one, line, imports, file)]
            if isinstance(one, Decorated):
                return _decorated(text, tree, one, line, imports, file)
            pattern = _body(one.find)
            for node in _around(tree, line):
                found: dict[str, Any] = {}
                if _same(pattern, node, found, imports):
                    return [_replaced(text, tree, node, _body(one.put), found, imports, file)]
    except RecursionError:
        raise NotEditable("it is nested too deeply") from None
    raise NotEditable("it is written in a way that no edit of code is known for")


def _body(code: str) -> ast.stmt | ast.expr:
    """Return the only statement of some code, or its expression where it is one."""
    (statement,) = ast.parse(textwrap.dedent(code)).body
    return statement.value if isinstance(statement, ast.Expr) else statement


def _around(tree: ast.Module, line: int) -> Iterator[ast.stmt | ast.expr]:
    """Yield what a line is a part of: its expressions, with all of a statement that ends in another line, and its
    statements, the innermost first.
    """
    spanning = [
        one for one in ast.walk(tree) if isinstance(one, ast.stmt) and one.lineno <= line <= (one.end_lineno or 0)
    ]
    spanning.sort(key=lambda one: (one.end_lineno or 0) - one.lineno)
    for one in spanning:
        whole = not hasattr(one, "body")
        for node in ast.walk(one):
            if isinstance(node, ast.expr) and (whole or node.lineno <= line <= (node.end_lineno or 0)):
                yield node
    yield from spanning


def _imports(tree: ast.Module) -> dict[str, str]:
    """Return what the names of imports stand for: {"np": "numpy", "tensor": "torch.tensor"}."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    return found


def _path(node: object, imports: Mapping[str, str]) -> str:
    """Return the whole name that an expression is of a module's: "torch.tensor"; "": it is of none."""
    if isinstance(node, ast.Name):
        return imports.get(node.id, "")
    if isinstance(node, ast.Attribute) and (before := _path(node.value, imports)):
        return f"{before}.{node.attr}"
    return ""


_OWN = {root: root for root in _ROOTS}


def _same(pattern: object, node: object, found: dict[str, Any], imports: Mapping[str, str]) -> bool:
    """Return whether a node is of a pattern, and note what its names stand for."""
    if isinstance(pattern, ast.Name) and pattern.id.startswith("_"):
        if not isinstance(node, ast.expr) or isinstance(node, (ast.Slice, ast.Starred)):
            return False
        if pattern.id.endswith("_text") and not (isinstance(node, ast.Constant) and isinstance(node.value, str)):
            return False
        if pattern.id.endswith("_loader") and "loader" not in ast.unparse(node).lower():
            return False
        return ast.dump(_bare(found.setdefault(pattern.id, node))) == ast.dump(_bare(node))
    if path := _path(pattern, _OWN):
        return path == _path(node, imports)
    if type(pattern) is not type(node):
        return False
    if isinstance(pattern, ast.Call) and isinstance(node, ast.Call):
        return _same_call(pattern, node, found, imports)
    if isinstance(pattern, ast.AST):
        fields = (field for field in pattern._fields if field not in _IGNORED)
        return all(_same(getattr(pattern, f, None), getattr(node, f, None), found, imports) for f in fields)
    if isinstance(pattern, list) and isinstance(node, list):
        return len(pattern) == len(node) and all(
            _same(a, b, found, imports) for a, b in zip(pattern, node, strict=True)
        )
    return pattern == node


def _same_call(pattern: ast.Call, node: ast.Call, found: dict[str, Any], imports: Mapping[str, str]) -> bool:
    if not _same(pattern.func, node.func, found, imports):
        return False
    args, rest = [*pattern.args], None
    if args and isinstance(args[-1], ast.Starred) and isinstance(args[-1].value, ast.Name):
        rest = args.pop().value.id  # type: ignore[attr-defined]
        found[rest] = node.args[len(args) :]
    given = node.args[: len(args)] if rest else node.args
    if len(given) != len(args) or not all(_same(a, b, found, imports) for a, b in zip(args, given, strict=True)):
        return False
    left = {keyword.arg: keyword for keyword in node.keywords}
    if len(left) != len(node.keywords):
        return False
    further = None
    for keyword in pattern.keywords:
        if keyword.arg is None and isinstance(keyword.value, ast.Name):
            further = keyword.value.id
        elif keyword.arg not in left or not _same(keyword.value, left.pop(keyword.arg).value, found, imports):
            return False
    if further:
        found[further] = [*left.values()]
    return bool(further) or not left


def _bare(node: ast.expr) -> ast.expr:
    """Return an expression as it is where a value is read: a target and a value of one name are the same."""
    copy = deepcopy(node)
    for one in ast.walk(copy):
        if hasattr(one, "ctx"):
            one.ctx = ast.Load()
    return copy


class _Filled(ast.NodeTransformer):
    """Puts in what names stand for, and names of modules as the file has them."""

    def __init__(self, found: Mapping[str, Any], names: Mapping[str, str]) -> None:
        self.found, self.names = found, names

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Put in an expression, or how the file names a module."""
        if node.id in self.found:
            expression = deepcopy(self.found[node.id])
            expression.ctx = ast.Load()  # of a target, its value
            return expression  # type: ignore[no-any-return]
        if node.id in _ROOTS:
            if node.id not in self.names:
                raise NotEditable(f"{node.id} is not imported there")
            return ast.Name(self.names[node.id], ast.Load())
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Put in further arguments."""
        args: list[ast.expr] = []
        for one in node.args:
            many = isinstance(one, ast.Starred) and isinstance(one.value, ast.Name) and self.found.get(one.value.id)
            args += many if isinstance(many, list) else [] if many == [] else [one]
        keywords: list[ast.keyword] = []
        for keyword in node.keywords:
            more = keyword.arg is None and isinstance(keyword.value, ast.Name) and self.found.get(keyword.value.id)
            keywords += more if isinstance(more, list) else [keyword]
        return self.generic_visit(ast.Call(node.func, args, keywords))


def _replaced(
    text: bytes,
    tree: ast.Module,
    node: ast.stmt | ast.expr,
    put: ast.stmt | ast.expr,
    found: Mapping[str, Any],
    imports: Mapping[str, str],
    file: str,
) -> Change:
    """Return the edit that puts something in a node's place; raise NotEditable where that cannot be written."""
    if isinstance(put, ast.stmt) and isinstance(node, ast.expr):
        whole = next((one for one in ast.walk(tree) if isinstance(one, ast.Expr) and one.value is node), None)
        if whole is None:
            raise NotEditable("its value is used")
        node = whole
    names = {path: name for name, path in imports.items() if path in _ROOTS}
    new = _Filled(found, names).visit(deepcopy(put))
    code = ast.unparse(ast.fix_missing_locations(new)).encode()
    lines = Lines(text)
    if isinstance(node, ast.stmt):
        indent = _indent(lines, node)
        code = code.replace(b"\n", (b"\r\n" if b"\r\n" in text else b"\n") + indent)
    return _checked(lines, tree, node, new, code, file)


def _wrapped(text: bytes, tree: ast.Module, one: Wrapped, line: int, imports: Mapping[str, str], file: str) -> Change:
    """Return the edit that puts the loop that begins in a line into a block; raise NotEditable where it may not."""
    loop = next((node for node in ast.walk(tree) if isinstance(node, ast.For) and node.lineno == line), None)
    if loop is None:
        raise NotEditable("no loop begins in that line")
    called = {
        node.func.attr for node in ast.walk(loop) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    if found := called & {*one.without}:
        raise NotEditable(f"{min(found)} is called in it")
    lines = Lines(text)
    indent = _indent(lines, loop)
    names = {path: name for name, path in imports.items() if path in _ROOTS}
    block = _Filled({}, names).visit(ast.parse(f"{one.block}\n    pass").body[0])
    header = ast.unparse(ast.fix_missing_locations(block)).split("\n")[0].encode()
    newline = b"\r\n" if b"\r\n" in text else b"\n"
    begin, end = lines.at(loop.lineno, loop.col_offset), lines.at(loop.end_lineno or 0, loop.end_col_offset or 0)
    inner = text[begin:end].split(b"\n")
    deeper = b"\n".join((b"\t" if b"\t" in indent else b"    ") + row if row.strip() else row for row in inner)
    # Each line keeps its own indentation before what is put before it: the first one has lost it.
    code = header + newline + indent + deeper
    return _checked(lines, tree, loop, ast.With(block.items, [loop]), code, file)


def _decorated(
    text: bytes, tree: ast.Module, one: Decorated, line: int, imports: Mapping[str, str], file: str
) -> list[Change]:
    """Return the edits that give the method that a line is in a decorator, and import its module."""
    owners = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    methods = [node for owner in owners for node in owner.body if isinstance(node, ast.FunctionDef)]
    inside = [m for m in methods if m.name == one.method and m.lineno <= line <= (m.end_lineno or 0)]
    if len(inside) != 1:
        raise NotEditable(f"it is in no {one.method}")
    (method,), lines = inside, Lines(text)
    names_of = [given.arg for given in method.args.args]
    if method.decorator_list or ast.unparse(method.args) != ", ".join(names_of) or len(names_of) != one.args:
        raise NotEditable("it is decorated, or takes other arguments")
    root, names = one.decorator.partition(".")[0], {path: name for name, path in imports.items()}
    called = names.get(one.decorator) or one.decorator.replace(root, names.get(root, root), 1)
    newline = b"\r\n" if b"\r\n" in text else b"\n"
    at = lines.at(method.lineno, method.col_offset)
    edits = [Change(file, at, at, f"@{called}".encode() + newline + _indent(lines, method), method.lineno)]
    first: ast.stmt | None = None
    if not names.keys() & {root, one.decorator}:
        first = next((n for n in tree.body if isinstance(n, (ast.Import, ast.ImportFrom))), None)
        future = first is not None and isinstance(first, ast.ImportFrom) and first.module == "__future__"
        if first is None or future:
            first = next((n for n in tree.body[1:] if isinstance(n, (ast.Import, ast.ImportFrom)) and n != first), None)
        if first is None:
            raise NotEditable("it imports nothing")
        at = lines.at(first.lineno, 0)
        edits.append(Change(file, at, at, f"import {root}".encode() + newline, first.lineno))
    made = text
    for edit in edits:  # the later one comes first
        made = made[: edit.begin] + edit.new + made[edit.end :]
    method.decorator_list.append(ast.parse(called, mode="eval").body)
    if first is not None:
        tree.body.insert(tree.body.index(first), ast.parse(f"import {root}").body[0])
    if ast.dump(ast.parse(made)) != ast.dump(tree):
        raise NotEditable("it is written in a way that is not edited")
    return edits


def _indent(lines: Lines, node: ast.stmt) -> bytes:
    """Return what stands before a statement in its line; raise NotEditable where that is no blank."""
    indent = lines.text[lines.at(node.lineno, 0) : lines.at(node.lineno, node.col_offset)]
    if indent.strip():
        raise NotEditable("it is not alone in its line")
    return indent


def _checked(lines: Lines, tree: ast.Module, node: ast.stmt | ast.expr, new: ast.AST, code: bytes, file: str) -> Change:
    """Return an edit whose text is what the tree says; raise NotEditable where it is not."""
    begin, end = lines.at(node.lineno, node.col_offset), lines.at(node.end_lineno or 0, node.end_col_offset or 0)
    try:
        after = ast.dump(ast.parse(lines.replaced(begin, end, code)))
    except SyntaxError:
        after = ""
    around = deepcopy(tree, {id(node): node})  # a copy that holds the same node
    if after != ast.dump(_Swapped(node, new).visit(around)):
        raise NotEditable("it is written in a way that is not edited")
    return Change(file, begin, end, code, node.lineno)


class _Swapped(ast.NodeTransformer):
    """Puts one node in the place of another."""

    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> Any:
        """Return the other node in the place of this one."""
        return self.new if node is self.old else self.generic_visit(node)
