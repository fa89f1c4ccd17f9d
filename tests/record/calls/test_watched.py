"""Which lines of real scripts are named, and as what."""

from __future__ import annotations

import sys
from pathlib import Path
from textwrap import dedent

import pytest

from dlprof.record.calls.seen import Calls
from dlprof.record.hooks import watch
from tests.fixtures.jobs import facts, record, tiny

torch = pytest.importorskip("torch", reason="recording needs torch")

LOOP = """
from torch.utils.data import DataLoader as Batches

def loaded(n):
    return Batches(
        data,
        batch_size=4,
        num_workers=n,
    )

def validate(loader):
    with torch.no_grad():
        for batch in loader:
            model(batch[0])

def main():
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for epoch in range(3):
        for batch in trained:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                model(batch[0])
            print(train(batch).item())
        validate(held)
        torch.save(model.state_dict(), "model.pt")

trained, held = loaded(0), DataLoader(data)
main()
"""


def lines(script: Path, run: Path) -> dict[str, list[tuple[str, str]]]:
    """Return of each kind the source lines and functions of its calls in a script."""
    text = script.read_text().splitlines()
    found: dict[str, list[tuple[str, str]]] = {}
    for call in facts(run / "ranks/00000")["calls"]:
        assert call["file"] == script.name
        found.setdefault(call["kind"], []).append((text[call["line"] - 1].strip(), call["function"]))
    return found


@pytest.mark.long
def test_the_lines_of_a_training_loop(tmp_path: Path) -> None:
    script = tiny(tmp_path, LOOP)
    record(script, folder=tmp_path / "run", options=["--window", "20,1,2"])
    assert lines(script, tmp_path / "run") == {
        "optimizer": [("optimizer = torch.optim.SGD(model.parameters(), lr=0.1)", "<module>")],
        "loader": [
            ("return Batches(", "loaded"),
            ("trained, held = loaded(0), DataLoader(data)", "<module>"),
        ],
        "grad_scaler": [('scaler = torch.amp.GradScaler("cpu", enabled=False)', "main")],
        "iteration": [("for batch in trained:", "main"), ("for batch in loader:", "validate")],
        "autocast": [('with torch.autocast("cpu", dtype=torch.bfloat16):', "main")],
        "forward": [("model(batch[0])", "main")],
        "backward": [("loss.backward()", "train")],
        "optimizer_step": [("optimizer.step()", "train")],
        "sync": [("print(train(batch).item())", "main")],
        "save": [('torch.save(model.state_dict(), "model.pt")', "main")],
    }
    told = facts(tmp_path / "run/ranks/00000")
    assert told["directory"] == f"{tmp_path}/"
    roles = [(call["kind"], call["roles"]) for call in told["calls"] if call.get("roles")]
    assert roles == [
        ("loader", ["train"]),
        ("loader", ["validation"]),
        ("iteration", ["train"]),
        ("iteration", ["validation"]),
    ]
    assert len({call["digest"] for call in told["calls"]}) == 1


WRAPPED = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, fully_shard
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
model = DistributedDataParallel(nn.Linear(8, 8))
FSDP(nn.Linear(4, 4), device_id=torch.device("cpu"))
fully_shard(nn.Linear(8, 8))
nn.DataParallel(nn.Linear(4, 4))
compiled = torch.compile(model, backend="eager")
nn.Softmax().to("cpu")
model.to("cpu")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    compiled(torch.randn(2, 8)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.mark.long
@pytest.mark.skipif(sys.version_info < (3, 11), reason="without columns Dynamo's calls look like the user's")
def test_the_lines_that_wrap_a_model(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(dedent(WRAPPED))
    record(script, folder=tmp_path / "run", options=["--no-trace"])
    found = {kind: [text for text, _ in of] for kind, of in lines(script, tmp_path / "run").items()}
    assert found["ddp"] == ["model = DistributedDataParallel(nn.Linear(8, 8))"]
    assert found["fsdp"][0] == 'FSDP(nn.Linear(4, 4), device_id=torch.device("cpu"))'
    assert "fully_shard(nn.Linear(8, 8))" in found["fsdp"]
    assert found["data_parallel"] == ["nn.DataParallel(nn.Linear(4, 4))"]
    assert found["compile"] == ['compiled = torch.compile(model, backend="eager")']
    assert found["model"] == ['model.to("cpu")']
    assert found["forward"] == ["compiled(torch.randn(2, 8)).sum().backward()"]


def test_what_is_made_while_dynamo_reads_the_script_is_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, traced = Calls(), [False]
    watch(calls, lambda: traced[0], monkeypatch.setattr, lambda wrapper: wrapper)

    def seen() -> int:
        torch.amp.GradScaler("cpu", enabled=False)
        return sum(call["count"] for call in calls.facts() if call["kind"] == "grad_scaler")

    assert seen() == 1
    traced[0] = True
    assert seen() == 1
    traced[0] = False
    assert seen() == 2
