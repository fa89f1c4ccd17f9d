"""What is changed in PyTorch while a process is recorded, and how it is undone.

The hooks stand on PyTorch itself, and on torchdata's loader, never on the script's objects: on the loaders' iterators,
`nn.Module.__call__`, `torch.autograd.backward` and `grad`, the optimizers' global hooks, and `torch.cuda.CUDAGraph`. So
nothing of ours is in a model that the script pickles, scripts, compiles or copies. Collectors put their own wrappers in
place with `put`, too. The rules for a wrapper are in dlprof/record/__init__.py.

Also hooks that see where the script makes its loaders, wrappers and optimizers, and what it calls.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dlprof import marks, redaction
from dlprof.plain import words_of
from dlprof.record import signals
from dlprof.record.attribution import in_place_of, passed, passed_over, passing
from dlprof.record.calls import Calls, Files, Frames
from dlprof.record.captured import capture_test
from dlprof.record.device.gpu import Graphs
from dlprof.record.loaders import forget_passes
from dlprof.record.model.ranges import Ranges
from dlprof.record.observed import Observed
from dlprof.record.recorder import Collector, Recorder
from dlprof.record.step_clock import Phases, StepClock

_ABSENT = object()  # the attribute was inherited: undone by deleting ours


class Patch:
    """A wrapper of ours in the place of an attribute of torch's."""

    def __init__(self, owner: Any, name: str, wrapper: Any) -> None:
        self._owner = owner
        self._name = name
        self._wrapper = wrapper
        self._original = vars(owner).get(name, _ABSENT)
        setattr(owner, name, wrapper)

    def undo(self) -> bool:
        """Put the original back; False: ours is no longer there, or it was wrapped since."""
        if vars(self._owner).get(self._name, _ABSENT) is not self._wrapper:
            return False
        if self._original is _ABSENT:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._original)
        return True


_undo: list[Callable[[], object]] = []  # what takes each change of this process back, in the order of the changes


def put(owner: Any, name: str, wrapper: Any) -> Patch:
    """Put a wrapper in the place of an attribute of a module or a class, until `uninstall`.

    A wrapper must call the original from its own frame: then warnings name the same lines as without it.
    """
    return _replace(owner, name, passed_over(wrapper))


def _replace(owner: Any, name: str, wrapper: Any) -> Patch:
    _undo.append((patch := Patch(owner, name, wrapper)).undo)
    return patch


def at_uninstall(undo: Callable[[], object]) -> None:
    """Have `uninstall` call what takes a change of another kind back."""
    _undo.append(undo)


def install(run: str, collectors: Iterable[Callable[[], Collector]], cores: Iterable[int] | None = None) -> None:
    """Hook into torch, which must be imported, and record into the run folder once this process trains.

    `cores`: those that the process could use when it started; None: not known.
    """
    import torch

    recorder = Recorder(Path(run), collectors)
    recorder.cores = None if cores is None else frozenset(cores)
    try:
        for part in (Recorder, StepClock, Phases, Observed, Calls, Files, Frames, Graphs, Ranges):
            for method in vars(part).values():
                if hasattr(method, "__code__"):
                    hide(method, with_callees=True)
        recorder.clock.grad_enabled = torch.is_grad_enabled
        recorder.clock.is_captured = hide(capture_test(), with_callees=True)
        _watch_modules(recorder.clock, recorder.module_ranges)
        _watch_autograd(recorder.clock)
        _watch_optimizers(recorder)
        _watch_loaders(recorder.clock)
        _watch_graphs(Graphs(recorder))
        watch_calls(recorder.observed.calls)
        signals.watch(put, at_uninstall)
        _watch_options(recorder.observed)
        recorder.observed.calls.files.watch(at_uninstall, recorder.run)
    except Exception:
        # A torch that is not as we know it: what hangs on it already must do nothing.
        recorder.switch_off()
        raise
    os.register_at_fork(after_in_child=recorder.forked)
    marks.recorder = recorder


def uninstall() -> None:
    """End the recording and undo `install`, wherever the wrapper in place is ours.

    A wrapper that was wrapped since stays, and passes its calls on. So do the entries in os.register_at_fork.
    """
    if marks.recorder is not None:
        marks.recorder.leave()
        marks.recorder = None
    while _undo:
        _undo.pop()()
    forget_passes()


def hidden(wrapper: Any) -> Any:
    """Return a wrapper whose frame neither Dynamo compiles nor warnings count. What it calls is compiled as ever."""
    return hide(passed_over(wrapper))


