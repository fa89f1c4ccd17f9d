"""Counts the floating-point operations of one training step, so that the report can tell how busy the arithmetic is.

For one step, whose times count for nothing, every operator passes through a dispatch mode of ours that looks at the
shapes. It hands on what it was given and gives back what it got, so the step computes what it would have computed. Two
floating-point operations a multiplication, as FlopCounterMode of PyTorch counts them; that class itself hangs hooks on
all modules, fails an operator whose formula fails, and counts a grouped convolution's backward pass too high.
"""

from __future__ import annotations

import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from threading import get_ident
from typing import Any

from dlprof.record.recorder import Recorder
from dlprof.record.stepping import BACKWARD, FETCH, Step

# The tenth step of training is past lazy set-up and the first compilations, and before the default trace window.
_COUNTED_STEP = 9

# Steps that turned out not to train (validation), or held no arithmetic that is known, before it is given up.
_MOST_TRIES = 8

# What is kept by name; the rest is summed up as "others". And so many of the shapes that operators met.
_MOST_OPERATORS = 10
_MOST_SHAPES = 40

# Operators with arithmetic of their own that no formula below covers, and libraries' own operators, are told by name.
_UNCOUNTED = (
    "_cdist_forward",
    "_cudnn_rnn",
    "_efficient_attention_forward",
    "_fft",
    "_flash_attention_forward",
    "_grouped_mm",
    "_int_mm",
    "_scaled_grouped_mm",
    "_sparse_mm",
    "_thnn",
    "_weight_int",
    "_linalg_",
    "linalg_cholesky",
    "linalg_householder",
    "linalg_inv",
    "linalg_lu",
    "linalg_qr",
    "mkldnn_rnn_layer",
    "miopen_rnn",
)
_PLAIN_NAMESPACES = ("aten", "prim", "prims", "profiler", "c10d", "_c10d_functional", "fsdp", "inductor", "symm_mem")


class Flops:
    """Leaves in the facts what one step computes: `flops`, by operator and data type, and by shape with bytes."""

    name = "flops"

    def __init__(self) -> None:
        self._asked = os.environ.get("DLPROF_FLOPS") or "auto"
        self.said: dict[str, Any] = {"state": "off" if self._asked == "off" else "waiting", "why": "", "step": None}
        self._recorder: Recorder | None = None
        self._mode: Any = None  # on the stack of the training thread's dispatch modes
        self._counting = False
        self._thread = 0
        self._tries = 0

    def start(self, recorder: Recorder) -> None:
        """Let the facts tell what became of it."""
        self._recorder = recorder
        recorder.flops = self.said

    def step(self, done: Sequence[Step]) -> int | None:
        """Begin to count with the step that has just begun, or take what the step that has ended was counted to do."""
        recorder = self._recorder
        if recorder is None or (self._mode is None and self.said["state"] != "waiting"):
            return None
        mode, left = self._mode, self._leave()
        if self._counting:
            self._counting = False
            self._take(recorder, done[-1], mode)
        if not left:
            # Our mode lies below one that the script has entered meanwhile, and does nothing until that is left.
            recorder.clock.row.profiled = 1
        elif self.said["state"] == "waiting" and recorder.ended is None and self._is_time(recorder):
            self._begin(recorder)
        return recorder.clock.row.number + 1

    def stop(self) -> None:
        """Stop counting; half a step is none. Also when recording is switched off, and in a fork's child."""
        self._counting = False
        if get_ident() == self._thread:
            self._leave()
        elif self._mode is not None:
            self._mode.over = True

    def _is_time(self, recorder: Recorder) -> bool:
        number = recorder.clock.position
        window = recorder.window
        skipped = window.get("skip")
        if skipped is None or window.get("state") != "waiting":
            return number >= _COUNTED_STEP
        # Never inside the window. One that opens at once is waited for.
        return min(skipped - 1, _COUNTED_STEP) <= number < skipped and number > 0

    def _begin(self, recorder: Recorder) -> None:
        import torch

        autograd: Any = torch.autograd
        # A step that begins within a phase does so inside of a call that may put the old stack of modes back.
        if recorder.clock.phase not in (None, FETCH) or autograd._profiler_enabled():
            return
        why = _obstacle(recorder, untested=self._asked == "on")
        if why:
            self._abstain(recorder, why)
            return
        self._tries += 1
        self._thread = get_ident()
        self._mode = _mode(recorder)
        recorder.switched_off = self.stop
        self._mode.__enter__()
        self._counting = True
        recorder.clock.row.profiled = 1

    def _take(self, recorder: Recorder, step: Step, mode: Any) -> None:
        """Keep what the step that has ended was counted to do, if that was training; else the next one is tried."""
        recorder.observed.news = True
        total = sum(mode.flops.values())
        if mode.error:
            self._abstain(recorder, f"an operator could not be counted: {mode.error}")
        elif step.backwards and total:
            self.said.update(state="counted", step=step.number, total=total, **mode.told())
        elif self._tries >= _MOST_TRIES:
            self._abstain(
                recorder, "no operator of known arithmetic was seen (CUDA graphs and kernels of one's own show none)"
            )

    def _leave(self) -> bool:
        """Stop our mode, if there is one, and take it off the stack if it is on top; False: it lies below another."""
        if self._mode is None:
            return True
        from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

        mode = self._mode
        mode.over = True
        stack: list[Any] = [*_get_current_dispatch_mode_stack()]
        if stack and stack[-1] is mode:
            stack[-1].__exit__(None, None, None)
        elif any(m is mode for m in stack):
            return False
        self._mode = None
        return True

    def _abstain(self, recorder: Recorder, why: str) -> None:
        self.said.update(state="abstained", why=why)
        recorder.observed.news = True
        if self._asked == "on":
            recorder.warn(f"floating-point operations are not counted: {why}")


