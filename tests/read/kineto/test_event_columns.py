"""The rows of a trace: what is left out is counted, marks become spans, copies tell their bytes."""

import re
from pathlib import Path
from typing import Any

import pytest

from dlprof.read.kineto import event_columns
from tests.fixtures import traces
from tests.fixtures.reading import only, read, spans_of
from tests.fixtures.traces import BASE_NS


def test_times_stay_exact_where_blurred_ones_begin_late_in_the_file(tmp_path: Path) -> None:
    whole = [traces.op(f"w{i}", 0, 1000) | {"ts": 1_694_128_201_000_000 + i} for i in range(50)]
    data = traces.dump(traces.trace(*whole, traces.op("late", 0, 1000), base_ns=None))
    data = data.replace(b'"ts": 0.0', b'"ts": 1694128201000050.321')
    spans = read(tmp_path, data).tables["spans"]
    assert spans["start_ns"].to_list() == [1_694_128_201_000_000_000 + i * 1000 for i in range(50)] + [
        1_694_128_201_000_050_321
    ]


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
    assert any("2 begin or end marks without a partner" in w for w in reading.warnings)


def test_several_processes_in_one_file_are_said_to_be_so(tmp_path: Path) -> None:
    reading = read(tmp_path, traces.trace(traces.op("a", 0, 1), traces.op("b", 0, 1) | {"pid": 77}))
    assert any("2 processes" in w for w in reading.warnings)
    # The mark of another process is no work: some launchers mark steps for their children.
    alone = read(tmp_path, traces.trace(traces.op("a", 0, 1), traces.step(1, 0, 9) | {"pid": 77}))
    assert alone.warnings == ()


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


def test_numbers_are_given_in_order_of_appearance_and_names_understood_once() -> None:
    names, lanes = event_columns.Names(), event_columns.Lanes()
    places = event_columns.Places(names, lanes)
    assert [places["cpu_op", "aten::mm", 1, t] for t in (5, 6, 5)] == [0, 1, 0]
    assert places["kernel", "gemm", 0, 7] == 2
    assert names.name == ["aten::mm", "gemm"]
    assert names.multiplies == [True, False]
    # A device's lane depends on its arguments.
    assert places.lane == [0, 1, -1]
    assert list(lanes) == [(False, 1, 5), (False, 1, 6)]


@pytest.mark.parametrize(
    "modules", [[traces.annotation("nn.Module: layer (Linear)", 100, 5)], []], ids=["named", "none"]
)
def test_autograd_numbers_what_it_makes_and_says_which_thread_made_it(
    tmp_path: Path, modules: list[dict[str, object]]
) -> None:
    spans = spans_of(
        tmp_path,
        traces.op("aten::addmm", 0, 10, **traces.made_by(7)),
        traces.op("aten::relu", 20, 10, **traces.made_by("8", "0")),
        traces.op("aten::empty", 30, 10, **traces.made_by(9)),  # makes none
        traces.op("aten::mul", 40, 10, **traces.made_by(-1)),
        traces.op("autograd::engine::evaluate_function: ReluBackward0", 50, 10, **traces.made_by(8, 3)),
        traces.op("autograd::engine::evaluate_function: AddmmBackward0", 60, 10),  # a hook comes first
        traces.op("AddmmBackward0", 65, 5, **traces.made_by(7, 1)),
        traces.op("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 70, 10),
        traces.op("aten::sum", 80, 10, **traces.made_by(2**64, 2**40)),
        traces.kernel("gemm", 90, 10),
        *modules,
    )
    numbers, makers = [7, 8, -1, -1, 8, -1, 7, -1, -1, -1], ["", "", "", "", "3", "", "1", "", "", ""]
    assert spans["autograd"].tolist()[:10] == (numbers if modules else [-1] * 10)
    assert spans["forward_thread"].tolist()[:10] == (makers if modules else [""] * 10)
