"""The hooks change nothing for the script, and can be taken out of PyTorch again."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from dlprof.record import hooks
from dlprof.record.hooks import Patch
from dlprof.record.observed import Observed
from tests.fixtures.in_process import run_recorded
from tests.fixtures.jobs import environment, facts, launch, record, rows, tiny
from tests.fixtures.places import ROOT

pytest.importorskip("torch", reason="recording needs torch")


class Base:
    """Somebody's class."""

    def inherited(self) -> str:
        return "inherited"


class Theirs(Base):
    """One that inherits."""

    def own(self) -> str:
        return "own"

    @classmethod
    def of_class(cls) -> str:
        return "of_class"


@pytest.mark.parametrize("name", ["own", "inherited", "of_class"])
def test_a_patch_is_undone_unless_somebody_has_wrapped_it(name: str) -> None:
    before = dict(vars(Theirs))
    patch = Patch(Theirs, name, lambda *_: "ours")
    assert getattr(Theirs(), name)() == "ours"
    assert patch.undo()
    assert dict(vars(Theirs)) == before
    assert not patch.undo()
    assert getattr(Theirs(), name)() == name
    patch = Patch(Theirs, name, lambda *_: "ours")
    ours: Any = vars(Theirs)[name]
    theirs = Patch(Theirs, name, lambda *_: f"{ours()} theirs")
    assert not patch.undo()
    assert getattr(Theirs(), name)() == "ours theirs"
    assert theirs.undo()
    assert patch.undo()


# Compares every attribute of PyTorch's modules and their classes, and whatever else of the process can be seen, after
# recordings that saw nothing, trained, and trained while the script wrapped what is ours.
UNINSTALLED = """
    import _signal, gc, signal, threading, types, warnings
    import torch.distributed.checkpoint, torch.distributed.pipelining.schedules
    from dlprof.record import collectors, hooks

    def attributes():
        found = {}
        for name, module in list(sys.modules.items()):
            if name.split(".")[0] == "torch":
                for key, value in list(vars(module).items()):
                    found[name, key] = value
                    if isinstance(value, type) and value.__module__ == name:
                        found |= {(value, k): v for k, v in list(vars(value).items()) if not isinstance(v, int)}
        return {at: value for at, value in found.items() if isinstance(value, (types.FunctionType, classmethod))}

    def process():
        from torch.optim import optimizer as lists
        hooks = (len(lists._global_optimizer_pre_hooks), len(lists._global_optimizer_post_hooks))
        wakes = signal.set_wakeup_fd(-1)
        if wakes != -1:
            signal.set_wakeup_fd(wakes)
        term = type(_signal.getsignal(signal.SIGTERM)).__name__
        return hooks, len(gc.callbacks), wakes, term, len(os.listdir("/proc/self/fd"))

    def epoch():
        for batch in DataLoader(data, batch_size=8, num_workers=1):
            train(batch)

    warnings.simplefilter("ignore")
    epoch()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        pass  # its first use leaves a thread
    before, before_process, tasks = attributes(), process(), len(os.listdir("/proc/self/task"))
    for n, what in enumerate(("idle", "train", "wrap")):
        hooks.install(f"run-{n}", collectors.COLLECTORS)
        assert attributes() != before
        if what != "idle":
            epoch()
        if what == "wrap":
            ours = torch.autograd.backward
            torch.autograd.backward = lambda *args, **kwargs: ours(*args, **kwargs)
        hooks.uninstall()
        after = attributes()
        print([f"{at[0]}.{at[1]}" for at in {*before, *after} if before.get(at) is not after.get(at)])
    epoch()  # its worker is forked now
    time.sleep(1.2)  # our thread wakes twice a second
    print(process() == before_process, threading.active_count(), len(os.listdir("/proc/self/task")) - tasks)
"""


@pytest.mark.long
def test_uninstalling_leaves_pytorch_and_the_process_as_they_were(tmp_path: Path) -> None:
    env = environment(PYTHONPATH=str(ROOT), DLPROF_WINDOW="2,1,2")
    done = launch([sys.executable, tiny(tmp_path, UNINSTALLED)], tmp_path, env=env, timeout=280)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[]", "[]", "['torch.autograd.backward']", "True 1 0"]
    assert "dlprof" not in done.stderr
    assert not (tmp_path / "run-0/ranks").exists()
    for n in (1, 2):
        rank = tmp_path / f"run-{n}/ranks/00000"
        assert [row["optimizer_steps"] for row in rows(rank)] == [1] * 8 + [0]
        assert (facts(rank)["ended"], facts(rank)["window"]["state"]) == ("exit", "exported")
        loading = [row["kind"] for row in rows(rank, "loading")]
        assert (loading.count("first"), loading.count("batch")) == (1, 7)
        # The worker of the epoch after the end wrote nothing.
        fetches = [json.loads(line) for line in (rank / "fetches.jsonl").read_text().splitlines()]
        assert len({fetch["pid"] for fetch in fetches}) == 1


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
    loop = tiny(tmp_path, WORKERS)
    plain = launch([sys.executable, loop, "--flag"], tmp_path)
    done = record(loop, "--flag", folder=tmp_path / "run")
    assert done.stdout == plain.stdout
    assert plain.stdout.startswith("[")
    assert [path.name for path in (tmp_path / "run/ranks").iterdir()] == ["00000"]
    rank = tmp_path / "run/ranks/00000"
    # The forked child's step is not among them.
    assert [row["optimizer_steps"] for row in rows(rank)] == [1] * 12 + [0]
    assert [loader["start_method"] for loader in facts(rank)["loaders"]] == ["fork", "spawn", "forkserver"]
    assert facts(rank)["warnings"] == []


