"""Exceptions of the script's: what a signal's handler raises arrives, and tracebacks read as without dlprof."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.torture import signals
from tests.fixtures.jobs import facts, launch, wrapped

pytest.importorskip("torch", reason="recording needs torch")

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
