"""Who holds the lock that a thread waits for, by the lines that the threads of its process stand in.

Python does not say who holds a `threading.Lock`. A thread holds one where its line is inside of `with lock:`, or behind
a `lock.acquire()` that no `lock.release()` follows. Two locks are taken for one where both lines are in the same file,
write it in the same way, and, for `self.…`, in the same class: another object of that class has another lock.
"""

from __future__ import annotations

import ast
import functools
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

_MOST_BYTES = 4_000_000
_CALLS = ("acquire", "release")


class Place(NamedTuple):
    """A line of a file."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file.rpartition('/')[2]}:{self.line}"


class _Lock(NamedTuple):
    """A lock as the source names it; `of`: the class in which `self` is meant."""

    name: str
    of: str


class _Taken(NamedTuple):
    """Where a function takes a lock: `line`, and the lines between which a thread of it then holds it.

    `others`: the first and last lines of functions that are made there, and run later.
    """

    lock: _Lock
    line: int
    first: int
    last: int
    others: tuple[tuple[int, int], ...] = ()

    def holds(self, line: int) -> bool:
        """Return whether a thread in that line holds it."""
        return self.first <= line <= self.last and not any(first <= line <= last for first, last in self.others)


class Holder(NamedTuple):
    """Which thread holds a lock, where it took it, and where it is now. `thread`: −1 where none of them does."""

    thread: int
    taken: Place
    now: Place


def holder(stacks: Sequence[Sequence[tuple[str, int]]], waiting: int) -> Holder | None:
    """Return who holds the lock that one of the threads waits for in its innermost line; None: that is not known.

    `stacks`: of each thread the user's lines, as file and line, the innermost first.
    """
    if not stacks[waiting]:
        return None
    here = Place(*stacks[waiting][0])
    wanted = {taken.lock for taken in _taken(here.file) if taken.line == here.line}
    if len(wanted) != 1:
        return None
    for number, stack in enumerate(stacks):
        for file, line in stack:
            for taken in _taken(file) if file == here.file else ():
                if taken.lock in wanted and taken.holds(line):
                    return Holder(number, Place(file, taken.line), Place(*stack[0]))
    return Holder(-1, here, here)


@functools.cache
def _taken(file: str) -> tuple[_Taken, ...]:
    """Return where the functions of a file take locks; none where it cannot be read."""
    try:
        path = Path(file)
        if not path.is_file() or path.stat().st_size > _MOST_BYTES:
            return ()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(path.read_bytes())
        return tuple(_of_body(tree, ""))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return ()


def _of_body(scope: ast.AST, cls: str) -> Iterator[_Taken]:
    """Yield what a module, class or function takes, and then those in it."""
    found: list[_Taken] = []
    calls: list[tuple[int, str, _Lock]] = []
    inner: list[tuple[ast.AST, str, tuple[int, int]]] = []
    todo = [*ast.iter_child_nodes(scope)]
    while todo:
        node = todo.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            lines = node.lineno, node.end_lineno or node.lineno
            inner.append((node, node.name if isinstance(node, ast.ClassDef) else cls, lines))
            continue
        todo += ast.iter_child_nodes(node)
        if isinstance(node, (ast.With, ast.AsyncWith)):
            last = node.body[-1].end_lineno or node.body[-1].lineno
            taken = [item.context_expr for item in node.items if not isinstance(item.context_expr, ast.Call)]
            found += [_Taken(_named(lock, cls), lock.lineno, node.body[0].lineno, last) for lock in taken]
        elif isinstance(node, ast.Call) and isinstance(called := node.func, ast.Attribute):
            calls += [(node.lineno, called.attr, _named(called.value, cls))] if called.attr in _CALLS else []
    end = getattr(scope, "end_lineno", None) or 1 << 30
    for line, what, lock in calls:
        freed = [at for at, how, other in calls if how == "release" and other == lock and at > line]
        found += [_Taken(lock, line, line + 1, min(freed, default=end))] if what == "acquire" else []
    others = tuple(lines for _, _, lines in inner)
    yield from (taken._replace(others=others) for taken in found)
    for node, name, _ in inner:
        yield from _of_body(node, name)


def _named(node: ast.expr, cls: str) -> _Lock:
    name = ast.unparse(node)
    return _Lock(name, cls if name.startswith("self.") else "")
