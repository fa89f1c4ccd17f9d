"""What memory holds in one step of real jobs, that nothing else changes for it, and what is said where it fails."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from dlprof.read import held
from tests.fixtures.jobs import COMPILES_NOTHING, TORCHRUN, facts, launch, record, rows, wrapped

torch: Any = pytest.importorskip("torch", reason="recording needs torch")

LOOP = """
import sys, torch
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
def say(loss):
    print(loss.item().hex(), [p.double().sum().item().hex() for p in model.parameters()], torch.rand(1).item().hex())
"""

EPOCH = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
for n in range(24):
    x, y = batch()
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
say(loss)
"""

PARAMETERS = 2 * (64 * 256 + 256 + 256 * 64 + 64) + 64 * 8 + 8
# What each layer takes in, of 32 rows, but for the batch itself; the log-softmax, the labels, and the sum of the
# weights that these have.
ACTIVATIONS = 32 * (256 + 64 + 256 + 64 + 8) * 4 + 32 * 8 + 4


def job(folder: Path, *bodies: str, compiles: bool = False) -> Path:
    path = folder / "job.py"
    path.write_text(("" if compiles else COMPILES_NOTHING) + LOOP + "".join(map(dedent, bodies)))
    return path


def told(run: Path, rank: int = 0) -> tuple[Any, Mapping[str, Any]]:
    """Return the table of a rank and what stands beside it."""
    reading = held.read(run / f"ranks/{rank:05d}/held.json")
    assert reading.warnings == ()
    return reading.tables["held"], reading.facts["held"]


def sums(table: Any, by: str = "part") -> dict[str, int]:
    grouped: dict[str, int] = table.groupby(by, observed=True)["bytes"].sum().to_dict()
    return grouped


def counted(folder: Path, body: str, *options: str) -> tuple[Any, Mapping[str, Any]]:
    record(job(folder, body), folder=folder / "run", options=["--no-trace", "--no-sample", *options])
    assert facts(folder / "run/ranks/00000")["warnings"] == []
    return told(folder / "run")


def test_a_step_of_known_bytes_and_the_same_weights_and_random_numbers(tmp_path: Path) -> None:
    plain = launch([sys.executable, job(tmp_path, EPOCH)], tmp_path)
    done = record(tmp_path / "job.py", folder=tmp_path / "run", options=["--window", "10,1,2"])
    assert done.stdout == plain.stdout
    assert facts(tmp_path / "run/ranks/00000")["warnings"] == []
    table, beside = told(tmp_path / "run")
    assert sums(table) == {
        "parameter": PARAMETERS * 4,
        "gradient": PARAMETERS * 4,
        "optimizer": PARAMETERS * 4,
        "activation": ACTIVATIONS,
        "input": 32 * 64 * 4,
    }
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
    assert 0 < beside["process"]["before_bytes"] < beside["process"]["anonymous_bytes"]
    # In the step whose operators are counted, which counts for nothing anyway.
    assert beside["step"] == 9
    profiled = [row["step"] for row in rows(tmp_path / "run/ranks/00000") if row["profiled"]]
    assert profiled == [9, 10, 11, 12, 13, 14]


@pytest.mark.parametrize(
    ("options", "step"),
    [
        (["--flops", "off", "--window", "12,2,2"], 12),  # the profiler warms up
        (["--flops", "off", "--window", "0,0,4"], 5),  # the step behind the window
        (["--flops", "off", "--no-trace"], 9),
    ],
)
def test_which_step_it_is(options: list[str], step: int, tmp_path: Path) -> None:
    record(job(tmp_path, EPOCH), folder=tmp_path / "run", options=["--no-sample", *options])
    table, beside = told(tmp_path / "run")
    assert beside["step"] == step
    assert sums(table)["activation"] == ACTIVATIONS
    (row,) = (row for row in rows(tmp_path / "run/ranks/00000") if row["step"] == step)
    assert row["profiled"] == 1


