"""No job outlives its time, nor leaves anything running, whatever it does to get away."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from benchmarks.gpu import jobs
from benchmarks.gpu.jobs import JobFailedError, must, python, run
from tests.fixtures.jobs import is_running


@pytest.mark.long
def test_a_job_that_hangs_is_ended_with_what_left_its_group_and_ignores_signals(tmp_path: Path) -> None:
    body = f"""
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
away = "import os, signal, time; os.setsid(); signal.signal(signal.SIGTERM, signal.SIG_IGN);"
away += "open({str(tmp_path / "away")!r}, 'w').write(str(os.getpid())); time.sleep(300)"
subprocess.Popen([sys.executable, "-c", away])
print("begun", flush=True)
time.sleep(300)
"""
    began = time.monotonic()
    ended = run(python("-c", body), tmp_path, 3.0)
    assert ended.code is None
    assert time.monotonic() - began < 30
    assert [text for _, text in ended.lines] == ["begun"]
    assert "ended after 3 s" in ended.errors
    pid = int((tmp_path / "away").read_text())
    assert pid != os.getpid()
    assert not is_running(pid)


def test_what_a_job_that_ended_left_running_is_ended(tmp_path: Path) -> None:
    body = "import subprocess; p = subprocess.Popen(['sleep', '300'], start_new_session=True); print(p.pid)"
    ended = run(python("-c", body), tmp_path, 60.0)
    assert ended.code == 0
    assert not is_running(int(ended.out))


def test_lines_come_with_the_time_they_were_printed_at(tmp_path: Path) -> None:
    heard: list[str] = []
    body = "import sys, time\nfor n in range(3):\n    print('step', n)\n    time.sleep(0.2)\nsys.exit(7)"
    ended = run(python("-c", body), tmp_path, 60.0, hear=heard.append)
    assert heard == ["step 0", "step 1", "step 2"]
    times = [at for at, _ in ended.lines]
    assert 0.1 < times[1] - times[0] < 5
    assert ended.code == 7


def test_a_failure_is_one_line_that_names_the_error_and_a_tail(tmp_path: Path) -> None:
    ended = run(python("-c", "print('out'); raise RuntimeError('CUDA error: out of memory')"), tmp_path, 60.0)
    with pytest.raises(JobFailedError, match="the job: exit code 1: RuntimeError: CUDA error: out of memory") as failed:
        must("the job", ended)
    assert "\n" not in str(failed.value)
    assert "| out" in failed.value.tail
    assert must("the job", ended, code=1) is ended
    assert run(["/no/such/program"], tmp_path, 5.0).code == 127


def test_a_job_sees_dlprof_and_no_outer_recording(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    outer = {"DLPROF_RUN": "/x", "RANK": "1", "WORLD_SIZE": "2", "PYTHONPATH": str(tmp_path), "PATH": "/usr/bin"}
    env = jobs.environment(outer)
    assert not {"DLPROF_RUN", "RANK", "WORLD_SIZE"} & set(env)
    assert env["PYTHONPATH"].split(os.pathsep) == [str(jobs.ROOT), str(tmp_path)]
    # Programs of packages that were carried along lie there.
    assert env["PATH"].split(os.pathsep) == ["/usr/bin", str(tmp_path / "bin")]
    assert jobs.environment({})["PYTHONPATH"] == str(jobs.ROOT)
