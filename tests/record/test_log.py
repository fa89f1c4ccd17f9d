"""A log goes on where a script has closed or taken its descriptor, and never writes into another file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dlprof.record import log as ours
from dlprof.record.log import BudgetLog, Descriptor, Log, Row
from tests.fixtures.places import ROOT


def descriptor(path: Path) -> int:
    """Return the number under which this process has a file open."""
    (fd,) = (int(p.name) for p in Path("/proc/self/fd").iterdir() if p.exists() and p.samefile(path))
    return fd


@pytest.mark.parametrize("how", ["open", "closed", "taken"])
def test_lines_are_appended_and_a_descriptor_that_the_script_took_is_left_alone(how: str, tmp_path: Path) -> None:
    log, theirs = Log(tmp_path / "log"), -1
    log.write("before\n")
    fd = descriptor(tmp_path / "log")
    if how != "open":
        os.close(fd)
    if how == "taken":
        theirs = os.open(tmp_path / "theirs", os.O_RDWR | os.O_CREAT)
        assert theirs == fd
    log.write("after\n")
    log.close()
    again = Log(tmp_path / "log")  # an old file is gone on with
    again.write("again\n")
    again.close()
    assert (tmp_path / "log").read_text() == "before\nafter\n\nagain\n"  # the last line may have been cut off
    if how == "taken":
        assert os.fstat(theirs).st_size == 0
        os.close(theirs)


@pytest.mark.parametrize("closed", [False, True])
def test_a_deleted_file_is_not_made_again(closed: bool, tmp_path: Path) -> None:
    log = Log(tmp_path / "log")
    if closed:
        os.close(descriptor(tmp_path / "log"))
    (tmp_path / "log").unlink()
    with pytest.raises(OSError, match="deleted"):
        log.write("lost\n")
    assert list(tmp_path.iterdir()) == []


def test_where_stdout_is_closed_what_is_printed_is_not_in_the_log(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; os.closerange(0, 3); from dlprof.record.log import Log;"
        "log = Log(Path(sys.argv[1])); os.path.exists('/proc/self/fd/1') and os.write(1, b'theirs\\n');"
        "log.write('ours\\n')"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "log")], cwd=ROOT, check=True)
    assert (tmp_path / "log").read_text() == "ours\n"


def test_a_descriptor_is_ours_until_somebody_closes_it(tmp_path: Path) -> None:
    ours, theirs = (os.open(tmp_path / name, os.O_RDWR | os.O_CREAT) for name in ("ours", "theirs"))
    file = Descriptor(ours)
    assert file.is_ours
    os.dup2(theirs, ours)
    assert not file.is_ours
    file.close()
    assert os.fstat(ours).st_ino == os.fstat(theirs).st_ino  # left open
    again = Descriptor(theirs)
    again.close()
    assert not again.is_ours
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(theirs)
    os.close(ours)
    assert not Descriptor(-1).is_ours


def line(row: Row) -> str:
    """Write a row of a worker, a process, a time, and what is summed: how many, and ns that may be unknown."""
    return json.dumps(dict(zip(("worker", "pid", "at", "count", "ns"), row, strict=True))) + "\n"


def budget(folder: Path, age_ns: int = 0) -> BudgetLog:
    log = BudgetLog(line, keys=2, sums=3)
    log.open(Log(folder / "log"), age_ns)
    return log


def written(folder: Path) -> list[tuple[int, ...]]:
    return [tuple(json.loads(text).values()) for text in (folder / "log").read_text().split("\n") if text]


def test_rows_beyond_the_budget_are_summed_by_their_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "_BURST_BYTES", 10)
    monkeypatch.setattr(ours, "_BYTES_A_SECOND", 0)
    log = budget(tmp_path)
    log.rows.append((0, 7, 100, 1, 5))
    log.write(0, last=False)
    log.rows += [(0, 7, 101, 1, 5), (1, 8, 102, 1, 6), (0, 7, 103, 1, 0), (1, 8, 104, 1, -1)]
    log.write(0, last=False)
    assert len(written(tmp_path)) == 1  # the file is full
    log.rows.append((0, 7, 105, 1, 1))
    log.write(0, last=True)
    assert written(tmp_path) == [(0, 7, 100, 1, 5), (0, 7, 101, 3, 6), (1, 8, 102, 2, -1)]


def test_rows_wait_for_their_file_in_bounded_memory_and_a_forks_child_forgets_them(tmp_path: Path) -> None:
    log = BudgetLog(line, keys=2, sums=3)
    log.rows += [(0, 7, n, 1, 2) for n in range(1000)]
    log.fit()
    assert log.rows == [(0, 7, 0, 1000, 2000)]
    log.forget()
    log.write(0, last=True)
    log.open(Log(tmp_path / "log"))
    log.rows.append((0, 7, 1, 1, 2))
    log.fit()  # there is a file: rows stay as they are
    log.rows.append((0, 7, 2, 1, 2))
    log.write(time.perf_counter_ns(), last=True)
    assert [row[2] for row in written(tmp_path)] == [1, 2]
    log.forget()
    assert not log.is_open


def test_workers_of_short_epochs_share_one_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ours, "_BURST_BYTES", 1_500)
    monkeypatch.setattr(ours, "_BYTES_A_SECOND", 50)
    for second in range(20):  # each has a worker of its own, which makes 50 batches
        log = budget(tmp_path, second * 1_000_000_000)
        log.rows = [(0, 1000 + second, n, 1, 5) for n in range(50)]
        later = time.perf_counter_ns() + 500_000_000
        log.write(later, last=False)
        log.write(later, last=True)
    assert sum(row[3] for row in written(tmp_path)) == 20 * 50
    # 50 lines fill the file; a later one may fill what 20 seconds have added, and each of the others has one line.
    lines = len(written(tmp_path))
    assert lines < 50 + 50 + 20
    # In an hour there is room for more.
    log = budget(tmp_path, 3600 * 1_000_000_000)
    log.rows = [(0, 7, n, 1, 5) for n in range(50)]
    log.write(time.perf_counter_ns(), last=True)
    assert len(written(tmp_path)) == lines + 50
