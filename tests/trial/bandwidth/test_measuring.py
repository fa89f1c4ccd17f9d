"""The measurement on one rank: rows of every size, what does not fit into the time, and what cannot be done."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="exchanging needs torch")
from dlprof.trial.bandwidth import exchanges, measuring  # noqa: E402 - after the check that there is torch
from dlprof.trial.bandwidth.joining import BrokenError, Ranks  # noqa: E402
from dlprof.trial.bandwidth.measuring import measure, pair_members  # noqa: E402
from dlprof.trial.bandwidth.plan import Plan  # noqa: E402
from dlprof.trial.bandwidth.results import OUT_OF_TIME, Row  # noqa: E402
from dlprof.trial.bandwidth.watching import Watch  # noqa: E402
from tests.fixtures import worlds  # noqa: E402

CPU = torch.device("cpu")
PLAN = Plan((1 << 10, 1 << 16), ("all_reduce", "all_to_all"), iterations=4, warmup=1)


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    """Make a process group of this process alone."""
    with worlds.of_one():
        yield


def rows(plan: Plan) -> list[Row]:
    with Watch(60) as watch:
        here = Ranks(0, 1, worlds.store(), watch)
        found, pairs = measure(plan, here, CPU, ["n1"], lambda _: None)
    assert pairs == []
    return found


def test_every_size_of_every_collective_has_its_samples_the_small_first() -> None:
    found = rows(PLAN)
    assert [(r.collective, r.bytes) for r in found] == [
        ("all_reduce", 1 << 10),
        ("all_to_all", 1 << 10),
        ("all_reduce", 1 << 16),
        ("all_to_all", 1 << 16),
    ]
    for row in found:
        assert row.correct
        assert (row.why, row.count) == ("", row.bytes // 4)
        ((*samples,),) = row.samples
        assert len(samples) == 4
        assert min(samples) > 0


@pytest.mark.parametrize(
    ("call_s", "samples", "calls"),
    [
        (1e-6, 20, 100),
        (2e-4, 20, 6),  # a millisecond
        (0.01, 20, 1),
        (1.0, 9, 1),
        (60.0, 3, 1),
    ],
)
def test_short_calls_are_repeated_and_long_ones_share_the_time(call_s: float, samples: int, calls: int) -> None:
    plan = replace(PLAN, sizes=(1, 4), iterations=20)
    with Watch(60) as watch:
        ours = measuring.Measurement(plan, Ranks(0, 1, worlds.store(), watch), CPU, lambda _: None)
    # Of 100 s the first of two sizes has a fifth, by its bytes, and each of two collectives half of that.
    found = ours._often(call_s, 0, 99.9)
    assert found == (samples, calls)


def test_what_does_not_fit_into_the_time_is_left_out_with_the_reason() -> None:
    assert {(r.why, r.samples) for r in rows(replace(PLAN, seconds=0.0))} == {(OUT_OF_TIME, ())}


def test_what_the_backend_cannot_do_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    real = exchanges.prepare

    def prepare(collective: str, *args: Any) -> exchanges.Exchange:
        made = real(collective, *args)

        def cannot() -> None:
            raise NotImplementedError("ProcessGroupX does not support alltoall_base")

        return replace(made, run=cannot) if collective == "all_to_all" else made

    monkeypatch.setattr(exchanges, "prepare", prepare)
    found = rows(PLAN)
    assert [r.why for r in found] == ["", "ProcessGroupX does not support alltoall_base", ""]


def test_too_little_memory_is_a_row_and_a_wrong_result_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = exchanges.prepare

    def prepare(collective: str, size: int, *args: Any) -> exchanges.Exchange:
        if size > 1 << 10:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] can't allocate memory")
        return replace(real(collective, size, *args), is_right=lambda: False)

    monkeypatch.setattr(exchanges, "prepare", prepare)
    found = rows(PLAN)
    assert [r.correct for r in found] == [False, False, None, None]
    assert "rank 0: [enforce fail at alloc_cpu.cpp:127] can't allocate memory" in {r.why for r in found}


def test_an_exchange_that_breaks_off_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    real = exchanges.prepare

    def prepare(collective: str, size: int, *args: Any) -> exchanges.Exchange:
        def breaks() -> None:
            raise RuntimeError("Connection closed by peer")

        made = real(collective, size, *args)
        return made if size == 1 << 10 else replace(made, run=breaks)

    monkeypatch.setattr(exchanges, "prepare", prepare)
    with pytest.raises(BrokenError, match=r"all_reduce of 65\.5 kB broke off: Connection closed by peer"):
        rows(PLAN)


def test_pairs_are_of_few_ranks_or_of_few_hosts() -> None:
    assert pair_members(["a", "a"]) == []
    assert pair_members(["a", "a", "b"]) == [0, 1, 2]
    many = [f"n{r // 8}" for r in range(32)]
    assert pair_members(many) == [0, 8, 16, 24]
    assert pair_members(["a"] * 32) == []
    assert pair_members([f"n{r}" for r in range(17)]) == []
