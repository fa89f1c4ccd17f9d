"""The loader workload: every storage and start method gives the same records, and each fault is where FAULTS says."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from tests.workloads.scripts import load, losses, train

TINY = ("--device=cpu", "--records=256", "--batch-size=16", "--steps=20", "--read-ms=0", "--layers=1")

workload = load("loader_variants")


# What a storage is read with, where that is no part of Python or NumPy.
LIBRARIES = {"hdf5": "h5py", "lmdb": "lmdb", "webdataset": "webdataset"}


@pytest.mark.parametrize("storage", [name for name in workload.STORAGE if name != "files"])
def test_every_storage_holds_the_same_records(data: Path, storage: str) -> None:
    if storage in LIBRARIES:
        pytest.importorskip(LIBRARIES[storage], reason=f"{storage} needs {LIBRARIES[storage]}")
    folder = workload.make_records(data, 256)
    sums: list[dict[int, float]] = []
    for kind in (storage, "files"):
        args = workload.parse([*TINY, "--workers=0", "--storage", kind, "--data", str(data)])
        sums.append({})
        for records, labels in workload.build_loader(args, folder):
            for record, label in zip(records, labels, strict=True):
                sums[-1][int(label)] = sums[-1].get(int(label), 0.0) + float(record.sum())
    assert sums[0] == pytest.approx(sums[1], rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [["--storage", "mapped", "--start-method", "spawn"], ["--storage", "tar"]],
    ids=["spawned", "tar"],
)
def test_it_trains(data: Path, options: list[str]) -> None:
    done = train("loader_variants", *TINY, "--data", str(data), *options, ranks=1)
    assert len(losses(done)) == 1
    assert re.search(r"^20 steps  loss \d", done.stdout, re.MULTILINE)


@pytest.mark.parametrize("storage", [*LIBRARIES])
def test_a_format_without_its_library_says_what_to_install(
    data: Path, storage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, LIBRARIES[storage], None)
    args = workload.parse([*TINY, "--workers=0", "--storage", storage, "--data", str(data)])
    with pytest.raises(SystemExit, match=f"pip install {LIBRARIES[storage]}"):
        workload.build_loader(args, workload.make_records(data, args.records))


@pytest.mark.parametrize("storage", [*LIBRARIES, "memory"])
def test_workers_read_a_format_each_for_itself(data: Path, storage: str) -> None:
    if storage in LIBRARIES:
        pytest.importorskip(LIBRARIES[storage], reason=f"{storage} needs {LIBRARIES[storage]}")
    args = workload.parse([*TINY, "--workers=2", "--storage", storage, "--data", str(data)])
    found = [
        label
        for _, labels in workload.build_loader(args, workload.make_records(data, args.records))
        for label in labels
    ]
    assert len(found) == 256


def test_a_batch_put_together_slowly_holds_the_same_records_scaled(data: Path) -> None:
    args = workload.parse([*TINY, "--workers=0", "--data", str(data)])
    files = workload.Files(workload.make_records(data, args.records), lambda: None)
    samples = [files[n] for n in range(4)]
    rows, labels = workload.slow_collate(samples)
    assert labels.tolist() == [0, 1, 2, 3]
    for row, (record, _) in zip(rows, samples, strict=True):
        assert float(row.abs().max()) == pytest.approx(3)
        assert float(torch.corrcoef(torch.stack((row, record)))[0, 1]) == pytest.approx(1)
