"""Several processes decode what one reads, of whole and of damaged files; whatever dies, nothing is lost."""

from __future__ import annotations

import contextlib
import gzip
import json
import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pandas.testing import assert_frame_equal

from dlprof.errors import DlprofError
from dlprof.read import limits
from dlprof.read.kineto import event_columns, prefetch, split, torch_trace
from dlprof.read.kineto.event_columns import Processes, Reader
from dlprof.read.kineto.split import IN_FILE, MOST_SPANS, Done, Span, Table, Task, boundary, fill, late_boundary, spans
from dlprof.read.sources import Reading
from tests.fixtures import traces
from tests.fixtures.places import TRACES

pytestmark = pytest.mark.skipif(
    not hasattr(os, "memfd_create") or len(os.sched_getaffinity(0)) < 2, reason="needs Linux and a second core"
)
MB = 1 << 20


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(threading, "active_count", lambda: 1)  # pytest's plugins have threads, which sleep
    yield
    prefetch.forget()
    split.share_out({}, 0)


def same(found: Reading, expected: Reading) -> None:
    assert list(found.tables) == list(expected.tables)
    for name, table in expected.tables.items():
        assert_frame_equal(found.tables[name], table)
    assert (found.facts, found.warnings) == (expected.facts, expected.warnings)


# Boundaries between events.

ODD = ["},{", '"},{"', '"},{"ph":"X"},{', "\\", '\\"},{"', "}, {", "[{", "größe 😀", "\n"]


def events(count: int) -> list[dict[str, Any]]:
    made = [
        traces.op(f"{ODD[i % len(ODD)]}{i}", i * 1000, 500, odd=[{"a": ODD[i % 7]}, {"b": {}}]) for i in range(count)
    ]
    return json.loads(json.dumps(made))  # type: ignore[no-any-return]


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("ascii_only", [False, True])
def test_from_any_byte_on_the_next_true_boundary_is_found(indent: int | None, ascii_only: bool) -> None:
    made = events(9)
    text = json.dumps(made, indent=indent, ensure_ascii=ascii_only).encode()
    for at in range(1, len(text)):
        found = boundary(text[at:])
        if found is None:  # the last event, or the one before
            assert text[at:].count(b'"ph"') <= 1
            continue
        assert json.loads(text[: at + found[0]] + b"]") + json.loads(b"[" + text[at + found[1] :]) == made


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (b'1}, {"name": "x"}, {"name": "y"}', None),  # no phase
        (b'1}, {"ph": "X", "name": "cut off', None),
        (b'1}, {"ph": "X", "rate": NaN}, ', (2, 4)),
        (b"", None),
        # Not all of a hostile window is looked through.
        (b'}, {"a": [' * 9 + b'1}, {"ph": "X"}', None),
        (b'}, {"a": 1' * 101 + b'}, {"ph": "X"}', None),
        (b'}, {"a": 1' * 99 + b'}, {"ph": "X"}', (10 * 99, 10 * 99 + 2)),
    ],
)
def test_a_boundary_has_a_whole_event_with_a_phase_behind_it(text: bytes, found: tuple[int, int] | None) -> None:
    assert boundary(text) in (found, found and (found[0] + 1, found[1] + 1))


@pytest.mark.parametrize("layout", ["kineto", "compact", "pretty"])
def test_spans_follow_each_other_and_leave_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: traces.Layout
) -> None:
    monkeypatch.setattr(split, "WINDOW", 1000)
    monkeypatch.setattr(split, "LAST", 2000)
    path = traces.write(tmp_path / "trace.json", traces.trace(*events(300)), layout)
    data = path.read_bytes()
    first = at = data.index(b"{", data.index(b'"traceEvents"'))
    with path.open("rb") as file:
        found = list(spans(file.fileno(), first, 5000))
    assert len(found) > 5
    made = []
    for span in found:
        assert span.start == at
        made += json.loads(b"[" + data[at : span.stop] + b"]")
        at = span.after
    assert made == events(300)[: len(made)]
    assert len(data) - at < 3000


@pytest.mark.parametrize("last", [20, 100, 900])
def test_a_file_without_boundaries_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: int) -> None:
    looked = []

    def seen(window: bytes) -> tuple[int, int] | None:
        looked.append(len(window))
        return boundary(window)

    for name, value in (("WINDOW", 100), ("LAST", last), ("boundary", seen)):
        monkeypatch.setattr(split, name, value)
    for size in (500, 1_000, 100_000):
        (tmp_path / "trace.json").write_bytes(b'{"ph": "' + b"x" * size)
        with (tmp_path / "trace.json").open("rb") as file:
            assert list(spans(file.fileno(), 0, 200)) == []
    assert 16 <= len(looked) < 40


