"""Each oddity that trace files have, made by hand, what the reader makes of it, and two traces recorded with gloo."""

import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from dlprof.errors import DlprofError
from dlprof.read.kineto import headers, torch_trace
from dlprof.read.sources import Reading
from tests.fixtures import traces
from tests.fixtures.traces import BASE_NS

GOLDEN = Path(__file__).parents[2] / "golden"


def read(tmp_path: Path, made: dict[str, Any] | bytes, name: str = "trace.json", **how: Any) -> Reading:
    return torch_trace.read(traces.write(tmp_path / name, made, **how))


def spans_of(tmp_path: Path, *events: Any, **keys: Any) -> pd.DataFrame:
    reading = read(tmp_path, traces.trace(*events, **keys))
    assert reading.warnings == ()
    return reading.tables["spans"]


def only(spans: pd.DataFrame) -> dict[str, Any]:
    assert len(spans) == 1
    return {str(name): value for name, value in spans.iloc[0].items()}


# ── The whole of a trace


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


# ── Time


@pytest.mark.parametrize("ns", [0, 1, 999, 1_000_001, 4_316_168_582_958_775, 7_889_237_999_999_999])
def test_times_from_a_base_are_exact(tmp_path: Path, ns: int) -> None:
    data = traces.dump(traces.trace(traces.op("a", 0, 0)))
    data = data.replace(b'"ts": 0.0', b'"ts": %d.%03d' % divmod(ns, 1000)).replace(b'"dur": 0.0', b'"dur": 1234567.891')
    assert only(read(tmp_path, data).tables["spans"])["start_ns"] == BASE_NS + ns
    assert only(read(tmp_path, data).tables["spans"])["dur_ns"] == 1_234_567_891


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        (b"1694128201426556", 1_694_128_201_426_556_000),
        (b"1694128201426556.0", 1_694_128_201_426_556_000),
        (b"1694128201426556.123", 1_694_128_201_426_556_123),
        (b"1694128201426556.001", 1_694_128_201_426_556_001),
        (b"1694128201426556.999", 1_694_128_201_426_556_999),
        (b'"1694128201426556.123"', 1_694_128_201_426_556_123),
        (b"1.694128201426556123e15", 1_694_128_201_426_556_123),
    ],
)
def test_absolute_times_are_exact_beyond_float64(tmp_path: Path, text: bytes, ns: int) -> None:
    data = traces.dump(traces.trace(traces.op("a", 0, 7_001), base_ns=None)).replace(b'"ts": 0.0', b'"ts": ' + text)
    reading = read(tmp_path, data)
    assert (only(reading.tables["spans"])["start_ns"], only(reading.tables["spans"])["dur_ns"]) == (ns, 7_001)
    assert reading.warnings == ()


def test_times_stay_exact_where_blurred_ones_begin_late_in_the_file(tmp_path: Path) -> None:
    whole = [traces.op(f"w{i}", 0, 1000) | {"ts": 1_694_128_201_000_000 + i} for i in range(50)]
    data = traces.dump(traces.trace(*whole, traces.op("late", 0, 1000), base_ns=None))
    data = data.replace(b'"ts": 0.0', b'"ts": 1694128201000050.321')
    spans = read(tmp_path, data).tables["spans"]
    assert spans["start_ns"].to_list() == [1_694_128_201_000_000_000 + i * 1000 for i in range(50)] + [
        1_694_128_201_000_050_321
    ]


def test_a_base_is_not_added_to_times_that_are_absolute(tmp_path: Path) -> None:
    e = traces.op("a", 0, 1000) | {"ts": 1_735_632_360_000_005}
    reading = read(tmp_path, traces.trace(e))
    assert only(reading.tables["spans"])["start_ns"] == 1_735_632_360_000_005_000
    assert any("absolute already" in w for w in reading.warnings)


def test_times_without_a_base_are_said_to_be_so(tmp_path: Path) -> None:
    reading = read(tmp_path, traces.trace(traces.op("a", 1000, 1000), base_ns=None))
    assert only(reading.tables["spans"])["start_ns"] == 1000
    assert any("unknown zero" in w for w in reading.warnings)


