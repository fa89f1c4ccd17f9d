"""Copies that nothing hides: found for pinned ones and for the way back, silent on hidden and on pageable ones."""

from pathlib import Path

import pytest

from dlprof.analysis.memory.rules.exposed_copy import RULE
from dlprof.result import Setting
from tests.fixtures import runs, traces
from tests.fixtures.allocator import copied_batches
from tests.fixtures.asking import ask
from tests.fixtures.runs import MS


@pytest.mark.parametrize(
    ("kinds", "way"), [("HtoD (Pinned -> Device)", "to the device"), ("DtoH (Device -> Pageable)", "from the device")]
)
def test_found_with_its_way(tmp_path: Path, kinds: str, way: str) -> None:
    found = ask(RULE, copied_batches(tmp_path, kinds))
    assert found.state == "found"
    assert found.share == pytest.approx(0.4, rel=0.05)  # but for launching what then comes first
    assert way in found.title
    assert found.ranks == (0,)
    assert found.changes[0].settings == (Setting("non_blocking", None, True),)


def test_hidden_copies_are_left_alone(tmp_path: Path) -> None:
    clear = ask(RULE, copied_batches(tmp_path, "HtoD (Pinned -> Device)", beside=True))
    assert clear.state == "clear"
    assert clear.share == pytest.approx(0.002)  # what it takes until it computes


def test_pageable_copies_are_another_rules_business(tmp_path: Path) -> None:
    assert ask(RULE, copied_batches(tmp_path)).state == "clear"


def test_no_more_is_gained_than_there_is_computation_to_hide_behind(tmp_path: Path) -> None:
    found = ask(RULE, copied_batches(tmp_path, "HtoD (Pinned -> Device)", takes=700_000))
    assert found.saving_ns == pytest.approx(280_000, rel=0.01)


def test_without_a_device_it_abstains(tmp_path: Path) -> None:
    made = traces.trace(traces.step(1, 0, MS), traces.op("aten::mm", 0, MS), device="", backend="gloo", world_size=1)
    assert ask(RULE, runs.foreign(tmp_path, made)).state == "does_not_apply"
