"""From a slow script to a proven patch on a GPU: `dlprof fix`, and the script with its patch, by the script's clock."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.gpu import jobs, timing
from benchmarks.gpu.bench import SCRIPTS, Bench
from benchmarks.gpu.jobs import Ended, how, must, python, tail
from benchmarks.gpu.outcome import Part, between, holds, named, skipped

# Two runs of one script differ by so much on a lent machine: the interval that is printed is of runs made in turn.
_NOISE = 0.07


@dataclass(frozen=True)
class Fix:
    """A script of scripts/fix, whose one mistake a patch mends: what it must set, and options of `dlprof fix`."""

    script: str
    words: tuple[str, ...]  # one of them stands in what is kept
    options: tuple[str, ...] = ()


FIXES: tuple[Fix, ...] = (
    Fix("optimizer", ("optimizer.fused",)),
    Fix("average", ("average_of_weights",)),
    Fix("layout", ("model.memory_format",), ("--allow-numerics",)),
    Fix("loader", ("loader.num_workers",)),
)

# What one needs at least: a recording, its report, two pairs of trials, a comparison of losses, and the patched script.
# Importing torch takes two thirds of each of these runs.
_LEAST_S, _MOST_S = 120.0, 200.0
_TIMED_S = 30.0  # of that, for the script with and without its patch


def proven(bench: Bench) -> None:
    """Fix script after script while there is time."""
    left = bench.pick(FIXES, FIXES[:1])
    for n, fix in enumerate(left):
        if bench.left_s < _LEAST_S:
            bench.add(skipped(f"{fix.script}: kept", "no time left"))
            continue
        seconds = min(_MOST_S, max(_LEAST_S, bench.left_s / (len(left) - n)))
        bench.add(*named(fix.script, _fixed(bench, fix, seconds)))


def _fixed(bench: Bench, fix: Fix, seconds: float) -> list[Part]:
    """Let `dlprof fix` work on a copy of a script, apply its patch, and return what of it holds."""
    folder = bench.work / fix.script
    folder.mkdir()
    for name in ("own_clock.py", f"{fix.script}.py"):
        shutil.copy(SCRIPTS / "fix" / name, folder)
    script = [f"{fix.script}.py", "--device", bench.device, *bench.pick([], ["--tiny"])]
    minutes = (seconds - _TIMED_S) / 60
    asked = python("-m", "dlprof", "fix", "--minutes", f"{minutes:.2f}", "--format", "json", *fix.options)
    # It copies the folder in which it is called.
    limit = min(seconds + 30, bench.left_s)
    ended = jobs.run([*asked, "-o", bench.work / f"{fix.script}-run", *script], folder, limit, bench.usual)
    print("\n".join(f"    {text}" for text in ended.errors.splitlines() if text.startswith("dlprof:")), flush=True)
    must("dlprof fix", ended)
    said = json.loads(ended.out[ended.out.index("{") :])
    patch = said["fix"]["patch"]
    plain_ms: list[float] = []
    fixed_ms: list[float] = []
    if patch is not None:
        print("\n".join(f"    {text}" for text in Path(patch).read_text().splitlines()), flush=True)
        patched = bench.work / f"{fix.script}-patched"
        shutil.copytree(folder, patched)
        words = ["patch", "-p1", "-d", patched, "-i", patch]
        if shutil.which("patch") is None:
            words = ["git", "-C", patched, "apply", patch]
        applied = bench.run(words)
        if applied.code != 0:
            return [holds("the patch applies", False, how(applied))]
        began = time.monotonic()
        while not plain_ms or (len(plain_ms) < 2 and bench.left_s > 1.5 * (time.monotonic() - began)):
            for tree, times in ((folder, plain_ms), (patched, fixed_ms)):
                times.append(_timed(bench, [tree / script[0], *script[1:]], fix.script))
    return of_fix(said, fix.words, plain_ms, fixed_ms)


def _timed(bench: Bench, script: Sequence[str | Path], name: str) -> float:
    ended: Ended = bench.run(python(*script))
    step = timing.step_ms_said(ended.lines)
    if ended.code != 0 or step is None:
        print(tail(ended), flush=True)
        raise ValueError(f"{name} with and without its patch: {how(ended)}")
    print(f"    {name}: a step of {step} ms", flush=True)
    return step


def of_fix(
    said: Mapping[str, Any], words: Sequence[str], plain_ms: Sequence[float], fixed_ms: Sequence[float]
) -> list[Part]:
    """Judge what `dlprof fix --format json` said; the steps are of the script without and with its patch, in turn."""
    best, patch = said["best"], said["fix"]["patch"]
    tried = "; ".join(f"{list(a['settings'])}: {a['verdict']} {a['why']}".strip() for a in said["attempts"])
    if best is None:
        return [holds("kept", False, f"nothing was kept: {said['why'] or said['state']}; tried: {tried or 'nothing'}")]
    kept = json.dumps(best["settings"])
    parts = [
        holds("kept", any(word in kept for word in words), f"{kept}; tried: {tried}", how=kept),
        holds("losses", best["losses"] in ("equal", "within"), str(best["losses"]), how=str(best["losses"])),
    ]
    if patch is None or not plain_ms:
        return [*parts, holds("a patch", False, f"in words only: {said['fix']['words']}")]
    measured = fmean(plain_ms) / fmean(fixed_ms)
    printed = best["measured"]
    told = f"the script's own clock, {len(plain_ms)} times each way; {printed['ratio']:.3f} × was printed"
    least, most = printed["low"] * (1 - _NOISE), printed["high"] * (1 + _NOISE)
    return [*parts, between("gain of the patched script", measured, least, most, unit="×", how=told)]
