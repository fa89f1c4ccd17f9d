"""Counts the floating-point operations of one training step, so that the report can show how busy the arithmetic is.

In one step, whose time is not used, every operator passes through a dispatch mode of ours that reads the shapes. It
changes neither arguments nor results, so the step computes the same. A multiplication with its addition counts as two
operations, as in PyTorch's FlopCounterMode. We do not use that class, because it hooks all modules, fails an operator
if its formula fails, and counts too much for the backward pass of a grouped convolution.

The mode also counts the bytes that operators read and write, and the bytes that fused elementwise operators would.
"""

from __future__ import annotations

import math
import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import get_ident
from types import FrameType
from typing import Any

from dlprof.plain import words_of
from dlprof.record.attribution import passed_over, passing
from dlprof.record.calls import Place
from dlprof.record.captured import capture_test
from dlprof.record.model.flows import Call, Flows
from dlprof.record.model.names import Functions, alive, modules_of
from dlprof.record.recorder import Recorder
from dlprof.record.step_clock import BACKWARD, FETCH, OPTIMIZER, PHASES, Step, StepClock

# The tenth training step comes after lazy set-up and the first compilations, and before the default trace window.
_COUNTED_STEP = 9

# Give up after this many steps that did not train (validation) or had no known arithmetic.
_MOST_TRIES = 8

# The most operators that are kept by name; the rest is summed as "others". And the most shapes that are kept.
_MOST_OPERATORS = 10
_MOST_SHAPES = 40

# Prefixes of operators with arithmetic that no formula below covers. They are listed in the facts, and so are operators
# of all namespaces other than PyTorch's.
_UNCOUNTED_NAMES = """
_cdist_forward _cudnn_rnn _efficient_attention_forward _fft _flash_attention_forward _grouped_mm _int_mm _linalg_
_scaled_grouped_mm _sparse_mm _thnn _weight_int linalg_cholesky linalg_householder linalg_inv linalg_lu linalg_qr
miopen_rnn mkldnn_rnn
"""
_UNCOUNTED = tuple(_UNCOUNTED_NAMES.split())
# Operators that read a value on the host, and operators that may copy to another device. Their lines are kept.
_READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero")
_COPIES = ("aten::_to_copy", "aten::copy_")
# Operators of the forward pass and the loss whose lines are kept too, by the kind of call.
_KINDS = {
    "norm": "rsqrt sqrt std var var_mean",
    "loss": "_log_softmax log logsumexp",
    "softmax": "_softmax",
    "one_hot": "scatter scatter_",
    "cat": "cat",
    "embedding": "embedding _embedding_bag",
}
_KIND_OF = {f"aten::{name}": kind for kind, names in _KINDS.items() for name in names.split()}
# The most lines that are counted, and the most that are kept with their most frequent operators.
_MOST_LINES = 400
_KEPT_LINES, _LARGEST_LINES = 40, 20
_MOST_NAMES = 12
# The most sizes of one-hot tensors that are kept.
_MOST_ONE_HOT = 8
# After so many more steps, what is still there and has not been written into stays the same in each.
_LATER = 3
_PLAIN_NAMESPACES = ("aten", "prim", "prims", "profiler", "c10d", "_c10d_functional", "fsdp", "inductor", "symm_mem")