def hide(function: Any, *, with_callees: bool = False) -> Any:
    """Keep Dynamo from compiling a function's frame, and return the function. What it calls is compiled as ever.

    `with_callees`: nor is what it calls. The same as torch.compiler.disable, without importing Dynamo where nobody
    compiles.
    """
    import torch._C

    frames: Any = torch._C._dynamo.eval_frame
    if hasattr(frames, "skip_code"):  # before FrameExecStrategy came: never with the callees
        frames.skip_code(function.__code__)
    else:
        callees = frames._FrameAction.SKIP if with_callees else frames._FrameAction.DEFAULT
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(frames._FrameAction.SKIP, callees))
    return function


def watch_method(kind: type, name: str, watched: Callable[[Any], Any]) -> None:
    """Put watched(method) in the place of a class's method, and of that which a class of torchdata's has of its own.

    Those are subclasses that a script imports later, or has imported before a block that is recorded. A subclass of the
    script's own is left as it is.
    """
    own = vars(kind).get("__init_subclass__")

    def __init_subclass__(cls: type[Any], /, **kwargs: Any) -> None:  # noqa: N807 - what it stands for
        if own is None:
            super(kind, cls).__init_subclass__(**kwargs)  # type: ignore[arg-type]
        else:
            own.__func__(cls, **kwargs)
        with contextlib.suppress(Exception):  # the script's import goes on; its loaders are then known by less
            wrap_if_known(cls)

    def wrap_if_known(cls: type) -> None:
        if cls.__module__.startswith("torchdata.") and name in vars(cls):
            put(cls, name, watched(vars(cls)[name]))

    put(kind, "__init_subclass__", classmethod(__init_subclass__))
    known: list[Any] = [kind]
    for one in known:
        known += [more for more in one.__subclasses__() if more not in known]
    if name in vars(kind):
        put(kind, name, watched(vars(kind)[name]))
    for one in known[1:]:
        wrap_if_known(one)


def _watch_modules(clock: StepClock, ranges: Ranges) -> None:
    import torch

    original: Any = torch.nn.Module.__call__
    is_traced, is_captured, passed_on = torch.compiler.is_dynamo_compiling, clock.is_captured, passed
    known = getattr(getattr(original, "__code__", None), "co_names", ()) == ("_compiled_call_impl", "_call_impl")

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807 - what it stands for
        outermost = False
        if (
            is_traced()
            or clock.inside
            or is_captured()
            or not ((outermost := clock.begin_forward(self, args, kwargs)) or clock.naming or clock.watcher is not None)
        ):
            # What the original does, without its frame: a model has hundreds of modules within the outermost.
            if known and self._compiled_call_impl is None:
                return self._call_impl(*args, **kwargs)
            if is_traced():
                return original(self, *args, **kwargs)
            try:  # not `with passing`, which Dynamo would compile
                return original(self, *args, **kwargs)
            except BaseException as e:
                passed_on(e)
                raise
        opened = ranges.open(self) if clock.naming else None
        seen = watcher if (watcher := clock.watcher) is not None and watcher.enter(self, args, kwargs) else None
        try:
            if known and self._compiled_call_impl is None:
                return self._call_impl(*args, **kwargs)
            try:
                return original(self, *args, **kwargs)
            except BaseException as e:
                passed_on(e)
                raise
        finally:
            if seen is not None:
                seen.leave()
            if opened is not None:
                opened.__exit__(None, None, None)
            if outermost:
                clock.end()

    if known:
        _replace(torch.nn.Module, "__call__", hide(in_place_of(__call__, original)))
    else:
        put(torch.nn.Module, "__call__", hidden(__call__))


def _watch_autograd(clock: StepClock) -> None:
    import torch

    is_traced, is_captured = torch.compiler.is_dynamo_compiling, clock.is_captured

    def timed(original: Callable[..., Any]) -> Any:
        is_backward = original.__name__ == "backward"

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if is_traced():
                return original(*args, **kwargs)
            if is_captured() or not clock.begin_backward():
                with passing:
                    return original(*args, **kwargs)
            if (watcher := clock.watcher) is not None:
                watcher.begin_backward(args, kwargs)
            if (differentiated := clock.differentiated) is not None:
                differentiated(args[0] if args else next(iter(kwargs.values()), None))
            if (losses := clock.losses) is not None and is_backward:
                losses.see(*args, **kwargs)
            try:
                return original(*args, **kwargs)
            except BaseException as e:
                passed(e)
                raise
            finally:
                if watcher is not None:
                    watcher.end_backward()
                clock.end()

        return hidden(call)

    for name in ("backward", "grad"):
        put(torch.autograd, name, timed(getattr(torch.autograd, name)))


