"""Writes the batch script of a job that is recorded: one task a rank, or one torchrun a node.

What puts the ranks of a job into a container, Apptainer's or that of pyxis, with the run folder and the recorder.

Hands a batch script to SLURM, and asks it what its nodes have.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dlprof.errors import DlprofError

Launcher = Literal["srun", "torchrun"]

# The variables of a rank that torchrun would set: SLURM sets the same under other names.
_TELLS = (
    "export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS"
    ' LOCAL_WORLD_SIZE=$SLURM_NTASKS_PER_NODE; exec "$@"'
)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What a batch script is made of. Paths are as the nodes see them."""

    command: tuple[str, ...]  # the script with its arguments, or any command
    name: str
    nodes: int
    ranks: int  # of a node
    gpus: bool  # a rank has a GPU
    launcher: Launcher
    cores: int  # of a rank
    threads: int  # of a rank's OpenMP pool
    runs: Path  # where the run folders are, on a disk that all nodes share
    directory: Path  # where the job runs
    dlprof: tuple[str, ...]  # the command that starts dlprof outside a container
    python: str  # the interpreter that trains
    recording: tuple[str, ...] = ()  # options of dlprof wrap
    directives: tuple[str, ...] = ()  # more lines #SBATCH, in the order given
    setup: tuple[str, ...] = ()  # lines before the job's
    grace_s: int = 60  # SIGTERM comes so long before the time is up; 0: as SLURM does
    hint: str = ""
    numa: str = ""  # torchrun's --numa-binding
    container: Container | None = None
    group: str = ""  # the Unix group that may read the recording
    requeue: str = ""  # the signal on which the script saves and ends before the time is up, to be queued again

    @property
    def run(self) -> str:
        """The run folder, for a shell: a job that is requeued has its number again."""
        number = "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" if self.is_array else "$SLURM_JOB_ID"
        return f"{shlex.quote(f'{self.runs}/{self.name}')}-{number}${{SLURM_RESTART_COUNT:+-$SLURM_RESTART_COUNT}}"

    @property
    def is_array(self) -> bool:
        """Whether the scheduler makes an array of jobs of it."""
        return bool(self._directed("--array", "-a"))

    @property
    def output(self) -> str:
        """The file of the job's output, with SLURM's own patterns."""
        return self._directed("--output", "-o") or f"{self.name}-{'%A_%a' if self.is_array else '%j'}.out"

    def _directed(self, long: str, short: str) -> str:
        """Return the value of an option in the lines of the user, the last of which counts; "" without it."""
        found = [re.match(rf"(?:{long}[= ]|{short}[= ]?)\s*(.+)", line) for line in self.directives]
        return next((one[1].strip("'\"") for one in reversed(found) if one), "")

    def text(self) -> str:
        """Return the script."""
        lines = ["#!/bin/bash", "# Written by dlprof slurm.", *(f"#SBATCH {line}" for line in self._directives()), ""]
        if self.setup:
            lines += [*self.setup, ""]
        lines += [
            "# The first node of the job runs this script: there the ranks meet. No two jobs of a node have one port.",
            "export MASTER_ADDR=$(hostname) MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))",
            f"export OMP_NUM_THREADS={self.threads}",
        ]
        if not self.gpus:
            lines.append("export CUDA_VISIBLE_DEVICES=")
        lines.append(f"run={self.run}")
        if self.group:
            lines += [
                "# The group reads what is recorded: it owns the folder, and what is made in it.",
                'umask 027; mkdir -p "$run" || exit',
                f'chgrp {shlex.quote(self.group)} "$run" && chmod 2750 "$run" || exit',
            ]
        lines += ["", *self._job()]
        return "\n".join(lines) + "\n"

    def _directives(self) -> list[str]:
        per_task = self.launcher == "srun"
        found = [
            f"--job-name={self.name}",
            f"--chdir={self.directory}",
            *([] if self._directed("--output", "-o") else [f"--output={self.output}"]),
            f"--nodes={self.nodes}",
            f"--ntasks-per-node={self.ranks if per_task else 1}",
            f"--cpus-per-task={self.cores if per_task else self.cores * self.ranks}",
        ]
        found += [f"--gpus-per-node={self.ranks}"] if self.gpus else []
        found += [f"--hint={self.hint}"] if self.hint else []
        if self.requeue:
            # To the shell of the batch script, which passes the script's own on; the output goes on where it was.
            found += ["--requeue", "--open-mode=append", f"--signal=B:USR2@{self.grace_s}"]
        elif self.grace_s:
            found.append(f"--signal=TERM@{self.grace_s}")
        return [shlex.quote(line) for line in found] + list(self.directives)

    def _job(self) -> list[str]:
        """Return the lines that start the ranks."""
        per_task = self.launcher == "srun"
        # Since SLURM 22.05 srun does not take the cores of a task from the batch job.
        srun = [f"--cpus-per-task={self.cores if per_task else self.cores * self.ranks}"]
        srun += [] if self.hint else ["--cpu-bind=cores"]
        # Neighbours in rank on the same socket, as GPUs are numbered.
        srun += ["--distribution=block:block"] if per_task else []
        srun += ["--kill-on-bad-exit=1"]
        outside, inside = [*self.dlprof], list[str]()
        if self.container is not None:
            srun += self.container.of_srun((self.directory, self.runs))
            inside = self.container.of_command((self.directory, self.runs), self.gpus)
            if self.container.holds_dlprof:
                outside = [self.python, "-m", "dlprof"]
        said = [
            " ".join(["srun" if self.requeue else "exec srun", *map(shlex.quote, srun)]),
            f"bash -c {shlex.quote(_TELLS)} rank" if per_task else "",
            " ".join([shlex.join([*outside, "wrap", "-o"]), '"$run"', *map(shlex.quote, self.recording), "--"]),
            shlex.join(inside),
            "" if per_task else self._torchrun(),
            shlex.join(self._program()),
        ]
        how = "One task a rank" if per_task else "One torchrun a node"
        why = "on cores of its own" if per_task else "on all cores of the job there; it starts the ranks"
        job = " \\\n    ".join(part for part in said if part)
        if not self.requeue:
            return [f"# {how}, {why}. exec: the job ends as it ends.", job]
        return [
            f"# Before the time is up the ranks get {self.requeue}. Once they have ended, the job is queued again.",
            f"trap 'again=1; scancel --signal={self.requeue} \"$SLURM_JOB_ID\"' USR2",
            f"# {how}, {why}. wait ends early for a trap.",
            f"{job} &",
            "while wait $!; status=$?; kill -0 $! 2>/dev/null; do :; done",
            '[ -z "$again" ] || scontrol requeue "$SLURM_JOB_ID"',
            "exit $status",
        ]

    def _torchrun(self) -> str:
        words = [self.python, "-m", "torch.distributed.run", "--nnodes", str(self.nodes)]
        words += ["--nproc-per-node", str(self.ranks), "--rdzv-backend", "c10d"]
        words += ["--numa-binding", self.numa] if self.numa else []
        return f'{shlex.join(words)} --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$MASTER_ADDR:$MASTER_PORT"'

    def _program(self) -> Sequence[str]:
        first = self.command[0]
        is_python = first.endswith(".py") or first == "-m"
        if self.launcher == "torchrun":
            return self.command if is_python else ["--no-python", *self.command]
        return [self.python, *self.command] if is_python else self.command


