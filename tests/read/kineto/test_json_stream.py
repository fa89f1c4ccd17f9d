"""Files cut off or damaged at any byte, and chunks that end anywhere: what is read is in the file, and all of it."""

import contextlib
import gzip
import json
import os
import random
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pandas as pd
import pytest

from dlprof.errors import DlprofError
from dlprof.read.kineto import json_stream, torch_trace
from dlprof.read.sources import Reading
from tests.fixtures import traces
from tests.fixtures.places import TRACES

REAL = TRACES / "dlrm_v100_8ranks" / "worker0_step_12.1694128201545.pt.trace.json.gz"


def small(**keys: Any) -> dict[str, Any]:
    """Return a trace with one event of each sort, so that cutting it at every byte takes seconds."""
    events = [
        traces.step(7, 1_000, 9_000),
        traces.op("aten::mm", 2_000, 3_456, stack='a\\b "},{" [{'),
        *traces.launched("gemm", 2_500, 4_000, 2_001, 5),
        traces.copy(7_000, 1_000, 64),
        traces.collective(8_000, 900, 16),
    ]
    return traces.trace(*events, **keys)


def rows(reading: Reading) -> Counter[tuple[Any, ...]]:
    frame = reading.tables["spans"].astype(dict.fromkeys(("lane", "kind", "name", "copy", "memory", "collective"), str))
    return Counter(frame.drop(columns=["group", "dtype"]).itertuples(index=False, name=None))


def assert_part_of(path: Path, whole: Reading) -> int:
    """Read a damaged file: an error in words, or rows and facts that are the whole file's too; give how many rows."""
    try:
        part = torch_trace.read(path)
    except DlprofError as e:
        said = str(e)
    else:
        said = ""
    if said:
        assert "\n" not in said
        return -1
    # A rank of the name, the groups of events and no base before a base was read: each fact is the whole's or absent.
    for name, value in part.facts.items():
        if name != "groups":
            assert whole.facts[name] == value
    mine, all_of_them = rows(part), rows(whole)
    if "base_time_ns" in whole.facts and "base_time_ns" not in part.facts:
        base = whole.facts["base_time_ns"]
        mine = Counter({(*r[:3], r[3] + base, *r[4:]): n for r, n in mine.items()})
    # The main device is the one with most rows; cut early it may be another. These traces have one.
    assert not mine - all_of_them
    if sum(mine.values()) < sum(all_of_them.values()):
        assert any("cut off" in w or "damaged" in w for w in part.warnings)
    return sum(mine.values())


def old_order(layout: traces.Layout) -> bytes:
    """Return the small trace with its base behind its events, as Kineto wrote it before torch 2.13."""
    made = small()
    made["baseTimeNanoseconds"] = made.pop("baseTimeNanoseconds")
    return traces.dump(made, layout)


@pytest.mark.parametrize(
    ("layout", "suffix"), [("kineto", ".json"), ("compact", ".json"), ("list", ".json"), ("compact", ".json.gz")]
)
def test_cut_at_any_byte_the_events_before_are_given(tmp_path: Path, layout: traces.Layout, suffix: str) -> None:
    decode = msgspec.json.Decoder(list[dict[str, Any]]).decode
    loaded = json.loads(old_order(layout))
    made = {"traceEvents": loaded} if isinstance(loaded, list) else loaded
    path = traces.write(tmp_path / f"trace{suffix}", old_order(layout))
    data = path.read_bytes()
    counts: list[int] = []
    for cut in reversed(range(len(data))):
        os.truncate(path, cut)
        file = json_stream.TraceFile(path, decode)
        try:
            events = [e for part in file.events() for e in part] if file.header() else []
        except DlprofError:
            events = []
        assert events == made["traceEvents"][: len(events)]
        assert file.keys == {k: made[k] for k in file.keys}
        assert file.cut or not events or len(events) == len(made["traceEvents"])
        counts.append(len(events))
    assert counts == sorted(counts, reverse=True), "the later the cut, the more is read"
    assert counts[0] == len(made["traceEvents"])
    assert len(set(counts)) >= 4


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
@pytest.mark.parametrize("layout", ["kineto", "compact", "list"])
def test_cut_anywhere_what_is_read_was_there(tmp_path: Path, layout: traces.Layout, name: str) -> None:
    path = traces.write(tmp_path / name, old_order(layout))
    data = path.read_bytes()
    whole = torch_trace.read(path)
    counts = []
    for cut in range(len(data) % 23, len(data), 23):
        path.write_bytes(data[:cut])
        counts.append(assert_part_of(path, whole))
    assert counts == sorted(counts)
    assert counts[0] == -1
    assert counts[-1] >= len(whole.tables["spans"]) - 1


