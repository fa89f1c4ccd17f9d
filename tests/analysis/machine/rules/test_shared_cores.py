"""Ranks bound to the same cores: found where others are free; silent where each has its own, or nobody is bound."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlprof.analysis.diagnosis import diagnose
from dlprof.analysis.machine.rules.shared_cores import RULE
from dlprof.read.run import open_run
from tests.fixtures import runs
from tests.fixtures.asking import ask
from tests.fixtures.readings import crowded
from tests.fixtures.runs import MS


def test_two_ranks_on_the_same_two_of_eight_cores(tmp_path: Path) -> None:
    found = ask(RULE, crowded(tmp_path, 0.3, 0.4, threads=2, ours=2.0, bound=("0-1", "0-1")))
    assert found.state == "found"
    assert found.share == pytest.approx(0.3, abs=0.001)  # all wait for the rank that gains least
    assert found.at_most
    assert "may use 2 cores each, of which others may use 2 cores as well; 6 cores" in found.summary
    assert "--cpus-per-task=5" in found.advice[0]


def test_ranks_with_cores_of_their_own_are_left_alone(tmp_path: Path) -> None:
    assert ask(RULE, crowded(tmp_path / "own", 0.3, 0.3, threads=2, bound=("0-1", "2-3"))).state == "clear"
    # They share all that there is.
    assert ask(RULE, crowded(tmp_path / "all", 0.3, 0.3, threads=2, bound=("0-3", "0-7"))).state == "clear"


def test_unbound_ranks_have_none(tmp_path: Path) -> None:
    assert ask(RULE, crowded(tmp_path / "free", 0.3, 0.3, bound=("0-7", "0-7"))).state == "does_not_apply"
    assert ask(RULE, crowded(tmp_path / "old", 0.3, 0.3)).state == "not_measured"


def test_ranks_that_share_cores_and_never_wait_are_left_alone(tmp_path: Path) -> None:
    assert ask(RULE, crowded(tmp_path, 0.0, 0.0, threads=1, ours=1.0, bound=("0-1", "0-1"))).state == "clear"


def test_a_gpu_on_another_node_is_told_without_a_figure(tmp_path: Path) -> None:
    rows = [runs.light(n, 100 * MS) for n in range(30)]
    nodes = {"0": "0-3", "1": "4-7"}
    ranks = []
    for cores, node in (("0-1", 1), ("2-3", 1), ("4-5", 0), ("6-7", 1)):  # of which only the last is right
        cpu = {"count": 8, "allowed": cores, "nodes": nodes}
        ranks.append((None, rows, {"device": {**runs.A100, "index": 0, "node": node}, "host": "node-1", "cpu": cpu}))
    result = diagnose(open_run(runs.recorded(tmp_path / "run", *ranks)), (RULE,), jobs=1)
    (found,) = result.outcomes
    assert found.state == "not_measured"
    told = (
        "ranks 0 and 1 may only use cores of NUMA node 0, and their GPUs are at node 1;"
        " rank 2 may only use cores of NUMA node 1, and its GPU is at node 0: "
    )
    assert found.why.startswith(told)
    (warning,) = [text for text in result.run.warnings if "NUMA" in text]
    assert warning.startswith(told)
    assert "--cpu-bind" in warning
