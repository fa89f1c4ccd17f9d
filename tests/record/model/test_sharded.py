"""Of each exchange of FSDP's it is known which module's parameters it moves, whoever has issued it: jobs of two ranks.

The units have different sizes. The script notes the size of all that is exchanged, in order.
"""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple

import numpy as np
import pytest

from dlprof.analysis.engine import RankData
from dlprof.analysis.modules.frames import module_frames, module_rows
from dlprof.analysis.timeline import host
from dlprof.analysis.timeline.steps import timing
from dlprof.read.run import open_run
from tests.fixtures.jobs import COMPILES_NOTHING, as_ranks, launch, wrapped

pytest.importorskip("torch", reason="recording needs torch")

UNITS = {100 * 200 + 200: "body.0", 200 * 300 + 300: "body.2", 300 * 400 + 400: "body.3"}
OUTERMOST = 10 * 100 + 100 + 400 * 10 + 10

HEAD = """
import json, sys, torch, torch.distributed as dist
from torch import nn
torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group("gloo")
moved = []
def noting(name, original):
    def call(*args, **kwargs):
        parts = [part if type(part) is list else [part] for part in (*args, *kwargs.values())]
        moved[-1].append([name, max(sum(t.numel() for t in part if torch.is_tensor(t)) for part in parts)])
        return original(*args, **kwargs)
    return call
for name in ("all_gather", "all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor",
             "reduce_scatter_single"):
    if hasattr(dist, name):
        setattr(dist, name, noting(name.replace("_tensor", "").replace("_single", ""), getattr(dist, name)))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(10, 100)
        self.body = nn.Sequential(nn.Linear(100, 200), nn.ReLU(), nn.Linear(200, 300), nn.Linear(300, 400))
        self.last = nn.Linear(400, 10)
    def forward(self, x):
        return self.last(self.body(self.first(x)))
net = Net()
passes, synchronised = 1, lambda last: None
"""
LOOP = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(14):
    moved.append([])
    optimizer.zero_grad()
    for k in range(passes):
        with synchronised(k == passes - 1) or torch.enable_grad():
            model(torch.ones(4, 10)).square().mean().backward()
    optimizer.step()
if dist.get_rank() == 1:
    print(json.dumps(moved))
dist.destroy_process_group()
"""

FIRST = """
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel as FSDP, ShardingStrategy
def shard(prefetch=None, inner=lambda module: module, **more):
    more.update(device_id=torch.device("cpu"), backward_prefetch=prefetch and BackwardPrefetch[prefetch])
    for k in (0, 2, 3):
        net.body[k] = FSDP(inner(net.body[k]), **more)
    return FSDP(net, **more)
"""
SECOND = """
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
units = [net.body[k] for k in (0, 2, 3)]
for unit in units:
    fully_shard(unit)
model = fully_shard(net)
"""

# The others than "ahead" are further cases, before a release.
JOBS = {
    "checkpointed": f"{FIRST}\nmodel = shard(inner=checkpoint_wrapper)",
    "ahead, accumulating": (
        f'{FIRST}\nmodel, passes = shard("BACKWARD_PRE", forward_prefetch=True, use_orig_params=True, '
        "sharding_strategy=ShardingStrategy.SHARD_GRAD_OP), 3"
        "\nsynchronised = lambda last: None if last else model.no_sync()"
    ),
    "reentrant": f'{FIRST}\nmodel = shard("BACKWARD_PRE", lambda m: checkpoint_wrapper(m, CheckpointImpl.REENTRANT))',
    "second, ahead as the script says": f"""{SECOND}
net.set_modules_to_forward_prefetch(units[:2])
units[0].set_modules_to_forward_prefetch(units[2:])
net.set_modules_to_backward_prefetch(units[1:][::-1])
""",
    "second, checkpointed, accumulating": f"""{SECOND}
passes = 2
synchronised = lambda last: net.set_requires_gradient_sync(last)
Net.forward = lambda self, x: self.last(checkpoint(self.body, self.first(x), use_reentrant=False))
""",
    "ahead": f'{FIRST}\nmodel = shard("BACKWARD_PRE", forward_prefetch=True, use_orig_params=True)',
}


class Job(NamedTuple):
    """A recorded job of two ranks, and its exchanges in a step: which each is, and whose parameters it moves."""

    name: str
    run: Path
    truth: list[tuple[str, str]]


def traced(run: Path) -> list[list[tuple[str, str]]]:
    """Return of each traced step what each exchange is, and the module that it is for, in order."""
    rank = RankData(open_run(run).ranks[1])
    spans, rows, frames = rank.table("spans"), rank.once(module_rows), rank.once(module_frames)
    calls = host.is_named(spans, "c10d::") & host.is_one_of(spans["collective"], "all_gather", "reduce_scatter")
    start = spans["start_ns"].to_numpy()
    found = []
    for begin, end in rank.once(timing).host_windows.tolist():
        mine = np.flatnonzero(calls & (start >= begin) & (start < end))
        module = rows["module"].to_numpy()[mine].tolist()
        assert set(rows["part"].iloc[mine]) == {"communication"}
        kinds = spans["collective"].astype(str).iloc[mine]
        found.append([(kind, frames.paths[of] if of >= 0 else "?") for kind, of in zip(kinds, module, strict=True)])
    return found


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=() if name == "ahead" else pytest.mark.slow) for name in JOBS]
)
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Record a job, and return of a step what each exchange is, and whose parameters it moves by its size."""
    folder = tmp_path_factory.mktemp("job")
    script = folder / "train.py"
    script.write_text(COMPILES_NOTHING + HEAD + JOBS[request.param] + dedent(LOOP))
    done = launch(wrapped(folder / "run", as_ranks(script), "--window", "6,1,4"), folder)
    assert done.returncode == 0, done.stderr
    assert "dlprof: modules" not in done.stderr
    moved: list[list[tuple[str, int]]] = json.loads(done.stdout.splitlines()[-1])
    assert all(step == moved[-1] for step in moved[2:])
    assert {size for _, size in moved[-1]} == {OUTERMOST, *UNITS}
    return Job(request.param, folder / "run", [(kind, UNITS.get(size, "")) for kind, size in moved[-1]])


@pytest.mark.long
def test_an_exchange_is_for_the_module_whose_parameters_it_moves(job: Job) -> None:
    assert traced(job.run) == [job.truth] * 4


@pytest.mark.long
def test_a_trace_of_others_shows_what_is_not_gathered_ahead(job: Job, tmp_path: Path) -> None:
    if job.name not in ("ahead", "checkpointed"):
        pytest.skip("a case of each is enough")
    run = Path(shutil.copytree(job.run, tmp_path / "run"))
    path = run / "ranks/00001/trace.json.gz"
    trace = json.loads(gzip.decompress(path.read_bytes()))
    ours = ("dlprof::all_gather", "dlprof::reduce")
    trace["traceEvents"] = [e for e in trace["traceEvents"] if not str(e.get("name")).startswith(ours)]
    path.write_bytes(gzip.compress(json.dumps(trace).encode()))
    for step in traced(run):
        known = [(kind, "?" if of == "?" else whose) for (kind, whose), (_, of) in zip(job.truth, step, strict=True)]
        assert step == known
        assert (step == job.truth) == (job.name == "checkpointed")
        assert (step[0], step[-1]) == (job.truth[0], job.truth[-1])
