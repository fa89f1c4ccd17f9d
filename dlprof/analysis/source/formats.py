"""Where `.to(memory_format=…)` is appended: to the model, as it is moved or given to the optimizer, and to its images.

Both are appended to an expression, which no name's scope or value can break.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from dlprof.analysis.source.edits import Call

_FORMATS = {4: "channels_last", 5: "channels_last_3d"}  # by the dimensions of images


def call_of(call: Call) -> ast.Call | None:
    """Return the syntax of a recorded call from what is kept of its line; None: it is not known which one it is."""
    length = call.span.end_column - call.span.column
    for text in (call.source, f"{call.source} pass"):
        with suppress(SyntaxError, ValueError):
            calls = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
            found = [node for node in calls if len(ast.get_source_segment(text, node) or "") == length]
            return found[0] if len(found) == 1 else None
    return None


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
