"""Reads speedscope's JSON, of py-spy and of any other tool: profiles of samples, or of events that open and close."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from dlprof.errors import DlprofError
from dlprof.read.formats import Format, beginning
from dlprof.read.kineto.json_stream import NOT_JSON
from dlprof.read.kineto.patterns import rank_in
from dlprof.read.opening import read_unpacked
from dlprof.read.profiles.frames import MOST_FRAMES, Frame, Stacks
from dlprof.read.sources import Reading

_NS = {"nanoseconds": 1.0, "microseconds": 1e3, "milliseconds": 1e6, "seconds": 1e9}
_SCHEMA = b"speedscope.app/file-format-schema"
_LARGEST = 1e18

# py-spy names a profile Thread 0x1FA08F100 "MainThread", with --subprocesses Process 12 before it.
_THREAD = re.compile(r'.*"(.*)"')


class _Profile(msgspec.Struct):
    type: str
    name: str = ""
    unit: str = "none"
    samples: list[list[int]] = []
    weights: list[float] = []
    events: list[dict[str, Any]] = []


class _Frame(msgspec.Struct):
    name: str = ""
    file: str | None = None
    line: int | None = None


class _Shared(msgspec.Struct):
    frames: list[_Frame] = []


class _File(msgspec.Struct):
    shared: _Shared
    profiles: list[_Profile]
    exporter: str = ""


_decode = msgspec.json.Decoder(_File).decode


def begins(head: bytes) -> bool:
    """Return whether a file begins as speedscope's JSON does: by its schema, or by its frames and profiles."""
    if head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] != b"{":
        return False
    return _SCHEMA in head or (b'"profiles"' in head and (b'"evented"' in head or b'"sampled"' in head))


def read(path: Path, piece: str = "") -> Reading:  # noqa: ARG001 - one piece is all of it
    """Return the table "stacks"; raises DlprofError if the file cannot be read, is cut off or holds no stack."""
    try:
        file = _decode(read_unpacked(path))
    except NOT_JSON as e:
        raise DlprofError(f"{path}: not a whole speedscope file: {str(e)[:120]}") from None
    frames: list[Frame] = [(f.name, f.file or "", max(f.line or 0, 0)) for f in file.shared.frames]
    timed = [p for p in file.profiles if p.unit in _NS]
    profiles = timed or [p for p in file.profiles if p.unit == "bytes"] or file.profiles
    unit = "ns" if timed else "bytes" if profiles and profiles[0].unit == "bytes" else "samples"
    tool = file.exporter.partition("@")[0].strip()[:40] or "speedscope"
    stacks = Stacks(path, tool, unit)
    bad = 0
    for profile in profiles:
        name = found[1] if (found := _THREAD.fullmatch(profile.name[:300])) else profile.name
        scale = _NS.get(profile.unit, 1.0)
        take = _events if profile.type == "evented" else _samples
        bad += take(stacks, name, profile, frames, scale)
    reading = stacks.reading(bad)
    left = len(file.profiles) - len(profiles)
    warnings = (
        (f"{path.name}: {left} of its profiles count something else than time, and are left out",) if left else ()
    )
    return Reading(reading.tables, reading.facts, (*reading.warnings, *warnings))


def _samples(stacks: Stacks, thread: str, profile: _Profile, frames: list[Frame], scale: float) -> int:
    """Take sampled stacks; return how many name frames that are not there."""
    bad = 0
    weights = profile.weights or [1.0] * len(profile.samples)
    for sample, weight in zip(profile.samples, weights, strict=False):
        if any(not 0 <= i < len(frames) for i in sample):
            bad += 1
        elif 0 < weight * scale < _LARGEST:
            stacks.add(thread, [frames[i] for i in sample[:MOST_FRAMES]], round(weight * scale))
    return bad


def _events(stacks: Stacks, thread: str, profile: _Profile, frames: list[Frame], scale: float) -> int:
    """Take what was on the stack between events; return how many events make no sense."""
    bad = 0
    stack: list[int] = []
    last = 0.0
    for event in profile.events:
        kind, at, frame = event.get("type"), event.get("at"), event.get("frame")
        if not isinstance(at, (int, float)) or type(frame) is not int or not 0 <= frame < len(frames):
            bad += 1
            continue
        if stack and 0 < (at - last) * scale < _LARGEST:
            stacks.add(thread, [frames[i] for i in stack[:MOST_FRAMES]], round((at - last) * scale))
        last = float(at)
        if kind == "O":
            stack.append(frame)
        elif kind == "C" and frame in stack:
            # A frame that closes takes with it what was not closed above it.
            del stack[len(stack) - 1 - stack[::-1].index(frame) :]
        else:
            bad += 1
    return bad


FORMAT = Format(
    name="speedscope",
    title="stacks for speedscope",
    recognised="JSON with speedscope's schema, or with sampled or evented profiles",
    recognise=beginning(begins, rank_in),
    read=read,
    tables=("stacks",),
    brings="a flame graph and the hottest functions",
    record="py-spy record --full-filenames -f speedscope -o stacks.json -- python train.py",
)
