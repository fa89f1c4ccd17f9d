"""What memory holds in one step of real jobs, that nothing else changes for it, and what is said where it fails."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import pytest

from dlprof.read.facts import read_held
from dlprof.record.model import tensors
from dlprof.run_folder import log_of
from tests.fixtures.in_process import run_plainly, run_recorded
from tests.fixtures.jobs import COMPILES_NOTHING, as_ranks, facts, launch, rows, wrapped

torch: Any = pytest.importorskip("torch", reason="recording needs torch")

LOOP = """
import os, sys, torch
from torch import nn
from torch.nn import functional as F
torch.manual_seed(0)
torch.set_num_threads(1)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
    def forward(self, x):
        return x + self.down(self.up(x).relu())

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(64, 8)
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)

model = Net()
def batch():
    return torch.randn(32, 64), torch.randint(8, (32,))
"""
EPOCH = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
for n in range(24):
    x, y = batch()
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
left = loss.item(), [p.double().sum().item() for p in model.parameters()], torch.rand(1).item()
"""

PARAMETERS = 4 * (2 * (64 * 256 + 256 + 256 * 64 + 64) + 64 * 8 + 8)
# What each layer takes in, of 32 rows, but for the batch itself; the log-softmax, the labels, and the sum of the
# weights that these have.
ACTIVATIONS = 32 * (256 + 64 + 256 + 64 + 8) * 4 + 32 * 8 + 4
INPUT = 32 * 64 * 4
STATE = dict.fromkeys(("parameter", "gradient", "optimizer"), PARAMETERS)


def told(run: Path, rank: int = 0) -> tuple[Any, Mapping[str, Any]]:
    """Return the table of a rank and what stands beside it."""
    reading = read_held(*log_of(run / f"ranks/{rank:05d}", "held"))
    assert reading.warnings == ()
    return reading.tables["held"], reading.facts["held"]


def sums(table: Any, by: str = "part") -> dict[str, int]:
    grouped: dict[str, int] = table.groupby(by, observed=True)["bytes"].sum().to_dict()
    return grouped


def profiled(folder: Path) -> list[int]:
    return [row["step"] for row in rows(folder / "run/ranks/00000") if row["profiled"]]


def test_a_step_of_known_bytes_and_the_same_weights_and_random_numbers(tmp_path: Path) -> None:
    plain = run_plainly(tmp_path, LOOP + EPOCH)["left"]
    assert run_recorded(tmp_path, LOOP + EPOCH, window=(10, 1, 2))["left"] == plain
    table, beside = told(tmp_path / "run")
    # Buffers are of models of other tests, which Dynamo keeps.
    assert sums(table[table["part"] != "buffer"]) == {**STATE, "activation": ACTIVATIONS, "input": INPUT}
    kept = table[table["part"] == "activation"]
    assert sums(kept, "module") == {
        "": 32 * 8 * 4 + 32 * 8 + 4,
        "blocks.0": 32 * 256 * 4,
        "blocks.1": 32 * 256 * 4,
        "blocks.1.up": 32 * 64 * 4,
        "head": 32 * 64 * 4,
    }
    # In the order of the forward pass, a row for each size: the log-softmax, the labels, and the sum of weights.
    order = [(row.module, row.bytes) for row in kept.itertuples()]
    assert [module for module, _ in order] == ["blocks.0", "blocks.1.up", "blocks.1", "head", "", "", ""]
    assert {size for module, size in order if not module} == {32 * 8 * 4, 32 * 8, 4}
    assert set(table[table["module"] == "blocks.1.up"]["kind"]) == {"Linear"}
    assert beside["activations"]["by_module"]
    assert beside["optimizers"][0]["class"] == "SGD"
    # In the step whose operators are counted, which counts for nothing anyway.
    assert (beside["step"], profiled(tmp_path)) == (9, [9, 10, 11, 12, 13, 14])


@pytest.mark.parametrize(
    ("options", "step"),
    [
        ({"window": (12, 2, 2)}, 12),  # the profiler warms up
        ({"window": (0, 0, 4)}, 5),  # the step behind the window
        ({}, 9),
    ],
)
def test_which_step_it_is(options: dict[str, Any], step: int, tmp_path: Path) -> None:
    run_recorded(tmp_path, LOOP + EPOCH, flops="off", **options)
    table, beside = told(tmp_path / "run")
    assert beside["step"] == step
    assert step in profiled(tmp_path)
    assert sums(table)["activation"] == ACTIVATIONS


