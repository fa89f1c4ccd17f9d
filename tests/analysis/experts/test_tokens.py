"""Tokens of a mixture of experts: which all-to-alls send them, who gets how many, and what even shares would save."""

from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.communication.collectives import NO_SIZES
from dlprof.analysis.engine import by_rank
from dlprof.analysis.experts.tokens import Balance, destinations, dispatches, expert_balance
from dlprof.errors import DoesNotApply, NotMeasured
from tests.fixtures import runs
from tests.fixtures.routed import routed

FULL = ((100, 100, 100, 500), (100, 100, 200, 400))
TURNS = ((100, 100, 100, 500), (500, 100, 100, 100))
SAME = ((100, 100, 100, 500), (100, 100, 100, 500))
ALIKE = ((100, 100, 100, 100), (200, 200, 200, 200))  # a longer batch in the second step


def balance(folder: Path, made: list[dict[str, Any]]) -> Balance:
    found: Balance = runs.measured(runs.foreign(folder, *made), expert_balance).frame(expert_balance)
    return found


def test_even_shares_save_what_the_tokens_above_the_mean_take(tmp_path: Path) -> None:
    found = balance(tmp_path, routed(*FULL))
    # A token takes a microsecond: the fullest rank has 300 and 200 more than the mean of 200.
    assert found.saving_ns == pytest.approx(250_000, rel=1e-6)
    assert found.uneven == pytest.approx((500 / 200 + 400 / 200) / 2)
    assert found.in_rows
    assert found.dispatches == 1
    assert by_rank(found.ranks, "tokens") == {0: 100, 1: 100, 2: 150, 3: 450}
    assert by_rank(found.ranks, "ratio") == pytest.approx({0: 0.5, 1: 0.5, 2: 0.75, 3: 2.25})
    assert by_rank(found.ranks, "expert_ns") == {0: 200_000, 1: 200_000, 2: 250_000, 3: 550_000}
    # Of the steps' 400 and 300 µs on the emptiest ranks; the fullest waits for nobody.
    assert by_rank(found.ranks, "wait_ns") == {0: 350_000, 1: 350_000, 2: 300_000, 3: 0}


def test_a_rank_that_is_full_in_turn_costs_as_much(tmp_path: Path) -> None:
    found = balance(tmp_path, routed(*TURNS))
    assert found.saving_ns == pytest.approx(300_000, rel=1e-6)
    assert by_rank(found.ranks, "ratio") == pytest.approx({0: 1.5, 1: 0.5, 2: 0.5, 3: 1.5})


def test_what_a_slow_rank_takes_longer_for_the_same_tokens_is_not_the_tokens(tmp_path: Path) -> None:
    found = balance(tmp_path, routed((200, 204, 196, 200), (200, 196, 204, 200), slower=(1, 1, 1, 2)))
    assert found.uneven == pytest.approx(1.02)
    assert found.saving_ns < 10_000  # of 300 µs that it is slower


def test_sizes_of_all_pieces_together_tell_elements(tmp_path: Path) -> None:
    found = balance(tmp_path, routed(*FULL, split=False))
    assert not found.in_rows
    assert by_rank(found.ranks, "tokens") == {0: 800, 1: 800, 2: 1_200, 3: 3_600}
    assert found.saving_ns == pytest.approx(250_000, rel=1e-6)


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


def test_a_layers_backward_pass_is_a_dispatch_of_its_own(tmp_path: Path) -> None:
    """Gradients go out as the tokens did and come back: four all-to-alls that each give back the last are two."""
    made = routed(*FULL, backward=True)
    frame = runs.measured(runs.foreign(tmp_path, *made), dispatches).frame(dispatches)
    assert frame[frame["rank"] == 3][["row", "place", "given", "got"]].to_numpy().tolist() == [
        [0, 0, 200, 500],
        [2, 1, 200, 500],
        [4, 0, 200, 400],
        [6, 1, 200, 400],
    ]
    assert balance(tmp_path, made).saving_ns == pytest.approx(500_000, rel=1e-6)
