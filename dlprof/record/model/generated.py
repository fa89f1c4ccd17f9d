"""Reads the code that Inductor generates: which kernels it calls, in which order, and what each of them is for.

A call stands behind a comment with the names that its operators have in Dynamo's graph ("Source Nodes"), and is passed
the parameters, which are called primals_1, primals_2, ... in the order of the graph's inputs. In the backward graph no
name leads to the forward one: there parameters tell, and the gradients, which are returned in the same order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

# What only looks at the same memory otherwise: no kernel is made for it.
_VIEW = re.compile(
    r"(?:_?(?:unsafe_)?view|permute|t|transpose|expand|select|slice|unsqueeze|squeeze|_?reshape\w*|as_strided|alias|getitem"
    r"|split\w*|unbind|detach)(?:_\d+)?"
)
_NAMES = re.compile(r"\s*# (?:\w+(?: Sorted)? )?Source Nodes: \[([^\]]*)\]")
_MAPPED = re.compile(r"#   (\w+) => (.*)")
_KERNEL = re.compile(r"(\w+) = async_compile\.")
_BODY = re.compile(r"\s*def (?:call|partition_\d+)\(")
_END = re.compile(r"def (?:get_args|benchmark_compiled_module)\(")
_ARGUMENTS = re.compile(r"\s+(\w+(?:, \w+)*),? = args$")
_RETURNS = re.compile(r"\s+return \((.*)\)$")
_CALL = re.compile(
    r"\s+(?:[\w, ]+ = )?(?:(?P<made>\w+)\.run|extern_kernels\.(?P<extern>\w+)"
    r"|(?:torch\.ops\.(?P<space>\w+)|aten)\.(?P<operator>\w+)(?:\.\w+)*|(?P<inner>cpp_\w+))(?P<args>\(.*)"
)
_RESULT = re.compile(r"\s+(\w+) = ")
_TENSOR = re.compile(r"\b(?!stream\d)([a-zA-Z_]\w*)\b")
_PARAMETER = re.compile(r"primals_(\d+)")
_OUT = re.compile(r"\bout=(?:reinterpret_tensor\()?(\w+)")


@dataclass(frozen=True)
class Call:
    """A call of a kernel or an operator in generated code.

    `operator`: its name in a trace, "" where the profiler does not see it (C++ kernels). `nodes`: the names in Dynamo's
    graph; an operator has its own alone. `tensors`: the names that it is passed, or returns. `makes`: of an operator,
    those that it makes. `fused`: it is a generated kernel.
    """

    operator: str
    nodes: tuple[str, ...]
    tensors: frozenset[str]
    makes: frozenset[str] = frozenset()
    fused: bool = False


@dataclass(frozen=True)
class Code:
    """A generated graph: the names of its arguments, its calls, and the name of the tensor in each place returned."""

    arguments: tuple[str, ...]
    calls: tuple[Call, ...]
    returned: tuple[str, ...]

    @property
    def is_backward(self) -> bool:
        """Whether it computes gradients."""
        return any(name.startswith("tangents_") for name in self.arguments)


def read(text: str) -> Code:
    """Return what a generated graph calls; without calls where the text is of another make."""
    arguments: tuple[str, ...] = ()
    returned: tuple[str, ...] = ()
    calls: list[Call] = []
    seen_views: dict[str, tuple[bool, ...]] = {}
    nodes: tuple[str, ...] = ()
    mapped: dict[str, str] = {}
    in_body = False
    for line in _outside_strings(text):
        if found := _NAMES.match(line):
            nodes, mapped = _split(found[1]), {}
        elif found := _MAPPED.match(line):
            mapped[found[1]] = found[2]
        elif found := _KERNEL.match(line):
            made = tuple(all(_VIEW.fullmatch(one) for one in _split(mapped.get(node, ""))) for node in nodes)
            seen_views[found[1]] = made if mapped else ()
            nodes = ()
        elif _BODY.match(line):
            in_body, nodes = True, ()
        elif _END.match(line):
            break
        elif not in_body:
            continue
        elif found := _ARGUMENTS.match(line):
            arguments = arguments or _split(found[1])
        elif found := _CALL.match(line):
            calls.append(_call(found, line, nodes, seen_views))
            nodes = ()
        elif found := _RETURNS.match(line):
            returned = tuple(_first_tensor(part) for part in _parts(found[1]))
    return Code(arguments, tuple(calls), returned)


def _call(found: re.Match[str], line: str, nodes: tuple[str, ...], views: Mapping[str, tuple[bool, ...]]) -> Call:
    tensors = frozenset(_TENSOR.findall(found["args"]))
    if result := _RESULT.match(line):
        tensors |= {result[1]}
    made = found["made"]
    if made or found["inner"]:
        name = made or found["inner"]
        only = views.get(name, ())
        if len(only) == len(nodes):
            nodes = tuple(node for node, view in zip(nodes, only, strict=True) if not view)
        return Call(made or "", nodes, tensors, fused=True)
    makes = frozenset(_OUT.findall(found["args"])) | ({result[1]} if result else set())
    name = f"aten::{found['extern'].removeprefix('bias_')}" if found["extern"] else ""
    return Call(name or f"{found['space'] or 'aten'}::{found['operator']}", nodes[-1:], tensors, makes)


def parameters_of(code: Code) -> dict[str, int]:
    """Return which tensors of a graph are inputs of the forward graph, or gradients of such: the place of the input."""
    found = {name: int(m[1]) - 1 for name in code.arguments if (m := _PARAMETER.fullmatch(name))}
    if code.is_backward:
        found |= {name: place for place, name in enumerate(code.returned) if name.startswith("buf")}
    return found


def kept(backward: Code, forward: Code) -> dict[str, str]:
    """Return what the forward graph calls that which it keeps for the backward graph; {}: it is another one's."""
    names = [name for name in backward.arguments if not name.startswith("tangents_")]
    given = forward.returned[-len(names) :] if names else ()
    pairs = dict(zip(names, given, strict=False))
    fits = len(pairs) == len(names) and all(one == name for name, one in pairs.items() if _PARAMETER.fullmatch(name))
    return pairs if fits and backward.is_backward else {}


