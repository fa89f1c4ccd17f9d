"""The same training eagerly, compiled into graphs, and as one captured graph a step: recorded without changing it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

from benchmarks.gpu import judges
from benchmarks.gpu.bench import SCRIPTS, Bench
from benchmarks.gpu.jobs import Ended, must, python, tail
from benchmarks.gpu.judges import Recording
from benchmarks.gpu.outcome import Part, holds, named, same

SCRIPT = SCRIPTS / "modes.py"

# How many steps may be missing or too many. Without a loader and with no optimizer called from Python, it is not said
# where the first and the last step end.
MODES: Mapping[str, int] = {"eager": 0, "compiled": 0, "graph": 0, "replay": 1}


def equal(bench: Bench) -> None:
    """Train in each mode plain and under dlprof; the losses must be the same, bit by bit."""
    steps = bench.pick(80, 24)
    args = ("--device", bench.device, "--steps", str(steps), "--layers", str(bench.pick(8, 2)))
    # Nothing is timed of the plain runs; the recorded ones come one after the other, since they may be kept.
    plain = bench.together(*(partial(bench.plain, SCRIPT, "--mode", m, *args, limit_s=110.0) for m in MODES))
    folders = {}
    for mode, before in zip(MODES, plain, strict=True):
        folder, ended = bench.record(mode, python(SCRIPT, "--mode", mode, *args), limit_s=90.0)
        bench.add(*of_mode(mode, _told(before), ended), anywhere=True)
        if ended.code == 0:
            folders[mode] = folder
        else:
            print(tail(ended), flush=True)
    for (mode, folder), said in zip(folders.items(), bench.reports(list(folders.values())), strict=True):
        oracle = {"steps": steps, "slack": MODES[mode]}
        bench.add(*named(mode, judges.counted(Recording(folder, said, oracle))), anywhere=True)
        bench.keep(f"mode-{mode}", folder, "counted", oracle)


def of_mode(mode: str, plain: Mapping[str, Any], ended: Ended) -> list[Part]:
    """Judge how a recorded run ended, and its losses against those of the plain one."""
    try:
        said = _told(must(mode, ended))
    except Exception as e:  # noqa: BLE001 - whatever is in the way of its figures is why it failed
        return [holds(f"{mode}: exit 0", False, str(e))]
    # The first that differs says more than that they do.
    differ = [n for n, (a, b) in enumerate(zip(said["losses"], plain["losses"], strict=False)) if a != b]
    first = "equal" if not differ and len(said["losses"]) == len(plain["losses"]) else f"differ from step {differ[:1]}"
    return [
        holds(f"{mode}: exit 0", True, ""),
        same(f"{mode}: steps made", said["steps"], plain["steps"], how="the plain run"),
        same(f"{mode}: losses", first, "equal", how="the plain run, all digits"),
    ]


def _told(ended: Ended) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(ended.lines[-1][1])
    return told
