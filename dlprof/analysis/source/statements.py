"""What the script's files say by their syntax: which settings are on, where float64 comes in, whether a mask is causal,
where a data set takes a part of a tensor.

Files are read as the recording keeps them (kept.py): names are known, the text of strings is not.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress

from msgspec import Struct

from dlprof.analysis.engine import JOB, Job, across_ranks, needs
from dlprof.analysis.source.kept import kept_files
from dlprof.errors import DlprofError
from dlprof.result import Place
from dlprof.units import short

Trees = Mapping[str, ast.Module]

_MOST = 3  # lines that are named

# What makes a causal mask, with the diagonal at which it does, and what a mask is made of, or is brought to, besides.
_TRIANGLES = {"tril": "0", "triu": "1"}
_MADE = "generate_square_subsequent_mask"
_OF_MASKS = """tril triu generate_square_subsequent_mask ones full zeros ones_like full_like zeros_like empty float
finfo size len to bool type type_as view reshape unsqueeze expand contiguous cuda detach clone repeat logical_not
masked_fill masked_fill_ fill_ where Parameter Buffer"""
_PLAIN = frozenset(_OF_MASKS.split())


@across_ranks
def statements(job: Job = needs(JOB)) -> Trees:
    """Return the syntax trees of the script's own files, by name; none where no copy was kept, or it is broken."""
    found: dict[str, ast.Module] = {}
    with suppress(DlprofError, OSError):
        for name, text in kept_files(job.run.path).items():
            with suppress(SyntaxError, ValueError, RecursionError):
                found[name] = ast.parse(text)
    return found


def switched_on(trees: Trees, function: str, keyword: str) -> tuple[Place, ...]:
    """Return the lines that call a function, or give any a keyword, with a first value that is not plainly false."""
    places = []
    for file, node in _calls(trees):
        values = [one.value for one in node.keywords if one.arg == keyword]
        if _name(node.func) == function:
            values += [*node.args[:1], *(one.value for one in node.keywords if one.arg == "mode")]
        if any(not isinstance(value, ast.Constant) or value.value for value in values):
            places.append(Place(file, node.lineno, what=ast.unparse(node)))
    return tuple(places[:_MOST])


def calling(trees: Trees, *functions: str) -> tuple[Place, ...]:
    """Return the lines that call one of these functions, as "tracemalloc.start", or imported by its last name."""
    names = {of for one in functions for of in (one, one.rpartition(".")[2])}
    found = [(file, node) for file, node in _calls(trees) if ast.unparse(node.func) in names]
    return tuple(Place(file, node.lineno, what=ast.unparse(node)) for file, node in found[:_MOST])


def telling(trees: Trees, names: Collection[str]) -> tuple[Place, ...]:
    """Return the lines that call a function of these names, or give a keyword of these names to any ("padding"), or one
    with a value ("padding='…'": any text, as texts are not kept).
    """
    places = []
    for file, node in _calls(trees):
        given = [one.value for one in node.keywords if {one.arg, f"{one.arg}={ast.unparse(one.value)}"} & {*names}]
        given += [node] if _name(node.func) in names else []
        places += [Place(file, one.lineno, what=short(ast.unparse(node), 80)) for one in given[:1]]
    return tuple(places[:_MOST])


def groups_made(trees: Trees, optimizer: str) -> tuple[Place, ...]:
    """Return the lines that make the groups of an optimizer's class: the first dictionary in what it is called with, or
    in the function of the script that is called there.
    """
    found = []
    for file, node in _calls(trees):
        given = [*node.args[:1], *(one.value for one in node.keywords if one.arg == "params")]
        if _name(node.func) != optimizer or not given:
            continue
        called = {_name(of.func) for of in ast.walk(given[0]) if isinstance(of, ast.Call)}
        parts: list[tuple[str, ast.AST]] = [(file, given[0])]
        parts += [(w, f) for w, t in trees.items() for f in ast.walk(t) if _is_function(f) and _name(f) in called]
        made = [
            (where, one) for where, part in parts for one in ast.walk(part) if isinstance(one, ast.Dict) and one.keys
        ]
        found += [Place(where, one.lineno, what=ast.unparse(one)) for where, one in made[:1]]
    return tuple(found[:_MOST])


