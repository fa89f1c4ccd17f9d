"""Expressions in one form, whichever way they are written, and the patterns that are looked for among them.

`x.softmax(-1)`, `F.softmax(x, dim=-1)` and `torch.softmax(x, -1)` are one term. A name that was assigned just before is
the term that it was assigned: attention over five statements is found as attention in one. A pattern is Python whose
names beginning with an underscore stand for any expression; LOW is a number that a softmax makes zero of, CAST(x) is x
of any type, WHEN(t, x, y) what `if t: y = x` leaves in y, DROPOUT(f, x) what a module called a dropout makes of x, and
CAUSAL(m) a mask that hides, and CAUSAL_KEPT(m) one that keeps, what comes before.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any


@dataclass(frozen=True)
class Term:
    """An expression: an operation of terms. `at`: the statement that it stands in; `of`: those which assigned it."""

    op: str
    args: tuple[Any, ...] = ()
    origin: ast.expr | None = field(default=None, compare=False, repr=False)
    at: int = field(default=0, compare=False, repr=False)
    of: frozenset[int] = field(default=frozenset(), compare=False, repr=False)


@dataclass(frozen=True)
class Found:
    """What the names of a pattern stand for, and the statements that assigned what was looked into."""

    names: Mapping[str, Term] = field(default_factory=dict)
    within: frozenset[int] = frozenset()


# Functions and methods of tensors by their arguments; what is given without its name gets it. Those after a "|" are
# left out where they are as here.
_SIGNATURES = """
argsort x dim descending; bmm x y; cdist x y; clamp x min max; cross_entropy x y; det x; dropout x p training
inplace|False; embedding x y; erf x; exp x; expand x; eye n; gather x dim index; log x; log_softmax x dim; logdet x;
logsumexp x dim; masked_fill x mask value; matmul x y; mean x dim keepdim|False; mm x y; mse_loss x y; mul x y; neg x;
nll_loss x y; norm x p; one_hot x n; ones a b; permute x; pow x y; relu x; rsqrt x; scatter x dim index y; sigmoid x;
softmax x dim; softplus x; sort x dim descending; sqrt x; square x; sub x y; sum x dim keepdim|False; tanh x;
transpose x y z; tril x diagonal|0; triu x diagonal|0; unsqueeze x dim; var x dim unbiased keepdim|False; view x; where
x y z; div x y; add x y; t x; float x; half x; bfloat16 x; double x; long x; to x; type x; type_as x y; contiguous x;
bool x;
scaled_dot_product_attention x y z attn_mask dropout_p|0.0 is_causal|False scale;
 linear x y bias; repeat x; item x; nonzero x; size x dim; slogdet x; inv x; inverse x; eq x y
