"""From an event of a trace to its row: kinds by name, exact times, odd values, copies, marks and collectives."""

from __future__ import annotations

import pickle
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from dlprof import schema
from dlprof.read.kineto import event_columns, events, patterns, torch_trace
from dlprof.read.kineto.event_columns import Numbers
from tests.fixtures import traces
from tests.fixtures.places import GOLDEN
from tests.fixtures.reading import only, read, spans_of
from tests.fixtures.traces import BASE_NS

# Names. Kernels are communication by the libraries that they come from.
KINDS = {
    ("device", "communication", "kernel"): (
        "ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)",
        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "void rcclKernel<1>(int)",
        "void ncclDevKernel_Generic_4(ncclDevComm*)",
        "void vllm::cross_device_reduce_1stage<__half, 2>(RankData*)",
        "void deep_ep::internode::dispatch<false, 4>(int4*)",
        "void deep_ep::internode_ll::combine<true>(void*)",
        "void deep_ep::intranode::combine<__nv_bfloat16, 4>(int)",
        "void dpsk::ep::internode::dispatch_ll<true, 3, 10, 7168>(void*, float*)",
        "void deep_ep::elastic::dispatch_impl<true, false, 24>(void*)",
        "void deep_ep::elastic::hybrid_combine_impl<true, 24>(void*)",
        "void hybrid_ep::dispatch_kernel<uint16_t>(hybrid_ep::param)",
        "void mori::moe::EpDispatchIntraNodeKernel<__hip_bfloat16>(int)",
        "nvshmemi_transfer_rma",
        "mscclpp::allreduce6<float>",
        "oneccl_allreduce_medium",
        "ncclSymkDevKernel_AllReduce_RSxLDMC_AGxSTMC_sum_bf16(ncclSymkDevWorkArgs4K)",
        "kuserbuffers_pushrecv(int, int, int, int*, int*, int)",
        "void userbuffers_fp16_sum_inplace_gpu_rw<8>(int, int, int)",
    ),
    ("device", "kernel", "Kernel"): (
        "void deep_ep::elastic::combine_reduce_epilogue_impl<true>(void*)",
        "void deep_ep::elastic::dispatch_copy_epilogue_impl<true>(void*)",
        "void deep_ep::layout::get_dispatch_layout<256, 32, 8>(long const*)",
        "hipLaunchByPtr_kernel",
        "void at::native::reduce_kernel<512, 1>(at::native::ReduceOp<float>)",
        "void gather_kernel<float>(int)",
    ),
    ("device", "copy", "gpu_memcpy"): ("Memcpy HtoD (Pinned -> Device)",),
    ("device", "copy", "Memcpy"): ("Memcpy DtoD (Device -> Device)",),
    ("device", "set", "Memset"): ("Memset (Device)",),
    ("device", "sync", "cuda_sync"): ("Event Sync",),
    ("device", "annotation", "gpu_user_annotation"): ("ProfilerStep#3", "nccl:all_reduce"),
    ("host", "op", "cpu_op"): ("aten::mm",),
    ("host", "op", "Operator"): ("aten::mm",),
    ("host", "communication", "cpu_op"): (
        "c10d::allreduce_",
        "_c10d_functional::all_gather_into_tensor",
        "c10d_functional::wait_tensor",
        "record_param_comms",
    ),
    ("host", "communication", "user_annotation"): ("gloo:all_reduce", "horovod:all_reduce", "nccl:_all_gather_base"),
    ("host", "annotation", "user_annotation"): ("nccl::not_a_mark", "FSDP::all_gather (layers.0)", "## forward ##"),
    ("host", "annotation", "Operator"): ("ProfilerStep#12", "Optimizer.step#SGD.step"),
    ("host", "fetch", "user_annotation"): (
        "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__",
        "dlprof::fetch",
    ),
    ("host", "fetch", "Operator"): ("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__",),
    ("host", "runtime", "cuda_runtime"): ("cudaLaunchKernel",),
    ("host", "runtime", "cuda_driver"): ("cuLaunchKernel",),
    ("host", "runtime", "Runtime"): ("cudaMemcpyAsync",),
    ("host", "runtime", "xpu_runtime"): ("urEnqueueKernelLaunch",),
    ("host", "python", "python_function"): ("train.py(12): main",),
}


