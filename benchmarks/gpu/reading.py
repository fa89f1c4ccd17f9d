"""What a run folder says: dlprof's result and what it recorded, read as plain JSON.

Nothing of dlprof is imported: what is judged here is what a user gets.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Result = Mapping[str, Any]


def result(folder: Path) -> Result:
    """Read the result.json of a run; raise OSError or ValueError where there is none that can be read."""
    data: Result = json.loads((folder / "result.json").read_text())
    return data


def facts(folder: Path, rank: int = 0) -> Mapping[str, Any]:
    """Read the facts of a rank."""
    data: Mapping[str, Any] = json.loads((folder / "ranks" / f"{rank:05d}" / "facts.json").read_text())
    return data


def lines(path: Path) -> list[dict[str, Any]]:
    """Read a .jsonl file, of a killed job's last line what is whole; [] where there is none."""
    found: list[dict[str, Any]] = []
    if not path.exists():
        return found
    for text in path.read_text().splitlines():
        try:
            found.append(json.loads(text))
        except ValueError:  # noqa: PERF203 - the last line alone may be cut off
            break
    return found


def samples(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    """Read what was sampled of a rank's GPU."""
    rows = [row for path in folder.glob("hosts/*/samples.jsonl") for row in lines(path)]
    found = [row for row in rows if (row.get("log"), row.get("rank")) == ("gpu", f"{rank:05d}")]
    return found or lines(folder / "ranks" / f"{rank:05d}" / "gpu.jsonl")  # of an older recording


def steps_counted(folder: Path, rank: int = 0) -> int:
    """Return how many training steps the step log holds; short ones may share a line."""
    at = folder / "ranks" / f"{rank:05d}"
    rows = [row for row in lines(at / "records.jsonl") if row.get("log") == "steps"] or lines(at / "steps.jsonl")
    return sum(int(row.get("steps") or 1) for row in rows if row.get("kind") == "train")


def trace_path(folder: Path, rank: int = 0) -> Path | None:
    """Return where a rank's trace is; None where there is none."""
    found = sorted((folder / "ranks" / f"{rank:05d}").glob("trace.json*"))
    return found[0] if found else None


def device_events(path: Path) -> dict[str, int]:
    """Count the events of a Kineto trace that ran on a device, by kind: kernel, gpu_memcpy, gpu_memset."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        events = json.loads(file.read()).get("traceEvents", [])
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    return {kind: sum(event.get("cat") == kind for event in events) for kind in kinds}


def step_ms(said: Result) -> float | None:
    """Return the mean steady step."""
    window = said.get("window")
    return None if window is None else float(window["step_ns"]) / 1e6


def of_window(said: Result, key: str) -> float | None:
    """Return a figure of the result's window: overhead, mfu, flops, noise_ns; None where it has none."""
    value = (said.get("window") or {}).get(key)
    return None if value is None else float(value)


def share(said: Result, category: str, rank: int = 0) -> float | None:
    """Return the share of a rank's mean steady step in a category: 0 where it takes none, None where none is told."""
    parts = [p for p in said.get("time") or () if p["rank"] == rank]
    return sum(float(p["share"]) for p in parts if p["category"] == category) if parts else None


def outcome(said: Result, rule: str) -> Mapping[str, Any] | None:
    """Return what became of a rule; None where the result does not name it."""
    return next((o for o in said.get("outcomes") or () if o["id"] == rule), None)


def is_found(said: Result, rule: str) -> bool:
    """Whether a rule found its bottleneck."""
    one = outcome(said, rule)
    return one is not None and one["state"] == "found"


def saving_ms(said: Result, *rules: str) -> float | None:
    """Return the largest saving that one of these rules found; None where none found anything."""
    found = [float(o["saving_ns"]) / 1e6 for rule in rules if (o := outcome(said, rule)) and o["state"] == "found"]
    return max(found, default=None)


def findings(said: Result, least: float = 0.0) -> list[str]:
    """List the findings of at least this share of the step, with their share, as "input_wait 7 %"."""
    found = [o for o in said.get("outcomes") or () if o["state"] == "found" and float(o["share"]) >= least]
    return [f"{o['id']} {100 * float(o['share']):.0f} %" for o in found]


def errors(said: Result) -> list[str]:
    """List the rules that ended with an error, and why."""
    return [f"{o['id']}: {o.get('why') or '?'}" for o in said.get("outcomes") or () if o["state"] == "error"]


def waits_ms(said: Result, rank: int, culprit: int) -> float | None:
    """Return how long a rank waits for another in the mean steady step; None where no waiting was told at all."""
    blame: Sequence[Mapping[str, Any]] = said.get("blame") or ()
    if not blame:
        return None
    return sum(float(b["ns"]) for b in blame if b["rank"] == rank and b["culprit"] == culprit) / 1e6


def matched_collectives(said: Result) -> float | None:
    """Return how many collectives of a mean traced step were matched over all ranks; None where none are told."""
    rows = said.get("exchanges") or ()
    if not rows:
        return None
    return sum(float(row["count"]) for row in rows if row.get("wait_ns") is not None)


def cures(said: Result, least: float = 0.0) -> list[Mapping[str, Any]]:
    """List the findings that name a cure, in their order, of at least this share of the step.

    A change of the training itself (`training`), as another batch size is, cures nothing: where a finding names no
    other change, it is none of them. Nor is what stands at the clock, which makes a script wait for others to end.
    """
    found = [o for o in said.get("outcomes") or () if o["state"] == "found" and float(o["share"]) >= least]
    found = [o for o in found if not any(str(place.get("file")).endswith("/clock.py") for place in o["where"][:1])]
    return [o for o in found if not o["changes"] or not all(change.get("training") for change in o["changes"])]


def lines_of(outcome: Mapping[str, Any]) -> list[int]:
    """Return the lines that a finding points at first: where it stands, and the call that takes its first change."""
    places = [*outcome["where"][:1], *(change["at"] for change in outcome["changes"][:1] if change.get("at"))]
    return list(dict.fromkeys(int(place["line"]) for place in places if place["line"]))


def change_of(outcome: Mapping[str, Any]) -> str:
    """Return the first change of a finding: its sentence, and its settings as name=value; "" where it names none."""
    first = next(iter(outcome["changes"]), None)
    if first is None:
        return ""
    settings = [f"{setting['name']}={setting['to']}" for setting in first["settings"]]
    return f"{first['text']} ({', '.join(settings)})" if settings else str(first["text"])


def after_ms(said: Result, outcome: Mapping[str, Any]) -> tuple[float, float, float] | None:
    """Return the step after a finding's change, and the least and most that the report's ± allows; None: no step.

    A bound allows any step between it and the present one. What an epoch's beginning takes is no part of the steady
    step: of such a finding it is the step of the whole training loop.
    """
    saving, share = float(outcome["saving_ns"]) / 1e6, float(outcome["share"])
    step = saving / share if share > 0 else step_ms(said)
    if step is None:
        return None
    after, margin = step - saving, float(outcome["error_ns"]) / 1e6
    if outcome["at_most"]:
        return after, after, step
    return after, max(after - margin, 0.0), after + margin
