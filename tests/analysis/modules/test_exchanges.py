"""Which modules' gradients an exchange reduces: on hand-made traces, and of jobs of two ranks over gloo."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest

from dlprof.analysis.engine import RankData
from dlprof.analysis.modules.frames import bucket_shares, module_frames, module_rows
from dlprof.analysis.modules.work import module_work
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.steps import timing
from dlprof.read.run import open_run
from tests.fixtures import layers, runs, traces
from tests.fixtures.jobs import COMPILES_NOTHING, as_ranks, launch, rows, wrapped
from tests.fixtures.traces import AUTOGRAD

MODULES = [
    ("", 0, -1),
    ("emb", 300, 1),
    ("block", 0, -1),
    ("block.a", 100, 0),
    ("block.b", 100, 0),
    ("block.b", 100, 1),
]


def job(steps: int, exchanges: int) -> dict[str, Any]:
    """Make steps that reduce so many buckets of 1,000 ns each."""
    events: list[Any] = []
    for n in range(steps):
        t, c = 100_000 * n, 100 * n + 1
        events += [traces.step(n, t, 100_000), layers.called("", "Net", t, 1_000)]
        events += [
            layers.called(path, "Linear", t + 100 * k, 90) for k, path in enumerate(("emb", "block", "block.a"), 1)
        ]
        for k in range(exchanges):
            at = t + 10_000 + 2_000 * k
            events += [
                layers.accumulates(at, 500, AUTOGRAD),
                traces.op("c10d::allreduce_", at + 10, 100, AUTOGRAD),
                traces.call("cudaLaunchKernelExC", at + 50, 10, c + k, tid=AUTOGRAD),
                traces.collective(t + 50_000 + 1_000 * k, 1_000, 100, correlation=c + k),
            ]
    return traces.trace(*events)


def communication(folder: Path, made: dict[str, Any], facts: dict[str, Any] | None = None) -> dict[str, float]:
    """Return what each module exchanges in a mean step, ns."""
    run = runs.recorded(folder, (made, [], facts or {}))
    rows = [{"path": p, "kind": "Linear", "parameters": s, "parameter_bytes": s, "bucket": b} for p, s, b in MODULES]
    (run / "ranks/00000/modules.jsonl").write_text("".join(json.dumps(row | {"sharded": 0}) + "\n" for row in rows))
    work = runs.measured(run, module_work).frame(module_work)
    work = work[(work["part"] == "communication") & (work["device_ns"] > 0)]
    assert work["exposed_ns"].tolist() == work["device_ns"].tolist()
    return dict(zip(work["path"], work["device_ns"].round(), strict=True))


def test_an_exchange_is_for_the_modules_in_its_bucket_by_their_bytes(tmp_path: Path) -> None:
    # Bucket 0 holds 100 of block.a and 100 of block.b, which the trace does not show: those are block's.
    expected = {"block.a": 500.0, "block": 500.0 + 250.0, "emb": 750.0}
    assert communication(tmp_path / "one", job(3, 2)) == expected
    accumulated = {path: 2 * ns for path, ns in expected.items()}
    assert communication(tmp_path / "two", job(3, 4)) == accumulated


@pytest.mark.parametrize("types", [("Float", "Float", "Int"), ("", "", "")])
def test_which_parameters_were_used_is_exchanged_behind_the_last_bucket(tmp_path: Path, types: tuple[str, ...]) -> None:
    searching = {"models": [{"ddp": {"find_unused_parameters": True, "static_graph": False}}]}
    made = job(3, 3)
    reductions = [event for event in made["traceEvents"] if "dtype" in event.get("args", {})]
    for n, event in enumerate(reductions):
        event["args"]["dtype"] = types[n % 3]
    expected = {"": 1_000.0, "block.a": 500.0, "block": 750.0, "emb": 750.0}
    assert communication(tmp_path, made, searching) == expected


def test_of_another_number_of_exchanges_nobody_knows_which_is_which(tmp_path: Path) -> None:
    assert communication(tmp_path, job(3, 3)) == {"": 3_000.0}


HEAD = """
    import sys, torch, torch.distributed as dist
    from torch import nn
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.body = nn.Linear(16, 64), nn.Sequential(nn.Linear(64, 600), nn.ReLU(), nn.Linear(600, 600))
            self.last = nn.Linear(600, 600)
        def forward(self, x):
            return self.last(self.body(self.first(x)))
    net = Net()
