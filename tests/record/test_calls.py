"""Which lines and files of the user's are named, what is kept of them, and within which bounds."""

from __future__ import annotations

import hashlib
import importlib
import os
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dlprof.record import calls as module
from dlprof.record import hooks
from dlprof.record.calls import LOOKS, MOST_FILE_BYTES, PLACES, Calls, Files, Frames, own_files
from dlprof.record.failures import memory_failure
from dlprof.record.hooks import watch_calls
from dlprof.record.loaders import LoaderSeen
from tests.fixtures.in_process import run_recorded
from tests.fixtures.jobs import TINY, facts, record, tiny

torch: Any = pytest.importorskip("torch", reason="recording needs torch")

POSITIONS = sys.version_info >= (3, 11)  # Python says in which columns a call stands


class Look:
    """Asks about the frame that calls it while it stands at the call."""

    def __init__(self, directory: Path, since: float = 1.0) -> None:
        self.frames = Frames(f"{directory}{os.sep}", time.time() + since)
        self.place: Any = None

    def __call__(self, *_: object, **__: object) -> None:
        frame, library = self.frames.find(sys._getframe(1))
        self.place = self.frames.place(frame, library) if frame is not None else None

    def run(self, path: Path, text: str, **names: Any) -> dict[str, Any]:
        """Run a file that calls `look(...)`, and return its names."""
        space: dict[str, Any] = {"look": self, **names}
        exec(compile(text, str(path), "exec"), space)
        return space


def looked(path: Path, text: str, directory: Path, since: float = 1.0) -> Any:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode())
    look = Look(directory, since)
    look.run(path, text)
    return look.place


def test_a_call_has_its_line_function_and_text(tmp_path: Path) -> None:
    text = "def main():\n    x = look(  # the loader\n        1,\n        size='ü',\n    )\nmain()\n"
    place = looked(tmp_path / "sub" / "train.py", text, tmp_path)
    assert (place.file, place.line, place.function, place.via) == ("sub/train.py", 2, "main", "")
    assert place.digest == hashlib.sha256(text.encode()).hexdigest()
    if POSITIONS:
        assert (place.end_line, place.column, place.end_column) == (5, 8, 5)
        assert place.source == "x = look( 1, size='ü', )"
    # A file outside of the working directory keeps its whole name.
    place = looked(tmp_path / "train.py", "look()\n", tmp_path / "elsewhere")
    assert (place.file, place.function) == (str(tmp_path / "train.py"), "<module>")


@pytest.mark.parametrize("is_ours", [False, True])
def test_the_innermost_librarys_frame_is_passed_and_named_unless_it_is_ours(
    is_ours: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "lib/site-packages/fancy"
    if is_ours:  # installed beside the libraries
        monkeypatch.setattr(module, "_OURS", f"{library}{os.sep}")
    look = Look(tmp_path)
    names = look.run(library / "loop.py", "class Trainer:\n    def train(self):\n        return look()\n")
    names = look.run(library / "trainer.py", "def train():\n    Trainer().train()\n", **names)
    look.run(tmp_path / "train.py", "def main():\n    train()\nmain()\n", **names)
    assert (look.place.file, look.place.line) == ("train.py", 2)
    function = "Trainer.train" if POSITIONS else "train"
    assert look.place.via == ("" if is_ours else f"{function} (fancy/loop.py:3)")


def test_what_is_read_of_a_file_is_bounded_and_never_of_a_newer_one(tmp_path: Path) -> None:
    big = "look()\n" + "#" * MOST_FILE_BYTES + "\n"
    assert looked(tmp_path / "big.py", big, tmp_path).digest == ""
    newer = looked(tmp_path / "newer.py", "look()\n", tmp_path, since=-60)
    assert (newer.digest, newer.line) == ("", 1)
    os.mkfifo(tmp_path / "pipe.py")  # which is not waited for
    look = Look(tmp_path)
    look.run(tmp_path / "pipe.py", "look()\n")
    assert (look.place.file, look.place.digest) == ("pipe.py", "")


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("look(api_key='hunter2', size=3)  # hunter2", "look(api_key='…', size=3)"),
        ('x = """ hunter2 \n hunter2 """, look()', '""", look()'),
        ('x = f"""{1} hunter2 \n hunter2 {look()} hunter2 \n"""', ""),
    ],
)
def test_text_in_a_calls_lines_is_left_out(text: str, kept: str, tmp_path: Path) -> None:
    assert looked(tmp_path / "train.py", f"{text}\n", tmp_path).source == kept


