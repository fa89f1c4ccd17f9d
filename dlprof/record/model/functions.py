"""Which module an operator belongs to while it runs, also in the backward pass, where no module is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# The parts of a step in which modules compute.
PARTS = ("forward", "recompute", "backward")

# A step of a model with more functions is counted without their modules.
_MOST = 200_000


class Functions:
    """Remembers which module created which function of the backward pass, by autograd's sequence numbers."""

    def __init__(self, inner: Callable[[], str]) -> None:
        import torch

        autograd: Any = torch.autograd
        self._inner = inner
        # Neither is in PyTorch's documentation; it is then not known which module a backward pass is of.
        self._next: Callable[[], int] | None = getattr(autograd, "_get_sequence_nr", None)
        self._running: Callable[[], Any] = getattr(torch._C, "_current_autograd_node", lambda: None)
        self._made_by: dict[int, str] = {}

    def module(self) -> tuple[str, str]:
        """Return the module whose operator runs now, "" where it is of none, and forward, recompute or backward."""
        name, function = self._inner(), self._running()
        if name:
            if self._next is not None and len(self._made_by) < _MOST:
                # An operator's function was made before it comes by a dispatch mode. Operators that make none, as
                # those that count batches, may come by after it in other modules.
                self._made_by.setdefault(self._next() - 1, name)
            return name, "forward" if function is None else "recompute"
        return ("", "forward") if function is None else (self._made_by.get(function._sequence_nr(), ""), "backward")
