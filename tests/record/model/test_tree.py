"""The modules of a model have their own parameters, and the exchange that moves them."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.fixtures import worlds

torch: Any = pytest.importorskip("torch", reason="recording needs torch")

from dlprof.record.model.names import rows_of  # noqa: E402


def model() -> Any:
    nn = torch.nn
    return nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 2, bias=False)))


ROWS = [("", 0, 0), ("0", 40, 160), ("1", 0, 0), ("1.0", 0, 0), ("1.1", 16, 64)]


def told(rows: list[dict[str, Any]]) -> list[tuple[str, int, int]]:
    return [(row["path"], row["parameters"], row["parameter_bytes"]) for row in rows]


def test_each_module_has_its_own_parameters() -> None:
    rows = rows_of([model()], {}, {})
    assert told(rows) == ROWS
    assert [row["kind"] for row in rows] == ["Sequential", "Linear", "Sequential", "ReLU", "Linear"]
    assert {(row["bucket"], row["sharded"]) for row in rows} == {(-1, 0)}


def test_a_wrapper_is_no_module_of_its_own_and_a_shared_parameter_counts_once() -> None:
    tied: Any = torch.nn.ModuleDict({"emb": torch.nn.Embedding(10, 4), "head": torch.nn.Linear(4, 10, bias=False)})
    tied["head"].weight = tied["emb"].weight
    rows = rows_of([torch.nn.DataParallel(tied)], {}, {})
    assert told(rows) == [("", 0, 0), ("emb", 40, 160), ("head", 0, 0)]


def test_models_that_stand_beside_each_other_have_their_classes_as_names() -> None:
    first = model()
    rows = rows_of([first, torch.nn.Linear(1, 1), copy.deepcopy(first), first[1]], {}, {})
    assert [row["path"] for row in rows if row["parameters"]] == [
        "(Sequential).0",
        "(Sequential).1.1",
        "(Linear)",
        "(Sequential#2).0",
        "(Sequential#2).1.1",
    ]


@pytest.mark.filterwarnings("ignore")
def test_buckets_are_those_that_ddp_made_behind_its_first_backward_pass() -> None:
    with worlds.of_one():
        wrapped = torch.nn.parallel.DistributedDataParallel(model(), bucket_cap_mb=1e-6)
        assert {row["bucket"] for row in rows_of([wrapped], {}, {})} == {-1}  # before it
        for _ in range(3):
            wrapped(torch.ones(1, 4)).sum().backward()
        found = {
            (row["path"], row["bucket"]): row["parameters"] for row in rows_of([wrapped], {}, {}) if row["parameters"]
        }
    # Each bucket is full with one parameter; the last layer's gradient is there first.
    assert found == {("1.1", 0): 16, ("0", 1): 8, ("0", 2): 32}


@pytest.mark.filterwarnings("ignore")
def test_where_ddp_looks_for_unused_parameters_it_keeps_the_first_buckets() -> None:
    def buckets_of(first: Any, **more: Any) -> dict[tuple[str, int], int]:
        kinds = torch.nn.Linear(300, 1000), first, torch.nn.Linear(300, 1)
        net = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*kinds), **more)
        return {(row["path"], row["bucket"]): row["parameters"] for row in rows_of([net], {}, {}) if row["parameters"]}

    again = torch.nn.Linear(1000, 300)
    with worlds.of_one():
        found = buckets_of(again, bucket_cap_mb=1, find_unused_parameters=True)
        assert found == {("2", 0): 301, ("1", 0): 300, ("1", 1): 300_000, ("0", 1): 1000, ("0", 2): 300_000}
        # Of two data types each has buckets of its own.
        mixed = buckets_of(again.to(torch.bfloat16), bucket_cap_mb=1, find_unused_parameters=True)
    assert {bucket for _, bucket in mixed} == {-1}


@pytest.mark.filterwarnings("ignore")
def test_the_units_of_fsdp_are_marked() -> None:
    from torch.distributed.fsdp import fully_shard

    with worlds.of_one():
        sharded = model()
        fully_shard(sharded[1])
        fully_shard(sharded)
        rows = rows_of([sharded], {}, {})
    assert {row["path"] for row in rows if row["sharded"]} == {"", "1"}
    assert told(rows) == ROWS


def test_what_a_step_computes_stands_beside_the_module_that_computes_it() -> None:
    flops = {("nn.Module: 0 (Linear)", "forward"): 7, ("nn.Module: 0 (Linear)", "backward"): 14, ("", "forward"): 3}
    rows = {row["path"]: row for row in rows_of([model()], flops, {"nn.Module: 0 (Linear)": 96})}
    assert [rows["0"][f"{part}_flops"] for part in ("forward", "recompute", "backward")] == [7, 0, 14]
    assert (rows["1.1"]["forward_flops"], rows["1.1"]["moved_bytes"], rows["0"]["moved_bytes"]) == (0, 0, 96)
    assert {row[name] for row in rows_of([model()], {}, {}) for name in ("forward_flops", "moved_bytes")} == {-1}
