"""The Lightning workload: it learns alone and under torchrun, and says what it lacks where Lightning is not there."""

from __future__ import annotations

import importlib.util

import pytest

from dlprof.commands.run import constant
from tests.workloads.scripts import FOLDER, listed, losses, planted, train

TINY = ["--device=cpu", "--width=4", "--size=16", "--batch-size=16", "--workers=0", "--read-ms=0", "--log-every=10"]

there = importlib.util.find_spec("lightning") is not None


@pytest.mark.slow
@pytest.mark.skipif(not there, reason="lightning is not installed")
@pytest.mark.parametrize("ranks", [1, 2])
def test_it_learns(ranks: int) -> None:
    found = losses(train("lightning_cnn", *TINY, "--steps=40", ranks=ranks))
    assert len(found) == 4
    assert found[-1] < 0.8 * found[0]


@pytest.mark.skipif(there, reason="lightning is installed")
def test_without_lightning_it_says_what_it_needs() -> None:
    done = train("lightning_cnn", ranks=1)
    assert (done.returncode, done.stderr.strip().splitlines()) == (
        1,
        ["lightning_cnn.py needs Lightning: pip install 'lightning>=2.4'"],
    )


def test_every_fault_is_planted_and_listed() -> None:
    faults = constant(FOLDER / "lightning_cnn.py", "FAULTS")
    assert planted("lightning_cnn") == set(faults)
    assert all(f"`{fault}`" in listed() for fault in faults)
