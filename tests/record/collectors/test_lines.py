"""Lines of real scripts: which functions are counted, in the rank and in its workers, and what must stay as it was."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from dlprof.read.lines import read
from tests.fixtures.jobs import COMPILES_NOTHING, environment, facts, launch, record, rows, wrapped

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

def run(dataset=None, **settings):
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    for batch in DataLoader(dataset or Images(), batch_size=4, collate_fn=collate, **settings):
        train(model, optimizer, batch)
"""


def written(folder: Path, body: str) -> Path:
    (folder / "data.py").write_text(DATA)
    script = folder / "train.py"
    script.write_text(COMPILES_NOTHING + TRAIN + dedent(body))
    return script


def counted(run: Path) -> dict[tuple[str, str], Counter[int]]:
    """Return role and function → the hits of its lines, the first line of its body being 1."""
    table = read(run / "ranks/00000/lines.jsonl").tables["lines"]
    out: dict[tuple[str, str], Counter[int]] = {}
    for (role, function), part in table.groupby(["role", "function"], observed=True):
        assert (part["source"] != "").all()
        first = part["line"][part["source"].astype(str).str.contains("def ")].iloc[0]
        out[str(role), str(function)] = Counter(dict(zip(part["line"] - first, part["hits"], strict=True)))
    return out


def lines(folder: Path, body: str, *targets: str) -> dict[tuple[str, str], Counter[int]]:
    options = [option for target in targets for option in ("--lines", target)]
    record(written(folder, body), folder=folder / "run", options=["--no-trace", "--no-sample", *options])
    return counted(folder / "run")


def test_functions_count_wherever_they_are_held_and_stay_what_they_were(tmp_path: Path) -> None:
    found = lines(
        tmp_path,
        """
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
        """,
        "data:decode",
        "data:Images.read",
        "__main__:collate",
        "train.py:train",
        "data:nowhere",
        "absent:function",
    )
    assert found["main", "data:Images.read"] == {-1: 0, 0: 0, 1: 40}
    assert found["main", "data:decode"] == {0: 0, 1: 41, 2: 440 + 3, 3: 400 + 2, 4: 41}
    assert found["main", "__main__:collate"] == {0: 0, 1: 10}
    assert found["main", "train.py:train"] == {-1: 0, 0: 0, 1: 10, 2: 10, 3: 10}
    assert len(found) == 4
    assert facts(tmp_path / "run/ranks/00000")["warnings"] == [
        "lines: no such Python function was found: data:nowhere, absent:function"
    ]
    assert sum(row["optimizer_steps"] for row in rows(tmp_path / "run/ranks/00000")) == 10


def test_functions_of_several_files_are_found(tmp_path: Path) -> None:
    found = lines(tmp_path, "run()", "train.py:train", "data.py:decode")
    assert found["main", "train.py:train"][1] == 10
    assert found["main", "data.py:decode"][1] == 40


@pytest.mark.long
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_loader_workers_count_for_themselves(method: str, tmp_path: Path) -> None:
    found = lines(
        tmp_path,
        f"""
        if __name__ == "__main__":
            run()
            run(num_workers=2, multiprocessing_context="{method}")
        """,
        "data:decode",
        "__main__:collate",
    )
    assert found["main", "data:decode"][1] == found["worker", "data:decode"][1] == 40
    assert found["main", "__main__:collate"] == found["worker", "__main__:collate"] == {0: 0, 1: 10}


def test_torchdatas_workers_count_too(tmp_path: Path) -> None:
    pytest.importorskip("torchdata", reason="its workers' loop is its own")
    found = lines(
        tmp_path,
        """
        from torchdata.stateful_dataloader import StatefulDataLoader
        optimizer = torch.optim.SGD(nn.Linear(8, 1).parameters(), lr=0.001)
        model = nn.Linear(8, 1)
        for batch in StatefulDataLoader(Images(), batch_size=4, num_workers=2):
            train(model, optimizer, batch)
        """,
        "data:decode",
    )
    assert found["worker", "data:decode"][1] == 40


@pytest.mark.long
def test_generators_and_the_loop_that_a_script_calls_last(tmp_path: Path) -> None:
    found = lines(tmp_path, "run(Stream(), num_workers=1)\nrun(Stream())", "data:Stream.__iter__", "__main__:run")
    assert found["worker", "data:Stream.__iter__"] == {0: 0, 1: 41, 2: 40}
    assert found["main", "data:Stream.__iter__"] == {0: 0, 1: 41, 2: 40}
    # The first call was running already when the script made its optimizer.
    assert found["main", "__main__:run"][4] == 10


