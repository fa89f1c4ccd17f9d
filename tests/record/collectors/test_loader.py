"""Loaders of real scripts, of every kind: what is written of their batches, and what must not be touched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dlprof.analysis.input.input_waits import copied_storages
from dlprof.analysis.timeline.steps import step_means
from dlprof.errors import DoesNotApply, NotMeasured
from tests.fixtures.in_process import run_recorded
from tests.fixtures.jobs import facts, noted, rows
from tests.fixtures.runs import measured

pytest.importorskip("torch", reason="recording needs torch")

# Module level, where spawned workers find it. A sample takes 2 ms of waiting.
HEAD = """
import os, signal, sys, threading, time
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, dataloader, get_worker_info

class Slow(Dataset):
    def __len__(self):
        return 48
    def __getitem__(self, i):
        time.sleep(0.002)
        return torch.full((8,), float(i)), os.getpid()

class Stream(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        for i in range(info.id if info else 0, 48, info.num_workers if info else 1):
            time.sleep(0.002)
            yield torch.full((8,), float(i)), os.getpid()

def collate(samples):
    time.sleep(0.003)
    return torch.stack([x for x, _ in samples]), [p for _, p in samples]

def train(loader, epochs=2):
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    seen = []
    for _ in range(epochs):
        for pixels, pids in loader:
            model(pixels).sum().backward()
            optimizer.step()
            seen.append(pixels)
    return seen
"""

# One job with loaders of many kinds, one after the other.
KINDS = """
held_out = DataLoader(Slow(), 4, num_workers=1)
with torch.no_grad():
    for pixels, _ in held_out:
        nn.Linear(8, 1)(pixels)

train(DataLoader(Slow(), 4))

for dataset in (Slow(), Stream()):
    loader = DataLoader(dataset, 4, num_workers=2, collate_fn=collate)
    assert len(train(loader)) == 24
    assert loader.collate_fn is collate

class Iterator(dataloader._MultiProcessingDataLoaderIter):
    def __next__(self):
        return super().__next__()
class Mine(DataLoader):
    def _get_iterator(self):
        return Iterator(self)
    def __iter__(self):
        for pixels, pid in super().__iter__():
            yield pixels[None], [pid]
seen = train(Mine(Slow(), batch_size=None, num_workers=2, persistent_workers=True, prefetch_factor=3))
assert seen[5].tolist() == [[5.0] * 8]

# As torchdata's StatefulDataLoader; what it asks another for within a fetch is no loader of the script's.
class Own(DataLoader):
    def __iter__(self):
        return self._get_iterator()
class Nested(Slow):
    def __getitem__(self, i):
        next(iter(Own(range(4), num_workers=0)))
        return super().__getitem__(i)
train(Own(Slow(), 4, num_workers=2))
train(Own(Nested(), 8))

done = threading.Event()
def spin():
    while not done.is_set():
        sum(range(1000))
threading.Thread(target=spin).start()
train(DataLoader(Slow(), 6), 1)
done.set()

class Broken(Slow):
    def __getitem__(self, i):
        if i == 20:
            raise KeyError("broken")
        return super().__getitem__(i)
class Late(Slow):
    def __getitem__(self, i):
        time.sleep(2.5 if i == 20 else 0)
        return super().__getitem__(i)
raised = []
for failing in (
    DataLoader(Broken(), 4), DataLoader(Broken(), 4, num_workers=1), DataLoader(Late(), 4, num_workers=1, timeout=1)
):
    try:
        train(failing)
    except (KeyError, RuntimeError) as e:
        raised.append((type(e), "broken" in str(e), "timed out" in str(e)))
assert raised == [(KeyError, True, False)] * 2 + [(RuntimeError, False, True)]

thread = threading.Thread(target=lambda: [None for _ in DataLoader(Slow(), 4)])
thread.start()
thread.join()

try:
    from torchdata.stateful_dataloader import StatefulDataLoader
except ImportError:
    StatefulDataLoader = None
for persistent in (False, True) if StatefulDataLoader else ():
    assert str(StatefulDataLoader.__iter__.__qualname__) == "StatefulDataLoader.__iter__"
    stateful = StatefulDataLoader(Slow(), 6, num_workers=2, persistent_workers=persistent)
    assert len(train(stateful, 3)) == 24
    assert stateful.state_dict()["_snapshot"]["_snapshot_step"] == 8
"""
ORDER: tuple[str, ...] = ("validation", "thread", "fork", "stream", "persistent", "own iter", "nested")
ORDER += ("beside a busy thread", "broken", "broken worker", "late", "stateful", "stateful persistent")


class Written(NamedTuple):
    """What was written of one loader: rows of `loading`, and of the batches that its workers fetched."""

    loading: list[dict[str, Any]]
    fetches: list[dict[str, Any]]

    @property
    def counts(self) -> dict[str, int]:
        kinds = [row["kind"] for row in self.loading]
        return {kind: kinds.count(kind) for kind in kinds}

    @property
    def batches(self) -> list[dict[str, Any]]:
        return [row for row in self.loading if row["kind"] in ("first", "batch")]

    @property
    def pids(self) -> list[list[int]]:
        """The processes of each pass's workers."""
        return [[*map(int, row["workers"].split())] for row in self.loading if row["kind"] == "start"]


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().split("\n") if line] if path.exists() else []


