"""DistributedDataParallel wraps a model with the settings asked for, on two ranks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.jobs import COMPILES_NOTHING, environment, free_port, launch, wrapped
from tests.fixtures.overriding import left, sets

pytest.importorskip("torch", reason="recording needs torch")

# Both ranks in one process would share a process group; here a script starts them.
SCRIPT = """
import json, os, sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
ddp = DistributedDataParallel(model, find_unused_parameters=True)
if "hook" in sys.argv:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
    ddp.register_comm_hook(None, allreduce_hook)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
for n in range(4):
    optimizer.zero_grad()
    ddp(torch.full((4, 8), float(rank + n))).sum().backward()
    optimizer.step()
weights = [torch.zeros_like(model[0].weight) for _ in range(dist.get_world_size())]
dist.all_gather(weights, model[0].weight.detach())
print(json.dumps({
    "bucket": ddp.bucket_bytes_cap, "view": ddp.gradient_as_bucket_view, "static": ddp.static_graph,
    "unused": ddp.find_unused_parameters, "buffers": ddp.broadcast_buffers,
    "hooks": [hook.__name__ for hook, _ in ddp._comm_hooks], "same": torch.equal(weights[0], weights[-1]),
}), flush=True)
dist.destroy_process_group()
"""


def run(folder: Path, *settings: str, args: tuple[str, ...] = (), ranks: int = 2) -> tuple[Any, str]:
    """Record ranks, two of them under torchrun, and return what the script said, once for both, and dlprof's stderr."""
    script = folder / "train.py"
    script.write_text(COMPILES_NOTHING + SCRIPT)
    port = free_port()
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port] if ranks > 1 else []
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    env = environment(**({} if ranks > 1 else alone))
    options = ("--no-trace", "--no-sample", "--allow-numerics", *sets(*settings))
    done = launch(wrapped(folder / "run", [sys.executable, *launcher, script, *args], *options), folder, env=env)
    assert done.returncode == 0, done.stderr
    said = {line for line in done.stdout.splitlines() if line.startswith("{")}
    assert len(said) == 1
    return json.loads(said.pop()), done.stderr


@pytest.mark.long
def test_two_ranks_are_wrapped_as_asked_for(tmp_path: Path) -> None:
    said, stderr = run(
        tmp_path,
        "ddp.bucket_cap_mb=2",
        "ddp.gradient_as_bucket_view=True",
        "ddp.static_graph=True",
        "ddp.find_unused_parameters=False",
        "ddp.broadcast_buffers=False",
        "ddp.comm_hook=fp16",
    )
    assert said == {
        "bucket": 2 << 20,
        "view": True,
        "static": True,
        "unused": False,
        "buffers": False,
        "hooks": ["fp16_compress_hook"],
        "same": True,
    }
    (line,) = [
        n for n, text in enumerate((tmp_path / "train.py").read_text().splitlines(), 1) if text.startswith("ddp = ")
    ]
    for rank in range(2):
        effects = left(tmp_path / "run", rank)
        assert {name: (entry["applied"], entry["error"]) for name, entry in effects.items()} == dict.fromkeys(
            effects, (1, None)
        )
        assert effects["ddp.find_unused_parameters"]["before"] == [True]
        assert effects["ddp.bucket_cap_mb"]["places"] == [["train.py", line, "<module>"]]
    assert "--set" not in stderr


@pytest.mark.long
def test_a_hook_of_the_scripts_own_gives_way_and_one_that_torch_refuses_leaves_it(tmp_path: Path) -> None:
    said, _ = run(tmp_path, "ddp.comm_hook=fp16", args=("hook",), ranks=1)
    assert (said["hooks"], said["same"]) == (["fp16_compress_hook"], True)
    effect = left(tmp_path / "run")["ddp.comm_hook"]
    assert (effect["applied"], effect["before"]) == (2, [None, "allreduce_hook"])
    (tmp_path / "other").mkdir()
    # gloo has no bfloat16: torch asks for NCCL.
    said, stderr = run(tmp_path / "other", "ddp.comm_hook=bf16", args=("hook",), ranks=1)
    assert (said["hooks"], said["same"]) == (["allreduce_hook"], True)
    effect = left(tmp_path / "other/run")["ddp.comm_hook"]
    assert (effect["applied"], "NCCL" in effect["error"]) == (0, True)
    assert "--set ddp.comm_hook=bf16 never applied: TypeError" in stderr