class Flops:
    """Puts the arithmetic of one step into the facts: `flops`, by operator and data type, and by shape with bytes."""

    name = "flops"
    _recorder: Recorder

    def __init__(self) -> None:
        self._option = os.environ.get("DLPROF_FLOPS") or "auto"
        self.facts: dict[str, Any] = {"state": "off" if self._option == "off" else "waiting", "why": "", "step": None}
        self._counts: _Counts | None = None  # what our mode has counted, until it is off the stack
        self._mode: Any = None
        self._counting = False
        self._follows = False  # whether the running module is tracked
        self._thread = 0
        self._tries = 0
        self._flows: Flows | None = None  # of the counted step, until later ones have shown what stays the same

    def start(self, recorder: Recorder) -> None:
        """Add the result to the facts."""
        self._recorder = recorder
        recorder.flops = self.facts

    def step(self, done: Sequence[Step]) -> int | None:
        """Start to count in the step that has just begun, or keep the counts of the step that has ended."""
        recorder, counts = self._recorder, self._counts
        if self._flows is not None and done[-1].number >= self.facts["step"] + _LATER:
            self.facts["flows"], self._flows = self._flows.facts(later=True), None
            recorder.observed.news = True
        if counts is None and self.facts["state"] != "waiting":
            return None if self._flows is None else self.facts["step"] + _LATER + 1
        left = self._leave()
        if counts is not None and self._counting:
            self._counting = False
            self._keep(done[-1], counts)
        if not left:
            # The script has entered a mode of its own since, and ours does nothing until the script's is left.
            recorder.clock.row.profiled = 1
        elif self.facts["state"] == "waiting" and recorder.ended is None and self._is_time():
            self._begin()
        return recorder.clock.row.number + 1

    def stop(self) -> None:
        """Stop counting; an incomplete step is dropped. Also used when recording ends early, and in forked children."""
        self._counting = False
        if get_ident() == self._thread:
            self._leave()
        elif self._counts is not None:
            self._counts.over = True

    def _is_time(self) -> bool:
        clock, window = self._recorder.clock, self._recorder.window
        if not clock.trains:
            return False
        number = clock.position
        skipped = window.get("skip")
        if skipped is None or window.get("state") != "waiting":
            return number >= _COUNTED_STEP
        # Never inside the trace window, which opens sooner if steps are slow. If it opens at once, count after it.
        if window.get("first_step") is not None:
            return False
        return min(skipped - 1, _COUNTED_STEP) <= number < skipped and number > 0

    def _begin(self) -> None:
        import torch

        recorder = self._recorder
        autograd: Any = torch.autograd
        # If a step begins within a phase, the enclosing call may restore the old stack of modes.
        if (
            recorder.clock.phase not in (None, FETCH)
            or autograd._profiler_enabled()
            or torch.is_inference_mode_enabled()
        ):
            return
        why = _obstacle(recorder, untested=self._option == "on")
        if why:
            self._abstain(why)
            return
        self._tries += 1
        self._thread = get_ident()
        self._follows = True
        self._counts = _Counts(recorder.clock, recorder.module_ranges.follow(alive(recorder.observed.models)))
        self._mode = _mode(self._counts)
        recorder.switched_off = self.stop
        recorder.clock.differentiated = self._counts.differentiates
        self._mode.__enter__()
        self._counting = True
        recorder.clock.row.profiled = 1

    def _keep(self, step: Step, counts: _Counts) -> None:
        """Keep the counts of the step that has ended if it was a training step; otherwise try the next one."""
        self._recorder.observed.news = True
        counted = counts.facts()
        if counts.error:
            self._abstain(f"an operator could not be counted: {counts.error}")
        elif step.backwards and counted["total"]:
            self.facts.update(state="counted", step=step.number, **counted)
            self._flows = counts.flows
            self._recorder.module_ranges.flops = dict(counts.modules)
            self._recorder.module_ranges.moved = dict(counts.moved)
        elif self._tries >= _MOST_TRIES:
            self._abstain("no operator of known arithmetic was seen (CUDA graphs and custom kernels show none)")

    def _leave(self) -> bool:
        """Stop our mode, and take it off the stack; return False if that has to wait: below another mode, or within
        `torch.inference_mode()`, whose end puts back what calls our mode, as it was at its begin.
        """
        if self._counts is None:
            return True
        import torch
        from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

        self._recorder.clock.differentiated = None
        if self._follows:
            self._follows = False
            self._recorder.module_ranges.follow_no_more()
        self._counts.over = True
        stack: list[Any] = [*_get_current_dispatch_mode_stack()]
        if torch.is_inference_mode_enabled():
            return False
        if stack and stack[-1] is self._mode:
            self._mode.__exit__(None, None, None)
        elif any(mode is self._mode for mode in stack):
            return False
        self._counts = self._mode = None
        return True

    def _abstain(self, why: str) -> None:
        self.facts.update(state="abstained", why=why)
        self._recorder.observed.news = True
        if self._option == "on":
            self._recorder.warn(f"floating-point operations are not counted: {why}")


# Layers of several products; and the frames in which one is looked for, from the operator outwards.
_LAYERS, _MOST_DEEP = "/torch/nn/modules/transformer.py", 24


def _in_layer() -> bool:
    """Return whether what runs is called by a layer of PyTorch's of several products: no line of the script's can have
    it leave rows out.
    """
    frame: FrameType | None = sys._getframe(2)
    for _ in range(_MOST_DEEP):
        file = "" if frame is None else frame.f_code.co_filename
        if frame is None or file.endswith(_LAYERS) or not ("/torch/" in file or "/dlprof/" in file):
            return file.endswith(_LAYERS)
        frame = frame.f_back
    return False


