"""Stacks of processes, read by the real py-spy: whose they are, what dies with what, and that nothing is left."""

from __future__ import annotations

import codecs
import json
import math
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
from typing import Any

import pytest

from dlprof import run_folder
from dlprof.read.run import open_run
from dlprof.read.stacks import read
from dlprof.record.samplers.sampling import Host
from dlprof.record.samplers.stacks import StacksSampler, find, texts_of, without_commands
from tests.fixtures.jobs import COMPILES_NOTHING, environment, facts, launch, spawned, until, words, wrapped
from tests.fixtures.sampling import leave_word


@cache
def permitted() -> bool:
    with spawned([sys.executable, "-c", "import time; time.sleep(60)"]) as target:
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
    assert until(lambda: not [pid for pid in processes() if str(tmp_path) in words(pid)])


def processes() -> list[int]:
    return [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit()]


def spies(folder: Path) -> list[int]:
    """List the py-spys that look at a rank of a run in that folder: by what they write into."""
    found = []
    for pid in processes():
        with suppress(OSError):
            files = Path(f"/proc/{pid}/fd").iterdir() if "py-spy" in words(pid) else ()
            found += [pid] if any(str(folder) in str(fd.readlink()) for fd in files) else []
    return found


def looks(folder: Path) -> bool:
    """Return whether py-spy has looked at a rank often: between two looks it sleeps."""
    for pid in spies(folder):
        with suppress(OSError):
            status = Path(f"/proc/{pid}/status").read_text()
            if int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0]) > 40:
                return True
    return False


TRAIN = (
    COMPILES_NOTHING
    + """
import os, sys, time
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)

def busy(seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass

class Images(Dataset):
    def __len__(self):
        return 100_000
    def __getitem__(self, n):
        return self.decode(n)
    def decode(self, n):
        busy(0.004)
        return torch.ones(8)

def log():
    busy(0.004)

model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
for batch in DataLoader(Images(), batch_size=4, num_workers=1):
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()
    log()
"""
)


def stacks_of(rank: Path) -> tuple[Path, str]:
    """Return the file with the stacks of a rank of this host, and what their lines begin with."""
    run = rank.parent.parent
    return run_folder.host_folder(run, os.uname().nodename) / run_folder.STACKS, run_folder.begins("stacks", rank.name)


def seen(rank: Path, function: str) -> set[tuple[str, str]]:
    """Return the roles and phases in which a function was seen."""
    table = read(*stacks_of(rank)).tables["stacks"].astype({"role": str, "phase": str, "stack": str})
    assert not table["stack"].str.contains(r"/dlprof/(?:hooks|recorder)\.py").any()
    assert table[table["role"] == "worker"]["stack"].str.startswith("_worker_loop (").all()
    found = table[table["stack"].str.contains(f"{function} (", regex=False)]
    return set(zip(found["role"], found["phase"], strict=True))


@pytest.mark.long
@pytest.mark.flaky(reruns=4)  # py-spy has 0.7 s to write what it saw: on a busy machine that is not always enough
def test_what_was_seen_of_a_rank_that_is_killed_is_kept(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="recording needs torch")
    (tmp_path / "train.py").write_text(TRAIN)
    command = wrapped(tmp_path / "run", [sys.executable, tmp_path / "train.py"], "--no-trace")
    rank = tmp_path / "run/ranks/00000"
    with spawned(command, env=environment(), stderr=subprocess.PIPE, cwd=tmp_path, text=True) as job:
        assert until(lambda: looks(rank))
        os.kill(facts(rank)["pid"], signal.SIGKILL)
        _, said = job.communicate(timeout=60)
    assert job.returncode == -signal.SIGKILL
    assert "py-spy" not in said
    # What took more than half a second to start was looked at before, too.
    assert seen(rank, "decode") - {("start_worker", "")} == {("worker", "")}
    assert seen(rank, "log") - {("start", "rest")} == {("main", "rest")}


SLOW_START = (
    TRAIN.replace(
        "model = nn.Linear(8, 1)",
        """
def prepare():
    busy(5)

prepare()
model = nn.Linear(8, 1)
""",
    )
    .replace("    log()\n", "    log()\n    if time.monotonic() > until:\n        break\n")
    .replace("for batch", "until = time.monotonic() + 4\nfor batch")
)