@pytest.mark.parametrize(("expected", "names"), KINDS.items(), ids=str)
def test_work_is_told_apart_by_category_and_name(expected: tuple[str, str, str], names: tuple[str, ...]) -> None:
    side, kind, category = expected
    assert {name: patterns.kind_of(category, name) for name in names} == dict.fromkeys(names, (side, kind))


def test_categories_without_rows_are_told_from_unknown_ones() -> None:
    for category, known in (("Trace", True), ("quantum", False)):
        assert patterns.kind_of(category, "x") is None
        assert bool(patterns.NO_ROWS.fullmatch(category)) == known
    assert {p.kind for p in patterns.PATTERNS} <= set(schema.KINDS)


COLLECTIVES = {
    "all_reduce": (
        "allreduce",
        "allreduce_coalesced",
        "c10d::allreduce_",
        "ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*, unsigned long, ncclWork*)",
        "ncclSymkDevKernel_AllReduce_RSxLDMC_AGxSTMC_sum_bf16(ncclSymkDevWorkArgs4K)",
    ),
    "all_gather": ("_allgather_base", "all_gather_into_tensor", "ALLGATHER"),
    "reduce_scatter": (
        "_reduce_scatter_base",
        "c10d::_reduce_scatter_base_",
        "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclSymkDevKernel_ReduceScatter_LL_sum_bf16(ncclSymkDevWorkArgs4K)",
    ),
    "all_to_all": ("alltoallv", "all_to_all"),
    "broadcast": ("broadcast",),
    "reduce": ("_reduce_oop",),
    "gather": ("gather",),
    "scatter": ("scatter",),
    "send": ("send",),
    "recv": ("recv_anysource",),
    "barrier": ("barrier",),
    "send_recv": (
        "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)",
        "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)",
    ),
    "": ("_c10d_functional::wait_tensor", "nccl:coalesced"),
}


def test_collectives_have_one_name_each() -> None:
    for expected, written in COLLECTIVES.items():
        assert {text: patterns.collective_of(text) for text in written} == dict.fromkeys(written, expected)


NUMBERS: list[tuple[Any, list[int]]] = [([0, 1], [0, 1]), ("[0, 2]", [0, 2]), (None, []), (["a"], []), (3, [])]


@pytest.mark.parametrize(
    ("function", "text", "expected"),
    [
        (patterns.copy_of, "Memcpy HtoD (Pageable -> Device)", ("HtoD", "pageable")),
        (patterns.copy_of, "Memcpy DtoH (Device -> Pinned)", ("DtoH", "pinned")),
        (patterns.copy_of, "Memcpy HtoD (Host -> Device)", ("HtoD", "")),
        (patterns.copy_of, "Memcpy PtoP (Device -> Device)", ("PtoP", "")),
        (patterns.copy_of, "HtoD", ("HtoD", "")),
        (patterns.copy_of, "CopyDeviceToHost", ("DtoH", "")),
        (patterns.copy_of, "Memcpy", ("", "")),
        (patterns.element_type, "Float", ("float32", 4)),
        (patterns.element_type, "float", ("float32", 4)),
        (patterns.element_type, "c10::BFloat16", ("bfloat16", 2)),
        (patterns.element_type, "c10::Half", ("float16", 2)),
        (patterns.element_type, "Long", ("int64", 8)),
        (patterns.element_type, "long int", ("int64", 8)),
        (patterns.element_type, "Byte", ("uint8", 1)),
        (patterns.element_type, "Float8_e4m3fn", ("float8_e4m3fn", 1)),
        (patterns.element_type, "TensorList", ("TensorList", 0)),
        (patterns.rank_in, "rank-34.Jul_15_10_52_41.1074.pt.trace.json.gz", 34),
        (patterns.rank_in, "rank_3_trace.json", 3),
        (patterns.rank_in, "worker0.1623143089861.pt.trace.json.gz", 0),
        (patterns.rank_in, "trace_rank7.json", 7),
        (patterns.rank_in, "resnet50_workers4.json", None),
        (patterns.rank_in, "frank3.json", None),
        (patterns.rank_in, "node_1234.1623143089861.pt.trace.json", None),
        *((events.label, *case) for case in ((7, "7"), (7.0, "7"), ("stream 7", "7"), (" GPU 1", "1"), (7.5, "7.5"))),
        *((events.integer, *case) for case in ((7, 7), ("7", 7), (7.0, 7), (0, 0), ("x", -1), (None, -1), (2**63, -1))),
        *((events.numbers_of, *case) for case in NUMBERS),
        (events.numbers_of, "[0, 1, ..., 7]", []),  # abridged
    ],
)
def test_values_that_are_written_differently_mean_one_thing(function: Any, text: Any, expected: Any) -> None:
    assert function(text) == expected
    if function is events.integer:
        assert events.integers([text, 3]).tolist() == [expected, 3]


