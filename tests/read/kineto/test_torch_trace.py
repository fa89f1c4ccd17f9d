"""Each oddity that trace files have, made by hand, what the reader makes of it, and two traces recorded with gloo."""

from pathlib import Path

import pandas as pd
import pytest

from dlprof.errors import DlprofError
from dlprof.read.kineto import headers, torch_trace
from tests.fixtures import traces
from tests.fixtures.places import GOLDEN
from tests.fixtures.reading import only, read, spans_of
from tests.fixtures.traces import BASE_NS


def test_a_trace_becomes_spans_steps_and_facts(tmp_path: Path) -> None:
    reading = read(tmp_path, traces.training(steps=2, rank=1))
    spans, steps = reading.tables["spans"], reading.tables["traced_steps"]
    assert reading.warnings == ()
    assert reading.facts == {
        "rank": 1,
        "world_size": 2,
        "host": "node-1",
        "devices": [{"id": 0, "name": "NVIDIA H100 80GB HBM3", "memory_bytes": 85_000_000_000, "numSms": 132}],
        "backend": "nccl",
        "groups": {"0": {"desc": "default_pg", "size": 2, "ranks": [0, 1]}},
        "base_time_ns": BASE_NS,
        "schema": 1,
    }
    assert steps.to_dict("list") == {
        "step": [0, 1],
        "start_ns": [BASE_NS + 10_000_000, BASE_NS + 11_000_000],
        "dur_ns": [990_000, 990_000],
    }
    assert spans["kind"].value_counts().loc[lambda n: n > 0].to_dict() == {
        "runtime": 10,
        "kernel": 6,
        "annotation": 4,
        "op": 6,
        "communication": 4,
        "fetch": 2,
        "copy": 2,
    }
    assert set(spans["lane"]) == {"host:4000", "host:4100", "device:7", "device:21"}
    assert spans["start_ns"].is_monotonic_increasing
    mm = spans[spans["name"] == "aten::mm"].iloc[0]
    assert (mm["start_ns"], mm["dur_ns"], mm["launch"], mm["bytes"]) == (BASE_NS + 10_160_000, 30_000, -1, -1)


def test_a_parent_stands_before_its_child_that_starts_with_it(tmp_path: Path) -> None:
    spans = spans_of(tmp_path, traces.op("child", 5, 10), traces.op("parent", 5, 90), traces.op("first", 0, 1))
    assert spans["name"].to_list() == ["first", "parent", "child"]


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz", "packed_without_the_suffix"])
@pytest.mark.parametrize("layout", ["kineto", "compact", "pretty"])
def test_packing_and_layout_do_not_matter(tmp_path: Path, name: str, layout: traces.Layout) -> None:
    made = traces.training()
    expected = read(tmp_path / "plain", made)
    path = traces.write(tmp_path / (name if name.startswith("trace") else "x.gz"), made, layout)
    if not name.startswith("trace"):
        path = path.rename(tmp_path / name)
    got = torch_trace.read(path)
    assert got.facts == expected.facts
    for table, frame in expected.tables.items():
        pd.testing.assert_frame_equal(got.tables[table], frame)


def test_a_bare_list_of_events_is_a_trace(tmp_path: Path) -> None:
    reading = read(tmp_path, traces.training(), layout="list")
    expected = read(tmp_path, traces.training(base_ns=None))
    pd.testing.assert_frame_equal(reading.tables["spans"], expected.tables["spans"])
    # The collectives of the list itself tell their group.
    assert reading.facts == {"groups": {"0": {"desc": "default_pg", "size": 2, "ranks": [0, 1]}}}
    assert [w for w in reading.warnings if "no base" not in w] == []


def test_keys_may_stand_in_any_order_and_others_beside_them(tmp_path: Path) -> None:
    made = traces.training()
    expected = read(tmp_path, made)
    turned = {
        "odd": {"traceEvents": [1, {"}": ["]"]}]},
        "text": 'traceEvents": [{"ph": "X"}',
        "traceEvents": [dict(reversed(e.items())) for e in made["traceEvents"]],
        "more": [{"a": 1}, {"b": [{}, {}]}],
        **{k: made[k] for k in reversed(made) if k != "traceEvents"},
    }
    got = read(tmp_path, turned, layout="compact")
    pd.testing.assert_frame_equal(got.tables["spans"], expected.tables["spans"])
    assert got.facts == expected.facts
    assert got.warnings == ()


def test_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    assert len(read(tmp_path, b"\xef\xbb\xbf" + traces.dump(traces.training())).tables["spans"]) == 51


def test_a_base_is_not_added_to_times_that_are_absolute(tmp_path: Path) -> None:
    e = traces.op("a", 0, 1000) | {"ts": 1_735_632_360_000_005}
    reading = read(tmp_path, traces.trace(e))
    assert only(reading.tables["spans"])["start_ns"] == 1_735_632_360_000_005_000
    assert any("absolute already" in w for w in reading.warnings)


def test_times_without_a_base_are_said_to_be_so(tmp_path: Path) -> None:
    reading = read(tmp_path, traces.trace(traces.op("a", 1000, 1000), base_ns=None))
    assert only(reading.tables["spans"])["start_ns"] == 1000
    assert any("unknown zero" in w for w in reading.warnings)


