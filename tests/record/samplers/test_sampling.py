"""Samplers run beside the job: one process a host, gone when the job is, and a failing one costs only itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dlprof.files import boot
from dlprof.read.run import open_run
from dlprof.record.samplers.sampling import Host, claim
from tests.fixtures import jobs
from tests.fixtures.jobs import until
from tests.fixtures.sampling import leave_word

# Four samplers: one that counts and says whom it sees, and one for each moment at which a sampler may fail.
SAMPLES = """
import sys
from pathlib import Path
from dlprof.record.samplers.sampling import line, sample

class Counting:
    name, period_s = "counting", 0.02
    def start(self, host):
        self.host, self.log, self.ticks = host, host.log("counting.jsonl"), 0
    def tick(self):
        self.ticks += 1
        self.log.write(line({"tick": self.ticks, "ranks": [[r.rank, r.name, r.pid] for r in self.host.ranks]}))
    def stop(self):
        self.log.write(line({"stopped": self.ticks}))

def failing(at):
    class Failing:
        name, period_s = at, 0.02
        def start(self, host): self.fail("start")
        def tick(self): self.fail("tick")
        def stop(self): self.fail("stop")
        def fail(self, where):
            if where == at: raise RuntimeError("broken")
    return Failing

sample(Path(sys.argv[1]), [failing("start"), failing("tick"), Counting, failing("stop")], sys.stdin.fileno())
"""


class Beside:
    """A process that samples a run, as the supervisor's; closing its stdin is the end of the job."""

    def __init__(self, run: Path) -> None:
        self.folder = run / "hosts" / os.uname().nodename
        self.process = subprocess.Popen(
            [sys.executable, "-c", SAMPLES, str(run)], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def lines(self) -> list[Any]:
        path = self.folder / "counting.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def end(self) -> str:
        """End the job and give what the process said."""
        return self.process.communicate(timeout=30)[1]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "ranks").mkdir()
    (tmp_path / "run.json").write_text(json.dumps({"format": 1}))
    return tmp_path  # type: ignore[return-value]


def add_rank(run: Path, name: str, pid: int, **said: Any) -> None:
    (run / "ranks" / name).mkdir()
    facts = {"rank": int(name), "host": os.uname().nodename, "pid": pid, "device": {"type": "cpu"}} | said
    (run / "ranks" / name / "facts.json").write_text(json.dumps(facts))
    leave_word(run, name, pid)


def test_a_sampler_that_fails_costs_only_itself_and_the_report_says_so(run: Path) -> None:
    beside = Beside(run)
    assert until(lambda: len(beside.lines()) > 3)
    said = beside.end().splitlines()
    ticks = beside.lines()
    assert ticks[-1]["stopped"] == len(ticks) - 1
    assert [line.split(": ")[1] for line in said] == [f"the {at} sampler is off" for at in ("start", "tick", "stop")]
    warnings = open_run(run).warnings
    assert [w for w in warnings if "sampler" in w] == [
        f"{os.uname().nodename}: {line.removeprefix('dlprof: ')}" for line in said
    ]


def test_samplers_see_the_ranks_of_their_host_come_and_go(run: Path) -> None:
    beside = Beside(run)
    assert until(lambda: len(beside.lines()) > 1)
    rank = subprocess.Popen(["sleep", "60"])
    add_rank(run, "00001", rank.pid)
    add_rank(run, "00000", os.getpid(), host="elsewhere")  # by a host of this one's name
    assert until(lambda: beside.lines()[-1]["ranks"] == [[1, "00001", rank.pid]])
    rank.kill()
    # Dead before it is waited for: nobody mistakes a zombie for a rank.
    assert until(lambda: beside.lines()[-1]["ranks"] == [])
    rank.wait()
    beside.end()


def test_a_rank_without_facts_is_looked_at_again(run: Path) -> None:
    host = Host(run)
    (run / "ranks" / "00000").mkdir()
    leave_word(run, "00000", os.getpid())
    (host.folder / "rank-stray").write_text("")
    host.look()
    assert list(host.ranks) == []
    facts = {"rank": 0, "host": host.name, "pid": os.getpid(), "device": None}
    (run / "ranks" / "00000" / "facts.json").write_text(json.dumps(facts))
    host.look()
    (rank,) = host.ranks
    assert (rank.rank, rank.pid, rank.device) == (0, os.getpid(), {})


