"""DataParallel: found by its copying, silent without it, abstaining where nothing tells."""

from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.communication.rules.data_parallel import RULE
from tests.fixtures import runs, traces
from tests.fixtures.asking import ask
from tests.fixtures.runs import MS


def trained(folder: Path, copying: int) -> Path:
    """Write three steps of 1 ms, in each of which DataParallel copies the model for so many ns."""
    events: list[Any] = []
    for n in range(3):
        t = n * MS
        events += [
            traces.step(n, t, MS),
            traces.annotation("DataParallel.forward", t, 500_000),
            traces.op("Broadcast", t, copying),
            traces.launched("gemm", t + 100_000, t + 300_000, 700_000, n + 1),
        ]
    return runs.foreign(folder, traces.trace(*events, world_size=1))


def test_found_with_what_it_copies(tmp_path: Path) -> None:
    found = ask(RULE, trained(tmp_path, 250_000))
    assert found.state == "found"
    assert found.saving_ns == pytest.approx(250_000)
    assert "DistributedDataParallel" in found.advice[0]


def test_a_little_copying_is_left_alone(tmp_path: Path) -> None:
    clear = ask(RULE, trained(tmp_path, 10_000))
    assert clear.state == "clear"
    assert clear.share == pytest.approx(0.01)
    assert [cost.ns for cost in clear.by_rank] == pytest.approx([10_000])


def test_ranks_of_their_own_are_left_alone(tmp_path: Path) -> None:
    assert ask(RULE, runs.foreign(tmp_path, traces.training(3))).state == "does_not_apply"


def test_a_recorded_model_without_it_is_left_alone(tmp_path: Path) -> None:
    facts = {"device": {"type": "cuda"}, "models": [{"parameters": 5, "data_parallel": False}]}
    path = runs.recorded(tmp_path / "run", (traces.training(3), [], facts))
    assert ask(RULE, path).state == "does_not_apply"


def test_a_single_process_whose_trace_shows_none_has_none(tmp_path: Path) -> None:
    assert ask(RULE, runs.foreign(tmp_path, traces.training(3, world_size=1))).state == "does_not_apply"
