"""Tokens of a mixture of experts: which all-to-alls send them, who gets how many, and what even shares would save."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.communication.collectives import NO_SIZES
from dlprof.analysis.communication.experts import Balance, destinations, dispatches, expert_balance
from dlprof.analysis.communication.rules import expert_imbalance
from dlprof.analysis.engine import by_rank
from dlprof.analysis.estimate import Rule
from dlprof.analysis.stragglers.rules import straggler
from dlprof.errors import DoesNotApply, NotMeasured
from tests.fixtures import runs
from tests.fixtures.routed import routed
from tests.fixtures.ruled import Case, check, clear, found, inapplicable, table

FULL = ((100, 100, 100, 500), (100, 100, 200, 400))
SAME = ((100, 100, 100, 500), (100, 100, 100, 500))
ALIKE = ((100, 100, 100, 100), (200, 200, 200, 200))  # a longer batch in the second step
EVEN = ((200, 204, 196, 200), (200, 196, 204, 200))


def balance(folder: Path, made: list[dict[str, Any]]) -> Balance:
    found: Balance = runs.measured(runs.foreign(folder, *made), expert_balance).frame(expert_balance)
    return found


def test_even_shares_save_what_the_tokens_above_the_mean_take(tmp_path: Path) -> None:
    found = balance(tmp_path, routed(*FULL))
    # A token takes a microsecond: the fullest rank has 300 and 200 more than the mean of 200.
    assert found.saving_ns == pytest.approx(250_000, rel=1e-6)
    assert found.uneven == pytest.approx((500 / 200 + 400 / 200) / 2)
    assert (found.in_rows, found.dispatches) == (True, 1)
    assert by_rank(found.ranks, "tokens") == {0: 100, 1: 100, 2: 150, 3: 450}
    assert by_rank(found.ranks, "ratio") == pytest.approx({0: 0.5, 1: 0.5, 2: 0.75, 3: 2.25})
    assert by_rank(found.ranks, "expert_ns") == {0: 200_000, 1: 200_000, 2: 250_000, 3: 550_000}
    # Of the steps' 400 and 300 µs on the emptiest ranks; the fullest waits for nobody.
    assert by_rank(found.ranks, "wait_ns") == {0: 350_000, 1: 350_000, 2: 300_000, 3: 0}


@pytest.mark.parametrize(
    ("steps", "how", "saving_ns", "tokens"),
    [
        # A rank that is full in turn costs as much.
        (((100, 100, 100, 500), (500, 100, 100, 100)), {}, 300_000, [300, 100, 100, 300]),
        # Sizes of all pieces together tell elements, of which a token has eight.
        (FULL, {"split": False}, 250_000, [800, 800, 1_200, 3_600]),
        # Gradients go out as the tokens did and come back: a dispatch of its own.
        (FULL, {"backward": True}, 500_000, [200, 200, 300, 900]),
        # What a slow rank takes longer for the same tokens, 300 µs, is not the tokens'.
        (EVEN, {"slower": (1, 1, 1, 2)}, 0, [200, 200, 200, 200]),
    ],
    ids=["in turn", "elements", "backward", "slow"],
)
def test_what_uneven_tokens_cost(
    tmp_path: Path, steps: Any, how: dict[str, Any], saving_ns: float, tokens: list[int]
) -> None:
    found = balance(tmp_path, routed(*steps, **how))
    assert found.saving_ns == pytest.approx(saving_ns, rel=1e-6, abs=10_000)
    assert found.ranks["tokens"].tolist() == tokens
    assert found.in_rows == ("split" not in how)


@pytest.mark.parametrize(
    ("steps", "error", "why"),
    [
        (SAME, DoesNotApply, "do not change"),
        (ALIKE, DoesNotApply, "do not change"),
        (SAME[:1], NotMeasured, "one traced step"),
    ],
)
def test_what_is_no_routing_says_why(tmp_path: Path, steps: Any, error: type[Exception], why: str) -> None:
    with pytest.raises(error, match=why):
        balance(tmp_path, routed(*steps))


def test_without_sizes_nothing_is_known(tmp_path: Path) -> None:
    made = routed(*FULL)
    for event in (e for one in made for e in one["traceEvents"] if "In split size" in e["args"]):
        for key in ("In split size", "Out split size", "In msg nelems", "Out msg nelems"):
            del event["args"][key]
    with pytest.raises(NotMeasured) as raised:
        balance(tmp_path, made)
    assert str(raised.value) == NO_SIZES


def test_a_missing_rank_leaves_what_the_others_send(tmp_path: Path) -> None:
    run = runs.measured(runs.foreign(tmp_path, *routed(*FULL)[:2]), expert_balance, destinations)
    with pytest.raises(NotMeasured, match="2 of 4 ranks are missing"):
        run.frame(expert_balance)
    sent = run.frame(destinations)
    assert sent[sent["rank"] == 0]["tokens"].tolist() == [25, 25, 37.5, 112.5]


def test_four_all_to_alls_that_each_give_back_the_last_are_two_dispatches(tmp_path: Path) -> None:
    frame = runs.measured(runs.foreign(tmp_path, *routed(*FULL, backward=True)), dispatches).frame(dispatches)
    assert frame[frame["rank"] == 3][["row", "place", "given", "got"]].to_numpy().tolist() == [
        [0, 0, 200, 500],
        [2, 1, 200, 500],
        [4, 0, 200, 400],
        [6, 1, 200, 400],
    ]


def of(*steps: Sequence[int], **how: Any) -> Any:
    return lambda folder: runs.foreign(folder, *routed(*steps, **how))


ALWAYS = of((100, 100, 100, 500), (100, 100, 120, 480), (120, 100, 100, 480))
SLOW = of(*EVEN, (196, 200, 200, 204), slower=(1, 1, 1, 3))
NO_TOKENS = of(*[SAME[0]] * 3)
IMBALANCE = {
    "a full rank": found(
        ALWAYS, 1_000 * (300 + 280 + 280) / 3, "rank 3 gets most", ranks=[3], numerics=[False, True, True]
    ),
    "a rank that is full in turn": found(
        of((100, 100, 100, 500), (500, 100, 100, 100), (100, 500, 100, 100)), 300_000, "changes"
    ),
    # The fullest has 4 tokens, of a microsecond each, above the mean, in steps of 1.5 and of 2.8 ms.
    "even tokens": clear(of(*EVEN, (196, 200, 200, 204)), pytest.approx(4 / 1_504, rel=0.01)),
    "a slow rank": clear(SLOW, pytest.approx(4 / 2_801, rel=0.05)),
    "sizes that do not change": inapplicable(NO_TOKENS),
}
# What is a straggler then, and what is left to the rule above.
STRAGGLERS = {
    "a full rank": clear(ALWAYS, 0, "see expert_imbalance"),
    "a slow rank": found(SLOW),
    "sizes that do not change": found(NO_TOKENS),
}


@table({expert_imbalance: IMBALANCE, straggler: STRAGGLERS})
def test_uneven_tokens_are_told_from_stragglers(tmp_path: Path, rule: Rule, case: Case) -> None:
    made = check(rule, case, tmp_path)
    if made.id == "expert_imbalance" and made.state == "found":
        assert made.at_most
        assert ([c.training for c in made.changes], made.training) == ([False, True, True], False)