@pytest.mark.parametrize(
    ("asked", "age_s", "period_s"),
    [("auto", 0, 1), ("auto", 1_200, 2), ("auto", 43_200, 5), ("0.25", 43_200, 0.25), ("60", 0, 60)],
)
def test_an_old_job_is_read_less_often_unless_the_user_said_how_often(
    asked: str, age_s: float, period_s: float, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DLPROF_SAMPLE", asked)
    host = Host(run)
    host.began_s -= age_s
    assert host.period_s == pytest.approx(period_s, rel=1e-3)


def test_one_process_samples_a_host_and_the_next_takes_over(run: Path) -> None:
    held = claim(run)
    assert held is not None
    assert claim(run) is None
    other = claim(run / "ranks")
    assert other is not None
    other.close()
    beside = Beside(run)
    # It has looked, found the host claimed, and waits; what it would write, it has not written.
    assert until(lambda: Path(f"/proc/{beside.process.pid}/wchan").exists())
    assert not beside.folder.exists()
    held.close()
    assert until(lambda: len(beside.lines()) > 1)
    assert claim(run) is None
    beside.end()
    freed = claim(run)
    assert freed is not None
    freed.close()


def test_a_folder_of_another_machine_of_the_same_name_is_left_to_it(run: Path) -> None:
    theirs = run / "hosts" / os.uname().nodename
    theirs.mkdir(parents=True)
    (theirs / "boot").write_text("0-0")
    beside = Beside(run)
    beside.folder = theirs.with_name(f"{theirs.name}~{boot()[:8]}")
    assert until(lambda: len(beside.lines()) > 1)
    ranks = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    # Of two ranks whose process is here, the kernel of one is another.
    add_rank(run, "00000", ranks[0].pid, boot="0-0")
    add_rank(run, "00001", ranks[1].pid, boot=boot())
    assert until(lambda: beside.lines()[-1]["ranks"] == [[1, "00001", ranks[1].pid]])
    for rank in ranks:
        rank.kill()
        rank.wait()
    beside.end()
    words = {f"rank-{rank.pid}" for rank in ranks}
    assert {path.name for path in theirs.iterdir()} == {"boot", *words}
    # Whoever samples next on this machine goes on in its own.
    again = Beside(run)
    again.folder = beside.folder
    lines = len(again.lines())
    assert until(lambda: len(again.lines()) > lines)
    again.end()


def test_a_deleted_folder_ends_the_samplers_with_a_line(run: Path) -> None:
    beside = Beside(run)
    assert until(lambda: len(beside.lines()) > 1)
    for path in sorted(beside.folder.rglob("*")):
        path.unlink()
    assert "the counting sampler is off: the run folder was deleted" in beside.end()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_ends_the_samplers_with_a_line(run: Path) -> None:
    folder = run / "hosts" / os.uname().nodename
    folder.mkdir(parents=True)
    (folder / "counting.jsonl").symlink_to("/dev/full")
    beside = Beside(run)
    assert until(lambda: (folder / "warnings.txt").exists() and "counting" in (folder / "warnings.txt").read_text())
    assert "the counting sampler is off: [Errno 28] No space left on device" in beside.end()


def test_a_recorded_job_is_sampled_by_a_process_that_ends_with_it(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text("import sys\nprint('ready', flush=True)\nsys.stdin.readline()\n")
    for end in ("job", "kill"):
        command = jobs.wrapped(tmp_path / end, [sys.executable, script])
        process = subprocess.Popen(
            command, env=jobs.environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        sampling = [pid for pid in jobs.children(process.pid) if "samplers/__main__.py" in jobs.words(pid)]
        assert len(sampling) == 1
        # It is not one of the job's processes, and gets none of the terminal's signals.
        assert os.getsid(sampling[0]) != os.getsid(process.pid)
        if end == "kill":
            process.kill()
        else:
            process.stdin.write("\n")
            process.stdin.flush()
        process.wait(30)
        assert until(lambda pid=sampling[0]: not jobs.words(pid))  # type: ignore[misc]


def test_samplers_that_die_are_told_of_and_cost_the_job_nothing(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        "import os, signal, sys, time\n"
        "from pathlib import Path\n"
        "def words(pid):\n"
        "    return Path(f'/proc/{pid}/cmdline').read_text() if Path(f'/proc/{pid}').exists() else ''\n"
        "wrap, found = os.getppid(), []\n"
        "while not found:\n"
        "    found = [p for p in map(int, Path(f'/proc/{wrap}/task/{wrap}/children').read_text().split())\n"
        "        if 'samplers/__main__.py' in words(p)]\n"
        "os.kill(found[0], signal.SIGKILL)\n"
        "while words(found[0]):\n"
        "    time.sleep(0.01)\n"
        "sys.exit(5)\n"
    )
    done = jobs.launch(jobs.wrapped(tmp_path / "run", [sys.executable, script]), tmp_path)
    assert done.returncode == 5
    assert "the samplers ended before the job (status -9)" in done.stderr
    assert any("the samplers ended" in w for w in open_run(tmp_path / "run").warnings)


def test_samplers_that_hang_are_left_behind_by_nobody(tmp_path: Path) -> None:
    """A stopped process neither hears of the end nor ends: the job's status comes all the same, and it is gone."""
    script = tmp_path / "job.py"
    script.write_text("import sys\nprint('ready', flush=True)\nsys.stdin.readline()\nsys.exit(6)\n")
    command = jobs.wrapped(tmp_path / "run", [sys.executable, script])
    process = subprocess.Popen(
        command, env=jobs.environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    host = tmp_path / "run/hosts" / os.uname().nodename / "host.jsonl"
    # Old enough to be waited for.
    assert until(lambda: host.exists() and len(host.read_text().splitlines()) > 1)
    (hung,) = (pid for pid in jobs.children(process.pid) if "samplers/__main__.py" in jobs.words(pid))
    os.kill(hung, signal.SIGSTOP)
    process.communicate("\n", timeout=60)
    assert process.returncode == 6
    assert not jobs.words(hung)


def test_nothing_is_started_where_nobody_asked_for_samples(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        "import os\nwrap = os.getppid()\n"
        "for child in open(f'/proc/{wrap}/task/{wrap}/children').read().split():\n"
        "    print(open(f'/proc/{child}/cmdline').read().split(chr(0)))\n"
    )
    done = jobs.launch(jobs.wrapped(tmp_path / "run", [sys.executable, script], "--no-sample"), tmp_path)
    assert str(script) in done.stdout
    assert "samplers/__main__.py" not in done.stdout


def test_of_the_tasks_of_one_job_on_a_host_one_samples(tmp_path: Path) -> None:
    """As `srun -n2 dlprof wrap` starts them; when the first task has ended, the other's process takes over."""
    script = tmp_path / "job.py"
    script.write_text("import sys\nprint('ready', flush=True)\nsys.stdin.readline()\n")
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    command = jobs.wrapped(tmp_path / "run", [sys.executable, script])
    tasks = [
        subprocess.Popen(
            command,
            env=jobs.environment(**step, SLURM_PROCID=number),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in ("0", "1")
    ]

    def writing(task: subprocess.Popen[str]) -> bool:
        try:
            (pid,) = (pid for pid in jobs.children(task.pid) if "samplers/__main__.py" in jobs.words(pid))
            return any(fd.readlink().name == "host.jsonl" for fd in Path(f"/proc/{pid}/fd").iterdir())
        except (OSError, ValueError):  # it is just starting, or opening another file
            return False

    assert all(task.stdout is not None and task.stdout.readline() == "ready\n" for task in tasks)
    assert until(lambda: any(map(writing, tasks)))
    first, second = sorted(tasks, key=writing, reverse=True)
    assert not writing(second)
    first.communicate("\n", timeout=30)
    assert until(lambda: writing(second))
    second.communicate("\n", timeout=30)
    assert (first.returncode, second.returncode) == (0, 0)
