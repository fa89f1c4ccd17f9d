"""The recording of real scripts from its start to its end, and what it passes on to its collectors."""

from __future__ import annotations

import gzip
import json
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from dlprof.record import guarded
from dlprof.record.recorder import Recorder
from dlprof.record.step_clock import Row, Step
from tests.fixtures.jobs import TORCHRUN, environment, facts, launch, record, rows, tiny, wrapped

torch: Any = pytest.importorskip("torch", reason="recording needs torch")

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
        if rank == 1 and n == 11:
            raise RuntimeError("rank 1 has had enough")
"""


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_an_exception_in_one_of_two_ranks_ends_the_job_as_ever_and_leaves_both_recordings(tmp_path: Path) -> None:
    command = [sys.executable, *TORCHRUN, str(tiny(tmp_path, DDP))]
    done = launch(wrapped(tmp_path / "run", command, "--window", "3,1,3"), tmp_path)
    assert done.returncode == 1  # which torchrun says of any rank that failed
    assert "rank 1 has had enough" in done.stderr
    assert facts(tmp_path / "run/ranks/00001")["ended"] == "exit"
    for number in (0, 1):
        rank = tmp_path / f"run/ranks/{number:05d}"
        known, steps = facts(rank), rows(rank)
        names = ("rank", "local_rank", "world_size", "backend", "warnings")
        assert [known[name] for name in names] == [number, number, 2, "gloo", []]
        assert [known["window"][key] for key in ("state", "first_step", "last_step")] == ["exported", 4, 6]
        assert known["models"][0]["class"] == "Sequential"
        assert known["models"][0]["ddp"]["find_unused_parameters"] is False
        # The step before the window is counted: a forward pass, and the gradients of all but the data.
        assert [row["profiled"] for row in steps][:11] == [0] * 2 + [1] * 7 + [0] * 2
        flops = [known["flops"][key] for key in ("state", "step", "total")]
        assert flops == ["counted", 2, 2 * 4 * (2 * 128 + 3 * 16)]
        trace = json.loads(gzip.decompress((rank / "trace.json.gz").read_bytes()))
        events = [e for e in trace["traceEvents"] if e.get("ph") == "X"]
        marks = {e["name"]: e for e in events if e["name"].startswith("ProfilerStep#")}
        assert sorted(marks) == ["ProfilerStep#4", "ProfilerStep#5", "ProfilerStep#6"]
        for part in ("fetch", "forward", "backward", "optimizer"):
            inside = [e for e in events if e["name"] == f"dlprof::{part}"]
            for event, mark in zip(inside, marks.values(), strict=True):
                assert event["cat"] == "user_annotation"
                assert mark["ts"] <= event["ts"]
                assert event["ts"] + event["dur"] <= mark["ts"] + mark["dur"]
        # The step log and the trace use one clock.
        for name, mark in marks.items():
            start_ns = next(row["start_ns"] for row in steps if f"ProfilerStep#{row['step']}" == name)
            assert abs(trace["baseTimeNanoseconds"] + mark["ts"] * 1e3 - start_ns) < 20e6


@pytest.mark.long
def test_a_second_sigterm_waits_for_what_the_first_leaves(tmp_path: Path) -> None:
    # As where a scheduler signals every process of a job, and the launcher, signalled too, passes it on.
    loop = tiny(
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
    rank = tmp_path / "run/ranks/00000"
    assert (facts(rank)["window"]["state"], facts(rank)["ended"]) == ("partial", f"signal {signal.SIGTERM.value}")
    assert len(rows(rank)) > 400
    assert (rank / "trace.json.gz").exists()
    assert json.loads((tmp_path / "run/run.json").read_text())["exit"] == {"code": None, "signal": signal.SIGTERM.value}


@pytest.mark.long
@pytest.mark.parametrize(("window", "last"), [("2,1,100", 5), ("10,1,3", None)])
def test_the_scripts_own_handler_and_profiler_come_first(window: str, last: int | None, tmp_path: Path) -> None:
    """A profiler of the script's begins while ours records, or before."""
    loop = tiny(
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
    done = record(loop, folder=tmp_path / "run", options=["--window", window])
    assert done.stdout == "20\ntheirs\n"
    known = facts(tmp_path / "run/ranks/00000")
    assert (known["window"]["state"], known["window"].get("last_step")) == ("yielded", last)
    assert len(known["warnings"]) == 1


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
    done = record(tiny(tmp_path, body), folder=tmp_path / "gone", options=["--window", "200,1,2"])
    assert done.stdout == "trained 299\n"
    assert "the run folder was deleted" in done.stderr
    body = """
        if __name__ == "__main__":
            train(data[:8])
            torch.multiprocessing.spawn(again, nprocs=1)
        """
    head = "def again(n):\n    for _ in range(3): train(data[:8])\n"
    claimed = {"RANK": "0", "WORLD_SIZE": "2"}  # of a launcher: the next number is another rank's
    done = record(
        tiny(tmp_path, head + dedent(body)),
        folder=tmp_path / "twice",
        options=["--no-trace"],
        env=environment(**claimed),
    )
    first, second = sorted((tmp_path / "twice/ranks").iterdir())
    assert second.name == f"00000.{facts(second)['pid']}"
    assert [len(rows(rank)) for rank in (first, second)] == [1, 3]
    assert "another process records as ranks/00000" in facts(second)["warnings"][0]


class Collector:
    """Notes what it is called with."""

    name = "heard"

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def start(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def step(self, done: Sequence[Step]) -> None:
        self.heard.append(done[-1].number)

    def stop(self) -> None:
        self.heard.append("stopped")


@pytest.mark.parametrize(("age_s", "interval_ms"), [(1, 250), (19, 500), (3600, 1000)])
def test_steps_are_passed_on_in_longer_intervals_the_longer_the_job_runs(
    tmp_path: Path, age_s: int, interval_ms: int
) -> None:
    collector = Collector()
    recorder = Recorder(tmp_path, [lambda: collector])
    recorder.clock.started = True
    recorder.perf_ns -= age_s * 1_000_000_000
    began = time.perf_counter_ns()
    for number in range(26):
        recorder.clock.row = Row(number, began + 100_000_000 * (number - 1))
        recorder.clock.end_step(began + 100_000_000 * number)
    # The first is passed on at once; a step of 100 ms ends every 100 ms.
    every = -(-interval_ms // 100)
    assert collector.heard[:3] == [0, every, 2 * every]


def test_a_collector_that_failed_is_stopped_and_gets_no_more_batches(tmp_path: Path) -> None:
    class Fails(Collector):
        def step(self, _: Sequence[Step]) -> None:
            raise RuntimeError("no more")

        def begun(self, *_: object) -> None:
            self.heard.append("begun")

        def ask(self, *_: object) -> None:
            self.heard.append("ask")

        def got(self, *_: object) -> None:
            self.heard.append("got")

    collector = Fails()
    recorder = Recorder(tmp_path, [lambda: collector])
    clock = recorder.clock
    loader = torch.utils.data.DataLoader(range(4))

    def epoch() -> None:
        assert clock.begin_epoch()
        iterator = iter(loader)
        clock.end()
        clock.see_iterator(loader, iterator)
        for batch in range(2):
            assert clock.begin_fetch(iterator, first=not batch)
            clock.end_fetch(iterator, None)
            clock.row.forwards += 1

    epoch()
    clock.started = True
    clock.user_step()
    epoch()
    assert collector.heard == ["begun", "ask", "got", "ask", "got", "stopped"]
    assert recorder.warnings == ["heard is off: RuntimeError: no more; the job goes on without it"]


def test_what_fails_in_a_hook_switches_off_its_collector_once(tmp_path: Path) -> None:
    class Fails(Collector):
        def fail(self, error: Exception) -> None:
            self.recorder.drop(self, error)

        @guarded
        def hook(self, value: float) -> float | None:
            return 1 / value

    collector = Fails()
    recorder = Recorder(tmp_path, [lambda: collector])
    collector.start(recorder)
    assert [collector.hook(2), collector.hook(0), collector.hook(0)] == [0.5, None, None]
    assert recorder.warnings == ["heard is off: ZeroDivisionError: division by zero; the job goes on without it"]
    assert collector.heard == ["stopped"]


def test_another_thread_that_ends_the_recording_lets_the_training_thread_do_it(tmp_path: Path) -> None:
    class Stopped(Collector):
        def stop(self) -> None:
            self.heard.append(threading.get_ident())

    collector = Stopped()
    recorder = Recorder(tmp_path, [lambda: collector])
    clock = recorder.clock
    assert clock.begin_backward()
    clock.end()
    ending = threading.Thread(target=recorder.stop, args=("exit",))
    ending.start()
    while "exit" not in (recorder.ended or "") and ending.is_alive():
        clock.user_step()
    ending.join()
    recorder.leave()
    assert collector.heard[-1] == threading.get_ident()
    assert recorder.ended == "exit"