@pytest.mark.skipif(not POSITIONS, reason="Python says no columns here")
def test_what_was_compiled_anew_is_not_named(tmp_path: Path) -> None:
    """Dynamo's code has the function's first line alone, and no columns."""
    look = Look(tmp_path)
    step = look.run(tmp_path / "train.py", "def step():\n    look()\n")["step"]
    step()
    assert look.place.line == 2
    # A table that says of every instruction: the first line, no column.
    table = b"".join(
        bytes([0x80 | 13 << 3 | min(left, 8) - 1, 0]) for left in range(len(step.__code__.co_code) // 2, 0, -8)
    )
    step.__code__ = step.__code__.replace(co_linetable=table)
    step()
    assert look.place is None


def test_whose_a_file_is() -> None:
    ours = str(sys.modules[Frames.__module__].__file__)
    files = ("/home/me/train.py", os.__file__, pytest.__file__, "<string>", "/x/dist-packages/y.py", ours)
    assert list(map(own_files(), files)) == [True] + [False] * 5


class Loader:
    """Stands for a loader: it can be referred to weakly, and has a data set."""

    def __init__(self, dataset: object = None) -> None:
        self.dataset = dataset


def seen_loader(role: str) -> LoaderSeen:
    gone: Any = SimpleNamespace
    return LoaderSeen(gone, {}, role)


def test_a_place_is_kept_once_and_counted_within_bounds() -> None:
    calls = Calls()
    for _ in range(3):
        calls.see("save")
    calls.see("save")
    first, second = calls.facts()
    assert (first["kind"], first["count"], second["count"]) == ("save", 3, 1)
    assert first["function"] == test_a_place_is_kept_once_and_counted_within_bounds.__name__
    assert second["line"] == first["line"] + 1
    assert calls.news
    exec(compile("look('copy')\n" * 3 * PLACES, "/home/me/train.py", "exec"), {"look": calls.see})
    assert [call["file"] for call in calls.facts()[2:]] == ["/home/me/train.py"] * PLACES
    for _ in range(2 * LOOKS):
        calls.see("step")
        if calls.looks:
            calls.see_backward()
    counts = {call["kind"]: call["count"] for call in calls.facts()}
    assert (counts["step"], counts["backward"]) == (LOOKS, LOOKS)


def test_a_loaders_calls_know_what_its_batches_were_for() -> None:
    """Also those of a loader that a library made over the data set of the script's, as Accelerate's prepare() does."""
    calls, data = Calls(), [1, 2]
    mine, other, prepared, validation = Loader(data), Loader([3]), Loader(data), Loader()
    for loader in (mine, other, validation):
        calls.see_made(loader)
    names: dict[str, Any] = {}
    exec(compile("def prepare(see, of):\n    see(of)\n", "/x/site-packages/fancy/prepare.py", "exec"), names)
    names["prepare"](calls.see_made, prepared)
    seen = seen_loader("unknown")
    calls.see_iteration(prepared, seen)
    calls.see_iteration(validation, seen_loader("validation"))
    seen.role = "train"  # it is only known later
    found = [(call["kind"], call.get("roles"), call.get("via")) for call in calls.facts()]
    assert found == [
        ("loader", ["train", "validation"], None),  # made in one line
        ("loader", ["train"], "prepare (fancy/prepare.py:2)"),
        ("iteration", ["train"], None),
        ("iteration", ["validation"], None),
    ]


def test_what_is_moved_is_a_model_if_it_has_most_of_its_parameters() -> None:
    calls, part, loss = Calls(), torch.nn.Linear(8, 8), torch.nn.Linear(1, 1)
    model = torch.nn.Sequential(part, torch.nn.ReLU())
    calls.see_moved(part)
    calls.see_moved(loss)
    assert [call.get("whole") for call in calls.facts()] == [None, None]
    assert [call.get("whole") for call in calls.facts([weakref.ref(model)])] == [True, None]
    assert [call.get("whole") for call in calls.facts()] == [True, None]  # the model may be gone


def test_what_goes_wrong_ends_it_and_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls()
    calls.see("save")
    monkeypatch.setattr(calls._frames, "find", lambda _: 1 / 0)
    assert calls.see("save") is None
    assert (calls.off, calls.looks) == (True, 0)
    assert calls.problem == "lines of the script are not named: ZeroDivisionError: division by zero"
    assert len(calls.facts()) == 1


LOOP = """
from torch.utils.data import DataLoader as Batches

def loaded(n):
    return Batches(
        data,
        batch_size=4,
        num_workers=n,
    )

def validate(loader):
    with torch.no_grad():
        for batch in loader:
            model(batch[0])

def main():
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for epoch in range(3):
        for batch in trained:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                model(batch[0])
            print(train(batch).item())
        validate(held)
        torch.save(model.state_dict(), "model.pt")

def wrapped():
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    model = DistributedDataParallel(nn.Linear(8, 8))
    FSDP(nn.Linear(4, 4), device_id=torch.device("cpu"))
    fully_shard(nn.Linear(8, 8))
    nn.DataParallel(nn.Linear(4, 4))
    compiled = torch.compile(model, backend="eager")
    nn.Softmax().to("cpu")
    model.to("cpu")
    compiled(torch.randn(2, 8)).sum().backward()
    dist.destroy_process_group()

trained, held = loaded(0), DataLoader(data)
main()
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, fully_shard
from torch.nn.parallel import DistributedDataParallel
wrapped()
"""
NAMED = {
    "threads": [("torch.set_num_threads(1)", "<module>")],
    "optimizer": [("optimizer = torch.optim.SGD(model.parameters(), lr=0.1)", "<module>")],
    "loader": [("return Batches(", "loaded"), ("trained, held = loaded(0), DataLoader(data)", "<module>")],
    "grad_scaler": [('scaler = torch.amp.GradScaler("cpu", enabled=False)', "main")],
    "iteration": [("for batch in trained:", "main"), ("for batch in loader:", "validate")],
    "autocast": [('with torch.autocast("cpu", dtype=torch.bfloat16):', "main")],
    "forward": [
        ("loss = nn.functional.mse_loss(model(batch[0]), batch[1])", "train"),
        ("compiled(torch.randn(2, 8)).sum().backward()", "wrapped"),
    ],
    "unused_forward": [("model(batch[0])", "main")],
    "backward": [("loss.backward()", "train"), ("compiled(torch.randn(2, 8)).sum().backward()", "wrapped")],
    "optimizer_step": [("optimizer.step()", "train")],
    "sync": [("print(train(batch).item())", "main")],
    "save": [('torch.save(model.state_dict(), "model.pt")', "main")],
    "ddp": [("model = DistributedDataParallel(nn.Linear(8, 8))", "wrapped")],
    "fsdp": [
        ('FSDP(nn.Linear(4, 4), device_id=torch.device("cpu"))', "wrapped"),
        ("fully_shard(nn.Linear(8, 8))", "wrapped"),
    ],
    "data_parallel": [("nn.DataParallel(nn.Linear(4, 4))", "wrapped")],
    "compile": [('compiled = torch.compile(model, backend="eager")', "wrapped")],
    "model": [('model.to("cpu")', "wrapped")],
}

FIRST = """
def check():
    model(torch.randn(2, 8))

def evaluate():
    with torch.no_grad():
        for _ in range(9):
            model(torch.randn(2, 8))

check()
evaluate()
for _ in range(12):
    optimizer.zero_grad()
    model(torch.randn(2, 8)).sum().backward()
    optimizer.step()
"""


@pytest.mark.skipif(not POSITIONS, reason="without columns a call's text is not known")
def test_the_forward_pass_that_is_named_is_the_one_that_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_recorded(tmp_path, TINY + FIRST)
    text, calls = (TINY + FIRST).splitlines(), facts(tmp_path / "run/ranks/00000")["calls"]
    named = [text[call["line"] - 1].strip() for call in calls if call["kind"] == "forward"]
    assert named == ["model(torch.randn(2, 8)).sum().backward()"]


# FSDP's classes are seen as they are imported: in a process that has not done so.
@pytest.mark.long
@pytest.mark.skipif(not POSITIONS, reason="without columns Dynamo's calls look like the user's")
def test_the_lines_of_a_training_loop_and_of_what_wraps_a_model(tmp_path: Path) -> None:
    script = tiny(tmp_path, LOOP)
    record(script, folder=tmp_path / "run", options=["--window", "20,1,2"])
    known, text = facts(tmp_path / "run/ranks/00000"), script.read_text().splitlines()
    found: dict[str, list[tuple[str, str]]] = {}
    for call in known["calls"]:
        assert call["file"] == script.name
        found.setdefault(call["kind"], []).append((text[call["line"] - 1].strip(), call["function"]))
    assert found == NAMED
    assert known["directory"] == f"{tmp_path}/"
    assert len({call["digest"] for call in known["calls"]}) == 1
    roles = [(call["kind"], call["roles"]) for call in known["calls"] if call.get("roles")]
    assert roles == [(kind, [role]) for kind in ("loader", "iteration") for role in ("train", "validation")]


def test_what_is_made_while_dynamo_reads_the_script_is_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, traced = Calls(), [False]
    monkeypatch.setattr(torch.compiler, "is_dynamo_compiling", lambda: traced[0])
    monkeypatch.setattr(hooks, "put", monkeypatch.setattr)
    watch_calls(calls)

    def seen() -> int:
        torch.amp.GradScaler("cpu", enabled=False)
        return sum(call["count"] for call in calls.facts() if call["kind"] == "grad_scaler")

    counts = []
    for traced[0] in (False, True, False):
        counts.append(seen())
    assert counts == [1, 1, 2]


def empty() -> Any:
    return torch.empty(1 << 50)


def too_long() -> Any:
    return bytearray(1 << 55)


@pytest.mark.parametrize(("fails", "kind"), [(empty, "RuntimeError"), (too_long, "MemoryError"), (int.from_bytes, "")])
def test_only_an_error_of_memory_is_kept_with_the_users_line(
    fails: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("last_value", "last_exc"):
        monkeypatch.delattr(sys, name, raising=False)
    assert memory_failure() is None
    with pytest.raises(Exception) as raised:  # noqa: PT011 - of three kinds
        fails()
    monkeypatch.setattr(sys, "last_value", raised.value, raising=False)
    found = memory_failure()
    assert (found["type"] if found else "") == kind
    if found:
        assert found["site"] == f"{fails.__name__} ({__file__}:{fails.__code__.co_firstlineno + 1})"


def test_the_error_that_ends_a_process_is_known_at_its_exit(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import atexit\n"
        "from dlprof.record.failures import memory_failure\n"
        "atexit.register(lambda: print(memory_failure()['site']))\n"
        "def forward():\n    return bytearray(1 << 55)\n"
        "forward()\n"
    )
    out = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert (out.returncode, out.stdout) == (1, f"forward ({script}:5)\n")


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def test_what_the_script_read_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outside = tmp_path / "outside.yaml"
    job = tmp_path / "job"
    for folder in ("conf", "run"):
        (job / folder).mkdir(parents=True)
    texts = {
        "conf/a.yaml": "a: 1\n",
        "own_module.py": "X = 1\n",
        "run.sh": "python own_module.py\n",
        "Makefile": "all:\n",
        "run/ask-window.json": "5",
    }
    texts |= {"written.json": "{}", "later.json": "{}", "unread.yaml": "", "a.txt": "", "large.json": " " * (300 << 10)}
    for name, text in texts.items():
        (job / name).write_text(text)
    outside.write_text("")
    monkeypatch.setattr(module, "_MOST", 10_000)  # this process has the modules of all tests
    monkeypatch.chdir(job)
    monkeypatch.syspath_prepend(str(job))
    os.utime(job / "Makefile", (time.time() + 60,) * 2)  # written later than the job was started
    undo: list[Callable[[], object]] = []
    seen = Files(f"{job}/", time.time() + 1)
    seen.watch(undo.append, job / "run")
    importlib.import_module("own_module")
    for name in (
        "conf/a.yaml",
        "conf/../conf/a.yaml",
        "a.txt",
        "large.json",
        "later.json",
        "run/ask-window.json",
        str(outside),
    ):
        Path(name).read_text()
    Path("written.json").write_text("{}")
    Path("written.json").read_text()
    first = {row["file"]: row["digest"] for row in seen.facts()}
    Path("later.json").write_text("[]")
    known = {row["file"]: row["digest"] for row in seen.facts()}
    expected = {name: digest(texts[name]) for name in ("conf/a.yaml", "own_module.py", "run.sh")} | {"Makefile": ""}
    assert {name: known[name] for name in known if not name.startswith("tests")} == expected
    assert first == known | {"later.json": digest("{}")}
    (leave,) = undo
    leave()
    Path("unread.yaml").read_text()
    assert seen.facts() == [{"file": name, "digest": digest} for name, digest in known.items()]
    del sys.modules["own_module"]


def test_an_odd_event_costs_the_script_nothing(tmp_path: Path) -> None:
    seen = Files(f"{tmp_path}/", time.time())
    for args in ((), ("a.yaml",), (b"a.yaml", "r", 0), (3, None, 0), ("a.yaml", "r", None)):
        seen.see("open", args)
    assert seen.facts() == []