# Slow where other work keeps the looking thread from its core.
@pytest.mark.slow
def test_the_hottest_of_the_users_functions_are_found(tmp_path: Path) -> None:
    found = lines(
        tmp_path,
        """
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
            if time.monotonic() > began + 60:
                import faulthandler
                faulthandler.dump_traceback()
                sys.exit(f"not chosen; changed: {[name for name in globals() if name.startswith('__dlprof')]}")
        for n in range(3):
            slow()
        """,
        "auto",
    )
    assert found["main", "__main__:slow"][1] >= 3
    assert {role for role, _ in found} == {"main"}


@pytest.mark.slow
def test_the_graphs_of_torch_compile_are_as_without(tmp_path: Path) -> None:
    body = """
    from torch._dynamo.testing import CompileCounter

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
    print(whole.frame_count, whole.op_count, part.frame_count, part.op_count)
    """
    plain = launch([sys.executable, written(tmp_path, body)], tmp_path)
    options = ["--no-trace", "--lines", "__main__:double", "--lines", "__main__:Net.forward"]
    done = record(tmp_path / "train.py", folder=tmp_path / "run", options=options)
    assert done.stdout == plain.stdout
    assert counted(tmp_path / "run")["main", "__main__:double"][1] == 5


@pytest.mark.long
def test_a_debuggers_thread_is_left_to_it(tmp_path: Path) -> None:
    found = lines(
        tmp_path,
        """
        seen = []
        def follow(frame, event, arg):
            if frame.f_code.co_name == "collate" and event == "line":
                seen.append(frame.f_lineno - frame.f_code.co_firstlineno)
            return follow
        run()
        sys.settrace(follow)
        run()
        assert sys.gettrace() is follow
        sys.settrace(None)
        assert seen.count(1) == 10, seen
        """,
        "__main__:collate",
    )
    assert found["main", "__main__:collate"] == {0: 0, 1: 10}


@pytest.mark.long
def test_an_exception_and_a_forks_child_leave_the_counts_whole(tmp_path: Path) -> None:
    found = lines(
        tmp_path,
        """
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
        """,
        "__main__:fails",
    )
    assert found["main", "__main__:fails"] == {0: 0, 1: 20, 2: 10, 3: 10, 4: 2, 5: 2, 6: 0, 7: 2, 8: 10}


def test_what_was_counted_survives_a_kill(tmp_path: Path) -> None:
    script = written(
        tmp_path,
        """
        while True:
            run(num_workers=1)
        """,
    )
    log = tmp_path / "run/ranks/00000/lines.jsonl"
    command = wrapped(tmp_path / "run", [sys.executable, script], "--no-trace", "--lines", "data:decode")
    with subprocess.Popen(command, env=environment(), stderr=subprocess.DEVNULL, cwd=tmp_path) as job:
        while not log.exists() or not log.read_text().endswith("\n"):
            assert job.poll() is None
            time.sleep(0.05)
        told: Any = json.loads((tmp_path / "run/ranks/00000/facts.json").read_text())
        os.kill(told["pid"], signal.SIGKILL)
        assert job.wait(60) == -signal.SIGKILL
    assert counted(tmp_path / "run")["worker", "data:decode"][1] > 0


@pytest.mark.long
def test_a_python_without_line_profiler_says_so_in_one_line(tmp_path: Path) -> None:
    script = written(tmp_path, "run()")
    (tmp_path / "line_profiler.py").write_text("raise ImportError('none here')")
    done = record(script, folder=tmp_path / "run", options=["--no-trace", "--no-sample", "--lines", "data:decode"])
    assert [line for line in done.stderr.splitlines() if "line_profiler" in line] == [
        "dlprof: rank 0: lines are off: the script's Python has no line_profiler (pip install line_profiler): none here"
    ]
    assert not (tmp_path / "run/ranks/00000/lines.jsonl").exists()
    assert sum(row["optimizer_steps"] for row in rows(tmp_path / "run/ranks/00000")) == 10


@pytest.mark.long
def test_nobody_asked_means_nothing_is_touched(tmp_path: Path) -> None:
    script = written(tmp_path, "run()\nassert 'line_profiler' not in sys.modules\nassert 'passing' not in str(vars())")
    record(script, folder=tmp_path / "run", options=["--no-trace", "--no-sample"])
    assert not (tmp_path / "run/ranks/00000/lines.jsonl").exists()