def written(rank: Path, loader: int) -> Written:
    loading = [row for row in rows(rank, "loading") if row["loader"] == loader]
    pids = {pid for of in Written(loading, []).pids for pid in of}
    return Written(loading, [row for row in lines(rank / "fetches.jsonl") if row["pid"] in pids])


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the rank's folder of the job with all kinds of loaders."""
    folder = tmp_path_factory.mktemp("kinds")
    run_recorded(folder, HEAD + KINDS)
    return folder / "run/ranks/00000"


def check_workers(found: Written, workers: int, epochs: int) -> None:
    assert found.counts == {"start": epochs, "first": epochs, "batch": epochs * 11, "end": epochs}
    pids = {pid for of in found.pids for pid in of}
    assert len(pids) == workers * epochs  # they do not persist
    assert {f["pid"] for f in found.fetches} == pids
    assert sum(f["count"] for f in found.fetches) == epochs * 12
    assert {f["worker"] for f in found.fetches} == {row["worker"] for row in found.batches} == set(range(workers))
    for row in found.batches:
        assert row["ready"] >= 0 <= row["outstanding"]
        assert row["empty"] == (row["ready"] == 0)
    for f in found.fetches:
        assert f["collate_ns"] >= 3_000_000
        assert f["dur_ns"] >= f["collate_ns"] + 4 * 2_000_000
        assert f["cpu_ns"] > 0
        assert f["read_bytes"] > 0 <= f["stored_bytes"]
        assert (f["tensors"], f["tensor_bytes"]) == (f["count"], f["count"] * 4 * 8 * 4)


@pytest.mark.long
def test_loaders_are_known_in_order_and_by_their_role(kinds: Path) -> None:
    told = [(of["num_workers"], of["batch_size"], of["role"]) for of in facts(kinds)["loaders"]]
    trains = [(0, 4), (2, 4), (2, 4), (2, None), (2, 4), (0, 8), (0, 6), (0, 4), (1, 4), (1, 4)]
    # In each pass, a sample of some batches is known again: here by the number in it and by who made it.
    for name, workers in (("thread", 0), ("fork", 2)):
        found = written(kinds, ORDER.index(name))
        seen = [row for row in (found.fetches if workers else found.batches) if "sample" in row]
        made = {(row["sample"], row.get("pid")): row["digest"] for row in seen}
        assert len(seen) == 24
        assert len(set(made.values())) == len(made) == (24 if workers else 12)
        assert {row["of_samples"] for row in seen} == {48}
        assert all(row["sample"] % 3 == 0 and 32 < row["sample_bytes"] < 50 for row in seen)
    assert told[:11] == [(1, 4, "validation"), *((*one, "train") for one in trains)]
    usage = [row for row in rows(kinds, "loading") if row["kind"] == "usage"]
    assert {row["loader"] for row in usage} == {-1}
    assert all(row["thread_ns"] >= 0 for row in usage)
    # Nothing is told of the thread that does not train.
    assert {row["loader"] for row in rows(kinds, "loading")} == set(range(-1, len(told)))


@pytest.mark.long
@pytest.mark.parametrize("name", ["fork", "stream"])
def test_workers(name: str, kinds: Path) -> None:
    check_workers(written(kinds, ORDER.index(name)), 2, 2)


