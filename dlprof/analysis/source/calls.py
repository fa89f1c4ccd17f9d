"""The calls of the user's that ranks recorded."""

from __future__ import annotations

import ast
from contextlib import suppress
from dataclasses import dataclass

from dlprof.analysis.engine import Job, across_ranks
from dlprof.analysis.source.patches import Call, calls_of


@dataclass(frozen=True)
class ModelCall:
    """How the script names its model and what it calls that with, and where: "train.py:18"; "": not known.

    `moved`: where the model is moved to its device, `optimizer`: where what trains it is made.
    """

    model: str = "model"
    inputs: str = "x"
    at: str = ""
    moved: str = ""
    optimizer: str = ""


@across_ranks
def call_sites(job: Job) -> list[Call]:
    """Return the calls of the script that were recorded, each once over all ranks; none of foreign traces."""
    return calls_of(job.facts[rank] for rank in job.ranks)


@across_ranks
def model_call(call_sites: list[Call]) -> ModelCall:
    """Return what the script calls its model and its inputs, as far as one line of its own shows them."""
    own = [call for call in call_sites if not call.via]
    first = {kind: next((c for c in own if c.kind == kind), None) for kind in ("forward", "model", "optimizer")}
    at, moved, optimizer = (f"{call.file}:{call.line}" if call else "" for call in first.values())
    model, inputs = _names(first["forward"]) if first["forward"] else ("", "")
    return ModelCall(model or "model", inputs or "x", at, moved, optimizer)


def _names(call: Call) -> tuple[str, str]:
    """Return what stands before the brackets of a call and its first argument, where both are plain names."""
    source, length = call.source.removesuffix(":"), call.span.end_column - call.span.column
    with suppress(SyntaxError, ValueError):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and node.args and len(ast.get_source_segment(source, node) or "") == length:
                called, given = ast.unparse(node.func), ast.unparse(node.args[0])
                return called, given if given.replace(".", "").isidentifier() else ""
    return "", ""