def _outside_strings(text: str) -> Iterator[str]:
    """Yield the lines of Python, without those of the kernels' own code."""
    inside = False
    for line in text.splitlines():
        if not inside:
            yield line
        if line.count("'''") % 2:
            inside = not inside


def _parts(text: str) -> Iterator[str]:
    """Yield what commas divide, but for those in brackets."""
    depth, begin = 0, 0
    for place, letter in enumerate(text):
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and not depth:
            yield text[begin:place]
            begin = place + 1
    if text[begin:].strip():
        yield text[begin:]


def _first_tensor(text: str) -> str:
    names = [name for name in _TENSOR.findall(text) if name.startswith(("buf", "primals_", "arg"))]
    return names[0] if names else ""


def _split(names: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in names.split(",") if name.strip())


def innermost(paths: Sequence[str]) -> str:
    """Return the innermost module around all of these modules, where one that is around another does not count.

    A kernel that computes a layer norm and the sum before it is the norm's, that of two layers is the model's.
    """
    return around([one for one in paths if not any(one != two and is_inside(two, one) for two in paths)])


def around(paths: Sequence[str]) -> str:
    """Return the innermost module around all of these modules."""
    alike: list[str] = []
    for names in zip(*(path.split(".") for path in paths), strict=False):
        if len(set(names)) > 1:
            break
        alike.append(names[0])
    return ".".join(alike)


def is_inside(path: str, outer: str) -> bool:
    """Return whether a module is inside another one, or is it."""
    return not outer or path == outer or path.startswith(f"{outer}.")