"""
FSDP = """
    from torch.distributed.fsdp import fully_shard
    for part in (net.body[2], net.last):
        fully_shard(part)
    model = fully_shard(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(14):
        optimizer.zero_grad()
        model(torch.ones(4, 16)).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()
"""


def of_two_ranks(folder: Path, script: str, window: str) -> str:
    """Record a job of two ranks, and return what it printed."""
    (folder / "train.py").write_text(COMPILES_NOTHING + script)
    done = launch(wrapped(folder / "run", as_ranks(folder / "train.py"), "--window", window), folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
def test_what_fsdp_moves_is_for_the_module_that_it_shards(tmp_path: Path) -> None:
    of_two_ranks(tmp_path, dedent(HEAD) + dedent(FSDP), "6,1,4")
    frame = runs.measured(tmp_path / "run", module_work).frame(module_work)
    work: Any = frame[frame["rank"] == 1]
    exchanged = work[work["part"] == "communication"].set_index("path")
    assert set(exchanged.index) >= {"", "body.2", "last"}
    # One gather forward and one back, and the reduction of the gradients; the outermost one keeps what it gathered.
    assert exchanged.loc["last", "calls"] == exchanged.loc["body.2", "calls"]
    assert exchanged.loc["last", "exposed_ns"] > 0
    told = rows(tmp_path / "run/ranks/00001", "modules")
    assert {row["path"] for row in told if row["sharded"]} == {"", "body.2", "last"}
    backward = work[work["part"] == "backward"].set_index("path")
    assert set(backward.index) >= {"first", "body.0", "body.1", "body.2", "last"}


# What each bucket holds a twin of the model tells by its hook before the window, by names of parameters.
TWIN = """
    import contextlib, copy, json
    from torch.utils.checkpoint import checkpoint
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(16, 64)
            sizes = ((64, 500), (500, 600), (600, 700))
            self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(n, m), nn.ReLU()) for n, m in sizes])
            self.last = nn.Linear(700, 16)
            self.spare = nn.Linear(512, 600)
        def forward(self, x):
            x = self.first(x)
            for block in self.blocks:
                x = block(x) if again is None else checkpoint(block, x, use_reentrant=again)
            return self.last(x + (self.spare(torch.ones(512)).sum() if uses_spare else 0))
    def told(_, bucket):
        held.append([names[id(p)] for p in bucket.parameters()])
        every = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return every.then(lambda done: done.value()[0].div_(2))
    net = Net()
    twin = nn.parallel.DistributedDataParallel(copy.deepcopy(net), bucket_cap_mb=1, **more)
    names = {id(p): name for name, p in twin.module.named_parameters()}
    twin.register_comm_hook(None, told)
    for _ in range(3):
        held = []
        twin(torch.ones(4, 16)).square().mean().backward()
    if dist.get_rank() == 1:
        print(json.dumps(held))
    del twin, held
    model = nn.parallel.DistributedDataParallel(net, bucket_cap_mb=1, **more)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(14):
        optimizer.zero_grad()
        for k in range(passes):
            with model.no_sync() if k < passes - 1 else contextlib.nullcontext():
                model(torch.ones(4, 16)).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()
"""
DDPS = {
    "plain": "again, passes, uses_spare, more = None, 1, True, {}",
    "checkpointed": "again, passes, uses_spare, more = False, 1, True, {'gradient_as_bucket_view': True}",
    "reentrant, static": "again, passes, uses_spare, more = True, 1, True, {'static_graph': True}",
    "accumulating": "again, passes, uses_spare, more = False, 3, True, {}",
    "unused, accumulating": "again, passes, uses_spare, more = None, 2, False, {'find_unused_parameters': True}",
    "unused, static": (
        "again, passes, uses_spare, more = False, 1, False, {'find_unused_parameters': True, 'static_graph': True}"
    ),
}


SHORTER = ("unused, accumulating",)  # of the others each shows one thing more


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.long if kind in SHORTER else pytest.mark.slow) for kind in DDPS]
)
def test_what_ddp_reduces_and_what_runs_in_its_backward_pass_are_for_their_modules(tmp_path: Path, kind: str) -> None:
    script = dedent(HEAD).replace("net = Net()\n", "") + DDPS[kind] + dedent(TWIN)
    held = json.loads(of_two_ranks(tmp_path, script, "9,1,4").splitlines()[-1])
    assert len(held) >= 3
    rank = RankData(open_run(tmp_path / "run").ranks[1])
    spans, rows, frames = rank.table("spans"), rank.once(module_rows), rank.once(module_frames)
    shares, place = rank.once(bucket_shares), {path: n for n, path in enumerate(frames.paths)}
    for row, names in zip(shares, held, strict=True):
        # A module whose weight and bias are in different buckets has its part; what is not called is the model's.
        called = {name.rpartition(".")[0] for name in names}
        assert {frames.paths[n] for n in np.flatnonzero(row)} == {path if path in place else "" for path in called}

    searched = "unused" in kind and "static" not in kind
    calls, start = np.flatnonzero(host.is_named(spans, "c10d::allreduce_")), spans["start_ns"].to_numpy()
    windows = rank.once(timing).host_windows
    for begin, end in windows.tolist():
        mine = calls[(start[calls] >= begin) & (start[calls] < end)]
        assert rows["bucket"].to_numpy()[mine].tolist() == [*range(len(held)), *[-1] * searched]

    work = rank.once(module_work).set_index(["path", "part"])
    passes = 3 if kind == "accumulating" else 2 if kind == "unused, accumulating" else 1
    for k in range(3):
        assert work.loc[(f"blocks.{k}.0", "forward"), "calls"] == passes
        assert ((f"blocks.{k}.0", "recompute") in work.index) == (
            "again, passes, uses_spare, more = None" not in DDPS[kind]
        )
    functions = np.flatnonzero(frames.functions & (frames.start >= windows[0, 0]) & (frames.start < windows[-1, 1]))
    named = spans["name"].astype(str).to_numpy()[frames.row[functions]]
    module = [frames.paths[n] if n >= 0 else "-" for n in frames.module[functions].tolist()]
    products = [of for of, name in zip(module, named, strict=True) if name.endswith("AddmmBackward0")]
    linear = ["first", "blocks.0.0", "blocks.1.0", "blocks.2.0", "last", *["spare"] * ("unused" not in kind)]
    assert Counter(products) == dict.fromkeys(linear, len(windows) * passes)
    outside = {name for of, name in zip(module, named, strict=True) if of == "-"}
    assert outside == {f"{layers.ENGINE}MeanBackward0", f"{layers.ENGINE}PowBackward0"}
