"""The copies of the script's own files that a recording keeps, and where they bring in float64."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from dlprof import run_folder
from dlprof.analysis.engine import JOB, Job, across_ranks, needs
from dlprof.errors import DlprofError
from dlprof.read.opening import Inside, read_object
from dlprof.read.records import NotThereError
from dlprof.result import Place

_WIDE, _NARROW = ("double", "float64"), ("float", "float16", "float32", "bfloat16", "half")
_OF_ARRAYS = ("as_tensor", "from_numpy", "tensor")
_LIBRARIES = ("np", "numpy", "pd", "pandas")
_MOST = 2


def kept(path: Path) -> dict[str, str]:
    """Return the text of each file that rank 0 of a run keeps; of a result.json, those of the run that it lies in."""
    inside = Inside(path if path.is_dir() else path.parent)
    logs = [run_folder.log_of(rank, "sources") for rank in sorted(inside.root.glob("ranks/00000*"))]
    held = None
    for path, begins in reversed([log for log in logs if inside.holds(log[0])]):
        with suppress(NotThereError):
            held = read_object(path, begins).get("files")
            break
    texts = (
        {str(name): of.get("text") for name, of in held.items() if isinstance(of, dict)}
        if isinstance(held, dict)
        else {}
    )
    return {name: text for name, text in texts.items() if isinstance(text, str)}


@across_ranks
def float64_lines(job: Job = needs(JOB)) -> list[Place]:
    """Return the first lines of the script that set or name float64, else that make an array in NumPy's default type
    of which a tensor is made; [] where the recording keeps no files.
    """
    found: list[list[Place]] = [[], []]
    files: dict[str, str] = {}
    with suppress(DlprofError):
        files = kept(job.run.path)
    for file, text in files.items():
        with suppress(SyntaxError, ValueError, RecursionError):
            tree, lines = ast.parse(text), text.splitlines()
            for places, nodes in zip(found, (_named(tree), _by_default(tree)), strict=True):
                places += [Place(file, n.lineno, what=lines[n.lineno - 1].strip()) for n in nodes]
    return (found[0] or found[1])[:_MOST]


def _named(tree: ast.AST) -> Iterator[ast.expr]:
    """Yield calls of `.double()`, and those that are given float64."""
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        given = [*call.args, *(keyword.value for keyword in call.keywords)]
        named = any(_word(one) in _WIDE for one in given) and _owner(call) not in _LIBRARIES
        if named or (_word(call.func) == "double" and not given):
            yield call


def _by_default(tree: ast.AST) -> Iterator[ast.expr]:
    """Yield the calls of NumPy or pandas, without a type, that made what a tensor is made of."""
    nodes = list(ast.walk(tree))
    made = {_word(one.targets[0]): one.value for one in nodes if isinstance(one, ast.Assign)}
    for call in (n for n in nodes if isinstance(n, ast.Call) and _word(n.func) in _OF_ARRAYS and n.args):
        inside = list(ast.walk(call.args[0]))
        inside += [n for one in inside if _word(one) in made for n in ast.walk(made[_word(one)])]
        for one in (n for n in inside if isinstance(n, ast.Call)):
            given = [*one.args, *(keyword.value for keyword in one.keywords)]
            of_library = _word(one.func) == "to_numpy" or _owner(one) in _LIBRARIES
            if of_library and not any(_word(n) in _NARROW for n in given):
                yield one


def _owner(call: ast.Call) -> str:
    return _word(call.func.value) if isinstance(call.func, ast.Attribute) else ""


def _word(node: ast.AST) -> str:
    """Return the last name of a name or an attribute, "": neither."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
