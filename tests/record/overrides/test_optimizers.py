"""Torch's optimizers are made fused or not, and DistributedDataParallel wraps a model, with the settings asked for."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.jobs import COMPILES_NOTHING, environment, free_port, launch, wrapped
from tests.fixtures.overriding import done, left, overriding, sets

torch: Any = pytest.importorskip("torch", reason="recording needs torch")

from dlprof.record.overrides.constructors import install_optimizers  # noqa: E402

FUSED, FOREACH = "optimizer.fused", "optimizer.foreach"


def model(**more: Any) -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 3, **more), torch.nn.Linear(3, 1, **more))


def trained(make: Any, of: Any = None, steps: int = 3) -> tuple[Any, Any]:
    """Return an optimizer that has taken some steps, and the parameters then."""
    of = of or model()
    optimizer = make(of.parameters())
    x = torch.ones(2, 4, dtype=next(of.parameters()).dtype)
    for _ in range(steps):
        optimizer.zero_grad()
        of(x).sum().backward()
        optimizer.step()
    return optimizer, torch.cat([p.detach().flatten() for p in of.parameters()])


class Own(torch.optim.SGD):  # type: ignore[misc]
    """An optimizer of the script's own, by inheritance."""


@pytest.mark.parametrize(
    ("kind", "before"),
    [("Adam", None), ("AdamW", False), ("SGD", None), ("SGD", False), ("Adagrad", None), (Own, None)],
)
def test_an_optimizer_is_fused_and_computes_the_same(kind: Any, before: bool | None) -> None:
    kind = getattr(torch.optim, kind) if isinstance(kind, str) else kind
    _, expected = trained(lambda p: kind(p, lr=0.1))
    with overriding(install_optimizers, "optimizer.fused=True") as effects:
        optimizer, got = trained(lambda p: kind(p, lr=0.1, fused=before))
        assert optimizer.param_groups[0]["fused"] is True
        assert done(effects, FUSED) == (1, [before], None)
    torch.testing.assert_close(got, expected)
    assert not kind(model().parameters(), lr=0.1).param_groups[0]["fused"]


def test_fused_and_foreach_exclude_each_other() -> None:
    with overriding(install_optimizers, "optimizer.fused=True"):
        group = torch.optim.Adam(model().parameters(), foreach=True).param_groups[0]
        assert (group["fused"], group["foreach"]) == (True, None)
    with overriding(install_optimizers, "optimizer.foreach=True") as effects:
        group = torch.optim.Adam(model().parameters(), fused=True).param_groups[0]
        assert (group["fused"], group["foreach"]) == (None, True)
        assert done(effects, FOREACH) == (1, [None], None)


def test_groups_of_parameters_are_all_changed_and_stay_the_scripts_own() -> None:
    of = model()
    with overriding(install_optimizers, "optimizer.fused=True"):
        groups = [{"params": of[0].parameters(), "lr": 0.5}, {"params": of[1].parameters()}]
        optimizer = torch.optim.SGD(iter(groups), lr=0.1)
        assert [(g["fused"], g["lr"]) for g in optimizer.param_groups] == [(True, 0.5), (True, 0.1)]
        assert optimizer.param_groups[0] is groups[0]


def test_one_that_refuses_is_made_as_the_script_says() -> None:
    """A differentiable optimizer cannot be fused; torch raises after it has written into the groups."""
    of = model()
    with overriding(install_optimizers, "optimizer.fused=True") as effects:
        optimizer = torch.optim.Adam([{"params": of.parameters()}], differentiable=True)
        assert optimizer.param_groups[0]["fused"] is None
        assert len(optimizer.param_groups[0]["params"]) == 4
        applied, _, error = done(effects, FUSED)
        assert applied == 0
        assert "differentiable" in str(error)


class Complex(torch.nn.Module):  # type: ignore[misc]
    """A kind of parameters that no fused kernel takes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(4, dtype=torch.complex64))

    def forward(self, x: Any) -> Any:
        return (x * self.weight).abs()


class Sparse(torch.nn.Module):  # type: ignore[misc]
    """One with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(8, 2))

    def forward(self, _: Any) -> Any:
        return torch.nn.functional.embedding(torch.tensor([3]), self.weight, sparse=True)


