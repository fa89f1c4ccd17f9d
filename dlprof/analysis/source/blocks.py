"""`with torch.autocast(…):` around the statements from the model's call to its loss, as a user would write it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from copy import deepcopy

from dlprof.analysis.source.configuration import Change
from dlprof.analysis.source.edits import Call, Lines, NotEditable, parsed, utf8

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
