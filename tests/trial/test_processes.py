"""All that a run has started is found and ended: children, daemons, detached ones, those that hear nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dlprof.trial import running
from tests.fixtures.jobs import environment, until, words

# A launcher whose children are hard to end: one that is detached (setsid) and ignores SIGTERM, one that is stopped, one
# whose parent is gone and which is detached as well.
STARTS = """
import os, signal, subprocess, sys, time
wait = "import sys, time; open(sys.argv[1] + str(len(sys.argv[2])), 'w').close(); time.sleep(600)"
deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + wait
subprocess.Popen([sys.executable, "-c", deaf, sys.argv[1], "x"], start_new_session=True)
stopped = subprocess.Popen([sys.executable, "-c", wait, sys.argv[1], "xx"])
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, [sys.executable, "-c", wait, sys.argv[1], "xxx"])
    os._exit(0)
os.wait()
while not os.path.exists(sys.argv[1] + "2"):
    time.sleep(0.02)
os.kill(stopped.pid, signal.SIGSTOP)
open(sys.argv[1] + "0", "w").close()
time.sleep(600)
"""


def marked(text: str) -> list[int]:
    return [pid for p in Path("/proc").glob("[0-9]*") if text in words(pid := int(p.name))]


@pytest.mark.long
def test_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "GRACE_S", 0.5)
    mark = str(tmp_path / "up")
    env = environment(DLPROF_RUN=str(tmp_path / "run"))
    root = subprocess.Popen([sys.executable, "-c", STARTS, mark], env=env, start_new_session=True)
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env=environment())
    try:
        assert until(lambda: all(Path(f"{mark}{n}").exists() for n in range(4)))
        assert running.processes_of(root.pid, tmp_path / "run") == set(marked(mark))
        assert len(marked(mark)) == 4
        running.end(root.pid, tmp_path / "run")
        root.wait(10)
        assert marked(mark) == []
        assert other.poll() is None
    finally:
        for pid in (*marked(mark), other.pid):
            os.kill(pid, 9)
        other.wait()


def test_one_that_has_ended_has_none(tmp_path: Path) -> None:
    root = subprocess.Popen(["true"])
    root.wait()
    assert running.processes_of(root.pid, tmp_path) == set()
    running.end(root.pid, tmp_path)
