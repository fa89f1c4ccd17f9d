"""What many events repeat is understood once: names, threads and streams, shapes."""

from pathlib import Path
from typing import Any

import pytest

from dlprof.read.kineto import numbering
from tests.fixtures import traces
from tests.fixtures.reading import only, read, spans_of


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
    names, lanes = numbering.Names(), numbering.Codes()
    places = numbering.Places(names, lanes)
    assert [places["cpu_op", "aten::mm", 1, t] for t in (5, 6, 5)] == [0, 1, 0]
    assert places["kernel", "gemm", 0, 7] == 2
    assert names.name == ["aten::mm", "gemm"]
    assert names.multiplies == [True, False]
    # A device's lane depends on its arguments.
    assert places.lane == [0, 1, -1]
    assert list(lanes) == [(False, 1, 5), (False, 1, 6)]