# What a script calls the number of its process, and what divides data into as many parts.
_OWN_RANK = re.compile(r"(?<![a-z])(rank|process_index)\b", re.IGNORECASE)
_DIVIDES = frozenset(("array_split", "split", "tensor_split", "chunk"))


def contiguous_parts(trees: Trees) -> tuple[Place, ...]:
    """Return the lines in which a process takes its part of what lies in a row: `ids[rank * n : (rank + 1) * n]`, or
    `np.array_split(ids, size)[rank]`.
    """
    found = []
    for file, tree in trees.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Subscript):
                continue
            at, called = node.slice, node.value
            if isinstance(at, ast.Slice):
                ends = [end for end in (at.lower, at.upper) if end is not None]
                mine = at.step is None and any(_is_product(part) for end in ends for part in ast.walk(end))
            else:
                mine = isinstance(called, ast.Call) and _name(called.func) in _DIVIDES and _is_own(at)
            found += [Place(file, node.lineno, what=ast.unparse(node))] if mine else []
    return tuple(found[:_MOST])


def _is_own(node: ast.AST) -> bool:
    return bool(_OWN_RANK.search(ast.unparse(node)))


def _is_product(node: ast.AST) -> bool:
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and _is_own(node)


def made_in(trees: Trees, attribute: str, *classes: str) -> tuple[Place, ...]:
    """Return the lines that make an object of one of these classes for an attribute: `self.table = nn.Embedding(…)`."""
    found = []
    for file, tree in trees.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
                continue
            if _name(node.value.func) in classes and any(_name(target) == attribute for target in node.targets):
                found.append(Place(file, node.lineno, what=ast.unparse(node)))
    return tuple(found[:_MOST])


# What is split on purpose: batches, and the micro-batches of one.
_DELIBERATE = re.compile(r"loader|\.(chunk|split|tensor_split)\(")


class Turns(Struct, frozen=True):
    """A loop's line whose calls need nothing of other turns. `grows`: each gets what the one before got, and more."""

    text: str
    grows: bool


def independent_turns(trees: Trees, file: str, line: int) -> Turns | None:
    """Return what a line calls in a loop, where no turn needs what another one has made; None: no such loop is known.

    A call that gets nothing of the loop's own, or a loop that trains or yields, is none. What attributes and calls hold
    besides is not looked at: a model that keeps a state by itself is not seen.
    """
    around = [node for node in ast.walk(trees.get(file, ast.Module([], []))) if _spans(node, line)]
    loops = [node for node in around if isinstance(node, ast.For | ast.ListComp | ast.GeneratorExp)]
    made = [node for node in around if isinstance(node, ast.FunctionDef | ast.Lambda)]
    for loop in reversed(loops):  # the innermost first
        over = [loop.iter] if isinstance(loop, ast.For) else [one.iter for one in loop.generators]
        if _trains(loop) or any(one in ast.walk(loop) for one in made):
            continue
        if any(_DELIBERATE.search(ast.unparse(one)) for one in over):
            continue
        if isinstance(loop, ast.For):
            simple = [n for n in _simple(loop) if _spans(n, line)]
            if not simple:
                continue
            statement, varies = simple[-1], _used(loop.target)
        else:
            statement, varies = ast.Return(loop.elt), set[str]().union(*(_used(one.target) for one in loop.generators))
        later = _simple(loop)
        tainted = _targets(statement)
        while more := {t for n in later if _used(n) & tainted for t in _targets(n)} - tainted:
            tainted |= more
        varies |= {t for n in later for t in _targets(n)} - tainted
        given = [one for call in _calls_of(statement) for one in _given(call)]
        receivers = [call.func.value for call in _calls_of(statement) if isinstance(call.func, ast.Attribute)]
        if any(_used(one) & tainted for one in [*given, *receivers]) or not any(_used(one) & varies for one in given):
            continue
        grows = any(
            isinstance(n, ast.Slice) and n.lower is None and n.upper is not None and _used(n.upper) & varies
            for one in given
            for n in ast.walk(one)
        )
        return Turns(ast.unparse(statement), grows)
    return None


