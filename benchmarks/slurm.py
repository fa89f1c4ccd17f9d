"""Batch scripts plain and under `dlprof wrap`, on a real SLURM: whether they end alike, and what is left.

    python -m benchmarks.slurm                       all cases, about a quarter of an hour
    python -m benchmarks.slurm --only scancel limit  those whose name has one of the words
    python -m benchmarks.slurm --out docs/slurm.md   write the table into the page

It starts a SLURM of two nodes on this machine, from Debian's packages slurm-wlm and munge, in a folder of its own, and
ends it. Each case is submitted twice, as it stands and with dlprof in it. Compared are the state and the exit code that
SLURM notes, and what the job printed. Looked for are processes of the job that still run when it has ended.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from dlprof.errors import DlprofError
from dlprof.read.run import open_run
from dlprof.run_folder import lines_of
from tests.fixtures.slurm import cluster, lacking, path_of

PATIENCE_S = 300.0
# How long processes of a job that SLURM calls ended may take: SLURM itself gives them KillWait seconds.
_LINGER_S = 45.0

SCRIPT = """
import os, signal, sys, time
import torch
import torch.distributed as dist

words = sys.argv[1:]
if "ddp" in words:
    for name, task in (("RANK", "SLURM_PROCID"), ("WORLD_SIZE", "SLURM_NTASKS"), ("LOCAL_RANK", "SLURM_LOCALID")):
        os.environ.setdefault(name, os.environ[task])
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", str(10000 + int(os.environ["SLURM_JOB_ID"]) % 20000))
    dist.init_process_group("gloo")
rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("SLURM_PROCID", 0))
came = []
for name in ("USR1", "USR2", "TERM"):
    if name in words:
        signal.signal(getattr(signal, "SIG" + name), lambda number, _: came.append(signal.Signals(number).name))
if "reads" in words:
    print("stdin:", sys.stdin.read().strip(), flush=True)
torch.manual_seed(rank)
torch.set_num_threads(1)
model = torch.nn.Linear(8, 1)
if dist.is_initialized():
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(100000 if "long" in words else 60):
    loss = (model(torch.ones(4, 8)) ** 2).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    time.sleep(0.005)
    if step == 30:
        print(f"rank {rank} ready", flush=True)
        if "raises" in words:
            raise ValueError("on purpose")
        if "falls" in words and rank == 1:
            sys.exit(5)
        for name in ("SEGV", "ABRT", "KILL"):
            if name in words:
                os.kill(os.getpid(), getattr(signal, "SIG" + name))
    if came:
        print(f"rank {rank} got {came[0]}", flush=True)
        break
else:
    print(f"rank {rank}: loss {loss.item():.6f}", flush=True)
if dist.is_initialized():
    del model
    dist.destroy_process_group()
sys.exit(7 if "seven" in words else 0)
"""

PYTHON = f"{sys.executable} train.py"
TORCHRUN = f"{sys.executable} -m torch.distributed.run"
NODES = ("--nodes=2", "--ntasks-per-node=2")


class Job:
    """One submitted batch script."""

    def __init__(self, folder: Path, env: dict[str, str], number: str, cluster_folder: Path) -> None:
        self.folder, self.env, self.number, self._cluster = folder, env, number, cluster_folder

    def run(self, *words: str) -> str:
        """Run a command of SLURM; return what it prints."""
        done = subprocess.run(words, cwd=self.folder, env=self.env, capture_output=True, text=True, check=False)
        return done.stdout

    def said(self, key: str) -> str:
        """Return what SLURM says of the job (of its first part, if it has several)."""
        found = re.search(rf"\b{key}=(\S+)", self.run("scontrol", "--oneliner", "show", "job", self.number))
        return found[1] if found else ""

    @property
    def printed(self) -> str:
        """What the job has printed, all of its output files in the order of their names."""
        return "".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("*.out")))

    @property
    def has_ended(self) -> bool:
        """Whether SLURM has nothing of the job in its queue."""
        return not self.run("squeue", "--noheader", f"--jobs={self.number}").strip()

    @property
    def processes(self) -> list[int]:
        """The processes that have the job's environment."""
        mark, found = f"SLURM_JOB_ID={self.number}\0".encode(), []
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if mark in (path / "environ").read_bytes():
                    found.append(int(path.name))
        return found

    def lose(self, node: str) -> None:
        """Kill a node: its slurmd, its tasks, and the daemons that started them."""
        os.kill(int((self._cluster / f"slurmd-{node}.pid").read_text()), signal.SIGKILL)
        mark = f"SLURMD_NODENAME={node}\0".encode()
        for pid in self.processes:
            with suppress(OSError):
                if mark in Path(f"/proc/{pid}/environ").read_bytes():
                    parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
                    if "slurmstepd" in Path(f"/proc/{parent}/comm").read_text():
                        os.kill(parent, signal.SIGKILL)
                    os.kill(pid, signal.SIGKILL)


