"""Kineto's words and everybody else's, in real processes with the real profiler, and when CUPTI is torn down."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from dlprof.record.device.profiler import Kineto
from tests.fixtures.devices import Devices
from tests.fixtures.jobs import environment

torch = pytest.importorskip("torch", reason="recording needs torch")

# Kineto says that it cannot write where there is no folder: a real error, with its chatter around it.
JOB = """
import json, os, subprocess, sys, threading, time
import torch
from dlprof.record.device.profiler import Kineto

kineto = Kineto(on_device=True)
profiler = torch.profiler._KinetoProfile(activities=[torch.profiler.ProfilerActivity.CPU])

def trace(path="/nowhere/at/all.json"):
    with kineto.preparing():
        profiler.prepare_trace()
    with kineto.listening():
        profiler.start_trace()
        torch.ones(3) + 1
        profiler.stop_trace()
        during()
        profiler.export_chrome_trace(path)

def during():
    pass

def end():
    kineto.close()
    print(json.dumps({"errors": kineto.errors, "level": os.environ.get("KINETO_LOG_LEVEL")}))
"""


def run(body: str, **env: str) -> subprocess.CompletedProcess[str]:
    script = dedent(JOB) + dedent(body)
    command = [sys.executable, "-c", script]
    return subprocess.run(
        command, env=environment(**env), capture_output=True, text=True, timeout=120, check=False, cwd=Path.cwd()
    )


def heard(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert "Failed to open '/nowhere/at/all.json'" in said["errors"][0]
    return said


def test_what_kineto_says_is_kept_and_the_scripts_stderr_has_what_others_say(tmp_path: Path) -> None:
    done = run(
        """
        talking = True
        def talk():
            n = 0
            while talking:
                os.write(2, b"thread %d\\n" % n)
                n += 1
                time.sleep(0.0001)
            os.write(2, b"in all %d\\n" % n)
        thread = threading.Thread(target=talk)
        thread.start()
        trace()
        talking = False
        thread.join()
        end()
        sys.stderr.write("the end\\n")
        """
    )
    said = heard(done)
    assert [error.split(":")[0] for error in said["errors"]] == ["ERROR"] * len(said["errors"])
    *lines, last, end = done.stderr.splitlines()
    assert lines == [f"thread {n}" for n in range(len(lines))]
    assert (last, end) == (f"in all {len(lines)}", "the end")
    assert said["level"] is None


@pytest.mark.long
def test_after_it_kineto_says_what_it_would_have_said_without_us() -> None:
    again = """
    profiler = torch.profiler._KinetoProfile(activities=[torch.profiler.ProfilerActivity.CPU])
    profiler.prepare_trace(); profiler.start_trace(); profiler.stop_trace()
    profiler.export_chrome_trace("/nowhere/else.json")
    """
    ours = run(f"trace()\nend()\n{dedent(again)}")
    plain = run(dedent(again))
    heard(ours)

    def words(done: subprocess.CompletedProcess[str]) -> list[str]:
        return [line.partition("] ")[2] for line in done.stderr.splitlines()]

    assert words(ours) == words(plain)
    assert "Failed to open '/nowhere/else.json' : No such file or directory" in words(plain)


def test_a_user_who_wants_kinetos_words_has_them_all() -> None:
    done = run("trace()\nend()", KINETO_LOG_LEVEL="0")
    said = heard(done)
    assert "Completed Stage: Collection" in done.stderr
    assert "Failed to open '/nowhere/at/all.json'" in done.stderr
    assert said["level"] == "0"


@pytest.mark.long
def test_a_child_that_outlives_the_call_and_its_parent_is_heard_to_its_end() -> None:
    done = run(
        """
        def during():
            later = "import sys, time; time.sleep(1); sys.stderr.write('child\\\\n')"
            subprocess.Popen([sys.executable, "-c", later])
        trace()
        end()
        """
    )
    heard(done)
    assert done.stderr.splitlines() == ["child"]


@pytest.mark.filterwarnings("ignore")
def test_a_fork_meanwhile_has_the_real_stderr_and_no_child_more_is_waited_for() -> None:
    done = run(
        """
        def during():
            if os.fork() == 0:
                os.write(2, b"%s\\n" % os.readlink("/proc/self/fd/2").encode())
                os._exit(0)
            os.wait()
            try:
                os.wait()
            except ChildProcessError:
                os.write(2, b"no child\\n")
        print(os.readlink("/proc/self/fd/2"))
        trace()
        end()
        """
    )
    heard(done)
    assert done.stderr.splitlines() == [done.stdout.splitlines()[0], "no child"]


def test_the_last_words_of_a_process_that_dies_in_the_call_are_there() -> None:
    done = run(
        """
        import faulthandler
        faulthandler.enable()
        def during():
            os.abort()
        trace()
        """
    )
    assert done.returncode == -signal.SIGABRT
    assert "Fatal Python error: Aborted" in done.stderr
    assert "USDT" not in done.stderr


def test_a_script_that_changes_its_stderr_meanwhile_keeps_the_new_one(tmp_path: Path) -> None:
    done = run(
        f"""
        def during():
            fd = os.open({str(tmp_path / "err.txt")!r}, os.O_CREAT | os.O_WRONLY)
            os.dup2(fd, 2)
        trace()
        end()
        os.write(2, b"to the file\\n")
        """
    )
    assert done.returncode == 0
    assert done.stderr == ""
    assert (tmp_path / "err.txt").read_text().endswith("to the file\n")


@pytest.mark.long
def test_a_script_without_stderr_is_recorded_all_the_same() -> None:
    done = run("end()", PYTHONUNBUFFERED="1")
    assert json.loads(done.stdout)["errors"] == []
    silent = run("import os\nos.close(2)\nkineto = Kineto(on_device=True)\ntrace()\nend()")
    assert json.loads(silent.stdout.splitlines()[-1])["errors"] is None


def test_on_a_cpu_kineto_is_silent_and_nobody_listens(tmp_path: Path) -> None:
    done = run(f"kineto = Kineto(on_device=False)\ntrace({str(tmp_path / 'trace.json')!r})\nend()")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout.splitlines()[-1]) == {"errors": None, "level": None}


class Environment:
    """What Kineto would find in the environment, for a version of CUDA."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cuda: str | None, said: str | None = None) -> None:
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.delenv("TEARDOWN_CUPTI", raising=False)
        if said is not None:
            monkeypatch.setenv("TEARDOWN_CUPTI", said)
        self.kineto = Kineto(on_device=False)
        self.will = self.kineto.tear_down()
        self.found = os.environ.get("TEARDOWN_CUPTI")
        self.kineto.leave()
        self.left = os.environ.get("TEARDOWN_CUPTI")


