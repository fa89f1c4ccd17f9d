"""Samplers run in one process a host, which ends with the job; one that fails ends alone. What the host's reads."""

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
from dlprof.record.log import Log, Part
from dlprof.record.samplers.host import HostSampler, _Processes, _waited
from dlprof.record.samplers.sampling import Host, claim, claimed_name
from dlprof.run_folder import notes_name
from tests.fixtures import jobs
from tests.fixtures.jobs import sampled, until
from tests.fixtures.sampling import leave_word

HERE = os.uname().nodename

# Four samplers: one that counts and lists whom it sees, and one for each moment at which a sampler may fail.
SAMPLES = """
import sys
from pathlib import Path
from dlprof.record.samplers.sampling import line, sample

class Counting:
    name, period_s = "counting", 0.02
    def start(self, host):
        self.host, self.log, self.ticks = host, host.log("counting"), 0
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

    def __init__(self, run: Path, folder: str = HERE) -> None:
        self.folder = run / "hosts" / folder
        self.process = subprocess.Popen(
            [sys.executable, "-c", SAMPLES, str(run)], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def lines(self) -> list[Any]:
        return sampled(self.folder, "counting")

    def sees(self, *ranks: tuple[int, str, int]) -> bool:
        """Wait until it samples just these ranks."""
        expected = [list(rank) for rank in ranks]
        return until(lambda: bool(lines := self.lines()) and lines[-1]["ranks"] == expected)

    def end(self) -> str:
        """End the job and return what the process said."""
        return self.process.communicate(timeout=60)[1]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "ranks").mkdir()
    (tmp_path / "run.json").write_text(json.dumps({"format": 1}))
    return tmp_path


def add_rank(run: Path, name: str, pid: int, **more: Any) -> None:
    (run / "ranks" / name).mkdir()
    facts = {"rank": int(name), "host": HERE, "pid": pid, "device": {"type": "cpu"}} | more
    (run / "ranks" / name / "facts.json").write_text(json.dumps(facts))
    leave_word(run, name, pid)


def test_samplers_fail_alone_and_see_ranks_come_and_go(run: Path) -> None:
    beside = Beside(run)
    assert beside.sees()
    rank = subprocess.Popen(["sleep", "60"])
    add_rank(run, "00001", rank.pid)
    add_rank(run, "00000", os.getpid(), host="elsewhere")  # by a host of this one's name
    assert beside.sees((1, "00001", rank.pid))
    rank.kill()  # a zombie, until it is waited for, is no rank
    assert beside.sees()
    rank.wait()
    failed = beside.end().splitlines()
    *ticks, last = beside.lines()
    assert last["stopped"] == len(ticks)
    assert [line.split(": ")[1] for line in failed] == [f"the {at} sampler is off" for at in ("start", "tick", "stop")]
    warnings = [w for w in open_run(run).warnings if "sampler" in w]
    assert warnings == [f"{HERE}: {line.removeprefix('dlprof: ')}" for line in failed]


def test_a_rank_without_facts_is_looked_at_again(run: Path) -> None:
    host = Host(run)
    (run / "ranks" / "00000").mkdir()
    leave_word(run, "00000", os.getpid())
    (host.folder / "notes-stray.jsonl").write_text('{"log":"rank","pid": 1, "folder": "000')
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
def test_an_old_job_is_read_less_often_unless_the_user_sets_a_period(
    asked: str, age_s: float, period_s: float, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DLPROF_SAMPLE", asked)
    host = Host(run)
    host.began_s -= age_s
    assert host.period_s == pytest.approx(period_s, rel=1e-3)


@pytest.mark.long
def test_one_process_samples_a_host_and_the_next_takes_over(run: Path) -> None:
    name = claimed_name(run)
    held, other = claim(name), claim(claimed_name(run / "ranks"))
    assert held is not None
    assert other is not None
    assert claim(name) is None
    other.close()
    beside = Beside(run)
    assert until(lambda: jobs.state(beside.process.pid) == "S")
    assert not beside.folder.exists()
    held.close()
    assert beside.sees()
    assert claim(name) is None
    beside.end()
    freed = claim(name)
    assert freed is not None
    freed.close()


def test_a_folder_of_another_machine_of_the_same_name_is_left_to_it(run: Path) -> None:
    theirs = run / "hosts" / HERE
    theirs.mkdir(parents=True)
    (theirs / "samples.jsonl").write_text('{"log":"boot","boot":"0-0"}\n')
    own = f"{HERE}~{boot()[:8]}"
    beside = Beside(run, own)
    assert beside.sees()
    ranks = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    # Of two ranks whose process is here, the kernel of one is another.
    add_rank(run, "00000", ranks[0].pid, boot="0-0")
    add_rank(run, "00001", ranks[1].pid, boot=boot())
    assert beside.sees((1, "00001", ranks[1].pid))
    for rank in ranks:
        rank.kill()
        rank.wait()
    beside.end()
    assert {path.name for path in theirs.iterdir()} == {"samples.jsonl", notes_name(boot())}
    assert (theirs / "samples.jsonl").read_text().count("\n") == 1
    # Whoever samples next on this machine goes on in the same folder.
    again, lines = Beside(run, own), len(beside.lines())
    assert until(lambda: len(again.lines()) > lines)
    again.end()


@pytest.mark.parametrize("how", ["deleted", "full"])
def test_a_folder_that_cannot_be_written_ends_a_sampler_with_a_line(how: str, run: Path) -> None:
    folder = run / "hosts" / HERE
    if how == "full":
        folder.mkdir(parents=True)
        (folder / "samples.jsonl").write_text("of another machine")
        own = folder.with_name(f"{HERE}~{boot()[:8]}")
        own.mkdir()
        (own / "samples.jsonl").symlink_to("/dev/full")
        beside, warnings = Beside(run, own.name), own / notes_name(boot())
        assert until(lambda: warnings.exists() and "counting" in warnings.read_text())
        why = "[Errno 28] No space left on device"
    else:
        beside, why = Beside(run), "the run folder was deleted"
        assert beside.sees()
        for path in sorted(folder.rglob("*")):
            path.unlink()
    assert f"the counting sampler is off: {why}" in beside.end()


JOB = "import sys\nprint('ready', flush=True)\nsys.stdin.readline()\nsys.exit(6)\n"


def begun(folder: Path, *options: str, **env: str) -> subprocess.Popen[str]:
    """Start a recorded job without torch, which ends with status 6 at a line to its stdin."""
    (folder / "job.py").write_text(JOB)
    pipes: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    command = jobs.wrapped(folder / "run", [sys.executable, folder / "job.py"], *options)
    process = subprocess.Popen(command, env=jobs.environment(**env), text=True, **pipes)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def samplers(process: subprocess.Popen[str]) -> list[int]:
    return [pid for pid in jobs.children(process.pid) if "samplers/__main__.py" in jobs.words(pid)]


@pytest.mark.parametrize(
    "how", ["job ends", "wrap is killed", "samplers are killed", "samplers hang", "none asked for"]
)
def test_samplers_end_with_the_job_and_do_not_change_its_status(how: str, tmp_path: Path) -> None:
    process = begun(tmp_path, *(["--no-sample"] if how == "none asked for" else []))
    beside = samplers(process)
    assert len(beside) == (how != "none asked for")
    # It is not one of the job's processes, and gets none of the terminal's signals.
    assert all(os.getsid(pid) != os.getsid(process.pid) for pid in beside)
    if how == "samplers hang":  # a stopped process neither sees the end nor ends
        host = tmp_path / "run/hosts" / HERE
        assert until(lambda: len(sampled(host, "host")) > 1)  # old enough to be waited for
        os.kill(beside[0], signal.SIGSTOP)
    elif how == "samplers are killed":
        os.kill(beside[0], signal.SIGKILL)
        assert until(lambda: not jobs.words(beside[0]))
    elif how == "wrap is killed":
        process.kill()
    said = process.communicate("\n", timeout=60)[1]
    assert process.returncode == (-signal.SIGKILL if how == "wrap is killed" else 6)
    assert until(lambda: not any(map(jobs.words, beside)))
    assert ("the samplers ended before the job (status -9)" in said) == (how == "samplers are killed")
    if how == "samplers are killed":
        assert any("the samplers ended" in w for w in open_run(tmp_path / "run").warnings)


def test_of_the_tasks_of_one_job_on_a_host_one_samples(tmp_path: Path) -> None:
    """As `srun -n2 dlprof wrap` starts them; when the first task has ended, the other's process takes over."""
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    tasks = [begun(tmp_path, **step, SLURM_PROCID=number) for number in ("0", "1")]

    def writes(task: subprocess.Popen[str]) -> bool:
        try:
            (pid,) = samplers(task)
            return any(fd.readlink().name == "samples.jsonl" for fd in Path(f"/proc/{pid}/fd").iterdir())
        except (OSError, ValueError):  # it is just starting, or opening another file
            return False

    assert until(lambda: any(map(writes, tasks)))
    first, second = sorted(tasks, key=writes, reverse=True)
    assert not writes(second)
    first.communicate("\n", timeout=60)
    assert until(lambda: writes(second))
    second.communicate("\n", timeout=60)
    assert (first.returncode, second.returncode) == (6, 6)


