"""--losses records the loss of each backward pass, bit for bit; a seed makes it the same each time."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from dlprof.analysis.engine import RankData
from dlprof.read.run import open_run
from tests.fixtures.jobs import COMPILES_NOTHING, TORCHRUN, launch, rows, wrapped

pytest.importorskip("torch", reason="recording needs torch")

# It seeds nothing itself but on request, and draws from all that is seeded.
DRAWS = f"""{COMPILES_NOTHING}
import os, random, sys
import numpy as np
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
if "RANK" in os.environ:
    torch.distributed.init_process_group("gloo")
if "seeds" in sys.argv:
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
torch.set_num_threads(1)
data = TensorDataset(torch.randn(32, 8), torch.randn(32, 1))
model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 1))
if "RANK" in os.environ:
    model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
kept = []
for epoch in range(2):
    for x, y in DataLoader(data, batch_size=4, shuffle=True):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x + random.random() + np.random.rand()), y)
        kept.append(loss.item())
        if "scaled" in sys.argv:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            torch.autograd.backward([loss], retain_graph=True) if epoch else loss.backward()
            torch.autograd.grad(loss, model.parameters()) if epoch else None
            optimizer.step()
print([float(x).hex() for x in kept])
"""


def losses(folder: Path, seed: str, *words: str, before: tuple[str, ...] = ()) -> tuple[list[list[str]], str]:
    """Run the script and return what was recorded of each rank, and what it printed."""
    script = folder / "train.py"
    script.write_text(DRAWS)
    options = ("--no-trace", "--no-sample", "--flops", "off", *(("--losses", seed) if seed else ()))
    run = folder / f"run-{len(list(folder.iterdir()))}"
    done = launch(wrapped(run, [sys.executable, *before, script, *words], *options), folder)
    assert done.returncode == 0, done.stderr
    tables = [RankData(rank).table("losses") for rank in open_run(run).ranks] if seed else []
    for table in tables:
        assert table["step"].tolist() == list(range(16))
    assert ("waits for the device" in done.stderr) == bool(seed)
    return [[float(x).hex() for x in table["loss"]] for table in tables], done.stdout


@pytest.mark.long
def test_losses_are_the_same_with_the_same_seed_and_others_with_another(tmp_path: Path) -> None:
    first, printed = losses(tmp_path, "7")
    again, _ = losses(tmp_path, "7")
    other, _ = losses(tmp_path, "8")
    assert first == again == [json.loads(printed.replace("'", '"'))]
    assert set(first[0]).isdisjoint(other[0])


@pytest.mark.long
def test_a_scaler_is_taken_out_and_the_scripts_own_seed_wins(tmp_path: Path) -> None:
    first, printed = losses(tmp_path, "7", "seeds", "scaled")
    other, _ = losses(tmp_path, "8", "seeds", "scaled")
    assert first == other == [json.loads(printed.replace("'", '"'))]
    _, unseeded = losses(tmp_path, "", "scaled")
    assert unseeded != printed
    assert not list(tmp_path.glob("run-*/ranks/00000/losses.jsonl"))[2:]


@pytest.mark.long
def test_each_rank_has_its_own_losses_and_random_numbers(tmp_path: Path) -> None:
    first, _ = losses(tmp_path, "7", before=TORCHRUN)
    again, _ = losses(tmp_path, "7", before=TORCHRUN)
    assert first == again
    assert len(first) == 2
    assert first[0] != first[1]


@pytest.mark.long
def test_what_cannot_be_read_costs_the_losses_alone(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    raises = "\nclass Odd(torch.Tensor):\n    def item(self): raise OSError('no')\n"
    body = DRAWS.replace("loss.backward()", "loss.as_subclass(Odd).backward()").replace("[loss]", "loss")
    script.write_text(body.replace("kept = []", f"kept = []{raises}"))
    options = ("--no-trace", "--no-sample", "--losses", "1")
    done = launch(wrapped(tmp_path / "r", [sys.executable, script], *options), tmp_path)
    assert (done.returncode, "losses is off: no;" in done.stderr) == (0, True), done.stderr
    assert sum(row["kind"] == "train" for row in rows(tmp_path / "r/ranks/00000")) == 16
