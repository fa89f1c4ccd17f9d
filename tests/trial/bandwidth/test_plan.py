"""Sizes and collectives as words, and a plan as text for another process."""

from __future__ import annotations

import pytest

from dlprof.errors import DlprofError
from dlprof.trial.bandwidth.plan import COLLECTIVES, Plan, collectives, from_text, sizes


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("1K..64K", (1 << 10, 1 << 12, 1 << 14, 1 << 16)),
        ("1K..8k*2", (1 << 10, 1 << 11, 1 << 12, 1 << 13)),
        ("1K..5K", (1 << 10, 1 << 12)),
        ("100,1M,64KiB,100", (100, 1 << 16, 1 << 20)),
        ("2GB", (2 << 30,)),
    ],
)
def test_sizes(text: str, found: tuple[int, ...]) -> None:
    assert sizes(text) == found


@pytest.mark.parametrize(
    "text", ["", "K", "0", "-1", "1K..", "4K..1K", "1K..1M*1", "1Q", "9" * 30, "2T", "1..1T*2,3..1T*2"]
)
def test_no_sizes(text: str) -> None:
    with pytest.raises(DlprofError):
        sizes(text)


def test_collectives_in_one_order() -> None:
    assert collectives("send-recv, all_reduce") == ("all_reduce", "send_recv")
    with pytest.raises(DlprofError, match="there are: all_reduce"):
        collectives("all_reduce,broadcast")


def test_a_plan_travels_as_text() -> None:
    plan = Plan(sizes("1K..1M"), COLLECTIVES[:2], 7, 2, "bfloat16", "gloo", 12.5, 3.0)
    assert from_text(plan.to_text()) == plan
