"""The parts of a rank's memory at its peak, and the memory of each module."""

from __future__ import annotations

from collections.abc import Mapping
from math import nan
from typing import Any

import numpy as np
import pandas as pd

from dlprof import schema
from dlprof.analysis.engine import RANK, Frame, Maybe, RankFacts, maybe, needs, per_rank
from dlprof.analysis.memory.memory import memory_use
from dlprof.analysis.timeline.paths import folded, parent
from dlprof.errors import NotMeasured

# The parts that are counted tensor by tensor. They exist all the time or at one of the moments below.
COUNTED = ("parameter", "cast", "gradient", "optimizer", "buffer", "activation", "input", "communication")

# The most rows that a rank passes on: the largest modules, and one row for all others.
MOST_ROWS = 1_000

_KEYS = ["module", "kind", "part", "device"]


@per_rank
def memory_composition(
    held: Frame = needs(schema.HELD),
    memory_use: Maybe[Frame] = maybe(memory_use),
    memory: Maybe[Frame] = maybe(schema.MEMORY),
    samples: Maybe[Frame] = maybe(schema.SAMPLES),
    rank: RankFacts = needs(RANK),
) -> pd.DataFrame:
    """Return the parts of each device's memory at its peak: device, part, bytes, known (the source), moment.

    The rows of a device add up to all memory that the process has there. Parts, with their source in brackets:
    those of COUNTED ("counted", in one step), at the `moment` with more of them: "backward" (a backward pass begins) or
    "gradients" (the last one has ended). On a GPU also temporary (the allocator's peak less the counted parts,
    "difference"), cache (reserved and not allocated at the peaks, "allocator"), and libraries (the CUDA context, NCCL
    and other processes on that GPU: used less reserved, "driver"). On the host, where nothing counts what PyTorch
    allocates: process (memory of the process once it had imported torch, "process"), and unexplained (the rest of its
    peak: data, temporaries, freed memory that it keeps, "difference"). On a GPU the difference is "unexplained" where
    activations were not counted, or where it is below 0: more was counted than allocated.
    """
    facts = rank.trace_facts.get("held") or {}
    if not len(held):
        raise NotMeasured(_why(facts))
    rows: list[tuple[str, str, float, str, str]] = []
    for device, mine in held.groupby("device", observed=True):
        moment, parts = _fullest(mine, facts, str(device))
        rows += [(str(device), part, size, "counted", moment) for part, size in parts.items()]
        counted = sum(parts.values())
        if device == "cpu":
            rows += [("cpu", *row, moment) for row in _of_process(facts, counted)]
        elif memory_use and memory and _index(str(device)) == int(memory.get()["device"].iloc[-1]):
            known = (facts.get("activations") or {}).get("state") == "counted"
            found = _of_gpu(memory_use.get(), memory.get(), samples, counted, "temporary" if known else "unexplained")
            rows += [(str(device), *row, moment) for row in found]
    frame = pd.DataFrame(rows, columns=["device", "part", "bytes", "known", "moment"])
    return frame[frame["bytes"] != 0].reset_index(drop=True)


@per_rank
def held_by_module(held: Frame = needs(schema.HELD), rank: RankFacts = needs(RANK)) -> pd.DataFrame:
    """Return the memory of each module without the modules inside it, the largest first.

    Columns: module (path), kind (class), part, device, tensors, bytes and full_bytes (before sharding). Beyond
    MOST_ROWS rows the smaller ones are one row for each part and device, with module "…".
    """
    if not len(held):
        raise NotMeasured(_why(rank.trace_facts.get("held") or {}))
    sums = ["tensors", "bytes", "full_bytes"]
    whole = held.astype(dict.fromkeys(sums, "float64"))  # implausible numbers in the input may overflow 64 bits
    frame = whole.groupby(_KEYS, observed=True, as_index=False)[sums].sum()
    frame = frame.astype(dict.fromkeys(_KEYS, object)).sort_values("bytes", ascending=False, kind="stable")
    rest = frame[MOST_ROWS:].assign(module="…", kind="").groupby(_KEYS, as_index=False)[sums].sum()
    return pd.concat([frame[:MOST_ROWS], rest], ignore_index=True)


