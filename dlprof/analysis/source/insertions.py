"""Edits of the source that are no keyword of a call.

`.to(memory_format=…)` is appended to expressions, which no name's scope or value can break: to the model, as it is
moved or given to the optimizer, and to its images. `with torch.autocast(…):` is put around the statements from the
model's call to its loss, as a user would write it.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import replace

from dlprof.analysis.source.edits import Call, Lines, NotEditable, nodes_of_line, parsed, utf8
from dlprof.analysis.source.origins import Change

_FORMATS = {4: "channels_last", 5: "channels_last_3d"}  # by the dimensions of images


def call_of(call: Call) -> ast.Call | None:
    """Return the syntax of a recorded call from what is kept of its line; None: it is not known which one it is."""
    length = call.span.end_column - call.span.column
    calls = (node for node in nodes_of_line(call.source) if isinstance(node, ast.Call))
    found = [node for node in calls if len(ast.get_source_segment(call.source, node) or "") == length]
    return found[0] if len(found) == 1 else None


def is_name(node: ast.AST) -> bool:
    """Return whether an expression is a name or an attribute of one: `self.net`."""
    return isinstance(node, ast.Name) or (isinstance(node, ast.Attribute) and is_name(node.value))


def last_name(node: ast.AST) -> str:
    """Return the last word of a name: `net` of `self.net`; "" of what is none."""
    return ast.unparse(node).rpartition(".")[2] if is_name(node) else ""


def format_of(call: Call) -> str:
    """Return the format of the images that a line calls the model with; "": it gets none."""
    return next((name for rank, name in _FORMATS.items() if rank in call.takes), "")


def sites(calls: Sequence[Call]) -> list[Call]:
    """Return the calls whose expressions are the whole model and its images; [] unless both are known for sure.

    Each `takes` what the model gets.
    """
    forward = next((call for call in calls if call.kind == "forward"), None)
    run = call_of(forward) if forward is not None and forward.takes else None
    if forward is None or run is None or target(forward, run) is None:
        return []
    model = next(models(calls, last_name(run.func)), None)
    return [] if model is None else [replace(model, takes=forward.takes), forward]


def models(calls: Sequence[Call], called: str) -> Iterator[Call]:
    """Yield the calls in which the whole model stands: that move it, or that give the optimizer its parameters."""
    for call in sorted(calls, key=lambda call: call.kind):
        node = None if call.via or not call.torch else call_of(call)
        whole = node is not None and call.kind in ("model", "optimizer") and target(call, node) is not None
        if node is not None and whole and (call.kind == "model" or last_name(_owner(node)) == called):
            yield call


def target(call: Call, node: ast.Call) -> ast.expr | None:
    """Return the expression of a call to which it is appended; None: it has none."""
    if call.kind == "model":
        return node if call.whole and ast.unparse(node.func).endswith((".to", ".cuda")) else None
    if call.kind == "optimizer":
        owner = _owner(node)
        return owner if isinstance(owner, ast.expr) and is_name(owner) else None
    rank = next((rank for rank in _FORMATS if rank in call.takes), 0)
    if not rank or not call.torch or call.via or len(node.args) != len(call.takes):
        return None
    if not is_name(node.func) or hasattr(builtins, last_name(node.func)):  # list(map(model, batches))
        return None
    given = node.args[call.takes.index(rank)]
    return given if is_name(given) or isinstance(given, (ast.Call, ast.Subscript)) else None


def _owner(node: ast.Call) -> ast.AST:
    """Return what an optimizer gets the parameters of, `net` of `SGD(net.parameters())`; else the call itself."""
    given = node.args[0] if node.args else None
    of = given.func if isinstance(given, ast.Call) and isinstance(given.func, ast.Attribute) else None
    return of.value if of is not None and of.attr == "parameters" else node


# Their lines may be indented: they hold no other statements.
_SIMPLE = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr)


def pair(calls: Sequence[Call]) -> tuple[Call, Call] | None:
    """Return where the model is called, and its backward pass; None: unless there is one of each, in one function."""
    forward, backward = ([call for call in calls if call.kind == kind] for kind in ("forward", "backward"))
    if len(forward) != 1 or len(backward) != 1 or forward[0].via or backward[0].via:
        return None
    same = (forward[0].file, forward[0].function) == (backward[0].file, backward[0].function)
    return (forward[0], backward[0]) if same and forward[0].torch else None


def autocast(forward: Call, backward: Call, text: bytes) -> list[Change]:
    """Return the insertions that put all from the model's call to before its backward pass under autocast to bfloat16.

    Raises NotEditable where these are no simple statements of one block.
    """
    tree, lines = parsed(utf8(text)), Lines(text)
    block, first, last = _between(tree, forward.line, backward.line)
    inside = block[first:last]
    if not all(isinstance(one, _SIMPLE) for one in inside) or any(map(_is_long_text, _nodes(inside))):
        raise NotEditable("more than simple statements stand between the model's call and its backward pass")
    begin, end = lines.at(inside[0].lineno, 0), lines.at((inside[-1].end_lineno or 0) + 1, 0)
    indent = text[begin : lines.at(inside[0].lineno, inside[0].col_offset)]
    if indent.strip() or block[last].lineno <= (inside[-1].end_lineno or 0):
        raise NotEditable("several statements stand on one line")
    unit = b"\t" if b"\t" in indent else b"    "
    newline = b"\r\n" if b"\r\n" in text else b"\n"
    head = f'with torch.autocast("{forward.job.device}", torch.bfloat16):'.encode()
    at, made = begin, [Change(forward.file, begin, begin, indent + head + newline + unit, inside[0].lineno)]
    while (at := text.find(b"\n", at) + 1) and at < end:
        if text[at:end].partition(b"\n")[0].strip():
            made.append(Change(forward.file, at, at, unit, inside[0].lineno))
    wanted = deepcopy(tree)
    copied, _, _ = _between(wanted, forward.line, backward.line)
    copied[first:last] = [ast.With([ast.withitem(ast.parse(head[5:-1], mode="eval").body)], copied[first:last])]
    after = text
    for one in reversed(made):
        after = after[: one.begin] + one.new + after[one.end :]
    if ast.dump(parsed(after)) != ast.dump(wanted):
        raise NotEditable("it is written in a way that is not edited")
    return made


def _between(tree: ast.Module, forward: int, backward: int) -> tuple[list[ast.stmt], int, int]:
    """Return the innermost block with both lines in statements of its own, and the places of these."""
    found = None
    for block in _blocks(tree):
        places = [next((n for n, one in enumerate(block) if _holds(one, line)), -1) for line in (forward, backward)]
        if 0 <= places[0] < places[1]:
            found = block, places[0], places[1]  # blocks inside come later
    if found is None:
        raise NotEditable("the model's call and its backward pass do not stand one after the other in one block")
    return found


def _blocks(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
                yield block


def _holds(one: ast.stmt, line: int) -> bool:
    return one.lineno <= line <= (one.end_lineno or 0)


def _nodes(statements: Sequence[ast.stmt]) -> Iterator[ast.AST]:
    return (node for one in statements for node in ast.walk(one))


def _is_long_text(node: ast.AST) -> bool:
    """Return whether a node is a string of several lines, which indenting would change."""
    is_text = isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes))
    )
    return is_text and node.lineno != node.end_lineno  # type: ignore[attr-defined]