def _simple(loop: ast.AST) -> list[ast.stmt]:
    """Return the statements in a loop that have none in them."""
    return [n for n in ast.walk(loop) if isinstance(n, ast.stmt) and not hasattr(n, "body")]


def _spans(node: ast.AST, line: int) -> bool:
    return getattr(node, "lineno", line + 1) <= line <= (getattr(node, "end_lineno", 0) or 0)


def _trains(loop: ast.AST) -> bool:
    """Return whether a loop is that of the training, or hands on what it makes one by one."""
    named = {_name(n.func) for n in ast.walk(loop) if isinstance(n, ast.Call)}
    return bool(named & {"backward", "step", "zero_grad"}) or any(isinstance(n, ast.Yield) for n in ast.walk(loop))


def _used(node: ast.AST) -> set[str]:
    """Return the names in an expression: variables, and attributes of them, as "self.h"."""
    return {ast.unparse(n) for n in ast.walk(node) if isinstance(n, ast.Name | ast.Attribute)}


def _targets(node: ast.AST) -> set[str]:
    """Return the names that a statement assigns, or whose object it calls by itself, as a list's `append`."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Attribute):
        return {ast.unparse(node.value.func.value)}
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if hasattr(node, "target") else []
    found: set[str] = set()
    for target in targets:
        parts = target.elts if isinstance(target, ast.Tuple | ast.List) else [target]
        found |= {ast.unparse(part.value if isinstance(part, ast.Subscript) else part) for part in parts}
    return found


def _calls_of(statement: ast.AST) -> list[ast.Call]:
    """Return the calls of a statement, but for that of a list's `append` or the like which is the statement."""
    outer = statement.value if isinstance(statement, ast.Expr) else None
    return [n for n in ast.walk(statement) if isinstance(n, ast.Call) and not (n is outer and _targets(statement))]


def causal_masks(trees: Trees, file: str, line: int) -> tuple[Place, ...]:
    """Return where the mask is made that a line gives to `scaled_dot_product_attention`, if it is known to be causal.

    It is where all that the script's files assign to names of masks, or give as such, is `tril`, or `triu` above the
    main diagonal, in some type and form, or another of these masks: no call is followed.
    """
    given = [
        value
        for where, node in _calls(trees)
        if where == file and node.lineno <= line <= (node.end_lineno or 0) and _name(node.func).endswith("attention")
        for value in [*node.args[3:4], *(one.value for one in node.keywords if one.arg == "attn_mask")]
    ]
    values = [value for tree in trees.values() for value in _assigned(tree)]
    if not given or not all(value is not None and _is_causal(value) for value in [*given, *values]):
        return ()
    made = [(where, node) for where, node in _calls(trees) if _makes(node)]
    return tuple(Place(where, node.lineno, what=ast.unparse(node)) for where, node in made[:_MOST])


def filtered_after(trees: Trees, function: str, by: str) -> tuple[Place, ...]:
    """Return where what `function` makes is given to the generator `by`, if that hands on only some of what it gets."""
    if not any(_filters(node) for tree in trees.values() for node in ast.walk(tree) if _name(node) == by):
        return ()
    given = [(file, call) for file, call in _calls(trees) if _name(call.func) == by]
    made = [
        (file, call)
        for file, call in given
        if any(isinstance(n, ast.Call) and _name(n.func) == function for one in _given(call) for n in ast.walk(one))
    ]
    return tuple(Place(file, call.lineno, what=ast.unparse(call)) for file, call in made[:_MOST])


def _filters(node: ast.AST) -> bool:
    """Return whether this is a generator that yields what it loops over, as it is and under a condition."""
    for loop in (one for one in ast.walk(node) if isinstance(one, ast.For)):
        kept = _name(loop.target)
        whole = [one for one in loop.body if _yields(one, kept)]
        tests = [one for one in loop.body if isinstance(one, ast.If) and not one.orelse]
        if any(_yields(one, kept) for test in tests for one in test.body):
            return True
        if whole and any(isinstance(one, ast.Continue) for test in tests for one in test.body):
            return True
    return False