# Times.


@pytest.mark.parametrize("ns", [0, 1, 999, 1_000_001, 4_316_168_582_958_775, 7_889_237_999_999_999])
def test_times_from_a_base_are_exact(tmp_path: Path, ns: int) -> None:
    data = traces.dump(traces.trace(traces.op("a", 0, 0)))
    data = data.replace(b'"ts": 0.0', b'"ts": %d.%03d' % divmod(ns, 1000)).replace(b'"dur": 0.0', b'"dur": 1234567.891')
    row = only(read(tmp_path, data).tables["spans"])
    assert (row["start_ns"], row["dur_ns"]) == (BASE_NS + ns, 1_234_567_891)


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        (b"1694128201426556", 556_000),
        (b"1694128201426556.0", 556_000),
        (b"1694128201426556.123", 556_123),
        (b"1694128201426556.001", 556_001),
        (b"1694128201426556.999", 556_999),
        (b'"1694128201426556.123"', 556_123),
        (b"1.694128201426556123e15", 556_123),
    ],
)
def test_absolute_times_are_exact_beyond_float64(tmp_path: Path, text: bytes, ns: int) -> None:
    data = traces.dump(traces.trace(traces.op("a", 0, 7_001), base_ns=None)).replace(b'"ts": 0.0', b'"ts": ' + text)
    reading = read(tmp_path, data)
    row = only(reading.tables["spans"])
    assert (row["start_ns"], row["dur_ns"], reading.warnings) == (1_694_128_201_426_000_000 + ns, 7_001, ())


def test_times_stay_exact_where_blurred_ones_begin_late_in_the_file(tmp_path: Path) -> None:
    whole = [traces.op(f"w{i}", 0, 1000) | {"ts": 1_694_128_201_000_000 + i} for i in range(50)]
    data = traces.dump(traces.trace(*whole, traces.op("late", 0, 1000), base_ns=None))
    spans = read(tmp_path, data.replace(b'"ts": 0.0', b'"ts": 1694128201000050.321')).tables["spans"]
    assert spans["start_ns"].to_list() == [1_694_128_201_000_000_000 + i * 1000 + 321 * (i == 50) for i in range(51)]
    large = float(events.EXACT_US)
    assert events.nanoseconds([1.5, "2", "x"]).tolist() == [1500, 2000, events.NO_TIME]
    with pytest.raises(events.BlurredTimes):
        events.exact_nanoseconds([large])
    assert events.exact_nanoseconds([Decimal(large)]).tolist() == [int(large) * 1000]


