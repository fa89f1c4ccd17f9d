"""What scripts do to a recording, by mistake or for good reasons: it may suffer, and they must not."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent

import pytest

from dlprof import run_folder
from dlprof.read.run import open_run
from tests.fixtures.jobs import COMPILES_NOTHING, environment, facts, record, rows

pytest.importorskip("torch", reason="recording needs torch")

SETUP = """
import os, signal, sys, threading, time
import torch
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train(steps=1):
    for _ in range(steps):
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        time.sleep(0.002)
"""


def script(folder: Path, body: str, name: str = "train.py") -> Path:
    path = folder / name
    path.write_text(COMPILES_NOTHING + SETUP + dedent(body))
    return path


@pytest.mark.long
def test_files_that_take_our_descriptors_stay_as_the_script_wrote_them(tmp_path: Path) -> None:
    loop = script(
        tmp_path,
        """
        train(20)
        os.closerange(3, 1000)
        files = [open(f"theirs-{n}", "w+") for n in range(40)]
        for file in files:
            file.write("theirs")
            file.flush()
        train(200)
        print({open(f"theirs-{n}").read() for n in range(40)})
        """,
    )
    done = record(loop, folder=tmp_path / "run", options=["--window", "100,1,2"])
    assert done.stdout == "{'theirs'}\n"
    rank = tmp_path / "run/ranks/00000"
    assert len(rows(rank)) == 220
    assert facts(rank)["warnings"] == []
    assert facts(rank)["window"]["state"] == "exported"


FAILING = """
import dlprof.record.collectors as collectors

class Failing:
    fails_at = "making"
    def __init__(self):
        self.at("making")
    @property
    def name(self):
        return "a collector that fails at " + self.fails_at
    def start(self, recorder):
        self.at("start")
    def step(self, step):
        self.at("step")
    def stop(self):
        self.at("stop")
    def at(self, moment):
        if self.fails_at == moment:
            raise RuntimeError(f"planted at {moment}")

failing = [type("Failing", (Failing,), {"fails_at": moment}) for moment in ("making", "start", "step", "stop")]
collectors.COLLECTORS = (*collectors.COLLECTORS, *failing)
"""


@pytest.mark.long
def test_a_collector_that_raises_costs_itself_and_one_line(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(FAILING)
    loop = script(tmp_path, "train(15)\nprint('trained')")
    env = environment(PYTHONPATH=str(tmp_path / "site"))
    done = record(loop, folder=tmp_path / "run", options=["--window", "3,1,2"], env=env)
    assert done.stdout == "trained\n"
    rank = tmp_path / "run/ranks/00000"
    assert len(rows(rank)) == 15
    assert facts(rank)["window"]["state"] == "exported"
    warnings = facts(rank)["warnings"]
    assert len(warnings) == 4
    said = open_run(tmp_path / "run").warnings
    for warning, moment in zip(warnings, ("making", "start", "step", "stop"), strict=True):
        assert f" is off: RuntimeError: planted at {moment}" in warning
        assert done.stderr.count(f"planted at {moment}") == 1
        assert any(f"planted at {moment}" in text for text in said)


@pytest.mark.long
def test_a_limit_on_the_size_of_files_costs_the_recording_only(tmp_path: Path) -> None:
    loop = script(
        tmp_path,
        """
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        train(300)
        print("trained")
        """,
    )
    done = record(loop, folder=tmp_path / "run", options=["--window", "10,1,20"])
    assert done.stdout == "trained\n"
    rank = tmp_path / "run/ranks/00000"
    said = open_run(tmp_path / "run").warnings
    assert [text for text in said if "steps is off: " in text]
    assert [text for text in said if "trace is off: [Errno 27] File too large (ulimit -f limits" in text]
    assert facts(rank)["window"]["state"] == "failed"
    assert not list(rank.glob("trace*"))
    # The lines that fitted; the last may be half.
    assert len(run_folder.lines_of(rank, "steps")) > 50
    # All logs of a rank are in one file, and each that is full says so once.
    off = re.findall(r"(\w+) is off: ", done.stderr)
    assert {"steps", "trace"} <= {*off}
    assert len(off) == len({*off})


@pytest.mark.long
def test_a_script_that_replaces_itself_is_told_of(tmp_path: Path) -> None:
    again = """
        if sys.argv[1] != "again":
            train(10)
            os.execl(sys.executable, sys.executable, __file__, "again")
        train(15)
        print("trained", os.getpid())
        """
    # Both lives are kept, the first one to its last step, and the second one says so.
    done = record(script(tmp_path, again), "first", folder=tmp_path / "late", options=["--window", "2,1,100"])
    pid = done.stdout.split()[1]
    lives = sorted(path.name for path in (tmp_path / "late/ranks").iterdir())
    assert lives == ["00000", f"00000.{pid}"]
    assert len(rows(tmp_path / "late/ranks/00000")) == 10
    assert facts(tmp_path / "late/ranks/00000")["ended"] == "exec"
    assert facts(tmp_path / "late/ranks/00000")["window"]["state"] == "partial"
    assert len(rows(tmp_path / f"late/ranks/00000.{pid}")) == 15
    assert "replaced itself" in done.stderr
    # By a Python that the hook does not reach: it says what happened.
    (tmp_path / "leaves.py").write_text("import os, sys\nos.execv(sys.executable, [sys.executable, '-I', '-c', ''])\n")
    done = record(tmp_path / "leaves.py", folder=tmp_path / "isolated")
    assert "replaced itself" in done.stderr
    assert "replaced itself" in open_run(tmp_path / "isolated").warnings[0]


@pytest.mark.long
def test_a_loop_in_a_thread_that_is_still_running_at_the_end_breaks_nothing(tmp_path: Path) -> None:
    body = """
        import atexit
        atexit.register(os._exit, 0)  # after ours; torch in a daemon thread may abort later on, with and without us
        taken = []
        def forever():
            while True:
                train()
                taken.append(1)
        threading.Thread(target=forever, daemon=True).start()
        while len(taken) < 30:
            time.sleep(0.01)
        time.sleep(0.5)  # they are written every quarter of a second
        """
    done = record(script(tmp_path, body), folder=tmp_path / "daemon", options=["--window", "3,1,100000"])
    assert facts(tmp_path / "daemon/ranks/00000")["window"]["state"] == "partial"
    assert facts(tmp_path / "daemon/ranks/00000")["ended"] == "exit"
    assert len(rows(tmp_path / "daemon/ranks/00000")) > 10
    assert "Traceback" not in done.stderr


# A model whose own methods fail, as those of one do that is set up late; by what it overrides.
REFUSING = """
import torch
def refuses(self, *_, **__):
    raise RuntimeError("not set up")