# An update of an average that no step calls, beside modules that cannot be asked.
AVERAGED = (
    "class Odd(nn.Module):\n    def modules(self): raise TypeError\nodd = Odd(), nn.LazyLinear(4)\n"
    + EPOCH.replace("optimizer = ", "average = torch.optim.swa_utils.AveragedModel(model)\noptimizer = ", 1).replace(
        "optimizer.step()", "optimizer.step(); average.update_parameters(model)"
    )
)
MICRO_BATCHES = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
for n in range(12):
    optimizer.zero_grad()
    for _ in range(3):
        x, y = batch()
        F.cross_entropy(model(x), y).backward()
    optimizer.step()
"""
THREADS = """
from concurrent.futures import ThreadPoolExecutor
pool = ThreadPoolExecutor(2)
class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = model
    def forward(self, x):
        return torch.cat(list(pool.map(self.inner, x.chunk(2))))
both = Both()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for n in range(12):
    x, y = batch()
    optimizer.zero_grad()
    F.cross_entropy(both(x), y).backward()
    optimizer.step()
pool.shutdown()
"""
MODE = """
from torch.utils._python_dispatch import TorchDispatchMode
class Own(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))
with Own():
""" + indent(EPOCH, "    ")
VALIDATION = """
from torch.utils.data import DataLoader, TensorDataset
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
data = TensorDataset(torch.randn(8 * 32, 64), torch.randint(8, (8 * 32,)))
for epoch in range(3):
    for x, y in DataLoader(data, 32):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    with torch.no_grad():
        for x, y in DataLoader(data, 16):
            model(x)