# A rank that sleeps and a worker that computes; a line to stdin ends the worker, the next one the rank.
RANK = """
import subprocess, sys
worker = subprocess.Popen([sys.executable, "-c", "while True: pass"])
print(worker.pid, flush=True)
sys.stdin.readline()
worker.kill()
worker.wait()
print("ended", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def rank(run: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", RANK]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
    add_rank(run, "00003", process.pid)
    yield process
    process.communicate("\n\n", timeout=60)


def cpu_s(pid: int) -> float:
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize(("most_s", "again"), [(1.0, True), (-1.0, False)])
def test_what_workers_have_copied_is_read_no_more_once_that_takes_long(
    most_s: float, again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dlprof.record.samplers.host._OWN_MOST_S", most_s)
    monkeypatch.setattr("dlprof.record.samplers.host._OWN_SHARE", 1e9)
    processes = _Processes(os.getpid(), Part(Log(tmp_path / "samples.jsonl"), "processes", "00000"))
    assert processes._own([]) == {}
    before = processes._own([os.getpid()])["children_private_bytes"]
    held = bytearray(b"x" * (64 << 20))
    assert ("children_private_bytes" in (after := processes._own([os.getpid()]))) == again
    assert not again or after["children_private_bytes"] - before >= 32 << 20
    assert held


def test_a_host_a_rank_its_workers_and_the_job_are_read_as_the_kernel_counts(
    run: Path, rank: subprocess.Popen[str]
) -> None:
    assert rank.stdout is not None
    assert rank.stdin is not None
    worker = int(rank.stdout.readline())
    host, sampler = Host(run), HostSampler()
    sampler.start(host)
    sampler._supervisor = rank.pid  # and not whoever started the tests

    def read() -> tuple[Any, Any]:
        host.look()
        sampler.tick()
        return sampled(host.folder, "processes", "00003")[-1], sampled(host.folder, "host")[-1]

    first, beside = read()
    assert "job_cpu_s" not in beside  # its processes were not looked for yet
    burnt = cpu_s(worker)
    assert until(lambda: cpu_s(worker) > burnt + 0.3)
    second, beside = read()
    assert (first["children"], second["children"], second["threads"]) == (1, 1, 1)
    assert second["children_cpu_s"] - first["children_cpu_s"] > 0.25
    assert 0 < first["children_private_bytes"] < first["children_rss_bytes"]
    assert second["cpu_s"] - first["cpu_s"] < 0.1
    assert second["rss_bytes"] > second["anonymous_bytes"] > 1 << 20
    assert second["perf_ns"] > first["perf_ns"]

    assert len(beside["core_percent"]) == os.cpu_count()
    assert max(beside["core_percent"]) > 0
    assert 0 < beside["cpu_share"] <= 1
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < beside["memory_used_bytes"] < beside["memory_used_bytes"] + beside["memory_available_bytes"]
    assert beside["memory_used_bytes"] + beside["memory_available_bytes"] <= total * 1.01
    assert beside["page_faults"] > 0
    assert beside["runnable_threads"] >= 1
    # 128 cores, 8 ranks and a line a second: below 50 MB an hour.
    size = len(json.dumps(beside | {"core_percent": [100] * 128}, separators=(",", ":")))
    assert 3600 * (size + 8 * (len(json.dumps(second)) + 40)) < 50e6

    burnt = cpu_s(worker)
    rank.stdin.write("\n")
    assert rank.stdout.readline() == "ended\n"
    third, beside = read()
    # What a worker used stays used when it ends.
    assert third["children"] == 0
    assert third["children_cpu_s"] >= second["children_cpu_s"]
    assert beside["job_cpu_s"] > burnt - 0.05

    rank.stdin.write("\n")
    rank.wait(60)
    lines = sampled(host.folder, "processes", "00003")
    read()
    assert sampled(host.folder, "processes", "00003") == lines
    sampler.stop()


def test_the_waiting_of_a_pools_threads_is_counted_beside_the_main_ones() -> None:
    """Two threads more than cores, and none of them the main one, which sleeps."""
    threads = (os.cpu_count() or 1) + 3
    spin = "import threading, hashlib, time, os\ndef work():\n    while True: hashlib.sha256(bytes(1 << 20))\n"
    spin += f"for _ in range({threads - 1}): threading.Thread(target=work, daemon=True).start()\n"
    spinning = subprocess.Popen([sys.executable, "-c", f"{spin}time.sleep(60)"])
    try:
        assert until(lambda: _waited(spinning.pid, threads).get("other_threads_waited_ns", 0) > 200_000_000)
        waited = _waited(spinning.pid, threads)
        assert waited["main_thread_waited_ns"] < waited["other_threads_waited_ns"]
        # Of a process with very many threads only the main one is read.
        assert list(_waited(spinning.pid, 10_000)) == ["main_thread_waited_ns"]
    finally:
        spinning.kill()
        spinning.wait()
    assert _waited(2**22 + 1, 1) == {}