def _yields(node: ast.stmt, name: str) -> bool:
    made = node.value if isinstance(node, ast.Expr) else None
    return isinstance(made, ast.Yield) and made.value is not None and bool(name) and _name(made.value) == name


# Names of types, of what makes a tensor of an array, and of the libraries that make arrays.
_WIDE, _NARROW = ("double", "float64"), ("float", "float16", "float32", "bfloat16", "half")
_OF_ARRAYS = ("as_tensor", "from_numpy", "tensor")
_LIBRARIES = ("np", "numpy", "pd", "pandas")


@across_ranks
def float64_lines(statements: Trees = needs(statements)) -> list[Place]:
    """Return the first lines of the script that set or name float64, else that make an array in NumPy's default type
    of which a tensor is made; [] where the recording keeps no files.
    """
    found: list[list[Place]] = [[], []]
    for file, tree in statements.items():
        for places, nodes in zip(found, (_wide(tree), _by_default(tree)), strict=True):
            places += [Place(file, node.lineno, what=ast.unparse(node)) for node in nodes]
    return (found[0] or found[1])[:2]


def _wide(tree: ast.Module) -> Iterator[ast.Call]:
    """Yield calls of `.double()`, and those that are given float64."""
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        given = _given(call)
        named = any(_name(one) in _WIDE for one in given) and _owner(call) not in _LIBRARIES
        if named or (_name(call.func) == "double" and not given):
            yield call


def _by_default(tree: ast.Module) -> Iterator[ast.Call]:
    """Yield the calls of NumPy or pandas, without a type, that made what a tensor is made of."""
    nodes = list(ast.walk(tree))
    made = {_name(one.targets[0]): one.value for one in nodes if isinstance(one, ast.Assign)}
    for call in (n for n in nodes if isinstance(n, ast.Call) and _name(n.func) in _OF_ARRAYS and n.args):
        inside = list(ast.walk(call.args[0]))
        inside += [n for one in inside if _name(one) in made for n in ast.walk(made[_name(one)])]
        for one in (n for n in inside if isinstance(n, ast.Call)):
            of_library = _name(one.func) == "to_numpy" or _owner(one) in _LIBRARIES
            if of_library and not any(_name(n) in _NARROW for n in _given(one)):
                yield one


# Methods that make a sample or a batch, those that give a part of a tensor, those that copy it, and what passes on what
# it is given, as classes do.
_OF_SAMPLES = ("__getitem__", "__getitems__", "__iter__")
_PARTS = ("chunk", "narrow", "select", "split", "tensor_split", "unbind", "unfold")
_COPIES, _PASSES = ("clone", "copy", "item", "tolist"), ("dict", "list", "tuple")


def parts_taken(trees: Trees, dataset: str, collate: str = "") -> tuple[Place, ...]:
    """Return where the data set of a class takes slices, or other parts that are no copies, for what it returns.

    Those for what is returned come first. `collate`: the name of a function that collates, which is looked at next.
    Where none is known, the place of the `__getitem__` that stands for it; () where the files do not hold the class.
    """
    made, whole = [], []
    for file, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.name == dataset:
                made += [(file, f"{dataset}.{one.name}", one) for one in _functions(node) if one.name in _OF_SAMPLES]
        whole += [(file, one.name, one) for one in _functions(tree) if one.name == collate]
    for functions in (made, whole):
        found = [
            (not returned, Place(file, line, name, what=text))
            for file, name, function in functions
            for line, text, returned in _taken(function)
        ]
        if found:
            return tuple(place for _, place in sorted(found, key=lambda one: one[0]))[:_MOST]
    return tuple(Place(file, one.lineno, name) for file, name, one in made[:1])


def _functions(tree: ast.Module | ast.ClassDef) -> list[ast.FunctionDef]:
    return [one for one in tree.body if isinstance(one, ast.FunctionDef)]


