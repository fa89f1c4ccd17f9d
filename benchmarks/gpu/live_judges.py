"""What must hold of what dlprof says of a job while it runs (the check `live`)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.gpu.jobs import Ended, how
from benchmarks.gpu.outcome import Part, above, holds, near, same

NAME = "live_job.py"
UTILIZATION = "utilization.gpu"  # nvidia-smi's

# The parts that hold on a CPU as well, and those with a GPU's figures.
Found = tuple[Sequence[Part], Sequence[Part]]

# What says that py-spy is not allowed to look, or not there, by dlprof's own words.
_BLIND = ("cannot be read", "py-spy is not installed")


def of_top(text: Ended, told: Mapping[str, Any], step_s: float, used: Sequence[float]) -> Found:
    """Judge `top` by the job's own step and nvidia-smi's utilization, in per cent, of the same seconds."""
    runs = text.code == 0 and "running for" in text.out and told["state"] == "running"
    busy = told["ranks"][0]["machine"]["gpu_busy_share"] if told["ranks"] else None
    said_ms = 1e3 * told["step_s"] if told["step_s"] else None
    step = near("top: step", said_ms, 1e3 * step_s, share=0.1, unit="ms", how="the lines that the job prints")
    how_used = f"nvidia-smi's {UTILIZATION}, the median of {len(used)}"
    true = median(used) / 100 if used else None
    use = near("top: the GPU's use", busy, true, points=0.1, unit="share", how=how_used)
    return [holds("top: it runs", runs, f"{told['state']}: {text.out or how(text)}")], [step, use]


def of_blind(attached: Ended) -> str:
    """Return why no process can be looked into on this machine, as `attach` says it; "" where one can."""
    said = attached.errors.strip()
    return said if attached.code == 1 and any(words in said for words in _BLIND) else ""


def of_attach(attached: Ended, line: int, share: float) -> Found:
    """Judge `attach` by the line that waits, and the share of the time that the job itself measures there."""
    if attached.code != 0:
        return [holds("attach: exit 0", False, how(attached))], []
    parts = [part for rank in json.loads(attached.out) for part in rank["parts"]]
    device: Mapping[str, Any] = next((part for part in parts if part["what"] == "device"), {})
    place = next((place for place, *_ in device.get("lines", ())), None)
    waits = near("attach: waits", device.get("share"), share, points=0.1, unit="share", how="the job's own clock")
    return [
        holds("attach: exit 0", True, ""),
        same("attach: the line that waits for the device", place, f"{NAME}:{line}", how="the script"),
    ], [waits]


def of_ps(looks: Sequence[Sequence[Mapping[str, Any]]], pid: int) -> list[Part]:
    """Judge the rows of several calls of `ps`: a job that waits for its device most of the time, and trains."""
    rows = [row for look in looks for row in look if row["pid"] == pid]
    listed = len(rows) == len(looks) and all(row["ranks"] == 1 and not row["run"] for row in rows)
    said = [str(row["now"]) for row in rows]
    never = [now for now in said if not now.startswith("trains") and now != "runs Python"]
    right = not never and any("waits for its device" in now for now in said)
    return [
        holds("ps: lists it", listed, f"of process {pid}, in {len(looks)} calls: {rows}"),
        holds("ps: its word", right, f"it said {said}", how="most of each step waits for the device"),
    ]


def of_ps_gpu(looks: Sequence[Sequence[Mapping[str, Any]]], pid: int) -> Part:
    """Judge how busy `ps` says the job's GPU is; others compute on it meanwhile."""
    shares = [row["gpu_share"] for look in looks for row in look if row["pid"] == pid]
    most = max((share for share in shares if share is not None), default=None)
    return above("ps: its GPU's use", most, 0.4, unit="share", how="the job alone keeps it busy for 70 %")


def of_refusal(ended: Ended, goes_on: bool) -> list[Part]:
    """Judge `attach --inject` where nothing can do it: one line, and the job goes on."""
    said = ended.errors.strip()
    refused = ended.code == 1 and "needs gdb" in said and len(said.splitlines()) == 1
    return [
        holds("inject without gdb: refused in a line", refused, f"{how(ended)}; {said}"),
        holds("inject without gdb: the job goes on", goes_on, "it has ended"),
    ]


def of_injected(ended: Ended, steps: int, goes_on: bool) -> list[Part]:
    """Judge `attach --inject`: exit code 0, steps in its log, and the job goes on."""
    return [
        holds("inject: steps are recorded", ended.code == 0 and steps > 0, f"{steps} steps; {how(ended)}"),
        holds("inject: the job goes on", goes_on, "it has ended"),
    ]


def of_hang(name: str, told: Mapping[str, Any], line: int, least_s: float, most_s: float) -> Part:
    """Judge what is said of the job that stands still: the rank, its line, that it waits for the device, since when."""
    why, still_s = str(told.get("why")), float(told.get("still_s") or 0.0)
    words = ("Rank 0 waits for its device in .item()", f"{NAME}:{line}")
    right = all(word in why for word in words) and least_s <= still_s <= most_s
    return holds(f"{name}: the rank, its line, the device", right, f"{why} (for {still_s:.1f} s)", how="the script")


def of_losses(name: str, rows: Sequence[Mapping[str, Any]], plain: Sequence[Mapping[str, Any]]) -> Part:
    """Judge whether a recorded job printed the losses of the other one, which dlprof looked into meanwhile."""
    true = {row["step"]: row["loss"] for row in plain if "loss" in row}
    both = [(row["loss"], true[row["step"]]) for row in rows if "loss" in row and row["step"] in true]
    equal = sum(a == b for a, b in both)
    why = f"{equal} of {len(both)} are equal"
    return holds(f"{name}: losses", bool(both) and equal == len(both), why, how="the plain job's, all digits")
