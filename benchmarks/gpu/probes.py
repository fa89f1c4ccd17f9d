"""Whether the machine's sources of figures answer at all, and the tests that only a GPU can run."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu import jobs
from benchmarks.gpu.bench import SCRIPTS, Bench
from benchmarks.gpu.jobs import must, python
from benchmarks.gpu.outcome import Part, above, holds, same, skipped

# What `dlprof doctor` must find on a machine with a GPU.
SOURCES = ("recorder", "torch", "torch.profiler", "NVML")

_MARK = re.compile(r"^@pytest\.mark\.gpu$", re.MULTILINE)

# Words of a skip that is for want of a GPU.
_WANT = ("gpu", "cuda", "nvidia", "device")


def doctor(bench: Bench) -> None:
    """Ask doctor, and each source by itself."""
    told = must("dlprof doctor", bench.run(python("-m", "dlprof", "doctor", "--format", "json"), 90.0))
    bench.add(*of_doctor(json.loads(told.out)))
    asked = bench.plain(SCRIPTS / "counters.py", "--device", bench.device)
    bench.add(*of_counters(json.loads(asked.lines[-1][1])))


def of_doctor(told: Mapping[str, Any]) -> list[Part]:
    """Judge what doctor says."""
    checks = {check["source"]: check for check in told["checks"]}
    parts = []
    for source in SOURCES:
        check = checks.get(source)
        if check is None:
            parts.append(holds(f"doctor: {source}", False, "doctor does not name it"))
            continue
        parts.append(holds(f"doctor: {source}", check["works"], f"{check['found']} → {check.get('remedy', '')}"))
    seen = str(checks.get("torch", {}).get("found", ""))
    parts.append(holds("doctor sees the GPU", "sees" in seen and "sees none" not in seen, seen))
    return parts


def of_counters(told: Mapping[str, Any]) -> list[Part]:
    """Judge what CUPTI, NVML and GPM gave to a script without dlprof."""
    parts = [above("kernels in torch's own trace", told["events"]["kernel"], 0, unit="", how="torch.profiler alone")]
    nvml = told.get("nvml")
    if not isinstance(nvml, Mapping):
        return [*parts, holds("NVML", False, str(nvml or "was not asked"))]
    parts.append(above("NVML: power", nvml["power_w"], 0, unit="W", how="asked by a script"))
    gpm = nvml["gpm"]
    if isinstance(gpm, Mapping):
        parts.append(above("GPM: tensor cores", gpm.get("tensor_busy"), 0, unit="share", how="bf16 products meanwhile"))
    elif "Hopper" in gpm:
        parts.append(skipped("GPM", gpm))
    else:
        parts.append(holds("GPM", False, gpm))
    return parts


def marked_tests(bench: Bench) -> None:
    """Run every test that is marked gpu."""
    files = files_with_mark(jobs.ROOT / "tests")
    if bench.run(python("-c", "import pytest")).code != 0:
        bench.add(skipped("tests", f"pytest is not installed for {sys.executable}"))
        return
    report = bench.work / "tests.xml"
    # Options that need plugins are left out of pytest's usual ones: they may not be here.
    words = [
        "-m",
        "pytest",
        "-q",
        "-o",
        "addopts=",
        "-p",
        "no:cacheprovider",
        "-m",
        "gpu",
        "-raR",
        f"--junitxml={report}",
    ]
    # Each of them imports torch, and starts CUDA, in processes of its own: that is what takes their time.
    if importlib.util.find_spec("xdist") is not None:
        words += ["-n", str(max(1, (os.cpu_count() or 1) // 2))]
    ended = bench.run(python(*words, f"--rootdir={jobs.ROOT}", *files), bench.left_s)
    if not report.exists():
        raise jobs.JobFailedError(f"pytest: {jobs.how(ended)}", jobs.tail(ended))
    parts = of_tests(report.read_text())
    bench.add(*parts)
    if any(part.state == "failed" for part in parts):
        print(jobs.tail(ended), flush=True)


def files_with_mark(tests: Path) -> list[Path]:
    """List the files of tests that are marked gpu: the others need not even be imported."""
    return sorted(path for path in tests.rglob("test_*.py") if _MARK.search(path.read_text()))


def of_tests(report: str) -> list[Part]:
    """Judge a JUnit report of pytest's: all passed, and none skipped for want of a GPU."""
    cases = list(ET.fromstring(report).iter("testcase"))
    failed = [_name(case) for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skips = [(_name(case), str(skip.get("message"))) for case in cases if (skip := case.find("skipped")) is not None]
    wanting = [f"{name}: {why}" for name, why in skips if any(word in why.lower() for word in _WANT)]
    others = [skipped(name, why) for name, why in skips if not any(word in why.lower() for word in _WANT)]
    return [
        above("tests marked gpu", len(cases), 0, unit="", how="pytest -m gpu"),
        same("that failed", len(failed), 0, how=", ".join(failed)),
        holds("none skipped for want of a GPU", not wanting, "; ".join(wanting)),
        *others,
    ]


def _name(case: ET.Element) -> str:
    return f"{str(case.get('classname')).rpartition('.')[2]}::{case.get('name')}"
