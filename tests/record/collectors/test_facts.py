"""What facts.json tells, and what it must never tell."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from dlprof.record.collectors.facts import Facts, _last_bucket
from dlprof.record.device.cpu import listed
from dlprof.record.recorder import Recorder
from tests.fixtures.devices import Devices, Model, Parameter
from tests.fixtures.in_process import run_recorded
from tests.fixtures.jobs import DLPROF, facts, launch

torch: Any = pytest.importorskip("torch", reason="recording needs torch")

SETTINGS = """
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
torch.set_float32_matmul_precision("high")
class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.randn(8, 3, 4, 4))
# The first weight is laid out alike in both formats.
model = nn.Sequential(nn.Conv2d(3, 3, 1, bias=False), nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 1))
model.to(memory_format=torch.channels_last)
model.config = type("Config", (), {"_attn_implementation": "eager"})()  # as transformers' models have one
model[1].bias.requires_grad_(False)
groups = [{"params": model[:2].parameters()}, {"params": model[3].parameters(), "lr": 0.5}]
optimizer = torch.optim.AdamW(groups, lr=0.25, foreach=False)
scaler = torch.amp.GradScaler("cpu")
for x in DataLoader(Stream(), batch_size=4):
    with torch.autocast("cpu", torch.bfloat16):
        loss = nn.functional.relu(model(x)).sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""


def test_settings_of_models_optimizers_precision_and_the_launchers_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "TORCHELASTIC_RESTART_COUNT": "2"}.items():
        monkeypatch.setenv(name, value)
    before = torch.get_float32_matmul_precision()
    try:
        run_recorded(tmp_path, SETTINGS)
    finally:
        torch.set_float32_matmul_precision(before)
    told = facts(tmp_path / "run/ranks/00003.r2")
    assert (told["rank"], told["local_rank"], told["restart"]) == (3, 1, 2)
    assert told["models"] == [
        {
            "class": "Sequential",
            "parameters": 9 + 4 * 27 + 4 + 16 + 1,
            "parameter_bytes": 4 * (9 + 4 * 27 + 4 + 16 + 1),
            "trainable_parameters": 9 + 4 * 27 + 16 + 1,
            "last_bucket_bytes": 4 * (9 + 4 * 27 + 16 + 1),
            "dtypes": {"float32": 5},
            "modules": 5,
            "compiled": False,
            "channels_last": True,
            "ddp": None,
            "tensor_parallel": 1,
            "reads_sequences": False,
            "attention": "eager",
            "batch_first": True,
            "data_parallel": False,
            "fsdp": False,
        }
    ]
    assert told["optimizers"] == [
        {
            "class": "AdamW",
            "fused": None,
            "foreach": False,
            "takes": ["fused", "foreach"],
            "parameter_groups": 2,
            "distinct_groups": 2,
            "parameters": 5,
            "bytes": 4 * (9 + 4 * 27 + 4 + 16 + 1),
            "lr": 0.25,
        }
    ]
    (loader,) = told["loaders"]
    assert (loader["dataset"], loader["iterable"], loader["dataset_length"]) == ("Stream", True, None)
    assert told["autocast"] == {"enabled": True, "dtype": "bfloat16"}
    assert told["grad_scaler"] is True
    assert told["matmul"]["float32_precision"] == "high"
    assert told["device"]["type"] in ("cpu", "cuda")


# Each in a process of its own, as a script sets one for good: a fork, which has torch already.
PRECISION = """
import json, os, sys
import torch
from dlprof.record.collectors.facts import _matmul, _unanswered
for setting in sys.argv[1:]:
    if child := os.fork():
        os.waitpid(child, 0)
        continue
    exec(setting)
    said = _matmul()
    print(json.dumps([[said[k] for k in ("float32_precision", "allow_tf32", "cudnn_allow_tf32")], list(_unanswered)]))
    sys.stdout.flush()
    os._exit(0)
"""