@pytest.mark.long
def test_the_training_thread_itself(kinds: Path) -> None:
    found = written(kinds, ORDER.index("thread"))
    assert found.counts == {"start": 2, "first": 2, "batch": 22}
    assert all(row.get("ready", -1) == -1 for row in found.batches)
    assert {(f["tensors"], f["tensor_bytes"]) for f in found.batches} == {(2, 4 * 8 * 4 + 4 * 8)}
    # The first is not asked for what it used: it might have been quick.
    assert [f["cpu_ns"] > 0 for f in found.batches] == [False] + [True] * 23
    # Of a batch it sleeps six times 2 ms, in which another thread computes.
    beside = written(kinds, ORDER.index("beside a busy thread")).batches
    assert len(beside) == 8
    assert all(f["cpu_ns"] <= f["dur_ns"] - 6 * 2_000_000 for f in beside)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "passes", "batches"),
    [("persistent", 2, 96), ("own iter", 2, 24), ("nested", 2, 12), ("validation", 1, 12)],
)
def test_subclasses_and_other_passes(name: str, passes: int, batches: int, kinds: Path) -> None:
    found = written(kinds, ORDER.index(name))
    told = found.counts
    # Each pass is one, though an iterator may lie where one before it lay.
    assert [told[kind] for kind in ("start", "first", "batch")] == [passes, passes, batches - passes]
    fetched = sum(f["count"] for f in found.fetches)
    if name == "persistent":
        first, second = found.pids
        assert first == second == sorted({f["pid"] for f in found.fetches}, key=first.index)
        # A worker that lives as long as the job is ended by a signal, which may cost its last quarter of a second.
        assert fetched >= 24
        assert max(row["outstanding"] for row in found.batches) == 6
    elif name == "validation":
        assert fetched == 0  # its workers were gone before there was a rank to write for
    else:
        assert fetched == (0 if name == "nested" else batches)


@pytest.mark.long
@pytest.mark.parametrize("name", ["stateful", "stateful persistent"])
def test_epochs_of_torchdatas_loader_are_timed_from_their_start_to_the_workers_leaving(name: str, kinds: Path) -> None:
    pytest.importorskip("torchdata", reason="its loader has an iter() and an end of its own")
    found, persistent = written(kinds, ORDER.index(name)), name != "stateful"
    assert found.counts == {"start": 3, "first": 3, "batch": 21} | ({} if persistent else {"end": 3})
    assert (found.pids[0] == found.pids[1]) is persistent
    # Forking two processes, and no stopwatch that was never started.
    assert found.loading[0]["dur_ns"] > 1_000_000
    assert persistent or len({f["pid"] for f in found.fetches}) == 6


@pytest.mark.long
def test_what_fails_is_told_until_it_failed(kinds: Path) -> None:
    assert [len(written(kinds, ORDER.index(name)).batches) for name in ("broken", "broken worker", "late")] == [5] * 3


@pytest.mark.long
def test_a_worker_that_is_killed_leaves_what_it_had_written(tmp_path: Path) -> None:
    body = """
class Dying(Slow):
    def __len__(self):
        return 4000
    def __getitem__(self, i):
        if i == 400:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(i)
try:
    train(DataLoader(Dying(), 4, num_workers=2))
except Exception:  # which one depends on what the worker was sending when it was killed
    pass
else:
    raise AssertionError
"""
    run_recorded(tmp_path, HEAD + body)
    fetches = written(tmp_path / "run/ranks/00000", 0).fetches
    assert len({f["pid"] for f in fetches}) == 2
    assert sum(f["count"] for f in fetches) > 30


@pytest.mark.long
def test_who_never_trains_leaves_nothing(tmp_path: Path) -> None:
    passes = "assert len([b for b in DataLoader(Slow(), 4, num_workers=2)]) == 12"
    run_recorded(tmp_path, HEAD + passes, warnings=None)
    ranks = [word for host in (tmp_path / "run").glob("hosts/*") for word in noted(host, "rank")]
    assert [*(tmp_path / "run/ranks").iterdir(), *ranks] == []
    # Nor is what a worker fetches for a later recording of this process written twice.
    run_recorded(tmp_path, HEAD + "train(DataLoader(Slow(), 4, num_workers=2))", run="later")
    assert sum(f["count"] for f in written(tmp_path / "later/ranks/00000", 0).fetches) == 24


