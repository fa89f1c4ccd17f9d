"""What the kernel counts of this process, and what is unknown where it cannot be read."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from dlprof.record.device.cpu import KernelCounters, used_between

UNKNOWN = -1


def spin(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        sum(range(1000))


def test_what_the_thread_and_what_the_process_have_used_are_two_things(tmp_path: Path) -> None:
    counters = {whole: KernelCounters(whole_process=whole) for whole in (False, True)}
    before = {whole: one.all() for whole, one in counters.items()}
    other = threading.Thread(target=spin, args=(0.05,))
    other.start()
    other.join()
    spin(0.01)
    (tmp_path / "file").write_bytes(bytes(100_000))
    assert len((tmp_path / "file").read_bytes()) == 100_000
    used = {whole: used_between(before[whole], one.all()) for whole, one in counters.items()}
    assert 10_000_000 <= used[False][0] < 50_000_000
    assert used[True][0] >= 60_000_000
    for cpu, delayed, stored, read in used.values():
        assert cpu > 0
        assert min(delayed, stored) >= 0
        assert read >= 100_000
    process, _, thread = counters[True].cores()
    assert process >= thread > 0


def test_a_cpu_time_that_was_waited_is_not_used() -> None:
    counters = KernelCounters(whole_process=False)
    before = counters.cores()
    time.sleep(0.05)
    assert used_between(before, counters.cores())[2] < 50_000_000


@pytest.mark.parametrize("how", ["closed by the script", "closed by us", "taken"])
def test_what_cannot_be_read_any_more_is_unknown_and_no_descriptor_is_touched(how: str, tmp_path: Path) -> None:
    counters = KernelCounters(whole_process=True)
    fd = counters._io.fd
    theirs = -1
    if how == "closed by us":
        counters.close()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
    else:
        os.close(fd)
    if how == "taken":
        theirs = os.open(tmp_path / "theirs", os.O_RDWR | os.O_CREAT)
        assert theirs == fd
    assert counters.all()[2:] == (UNKNOWN, UNKNOWN)
    counters.close()
    if how == "taken":
        os.fstat(theirs)
        os.close(theirs)


def test_unknown_before_is_unknown_between() -> None:
    assert used_between((UNKNOWN, 5), (7, 9)) == (UNKNOWN, 4)