"""
_ARGS = {name: args for name, *args in (one.split() for one in _SIGNATURES.split(";"))}
_RENAMED = {"axis": "dim", "keepdims": "keepdim", "mm": "matmul", "bmm": "matmul", "inverse": "inv", "input": "x"}
_NAMESPACES = ("torch", "torch.nn.functional", "torch.linalg", "torch.special", "torch.Tensor")
# What changes the type of a tensor, or its layout in memory, alone.
_CASTS = frozenset(("float", "half", "bfloat16", "double", "to", "type", "type_as", "contiguous"))
# What leaves a mask the mask that it is, but for its shape and type; of a buffer, the part of it that is taken.
_OF_MASK = _CASTS | {"bool", "view", "index", "unsqueeze", "repeat", "expand"}
_OPERATORS = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.MatMult: "matmul", ast.Pow: "pow"}
_COMPARED = {ast.Eq: "eq", ast.NotEq: "ne", ast.Gt: "gt", ast.Lt: "lt", ast.IsNot: "is not", ast.Is: "is"}
_LOW = -1e3
# Deeper ones are not looked into: what names stand for grows with each statement.
_DEEPEST = 40


class Scope:
    """Terms of the expressions of a block: `names` are those that were assigned in it, `imports` what modules are.

    `buffers`: what attributes of the object are that never change.
    """

    def __init__(self, imports: Mapping[str, str], buffers: Mapping[str, ast.expr] | None = None) -> None:
        self.imports, self.buffers = imports, buffers or {}
        self.names: dict[str, Term] = {}
        self.at = 0

    def term(self, node: ast.expr, deep: int = 0) -> Term:
        """Return an expression's term, as it stands in the statement `at`."""
        made = self._term(node, deep + 1) if deep < _DEEPEST else Term("?", (id(node),))
        return replace(made, origin=node, at=self.at)

    def assign(self, statement: ast.stmt) -> bool:
        """Note what a statement assigns to a name; return False, and forget all names that it has, if it is no such."""
        name, value = _assigned(statement)
        if name and value is not None:
            made = self.term(value)
            if isinstance(statement, ast.AugAssign):
                made = self.term(ast.BinOp(ast.Name(name, ast.Load()), statement.op, statement.value))
            self.names[name] = replace(made, of=made.of | {self.at})
            return True
        if isinstance(statement, ast.If) and len(statement.body) == 1 and not statement.orelse:
            name, value = _assigned(statement.body[0])
            if name in self.names and value is not None and isinstance(statement.body[0], ast.Assign):
                parts = (self.term(statement.test), self.term(value), self.names[name])
                self.names[name] = Term("WHEN", parts, at=self.at, of=frozenset((self.at,)))
                return True
        for node in ast.walk(statement):
            if isinstance(node, ast.Name):
                self.names.pop(node.id, None)
        return False

    def _term(self, node: ast.expr, deep: int) -> Term:
        def of(one: ast.expr) -> Term:
            return self.term(one, deep)

        if isinstance(node, ast.Constant):
            return Term("const", (node.value,))
        if path := self._path(node):
            return Term("const", (float("inf"),)) if path in ("math.inf", "torch.inf", "numpy.inf") else Term(path)
        if isinstance(node, ast.Name):
            return self.names.get(node.id, Term("name", (node.id,)))
        if isinstance(node, ast.Attribute):
            if node.attr in ("T", "mT"):
                return Term("mT", (of(node.value),))
            if isinstance(node.value, ast.Name) and node.value.id == "self" and node.attr in self.buffers:
                return self.term(self.buffers[node.attr], deep)
            return Term("attr", (of(node.value), node.attr))
        if isinstance(node, ast.Call):
            return self._call(node, deep)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _operation(_OPERATORS[type(node.op)], of(node.left), of(node.right))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return _negative(of(node.operand))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Invert, ast.Not)):
            return Term("not", (of(node.operand),))
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARED:
            return Term(_COMPARED[type(node.ops[0])], (of(node.left), of(node.comparators[0])))
        if isinstance(node, ast.Subscript):
            dim = _new_dim(node.slice)
            if dim is not None:
                return Term("unsqueeze", (("dim", Term("const", (dim,))), ("x", of(node.value))))
            return Term("index", (of(node.value), of(node.slice)))
        if isinstance(node, ast.Slice):
            return Term("slice", tuple(one and of(one) for one in (node.lower, node.upper, node.step)))
        if isinstance(node, (ast.Tuple, ast.List)):
            return Term("tuple", tuple(map(of, node.elts)))
        return Term("?", (ast.dump(node),))

    def _path(self, node: ast.expr) -> str:
        """Return the whole name of what is of a module; "": it is of none."""
        if isinstance(node, ast.Name):
            return "" if node.id in self.names else self.imports.get(node.id, "")
        if isinstance(node, ast.Attribute) and (before := self._path(node.value)):
            return f"{before}.{node.attr}"
        return ""

    def _call(self, node: ast.Call, deep: int) -> Term:
        keywords = {_RENAMED.get(k.arg or "", k.arg or "**"): self.term(k.value, deep) for k in node.keywords}
        given = [self.term(one, deep) for one in node.args]
        space, _, name = self._path(node.func).rpartition(".")
        if isinstance(node.func, ast.Name) and node.func.id.isupper():  # of a pattern
            return Term(node.func.id, tuple(given))
        if isinstance(node.func, ast.Name) and node.func.id == "float" and len(node.args) == 1:
            text = node.args[0]
            if isinstance(text, ast.Constant) and isinstance(text.value, str) and text.value.strip("+-") == "inf":
                return Term("const", (float(text.value),))
        if space in _NAMESPACES and name == "einsum":
            return _einsum(given) or Term("einsum", tuple(given))
        of_tensor = isinstance(node.func, ast.Attribute) and not space and node.func.attr in _ARGS
        if isinstance(node.func, ast.Attribute) and of_tensor:
            given, name = [self.term(node.func.value, deep), *given], node.func.attr
        if of_tensor or (space in _NAMESPACES and name in _ARGS):
            return _named(name, given, keywords)
        return Term("call", (self.term(node.func, deep), *given, *sorted(keywords.items())))