@pytest.mark.long
def test_files_grow_no_faster_than_their_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dlprof.record.recorder._PASS_ON_EVERY_NS", 20_000_000)
    monkeypatch.setattr("dlprof.record.log._BURST_BYTES", 3_000)
    monkeypatch.setattr("dlprof.record.log._BYTES_A_SECOND", 0)
    monkeypatch.setattr("dlprof.record.collectors.loader.WRITE_EVERY_NS", 20_000_000)
    run_recorded(tmp_path, HEAD + "train(DataLoader(Slow(), 1, num_workers=2), epochs=3)")
    rank = tmp_path / "run/ranks/00000"
    for found in (written(rank, 0).batches, lines(rank / "fetches.jsonl")):
        assert sum(row["count"] for row in found) == 144
        assert len(found) < 100


@pytest.mark.slow
def test_a_job_that_uses_up_what_was_made_ahead_is_as_slow_as_its_loader(tmp_path: Path) -> None:
    # Four workers make a batch every 100 ms, and 16 of them while the first step takes its time; the loop takes 25 ms.
    body = """
class Slower(Slow):
    def __getitem__(self, i):
        time.sleep(0.4)
        return super().__getitem__(i)
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
for n, (pixels, _) in enumerate(DataLoader(Slower(), 1, sampler=[0] * 60, num_workers=4, prefetch_factor=4)):
    model(pixels).sum().backward()
    optimizer.step()
    time.sleep(0.025 if n else 2.0)
"""
    run_recorded(tmp_path, HEAD + body)
    run = measured(tmp_path / "run", step_means)
    assert run.frame(step_means)["step_ns"][0] == pytest.approx(100e6, rel=0.07)


@pytest.mark.long
def test_the_thread_that_pins_batches_is_timed_by_the_kernel(tmp_path: Path) -> None:
    # Only with CUDA do PyTorch's iterators have that thread; here the script gives them one, which spins half the time.
    body = """
class Pinned(dataloader._MultiProcessingDataLoaderIter):
    def __init__(self, loader):
        super().__init__(loader)
        self._pin_memory_thread_done_event = threading.Event()
        self._pin_memory_thread = threading.Thread(target=self.pins, daemon=True)
        self._pin_memory_thread.start()
    def pins(self):
        began = time.perf_counter_ns()
        while not self._pin_memory_thread_done_event.wait(0.005):
            until = time.thread_time_ns() + 5_000_000
            while time.thread_time_ns() < until:
                pass
        used.append(time.thread_time_ns() / (time.perf_counter_ns() - began))
class Mine(DataLoader):
    def _get_iterator(self):
        return Pinned(self)
used = []
train(Mine(Slow(), 1, num_workers=1, sampler=[0] * 500), 1)
"""
    (share,) = run_recorded(tmp_path, HEAD + body)["used"]
    # What comes after the last writing is not known: the thread ends with the pass.
    pins = [row for row in rows(tmp_path / "run/ranks/00000", "loading") if row.get("pin_ns", -1) >= 0]
    assert len(pins) >= 4
    assert sum(row["pin_ns"] for row in pins) / sum(row["dur_ns"] for row in pins) == pytest.approx(share, rel=0.15)


# Samples of 40 kB, as parts of 4 MB.
PARTS = """
import numpy as np
class Parts(Dataset):
    def __init__(self):
        self.rows = np.zeros((100, 10_000), dtype=np.float32)
        self.shared = torch.zeros(100, 10_000).share_memory_()
    def __len__(self):
        return 80
    def __getitem__(self, i):
        rows = torch.from_numpy(self.rows)
        part = {}
        return part
def lists(samples):
    return list(samples), 0
def train(loader):
    model = nn.Linear(10_000, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    for _ in range(2):
        for parts, _ in loader:
            model(torch.cat(parts)).sum().backward()
            optimizer.step()
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("part", "workers", "copied"),
    [("rows[i:i + 1]", 1, 16_000_000), ("rows[i:i + 1].clone()", 1, 160_000), ("self.shared[i:i + 1]", 1, 0),
     ("rows[i:i + 1]", 0, None)],
)  # fmt: skip
def test_parts_of_storages(part: str, workers: int, copied: int | None, tmp_path: Path) -> None:
    loader = f"train(DataLoader(Parts(), 4, num_workers={workers}, collate_fn=lists))"
    run_recorded(tmp_path, HEAD + PARTS.replace("{}", part) + loader)
    found = written(tmp_path / "run/ranks/00000", 0)
    seen = {row.get("copied_bytes") for row in (found.fetches if workers else found.batches)}
    assert seen == {copied}
    if copied != 16_000_000:  # what that takes of a step is that of the machine
        with pytest.raises(DoesNotApply if workers else NotMeasured):
            measured(tmp_path / "run", copied_storages).frame(copied_storages)
