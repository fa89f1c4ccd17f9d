"""Ranks that wait for the one with the most tokens: what that costs, and which jobs it is not the matter with."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.stragglers.rules.unequal_lengths import RULE
from tests.fixtures import runs
from tests.fixtures.claims import case, claims
from tests.fixtures.runs import MS, light

STEPS = 203  # of which three warm up
FIXED, EACH = 20 * MS, 50_000  # ns of a step without tokens, and of each token


def drawn(rank: int) -> list[int]:
    """Return the tokens of a rank in each step: mostly few, and now and then many."""
    dice = random.Random(rank)
    return [40 + round(1_000 * dice.random() ** 3) for _ in range(STEPS)]


def wait(tokens: Sequence[int], mine: int) -> int:
    return max(tokens)


def wait_for_none(tokens: Sequence[int], mine: int) -> int:
    return mine


def differ_by_chance(tokens: Sequence[int], mine: int) -> int:
    return random.Random(tokens[0] + 1).randint(0, 1_000)


def training(*ranks: list[int], go: Callable[[Sequence[int], int], int] = wait, **facts: Any) -> Any:
    """Return what makes ranks with so many tokens in their steps, which take as long as the tokens ask for."""

    def make(folder: Path) -> Path:
        made = []
        for mine in ranks:
            lasts = [FIXED + EACH * go(all_, n) for all_, n in zip(zip(*ranks, strict=True), mine, strict=True)]
            steps = [light(k, ns, tokens=n) for k, (ns, n) in enumerate(zip(lasts, mine, strict=True))]
            made.append((None, steps, {**runs.CPU, "world_size": len(ranks), **facts}))
        return runs.recorded(folder / "run", *made)

    return make


def lost_ms(*ranks: list[int]) -> float:
    """Return what waiting for the most tokens costs the mean of the steady steps, beside the most of the means."""
    steady = [mine[3:] for mine in ranks]
    most = sum(map(max, zip(*steady, strict=True))) - max(map(sum, steady))
    return float(most / (STEPS - 3) * EACH / MS)


ONE, TWO, THREE = drawn(1), drawn(2), drawn(3)
LONGER = [n + 1_000 for n in TWO]


@pytest.mark.parametrize(
    ("make", "told"),
    [
        case("two ranks draw for themselves", training(ONE, TWO),
             saving=lost_ms(ONE, TWO), says=("1,000 more on one rank cost 50.0 ms", "100 % of how much",
                                             "group_by_length=True")),
        case("three ranks", training(ONE, TWO, THREE), saving=lost_ms(ONE, TWO, THREE)),
        case("the same on all", training(ONE, ONE), state="clear"),
        case("one always has more", training(ONE, LONGER), state="clear"),
        case("nobody waits", training(ONE, TWO, go=wait_for_none), state="clear"),
        case("something else", training(ONE, TWO, go=differ_by_chance), state="clear"),
        case("tokens were not counted", training([-1] * STEPS, [-1] * STEPS), state="not_measured",
             says="how many tokens"),
        case("a rank is missing", training(ONE, TWO, world_size=3), state="not_measured"),
        case("one rank", training(ONE), state="does_not_apply"),
        case("few steps", training(ONE[:20], TWO[:20]), state="not_measured", says="too few"),
    ],
)  # fmt: skip
def test_rule(tmp_path: Path, make: Callable[[Path], Path], told: dict[str, Any]) -> None:
    claims(RULE, make(tmp_path), told)
