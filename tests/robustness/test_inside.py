"""What a script sees of its recording: what docs/inside.md lists, exceptions as ever, and secrets nowhere."""

from __future__ import annotations

import json
import random
import re
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.torture import signals
from benchmarks.torture.secrets import SHAPES, held, leaks, plant, promised, random_shape
from tests.fixtures.jobs import environment, facts, launch, wrapped

pytest.importorskip("torch", reason="recording needs torch")

LISTED = (Path(__file__).parent.parent.parent / "docs/inside.md").read_text()

# Trains, and tells of itself whatever can be seen from within.
INSIDE = """
import gc, json, os, signal, sys, threading, types
import torch
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.ones(400, 8)), batch_size=4)
for (batch,) in loader:
    model(batch).sum().backward()
    optimizer.step()

def ours(value):
    if type(value) is not types.FunctionType:
        return False
    # One has torch's own file and line, and holds what is ours.
    held = [type(cell.cell_contents).__module__ for cell in value.__closure__ or () if cell != types.CellType()]
    return "/dlprof/" in value.__code__.co_filename or any(name.startswith("dlprof.") for name in held)

patched = {}
def see(name, value):
    # A function may have several names.
    known = patched.setdefault(id(value), name)
    patched[id(value)] = min(known, name, key=len)

for name, module in list(sys.modules.items()):
    if name.split(".")[0] in ("dlprof", "sitecustomize") or not isinstance(module, types.ModuleType):
        continue
    for key, value in list(vars(module).items()):
        if ours(value):
            see(f"{name}.{key}", value)
        elif issubclass(type(value), type) and value.__module__ == name:
            for k, v in list(vars(value).items()):
                if ours(v):
                    see(f"{name}.{value.__qualname__}.{k}", v)
print(json.dumps({
    "patched": sorted(patched.values()),
    "environment": dict(os.environ),
    "path": sys.path,
    "finders": [str(type(finder)) for finder in sys.meta_path],
    "collected": len(gc.callbacks),
    "threads": sorted(thread.name for thread in threading.enumerate()),
    "tasks": len(os.listdir("/proc/self/task")),
    "handlers": {int(n): repr(signal.getsignal(n)) for n in signal.valid_signals()},
    "wakes": signal.set_wakeup_fd(-1) != -1,
    "files": len(os.listdir("/proc/self/fd")),
    "modules": sorted({name.partition(".")[0] for name in sys.modules}),
    "model": sorted(vars(model)), "loader": sorted(vars(loader)), "optimizer": sorted(vars(optimizer)),
    "state": torch.get_rng_state().sum().item(),
    "argv": sys.argv, "flags": list(sys.flags), "recursion": sys.getrecursionlimit(), "trace": repr(sys.gettrace()),
}))
"""


def told(folder: Path, *, wraps: bool) -> Any:
    script = folder / "train.py"
    script.write_text(INSIDE)
    command = [sys.executable, str(script)]
    done = launch(wrapped(folder / "run", command, "--window", "1000,1,1") if wraps else command, folder)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def section(title: str) -> set[str]:
    """List what stands in backticks at the head of a section's lines."""
    body = re.split(r"\n##+ ", LISTED.partition(f"# {title}\n")[2])[0]
    return set(re.findall(r"^[*] `([^`]+)`", body, re.M))


@pytest.mark.long
def test_a_recorded_process_differs_in_what_is_listed_alone(tmp_path: Path) -> None:
    plain, ours = told(tmp_path, wraps=False), told(tmp_path, wraps=True)
    assert plain["patched"] == []
    assert set(ours["patched"]) == section("Functions that are ours")
    here, there = ours["environment"], plain["environment"]
    assert {k for k in here | there if here.get(k) != there.get(k)} == section("Environment")
    assert [p for p in ours["path"] if p not in plain["path"]] == [ours["environment"]["PYTHONPATH"].partition(":")[0]]
    assert set(ours["modules"]) - set(plain["modules"]) <= section("Modules")
    assert ours["tasks"] - plain["tasks"] == 1
    assert ours["collected"] - plain["collected"] == 1
    assert (ours["wakes"], plain["wakes"]) == (True, False)
    assert ours["files"] - plain["files"] == len(section("Files")) + len(("read end", "write end"))
    same = set(plain) - {"patched", "environment", "path", "modules", "tasks", "collected", "wakes", "files"}
    assert {key: ours[key] for key in same} == {key: plain[key] for key in same}


