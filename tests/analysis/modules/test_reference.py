"""Modules of a real trace that others recorded with stacks: the sums are those that an independent program made.

It is not part of this project: without it these tests skip.
"""

from __future__ import annotations

import pytest

from dlprof.analysis import intervals as iv
from dlprof.analysis.engine import RankData
from dlprof.analysis.modules.rows import module_rows
from dlprof.analysis.modules.work import module_work
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.device import device_sets, device_work
from dlprof.analysis.timeline.steps import launched_within, timing
from dlprof.read.run import open_run
from tests.fixtures.places import TRACES

RESNET = TRACES / "gpu_async/mi300_resnet.json.gz"

pytestmark = pytest.mark.skipif(not RESNET.is_file(), reason="the reference traces are not here (../shared/traces)")


@pytest.fixture(scope="module")
def rank() -> RankData:
    return RankData(open_run(RESNET).ranks[0])


def test_all_work_of_the_steps_is_some_modules_or_outside(rank: RankData) -> None:
    work, steps = rank.once(module_work), rank.once(timing)
    mine = rank.once(launched_within) >= 0
    n = len(steps.windows)
    assert work["device_ns"].sum() * n == pytest.approx(rank.once(device_work)["dur_ns"].to_numpy()[mine].sum())
    busy = iv.intersect(rank.once(device_sets).busy, iv.merge(steps.windows))
    assert work["exposed_ns"].sum() * n == pytest.approx(iv.total(busy))


def test_a_resnets_convolutions_and_norms_have_most_of_its_computing(rank: RankData) -> None:
    work = rank.once(module_work)
    computing = work[work["part"].isin(["forward", "recompute", "backward"])]
    by_kind = computing.groupby("kind")["device_ns"].sum() / 1e6
    # Computation is 6.4 ms a step (GPU.md §1 of the reference), with copies and what is outside of modules 7.1.
    assert by_kind.sum() == pytest.approx(6.7, abs=0.3)
    assert by_kind["Conv2d"] == pytest.approx(3.5, abs=0.3)
    assert by_kind["BatchNorm2d"] == pytest.approx(2.4, abs=0.3)
    assert by_kind.nlargest(2).index.tolist() == ["Conv2d", "BatchNorm2d"]
    exchanged = work[work["part"] == "communication"]
    assert exchanged["device_ns"].sum() / 1e6 == pytest.approx(15.7, abs=0.1)
    assert exchanged["exposed_ns"].sum() / 1e6 == pytest.approx(11.8, abs=0.1)


def test_its_blocks_are_checkpointed_and_run_again(rank: RankData) -> None:
    work = rank.once(module_work).set_index(["path", "part"])
    again = work[work.index.get_level_values("part") == "recompute"]
    assert len({path for path, _ in again.index}) > 30
    for path in ("Sequential_0.BasicBlock_0.Conv2d_1", "Sequential_5.BasicBlock_7.Conv2d_19"):
        first, second = work.loc[(path, "forward"), "device_ns"], work.loc[(path, "recompute"), "device_ns"]
        assert second == pytest.approx(first, rel=0.15)


def test_each_kernel_that_a_function_of_the_backward_pass_launched_has_a_module(rank: RankData) -> None:
    rows, spans = rank.once(module_rows), rank.table("spans")
    backward = host.is_kind(spans, "kernel") & (rows["part"] == "backward").to_numpy()
    without = backward & (rows["module"].to_numpy() < 0)
    took = spans["dur_ns"].to_numpy()
    assert took[without].sum() < 0.02 * took[backward].sum()