@pytest.mark.parametrize("seed", range(4))
def test_any_byte_changed_raises_nothing_but_words(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    for packed in (False, True):
        data = traces.dump(small(), "compact")
        data = gzip.compress(data, mtime=0) if packed else data
        path = tmp_path / ("trace.json.gz" if packed else "trace.json")
        for _ in range(100):
            broken = bytearray(data)
            for _ in range(rng.choice((1, 1, 3))):
                broken[rng.randrange(len(broken))] = rng.choice(
                    (0, 9, 34, 44, 91, 92, 93, 123, 125, rng.randrange(256))
                )
            path.write_bytes(broken)
            with contextlib.suppress(DlprofError):
                assert len(torch_trace.read(path).tables["spans"]) <= 7


@pytest.mark.long
@pytest.mark.skipif(not REAL.exists(), reason="needs ../shared/traces")
@pytest.mark.parametrize("packed", [False, True])
def test_a_real_trace_cut_anywhere(tmp_path: Path, packed: bool) -> None:
    whole = torch_trace.read(REAL)
    data = REAL.read_bytes() if packed else gzip.decompress(REAL.read_bytes())
    path = tmp_path / ("worker0.json.gz" if packed else "worker0.json")
    rng = random.Random(5)
    counts = []
    for cut in sorted(rng.randrange(len(data)) for _ in range(30)):
        path.write_bytes(data[:cut])
        counts.append(assert_part_of(path, whole))
    assert counts == sorted(counts)
    assert counts[-1] > 1000


# ── Chunks


@pytest.mark.parametrize("chunk", [1, 100, 333, 1000, 4096])
@pytest.mark.parametrize("layout", ["kineto", "compact", "pretty", "list"])
def test_where_chunks_end_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int, layout: traces.Layout
) -> None:
    made = traces.training(steps=6)
    for i, e in enumerate(made["traceEvents"]):
        e["args"]["odd"] = [{"a": 1}, {"b": "},{"}, {"c": '"}, {"'}, {}][: i % 5]
    path = traces.write(tmp_path / "trace.json", made, layout)
    expected = torch_trace.read(path)
    monkeypatch.setattr(json_stream, "CHUNK", chunk)
    monkeypatch.setattr(json_stream, "BLOCK", max(chunk // 3, 16))
    got = torch_trace.read(path)
    assert got.facts == expected.facts
    assert got.warnings == expected.warnings
    for table, frame in expected.tables.items():
        pd.testing.assert_frame_equal(got.tables[table], frame)
    assert len(got.tables["spans"]) == 6 * 17


def test_memory_holds_chunks_and_not_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_stream, "CHUNK", 2000)
    monkeypatch.setattr(json_stream, "BLOCK", 500)
    sizes = []
    decode = msgspec.json.Decoder(list[dict[str, Any]]).decode

    def watched(array: bytes | memoryview) -> list[dict[str, Any]]:
        sizes.append(len(array))
        return decode(array)

    made = traces.training(steps=50)
    file = json_stream.TraceFile(traces.write(tmp_path / "trace.json", made, "compact"), watched)
    assert file.header()
    assert [e for part in file.events() for e in part] == json.loads(json.dumps(made["traceEvents"]))
    assert file.cut == ""
    assert max(sizes) < 4000


@pytest.mark.parametrize("where", ["before", "within"])
def test_a_text_without_an_end_is_given_up_before_memory_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr(json_stream, "CHUNK", 1000)
    monkeypatch.setattr(json_stream, "BLOCK", 500)
    monkeypatch.setattr(json_stream, "LONGEST", 10_000)
    data = traces.dump(traces.training(steps=100))
    mark = b'"node-1' if where == "before" else b'"ProfilerStep#7'
    path = traces.write(tmp_path / "trace.json", data.replace(mark + b'"', mark + b"x" * 50_000, 1))
    assert path.stat().st_size > 100_000
    if where == "before":
        with pytest.raises(DlprofError, match="cut off before its first event"):
            torch_trace.read(path)
        return
    reading = torch_trace.read(path)
    assert len(reading.tables["spans"]) == 7 * 17
    assert any("cut off or damaged within its events" in w for w in reading.warnings)


def test_what_follows_the_events_may_be_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_stream, "CHUNK", 500)
    monkeypatch.setattr(json_stream, "BLOCK", 300)
    made = traces.training(steps=1)
    base = made.pop("baseTimeNanoseconds")
    made |= {"logs": [{"line": f"}}, {{ {i}"} for i in range(500)], "baseTimeNanoseconds": base}
    reading = torch_trace.read(traces.write(tmp_path / "trace.json", made, "compact"))
    assert reading.facts["base_time_ns"] == base
    assert len(reading.tables["spans"]) == 17
    assert reading.warnings == ()