"""
DDP = """
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=VIEW)
"""
DDP_END = "\ndel model\ndist.destroy_process_group()"
# A script; bytes by part; and what stands beside them: activations' entries, and gradients' bytes at the moments.
SCRIPTS: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    "average": (AVERAGED, {"parameter": PARAMETERS}, {}),
    "micro-batches": (
        MICRO_BATCHES,
        {"activation": ACTIVATIONS, "input": INPUT},
        {"graphs": 3, "backward": PARAMETERS, "gradients": PARAMETERS},
    ),
    # Threads that compute together are not told apart.
    "threads": (THREADS, {"activation": ACTIVATIONS}, {"by_module": False}),
    "a mode of the script's own": (
        MODE,
        {**STATE, "input": INPUT, "activation": 0},
        {"state": "abstained", "why": "the script has a dispatch mode of its own", "nodes": 0, "unseen": 0},
    ),
    # 8 steps of training, 16 of validation, one in which that turns out to have ended.
    "validation": (VALIDATION, {"activation": ACTIVATIONS}, {"step": 25, "profiled": [25]}),
    "DDP": (
        DDP.replace("VIEW", "False") + EPOCH + DDP_END,
        {"gradient": PARAMETERS, "communication": PARAMETERS, "activation": ACTIVATIONS},
        {"backward": 0},  # set_to_none frees no bucket
    ),
    "DDP whose gradients lie in buckets": (
        DDP.replace("VIEW", "True") + EPOCH + DDP_END,
        {"gradient": PARAMETERS, "communication": 0, "activation": ACTIVATIONS},
        {"backward": PARAMETERS},
    ),
}


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.filterwarnings("ignore")
def test_bytes_of_scripts(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A process that has run thousands of tests is larger than most jobs.
    monkeypatch.setattr(tensors, "_MOST_BLOCKS", sys.maxsize)
    body, parts, expected = SCRIPTS[name]
    run_recorded(tmp_path, LOOP + body, flops="off" if name == "validation" else "auto")
    table, beside = told(tmp_path / "run")
    found = sums(table)
    assert {part: found.get(part, 0) for part in parts} == parts
    at = {"backward": 0, **{moment["moment"]: moment["gradient_bytes"] for moment in beside["moments"]}}
    seen = {**at, **beside["activations"], "step": beside["step"], "profiled": profiled(tmp_path)}
    assert {key: seen[key] for key in expected} == expected
    if name == "average":
        # With how often it was averaged.
        assert sums(table[table["module"] == "(AveragedModel)"]) == {"buffer": PARAMETERS + 8}
    if name == "threads":
        assert set(table[table["part"] == "activation"]["module"]) == {""}
    if "DDP" in name:
        assert set(table["module"]) >= {"blocks.0.up", "head"}


@pytest.mark.long
def test_what_is_compiled_is_counted_and_not_compiled_again(tmp_path: Path) -> None:
    body = """
    from torch._dynamo.utils import counters
    torch._dynamo.reset()
    counters.clear()
    model = torch.compile(model, backend="aot_eager")
    """
    compiled = (
        "\ngraphs = {k: dict(v) for k, v in counters.items() if k in ('stats', 'recompiles', 'graph_break', 'frames')}"
    )
    text = LOOP + dedent(body) + EPOCH + compiled
    plain = run_plainly(tmp_path, text)
    done = run_recorded(tmp_path, text)
    assert (done["graphs"], done["left"]) == (plain["graphs"], plain["left"])
    table, beside = told(tmp_path / "run")
    # Buffers are of models of other tests, which Dynamo keeps.
    assert sums(table[table["part"] != "buffer"]) == {**STATE, "activation": ACTIVATIONS, "input": INPUT}
    assert beside["activations"]["state"] == "counted"


def test_two_models_in_turns_and_a_penalty_on_gradients(tmp_path: Path) -> None:
    body = """
    critic = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizers = [torch.optim.Adam(m.parameters()) for m in (model, critic)]
    for (x,) in torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(12 * 32, 64)), 32):
        made = model(x)
        score = critic(made.detach().requires_grad_())
        given = made.detach().requires_grad_()
        (slope,) = torch.autograd.grad(critic(given).sum(), given, create_graph=True)
        (score.mean() + slope.norm()).backward()
        optimizers[1].step()
        (-critic(made).mean()).backward()
        optimizers[0].step()
    """
    run_recorded(tmp_path, LOOP + dedent(body))
    table, beside = told(tmp_path / "run")
    critic = 4 * (8 * 32 + 32 + 32 + 1)
    # Each has its class before its paths, as in the tree of modules: both have a module "0" or "2".
    of_module = sums(table[table["part"] == "parameter"], "module")
    assert sum(n for path, n in of_module.items() if path.startswith("(Sequential).")) == critic
    assert sum(n for path, n in of_module.items() if path.startswith("(Net).")) == PARAMETERS
    of_floats = sums(table[table["dtype"] == "float32"])
    assert of_floats["optimizer"] == 2 * (PARAMETERS + critic) + 14 * 4  # a number for each tensor
    assert not beside["activations"]["by_module"]
    assert of_floats["activation"] > 0


def test_what_fails_is_said_and_the_script_goes_on(tmp_path: Path) -> None:
    body = """
    class Odd(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            return func(*(a.inner if isinstance(a, Odd) else a for a in args), **(kwargs or {}))
        def __tensor_flatten__(self):
            raise ValueError("no")
    odd = torch.Tensor._make_wrapper_subclass(Odd, (3,))
    odd.inner = torch.zeros(3)
    model.register_buffer("odd", odd)
    """
    text = LOOP + dedent(body) + EPOCH
    plain = run_plainly(tmp_path, text)["left"]
    assert run_recorded(tmp_path, text, warnings=1)["left"] == plain
    (warning,) = facts(tmp_path / "run/ranks/00000")["warnings"]
    assert warning == "what memory holds is off: ValueError: no; the job goes on without it"
    assert not rows(tmp_path / "run/ranks/00000", "held")
    assert len(rows(tmp_path / "run/ranks/00000")) == 24


@pytest.mark.long
def test_shards_are_what_a_rank_holds_and_a_rank_without_a_trace_counts_too(tmp_path: Path) -> None:
    body = """
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    dist.init_process_group("gloo")
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    """
    script = tmp_path / "job.py"
    script.write_text(COMPILES_NOTHING + LOOP + dedent(body) + EPOCH.partition("left")[0])
    options = ("--ranks", "0", "--no-sample")
    done = launch(wrapped(tmp_path / "run", as_ranks(script), *options), tmp_path)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        table, beside = told(tmp_path / "run", rank)
        # The head is the root's own, which stays gathered between the passes.
        parts = dict.fromkeys(STATE, PARAMETERS // 2) | {"communication": (64 * 8 + 8) * 4, "activation": ACTIVATIONS}
        assert sums(table) == parts | {"input": INPUT}
        for part in STATE:
            assert table[table["part"] == part]["full_bytes"].sum() == PARAMETERS
        assert beside["optimizers"][0]["state"][0]["full_bytes"] == PARAMETERS