def test_a_step_counts_once_by_the_hosts_mark(tmp_path: Path) -> None:
    on_gpu = traces.event("gpu_user_annotation", "ProfilerStep#5", 200, 5000, pid=0, tid=7)
    again = traces.annotation("ProfilerStep#5", 150, 20, tid=4999)
    reading = read(tmp_path, traces.trace(traces.step(6, 1100, 900), traces.step(5, 100, 1000), again, on_gpu))
    assert reading.tables["traced_steps"].to_dict("list") == {
        "step": [5, 6],
        "start_ns": [BASE_NS + 100, BASE_NS + 1100],
        "dur_ns": [1000, 900],
    }
    assert (reading.tables["spans"]["kind"] == "annotation").all()


def test_a_trace_without_steps_has_none(tmp_path: Path) -> None:
    assert len(read(tmp_path, traces.trace(traces.op("a", 0, 1))).tables["traced_steps"]) == 0


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.json", b"", "empty"),
        ("a.json.gz", b"", "empty"),
        ("a.json", b"hello", "not JSON"),
        ("a.json", b"\x00\x01\x02\xff" * 99, "not JSON"),
        ("a.json", b"{hello}", "not JSON"),
        ("a.json", b'"text"', "not JSON"),
        ("a.json", b"{}", "without traceEvents"),
        ("a.json", b'{"a": [1, {"traceEvents": []}]}', "without traceEvents"),
        ("a.json", b'{"traceEvents": 5}', "not a list"),
        ("a.json", b'{"traceEvents": {"a": []}}', "not a list"),
        ("a.json", b"[]", "list without events"),
        ("a.json", b'[1, 2, "x", {"a": 1}]', "list without events"),
        ("a.json", b'{"schemaVersion": 1, "deviceProp', "cut off before its first event"),
        ("a.json.gz", b'{"traceEvents": []}', "named .gz but not gzip"),
        ("a.json.gz", b"\x1f\x8bgarbage that is no gzip", "damaged"),
        ("a.json.gz", b"\x1f\x8b", "cut off"),
    ],
)
def test_what_is_no_trace_is_refused_in_one_line(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DlprofError, match=said) as e:
        torch_trace.read(path)
    assert "\n" not in str(e.value)
    assert str(path) in str(e.value)
    # A file cut off within a trace's header is a trace, of which nothing is left.
    assert headers.peek(path)["is_trace"] is (b"schemaVersion" in content)


def test_what_cannot_be_opened_is_refused_in_one_line(tmp_path: Path) -> None:
    for path, said in ((tmp_path / "none.json", "no such file"), (tmp_path, "a folder")):
        for function in (torch_trace.read, headers.peek):
            with pytest.raises(DlprofError, match=said):
                function(path)


def test_a_trace_without_events_is_an_empty_table_and_a_warning(tmp_path: Path) -> None:
    reading = read(tmp_path, traces.trace())
    assert len(reading.tables["spans"]) == 0
    assert len(reading.tables["traced_steps"]) == 0
    assert reading.facts["rank"] == 0
    assert any("no spans" in w for w in reading.warnings)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_gloo_job_of_two_ranks(rank: int) -> None:
    path = GOLDEN / f"gloo_rank{rank}.json.gz"
    reading = torch_trace.read(path)
    spans = reading.tables["spans"]
    assert reading.warnings == ()
    assert headers.peek(path) == {k: reading.facts[k] for k in ("rank", "world_size", "host")} | {"is_trace": True}
    assert (reading.facts["rank"], reading.facts["world_size"], reading.facts["backend"]) == (rank, 2, "gloo")
    assert reading.tables["traced_steps"]["step"].to_list() == [1, 2, 3]
    assert (spans["kind"] == "fetch").sum() == 3
    marks = spans[spans["name"].astype(str).str.startswith("gloo:")]
    assert (marks["kind"] == "communication").all()
    # DDP first compares shapes, then reduces 64 × 64 + 64 float32 a step; gloo shows a reduce-scatter as an all-reduce.
    told = marks[["collective", "bytes"]].to_numpy().tolist()
    assert told[2:] == [
        ["all_reduce", 16640],
        ["all_reduce", 16640],
        ["all_gather", 80],
        ["all_reduce", 80],
        ["broadcast", 40],
        ["barrier", -1],
        ["send" if rank == 0 else "recv", 40],
    ]
    assert [name for name, _ in told[:2]] == ["broadcast", "broadcast"]
    assert set(spans["lane"].astype(str).str.partition(":")[0]) == {"host"}


SERVED = (
    "execute_new_2_cached_0",
    "execute_context_2(512)_generation_3(3)",
    "execute_77_context_9(sq4sk4)",
    "step[EXTEND bs=17 toks=8192]",
    "step[DECODE bs=63]",
)


@pytest.mark.parametrize("name", SERVED)
def test_ranges_of_an_inference_server_show_one_but_where_it_trains_too(tmp_path: Path, name: str) -> None:
    events = [traces.annotation(name, n * 1_000_000, 900_000) for n in range(3)]
    assert read(tmp_path, traces.trace(*events)).facts["inference"] is True
    backward = traces.op("autograd::engine::evaluate_function: MmBackward0", 4_000_000, 1_000)
    assert "inference" not in read(tmp_path, traces.trace(*events, backward)).facts


@pytest.mark.parametrize("name", ["execute_context_sql", "step[1]", "step[TRAIN bs=2]", "execute_new_x", "step"])
def test_other_ranges_show_no_inference_server(tmp_path: Path, name: str) -> None:
    assert "inference" not in read(tmp_path, traces.trace(traces.annotation(name, 0, 900_000))).facts