def test_a_buffer_is_filled_up_to_a_boundary_near_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("WINDOW", 500), ("BLOCK", 300), ("LAST", 1000)):
        monkeypatch.setattr(split, name, value)
    made = events(100)
    text = json.dumps(made).encode()[1:-1]
    blocks = iter([text[i : i + 300] for i in range(0, len(text), 300)])
    buffer, rest, taken = memoryview(bytearray(4000)), b"", []
    while True:
        size, found = fill(buffer, rest, blocks, 2000)
        if not found:
            break
        assert found[0] >= 2000
        taken += json.loads(b"[" + bytes(buffer[: found[0]]) + b"]")
        rest = bytes(buffer[found[1] : size])
    assert len(taken) > 80
    assert taken + json.loads(b"[" + bytes(buffer[:size]) + b"]") == made
    full = memoryview(bytearray(3 << 20))
    assert fill(full, b"", iter([b"x" * (1 << 20)] * 9), 1 << 20) == (3 << 20, None)
    found = late_boundary(text)
    assert found
    assert len(text) - 1000 < found[0] < len(text) - 500
    assert json.loads(b"[" + text[: found[0]] + b"]") + json.loads(b"[" + text[found[1] :] + b"]") == made
    assert late_boundary(text[:900]) is None


# Messages and tasks between processes.


def test_several_messages_in_one_file_keep_their_arrays_in_place() -> None:
    file = os.memfd_create("test")
    many, few = (
        {"a": np.arange(100_000), "b": [np.empty(0, np.int32), "größe"]},
        (np.arange(7, dtype=np.int8), np.arange(3.0)),
    )
    at, places = 0, []
    for message in (many, None, few):
        at = split.next_page(at)
        places.append((at, split.write(file, at, message)))
        at += places[-1][1]
    first, nothing, last = (split.read(file, *place) for place in places)
    os.close(file)  # the arrays keep the memory
    for got, expected in ((first["a"], many["a"]), *zip(last, few, strict=True)):
        np.testing.assert_array_equal(got, expected)
        assert (got.dtype, got.flags.owndata, got.flags.writeable) == (np.asarray(expected).dtype, False, False)
        assert got.ctypes.data % got.itemsize == 0
    assert (first["b"][0].dtype, first["b"][1], nothing) == (np.int32, "größe", None)


def span(number: int) -> Span:
    return Span(number * 10, number * 10 + 9, number * 10 + 10)


def in_child(work: Callable[[], None]) -> int:
    """Fork a process that does something, and return its number."""
    if pid := os.fork():
        return pid
    try:
        work()
    finally:
        os._exit(0)


def test_all_tasks_fit_and_each_is_taken_once() -> None:
    table = Table(1)
    put = [Task(n, IN_FILE, span(n)) for n in range(MOST_SPANS)]
    for task in put:
        table.put(task)

    def work() -> None:
        table.leave(decodes=True)
        for n, task in enumerate(iter(table.take, None)):
            assert task == put[n]
            table.post(0, Done(n, task.span, None))
        table.post(0, None)

    pid = in_child(work)
    table.leave()
    assert [done.span for done in table.done()] == [task.span for task in put]
    assert not table.lost
    os.waitpid(pid, 0)
    table.close()


def test_messages_come_in_order_up_to_a_gap() -> None:
    table = Table(2)

    def work() -> None:
        table.leave(decodes=True)
        for number in (2, 0, 1, 4):
            table.post(1, Done(number, span(number), str(number).encode()))

    os.waitpid(in_child(work), 0)
    table.leave()
    assert [(done.number, done.made) for done in table.done()] == [(0, b"0"), (1, b"1"), (2, b"2")]
    assert table.lost
    table.close()


def test_buffers_are_used_again_and_nobody_waits_for_one_that_nobody_frees() -> None:
    table = Table(2, buffers=2)
    assert {table.free_buffer(), table.free_buffer()} == {0, 1}
    table.free(1)
    assert table.free_buffer() == 1
    table.buffer(1)[:3] = b"abc"
    assert [bytes(table.buffer(n)[:3]) for n in (1, 0)] == [b"abc", b"\0\0\0"]
    table.leave(unpacks=True)  # nobody else is there
    assert table.free_buffer() is None
    table = Table(1, buffers=1)
    table.put(Task(0, 0, span(0)))
    table.close()
    assert (table.take(), table.free_buffer()) == (None, None)
    table.close()


