"""One process a GPU against one for all: what a machine without two GPUs can show of it."""

from __future__ import annotations

import pytest
import torch

from tests.workloads.scripts import load, losses, refusal, train

TINY = ("--device=cpu", "--width=4", "--size=16", "--batch-size=16", "--workers=0", "--log-every=10")

workload = load("data_parallel")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_it_learns(ranks: int) -> None:
    found = losses(train("data_parallel", *TINY, "--steps=40", ranks=ranks))
    assert len(found) == 4
    assert found[-1] < 0.8 * found[0]


@pytest.mark.parametrize(("device", "ranks", "gpus"), [("cpu", 1, 0), ("cuda", 1, 1), ("cuda", 2, 2)])
def test_one_process_for_all_gpus_needs_two_of_them(
    device: str, ranks: int, gpus: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    said = refusal(workload, (*TINY, "--fault=data_parallel", "--device", device), capsys)
    assert f"needs two GPUs (there are {gpus}) and one process that drives them" in said


def test_one_process_for_all_gpus_drives_each_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    healthy, faulty = (workload.parse([*TINY, "--device=cuda", *more]) for more in ([], ["--fault=data_parallel"]))
    assert [(args.data_parallel, args.driven) for args in (healthy, faulty)] == [(False, 1), (True, 4)]


def test_batches_are_pageable_only_where_that_is_planted() -> None:
    healthy, faulty = (workload.parse([*TINY, "--device=cuda", *more]) for more in ([], ["--fault=pageable"]))
    assert [args.pin_memory for args in (healthy, faulty)] == [True, False]
