"""Records which modules each graph that Inductor compiles consists of, and writes this next to the trace.

Each node of a Dynamo graph names the module that called it, but Dynamo drops the graph once it is compiled. The
generated code, which may come from a cache, names these nodes again. Nothing of this runs except during compilation,
and once at the end of the trace window.

The generated code is parsed for the kernels that it calls, their order and their purpose. Before each call, a comment
lists the names of its operators in Dynamo's graph ("Source Nodes"). The parameters that are passed to it are called
primals_1, primals_2, ... in the order of the graph's inputs. In a backward graph no name leads to the forward graph.
Its parameters do, and the gradients, which are returned in the same order.
"""

from __future__ import annotations

import functools
import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dlprof.plain import words_of
from dlprof.record import guarded
from dlprof.record.attribution import passing
from dlprof.record.hooks import put
from dlprof.record.model.names import alive, names_of_all
from dlprof.record.recorder import Recorder
from dlprof.record.step_clock import Step

# The most nodes that are recorded of a job, and the most backward graphs that are compiled later.
_MOST_NODES = 100_000
_MOST_LATER = 1_000


@dataclass
class _Graph:
    """One graph of Dynamo's: the ids of the modules of its nodes, by their names, and of its inputs."""

    compilation: str = ""  # Dynamo's id; DistributedDataParallel splits a graph into several with the same id
    nodes: dict[str, int] = field(default_factory=dict)
    inputs: list[int] = field(default_factory=list)  # 0 if not a parameter or buffer
    codes: dict[str, str] = field(default_factory=dict)  # the code that Inductor generated for it, by key


class _Open(threading.local):
    """The graphs that a thread is compiling, the innermost last."""

    def __init__(self) -> None:
        self.graphs: list[_Graph] = []