@pytest.mark.long
def test_what_a_process_does_before_its_first_step_is_seen_as_its_start(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="recording needs torch")
    (tmp_path / "train.py").write_text(SLOW_START)
    done = launch(wrapped(tmp_path / "run", [sys.executable, tmp_path / "train.py"], "--no-trace"), tmp_path)
    assert done.returncode == 0
    rank = tmp_path / "run/ranks/00000"
    assert seen(rank, "prepare") == {("start", "rest")}
    assert ("main", "rest") in seen(rank, "log")
    found = read(*stacks_of(rank)).facts["stacks"]
    assert 2 < (found["start"]["end_ns"] - found["start"]["start_ns"]) / 1e9 < 15
    assert found["bursts"] >= 1


# A rank without torch: it ends once a host has warned, or is ended by the test, which says that it trains.
RANK = """
import ctypes, glob, os, sys, time
ctypes.CDLL(None).prctl(4, int(sys.argv[1]))
print(os.getpid(), flush=True)
until = time.monotonic() + 60
notes = os.environ["DLPROF_RUN"] + "/hosts/*/notes-*"
while time.monotonic() < until and not any("warning" in open(path).read() for path in glob.glob(notes)):
    time.sleep(0.001)
"""


def trains(run: Path, pid: int) -> Path:
    """Say of a process of this host that it trains; return its folder."""
    rank = run / "ranks/00000"
    rank.mkdir(parents=True)
    (rank / "facts.json").write_text(json.dumps({"rank": 0, "host": os.uname().nodename, "pid": pid}))
    leave_word(run, "00000", pid)
    return rank


def started(folder: Path, *before: str, may_be_read: bool = True) -> tuple[subprocess.Popen[str], int, Path]:
    """Start a rank without torch under dlprof; return the command, the rank's process and its folder."""
    (folder / "rank.py").write_text(dedent(RANK))
    command = wrapped(folder / "run", [sys.executable, folder / "rank.py", str(int(may_be_read))])
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    job = subprocess.Popen([*before, *command], env=environment(), cwd=folder, text=True, **pipes)
    assert job.stdout is not None
    pid = int(job.stdout.readline())
    return job, pid, trains(folder / "run", pid)


@pytest.mark.long
def test_py_spy_goes_when_all_of_dlprof_is_killed(tmp_path: Path) -> None:
    job, pid, rank = started(tmp_path)
    assert until(lambda: looks(tmp_path))
    (beside,) = (p for p in processes() if "samplers/__main__.py" in words(p) and str(tmp_path) in words(p))
    os.kill(beside, signal.SIGKILL)
    assert until(lambda: not spies(tmp_path))
    assert job.poll() is None  # the job has not noticed
    assert words(pid)
    os.kill(pid, signal.SIGTERM)
    job.communicate(timeout=60)
    assert job.returncode == -signal.SIGTERM
    # Nobody was left to append it without the command lines.
    assert not list(rank.glob("stacks*"))


@pytest.mark.slow
def test_without_permission_one_line_says_so(tmp_path: Path) -> None:
    if os.geteuid() or subprocess.run(["setpriv", "--version"], capture_output=True, check=False).returncode:
        pytest.skip("only root can give up the permission, with setpriv")
    # A process that is not dumpable may be read with the capability alone, which the job is started without.
    lesser = ["setpriv", "--bounding-set", "-sys_ptrace", "--inh-caps", "-sys_ptrace"]
    job, _, rank = started(tmp_path, *lesser, may_be_read=False)
    said = job.communicate(timeout=90)[1]
    assert job.returncode == 0, said
    (line,) = [line for line in said.splitlines() if "py-spy" in line]
    assert line.startswith("dlprof: stacks are not sampled: py-spy: ")
    assert "dlprof doctor" in line
    assert list(rank.glob("stacks*")) == []


