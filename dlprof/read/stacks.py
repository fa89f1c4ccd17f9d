"""Reads the folded stacks that py-spy sampled in a rank and its workers, with role, thread and phase of the step."""

from __future__ import annotations

import itertools
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Annotated

import msgspec
import pandas as pd

from dlprof import schema
from dlprof.errors import DlprofError
from dlprof.read.kineto.json_stream import NOT_JSON
from dlprof.read.limits import MOST_UNPACKED, most_unpacked
from dlprof.read.opening import read_file
from dlprof.read.profiles.frames import SPY_FRAME, SPY_THREAD, is_worker_loop, phase_in
from dlprof.read.records import lines_in
from dlprof.read.sources import Reading

# Name, file and line.
_Frame = tuple[str, str, str]

_Ns = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]

# File, line and text of a line of the user's.
_Text = tuple[str, Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)], Annotated[str, msgspec.Meta(max_length=400)]]

# File, line, and the line where the innermost loop around it begins.
_Loop = tuple[str, int, int]


class _Burst(msgspec.Struct):
    start_ns: _Ns
    end_ns: _Ns
    lines: Annotated[list[_Text], msgspec.Meta(max_length=1000)] = []
    loops: Annotated[list[_Loop], msgspec.Meta(max_length=1000)] = []
    start: bool = False


_burst = msgspec.json.Decoder(_Burst).decode

_TIMES = re.compile("[0-9]{1,15}")
_PROCESS = re.compile(r'process (\d+):"')
_COMMAND_END = re.compile(r'";(?=process \d+:"|thread \()')

# Roles in the burst before a process was a rank, by what the thread is.
_STARTING = {"main": "start", "worker": "start_worker"}

# The recorder's files: its hooks are between the script's frames. Older versions had them in the package's top folder.
_OURS = re.compile(
    r"[/\\]dlprof[/\\](record[/\\](\w+[/\\])*\w+|(__init__|hooks|recorder|step_clock|observed|marks|overrides)|(collectors|inject)[/\\]\w+)\.py$"
)
# Frames that call this, or the profiler from a file of the recorder, do the recorder's work, not the script's.
_OUR_WORK = re.compile(r"[/\\]dlprof[/\\](record[/\\])?recorder\.py$")
_PROFILER = re.compile(r"[/\\]torch[/\\](profiler[/\\]\w+|autograd[/\\]profiler)\.py$")


class _Packed(msgspec.Struct):
    gzip: bytes  # in JSON as base64


_packed = msgspec.json.Decoder(_Packed).decode


def read(path: Path, begins: str = "") -> Reading:
    """Return the table "stacks"; facts: `stacks` with bursts, sampled seconds and lines, if the file has them.

    `lines`: the source of lines that were seen much: file, line, text, and the line of the loop that it is in, 0: none
    that is not the training's. `start`: start_ns and end_ns of the burst before the process was a rank.

    If the end is cut off, only its stacks are lost. `begins`: see `records.lines_in`. Raises DlprofError if the
    file cannot be read or holds no stack.
    """
    lines: Counter[tuple[bool, str]] = Counter()
    bursts = ns = bad = 0
    cut = False
    start: dict[str, int] = {}
    warnings: list[str] = []
    texts: dict[tuple[str, int], str] = {}
    loops: dict[tuple[str, int], int] = {}
    for text, cut in _parts_of(path, begins, warnings):  # noqa: B007 - of the last one
        starts = False
        for line in text.split("\n"):
            folded, _, times = line.rpartition(" ")
            if _TIMES.fullmatch(times) and folded.startswith("process "):
                lines[starts, folded] += int(times)
            elif line.startswith("#"):
                try:
                    burst = _burst(line[1:])
                    starts = burst.start
                    if starts:
                        start = {"start_ns": burst.start_ns, "end_ns": burst.end_ns}
                    else:
                        ns += burst.end_ns - burst.start_ns
                        bursts += 1
                    texts.update(((file, at), source) for file, at, source in burst.lines)
                    loops.update(((file, at), loop) for file, at, loop in burst.loops)
                except NOT_JSON:
                    bad += 1
            elif line:
                bad += 1
    seen: Counter[tuple[str, str, str, str]] = Counter()
    for (starts, folded), count in lines.items():
        if (row := _row(folded)) is not None and (not starts or row[0] in _STARTING):
            seen[(_STARTING[row[0]], *row[1:]) if starts else row] += count
    lost = bad - cut
    if lost > 0 and not seen:
        raise DlprofError(f"{path}: no stacks of py-spy in it")
    if lost > 0:
        warnings.append(f"{path.name}: {lost:,} malformed lines are left out")
    frame = pd.DataFrame([(*row, n, "", "samples") for row, n in sorted(seen.items())], columns=list(schema.STACKS))
    known = [{"file": f, "line": at, "text": text, "loop": loops.get((f, at), 0)} for (f, at), text in texts.items()]
    seen_of: dict[str, object] = {"bursts": bursts, "seconds": ns / 1e9}
    seen_of |= {name: of for name, of in (("lines", known), ("start", start)) if of}
    facts = {"stacks": seen_of} if (bursts or start) and seen else {}
    return Reading({"stacks": schema.check("stacks", frame.astype(dict(schema.STACKS)))}, facts, tuple(warnings))


