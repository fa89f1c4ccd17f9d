"""A trace file becomes spans, steps and facts, whatever its layout; of a damaged one, what is read was in it."""

from __future__ import annotations

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
from dlprof.read.formats import Head
from dlprof.read.kineto import format as of_kineto
from dlprof.read.kineto import json_stream, torch_trace
from dlprof.read.kineto.format import is_rewritten, pids, ranks_of_processes
from dlprof.read.run import TRACE, open_run
from dlprof.read.sources import Reading
from tests.fixtures import dialects, traces
from tests.fixtures.places import GOLDEN, TRACES
from tests.fixtures.reading import only, read, spans_of
from tests.fixtures.traces import BASE_NS

REAL = TRACES / "dlrm_v100_8ranks" / "worker0_step_12.1694128201545.pt.trace.json.gz"
decode = msgspec.json.Decoder(list[dict[str, Any]]).decode


def same(got: Reading, expected: Reading, facts: bool = True) -> None:
    for table, frame in expected.tables.items():
        pd.testing.assert_frame_equal(got.tables[table], frame)
    if facts:
        assert (got.facts, got.warnings) == (expected.facts, expected.warnings)


def names(reading: Reading) -> list[str]:
    return reading.tables["spans"]["name"].to_list()


# Whole files.


def test_a_trace_becomes_spans_steps_and_facts(tmp_path: Path) -> None:
    reading = read(tmp_path, traces.training(steps=2, rank=1))
    spans, steps = reading.tables["spans"], reading.tables["traced_steps"]
    device = {"id": 0, "name": "NVIDIA H100 80GB HBM3", "memory_bytes": 85_000_000_000, "numSms": 132}
    assert reading.warnings == ()
    assert reading.facts == {
        "rank": 1,
        "world_size": 2,
        "host": "node-1",
        "devices": [device],
        "backend": "nccl",
        "groups": {"0": {"desc": "default_pg", "size": 2, "ranks": [0, 1]}},
        "base_time_ns": BASE_NS,
        "schema": 1,
    }
    assert steps.to_numpy().tolist() == [[n, BASE_NS + (10 + n) * 1_000_000, 990_000] for n in (0, 1)]
    kinds = {"runtime": 10, "kernel": 6, "annotation": 4, "op": 6, "communication": 4, "fetch": 2, "copy": 2}
    assert Counter(spans["kind"]) == kinds
    assert set(spans["lane"]) == {"host:4000", "host:4100", "device:7", "device:21"}
    assert spans["start_ns"].is_monotonic_increasing
    mm = spans[spans["name"] == "aten::mm"].iloc[0]
    assert (mm["start_ns"], mm["dur_ns"], mm["launch"], mm["bytes"]) == (BASE_NS + 10_160_000, 30_000, -1, -1)
    nested = spans_of(tmp_path, traces.op("child", 5, 10), traces.op("parent", 5, 90), traces.op("first", 0, 1))
    assert nested["name"].to_list() == ["first", "parent", "child"]


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz", "packed"])
@pytest.mark.parametrize("layout", ["kineto", "compact", "pretty"])
def test_packing_and_layout_do_not_matter(tmp_path: Path, name: str, layout: traces.Layout) -> None:
    made = traces.training()
    path = traces.write(tmp_path / ("x.gz" if name == "packed" else name), made, layout).rename(tmp_path / name)
    same(torch_trace.read(path), read(tmp_path / "plain", made))


def test_a_list_any_order_of_keys_a_byte_order_mark_and_glued_files(tmp_path: Path) -> None:
    made = traces.training()
    expected = read(tmp_path, made)
    same(read(tmp_path, b"\xef\xbb\xbf" + traces.dump(made)), expected)
    turned = {
        "odd": {"traceEvents": [1, {"}": ["]"]}]},
        "text": 'traceEvents": [{"ph": "X"}',
        "traceEvents": [dict(reversed(e.items())) for e in made["traceEvents"]],
        "more": [{"a": 1}, {"b": [{}, {}]}],
        **{k: made[k] for k in reversed(made) if k != "traceEvents"},
    }
    same(read(tmp_path, turned, layout="compact"), expected)
    data = traces.dump(made)
    glued = gzip.compress(data[:5000]) + gzip.compress(data[5000:]) + b"\0" * 512
    (tmp_path / "glued.json.gz").write_bytes(glued)
    same(torch_trace.read(tmp_path / "glued.json.gz"), expected)
    bare = read(tmp_path, made, layout="list")
    same(bare, read(tmp_path, traces.training(base_ns=None)), facts=False)
    assert bare.facts == {"groups": {"0": {"desc": "default_pg", "size": 2, "ranks": [0, 1]}}}
    assert [w for w in bare.warnings if "no base" not in w] == []