@pytest.mark.parametrize(
    ("of", "make", "why"),
    [
        (Complex, lambda p: torch.optim.Adam(p, lr=0.1), "floating point"),
        (Sparse, lambda p: torch.optim.SGD(p, lr=0.1), "sparse"),
    ],
)
def test_what_cannot_be_stepped_fused_is_stepped_as_ever(of: Any, make: Any, why: str) -> None:
    _, expected = trained(make, of())
    with overriding(install_optimizers, "optimizer.fused=True") as effects:
        optimizer, got = trained(make, of())
        assert optimizer.param_groups[0]["fused"] is None
        assert not hasattr(optimizer, "_step_supports_amp_scaling")
        applied, _, error = done(effects, FUSED)
        assert applied == 0
        assert why in str(error)
    torch.testing.assert_close(got, expected)


def test_an_optimizer_that_takes_no_such_setting_is_named() -> None:
    with overriding(install_optimizers, "optimizer.fused=True") as effects:
        optimizer = torch.optim.LBFGS(model().parameters())
        assert done(effects, FUSED) == (0, [], None)  # until it steps
        optimizer.step(lambda: torch.tensor(0.0))
        assert done(effects, FUSED) == (0, [], "LBFGS does not take it")


# Two ranks in one process would share a process group; here a script starts them.
SCRIPT = """
import json, os, sys
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
ddp = DistributedDataParallel(model, find_unused_parameters=True)
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
}) + "\\n", end="", flush=True)  # torchrun's ranks write unbuffered: one write, or the other's line comes between
dist.destroy_process_group()
"""
DDP: dict[str, object] = {"bucket_cap_mb": 2, "gradient_as_bucket_view": True, "static_graph": True}
DDP |= {"find_unused_parameters": False, "broadcast_buffers": False, "comm_hook": "fp16"}


def wrap(folder: Path, ranks: int, *settings: str) -> tuple[Any, str]:
    """Record ranks, two of them under torchrun, and return what the script said, once for both, and dlprof's stderr."""
    script = folder / "train.py"
    script.write_text(COMPILES_NOTHING + SCRIPT)
    port = free_port()
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port] if ranks > 1 else []
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    options = ("--no-trace", "--no-sample", "--allow-numerics", *sets(*settings))
    command = wrapped(folder / "run", [sys.executable, *launcher, script], *options)
    ended = launch(command, folder, env=environment(**({} if ranks > 1 else alone)))
    assert ended.returncode == 0, ended.stderr
    (said,) = {line for line in ended.stdout.splitlines() if line.startswith("{")}
    return json.loads(said), ended.stderr


@pytest.mark.long
def test_two_ranks_are_wrapped_as_asked_for_and_a_hook_of_the_scripts_gives_way(tmp_path: Path) -> None:
    said, stderr = wrap(tmp_path, 2, *(f"ddp.{name}={value}" for name, value in DDP.items()))
    hooks = {"hooks": ["fp16_compress_hook"], "same": True}
    assert said == {"bucket": 2 << 20, "view": True, "static": True, "unused": False, "buffers": False, **hooks}
    lines = (tmp_path / "train.py").read_text().splitlines()
    (line,) = (n for n, text in enumerate(lines, 1) if text.startswith("ddp = "))
    for rank in range(2):
        effects = left(tmp_path / "run", rank)
        applied = {name.partition(".")[2]: (entry["applied"], entry["error"]) for name, entry in effects.items()}
        assert applied == dict.fromkeys(DDP, (1, None)) | {"comm_hook": (2, None)}
        assert effects["ddp.comm_hook"]["before"] == [None, "allreduce_hook"]
        assert [effects[f"ddp.{name}"]["before"] for name in ("find_unused_parameters", "broadcast_buffers")] == [
            [True]
        ] * 2
        assert effects["ddp.bucket_cap_mb"]["places"] == [["train.py", line, "<module>"]]
    assert not any(told in stderr for told in ("--set", "FutureWarning"))  # torch 2.13 has another name for one


@pytest.mark.long
def test_a_hook_that_torch_refuses_leaves_the_scripts_own(tmp_path: Path) -> None:
    # gloo has no bfloat16: torch asks for NCCL.
    said, stderr = wrap(tmp_path, 1, "ddp.comm_hook=bf16")
    assert (said["hooks"], said["same"]) == (["allreduce_hook"], True)
    effect = left(tmp_path / "run")["ddp.comm_hook"]
    assert (effect["applied"], "NCCL" in effect["error"]) == (0, True)
    assert "--set ddp.comm_hook=bf16 never applied: TypeError" in stderr
