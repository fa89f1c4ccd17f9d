"""Callbacks that record a training of transformers' Trainer or of Lightning, and log the verdict where the job logs.

`TrainerCallback` and `LightningCallback` are made when they are first named, and only then import their library.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from functools import cache, partial
from types import FrameType
from typing import Any

from dlprof import profile
from dlprof.plain import words_of
from dlprof.profiling import Profile, active_trackers, of_lightning
from dlprof.record import guarded
from dlprof.record.recorder import say

__all__ = ["LightningCallback", "TrainerCallback"]  # noqa: F822 - made by __getattr__


class _Training:
    """What the callbacks share: each training is recorded into a folder, and nothing here fails it.

    `steps`: how many steps of the optimizer are recorded; None: all. `log`: True: where the job logs; False: nowhere;
    or a SummaryWriter. The rest as `dlprof.profile`, which raises TypeError or ValueError for options that make no
    sense. `profile`: that of the last training, with its result and report.
    """

    def __init__(
        self, path: str | os.PathLike[str] | None = None, *, steps: int | None = None, log: Any = True, **options: Any
    ) -> None:
        self._new = partial(profile, path, log=log, **options)
        self._new()  # checks the options
        self._asked, self._steps, self._last = log, steps, sys.maxsize
        self._log: list[Any] | None = None
        self._records = False
        self.profile: Profile | None = None

    def fail(self, error: BaseException) -> None:
        """Say that something of ours failed."""
        say(f"the training goes on without dlprof's callback: {words_of(error)}")

    @guarded
    def _begin(self, found: Callable[[], list[Any]]) -> None:
        self._end(0)  # of a training that an exception has ended
        self.profile = self._new()
        self.profile.__enter__()
        self._records = True
        self._log = found() if self._asked is True else None

    def _count(self, step: int) -> None:
        self._last = step + (self._steps or sys.maxsize)

    @guarded
    def _stepped(self, step: int) -> None:
        if step >= self._last:
            self._end(step)

    @guarded
    def _end(self, step: int, error: BaseException | None = None) -> None:
        records, self._records = self._records, False
        if records and self.profile is not None:
            self.profile.end(error, self._log, step)


class _OfTrainer(_Training):
    """Records what a Trainer trains: `Trainer(…, callbacks=[TrainerCallback("runs/x", steps=200)])`."""

    def on_train_begin(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
        self._begin(partial(_reported, sys._getframe(1)))
        self._count(state.global_step)

    def on_step_end(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
        self._stepped(state.global_step)

    def on_train_end(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
        self._end(state.global_step)


class _OfLightning(_Training):
    """Records what `fit` trains: `lightning.Trainer(…, callbacks=[LightningCallback("runs/x", steps=200)])`."""

    def setup(self, trainer: Any, _module: Any, stage: str) -> None:
        if stage == "fit":  # before the optimizers are made, and after the process group is
            self._begin(lambda: [*map(of_lightning, trainer.loggers)])

    def on_train_start(self, trainer: Any, *_: Any) -> None:
        self._count(trainer.global_step)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self._stepped(trainer.global_step)

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        self._end(trainer.global_step)

    def on_exception(self, trainer: Any, _module: Any, error: BaseException) -> None:
        self._end(trainer.global_step, error)


def _reported(caller: FrameType) -> list[Any]:
    """Return what a Trainer reports to. Its SummaryWriter belongs to a callback that stands beside ours.

    They are looked up as training begins: the Trainer ends MLflow's run, and closes the writer, before it calls us.
    """
    beside = getattr(caller.f_locals.get("self"), "callbacks", ())
    writers = [writer for one in beside if (writer := getattr(one, "tb_writer", None)) is not None]
    return [*active_trackers(), *writers]


@cache
def __getattr__(name: str) -> Any:
    # Lightning has two packages, of which either refuses the other's callbacks.
    old = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
    library, base, ours = {
        "TrainerCallback": ("transformers", "TrainerCallback", _OfTrainer),
        "LightningCallback": ("pytorch_lightning" if old else "lightning.pytorch", "Callback", _OfLightning),
    }.get(name, ("", "", None))
    if ours is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    bases = (ours, getattr(importlib.import_module(library), base))
    return type(name, bases, {"__doc__": ours.__doc__, "__module__": __name__})