def name_of(words: Sequence[str]) -> str:
    """Name a job after its script, or else its module or command."""
    script = next((word for word in words if word.endswith(".py")), None)
    stem = Path(script).stem if script else words[1] if words[0] == "-m" else Path(words[0]).name
    return re.sub(r"[^\w.-]", "_", stem, flags=re.ASCII) or "job"


Runtime = Literal["apptainer", "pyxis"]

# Of a time limit: minutes[:seconds], hours:minutes:seconds, days-hours[:minutes[:seconds]], or that of the partition.
_LIMIT = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
_NO_LIMIT = ("UNLIMITED", "INFINITE")


def limit_s(text: str) -> float:
    """Return the seconds of a time limit as `sbatch --time` takes it; raise ValueError where it does not take it."""
    if text.upper() in _NO_LIMIT:
        return math.inf
    found = _LIMIT.fullmatch(text)
    if found is None:
        raise ValueError("minutes, minutes:seconds, hours:minutes:seconds, days-hours, or days-hours:minutes:seconds")
    days, *parts = found.groups()
    first, second, third = (int(part or 0) for part in parts)
    if days is not None:
        return 86400 * int(days) + 3600 * first + 60 * second + third
    return 60 * first + second if parts[2] is None else 3600 * first + 60 * second + third


