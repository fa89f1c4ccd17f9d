"""What the recorder marks in real training scripts, and that it changes nothing about them."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from textwrap import dedent

import pytest

from dlprof.record.recorder import Recorder
from dlprof.record.stepping import Row, Step
from dlprof.schema import STEPS
from tests.fixtures.jobs import environment, facts, launch, record, rows, wrapped

torch = pytest.importorskip("torch", reason="recording needs torch")

# A tiny model and loader, for scripts that only differ in their loop.
SETUP = """
import os, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)
torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def train(batch):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    return loss
"""


def script(folder: Path, body: str, name: str = "train.py") -> Path:
    path = folder / name
    path.write_text(SETUP + dedent(body))
    return path


def test_epochs_validation_and_accumulated_gradients(tmp_path: Path) -> None:
    loop = script(
        tmp_path,
        """
        for epoch in range(2):
            for n, (x, y) in enumerate(DataLoader(data, batch_size=8)):
                nn.functional.mse_loss(model(x), y).backward()
                if n % 2:
                    optimizer.step()
                    optimizer.zero_grad()
            with torch.no_grad():
                for x, y in DataLoader(data, batch_size=16):
                    model(x)
        """,
    )
    record(loop, folder=tmp_path / "run", options=["--no-trace", "--flops", "off"])
    rank = tmp_path / "run/ranks/00000"
    steps = rows(rank)
    assert [list(row) for row in steps] == [list(STEPS)] * len(steps)
    assert [row["step"] for row in steps] == list(range(len(steps)))
    epoch = ["train"] * 8 + ["validation"] * 4
    assert [row["kind"] for row in steps] == [*epoch, *epoch, "other"]
    trained = [row for row in steps if row["kind"] == "train"]
    assert [row["optimizer_steps"] for row in trained] == [0, 1] * 8
    assert {row["backwards"] for row in trained} == {1}
    # The end of one loader and the start of the next fall into one step.
    assert [row["step"] for row in steps if row["first"]] == [0, 8, 12, 20, 24]
    assert [row["fetches"] for row in steps if row["first"]] == [1, 2, 2, 2, 1]
    for row, following in itertools.pairwise(steps):
        assert row["start_ns"] + row["dur_ns"] == following["start_ns"]
    for row in steps:
        parts = row["fetch_ns"] + row["forward_ns"] + row["backward_ns"] + row["optimizer_ns"]
        assert parts + max(row["lead_ns"], 0) <= row["dur_ns"]
        assert (row["lead_ns"] >= 0) == (row["kind"] != "other")
        assert (row["forward_ns"] > 0) == (row["kind"] != "other")
        assert (row["backward_ns"] > 0) == (row["kind"] == "train")
        assert (row["optimizer_ns"] > 0) == (row["optimizer_steps"] > 0)
        assert (row["fetch_ns"] > 0) == (row["fetches"] > 0)
        assert row["profiled"] == 0
        assert row["device_step_ns"] == -1
    told = facts(rank)
    assert told["step"]["mark"] == "loader"
    assert told["window"]["state"] == "off"
    assert [(loader["role"], loader["batch_size"]) for loader in told["loaders"]][:2] == [
        ("train", 8),
        ("validation", 16),
    ]
    assert not list(rank.glob("trace*"))


@pytest.mark.long
def test_a_script_without_a_loader_and_one_with_a_single_batch(tmp_path: Path) -> None:
    body = "import time\nfor n in range(6):\n    time.sleep(0.01)\n    train(data[:8])"
    record(script(tmp_path, body), folder=tmp_path / "a", options=["--no-trace"])
    rank = tmp_path / "a/ranks/00000"
    assert facts(rank)["step"]["mark"] == "optimizer"
    assert [row["optimizer_steps"] for row in rows(rank)] == [1] * 6
    assert all(row["lead_ns"] >= 10_000_000 for row in rows(rank)[1:])
    body = "batch = next(iter(DataLoader(data, batch_size=8)))\nfor n in range(40): train(batch)"
    record(script(tmp_path, body), folder=tmp_path / "b", options=["--no-trace"])
    rank = tmp_path / "b/ranks/00000"
    assert facts(rank)["step"]["mark"] == "optimizer"
    assert sum(row["optimizer_steps"] for row in rows(rank)) == 40
    assert [row["optimizer_steps"] for row in rows(rank)][1:] == [1] * 7


@pytest.mark.long
def test_steps_that_the_script_marks_itself_and_closures_and_nested_optimizers(tmp_path: Path) -> None:
    loop = script(
        tmp_path,
        """
        import dlprof

        def closure():
            with dlprof.annotate("closure"):
                optimizer.zero_grad()
                time.sleep(0.02)
                loss = model(data[:8][0]).sum()
                loss.backward()
            return loss

        class Outer(torch.optim.Optimizer):
            def step(self, closure=None):
                return optimizer.step(closure)

        outer = Outer(model.parameters(), {})
        for n in range(8):
            outer.step(closure)
            outer.step(closure)
            dlprof.step()
        """,
    )
    record(loop, folder=tmp_path / "run", options=["--window", "2,1,2"])
    rank = tmp_path / "run/ranks/00000"
    assert facts(rank)["step"]["mark"] == "user"
    # Before the first dlprof.step() the optimizer marked the steps.
    assert [row["optimizer_steps"] for row in rows(rank)] == [1, 1, 0] + [2] * 7
    assert all(row["backwards"] == row["optimizer_steps"] for row in rows(rank))
    assert all(row["optimizer_ns"] >= 40_000_000 for row in rows(rank)[3:])
    assert all(row["forward_ns"] < row["optimizer_ns"] for row in rows(rank)[3:])
    events = json.loads(subprocess.run(["gzip", "-dc", rank / "trace.json.gz"], capture_output=True, check=True).stdout)
    assert sum(event.get("name") == "closure" for event in events["traceEvents"]) == 4


WORKERS = """
    import copy, io, pickle
    from multiprocessing import get_context

    class Squares(torch.utils.data.Dataset):
        def __len__(self):
            return 16
        def __getitem__(self, n):
            return torch.full((8,), float(n)), torch.tensor([float(n) ** 2]), torch.utils.data.get_worker_info().id

    if __name__ == "__main__":
        seen = []
        for method in ("fork", "spawn", "forkserver"):
            loader = DataLoader(Squares(), batch_size=4, num_workers=1, multiprocessing_context=method)
            for x, y, worker in loader:
                train((x / 16, y / 256))
                seen.append(y.sum().item())
        # What a script may do with its model: pickle, copy, script, trace it, and look at its hooks.
        buffer = io.BytesIO()
        torch.save(copy.deepcopy(model), buffer)
        scripted = torch.jit.script(model)
        hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
        if os.fork() == 0:
            train((torch.zeros(2, 8), torch.zeros(2, 1)))
            sys.exit(0)
        os.wait()
        print(seen, hooks, len(buffer.getvalue()), b"dlprof" in buffer.getvalue(), __name__, sys.argv[1:])
        print([p.sum().item() for p in model.parameters()], torch.load(buffer := io.BytesIO(buffer.getvalue()),
            weights_only=False)(torch.ones(1, 8)).item(), scripted(torch.ones(1, 8)).item())