# One process and several.

REAL = sorted(TRACES.glob("*/*.json.gz"))[:6] if TRACES.exists() else []
NAMES = ["aten::mm", "aten::add_", 'a\\b "},{" [{', "}, {", '"},{"ph":"X"', "größe 😀", "\u2028\n", "x" * 900, "]}"]
DAMAGE = (
    *(b"\0" * 50, b'"', b"}", b"]", b"{", b"[", b"},{", b'"},{"', b'\\"'),
    *(b"garbage", b"]}", b'{"ph":"X"},', b"\xff" * 9),
)
SUFFIXES = (".json", ".json.gz")


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

    def read(self, path: Path, processes: Processes = None, workers: int = 2) -> tuple[Reading | str, Reading | str]:
        """Return what one process reads and what several do, or the words in which either refuses."""
        self.joined = 0
        found: list[Reading | str] = []
        for decode in (event_columns.decode, split.decode):
            split.share_out({path: MB}, MB, workers)
            self._patch.setattr(torch_trace, "decode", decode)
            try:
                found.append(torch_trace.read(path, processes))
            except DlprofError as e:
                found.append(str(e))
        return found[0], found[1]

    def __call__(self, path: Path, processes: Processes = None, workers: int = 2) -> Reading | None:
        """Return what both read alike, None where both refuse in the same words."""
        one, several = self.read(path, processes, workers)
        if isinstance(one, str) or isinstance(several, str):
            assert one == several
            return None
        same(several, one)
        return several

    def spans(self, path: Path, processes: Processes = None, least: int = 5) -> Any:
        """Return the spans that both read, of which several processes decoded at least so many parts."""
        read = self(path, processes)
        assert read
        assert self.joined > least
        return read.tables["spans"]


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Both:
    """Split files of some kilobytes into many spans."""
    monkeypatch.setattr(split, "LEAST_BYTES", 1)
    monkeypatch.setattr(split, "free_bytes", lambda: None)
    for name, value in (("WINDOW", 2500), ("LAST", 3000), ("AIM", 3000), ("AIM_PACKED", 3000)):
        monkeypatch.setattr(split, name, value)
    return Both(monkeypatch)