def _parts_of(path: Path, begins: str, warnings: list[str]) -> Iterator[tuple[str, bool]]:
    """Return the text of each burst, unpacked as far as possible, and whether its last line may be partial."""
    data = _packed_in(path, begins, warnings) if begins else read_file(path)
    left = most_unpacked(len(data))
    if not begins and path.suffix != ".gz":
        yield data.decode(errors="replace"), not data.endswith(b"\n")
        return
    while data:
        member = zlib.decompressobj(wbits=31)
        try:
            text = member.decompress(data, left)
        except zlib.error:
            yield "", True
            return
        yield text.decode(errors="replace"), not member.eof
        left -= len(text)
        if left <= 0:
            warnings.append(f"{path.name}: unpacks to more than {MOST_UNPACKED} times its size (--no-limits reads all)")
            return
        data = member.unused_data


def _packed_in(path: Path, begins: str, warnings: list[str]) -> bytes:
    """Return the bursts of a log, one after the other; of a cut last line nothing."""
    found, bad, last_is_bad = [], 0, False
    for line in itertools.chain(*lines_in(path, begins)):
        try:
            found.append(_packed(line).gzip)
            last_is_bad = False
        except NOT_JSON:  # noqa: PERF203 - a line a burst
            bad += 1
            last_is_bad = True
    if lost := bad - last_is_bad:
        warnings.append(f"{path.name}: {lost:,} malformed lines are left out")
    return b"".join(found)


def _row(folded: str) -> tuple[str, str, str, str] | None:
    """Return role, thread, phase and stack of one folded line; None: a thread without Python code of the job.

    Work of a rank for the recorder, such as writing its trace, does not belong to the job.
    """
    depth = 0
    while (process := _PROCESS.match(folded)) is not None:
        # The command line may hold anything; what follows it is the next process or the thread.
        end = _COMMAND_END.search(folded, process.end())
        if end is None:
            return None
        folded = folded[end.end() :]
        depth += 1
    head, _, stack = folded.partition(";")
    thread = SPY_THREAD.match(head)
    texts = stack.split(";")
    if thread is None:
        return None
    name = thread[2] or "unnamed"
    role = "other" if depth > 1 else "main" if name == "MainThread" else "thread"
    if depth > 1 and name == "MainThread":
        named = ((n, _frame(text)[0]) for n, text in enumerate(texts))
        at = next((n for n, frame in named if frame and is_worker_loop(frame[0], frame[1])), None)
        if at is not None:
            role, texts = "worker", texts[at:]
    frames = _of_the_job(texts)
    if not frames:
        return None
    phase = (phase_in(frames) or "rest") if role == "main" else ""
    return role, name, phase, ";".join(f"{function} ({file}:{line})" for function, file, line in frames)


def _of_the_job(texts: list[str]) -> list[_Frame]:
    """Return the frames without the recorder's; none if the recorder is at work."""
    frames: list[_Frame] = []
    after_ours = False
    for text in texts:
        frame, kind = _frame(text)
        if kind == "work" or (kind == "profiler" and after_ours):
            return []
        after_ours = kind == "ours"
        if frame is not None and not after_ours:
            frames.append(frame)
    return frames


@cache
def _frame(text: str) -> tuple[_Frame | None, str]:
    """Return name, file and line of a frame, and whether it is the recorder's own work, only ours, or a profiler's."""
    found = SPY_FRAME.fullmatch(text)
    if found is None:
        return None, ""
    file = found[2]
    kinds = (("work", _OUR_WORK), ("ours", _OURS), ("profiler", _PROFILER))
    return (found[1], file, found[3] or "0"), next((kind for kind, files in kinds if files.search(file)), "")
