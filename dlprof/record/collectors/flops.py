"""Counts the floating-point operations of one training step, so that the report can show how busy the arithmetic is.

For one step, whose times count for nothing, every operator passes through a dispatch mode of ours that looks at the
shapes. It changes neither arguments nor results, so the step computes what it would have computed. A multiplication
with its addition is two operations, as for PyTorch's FlopCounterMode; that class itself hooks all modules, fails an
operator whose formula fails, and counts a grouped convolution's backward pass too high.
"""

from __future__ import annotations

import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from threading import get_ident
from typing import Any

from dlprof.plain import words_of
from dlprof.record.calls.attribution import passed_over, passing
from dlprof.record.calls.frames import Place
from dlprof.record.captured import capture_test
from dlprof.record.device.traffic import Traffic, tensors_in
from dlprof.record.model.functions import Functions
from dlprof.record.model.names import modules_of
from dlprof.record.recorder import Recorder
from dlprof.record.step_clock import StepClock
from dlprof.record.stepping import BACKWARD, FETCH, OPTIMIZER, PHASES, Step

# The tenth step of training is past lazy set-up and the first compilations, and before the default trace window.
_COUNTED_STEP = 9

# Steps that turned out not to train (validation), or held no arithmetic that is known, before it is given up.
_MOST_TRIES = 8

# What is kept by name; the rest is summed up as "others". And so many of the shapes that operators met.
_MOST_OPERATORS = 10
_MOST_SHAPES = 40

# Operators with arithmetic of their own that no formula below covers, by how their names begin. They are listed, as
# are those of all namespaces but PyTorch's.
_UNCOUNTED_NAMES = """
_cdist_forward _cudnn_rnn _efficient_attention_forward _fft _flash_attention_forward _grouped_mm _int_mm _linalg_
_scaled_grouped_mm _sparse_mm _thnn _weight_int linalg_cholesky linalg_householder linalg_inv linalg_lu linalg_qr
miopen_rnn mkldnn_rnn
"""
_UNCOUNTED = tuple(_UNCOUNTED_NAMES.split())
# Operators that read a value for the host, and that copy, maybe to another device: their lines are kept.
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
# So many lines are counted, and so many kept with their most frequent operators.
_MOST_LINES = 400
_KEPT_LINES = 40
_MOST_NAMES = 6
# So many sizes of one-hot tensors are kept.
_MOST_ONE_HOT = 8
_PLAIN_NAMESPACES = ("aten", "prim", "prims", "profiler", "c10d", "_c10d_functional", "fsdp", "inductor", "symm_mem")


