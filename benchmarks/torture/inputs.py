"""Truncates and changes every kind of file that dlprof reads, at random, and reports on what is left of it.

    python -m benchmarks.torture.inputs --number 300 --seed 1

A source is a file or a folder that tests/fixtures makes, tests/golden holds, or ../shared/traces has where it is there.
Each input is a copy of one with one of its files cut off, or with bytes or values of it changed. `dlprof report` runs
on it in a child process with a limit on memory and time. The table counts by kind of source: reports without a new
warning, with one, inputs that were refused in one line, tracebacks (of a command, of a measure or of a rule), and
children that were ended at a limit. The last two must be 0; else the command fails, and names the inputs.
"""

from __future__ import annotations

import argparse
import bz2
import gzip
import json
import lzma
import os
import random
import re
import resource
import shutil
import sys
import tarfile
import tempfile
import time
import zipfile
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.fixtures import dialects, dumps, runs, traces
from tests.fixtures.places import GOLDEN, TRACES

OUTCOMES = ("full", "partial", "refused", "traceback", "over the limit")
MEMORY_BYTES, SECONDS = 6 << 30, 120
LARGEST = 4 << 20  # bytes of a source: larger files take longer and show the same

# What a measure, a rule or a reader says that broke.
_BROKE = re.compile(r"\b(?:[A-Z]\w+Error\b|dlprof failed|a measure failed)")
_VALUES = (b"null", b"-1", b"0", b"1e999", b"9" * 400, b"1000000000", b'""', b"[]", b"{}", b"NaN", b"true")


class Tried(NamedTuple):
    """What became of an input: one of OUTCOMES, and what was said."""

    outcome: str
    said: str = ""


def sources(folder: Path) -> dict[str, Path]:
    """Return the sources by name: those that are made lie in the folder."""
    made = traces.training(rank=0)
    for name, data in {
        "kineto": traces.dump(made),
        "kineto_list": traces.dump(made, "list"),
        "kineto_gz": gzip.compress(traces.dump(made)),
        "xz": lzma.compress(traces.dump(made)),
        "bz2": bz2.compress(traces.dump(made)),
        "merged": traces.dump(dialects.merged(made, traces.training(rank=1), named=True)),
        "horovod": dialects.horovod().encode(),
        "rocprof_json": json.dumps(dialects.rocprof_json()).encode(),
        "execution_trace": dialects.execution_trace().encode(),
    }.items():
        (folder / name).mkdir()
        (folder / name / "rank0.json").write_bytes(data)
    dialects.rocprof_csv(_new(folder / "rocprof_csv"))
    dumps.hung(_new(folder / "flight_recorder"))
    dumps.write(_new(folder / "snapshot") / "snapshot.pickle", dumps.training().snapshot())
    run = runs.cpu_run(_new(folder / "run"), 2 * runs.MS, 4 * runs.MS)
    job = runs.foreign(_new(folder / "job"), made, traces.training(rank=1))
    with tarfile.open(_new(folder / "tar") / "job.tar.gz", "w:gz") as archive:
        archive.add(job, "job")
    with zipfile.ZipFile(_new(folder / "zip") / "run.zip", "w", zipfile.ZIP_DEFLATED) as packed:
        for path in run.rglob("*"):
            packed.write(path, path.relative_to(run))
    found = {path.name: path for path in sorted(folder.iterdir())}
    for below, of in ((GOLDEN, "golden"), (TRACES, "shared")):
        for path in sorted(below.rglob("*")) if below.is_dir() else ():
            if path.is_file() and path.suffix not in (".py", ".md") and 0 < path.stat().st_size <= LARGEST:
                found[f"{of}/{path.relative_to(below)}"] = path
    return found