@pytest.mark.long
def test_the_precision_of_float32_is_known_whichever_way_it_was_set(tmp_path: Path) -> None:
    known = {
        "pass": ("highest", False, True),
        "torch.set_float32_matmul_precision('medium')": ("medium", True, True),
        "torch.backends.cuda.matmul.allow_tf32 = True; torch.backends.cudnn.allow_tf32 = False": ("high", True, False),
    }
    if hasattr(torch.backends, "fp32_precision"):  # since torch 2.9
        ieee_products = "torch.backends.fp32_precision = 'tf32'; torch.backends.cuda.matmul.fp32_precision = 'ieee'"
        known |= {
            "torch.backends.cuda.matmul.fp32_precision = 'tf32'": ("high", True, True),
            "torch.backends.fp32_precision = 'ieee'": ("highest", False, False),
            ieee_products: ("highest", False, True),
        }
    done = launch([sys.executable, "-W", "error", "-c", PRECISION, *known], tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    said = [json.loads(line) for line in done.stdout.splitlines()]
    assert dict(zip(known, said, strict=True)) == {setting: [list(is_), []] for setting, is_ in known.items()}


def test_a_rank_is_on_its_models_gpu_and_no_other_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = Devices(monkeypatch)
    asked = []
    model_id = "11111111-2222-3333-4444-555555555555"

    class Properties:
        name, total_memory, major, minor = "NVIDIA H100 80GB HBM3", 80 << 30, 9, 0
        uuid = model_id
        pci_domain_id, pci_bus_id, pci_device_id = 0, 0xC1, 0

        @property
        def multi_processor_count(self) -> int:
            raise AssertionError("nobody needs that")

    def properties(index: int) -> Properties:
        asked.append(index)
        return Properties()

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0, MIG-77777777-2222-3333-4444-555555555555")
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    recorder = Recorder(tmp_path, [Facts])
    model = Model(Parameter(4, "cuda", 1))
    assert recorder.clock.begin_forward(model)
    recorder.clock.end()
    recorder.begin()
    recorder.stop("exit")
    assert facts(recorder.folder)["device"] == {
        "type": "cuda",
        "index": 1,
        "vendor": "nvidia",
        "name": "NVIDIA H100 80GB HBM3",
        "uuid": model_id,
        "pci": "0000:c1:00.0",
        "slice": "MIG-77777777-2222-3333-4444-555555555555",
        "node": None,
        "memory_bytes": 80 << 30,
        "capability": [9, 0],
        "count": 2,
    }
    assert (set(asked), devices.awake) == ({1}, set())


@pytest.mark.parametrize(
    ("megabytes", "last"),
    [
        ((4, 4), 4),  # the first bucket, of 1 MiB, is full with the last tensor
        ((4, 1), 4),
        ((100, 1, 30, 1), 101),
        ((10, 10, 30, 1), 20),
    ],
)
def test_the_last_bucket_holds_the_first_tensors(megabytes: tuple[int, ...], last: int) -> None:
    assert _last_bucket([m << 20 for m in megabytes]) == last << 20


STATE = """
import cProfile, os, tracemalloc
os.sched_setaffinity(0, os.sched_getaffinity(0))
os.sched_setaffinity(os.getppid(), os.sched_getaffinity(os.getppid()))
import torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train(steps):
    for _ in range(steps):
        model(torch.rand(4, 2)).sum().backward()
        optimizer.step()
torch.set_num_threads(1)
train(3)
profile, profiler = cProfile.Profile(), torch.autograd.profiler.profile(record_shapes=True)
tracemalloc.start()
profile.enable()
with profiler:
    train(4)
torch.optim.SGD(model.parameters(), lr=0.1).step()  # news, for the facts
train(1)
profile.disable()
tracemalloc.stop()
"""


def test_what_slows_the_process_and_the_lines_that_set_its_state(tmp_path: Path) -> None:
    run_recorded(tmp_path, STATE, window=(1_000, 1, 1))
    told = facts(tmp_path / "run/ranks/00000")
    lines = {call["kind"]: (call["line"], call["count"]) for call in reversed(told["calls"])}  # the first of a kind
    assert (lines["affinity"], lines["threads"], lines["profiler"]) == ((3, 1), (12, 1), (14, 1))
    assert sum(call["kind"] == "affinity" for call in told["calls"]) == 1  # the other one is of another process
    state = told["process"]
    assert state["tracemalloc"] is True
    assert "cProfile.Profile" in (state["profiler"], *state["monitors"]) or "cProfile" in state["monitors"]
    assert told["subnormal"][0] == {"step": 0, "parameters": 0.0}  # SGD has no state
    (theirs,) = told["window"]["theirs"]
    assert (theirs["first_step"], theirs["last_step"], theirs["shapes"]) == (3, 7, True)
    assert theirs["exit_ns"] > 0


MODE = """
import torch
torch.use_deterministic_algorithms(True, warn_only=True)
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.rand(4, 2)).sum().backward()
    optimizer.step()
"""


def test_deterministic_algorithms_and_the_line_that_switched_them_on(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    try:
        run_recorded(tmp_path, MODE)
    finally:
        torch.use_deterministic_algorithms(False)
    told = facts(tmp_path / "run/ranks/00000")
    assert [call["line"] for call in told["calls"] if call["kind"] == "deterministic"] == [3]
    assert told["matmul"]["deterministic"] is True
    assert told["matmul"]["fills_new"] is True
    assert told["matmul"]["cudnn_deterministic"] is False


EARLY = """
import os
# os.sched_setaffinity(0, {9})
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
os.environ["OMP_NUM_THREADS"] = "3"
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a process of one core cannot be bound to fewer")
@pytest.mark.long
def test_the_lines_that_bound_the_process_before_torch_was_there(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(EARLY + STATE.replace("torch.set_num_threads(1)", ""))
    launch([*DLPROF, "wrap", "--no-report", "--no-trace", "--stacks", "off", "-o", "run", "train.py"], tmp_path)
    told = facts(tmp_path / "run/ranks/00000")
    lines = [(call["kind"], call["line"]) for call in told["calls"] if call["kind"] in ("affinity", "threads")]
    assert lines == [("affinity", 4), ("affinity", 8), ("affinity", 9), ("threads", 5)]
    assert told["cpu"]["at_start"] == listed(os.sched_getaffinity(0)) != told["cpu"]["allowed"]