def test_files_glued_together_are_read_to_the_end(tmp_path: Path) -> None:
    data = traces.dump(traces.training(steps=2))
    middle = len(data) // 2
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(data[:middle]) + gzip.compress(data[middle:]) + b"\0" * 512)
    reading = torch_trace.read(path)
    assert len(reading.tables["spans"]) == 34
    assert reading.warnings == ()


def test_the_standard_librarys_gzip_gives_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = traces.write(tmp_path / "trace.json.gz", traces.training())
    expected = torch_trace.read(path).tables["spans"]
    monkeypatch.setattr(json_stream, "_inflate", zlib)
    pd.testing.assert_frame_equal(torch_trace.read(path).tables["spans"], expected)
    cut = traces.write(tmp_path / "cut.json.gz", traces.training(), cut=900)
    assert any("gzip file is cut off" in w for w in torch_trace.read(cut).warnings)


def test_damage_within_packed_data_leaves_what_stands_before(tmp_path: Path) -> None:
    made = traces.training(steps=3000)
    path = traces.write(tmp_path / "trace.json.gz", made)
    data = bytearray(path.read_bytes())
    assert len(data) > 3 * (64 << 10)
    data[-1000:-500] = bytes(500)
    path.write_bytes(data)
    reading = torch_trace.read(path)
    assert any("gzip data are damaged" in w for w in reading.warnings)
    assert 1000 < len(reading.tables["spans"]) < 51_000


# ── Bytes that JSON forbids


@pytest.mark.parametrize(
    ("inside", "name"),
    [
        (b"a\tb", "a b"),
        (b"a\x00\x1f\nb", "a   b"),
        (b"a\xff\xfeb", "a��b"),
        (b"a\\qb", "a\\qb"),
        (b"C:\\Users\\Dev", "C:\\Users\\Dev"),
        (b'a\\\\b\\"\\n', 'a\\b"\n'),
        (b"a\\ud800b", "a�b"),
        (b"a\\ud83d\\ude00b", "a\U0001f600b"),
        ("größe".encode(), "größe"),
        (b"NaN, NaN, -Infinity", "NaN, NaN, -Infinity"),
    ],
)
@pytest.mark.parametrize(
    "also", [b"", b'"occupancy": NaN, "low": -Infinity, "rate": inf, "x": -nan(ind), ', b'"s": "\t", ']
)
def test_forbidden_bytes_cost_nothing_but_themselves(tmp_path: Path, inside: bytes, name: str, also: bytes) -> None:
    made = traces.trace(traces.op("first", 0, 1), traces.op("NAME", 10, 5, note=1), traces.op("last", 20, 1))
    data = traces.dump(made).replace(b"NAME", inside).replace(b'"note"', also + b'"note"')
    reading = torch_trace.read(traces.write(tmp_path / "trace.json", data))
    assert reading.tables["spans"]["name"].to_list() == ["first", name, "last"]
    assert reading.warnings == ()


def test_an_event_that_nothing_can_repair_costs_only_itself(tmp_path: Path) -> None:
    data = traces.dump(traces.trace(traces.op("a", 0, 1), traces.op("b", 10, 5), traces.op("c", 20, 1)), "compact")
    data = data.replace(b'"dur":0.005', b'"dur" 0.005')
    reading = torch_trace.read(traces.write(tmp_path / "trace.json", data))
    assert reading.tables["spans"]["name"].to_list() == ["a", "c"]
    assert any("1 events that could not be decoded" in w for w in reading.warnings)


def test_repairing_leaves_good_json_as_it_is() -> None:
    for text in (
        b'[{"a": "NaN", "b": [1, 2.5e-3], "c": "x\\\\", "d": "\\u00e9\\"", "inf": "inf"}]',
        traces.dump(small()),
        traces.dump(small(), "compact"),
    ):
        assert json.loads(json_stream.repaired(text)) == json.loads(text)