def test_an_averaged_copy_that_no_step_calls_is_held_too(tmp_path: Path) -> None:
    odd = "class Odd(nn.Module):\n    def modules(self): raise TypeError\nodd = Odd(), nn.LazyLinear(4)\n"
    body = odd + EPOCH.replace("optimizer = ", "average = torch.optim.swa_utils.AveragedModel(model)\noptimizer = ", 1)
    table, _ = counted(tmp_path, body.replace("optimizer.step()", "optimizer.step(); average.update_parameters(model)"))
    copy = table[table["module"] == "(AveragedModel)"]
    assert sums(copy) == {"buffer": PARAMETERS * 4 + 8}  # and how often it was averaged
    assert sums(table)["parameter"] == PARAMETERS * 4


@pytest.mark.long
def test_what_is_compiled_is_counted_and_not_compiled_again(tmp_path: Path) -> None:
    body = """
    model = torch.compile(model, backend="aot_eager")
    """
    counters = """
    from torch._dynamo.utils import counters
    print({k: dict(v) for k, v in counters.items() if k in ("stats", "recompiles", "graph_break", "frames")})
    """
    script = job(tmp_path, body, EPOCH, counters, compiles=True)
    plain = launch([sys.executable, script], tmp_path)
    done = record(script, folder=tmp_path / "run", options=["--no-sample"])
    assert done.stdout == plain.stdout
    table, beside = told(tmp_path / "run")
    assert sums(table)["parameter"] == PARAMETERS * 4
    assert sums(table)["activation"] == ACTIVATIONS
    assert beside["activations"]["state"] == "counted"


def test_micro_batches_keep_no_more_than_one_and_meet_their_gradients(tmp_path: Path) -> None:
    table, beside = counted(
        tmp_path,
        """
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        for n in range(12):
            optimizer.zero_grad()
            for _ in range(3):
                x, y = batch()
                F.cross_entropy(model(x), y).backward()
            optimizer.step()
        """,
    )
    assert sums(table)["activation"] == ACTIVATIONS
    assert sums(table)["input"] == 32 * 64 * 4
    assert beside["activations"]["graphs"] == 3
    at = {moment["moment"]: moment["gradient_bytes"] for moment in beside["moments"]}
    assert at == {"backward": PARAMETERS * 4, "gradients": PARAMETERS * 4}


def test_two_models_in_turns_and_a_penalty_on_gradients(tmp_path: Path) -> None:
    table, beside = counted(
        tmp_path,
        """
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
        """,
    )
    critic = 8 * 32 + 32 + 32 + 1
    size = PARAMETERS + critic
    # Each has its class before its paths, as in the tree of modules: both have a module "0" or "2".
    of_module = sums(table[table["part"] == "parameter"], "module")
    assert sum(n for path, n in of_module.items() if path.startswith("(Sequential).")) == critic * 4
    assert sum(n for path, n in of_module.items() if path.startswith("(Net).")) == PARAMETERS * 4
    assert sums(table)["parameter"] == size * 4
    assert sums(table[table["dtype"] == "float32"])["optimizer"] == 2 * size * 4 + 14 * 4  # a number for each tensor
    assert not beside["activations"]["by_module"]
    assert sums(table)["activation"] > 0


def test_threads_that_compute_together_are_not_told_apart(tmp_path: Path) -> None:
    table, beside = counted(
        tmp_path,
        """
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
        """,
    )
    assert not beside["activations"]["by_module"]
    assert sums(table)["activation"] == ACTIVATIONS
    assert set(table[table["part"] == "activation"]["module"]) == {""}


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
    plain = launch([sys.executable, job(tmp_path, body, EPOCH)], tmp_path)
    done = record(tmp_path / "job.py", folder=tmp_path / "run", options=["--no-trace", "--no-sample"])
    assert plain.returncode == 0, plain.stderr
    assert done.stdout == plain.stdout
    (warning,) = facts(tmp_path / "run/ranks/00000")["warnings"]
    assert warning == "what memory holds is off: ValueError: no; the job goes on without it"
    assert not (tmp_path / "run/ranks/00000/held.json").exists()
    assert len(rows(tmp_path / "run/ranks/00000")) == 24


