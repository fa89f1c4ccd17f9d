"""Stalls of real scripts: what is written of them, what the rules make of it, and what must not be touched."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent
from typing import Any

import pandas as pd
import pytest

from dlprof import schema
from dlprof.analysis.step.rules import checkpoint_stall, gc_pauses
from dlprof.record.collectors.stalls import _sizes
from tests.fixtures.asking import ask
from tests.fixtures.in_process import run_recorded
from tests.fixtures.jobs import rows

torch = pytest.importorskip("torch", reason="recording needs torch")

LOOP = """
import gc, io, os, pickle, sys, threading, time
from pathlib import Path
import torch
from torch import nn
from torch import save
gc.freeze()  # the rest of the process
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
big = torch.zeros(4_000_000)
alive = [[] for _ in range(200_000)]
def train():
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
"""


def stalls(folder: Path, body: str, steps: int) -> list[dict[str, Any]]:
    import gc

    try:
        run_recorded(folder, LOOP + dedent(body))
    finally:
        gc.unfreeze()
        gc.enable()
    rank = folder / "run/ranks/00000"
    assert len(rows(rank)) == steps
    return rows(rank, "stalls")


@pytest.mark.long
def test_pauses_and_checkpoints_are_written_and_diagnosed(tmp_path: Path) -> None:
    body = """
    class Slow:
        def __reduce__(self):
            time.sleep(0.05)  # as if it went over a network
            return (list, ())
    gc.disable()  # but for the script's own collections
    for step in range(40):
        train()
        cycle = []
        cycle.append(cycle)
        gc.collect()
        if step % 5 == 4:
            torch.save([model.state_dict(), Slow()], "état.pt")
    """
    found = stalls(tmp_path, body, 40)
    lines = rows(tmp_path / "run/ranks/00000")
    begins = {line["step"]: (line["start_ns"], line["start_ns"] + line["dur_ns"]) for line in lines}
    saves = [s for s in found if s["kind"] == "checkpoint"]
    pauses = [s for s in found if s["kind"] == "garbage_collection"]
    assert [(s["path"], s["generation"]) for s in saves] == [("état.pt", None)] * 8
    assert len(pauses) >= 39
    assert {(s["path"], s["generation"]) for s in pauses} == {(None, 2)}
    for s in found:
        assert set(s) == {*schema.STALLS}
        assert s["dur_ns"] >= 1_000_000
        assert s["phase"] == "rest"
        begin, end = begins.get(s["step"], (0, 1 << 63))  # 40: after the last step, and so in none
        assert begin <= s["start_ns"] < end
    assert ask(gc_pauses.RULE, tmp_path / "run").state == "found"
    assert ask(checkpoint_stall.RULE, tmp_path / "run").state == "found"


def test_what_is_saved_is_measured_with_the_storages_that_are_written() -> None:
    bank, other = torch.zeros(1000, 250), torch.zeros(10)
    saved = {"a": bank[:10], "b": [bank[:10], (other, 3)], "c": {"d": bank[10:20]}, "e": torch.eye(3).to_sparse()}
    assert _sizes(saved) == (20 * 1000 + 40, 1_000_000 + 40)
    assert _sizes(3) == (0, 0)


@pytest.mark.parametrize(
    ("values", "storage", "clones"),
    [(1 << 19, 1 << 20, True), (1 << 19, (1 << 20) - 1, False), ((1 << 20) + 1, 1 << 21, False), (0, 0, False)],
)
def test_parts_of_larger_tensors_are_cloned(values: int, storage: int, clones: bool) -> None:
    frame = pd.DataFrame({"rank": [1], "values_bytes": [values], "storage_bytes": [storage]})
    said, changes = checkpoint_stall._parts(frame, 1)
    assert [bool(said), "clone" in "".join(c.text for c in changes)] == [clones, clones]
    assert checkpoint_stall._parts(frame, 0) == checkpoint_stall._parts(None, 1) == ("", ())


@pytest.mark.long
def test_a_job_that_collects_garbage_in_every_step_leaves_a_small_file_that_tells_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dlprof.record.collectors.stalls._MOST_FULL", 0)  # instead of thousands
    monkeypatch.setattr("dlprof.record.collectors.stalls.WRITE_EVERY_NS", 1 << 62)  # at the end alone
    body = """
    took = []
    def watch(moment, info):
        took.append(time.perf_counter_ns())
    gc.callbacks.insert(0, watch)
    for step in range(20):
        train()
        gc.collect()
    gc.callbacks.remove(watch)
    long = [b - a for a, b in zip(took[::2], took[1::2]) if b - a > 1_000_000]
    with open("took", "w") as file:
        print(len(long), sum(long), file=file)
    """
    pauses = [s for s in stalls(tmp_path, body, 20) if s["kind"] == "garbage_collection"]
    many, took = map(int, (tmp_path / "took").read_text().split())
    # Some before the script's own watch, and some that last a millisecond by one clock reading and not by the other.
    assert sum(s["count"] for s in pauses) == pytest.approx(many, rel=0.05, abs=5)
    assert sum(s["dur_ns"] for s in pauses) == pytest.approx(took, rel=0.2)
    # One line for each generation and phase; the script's own collections are of the last, between the phases.
    assert len({(s["generation"], s["phase"]) for s in pauses}) == len(pauses)
    assert max(s["count"] for s in pauses) >= 19


@pytest.mark.long
def test_each_save_of_the_training_thread_is_one_stall(tmp_path: Path) -> None:
    body = """
    import torch.distributed.checkpoint as dcp
    class Collecting:
        def __reduce__(self):
            gc.collect()
            return (list, ())
    class Broken:
        def __reduce__(self):
            time.sleep(0.01)
            raise ValueError("broken")
    def slowly(event, args):
        if event == "os.rename":
            time.sleep(0.3)  # as if an older file of gigabytes were replaced
    sys.addaudithook(slowly)
    buffer = io.BytesIO()
    gc.disable()
    for step in range(20):
        train()
        if step == 2:
            save([big, Collecting()], buffer)  # by a name that was taken early; what it collects belongs to it
        if step == 4:
            dcp.save({"big": big}, checkpoint_id="folder", no_dist=True)
        if step == 6:
            thread = threading.Thread(target=torch.save, args=(big, "threads.pt"))
            thread.start()
            thread.join()
        if step in (8, 10):
            try:
                torch.save(Broken(), io.BytesIO())
            except ValueError as e:
                assert str(e) == "broken"
            else:
                raise AssertionError
        if step == 12:
            child = os.fork()
            if not child:
                ours = [c for c in gc.callbacks if "dlprof" in type(getattr(c, "__self__", None)).__module__]
                gc.collect()
                torch.save(big, "child.pt")
                os._exit(len(ours))
            assert os.waitpid(child, 0)[1] == 0
            assert os.path.getsize("child.pt") > 0
        if step == 14:
            torch.save(big, Path("part.pt"))
            Path("part.pt").replace("whole.pt")  # is saving
        if step == 16:
            os.rename("whole.pt", "moved.pt")  # is not
    buffer.seek(0)
    assert torch.load(buffer, weights_only=False)[0].shape == big.shape
    assert pickle.loads(pickle.dumps(save)) is save is torch.save
    assert pickle.loads(pickle.dumps(os.replace)) is os.replace
    """
    found = stalls(tmp_path, body, 20)
    saves = [(3, None), (5, "folder"), (9, None), (11, None), (15, "part.pt")]
    assert [(s["kind"], s["step"], s["path"]) for s in found] == [("checkpoint", *one) for one in saves]
    assert [s["dur_ns"] >= 300_000_000 for s in found[-2:]] == [False, True]


@pytest.mark.long
def test_saving_in_the_background_counts_until_the_state_is_copied(tmp_path: Path) -> None:
    body = """
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import DefaultSavePlanner
    class Slow(DefaultSavePlanner):
        # Runs in the background, as if the disk were slow.
        def resolve_data(self, item):
            time.sleep(1.0)
            return super().resolve_data(item)
    dist.init_process_group("gloo", init_method="file://" + os.path.abspath("store"), rank=0, world_size=1)
    gc.disable()
    saving = None
    for step in range(10):
        train()
        if step == 4:
            began = time.perf_counter()
            saving = dcp.async_save({"big": big.clone()}, checkpoint_id="folder", planner=Slow())
            assert not saving.done()
    saving.result()
    assert time.perf_counter() - began > 1.0
    dist.destroy_process_group()
    """
    (save,) = (s for s in stalls(tmp_path, body, 10) if s["kind"] == "checkpoint")
    assert (save["path"], save["step"]) == ("folder", 5)
    assert save["dur_ns"] < 1e9  # the sleeping is not in it


@pytest.mark.long
def test_compilations_are_told_with_their_reason_and_graphs_stay_the_same(tmp_path: Path) -> None:
    body = """
    from torch._dynamo.utils import counters
    torch._dynamo.reset()
    counters.clear()
    def forward(x):
        return model(x).relu()
    compiled = torch.compile(forward, backend="aot_eager", dynamic=False)
    gc.disable()
    for n in [4, 4, 4, 4, 4, 5, 5, 6, 6, 6]:
        compiled(torch.randn(n, 8)).sum().backward()
        optimizer.step()
    assert counters["stats"]["unique_graphs"] == 3
    """
    found = stalls(tmp_path, body, 10)
    assert {s["kind"] for s in found} == {"compilation"}
    forward = [s for s in found if s["phase"] == "forward"]
    assert [s["step"] for s in forward] == [0, 5, 7]
    assert all(s["path"].endswith(" forward") and "train.py:" in s["path"] for s in forward)
    first, second, third = (s["reason"] for s in forward)
    assert first is None
    assert "size mismatch at index 0. expected 4, actual 5" in second
    assert "expected" in third
    assert "actual 5" not in third
    # Backward passes are compiled when they first run.
    assert {s["step"] for s in found if s["phase"] == "backward"} <= {0, 5, 7}