def _scancel(*words: str) -> Callable[[Job], None]:
    def act(job: Job) -> None:
        job.run("scancel", *words, job.number)

    return act


def _requeue(job: Job) -> None:
    job.run("scontrol", "requeue", job.number)
    wait(lambda: job.said("JobState") == "PENDING")
    time.sleep(5)  # what it ran before is still being cleared away
    job.run("scontrol", "update", f"JobId={job.number}", "StartTime=now")
    wait(lambda: job.printed.count(" ready") >= 2)
    job.run("scancel", job.number)


def _suspend(job: Job) -> None:
    job.run("scontrol", "suspend", job.number)
    time.sleep(2)
    job.run("scontrol", "resume", job.number)


def _preempt(job: Job) -> None:
    job.run("sbatch", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap", "sleep 1")


def _lose(job: Job) -> None:
    job.lose("node2")


@dataclass(frozen=True)
class Case:
    """A batch script: `@` stands where dlprof goes, `@NAME` where it records into another folder."""

    name: str
    body: str
    head: tuple[str, ...] = ("--ntasks=1",)
    ranks: int = 1  # how many each recording holds
    runs: int = 1  # how many recordings there are
    acts: tuple[Callable[[Job], None], ...] = ()  # what is done to it, once `ready` ranks have trained
    ready: int = 1
    files: dict[str, str] = field(default_factory=dict)
    alone: bool = False  # has a cluster for itself


MULTI = f"0 @ {PYTHON} ddp\n1 @ {PYTHON} ddp\n"
MEETING = "--rdzv-backend c10d --rdzv-endpoint localhost:$PORT"
CASES = (
    Case("sbatch without srun", f"@ {PYTHON}"),
    Case("`exec srun`, one task", f"exec srun @ {PYTHON}"),
    Case("srun within wrap, one task", f"@ srun {PYTHON}"),
    Case("2 nodes × 2 tasks, wrap within srun", f"srun @ {PYTHON} ddp", NODES, 4),
    Case("2 nodes × 2 tasks, srun within wrap", f"@ srun {PYTHON} ddp", NODES, 4),
    Case("torchrun on one node", f"@ {TORCHRUN} --standalone --nproc-per-node 2 train.py ddp", ranks=2),
    Case(
        "torchrun a node, wrap within srun",
        f"srun @ {TORCHRUN} --nnodes 2 --nproc-per-node 2 {MEETING} train.py ddp",
        ("--nodes=2", "--ntasks-per-node=1"),
        4,
    ),
    Case(
        "torchrun a node, srun within wrap",
        f"@ srun {TORCHRUN} --nnodes 2 --nproc-per-node 2 {MEETING} train.py ddp",
        ("--nodes=2", "--ntasks-per-node=1"),
        4,
    ),
    Case(
        "--multi-prog, wrap in its lines",
        "srun --multi-prog multi.conf",
        ("--ntasks=2",),
        2,
        files={"multi.conf": MULTI},
    ),
    Case(
        "--multi-prog within wrap",
        "@ srun --multi-prog multi.conf",
        ("--ntasks=2",),
        2,
        files={"multi.conf": MULTI.replace("@ ", "")},
    ),
    Case("heterogeneous job", f"srun --het-group=0,1 @ {PYTHON}", ("--ntasks=1", "hetjob", "--ntasks=1"), 2),
    Case("array of two", f"srun @run-$SLURM_ARRAY_TASK_ID {PYTHON}", ("--ntasks=1", "--array=0-1"), runs=2),
    Case("two steps, one after the other", f"srun @ {PYTHON}\nsrun @ {PYTHON}", runs=2),
    Case(
        "two steps at a time",
        f"srun -n1 --exact @ {PYTHON} &\nsrun -n1 --exact @ {PYTHON} &\nwait",
        ("--ntasks=2",),
        runs=2,
    ),
    Case("bash around the script", f"srun bash -c 'exec @ {PYTHON}'"),
    Case("--export of one variable", f"srun --export=PATH,HOME,PYTHONPATH,OMP_NUM_THREADS @ {PYTHON}"),
    Case("stdin of a file", f"srun @ {PYTHON} reads < words", files={"words": "a b\n"}),
    Case("labelled output", f"srun --label @ {PYTHON} ddp", ("--ntasks=2",), 2),
    Case("an output for each task", f"srun --output=%t.out @ {PYTHON} ddp", ("--ntasks=2",), 2),
    Case("exit code 7", f"srun @ {PYTHON} seven"),
    Case("exit code 7, without srun", f"@ {PYTHON} seven"),
    Case("an exception", f"srun @ {PYTHON} raises"),
    Case("segmentation fault", f"srun @ {PYTHON} SEGV"),
    Case("abort", f"srun @ {PYTHON} ABRT"),
    Case("killed", f"srun @ {PYTHON} KILL"),
    Case("one rank of two fails", f"srun --kill-on-bad-exit=1 @ {PYTHON} ddp falls", ("--ntasks=2",), 2),
    Case("scancel", f"srun @ {PYTHON} ddp long", NODES, 4, acts=(_scancel(),), ready=4),
    Case("scancel, srun within wrap", f"@ srun {PYTHON} ddp long", NODES, 4, acts=(_scancel(),), ready=4),
    Case("scancel, without srun", f"@ {PYTHON} long", acts=(_scancel(),)),
    Case("scancel --signal=TERM", f"srun @ {PYTHON} long", acts=(_scancel("--signal=TERM"),)),
    Case("TERM with a handler", f"srun @ {PYTHON} long TERM", acts=(_scancel("--signal=TERM"),)),
    Case("USR1 with a handler", f"srun @ {PYTHON} long USR1", acts=(_scancel("--signal=USR1"),)),
    Case("USR2 with a handler", f"srun @ {PYTHON} long USR2", acts=(_scancel("--signal=USR2"),)),
    Case("USR1 without a handler", f"srun @ {PYTHON} long", acts=(_scancel("--signal=USR1"),)),
    Case(
        "USR1 to job, shell and steps", f"exec srun @ {PYTHON} long USR1", acts=(_scancel("--full", "--signal=USR1"),)
    ),
    Case(
        "USR1 to the batch shell that is the job",
        f"exec @ {PYTHON} long USR1",
        acts=(_scancel("--batch", "--signal=USR1"),),
    ),
    Case("INT", f"srun @ {PYTHON} long", acts=(_scancel("--signal=INT"),)),
    Case("CONT", f"srun @ {PYTHON} long USR1", acts=(_scancel("--signal=CONT"), _scancel("--signal=USR1"))),
    Case("suspended and resumed", f"srun @ {PYTHON} long USR1", acts=(_suspend, _scancel("--signal=USR1"))),
    Case("#SBATCH --signal=USR1@30", f"srun @ {PYTHON} long USR1", ("--ntasks=1", "--time=1", "--signal=USR1@30")),
    Case("the time limit", f"srun @ {PYTHON} long", ("--ntasks=1", "--time=1")),
    Case(
        "requeued by hand, then scancel",
        f"srun @ {PYTHON} long",
        ("--ntasks=1", "--requeue", "--open-mode=append"),
        runs=2,
        acts=(_requeue,),
    ),
    Case(
        "preempted", f"srun @ {PYTHON} ddp long", (*NODES, "--partition=low"), 4, acts=(_preempt,), ready=4, alone=True
    ),
    Case(
        "a node is lost", f"srun @ {PYTHON} ddp long", (*NODES, "--no-requeue"), 4, acts=(_lose,), ready=4, alone=True
    ),
)


@dataclass(frozen=True)
class Ending:
    """How a job ended: what SLURM notes and the script printed, how many processes are left, and the recordings."""

    state: str
    code: str
    lines: tuple[str, ...]
    left: int
    recorded: tuple[str, ...] = ()
    problem: str = ""

    @property
    def words(self) -> str:
        """The state and the exit code, as in the table."""
        return f"{self.state.lower()} {self.code}"


def wait(ready: Callable[[], bool], patience_s: float = PATIENCE_S) -> bool:
    """Wait until it is ready; return whether it is."""
    until = time.monotonic() + patience_s
    while not (is_ready := ready()) and time.monotonic() < until:
        time.sleep(0.3)
    return is_ready


def submit(case: Case, folder: Path, env: dict[str, str], place: Path, *, wrapped: bool) -> Job:
    """Write the case's files, and submit it."""

    def filled(text: str) -> str:
        if not wrapped:
            return re.sub(r"@\S* ", "", text)
        options = "--quiet --no-report --window 5,1,3"
        return re.sub(
            r"@(\S*) ", lambda m: f"{sys.executable} -m dlprof wrap -o {folder}/{m[1] or 'run'} {options} -- ", text
        )

    folder.mkdir(parents=True)
    (folder / "train.py").write_text(SCRIPT)
    for name, text in case.files.items():
        (folder / name).write_text(filled(text))
    output = () if any("--array" in each for each in case.head) else ("--output=job.out",)
    head = "".join(f"#SBATCH {each}\n" for each in (*output, *case.head))
    port = "export PORT=$((10000 + SLURM_JOB_ID % 20000))\n"
    (folder / "job.sh").write_text(f"#!/bin/bash\n{head}{port}{filled(case.body)}\n")
    done = subprocess.run(
        ["sbatch", "--parsable", "job.sh"], cwd=folder, env=env, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise DlprofError(f"{case.name}: {done.stderr.strip()}")
    return Job(folder, env, done.stdout.strip(), place)


def ended(case: Case, folder: Path, env: dict[str, str], place: Path, *, wrapped: bool) -> Ending:
    """Submit a case, do to it what it says, and wait for its end."""
    job = submit(case, folder, env, place, wrapped=wrapped)
    problem = ""
    if case.acts and not wait(lambda: job.printed.count(" ready") >= case.ready):
        problem = "did not train"
    for act in case.acts:
        act(job)
    if not wait(lambda: job.has_ended):
        problem = problem or "did not end"
        job.run("scancel", "--signal=KILL", "--full", job.number)
    wait(lambda: not job.processes, _LINGER_S)
    printed = re.findall(r"^(?:\d: )?(?:rank \d|stdin:|ValueError).*", job.printed, re.MULTILINE)
    recorded = tuple(_recorded(path) for path in sorted(folder.glob("run*")) if path.is_dir())
    left = len(job.processes)
    return Ending(job.said("JobState"), job.said("ExitCode"), tuple(sorted(printed)), left, recorded, problem)


def _recorded(path: Path) -> str:
    """Return what a recording holds: how many ranks, and the fewest steps of one."""
    try:
        run = open_run(path)
    except DlprofError as error:
        return str(error)
    steps = [len(lines_of(rank, "steps")) for rank in sorted((path / "ranks").iterdir())]
    return f"{len(run.ranks)} × {min(steps, default=0)} steps"


def row(case: Case, plain: Ending, wrapped: Ending) -> tuple[bool, str]:
    """Return whether a case is as it should be, and its row of the table."""
    ranks = [re.match(r"(\d+) × (\d+)", each) for each in wrapped.recorded]
    whole = len(ranks) == case.runs and all(r and int(r[1]) == case.ranks and int(r[2]) > 0 for r in ranks)
    alike = (plain.state, plain.code) == (wrapped.state, wrapped.code)
    same = plain.lines == wrapped.lines
    clean = not plain.left < wrapped.left
    fine = alike and same and whole and clean and not plain.problem and not wrapped.problem
    cells = [
        case.name.replace("|", "\\|"),
        plain.words,
        "the same" if alike else f"**{wrapped.words}**",
        "the same" if same else "**differs**",
        ", ".join(wrapped.recorded) if whole else f"**{', '.join(wrapped.recorded) or 'nothing'}**",
        "nothing" if clean else f"**{wrapped.left} processes**",
    ]
    problem = "; ".join(f"{of} {each}" for of, each in (("plain", plain.problem), ("wrapped", wrapped.problem)) if each)
    return fine, f"| {' | '.join(cells)} |" + (f" **{problem}**" if problem else "")


SETTINGS = (
    "SlurmdTimeout=20",
    "KillWait=15",
    "PreemptType=preempt/partition_prio",
    "PreemptMode=CANCEL",
    "PartitionName=low Nodes=ALL PriorityTier=1 PreemptMode=CANCEL State=UP",
    "PartitionName=high Nodes=ALL PriorityTier=10 State=UP",
)


def compared(case: Case, folder: Path, env: dict[str, str] | None, place: Path) -> tuple[bool, str]:
    """Run a case plain and wrapped; without an environment each on a cluster of its own."""
    endings = []
    for number, wrapped in enumerate((False, True)):
        at = folder / ("wrapped" if wrapped else "plain")
        if env is not None:
            endings.append(ended(case, at, env, place, wrapped=wrapped))
            continue
        own = place / f"{abs(hash(case.name)) % 1000}-{number}"
        own.mkdir()
        with cluster(own, *SETTINGS) as its:
            endings.append(ended(case, at, its, own, wrapped=wrapped))
    fine, text = row(case, *endings)
    print(text, flush=True)
    return fine, text


def run(cases: Sequence[Case], folder: Path, jobs: int) -> list[tuple[bool, str]]:
    """Run cases, so many at a time; first those that can share a cluster."""
    place = folder / "c"
    place.mkdir()
    found: dict[str, tuple[bool, str]] = {}

    def one(case: Case, env: dict[str, str] | None = None) -> None:
        found[case.name] = compared(case, folder / re.sub(r"\W+", "-", case.name), env, place)

    if together := [case for case in cases if not case.alone]:
        shared = place / "all"
        shared.mkdir()
        with cluster(shared, *SETTINGS) as env, ThreadPoolExecutor(jobs) as pool:
            list(pool.map(lambda case: one(case, env), together))
    for case in cases:
        if case.alone:
            one(case)
    return [found[case.name] for case in cases]


def main() -> None:
    """Run the cases, print their rows as they end, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="WORD", help="cases whose name has one of the words")
    parser.add_argument("--out", type=Path, help="the page whose table is written")
    parser.add_argument("--jobs", type=int, default=1, help="how many cases run at a time (1)")
    parser.add_argument("--keep", type=Path, help="an empty folder of a short path for what the jobs leave")
    given = parser.parse_args()
    if why := lacking():
        print(f"skipped: {why}")
        return
    cases = [case for case in CASES if not given.only or any(word in case.name for word in given.only)]
    with tempfile.TemporaryDirectory(prefix="dlprof-slurm-") as made:
        folder = given.keep or Path(made)
        folder.mkdir(exist_ok=True)
        rows = run(cases, folder.resolve(), given.jobs)
    right = sum(fine for fine, _ in rows)
    print(f"{right} of {len(rows)} as without dlprof")
    if given.out:
        asked = subprocess.run([path_of("slurmctld"), "-V"], capture_output=True, text=True, check=True)
        table = "".join(f"{text}\n" for _, text in rows)
        part = _PART.format(right=right, all=len(rows), version=asked.stdout.strip(), table=table)
        between = re.compile(r"(?<=<!-- made by make slurm -->\n).*?(?=<!-- until here -->)", re.DOTALL)
        page, count = between.subn(lambda _: part, given.out.read_text())
        if not count:
            parser.error(f"{given.out} has no line <!-- made by make slurm -->")
        given.out.write_text(page)
    sys.exit(right < len(rows))


_PART = """
Each of these jobs was submitted twice to a {version} of two nodes on one machine: as it stands, and with
`dlprof wrap` in it. {right} of {all} ended alike, printed the same, and left a recording of all ranks and no process.

| job | plain: state, exit code:signal | with dlprof | printed | ranks × steps, of the shortest | still runs |
|---|---|---|---|---|---|
{table}
"""

if __name__ == "__main__":
    main()
