"""Idle cores: found with the gain of products and large operators; silent where cores are in use, or threads enough."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlprof.analysis.machine.rules.idle_cores import RULE
from dlprof.result import Setting
from tests.fixtures import runs, traces
from tests.fixtures.asking import ask
from tests.fixtures.processors import PRODUCTS, SPLIT, computing
from tests.fixtures.runs import MS


def test_one_thread_on_two_cores_is_found(tmp_path: Path) -> None:
    found = ask(RULE, computing(tmp_path))
    assert found.state == "found"
    expected = PRODUCTS * (1 - 2**-0.9) + SPLIT * (1 - 2**-0.7) - 2 * 5_000
    assert found.saving_ns == pytest.approx(expected, rel=0.01)
    # Never more than both on two cores at their best.
    assert found.saving_ns < (PRODUCTS + SPLIT) / 2
    assert [change.settings for change in found.changes] == [(Setting("num_threads", 1, 2),)]
    assert not found.changes[0].numerics
    assert "at most 30" in found.sure  # (400 + 200) / 2 ms
    assert found.evidence is not None
    assert found.evidence.rows[0][:5] == ("rank 0", 1, 2, pytest.approx(1.0), 2)


def test_cores_that_are_in_use_and_threads_enough_are_left_alone(tmp_path: Path) -> None:
    busy = ask(RULE, computing(tmp_path / "busy", used=1.9))
    assert (busy.state, busy.saving_ns) == ("clear", 0.0)
    assert busy.summary.startswith("1 thread and 2 cores a rank, of which 0.1")
    enough = ask(RULE, computing(tmp_path / "enough", threads=2, used=1.0))
    assert enough.state == "clear"


def test_without_a_trace_it_abstains_and_says_what_to_try(tmp_path: Path) -> None:
    said = ask(RULE, computing(tmp_path, traced=False))
    assert said.state == "not_measured"
    assert "torch.set_num_threads(2)" in said.why


def test_a_gpu_has_no_use_for_them(tmp_path: Path) -> None:
    path = runs.recorded(tmp_path / "gpu", (traces.training(), [], {"device": {"type": "cuda", "name": "A100"}}))
    assert ask(RULE, path).state == "does_not_apply"


def test_without_samples_it_abstains(tmp_path: Path) -> None:
    steps = [runs.light(n, 10 * MS) for n in range(30)]
    assert ask(RULE, runs.recorded(tmp_path / "run", (None, steps, runs.CPU))).state == "not_measured"
