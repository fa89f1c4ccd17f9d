"""Makes the edits of code that rewrites.py lists, where the code is written as one of them wants it.

What comes out is parsed again and compared with the tree it should have. An edit takes out only what nothing else
needs: which statements read a name, and which assign it, is looked up in the function around the line.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import replace
from typing import Any

from dlprof.analysis.source import forms
from dlprof.analysis.source.edits import Lines, NotEditable, parsed, utf8
from dlprof.analysis.source.origins import Change
from dlprof.analysis.source.rewrites import REWRITES, Begun, Decorated, Held, Opened, Rewrite, Wrapped, Written

_WITHOUT_GRAPH = re.compile(r"\.(detach|item|tolist|numpy|cpu)\(\)$|^(float|int|len)\(")
_ROOTS = ("torch", "numpy", "gc", "functools")
# Fields of the syntax tree that say nothing of what a program does, or that differ by where an expression stands.
_IGNORED = ("ctx", "type_comment", "type_ignores", "kind")


def rewritten(source: bytes, file: str, line: int, name: str) -> list[Change]:
    """Return the edits of a line's statement that cure an idiom; raise NotEditable where none is known that fits."""
    text = utf8(source)
    tree = parsed(text)
    try:
        imports = _imports(tree)
        edits = REWRITES.get(name, ())
        if found := _written(text, tree, [one for one in edits if isinstance(one, Written)], line, imports, file):
            return found
        why = NotEditable("it is written in a way that no edit of code is known for")
        for one in edits:
            with _noted(why):
                if isinstance(one, Wrapped):
                    return [_wrapped(text, tree, one, line, imports, file)]
                if isinstance(one, Decorated):
                    return _decorated(text, tree, one, line, imports, file)
                if isinstance(one, Held) and (found := _held(text, tree, one, line, imports, file)):
                    return found
                if isinstance(one, Opened) and (found := _opened(text, tree, one, line, imports, file)):
                    return found
                if isinstance(one, Begun):
                    return _replaced_all(Lines(text), tree, [], file, ast.parse(one.statement).body)
                if isinstance(one, Rewrite) and (found := _rewritten(text, tree, one, line, imports, file)):
                    return found
    except RecursionError:
        raise NotEditable("it is nested too deeply") from None
    raise why


@contextmanager
def _noted(why: NotEditable) -> Iterator[None]:
    """Keep why one edit cannot be made, as another one may."""
    try:
        yield
    except NotEditable as error:
        why.args = error.args


def _rewritten(
    text: bytes, tree: ast.Module, one: Rewrite, line: int, imports: Mapping[str, str], file: str
) -> list[Change]:
    """Return the edits of all expressions of a line's statement that are so, or of the one statement; []: none is."""
    if one.rows and not _takes_rows(tree):
        raise NotEditable("`__getitem__` does more than to take a row")
    pattern, put, made = _body(one.find), _body(one.put), set[Change]()
    for node in _around(tree, line):
        found: dict[str, Any] = {}
        if _same(pattern, node, found, imports):
            made.add(_replaced(text, tree, node, put, found, imports, file))
            if isinstance(node, ast.stmt) or isinstance(put, ast.stmt):
                break
    apart = [m for m in made if not any(o is not m and o.begin <= m.begin and m.end <= o.end for o in made)]
    return sorted(apart, key=lambda change: change.begin)


# What does the same to one row and to many.
_OF_ROWS = {"float", "long", "int", "half", "double", "bool"}


def _takes_rows(tree: ast.Module) -> bool:
    """Return whether each `__getitem__` only takes a row out of attributes, with arithmetic at most: so it may rows."""
    made = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "__getitem__"]
    return bool(made) and all(map(_takes_row, made))