"""


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_loader_workers_pickling_and_forks_go_on_as_without_dlprof(tmp_path: Path) -> None:
    loop = script(tmp_path, WORKERS)
    plain = launch([sys.executable, loop, "--flag"], tmp_path)
    done = record(loop, "--flag", folder=tmp_path / "run")
    assert done.stdout == plain.stdout
    assert plain.stdout.startswith("[")
    assert [path.name for path in (tmp_path / "run/ranks").iterdir()] == ["00000"]
    rank = tmp_path / "run/ranks/00000"
    steps = rows(rank)
    # The forked child's step is not among them.
    assert [row["optimizer_steps"] for row in steps] == [1] * 12 + [0]
    assert [loader["start_method"] for loader in facts(rank)["loaders"]] == ["fork", "spawn", "forkserver"]
    assert facts(rank)["warnings"] == []


DDP = """
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    ddp = DistributedDataParallel(model)
    for n, (x, y) in enumerate(DataLoader(data, batch_size=4)):
        loss = nn.functional.mse_loss(ddp(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if "fail" in sys.argv and rank == 1 and n == 9:
            raise RuntimeError("rank 1 has had enough")
    del ddp  # before its group: PyTorch and gloo may wait for each other else
    dist.destroy_process_group()
"""


@pytest.mark.filterwarnings("ignore")
def test_two_ranks_under_torchrun(tmp_path: Path) -> None:
    loop = script(tmp_path, DDP)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(loop)]
    done = launch(wrapped(tmp_path / "run", command, "--window", "3,1,3"), tmp_path)
    assert done.returncode == 0, done.stderr
    for number in (0, 1):
        rank = tmp_path / f"run/ranks/{number:05d}"
        told = facts(rank)
        assert (told["rank"], told["local_rank"], told["world_size"], told["backend"]) == (number, number, 2, "gloo")
        assert told["ended"] == "exit"
        assert told["warnings"] == []
        assert [told["window"][key] for key in ("state", "first_step", "last_step")] == ["exported", 4, 6]
        assert told["models"][0]["class"] == "Sequential"
        assert told["models"][0]["ddp"]["find_unused_parameters"] is False
        # The step before the window is counted: a forward pass, and the gradients of all but the data.
        assert [row["profiled"] for row in rows(rank)] == [0] * 2 + [1] * 7 + [0] * 8
        assert [told["flops"][key] for key in ("state", "step", "total")] == ["counted", 2, 2 * 4 * (2 * 128 + 3 * 16)]
        trace = subprocess.run(["gzip", "-dc", rank / "trace.json.gz"], capture_output=True, check=True).stdout
        events = [e for e in json.loads(trace)["traceEvents"] if e.get("ph") == "X"]
        marks = {e["name"]: e for e in events if e["name"].startswith("ProfilerStep#")}
        assert sorted(marks) == ["ProfilerStep#4", "ProfilerStep#5", "ProfilerStep#6"]
        for part in ("fetch", "forward", "backward", "optimizer"):
            inside = [e for e in events if e["name"] == f"dlprof::{part}"]
            assert [e["cat"] for e in inside] == ["user_annotation"] * 3
            for event, mark in zip(inside, marks.values(), strict=True):
                assert mark["ts"] <= event["ts"]
                assert event["ts"] + event["dur"] <= mark["ts"] + mark["dur"]
        # The light layer and the trace tell the time by one clock.
        base = json.loads(trace)["baseTimeNanoseconds"]
        by_step = {row["step"]: row for row in rows(rank)}
        for name, mark in marks.items():
            start_ns = by_step[int(name.partition("#")[2])]["start_ns"]
            assert abs(base + mark["ts"] * 1e3 - start_ns) < 20e6


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_an_exception_in_one_rank_ends_the_job_as_ever_and_leaves_both_recordings(tmp_path: Path) -> None:
    loop = script(tmp_path, DDP)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(loop),
        "fail",
    ]
    plain = launch(command, tmp_path)
    done = launch(wrapped(tmp_path / "run", command, "--window", "8,0,50"), tmp_path)
    assert done.returncode == plain.returncode != 0
    assert "rank 1 has had enough" in done.stderr
    for number in (0, 1):
        rank = tmp_path / f"run/ranks/{number:05d}"
        assert len(rows(rank)) >= 9
        assert facts(rank)["window"]["state"] == "partial"
        assert (rank / "trace.json.gz").exists()
    assert facts(tmp_path / "run/ranks/00001")["ended"] == "exit"


@pytest.mark.long
def test_sigterm_leaves_the_window_and_the_status_is_sigterm(tmp_path: Path) -> None:
    body = (
        "for n in range(10**9):\n    train(data[:8])\n    if n == 20: print('ready', flush=True)\n    time.sleep(0.002)"
    )
    command = wrapped(tmp_path / "run", [sys.executable, script(tmp_path, body)], "--window", "2,1,1000000")
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    assert process.wait(60) == -signal.SIGTERM
    rank = tmp_path / "run/ranks/00000"
    assert facts(rank)["ended"] == f"signal {signal.SIGTERM.value}"
    assert facts(rank)["window"]["state"] == "partial"
    assert len(rows(rank)) > 20
    assert (rank / "trace.json.gz").exists()
    assert json.loads((tmp_path / "run/run.json").read_text())["exit"] == {"code": None, "signal": signal.SIGTERM.value}


@pytest.mark.long
def test_a_second_sigterm_waits_for_what_the_first_leaves(tmp_path: Path) -> None:
    # As where a scheduler signals every process of a job, and the launcher, signalled too, passes it on.
    loop = script(
        tmp_path,
        """
        import pathlib, signal, threading
        unfinished = pathlib.Path("run/ranks/00000/trace.json.tmp")
        def again():
            while not unfinished.exists():
                time.sleep(0.0005)
            os.kill(os.getpid(), signal.SIGTERM)
        threading.Thread(target=again, daemon=True).start()
        for n in range(10**9):
            train(data[:8])
            if n == 400:
                os.kill(os.getpid(), signal.SIGTERM)
        """,
    )
    done = launch(wrapped(tmp_path / "run", [sys.executable, loop], "--window", "2,1,1000000"), tmp_path)
    assert done.returncode == -signal.SIGTERM, done.stderr
    assert facts(tmp_path / "run/ranks/00000")["window"]["state"] == "partial"
    assert (tmp_path / "run/ranks/00000/trace.json.gz").exists()


@pytest.mark.long
def test_the_scripts_own_handler_and_profiler_come_first(tmp_path: Path) -> None:
    loop = script(
        tmp_path,
        """
        import signal
        signal.signal(signal.SIGTERM, lambda number, frame: print("theirs", flush=True))
        for n in range(6):
            train(data[:8])
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            for n in range(20):
                train(data[:8])
        print(sum(event.name == "Optimizer.step#SGD.step" for event in profiler.events()))
        os.kill(os.getpid(), signal.SIGTERM)
        """,
    )
    done = record(loop, folder=tmp_path / "during", options=["--window", "2,1,100"])
    assert done.stdout == "20\ntheirs\n"
    window = facts(tmp_path / "during/ranks/00000")["window"]
    assert (window["state"], window["first_step"], window["last_step"]) == ("yielded", 3, 5)
    assert len(facts(tmp_path / "during/ranks/00000")["warnings"]) == 1
    done = record(loop, folder=tmp_path / "before", options=["--window", "10,1,3"])
    assert done.stdout == "20\ntheirs\n"
    assert facts(tmp_path / "before/ranks/00000")["window"]["state"] == "yielded"


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("mount") is None, reason="a full disk needs root and mount")
def test_a_disk_that_fills_up_costs_the_recording_only(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "none", disk], check=False).returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        body = """
        for n in range(400):
            train(data[:8])
            if n == 100:
                open(sys.argv[1], "wb").write(bytes(100_000))
                try:
                    open(sys.argv[1], "ab").write(bytes(300_000))
                except OSError:
                    pass
            time.sleep(0.002)
        print("trained", n)
        """
        loop = script(tmp_path, body)
        done = record(loop, str(disk / "filler"), folder=disk / "run", options=["--window", "300,1,3"])
        assert done.stdout == "trained 399\n"
        assert "steps is off: " in done.stderr
        assert "No space left" in done.stderr
        for line in done.stderr.splitlines():
            assert line.startswith("dlprof: ")
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.long
def test_a_deleted_folder_and_a_claimed_rank(tmp_path: Path) -> None:
    body = """
        import shutil
        for n in range(300):
            train(data[:8])
            if n == 100:
                shutil.rmtree(os.environ["DLPROF_RUN"])
            time.sleep(0.002)
        print("trained", n)
        """
    done = record(script(tmp_path, body), folder=tmp_path / "gone", options=["--window", "200,1,2"])
    assert done.stdout == "trained 299\n"
    assert "the run folder was deleted" in done.stderr
    body = """
        if __name__ == "__main__":
            train(data[:8])
            torch.multiprocessing.spawn(again, nprocs=1)
        """
    head = "def again(n):\n    for _ in range(3): train(data[:8])\n"
    done = record(script(tmp_path, head + dedent(body)), folder=tmp_path / "twice", options=["--no-trace"])
    first, second = sorted((tmp_path / "twice/ranks").iterdir())
    assert second.name == f"00000.{facts(second)['pid']}"
    assert [len(rows(rank)) for rank in (first, second)] == [1, 3]
    assert "another process records as ranks/00000" in facts(second)["warnings"][0]


@pytest.mark.long
def test_a_compiled_script_has_the_same_graphs(tmp_path: Path) -> None:
    loop = script(
        tmp_path,
        """
        from torch._dynamo.utils import counters
        graphs = []
        def backend(graph, inputs):
            graphs.append(len(graph.graph.nodes))
            return graph.forward
        def loop(step):
            for epoch in range(2):
                for batch in DataLoader(data, batch_size=8):
                    step(batch)
            print(graphs, counters["frames"]["ok"] > 0, sum(counters["graph_break"].values()))
        loop(torch.compile(train, backend=backend))
        original = model
        model = torch.compile(original, backend=backend)
        loop(train)
        torch._dynamo.reset()
        model = original
        model.compile(backend=backend)
        loop(train)
        """,
    )
    plain = launch([sys.executable, loop], tmp_path)
    done = record(loop, folder=tmp_path / "run", options=["--window", "2,1,3"])
    assert done.stdout == plain.stdout
    assert len(plain.stdout.splitlines()) == 3
    steps = rows(tmp_path / "run/ranks/00000")
    assert [row["kind"] for row in steps] == ["train"] * 48 + ["other"]
    assert all(row["forward_ns"] > 0 for row in steps[16:-1])
    assert [model["compiled"] for model in facts(tmp_path / "run/ranks/00000")["models"]] == [True, True]


@pytest.mark.parametrize(("age_s", "told_ms"), [(1, 250), (19, 500), (3600, 1000)])
def test_collectors_hear_of_steps_in_longer_intervals_the_longer_the_job_runs(
    tmp_path: Path, age_s: int, told_ms: int
) -> None:
    heard: list[int] = []

    class Heard:
        name = "heard"

        def start(self, recorder: Recorder) -> None:
            pass

        def step(self, done: Sequence[Step]) -> None:
            heard.append(done[-1].number)

        def stop(self) -> None:
            pass

    recorder = Recorder(tmp_path, [Heard])
    recorder.started = True
    recorder.perf_ns -= age_s * 1_000_000_000
    began = time.perf_counter_ns()
    for number in range(26):
        recorder.row = Row(number, began + 100_000_000 * (number - 1))
        recorder._end_step(began + 100_000_000 * number)
    # The first is told at once; a step of 100 ms ends every 100 ms.
    every = -(-told_ms // 100)
    assert heard[:3] == [0, every, 2 * every]


def test_a_collector_that_failed_hears_of_no_more_batches(tmp_path: Path) -> None:
    heard: list[str] = []

    class Heard:
        name = "heard"

        def start(self, recorder: Recorder) -> None:
            pass

        def step(self, _: Sequence[Step]) -> None:
            raise RuntimeError("no more")

        def stop(self) -> None:
            pass

        def begun(self, *_: object) -> None:
            heard.append("begun")

        def ask(self, *_: object) -> None:
            heard.append("ask")

        def got(self, *_: object) -> None:
            heard.append("got")

    recorder = Recorder(tmp_path, [Heard])
    loader = torch.utils.data.DataLoader(range(4))

    def epoch() -> None:
        assert recorder.begin_epoch()
        iterator = iter(loader)
        recorder.end()
        recorder.see_iterator(loader, iterator)
        for batch in range(2):
            assert recorder.begin_fetch(iterator, first=not batch)
            recorder.end_fetch(iterator)
            recorder.row.forwards += 1

    epoch()
    assert heard == ["begun", "ask", "got", "ask", "got"]
    recorder.started = True
    recorder.user_step()
    epoch()
    assert len(heard) == 5
    assert recorder.warnings == ["heard is off: RuntimeError: no more; the job goes on without it"]


def test_a_step_that_ends_while_a_loader_is_asked_in_vain_costs_nothing(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, [])
    loader = torch.utils.data.DataLoader(range(4))
    assert recorder.begin_epoch()
    iterator = iter(loader)
    recorder.end()
    recorder.see_iterator(loader, iterator)
    assert recorder.begin_fetch(iterator, first=True)
    recorder.row.forwards += 1
    recorder.user_step()  # as a data set may call it
    recorder.end()
    recorder.end_of_epoch()
    assert not recorder.warnings
    assert [seen.role for seen in recorder.loaders] == ["validation"]


def test_a_failing_collector_costs_itself_only(tmp_path: Path) -> None:
    loop = script(
        tmp_path, "torch.profiler._KinetoProfile = None\nfor n in range(12): train(data[:8])\nprint('trained')"
    )
    done = launch(wrapped(tmp_path / "run", [sys.executable, loop], "--window", "2,1,2"), tmp_path)
    assert done.stdout == "trained\n"
    assert done.returncode == 0
    rank = tmp_path / "run/ranks/00000"
    assert len(rows(rank)) == 12
    assert facts(rank)["window"]["state"] == "failed"
    (warning,) = facts(rank)["warnings"]
    assert warning.startswith("trace is off: ")
    assert done.stderr.count("trace is off: ") == 1
