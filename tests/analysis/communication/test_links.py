"""Links judged by large collectives: against their peak, against groups like them, and what may slow them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlprof.analysis.communication.bandwidth import links, slowing_settings
from dlprof.analysis.engine import Measured
from dlprof.errors import NotMeasured
from dlprof.result import Setting
from tests.fixtures import runs
from tests.fixtures.exchanges import grouped
from tests.fixtures.runs import MS

PAIRS = ((0, 1), (2, 3), (4, 5))


def linked(folder: Path, *args: Any, **keys: Any) -> Measured:
    return runs.measured(runs.foreign(folder, *grouped(*args, **keys)), links)


def test_below_an_eighth_of_the_peak_three_quarters_of_it_are_better(tmp_path: Path) -> None:
    (row,) = linked(tmp_path, [(0, 1)], [10 * MS]).frame(links).to_dict("records")
    assert (row["on"], row["each"], row["took_ns"]) == ((0, 1), 40e6, 10 * MS)
    assert (row["busbw"], row["of_peak"]) == pytest.approx((4e9, 4 / 450))
    assert row["better_ns"] == pytest.approx(10 * MS * 4 / 450 / 0.75)


def test_near_the_peak_nothing_is_better(tmp_path: Path) -> None:
    frame = linked(tmp_path, [(0, 1)], [10 * MS], elements=400_000_000).frame(links)
    assert frame["of_peak"].tolist() == pytest.approx([160 / 450])
    assert frame["better_ns"].isna().all()


def test_other_groups_like_it_are_compared_by_their_bytes(tmp_path: Path) -> None:
    sizes = [10_000_000, 10_000_000, 18_000_000]
    run = linked(tmp_path, PAIRS, [4 * MS, 4 * MS, 13 * MS], elements=sizes, device="Something else")
    frame = run.frame(links).set_index("members")
    assert frame["alike_ns"]["4,5"] == pytest.approx(4 * MS * 1.8)
    assert frame["better_ns"]["4,5"] == pytest.approx(4 * MS * 1.8)
    assert np.isnan(frame["better_ns"]["0,1"])


@pytest.mark.parametrize(
    ("groups", "keys"),
    [
        ([(0, 1), (2, 3)], {"hosts": {3: "node-2"}}),  # one within a host, one between two
        ([(0, 3), (1, 2)], {}),  # of other strides
        ([(0, 1), (2, 3)], {"elements": [10_000_000, 25_000_000]}),
    ],
)
def test_groups_that_differ_are_not_compared(tmp_path: Path, groups: Any, keys: dict[str, Any]) -> None:
    with pytest.raises(NotMeasured, match="no similar group"):
        linked(tmp_path, groups, [4 * MS, 10 * MS], device="", **keys).frame(links)


def test_only_settings_on_the_way_between_those_ranks_are_named(tmp_path: Path) -> None:
    env = {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1", "NCCL_SHM_DISABLE": "0", "NCCL_MAX_CTAS": "2"}
    made: list[Any] = [(m, [], {"env": env}) for m in grouped([(0, 1)], [MS])]
    job = runs.measured(runs.recorded(tmp_path / "run", *made), links).job
    within = [change.settings for change in slowing_settings(job, (0, 1), False)]
    assert within == [(Setting("NCCL_P2P_DISABLE", "1"),), (Setting("NCCL_MAX_CTAS", "2"),)]
    between = [change.settings for change in slowing_settings(job, (0, 1), True)]
    assert between == [(Setting("NCCL_IB_DISABLE", "1"),), (Setting("NCCL_MAX_CTAS", "2"),)]
