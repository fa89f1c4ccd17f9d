"""Kineto's messages are kept and all others pass, packet by packet and in real processes; when CUPTI is torn down."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from dlprof.record.device import relay
from dlprof.record.device.kineto import Kineto
from tests.fixtures.devices import Devices
from tests.fixtures.in_process import in_c
from tests.fixtures.jobs import COMPILES_NOTHING, environment

torch: Any = pytest.importorskip("torch", reason="recording needs torch")

HEAD = b"%s:2026-01-02 03:04:05 17:18 init.cpp:178] "
WARNING, STAGE, ERROR = (HEAD % level for level in (b"WARNING", b"STAGE", b"ERROR"))


def relayed(*packets: bytes, everything: bool = False, is_read: bool = True) -> tuple[bytes, bytes]:
    """Return what is passed on and what is kept of packets that are written one after the other."""
    read, write = os.pipe2(os.O_DIRECT)
    passed, stderr = os.pipe()
    kept, keep = os.pipe()

    def write_all() -> None:
        for packet in packets:
            os.write(write, packet)
        os.close(write)

    if not is_read:
        os.close(passed)
    writer = threading.Thread(target=write_all)
    writer.start()
    relay.relay(read, stderr, keep, everything)
    writer.join()
    for fd in (read, stderr, keep):
        os.close(fd)
    found = []
    for fd in (passed, kept) if is_read else (kept,):
        with open(fd, "rb") as file:  # noqa: PTH123 - a descriptor
            found.append(file.read())
    return (found[0] if is_read else b""), found[-1]


KINETO, OTHERS = STAGE + b"Completed Stage: Warm Up", b"loss 0.1\n"


@pytest.mark.parametrize(
    ("packets", "passed", "kept"),
    [
        ([KINETO, b"\n"], b"", b""),
        ([ERROR + b"no", b"\n"], b"", ERROR + b"no\n"),
        ([OTHERS, ERROR + b"no", b"\n", b"loss 0.2\n"], b"loss 0.1\nloss 0.2\n", ERROR + b"no\n"),
        # Another thread writes between a message and the end of its line.
        ([WARNING + b"no", OTHERS, b"\n"], b"loss 0.1\n\n", WARNING + b"no\n"),
        ([WARNING + b"one\ntwo\n", b"\n"], b"\n", WARNING + b"one two\n"),
        # A progress bar, and words that only look like Kineto's.
        ([b"\r 10 %", b"\r 20 %"], b"\r 10 %\r 20 %", b""),
        ([b"ERROR:root:no\n", b"WARNING: slow\n"], b"ERROR:root:no\nWARNING: slow\n", b""),
        ([b"\xff\x00\n", b"\n"], b"\xff\x00\n\n", b""),
        ([], b"", b""),
        # Longer than a packet: all of it stays, a part is kept.
        ([STAGE + b"x" * 10_000, b"\n", OTHERS], OTHERS, b""),
        ([ERROR + b"y" * 10_000, OTHERS], OTHERS, ERROR + b"y" * (1000 - len(ERROR)) + b"\n"),
    ],
)
def test_kinetos_messages_stay_and_all_else_passes_in_order(packets: list[bytes], passed: bytes, kept: bytes) -> None:
    assert relayed(*packets) == (passed, kept)
    assert relayed(*packets, is_read=False) == (b"", kept)  # stderr that nobody reads stops nothing
    assert relayed(*packets, everything=True) == (b"".join(packets), kept)  # the user asked for Kineto's, too


def test_what_is_kept_is_bounded() -> None:
    # A pipe that is full would hold up what others write.
    passed, kept = relayed(*([ERROR + b"z" * 950, b"\n"] * 60), b"after\n")
    assert passed == b"after\n"
    assert 30_000 < len(kept) < 35_000


# Kineto says that it cannot write where there is no folder: a real error, with its chatter around it.
JOB = (
    COMPILES_NOTHING
    + """
import json, os, subprocess, sys, threading, time
from dlprof.record.device.kineto import Kineto

kineto = Kineto(on_device=True)

def trace(path="/nowhere/at/all.json", during=lambda: None):
    profiler = torch.profiler._KinetoProfile(activities=[torch.profiler.ProfilerActivity.CPU])
    with kineto.preparing():
        profiler.prepare_trace()
    with kineto.listening():
        profiler.start_trace()
        torch.ones(3) + 1
        profiler.stop_trace()
        during()
        profiler.export_chrome_trace(path)

def end():
    kineto.close()
    print(json.dumps({"errors": kineto.errors, "level": os.environ.get("KINETO_LOG_LEVEL")}), flush=True)
