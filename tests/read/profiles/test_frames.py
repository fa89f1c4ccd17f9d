"""Whose a frame is, what the step was doing, and the table that stacks end in."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlprof.analysis.host.stacks import is_own
from dlprof.errors import DlprofError
from dlprof.read.profiles import frames
from dlprof.read.profiles.frames import Stacks, phase_in, placed_file

LIB = "/v/site-packages/torch"


@pytest.mark.parametrize(
    ("file", "own"),
    [
        ("train.py", True),
        ("/home/me/train.py", True),
        ("models/torch_net.py", True),
        ("torch/nn/modules/module.py", False),
        ("json/decoder.py", False),
        ("threading.py", False),
        ("<frozen importlib._bootstrap>", False),
        ("", False),
        ("C:\\me\\train.py", True),
    ],
)
def test_a_shortened_file_of_a_library_is_no_file_of_the_users(file: str, own: bool) -> None:
    assert is_own(placed_file(file)) is own


def test_phases_are_those_of_the_recorder() -> None:
    step = ("Adam.step", f"{LIB}/optim/adam.py", 1)
    forward = ("Module._call_impl", f"{LIB}/nn/modules/module.py", 1)
    assert phase_in([("main", "train.py", 1)]) == ""
    assert phase_in([("main", "train.py", 1), step]) == "optimizer"
    assert phase_in([step, forward]) == "forward"  # a closure's forward in the optimizer


def test_only_the_main_thread_and_workers_are_the_jobs() -> None:
    stacks = Stacks(Path("p"), "tool", "samples")
    stacks.add("MainThread", [("main", "train.py", 1)], 3)
    stacks.add("pin_memory", [("run", "threading.py", 2)], 4)
    stacks.add("2", [("main", "train.py", 1), ("_worker_loop", f"{LIB}/utils/data/_utils/worker.py", 5)], 5)
    stacks.add("MainThread", [], 9)
    table = stacks.reading().tables["stacks"]
    assert dict(zip(table["role"], table["samples"], strict=True)) == {"main": 3, "thread": 4, "worker": 5}
    assert set(table["profile"]) == {"p"}


def test_too_many_stacks_are_left_out_with_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MOST_NAMES", 2)
    stacks = Stacks(Path("p"), "tool", "samples")
    for n in range(5):
        stacks.add("", [(f"f{n}", "a.py", 1)], 1)
    reading = stacks.reading()
    assert len(reading.tables["stacks"]) == 2
    assert any("different stacks" in w for w in reading.warnings)


def test_no_stack_is_no_profile() -> None:
    with pytest.raises(DlprofError):
        Stacks(Path("p"), "tool", "samples").reading()
