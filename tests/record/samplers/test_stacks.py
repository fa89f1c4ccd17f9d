"""Stacks of real jobs, seen by the real py-spy: whose they are, what dies with what, and that nothing is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from textwrap import dedent

import pandas as pd
import pytest

from dlprof.read.run import open_run
from dlprof.read.stacks import read
from dlprof.record.samplers.sampling import Host
from dlprof.record.samplers.stacks import StacksSampler, find, without_commands
from tests.fixtures.jobs import environment, facts, launch, record, words, wrapped
from tests.fixtures.sampling import leave_word

pytest.importorskip("torch", reason="recording needs torch")


@cache
def permitted() -> bool:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as target:
        time.sleep(0.5)
        command = [str(find()), "dump", "--nonblocking", "--pid", str(target.pid)]
        done = subprocess.run(command, capture_output=True, check=False)
        target.kill()
    return done.returncode == 0


@pytest.fixture(autouse=True)
def _may_look() -> None:
    if find() is None:
        pytest.skip("py-spy is not installed")
    if not permitted():
        pytest.skip("py-spy may not read other processes here")


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path: Path) -> Iterator[None]:
    yield
    until = time.monotonic() + 10
    while left := [pid for pid in processes() if str(tmp_path) in words(pid)]:
        assert time.monotonic() < until, [words(pid) for pid in left]
        time.sleep(0.05)


def processes() -> list[int]:
    return [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit()]


def wait_for_looks(job: subprocess.Popen[str], folder: Path) -> None:
    """Return when py-spy is looking: between two looks it sleeps."""
    while True:
        assert job.poll() is None
        for pid in spies(folder):
            with suppress(OSError):
                status = Path(f"/proc/{pid}/status").read_text()
                if int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0]) > 40:
                    return
        time.sleep(0.05)


def spies(folder: Path) -> list[int]:
    """List the py-spys that look at a rank of a run in that folder: by what they write into."""
    return [pid for pid in processes() if "py-spy" in words(pid) and any(str(folder) in name for name in held(pid))]


def held(pid: int) -> list[str]:
    """Return the names of what a process has open."""
    try:
        return [str(fd.readlink()) for fd in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return []


TRAIN = """
import os, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)

def busy(seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass

class Images(Dataset):
    def __len__(self):
        return 10_000
    def __getitem__(self, n):
        return self.decode(n)
    def decode(self, n):
        busy(0.004)
        return torch.ones(8)

def log():
    busy(0.004)

model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)

def train(batch):
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()
    log()

def run(seconds=600):
    until = time.monotonic() + seconds
    ranks = os.environ["DLPROF_RUN"] + "/ranks"
    size = int(os.environ.get("WORLD_SIZE", 1))
    written = [f"{ranks}/{n:05d}/stacks.txt.gz" for n in range(size)]
    for batch in DataLoader(Images(), batch_size=4, num_workers=1):
        train(batch)
        if time.monotonic() > until or (seconds == 600 and all(map(os.path.exists, written))):
            break