"""
)


def run(body: str, **env: str) -> subprocess.CompletedProcess[str]:
    command, cwd = [sys.executable, "-c", JOB + dedent(body)], Path.cwd()
    return subprocess.run(
        command, env=environment(**env), capture_output=True, text=True, timeout=120, check=False, cwd=cwd
    )


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_what_kineto_says_is_kept_and_stderr_has_what_all_others_say() -> None:
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
        def during():
            later = "import sys, time; time.sleep(1); sys.stderr.write('child\\\\n')"
            subprocess.Popen([sys.executable, "-c", later])  # outlives the call and its parent
            if os.fork() == 0:
                os.write(2, b"fork %s\\n" % os.readlink("/proc/self/fd/2").encode())
                os._exit(0)
            os.wait()
        print(os.readlink("/proc/self/fd/2"), os.getpid(), flush=True)
        thread = threading.Thread(target=talk)
        thread.start()
        trace(during=during)
        with open(f"/proc/{os.getpid()}/task/{os.getpid()}/children") as children:
            print(len(children.read().split()))  # the script's own alone
        talking = False
        thread.join()
        end()
        profiler = torch.profiler._KinetoProfile(activities=[torch.profiler.ProfilerActivity.CPU])
        profiler.prepare_trace(); profiler.start_trace(); profiler.stop_trace()
        profiler.export_chrome_trace("/nowhere/else.json")
        """
    )
    assert done.returncode == 0, done.stderr
    first, children, last = done.stdout.splitlines()
    assert children == "1"
    said = json.loads(last)
    assert "Failed to open '/nowhere/at/all.json'" in said["errors"][0]
    assert [error.split(":")[0] for error in said["errors"]] == ["ERROR"] * len(said["errors"])
    assert said["level"] is None
    lines = done.stderr.splitlines()
    threads = [int(line.split()[1]) for line in lines if line.startswith("thread")]
    assert sorted(threads) == list(range(len(threads)))  # none is lost
    assert [line for line in lines if line.startswith(("in all", "fork", "child"))] == [
        f"fork {first.split()[0]}",  # the real stderr
        f"in all {len(threads)}",
        "child",
    ]
    # Afterwards Kineto says what it says without us.
    assert any(line.startswith("ERROR:") and "Failed to open '/nowhere/else.json'" in line for line in lines)


def test_a_user_who_asked_for_kinetos_messages_has_them_all() -> None:
    done = run("trace()\nend()", KINETO_LOG_LEVEL="0")
    assert "Completed Stage: Collection" in done.stderr
    assert "Failed to open '/nowhere/at/all.json'" in done.stderr
    assert json.loads(done.stdout)["level"] == "0"


def test_the_last_words_of_a_process_that_dies_in_the_call_are_there() -> None:
    done = run("import faulthandler\nfaulthandler.enable()\ntrace(during=os.abort)")
    assert done.returncode == -signal.SIGABRT
    assert "Fatal Python error: Aborted" in done.stderr
    assert "USDT" not in done.stderr


@pytest.mark.long
def test_a_script_that_changes_or_closes_its_stderr_is_recorded_all_the_same(tmp_path: Path) -> None:
    done = run(
        f"""
        def during():
            os.dup2(os.open({str(tmp_path / "err.txt")!r}, os.O_CREAT | os.O_WRONLY), 2)
        trace(during=during)
        end()
        os.write(2, b"to the file\\n")
        os.close(2)
        kineto = Kineto(on_device=True)
        trace()
        end()
        """
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "err.txt").read_text().endswith("to the file\n")
    assert json.loads(done.stdout.splitlines()[-1])["errors"] is None


@pytest.mark.parametrize(
    ("cuda", "said", "captured", "will", "found", "left"),
    [
        ("12.6", None, False, True, "1", None),
        ("13.0", None, False, True, "1", None),
        ("13.0", None, True, False, None, None),  # a graph holds on to it
        ("12.5", None, False, False, None, None),
        ("11.8", None, False, False, None, None),
        (None, None, False, None, None, None),
        ("12.8", "0", False, False, "0", "0"),
        ("12.4", "1", True, True, "1", "1"),
    ],
)
def test_cupti_is_torn_down_where_that_is_safe_unless_the_user_has_set_it(
    cuda: str | None,
    said: str | None,
    captured: bool,
    will: bool | None,
    found: str | None,
    left: str | None,
    monkeypatch: Any,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.delenv("TEARDOWN_CUPTI", raising=False)
    if said is not None:
        monkeypatch.setenv("TEARDOWN_CUPTI", said)
    kineto = Kineto(on_device=False)
    assert (kineto.tear_down(captured), in_c("TEARDOWN_CUPTI")) == (will, found)
    assert os.environ.get("TEARDOWN_CUPTI") == said  # the script's own is not written to
    kineto.leave()
    assert (in_c("TEARDOWN_CUPTI"), os.environ.get("TEARDOWN_CUPTI")) == (left, said)


def test_cupti_is_torn_down_in_a_call_to_the_ranks_device(monkeypatch: pytest.MonkeyPatch) -> None:
    devices, asked = Devices(monkeypatch), list[int]()

    class Stream:
        def __init__(self, index: int) -> None:
            self.index = index

        def query(self) -> bool:
            asked.append(self.index)
            return False

    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    kineto = Kineto(on_device=False)
    kineto.torn_down(1)
    assert asked == []
    assert kineto.tear_down(False)
    kineto.torn_down(1)
    assert {*asked} == {1}
    kineto.leave()
    assert devices.awake == set()