def _obstacle(recorder: Recorder, untested: bool) -> str:
    """Return why this job must not be counted; "": nothing is in the way."""
    import torch

    cuda: Any = torch.cuda
    if torch._C._len_torch_dispatch_stack():
        return "the script has a dispatch mode of its own"
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    frames: Mapping[str, int] = getattr(dynamo, "counters", {}).get("frames", {})
    modules = [m for ref in recorder.observed.models if (model := ref()) is not None for m in model.modules()]
    names = {type(m).__name__ for m in modules}
    if any(frames.values()) or "OptimizedModule" in names or any(_compiled(m) for m in modules):
        return "the script uses torch.compile, and counting would change what is compiled"
    if any(isinstance(m, torch.jit.ScriptModule) for m in modules):
        return "the model is TorchScript, and counting would change how it runs"
    if cuda.is_initialized() and cuda.is_current_stream_capturing():
        return "the script captures a CUDA graph"
    if not untested:
        if "FullyShardedDataParallel" in names:
            return "not tried with FullyShardedDataParallel (--flops on counts all the same)"
        if "DeepSpeedEngine" in names:
            return "not tried with DeepSpeed (--flops on counts all the same)"
    return ""


def _compiled(module: Any) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None


def _mode(recorder: Recorder) -> Any:
    """Make a dispatch mode that counts until its `over` is set, and that never fails an operator."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    plain: Any = torch.Tensor.__torch_dispatch__

    class Counting(TorchDispatchMode):
        # False would fail the higher-order operators (cond, checkpoint) of a script.
        supports_higher_order_operators = True

        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.over = False
            self.error = ""
            self.flops: Counter[tuple[str, str, bool]] = Counter()  # by operator, dtype, and whether in backward
            self.calls: Counter[tuple[str, str]] = Counter()
            self.shapes: dict[tuple[str, str, str], list[int]] = {}  # → calls, FLOPs, bytes
            self.uncounted: Counter[str] = Counter()
            self.known: dict[Any, tuple[str, Callable[[Any, Any], int] | None]] = {}

        def see(self, func: Any, args: Any, out: Any) -> None:
            if func not in self.known:
                name = func._schema.name
                self.known[func] = (name, _FORMULAS.get(name))
                namespace, _, operator = name.partition("::")
                if namespace not in _PLAIN_NAMESPACES or operator.startswith(_UNCOUNTED):
                    self.uncounted[name] = 0
            name, formula = self.known[func]
            # What the script's own data set computes is not the model's.
            if recorder.clock.phase == FETCH:
                return
            if formula is not None:
                dtype = str(next(a for a in args if hasattr(a, "dtype")).dtype).replace("torch.", "")
                flops = formula(args, out)
                self.flops[name, dtype, recorder.clock.phase == BACKWARD] += flops
                self.calls[name, dtype] += 1
                tensors = [t for t in args if hasattr(t, "element_size")]
                shape = " ".join("x".join(map(str, t.shape)) for t in tensors)
                met = self.shapes.setdefault((name, dtype, shape), [0, 0, 0])
                met[0] += 1
                met[1] += flops
                given = [t for t in (out if isinstance(out, (tuple, list)) else (out,)) if hasattr(t, "element_size")]
                met[2] += sum(t.numel() * t.element_size() for t in (*tensors, *given))
            elif name in self.uncounted:
                self.uncounted[name] += 1

        def told(self) -> dict[str, Any]:
            merged: Counter[tuple[str, str]] = Counter()
            for (name, dtype, _), flops in self.flops.items():
                merged[name, dtype] += flops
            rows: list[dict[str, Any]] = [
                {"operator": name, "dtype": dtype, "flops": flops, "calls": self.calls[name, dtype]}
                for (name, dtype), flops in merged.most_common()
            ]
            rest: Counter[str] = Counter()
            for row in rows[_MOST_OPERATORS:]:
                rest[row["dtype"]] += row["flops"]
            others = [{"operator": "others", "dtype": d, "flops": n, "calls": None} for d, n in rest.items()]
            return {
                "backward": sum(flops for (_, _, backward), flops in self.flops.items() if backward),
                "operators": rows[:_MOST_OPERATORS] + others,
                "shapes": [
                    {"operator": o, "dtype": d, "shape": text, "calls": calls, "flops": flops, "bytes": size}
                    for (o, d, text), (calls, flops, size) in sorted(self.shapes.items(), key=lambda s: -s[1][1])
                ][:_MOST_SHAPES],
                "uncounted": {name: n for name, n in self.uncounted.most_common(_MOST_OPERATORS) if n},
            }

    def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A subclass of Tensor (DTensor) does its own work with plain ones, which come by here in their turn.
        for kind in types:
            if kind.__torch_dispatch__ is not plain:
                return NotImplemented
        out = func(*args, **(kwargs or {}))
        if not self.over:
            try:
                if hasattr(func, "_schema"):
                    self.see(func, args, out)
            except Exception as e:  # noqa: BLE001 - the operator has run; the script goes on
                self.error = f"{func}: {type(e).__name__}: {e}"
                self.over = True
        return out

    # Set from outside: what a class brings along is wrapped so that its first call imports Dynamo, a matter of seconds.
    Counting.__torch_dispatch__ = dispatch  # type: ignore[method-assign]
    return Counting()


def _product(args: Any, out: Any) -> int:
    return int(2 * out.numel() * args[0].shape[-1])


def _product_added(args: Any, out: Any) -> int:
    return int(2 * out.numel() * args[1].shape[-1])


def _convolved(x: Any, weight: Any, out: Any, transposed: bool) -> int:
    """Count what each value of the output sums up, of a transposed one what each value of the input goes into."""
    return int(2 * (x if transposed else out).numel() * math.prod(weight.shape[1:]))


def _convolution(args: Any, out: Any) -> int:
    return _convolved(args[0], args[1], out, bool(args[6]))


def _convolution_whole(args: Any, out: Any) -> int:
    return _convolved(args[0], args[1], out, False)


def _convolution_backward(args: Any, _out: Any) -> int:
    gradient, x, weight = args[:3]
    # The gradients of the input and of the weight cost as much as the forward pass each.
    return (bool(args[10][0]) + bool(args[10][1])) * _convolved(x, weight, gradient, bool(args[7]))


def _attention(args: Any, _out: Any) -> int:
    query, key, value = args[:3]
    # Scores and their product with the values, the masked ones too.
    return int(2 * math.prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1]))


def _attention_backward(args: Any, _out: Any) -> int:
    query, key, value = args[1:4]
    # The scores again, then the gradients of queries, keys, scores and values.
    return int(2 * math.prod(query.shape[:-1]) * key.shape[-2] * (3 * query.shape[-1] + 2 * value.shape[-1]))


_FUSED = ("efficient_attention", "flash_attention", "flash_attention_for_cpu", "cudnn_attention")

# What operators compute, from their arguments and what they gave. Those of the second block come by whole where the
# script uses inference mode, and as the others elsewhere.
# `flop_registry` of torch.utils.flop_counter would do for mm, bmm, addmm, baddbmm and convolution alone, at 20 to 50 µs
# a call instead of 1 or 2, and importing it takes half a second where Triton is installed and not loaded yet. It lacks
# the second block, attention on the CPU, _scaled_mm in torch 2.6 and convolution_overrideable before 2.10, counts a
# grouped convolution's backward pass too high (2.13 still does), and fails on grouped-query attention up to 2.11.
_FORMULAS: Mapping[str, Callable[[Any, Any], int]] = {
    "aten::mm": _product,
    "aten::bmm": _product,
    "aten::_scaled_mm": _product,
    "aten::addmm": _product_added,
    "aten::baddbmm": _product_added,
    "aten::convolution": _convolution,
    "aten::convolution_overrideable": _convolution,
    "aten::convolution_backward": _convolution_backward,
    **{f"aten::_scaled_dot_product_{kind}": _attention for kind in _FUSED},
    **{f"aten::_scaled_dot_product_{kind}_backward": _attention_backward for kind in _FUSED},
    "aten::linear": _product,
    "aten::matmul": _product,
    "aten::conv1d": _convolution_whole,
    "aten::conv2d": _convolution_whole,
    "aten::conv3d": _convolution_whole,
    "aten::scaled_dot_product_attention": _attention,
}