def test_a_child_that_does_not_train_is_as_it_was_but_for_a_word_and_a_finder(tmp_path: Path) -> None:
    """pip, git's helpers, a tokenizer's server: Python without torch."""
    seen = (
        "import gc, json, os, signal, sys, threading; print(json.dumps({"
        "'threads': threading.active_count(), 'collected': len(gc.callbacks),"
        "'files': len(os.listdir('/proc/self/fd')),"
        "'wakes': signal.set_wakeup_fd(-1), 'term': repr(signal.getsignal(signal.SIGTERM)),"
        "'finders': [type(f).__name__ for f in sys.meta_path if not isinstance(f, type)],"
        "'dlprof': sorted(m for m in sys.modules if m.startswith('dlprof') or m == 'sitecustomize')}))"
    )
    command = [sys.executable, "-c", seen]
    plain = json.loads(launch(command, tmp_path, env=environment()).stdout)
    ours = json.loads(launch(wrapped(tmp_path / "run", command), tmp_path).stdout)
    assert ours.pop("finders") == ["_TorchFinder", *plain.pop("finders")]
    assert ours.pop("dlprof") == ["sitecustomize"]
    assert plain.pop("dlprof") in ([], ["sitecustomize"])  # Debian's Python has one
    assert ours == plain


# Each is raised below what dlprof has wrapped, or by it.
TRACEBACKS = """
import traceback, warnings
import torch
from torch.utils.data import DataLoader, Dataset
warnings.simplefilter("ignore")

class Broken(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 1)
    def forward(self, x):
        return self.inner(torch.ones(2, 3))

class Nested(torch.nn.Sequential):
    pass

class Missing(Dataset):
    def __init__(self, least=6):
        self.least = least
    def __len__(self):
        return 8
    def __getitem__(self, index):
        if index >= self.least:
            raise KeyError(f"no sample {index}")
        return torch.ones(4)

def collate(samples):
    raise ValueError("samples do not fit")

def closure():
    raise ArithmeticError("no loss")

class Refusing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x
    @staticmethod
    def backward(ctx, grad):
        raise ValueError("no gradient")

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()

CASES = {
    "forward": lambda: Broken()(torch.ones(2, 4)),
    "nested": lambda: Nested(torch.nn.Sequential(Broken()))(torch.ones(2, 4)),
    "backward": lambda: torch.ones(2).sum().backward(),
    "backward, Python": lambda: Refusing.apply(model(torch.ones(2, 4))).sum().backward(),
    "grad": lambda: torch.autograd.grad(torch.ones(1, requires_grad=True), torch.ones(1)),
    "step": lambda: optimizer.step(closure),
    "optimizer": lambda: torch.optim.SGD(model.parameters(), lr=-1),
    "loader": lambda: DataLoader(Missing(), num_workers=-1),
    "iteration": lambda: next(iter(DataLoader(Missing(0)))),
    "second batch": lambda: [*DataLoader(Missing(6), batch_size=4)],
    "collate": lambda: next(iter(DataLoader(Missing(), collate_fn=collate))),
    "worker": lambda: next(iter(DataLoader(Missing(0), num_workers=1))),
    "no len": lambda: next(iter(DataLoader(object()))),
    "to": lambda: model.to("no such device"),
    "save": lambda: torch.save(model, "/no/such/folder/model.pt"),
    "scaler": lambda: torch.amp.GradScaler("cpu").scale("text"),
    "autocast": lambda: torch.autocast("no such device"),
    "compile": lambda: torch.compile(model, backend="no such backend", dynamic=5),
    "synchronize": lambda: torch.cuda.synchronize("no such device"),
}
for name, case in CASES.items():
    print(name)
    try:
        case()
    except Exception:
        print(traceback.format_exc())
"""