def test_unusable_times_are_left_out_and_counted(tmp_path: Path) -> None:
    events = [traces.op("good", 1000, 10)]
    no_times: list[Any] = [None, "soon", 10**30, 1e300, []]
    no_durations: list[Any] = [-1, -0.001, "long", None, 4e14, 1e300]
    events += [traces.op("bad", 0, 10) | {"ts": ts} for ts in no_times]
    events += [traces.op("bad", 0, 10) | {"dur": dur} for dur in no_durations]
    reading = read(tmp_path, traces.trace(*events))
    assert reading.tables["spans"]["name"].to_list() == ["good"]
    assert any(w.endswith("5 events without a usable time are left out") for w in reading.warnings)
    assert any(w.endswith("6 events with a negative or absurd duration are left out") for w in reading.warnings)


def test_an_event_of_no_duration_stays(tmp_path: Path) -> None:
    assert only(spans_of(tmp_path, traces.op("a", 7, 0)))["dur_ns"] == 0


# ── Old and foreign names


def test_names_of_kinetos_first_releases(tmp_path: Path) -> None:
    events = [
        traces.event("Operator", "aten::mm", 0, 10, tid="4000"),
        traces.event("Operator", "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 20, 5, tid="4000"),
        traces.event("Operator", "ProfilerStep#3", 0, 90, tid="4000"),
        traces.event("Runtime", "cudaLaunchKernel", 5, 2, tid="4000", correlation=9),
        traces.event("Kernel", "gemm", 8, 30, pid=0, tid="stream 7", device=0, stream=7, correlation=9),
        traces.event("Memcpy", "Memcpy HtoD (Pageable -> Device)", 40, 4, pid=0, tid="stream 7", bytes=64, stream=7),
        traces.event("Memset", "Memset (Device)", 45, 1, pid=0, tid="stream 7", bytes=8, stream=7),
    ]
    reading = read(tmp_path, traces.trace(*events))
    spans = reading.tables["spans"].set_index("name")
    assert spans["kind"].astype(str).to_dict() == {
        "ProfilerStep#3": "annotation",
        "aten::mm": "op",
        "cudaLaunchKernel": "runtime",
        "gemm": "kernel",
        "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__": "fetch",
        "Memcpy HtoD (Pageable -> Device)": "copy",
        "Memset (Device)": "set",
    }
    assert set(spans["lane"]) == {"host:4000", "device:7"}
    assert spans.loc[["gemm", "cudaLaunchKernel"], "launch"].to_list() == [9, 9]
    assert reading.tables["traced_steps"]["step"].to_list() == [3]


@pytest.mark.parametrize(
    ("tid", "stream", "lane"), [(0, 0, "0"), ("stream 7", "7", "7"), (7, "7", "7"), (-1, -1, "-1")]
)
def test_streams_are_numbers_or_text(tmp_path: Path, tid: Any, stream: Any, lane: str) -> None:
    e = traces.on_device("kernel", "k", 0, 1, stream, 0) | {"tid": tid}
    assert only(spans_of(tmp_path, e))["lane"] == f"device:{lane}"


def test_the_main_device_has_no_number_and_annotations_are_on_its_streams(tmp_path: Path) -> None:
    events = [traces.kernel(f"k{i}", i * 10, 5, device=3) for i in range(3)]
    events += [traces.kernel("other", 0, 5, device=0)]
    events += [traces.event("gpu_user_annotation", "fwd", 0, 30, pid=3, tid=7) for _ in range(9)]
    spans = spans_of(tmp_path, *events)
    assert spans.loc[spans["name"] == "other", "lane"].to_list() == ["device0:7"]
    assert set(spans.loc[spans["name"] != "other", "lane"]) == {"device:7"}


def test_values_written_as_text_are_numbers(tmp_path: Path) -> None:
    e = traces.copy(1000, 2000, 0) | {"ts": "1.0", "dur": "2.5", "pid": "0", "tid": "7"}
    e["args"] = {"device": "0", "stream": "7", "correlation": "12", "bytes": "4096"}
    row = only(spans_of(tmp_path, e))
    assert (row["start_ns"], row["dur_ns"], row["launch"], row["bytes"]) == (BASE_NS + 1000, 2500, 12, 4096)
    assert row["lane"] == "device:7"


@pytest.mark.parametrize("args", [None, [], "text", {"correlation": [1], "bytes": {"a": 1}, "stream": None}])
def test_args_of_an_unexpected_type_cost_only_themselves(tmp_path: Path, args: Any) -> None:
    e = traces.kernel("k", 0, 5) | {"args": args}
    odd: list[Any] = [["not an event"], 5, "text", {"ph": "X", "cat": "Trace", "name": 3, "pid": [], "dur": "x"}]
    made = traces.trace(e, traces.op("a", 10, 1))
    made["traceEvents"] += odd
    reading = read(tmp_path, made, layout="compact")
    assert reading.warnings == ()
    spans = reading.tables["spans"]
    assert spans["name"].to_list() == ["k", "a"]
    assert spans["launch"].to_list() == [-1, -1]


def test_a_correlation_of_zero_links_nothing_and_the_old_key_counts(tmp_path: Path) -> None:
    old = traces.kernel("k2", 10, 5)
    old["args"] = {"stream": 7, "correlation id": 33}
    spans = spans_of(tmp_path, traces.kernel("k1", 0, 5, correlation=0), old)
    assert spans["launch"].to_list() == [-1, 33]


def test_unknown_categories_are_left_out_with_a_word_and_known_ones_without(tmp_path: Path) -> None:
    silent = [traces.event(cat, "x", 0, 5) for cat in ("Trace", "overhead")]
    silent += [{"ph": ph, "name": "x", "cat": "ac2g", "ts": 0, "pid": 1, "tid": 1, "id": 4} for ph in "sfi"]
    silent += [{"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "python"}}]
    loud = [traces.event("quantum", "x", 0, 5)] * 3
    reading = read(tmp_path, traces.trace(traces.op("a", 0, 1), *silent, *loud))
    assert only(reading.tables["spans"])["name"] == "a"
    assert [re.sub(r"^.*json: ", "", w) for w in reading.warnings] == [
        "3 events of the unknown category 'quantum' are left out"
    ]


# ── Steps, pairs, processes


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


def test_begin_and_end_marks_become_spans(tmp_path: Path) -> None:
    def mark(ph: str, name: str, at: int, tid: int) -> dict[str, Any]:
        return {"ph": ph, "cat": "cpu_op", "name": name, "pid": 1, "tid": tid, "ts": at / 1000, "args": {"x": 1}}

    marks = [
        mark("B", "outer", 1_001, 1),
        mark("B", "inner", 2_000, 1),
        mark("B", "other", 1_500, 2),
        mark("E", "", 3_003, 1),
        mark("E", "", 2_500, 2),
        mark("E", "", 9_001, 1),
        mark("E", "", 9_500, 1),
        mark("B", "open", 9_600, 2),
    ]
    reading = read(tmp_path, traces.trace(*marks))
    rows = reading.tables["spans"][["name", "start_ns", "dur_ns", "lane"]]
    assert rows.to_numpy().tolist() == [
        ["outer", BASE_NS + 1_001, 8_000, "host:1"],
        ["other", BASE_NS + 1_500, 1_000, "host:2"],
        ["inner", BASE_NS + 2_000, 1_003, "host:1"],
    ]
    assert any("2 begin or end marks have no partner" in w for w in reading.warnings)


def test_several_processes_in_one_file_are_said_to_be_so(tmp_path: Path) -> None:
    reading = read(tmp_path, traces.trace(traces.op("a", 0, 1), traces.op("b", 0, 1) | {"pid": 77}))
    assert any("2 processes" in w for w in reading.warnings)
    # The mark of another process is no work: some launchers mark steps for their children.
    alone = read(tmp_path, traces.trace(traces.op("a", 0, 1), traces.step(1, 0, 9) | {"pid": 77}))
    assert alone.warnings == ()


# ── Copies and collectives


def test_copies_tell_direction_memory_and_bytes(tmp_path: Path) -> None:
    spans = spans_of(
        tmp_path,
        traces.copy(0, 5, 4096),
        traces.copy(10, 5, 8, "DtoH (Device -> Pinned)"),
        traces.copy(20, 5, 16, "HtoD (Host -> Device)"),
        traces.clear(30, 5, 32),
        traces.kernel("k", 40, 5),
    )
    assert spans["copy"].to_list() == ["HtoD", "DtoH", "HtoD", "", ""]
    assert spans["memory"].to_list() == ["pageable", "pinned", "", "", ""]
    assert spans["bytes"].to_list() == [4096, 8, 16, 32, -1]


def test_on_amd_the_call_tells_the_bytes_and_args_the_direction(tmp_path: Path) -> None:
    call = traces.call("hipMemcpyWithStream", 0, 5, 117)
    call["args"] |= {"size": "2560", "kind": "1"}
    moved = traces.on_device("gpu_memcpy", "CopyBuffer", 6, 5, 0, 2, correlation=117, kind="DtoH")
    row = spans_of(tmp_path, call, moved).iloc[1]
    assert (row["copy"], row["bytes"], row["launch"], row["lane"]) == ("DtoH", 2560, 117, "device:0")


@pytest.mark.parametrize(
    ("name", "elements", "collective", "size"),
    [
        ("allreduce", 1000, "all_reduce", 4000),
        ("_allgather_base", 1000, "all_gather", 4000),
        ("reduce_scatter_tensor_coalesced", 1000, "reduce_scatter", 4000),
        ("all_to_allv", 1000, "all_to_all", 4000),
        ("recv", 10, "recv", 40),
    ],
)
def test_collectives_tell_name_group_type_and_bytes(
    tmp_path: Path, name: str, elements: int, collective: str, size: int
) -> None:
    made = traces.collective(
        0, 5, elements, name=name, group="3", ranks=(0, 2, 4, 6), kernel_name="ncclKernel_SendRecv"
    )
    reading = read(tmp_path, traces.trace(made, world_size=8))
    row = only(reading.tables["spans"])
    assert [row[k] for k in ("kind", "collective", "group", "dtype", "bytes")] == [
        "communication",
        collective,
        "3",
        "float32",
        size,
    ]
    assert reading.facts["groups"]["3"] == {"desc": "mesh_3", "size": 4, "ranks": [0, 2, 4, 6]}
    assert reading.facts["groups"]["0"]["size"] == 8


def test_a_collective_without_metadata_is_named_by_its_kernel(tmp_path: Path) -> None:
    row = only(spans_of(tmp_path, traces.kernel("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)", 0, 5)))
    assert [row[k] for k in ("kind", "collective", "group", "dtype", "bytes")] == [
        "communication",
        "send_recv",
        "",
        "",
        -1,
    ]


def test_a_group_without_a_name_goes_by_its_ranks(tmp_path: Path) -> None:
    def nameless(start: int, ranks: tuple[int, ...]) -> traces.Event:
        made = traces.collective(start, 5, 8, ranks=ranks)
        del made["args"]["Process Group Name"], made["args"]["Process Group Description"]
        return made

    spans = spans_of(tmp_path, nameless(0, (0, 1)), nameless(10, (0, 2)), nameless(20, (0, 1)))
    first, second, third = spans["group"]
    assert first == third
    assert first != second
    assert first.startswith("ranks-")


def test_a_mark_around_a_collective_counts_its_input(tmp_path: Path) -> None:
    args: dict[str, Any] = {"Input Dims": [[8, 100]], "Input type": ["c10::BFloat16"]}
    spans = spans_of(
        tmp_path,
        traces.annotation("gloo:all_reduce", 0, 5, **args),
        traces.annotation("gloo:all_gather", 10, 5, **args),
        traces.annotation("nccl:broadcast", 20, 5),
        traces.op("c10d::allreduce_", 30, 5, **args),
    )
    assert spans["kind"].to_list() == ["communication"] * 4
    assert spans["bytes"].to_list() == [1600, 3200, -1, -1]
    assert spans["dtype"].to_list() == ["bfloat16", "bfloat16", "", ""]
    assert spans["collective"].to_list() == ["all_reduce", "all_gather", "broadcast", "all_reduce"]


# ── What cannot be read


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


# ── Recorded with torch 2.13 on CPU by tests/golden/record_gloo.py


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


def test_what_operators_multiply_has_its_shapes_and_type(tmp_path: Path) -> None:
    told = {
        "Input Dims": [[512], [64, 128], [128, 512], []],
        "Input type": ["c10::Half", "c10::Half", "c10::Half", "Scalar"],
    }
    spans = spans_of(
        tmp_path,
        traces.op("aten::addmm", 0, 5, **told),
        traces.op("aten::add", 10, 5, **told),
        traces.op("aten::mm", 20, 5),
        traces.op("aten::cudnn_convolution", 30, 5, **{"Input Dims": "abridged", "Input type": ["float"]}),
    )
    assert spans["shape"].to_list() == ["512 64x128 128x512", "", "", ""]
    assert spans["dtype"].to_list() == ["float16", "", "", ""]


@pytest.mark.parametrize(
    ("name", "args", "peer"),
    [
        ("record_param_comms", {"Collective name": "send", "Dst Rank": 6, "Rank": 2}, 6),
        ("record_param_comms", {"Collective name": "recv", "Src Rank": 6, "Rank": 2}, 6),
        ("record_param_comms", {"Collective name": "recv", "Rank": 2}, -1),
        ("c10d::send", {"Concrete Inputs": ["", "", "1", "0"]}, 6),  # the second rank of the job's only group
        ("c10d::recv_", {"Concrete Inputs": ["", "", "0", "7"]}, 4),
        ("c10d::recv_", {}, -1),
        ("c10d::recv_any_source_", {"Concrete Inputs": ["", "", "1"]}, -1),
        ("nccl:send 0->1", {}, 6),
        ("nccl:recv 0<-3", {}, -1),
    ],
)
def test_whom_a_send_goes_to_is_a_rank_of_the_job(tmp_path: Path, name: str, args: dict[str, Any], peer: int) -> None:
    made = traces.trace(traces.op(name, 0, 10) | {"args": args}, rank=4, world_size=8)
    made["distributedInfo"]["pg_config"] = [{"pg_name": "0", "pg_size": 2, "ranks": [4, 6]}]
    assert only(read(tmp_path, made).tables["spans"])["peer"] == peer


def test_a_number_in_one_of_several_groups_is_no_rank(tmp_path: Path) -> None:
    made = traces.trace(traces.op("c10d::send", 0, 10, **{"Concrete Inputs": ["", "", "1", "0"]}))
    made["distributedInfo"]["pg_config"].append({"pg_name": "7", "pg_size": 2, "ranks": [2, 3]})
    assert only(read(tmp_path, made).tables["spans"])["peer"] == -1


@pytest.mark.parametrize("rank", [0, 1])
def test_gloos_calls_tell_the_other_rank(rank: int) -> None:
    spans = torch_trace.read(GOLDEN / f"gloo_rank{rank}.json.gz").tables["spans"]
    assert spans.loc[spans["name"] == ("c10d::send", "c10d::recv_")[rank], "peer"].tolist() == [1 - rank]


def test_args_that_are_no_json_cost_their_event_nothing_else(tmp_path: Path) -> None:
    data = traces.dump(traces.trace(*traces.launched("k", 0, 2000, 1000, 7), traces.op("a", 5000, 10)))
    odd = data.replace(b'"correlation": 7', b'"correlation": 7, "text": "\x01\xff \\q", "n": NaN', 1)
    assert odd != data
    spans = read(tmp_path, odd).tables["spans"]
    assert spans["launch"].to_list() == [7, 7, -1]


def test_args_with_a_text_of_no_encoding_keep_all_else(tmp_path: Path) -> None:
    # Passing over such a text is no error, taking it is one.
    data = traces.dump(traces.trace(*traces.launched("k", 0, 2000, 1000, 7)))
    odd = data.replace(b'"stream": 7', b'"stream": "\xff"', 1)
    assert odd != data
    assert read(tmp_path, odd).tables["spans"]["launch"].to_list() == [7, 7]


def test_args_of_an_unexpected_type_are_left_out(tmp_path: Path) -> None:
    events = [*traces.launched("k", 0, 2000, 1000, 7), traces.op("a", 5000, 10)]
    events[0]["args"]["correlation"] = {"what": 1}
    events[2]["args"] = [1, 2]
    reading = read(tmp_path, traces.trace(*events), layout="compact")
    assert reading.warnings == ()
    assert reading.tables["spans"]["launch"].to_list() == [-1, 7, -1]