class Flops:
    """Leaves in the facts what one step computes: `flops`, by operator and data type, and by shape with bytes."""

    name = "flops"
    _recorder: Recorder

    def __init__(self) -> None:
        self._asked = os.environ.get("DLPROF_FLOPS") or "auto"
        self.facts: dict[str, Any] = {"state": "off" if self._asked == "off" else "waiting", "why": "", "step": None}
        self._counts: _Counts | None = None  # what our mode has counted, until that is off the stack
        self._mode: Any = None
        self._counting = False
        self._follows = False  # modules, of which the operators are
        self._thread = 0
        self._tries = 0

    def start(self, recorder: Recorder) -> None:
        """Have the facts show what became of it."""
        self._recorder = recorder
        recorder.flops = self.facts

    def step(self, done: Sequence[Step]) -> int | None:
        """Begin to count with the step that has just begun, or keep what was counted in the step that has ended."""
        recorder, counts = self._recorder, self._counts
        if counts is None and self.facts["state"] != "waiting":
            return None
        left = self._leave()
        if counts is not None and self._counting:
            self._counting = False
            self._keep(done[-1], counts)
        if not left:
            # Our mode lies below one that the script has entered meanwhile, and does nothing until that is left.
            recorder.clock.row.profiled = 1
        elif self.facts["state"] == "waiting" and recorder.ended is None and self._is_time():
            self._begin()
        return recorder.clock.row.number + 1

    def stop(self) -> None:
        """Stop counting; half a step is none. Also when recording is switched off, and in a fork's child."""
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
        # Never inside the window, which opens sooner where steps are slow. One that opens at once is waited for.
        if window.get("first_step") is not None:
            return False
        return min(skipped - 1, _COUNTED_STEP) <= number < skipped and number > 0

    def _begin(self) -> None:
        import torch

        recorder = self._recorder
        autograd: Any = torch.autograd
        # A step that begins within a phase does so inside of a call that may put the old stack of modes back.
        if recorder.clock.phase not in (None, FETCH) or autograd._profiler_enabled():
            return
        why = _obstacle(recorder, untested=self._asked == "on")
        if why:
            self._abstain(why)
            return
        self._tries += 1
        self._thread = get_ident()
        self._follows = True
        models = [model for ref in recorder.observed.models if (model := ref()) is not None]
        self._counts = _Counts(recorder.clock, recorder.module_ranges.follow(models))
        self._mode = _mode(self._counts)
        recorder.switched_off = self.stop
        self._mode.__enter__()
        self._counting = True
        recorder.clock.row.profiled = 1

    def _keep(self, step: Step, counts: _Counts) -> None:
        """Keep what was counted in the step that has ended, if that was training; else the next one is tried."""
        self._recorder.observed.news = True
        counted = counts.facts()
        if counts.error:
            self._abstain(f"an operator could not be counted: {counts.error}")
        elif step.backwards and counted["total"]:
            self.facts.update(state="counted", step=step.number, **counted)
            self._recorder.module_ranges.flops = dict(counts.modules)
            self._recorder.module_ranges.moved = dict(counts.moved)
        elif self._tries >= _MOST_TRIES:
            self._abstain("no operator of known arithmetic was seen (CUDA graphs and custom kernels show none)")

    def _leave(self) -> bool:
        """Stop our mode, if there is one, and take it off the stack if it is on top; False: it lies below another."""
        if self._counts is None:
            return True
        from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

        if self._follows:
            self._follows = False
            self._recorder.module_ranges.follow_no_more()
        self._counts.over = True
        stack: list[Any] = [*_get_current_dispatch_mode_stack()]
        if stack and stack[-1] is self._mode:
            self._mode.__exit__(None, None, None)
        elif any(mode is self._mode for mode in stack):
            return False
        self._counts = self._mode = None
        return True

    def _abstain(self, why: str) -> None:
        self.facts.update(state="abstained", why=why)
        self._recorder.observed.news = True
        if self._asked == "on":
            self._recorder.warn(f"floating-point operations are not counted: {why}")


def _obstacle(recorder: Recorder, untested: bool) -> str:
    """Return why this job must not be counted; "": nothing is in the way."""
    import torch

    cuda: Any = torch.cuda
    if torch._C._len_torch_dispatch_stack():
        return "the script has a dispatch mode of its own"
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    frames: Mapping[str, int] = getattr(dynamo, "counters", {}).get("frames", {})
    modules = [m for ref in recorder.observed.models if (model := ref()) is not None for m in modules_of(model)]
    names = {type(m).__name__ for m in modules}
    compiled = any(getattr(m, "_compiled_call_impl", None) is not None for m in modules)
    if any(frames.values()) or "OptimizedModule" in names or compiled:
        return "the script uses torch.compile, and counting would change what is compiled"
    if any(issubclass(type(m), torch.jit.ScriptModule) for m in modules):
        return "the model is TorchScript, and counting would change how it runs"
    if cuda.is_initialized() and cuda.is_current_stream_capturing():
        return "the script captures a CUDA graph"
    for name, library in (("FullyShardedDataParallel",) * 2, ("DeepSpeedEngine", "DeepSpeed")):
        if name in names and not untested:
            return f"not tried with {library} (--flops on counts all the same)"
    return ""