def _watch_optimizers(recorder: Recorder) -> None:
    import torch
    from torch.amp.grad_scaler import GradScaler
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    is_traced, clock, observed = torch.compiler.is_dynamo_compiling, recorder.clock, recorder.observed
    is_captured = clock.is_captured

    def before(optimizer: Any, args: Any, kwargs: Any) -> Any:
        if is_traced() or is_captured():
            return None
        new = clock.begin_optimizer(optimizer)
        if len(observed.optimizers) > 1:
            observed.dropped.see(optimizer, observed.optimizers)
        if new:
            observed.calls.see("optimizer_step")
            _watch_exchange(recorder, optimizer)
        # The optimizer's step gets what is returned here instead.
        if callable(closure := kwargs.get("closure")):
            return args, kwargs | {"closure": timed(closure)}
        if len(args) > 1 and callable(args[1]):
            return (args[0], timed(args[1]), *args[2:]), kwargs
        return None

    def timed(closure: Any) -> Any:
        @functools.wraps(closure)
        def closing(*args: Any, **kwargs: Any) -> Any:
            clock.begin_closure()
            try:
                return closure(*args, **kwargs)
            except BaseException as e:
                passed(e)
                raise
            finally:
                clock.end_closure()

        return hidden(closing)

    def after(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if not (is_traced() or is_captured()):
            clock.end_optimizer()

    scale = GradScaler.scale

    @functools.wraps(scale)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_traced():
            return scale(self, *args, **kwargs)
        if not observed.grad_scaler and self.is_enabled():
            observed.grad_scaler = observed.news = True
        with passing:
            return scale(self, *args, **kwargs)

    at_uninstall(register_optimizer_step_pre_hook(hidden(before)).remove)
    at_uninstall(register_optimizer_step_post_hook(hidden(after)).remove)
    put(GradScaler, "scale", hidden(watched))


def _watch_exchange(recorder: Recorder, optimizer: Any) -> None:
    """Name what Horovod's optimizer waits for within its step, which no trace of a CPU shows. Its class is its own."""
    kind = type(optimizer)
    waiting = vars(kind).get("synchronize")
    if waiting is None or not str(kind.__module__).startswith("horovod.") or hasattr(waiting, "__wrapped__"):
        return

    def synchronize(self: Any, *args: Any, **kwargs: Any) -> Any:
        opened = recorder.clock.open_range("horovod:all_reduce")
        try:
            with passing:
                return waiting(self, *args, **kwargs)
        finally:
            if opened is not None:
                opened.__exit__(None, None, None)

    try:
        put(kind, "synchronize", hidden(functools.wraps(waiting)(synchronize)))
    except (AttributeError, TypeError) as e:  # the script's step goes on
        recorder.warn(f"what Horovod exchanges is not named: {words_of(e)}")


def _watch_graphs(graphs: Graphs) -> None:
    import torch

    kind: Any = getattr(torch.cuda, "CUDAGraph", None)
    if not all(hasattr(kind, name) for name in ("capture_begin", "capture_end", "replay")):
        return  # the steps of other jobs are marked without it
    beginning, ending, replaying = kind.capture_begin, kind.capture_end, kind.replay
    is_traced = torch.compiler.is_dynamo_compiling

    @functools.wraps(beginning)
    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> Any:
        with passing:
            result = beginning(self, *args, **kwargs)
        graphs.begin_capture(self)
        return result

    @functools.wraps(ending)
    def capture_end(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            with passing:
                return ending(self, *args, **kwargs)
        finally:
            graphs.end_capture(self)

    @functools.wraps(replaying)
    def replay(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_traced():
            return replaying(self, *args, **kwargs)
        counts = graphs.begin_replay()
        with passing:
            result = replaying(self, *args, **kwargs)
        if not counts:
            return result
        graphs.end_replay(self)
        return result

    put(kind, "capture_begin", hidden(capture_begin))
    put(kind, "capture_end", hidden(capture_end))
    put(kind, "replay", hidden(replay))


def _watch_loaders(clock: StepClock) -> None:
    from torch.utils.data import dataloader

    following: Any = dataloader._BaseDataLoaderIter.__next__
    making: Any = dataloader._BaseDataLoaderIter.__init__
    nameless = SimpleNamespace(_dlprof_pass=None)  # stands for an iterator that is none of PyTorch's
    is_captured = clock.is_captured
    dispatching = False

    @functools.wraps(following)
    def __next__(self: Any) -> Any:  # noqa: N807 - what it stands for
        if is_captured() or not clock.begin_fetch(self, first=not self._num_yielded):
            with passing:
                return dispatched(self) if dispatching and clock.fetching else following(self)
        try:
            batch = following(self)
        except BaseException as e:
            clock.end()
            if isinstance(e, StopIteration):
                clock.end_of_epoch()
            passed(e)
            raise
        clock.end_fetch(self, batch)
        return batch

    def watched(iterating: Any) -> Any:
        @functools.wraps(iterating)
        def __iter__(self: Any) -> Any:  # noqa: N807 - what it stands for
            watch_dispatcher()
            if is_captured() or not clock.begin_epoch():
                with passing:
                    return iterating(self)
            try:
                with passing:
                    iterator = iterating(self)
            finally:
                clock.end()
            clock.see_iterator(self, iterator)
            return iterator

        return __iter__

    @functools.wraps(making)
    def __init__(self: Any, loader: Any) -> None:  # noqa: N807 - what it stands for
        with passing:
            making(self, loader)
        clock.see_made(loader, self)

    @passed_over
    def dispatched(iterator: Any) -> Any:
        """Fetch one of the batches that accelerate's rank 0 fetches for all, which make one fetch of its own."""
        nonlocal dispatching
        clock.ask(iterator)
        dispatching = False  # batches that this fetches from other loaders are not the script's
        try:
            with passing:
                batch = following(iterator)
        finally:
            dispatching = True
        clock.got(iterator)
        return batch

    def watch_dispatcher() -> None:
        """Hook into accelerate's loader for iterable data: its rank 0 fetches for all, and the others use no loader."""
        module: Any = sys.modules.get("accelerate.data_loader")
        dispatcher = getattr(module, "DataLoaderDispatcher", None)
        fetching = getattr(dispatcher, "_fetch_batches", None)
        if fetching is None or hasattr(fetching, "__wrapped__"):
            return

        @functools.wraps(fetching)
        def _fetch_batches(self: Any, iterator: Any) -> Any:
            nonlocal dispatching
            known = isinstance(iterator, dataloader._BaseDataLoaderIter)
            if not clock.begin_fetch(iterator if known else nameless, first=False):
                with passing:
                    return fetching(self, iterator)
            dispatching = True
            try:
                with passing:
                    fetched = fetching(self, iterator)
            finally:
                dispatching = False
                clock.end()
            if self._stop_iteration:
                clock.end_of_epoch()
            return fetched

        put(dispatcher, "_fetch_batches", hidden(_fetch_batches))

    put(dataloader._BaseDataLoaderIter, "_dlprof_pass", None)
    put(dataloader._BaseDataLoaderIter, "__next__", __next__)
    put(dataloader._BaseDataLoaderIter, "__init__", __init__)
    watch_method(dataloader.DataLoader, "__iter__", watched)


# Classes of modules that come when a script imports them, by the kind of call that makes one.
_LATER = {"FullyShardedDataParallel": "fsdp"}

# A class that `fully_shard` makes of a module's has this one among its bases.
_SHARDED = "FSDPModule"


def watch_calls(calls: Calls) -> None:
    """See where the script makes its loaders, wrappers and optimizers, and what else it calls."""
    import torch
    from torch.amp.autocast_mode import autocast
    from torch.amp.grad_scaler import GradScaler
    from torch.nn.parallel import DataParallel, DistributedDataParallel
    from torch.optim import Optimizer
    from torch.utils.data import DataLoader

    is_traced = torch.compiler.is_dynamo_compiling

    def seeing(original: Any, see: Callable[[Any], object]) -> Any:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if is_traced():
                return original(*args, **kwargs)
            if not calls.off:
                see(args[0] if args else None)
            with passing:
                return original(*args, **kwargs)

        return hidden(call)

    def of(kind: str) -> Callable[[Any], object]:
        def look(_: Any) -> object:
            return calls.see(kind)

        return look

    making: Any = DataLoader.__init__

    @functools.wraps(making)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - what it stands for
        with passing:
            making(self, *args, **kwargs)
        calls.see_made(self)

    put(DataLoader, "__init__", hidden(__init__))

    def by_script(kind: str, setting: str = "") -> Callable[[Any], object]:
        """See what torch itself calls, too: its profiler synchronizes where it starts and stops.

        `setting`: what the first argument is, a whole number.
        """

        def look(first: Any) -> object:
            caller = sys._getframe(2)
            call = None if "/torch/" in caller.f_code.co_filename else calls.see(kind)
            if call is not None and setting and type(first) is int:
                call.values = {setting: first} if call.count == 1 or call.values == {setting: first} else {}
            return call

        return look

    def of_process(kind: str) -> Callable[[Any], object]:
        """See what is about this process, and not about another one of that number."""

        def look(pid: Any) -> object:
            return calls.see(kind) if pid in (0, os.getpid()) else None

        return look

    for name in ("synchronize", "empty_cache"):
        put(torch.cuda, name, seeing(getattr(torch.cuda, name), by_script(name)))
    for mode in (torch.autograd.set_detect_anomaly, torch.autograd.detect_anomaly):
        put(mode, "__init__", seeing(vars(mode)["__init__"], by_script("anomaly")))
    setting = torch.use_deterministic_algorithms
    put(torch, "use_deterministic_algorithms", seeing(setting, by_script("deterministic")))
    put(os, "sched_setaffinity", seeing(os.sched_setaffinity, of_process("affinity")))
    put(torch, "set_num_threads", seeing(torch.set_num_threads, by_script("threads", "num_threads")))
    for profiler in (torch.profiler.profile, torch.autograd.profiler.profile, torch.autograd.profiler.emit_nvtx):
        put(profiler, "__init__", seeing(vars(profiler)["__init__"], by_script("profiler")))
    made = {"ddp": DistributedDataParallel, "data_parallel": DataParallel, "optimizer": Optimizer}
    made |= {"autocast": autocast, "grad_scaler": GradScaler}
    for kind, cls in made.items():
        put(cls, "__init__", seeing(vars(cls)["__init__"], of(kind)))
    put(torch, "compile", seeing(torch.compile, of("compile")))

    for name in ("to", "cuda"):
        put(torch.nn.Module, name, seeing(vars(torch.nn.Module)[name], calls.see_moved))

    # Called with each class of modules: one of FSDP's is made when it is imported, the other where it is applied.
    def __init_subclass__(cls: Any, /, **kwargs: Any) -> None:  # noqa: N807 - what it stands for
        super(torch.nn.Module, cls).__init_subclass__(**kwargs)
        with contextlib.suppress(Exception):  # the script's class is made; its calls are then not named
            kind = _LATER.get(cls.__name__)
            if kind is not None and cls.__module__.startswith("torch.distributed."):
                put(cls, "__init__", seeing(vars(cls)["__init__"], of(kind)))
            elif any(base.__name__ == _SHARDED for base in cls.__bases__):
                calls.see("fsdp")

    put(torch.nn.Module, "__init_subclass__", classmethod(hidden(__init_subclass__)))


_MOST_OPTIONS = 500


def _watch_options(observed: Observed) -> None:
    """Keep the options of the command line as argparse knows them: names, and which switches are on, but no value.

    Options of click, typer, hydra and absl are not seen.
    """
    original = argparse.ArgumentParser.parse_known_args

    @functools.wraps(original)
    def parse_known_args(self: Any, args: Any = None, *more: Any, **others: Any) -> Any:
        with passing:
            found = original(self, args, *more, **others)
        try:
            observed.options |= _options(self, args, found[0])
            observed.news = True
        except Exception:  # noqa: BLE001 - the script's own classes: its options are then not named
            observed.options.clear()
        return found

    put(argparse.ArgumentParser, "parse_known_args", parse_known_args)


def _options(parser: argparse.ArgumentParser, args: Any, namespace: Any) -> dict[str, dict[str, Any]]:
    """Return the options of a parser that reads the command line, or a part of it, by name."""
    line = sys.argv[1:]
    if args is not None and not (set(args) <= set(line) and (args or not line)):
        return {}
    found = {}
    for action in parser._actions[:_MOST_OPTIONS]:
        names = [name for name in action.option_strings if redaction.is_option(name) and not redaction.is_secret(name)]
        value = getattr(namespace, action.dest, None)
        if names and action.dest.isidentifier() and action.dest != "help":
            name = next((name for name in names if name.startswith("--")), names[0])
            is_on = value is True or (action.nargs == 0 and isinstance(value, (int, str)) and bool(value))
            found[name] = {"name": name, "dest": action.dest, "switch": action.nargs == 0, "on": is_on}
    return found
