"""What a step is counted to compute in real jobs, that nothing else changes for it, and where it is not counted."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from dlprof.read.kineto import torch_trace
from dlprof.record.collectors.flops import _draws
from tests.fixtures.in_process import run_plainly, run_recorded
from tests.fixtures.jobs import TORCHRUN, facts, launch, rows, wrapped

torch: Any = pytest.importorskip("torch", reason="recording needs torch")

LOOP = """
import os, time, torch
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
STEPS = "for n in range(15): train(*data[:8])"

# 8 images: a 3 × 3 convolution of 3 channels to 8 at 6 × 6 places, and two linear layers. Backward: the gradients of
# all weights, and of all inputs but the images.
CONV, LINEAR, HEAD = 2 * 8 * 36 * 8 * 27, 2 * 8 * 288 * 16, 2 * 8 * 16
BACKWARD = CONV + 2 * (LINEAR + HEAD)
TOTAL = CONV + LINEAR + HEAD + BACKWARD


def test_a_step_of_known_arithmetic_and_bytes_and_the_same_weights_and_random_numbers(tmp_path: Path) -> None:
    body = """
    for epoch in range(2):
        for x, y in DataLoader(data, batch_size=8, shuffle=True):
            loss = train(x, y)
    left = loss.item(), [p.double().sum().item() for p in model.parameters()], torch.rand(1).item()
    assert torch._C._len_torch_dispatch_stack() == 0
    """
    plain = run_plainly(tmp_path, LOOP + dedent(body))["left"]
    counter = "torch.utils.flop_counter" in sys.modules
    script = run_recorded(tmp_path, LOOP + dedent(body), window=(10, 1, 2), shapes=True)
    assert script["left"] == plain
    assert ("torch.utils.flop_counter" in sys.modules) == counter  # importing it takes half a second
    rank = tmp_path / "run/ranks/00000"
    flops = facts(rank)["flops"]
    assert (flops["state"], flops["step"], flops["uncounted"]) == ("counted", 9, {})
    assert (flops["total"], flops["backward"]) == (TOTAL, BACKWARD)
    assert {(row["operator"], row["dtype"], row["flops"], row["calls"]) for row in flops["operators"]} == {
        ("aten::convolution", "float32", CONV, 1),
        ("aten::convolution_backward", "float32", CONV, 1),
        ("aten::addmm", "float32", LINEAR + HEAD, 2),
        ("aten::mm", "float32", 2 * (LINEAR + HEAD), 4),
    }
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
    assert [row["step"] for row in rows(rank) if row["profiled"]] == [9, 10, 11, 12, 13, 14]

    modules = {row["path"]: row["moved_bytes"] for row in rows(rank, "modules")}
    activations, x, weight, y = 8 * 8 * 36, 8 * 288, 288 * 16, 8 * 16
    assert modules["1"] == 4 * 5 * activations  # read and written; back two are read and one is written
    assert modules["2"] == modules[""] == 0  # a view
    # Forward with the bias; back for the input, for the weight, and the bias as a sum.
    assert modules["4"] == 4 * ((16 + x + weight + y) + (y + weight + x) + (y + x + weight) + (y + 16))

    spans = torch_trace.read(rank / "trace.json.gz").tables["spans"]
    multiplied = spans[spans["name"] == "aten::addmm"]
    assert len(multiplied)
    assert (multiplied["shape"] != "").all()
    assert set(multiplied["dtype"]) == {"float32"}


def test_the_same_as_the_counter_of_pytorch_where_that_is_right(tmp_path: Path) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    script = run_recorded(
        tmp_path,
        """
import torch
from torch import nn
model = nn.Sequential(
    nn.Embedding(16, 32), nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), nn.Linear(32, 4),
    nn.Unflatten(1, (4, 2)), nn.ConvTranspose2d(4, 6, 2, stride=2), nn.Conv2d(6, 6, 2))
for n in range(12):
    model(torch.arange(64).reshape(8, 8) % 16).sum().backward()
    torch.optim.SGD(model.parameters()).step()
""",
    )
    with FlopCounterMode(display=False) as counter:
        script["model"](torch.arange(64).reshape(8, 8) % 16).sum().backward()
    assert facts(tmp_path / "run/ranks/00000")["flops"]["total"] == counter.get_total_flops() > 0