def _obstacle(recorder: Recorder, untested: bool) -> str:
    """Return why this job must not be counted, or "" if it can be."""
    import torch

    cuda: Any = torch.cuda
    if torch._C._len_torch_dispatch_stack():
        return "the script has a dispatch mode of its own"
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    frames: Mapping[str, int] = getattr(dynamo, "counters", {}).get("frames", {})
    modules = [m for model in alive(recorder.observed.models) for m in modules_of(model)]
    names = {type(m).__name__ for m in modules}
    compiled = any(getattr(m, "_compiled_call_impl", None) is not None for m in modules)
    if any(frames.values()) or "OptimizedModule" in names or compiled:
        return "the script uses torch.compile, and counting would change what is compiled"
    if any(issubclass(type(m), torch.jit.ScriptModule) for m in modules):
        return "the model is TorchScript, and counting would change how it runs"
    if cuda.is_initialized() and cuda.is_current_stream_capturing():
        return "the script captures a CUDA graph"
    if "DeepSpeedEngine" in names and not untested:
        return "not tried with DeepSpeed (--flops on counts all the same)"
    return ""


@dataclass
class _Line:
    """A line of the script: how often it calls each operator, and how many bytes these move."""

    place: Place
    operators: Counter[str]
    moved: Counter[str]


