"""The settings of the job that advice cites: its loader, its model, its optimizer, as the recorder saw them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dlprof.engine import Measured

Settings = Mapping[str, Any]


def training_loader(run: Measured, rank: int | None = None) -> Settings:
    """Give the settings of a rank's training loader (of the first rank that has one); empty where nobody saw it."""
    for r in [rank] if rank is not None else run.ranks:
        loaders = run.facts.get(r, {}).get("loaders") or []
        train = [x for x in loaders if x.get("role") == "train"] or [x for x in loaders if x.get("role") == "unknown"]
        if train:
            return dict(train[0])
    return {}


def model(run: Measured) -> Settings:
    """Give the settings of the largest model; empty where nobody saw it."""
    models = [m for r in run.ranks for m in run.facts[r].get("models") or []]
    return max(models, key=lambda m: m.get("parameters") or 0, default={})


def optimizer(run: Measured) -> Settings:
    """Give the settings of the optimizer with most parameters; empty where nobody saw it."""
    optimizers = [o for r in run.ranks for o in run.facts[r].get("optimizers") or []]
    return max(optimizers, key=lambda o: o.get("parameters") or 0, default={})


def cores_per_rank(run: Measured, rank: int) -> int | None:
    """Give how many cores a rank can count on: those it may use, shared by the ranks of its host that have the same."""
    cpu = run.facts.get(rank, {}).get("cpu") or {}
    cores = cpu.get("affinity") or cpu.get("count")
    if not isinstance(cores, int):
        return None
    host = run.facts[rank].get("host")
    neighbours = sum(1 for r in run.ranks if run.facts[r].get("host") == host)
    return max(1, cores // max(neighbours, 1)) if cores == cpu.get("count") or neighbours > 1 else cores


def on_cpu(run: Measured) -> bool:
    """Tell whether the job is known to train on the CPU."""
    kinds = {(run.facts[r].get("device") or {}).get("type") for r in run.ranks}
    return kinds == {"cpu"}
