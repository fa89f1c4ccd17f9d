"""Which GPU a rank trains on, and timing events on it that disturb nothing.

A GPU that the script does not use must stay asleep: recording an event there, or asking it for its memory, makes a CUDA
context of some hundred megabytes. So the device is that of the model's parameters and not the current one, which is 0
in every rank of a script that never calls `torch.cuda.set_device`. On ROCm torch calls its devices "cuda" as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol


class Reference(Protocol):
    """A weak reference to a model or an optimizer of the script's."""

    def __call__(self) -> Any:
        """Return the object; None where it is gone."""


class RankDevice:
    """The GPU that holds most of what a rank trains. A process that drives several (nn.DataParallel) has one, too."""

    __slots__ = ("_models", "_optimizers", "captures", "index")

    def __init__(self) -> None:
        self.index: int | None = None  # None: no parameter was seen on a GPU
        self.captures = 0  # CUDA graphs that threads of this process are capturing, as far as PyTorch's class captures
        self._models = self._optimizers = 0

    def look(self, models: Sequence[Reference], optimizers: Sequence[Reference]) -> None:
        """Look at the parameters again if there is a model or an optimizer more than last time."""
        if (len(models), len(optimizers)) == (self._models, self._optimizers):
            return
        self._models, self._optimizers = len(models), len(optimizers)
        # A job without modules has the tensors that its optimizers step.
        for parameters in (_of_models(models), _of_optimizers(optimizers)):
            index = most_on(parameters)
            if index is not None:
                self.index = index
                return

    def in_use(self) -> int | None:
        """Return the index of the GPU to measure; None: the script uses none, and asking would wake one.

        The current device where the parameters are on none, as those that are offloaded to the host are.
        """
        import torch

        cuda: Any = torch.cuda
        if not cuda.is_initialized():
            return None
        if self.index is not None:
            return self.index
        current: int = cuda.current_device()
        is_awake: Any = getattr(torch._C, "_cuda_hasPrimaryContext", None)
        return current if is_awake is None or is_awake(current) else None

    def capturing(self) -> bool:
        """Return whether a CUDA graph is captured: a device that is asked anything meanwhile makes that fail.

        By default also when it is another thread that asks (cudaStreamCaptureModeGlobal, CUDA Runtime API).
        """
        if self.captures > 0:
            return True
        import torch

        cuda: Any = torch.cuda
        try:
            if not cuda.is_initialized():
                return False
            if self.index is None or cuda.current_device() == self.index:
                return bool(cuda.is_current_stream_capturing())
            with cuda.device(self.index):
                return bool(cuda.is_current_stream_capturing())
        except Exception:  # noqa: BLE001 - whoever asks the device next says what is wrong with it
            return False


def most_on(parameters: Iterable[Any]) -> int | None:
    """Return the index of the GPU that most elements of these tensors are on; None: none is on a GPU."""
    elements: Counter[int] = Counter()
    try:
        for tensor in parameters:
            device = tensor.device
            if device.type == "cuda":
                elements[device.index] += tensor.numel()
    except Exception:  # noqa: BLE001 - the script's own classes answer; what they have told until here counts
        pass
    return max(elements, key=lambda index: (elements[index], -index)) if elements else None


def _of_models(models: Iterable[Reference]) -> Iterator[Any]:
    for reference in models:
        model = reference()
        if model is not None:
            yield from model.parameters()


def _of_optimizers(optimizers: Iterable[Reference]) -> Iterator[Any]:
    for reference in optimizers:
        optimizer = reference()
        if optimizer is not None:
            for group in optimizer.param_groups:
                yield from group["params"]


class Events:
    """Timing events of one GPU, from a pool. An event is recorded on the stream that the calling thread uses there."""

    __slots__ = ("_cuda", "_pool", "index")

    def __init__(self, index: int) -> None:
        import torch

        self._cuda: Any = torch.cuda
        self._pool: list[Any] = []
        self.index = index

    def record(self) -> Any:
        """Record an event and return it; None while the stream is captured into a CUDA graph."""
        cuda = self._cuda
        if cuda.current_device() == self.index:
            return self._record()
        # The stream and its capture are asked of the current device. Leaving this block wakes no device that was
        # asleep: torch only remembers its number.
        with cuda.device(self.index):
            return self._record()

    def _record(self) -> Any:
        if self._cuda.is_current_stream_capturing():
            return None
        event = self._pool.pop() if self._pool else self._cuda.Event(enable_timing=True)
        event.record()
        return event

    def release(self, *events: Any) -> None:
        """Take back events that nobody will ask any more."""
        self._pool += events