class _Counts:
    """What the operators of a step compute."""

    def __init__(self, clock: StepClock, module: Callable[[], str]) -> None:
        self._clock = clock
        self._functions = Functions(module)
        self.modules: Counter[tuple[str, str]] = Counter()  # FLOPs by module and part of the step
        self.moved: Counter[str] = Counter()  # bytes that operators read and write, by module
        self._traffic = Traffic()
        self._names: dict[Any, str] = {}
        self._backward = 0
        self._shapes: dict[tuple[str, str, str], list[int]] = {}  # operator, dtype, shapes → calls, FLOPs, bytes
        self._others: Counter[str] = Counter()  # calls of operators without a formula
        self._one_hot: set[tuple[int, int]] = set()  # values and classes of what was scattered into
        # The script's lines that call operators, by the phase that they are in or that ended last before them.
        self._lines: dict[tuple[str, str, Any, int], Counter[str]] = {}
        self._places: dict[tuple[str, str, Any, int], Place] = {}
        self._after = "fetch" if clock.row.fetches else "optimizer"
        self.over = False
        self.error = ""

    def see(self, func: Any, args: Any, out: Any) -> None:
        """Count one call of an operator, but for those of the script's own data set, which are not the model's."""
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
        if phase != BACKWARD and not name.startswith("profiler::"):
            self._see_line("" if phase is None else PHASES[phase], name)
        moved = self._traffic.see(func, args, out, optimizer=phase == OPTIMIZER)
        formula = _FORMULAS.get(name)
        if moved or formula is not None:
            module = self._functions.module()
            self.moved[module[0]] += moved
        if formula is None:
            self._others[name] += 1
            return
        tensors = list(tensors_in(args))
        dtype = str(tensors[0].dtype).replace("torch.", "")
        flops = formula(args, out)
        if phase == BACKWARD:
            self._backward += flops
        self.modules[module] += flops
        shape = " ".join("x".join(map(str, t.shape)) for t in tensors)
        sums = self._shapes.setdefault((name, dtype, shape), [0, 0, 0])
        sums[0] += 1
        sums[1] += flops
        sums[2] += moved

    def _see_line(self, phase: str, name: str) -> None:
        """Count a call of an operator for the script's line that it comes from."""
        found = self._clock.observed.calls.line(sys._getframe(2))
        if found is None:
            return
        frame, place = found
        key = (phase, self._after, frame.f_code, frame.f_lineno)
        if key not in self._lines:
            if len(self._lines) >= _MOST_LINES:
                return
            self._places[key] = place()
        self._lines.setdefault(key, Counter())[name] += 1

    def _of_lines(self) -> list[dict[str, Any]]:
        """Return the lines with the most calls, as the facts have them."""
        busiest = sorted(self._lines.items(), key=lambda item: -item[1].total())[:_KEPT_LINES]
        return [
            {
                "phase": phase,
                "after": after,
                **{
                    name: getattr(self._places[phase, after, code, line], name)
                    for name in ("file", "line", "function", "source")
                },
                "calls": calls.total(),
                "operators": dict(calls.most_common(_MOST_NAMES)),
            }
            for (phase, after, code, line), calls in busiest
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
            **self._traffic.facts(),
            "one_hot": [{"values": n, "classes": k} for n, k in sorted(self._one_hot)[:_MOST_ONE_HOT]],
            "uncounted": dict([(n, k) for n, k in self._others.most_common() if _computes(n)][:_MOST_OPERATORS]),
        }


def _computes(name: str) -> bool:
    """Return whether an operator without a formula may have arithmetic that is missing in the total."""
    namespace, _, operator = name.partition("::")
    return namespace not in _PLAIN_NAMESPACES or operator.startswith(_UNCOUNTED)


def _mode(counts: _Counts) -> Any:
    """Make a dispatch mode that counts until `counts.over` is set, and that never fails an operator."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    plain: Any = torch.Tensor.__torch_dispatch__

    class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
        # False would fail the higher-order operators (cond, checkpoint) of a script.
        supports_higher_order_operators = True

        @classmethod
        def is_infra_mode(cls) -> bool:
            # True, as of what torch.compile enters itself: else Dynamo would leave what is called now uncompiled.
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
                    counts.see(func, args, out)
            except Exception as e:  # noqa: BLE001 - the operator has run; the script goes on
                counts.error = f"{func}: {words_of(e)}"
                counts.over = True
        return out

    # Set from outside: what a class brings along is wrapped so that its first call imports Dynamo, a matter of seconds.
    Counting.__torch_dispatch__ = dispatch  # type: ignore[method-assign]
    return Counting()  # type: ignore[no-untyped-call]


def _product(args: Any, out: Any) -> int:
    return int(2 * out.numel() * args[0].shape[-1])


def _convolved(x: Any, weight: Any, out: Any, transposed: bool = False) -> int:
    """Count what each value of the output sums up, of a transposed one what each value of the input goes into."""
    return int(2 * (x if transposed else out).numel() * math.prod(weight.shape[1:]))


def _convolution_backward(args: Any, _out: Any) -> int:
    gradient, x, weight = args[:3]
    # The gradients of the input and of the weight cost as much as the forward pass each.
    return (bool(args[10][0]) + bool(args[10][1])) * _convolved(x, weight, gradient, args[7])


def _attention(args: Any, _out: Any) -> int:
    query, key, value = args[:3]
    # Scores and their product with the values, the masked ones too.
    return int(2 * math.prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1]))


def _attention_backward(args: Any, _out: Any) -> int:
    query, key, value = args[1:4]
    # The scores again, then the gradients of queries, keys, scores and values.
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