def test_unusable_times_are_left_out_and_counted(tmp_path: Path) -> None:
    no_times: list[Any] = [None, "soon", 10**30, 1e300, []]
    no_durations: list[Any] = [-1, -0.001, "long", None, 4e14, 1e300]
    odd = [traces.op("bad", 0, 10) | {"ts": ts} for ts in no_times]
    odd += [traces.op("bad", 0, 10) | {"dur": dur} for dur in no_durations]
    reading = read(tmp_path, traces.trace(traces.op("good", 1000, 10), traces.op("empty", 2000, 0), *odd))
    assert reading.tables["spans"][["name", "dur_ns"]].to_numpy().tolist() == [["good", 10], ["empty", 0]]
    for words in ("5 events without a usable time", "6 events with a negative or absurd duration"):
        assert any(w.endswith(f"{words} are left out") for w in reading.warnings)


@pytest.mark.parametrize("other", [7, 7.001, "7.001", Decimal("7.001"), None])
def test_a_truth_is_one_whatever_stands_beside_it(other: Any) -> None:
    assert events.nanoseconds([True, other])[0] == 1_000
    assert events.nanoseconds([other, False])[1] == 0


# Odd values.


def test_values_written_as_text_are_numbers(tmp_path: Path) -> None:
    e = traces.copy(1000, 2000, 0) | {"ts": "1.0", "dur": "2.5", "pid": "0", "tid": "7"}
    e["args"] = {"device": "0", "stream": "7", "correlation": "12", "bytes": "4096"}
    row = only(spans_of(tmp_path, e))
    assert [row[k] for k in ("start_ns", "dur_ns", "launch", "bytes", "lane")] == [
        *(BASE_NS + 1000, 2500, 12, 4096, "device:7")
    ]


@pytest.mark.parametrize("args", [None, [], "text", [1, 2], {"correlation": [1], "bytes": {"a": 1}, "stream": None}])
def test_args_of_an_unexpected_type_cost_only_themselves(tmp_path: Path, args: Any) -> None:
    odd: list[Any] = [["not an event"], 5, "text", {"ph": "X", "cat": "Trace", "name": 3, "pid": [], "dur": "x"}]
    made = traces.trace(traces.kernel("k", 0, 5) | {"args": args}, *traces.launched("good", 10, 20, 1, 7))
    made["traceEvents"] += odd
    reading = read(tmp_path, made, layout="compact")
    assert reading.warnings == ()
    assert sorted(reading.tables["spans"]["launch"]) == [-1, 7, 7]


@pytest.mark.parametrize(
    ("was", "becomes"),
    [
        (b'"correlation": 7', b'"correlation": 7, "text": "\x01\xff \\q", "n": NaN'),
        (b'"stream": 7', b'"stream": "\xff"'),  # passing over such a text is no error, taking it is one
        (b'"pid": 4000', b'"pid": []'),
    ],
)
def test_bytes_that_are_no_json_cost_their_event_nothing_else(tmp_path: Path, was: bytes, becomes: bytes) -> None:
    made = traces.trace(*traces.launched("k", 0, 2000, 1000, 7), traces.op("a", 5000, 10), traces.op("b", 9000, 1))
    data = traces.dump(made).replace(b'"ts": 9.0', b'"ts": true')
    expected, found = (read(tmp_path, d).tables["spans"] for d in (data, data.replace(was, becomes, 1)))
    assert data.replace(was, becomes, 1) != data
    assert found["launch"].to_list() == expected["launch"].to_list() == [7, -1, 7, -1]
    assert found["start_ns"].to_list() == expected["start_ns"].to_list()
    assert BASE_NS + 1000 in set(found["start_ns"])  # true is 1 µs


def test_a_correlation_of_zero_links_nothing_and_the_old_key_counts(tmp_path: Path) -> None:
    old = traces.kernel("k2", 10, 5) | {"args": {"stream": 7, "correlation id": 33}}
    assert spans_of(tmp_path, traces.kernel("k1", 0, 5, correlation=0), old)["launch"].to_list() == [-1, 33]


