"""Starts a job under NVIDIA's nsys, and has nsys export what it recorded, so that dlprof reads it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dlprof import nsys
from dlprof.errors import DlprofError
from dlprof.record.launch.tasks import number_of

# A window of a few steps is exported in seconds; a whole job may take minutes, and the job has ended.
_EXPORT_S = 900

# The driver's device files; the second is that of WSL.
_DEVICES = ("/dev/nvidiactl", "/dev/dxg")


def has_gpu() -> bool:
    """Return whether the machine has a GPU of NVIDIA, as far as its device files show."""
    return any(map(os.path.exists, _DEVICES))


@dataclass(frozen=True)
class Nsys:
    """nsys around a command. `name` is that of its report, without suffix; `window`: it waits for cudaProfilerStart."""

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
            "--wait=primary",  # with "all", nsys 2022.4 does not end even where the command left nothing
            "--kill=none",  # the end of a recording ends nobody
            "--force-overwrite=true",
            f"--output={folder / self.name}",
        )

    def ended(self, folder: Path) -> list[str]:
        """Export the report that was left; return a warning where there is none, or it could not be exported."""
        report = folder / f"{self.name}.nsys-rep"
        if not report.exists():
            if (folder / f"{self.name}.qdstrm").exists():
                return [
                    f"nsys left {self.name}.qdstrm: this nsys has no importer; `nsys export` of a whole installation "
                    "reads it"
                ]
            return ["nsys left no report" + (": its window was not reached (--window moves it)" if self.window else "")]
        why = nsys.export(self.program, report, report.with_suffix(".sqlite"), _EXPORT_S)
        return [f"{why}: {report.name} is left for nsys-ui"] if why else []


def launcher(env: Mapping[str, str], window: bool) -> Nsys:
    """Return the nsys on the PATH of a command.

    Raises DlprofError where there is none: it was asked for, and something else would be recorded without it.
    """
    program = nsys.found(env.get("PATH"))
    if program is None:
        raise DlprofError("--nsys: no nsys on the PATH; install NVIDIA Nsight Systems, or record without --nsys")
    # Tasks of one job on one host each have an nsys of their own.
    number = number_of(env)
    return Nsys(program, "nsys" + re.sub(r"[^\w.-]", "_", f"-{number}" if number else ""), window)
