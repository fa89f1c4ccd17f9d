"""Bytes of tensors that share storages, consist of others, or have none, each counted once."""

from __future__ import annotations

from typing import Any

import pytest

from dlprof.record.model.state import Storages, of, plain, tensors_in

torch: Any = pytest.importorskip("torch", reason="recording needs torch")

OWNER = ("layer", "Linear")


def sums(storages: Storages) -> dict[str, list[int]]:
    """Return tensors, bytes and full bytes, by part."""
    return {row[0]: found for row, found in storages.rows.items()}


def test_views_have_their_own_bytes_and_the_first_what_is_left() -> None:
    whole = torch.zeros(100)
    storages = Storages()
    storages.add("parameter", OWNER, whole[:30])
    storages.add("gradient", OWNER, whole[30:90])
    storages.add("buffer", OWNER, whole[90:95].expand(7, 5))
    assert sums(storages) == {"parameter": [1, 120, 120], "gradient": [1, 240, 240], "buffer": [1, 40, 40]}
    storages.settle()
    assert sum(size for _, size, _ in storages.rows.values()) == whole.untyped_storage().nbytes()


def test_what_is_there_twice_is_counted_once() -> None:
    one = torch.zeros(8, dtype=torch.bfloat16)
    storages = Storages()
    for tensor in (one, one.view(2, 4), one.detach().t()):
        storages.add("activation", OWNER, tensor)
    storages.settle()
    assert storages.rows == {("activation", *OWNER, "cpu", "bfloat16", 0): [3, 16, 16]}


def test_what_a_view_keeps_alive_counts_whole() -> None:
    storages = Storages()
    storages.add("activation", OWNER, torch.zeros(1_000)[:1])
    storages.settle()
    assert sums(storages) == {"activation": [1, 4_000, 4_000]}


def test_sparse_tensors_and_those_made_of_others() -> None:
    sparse = torch.sparse_coo_tensor([[0, 5]], torch.ones(2, 3), (10, 3), check_invariants=True)
    jagged = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)
    storages = Storages()
    storages.add("gradient", OWNER, sparse)
    storages.add("activation", OWNER, jagged)
    by_type = {(row[0], row[4]): found[1] for row, found in storages.rows.items()}
    assert by_type["gradient", "int64"] == 2 * 8
    assert by_type["gradient", "float32"] == 6 * 4
    assert by_type["activation", "float32"] == 6 * 3 * 4


def test_tensors_without_memory_have_none() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.zeros(4))
    for tensor in (torch.zeros(4, device="meta"), fake, torch.zeros(2, 2).to_mkldnn()):
        assert [of(one) for one in plain(tensor)] == [None]


def test_a_storage_that_is_copied_on_write_is_not_copied() -> None:
    first = torch.zeros(1_000)
    second = torch._lazy_clone(first)
    assert of(first) is not None
    assert of(second) is not None
    assert torch._C._is_cow_tensor(first)
    assert torch._C._is_cow_tensor(second)


def test_tensors_within_functorch_are_looked_at_inside() -> None:
    found: list[Any] = []

    def look(x: Any) -> Any:
        found.extend(of(one) for one in plain(x))
        return x * 2

    whole = torch.zeros(3, 5)
    torch.vmap(look)(whole)
    assert found == [of(whole)]


def test_tensors_in_nested_values() -> None:
    class Own:
        tensor = torch.zeros(1)

    a, b = torch.zeros(1), torch.zeros(2)
    assert list(tensors_in([1, {"a": (a, "x")}, [[b]], Own(), None])) == [b, a]
    endless: list[Any] = [a]
    endless.append(endless)
    assert len(list(tensors_in(endless))) < 1_000
