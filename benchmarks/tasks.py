"""What recording asks of the disk that a job's hosts share, by how many tasks the job has: system calls of one task.

Each task is a process that supervises a rank, as under `srun dlprof wrap`, and all of them are there at once. The rank
does what a real one does to the run folder and nothing else: it makes its folder, leaves its facts and a trace, and
waits until all others have come. strace counts the calls that name the run folder, before and after that moment.

Eight tasks have one host: a name of its own, which takes root.

    python -m benchmarks.tasks            # needs strace
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean

TASKS = (25, 50, 100, 200)

# The rank, in an interpreter that has the recorder's hook and no torch; then it is a shell that waits.
RANK = """
import os, pathlib
from dlprof.record import ranks
run = pathlib.Path(os.environ["DLPROF_RUN"])
folder = ranks.make_folder(run, ranks.find_rank(), 0, alone=False)[0]
(folder / "facts.json").write_text("{}")
(folder / "trace.json").write_text("{}")
(run.parent / f"came-{os.getpid()}").touch()
os.execv("/bin/sh", ["sh", "-c", "read word < ../go"])
"""

# The tasks: forks of one process, for 200 interpreters with dlprof in each would not start together on a laptop.
JOB = """
import ctypes, os, socket, sys
from pathlib import Path
from dlprof.record.launch.folder import RunFolder
from dlprof.record.launch.supervisor import supervise
size, rank = int(sys.argv[1]), sys.argv[2]
for number in range(size):
    if os.fork() == 0:
        if ctypes.CDLL(None).unshare(0x04000000):  # CLONE_NEWUTS, of <sched.h>
            raise SystemExit("hosts cannot be made here: it takes root")
        socket.sethostname(f"node{number // 8:04d}")
        task = {"OMPI_COMM_WORLD_SIZE": str(size), "OMPI_COMM_WORLD_RANK": str(number), "PMIX_NAMESPACE": "1"}
        command, env = [sys.executable, "-c", rank], os.environ | task
        supervise(command, RunFolder(Path("run"), command, {}, env), env)
        os._exit(0)
for number in range(size):
    os.wait()
"""

# Looks for the ranks of this host as its sampler does, once, where so many others of the job are elsewhere.
LOOK = """
import json, os, sys
from pathlib import Path
from dlprof.record.ranks import leave_note
from dlprof.record.samplers.sampling import Host
run, size, here = Path("run"), int(sys.argv[1]), os.uname().nodename
for rank in range(size):
    folder = run / "ranks" / f"{rank:05d}"
    folder.mkdir(parents=True)
    (folder / "facts.json").write_text(json.dumps({"rank": rank, "host": "elsewhere" if rank else here, "pid": 1}))
(run / "hosts" / here).mkdir(parents=True)
leave_note(run / "hosts" / here, "rank", pid=1, folder="00000", supervisor="1", since="1", at_ns=1)
host = Host(run)
opened = []
sys.addaudithook(lambda name, args: opened.append(args[0]) if name == "open" and "facts.json" in str(args[0]) else None)
host.look()
print(len(opened))
"""

_CALL = re.compile(r"^\d+ +(\d+\.\d+) (\w+)\((.*)$")
_LISTS, _MAKES = ("getdents64",), ("mkdir", "mkdirat", "rename", "renameat", "renameat2", "unlink", "unlinkat")


def calls(log: Path, run: str) -> list[tuple[float, str]]:
    """Return when each call was made that names the run folder, in Unix seconds, and of which kind it was."""
    found = []
    for line in log.read_text(errors="replace").splitlines():
        call = _CALL.match(line)
        if call is None or run not in call[3]:
            continue
        opens = call[2] in ("open", "openat")
        makes = call[2] in _MAKES or (opens and "O_CREAT" in call[3])
        kind = "list" if call[2] in _LISTS else "make" if makes else "open" if opens else "stat"
        found.append((float(call[1]), kind))
    return found


def measure(size: int, env: Mapping[str, str]) -> dict[str, Counter[str]]:
    """Return how many calls of each kind all tasks of a job make at its start and at its end."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place, "job")
        folder.mkdir()
        os.mkfifo(Path(place, "go"))
        log = Path(place, "log")
        traced = ["strace", "-f", "-y", "-ttt", "-s", "400", "-e", "trace=%file,getdents64", "-o", str(log)]
        job = subprocess.Popen([*traced, sys.executable, "-c", JOB, str(size), RANK], cwd=folder, env=dict(env))
        while len(list(folder.glob("came-*"))) < size:
            if job.poll() is not None:
                raise SystemExit(f"the tasks ended before all had come: status {job.returncode}")
            time.sleep(0.2)
        time.sleep(1.0)  # until the last of them waits
        middle = time.time()
        Path(place, "go").write_text("")  # opens it once all wait, and closes it
        job.wait()
        there = calls(log, f"{folder}/run") + calls(log, '"run')
        most = Counter(str(path.parent) for path in (folder / "run").rglob("*")).most_common(1)[0][1]
        return {
            "start": Counter(kind for at, kind in there if at < middle),
            "end": Counter(kind for at, kind in there if at >= middle),
            "largest folder": Counter(entries=most),
        }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", type=int, nargs="+", default=TASKS)
    args = parser.parse_args(arguments)
    if shutil.which("strace") is None:
        raise SystemExit("strace is not installed")
    hidden = ("DLPROF_", "SLURM_", "OMPI_", "PMI")
    env = {k: v for k, v in os.environ.items() if not k.startswith(hidden)} | {"PYTHONDONTWRITEBYTECODE": "1"}
    print("calls of one task that name the run folder, mean\n")
    print("tasks    at the start             at the end               entries of the  ranks' facts that a")
    print("         stat  open  make  list   stat  open  make  list   largest folder  host's sampler reads")
    for size in args.tasks:
        found = measure(size, env)
        each = [found[when][kind] / size for when in ("start", "end") for kind in ("stat", "open", "make", "list")]
        with tempfile.TemporaryDirectory() as place:
            looked = subprocess.run(
                [sys.executable, "-c", LOOK, str(size)], cwd=place, env=env, check=True, capture_output=True, text=True
            )
        cells = [f"{n:5.1f}" for n in each]
        most = found["largest folder"]["entries"]
        print(
            f"{size:5}   {' '.join(cells[:4])}  {' '.join(cells[4:])}   {most:14}  {looked.stdout.strip():>19}",
            flush=True,
        )
    assert mean(each) > 0


if __name__ == "__main__":
    main()
