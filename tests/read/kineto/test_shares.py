"""Cores are divided by bytes: one large trace takes those that the others leave."""

import math
import multiprocessing
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlprof.read.kineto import shares

MB = 1 << 20


@pytest.fixture(autouse=True)
def _none_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    yield
    shares.share_out({}, 0)


def shared(cores: int, *megabytes: int) -> list[int]:
    """Give how many processes each of some traces may have."""
    bytes_of = {Path(f"{i}.json"): size * MB for i, size in enumerate(megabytes)}
    shares.share_out(bytes_of, sum(bytes_of.values()), cores)
    return [shares.workers_for(path) for path in bytes_of]


@pytest.mark.parametrize(
    ("cores", "megabytes", "workers"),
    [
        (2, [1000], [2]),
        (1, [1000], [1]),
        (8, [1000], [8]),
        (2, [500, 500], [1, 1]),
        (2, [510, 490], [1, 1]),
        (8, [500, 500], [4, 4]),
        (2, [300] * 8, [1] * 8),
        (2, [1000, 50, 50, 50, 50, 50, 50, 50], [2, 0, 0, 0, 0, 0, 0, 0]),
        (16, [2000, 1000, 1000], [8, 4, 4]),
        (2, [50], [0]),
    ],
)
def test_each_trace_has_its_share(
    monkeypatch: pytest.MonkeyPatch, cores: int, megabytes: list[int], workers: list[int]
) -> None:
    monkeypatch.setattr(shares, "free_bytes", lambda: None)
    assert shared(cores, *megabytes) == workers


def test_other_files_of_the_run_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "free_bytes", lambda: None)
    shares.share_out({Path("a"): 500 * MB}, 1000 * MB, 4)
    assert shares.workers_for(Path("a")) == 2
    assert shares.workers_for(Path("b")) == 0


def test_memory_bounds_the_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "free_bytes", lambda: 7 * shares.PROCESS_BYTES)
    assert shared(8, 1000) == [3]
    monkeypatch.setattr(shares, "free_bytes", lambda: shares.PROCESS_BYTES)
    assert shared(8, 1000) == [0]


def test_nothing_is_split_where_forking_is_unsafe_or_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shared(2, 1000) == [2]
    monkeypatch.setattr(threading, "active_count", lambda: 2)
    assert shared(2, 1000) == [0]
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)  # type: ignore[attr-defined]
    assert shared(2, 1000) == [0]


def test_the_free_memory_is_the_kernels() -> None:
    free = shares.free_bytes()
    assert free is None or 1 * MB < free < 2**50
    assert math.isfinite(free or 0)
