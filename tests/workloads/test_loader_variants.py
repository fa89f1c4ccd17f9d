"""The loader workload: every storage and start method gives the same records, and each fault is where FAULTS says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from tests.workloads.scripts import load, losses, refusal, train

TINY = ("--device=cpu", "--records=256", "--batch-size=16", "--steps=20", "--read-ms=0", "--layers=1")

workload = load("loader_variants")


@pytest.mark.parametrize("storage", ["files", "mapped", "tar"])
def test_every_storage_holds_the_same_records(data: Path, storage: str) -> None:
    args = workload.parse([*TINY, "--workers=0", "--storage", storage, "--data", str(data)])
    folder = workload.make_records(data, args.records)
    sums: dict[int, float] = {}
    for records, labels in workload.build_loader(args, folder):
        for record, label in zip(records, labels, strict=True):
            sums[int(label)] = sums.get(int(label), 0.0) + float(record.sum())
    args = workload.parse([*TINY, "--workers=0", "--data", str(data)])
    plain: dict[int, float] = {}
    for records, labels in workload.build_loader(args, folder):
        for record, label in zip(records, labels, strict=True):
            plain[int(label)] = plain.get(int(label), 0.0) + float(record.sum())
    assert sums == pytest.approx(plain, rel=1e-3)


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [["--storage", "tar"], ["--storage", "mapped", "--start-method", "spawn"], ["--fault", "workers_restart"]],
    ids=["tar", "spawned", "restart"],
)
def test_it_trains(data: Path, options: list[str]) -> None:
    done = train("loader_variants", *TINY, "--data", str(data), *options, ranks=1)
    assert len(losses(done)) == 1
    assert re.search(r"^20 steps  loss \d", done.stdout, re.MULTILINE)


@pytest.mark.parametrize("fault", workload.NEEDS_GPU)
def test_a_fault_of_copies_needs_a_gpu(fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "needs a GPU" in refusal(workload, ("--device=cpu", "--fault", fault), capsys)


def test_a_batch_put_together_slowly_holds_the_same_records_scaled(data: Path) -> None:
    args = workload.parse([*TINY, "--workers=0", "--data", str(data)])
    files = workload.Files(workload.make_records(data, args.records), lambda: None)
    samples = [files[n] for n in range(4)]
    rows, labels = workload.slow_collate(samples)
    assert labels.tolist() == [0, 1, 2, 3]
    for row, (record, _) in zip(rows, samples, strict=True):
        assert float(row.abs().max()) == pytest.approx(3)
        assert float(torch.corrcoef(torch.stack((row, record)))[0, 1]) == pytest.approx(1)
