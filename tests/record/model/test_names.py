"""Modules have the path that a script's author knows, whatever wraps them, with their parameters and operators."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.fixtures import worlds

torch: Any = pytest.importorskip("torch", reason="recording needs torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from dlprof.record.model.names import Functions, class_of, names_of, rows_of, wrapped  # noqa: E402

nn = torch.nn


def model() -> Any:
    return nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 2, bias=False)))


def checkpointed_compiled_and_parallel() -> Any:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    inner = model()
    inner[1] = checkpoint_wrapper(inner[1])
    assert wrapped(inner) is None
    return nn.DataParallel(torch.compile(inner))


def sharded() -> Any:
    from torch.distributed.fsdp import fully_shard

    made = model()
    fully_shard(made[1])
    fully_shard(made)
    return made


def sharded_as_before() -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model(), device_id=torch.device("cpu"))


def shared() -> Any:
    one = nn.Linear(2, 2)
    return nn.Sequential(one, nn.ReLU(), one)


PATHS = [("", "Sequential"), ("0", "Linear"), ("1", "Sequential"), ("1.0", "ReLU"), ("1.1", "Linear")]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (model, PATHS),
        (checkpointed_compiled_and_parallel, PATHS),
        (sharded, PATHS),
        (sharded_as_before, PATHS),
        (shared, [("", "Sequential"), ("0", "Linear"), ("1", "ReLU")]),  # a module at two paths has the first
    ],
)
def test_paths_and_classes(make: Callable[[], Any], expected: list[tuple[str, str]]) -> None:
    with worlds.of_one():
        made = make()
        names = names_of(made)
        assert sorted(set(names.values())) == sorted(expected)
        assert (class_of(made), names[id(made)]) == ("Sequential", ("", "Sequential"))
        if wrapped(made) is None:
            assert list(names.values()) == expected  # in the order of named_modules
            assert [path for path, _ in expected] == [path for path, _ in made.named_modules()]


def told(rows: list[dict[str, Any]], *names: str) -> list[tuple[Any, ...]]:
    return [tuple(row[name] for name in ("path", *names)) for row in rows]


def test_each_module_has_its_own_parameters_its_kind_and_what_it_computes() -> None:
    rows = rows_of([model()], {}, {})
    assert told(rows, "kind", "parameters", "parameter_bytes") == [
        ("", "Sequential", 0, 0),
        ("0", "Linear", 40, 160),
        ("1", "Sequential", 0, 0),
        ("1.0", "ReLU", 0, 0),
        ("1.1", "Linear", 16, 64),
    ]
    assert {(row["bucket"], row["sharded"], row["forward_flops"], row["moved_bytes"]) for row in rows} == {
        (-1, 0, -1, -1)
    }
    flops = {("nn.Module: 0 (Linear)", "forward"): 7, ("nn.Module: 0 (Linear)", "backward"): 14, ("", "forward"): 3}
    counted = rows_of([model()], flops, {"nn.Module: 0 (Linear)": 96})
    computes = told(counted, "forward_flops", "recompute_flops", "backward_flops", "moved_bytes")
    assert (computes[1], computes[4]) == (("0", 7, 0, 14, 96), ("1.1", 0, 0, 0, 0))
    with worlds.of_one():
        units = rows_of([sharded()], {}, {})
    assert {row["path"] for row in units if row["sharded"]} == {"", "1"}
    assert told(units, "parameters") == told(rows, "parameters")


def test_a_shared_parameter_counts_once_and_models_beside_each_other_have_their_classes_as_names() -> None:
    tied: Any = nn.ModuleDict({"emb": nn.Embedding(10, 4), "head": nn.Linear(4, 10, bias=False)})
    tied["head"].weight = tied["emb"].weight
    assert told(rows_of([nn.DataParallel(tied)], {}, {}), "parameters") == [("", 0), ("emb", 40), ("head", 0)]
    first = model()
    rows = rows_of([first, nn.Linear(1, 1), copy.deepcopy(first), first[1]], {}, {})
    assert [row["path"] for row in rows if row["parameters"]] == [
        "(Sequential).0",
        "(Sequential).1.1",
        "(Linear)",
        "(Sequential#2).0",
        "(Sequential#2).1.1",
    ]


@pytest.mark.filterwarnings("ignore")
def test_buckets_are_those_of_ddp() -> None:
    def buckets_of(net: Any) -> dict[tuple[str, int], int]:
        return {(row["path"], row["bucket"]): row["parameters"] for row in rows_of([net], {}, {}) if row["parameters"]}

    def looks_for_unused(middle: Any) -> Any:
        net = nn.Sequential(nn.Linear(300, 1000), middle, nn.Linear(300, 1))
        return nn.parallel.DistributedDataParallel(net, bucket_cap_mb=1, find_unused_parameters=True)

    middle = nn.Linear(1000, 300)
    with worlds.of_one():
        net = nn.parallel.DistributedDataParallel(model(), bucket_cap_mb=1e-6)
        assert {bucket for _, bucket in buckets_of(net)} == {-1}  # before its first backward pass
        for _ in range(3):
            net(torch.ones(1, 4)).sum().backward()
        # Each bucket is full with one parameter; the last layer's gradient is there first.
        assert buckets_of(net) == {("1.1", 0): 16, ("0", 1): 8, ("0", 2): 32}
        # Where it looks for unused parameters it keeps the first buckets.
        found = buckets_of(looks_for_unused(middle))
        assert found == {("2", 0): 301, ("1", 0): 300, ("1", 1): 300_000, ("0", 1): 1000, ("0", 2): 300_000}
        # Of two data types each has buckets of its own.
        assert {bucket for _, bucket in buckets_of(looks_for_unused(middle.to(torch.bfloat16)))} == {-1}


@contextmanager
def dispatched(see: Callable[[str], None]) -> Iterator[None]:
    """Hand the name of each operator in the block to a function."""

    class Seeing(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            see(func._schema.name.removeprefix("aten::"))
            return func(*args, **(kwargs or {}))

    with Seeing():  # type: ignore[no-untyped-call]
        yield


def entered(inside: list[str], module: Any, name: str) -> Any:
    """Have a list name the module while it runs."""
    forward = module.forward

    def call(*args: Any) -> Any:
        inside.append(name)
        try:
            return forward(*args)
        finally:
            inside.pop()

    module.forward = call
    return module


@pytest.mark.parametrize("reentrant", [False, True])
def test_products_are_counted_by_module_and_part_the_middle_one_checkpointed(reentrant: bool) -> None:
    inside: list[str] = []
    first, middle, last = (entered(inside, nn.Linear(4, 4), name) for name in ("first", "middle", "last"))
    functions = Functions(lambda: inside[-1] if inside else "")
    found: Counter[tuple[str, str]] = Counter()
    with dispatched(lambda name: found.update([functions.module()] if name in ("mm", "addmm") else [])):
        x = torch.tanh(first(torch.ones(2, 4, requires_grad=True)))
        y = last(checkpoint(lambda x: middle(torch.tanh(middle(x))), x, use_reentrant=reentrant))
        (y @ torch.ones(4, 4)).sum().backward()
    # Each layer's gradients of its weights and of its input are a product each.
    assert [found[name, "backward"] for name in ("first", "middle", "last")] == [2, 4, 2]
    assert [found[name, "forward"] for name in ("first", "middle", "last")] == [1, 2, 1]
    assert found["middle", "recompute"] in ((2,) if reentrant else (1, 2))  # it ends as soon as all is there again
    assert (found["", "forward"], found["", "backward"]) == (1, 1)
    assert found.total() == 4 + 8 + 2 + found["middle", "recompute"]


def test_an_operator_without_a_function_does_not_take_that_of_the_module_before() -> None:
    # A BatchNorm counts its batches before it makes its function.
    inside: list[str] = []
    net = nn.Sequential(
        *(entered(inside, one, f"{n}") for n, one in enumerate((nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))))
    )
    functions = Functions(lambda: inside[-1] if inside else "")
    found: set[tuple[str, str, str]] = set()
    with dispatched(lambda name: found.add((name, *functions.module()))):
        net(torch.ones(2, 3, 8, 8)).sum().backward()
    assert {("convolution_backward", "0", "backward"), ("native_batch_norm_backward", "1", "backward")} <= found
