"""The ranges around real all-to-alls: what goes where is in the trace, and nowhere else."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dlprof.analysis.communication.collectives import collectives
from tests.fixtures.jobs import TORCHRUN, launch, tiny, wrapped
from tests.fixtures.runs import measured

pytest.importorskip("torch", reason="recording needs torch")

JOB = """
import torch.distributed as dist
from torch.distributed import all_to_all_single
dist.init_process_group("gloo")
rank = dist.get_rank()
for step in range(12):
    give, take = [[2, 1 + step], [3, 4]][rank], [[2, 3], [1 + step, 4]][rank]
    came = torch.empty(sum(take), 8)
    all_to_all_single(came, torch.randn(sum(give), 8), output_split_sizes=take, input_split_sizes=give)
    even = torch.empty(4)
    work = dist.all_to_all_single(even, torch.full((4,), float(rank)), async_op=True)
    work.wait()
    assert even.tolist() == [0, 0, 1, 1]
    for batch in DataLoader(data, batch_size=32):
        train((came[:1], batch[1][:1]))
        break
dist.destroy_process_group()
"""


@pytest.mark.long
def test_the_trace_of_gloo_tells_what_goes_where(tmp_path: Path) -> None:
    script = tiny(tmp_path, JOB)
    done = launch(wrapped(tmp_path / "run", [sys.executable, *TORCHRUN, script], "--window", "4,1,3"), tmp_path)
    assert done.returncode == 0, done.stderr
    frame = measured(tmp_path / "run", collectives).frame(collectives)
    frame = frame[frame["collective"] == "all_to_all"]
    for rank, of in frame.groupby("rank"):
        steps = [int(text.split(">")[0].split(",")[1]) for text in of["pieces"] if text != ">"]
        assert of["pieces"].tolist()[1::2] == [">"] * len(steps)
        if rank == 0:
            assert steps == list(range(steps[0], steps[0] + len(steps)))
            assert len(steps) >= 2
        else:
            assert set(steps) == {4}


@pytest.mark.long
def test_a_compiled_step_is_not_broken_by_it(tmp_path: Path) -> None:
    """Dynamo takes the collective itself, with one graph, as without us."""
    body = """
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

@torch.compile(backend="eager", fullgraph=True)
def exchange(x):
    came = torch.empty_like(x)
    dist.all_to_all_single(came, x * 2)
    return came + 1

for step in range(12):
    assert exchange(torch.ones(4)).tolist() == [3, 3, 3, 3]
    for batch in DataLoader(data, batch_size=32):
        train(batch)
dist.destroy_process_group()
"""
    script = tiny(tmp_path, body)
    plain = launch([sys.executable, script], tmp_path)
    done = launch(wrapped(tmp_path / "run", [sys.executable, script]), tmp_path)
    assert (done.returncode, plain.returncode) == (0, 0), plain.stderr + done.stderr