def _assigned(statement: ast.stmt) -> tuple[str, ast.expr | None]:
    """Return the one name that a statement assigns to, and the value; "": it is none."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target: ast.expr = statement.targets[0]
    elif isinstance(statement, (ast.AnnAssign, ast.AugAssign)) and statement.value is not None:
        target = statement.target
    else:
        return "", None
    return (target.id, statement.value) if isinstance(target, ast.Name) else ("", None)


def _named(name: str, given: Sequence[Term], keywords: Mapping[str, Term]) -> Term:
    """Return a call of a function of tensors."""
    names = [one.partition("|")[0] for one in _ARGS[name]]
    defaults = dict(one.split("|") for one in _ARGS[name] if "|" in one)
    both = {**dict(zip(names, given, strict=False)), **keywords}
    both |= {f"{n}": one for n, one in enumerate(given[len(names) :])}
    if name == "var" and str(both.get("correction")) == str(Term("const", (0,))):
        both["unbiased"] = Term("const", (False,))
        del both["correction"]
    both = {k: v for k, v in both.items() if not (k in defaults and str(v.args) == f"({defaults[k]},)")}
    x, y = both.get("x"), both.get("y")
    if x is not None and y is not None and len(both) == 2 and name in ("add", "sub", "mul", "div", "pow", "eq"):
        return _operation(name, x, y) if name != "eq" else Term("eq", (x, y))
    if name in ("t", "transpose") and (name == "t" or {str(both.get(k)) for k in "yz"} in _LAST_TWO):
        return Term("mT", (x,))
    if x is not None and len(both) == 1 and name in ("neg",):
        return _negative(x)
    return Term(_RENAMED.get(name, name), tuple(sorted(both.items())))


def _operation(op: str, left: Term, right: Term) -> Term:
    exponent = right.args[0] if op == "pow" and right.op == "const" else None
    if exponent in (2, 0.5, -0.5):
        return Term({2: "square", 0.5: "sqrt", -0.5: "rsqrt"}[exponent], (("x", left),))
    if op == "div" and left.op == "const" and left.args == (1,) and right.op == "sqrt":
        return Term("rsqrt", right.args)
    if op == "matmul":
        return Term("matmul", (("x", left), ("y", right)))
    if op in ("add", "mul"):  # of two or more, in any order
        parts = [one.args if one.op == op else (one,) for one in (left, right)]
        of = frozenset().union(*(one.of for one in (left, right) if one.op == op))
        return Term(op, (*parts[0], *parts[1]), of=of)
    return Term(op, (left, right))


def _negative(term: Term) -> Term:
    value = term.args[0] if term.op == "const" else None
    return Term("const", (-value,)) if isinstance(value, (int, float)) else Term("neg", (term,))


_LAST_TWO = [{str(Term("const", (a,))), str(Term("const", (b,)))} for a, b in ((-1, -2), (2, 3))]


def _new_dim(index: ast.expr) -> int | None:
    """Return the dimension that an index adds, `x[:, None]`; None: it does something else, too."""
    parts = index.elts if isinstance(index, ast.Tuple) else [index]
    new = [n for n, one in enumerate(parts) if isinstance(one, ast.Constant) and one.value is None]
    whole = [isinstance(one, ast.Slice) and not (one.lower or one.upper or one.step) for one in parts]
    rest = [n for n, one in enumerate(parts) if n not in new and not whole[n]]
    if len(new) != 1 or not all(isinstance(parts[n], ast.Constant) and parts[n].value is ... for n in rest):  # type: ignore[attr-defined]
        return None
    return new[0] - len(parts) if rest and rest[0] < new[0] else new[0] if not rest else None


def _einsum(given: Sequence[Term]) -> Term | None:
    """Return the product of matrices that an einsum is; None: it is none."""
    if len(given) != 3 or given[0].op != "const" or not isinstance(given[0].args[0], str):
        return None
    a, _, rest = given[0].args[0].replace(" ", "").partition(",")
    b, _, out = rest.partition("->")
    if not (len(a) == len(b) == len(out) > 1 and a[:-2] == b[:-2] == out[:-2]):
        return None
    if a[-1] == b[-1] and out[-2:] == a[-2] + b[-2]:
        return _operation("matmul", given[1], Term("mT", (given[2],)))
    return _operation("matmul", given[1], given[2]) if a[-1] == b[-2] and out[-2:] == a[-2] + b[-1] else None


@cache
def pattern(code: str) -> Term:
    """Return the term that a pattern is."""
    names = {"torch": "torch", "math": "math", "numpy": "numpy", "F": "torch.nn.functional"}
    return Scope(names).term(ast.parse(code, mode="eval").body)


def matches(want: Any, term: Any, found: Found) -> Iterator[Found]:
    """Yield what a pattern's names may stand for, if a term is of it."""
    if not isinstance(want, Term) or not isinstance(term, Term):
        if isinstance(want, tuple) and isinstance(term, tuple) and len(want) == len(term):
            yield from _all(list(zip(want, term, strict=True)), found)
        elif want == term and isinstance(want, bool) == isinstance(term, bool):
            yield found
        return
    if want.op == "name" and want.args[0].startswith("_"):
        before = found.names.get(want.args[0])
        if before is None or before == term:
            yield replace(found, names={**found.names, want.args[0]: before or term})
        return
    inside = replace(found, within=found.within | term.of)
    if want.op == "name" and want.args[0] == "LOW":
        value = term.args[0] if term.op == "const" else None
        if isinstance(value, (int, float)) and value <= _LOW:
            yield inside
        return
    if want.op in ("CAST", "CAUSAL", "CAUSAL_KEPT"):
        yield from _special(want, term, inside)
        return
    if want.op == "DROPOUT":
        if term.op == "call" and len(term.args) == 2 and term.args[0].op == "attr" and "drop" in term.args[0].args[1]:
            yield from _all([(want.args[0], term.args[0]), (want.args[1], term.args[1])], inside)
        return
    if want.op != term.op or len(want.args) != len(term.args):
        return
    if want.op in ("add", "mul"):
        for order in itertools.permutations(term.args) if len(term.args) <= 4 else ():
            yield from _all(list(zip(want.args, order, strict=True)), inside)
        return
    yield from _all(list(zip(want.args, term.args, strict=True)), inside)