# The recorder is found by its place, and inside a container it has the same one.
PACKAGE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Container:
    """An image and what runs it.

    Apptainer starts a command: dlprof stays outside, where all that it needs is installed, and its package is bound
    into the container, where the recorder needs Python and torch alone. pyxis is srun's own: it puts all of a task into
    the container, dlprof too, and the image must have it.
    """

    image: str
    runtime: Runtime

    @property
    def holds_dlprof(self) -> bool:
        """Whether dlprof itself runs inside."""
        return self.runtime == "pyxis"

    def of_srun(self, places: Iterable[Path]) -> list[str]:
        """Return the options of srun; `places`: what is there inside as outside, the first as working directory."""
        if self.runtime != "pyxis":
            return []
        first, *rest = places
        mounts = ",".join(f"{place}:{place}" for place in _outermost([first, *rest]))
        return [f"--container-image={self.image}", f"--container-mounts={mounts}", f"--container-workdir={first}"]

    def of_command(self, places: Iterable[Path], gpus: bool) -> list[str]:
        """Return the words before the command that trains."""
        if self.runtime != "apptainer":
            return []
        first, *rest = places
        binds = [word for place in _outermost([first, *rest, PACKAGE]) for word in ("--bind", str(place))]
        return ["apptainer", "exec", *(["--nv"] if gpus else []), *binds, "--pwd", str(first), self.image]


def _outermost(places: Sequence[Path]) -> list[Path]:
    """Return these folders without those that are in another of them, each once."""
    kept = list[Path]()
    for place in places:
        if not any(place.is_relative_to(other) for other in kept):
            kept = [other for other in kept if not other.is_relative_to(place)] + [place]
    return kept


# sbatch itself retries a controller that does not answer, for minutes.
_PATIENCE_S = 180

_ANSWER_S = 5


def submit(script: str, file: Path | None = None) -> str:
    """Submit a batch script, from its file where it is in one; return the number of the job.

    The job's environment is this one's without what a recording has put there. Raises DlprofError where there is no
    sbatch, or it does not take the job.
    """
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        raise DlprofError("sbatch is not on the PATH, nothing is submitted; without --submit the script is written")
    env = {name: value for name, value in os.environ.items() if not name.startswith("DLPROF_")}
    command = [sbatch, "--parsable", *([str(file)] if file else [])]
    try:
        done = subprocess.run(
            command,
            env=env,
            input=None if file else script,
            stdin=subprocess.DEVNULL if file else None,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PATIENCE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise DlprofError(f"sbatch has not answered for {_PATIENCE_S} s: the scheduler cannot be reached") from None
    number = done.stdout.strip().partition(";")[0]
    if done.returncode or not number.isdigit():
        # sbatch: error: what is wrong.
        lines = [line.split(": ", 2)[-1].rstrip(".") for line in done.stderr.splitlines()]
        said = "; ".join(lines) or "it gives no reason"
        raise DlprofError(f"sbatch did not take the job: {said}")
    return number


def cores_of_nodes(partition: str | None) -> int | None:
    """Return the CPUs of the largest node of a partition, or of all; None: there is no SLURM here, or no answer."""
    sinfo = shutil.which("sinfo")
    if sinfo is None:
        return None
    command = [sinfo, "--noheader", "--Node", "--format", "%c", *([f"--partition={partition}"] if partition else [])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return max((int(word) for word in done.stdout.split() if word.isdigit()), default=None)
