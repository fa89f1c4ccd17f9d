"""A process is told from a later one of its number, and whatever is tied to another ends with it."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys

import pytest

from dlprof.record.launch.process import family, has_ended, running, started, stat_of, stats, wait_or_kill
from tests.fixtures.jobs import state, until, words


def test_a_process_has_begun_at_one_time_until_it_ends() -> None:
    first = started(os.getpid())
    assert first is not None
    process = subprocess.Popen(["sleep", "60"])
    begun = started(process.pid)
    assert begun is not None
    assert begun >= first == started(os.getpid())
    process.kill()
    # Dead, and before it is waited for.
    assert until(lambda: state(process.pid) == "Z")
    assert started(process.pid) is None
    assert has_ended(stat_of(process.pid))
    assert process.pid in stats().keys() - running().keys()
    process.wait()
    assert started(process.pid) is None


def test_a_family_is_a_process_and_all_that_descend_from_it_each_once() -> None:
    stats = {pid: [b"S", b"%d" % parent] for pid, parent in {5: 1, 7: 5, 6: 5, 8: 7, 9: 2}.items()}
    assert family([5], stats) == [5, 6, 7, 8]
    assert family([7, 5], stats) == [7, 5, 8, 6]
    assert family([4], stats) == [4]


def test_what_this_process_has_started_is_of_its_family() -> None:
    process = subprocess.Popen(["sleep", "60"])
    assert process.pid in family([os.getpid()], running())
    process.kill()
    assert until(lambda: process.pid not in family([os.getpid()], running()))
    process.wait()


def test_a_child_that_does_not_end_in_time_is_killed() -> None:
    for command, seconds, code in ((["sleep", "60"], 0.05, -signal.SIGKILL), (["true"], 30.0, 0)):
        process = subprocess.Popen(command)
        wait_or_kill(process, seconds)
        assert process.returncode == code


# Starts two children, says their numbers, and is killed.
TIES = """
import os, signal, subprocess, sys
from dlprof.record.launch.process import tied
for before in (tied(signal.SIGTERM), None):
    print(subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL, preexec_fn=before).pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_is_tied_to_a_process_ends_with_it_however_that_ends() -> None:
    done = subprocess.run([sys.executable, "-c", TIES], stdout=subprocess.PIPE, text=True, check=False, timeout=60)
    tied, other = map(int, done.stdout.split())
    try:
        assert until(lambda: not words(tied))
        assert "sleep" in words(other)
    finally:
        os.kill(other, signal.SIGKILL)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's malloc is told")
def test_memory_that_is_freed_is_kept_for_what_comes_next() -> None:
    code = """if True:
        import resource, sys
        import numpy as np
        from dlprof.record.launch.process import keep_memory
        keep_memory() if sys.argv[1] == "kept" else None
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(100):
            [np.ones(1 << 17) for _ in range(8)]  # a megabyte each
        print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    """
    # What an analysis in this process has set for itself is not for this one.
    env = {n: v for n, v in os.environ.items() if not n.startswith(("MALLOC_", "NUMPY_"))}
    pages = {
        how: int(subprocess.run([sys.executable, "-c", code, how], env=env, capture_output=True, check=True).stdout)
        for how in ("kept", "given back")
    }
    assert pages["kept"] < pages["given back"] / 10