COMPILED = """
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
"""


@pytest.mark.long
def test_a_compiled_script_has_the_same_graphs(tmp_path: Path) -> None:
    loop = tiny(tmp_path, COMPILED)
    plain = launch([sys.executable, loop], tmp_path)
    done = record(loop, folder=tmp_path / "run", options=["--window", "2,1,3"])
    assert done.stdout == plain.stdout
    assert len(plain.stdout.splitlines()) == 3
    steps = rows(tmp_path / "run/ranks/00000")
    # The optimizer's steps are compiled in the first loop, and not seen: the first batches may be micro-batches.
    assert [row["backwards"] for row in steps] == [8] + [1] * 40 + [0]
    assert all(row["forward_ns"] > 0 for row in steps[9:-1])
    assert [model["compiled"] for model in facts(tmp_path / "run/ranks/00000")["models"]] == [True, True]


def parser(**more: Any) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(**more)
    made.add_argument("folder")
    made.add_argument("-j", "--workers", type=int, default=2)
    made.add_argument("--amp", action="store_true")
    made.add_argument("--pin-mem", action=argparse.BooleanOptionalAction, default=True)
    made.add_argument("--no-prefetch", dest="prefetch", action="store_false")
    made.add_argument("--compile", type=lambda text: text == "yes")
    made.add_argument("--api-token")
    made.add_argument("-v", action="count")
    return made


def seen(monkeypatch: pytest.MonkeyPatch, line: str, parse: Any) -> dict[str, tuple[str, bool, bool]]:
    """Return the options that are seen where a script of that command line parses: dest, switch, on."""
    observed = Observed()
    with monkeypatch.context() as patched:
        patched.setattr(hooks, "put", patched.setattr)
        hooks._watch_options(observed)
        patched.setattr(sys, "argv", ["train.py", *line.split()])
        parse()
    rows = [*observed.options.values()]
    assert "hunter2" not in json.dumps(rows)
    return {row["name"]: (row["dest"], row["switch"], row["on"]) for row in rows}


ALL = {
    "--workers": ("workers", False, False),
    "--amp": ("amp", True, False),
    "--pin-mem": ("pin_mem", True, True),
    "--no-prefetch": ("prefetch", True, True),
    "--compile": ("compile", False, False),
    "-v": ("v", True, False),
}


def subcommand() -> None:
    made = argparse.ArgumentParser()
    train = made.add_subparsers().add_parser("train", parents=[parser(add_help=False)])
    assert train
    made.parse_args()


@pytest.mark.parametrize(
    ("line", "parse", "on"),
    [
        ("hunter2", lambda: parser().parse_args(), {}),
        ("hunter2 --am --workers 4 --api-token hunter2", lambda: parser().parse_args(), {"--amp": True}),
        ("hunter2 --compile yes -vv", lambda: parser().parse_args(), {"--compile": True, "-v": True}),
        ("hunter2 --no-pin-mem", lambda: parser().parse_args(sys.argv[1:]), {"--pin-mem": False}),
        ("hunter2 --other", lambda: parser().parse_known_args(), {}),
        ("train hunter2 --amp", subcommand, {"--amp": True}),
    ],
)
def test_options_are_seen_by_name(monkeypatch: pytest.MonkeyPatch, line: str, parse: Any, on: dict[str, bool]) -> None:
    expected = {name: (dest, switch, on.get(name, by_default)) for name, (dest, switch, by_default) in ALL.items()}
    assert seen(monkeypatch, line, parse) == expected


def test_what_is_no_command_line_is_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert seen(monkeypatch, "--amp", lambda: parser().parse_args(["data"])) == {}
    assert seen(monkeypatch, "--amp", lambda: argparse.ArgumentParser().parse_known_args([])) == {}


def test_a_script_that_cannot_be_asked_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class Odd(argparse.ArgumentParser):
        """One whose namespace answers nothing."""

    class Broken(argparse.Namespace):
        def __getattribute__(self, name: str) -> Any:
            if name == "amp" and sys._getframe(1).f_code.co_name == "_options":
                raise ValueError(name)
            return super().__getattribute__(name)

    def parse() -> None:
        made = Odd()
        made.add_argument("--amp", action="store_true")
        assert vars(made.parse_args(namespace=Broken())) == {"amp": True}

    assert seen(monkeypatch, "--amp", parse) == {}
    with pytest.raises(SystemExit):
        seen(monkeypatch, "", lambda: parser().parse_args())


CLOSURE = """
import time, torch
from torch import nn
torch.set_num_threads(1)
model = nn.Linear(16, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
def training_step():
    optimizer.zero_grad()
    loss = model(torch.ones(4, 16)).mean()
    time.sleep(0.004)
    loss.backward()
    return loss
for n in range(30):
    optimizer.step(training_step) if n % 2 else optimizer.step(closure=training_step)
"""


def test_what_a_closure_does_besides_its_passes_is_no_part_of_the_optimizer(tmp_path: Path) -> None:
    run_recorded(tmp_path, CLOSURE)
    steps = rows(tmp_path / "run/ranks/00000")[5:-1]
    assert len(steps) >= 20
    assert {row["backwards"] for row in steps} == {1}
    # Each step sleeps for 4 ms; a busy machine may take a core away from some.
    assert median(row["optimizer_ns"] for row in steps) < 4_000_000 <= min(row["dur_ns"] for row in steps)
