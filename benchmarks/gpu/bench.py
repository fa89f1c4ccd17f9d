"""What a check works with: jobs, plain and under dlprof, reports, the parts that it adds, recordings that it keeps."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.gpu import fixtures, jobs, outcome, reading
from benchmarks.gpu.jobs import Ended, JobFailedError, must, python
from benchmarks.gpu.outcome import Part

SCRIPTS = Path(__file__).parent / "scripts"
WORKLOADS = jobs.ROOT / "workloads"

# Each has processes of its own.
REPORTS_AT_ONCE = max(4, (os.cpu_count() or 1) * 3 // 4)

# What a check keeps of its time for writing down what it found.
_RESERVE_S = 2.0

Size = TypeVar("Size")
Changes = Mapping[str, str] | None  # to a job's environment


@dataclass
class Bench:
    """One check at work. `ends` is when its time is over, as time.monotonic() tells it."""

    check: str
    work: Path  # a folder of its own
    device: str  # cuda, or cpu in a rehearsal
    ends: float
    machine: Mapping[str, Any]
    scripts: Sequence[str] = ()  # of the check `advice`; (): all
    measured: Mapping[str, Sequence[float]] = field(default_factory=dict)  # ms plain and fixed, of an earlier call
    parts: list[Part] = field(default_factory=list)

    @property
    def rehearsal(self) -> bool:
        """Whether all this only shows that the plumbing works."""
        return self.device == "cpu"

    @property
    def gpus(self) -> Sequence[Mapping[str, Any]]:
        """The GPUs of this machine, as torch names them."""
        listed: Sequence[Mapping[str, Any]] = self.machine["torch"]["gpus"]
        return listed

    @property
    def left_s(self) -> float:
        """What is left of the check's time."""
        return self.ends - time.monotonic() - _RESERVE_S

    @property
    def usual(self) -> dict[str, str]:
        """Changes to the environment of every job.

        A rehearsal shares its cores with whatever else runs: threads that wait for each other there wait for long.
        """
        return {"OMP_NUM_THREADS": "1"} if self.rehearsal else {}

    def pick(self, gpu: Size, rehearsal: Size) -> Size:
        """Return a size: that for a GPU, or the small one of a rehearsal."""
        return rehearsal if self.rehearsal else gpu

    def add(self, *parts: Part, anywhere: bool = False) -> None:
        """Add what was found and print it.

        In a rehearsal, what speaks of a GPU's figures is neither passed nor failed; `anywhere` says that a part holds
        on a CPU as well.
        """
        judged = [p if anywhere or not self.rehearsal else outcome.rehearsed(p) for p in parts]
        for part in judged:
            print(f"  {outcome.line(part)}", flush=True)
        self.note(*judged)

    def note(self, *parts: Part) -> None:
        """Add parts without a word, and write all of them down, since this process may be ended at any time."""
        self.parts += parts
        write(self.work / "row.json", outcome.to_json(outcome.Row(self.check, "running", parts=tuple(self.parts))))

    def run(self, words: Sequence[str | Path], limit_s: float = 60.0, changes: Changes = None) -> Ended:
        """Run a command in the check's folder, within what is left of its time."""
        return jobs.run(words, self.work, min(limit_s, self.left_s), self.usual | dict(changes or {}))

    def beside(self, words: Sequence[str | Path]) -> jobs.Beside:
        """Start a job that runs beside, while the check's time is not over."""
        return jobs.Beside(words, self.work, self.left_s, self.usual)

    def dlprof(self, *words: str | Path, changes: Changes = None) -> Ended:
        """Run a command of dlprof."""
        return self.run(python("-m", "dlprof", *words), changes=changes)

    def told(self, *words: str | Path) -> Any:
        """Return what a command of dlprof says as JSON; raise JobFailedError where it fails."""
        return json.loads(must(f"dlprof {words[0]}", self.dlprof(*words, "--format", "json")).out)

    def plain(self, script: Path, *args: str | Path, limit_s: float = 60.0) -> Ended:
        """Run a script without dlprof; raise JobFailedError where it fails."""
        return must(f"{script.name} without dlprof", self.run(python(script, *args), limit_s))

    def record(
        self, name: str, words: Sequence[str | Path], *options: str, limit_s: float = 60.0, changes: Changes = None
    ) -> tuple[Path, Ended]:
        """Run a command under dlprof into the folder `name`, without a report; return the folder and how it ended."""
        folder = self.work / name
        wrap = python("-m", "dlprof", "wrap", "-o", folder, "--quiet", "--no-report", *options, "--", *words)
        return folder, self.run(wrap, limit_s, changes)

    def recorded(
        self, name: str, script: Path, *args: str | Path, options: Sequence[str] = (), limit_s: float = 60.0
    ) -> Path:
        """Run a script under dlprof and return the run's folder; raise JobFailedError where it fails."""
        folder, ended = self.record(name, python(script, *args), *options, limit_s=limit_s)
        must(f"{script.name} under dlprof", ended)
        return folder

    def report(self, folder: Path) -> reading.Result:
        """Let dlprof report on a run and return the result; raise JobFailedError where it cannot."""
        return self.reports([folder])[0]

    def reports(self, folders: Sequence[Path]) -> list[reading.Result]:
        """Report on several runs at once, as nothing is timed meanwhile; the first that fails raises."""
        results = self.tried_reports(folders)
        for result in results:
            if isinstance(result, JobFailedError):
                raise result
        return [result for result in results if not isinstance(result, JobFailedError)]

    def tried_reports(self, folders: Sequence[Path]) -> list[reading.Result | JobFailedError]:
        """Report on several runs at once; of one that has no report, return what went wrong."""

        def report(folder: Path) -> reading.Result | JobFailedError:
            ended = self.run(python("-m", "dlprof", "report", folder, "--quiet"), 120.0)
            try:
                must(f"dlprof report {folder.name}", ended)
                return reading.result(folder)
            except JobFailedError as e:
                return e
            except (OSError, ValueError) as e:
                return JobFailedError(f"dlprof report {folder.name}: {e}", jobs.tail(ended))

        with ThreadPoolExecutor(max(1, min(REPORTS_AT_ONCE, len(folders)))) as pool:
            return list(pool.map(report, folders))

    def together(self, *calls: Callable[[], Any]) -> list[Any]:
        """Run several jobs at once, of none of which a time is taken; the first that fails raises."""
        with ThreadPoolExecutor(len(calls)) as pool:
            return [future.result() for future in [pool.submit(call) for call in calls]]

    def keep(self, name: str, folder: Path, judge: str, oracle: Mapping[str, Any]) -> None:
        """Keep a recording and what the oracle said of it, for tests on machines without a GPU.

        `judge` names the function of benchmarks.gpu.judges that says what must hold of the result. One that cannot be
        kept costs nothing but itself.
        """
        try:
            fixtures.keep(folder, self.work / "kept" / name, self._oracle(judge, oracle), self.machine)
        except (OSError, ValueError) as e:
            print(f"  not kept: {name}: {e}", flush=True)

    def keep_beside(
        self, keepers: ProcessPoolExecutor, name: str, folder: Path, judge: str, oracle: Mapping[str, Any]
    ) -> Future[None]:
        """Keep a recording in another process, as that takes seconds; what went wrong is the future's exception."""
        where = self.work / "kept" / name
        return keepers.submit(fixtures.keep, folder, where, self._oracle(judge, oracle), self.machine)

    def _oracle(self, judge: str, oracle: Mapping[str, Any]) -> dict[str, Any]:
        return {"judge": judge, **oracle, **({"rehearsal": True} if self.rehearsal else {})}


def oracle_of(path: Path) -> dict[str, Any]:
    """Read what a script wrote of itself."""
    told: dict[str, Any] = json.loads(path.read_text())
    return told


def write(path: Path, data: Any) -> None:
    """Write a JSON file, all of it or nothing."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n")
    part.replace(path)