# A signal comes while a model is compiled that only `--set` compiles.
COMPILED = """
import signal
import torch
from torch._inductor import config

class StopError(Exception):
    pass

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 1)
    def forward(self, x):
        return torch.relu(self.inner(x))

def handler(*_):
    raise StopError

signal.signal(signal.SIGUSR1, handler)
config.pre_grad_custom_pass = lambda _: signal.raise_signal(signal.SIGUSR1)
try:
    Net()(torch.ones(2, 4))
except StopError:
    print("stopped")
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    [
        ("once", "TimeoutError", "loader"),
        pytest.param(("object", "AttributeError", "optimizer"), marks=pytest.mark.slow),
        pytest.param(("function", "RuntimeError", "made"), marks=pytest.mark.slow),
    ],
)
def test_no_exception_of_a_signals_handler_is_lost_and_the_recording_goes_on(
    case: tuple[str, str, str], tmp_path: Path
) -> None:
    done = signals.run(case, 250, 1, tmp_path / "run", ["--window", "30,1,3"])
    assert (done.raised, done.lost) == (250, 0)
    assert done.steps >= done.ended >= 100
    assert " is off" not in done.said
    assert "did not apply" not in done.said
    assert facts(tmp_path / "run/ranks/00000")["window"]["state"] == "exported"
    if sys.version_info >= (3, 11):
        assert done.ours == {}


@pytest.mark.slow
def test_what_a_handler_raises_while_a_model_is_compiled_arrives(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(COMPILED)
    options = ("--no-trace", "--allow-numerics", "--set", "torch.compile=default")
    done = launch(wrapped(tmp_path / "run", [sys.executable, str(script)], *options), tmp_path)
    assert done.stdout == "stopped\n", done.stderr


@pytest.mark.long
@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 shows a wrapper's frame")
def test_tracebacks_are_the_same(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRACEBACKS)
    plain = launch([sys.executable, str(script)], tmp_path)
    ours = launch(wrapped(tmp_path / "run", [sys.executable, str(script)], "--no-trace"), tmp_path)
    assert plain.returncode == 0, plain.stderr
    assert plain.stdout.count("Traceback") >= 19, plain.stdout
    assert ours.stdout == plain.stdout


@pytest.mark.long
@pytest.mark.parametrize("options", [(), pytest.param(("--keep-arguments",), marks=pytest.mark.slow)])
def test_secrets_of_command_environment_and_source_reach_nothing(tmp_path: Path, options: tuple[str, ...]) -> None:
    dice = random.Random(7)
    shapes = [shape for shape in (*SHAPES, *(random_shape(dice) for _ in range(60))) if shape.named or not options]
    planted = plant(tmp_path, shapes, dice, "--lines", "__main__:step", *options)
    assert stat.S_IMODE(planted.run.stat().st_mode) == 0o700
    files = held(planted.run)
    # What is no secret is there: the search looks where it should.
    for word in ("0.125", "adamw", "--precision=bf16", "[redacted]"):
        assert leaks({"run.json": files["run.json"]}, [word])
    calls = json.loads((planted.run / "ranks/00000/facts.json").read_text())["calls"]
    assert any("model(batch[0], **login(token=" in call["source"] for call in calls)
    assert b"loss.backward(**login(" in files["ranks/00000/lines.jsonl"]
    assert {"report.html", "result.json"} <= set(leaks(files, ["adamw"])["adamw"])
    for name in (name for name in files if name.endswith("stacks.jsonl")):
        assert b"thread (" in files[name]
    # In what the job is started with, the whole body of a shell is one argument.
    found = leaks(files, promised(planted, keep=bool(options)))
    assert {planted.secrets[secret]: names for secret, names in found.items()} == {}
