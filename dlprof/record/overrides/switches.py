"""Overrides of what holds for the whole process: torch.num_threads and the environment's variables."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping
from typing import Any

from dlprof.overrides import Value
from dlprof.record.hooks import at_uninstall, put
from dlprof.record.overrides.effects import Effects


def install(asked: Mapping[str, Value], effects: Effects) -> None:
    """Set them now, when torch has just been imported, and again whenever the script sets something else."""
    if "torch.num_threads" in asked:
        _threads(int(asked["torch.num_threads"]), effects)


def _threads(value: int, effects: Effects) -> None:
    import torch

    name, setting = "torch.num_threads", torch.set_num_threads
    before = torch.get_num_threads()
    setting(value)
    at_uninstall(functools.partial(setting, before))
    effects.took(name, before)

    @functools.wraps(setting)
    def set_num_threads(*args: Any, **kwargs: Any) -> None:
        # torch's own calls are those of its loaders' workers.
        if _by_torch():
            return setting(*args, **kwargs)
        setting(*args, **kwargs)  # what it refuses, it refuses
        effects.took(name, torch.get_num_threads())
        return setting(value)

    put(torch, "set_num_threads", set_num_threads)


def _by_torch() -> bool:
    """Return whether the caller of a wrapper is torch."""
    return str(sys._getframe(2).f_globals.get("__name__")).startswith("torch.")


def note_environment(asked: Mapping[str, Value], before: Mapping[str, Any], effects: Effects) -> None:
    """Note which variables of the environment this process has as asked for."""
    for name, value in asked.items():
        group, _, variable = name.partition(".")
        if group != "env":
            continue
        if os.environ.get(variable) == value:
            effects.took(name, before.get(variable), placed=False)
        else:
            effects.failed(name, f"it is {os.environ.get(variable)!r} in the rank")
