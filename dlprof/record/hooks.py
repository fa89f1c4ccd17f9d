"""Where the recorder hangs on PyTorch.

The hooks stand on PyTorch itself, and on torchdata's loader, never on the script's objects: on the loaders' iterators,
`nn.Module.__call__`, `torch.autograd.backward` and `grad`, the optimizers' global hooks, and `torch.cuda.CUDAGraph`. So
nothing of ours is in a model that the script pickles, scripts, compiles or copies.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dlprof
from dlprof.record.graphs import Graphs
from dlprof.record.loaders import watch_method
from dlprof.record.recorder import Collector, Recorder, _hidden
from dlprof.record.stepping import BACKWARD


def install(run: str, collectors: Iterable[Callable[[], Collector]]) -> None:
    """Hook into torch, which must be imported, and record into the run folder once this process trains."""
    recorder = Recorder(Path(run), collectors)
    try:
        for method in (*vars(Recorder).values(), *vars(Graphs).values()):
            if hasattr(method, "__code__"):
                _hidden(method, with_callees=True)
        _watch_modules(recorder)
        _watch_autograd(recorder)
        _watch_optimizers(recorder)
        _watch_loaders(recorder)
        _watch_graphs(Graphs(recorder))
    except Exception:
        # A torch that is not as we know it: what hangs on it already must do nothing.
        recorder._switch_off()
        raise
    os.register_at_fork(after_in_child=recorder.forked)
    dlprof._recorder = recorder


def _is_traced() -> Callable[[], bool]:
    """Return what Dynamo reads as True, so that it reads nothing that stands after it, at the least cost to others."""
    import torch

    return getattr(torch.compiler, "is_dynamo_compiling", torch.compiler.is_compiling)


def _watch_modules(recorder: Recorder) -> None:
    import torch

    original: Any = torch.nn.Module.__call__
    compiler: Any = torch.compiler
    is_compiling = compiler.is_compiling
    flagged = hasattr(compiler, "_is_compiling_flag")  # what that function asks: its frames cost more than the answer
    is_traced = _is_traced()
    as_we_know_it = ("_compiled_call_impl", "_call_impl")
    known = getattr(getattr(original, "__code__", None), "co_names", ()) == as_we_know_it

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807 - what it stands for
        if (
            is_traced()
            or recorder.inside
            or (compiler._is_compiling_flag if flagged else is_compiling())
            or not recorder.begin_forward(self)
        ):
            # What the original does, without its frame: a model has hundreds of modules within the outermost.
            if known and self._compiled_call_impl is None:
                return self._call_impl(*args, **kwargs)
            return original(self, *args, **kwargs)
        try:
            if known and self._compiled_call_impl is None:
                return self._call_impl(*args, **kwargs)
            return original(self, *args, **kwargs)
        finally:
            recorder.end()

    torch.nn.Module.__call__ = _hidden(__call__)  # type: ignore[method-assign]


def _watch_autograd(recorder: Recorder) -> None:
    import torch

    is_traced = _is_traced()

    def timed(original: Callable[..., Any]) -> Any:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if is_traced() or not recorder.begin(BACKWARD):
                return original(*args, **kwargs)
            try:
                return original(*args, **kwargs)
            finally:
                recorder.end()

        return _hidden(call)

    torch.autograd.backward = timed(torch.autograd.backward)
    torch.autograd.grad = timed(torch.autograd.grad)


def _watch_optimizers(recorder: Recorder) -> None:
    from torch.amp.grad_scaler import GradScaler
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    is_traced = _is_traced()

    def before(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if not is_traced() and recorder.begin_optimizer(optimizer):
            _watch_exchange(recorder, optimizer)

    def after(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if not is_traced():
            recorder.end_optimizer()

    scale = GradScaler.scale

    @functools.wraps(scale)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_traced() and not recorder.grad_scaler and self.is_enabled():
            recorder.grad_scaler = recorder.news = True
        return scale(self, *args, **kwargs)

    register_optimizer_step_pre_hook(_hidden(before))
    register_optimizer_step_post_hook(_hidden(after))
    GradScaler.scale = _hidden(watched)  # type: ignore[method-assign]


def _watch_exchange(recorder: Recorder, optimizer: Any) -> None:
    """Name what Horovod's optimizer waits for within its step, which no trace of a CPU shows. Its class is its own."""
    kind = type(optimizer)
    waiting = vars(kind).get("synchronize")
    if waiting is None or not str(kind.__module__).startswith("horovod.") or hasattr(waiting, "__wrapped__"):
        return

    def synchronize(self: Any, *args: Any, **kwargs: Any) -> Any:
        opened = recorder.open_range("horovod:all_reduce")
        try:
            return waiting(self, *args, **kwargs)
        finally:
            if opened is not None:
                opened.__exit__(None, None, None)

    try:
        kind.synchronize = _hidden(functools.wraps(waiting)(synchronize))
    except Exception as e:  # noqa: BLE001 - the script's step goes on
        recorder.warn(f"what Horovod exchanges is not named: {type(e).__name__}: {e}")


