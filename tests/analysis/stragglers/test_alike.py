"""Groups of like ranks, and the ranks that stand out, from what each spends of its step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from dlprof.analysis.engine import Maybe
from dlprof.analysis.engine.ranks import Job, RankAnswer
from dlprof.analysis.stragglers.alike import members
from dlprof.errors import DoesNotApply, NotMeasured
from dlprof.read.run import Run
from dlprof.result.figures import MANY, Member

MS = 1e6
RANKS = 256


def known(frame: pd.DataFrame | None) -> Maybe[pd.DataFrame]:
    """Return a measure that is there, or is not."""

    def ask() -> pd.DataFrame:
        if frame is None:
            raise NotMeasured("no pipeline")
        return frame

    return Maybe(ask)


def of(
    computation: Mapping[int, float], stages: int = 1, waits: Mapping[int, float] | None = None, ranks: int = RANKS
) -> dict[int, Member]:
    """Return the members of a job whose ranks compute 60 ms but for these, wait 30 ms but for these."""
    jitter = np.random.default_rng(3).normal(1.0, 0.002, ranks)
    mine = np.array([computation.get(r, 60.0) for r in range(ranks)]) * jitter * MS
    wait = np.array([(waits or {}).get(r, 30.0) for r in range(ranks)]) * MS
    parts = {"computation": mine, "communication": wait + 2 * MS}
    breakdown = pd.concat([pd.DataFrame({"rank": range(ranks), "category": c, "ns": ns}) for c, ns in parts.items()])
    own = pd.DataFrame({"rank": range(ranks), "wait_ns": wait})
    rows = [(r, f"{r // stages}", str(r % stages)) for r in range(ranks)]
    pipelines = pd.DataFrame(rows, columns=["rank", "ranks", "stages"]) if stages > 1 else None
    facts = {r: RankAnswer({}, {"host": f"node-{r // 8}"}, {}, ()) for r in range(ranks)}
    found = members.function(breakdown, own, known(pipelines), Job(Run(Path(), ()), facts))
    return {m.rank: m for m in found}


def test_like_ranks_are_one_group_and_the_slow_one_stands_out() -> None:
    found = of({77: 90.0}, waits={77: 0.0})
    assert list(found) == list(range(RANKS))
    assert {r for r, m in found.items() if m.category} == {77}
    slow = found[77]
    assert (slow.host, slow.group, slow.category) == ("node-9", "all ranks", "computation")
    assert slow.ns == pytest.approx(90 * MS, rel=0.02)
    assert slow.usual_ns == pytest.approx(60 * MS, rel=0.01)


def test_waiting_for_others_makes_no_rank_unlike_them() -> None:
    assert not any(m.category for m in of({}, waits={5: 0.0, 6: 80.0}).values())


def test_stages_of_pipelines_are_compared_with_their_like() -> None:
    longer = {r: 90.0 for r in range(RANKS) if r % 4 == 3}
    found = of(longer | {42: 85.0}, stages=4)
    assert Counter(m.group for m in found.values()) == {f"stage {n}": RANKS // 4 for n in range(4)}
    assert {r for r, m in found.items() if m.category} == {42}


def test_many_that_differ_alike_are_a_group_of_their_own() -> None:
    found = of(dict.fromkeys(range(100), 80.0))
    assert not any(m.category for m in found.values())
    assert Counter(m.group for m in found.values()) == {"all ranks": 156, "all ranks, more computation": 100}


def test_few_ranks_are_shown_one_by_one() -> None:
    with pytest.raises(DoesNotApply):
        of({}, ranks=MANY - 1)