def test_without_py_spy_one_line_says_so(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(dedent(RANK))
    # A Python beside which there is no py-spy, and a PATH without one.
    lean = tmp_path / "lean"
    lean.mkdir()
    (lean / "python").symlink_to(Path(sys.executable).resolve())
    env = environment(PATH="/nowhere", PYTHONPATH=os.pathsep.join(p for p in sys.path if p))
    command = ["-m", "dlprof", "wrap", "-o", "run", "--no-report", str(tmp_path / "rank.py"), "1"]
    done = launch([lean / "python", *command], tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    text = "stacks are not sampled: py-spy is not installed (pip install py-spy)"
    assert [line for line in done.stderr.splitlines() if "py-spy" in line] == [f"dlprof: {text}"]
    assert [w.partition(": ")[2] for w in open_run(tmp_path / "run").warnings if "py-spy" in w] == [text]


@pytest.mark.long
@pytest.mark.parametrize("asked", ["47", "off"])
def test_between_bursts_it_does_not_look(asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with spawned([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        rank = trains(tmp_path, process.pid)
        monkeypatch.setenv("DLPROF_STACKS", asked)
        host, sampler = Host(tmp_path), StacksSampler()
        sampler.start(host)
        sampler.tick()
        assert sampler.period_s == (0.5 if asked == "47" else math.inf)  # a rank may come any time
        host.look()
        sampler.tick()
        assert bool(spies(tmp_path)) == (asked == "47")
        while spies(tmp_path):
            assert sampler.period_s == 0.5
            time.sleep(0.05)
        sampler.tick()
        assert 3 < sampler.period_s <= 5 or asked == "off"
        sampler.stop()
        process.kill()
    assert stacks_of(rank)[0].exists() == (asked == "47")


@pytest.mark.parametrize("command", ["python train.py --note hunter2", "sh -c a\n hunter2\rb\n", 'x";thread (hunter2'])
def test_of_what_py_spy_writes_no_command_is_kept(command: str) -> None:
    worker = 'process 7:"{0}";process 8:"{0}";thread (0x1): MainThread;run (a.py:1);decode (a.py:2) 3\n'
    main = 'process 7:"{0}";thread (0x2): MainThread;run (a.py:1) 5\n'
    written = f"{worker}{main}{worker}"
    assert without_commands(written.format(command).encode()).decode() == written.format("")


def test_the_text_of_the_lines_that_were_seen_most_is_kept_redacted(tmp_path: Path) -> None:
    script = tmp_path / "data.py"
    script.write_text("def get(path):\n    with open(path) as f:  # a comment\n        return f.read('of the user')\n")
    stack = f"thread (0x1): MainThread;main ({script}:9);get ({script}:{{}});read ({codecs.__file__}:1) {{}}\n"
    seen = "".join(stack.format(*line) for line in ((2, 5), (3, 90), (7, 1))).encode()
    lines = [(str(script), 3, "return f.read('…')"), (str(script), 2, "with open(path) as f:")]
    assert texts_of(seen, time.time_ns() + 10**9) == (lines, [])
    # What was written since then may not be what runs, and neither may what is gone.
    assert texts_of(seen, 0) == ([], [])
    script.unlink()
    assert texts_of(seen, time.time_ns() + 10**9) == ([], [])


LOOPS = """
def get(self, n):
    for word in self.words:
        if word in self.text:
            self.found.append(word)
    return self.found

for x in loader:
    loss = model(x)
    loss.backward()
    while ready():
        total += loss

for n in range(9):
    model(x).backward()
    step()
"""


@pytest.mark.parametrize(
    ("line", "loop"),
    [(3, 3), (4, 3), (5, 3), (6, 0), (9, 0), (12, 11), (16, 0)],
    ids=["itself", "in it", "deeper", "after it", "the training's", "within the training's", "a loop of steps"],
)
def test_the_loop_that_a_line_is_in_is_kept_unless_it_trains(tmp_path: Path, line: int, loop: int) -> None:
    script = tmp_path / "data.py"
    script.write_text(LOOPS)
    seen = f"thread (0x1): MainThread;get ({script}:{line}) 5\n".encode()
    _, loops = texts_of(seen, time.time_ns() + 10**9)
    assert loops == ([(str(script), line, loop)] if loop else [])
