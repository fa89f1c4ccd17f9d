"""Plain data of any protocol is read as Python reads it; whatever else a pickle holds is refused; a cut one in part."""

from __future__ import annotations

import contextlib
import gzip
import os
import pickle
import random
from pathlib import Path
from typing import Any

import pytest

from dlprof.errors import DlprofError
from dlprof.read.dumps import plain_pickle
from dlprof.read.dumps.plain_pickle import NotPlain, load
from dlprof.read.limits import NO_LIMITS
from tests.fixtures import dumps

REFERRED = ["one", "two", "three"]
VALUES: tuple[Any, ...] = (
    {"a": [1, 2.5, None, True, False, "ü", (), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)]},
    {1: -1, 255: 256, 65535: 65536, -(2**31): 2**31, 2**62: -(2**63), "x" * 300: "y"},
    [[], {}, [[]], [{}], {"k": [{}]}],
    [list(REFERRED) for _ in range(3)] + [REFERRED, REFERRED],
    [[list(range(2500))], ["n"] * 2500, [REFERRED[n % 3] for n in range(5000)]],
    {str(n): n for n in range(3000)},
)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
def test_plain_data_is_read_as_python_reads_it(value: Any, protocol: int) -> None:
    assert load(pickle.dumps(value, protocol)) == (value, False)


def test_bytes_are_plain_from_protocol_3_on() -> None:
    for protocol in (3, 4, 5):
        assert load(pickle.dumps([b"x", b"y" * 300], protocol)) == ([b"x", b"y" * 300], False)
    with pytest.raises(NotPlain):  # protocol 2 has them decoded by a function
        load(pickle.dumps(b"x", 2))


def test_a_snapshot_is_read_as_python_reads_it() -> None:
    made = dumps.training().snapshot()
    assert load(pickle.dumps(made))[0] == pickle.loads(pickle.dumps(made))


class Hostile:
    """Runs a command where it is read by Python."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_pickle_that_calls_is_refused_and_calls_nothing(tmp_path: Path, protocol: int) -> None:
    data = pickle.dumps({"segments": [Hostile(tmp_path / "made")]}, protocol)
    with pytest.raises(NotPlain, match="more than plain data"):
        load(data)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"garbage",
        b"\x80\x04.",
        b"\x80\x04e.",
        b"\x80\x04u.",
        b"\x80\x04Nh\x05.",
        b"\x80\x04K\x01K\x02.",
        b"\x80\x04]K\x01K\x02s.",
        b"\x80\x04K\x01K\x02a.",
        b"\x80\x04" + b"(" * 1000,
        b"\x80\x02Nr\xff\xff\xff\x7f.",  # would have Python reserve 16 GB
        b"\x80\x04}](K\x01eK\x01s.",  # a list as a key
        b"\x80\x04})\x85\x85\x85K\x01s.",  # a tuple as a key
        b"\x80\x04\x8a\xff" + b"\x01" * 255 + b".",
        b"\x80\x04cos\nsystem\n.",
        b"\x80\x04Pid\n.",
        b"\x80\x04\x82\x01.",
    ],
)
def test_hostile_and_broken_pickles_are_one_line(data: bytes) -> None:
    with pytest.raises(NotPlain) as raised:
        load(data)
    assert "\n" not in str(raised.value)


def test_a_length_that_is_not_there_reserves_nothing() -> None:
    assert load(b"\x80\x04]\x8e\xff\xff\xff\xff\xff\xff\xff\x7f") == ([], True)


def test_random_bytes_never_do_more_than_fail() -> None:
    chosen = random.Random(5)
    data = pickle.dumps(dumps.training().snapshot())
    for _ in range(300):
        broken = bytearray(data)
        for _ in range(chosen.randint(1, 8)):
            broken[chosen.randrange(2, len(broken))] = chosen.randrange(256)
        with contextlib.suppress(NotPlain):
            load(bytes(broken))


def test_collections_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_pickle, "MOST_CONTAINERS", 10)
    data = pickle.dumps([[n] for n in range(30)])
    with pytest.raises(NotPlain, match="more than 10"):
        load(data)
    monkeypatch.setenv(NO_LIMITS, "1")
    assert len(load(data)[0]) == 30


def test_of_a_cut_pickle_what_comes_before_is_returned() -> None:
    made = dumps.training().snapshot()
    data = pickle.dumps(made)
    seen = set()
    for cut in range(12, len(data)):  # behind the header
        held, missing = load(data[:cut])
        assert missing
        if isinstance(held, dict) and isinstance(held.get("device_traces"), list) and held["device_traces"]:
            events = held["device_traces"][0]
            whole = [e for e in events if e in made["device_traces"][0]]
            assert len(whole) >= len(events) - 1  # the last may be half
            assert held["segments"] == made["segments"]
            seen.add(len(events))
    assert seen == set(range(len(made["device_traces"][0]) + 1))


def test_packed_files_are_unpacked_and_a_bomb_is_refused(tmp_path: Path) -> None:
    data = pickle.dumps(dumps.training().snapshot())
    (tmp_path / "whole").write_bytes(gzip.compress(data))
    assert plain_pickle.bytes_of(tmp_path / "whole") == (data, False)
    (tmp_path / "cut").write_bytes(gzip.compress(data)[:-200])
    part, cut = plain_pickle.bytes_of(tmp_path / "cut")
    assert cut
    assert data.startswith(part)
    (tmp_path / "broken").write_bytes(b"\x1f\x8bnonsense")
    with pytest.raises(DlprofError, match="gzip"):
        plain_pickle.bytes_of(tmp_path / "broken")


def test_a_file_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_pickle, "MOST_WHOLE", 100)
    (tmp_path / "plain").write_bytes(b"x" * 101)
    (tmp_path / "packed").write_bytes(gzip.compress(b"x" * 101))
    for name in ("plain", "packed"):
        with pytest.raises(DlprofError, match="--no-limits"):
            plain_pickle.bytes_of(tmp_path / name)
    monkeypatch.setenv(NO_LIMITS, "1")
    assert len(plain_pickle.bytes_of(tmp_path / "packed")[0]) == 101
