"""What differs inside a recorded process is what docs/inside.md lists, and nothing else."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.jobs import environment, launch, wrapped

pytest.importorskip("torch", reason="recording needs torch")

LISTED = (Path(__file__).parent.parent.parent / "docs/inside.md").read_text()

# Trains, and tells of itself whatever can be seen from within.
SCRIPT = """
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
    script.write_text(SCRIPT)
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
    assert (ours.pop("dlprof"), plain.pop("dlprof")) == (["sitecustomize"], [])
    assert ours == plain
