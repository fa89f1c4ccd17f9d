"""Copies from pageable memory: found, silent on pinned or hidden or tiny ones, abstaining without a device."""

from pathlib import Path
from typing import Any

import pytest

from dlprof.rules.pageable_copy import RULE
from tests import runs, traces
from tests.rules.asking import ask
from tests.runs import MS


def batches(folder: Path, kinds: str = "HtoD (Pageable -> Device)", size: int = 10_000_000, beside: int = 0) -> Path:
    """Write two steps of 1 ms: 0.2 ms of copying, `beside` ns of them behind computation, and 0.8 ms of computing."""
    events: list[Any] = []
    for n in range(2):
        t = n * MS
        events += [
            traces.step(n, t, MS),
            traces.copy(t, 200_000, size, kinds),
            traces.kernel("gemm", t + 200_000 - beside, 800_000 + beside),
        ]
    return runs.foreign(folder, traces.trace(*events, world_size=1))


def test_found_with_bytes_and_rate(tmp_path: Path) -> None:
    found = ask(RULE, batches(tmp_path))
    assert found.state == "found"
    assert found.saving_ns == pytest.approx(200_000)
    assert found.share == pytest.approx(0.2)
    assert "50 GB/s" in found.summary
    assert any("pin_memory=True" in a for a in found.advice)


def test_pinned_copies_are_left_alone(tmp_path: Path) -> None:
    assert ask(RULE, batches(tmp_path, "HtoD (Pinned -> Device)")).state == "clear"


def test_hidden_copies_are_left_alone(tmp_path: Path) -> None:
    assert ask(RULE, batches(tmp_path, beside=190_000)).state == "clear"


def test_copies_of_a_few_bytes_are_left_alone(tmp_path: Path) -> None:
    assert ask(RULE, batches(tmp_path, size=8)).state == "clear"


def test_what_comes_back_is_another_rules_business(tmp_path: Path) -> None:
    assert ask(RULE, batches(tmp_path, "DtoH (Device -> Pageable)")).state == "clear"


@pytest.mark.parametrize(("hidden", "room"), [(0, 300_000), (100_000, 200_000)])
def test_no_more_is_gained_than_there_is_computation_left_to_hide_behind(
    tmp_path: Path, hidden: int, room: int
) -> None:
    """Of 0.3 ms that it computes a part hides another copy already."""
    made = traces.trace(
        traces.step(1, 0, MS),
        traces.copy(0, 700_000, 10_000_000),
        traces.kernel("gemm", 700_000, 300_000),
        *([traces.copy(800_000, hidden, 1_000_000, "HtoD (Pinned -> Device)", stream=9)] if hidden else []),
        world_size=1,
    )
    assert ask(RULE, runs.foreign(tmp_path, made)).saving_ns == pytest.approx(room)


def test_without_a_device_it_abstains(tmp_path: Path) -> None:
    made = traces.trace(traces.step(1, 0, MS), traces.op("aten::mm", 0, MS), device="", backend="gloo", world_size=1)
    assert ask(RULE, runs.foreign(tmp_path, made)).state == "not_measured"


def test_the_setting_of_the_run_is_cited(tmp_path: Path) -> None:
    made = traces.trace(
        *(
            e
            for n in range(2)
            for e in (
                traces.step(n, n * MS, MS),
                traces.copy(n * MS, 200_000, 10_000_000),
                traces.kernel("gemm", n * MS + 200_000, 800_000),
            )
        )
    )
    facts = {"device": {"type": "cuda"}, "loaders": [{"role": "train", "pin_memory": False}]}
    found = ask(RULE, runs.recorded(tmp_path / "run", (made, [], facts)))
    assert "(is False)" in found.advice[0]
