"""One process a GPU against one for all: what a machine without two GPUs can show of it."""

from __future__ import annotations

import pytest

from tests.workloads.scripts import listed, load, losses, planted, train

TINY = ["--device=cpu", "--width=4", "--size=16", "--batch-size=16", "--workers=0", "--log-every=10"]

workload = load("data_parallel")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_it_learns(ranks: int) -> None:
    found = losses(train("data_parallel", *TINY, "--steps=40", ranks=ranks))
    assert len(found) == 4
    assert found[-1] < 0.8 * found[0]


def test_one_process_for_all_gpus_needs_two_of_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit) as stopped:
        workload.parse([*TINY, "--fault=data_parallel"])
    assert stopped.value.code == 2
    (said,) = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert "needs two GPUs (there are 0) and one process that drives them" in said


def test_a_class_looks_alike_and_its_pictures_differ() -> None:
    pictures = workload.Patterns(40, 16, seed=0)
    (a, label), (b, same), (_, other) = (pictures[i] for i in (3, 13, 4))
    assert label == same != other
    assert 0 < float((a - b).abs().mean()) < 2


def test_every_fault_is_planted_and_listed() -> None:
    assert planted("data_parallel") == set(workload.FAULTS)
    assert all(f"`{fault}`" in listed() for fault in workload.FAULTS)