def _takes_row(method: ast.FunctionDef) -> bool:
    of_self, index = [given.arg for given in method.args.args][:2] if len(method.args.args) == 2 else ("", "")
    rows = [
        n for n in ast.walk(method) if isinstance(n, ast.Subscript) and ast.unparse(n.value).startswith(f"{of_self}.")
    ]
    taken = [n for n in rows if isinstance(n.slice, ast.Name) and n.slice.id == index]
    named = [n for n in ast.walk(method) if isinstance(n, ast.Name) and n.id == index]
    other = [n for n in ast.walk(method) if isinstance(n, ast.Subscript) and n not in taken]
    calls = [n for n in ast.walk(method) if isinstance(n, ast.Call)]
    plain = all(isinstance(n, ast.Assign | ast.AnnAssign | ast.Return | ast.Expr) for n in method.body)
    cast = all(isinstance(c.func, ast.Attribute) and c.func.attr in _OF_ROWS and not c.args for c in calls)
    return bool(index and taken) and len(named) == len(taken) and not other and plain and cast


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
        if pattern.id.endswith("_graph") and (
            isinstance(node, ast.Constant) or _WITHOUT_GRAPH.search(ast.unparse(node))
        ):
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
            expression.ctx = node.ctx  # of a target, its value
            return expression  # type: ignore[no-any-return]
        if node.id in _ROOTS:
            if node.id not in self.names:
                raise NotEditable(f"{node.id} is not imported there")
            return ast.Name(self.names[node.id], ast.Load())
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """Put in the shortest name that the file has of what is of a module: `F.gelu`."""
        name = self.names.get(_path(node, _OWN))
        return ast.Name(name, ast.Load()) if name else self.generic_visit(node)

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
    new = _Filled(found, {path: name for name, path in imports.items()}).visit(deepcopy(put))
    new = ast.Expr(new) if isinstance(node, ast.stmt) and isinstance(new, ast.expr) else new
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
    block = _Filled({}, {path: name for name, path in imports.items()}).visit(
        ast.parse(f"{one.block}\n    pass").body[0]
    )
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


def _written(
    text: bytes, tree: ast.Module, edits: Sequence[Written], line: int, imports: Mapping[str, str], file: str
) -> list[Change]:
    """Return the edits that put another expression in the place of one that a line is part of; []: none is so."""
    wanted = [(forms.pattern(one.find), one) for one in edits]
    function = _innermost(tree, line, (ast.FunctionDef, ast.AsyncFunctionDef)) or tree
    block = next((b for b in _blocks(function) if b[0].lineno <= line <= (b[-1].end_lineno or 0)), []) if wanted else []
    scope = forms.Scope(imports, _buffers(_innermost(tree, line, (ast.ClassDef,))))
    best: tuple[int, Any, Written, list[ast.stmt], forms.Found] | None = None
    for scope.at, statement in enumerate(block):
        whole = not hasattr(statement, "body")
        for node in ast.walk(statement) if whole and (statement.end_lineno or 0) >= line else ():
            if not isinstance(node, ast.expr) or isinstance(node, ast.Name):  # a name is what was assigned before
                continue
            term = scope.term(node)
            for want, one in wanted:
                for found in forms.matches(want, term, forms.Found()):
                    gone = [block[n] for n in sorted(found.within)]
                    here = any(a.lineno <= line <= (a.end_lineno or 0) for a in (*gone, statement))
                    more = here and (best is None or len(gone) > best[0])
                    if more and _may_go(function, block, scope.at, node, found):
                        best = len(gone), node, one, gone, found
        scope.assign(statement)
    if best is None:
        return []
    _, node, one, gone, found = best  # the one that the most statements are part of
    names = {name: term.origin for name, term in found.names.items()}
    new = _Filled(names, {path: name for name, path in imports.items()}).visit(_body(one.put))
    return _replaced_all(Lines(text), tree, [(node, new), *((one, None) for one in gone)], file)


def _innermost(tree: ast.AST, line: int, kinds: tuple[type[ast.stmt], ...]) -> Any:
    """Return the innermost statement of some kinds around a line; None: there is none."""
    around = [n for n in ast.walk(tree) if isinstance(n, kinds) and n.lineno <= line <= (n.end_lineno or 0)]
    return max(around, key=lambda one: one.lineno, default=None)


