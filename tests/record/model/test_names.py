"""Modules have the path that a script's author knows them by, whatever wraps them."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from dlprof.record.model.names import class_of, names_of, wrapped  # noqa: E402
from tests.fixtures import worlds  # noqa: E402


def model() -> Any:
    nn = torch.nn
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2)))


PATHS = [
    ("", "Sequential"),
    ("0", "Linear"),
    ("1", "Sequential"),
    ("1.0", "ReLU"),
    ("1.1", "Linear"),
]


def test_a_plain_model_has_the_names_of_named_modules() -> None:
    plain = model()
    assert list(names_of(plain).values()) == PATHS
    assert [path for path, _ in names_of(plain).values()] == [path for path, _ in plain.named_modules()]


def test_wrappers_have_the_name_of_what_they_wrap() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    inner = model()
    inner[1] = checkpoint_wrapper(inner[1])
    outer = torch.nn.DataParallel(torch.compile(inner))
    names = names_of(outer)
    assert sorted(set(names.values())) == PATHS
    assert names[id(outer)] == names[id(inner)] == ("", "Sequential")
    assert wrapped(inner) is None
    assert wrapped(outer) is not None


def test_a_module_at_two_paths_has_the_first() -> None:
    shared = torch.nn.Linear(2, 2)
    assert list(names_of(torch.nn.Sequential(shared, torch.nn.ReLU(), shared)).values()) == [
        ("", "Sequential"),
        ("0", "Linear"),
        ("1", "ReLU"),
    ]


def test_sharded_modules_have_the_scripts_class() -> None:
    with worlds.of_one():
        from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

        sharded = model()
        fully_shard(sharded[1])
        fully_shard(sharded)
        assert list(names_of(sharded).values()) == PATHS
        assert class_of(sharded) == "Sequential"
        older = FullyShardedDataParallel(model(), device_id=torch.device("cpu"))
        assert sorted(set(names_of(older).values())) == PATHS
