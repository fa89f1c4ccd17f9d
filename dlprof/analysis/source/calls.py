"""The calls of the user's that ranks recorded."""

from __future__ import annotations

import ast
from contextlib import suppress

from dlprof.analysis.engine import JOB, Job, across_ranks, needs
from dlprof.analysis.source.patches import Call, calls_of


@across_ranks
def call_sites(job: Job = needs(JOB)) -> list[Call]:
    """Return the calls of the script that were recorded, each once over all ranks; none of foreign traces."""
    return calls_of(job.facts[rank] for rank in job.ranks)


def names_in(call: Call) -> tuple[str, str]:
    """Return what a call in one line calls, and its first argument if that is a name; "": not known."""
    length = call.span.end_column - call.span.column
    with suppress(SyntaxError, ValueError):
        for node in ast.walk(ast.parse(call.source)):
            if (
                isinstance(node, ast.Call)
                and node.args
                and len(ast.get_source_segment(call.source, node) or "") == length
            ):
                given = ast.unparse(node.args[0])
                return ast.unparse(node.func), given if given.replace(".", "").isidentifier() else ""
    return "", ""
