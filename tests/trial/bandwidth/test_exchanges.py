"""Each collective in a world of one, where every result is known; and that a wrong result is seen."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch", reason="exchanging needs torch")
from dlprof.trial.bandwidth import exchanges  # noqa: E402 - after the check that there is torch
from dlprof.trial.bandwidth.plan import COLLECTIVES, DTYPES  # noqa: E402
from tests.fixtures import worlds  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    """Make a process group of this process alone."""
    with worlds.of_one():
        yield


@pytest.mark.parametrize("collective", [c for c in COLLECTIVES if c != "send_recv"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_right_result_is_right_and_a_wrong_one_is_seen(collective: str, dtype: str) -> None:
    exchange = exchanges.prepare(collective, 1_000, getattr(torch, dtype), CPU, 0, 1)
    assert exchange.bytes == exchange.count * DTYPES[dtype] <= 1_000
    exchange.run()
    assert exchange.is_right()
    exchange.sent[exchange.count // 2] += 1
    exchange.run()
    assert not exchange.is_right()


def test_what_a_rank_gives_to_a_sum_is_its_own_elements_alone() -> None:
    like = torch.empty(0, dtype=torch.int64)
    given = [exchanges._alone(like, rank, 3, 5) for rank in range(3)]
    assert torch.equal(sum(given), exchanges._numbers(like, 5).repeat(3))
    assert all(int((g != 0).sum()) == exchanges.PERIOD for g in given)


def test_sizes_are_shared_out_and_never_nothing() -> None:
    made = {c: exchanges.prepare(c, 100, torch.float32, CPU, 1, 4) for c in COLLECTIVES}
    assert {c: e.count for c, e in made.items()} == {
        "all_reduce": 24, "all_gather": 24, "reduce_scatter": 24, "all_to_all": 24, "send_recv": 25,
    }  # fmt: skip
    assert exchanges.prepare("all_gather", 1, torch.float32, CPU, 0, 4).count == 4


def test_every_number_is_held_by_every_type() -> None:
    for dtype in DTYPES:
        numbers = exchanges._numbers(torch.empty(0, dtype=getattr(torch, dtype)), 40)
        assert sorted(numbers.to(torch.int64).tolist()) == list(range(1, exchanges.PERIOD + 1))