def _taken(function: ast.FunctionDef) -> Iterator[tuple[int, str, bool]]:
    """Yield the lines of a function that take a part, their text, and whether the part is returned or yielded."""
    nodes = list(ast.walk(function))
    ends = [one for one in nodes if isinstance(one, (ast.Return, ast.Yield)) and one.value is not None]
    names = {_name(part) for one in ends for part in ast.walk(one)} - {"", "self"}
    for node in nodes:
        if not isinstance(node, (ast.Assign, ast.Return, ast.Expr)) or not any(_takes(node.value)):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else []
        returned = not targets or any(_name(part) in names for target in targets for part in ast.walk(target))
        yield node.lineno, ast.unparse(node), returned


def _takes(value: ast.AST | None) -> Iterator[bool]:
    """Yield True for each place where an expression takes a part of something, and hands on no copy of it."""
    inside = list(ast.iter_child_nodes(value)) if value is not None else []
    if isinstance(value, ast.Call):
        name = _name(value.func)
        if name in _COPIES:
            return
        yield from [True] * (isinstance(value.func, ast.Attribute) and name in _PARTS)
        inside = inside if name in _PASSES or name[:1].isupper() else [value.func]
    if isinstance(value, ast.Subscript) and any(isinstance(one, ast.Slice) for one in _indices(value)):
        yield True
    for part in inside:
        yield from _takes(part)


def _indices(node: ast.Subscript) -> list[ast.expr]:
    return node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]


def _given(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def _owner(call: ast.Call) -> str:
    return _name(call.func.value) if isinstance(call.func, ast.Attribute) else ""


def _assigned(tree: ast.Module) -> Iterator[ast.expr | None]:
    """Yield what is assigned to names of masks, or given as such; None where it is a part of something else."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield from (one.value for one in node.keywords if "mask" in (one.arg or ""))
            if _name(node.func) == "register_buffer":  # the text of its name is not kept
                yield from (v for v in node.args[1:2] if any(_name(n) in _TRIANGLES for n in ast.walk(v)))
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in filter(None, targets):
            whole = not isinstance(node, (ast.AugAssign, ast.For, ast.AsyncFor, ast.comprehension))
            if "mask" in _name(target):
                yield getattr(node, "value", None) if whole else None
            elif any("mask" in _name(part) for part in ast.walk(target) if not isinstance(target, ast.Subscript)):
                yield None


def _is_causal(value: ast.expr) -> bool:
    """Return whether an expression is a causal mask, one of those that the names of masks stand for, or None."""
    nodes = [*ast.walk(value)]
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    triangles = [call for call in calls if _name(call.func) in (*_TRIANGLES, _MADE)]
    if any(isinstance(node, (ast.BitAnd, ast.BitOr, ast.BitXor, ast.Add)) for node in nodes):
        return False
    if not {_name(call.func) for call in calls} <= _PLAIN or not all(map(_makes, triangles)):
        return False
    named = any("mask" in _name(node) or isinstance(node, ast.Attribute) for node in nodes)
    return bool(triangles) or named or (isinstance(value, ast.Constant) and value.value is None)


def _makes(call: ast.Call) -> bool:
    name = _name(call.func)
    # A method's first argument is the diagonal, a function's the second.
    of_torch = not isinstance(call.func, ast.Attribute) or _name(call.func.value) == "torch"
    given = [*(one.value for one in call.keywords if one.arg == "diagonal"), *call.args[of_torch:]]
    diagonal = ast.unparse(given[0]) if given else "0"
    return name == _MADE or _TRIANGLES.get(name) == diagonal


def _calls(trees: Trees) -> Iterator[tuple[str, ast.Call]]:
    for file, tree in trees.items():
        yield from ((file, node) for node in ast.walk(tree) if isinstance(node, ast.Call))


def _is_function(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef)


def _name(node: ast.AST) -> str:
    """Return the last name of an expression, or that of a function: "tril" of `torch.tril`; "": it has none."""
    if isinstance(node, ast.FunctionDef):
        return node.name
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