def training(steps: int = 40) -> dict[str, Any]:
    """Return a trace with odd names and args, collectives and copies."""
    made = traces.training(steps=steps)
    for i, e in enumerate(made["traceEvents"]):
        e["args"]["odd"] = [{"a": 1}, {"b": "},{"}, {"c": '"}, {"'}, {"ph": {}}][: i % 5]
        if e["cat"] == "cpu_op" and i % 3:
            e["name"] = NAMES[i % len(NAMES)]
    return made


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize(("layout", "workers"), [("kineto", 3), ("compact", 2), ("pretty", 2), ("list", 2)])
def test_several_processes_give_what_one_does(
    tmp_path: Path, both: Both, layout: traces.Layout, suffix: str, workers: int
) -> None:
    read = both(traces.write(tmp_path / f"trace{suffix}", training(), layout), workers=workers)
    assert read
    assert (len(read.tables["spans"]), both.joined > 10) == (40 * 17, True)
    assert read.warnings == () or layout == "list"


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_late_keys_large_events_glued_files_and_refusals(tmp_path: Path, both: Both, suffix: str) -> None:
    path = tmp_path / f"trace{suffix}"
    made = training()
    made["baseTimeNanoseconds"] = made.pop("baseTimeNanoseconds")
    data = traces.dump(made, "compact").rstrip()[:-1]
    late = data + b', "traceEvents": [' + json.dumps(traces.op("late", 10**9, 5)).encode() + b"]}"
    found = both.spans(traces.write(path, late), least=10)
    assert "late" in set(found["name"])
    assert found["start_ns"].min() > traces.BASE_NS
    made["traceEvents"][300]["args"]["huge"] = [{"ph": "X", "name": "}, {", "n": i} for i in range(400)]
    assert len(both.spans(traces.write(path, made, "compact"), least=2)) == 40 * 17
    for odd in (b"[1, 2]", b"{}", b"", b"nonsense", b'{"traceEvents": 7}', b'{"traceEvents": [', b"[" * 9000):
        both(traces.write(path, odd))
    assert both(tmp_path / f"absent{suffix}") is None
    if suffix == ".json.gz":
        path.write_bytes(gzip.compress(data[:20_000]) + gzip.compress(data[20_000:]) + b"\0" * 512)
        both.spans(path, least=10)
        packed = bytearray(traces.write(path, training(steps=400)).read_bytes())
        packed[len(packed) * 2 // 3 : len(packed) * 2 // 3 + 200] = bytes(200)
        path.write_bytes(packed)
        both.spans(path, least=10)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_cut_off_anywhere(tmp_path: Path, both: Both, suffix: str) -> None:
    path = traces.write(tmp_path / f"trace{suffix}", training())
    data, most = path.read_bytes(), 0
    for cut in range(50, len(data), len(data) // 6):
        path.write_bytes(data[:cut])
        read = both(path)
        most = max(most, both.joined)
        assert read is None or any("cut off" in w or "damaged" in w for w in read.warnings)
    assert most > 10


@pytest.mark.parametrize("damage", DAMAGE)
def test_garbage_in_the_middle(tmp_path: Path, both: Both, damage: bytes) -> None:
    data = traces.dump(training(30), "compact")
    place = len(data) * (4 + DAMAGE.index(damage) % 5) // 12 + 17
    path = tmp_path / f"trace{SUFFIXES[DAMAGE.index(damage) % 2]}"
    both(traces.write(path, data[:place] + damage + data[place:]))
    assert both.joined > 2, "what comes before the damage is decoded by several processes"


def test_times_marks_groups_and_processes_across_parts(tmp_path: Path, both: Both) -> None:
    path = tmp_path / "trace.json"
    whole = [traces.op(f"w{i}", 0, 1000) | {"ts": 1_694_128_201_000_000 + i} for i in range(300)]
    blurred = traces.op("late", 0, 1000)
    for made in ([*whole, blurred], [blurred, *whole]):  # float64 blurs the last, or the first
        data = traces.dump(traces.trace(*made, base_ns=None)).replace(b'"ts": 0.0', b'"ts": 1694128201000300.321')
        assert both.spans(traces.write(path, data))["start_ns"].max() == 1_694_128_201_000_300_321
    mark = {"cat": "cpu_op", "pid": 1}
    marks = [
        mark | {"name": f"op{i % 40}", "tid": i % 3, "ts": i, "ph": "BE"[i >= 150], "args": {"x": i}}
        for i in range(300)
    ]
    assert len(both.spans(traces.write(path, traces.trace(*marks, traces.op("a", 0, 1))))) == 151
    dims = {"Input Dims": [[64, 128]], "Input type": ["float"]}
    gathers = [traces.event("cpu_op", "gloo:all_gather", i * 1000, 500, **dims) for i in range(150)]
    named = traces.event("cpu_op", "gloo:all_reduce", 0, 5, **{"Process Group Name": "0", "Group size": 4}, **dims)
    for made in ([named, *gathers], [*gathers, named]):
        found = both.spans(traces.write(path, traces.trace(*made)))
        assert set(found["bytes"][found["collective"] == "all_gather"]) == {64 * 128 * 4 * 4}
    made = [traces.op(f"o{i}", i, 1) | {"pid": i % 3} for i in range(300)]
    assert len(both.spans(traces.write(path, traces.trace(*made)), frozenset({1}))) == 100


@pytest.mark.parametrize(("limit", "value", "rows"), [("MOST_ROWS", 400, 400), ("MOST_NAMES", 1, None)])
def test_limits_hold_at_the_same_event(
    tmp_path: Path, both: Both, monkeypatch: pytest.MonkeyPatch, limit: str, value: int, rows: int | None
) -> None:
    monkeypatch.setattr(limits, limit, value)
    read = both(traces.write(tmp_path / "trace.json", training()))
    assert read
    assert any("holds more than" in w for w in read.warnings)
    if rows:
        assert (len(read.tables["spans"]), 2 < both.joined < 40) == (rows, True)


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("dies", ["killed", "raises", "at once"])
def test_what_a_dead_process_leaves_is_decoded_here(
    tmp_path: Path, both: Both, monkeypatch: pytest.MonkeyPatch, suffix: str, dies: str
) -> None:
    path = traces.write(tmp_path / f"trace{suffix}", training())
    expected = both(path)
    assert expected
    parent, post = os.getpid(), split.Table.post

    def last_words(self: split.Table, process: int, done: split.Done | None) -> None:
        if os.getpid() != parent and done and done.number >= (0 if dies == "at once" else 5):
            if dies == "raises":
                raise MemoryError
            os.kill(os.getpid(), signal.SIGKILL)
        post(self, process, done)

    monkeypatch.setattr(split.Table, "post", last_words)
    both.joined = 0
    read = torch_trace.read(path)
    for name, frame in expected.tables.items():
        assert_frame_equal(read.tables[name], frame)
    assert both.joined == (0 if dies == "at once" else 5)
    assert any("ended early (out of memory?)" in w for w in read.warnings)


def open_files() -> set[str]:
    """Return the pipes and files in memory that this process has open, once its children have ended."""
    while children := multiprocessing.active_children():
        children.pop().join(30)
    links = []
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one that lists them
            links.append(str(fd.readlink()))
    return {link for link in links if link.startswith("pipe:") or "memfd" in link}


def test_nothing_is_left_behind(tmp_path: Path, both: Both) -> None:
    path = traces.write(tmp_path / "trace.json.gz", training())
    before = open_files()
    both.spans(path, least=10)
    begun = split.begin(path)
    assert begun
    begun.close()
    assert open_files() <= before


@pytest.mark.skipif(not REAL, reason="needs ../shared/traces")
@pytest.mark.parametrize(
    "path", [pytest.param(p, marks=() if p.name.startswith("worker0") else pytest.mark.slow, id=p.name) for p in REAL]
)
def test_real_traces(tmp_path: Path, both: Both, monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    monkeypatch.setattr(split, "AIM_PACKED", 100_000)
    monkeypatch.setattr(split, "AIM", 100_000)
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
    lambda cat, name, ts, dur, extra, odd: (
        {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": 1, "ts": ts, "dur": dur, "args": {"odd": odd}} | extra
    ),
    st.sampled_from(["cpu_op", "kernel", "cuda_runtime", "gpu_memcpy", "user_annotation", "quantum", "ac2g"]),
    texts,
    st.integers(0, 10**6),
    st.integers(0, 1000),
    st.dictionaries(st.sampled_from(["ph", "cat", "pid", "tid", "ts", "dur", "name"]), values, max_size=1),
    values,
)


@settings(max_examples=12, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    made=st.lists(an_event, min_size=1, max_size=60),
    aim=st.integers(1, 4000),
    indent=st.sampled_from([None, None, 2]),
    cut=st.floats(0.05, 1.5),
    damage=st.tuples(st.floats(0, 1), st.sampled_from((b"",) * 9 + DAMAGE)),
    suffix=st.sampled_from(SUFFIXES),
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
    suffix: str,
) -> None:
    for name, value in (("AIM", aim), ("AIM_PACKED", aim), ("WINDOW", 300), ("LAST", 300)):
        monkeypatch.setattr(split, name, value)
    data = json.dumps({"schemaVersion": 1, "traceEvents": made, "traceName": "x"}, indent=indent).encode()
    place = int(damage[0] * len(data))
    data = (data[:place] + damage[1] + data[place:])[: int(cut * len(data))]
    path = traces.write(tmp_path / f"trace{suffix}", data)
    if not damage[1]:
        both(path)
        return
    # Of an event that never ends, one process takes some that follow for a part; several begin anew at the next
    # boundary, and lose no more.
    one, several = both.read(path)
    if not isinstance(one, str):
        assert not isinstance(several, str)
        assert len(several.tables["spans"]) >= len(one.tables["spans"])
        assert bool(several.warnings) == bool(one.warnings)


# Shares of the cores.


def shared(cores: int, *megabytes: int) -> list[int]:
    """Return how many processes each of some traces may have."""
    bytes_of = {Path(f"{i}.json"): size * MB for i, size in enumerate(megabytes)}
    split.share_out(bytes_of, sum(bytes_of.values()), cores)
    return [split.workers_for(path) for path in bytes_of]


@pytest.mark.parametrize(
    ("cores", "megabytes", "free", "workers"),
    [
        (2, [1000], None, [2]),
        (1, [1000], None, [1]),
        (8, [1000], None, [8]),
        (2, [510, 490], None, [1, 1]),
        (8, [500, 500], None, [4, 4]),
        (2, [300] * 8, None, [1] * 8),
        (2, [1000, 50, 50, 50, 50, 50, 50, 50], None, [2, 0, 0, 0, 0, 0, 0, 0]),
        (16, [2000, 1000, 1000], None, [8, 4, 4]),
        (2, [50], None, [0]),
        (8, [1000], 7, [3]),
        (8, [1000], 1, [0]),
    ],
)
def test_cores_are_divided_by_bytes_as_far_as_memory_allows(
    monkeypatch: pytest.MonkeyPatch, cores: int, megabytes: list[int], free: int | None, workers: list[int]
) -> None:
    monkeypatch.setattr(split, "free_bytes", lambda: free and free * split.PROCESS_BYTES)
    assert shared(cores, *megabytes) == workers
    if cores == 16:  # other files of the run count
        split.share_out({Path("a"): 500 * MB}, 1000 * MB, 4)
        assert [split.workers_for(Path(name)) for name in "ab"] == [2, 0]


def test_nothing_is_split_where_forking_is_unsafe_or_forbidden(monkeypatch: pytest.MonkeyPatch) -> None:
    free = split.free_bytes()
    assert free is None or MB < free < 2**50
    assert shared(2, 1000) == [2]
    monkeypatch.setattr(threading, "active_count", lambda: 2)
    assert shared(2, 1000) == [0]
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)  # type: ignore[attr-defined]
    assert shared(2, 1000) == [0]


# Decoding ahead.


def written(tmp_path: Path, name: str, rank: int = 0) -> Path:
    return traces.write(tmp_path / name, traces.training(steps=4, rank=rank))


def begun(path: Path) -> None:
    """Begin a file and wait until its process has."""
    prefetch.begin([path])
    until = time.monotonic() + 20
    while not prefetch._places[path].shared[prefetch._BEGUN]:
        assert time.monotonic() < until
        time.sleep(0.01)


def test_rows_decoded_ahead_are_those_of_the_file_and_are_taken_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path, "a.json.gz")
    expected = torch_trace.read(path)
    begun(path)
    with monkeypatch.context() as patch:
        patch.setattr(torch_trace, "decode", None)  # nothing here can decode: the other process made what is given
        same(torch_trace.read(path), expected)
    assert prefetch.rows_of(path) is None
    same(torch_trace.read(path), expected)
    bad = traces.write(tmp_path / "bad.json", b"[1, 2]")
    begun(bad)
    with pytest.raises(DlprofError, match="a list without events"):
        torch_trace.read(bad)


def test_no_further_file_is_begun_once_it_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = written(tmp_path, "a.json"), written(tmp_path, "b.json", rank=1)

    def decode(path: Path) -> event_columns.Rows:
        time.sleep(1)
        return event_columns.decode(path)

    monkeypatch.setattr(prefetch, "decode", decode)
    prefetch.begin([first, second, written(tmp_path, "c.json", rank=2)])
    assert list(prefetch._places) == [first, second]
    time.sleep(0.3)
    prefetch.stop()
    shared = prefetch._places[first].shared
    start = time.monotonic()
    assert prefetch.rows_of(second) is None
    assert time.monotonic() - start < 0.5  # whoever reads it does not wait for the first one's end
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


def test_large_files_are_not_decoded_ahead_whole_but_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, other = written(tmp_path, "a.json"), written(tmp_path, "b.json", rank=1)
    expected = torch_trace.read(path)
    with monkeypatch.context() as patch:
        patch.setattr(prefetch, "MOST_BYTES", path.stat().st_size - 1)
        prefetch.begin([path, tmp_path / "none.json"])
        assert list(prefetch._places) == [tmp_path / "none.json"]
        assert prefetch.rows_of(tmp_path / "none.json") is None
    prefetch.forget()
    monkeypatch.setattr(split, "LEAST_BYTES", 1)
    for reads in (True, False):
        split.share_out({path: MB}, MB, 2)
        prefetch.begin([path, other])
        split.share_out({}, 0)
        # The processes of the large one have the cores; who reads it goes first, for it still takes long.
        assert (list(prefetch._split), dict(prefetch._places), prefetch.is_begun(path)) == ([path], {}, False)
        if reads:
            with monkeypatch.context() as patch:
                patch.setattr(torch_trace, "decode", None)
                same(torch_trace.read(path), expected)
        prefetch.forget()
        assert not prefetch._split
        same(torch_trace.read(path), expected)
