"""What several processes decode is what one reads, of whole and of damaged files; whatever dies, nothing is lost."""

from __future__ import annotations

import contextlib
import gzip
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pandas.testing import assert_frame_equal

from dlprof.errors import DlprofError
from dlprof.read import limits
from dlprof.read.kineto import event_columns, shares, torch_trace
from dlprof.read.kineto.event_columns import Processes, Reader
from dlprof.read.kineto.split import boundaries, decoding
from dlprof.read.sources import Reading
from tests.fixtures import traces
from tests.fixtures.places import TRACES

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")

REAL = sorted(TRACES.glob("*/*.json.gz")) if TRACES.exists() else []
NAMES = ["aten::mm", "aten::add_", 'a\\b "},{" [{', "}, {", '"},{"ph":"X"', "größe 😀", "\u2028\n", "x" * 900, "]}"]


@pytest.fixture(autouse=True)
def small_spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Split files of some kilobytes into many spans."""
    monkeypatch.setattr(threading, "active_count", lambda: 1)  # pytest's plugins have threads, which sleep
    monkeypatch.setattr(shares, "LEAST_BYTES", 1)
    monkeypatch.setattr(shares, "free_bytes", lambda: None)
    monkeypatch.setattr(boundaries, "WINDOW", 2500)
    monkeypatch.setattr(boundaries, "LAST", 3000)
    monkeypatch.setattr(decoding, "AIM", 3000)
    monkeypatch.setattr(decoding, "AIM_PACKED", 3000)
    yield
    shares.share_out({}, 0)


class Both:
    """Reads a file by one process and by several; `joined` counts the spans that others decoded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.joined = 0
        join = Reader.join

        def counted(reader: Reader, other: Reader) -> None:
            self.joined += 1
            join(reader, other)

        monkeypatch.setattr(Reader, "join", counted)
        self._patch = monkeypatch

    def __call__(self, path: Path, processes: Processes = None, workers: int = 2) -> Reading | None:
        """Return what is read, None where either says that it cannot be: in the same words."""
        self.joined = 0
        self._patch.setattr(torch_trace, "decode", event_columns.decode)
        one = self._read(path, processes)
        shares.share_out({path: 1 << 20}, 1 << 20, workers)
        self._patch.setattr(torch_trace, "decode", decoding.decode)
        several = self._read(path, processes)
        if isinstance(one, str) or isinstance(several, str):
            assert one == several
            return None
        assert list(one.tables) == list(several.tables)
        for name, frame in one.tables.items():
            assert_frame_equal(several.tables[name], frame)
        assert several.facts == one.facts
        assert several.warnings == one.warnings
        return several

    def after_damage(self, path: Path) -> None:
        """Read a file with damage: of an event that never ends, one process takes some that follow for a part.

        Several begin anew at the next boundary, and lose no more.
        """
        self._patch.setattr(torch_trace, "decode", event_columns.decode)
        one = self._read(path, None)
        shares.share_out({path: 1 << 20}, 1 << 20, 2)
        self._patch.setattr(torch_trace, "decode", decoding.decode)
        several = self._read(path, None)
        if not isinstance(one, str):
            assert not isinstance(several, str)
            assert len(several.tables["spans"]) >= len(one.tables["spans"])
            assert bool(several.warnings) == bool(one.warnings)

    def _read(self, path: Path, processes: Processes) -> Reading | str:
        try:
            return torch_trace.read(path, processes)
        except DlprofError as e:
            return str(e)


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Both:
    return Both(monkeypatch)