def _blocks(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    """Yield the blocks of statements of a tree, the inner ones before those around them."""
    for node in reversed([*ast.walk(tree)]):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
                yield block


def _buffers(owner: ast.AST | None) -> dict[str, ast.expr]:
    """Return what a module of a class registers as its buffers, by their names."""
    calls = [n for n in ast.walk(owner) if isinstance(n, ast.Call)] if owner is not None else []
    registers = [c for c in calls if ast.unparse(c.func) == "self.register_buffer" and len(c.args) > 1]
    return {str(c.args[0].value): c.args[1] for c in registers if isinstance(c.args[0], ast.Constant)}


def _may_go(function: ast.AST, block: Sequence[ast.stmt], at: int, whole: ast.expr, found: forms.Found) -> bool:
    """Return whether the statements that were looked into are needed by no other, and what is left has its values.

    `whole`: the expression of the statement `at` that is replaced.
    """
    stored = [{n.id for n in ast.walk(one) if isinstance(n, ast.Name) and not _is_read(n)} for one in block]
    for term in found.names.values():
        read = {n.id for n in ast.walk(term.origin) if isinstance(n, ast.Name)} if term.origin is not None else set()
        if term.origin is None or any(read & stored[n] for n in range(term.at, at) if n not in found.within):
            return False
    gone = {id(node) for one in (whole, *(block[n] for n in found.within)) for node in ast.walk(one)}
    for n in found.within:
        (name,) = stored[n]
        until = next((m for m in range(n + 1, len(block)) if m not in found.within and name in stored[m]), None)
        if until is not None and not isinstance(block[until], (ast.Assign, ast.AnnAssign)):
            return False
        begin, end = block[n].lineno, (block[until].end_lineno or 0) if until is not None else 1 << 60
        reads = (one for one in ast.walk(function) if isinstance(one, ast.Name) and one.id == name and _is_read(one))
        # The next turn of a loop may read it before it is assigned again.
        loops = [a for a in ast.walk(function) if isinstance(a, (ast.For, ast.While)) and block[n] in ast.walk(a)]
        if loops and until is None and not any(name in one for one in stored[:n]):
            begin = min(one.lineno for one in loops)
        if any(id(one) not in gone and begin <= one.lineno <= end for one in reads):
            return False
    return True


def _is_read(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Load)


def _held(text: bytes, tree: ast.Module, one: Held, line: int, imports: Mapping[str, str], file: str) -> list[Change]:
    """Return the edits that make once what an expression of a line makes anew each time; []: it is written otherwise.

    Raises NotEditable where what it is made of may change, or is not known where it is assigned.
    """
    owner, function = _innermost(tree, line, (ast.ClassDef,)), _innermost(tree, line, (ast.FunctionDef,))
    pattern = _body(one.find)
    for node in _around(tree, line):
        found: dict[str, Any] = {}
        if isinstance(node, ast.expr) and _same(pattern, node, found, imports):
            source = found["_a"]
            of_self = isinstance(source, ast.Attribute) and ast.unparse(source.value) == "self"
            if isinstance(source, ast.Name) or (of_self and owner):
                break
    else:
        return []
    statement: ast.stmt | None = None
    spaces = [owner] if of_self else [function, tree] if function else [tree]
    for space in spaces:
        statement = _assignment(space, source)
        if statement is not None:
            break
    if isinstance(source, ast.Name) and not _is_repeated(function or tree, node, statement):
        raise NotEditable("it is made once as it is")
    after = statement
    if statement is None or not isinstance(statement, ast.FunctionDef):
        value = getattr(statement, "value", None)
        if value is None or not _same(_body(one.value), value, {}, imports):
            raise NotEditable("it is not known what is assigned there")
    elif one.value != "_v":
        raise NotEditable("it is not known what is given there")
    given = [node for key, node in found.items() if key in one.once and key != "_a"]
    names = {n.id for n in ast.walk(ast.Tuple(given)) if isinstance(n, ast.Name)}
    if names & {n.id for n in ast.walk(function or tree) if isinstance(n, ast.Name) and not _is_read(n)} or (
        function and names & {a.arg for a in ast.walk(function.args) if isinstance(a, ast.arg)}
    ):
        raise NotEditable("what it is made of is not known before")
    kept = deepcopy(source)
    if isinstance(kept, ast.Name):
        kept.id += one.called and f"_{one.called}"
    else:
        kept.attr += one.called and f"_{one.called}"
    kept.ctx = ast.Load()
    if one.called and ast.unparse(kept) in {ast.unparse(n) for n in ast.walk(tree) if isinstance(n, type(kept))}:
        raise NotEditable(f"{ast.unparse(kept)} is something else there")
    fill = _Filled({**found, "_kept": kept}, {path: name for name, path in imports.items()})
    target = deepcopy(kept)
    target.ctx = ast.Store()
    made = ast.Assign([target], fill.visit(_body(one.once)))
    changes: list[tuple[ast.AST, Any]] = []
    known = {key: found[key] for key in found if key == "_a" or key in one.once}
    for other in ast.walk(function or tree) if one.put else ():  # all that read the same
        values = dict(known)
        if isinstance(other, ast.expr) and _same(pattern, other, values, imports):
            changes.append((other, _Filled({**values, "_kept": kept}, fill.names).visit(_body(one.put))))
    return _replaced_all(Lines(text), tree, changes, file, [made], after)


def _opened(
    text: bytes, tree: ast.Module, one: Opened, line: int, imports: Mapping[str, str], file: str
) -> list[Change]:
    """Return the edits that open a file once in each process; []: none is opened in that line.

    Raises NotEditable where what is written into it might be lost, or where that cannot be written.
    """
    owner = _innermost(tree, line, (ast.With,))
    if owner is None or len(owner.items) != 1:
        return []
    (item,), (package, _, _) = owner.items, one.call.partition(".")
    call, name = item.context_expr, item.optional_vars
    if not (isinstance(call, ast.Call) and _path(call.func, imports) == one.call and isinstance(name, ast.Name)):
        return []
    modes = [*call.args[1:2], *(keyword.value for keyword in call.keywords if keyword.arg in ("mode", None))]
    if not all(isinstance(mode, ast.Constant) and mode.value in ("r", "rb") for mode in modes):
        raise NotEditable("it may be written to")
    lines = Lines(text)
    indent = _indent(lines, owner)
    helper = f"open_{package.lower()}"
    if helper in {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}:
        raise NotEditable(f"{helper} is something else there")
    kept = ast.Call(
        ast.Name(helper, ast.Load()), [ast.parse("os.getpid()", mode="eval").body, *call.args], call.keywords
    )
    assign = ast.Assign([name], kept)
    begin, end = lines.at(owner.body[0].lineno, 0), lines.at(owner.end_lineno or 0, owner.end_col_offset or 0)
    deeper = text[begin : lines.at(owner.body[0].lineno, owner.body[0].col_offset)]
    if deeper.strip() or not deeper.startswith(indent) or owner.body[0].lineno == owner.lineno:
        raise NotEditable("it is not alone in its lines")
    inner = [indent + row[len(deeper) :] if row.startswith(deeper) else row for row in text[begin:end].split(b"\n")]
    newline = b"\r\n" if b"\r\n" in text else b"\n"
    code = ast.unparse(ast.fix_missing_locations(assign)).encode() + newline + b"\n".join(inner)
    opens = f"lambda process, *given, **named: {ast.unparse(call.func)}(*given, **named)"
    wanted = [f"import {module}" for module in ("functools", "os") if imports.get(module) != module]
    wanted.append(f"{helper} = functools.lru_cache(16)({opens})")
    added = [statement for each in wanted for statement in ast.parse(each).body]
    return _replaced_all(lines, tree, [(owner, [assign, *owner.body], code)], file, added)


_LOOPS = (ast.For, ast.While, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def _is_repeated(space: ast.AST, node: ast.AST, statement: ast.AST | None) -> bool:
    """Return whether a loop has an expression in it, but not the statement that makes what that is made of."""
    inside = [{id(n) for n in ast.walk(loop)} for loop in ast.walk(space) if isinstance(loop, _LOOPS)]
    outside = statement is None or isinstance(statement, ast.FunctionDef)
    in_space = any(n is statement for n in ast.walk(space))
    return not (in_space or outside) or any(id(node) in one and id(statement) not in one for one in inside)


# Methods that change what a list, a table or an array holds.
_METHODS = "append extend insert remove pop clear sort reverse update add discard drop_duplicates"
_CHANGE = frozenset(_METHODS.split())


def _assignment(space: ast.AST, source: ast.expr) -> ast.stmt | None:
    """Return the statement that alone assigns a name or an attribute, or the function that gets it as an argument.

    None: there is none. Raises NotEditable where there are more, or where it is changed.
    """
    name = ast.unparse(source)
    stores, changed, statement = 0, False, None
    for node in ast.walk(space):
        if isinstance(node, type(source)) and ast.unparse(node) == name and isinstance(node.ctx, (ast.Store, ast.Del)):  # type: ignore[attr-defined]
            stores += 1
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if len(targets) == 1 and ast.unparse(targets[0]) == name:
                statement = node
        if isinstance(node, ast.Attribute) and node.attr in _CHANGE and ast.unparse(node.value) == name:
            changed = True
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load) and ast.unparse(node.value) == name:
            changed = True
    given = isinstance(space, ast.FunctionDef) and name in {
        a.arg for a in ast.walk(space.args) if isinstance(a, ast.arg)
    }
    if changed or stores + given > 1 or (stores and statement is None):
        raise NotEditable("it is assigned or changed in several places")
    return space if given else statement  # type: ignore[return-value]


def _replaced_all(
    lines: Lines,
    tree: ast.Module,
    changes: Sequence[tuple[Any, ...]],
    file: str,
    added: Sequence[ast.stmt] = (),
    after: ast.stmt | None = None,
) -> list[Change]:
    """Return the edits that put others in the place of expressions and statements, or take statements out (None).

    `changes`: a node, what takes its place, and its text where that is no expression. `added`: statements that are put
    after one, at the begin of a function, or after the imports (None). Raises NotEditable where that cannot be written.
    """
    text, new = lines.text, {id(node): [] if put is None else put for node, put, *_ in changes}
    newline = b"\r\n" if b"\r\n" in text else b"\n"
    made = []
    if added:
        begins = isinstance(after, ast.FunctionDef)
        first = after or next((n for n in reversed(tree.body) if isinstance(n, (ast.Import, ast.ImportFrom))), None)
        if isinstance(after, ast.FunctionDef):
            first = after.body[1 if ast.get_docstring(after) is not None and len(after.body) > 1 else 0]
        if first is None:
            raise NotEditable("it imports nothing")
        at = lines.at(first.lineno if begins else (first.end_lineno or 0) + 1, 0)
        rows = [_indent(lines, first) + ast.unparse(ast.fix_missing_locations(one)).encode() for one in added]
        code = b"".join(row + newline for row in rows)
        whole = begins or text[at - 1 : at] == b"\n"
        made.append(Change(file, at, at, code if whole else newline + code, first.lineno))
        new[id(first)] = [*added, first] if begins else [first, *added]
    for node, put, *texts in changes:
        begin, end = lines.at(node.lineno, node.col_offset), lines.at(node.end_lineno or 0, node.end_col_offset or 0)
        if put is None:
            _indent(lines, node)
            begin, end = lines.at(node.lineno, 0), lines.at((node.end_lineno or 0) + 1, 0)
        code = b"" if put is None else texts[0] if texts else ast.unparse(ast.fix_missing_locations(put)).encode()
        made.append(Change(file, begin, end, code, node.lineno))
    made.sort(key=lambda one: one.begin)
    keep = {id(node): node for node in ast.walk(tree) if id(node) in new}
    wanted = ast.dump(_Replaced(new).visit(deepcopy(tree, dict(keep))))
    expressions = {lines.at(node.lineno, node.col_offset) for node, *_ in changes if isinstance(node, ast.expr)}
    for brackets in (False, True):
        put_in = [replace(m, new=b"(" + m.new + b")") if brackets and m.begin in expressions else m for m in made]
        out = text
        for one in reversed(put_in):
            out = out[: one.begin] + one.new + out[one.end :]
        with suppress(SyntaxError):
            if ast.dump(ast.parse(out)) == wanted:
                return put_in
    raise NotEditable("it is written in a way that is not edited")


class _Replaced(ast.NodeTransformer):
    """Puts nodes, several or none, in the place of others, by their identity."""

    def __init__(self, new: Mapping[int, Any]) -> None:
        self.new = new

    def visit(self, node: ast.AST) -> Any:
        """Return what is put in the place of a node."""
        put = self.new.get(id(node))
        if put is None:
            return self.generic_visit(node)
        if not isinstance(put, list):
            return put
        return [self.generic_visit(one) if one is node else one for one in put]


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