class _Counts:
    """Counts what the operators of a step compute."""

    def __init__(self, clock: StepClock, module: Callable[[], str]) -> None:
        self._clock = clock
        self._functions = Functions(module)
        self.modules: Counter[tuple[str, str]] = Counter()  # FLOPs by module and part of the step
        self.moved: Counter[str] = Counter()  # bytes that operators read and write, by module
        self._traffic = Traffic()
        self.flows: Flows | None = Flows()  # None: it has failed
        self._names: dict[Any, str] = {}
        self._backward = 0
        self._shapes: dict[tuple[str, str, str], list[int]] = {}  # operator, dtype, shapes → calls, FLOPs, bytes
        self._others: Counter[str] = Counter()  # calls of operators without a formula
        self._one_hot: set[tuple[int, int]] = set()  # values and classes of one-hot tensors
        # The script's lines that call operators, by their phase and the last phase before them.
        self._lines: dict[tuple[str, str, Any, int], _Line] = {}
        self._callers: dict[tuple[Any, int], Place] = {}  # of the functions that these lines are in
        self._after = "fetch" if clock.row.fetches else "optimizer"
        self._outputs: dict[int, weakref.ref[Any]] = {}  # that `backward` and `grad` began from
        self._derivatives = [0, 0]  # calls of these, and different outputs
        self.over = False
        self.error = ""

    def differentiates(self, outputs: Any) -> None:
        """Count a call of `backward` or `grad`, and its outputs that no earlier one began from. Never raises."""
        self._derivatives[0] += 1
        for one in outputs if isinstance(outputs, (tuple, list)) else (outputs,):
            known = self._outputs.get(id(one))
            if known is None or known() is not one:
                self._derivatives[1] += 1
                with suppress(TypeError):  # no tensor, and nothing that can be kept so
                    self._outputs[id(one)] = weakref.ref(one)

    def see(self, func: Any, args: Any, given: Mapping[str, Any], out: Any) -> None:
        """Count one call of an operator, `given`: by name. What the script's data set calls is not the model's."""
        phase = self._clock.phase
        if phase == FETCH:
            return
        name = self._names.get(func) or self._names.setdefault(func, func._schema.name)
        if name in _READS:
            self._clock.observed.calls.see("sync")
        elif name in _COPIES and len({t.device for t in (*args, out) if hasattr(t, "device")}) > 1:
            self._clock.observed.calls.see("sync" if out.device.type == "cpu" else "copy")
        elif name in _KIND_OF and phase not in (BACKWARD, OPTIMIZER):
            self._clock.observed.calls.see(_KIND_OF[name])
            if _KIND_OF[name] == "one_hot" and out.dim():
                self._one_hot.add((out.numel(), out.shape[-1]))
        if phase is not None:
            self._after = PHASES[phase]
        line = place = caller = None
        if phase != BACKWARD and not name.startswith("profiler::"):
            line, caller = self._see_line("" if phase is None else PHASES[phase])
        moved = self._traffic.see(func, args, out, optimizer=phase == OPTIMIZER)
        if line is not None:
            place = line.place
            line.operators[name] += 1
            line.moved[name] += moved
        formula = _FORMULAS.get(name)
        tensors = list(tensors_in(args))
        shape = " ".join("x".join(map(str, t.shape)) for t in tensors) if formula is not None else ""
        dtype = str(tensors[0].dtype).replace("torch.", "") if tensors else ""
        flops = 0 if formula is None else formula(args, out)
        if self.flows is not None:
            try:
                moves, elementwise, _, random = self._traffic.kind(func)
                if moves and phase in (BACKWARD, OPTIMIZER):
                    self.flows.wrote(out, tensors if phase == OPTIMIZER else [])
                else:
                    call = Call(name, dtype, shape, flops, moved, place, caller, flops > 0 and _in_layer())
                    named = (*args, given) if given else args
                    random = random and _draws(func, args, given)
                    self.flows.see(call, tensors, named, out, moves=moves, elementwise=elementwise, random=random)
            except Exception:  # noqa: BLE001 - an operator of an unknown form; the arithmetic is counted on
                self.flows = None
        if moved or formula is not None:
            module = self._functions.module()
            self.moved[module[0]] += moved
        if formula is None:
            self._others[name] += 1
            return
        if phase == BACKWARD:
            self._backward += flops
        self.modules[module] += flops
        sums = self._shapes.setdefault((name, dtype, shape), [0, 0, 0])
        sums[0] += 1
        sums[1] += flops
        sums[2] += moved

    def _see_line(self, phase: str) -> tuple[_Line | None, Place | None]:
        """Return the script's line that calls an operator, and what called its function, if there are such."""
        calls = self._clock.observed.calls
        found = calls.line(sys._getframe(2))
        if found is None:
            return None, None
        frame, place = found
        caller = None
        if (above := calls.line(frame.f_back)) is not None:
            line = above[0].f_code, above[0].f_lineno
            caller = self._callers.get(line) or self._callers.setdefault(line, above[1]())
        key = (phase, self._after, frame.f_code, frame.f_lineno)
        if key not in self._lines:
            if len(self._lines) >= _MOST_LINES:
                return None, None
            self._lines[key] = _Line(place(), Counter(), Counter())
        return self._lines[key], caller

    def _of_lines(self) -> list[dict[str, Any]]:
        """Return the entries of facts.json for the lines with the most calls, and for those that move most bytes."""
        lines = self._lines.items()
        busiest = sorted(lines, key=lambda item: -item[1].operators.total())[:_KEPT_LINES]
        largest = sorted(lines, key=lambda item: -item[1].moved.total())[:_LARGEST_LINES]
        return [
            {"phase": phase, "after": after, **line.place.quoted, "calls": line.operators.total()}
            | {"operators": dict(kept := line.operators.most_common(_MOST_NAMES))}
            | {"moved": {name: line.moved[name] for name, _ in kept}}
            for (phase, after, _, _), line in dict([*busiest, *largest]).items()
        ]

    def facts(self) -> dict[str, Any]:
        """Return the step's entries of facts.json."""
        flops: Counter[tuple[str, str]] = Counter()
        calls: Counter[tuple[str, str]] = Counter()
        for (name, dtype, _), (times, count, _) in self._shapes.items():
            calls[name, dtype] += times
            flops[name, dtype] += count
        rest: Counter[str] = Counter()
        for (_, dtype), count in flops.most_common()[_MOST_OPERATORS:]:
            rest[dtype] += count
        return {
            "total": flops.total(),
            "backward": self._backward,
            "operators": [
                {"operator": name, "dtype": dtype, "flops": count, "calls": calls[name, dtype]}
                for (name, dtype), count in flops.most_common(_MOST_OPERATORS)
            ]
            + [{"operator": "others", "dtype": dtype, "flops": n, "calls": None} for dtype, n in rest.items()],
            "shapes": [
                {"operator": name, "dtype": dtype, "shape": shape, "calls": times, "flops": count, "bytes": size}
                for (name, dtype, shape), (times, count, size) in sorted(
                    self._shapes.items(), key=lambda item: -item[1][1]
                )[:_MOST_SHAPES]
            ],
            "lines": self._of_lines(),
            "flows": None if self.flows is None else self.flows.facts(),
            **self._traffic.facts(),
            "derivatives": dict(zip(("calls", "outputs"), self._derivatives, strict=True)),
            "one_hot": [{"values": n, "classes": k} for n, k in sorted(self._one_hot)[:_MOST_ONE_HOT]],
            "uncounted": dict([(n, k) for n, k in self._others.most_common() if _computes(n)][:_MOST_OPERATORS]),
        }