def training(steps: int = 40, **keys: Any) -> dict[str, Any]:
    """Return a trace with odd names and args, collectives and copies."""
    made = traces.training(steps=steps, **keys)
    for i, e in enumerate(made["traceEvents"]):
        e["args"]["odd"] = [{"a": 1}, {"b": "},{"}, {"c": '"}, {"'}, {"ph": {}}][: i % 5]
        if e["cat"] == "cpu_op" and i % 3:
            e["name"] = NAMES[i % len(NAMES)]
    return made


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
@pytest.mark.parametrize("layout", ["kineto", "compact", "pretty", "list"])
@pytest.mark.parametrize("workers", [2, 3])
def test_several_processes_give_what_one_does(
    tmp_path: Path, both: Both, layout: traces.Layout, name: str, workers: int
) -> None:
    read = both(traces.write(tmp_path / name, training(), layout), workers=workers)
    assert read
    assert len(read.tables["spans"]) == 40 * 17
    assert both.joined > 10
    assert read.warnings == () or layout == "list"


@pytest.mark.parametrize("packed", [False, True])
def test_keys_behind_the_events_and_events_behind_these(tmp_path: Path, both: Both, packed: bool) -> None:
    made = training()
    made["baseTimeNanoseconds"] = made.pop("baseTimeNanoseconds")
    data = traces.dump(made, "compact")
    data = data.rstrip()[:-1] + b', "traceEvents": [' + json.dumps(traces.op("late", 10**9, 5)).encode() + b"]}"
    path = traces.write(tmp_path / ("trace.json.gz" if packed else "trace.json"), data)
    read = both(path)
    assert read
    assert both.joined > 10
    assert read.facts["base_time_ns"] == traces.BASE_NS
    assert "late" in set(read.tables["spans"]["name"])