def test_unknown_categories_are_left_out_with_a_warning_and_known_ones_without(tmp_path: Path) -> None:
    silent = [traces.event(cat, "x", 0, 5) for cat in ("Trace", "overhead")]
    silent += [{"ph": ph, "name": "x", "cat": "ac2g", "ts": 0, "pid": 1, "tid": 1, "id": 4} for ph in "sfi"]
    silent += [{"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "python"}}]
    reading = read(tmp_path, traces.trace(traces.op("a", 0, 1), *silent, *[traces.event("quantum", "x", 0, 5)] * 3))
    assert only(reading.tables["spans"])["name"] == "a"
    found = [re.sub(r"^.*json: ", "", w) for w in reading.warnings]
    assert found == ["3 events of the unknown category 'quantum' are left out"]


def test_begin_and_end_marks_become_spans(tmp_path: Path) -> None:
    at = [("B", "outer", 1_001, 1), ("B", "inner", 2_000, 1), ("B", "other", 1_500, 2), ("E", "", 3_003, 1)]
    at += [("E", "", 2_500, 2), ("E", "", 9_001, 1), ("E", "", 9_500, 1), ("B", "open", 9_600, 2)]
    keys = {"cat": "cpu_op", "pid": 1, "args": {"x": 1}}
    marks = [keys | {"ph": ph, "name": name, "ts": ns / 1000, "tid": tid} for ph, name, ns, tid in at]
    reading = read(tmp_path, traces.trace(*marks))
    assert reading.tables["spans"][["name", "start_ns", "dur_ns", "lane"]].to_numpy().tolist() == [
        ["outer", BASE_NS + 1_001, 8_000, "host:1"],
        ["other", BASE_NS + 1_500, 1_000, "host:2"],
        ["inner", BASE_NS + 2_000, 1_003, "host:1"],
    ]
    assert any("2 begin or end marks without a partner" in w for w in reading.warnings)


def test_several_processes_in_one_file_are_named_but_a_launchers_marks_are_no_process(tmp_path: Path) -> None:
    reading = read(tmp_path, traces.trace(traces.op("a", 0, 1), traces.op("b", 0, 1) | {"pid": 77}))
    assert any("2 processes" in w for w in reading.warnings)
    assert read(tmp_path, traces.trace(traces.op("a", 0, 1), traces.step(1, 0, 9) | {"pid": 77})).warnings == ()


# Copies, lanes, shapes and autograd's numbers.


def test_copies_have_direction_memory_and_bytes(tmp_path: Path) -> None:
    copies = [traces.copy(0, 5, 4096), traces.copy(10, 5, 8, "DtoH (Device -> Pinned)")]
    spans = spans_of(tmp_path, *copies, traces.clear(30, 5, 32), traces.kernel("k", 40, 5))
    assert spans[["copy", "memory", "bytes"]].to_numpy().tolist() == [
        *(["HtoD", "pageable", 4096], ["DtoH", "pinned", 8], ["", "", 32], ["", "", -1])
    ]
    # On AMD, the call has the bytes and the arguments have the direction.
    call = traces.call("hipMemcpyWithStream", 0, 5, 117)
    call["args"] |= {"size": "2560", "kind": "1"}
    moved = traces.on_device("gpu_memcpy", "CopyBuffer", 6, 5, 0, 2, correlation=117, kind="DtoH")
    row = spans_of(tmp_path, call, moved).iloc[1]
    assert (row["copy"], row["bytes"], row["launch"], row["lane"]) == ("DtoH", 2560, 117, "device:0")


def test_names_of_kinetos_first_releases(tmp_path: Path) -> None:
    host, device = {"tid": "4000"}, {"pid": 0, "tid": "stream 7", "stream": 7}
    made = traces.trace(
        traces.event("Operator", "aten::mm", 0, 10, **host),
        traces.event("Operator", "ProfilerStep#3", 0, 90, **host),
        traces.event("Runtime", "cudaLaunchKernel", 5, 2, correlation=9, **host),
        traces.event("Kernel", "gemm", 8, 30, device=0, correlation=9, **device),
        traces.event("Memcpy", "Memcpy HtoD (Pageable -> Device)", 40, 4, bytes=64, **device),
    )
    reading = read(tmp_path, made)
    assert reading.tables["spans"][["name", "kind", "lane", "launch"]].to_numpy().tolist() == [
        ["ProfilerStep#3", "annotation", "host:4000", -1],
        ["aten::mm", "op", "host:4000", -1],
        ["cudaLaunchKernel", "runtime", "host:4000", 9],
        ["gemm", "kernel", "device:7", 9],
        ["Memcpy HtoD (Pageable -> Device)", "copy", "device:7", -1],
    ]
    assert reading.tables["traced_steps"]["step"].to_list() == [3]


@pytest.mark.parametrize(("tid", "stream", "lane"), [(0, 0, "0"), ("stream 7", "7", "7"), (-1, -1, "-1")])
def test_streams_are_numbers_or_text(tmp_path: Path, tid: Any, stream: Any, lane: str) -> None:
    e = traces.on_device("kernel", "k", 0, 1, stream, 0) | {"tid": tid}
    assert only(spans_of(tmp_path, e))["lane"] == f"device:{lane}"


def test_the_device_with_most_kernels_has_no_number_in_its_lanes(tmp_path: Path) -> None:
    made = [traces.kernel(f"k{i}", i * 10, 5, device=3) for i in range(3)] + [traces.kernel("other", 0, 5, device=0)]
    made += [traces.event("gpu_user_annotation", "fwd", 0, 30, pid=3, tid=7) for _ in range(9)]
    spans = spans_of(tmp_path, *made)
    assert spans.loc[spans["name"] == "other", "lane"].to_list() == ["device0:7"]
    assert set(spans.loc[spans["name"] != "other", "lane"]) == {"device:7"}


def test_what_operators_multiply_has_its_shapes_and_type(tmp_path: Path) -> None:
    dims = {"Input Dims": [[512], [64, 128], [128, 512], []], "Input type": [*["c10::Half"] * 3, "Scalar"]}
    odd = {"Input Dims": "abridged", "Input type": ["float"]}
    ops = [traces.op("aten::addmm", 0, 5, **dims), traces.op("aten::add", 10, 5, **dims), traces.op("aten::mm", 20, 5)]
    spans = spans_of(tmp_path, *ops, traces.op("aten::cudnn_convolution", 30, 5, **odd))
    assert spans["shape"].to_list() == ["512 64x128 128x512", "", "", ""]
    assert spans["dtype"].to_list() == ["float16", "", "", ""]


def test_places_are_numbered_in_order_of_appearance() -> None:
    names, lanes = event_columns.Names(), event_columns.Lanes()
    places = event_columns.Places(names, lanes)
    assert [places["cpu_op", "aten::mm", 1, t] for t in (5, 6, 5)] == [0, 1, 0]
    assert places["kernel", "gemm", 0, 7] == 2
    assert (names.name, names.multiplies) == (["aten::mm", "gemm"], [True, False])
    # A device's lane depends on its arguments.
    assert (places.lane, list(lanes)) == ([0, 1, -1], [(False, 1, 5), (False, 1, 6)])


@pytest.mark.parametrize("named", [True, False])
def test_autograds_numbers_are_read_where_a_module_is_named(tmp_path: Path, named: bool) -> None:
    function = "autograd::engine::evaluate_function: "
    cases: list[tuple[str, dict[str, Any], int, str]] = [
        ("aten::addmm", traces.made_by(7), 7, ""),
        ("aten::relu", traces.made_by("8", "0"), 8, ""),
        ("aten::empty", traces.made_by(9), -1, ""),  # makes none
        ("aten::mul", traces.made_by(-1), -1, ""),
        (f"{function}ReluBackward0", traces.made_by(8, 3), 8, "3"),
        (f"{function}AddmmBackward0", {}, -1, ""),  # a hook comes first
        ("AddmmBackward0", traces.made_by(7, 1), 7, "1"),
        (f"{function}torch::autograd::AccumulateGrad", {}, -1, ""),
        ("aten::sum", traces.made_by(2**64, 2**40), -1, ""),
    ]
    ops = [
        traces.op(name, 10 * n, 10 - 5 * (name == "AddmmBackward0"), **args)
        for n, (name, args, _, _) in enumerate(cases)
    ]
    modules = [traces.annotation("nn.Module: layer (Linear)", 100, 5)] * named
    spans = spans_of(tmp_path, *ops, *modules)
    found = spans[["autograd", "forward_thread"]].to_numpy().tolist()[: len(cases)]
    assert found == [[number, thread] if named else [-1, ""] for _, _, number, thread in cases]


OPERATOR = b'{"External id": 3, "Sequence number": 7, "Fwd thread id": 0}'
FUNCTION = b'{\n  "Sequence number": 7,\n  "Fwd thread id": 2\n}'
NAN = b'{"Sequence number": 5, "x": NaN}'


def numbers(*added: tuple[list[int], list[bool], list[bytes], bool]) -> Numbers:
    made = Numbers()
    for rows, runs, args, wanted in added:
        made.add(np.array(rows), np.array(runs, dtype=bool), [msgspec.Raw(one) for one in args], wanted)
    return made


def rows_of(made: Numbers, wanted: bool = True) -> list[tuple[int, int, int]]:
    end = made.end(wanted)
    assert [str(column.dtype) for column in end] == ["int64", "int64", "int32"]
    return sorted(zip(end.row.tolist(), end.number.tolist(), end.maker.tolist(), strict=True))


@pytest.mark.parametrize("wanted", [(False, False), (False, True), (True, True)])
def test_autograds_numbers_are_the_same_read_at_once_or_later(wanted: tuple[bool, bool]) -> None:
    first = ([0, 2, 5], [False, False, True], [OPERATOR, b'{"External id": 4}', FUNCTION], wanted[0])
    assert rows_of(numbers(first, ([9], [False], [OPERATOR], wanted[1]))) == [(0, 7, 0), (5, 7, 2), (9, 7, 0)]


def test_autograds_numbers_of_no_module_of_another_process_and_of_odd_args() -> None:
    later = ([0], [False], [OPERATOR], False)
    assert rows_of(numbers(later), wanted=False) == []
    other = numbers(([0], [True], [FUNCTION], True), ([1], [False], [OPERATOR], False))
    joined = numbers(([1], [False], [OPERATOR], False))
    joined.join(pickle.loads(pickle.dumps(other)), 10)
    assert rows_of(joined) == [(1, 7, 0), (10, 7, 2), (11, 7, 0)]
    for odd, found in ((NAN, [(0, 5, 0), (1, 7, 0)]), (b"\0", [])):
        assert rows_of(numbers(([0, 1], [False, False], [odd, OPERATOR], False))) == found


# Collectives.

WHAT = ["kind", "collective", "group", "dtype", "bytes"]


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
def test_a_collective_has_its_verb_group_type_and_bytes(
    tmp_path: Path, name: str, elements: int, collective: str, size: int
) -> None:
    kernel = "ncclKernel_SendRecv"
    made = traces.collective(0, 5, elements, name=name, group="3", ranks=(0, 2, 4, 6), kernel_name=kernel)
    reading = read(tmp_path, traces.trace(made, world_size=8))
    row = only(reading.tables["spans"])
    assert [row[k] for k in WHAT] == ["communication", collective, "3", "float32", size]
    assert reading.facts["groups"]["3"] == {"desc": "mesh_3", "size": 4, "ranks": [0, 2, 4, 6]}
    assert reading.facts["groups"]["0"]["size"] == 8


def test_without_metadata_the_kernel_names_the_collective_and_the_ranks_the_group(tmp_path: Path) -> None:
    row = only(spans_of(tmp_path, traces.kernel("ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclWorkElem)", 0, 5)))
    assert [row[k] for k in WHAT] == ["communication", "send_recv", "", "", -1]
    made = [traces.collective(10 * n, 5, 8, ranks=ranks) for n, ranks in enumerate(((0, 1), (0, 2), (0, 1)))]
    for one in made:
        del one["args"]["Process Group Name"], one["args"]["Process Group Description"]
    first, second, third = spans_of(tmp_path, *made)["group"]
    assert (first == third, first != second, first.startswith("ranks-")) == (True, True, True)


def test_a_mark_around_a_collective_counts_its_input(tmp_path: Path) -> None:
    args: dict[str, Any] = {"Input Dims": [[8, 100]], "Input type": ["c10::BFloat16"]}
    marks = [traces.annotation("gloo:all_reduce", 0, 5, **args), traces.annotation("gloo:all_gather", 10, 5, **args)]
    marks += [traces.annotation("nccl:broadcast", 20, 5), traces.op("c10d::allreduce_", 30, 5, **args)]
    vast = traces.annotation("gloo:all_gather", 0, 5, **args | {"Input Dims": [[2**60]]})  # 2^62 bytes of two ranks
    assert only(spans_of(tmp_path, vast))["bytes"] == -1
    assert spans_of(tmp_path, *marks)[["kind", "collective", "dtype", "bytes"]].to_numpy().tolist() == [
        ["communication", "all_reduce", "bfloat16", 1600],
        ["communication", "all_gather", "bfloat16", 3200],
        ["communication", "broadcast", "", -1],
        ["communication", "all_reduce", "", -1],
    ]


@pytest.mark.parametrize(
    ("said", "pieces"),
    [
        ({"In split size": "[3, 5]", "Out split size": "[4, 1]"}, "3,5>4,1"),
        ({"In split size": [3, 5], "Out split size": [4, 1]}, "3,5>4,1"),
        ({"In split size": "[]", "Out split size": "[]", "Out msg nelems": 40}, "64>40"),
        # Abridged, as torch does with more than 30 ranks.
        ({"In split size": "[1, 2, ...]", "Out split size": "[1, 2, ...]"}, "64>64"),
        ({"In split size": "[-3, 5]", "Out split size": "[4, 1]"}, ""),
        ({"In split size": f"[{2**60}, 5]", "Out split size": "[4, 1]"}, ""),
        ({"In split size": "[3]", "Out split size": "nonsense", "Out msg nelems": None}, ""),
    ],
)
def test_an_all_to_all_has_what_goes_to_each_rank_and_comes_from_it(
    tmp_path: Path, said: dict[str, Any], pieces: str
) -> None:
    made = traces.collective(0, 5, 64, name="all_to_allv")
    made["args"] |= said
    assert only(spans_of(tmp_path, made))["shape"] == pieces


def test_the_inputs_of_a_call_have_the_pieces_too(tmp_path: Path) -> None:
    inputs = ["", "", "", "[4, 1]", "[3, 5]", "False", "-1"]
    made = traces.op("c10d::alltoall_base_", 0, 5, **{"Concrete Inputs": inputs})
    assert only(spans_of(tmp_path, made))["shape"] == "3,5>4,1"


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
def test_the_peer_of_a_send_is_a_rank_of_the_job(tmp_path: Path, name: str, args: dict[str, Any], peer: int) -> None:
    made = traces.trace(traces.op(name, 0, 10) | {"args": args}, rank=4, world_size=8)
    groups = made["distributedInfo"]["pg_config"] = [{"pg_name": "0", "pg_size": 2, "ranks": [4, 6]}]
    assert only(read(tmp_path, made).tables["spans"])["peer"] == peer
    if name == "c10d::send":  # of several groups nobody knows which one counts
        groups.append({"pg_name": "7", "pg_size": 2, "ranks": [2, 3]})
        assert only(read(tmp_path, made).tables["spans"])["peer"] == -1


@pytest.mark.parametrize("rank", [0, 1])
def test_gloos_calls_name_the_other_rank(rank: int) -> None:
    spans = torch_trace.read(GOLDEN / f"gloo_rank{rank}.json.gz").tables["spans"]
    assert spans.loc[spans["name"] == ("c10d::send", "c10d::recv_")[rank], "peer"].tolist() == [1 - rank]
