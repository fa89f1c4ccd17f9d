"""Queued work that waits: found where the calls tell for what, said without a saving where they do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlprof.analysis.host.rules.queued_wait import RULE
from tests.fixtures import runs, traces
from tests.fixtures.asking import ask
from tests.fixtures.hosts import call, graph, waiting
from tests.fixtures.runs import MS


@pytest.mark.parametrize(
    ("name", "change"), [("cudaLaunchHostFunc", "off the stream"), ("cudaStreamWaitEvent", "record the event")]
)
def test_found_with_what_it_waits_for_and_what_to_change(tmp_path: Path, name: str, change: str) -> None:
    found = ask(RULE, runs.foreign(tmp_path, waiting(call(name))))
    assert found.state == "found"
    assert found.saving_ns == pytest.approx(0.5 * MS, rel=0.02)
    assert found.ranks == (0,)
    assert "second" in found.summary
    assert change in found.advice[0]
    assert found.evidence is not None


def test_a_node_within_a_graph_is_found_and_its_first_one_is_not_judged(tmp_path: Path) -> None:
    found = ask(RULE, runs.foreign(tmp_path / "node", graph(node=True)))
    assert (found.state, "capture without it" in found.advice[0]) == ("found", True)
    abstains = ask(RULE, runs.foreign(tmp_path / "start", graph(node=False)))
    assert abstains.state == "not_measured"
    assert "which cudaGraphLaunch had launched" in abstains.why


def test_what_nothing_tells_of_is_named_and_not_judged(tmp_path: Path) -> None:
    abstains = ask(RULE, runs.foreign(tmp_path, waiting()))
    assert abstains.state == "not_measured"
    assert "ends with second on stream device:7" in abstains.why


def test_short_gaps_are_no_waits(tmp_path: Path) -> None:
    clear = ask(RULE, runs.foreign(tmp_path, waiting(wait=15_000)))
    assert (clear.state, clear.share, clear.lost_share) == ("clear", 0.0, 0.0)


def test_waits_of_little_of_the_step_are_left_alone_whatever_for(tmp_path: Path) -> None:
    told = ask(RULE, runs.foreign(tmp_path / "told", waiting(call("cudaLaunchHostFunc"), wait=40_000)))
    assert told.state == "clear"
    assert told.lost_share == pytest.approx(0.04)
    assert told.saving_ns == pytest.approx(40_000 - 1_500)  # what the replay leaves between queued kernels
    assert [cost.rank for cost in told.by_rank] == [0]
    untold = ask(RULE, runs.foreign(tmp_path / "untold", waiting(wait=40_000)))
    assert (untold.state, untold.share) == ("clear", 0.0)
    assert untold.lost_share == pytest.approx(0.04)


def test_on_the_cpu_there_is_no_queue(tmp_path: Path) -> None:
    made = traces.trace(traces.step(0, 0, MS), traces.op("aten::mm", 0, MS), device="", backend="gloo", world_size=1)
    assert ask(RULE, runs.foreign(tmp_path, made)).state == "does_not_apply"
