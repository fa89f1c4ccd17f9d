"""What events tell of collectives: the verb, the group, the bytes, and between whom."""

from pathlib import Path
from typing import Any

import pytest

from dlprof.read.kineto import torch_trace
from tests.fixtures import traces
from tests.fixtures.places import GOLDEN
from tests.fixtures.reading import only, read, spans_of


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
def test_an_all_to_all_tells_what_goes_to_each_rank_and_comes_from_it(
    tmp_path: Path, said: dict[str, Any], pieces: str
) -> None:
    made = traces.collective(0, 5, 64, name="all_to_allv")
    made["args"] |= said
    assert only(spans_of(tmp_path, made))["shape"] == pieces


def test_inputs_of_a_call_tell_it_too(tmp_path: Path) -> None:
    inputs = ["", "", "", "[4, 1]", "[3, 5]", "False", "-1"]
    made = traces.op("c10d::alltoall_base_", 0, 5, **{"Concrete Inputs": inputs})
    assert only(spans_of(tmp_path, made))["shape"] == "3,5>4,1"


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
