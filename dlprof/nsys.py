"""NVIDIA's nsys as a program: it runs around a job that is recorded, and writes its report as SQLite."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dlprof.errors import DlprofError

# What nsys itself writes; .qdrep is the name before 2021.
REPORTS = (".nsys-rep", ".qdrep")


def found(path: str | None = None) -> str | None:
    """Return the nsys on a PATH, by default this process's."""
    return shutil.which("nsys", path=path)


def export(nsys: str, report: Path, to: Path, seconds: float) -> str:
    """Have nsys write a report as SQLite; return why that failed, "" where it did not."""
    words = [nsys, "export", "--type=sqlite", "--force-overwrite=true", f"--output={to}", str(report)]
    try:
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return f"nsys export took more than {seconds:g} s and was ended"
    except OSError as e:
        return f"{nsys} does not start: {e.strerror or e}"
    if done.returncode or not to.exists():
        said = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()
        # It shows its progress in the same line, and ends with advice: the line that names the error says why.
        said = [line.rpartition("]")[2].strip() if "[" in line else line for line in said]
        why = next((line for line in said if "error" in line.lower()), said[-1] if said else "")
        return f"nsys export failed ({done.returncode}){': ' + why[:300] if why else ''}"
    return ""


# The export of a few steps takes seconds, that of a whole job perhaps minutes.
_EXPORT_S = 900

# The driver's device files; the second is that of WSL.
_DEVICES = ("/dev/nvidiactl", "/dev/dxg")


def has_gpu() -> bool:
    """Return whether the machine has a GPU of NVIDIA, judging by its device files."""
    return any(map(os.path.exists, _DEVICES))


@dataclass(frozen=True)
class Nsys:
    """nsys around a command. `name`: that of its report without suffix; `window`: it waits for cudaProfilerStart."""

    program: str
    name: str
    window: bool

    def words(self, folder: Path) -> Sequence[str]:
        """Return the words before the command's."""
        capture = ("--capture-range=cudaProfilerApi", "--capture-range-end=stop") if self.window else ()
        return (
            *(self.program, "profile", "--trace=cuda,nvtx,osrt,cudnn,cublas"),
            *capture,
            "--cuda-graph-trace=node",
            # py-spy samples Python; nsys' own sampling of the cores slows the job, and 2022.4 may not end with it.
            *("--sample=none", "--cpuctxsw=none"),
            "--wait=primary",  # with "all", nsys 2022.4 does not end even if no process is left
            "--kill=none",  # the end of the recording must not kill the job
            "--force-overwrite=true",
            f"--output={folder / self.name}",
        )

    def ended(self, folder: Path) -> list[str]:
        """Export the report; return a warning if there is none or if the export failed."""
        report = folder / f"{self.name}.nsys-rep"
        if not report.exists():
            if (folder / f"{self.name}.qdstrm").exists():
                return [
                    f"nsys left {self.name}.qdstrm: this nsys has no importer; `nsys export` of a whole installation "
                    "reads it"
                ]
            return ["nsys left no report" + (": its window was not reached (--window moves it)" if self.window else "")]
        why = export(self.program, report, report.with_suffix(".sqlite"), _EXPORT_S)
        return [f"{why}: {report.name} is left for nsys-ui"] if why else []


def launcher(env: Mapping[str, str], number: str | None, window: bool) -> Nsys:
    """Return the nsys on the PATH of a command.

    Raises DlprofError if there is none: without it, the recording would not be what the user wants.
    """
    program = found(env.get("PATH"))
    if program is None:
        raise DlprofError("--nsys: no nsys on the PATH; install NVIDIA Nsight Systems, or record without --nsys")
    # Each task of a job has its own nsys, and several tasks may run on one host.
    return Nsys(program, "nsys" + re.sub(r"[^\w.-]", "_", f"-{number}" if number else ""), window)
