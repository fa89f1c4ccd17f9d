"""Who is late by the lengths of collectives: known culprits among few and many ranks, and none by chance."""

from pathlib import Path

import numpy as np
import pytest

from dlprof.analysis.stragglers.late_ranks import short_collectives
from dlprof.errors import NotMeasured
from tests.fixtures import runs
from tests.fixtures.exchanges import late_by
from tests.fixtures.runs import MS


@pytest.mark.parametrize("ranks", [4, 24, 120])
def test_the_late_rank_is_short_in_all_of_them(tmp_path: Path, ranks: int) -> None:
    rng = np.random.default_rng(ranks)
    late = [int(ns) for ns in rng.integers(0, 50_000, ranks)]
    late[2] = 2 * MS
    clocks = tuple(int(ns) for ns in rng.integers(0, 100 * MS, ranks))
    frame = (
        runs.measured(runs.foreign(tmp_path, *late_by(*late, skew=clocks)), short_collectives)
        .frame(short_collectives)
        .set_index("rank")
    )
    assert frame["short"].to_dict() == {r: 3 * (r == 2) for r in range(ranks)}
    assert frame["waited_ns"].to_dict() == pytest.approx({r: 2 * MS - ns for r, ns in enumerate(late)})


def test_chance_makes_no_outlier(tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    made = late_by(*(int(ns) for ns in rng.integers(0, 500_000, 8)), steps=1)
    frame = runs.measured(runs.foreign(tmp_path, *made, *[]), short_collectives)
    with pytest.raises(NotMeasured, match="too few"):
        frame.frame(short_collectives)
    alike = runs.foreign(tmp_path / "alike", *late_by(*range(0, 800_000, 100_000)))
    assert runs.measured(alike, short_collectives).frame(short_collectives)["short"].sum() == 0


def test_two_ranks_are_too_few(tmp_path: Path) -> None:
    with pytest.raises(NotMeasured, match="3 or more ranks"):
        runs.measured(runs.foreign(tmp_path, *late_by(0, MS)), short_collectives).frame(short_collectives)