def _watch_graphs(graphs: Graphs) -> None:
    import torch

    kind: Any = getattr(torch.cuda, "CUDAGraph", None)
    if not all(hasattr(kind, name) for name in ("capture_begin", "capture_end", "replay")):
        return  # the steps of other jobs are marked without it
    beginning, ending, replaying = kind.capture_begin, kind.capture_end, kind.replay
    is_traced = _is_traced()

    @functools.wraps(beginning)
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = beginning(self, *args, **kwargs)
        graphs.begin_capture(self)
        return result

    @functools.wraps(ending)
    def capture_end(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return ending(self, *args, **kwargs)
        finally:
            graphs.end_capture(self)

    @functools.wraps(replaying)
    def replay(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_traced() or not graphs.begin_replay():
            return replaying(self, *args, **kwargs)
        result = replaying(self, *args, **kwargs)
        graphs.end_replay(self)
        return result

    kind.capture_begin, kind.capture_end, kind.replay = _hidden(capture_begin), _hidden(capture_end), _hidden(replay)


def _watch_loaders(recorder: Recorder) -> None:
    from torch.utils.data import dataloader

    following: Any = dataloader._BaseDataLoaderIter.__next__
    making: Any = dataloader._BaseDataLoaderIter.__init__
    nameless = SimpleNamespace(_dlprof_pass=None)  # stands for an iterator that is none of PyTorch's
    dispatching = False

    @functools.wraps(following)
    def __next__(self: Any) -> Any:  # noqa: N807 - what it stands for
        if not recorder.begin_fetch(self, first=not self._num_yielded):
            return dispatched(self) if dispatching and recorder.fetching else following(self)
        try:
            batch = following(self)
        except BaseException as e:
            recorder.end()
            if isinstance(e, StopIteration):
                recorder.end_of_epoch()
            raise
        recorder.end_fetch(self)
        return batch

    def watched(iterating: Any) -> Any:
        @functools.wraps(iterating)
        def __iter__(self: Any) -> Any:  # noqa: N807 - what it stands for
            watch_dispatcher()
            if not recorder.begin_epoch():
                return iterating(self)
            try:
                iterator = iterating(self)
            finally:
                recorder.end()
            recorder.see_iterator(self, iterator)
            return iterator

        return __iter__

    @functools.wraps(making)
    def __init__(self: Any, loader: Any) -> None:  # noqa: N807 - what it stands for
        making(self, loader)
        recorder.see_made(loader, self)

    def dispatched(iterator: Any) -> Any:
        """Fetch one of the batches that accelerate's rank 0 fetches for all, which make one fetch of its own."""
        nonlocal dispatching
        recorder.ask(iterator)
        dispatching = False  # whatever that asks other loaders for is no batch of the script's
        try:
            batch = following(iterator)
        finally:
            dispatching = True
        recorder.got(iterator)
        return batch

    def watch_dispatcher() -> None:
        """Watch accelerate's loader for iterable data: its rank 0 fetches for all, and the others ask no loader."""
        module: Any = sys.modules.get("accelerate.data_loader")
        dispatcher = getattr(module, "DataLoaderDispatcher", None)
        fetching = getattr(dispatcher, "_fetch_batches", None)
        if fetching is None or hasattr(fetching, "__wrapped__"):
            return

        @functools.wraps(fetching)
        def _fetch_batches(self: Any, iterator: Any) -> Any:
            nonlocal dispatching
            known = isinstance(iterator, dataloader._BaseDataLoaderIter)
            if not recorder.begin_fetch(iterator if known else nameless, first=False):
                return fetching(self, iterator)
            dispatching = True
            try:
                fetched = fetching(self, iterator)
            finally:
                dispatching = False
                recorder.end()
            if self._stop_iteration:
                recorder.end_of_epoch()
            return fetched

        dispatcher._fetch_batches = _hidden(_fetch_batches)  # type: ignore[union-attr]

    dataloader._BaseDataLoaderIter._dlprof_pass = None  # type: ignore[attr-defined]
    dataloader._BaseDataLoaderIter.__next__ = __next__  # type: ignore[method-assign]
    watch_method(dataloader.DataLoader, "__iter__", watched)
    setattr(dataloader._BaseDataLoaderIter, "__init__", __init__)  # noqa: B010 - mypy knows it as no variable