@per_rank
def held_names(held: Frame = needs(schema.HELD), modules: Maybe[Frame] = maybe(schema.MODULES)) -> pd.DataFrame:
    """Return each module that holds memory, and the modules around it: module (path), name (folded) and kind.

    Modules fold by their content, as in the tree of the step's time: the first layer of a stack may hold less than the
    others if nothing before it is trained. Without a trace they fold by the modules that hold memory.
    """
    known = [held[["module", "kind"]]]
    if modules:
        known.insert(0, modules.get()[["path", "kind"]].rename(columns={"path": "module"}))
    rows = pd.concat([frame.astype(str) for frame in known]).drop_duplicates("module")
    kinds = dict(zip(rows["module"], rows["kind"], strict=True))
    mine = dict.fromkeys(path for module in held["module"].astype(str).unique() for path in around(module))
    names = folded({**dict.fromkeys(mine, ""), **kinds})
    return pd.DataFrame(
        {"module": list(mine), "name": [names[p] for p in mine], "kind": [kinds.get(p, "") for p in mine]}
    )


def around(path: str) -> list[str]:
    """Return a module's path and those of all modules around it; of the model itself, its own."""
    found = [path]
    while path := parent(path):
        found.append(path)
    return found


def _why(facts: Mapping[str, Any]) -> str:
    return f"memory was not counted: {facts.get('state') or 'no tensor was seen'}"


def _fullest(mine: pd.DataFrame, facts: Mapping[str, Any], device: str) -> tuple[str, dict[str, float]]:
    """Return the moment with the most counted memory on a device, and each part's bytes at that moment.

    When a backward pass begins, all activations exist, and the gradients that were not set to None. When it has ended,
    all gradients exist, and neither activations nor autocast's copies.
    """
    sums = mine.groupby("part", observed=True)["bytes"].agg(lambda sizes: float(sizes.astype(float).sum()))
    whole = {part: float(sums.get(part, 0.0)) for part in COUNTED}
    there = 0.0
    for moment in facts.get("moments") or ():
        if (moment.get("device"), moment.get("moment")) == (device, "backward"):
            there = float(moment.get("gradient_bytes") or 0)
    found = {"backward": whole | {"gradient": there}, "gradients": whole | {"activation": 0.0, "cast": 0.0}}
    fullest = max(found, key=lambda moment: sum(found[moment].values()))
    return fullest, found[fullest]


def _of_gpu(
    use: pd.DataFrame, memory: pd.DataFrame, samples: Maybe[pd.DataFrame], counted: float, rest: str
) -> list[tuple[str, float, str]]:
    peak, reserved = float(use["peak_allocated_bytes"].iloc[0]), float(use["peak_reserved_bytes"].iloc[0])
    rows = [
        (rest, max(peak - counted, 0.0), "difference"),
        ("unexplained", min(peak - counted, 0.0), "difference"),
        ("cache", max(reserved - peak, 0.0), "allocator"),
    ]
    beyond = _beyond_allocator(memory, samples)
    return rows if np.isnan(beyond) else [*rows, ("libraries", beyond, "driver")]


def _beyond_allocator(memory: pd.DataFrame, samples: Maybe[pd.DataFrame]) -> float:
    """Return the used memory according to the driver less the reserved, the median of all readings; NaN: unknown."""
    read = samples.or_none()
    if read is None:
        return nan
    used = read[(read["source"] == "gpu") & (read["metric"] == "memory_used_bytes")]
    at = np.searchsorted(memory["at_ns"], used["at_ns"], side="right") - 1
    if not (at >= 0).any():
        return nan
    beyond = used["value"].to_numpy()[at >= 0] - memory["reserved_bytes"].to_numpy()[at[at >= 0]]
    return max(float(np.median(beyond)), 0.0)


def _of_process(facts: Mapping[str, Any], counted: float) -> list[tuple[str, float, str]]:
    of_process = facts.get("process") or {}
    before, most = (of_process.get(name) for name in ("before_bytes", "anonymous_bytes"))
    if before is None or most is None:
        return []
    return [("process", float(before), "process"), ("unexplained", float(most) - before - counted, "difference")]


def _index(device: str) -> int:
    """Return the number in "cuda:0"; −1: it has none."""
    number = device.partition(":")[2]
    return int(number) if number.isdecimal() and len(number) < 10 else -1
