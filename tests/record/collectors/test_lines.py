"""Lines of real scripts: which functions are counted, in the rank and in its workers, and what must stay as it was."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from dlprof.read.logs import read_lines
from tests.fixtures.in_process import run_plainly, run_recorded
from tests.fixtures.jobs import COMPILES_NOTHING, environment, facts, record, rows, spawned, until, wrapped

pytest.importorskip("torch", reason="recording needs torch")
pytest.importorskip("line_profiler", reason="lines need line_profiler")

DATA = """
import functools, time
import torch
from torch.utils.data import Dataset, IterableDataset

def decode(n, *, times=10):
    total = 0
    for k in range(times):
        total += k
    return torch.full((8,), float(n))

class Images(Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, n):
        return self.read(n)
    @staticmethod
    def read(n):
        return decode(n)

class Stream(IterableDataset):
    def __iter__(self):
        for n in range(40):
            yield decode(n)
"""

TRAIN = """
import functools, inspect, os, pickle, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader
from data import Images, Stream, decode

def collate(items):
    return torch.stack(items)

def logged(function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        return function(*args, **kwargs)
    return call

@logged
def train(model, optimizer, batch):
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()

def run(dataset=None, loader=DataLoader, **settings):
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    for batch in loader(dataset or Images(), batch_size=4, collate_fn=collate, **settings):
        train(model, optimizer, batch)
"""


def script(folder: Path, body: str) -> Path:
    """Write a script for a process of its own."""
    (folder / "data.py").write_text(DATA)
    path = folder / "train.py"
    path.write_text(COMPILES_NOTHING + TRAIN + dedent(body))
    return path


def counted(run: Path) -> dict[tuple[str, str], Counter[int]]:
    """Return role and function → the hits of its lines, the first line of its body being 1."""
    table = read_lines(run / "ranks/00000/lines.jsonl").tables["lines"]
    out: dict[tuple[str, str], Counter[int]] = {}
    for (role, function), part in table.groupby(["role", "function"], observed=True):
        assert (part["source"] != "").all()
        first = part["line"][part["source"].astype(str).str.contains("def ")].iloc[0]
        out[str(role), str(function)] = Counter(dict(zip(part["line"] - first, part["hits"], strict=True)))
    return out


def lines(
    folder: Path, monkeypatch: pytest.MonkeyPatch, body: str, *targets: str, warnings: int = 0
) -> dict[tuple[str, str], Counter[int]]:
    """Record a script as the module "train" of this process; return what was counted."""
    (folder / "data.py").write_text(DATA)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "data", raising=False)
    run_recorded(folder, TRAIN + dedent(body), lines=targets, warnings=warnings)
    return counted(folder / "run")


def test_functions_count_wherever_they_are_held_and_stay_what_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = """
    early, signature = decode, str(inspect.signature(decode))
    run()
    assert early is decode
    assert str(inspect.signature(decode)) == signature == "(n, *, times=10)"
    assert inspect.getsource(decode).startswith("def decode")
    assert pickle.loads(pickle.dumps(decode)) is decode
    assert decode(3, times=2)[0] == 3
    try:
        decode(times=2)
    except TypeError as e:
        assert "'n'" in str(e)
    else:
        raise AssertionError
    """
    targets = ("data.py:decode", "data:Images.read", "train:collate", "train.py:train", "data:nowhere", "absent:f")
    found = lines(tmp_path, monkeypatch, body, *targets, warnings=1)
    assert found == {
        ("main", "data:Images.read"): {-1: 0, 0: 0, 1: 40},
        ("main", "data.py:decode"): {0: 0, 1: 41, 2: 440 + 3, 3: 400 + 2, 4: 41},
        ("main", "train:collate"): {0: 0, 1: 10},
        ("main", "train.py:train"): {-1: 0, 0: 0, 1: 10, 2: 10, 3: 10},
    }
    (warning,) = facts(tmp_path / "run/ranks/00000")["warnings"]
    assert warning == "lines: no such Python function was found: data:nowhere, absent:f"
    assert sum(row["optimizer_steps"] for row in rows(tmp_path / "run/ranks/00000")) == 10


@pytest.mark.long
def test_loader_workers_generators_and_a_running_loop_count_for_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = """
    run()
    run(num_workers=2)
    run(Stream(), num_workers=1)
    run(Stream())
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader
    except ImportError:
        pass
    else:
        run(Images(), StatefulDataLoader, num_workers=2)
    """
    pytest.importorskip("torchdata", reason="its workers' loop is its own")
    found = lines(tmp_path, monkeypatch, body, "data:Images.read", "train:collate", "data:Stream.__iter__", "train:run")
    assert found["main", "data:Images.read"][1] == 40
    assert found["worker", "data:Images.read"][1] == 2 * 40  # of PyTorch's workers, and of torchdata's
    assert found["main", "train:collate"] == {0: 0, 1: 20}
    assert found["worker", "train:collate"] == {0: 0, 1: 30}
    assert found["worker", "data:Stream.__iter__"] == found["main", "data:Stream.__iter__"] == {0: 0, 1: 41, 2: 40}
    # The first call was running already when the script made its optimizer.
    assert found["main", "train:run"][4] == 40


@pytest.mark.slow
def test_spawned_workers_count_for_themselves(tmp_path: Path) -> None:
    body = "if __name__ == '__main__':\n    run(num_workers=2, multiprocessing_context='spawn')"
    options = ["--no-trace", "--no-sample", "--lines", "data:decode", "--lines", "__main__:collate"]
    record(script(tmp_path, body), folder=tmp_path / "run", options=options)
    found = counted(tmp_path / "run")
    assert found["worker", "data:decode"][1] == 40
    assert found["worker", "__main__:collate"] == {0: 0, 1: 10}


# Slow where other work keeps the looking thread from its core.
@pytest.mark.slow
def test_the_hottest_of_the_users_functions_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = """
    def slow():
        until = time.monotonic() + 0.01
        while time.monotonic() < until:
            pass
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    began = time.monotonic()
    as_written = slow.__code__
    while slow.__code__ is as_written:
        slow()
        train(model, optimizer, torch.ones(4, 8))
        assert time.monotonic() < began + 60, [name for name in globals() if name.startswith('__dlprof')]
    for n in range(3):
        slow()
    """
    found = lines(tmp_path, monkeypatch, body, "auto")
    assert found["main", "train:slow"][1] >= 3
    assert {role for role, _ in found} == {"main"}


@pytest.mark.long
def test_the_graphs_of_torch_compile_are_as_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = """
    from torch._dynamo.testing import CompileCounter
    torch._dynamo.reset()

    def double(x):
        y = x * 2
        return y + 1

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)
        def forward(self, x, *, scale=2.0):
            return double(self.linear(x)) * scale

    whole, part = CompileCounter(), CompileCounter()
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    compiled = torch.compile(net, backend=whole, fullgraph=True)
    alone = torch.compile(double, backend=part)
    for n in range(5):
        compiled(torch.randn(4, 8), scale=3.0).sum().backward()
        optimizer.step()
        alone(torch.randn(3))
        double(torch.randn(3))
    graphs = whole.frame_count, whole.op_count, part.frame_count, part.op_count
    """
    (tmp_path / "data.py").write_text(DATA)
    monkeypatch.syspath_prepend(tmp_path)
    plain = run_plainly(tmp_path, TRAIN + dedent(body))["graphs"]
    done = run_recorded(tmp_path, TRAIN + dedent(body), lines=["train:double", "train:Net.forward"])
    assert done["graphs"] == plain
    assert counted(tmp_path / "run")["main", "train:double"][1] == 5


@pytest.mark.long
def test_debuggers_exceptions_and_forks_leave_the_counts_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = """
    def fails(n):
        if n % 2:
            raise ValueError(n)
        if not n % 10:
            child = os.fork()
            if not child:
                os._exit(sys.gettrace() is not None)
            assert os.waitpid(child, 0)[1] == 0
        return n
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    for n in range(20):
        train(model, optimizer, torch.ones(4, 8))
        try:
            fails(n)
        except ValueError as e:
            assert e.args == (n,)
    seen = []
    def follow(frame, event, arg):
        if frame.f_code.co_name == "collate" and event == "line":
            seen.append(frame.f_lineno - frame.f_code.co_firstlineno)
        return follow
    run()
    others = sys.gettrace()
    sys.settrace(follow)
    run()
    assert sys.gettrace() is follow
    sys.settrace(others)
    assert seen.count(1) == 10, seen
    """
    if sys.gettrace() is not None:
        pytest.skip("a debugger or coverage follows this thread")
    found = lines(tmp_path, monkeypatch, body, "train:fails", "train:collate")
    assert found["main", "train:fails"] == {0: 0, 1: 20, 2: 10, 3: 10, 4: 2, 5: 2, 6: 0, 7: 2, 8: 10}
    assert found["main", "train:collate"] == {0: 0, 1: 10}  # what the debugger followed is left to it


@pytest.mark.long
def test_what_was_counted_survives_a_kill(tmp_path: Path) -> None:
    log = tmp_path / "run/ranks/00000/lines.jsonl"
    path = script(tmp_path, "while True:\n    run(num_workers=1)\n")
    command = wrapped(tmp_path / "run", [sys.executable, path], "--no-trace", "--lines", "data:decode")
    with spawned(command, env=environment(), stderr=subprocess.DEVNULL, cwd=tmp_path) as job:
        assert until(lambda: log.exists() and log.read_text().endswith("\n"))
        told: Any = json.loads((tmp_path / "run/ranks/00000/facts.json").read_text())
        os.kill(told["pid"], signal.SIGKILL)
        assert job.wait(60) == -signal.SIGKILL
    assert counted(tmp_path / "run")["worker", "data:decode"][1] > 0


def test_a_python_without_line_profiler_says_so_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "data.py").write_text(DATA)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "data", raising=False)
    monkeypatch.setitem(sys.modules, "line_profiler", None)
    run_recorded(tmp_path, TRAIN + "run()", lines="data:decode", warnings=1)
    (warning,) = facts(tmp_path / "run/ranks/00000")["warnings"]
    assert "pip install line_profiler" in warning
    assert not (tmp_path / "run/ranks/00000/lines.jsonl").exists()
    assert sum(row["optimizer_steps"] for row in rows(tmp_path / "run/ranks/00000")) == 10