"""


def written(folder: Path, body: str) -> Path:
    script = folder / "train.py"
    script.write_text(TRAIN + dedent(body))
    return script


def stacks(rank: Path) -> pd.DataFrame:
    table = read(rank / "stacks.txt.gz").tables["stacks"]
    return table.astype({"role": str, "phase": str, "stack": str})


def seen(table: pd.DataFrame, function: str) -> set[tuple[str, str]]:
    found = table[table["stack"].str.contains(f"{function} (", regex=False)]
    return set(zip(found["role"], found["phase"], strict=True))


@pytest.mark.slow
def test_two_ranks_of_torchrun_and_their_forked_workers(tmp_path: Path) -> None:
    script = written(tmp_path, "run()")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)]
    done = launch(wrapped(tmp_path / "run", command, "--no-trace"), tmp_path)
    assert done.returncode == 0, done.stderr
    assert "py-spy" not in done.stderr
    for rank in (0, 1):
        folder = tmp_path / f"run/ranks/{rank:05d}"
        table = stacks(folder)
        assert seen(table, "decode") == {("worker", "")}
        assert seen(table, "log") == {("main", "rest")}
        assert "fetch" in set(table["phase"])
        workers = table[table["role"] == "worker"]
        assert workers["stack"].str.startswith("_worker_loop (").all()
        assert not table["stack"].str.contains(r"/dlprof/(?:hooks|recorder)\.py").any()


@pytest.mark.slow
def test_a_job_of_a_second_and_one_without_a_loader(tmp_path: Path) -> None:
    body = """
    file = os.environ["DLPROF_RUN"] + "/ranks/00000/stacks.txt.gz"
    until = time.monotonic() + float(sys.argv[1])
    while time.monotonic() < until and not os.path.exists(file):
        train(torch.ones(4, 8))
    """
    script = written(tmp_path, body)
    done = record(script, "1", folder=tmp_path / "short", options=["--no-trace"])
    assert "py-spy" not in done.stderr
    record(script, "60", folder=tmp_path / "run", options=["--no-trace", "--stacks", "100"])
    table = stacks(tmp_path / "run/ranks/00000")
    assert ("main", "rest") in seen(table, "log")
    assert set(table["role"]) == {"main"}


@pytest.mark.long
def test_a_rank_that_is_killed_ends_as_without_and_what_was_seen_is_kept(tmp_path: Path) -> None:
    script = written(tmp_path, "run(900)")
    command = wrapped(tmp_path / "run", [sys.executable, script], "--no-trace")
    with subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, cwd=tmp_path, text=True) as job:
        wait_for_looks(job, tmp_path)
        os.kill(facts(tmp_path / "run/ranks/00000")["pid"], signal.SIGKILL)
        _, said = job.communicate(timeout=60)
    assert job.returncode == -signal.SIGKILL
    assert "py-spy" not in said
    assert seen(stacks(tmp_path / "run/ranks/00000"), "decode") == {("worker", "")}


@pytest.mark.long
def test_py_spy_goes_when_all_of_dlprof_is_killed(tmp_path: Path) -> None:
    script = written(tmp_path, "print(os.getpid(), flush=True)\nrun(900)")
    command = wrapped(tmp_path / "run", [sys.executable, script], "--no-trace")
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, cwd=tmp_path, text=True) as job:
        assert job.stdout is not None
        pid = int(job.stdout.readline())
        wait_for_looks(job, tmp_path)
        beside = [p for p in processes() if "samplers/__main__.py" in words(p) and str(tmp_path) in words(p)]
        assert len(beside) == 1
        os.kill(beside[0], signal.SIGKILL)
        while spies(tmp_path):
            time.sleep(0.05)
        # The job has not noticed.
        assert job.poll() is None
        assert Path(f"/proc/{pid}").exists()
        os.kill(pid, signal.SIGTERM)
        assert job.wait(60) == -signal.SIGTERM
    # Nobody was left to append it without the command lines.
    assert not list((tmp_path / "run/ranks/00000").glob("stacks*"))


@pytest.mark.long
def test_between_bursts_it_does_not_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ranks/00000").mkdir(parents=True)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as rank:
        told = {"rank": 0, "host": os.uname().nodename, "pid": rank.pid}
        (tmp_path / "ranks/00000/facts.json").write_text(json.dumps(told))
        leave_word(tmp_path, "00000", rank.pid)
        monkeypatch.setenv("DLPROF_STACKS", "47")
        host, sampler = Host(tmp_path), StacksSampler()
        sampler.start(host)
        sampler.tick()
        assert sampler.period_s == 0.5  # somebody may come any time
        host.look()
        sampler.tick()
        while spies(tmp_path):
            assert sampler.period_s == 0.5
            time.sleep(0.05)
        sampler.tick()
        assert 3 < sampler.period_s <= 5
        sampler.stop()
        rank.kill()
    assert (tmp_path / "ranks/00000/stacks.txt.gz").exists()


@pytest.mark.long
def test_off_means_no_file_and_no_process(tmp_path: Path) -> None:
    script = written(tmp_path, "run(2)")
    command = wrapped(tmp_path / "run", [sys.executable, script], "--no-trace", "--stacks", "off")
    with subprocess.Popen(command, env=environment(), cwd=tmp_path) as job:
        while job.poll() is None:
            assert spies(tmp_path) == []
            time.sleep(0.05)
    assert job.returncode == 0
    assert (tmp_path / "run/ranks/00000/steps.jsonl").exists()
    assert list((tmp_path / "run/ranks/00000").glob("stacks*")) == []


@pytest.mark.long
def test_without_py_spy_one_line_says_so(tmp_path: Path) -> None:
    script = written(tmp_path, "run(1)")
    # A Python beside which there is no py-spy, and a PATH without one.
    lean = tmp_path / "lean"
    lean.mkdir()
    (lean / "python").symlink_to(Path(sys.executable).resolve())
    env = environment(PATH="/nowhere", PYTHONPATH=os.pathsep.join(p for p in sys.path if p))
    options = ["wrap", "-o", "run", "--no-report", "--no-trace"]
    done = launch([lean / "python", "-m", "dlprof", *options, script], tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if "py-spy" in line] == [
        "dlprof: stacks are not sampled: py-spy is not installed (pip install py-spy)"
    ]
    (warning,) = [text for text in open_run(tmp_path / "run").warnings if "py-spy" in text]
    assert "not installed" in warning


@pytest.mark.long
def test_without_permission_one_line_says_so(tmp_path: Path) -> None:
    if os.geteuid() or subprocess.run(["setpriv", "--version"], capture_output=True, check=False).returncode:
        pytest.skip("only root can give up the permission, with setpriv")
    # Not dumpable: such a process may be read with the capability alone, which the job was started without.
    body = """
    import ctypes, glob
    ctypes.CDLL(None).prctl(4, 0)
    until = time.monotonic() + 60
    while time.monotonic() < until and not glob.glob(os.environ["DLPROF_RUN"] + "/hosts/*/warnings.txt"):
        train(torch.ones(4, 8))
    """
    script = written(tmp_path, body)
    lesser = ["setpriv", "--bounding-set", "-sys_ptrace", "--inh-caps", "-sys_ptrace"]
    done = launch([*lesser, *wrapped(tmp_path / "run", [sys.executable, script], "--no-trace")], tmp_path)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "py-spy" in line]
    assert line.startswith("dlprof: stacks are not sampled: py-spy: ")
    assert "dlprof doctor" in line
    assert list((tmp_path / "run/ranks/00000").glob("stacks*")) == []


@pytest.mark.parametrize("command", ["python train.py --note hunter2", "sh -c a\n hunter2\rb\n", 'x";thread (hunter2'])
def test_of_what_py_spy_writes_no_command_is_kept(command: str) -> None:
    worker = 'process 7:"{0}";process 8:"{0}";thread (0x1): MainThread;run (a.py:1);decode (a.py:2) 3\n'
    main = 'process 7:"{0}";thread (0x2): MainThread;run (a.py:1) 5\n'
    written = f"{worker}{main}{worker}"
    assert without_commands(written.format(command).encode()).decode() == written.format("")
