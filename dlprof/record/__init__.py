"""What runs inside the ranks of a job, next to them, and around the job.

The rules for code in a rank stand here, and nowhere else. Such code runs in somebody else's process, mostly on the
thread that trains.

* **The job comes first.** A wrapper calls the original exactly once, with the same arguments, and returns or raises
  what that does. What fails in our own work ends at the edge of the hook, in `except Exception`: it goes to
  `Recorder.fail`, or to `Recorder.drop` where it is one collector's, which switch it off and say so in one line on
  stderr, and the script goes on. `guarded` is
  that edge; hooks that every step passes, or Dynamo reads, have it written out: a call more would cost more than they
  do. Further within, only errors that can be named are caught. Launchers, loader workers and other processes
  that never train leave no trace: files appear with the first backward pass or optimizer step, or after two seconds of
  many forward passes and no training in a process that is nobody's child of multiprocessing.
* **Threads.** One thread trains, and only it is measured: the first that fetches a batch or calls a module, until
  another one is seen to train. Hooks compare `get_ident()` and do nothing on other threads. One thread is ours
  (signals.py). It is no `threading.Thread`, so that a script that joins all threads does not wait for it.
* **Re-entrancy.** Hooks run inside each other: a loader whose data set iterates another loader, an optimizer that steps
  another one, a backward pass inside a backward pass. Only the outermost counts. `__del__` may call a hook when the
  interpreter is half gone: check that we still record before anything else.
* **Signals.** The script's handlers wait while the main thread is in our code (signals.py): an `except Exception` of
  ours meets nothing that they raise. That holds for a second, and in wrappers for their own frame alone: call nothing
  of Python's there but the original, torch's `is_compiling`, and functions of ours that are no wrappers. SIGTERM's
  handler is ours: it runs between any two bytecodes of the training thread, and ends the recording there. So take a
  list before you work on it (`batches, self._batches = self._batches, []`), use reentrant locks, and make `stop()` do
  nothing the second time.
* **Forks.** A forked child of a rank is no rank. Each part that holds a descriptor, a thread or rows resets itself in
  `os.register_at_fork(after_in_child=…)`. A child of a process that has not trained yet may become a rank or a worker.
* **Dynamo.** torch.compile must see the graphs that it would see without us. Mark wrappers, and what they call, with
  `hooks.hidden`, and let a wrapper ask `is_traced()` first: Dynamo takes that for True and reads nothing after it.
  Never import torch._dynamo for our own sake.
* **Captures.** torch.jit.trace, torch.export, make_fx and others keep what runs while they look. A wrapper that opens
  a range, looks at tensors or counts work asks `is_captured()` after `is_traced()`, and then only passes on. A
  TorchDispatchMode or TorchFunctionMode of the script sees nothing of ours either. See captured.py.
* **Tracebacks.** They must not show our frames: a wrapper calls the original in a block `with passing`, or has
  `passed` take its frame out of what it raises again. Not where Dynamo traces it.
* **Warnings.** They must name the script's lines as without us. `hooks.put` and `hooks.hidden` have them count no frame
  of a wrapper, if it calls the original from its own frame. See calls/attribution.py for other wrappers.
* **CUDA graphs.** While one is captured, no thread may ask the device anything: the capture would fail. Collectors
  neither start, step nor stop meanwhile, and no step ends. See graphs.py.
* **The device.** Never wake a GPU that the script does not use, never synchronise, never wait for an event. See
  device/device.py.
* **Cost.** A step touches few objects and calls few functions: our code and data are not in the processor's caches when
  a step comes back to us. Collectors hear of many steps at once. Import neither numpy nor pandas.
* **Memory.** Keep weak references to the script's objects, put no attribute on a model or an optimizer, and bound every
  list: a script may run for weeks, or make a new model each step.
* **Files.** The script may close descriptors that it never opened, and then get their numbers for files of its own: ask
  a descriptor whether it is ours before each use (`log.Descriptor`). Append whole lines, or write to a temporary name
  and rename.
* **Undoing.** A recording may end long before its process (`dlprof.record`), and another one may follow. Replace an
  attribute with `hooks.put` alone, so that `hooks.uninstall` restores it. Undo everything else in `stop()`, which is
  called where the process has trained, or by `hooks.at_uninstall`.
"""

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])


def guarded(method: _F) -> _F:
    """Make a method the edge of a hook: what it raises goes to `fail` of its object, and None is returned."""

    @functools.wraps(method)
    def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except Exception as e:  # noqa: BLE001 - the script goes on
            self.fail(e)
            return None

    return hook  # type: ignore[return-value]


class _Record(ModuleType):
    """The package, which takes the place of the function `dlprof.record`, and can be called as well."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        return sys.modules["dlprof"]._record(*args, **options)


sys.modules[__name__].__class__ = _Record