def _new(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return folder


def changed(data: bytes, at: random.Random) -> bytes:
    """Cut some bytes off, or replace, repeat or leave out some of them."""
    if not data:
        return at.randbytes(at.randrange(64))
    begin, length = at.randrange(len(data)), at.choice((1, 4, 64, 4_096))
    numbers = [m.span() for m in re.finditer(rb'(?<=[:\[, ])(?:-?\d[\d.]*|"[^"\n]{0,200}")', data[begin:][:20_000])]
    ways: list[Callable[[], bytes]] = [
        lambda: data[:begin],
        lambda: data[:begin] + at.randbytes(length) + data[begin + length :],
        lambda: data[:begin] + data[begin + length :],
        lambda: data[: begin + length] + data[begin:],
        lambda: data[:begin] + bytes((data[begin] ^ 1 << at.randrange(8),)) + data[begin + 1 :],
    ]
    if numbers:
        first, last = at.choice(numbers)
        ways += [lambda: data[: begin + first] + at.choice(_VALUES) + data[begin + last :]] * 3
    return at.choice(ways)()


def damaged(path: Path, at: random.Random) -> None:
    """Change a file, or what a gzip file holds."""
    data = path.read_bytes()
    packed = data.startswith(b"\x1f\x8b") and at.random() < 0.7
    if packed:
        data = gzip.decompress(data)
    for _ in range(at.choice((1, 1, 1, 3, 10))):
        data = changed(data, at)
    path.write_bytes(gzip.compress(data, 1) if packed else data)


def copied(source: Path, folder: Path) -> Path:
    """Copy a source; return what is to be reported on: the one file of a folder itself."""
    if source.is_file():
        shutil.copy(source, folder)
        (folder / source.name).chmod(0o600)
        return folder / source.name
    shutil.copytree(source, folder / source.name)
    files = list((folder / source.name).iterdir())
    return files[0] if len(files) == 1 else folder / source.name


def reported(path: Path, work: Path, memory: int = MEMORY_BYTES, seconds: float = SECONDS) -> Tried:
    """Run `dlprof report` on a path in a child process with these limits, and judge what it says."""
    out, err = work / "out", work / "err"
    child = os.fork()
    if not child:
        _in_child(path, work, out, err, memory)
    until = time.monotonic() + seconds
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > until:
            os.kill(child, 9)
            os.waitpid(child, 0)
            return Tried("over the limit", f"{seconds:.0f} s")
        time.sleep(0.01)
    code, complaint = os.waitstatus_to_exitcode(ended[1]), err.read_text(errors="replace")
    if "MemoryError" in complaint or code < 0:
        return Tried("over the limit", f"{code}: {complaint[-300:]}")
    if code == 1 and complaint.count("\n") == 1 and complaint.startswith("dlprof: ") and not _BROKE.search(complaint):
        return Tried("refused", complaint)
    if code:
        return Tried("traceback", f"{code}: {complaint[-2_000:]}")
    result = json.loads(out.read_bytes())
    broke = [o["why"] for o in result["outcomes"] if o["state"] == "error"]
    broke += [w for w in result["run"]["warnings"] if _BROKE.search(w)]
    if any("MemoryError" in text for text in broke):
        return Tried("over the limit", broke[0])
    return Tried("traceback", broke[0]) if broke else Tried("full", "\n".join(result["run"]["warnings"]))


def _in_child(path: Path, work: Path, out: Path, err: Path, memory: int) -> None:
    code = 99
    try:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for number, file in ((1, out), (2, err)):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
        os.environ["TMPDIR"] = tempfile.tempdir = str(_new(work / "temporary"))
        sys.argv = [
            "dlprof",
            "report",
            str(path),
            "-o",
            str(work / "report"),
            *["--quiet", "--jobs", "1", "--format", "json"],
        ]
        from dlprof.cli import main

        main()
        code = 0
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else int(e.code is not None)
    except BaseException:  # noqa: BLE001 - what it is stands in the file
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def torture(number: int, seed: int, only: str = "") -> tuple[dict[str, Counter[str]], list[str]]:
    """Try so many inputs; return how many came to which outcome by kind of source, and the inputs that must not be."""
    import dlprof.analysis.diagnosis
    import dlprof.analysis.rules
    import dlprof.report.html  # noqa: F401 - imported once, and not by each child

    counts: dict[str, Counter[str]] = defaultdict(Counter)
    wrong = []
    with tempfile.TemporaryDirectory(prefix="dlprof-torture-") as name:
        below = Path(name)
        known = {n: path for n, path in sources(_new(below / "sources")).items() if only in n}
        sound: dict[str, set[str]] = {}
        for n in range(number):
            at = random.Random(f"{seed} {n}")
            source = sorted(known)[n % len(known)]
            if source not in sound:
                with tempfile.TemporaryDirectory(dir=below) as work:
                    plain = reported(copied(known[source], _new(Path(work) / "input")), Path(work))
                    sound[source] = set(plain.said.splitlines())
            with tempfile.TemporaryDirectory(dir=below) as work:
                path = copied(known[source], _new(Path(work) / "input"))
                damaged(at.choice(sorted(p for p in (Path(work) / "input").rglob("*") if p.is_file())), at)
                tried = reported(path, Path(work))
            outcome = (
                "partial" if tried.outcome == "full" and set(tried.said.splitlines()) - sound[source] else tried.outcome
            )
            counts[source.partition("/")[0]][outcome] += 1
            if outcome in OUTCOMES[3:]:
                wrong.append(f"--seed {seed}, input {n} of {source}: {outcome}: {tried.said}")
    return counts, wrong


def table(counts: dict[str, Counter[str]]) -> str:
    """Return the counts as a table: a row a kind of source, and their sum."""
    lines = [f"{'source':20}" + "".join(f"{name:>16}" for name in ("inputs", *OUTCOMES))]
    whole: Counter[str] = sum(counts.values(), Counter())
    for name, of in [*sorted(counts.items()), ("all", whole)]:
        lines.append(f"{name:20}" + "".join(f"{n:16}" for n in (of.total(), *(of[outcome] for outcome in OUTCOMES))))
    return "\n".join(lines)


def main() -> None:
    """Print the table, and what must not be; exit with 1 where there is any."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--number", type=int, default=300)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--only", default="", help="sources with this in their names")
    asked = options.parse_args()
    counts, wrong = torture(asked.number, asked.seed, asked.only)
    print(table(counts))
    for line in wrong:
        print(line, file=sys.stderr)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