def _all(pairs: Sequence[tuple[Any, Any]], found: Found) -> Iterator[Found]:
    if not pairs:
        yield found
        return
    for one in matches(*pairs[0], found):
        yield from _all(pairs[1:], one)


def _special(want: Term, term: Term, found: Found) -> Iterator[Found]:
    """Match what a type, or the shape of a mask, makes no other thing."""
    if want.op == "CAST":
        yield from matches(want.args[0], term, found)
        if term.op in _CASTS and (inner := dict(term.args).get("x")) is not None:
            yield from matches(want, inner, found)
        return
    whole = term
    while term.op in _OF_MASK and (term.op != "index" or _begins(term.args[1])):
        term = term.args[0] if term.op == "index" else dict(term.args)["x"]
    keeps = want.op == "CAUSAL_KEPT"
    if keeps and term.op == "not":
        yield from _special(Term("CAUSAL", want.args), term.args[0], found)
    elif not keeps and term.op in ("not", "eq") and (term.op == "not" or term.args[1] == Term("const", (0,))):
        yield from _special(Term("CAUSAL_KEPT", want.args), term.args[0], found)
    else:
        args = dict(term.args) if term.op in ("tril", "triu") else {}
        ones = args.get("x", term)
        while ones.op in _OF_MASK and ones.op != "index":
            ones = dict(ones.args)["x"]
        after = args.get("diagonal") == Term("const", (1,))
        right = (term.op == "tril" and "diagonal" not in args) if keeps else (term.op == "triu" and after)
        if right and ones.op == "ones":
            yield from matches(want.args[0], whole, found)


def _begins(index: Term) -> bool:
    """Return whether an index takes a tensor from its begin on: of a part further on other values are hidden."""
    parts = index.args if index.op == "tuple" else (index,)
    return all(one.op == "slice" and one.args[0] is None and one.args[2] is None for one in parts)