class Plain(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8, 8))
        self.inner = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
    def forward(self, x):
        return self.inner(x @ self.weight)
plain = Plain()
parameters = [*plain.parameters()]
plain.__class__ = type("Model", (Plain,), {name: OVERRIDE})
optimizer = torch.optim.SGD(parameters, lr=0.1)
for _ in range(30):
    plain(torch.ones(4, 8)).sum().backward()
    optimizer.step()
print("trained")
"""
LATE = """lambda self, name: refuses(self) if name.startswith(("_is_", "_orig", "config", "module", "batch_")) else (
    object.__getattribute__(self, name))"""
OVERRIDES = {
    "named_parameters": ("refuses", "Model.parameters()"),
    "parameters": ("refuses", "Model.parameters()"),
    "named_modules": ("refuses", "Model.modules()"),
    "named_children": ("refuses", "Model.named_children()"),
    "__getattribute__": (LATE, "Model.modules()"),
    "__hash__": ("refuses", "Model.modules()"),
    "__class__": ("property(refuses)", ""),
}


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [n if n == "__getattribute__" else pytest.param(n, marks=pytest.mark.slow) for n in OVERRIDES]
)
def test_a_model_whose_own_methods_fail_is_recorded_all_the_same(name: str, tmp_path: Path) -> None:
    override, said = OVERRIDES[name]
    loop = tmp_path / "train.py"
    loop.write_text(f"{COMPILES_NOTHING}name = {name!r}\n" + REFUSING.replace("OVERRIDE", override))
    done = record(loop, folder=tmp_path / "run", options=["--window", "5,1,3"])
    assert done.stdout == "trained\n"
    rank = tmp_path / "run/ranks/00000"
    assert len(rows(rank)) == 30
    told = facts(rank)
    assert (told["window"]["state"], told["flops"]["state"]) == ("exported", "counted")
    assert [(model["parameters"], model["modules"]) for model in told["models"]] == [(136, 4)]
    assert rows(rank, "held")
    assert rows(rank, "modules")
    assert done.stderr.count(f"{said} fails (RuntimeError: not set up)") == bool(said), done.stderr
    assert " is off" not in done.stderr


# Threads that train; what is to become of the trace, and how many of the threads' steps are recorded at least.
THREADS = {
    "one after the other, and each ends within the window": ("for _ in range(4): start(14)", "partial", 14),
    "at a time": ("start(60, 3)", "exported", 60),
}


@pytest.mark.long
@pytest.mark.parametrize("name", ["at a time", pytest.param(next(iter(THREADS)), marks=pytest.mark.slow)])
def test_threads_that_train_leave_a_trace_and_nothing_on_stderr(name: str, tmp_path: Path) -> None:
    started, state, least = THREADS[name]
    loop = tmp_path / "train.py"
    loop.write_text(
        dedent(
            """
            import threading, torch
            def train(steps):
                model = torch.nn.Linear(8, 1)
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                for _ in range(steps):
                    model(torch.ones(4, 8)).sum().backward()
                    optimizer.step()
            def start(steps, count=1):
                threads = [threading.Thread(target=train, args=(steps,)) for _ in range(count)]
                [thread.start() for thread in threads]
                [thread.join() for thread in threads]
            """
        )
        + started
    )
    done = record(loop, folder=tmp_path / "run", options=["--quiet"])
    assert done.stderr == ""
    assert [rank.name for rank in (tmp_path / "run/ranks").iterdir()] == ["00000"]
    rank = tmp_path / "run/ranks/00000"
    assert facts(rank)["window"]["state"] == state
    assert (rank / "trace.json.gz").exists()
    assert len(rows(rank)) >= least