def test_a_dispatch_mode_of_the_scripts_own_sees_none_of_it(tmp_path: Path) -> None:
    table, beside = counted(
        tmp_path,
        """
        from torch.utils._python_dispatch import TorchDispatchMode
        class Own(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                return func(*args, **(kwargs or {}))
        with Own():
        """
        + "    "
        + dedent(EPOCH).strip().replace("\n", "\n        " + "    "),
    )
    assert beside["activations"] | {"graphs": 0} == {
        "state": "abstained",
        "why": "the script has a dispatch mode of its own",
        "graphs": 0,
        "nodes": 0,
        "recomputed": 0,
        "unseen": 0,
        "unseen_kinds": [],
        "by_module": True,
    }
    assert sums(table) == {
        **dict.fromkeys(("parameter", "gradient", "optimizer"), PARAMETERS * 4),
        "input": 32 * 64 * 4,
    }


DISTRIBUTED = """
import torch.distributed as dist
dist.init_process_group("gloo")
"""


@pytest.mark.long
@pytest.mark.parametrize("view", [False, True])
def test_buckets_are_communications_unless_gradients_lie_in_them(view: bool, tmp_path: Path) -> None:
    body = f"""
    model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view={view})
    """
    script = job(tmp_path, DISTRIBUTED, body, EPOCH)
    done = launch(wrapped(tmp_path / "run", [sys.executable, *TORCHRUN, script], "--no-trace", "--no-sample"), tmp_path)
    assert done.returncode == 0, done.stderr
    table, beside = told(tmp_path / "run", 1)
    found = sums(table)
    assert found["gradient"] == PARAMETERS * 4
    assert found.get("communication", 0) == (0 if view else PARAMETERS * 4)
    assert found["activation"] == ACTIVATIONS
    assert set(table["module"]) >= {"blocks.0.up", "head"}
    # set_to_none frees no bucket.
    at = {moment["moment"]: moment["gradient_bytes"] for moment in beside["moments"]}
    assert at.get("backward", 0) == (PARAMETERS * 4 if view else 0)


@pytest.mark.long
def test_shards_are_what_a_rank_holds_and_a_rank_without_a_trace_counts_too(tmp_path: Path) -> None:
    body = """
    from torch.distributed.fsdp import fully_shard
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    """
    script = job(tmp_path, DISTRIBUTED, body, EPOCH)
    options = ("--ranks", "0", "--no-sample")
    done = launch(wrapped(tmp_path / "run", [sys.executable, *TORCHRUN, script], *options), tmp_path)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        table, beside = told(tmp_path / "run", rank)
        found = sums(table)
        for part in ("parameter", "gradient", "optimizer"):
            assert found[part] == PARAMETERS * 4 // 2
            assert table[table["part"] == part]["full_bytes"].sum() == PARAMETERS * 4
        assert found["activation"] == ACTIVATIONS
        # The head is the root's own, which stays gathered between the passes.
        assert found["communication"] == (64 * 8 + 8) * 4
        assert beside["optimizers"][0]["state"][0]["full_bytes"] == PARAMETERS * 4


def test_a_validation_is_waited_for(tmp_path: Path) -> None:
    table, beside = counted(
        tmp_path,
        """
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
        """,
        *("--flops", "off"),
    )
    # 8 steps of training, 16 of validation, one in which that turns out to have ended.
    assert beside["step"] == 25
    assert sums(table)["activation"] == ACTIVATIONS
    profiled = [row["step"] for row in rows(tmp_path / "run/ranks/00000") if row["profiled"]]
    assert profiled == [25]
