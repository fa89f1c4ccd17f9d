"""What a step is counted to compute in real jobs, that nothing else changes for it, and where it is not counted."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from dlprof.read.kineto import torch_trace
from tests.fixtures.jobs import COMPILES_NOTHING, TORCHRUN, facts, launch, record, rows, wrapped

torch: Any = pytest.importorskip("torch", reason="recording needs torch")

LOOP = """
import sys, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
torch.set_num_threads(1)
data = TensorDataset(torch.randn(128, 3, 8, 8), torch.randn(128, 1))
model = nn.Sequential(
    nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Dropout(0.5), nn.Linear(288, 16), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
def train(x, y):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss
"""

# 8 images: a 3 × 3 convolution of 3 channels to 8 at 6 × 6 places, and two linear layers. Backward: the gradients of
# all weights, and of all inputs but the images.
CONV = 2 * 8 * 36 * 8 * 27
LINEAR = 2 * 8 * 288 * 16
HEAD = 2 * 8 * 16
FORWARD = CONV + LINEAR + HEAD
BACKWARD = CONV + 2 * (LINEAR + HEAD)


def job(folder: Path, body: str) -> Path:
    path = folder / "job.py"
    path.write_text(COMPILES_NOTHING + LOOP + dedent(body))
    return path


def counted(folder: Path, body: str, *options: str) -> dict[str, Any]:
    record(job(folder, body), folder=folder / "run", options=["--no-trace", "--no-sample", *options])
    told = facts(folder / "run/ranks/00000")
    assert told["warnings"] == []
    flops: dict[str, Any] = told["flops"]
    return flops


EPOCHS = """
for epoch in range(2):
    for x, y in DataLoader(data, batch_size=8, shuffle=True):
        loss = train(x, y)
print(loss.item().hex(), [p.double().sum().item().hex() for p in model.parameters()], torch.rand(1).item().hex())
print(torch._C._len_torch_dispatch_stack(), "torch.utils.flop_counter" in sys.modules)
"""


@pytest.mark.long
def test_a_step_of_known_arithmetic_and_the_same_weights_and_random_numbers(tmp_path: Path) -> None:
    plain = launch([sys.executable, job(tmp_path, EPOCHS)], tmp_path)
    done = record(tmp_path / "job.py", folder=tmp_path / "run", options=["--window", "10,1,2"])
    assert done.stdout == plain.stdout
    assert done.stdout.splitlines()[1] == "0 False"
    told = facts(tmp_path / "run/ranks/00000")
    assert told["warnings"] == []
    flops = told["flops"]
    assert (flops["state"], flops["step"]) == ("counted", 9)
    assert (flops["total"], flops["backward"]) == (FORWARD + BACKWARD, BACKWARD)
    assert {(row["operator"], row["dtype"], row["flops"], row["calls"]) for row in flops["operators"]} == {
        ("aten::convolution", "float32", CONV, 1),
        ("aten::convolution_backward", "float32", CONV, 1),
        ("aten::addmm", "float32", LINEAR + HEAD, 2),
        ("aten::mm", "float32", 2 * (LINEAR + HEAD), 4),
    }
    assert flops["uncounted"] == {}
    assert sum(row["flops"] for row in flops["shapes"]) == flops["total"]
    (head,) = (row for row in flops["shapes"] if row["operator"] == "aten::addmm" and row["flops"] == HEAD)
    # bias, rows × inputs, inputs × outputs; each read once, and rows × outputs written.
    bias, rows_in, weight = (math.prod(map(int, tensor.split("x"))) for tensor in head["shape"].split())
    assert head["bytes"] == 4 * (bias + rows_in + weight + HEAD * bias // (2 * weight))
    moved = {row["operator"]: (row["device"], row["calls"]) for row in flops["moved"]}
    assert (moved["aten::convolution"], moved["aten::mm"]) == (("cpu", 1), ("cpu", 4))
    # Dropout behind the activation, and back, are a chain each.
    assert 0 < flops["fused_bytes"] < flops["chained_bytes"]
    # The counted step and the traced window, from the warm-up to the step after the export.
    profiled = [row["step"] for row in rows(tmp_path / "run/ranks/00000") if row["profiled"]]
    assert profiled == [9, 10, 11, 12, 13, 14]


def test_the_same_as_the_counter_of_pytorch_where_that_is_right(tmp_path: Path) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    body = """
    model = nn.Sequential(
        nn.Embedding(16, 32), nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), nn.Linear(32, 4),
        nn.Unflatten(1, (4, 2)), nn.ConvTranspose2d(4, 6, 2, stride=2), nn.Conv2d(6, 6, 2))
    for n in range(12):
        model(torch.arange(64).reshape(8, 8) % 16).sum().backward()
        torch.optim.SGD(model.parameters()).step()
    """
    found = counted(tmp_path, body)
    scope: dict[str, Any] = {}
    made = dedent(body).partition("for n in")
    exec("import torch\nfrom torch import nn\n" + made[0], scope)
    with FlopCounterMode(display=False) as counter:
        scope["model"](torch.arange(64).reshape(8, 8) % 16).sum().backward()
    assert found["total"] == counter.get_total_flops() > 0


@pytest.mark.long
def test_the_bytes_that_each_modules_operators_move(tmp_path: Path) -> None:
    script = job(tmp_path, EPOCHS)
    record(script, folder=tmp_path / "run", options=["--no-sample", "--window", "10,1,1"])
    told = (tmp_path / "run/ranks/00000/modules.jsonl").read_text().splitlines()
    moved = {row["path"]: row["moved_bytes"] for row in map(json.loads, told)}
    activations = 8 * 8 * 36
    x, weight, y = 8 * 288, 288 * 16, 8 * 16
    assert moved["1"] == 4 * 5 * activations  # read and written; back two are read and one is written
    assert moved["2"] == 0  # a view
    # Forward with the bias; back for the input, for the weight, and the bias as a sum.
    assert moved["4"] == 4 * ((16 + x + weight + y) + (y + weight + x) + (y + x + weight) + (y + 16))
    assert moved[""] == 0


@pytest.mark.long
def test_validation_is_passed_over_and_loaders_and_their_workers_do_not_count(tmp_path: Path) -> None:
    body = """
    import os
    class Heavy(TensorDataset):
        def __getitem__(self, n):
            torch.randn(64, 64) @ torch.randn(64, 64)
            if torch.utils.data.get_worker_info() is not None:
                assert torch._C._len_torch_dispatch_stack() == 0
            return super().__getitem__(n)
    heavy = Heavy(*data.tensors)
    for workers in (0, 2):
        for n, (x, y) in enumerate(DataLoader(heavy, batch_size=8, num_workers=workers)):
            if n == 9:
                with torch.no_grad():
                    model(x)
                for _ in DataLoader(heavy, batch_size=64, num_workers=1):
                    pass
                continue
            train(x, y)
    """
    found = counted(tmp_path, body)
    # The loader inside the step hands out two batches of its own, each with nothing done to it.
    assert found["total"] == FORWARD + BACKWARD
    assert found["step"] > 9


@pytest.mark.long
def test_a_failing_step_fails_as_ever_and_leaves_nothing_behind(tmp_path: Path) -> None:
    body = """
    for n in range(20):
        try:
            train(data[:8][0], data[:8][1])
            if n == 9:
                model(torch.randn(2, 2))
        except RuntimeError as e:
            print(n, str(e)[:20])
        optimizer.step()
    print(torch._C._len_torch_dispatch_stack())
    """
    path = job(tmp_path, body)
    plain = launch([sys.executable, path], tmp_path)
    done = record(path, folder=tmp_path / "run", options=["--no-trace", "--no-sample"])
    assert done.stdout == plain.stdout
    assert done.stdout.splitlines()[-1] == "0"
    assert facts(tmp_path / "run/ranks/00000")["flops"]["state"] == "counted"


@pytest.mark.long
def test_recording_that_fails_meanwhile_takes_the_mode_along_and_so_does_a_fork(tmp_path: Path) -> None:
    body = """
    import dlprof, os
    for n in range(15):
        train(*data[:8])
        depth = torch._C._len_torch_dispatch_stack()
        if depth:
            child = os.fork()
            if not child:
                os._exit(torch._C._len_torch_dispatch_stack())
            assert os.waitpid(child, 0)[1] == 0
            dlprof.marks.recorder.clock.row = None  # the next hook fails
            model(data[:8][0])
        print(n, depth, torch._C._len_torch_dispatch_stack())
    """
    done = record(job(tmp_path, body), folder=tmp_path / "run", options=["--no-trace", "--no-sample"])
    told = [line.split()[1:] for line in done.stdout.splitlines()]
    assert told == [["0", "0"]] * 8 + [["1", "0"]] + [["0", "0"]] * 6
    assert done.stderr.count("recording is off") == 1


# Steps end in the optimizer's. From 9 on the script's mode comes on top of ours, which cannot leave for some steps.
@pytest.mark.long
@pytest.mark.parametrize(("first", "last", "state"), [(3, 15, "abstained"), (9, 12, "counted")])
def test_a_mode_of_the_scripts_own_stays_its_own(first: int, last: int, state: str, tmp_path: Path) -> None:
    body = """
    from torch.utils._python_dispatch import TorchDispatchMode
    class Mine(TorchDispatchMode):
        seen = 0
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            Mine.seen += 1
            return func(*args, **(kwargs or {}))
    x, y = data[:8]
    first, last = int(sys.argv[1]), int(sys.argv[2])
    mode = Mine()
    for n in range(20):
        optimizer.zero_grad()
        if n == first:
            mode.__enter__()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        if n == last:
            mode.__exit__(None, None, None)
    print(Mine.seen, torch._C._len_torch_dispatch_stack())
    """
    path = job(tmp_path, body)
    args = [str(first), str(last)]
    done = record(path, *args, folder=tmp_path / "run", options=["--no-trace", "--no-sample"])
    assert done.stdout == launch([sys.executable, path, *args], tmp_path).stdout
    assert done.stdout.split()[1] == "0"
    told = facts(tmp_path / "run/ranks/00000")["flops"]
    assert told["state"] == state
    assert ("dispatch mode of its own" in told["why"]) == (state == "abstained")
    if state == "counted":
        assert (told["step"], told["total"]) == (9, FORWARD + BACKWARD)
        assert [row["step"] for row in rows(tmp_path / "run/ranks/00000") if row["profiled"]] == [9, 10, 11, 12, 13]


@pytest.mark.long
@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("original = model\nmodel = torch.compile(lambda x: original(x), backend='eager')", "torch.compile"),
        ("model.compile(backend='eager')", "torch.compile"),
        ("model = torch.jit.trace(model, data[:8][0], check_trace=False)", "TorchScript"),
    ],
)
def test_compiled_and_scripted_models_are_left_alone(change: str, why: str, tmp_path: Path) -> None:
    told = counted(tmp_path, f"{change}\nfor n in range(15): train(*data[:8])")
    assert told["state"] == "abstained"
    assert why in told["why"]


@pytest.mark.long
@pytest.mark.parametrize(("options", "steps", "state"), [(("--flops", "off"), 15, "off"), ((), 5, "waiting")])
def test_not_asked_for_and_not_reached(options: tuple[str, ...], steps: int, state: str, tmp_path: Path) -> None:
    assert counted(tmp_path, f"for n in range({steps}): train(*data[:8])", *options)["state"] == state


@pytest.mark.long
def test_slow_steps_are_counted_beside_the_window_that_opens_sooner_for_them(tmp_path: Path) -> None:
    body = "import time\nfor n in range(17): train(*data[:8]), time.sleep(0.45)"
    record(job(tmp_path, body), folder=tmp_path / "run", options=["--no-sample"])
    told = facts(tmp_path / "run/ranks/00000")
    window, flops = told["window"], told["flops"]
    assert told["warnings"] == []
    assert flops["state"] == "counted"
    assert window["first_step"] < 12
    assert not window["first_step"] <= flops["step"] <= window["last_step"]
    # The model, its six modules: in each of the traced steps.
    assert window["modules"]["ranges"] == 7 * (window["last_step"] - window["first_step"] + 1)


@pytest.mark.long
def test_an_operator_whose_arithmetic_is_not_known_is_told_by_name(tmp_path: Path) -> None:
    body = """
    @torch.library.custom_op("mylib::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2
    for n in range(12):
        with torch.no_grad():
            twice(twice(data[:8][0]))
        train(*data[:8])
    """
    found = counted(tmp_path, body)
    assert found["uncounted"] == {"mylib::twice": 2}
    assert found["total"] == FORWARD + BACKWARD


PARALLEL = """
import sys, time, torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
kind = sys.argv[1]
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
torch.set_num_threads(1)
net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
x, y = torch.randn(8, 32), torch.randn(8, 32)
if kind == "sharded":
    from torch.distributed.fsdp import fully_shard
    for layer in (net[0], net[2], net):
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
if kind == "tensor":
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    parallelize_module(net, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})
if kind == "pipeline":
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    net = nn.Sequential(nn.Linear(32, 32), nn.ReLU())
    schedule = Schedule1F1B(PipelineStage(net, rank, 2, torch.device("cpu")), 4, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for n in range(12):
    optimizer.zero_grad()
    if kind == "pipeline":
        schedule.step(x) if rank == 0 else schedule.step(target=y, losses=[])
    else:
        nn.functional.mse_loss(net(x), y).backward()
    optimizer.step()
local = [p.to_local() if hasattr(p, "to_local") else p for p in net.parameters()]
told = sum(p.double().sum() for p in local).item().hex()
everyone = [None, None]
dist.all_gather_object(everyone, told)
if rank == 0:
    print(everyone, torch._C._len_torch_dispatch_stack(), flush=True)
time.sleep(0.5)  # until gloo's thread has freed its last work: at the interpreter's end that would abort the process
dist.destroy_process_group()
"""


# Two layers of 8 × 32 × 64: forward, all gradients but that of the data; half of each on a rank that shares them.
# One layer of 8 × 32 × 32 a stage: the first has no gradient to hand on.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "totals"),
    [("sharded", [163_840, 163_840]), ("tensor", [81_920, 81_920]), ("pipeline", [32_768, 49_152])],
)
def test_what_a_rank_computes_of_a_model_that_ranks_share(kind: str, totals: list[int], tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(PARALLEL)
    command = [sys.executable, *TORCHRUN]
    command += [str(tmp_path / "job.py"), kind]
    plain = launch(command, tmp_path)
    done = launch(wrapped(tmp_path / "run", command, "--no-trace"), tmp_path)
    assert done.returncode == plain.returncode == 0, done.stderr
    assert done.stdout == plain.stdout
    told = [facts(tmp_path / f"run/ranks/{rank:05d}")["flops"] for rank in (0, 1)]
    assert [flops.get("total") for flops in told] == totals


@pytest.mark.long
def test_shapes_are_in_the_trace_where_they_are_asked_for(tmp_path: Path) -> None:
    record(job(tmp_path, EPOCHS), folder=tmp_path / "run", options=["--window", "2,1,2", "--shapes"])
    spans = torch_trace.read(tmp_path / "run/ranks/00000/trace.json.gz").tables["spans"]
    multiplied = spans[spans["name"] == "aten::addmm"]
    assert len(multiplied)
    assert (multiplied["shape"] != "").all()
    assert set(multiplied["dtype"]) == {"float32"}


WRITTEN_OUT = """
from torch.nn.functional import embedding, one_hot
table = torch.randn(8, 16, requires_grad=True)
def normed(x):
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
for n in range(12):
    words = torch.arange(4) % 8
    x = one_hot(words, 8).float() @ table
    x = normed(x) + embedding(words, table)
    x = torch.cat([x, x])
    loss = torch.softmax(x @ x.t(), -1).log().mean()
    loss.backward()
    torch.optim.SGD([table], 0.1).step()
"""


def test_lines_of_what_is_written_out_and_the_size_of_one_hot_rows_are_kept(tmp_path: Path) -> None:
    flops = counted(tmp_path, WRITTEN_OUT)
    assert flops["one_hot"] == [{"values": 32, "classes": 8}]
    text = (tmp_path / "job.py").read_text().splitlines()
    calls = facts(tmp_path / "run/ranks/00000")["calls"]
    lines = {call["kind"]: text[call["line"] - 1].strip() for call in calls}
    assert (
        lines
        | {
            "norm": "return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)",
            "one_hot": "x = one_hot(words, 8).float() @ table",
            "embedding": "x = normed(x) + embedding(words, table)",
            "cat": "x = torch.cat([x, x])",
            "softmax": "loss = torch.softmax(x @ x.t(), -1).log().mean()",
            "loss": "loss = torch.softmax(x @ x.t(), -1).log().mean()",
        }
        == lines
    )
