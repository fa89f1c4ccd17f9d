"""Whether the tests notice a change of the analysis's arithmetic: operators and numbers are changed, one at a time.

    python -m benchmarks.mutation --sample 200 --jobs 2
    python -m benchmarks.mutation --changed HEAD~3 --only dlprof/analysis/input

Each mutant is made in a copy of the working tree, where the test files that import its module are run, then those of
its subject. One that no test fails for has survived, and is listed with its line; so is the share that was killed. A
mutant may survive because it computes the same (`<` for `<=` on times): the list is to be read.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).parent.parent
ANALYSIS = ROOT / "dlprof" / "analysis"

# A test that runs so long for a mutant, s, has noticed it: a loop that does not end.
_PATIENCE_S = 120

_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.GtE,
    ast.LtE: ast.Gt,
    ast.Gt: ast.LtE,
    ast.GtE: ast.Lt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
}
_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any", "sum": "max", "mean": "max", "cumsum": "cummax"}


@dataclass(frozen=True)
class Mutant:
    """One change of a file: where, what the line was, and what the whole file then is."""

    path: Path
    line: int
    was: str
    becomes: str
    text: str


def mutants(path: Path, lines: set[int] | None = None) -> Iterator[Mutant]:
    """Return the mutants of a file, of all its functions or those that begin on some lines."""
    text = path.read_text()
    tree = ast.parse(text)
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        for statement in function.body:
            for node in ast.walk(statement):
                changed = _changed(node)
                if changed is None or (lines is not None and node.lineno not in lines):  # type: ignore[attr-defined]
                    continue
                yield _mutant(path, text, node, changed)


def _changed(node: ast.AST) -> ast.expr | None:
    """Return what takes a node's place; None: it is no arithmetic."""
    made = copy.deepcopy(node)
    if isinstance(made, ast.BinOp) and type(made.op) in _ARITHMETIC and not _is_text(made):
        made.op = _ARITHMETIC[type(made.op)]()
    elif isinstance(made, ast.Compare) and len(made.ops) == 1 and type(made.ops[0]) in _COMPARISONS:
        made.ops = [_COMPARISONS[type(made.ops[0])]()]
    elif isinstance(made, ast.BoolOp):
        made.op = ast.Or() if isinstance(made.op, ast.And) else ast.And()
    elif isinstance(made, ast.Constant) and isinstance(made.value, (int, float)) and not isinstance(made.value, bool):
        made.value += 1
    elif isinstance(made, ast.Call) and isinstance(made.func, ast.Name) and made.func.id in _CALLS:
        made.func.id = _CALLS[made.func.id]
    elif isinstance(made, ast.Call) and isinstance(made.func, ast.Attribute) and made.func.attr in _CALLS:
        made.func.attr = _CALLS[made.func.attr]
    else:
        return None
    return made if isinstance(made, ast.expr) else None


def _is_text(node: ast.BinOp) -> bool:
    return any(
        isinstance(n, ast.JoinedStr) or (isinstance(n, ast.Constant) and isinstance(n.value, str))
        for n in ast.walk(node)
    )


def _mutant(path: Path, text: str, node: ast.AST, changed: ast.expr) -> Mutant:
    assert isinstance(node, ast.expr)
    lines = text.encode().splitlines(keepends=True)
    first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
    before, after = lines[first][: node.col_offset], lines[last][node.end_col_offset :]
    made = f"({ast.unparse(changed)})".encode()
    whole = b"".join([*lines[:first], before, made, after, *lines[last + 1 :]])
    return Mutant(path, node.lineno, ast.unparse(node), ast.unparse(changed), whole.decode())


def test_files(path: Path) -> tuple[list[str], list[str]]:
    """Return the test files that import a module, and the others of its subject, relative to the repository."""
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    package, _, leaf = module.rpartition(".")
    subject = ROOT / "tests" / Path(*path.relative_to(ROOT / "dlprof").parts[:2])
    near, far = [], []
    for test in sorted((ROOT / "tests").rglob("test_*.py")):
        text = test.read_text()
        imports = f"from {module} import" in text or (f"from {package} import" in text and f" {leaf}" in text)
        name = test.relative_to(ROOT).as_posix()
        if imports:
            near.append(name)
        elif test.is_relative_to(subject):
            far.append(name)
    return near, far


def survives(mutant: Mutant, tree: Path) -> bool:
    """Return whether all tests pass with a mutant, in a copy of the working tree."""
    place = tree / mutant.path.relative_to(ROOT)
    place.write_text(mutant.text)
    try:
        return all(_passes(tree, tests) for tests in test_files(mutant.path) if tests)
    finally:
        shutil.copy(mutant.path, place)


def _passes(tree: Path, tests: Sequence[str]) -> bool:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:rerunfailures", *tests]
    env = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(command, cwd=tree, env=env, capture_output=True, timeout=_PATIENCE_S, check=False)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode in (0, 5)  # 5: no test was collected


def _changed_lines(revision: str) -> dict[Path, set[int]]:
    """Return the lines of the analysis that differ from a revision, by file."""
    diff = subprocess.run(
        ["git", "diff", "-U0", revision, "--", "dlprof/analysis"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    found: dict[Path, set[int]] = {}
    path = None
    for line in diff.splitlines():
        if line.startswith("+++ b/"):
            path = ROOT / line[6:]
        elif line.startswith("@@") and path is not None:
            start, _, count = line.split()[2][1:].partition(",")
            found.setdefault(path, set()).update(range(int(start), int(start) + int(count or 1)))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Make mutants, run the tests for each, and print those that survived."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=Path, nargs="*", default=[ANALYSIS], help="files or folders of the analysis")
    parser.add_argument("--changed", metavar="REVISION", help="only lines that differ from it")
    parser.add_argument(
        "--sample", type=int, default=200, help="so many of them, drawn by --seed (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write the survivors as JSON")
    args = parser.parse_args(argv)
    lines = _changed_lines(args.changed) if args.changed else None
    paths = sorted({p.resolve() for only in args.only for p in (only.rglob("*.py") if only.is_dir() else [only])})
    every = [m for p in paths if lines is None or p in lines for m in mutants(p, lines[p] if lines else None)]
    chosen = random.Random(args.seed).sample(every, min(args.sample, len(every)))
    with tempfile.TemporaryDirectory() as folder:
        trees: SimpleQueue[Path] = SimpleQueue()
        for n in range(args.jobs):
            tree = Path(folder) / str(n)
            ignored = shutil.ignore_patterns(".git", ".venv", ".axe", ".viewers", ".bench", "__pycache__", "runs")
            shutil.copytree(ROOT, tree, ignore=ignored, symlinks=True)
            trees.put(tree)

        def tried(mutant: Mutant) -> bool:
            tree = trees.get()
            try:
                return survives(mutant, tree)
            finally:
                trees.put(tree)

        with ThreadPoolExecutor(args.jobs) as pool:
            survived = [m for m, alive in zip(chosen, pool.map(tried, chosen), strict=True) if alive]
    rows = [
        {"file": m.path.relative_to(ROOT).as_posix(), "line": m.line, "was": m.was, "becomes": m.becomes}
        for m in survived
    ]
    for row in rows:
        print(f"{row['file']}:{row['line']}: {row['was']}  →  {row['becomes']}")
    killed = len(chosen) - len(survived)
    share = killed / max(len(chosen), 1)
    print(f"{killed} of {len(chosen)} mutants were killed ({share:.0%}), of {len(every):,} there are")
    if args.out:
        args.out.write_text(json.dumps({"tried": len(chosen), "killed": killed, "survived": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
