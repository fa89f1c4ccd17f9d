"""A log goes on where a script has closed or taken its descriptor, and never writes into another file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dlprof.record.log import Log
from tests.fixtures.places import ROOT


def descriptor(path: Path) -> int:
    """Return the number under which this process has a file open."""
    (fd,) = (int(p.name) for p in Path("/proc/self/fd").iterdir() if p.exists() and p.samefile(path))
    return fd


def test_lines_are_appended_and_an_old_file_is_gone_on_with(tmp_path: Path) -> None:
    for n in range(2):
        log = Log(tmp_path / "log")
        log.write(f"{n} a\n")
        log.write(f"{n} b\n")
        log.close()
    assert (tmp_path / "log").read_text() == "0 a\n0 b\n1 a\n1 b\n"


@pytest.mark.parametrize("taken", [False, True])
def test_a_descriptor_that_was_closed_or_taken_is_left_alone_and_the_log_goes_on(taken: bool, tmp_path: Path) -> None:
    log = Log(tmp_path / "log")
    log.write("before\n")
    fd = descriptor(tmp_path / "log")
    os.close(fd)
    theirs = os.open(tmp_path / "theirs", os.O_RDWR | os.O_CREAT) if taken else -1
    assert not taken or theirs == fd
    log.write("after\n")
    log.close()
    assert (tmp_path / "log").read_text() == "before\nafter\n"
    if taken:
        assert os.fstat(theirs).st_size == 0
        os.close(theirs)


def test_closing_leaves_a_taken_descriptor_open(tmp_path: Path) -> None:
    log = Log(tmp_path / "log")
    fd = descriptor(tmp_path / "log")
    os.close(fd)
    theirs = os.open(tmp_path / "theirs", os.O_WRONLY | os.O_CREAT)
    assert theirs == fd
    log.close()
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
