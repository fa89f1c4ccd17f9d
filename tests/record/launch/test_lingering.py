"""A command that runs on after it was told to end is named, with what it waits for; one that ends is not."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from dlprof.record.launch.child import Lingering

PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
child.wait()
"""


@pytest.fixture
def family() -> Iterator[tuple[int, int]]:
    """Return a process and the one that it waits for."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    yield parent.pid, child
    os.kill(child, 9)
    parent.wait(30)
    parent.stdout.close()


def test_what_lingers_is_named_once(family: tuple[int, int], capfd: pytest.CaptureFixture[str]) -> None:
    lingering = Lingering(family[0], patience_s=0.05)
    lingering.told_to_end()
    lingering.told_to_end()
    said = ""
    until = time.monotonic() + 30
    while not said and time.monotonic() < until:
        time.sleep(0.05)
        said += capfd.readouterr().err
    time.sleep(0.2)
    said += capfd.readouterr().err
    lingering.ended()
    (line,) = said.splitlines()
    assert f"(processes {family[0]}, {family[1]})" in line


def test_what_ends_in_time_is_not_named(family: tuple[int, int], capfd: pytest.CaptureFixture[str]) -> None:
    lingering = Lingering(family[0], patience_s=0.2)
    lingering.told_to_end()
    lingering.ended()
    Lingering(family[0]).ended()
    time.sleep(0.4)
    assert capfd.readouterr().err == ""
