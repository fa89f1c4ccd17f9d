"""A process is told from a later one of its number, and whatever is tied to another ends with it."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys

import pytest

from dlprof.record.launch.process import started
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
    process.wait()
    assert started(process.pid) is None


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
    pages = {
        how: int(subprocess.run([sys.executable, "-c", code, how], capture_output=True, check=True).stdout)
        for how in ("kept", "given back")
    }
    assert pages["kept"] < pages["given back"] / 10
