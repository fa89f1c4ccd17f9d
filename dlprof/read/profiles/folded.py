"""Reads folded stacks, `a;b;c 12`: of flame graph scripts, of `py-spy record -f raw`, of perf, of austin's text."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

from dlprof.errors import DlprofError
from dlprof.read.formats import Format, beginning
from dlprof.read.kineto.patterns import rank_in
from dlprof.read.opening import lines_of, open_file
from dlprof.read.profiles.frames import SPY_FRAME, SPY_THREAD, Frame, Stacks
from dlprof.read.sources import Reading

_WEIGHT = re.compile(r"(\d{1,18})(?:\.\d{1,9})?")
# py-spy writes with --subprocesses first process 12:"python ...".
_SPY_PROCESS = re.compile(r'process \d+:".*?"')
# austin: P1234;T0:5678;file:name:12;... and its weight in µs (a time), or µs,0 or 1,bytes (all metrics).
_AUSTIN = re.compile(r"P\d+;T[^;]*")
_AUSTIN_FRAME = re.compile(r"(.*):([^:]*(?:<[^:]*>)?[^:]*):(\d{1,9})")
_AUSTIN_MODE = re.compile(r"# mode: (\w+)")

# A longer frame is taken for a name: what separates its parts is looked for in the time of its length squared.
_LONGEST = 2_000

_LEAST = 0.8  # of the first lines, that must be such stacks


def begins(head: bytes) -> bool:
    """Return whether the first lines of a file are folded stacks, most of all."""
    if head.startswith(b"# austin"):
        return True
    if b"\0" in head or head.lstrip().startswith((b"{", b"[", b"<svg", b"<?xml", b"<!", b"<html")):
        return False
    lines = head.decode(errors="replace").splitlines()
    lines = [line for line in (lines[:-1] if len(lines) > 1 else lines)[:40] if line.strip() and line[0] != "#"]
    fit = sum(_is_stack(line) for line in lines)
    return fit > 0 and fit >= _LEAST * len(lines)


def _is_stack(line: str) -> bool:
    """Return whether a line is a stack and its weight: frames joined by `;` without a space after it, or py-spy's."""
    stack, weight = _halves(line)
    frames = stack.split(";")
    several = len(frames) > 1 and all(frame and not frame.startswith(" ") for frame in frames)
    return weight > 0 and (several or _spy(frames[0]) is not None)


def _halves(line: str) -> tuple[str, int]:
    """Return the stack and the weight that a line holds; weight 0 where it holds none."""
    parts = line.rsplit(None, 1)
    found = _WEIGHT.fullmatch(parts[1]) if len(parts) == 2 else None
    return (parts[0], int(found[1])) if found else (line, 0)


def _spy(text: str) -> re.Match[str] | None:
    """Return the parts of a frame as py-spy writes it; None if it is another's."""
    return SPY_FRAME.fullmatch(text) if len(text) <= _LONGEST else None


def read(path: Path, piece: str = "") -> Reading:  # noqa: ARG001 - one piece is all of it
    """Return the table "stacks". A cut end loses its stack alone.

    Raises DlprofError if the file cannot be read or holds no stack.
    """
    bad = 0
    stacks: Stacks | None = None
    austin, mode = False, "wall"
    with open_file(path) as file:
        for lines in lines_of(file):
            for raw in lines:
                line = raw.decode(errors="replace").strip()
                if line.startswith("#"):
                    austin = austin or line.startswith("# austin")
                    mode = found[1] if (found := _AUSTIN_MODE.match(line)) else mode
                    continue
                if not line:
                    continue
                if stacks is None:
                    stacks, take = _format(path, line, mode, austin)
                if not take(stacks, line):
                    bad += 1
    if stacks is None or not len(stacks):
        raise DlprofError(f"{path}: no folded stacks (`a;b;c 12`) in it")
    return stacks.reading(bad)


def _format(path: Path, line: str, mode: str, austin: bool) -> tuple[Stacks, Callable[[Stacks, str], bool]]:
    """Return where stacks go, and what takes a line, by the first line."""
    if austin or _AUSTIN.match(line):
        return Stacks(path, "austin", "bytes" if mode == "memory" else "ns"), _take_austin
    frames = _halves(line)[0].split(";")
    spy = _SPY_PROCESS.match(frames[0]) or SPY_THREAD.fullmatch(frames[0]) or _spy(frames[-1])
    return Stacks(path, "py-spy" if spy else "folded stacks", "samples"), _take


def _take(stacks: Stacks, line: str) -> bool:
    """Take a line of py-spy or of another tool; False where it is none."""
    texts, weight = _halves(line)
    if not weight:
        return False
    thread = ""
    while process := _SPY_PROCESS.match(texts):
        texts = texts[process.end() :].lstrip(";")
    first, _, rest = texts.partition(";")
    if named := SPY_THREAD.fullmatch(first):
        thread, texts = named[2] or f"thread {named[1]}", rest
    stacks.add(thread, [frame for text in texts.split(";") if (frame := _frame(text))], weight)
    return True


@cache
def _frame(text: str) -> Frame | None:
    text = text.strip()
    found = _spy(text)
    if found is None or ("." not in found[2] and not found[2].startswith("<")):
        return (text, "", 0) if text else None
    return found[1], found[2], int(found[3] or 0)


def _take_austin(stacks: Stacks, line: str) -> bool:
    texts, _, weights = line.rpartition(" ")
    numbers = weights.split(",")
    process, _, rest = texts.partition(";")
    thread, _, frames = rest.partition(";")
    if not process.startswith("P") or not thread.startswith("T") or not numbers[0].lstrip("-").isdigit():
        return False
    if len(numbers) > 1 and numbers[1] == "1":  # all metrics: idle
        return True
    scale = 1000 if stacks.unit == "ns" else 1
    named = [found for text in frames.split(";") if (found := _austin_frame(text))]
    # On Linux the main thread has its process's number.
    name = "MainThread" if thread.rpartition(":")[2].lstrip("T") == process[1:] else thread[1:]
    stacks.add(name, named, int(numbers[0][:18]) * scale)
    return True


@cache
def _austin_frame(text: str) -> Frame | None:
    found = _AUSTIN_FRAME.fullmatch(text) if len(text) <= _LONGEST else None
    return (found[2], found[1], int(found[3])) if found else None


FORMAT = Format(
    name="folded",
    title="folded stacks",
    recognised="lines of frames joined by `;`, each with a weight",
    recognise=beginning(begins, rank_in),
    read=read,
    tables=("stacks",),
    brings="a flame graph and the hottest functions",
    record=(
        "py-spy record --full-filenames -f raw -o stacks.txt -- python train.py; perf script | stackcollapse-perf.pl;"
        " austin -o stacks.austin python train.py"
    ),
)