class Compiled:
    """Writes the log `compiled`: keys as in the table `compiled`."""

    name = "compiled"

    def __init__(self) -> None:
        self._recorder: Recorder | None = None
        self._graphs: list[_Graph] = []
        self._left = _MOST_NODES
        self._open = _Open()
        self._later: list[tuple[str, str, str]] = []  # backward graphs that are compiled when they first run
        self._wraps_results = False
        self._error = ""
        self._wrap()

    def start(self, recorder: Recorder) -> None:
        """Write when the trace window has ended."""
        self._recorder = recorder

    def step(self, done: Sequence[Step]) -> None:  # noqa: ARG002 - a collector's
        """Write once the modules of the trace are known."""
        self._write()

    def stop(self) -> None:
        """Write the rest, and stop recording."""
        try:
            self._write()
        finally:
            self._left = 0
            self._graphs.clear()
            self._later.clear()

    def _write(self) -> None:
        recorder = self._recorder
        if recorder is None or not recorder.window.get("modules"):
            return
        self._recorder = None
        names = {module: path for module, (path, _) in names_of_all(alive(recorder.observed.models)).items()}
        graphs, self._graphs, later, self._later, self._left = self._graphs, [], self._later, [], 0
        if self._error:
            recorder.warn(f"which modules compiled kernels are of is not known: {self._error}")
        rows = [row for graph in graphs for row in _rows(graph, later, names)]
        if rows:
            recorder.log("compiled", "".join(json.dumps(row) + "\n" for row in rows))

    # -- wrappers

    def _wrap(self) -> None:
        import torch

        wrapper: Any = getattr(torch, "_TorchCompileInductorWrapper", None)
        if wrapper is None or os.environ.get("DLPROF_WINDOW") == "off":  # or an unknown version of torch
            return
        original: Callable[..., Any] = wrapper.__call__

        @functools.wraps(original)
        def __call__(compiler: Any, model: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807 - what it stands for
            if not self._begin(model):
                with passing:
                    return original(compiler, model, *args, **kwargs)
            try:
                with passing:
                    return original(compiler, model, *args, **kwargs)
            finally:
                self._open.graphs.pop()

        put(wrapper, "__call__", __call__)

    @guarded
    def _begin(self, model: Any) -> bool:
        """Record the modules of a graph that is about to be compiled; return whether it is recorded."""
        if self._left <= 0:
            return False
        self._wrap_results()
        graph = _Graph(_compilation())
        for node in model.graph.nodes:
            modules = [int(m[0]) for key in node.meta.get("nn_module_stack") or () if (m := re.match(r"\d+", key))]
            if node.op == "placeholder":
                owned = re.search(r"_(?:parameters|buffers)_", node.name)
                graph.inputs.append(modules[-1] if modules and owned else 0)
            elif modules:
                graph.nodes[node.name] = modules[-1]
            self._left -= 1
        self._graphs.append(graph)
        self._open.graphs.append(graph)
        return True

    def _wrap_results(self) -> None:
        """Record what Inductor generates or finds in its cache. Its module is about to be imported anyway."""
        if self._wraps_results:
            return
        self._wraps_results = True
        from torch._inductor.output_code import CompiledFxGraph

        kind: Any = CompiledFxGraph
        original: Callable[..., Any] = kind.post_compile

        @functools.wraps(original)
        def post_compile(made: Any, *args: Any, **kwargs: Any) -> Any:
            with passing:
                result = original(made, *args, **kwargs)
            self._keep_code(made)
            return result

        put(kind, "post_compile", post_compile)

    @guarded
    def _keep_code(self, made: Any) -> None:
        key, text = made._fx_graph_cache_key, str(made.source_code)
        if key and self._open.graphs:
            self._open.graphs[-1].codes[str(key)] = text
        elif key and self._left > 0 and len(self._later) < _MOST_LATER:
            self._later.append((_compilation(), str(key), text))

    def fail(self, error: Exception) -> None:
        """Record no more graphs; the script's model is compiled all the same."""
        self._left, self._error = 0, words_of(error)


def _compilation() -> str:
    from torch._guards import CompileContext

    return str(CompileContext.current_compile_id())


def _rows(graph: _Graph, later: Sequence[tuple[str, str, str]], names: Mapping[int, str]) -> Iterator[dict[str, str]]:
    """Yield the rows of the table `compiled`: the calls of each graph that a trace shows, in their order."""
    codes = {key: read(text) for key, text in graph.codes.items()}
    forwards = [code for code in codes.values() if not code.is_backward]
    forward = forwards[0] if len(forwards) == 1 else None
    if forward is not None:
        ours = ((key, read(text)) for compilation, key, text in later if compilation == graph.compilation)
        codes |= {key: code for key, code in ours if kept(code, forward)}
    for key, code in codes.items():
        modules = _modules(graph, code, forward, names)
        if all(module is None for module in modules):
            continue
        unseen: list[str] = []  # C++ kernels
        for call, module in zip(code.calls, _filled(modules), strict=True):
            if call.operator:
                before = innermost(unseen or [module])
                yield {"graph": key, "operator": call.operator, "module": module, "before": before}
                unseen = []
            else:
                unseen.append(module)
        if unseen:
            yield {"graph": key, "operator": "", "module": innermost(unseen), "before": innermost(unseen)}


def _modules(graph: _Graph, code: Code, forward: Code | None, names: Mapping[int, str]) -> list[str | None]:
    """Return the module of each call; None if it is unknown."""
    inputs = graph.inputs
    owners = {
        name: names[inputs[place]]
        for name, place in parameters_of(code).items()
        if place < len(inputs) and inputs[place] in names
    }
    if forward is not None and len(forward.arguments) != len(inputs):
        owners = {}  # parameters that are several tensors each, or a part of the graph

    def of(call: Call) -> str | None:
        found = [] if code.is_backward else [graph.nodes.get(node, 0) for node in call.nodes]
        paths = [names[one] for one in found if one in names] or [owners[one] for one in call.tensors if one in owners]
        return innermost(paths) if paths else None

    modules = [of(call) for call in code.calls]
    if code.is_backward and forward is not None:
        used = _used_by(forward, _modules(graph, forward, forward, names))
        named = {name: used[given] for name, given in kept(code, forward).items() if given in used}
        for place, call in enumerate(code.calls):
            operands = [named[one] for one in call.tensors if one in named]
            if modules[place] is None and operands and not call.fused:
                modules[place] = around(sorted(set.intersection(*operands) or set.union(*operands)))
    return modules


def _used_by(code: Code, modules: Sequence[str | None]) -> dict[str, set[str]]:
    """Return which modules' operators use each tensor of a forward graph.

    From the forward pass, the gradient of a product needs the operands of the product.
    """
    used: dict[str, set[str]] = {}
    for call, module in zip(code.calls, modules, strict=True):
        if module is not None and not call.fused:
            for name in call.tensors - call.makes:
                used.setdefault(name, set()).add(module)
    return used


def _filled(modules: Sequence[str | None]) -> list[str]:
    """Return the modules of calls; an unknown one is the innermost module around both neighbours."""
    before, after = list(modules), list(modules)
    for place in range(1, len(modules)):
        before[place] = before[place - 1] if before[place] is None else before[place]
        after[-1 - place] = after[-place] if after[-1 - place] is None else after[-1 - place]
    both = zip(before, after, strict=True)
    return [around([one for one in two if one is not None]) for two in both]


# Operators that return a view of the same memory: no kernel is generated for them.
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

    `operator` is its name in a trace, or "" if the profiler does not see it (C++ kernels). `nodes` are the names in
    Dynamo's graph; an operator has only its own. `tensors` are the names of its arguments and results, `makes` those of
    an operator's results. `fused` is whether it is a generated kernel.
    """

    operator: str
    nodes: tuple[str, ...]
    tensors: frozenset[str]
    makes: frozenset[str] = frozenset()
    fused: bool = False


@dataclass(frozen=True)
class Code:
    """A generated graph: the names of its arguments, its calls, and the names of the tensors that it returns."""

    arguments: tuple[str, ...]
    calls: tuple[Call, ...]
    returned: tuple[str, ...]

    @property
    def is_backward(self) -> bool:
        """Whether it computes gradients."""
        return any(name.startswith("tangents_") for name in self.arguments)


def read(text: str) -> Code:
    """Parse a generated graph; the result has no calls if the format is unknown."""
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
    """Return the tensors that are inputs of the forward graph or gradients of inputs, with the index of the input."""
    found = {name: int(m[1]) - 1 for name in code.arguments if (m := _PARAMETER.fullmatch(name))}
    if code.is_backward:
        found |= {name: place for place, name in enumerate(code.returned) if name.startswith("buf")}
    return found


def kept(backward: Code, forward: Code) -> dict[str, str]:
    """Return the forward graph's names of the tensors that it keeps for a backward graph; {} if they do not fit."""
    names = [name for name in backward.arguments if not name.startswith("tangents_")]
    given = forward.returned[-len(names) :] if names else ()
    pairs = dict(zip(names, given, strict=False))
    fits = len(pairs) == len(names) and all(one == name for name, one in pairs.items() if _PARAMETER.fullmatch(name))
    return pairs if fits and backward.is_backward else {}


def _outside_strings(text: str) -> Iterator[str]:
    """Yield the lines of Python without those of the kernels' code."""
    inside = False
    for line in text.splitlines():
        if not inside:
            yield line
        if line.count("'''") % 2:
            inside = not inside


def _parts(text: str) -> Iterator[str]:
    """Split at the commas outside brackets."""
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
    """Return the innermost module around all of these modules, ignoring modules that are around another of them.

    A kernel for a layer norm and the sum before it belongs to the norm; a kernel for two layers belongs to the model.
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
    """Return whether a module is another one or inside it."""
    return not outer or path == outer or path.startswith(f"{outer}.")