@pytest.mark.parametrize(
    ("cuda", "said", "will", "found", "left"),
    [
        ("12.6", None, True, "1", None),
        ("13.0", None, True, "1", None),
        ("12.4", None, False, None, None),
        ("11.8", None, False, None, None),
        (None, None, None, None, None),
        ("12.8", "0", False, "0", "0"),
        ("12.4", "1", True, "1", "1"),
    ],
)
def test_cupti_is_torn_down_where_that_is_safe_and_the_users_word_stands(
    cuda: str | None, said: str | None, will: bool | None, found: str | None, left: str | None, monkeypatch: Any
) -> None:
    got = Environment(monkeypatch, cuda, said)
    assert (got.will, got.found, got.left) == (will, found, left)


def test_the_call_that_tears_it_down_is_made_at_once_and_on_the_ranks_device(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = Devices(monkeypatch)
    monkeypatch.setattr("dlprof.record.device.profiler._TEAR_DOWN_S", 0.01)
    asked = []

    class Stream:
        def query(self) -> bool:
            asked.append(True)
            return False

    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: Stream() if index == 1 else None)
    kineto = Kineto(on_device=False)
    kineto.torn_down(1)
    assert asked == []
    assert kineto.tear_down()
    kineto.torn_down(1)
    assert asked
    kineto.leave()
    assert devices.awake == set()