@pytest.mark.parametrize("packed", [False, True])
def test_a_file_cut_off_anywhere(tmp_path: Path, both: Both, packed: bool) -> None:
    path = traces.write(tmp_path / ("trace.json.gz" if packed else "trace.json"), training())
    data = path.read_bytes()
    most = 0
    for cut in range(50, len(data), len(data) // 15):
        path.write_bytes(data[:cut])
        read = both(path)
        most = max(most, both.joined)
        assert read is None or any("cut off" in w or "damaged" in w for w in read.warnings)
    assert most > 10


DAMAGE = (
    b"\0" * 50,
    b'"',
    b"}",
    b"]",
    b"{",
    b"[",
    b"},{",
    b'"},{"',
    b'\\"',
    b"garbage",
    b"]}",
    b'{"ph":"X"},',
    b"\xff" * 9,
)


@pytest.mark.parametrize("damage", DAMAGE)
def test_garbage_in_the_middle(tmp_path: Path, both: Both, damage: bytes) -> None:
    data = traces.dump(training(), "compact")
    for place in (len(data) // 3, len(data) // 2, len(data) * 2 // 3 + 17):
        for path in (tmp_path / "trace.json", tmp_path / "trace.json.gz"):
            traces.write(path, data[:place] + damage + data[place:])
            both(path)
            assert both.joined > 2, "what stands before the damage is decoded by several processes"


def test_an_event_larger_than_a_span(tmp_path: Path, both: Both) -> None:
    made = training()
    made["traceEvents"][300]["args"]["huge"] = [{"ph": "X", "name": "}, {", "n": i} for i in range(400)]
    for name in ("trace.json", "trace.json.gz"):
        read = both(traces.write(tmp_path / name, made, "compact"))
        assert read
        assert len(read.tables["spans"]) == 40 * 17
        assert both.joined > 2


def test_what_is_no_trace_is_refused_in_the_same_words(tmp_path: Path, both: Both) -> None:
    for data in (b"[1, 2]", b"{}", b"", b"nonsense", b'{"traceEvents": 7}', b'{"traceEvents": [', b"[" * 9000):
        both(traces.write(tmp_path / "trace.json", data))
        both(traces.write(tmp_path / "trace.json.gz", data))
    assert both(tmp_path / "absent.json") is None


def test_members_of_gzip_glued_together_and_damage_in_packed_data(tmp_path: Path, both: Both) -> None:
    data = traces.dump(training())
    path = tmp_path / "trace.json.gz"
    middle = len(data) // 2
    path.write_bytes(gzip.compress(data[:middle]) + gzip.compress(data[middle:]) + b"\0" * 512)
    assert both(path)
    assert both.joined > 10
    packed = bytearray(traces.write(path, training(steps=400)).read_bytes())
    packed[len(packed) * 2 // 3 : len(packed) * 2 // 3 + 200] = bytes(200)
    path.write_bytes(packed)
    assert both(path)
    assert both.joined > 10


def test_times_that_float64_blurs_stay_exact(tmp_path: Path, both: Both) -> None:
    whole = [traces.op(f"w{i}", 0, 1000) | {"ts": 1_694_128_201_000_000 + i} for i in range(300)]
    data = traces.dump(traces.trace(*whole, traces.op("late", 0, 1000), base_ns=None))
    data = data.replace(b'"ts": 0.0', b'"ts": 1694128201000300.321')
    read = both(traces.write(tmp_path / "trace.json", data))
    assert read
    assert read.tables["spans"]["start_ns"].max() == 1_694_128_201_000_300_321
    # The first spans are blurred themselves.
    early = traces.dump(traces.trace(traces.op("early", 0, 1000), *whole, base_ns=None))
    early = early.replace(b'"ts": 0.0', b'"ts": 1694128201000300.321')
    assert both(traces.write(tmp_path / "early.json", early))
    assert both.joined > 5


def test_marks_whose_partner_is_in_another_span(tmp_path: Path, both: Both) -> None:
    marks = []
    for i in range(300):
        mark = {"cat": "cpu_op", "name": f"op{i % 40}", "pid": 1, "tid": i % 3, "ts": i, "args": {"x": i}}
        marks.append(mark | {"ph": "E" if i >= 150 else "B"})
    read = both(traces.write(tmp_path / "trace.json", traces.trace(*marks, traces.op("a", 0, 1))))
    assert read
    assert len(read.tables["spans"]) == 151
    assert both.joined > 5


def test_sizes_of_groups_that_are_named_in_another_span(tmp_path: Path, both: Both) -> None:
    told = {"Input Dims": [[64, 128]], "Input type": ["float"]}
    gathers = [traces.event("cpu_op", "gloo:all_gather", i * 1000, 500, **told) for i in range(150)]
    named = traces.event("cpu_op", "gloo:all_reduce", 0, 5, **{"Process Group Name": "0", "Group size": 4}, **told)
    for events in ([named, *gathers], [*gathers, named]):
        read = both(traces.write(tmp_path / "trace.json", traces.trace(*events)))
        assert read
        spans = read.tables["spans"]
        assert set(spans["bytes"][spans["collective"] == "all_gather"]) == {64 * 128 * 4 * 4}
        assert both.joined > 5


def test_only_some_processes(tmp_path: Path, both: Both) -> None:
    events = [traces.op(f"o{i}", i, 1) | {"pid": i % 3} for i in range(300)]
    read = both(traces.write(tmp_path / "trace.json", traces.trace(*events)), frozenset({1}))
    assert read
    assert len(read.tables["spans"]) == 100
    assert both.joined > 5


@pytest.mark.parametrize(("limit", "value"), [("MOST_ROWS", 400), ("MOST_NAMES", 1)])
def test_limits_hold_at_the_same_event(
    tmp_path: Path, both: Both, monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    monkeypatch.setattr(limits, limit, value)
    read = both(traces.write(tmp_path / "trace.json", training()))
    assert read
    assert any("holds more than" in w for w in read.warnings)
    if limit == "MOST_ROWS":
        assert len(read.tables["spans"]) == 400
        assert 2 < both.joined < 40


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dies", ["killed", "raises", "at once"])
def test_what_a_dead_process_leaves_is_decoded_here(
    tmp_path: Path, both: Both, monkeypatch: pytest.MonkeyPatch, packed: bool, dies: str
) -> None:
    path = traces.write(tmp_path / ("trace.json.gz" if packed else "trace.json"), training())
    expected = both(path)
    assert expected
    parent, lay_down = os.getpid(), decoding.Table.lay_down

    def last_words(self: decoding.Table, process: int, done: decoding.Done | None) -> None:
        if os.getpid() != parent and done and done.number >= (0 if dies == "at once" else 5):
            if dies == "raises":
                raise MemoryError
            os.kill(os.getpid(), signal.SIGKILL)
        lay_down(self, process, done)

    monkeypatch.setattr(decoding.Table, "lay_down", last_words)
    both.joined = 0
    read = torch_trace.read(path)
    for name, frame in expected.tables.items():
        assert_frame_equal(read.tables[name], frame)
    assert both.joined == (0 if dies == "at once" else 5)
    assert any("ended early (out of memory?)" in w for w in read.warnings)


def held() -> set[str]:
    """Return the pipes and files in memory that this process has open: other tests have sockets of their own.

    A process that has ended holds two pipes of multiprocessing's until it is joined.
    """
    while children := multiprocessing.active_children():
        children.pop().join(30)
    links = []
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one that lists them
            links.append(str(fd.readlink()))
    return {link for link in links if link.startswith("pipe:") or "memfd" in link}


def test_nothing_is_left_behind(tmp_path: Path, both: Both) -> None:
    path = traces.write(tmp_path / "trace.json.gz", training())
    before = held()
    assert both(path)
    assert both.joined > 10
    begun = decoding.begin(path)
    assert begun
    begun.close()
    assert held() <= before


@pytest.mark.skipif(not REAL, reason="needs ../shared/traces")
@pytest.mark.parametrize("path", REAL[:6], ids=lambda p: f"{p.parent.name}/{p.name}")
def test_real_traces(tmp_path: Path, both: Both, monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    monkeypatch.setattr(decoding, "AIM_PACKED", 100_000)
    monkeypatch.setattr(decoding, "AIM", 100_000)
    both(path)
    packed = both.joined
    plain = tmp_path / path.name.removesuffix(".gz")
    plain.write_bytes(gzip.decompress(path.read_bytes()))
    both(plain)
    assert (packed > 1) == (both.joined > 1) == (plain.stat().st_size > 400_000)


texts = st.one_of(st.sampled_from(NAMES), st.text(max_size=12))
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), texts),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=6,
)
an_event = st.builds(
    lambda cat, name, ts, dur, extra, odd: {
        "ph": "X",
        "cat": cat,
        "name": name,
        "pid": 1,
        "tid": 1,
        "ts": ts,
        "dur": dur,
        "args": {"odd": odd},
        **extra,
    },
    st.sampled_from(["cpu_op", "kernel", "cuda_runtime", "gpu_memcpy", "user_annotation", "quantum", "ac2g"]),
    texts,
    st.integers(0, 10**6),
    st.integers(0, 1000),
    st.dictionaries(st.sampled_from(["ph", "cat", "pid", "tid", "ts", "dur", "name"]), values, max_size=1),
    values,
)


@settings(max_examples=40, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    made=st.lists(an_event, min_size=1, max_size=60),
    aim=st.integers(1, 4000),
    indent=st.sampled_from([None, None, 2]),
    cut=st.floats(0.05, 1.5),
    damage=st.tuples(st.floats(0, 1), st.sampled_from((b"",) * 9 + DAMAGE)),
    packed=st.booleans(),
)
def test_any_events_split_anywhere(
    tmp_path: Path,
    both: Both,
    monkeypatch: pytest.MonkeyPatch,
    made: list[Any],
    aim: int,
    indent: int | None,
    cut: float,
    damage: tuple[float, bytes],
    packed: bool,
) -> None:
    monkeypatch.setattr(decoding, "AIM", aim)
    monkeypatch.setattr(decoding, "AIM_PACKED", aim)
    monkeypatch.setattr(boundaries, "WINDOW", 300)
    monkeypatch.setattr(boundaries, "LAST", 300)
    data = json.dumps({"schemaVersion": 1, "traceEvents": made, "traceName": "x"}, indent=indent).encode()
    place = int(damage[0] * len(data))
    data = (data[:place] + damage[1] + data[place:])[: int(cut * len(data))]
    path = traces.write(tmp_path / ("trace.json.gz" if packed else "trace.json"), data)
    if damage[1]:
        both.after_damage(path)
    else:
        both(path)
