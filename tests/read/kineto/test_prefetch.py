"""What is decoded ahead is what reading gives; whatever goes wrong with it, the file is read as if nobody had begun."""

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pandas.testing import assert_frame_equal

from dlprof.read.kineto import event_columns, prefetch, shares, torch_trace
from tests.fixtures import traces

pytestmark = pytest.mark.skipif(
    not hasattr(os, "memfd_create") or len(os.sched_getaffinity(0)) < 2, reason="needs Linux and a second core"
)


@pytest.fixture(autouse=True)
def _nothing_begun(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # pytest's plugins have threads of their own, which sleep.
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    yield
    prefetch.forget()


def written(tmp_path: Path, name: str, rank: int = 0) -> Path:
    return traces.write(tmp_path / name, traces.training(steps=4, rank=rank))


def begun(path: Path) -> None:
    """Begin a file and wait until its process has."""
    prefetch.begin([path])
    until = time.monotonic() + 20
    while not prefetch._places[path].shared[prefetch._BEGUN]:
        assert time.monotonic() < until
        time.sleep(0.01)


def test_rows_decoded_ahead_are_those_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, "a.json.gz")
    expected = torch_trace.read(path)
    begun(path)
    # The file is gone and nothing here can decode: what is given was made by the other process.
    monkeypatch.setattr(torch_trace, "decode", None)
    found = torch_trace.read(path)
    for name, table in expected.tables.items():
        assert_frame_equal(found.tables[name], table)
    assert (found.facts, found.warnings) == (expected.facts, expected.warnings)


def test_rows_are_taken_once_and_then_decoded_again(tmp_path: Path) -> None:
    path = written(tmp_path, "a.json")
    begun(path)
    assert prefetch.rows_of(path) is not None
    assert prefetch.rows_of(path) is None
    assert len(torch_trace.read(path).tables["spans"])


def test_no_further_file_is_begun_once_it_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = written(tmp_path, "a.json"), written(tmp_path, "b.json", rank=1)
    slow = event_columns.decode

    def decode(path: Path) -> event_columns.Rows:
        time.sleep(1)
        return slow(path)

    monkeypatch.setattr(prefetch, "decode", decode)
    prefetch.begin([first, second, written(tmp_path, "c.json", rank=2)])
    assert list(prefetch._places) == [first, second]
    time.sleep(0.3)
    prefetch.stop()
    assert prefetch._places[first].shared[:] == b"\1\1\0"
    start = time.monotonic()
    assert prefetch.rows_of(second) is None
    assert time.monotonic() - start < 0.5  # whoever reads it does not wait for the first one's end
    shared = prefetch._places[first].shared
    assert prefetch.rows_of(first) is not None
    time.sleep(0.3)
    assert shared[:] == b"\1\1\0"  # stopped; the first was begun, the second never


@pytest.mark.parametrize("fails", ["raises", "dies", "half"])
def test_what_fails_there_is_done_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    path = written(tmp_path, "a.json")

    def decode(path: Path) -> event_columns.Rows:
        if fails == "raises":
            raise MemoryError
        if fails == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        return event_columns.decode(path)

    monkeypatch.setattr(prefetch, "decode", decode)
    if fails == "half":
        monkeypatch.setattr(pickle, "dump", lambda rows, file, **_: file.write(pickle.dumps(rows)[:-20]))
    begun(path)
    assert prefetch.rows_of(path) is None
    assert len(torch_trace.read(path).tables["spans"])


def test_what_is_no_trace_is_refused_in_the_same_words(tmp_path: Path) -> None:
    path = traces.write(tmp_path / "a.json", b"[1, 2]")
    begun(path)
    with pytest.raises(Exception, match="a list without events"):
        torch_trace.read(path)


def test_nothing_is_begun_for_large_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, "a.json")
    monkeypatch.setattr(prefetch, "MOST_BYTES", path.stat().st_size - 1)
    prefetch.begin([path, tmp_path / "none.json"])
    assert list(prefetch._places) == [tmp_path / "none.json"]
    assert prefetch.rows_of(tmp_path / "none.json") is None


def test_decoding_needs_no_pandas() -> None:
    # What decodes ahead is forked before pandas is imported, and would have to import it a second time.
    code = "import sys, dlprof.read.kineto.prefetch, dlprof.read.run; assert 'pandas' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_large_trace_is_begun_by_several_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, other = written(tmp_path, "a.json"), written(tmp_path, "b.json", rank=1)
    expected = torch_trace.read(path)
    monkeypatch.setattr(shares, "LEAST_BYTES", 1)
    shares.share_out({path: 1 << 20}, 1 << 20, 2)
    prefetch.begin([path, other])
    shares.share_out({}, 0)
    assert list(prefetch._split) == [path]
    assert not prefetch._places  # they have the cores
    assert not prefetch.is_begun(path)  # who reads it goes first, for it still takes long
    monkeypatch.setattr(torch_trace, "decode", None)
    found = torch_trace.read(path)
    for name, table in expected.tables.items():
        assert_frame_equal(found.tables[name], table)
    assert (found.facts, found.warnings) == (expected.facts, expected.warnings)
    assert prefetch.rows_of(path) is None


def test_a_large_trace_that_nobody_reads_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, "a.json")
    monkeypatch.setattr(shares, "LEAST_BYTES", 1)
    shares.share_out({path: 1 << 20}, 1 << 20, 2)
    prefetch.begin([path])
    prefetch.forget()
    assert not prefetch._split
    assert len(torch_trace.read(path).tables["spans"])
    shares.share_out({}, 0)