def _computes(name: str) -> bool:
    """Return whether an operator without a formula may have arithmetic that the total lacks."""
    namespace, _, operator = name.partition("::")
    return namespace not in _PLAIN_NAMESPACES or operator.startswith(_UNCOUNTED)


def _mode(counts: _Counts) -> Any:
    """Create a dispatch mode that counts until `counts.over` is set and never makes an operator fail."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    plain: Any = torch.Tensor.__torch_dispatch__

    class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
        # With False, higher-order operators (cond, checkpoint) of a script would fail.
        supports_higher_order_operators = True

        @classmethod
        def is_infra_mode(cls) -> bool:
            # True, as for torch.compile's own modes: otherwise Dynamo would not compile what is called now.
            return True

    is_captured = capture_test()

    @passed_over
    def dispatch(_mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_captured():  # the modes below ours work on tensors of their own kinds
            return func(*args, **(kwargs or {}))
        # A subclass of Tensor (DTensor) does its own work with plain ones, which come by here in their turn.
        for kind in types:
            if kind.__torch_dispatch__ is not plain:
                return NotImplemented
        with passing:
            out = func(*args, **(kwargs or {}))
        if not counts.over:
            try:
                if hasattr(func, "_schema"):
                    counts.see(func, args, kwargs or {}, out)
            except Exception as e:  # noqa: BLE001 - the operator has run; the script goes on
                counts.error = f"{func}: {words_of(e)}"
                counts.over = True
        return out

    # Set from outside: PyTorch wraps a method of the class body such that its first call imports Dynamo for seconds.
    Counting.__torch_dispatch__ = dispatch  # type: ignore[method-assign]
    return Counting()  # type: ignore[no-untyped-call]


def _product(args: Any, out: Any) -> int:
    if str(args[0].layout) != "torch.strided":  # each value that is there times a row
        return int(2 * args[0]._nnz() * out.shape[-1])
    return int(2 * out.numel() * args[0].shape[-1])


def _convolved(x: Any, weight: Any, out: Any, transposed: bool = False) -> int:
    """Count the products for each output value or, if the convolution is transposed, for each input value."""
    return int(2 * (x if transposed else out).numel() * math.prod(weight.shape[1:]))


def _convolution_backward(args: Any, _out: Any) -> int:
    gradient, x, weight = args[:3]
    # The gradients of the input and of the weight cost as much as the forward pass each.
    return (bool(args[10][0]) + bool(args[10][1])) * _convolved(x, weight, gradient, args[7])


def _attention(args: Any, _out: Any) -> int:
    query, key, value = args[:3]
    # The scores and their product with the values, including masked ones.
    return int(2 * math.prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1]))


def _attention_backward(args: Any, _out: Any) -> int:
    query, key, value = args[1:4]
    # The scores once more, then the gradients of queries, keys, scores and values.
    return int(2 * math.prod(query.shape[:-1]) * key.shape[-2] * (3 * query.shape[-1] + 2 * value.shape[-1]))


_FUSED = ("efficient_attention", "flash_attention", "flash_attention_for_cpu", "cudnn_attention")

# What operators compute, from their arguments and results. linear, matmul, conv1d to conv3d and the plain attention
# are seen as such where the script uses inference mode, and as the operators that they consist of elsewhere.
# `flop_registry` of torch.utils.flop_counter would do for mm, bmm, addmm, baddbmm and convolution alone, at 20 to 50 µs
# a call instead of 1 or 2, and importing it takes half a second where Triton is installed and not loaded yet. It lacks
# the inference ones, attention on the CPU, _scaled_mm in torch 2.6 and convolution_overrideable before 2.10, counts a
# grouped convolution's backward pass too high (2.13 still does), and fails on grouped-query attention up to 2.11.
_FORMULAS: Mapping[str, Callable[[Any, Any], int]] = {
    **dict.fromkeys((f"aten::{name}" for name in ("mm", "bmm", "_scaled_mm", "linear", "matmul")), _product),
    **dict.fromkeys(("aten::addmm", "aten::baddbmm"), lambda args, out: _product(args[1:], out)),
    **dict.fromkeys(
        ("aten::convolution", "aten::convolution_overrideable"),
        lambda args, out: _convolved(args[0], args[1], out, args[6]),
    ),
    **{f"aten::conv{n}d": lambda args, out: _convolved(args[0], args[1], out) for n in (1, 2, 3)},
    "aten::convolution_backward": _convolution_backward,
    **{f"aten::_scaled_dot_product_{kind}": _attention for kind in _FUSED},
    **{f"aten::_scaled_dot_product_{kind}_backward": _attention_backward for kind in _FUSED},
    "aten::scaled_dot_product_attention": _attention,
}

_MOST_COUNTED = 60

# Elementwise operators that PyTorch does not tag as such (torch.Tag.pointwise), beside those over lists of tensors.
_FILLS = "copy_ fill_ zero_ ones_like zeros_like full_like"
_UNTAGGED = f"_to_copy native_dropout masked_fill_ leaky_relu_backward mse_loss_backward {_FILLS}".split()

# The argument of which no value is read: it is overwritten, or only its shape matters.
_UNREAD = dict.fromkeys(f"{_FILLS} new_zeros new_ones normal_ uniform_ bernoulli_ random_".split(), 0)
_UNREAD |= {"nll_loss_backward": 1, "max_pool2d_with_indices_backward": 1}


# Of their first argument these use what indices point at: no more bytes than all else has.
_PARTS = "embedding _embedding_bag gather index index_select take nll_loss_forward masked_select"
_PART = f"{_PARTS} index_put_ _index_put_impl_ index_add_ scatter_ scatter_add_".split()
_Sized = list[tuple[Any, int, int]]  # tensors, each with its storage and the bytes of it that count


@dataclass(slots=True)
class _Storage:
    depth: int = 0
    chained: bool = False  # an elementwise operator made it
    unwritten: int = 0  # bytes that nothing has needed in memory so far
    read_at: int = -1  # the depth of the last elementwise operator that read it from memory


class Traffic:
    """The bytes of a step's operators; and of elementwise ones outside the optimizer, what each chain of them needs.

    The depth of a tensor is the number of operators on the longest way to it that are not elementwise. What a chain
    makes at one depth it has in registers; all else it reads once. What it makes is written only where something at
    another depth, or of another kind, reads it. Nothing is computed twice to save a read.
    """

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str, str], list[int]] = {}  # operator, dtype, device → calls, bytes
        self._kinds: dict[Any, tuple[bool, bool, tuple[int, ...], bool]] = {}
        self._storages: dict[int, _Storage] = {}
        self._chained = self._fused = 0

    def see(self, func: Any, args: Any, out: Any, *, optimizer: bool) -> int:
        """Count one call of an operator; return its bytes: 0 of views, and of what only allocates."""
        moves, elementwise, written, _ = self.kind(func)
        if not moves:
            return 0
        name = func._schema.name
        read, changed, made = _parts(name.partition("::")[2], written, args, out)
        touched = [*read, *changed, *made]
        size = sum(n for _, _, n in touched)
        # A scalar may stay on the host. A copy from one device to another is no work of theirs.
        tensors = [t for t, _, _ in touched if t.dim()] or [t for t, _, _ in touched]
        if len({t.device for t in tensors}) == 1:
            key = name, str(tensors[0].dtype).replace("torch.", ""), tensors[0].device.type
            sums = self._sums.setdefault(key, [0, 0])
            sums[0] += 1
            sums[1] += size
            if not optimizer:
                self._chained += size * elementwise
                self._chain(elementwise, read, changed, made)
        return size

    def kind(self, func: Any) -> tuple[bool, bool, tuple[int, ...], bool]:
        """Return whether an operator moves bytes, is elementwise, which arguments it writes, whether it draws."""
        return self._kinds.get(func) or self._kinds.setdefault(func, _kind(func))

    def facts(self) -> dict[str, Any]:
        """Return the operators with most bytes, and the bytes of elementwise ones, as they are and fused."""
        order = sorted(self._sums.items(), key=lambda item: -item[1][1])[:_MOST_COUNTED]
        moved = [{"operator": o, "dtype": t, "device": d, "calls": n, "bytes": size} for (o, t, d), (n, size) in order]
        return {"moved": moved, "chained_bytes": self._chained, "fused_bytes": self._fused}

    def _chain(self, elementwise: bool, read: _Sized, changed: _Sized, made: _Sized) -> None:
        inputs = [(place, n, self._storages.setdefault(place, _Storage())) for _, place, n in (*read, *changed)]
        depth = max((storage.depth for _, _, storage in inputs), default=0)
        for n, (place, size, storage) in enumerate(inputs):
            if elementwise and storage.chained and storage.depth == depth:
                continue
            if n >= len(read):  # it is written in place
                self._fused += size * elementwise
                self._storages[place] = _Storage(depth + (not elementwise), elementwise)
                continue
            self._fused += storage.unwritten + size * (elementwise and storage.read_at != depth)
            storage.unwritten, storage.read_at = 0, depth if elementwise else storage.read_at
        for _, place, size in made:
            self._storages[place] = _Storage(depth + (not elementwise), elementwise, size * elementwise)


def _kind(func: Any) -> tuple[bool, bool, tuple[int, ...], bool]:
    """Return whether an operator moves bytes, is elementwise, which arguments it writes, whether it draws."""
    import torch

    schema = func._schema
    namespace, _, name = schema.name.partition("::")
    views = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    allocates = name.startswith(("empty", "new_empty", "detach", "_unsafe_view"))
    of_lists = name.startswith("_foreach_") and not name.endswith(("norm", "max"))
    written = [n for n, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
    # A fused optimizer may change the gradients, the second of its lists, where it scales the loss; it seldom does.
    written = [n for n in written if n != 1 or not name.startswith("_fused_")]
    elementwise = name in _UNTAGGED or of_lists or torch.Tag.pointwise in func.tags
    draws = torch.Tag.nondeterministic_seeded in func.tags
    return not (views or allocates or namespace == "prim"), elementwise, tuple(written), draws


def _draws(func: Any, args: Any, given: Mapping[str, Any]) -> bool:
    """Return whether an operator that can draw numbers does: an attention without dropout draws none."""
    names = [one.name for one in func._schema.arguments]
    if "dropout_p" not in names:
        return True
    n = names.index("dropout_p")
    return bool(args[n] if n < len(args) else given.get("dropout_p", 0.0))


def _parts(name: str, written: tuple[int, ...], args: Any, out: Any) -> tuple[_Sized, _Sized, _Sized]:
    """Return what an operator reads, what of its arguments it writes, and what it makes, each with its bytes."""
    given = [_sized((arg,)) for arg in args]
    places = {place for of in given for _, place, _ in of}
    read = [one for n, of in enumerate(given) if n != _UNREAD.get(name) for one in of]
    changed = [one for n in written if n < len(given) for one in given[n]]
    made = [one for one in _sized((out,)) if one[1] not in places]
    if name in _PART:
        rest = sum(n for _, _, n in (*read[1:], *made))
        # An operator in place writes where it would have read.
        read[0] = (*read[0][:2], 0 if changed else min(read[0][2], rest))
        changed = [(t, place, min(n, rest)) for t, place, n in changed]
    return read, changed, made


def _sized(values: Iterable[Any]) -> _Sized:
    return [(t, t.untyped_storage()._cdata, _bytes_of(t)) for t in tensors_in(values)]


def tensors_in(values: Iterable[Any]) -> Iterator[Any]:
    """Yield the tensors among values, and in lists and tuples of them; of sparse ones those that they consist of."""
    for value in values:
        if getattr(value, "is_sparse", False):
            yield from (value._indices(), value._values())
        elif (layout := str(getattr(value, "layout", "")).removeprefix("torch.sparse_")) in ("csr", "bsr"):
            yield from (value.crow_indices(), value.col_indices(), value.values())
        elif layout in ("csc", "bsc"):  # as the transpose of the former, of which the backward pass makes a product
            yield from (value.ccol_indices(), value.row_indices(), value.values())
        elif hasattr(value, "untyped_storage"):  # a storage itself has none
            yield value
        elif isinstance(value, (tuple, list)):
            yield from tensors_in(value)


def _bytes_of(tensor: Any) -> int:
    """Return the bytes that a tensor holds; one that is expanded is read from the cache, and counts once."""
    strides = tensor.stride()
    if 0 not in strides:
        return int(tensor.nbytes)
    return int(math.prod(n for n, stride in zip(tensor.shape, strides, strict=True) if stride) * tensor.element_size())