@pytest.mark.parametrize(
    ("at", "base", "start", "words"),
    [(1_735_632_360_000_005, BASE_NS, 1_735_632_360_000_005_000, "absolute already"), (1, None, 1000, "unknown zero")],
)
def test_times_that_need_no_base_or_have_none(
    tmp_path: Path, at: int, base: int | None, start: int, words: str
) -> None:
    reading = read(tmp_path, traces.trace(traces.op("a", 0, 1000) | {"ts": at}, base_ns=base))
    assert only(reading.tables["spans"])["start_ns"] == start
    assert any(words in w for w in reading.warnings)


def test_a_step_counts_once_by_the_hosts_mark(tmp_path: Path) -> None:
    on_gpu = traces.event("gpu_user_annotation", "ProfilerStep#5", 200, 5000, pid=0, tid=7)
    again = traces.annotation("ProfilerStep#5", 150, 20, tid=4999)
    reading = read(tmp_path, traces.trace(traces.step(6, 1100, 900), traces.step(5, 100, 1000), again, on_gpu))
    assert reading.tables["traced_steps"].to_numpy().tolist() == [[5, BASE_NS + 100, 1000], [6, BASE_NS + 1100, 900]]
    assert (reading.tables["spans"]["kind"] == "annotation").all()
    assert len(read(tmp_path, traces.trace(traces.op("a", 0, 1))).tables["traced_steps"]) == 0
    nothing = read(tmp_path, traces.trace())
    assert [len(table) for table in nothing.tables.values()] == [0, 0]
    assert (nothing.facts["rank"], any("no spans" in w for w in nothing.warnings)) == (0, True)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.json", b"", "empty"),
        ("a.json.gz", b"", "empty"),
        *(("a.json", data, "not JSON") for data in (b"hello", b"\x00\x01\x02\xff" * 99, b"{hello}", b'"text"')),
        *(("a.json", data, "without traceEvents") for data in (b"{}", b'{"a": [1, {"traceEvents": []}]}')),
        *(("a.json", data, "not a list") for data in (b'{"traceEvents": 5}', b'{"traceEvents": {"a": []}}')),
        *(("a.json", data, "list without events") for data in (b"[]", b'[1, 2, "x", {"a": 1}]')),
        ("a.json", b'{"schemaVersion": 1, "deviceProp', "cut off before its first event"),
        ("a.json.gz", b'{"traceEvents": []}', "named .gz but not gzip"),
        ("a.json.gz", b"\x1f\x8bgarbage that is no gzip", "damaged"),
        ("a.json.gz", b"\x1f\x8b", "cut off"),
        ("a.json", None, "no such file"),
        ("", None, "a folder"),
    ],
)
def test_what_is_no_trace_is_refused_in_one_line(tmp_path: Path, name: str, content: bytes | None, words: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
        # A file cut off within a trace's header is a trace, of which nothing is left.
        assert of_kineto.peek(path)["is_trace"] is (b"schemaVersion" in content)
    with pytest.raises(DlprofError, match=words) as e:
        torch_trace.read(path)
    assert ("\n" in str(e.value), str(path) in str(e.value)) == (False, True)


SERVED = ["execute_new_2_cached_0", "execute_context_2(512)_generation_3(3)", "execute_77_context_9(sq4sk4)"]
SERVED += ["step[EXTEND bs=17 toks=8192]", "step[DECODE bs=63]", "capture_32_DECODE", "execute_diffusion_1"]
OTHERS = ["execute_context_sql", "step[1]", "step[TRAIN bs=2]", "execute_new_x", "step"]


@pytest.mark.parametrize("name", SERVED + OTHERS)
def test_ranges_of_an_inference_server_show_one_but_where_it_trains_too(tmp_path: Path, name: str) -> None:
    made = [traces.annotation(name, n * 1_000_000, 900_000) for n in range(3)]
    assert read(tmp_path, traces.trace(*made)).facts.get("inference", False) is (name in SERVED)
    backward = traces.op("autograd::engine::evaluate_function: MmBackward0", 4_000_000, 1_000)
    assert "inference" not in read(tmp_path, traces.trace(*made, backward)).facts


@pytest.mark.parametrize("rank", [0, 1])
def test_a_gloo_job_of_two_ranks(rank: int) -> None:
    path = GOLDEN / f"gloo_rank{rank}.json.gz"
    reading = torch_trace.read(path)
    spans = reading.tables["spans"]
    assert reading.warnings == ()
    assert of_kineto.peek(path) == {k: reading.facts[k] for k in ("rank", "world_size", "host")} | {"is_trace": True}
    assert (reading.facts["rank"], reading.facts["world_size"], reading.facts["backend"]) == (rank, 2, "gloo")
    assert reading.tables["traced_steps"]["step"].to_list() == [1, 2, 3]
    assert (spans["kind"] == "fetch").sum() == 3
    marks = spans[spans["name"].astype(str).str.startswith("gloo:")]
    # DDP first compares shapes, then reduces 64 × 64 + 64 float32 a step; gloo shows a reduce-scatter as an all-reduce.
    assert marks["collective"].to_list()[:2] == ["broadcast", "broadcast"]
    assert marks[["kind", "collective", "bytes"]].to_numpy().tolist()[2:] == [
        ["communication", "all_reduce", 16640],
        ["communication", "all_reduce", 16640],
        ["communication", "all_gather", 80],
        ["communication", "all_reduce", 80],
        ["communication", "broadcast", 40],
        ["communication", "barrier", -1],
        ["communication", "send" if rank == 0 else "recv", 40],
    ]
    assert set(spans["lane"].astype(str).str.partition(":")[0]) == {"host"}


# A first look, and files of several ranks.


@pytest.mark.parametrize(
    ("name", "made", "facts"),
    [
        ("a.json", traces.training(rank=5, world_size=16), {"rank": 5, "world_size": 16, "host": "node-1"}),
        ("a.json.gz", traces.training(rank=5, world_size=16), {"rank": 5, "world_size": 16, "host": "node-1"}),
        ("rank-34.json", traces.trace(traces.op("a", 0, 1), rank=None, host=""), {"rank": 34}),
        ("rank-34.json", traces.trace(rank=1), {"rank": 1, "world_size": 1, "host": "node-1"}),
        ("some.json", traces.trace(traces.op("a", 0, 1), rank=None, host=""), {}),
        ("worker2.json", [traces.op("a", 0, 1)], {"rank": 2}),
        ("worker3.json", [{"args": {"a": {}}, **traces.op("a", 0, 1), "args2": 1}], {"rank": 3}),
        *(("rank-3.json", odd, None) for odd in ({"format": 1, "run": {}}, {"schemaVersion": 2, "layers": [{}]})),
        *(("rank-3.json", odd, None) for odd in ([1, 2], [{"a": 1}], "x", 5)),
    ],
)
def test_a_first_look_finds_rank_and_world(tmp_path: Path, name: str, made: Any, facts: dict[str, Any] | None) -> None:
    path = traces.write(tmp_path / name, json.dumps(made).encode() + b" " * (1 << 20))
    found = of_kineto.peek(path)
    if facts and facts.get("rank") == 1:
        facts["world_size"] = found["world_size"]
    assert found == ({"is_trace": False} if facts is None else {"is_trace": True} | facts)


def test_a_first_look_sees_past_a_list_of_groups_longer_than_what_it_reads(tmp_path: Path) -> None:
    made = traces.training(rank=777, world_size=4096)
    made["distributedInfo"]["pg_config"] = [{"pg_name": str(i), "ranks": list(range(4096))} for i in range(20)]
    data = traces.dump(made)
    assert data.index(b"traceEvents") > of_kineto.PEEK_BYTES
    found = of_kineto.peek(traces.write(tmp_path / "a.json", data))
    assert [found[k] for k in ("is_trace", "rank", "world_size")] == [True, 777, 4096]


@pytest.mark.parametrize(("name", "rank"), [("rank7.json", 7), ("some.json", None)])
def test_a_trace_as_a_format_has_its_rank_and_when_it_began(tmp_path: Path, name: str, rank: int | None) -> None:
    path = traces.write(tmp_path / name, traces.training(rank=None))
    (part,) = of_kineto.recognise(Head(path))
    assert (part.rank, part.piece, part.began_ns) == (rank, "", BASE_NS + 10_000_000)
    assert len(of_kineto.read(path).tables["traced_steps"]) == 3
    for content in (b"", b"{}", b"[]", b"text", b'{"a": [1]}'):
        assert not of_kineto.recognise(Head(traces.write(tmp_path / "other.json", content)))


@pytest.mark.parametrize("named", [True, False])
def test_a_merged_file_has_the_ranks_that_it_was_made_of(tmp_path: Path, named: bool) -> None:
    ranks = [traces.training(steps, rank=n) for n, steps in enumerate((3, 4))]
    path = traces.write(tmp_path / "all.json", dialects.merged(*ranks, named=named), layout="compact")
    run = open_run(path)
    assert [rank.index for rank in run.ranks] == [0, 1]
    for rank, made in zip(run.ranks, ranks, strict=True):
        alone = torch_trace.read(traces.write(tmp_path / f"rank{rank.index}.json", made))
        mine = torch_trace.read(path, pids(rank.pieces[TRACE]))
        assert mine.tables["spans"].drop(columns="group").equals(alone.tables["spans"].drop(columns="group"))
        assert mine.tables["traced_steps"].equals(alone.tables["traced_steps"])
        assert not any("processes" in w for w in mine.warnings)


def test_a_file_that_nothing_divides_into_ranks_is_one_rank(tmp_path: Path) -> None:
    made = dialects.merged(*(traces.training(rank=n) for n in range(2)), named=False)
    for event in made["traceEvents"]:
        event["pid"] = event["pid"] if event["pid"] >= traces.PROCESS else 0
    path = traces.write(tmp_path / "all.json", made, layout="compact")
    assert (ranks_of_processes(path), [rank.index for rank in open_run(path).ranks]) == ([], [0])
    path = traces.write(tmp_path / "rank3.json", traces.training(rank=3), layout="compact")
    assert (ranks_of_processes(path), is_rewritten(path.read_bytes())) == ([], True)
    assert not is_rewritten(traces.dump(traces.training()))
    assert ranks_of_processes(traces.write(tmp_path / "other.json", b"{}")) == []
    (part,) = of_kineto.recognise(Head(traces.write(tmp_path / "rank4.json", traces.trace(rank=4))))
    assert (part.rank, part.began_ns) == (4, None)
    assert [pids(piece) for piece in ("", "{}", "[[1]]", '[1, "a"]')] == [set(), set(), set(), {1, "a"}]


# Cut off and damaged.


def small(layout: traces.Layout) -> bytes:
    """Return a trace with one event of each sort and its base behind them, as Kineto wrote it before torch 2.13."""
    made = traces.trace(
        traces.step(7, 1_000, 9_000),
        traces.op("aten::mm", 2_000, 3_456, stack='a\\b "},{" [{'),
        *traces.launched("gemm", 2_500, 4_000, 2_001, 5),
        traces.copy(7_000, 1_000, 64),
        traces.collective(8_000, 900, 16),
    )
    made["baseTimeNanoseconds"] = made.pop("baseTimeNanoseconds")
    return traces.dump(made, layout)


def rows(reading: Reading) -> Counter[tuple[Any, ...]]:
    frame = reading.tables["spans"].astype(dict.fromkeys(("lane", "kind", "name", "copy", "memory", "collective"), str))
    return Counter(frame.drop(columns=["group", "dtype"]).itertuples(index=False, name=None))


def part_of(path: Path, whole: Reading) -> int:
    """Read a damaged file, check that its rows and facts are the whole file's too, and return how many rows it has."""
    try:
        part = torch_trace.read(path)
    except DlprofError:
        return -1
    assert all(whole.facts[name] == value for name, value in part.facts.items() if name != "groups")
    mine, every = rows(part), rows(whole)
    if "base_time_ns" in whole.facts and "base_time_ns" not in part.facts:
        mine = Counter({(*r[:3], r[3] + whole.facts["base_time_ns"], *r[4:]): n for r, n in mine.items()})
    assert not mine - every
    if mine != every:
        assert any("cut off" in w or "damaged" in w for w in part.warnings)
    return sum(mine.values())


@pytest.mark.parametrize(("layout", "suffix"), [("kineto", ".json"), ("list", ".json"), ("compact", ".json.gz")])
def test_cut_at_any_byte_the_events_before_are_given(tmp_path: Path, layout: traces.Layout, suffix: str) -> None:
    loaded = json.loads(small(layout))
    made = {"traceEvents": loaded} if isinstance(loaded, list) else loaded
    path = traces.write(tmp_path / f"trace{suffix}", small(layout))
    data, whole = path.read_bytes(), torch_trace.read(path)
    counts, read_rows = [], []
    stride = 3 if layout == "kineto" else 7
    for n, cut in enumerate(range(len(data) - 1, -1, -stride)):
        os.truncate(path, cut)
        file = json_stream.TraceFile(path, decode)
        try:
            found = [e for part in file.events() for e in part] if file.header() else []
        except DlprofError:
            found = []
        assert found == made["traceEvents"][: len(found)]
        assert file.keys == {k: made[k] for k in file.keys}
        assert file.cut or not found or len(found) == len(made["traceEvents"])
        counts.append(len(found))
        if n % (21 // stride) == 0:
            read_rows.append(part_of(path, whole))
    assert counts == sorted(counts, reverse=True), "the later the cut, the more is read"
    assert (counts[0], len(set(counts)) >= 4) == (len(made["traceEvents"]), True)
    assert (read_rows, read_rows[-1]) == (sorted(read_rows, reverse=True), -1)
    assert read_rows[0] >= len(whole.tables["spans"]) - 1


@pytest.mark.parametrize("packed", [False, True])
def test_any_byte_changed_raises_nothing_but_words(tmp_path: Path, packed: bool) -> None:
    rng = random.Random(0)
    data = gzip.compress(small("compact"), mtime=0) if packed else small("compact")
    path = tmp_path / ("trace.json.gz" if packed else "trace.json")
    for _ in range(80):
        broken = bytearray(data)
        for _ in range(rng.choice((1, 1, 3))):
            broken[rng.randrange(len(broken))] = rng.choice((0, 9, 34, 44, 91, 92, 93, 123, 125, rng.randrange(256)))
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
    for cut in sorted(rng.randrange(len(data)) for _ in range(10)):
        path.write_bytes(data[:cut])
        counts.append(part_of(path, whole))
    assert counts == sorted(counts)
    assert counts[-1] > 1000


def test_damage_within_packed_data_leaves_what_comes_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_stream, "_PACKED", 4 << 10)
    path = traces.write(tmp_path / "trace.json.gz", traces.training(steps=300))
    data = bytearray(path.read_bytes())
    assert len(data) > 3 * (4 << 10)
    data[-1000:-500] = bytes(500)
    path.write_bytes(data)
    reading = torch_trace.read(path)
    assert any("gzip data are damaged" in w for w in reading.warnings)
    assert 100 < len(reading.tables["spans"]) < 5_100


def test_the_standard_librarys_gzip_gives_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = traces.write(tmp_path / "trace.json.gz", traces.training())
    expected = torch_trace.read(path)
    monkeypatch.setattr(json_stream, "_inflate", zlib)
    same(torch_trace.read(path), expected)
    cut = traces.write(tmp_path / "cut.json.gz", traces.training(), cut=900)
    assert any("gzip file is cut off" in w for w in torch_trace.read(cut).warnings)


# Chunks.


@pytest.fixture
def chunks(monkeypatch: pytest.MonkeyPatch) -> Any:
    def of(chunk: int, block: int, longest: int = json_stream.LONGEST) -> None:
        for name, value in (("CHUNK", chunk), ("BLOCK", block), ("LONGEST", longest)):
            monkeypatch.setattr(json_stream, name, value)

    return of


@pytest.mark.parametrize("chunk", [1, 100, 1000])
@pytest.mark.parametrize("layout", ["kineto", "compact", "pretty", "list"])
def test_where_chunks_end_does_not_matter(tmp_path: Path, chunks: Any, chunk: int, layout: traces.Layout) -> None:
    made = traces.training(steps=6)
    for i, e in enumerate(made["traceEvents"]):
        e["args"]["odd"] = [{"a": 1}, {"b": "},{"}, {"c": '"}, {"'}, {}][: i % 5]
    path = traces.write(tmp_path / "trace.json", made, layout)
    expected = torch_trace.read(path)
    chunks(chunk, max(chunk // 3, 16))
    same(torch_trace.read(path), expected)
    assert len(expected.tables["spans"]) == 6 * 17


def test_memory_holds_chunks_and_not_the_file(tmp_path: Path, chunks: Any) -> None:
    chunks(2000, 500)
    sizes = []

    def counted(array: bytes | memoryview) -> list[dict[str, Any]]:
        sizes.append(len(array))
        return decode(array)

    made = traces.training(steps=50)
    file = json_stream.TraceFile(traces.write(tmp_path / "trace.json", made, "compact"), counted)
    assert file.header()
    assert [e for part in file.events() for e in part] == json.loads(json.dumps(made["traceEvents"]))
    assert (file.cut, max(sizes) < 4000) == ("", True)


@pytest.mark.parametrize("mark", [b'"node-1', b'"ProfilerStep#7'], ids=["before the events", "within them"])
def test_a_text_without_an_end_is_given_up_before_memory_is(tmp_path: Path, chunks: Any, mark: bytes) -> None:
    chunks(1000, 500, 10_000)
    data = traces.dump(traces.training(steps=100)).replace(mark + b'"', mark + b"x" * 50_000, 1)
    path = traces.write(tmp_path / "trace.json", data)
    if mark == b'"node-1':
        with pytest.raises(DlprofError, match="cut off before its first event"):
            torch_trace.read(path)
        return
    reading = torch_trace.read(path)
    assert len(reading.tables["spans"]) == 7 * 17
    assert any("cut off or damaged within its events" in w for w in reading.warnings)


def test_what_follows_the_events_may_be_long(tmp_path: Path, chunks: Any) -> None:
    chunks(500, 300)
    made = traces.training(steps=1)
    base = made.pop("baseTimeNanoseconds")
    made |= {"logs": [{"line": f"}}, {{ {i}"} for i in range(500)], "baseTimeNanoseconds": base}
    reading = read(tmp_path, made, layout="compact")
    assert (reading.facts["base_time_ns"], len(reading.tables["spans"]), reading.warnings) == (base, 17, ())


# Bytes that JSON forbids.


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
def test_forbidden_bytes_cost_nothing_but_themselves(tmp_path: Path, inside: bytes, name: str) -> None:
    made = traces.trace(traces.op("first", 0, 1), traces.op("NAME", 10, 5, note=1), traces.op("last", 20, 1))
    for also in (b"", b'"occupancy": NaN, "low": -Infinity, "rate": inf, "x": -nan(ind), ', b'"s": "\t", '):
        data = traces.dump(made).replace(b"NAME", inside).replace(b'"note"', also + b'"note"')
        reading = read(tmp_path, data)
        assert (names(reading), reading.warnings) == (["first", name, "last"], ())


def test_an_event_that_nothing_can_repair_costs_only_itself(tmp_path: Path) -> None:
    data = traces.dump(traces.trace(traces.op("a", 0, 1), traces.op("b", 10, 5), traces.op("c", 20, 1)), "compact")
    reading = read(tmp_path, data.replace(b'"dur":0.005', b'"dur" 0.005'))
    assert names(reading) == ["a", "c"]
    assert any("1 events that could not be decoded" in w for w in reading.warnings)
    good = b'[{"a": "NaN", "b": [1, 2.5e-3], "c": "x\\\\", "d": "\\u00e9\\"", "inf": "inf"}]'
    for text in (good, small("kineto"), small("compact")):
        assert json.loads(json_stream.repaired(text)) == json.loads(text)