COUNTED = {"state": "counted", "total": TOTAL}
MODE = """
from torch.utils._python_dispatch import TorchDispatchMode
class Mine(TorchDispatchMode):
    seen = 0
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        Mine.seen += 1
        return func(*args, **(kwargs or {}))
mode = Mine()
for n in range(20):
    optimizer.zero_grad()
    if n == FIRST:
        mode.__enter__()
    nn.functional.mse_loss(model(data[:8][0]), data[:8][1]).backward()
    optimizer.step()
    if n == LAST:
        mode.__exit__(None, None, None)
left = Mine.seen, torch._C._len_torch_dispatch_stack()
assert left[1] == 0
"""
# A script and, of the facts about its step, those that matter.
SCRIPTS: dict[str, tuple[str, dict[str, Any]]] = {
    "not reached": ("for n in range(5): train(*data[:8])", {"state": "waiting"}),
    "not wanted": (STEPS, {"state": "off"}),
    "torch.compile": (
        f"original = model\nmodel = torch.compile(lambda x: original(x), backend='eager')\n{STEPS}",
        {"state": "abstained", "why": "torch.compile"},
    ),
    "a compiled module": (f"model.compile(backend='eager')\n{STEPS}", {"state": "abstained", "why": "torch.compile"}),
    "TorchScript": (
        f"model = torch.jit.trace(model, data[:8][0], check_trace=False)\n{STEPS}",
        {"state": "abstained", "why": "TorchScript"},
    ),
    "a mode of the script's own": (
        MODE.replace("FIRST", "3").replace("LAST", "15"),
        {"state": "abstained", "why": "dispatch mode of its own"},
    ),
    "FSDP1, which computes what is sharded": (
        f"""
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
{STEPS}
dist.destroy_process_group()
""",
        COUNTED,
    ),
    # It comes on top of ours, which cannot leave for some steps.
    "a mode that begins in the counted step": (
        MODE.replace("FIRST", "9").replace("LAST", "12"),
        COUNTED | {"step": 9, "profiled": [9, 10, 11, 12, 13]},
    ),
    "an operator of unknown arithmetic": (
        """
        @torch.library.custom_op("dlprof_tests::twice", mutates_args=(), schema="(Tensor x) -> Tensor")
        def twice(x):
            return x * 2
        for n in range(12):
            with torch.no_grad():
                twice(twice(data[:8][0]))
            train(*data[:8])
        """,
        COUNTED | {"uncounted": {"dlprof_tests::twice": 2}},
    ),
    "a sparse gradient": (
        """
        table = nn.EmbeddingBag(50, 16, sparse=True)
        for n in range(12):
            (table(torch.arange(8).view(4, 2)).sum() + train(*data[:8]).detach()).backward()
            table.weight.grad = None
        """,
        {"state": "counted", "why": "", "total": TOTAL, "flows": []},
    ),
    # Of 3 x 8 values, 3 are there: 2 FLOPs for each and each of 4 columns.
    **{
        f"a product of a sparse matrix, {layout}": (
            f"""
            sparse = torch.eye(3, 8).to_sparse{layout}()
            rows = torch.randn(8, 4)
            for n in range(12):
                train(*data[:8])
                sparse @ rows
            """,
            {"state": "counted", "why": "", "total": TOTAL + 2 * 3 * 4},
        )
        for layout in ("_coo", "_csr")
    },
    "a step that fails": (
        """
        left = []
        for n in range(20):
            try:
                train(*data[:8])
                if n == 9:
                    model(torch.randn(2, 2))
            except RuntimeError as e:
                left.append((n, str(e)))
            optimizer.step()
        assert torch._C._len_torch_dispatch_stack() == 0
        """,
        {"state": "counted"},
    ),
    # Nothing of loaders and their workers counts, and validation is passed over. The loader inside of the step hands
    # out two batches of its own, each with nothing done to it.
    "validation and loaders within steps": (
        """
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
        """,
        COUNTED,
    ),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_is_counted_and_why_not(name: str, tmp_path: Path) -> None:
    body, expected = SCRIPTS[name]
    text = LOOP + dedent(body)
    # What the script has noted is the same without us.
    left = run_plainly(tmp_path, text)["left"] if "left" in text else None
    script = run_recorded(tmp_path, text, flops="off" if name == "not wanted" else "auto")
    assert script.get("left") == left
    flops = facts(tmp_path / "run/ranks/00000")["flops"]
    steps = [row["step"] for row in rows(tmp_path / "run/ranks/00000") if row["profiled"]]
    assert expected.get("why", "") in flops["why"]
    expected = {key: value for key, value in expected.items() if key != "why"}
    assert {key: ({"profiled": steps} | flops)[key] for key in expected} == expected
    if name == "validation and loaders within steps":
        assert flops["step"] > 9


def test_recording_that_fails_meanwhile_takes_the_mode_along_and_so_does_a_fork(tmp_path: Path) -> None:
    body = """
    import dlprof
    recorder, seen = dlprof.marks.recorder, []
    for n in range(15):
        train(*data[:8])
        depth = torch._C._len_torch_dispatch_stack()
        if depth:
            child = os.fork()
            if not child:
                os._exit(torch._C._len_torch_dispatch_stack())
            assert os.waitpid(child, 0)[1] == 0
            recorder.clock.row = None  # the next hook fails
            model(data[:8][0])
        seen.append((depth, torch._C._len_torch_dispatch_stack()))
    """
    script = run_recorded(tmp_path, LOOP + dedent(body), warnings=None)
    assert script["seen"] == [(0, 0)] * 8 + [(1, 0)] + [(0, 0)] * 6
    assert "recording is off" in script["recorder"].warnings[0]


def test_slow_steps_are_counted_beside_the_window_that_opens_sooner_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_SKIP_NS", "_RECORD_NS"):
        monkeypatch.setattr(f"dlprof.record.collectors.trace.{name}", 300_000_000)  # instead of 3 and 5 s
    run_recorded(tmp_path, LOOP + "for n in range(16): train(*data[:8]), time.sleep(0.05)", trace=True)
    known = facts(tmp_path / "run/ranks/00000")
    window, flops = known["window"], known["flops"]
    assert flops["state"] == "counted"
    assert window["first_step"] < 12
    assert not window["first_step"] <= flops["step"] <= window["last_step"]
    # The model, its six modules: in each of the traced steps.
    assert window["modules"]["ranges"] == 7 * (window["last_step"] - window["first_step"] + 1)


def test_lines_of_what_is_written_out_and_the_size_of_one_hot_rows_are_kept(tmp_path: Path) -> None:
    body = """
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
    run_recorded(tmp_path, LOOP + dedent(body))
    known = facts(tmp_path / "run/ranks/00000")
    assert known["flops"]["one_hot"] == [{"values": 32, "classes": 8}]
    text = (tmp_path / "train.py").read_text().splitlines()
    lines = {call["kind"]: text[call["line"] - 1] for call in known["calls"]}
    calls = {"norm": "sqrt(", "one_hot": "one_hot(", "embedding": "embedding(", "cat": "cat("}
    for kind, call in {**calls, "softmax": "softmax(", "loss": "log("}.items():
        assert call in lines[kind]


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


@pytest.mark.parametrize(
    ("operator", "args", "given", "draws"),
    [
        ("_scaled_dot_product_flash_attention_for_cpu", (None, None, None), {}, False),
        ("_scaled_dot_product_flash_attention_for_cpu", (None, None, None, 0.1), {}, True),
        ("scaled_dot_product_attention", (None, None, None), {"dropout_p": 0.1}, True),
        ("native_dropout", (None, 0.1, True), {}, True),
    ],
)
def test_an_attention_without_dropout_draws_no_numbers(
    operator: str, args: tuple[Any, ...], given: dict[str, Any], draws: bool
) -> None:
    aten = pytest.importorskip("torch").ops.aten
    assert _draws(getattr(aten, operator).default, args, given) == draws


INFERENCE = """
held_out = DataLoader(data, 32)

@torch.inference_mode()
def evaluate():
    return sum(float(model(x).sum()) for x, _ in held_out)

for n, (x, y) in enumerate(DataLoader(data, 8)):
    train(x, y)
    if n % 3 == {turn}:
        evaluate()
    with torch.autograd.profiler.record_function("mine"):  # fails where the key of our mode is left behind
        pass
"""


@pytest.mark.parametrize("turn", [0, 1, 2])
def test_a_step_that_ends_within_inference_mode_leaves_nothing_of_ours(turn: int, tmp_path: Path) -> None:
    run_recorded(tmp_path, LOOP + INFERENCE.replace("{turn}", str(turn)))
    assert facts(tmp_path / "run/ranks/00000")["flops"]["state"] == "counted"
