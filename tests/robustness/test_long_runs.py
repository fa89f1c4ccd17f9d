"""A job of many short steps: the recorder's memory stays flat, its files small, and no step is lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dlprof.read import steps as reader
from tests.fixtures.jobs import facts, record, rows

pytest.importorskip("torch", reason="recording needs torch")

# Steps as short as they can be; after the first ones nothing of ours may go on growing. Tells what grew, in bytes, by
# the file that allocated it, and the times of the steps that it saw itself.
SCRIPT = """
import gc, json, os, sys, time, tracemalloc
import torch
from torch.utils.data import DataLoader, TensorDataset

def ours(snapshot):
    kept = snapshot.filter_traces([tracemalloc.Filter(True, "*/dlprof/*")])
    return sum(statistic.size for statistic in kept.statistics("filename"))

model = torch.nn.Linear(2, 1)
data = TensorDataset(torch.ones(500, 2), torch.ones(500, 1))
steps, settled = int(sys.argv[1]), int(sys.argv[2])
n = 0
# What was recorded since the last write waits for the next, of a second at most: the least of some looks is without it.
before, after = [], []
while n < steps:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)  # a new one and a new loader every epoch
    for x, y in DataLoader(data, batch_size=1):
        model(x).sum().backward()
        optimizer.step()
        n += 1
        if n == settled:
            tracemalloc.start()
        for looks, begin in ((before, settled + 600), (after, steps - 1400)):
            if begin < n <= begin + 1400 and n % 100 == 0:
                gc.collect()
                looks.append(ours(tracemalloc.take_snapshot()))
print(json.dumps([n, min(after) - min(before)]))
"""


@pytest.mark.slow
def test_memory_stays_flat_and_files_small_and_no_step_is_lost(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = record(tmp_path / "train.py", "20000", "16000", folder=tmp_path / "run", options=["--no-trace"])
    steps, grown = json.loads(done.stdout)
    assert steps == 20000
    # The lists that what waits is in, and the first of what waits.
    assert grown < 100_000
    rank = tmp_path / "run/ranks/00000"
    assert facts(rank)["warnings"] == []
    lines = rows(rank)
    table = reader.read(rank / "steps.jsonl").tables["steps"]
    assert len(lines) < 11_500
    assert table["step"].to_list() == list(range(len(table)))
    assert table["optimizer_steps"].sum() == 20000
    assert table["fetches"].sum() == 20000 + 40  # and each epoch's end
    assert table["first"].sum() >= 40
    # One after the other without a gap, but for what rounding to shares leaves: nothing.
    ends = (table["start_ns"] + table["dur_ns"]).to_numpy()
    assert (ends[:-1] == table["start_ns"].to_numpy()[1:]).all()


@pytest.mark.long
def test_what_is_made_anew_in_every_step_is_told_of_within_bounds(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "kept = []\n"
        "for n in range(400):\n"
        "    model = torch.nn.Linear(2, 1)\n"
        "    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)\n"
        "    kept.append((model, optimizer))\n"
        "    model(torch.ones(4, 2)).sum().backward()\n"
        "    optimizer.step()\n"
    )
    record(tmp_path / "train.py", folder=tmp_path / "run", options=["--no-trace"])
    told = facts(tmp_path / "run/ranks/00000")
    assert len(rows(tmp_path / "run/ranks/00000")) == 400
    assert len(told["optimizers"]) == len(told["models"]) == 100
