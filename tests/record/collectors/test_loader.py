"""Loaders of real scripts, of every kind: what is written of their batches, and what must not be touched."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import pytest

from dlprof.analysis.timeline.steps import step_means
from tests.fixtures.jobs import COMPILES_NOTHING, facts, launch, record, wrapped
from tests.fixtures.runs import measured

pytest.importorskip("torch", reason="recording needs torch")

# Module level, where spawned workers find it. A sample takes 2 ms of waiting.
HEAD = """
import os, signal, sys, threading, time
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

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


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def recorded(folder: Path, body: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    script = folder / "script.py"
    script.write_text(COMPILES_NOTHING + HEAD + 'if __name__ == "__main__":\n' + indent(dedent(body), "    "))
    record(script, folder=folder / "run", options=["--no-trace", "--no-sample"])
    rank = folder / "run/ranks/00000"
    assert facts(rank)["warnings"] == []
    return lines(rank / "loading.jsonl"), fetched(rank)


def fetched(rank: Path) -> list[dict[str, Any]]:
    """Return the batches that workers fetched, or the training thread, whose worker is −1."""
    own = [{"worker": -1, **row} for row in lines(rank / "loading.jsonl") if "collate_ns" in row]
    workers = rank / "fetches.jsonl"
    return [*own, *(lines(workers) if workers.exists() else [])]


def counts(loading: list[dict[str, Any]]) -> dict[str, int]:
    kinds = [row["kind"] for row in loading if row["kind"] != "usage"]
    return {kind: kinds.count(kind) for kind in kinds}


@pytest.mark.long
@pytest.mark.parametrize(
    ("dataset", "method", "workers", "epochs"),
    # A worker that is not forked imports torch, which takes seconds: one is enough.
    [("Slow", "fork", 2, 2), ("Slow", "spawn", 1, 1), ("Slow", "forkserver", 1, 1), ("Stream", "fork", 2, 2)],
)
def test_workers_of_every_kind(tmp_path: Path, dataset: str, method: str, workers: int, epochs: int) -> None:
    loading, fetches = recorded(
        tmp_path,
        f"""
        loader = DataLoader(
            {dataset}(), 4, num_workers={workers}, collate_fn=collate, multiprocessing_context="{method}"
        )
        seen = train(loader, {epochs})
        assert len(seen) == {epochs * 12}
        assert loader.collate_fn is collate
        """,
    )
    assert counts(loading) == {"start": epochs, "first": epochs, "batch": epochs * 11, "end": epochs}
    assert {row["loader"] for row in loading if row["kind"] != "usage"} == {0}
    assert all(row["thread_ns"] >= 0 for row in loading if row["kind"] == "usage")
    started = [row for row in loading if row["kind"] == "start"]
    pids = {int(p) for row in started for p in row["workers"].split()}
    assert len(pids) == workers * epochs  # they do not persist
    assert {f["pid"] for f in fetches} == pids
    assert sum(f["count"] for f in fetches) == epochs * 12
    assert {f["worker"] for f in fetches} == set(range(workers))
    got = [row for row in loading if row["kind"] in ("first", "batch")]
    assert {row["worker"] for row in got} == set(range(workers))
    assert all(row["ready"] >= 0 and row["outstanding"] >= 0 and row["empty"] == (row["ready"] == 0) for row in got)
    for f in fetches:
        assert f["collate_ns"] >= 3_000_000
        assert f["dur_ns"] >= f["collate_ns"] + 4 * 2_000_000
        assert f["cpu_ns"] > 0
        assert f["read_bytes"] > 0 <= f["stored_bytes"]
        assert (f["tensors"], f["tensor_bytes"]) == (f["count"], f["count"] * 4 * 8 * 4)


@pytest.mark.long
def test_the_training_thread_itself(tmp_path: Path) -> None:
    loading, fetches = recorded(tmp_path, "train(DataLoader(Slow(), 4))")
    assert counts(loading) == {"start": 2, "first": 2, "batch": 22}
    assert {f["worker"] for f in fetches} == {-1}
    assert {f["worker"] for f in fetches} == {-1}
    waits = {row["step"]: row for row in loading if row["kind"] == "batch"}
    assert all(row.get("ready", -1) == -1 for row in waits.values())
    assert sum(f["count"] for f in fetches) == 24
    assert {(f["tensors"], f["tensor_bytes"]) for f in fetches} == {(2, 4 * 8 * 4 + 4 * 8)}
    # The first is not asked for what it used: it might have been quick.
    assert [f["cpu_ns"] > 0 for f in fetches] == [False] + [True] * 23


@pytest.mark.long
def test_what_other_threads_do_meanwhile_is_none_of_a_training_threads_fetch(tmp_path: Path) -> None:
    _, fetches = recorded(
        tmp_path,
        """
        done = threading.Event()
        def spin():
            while not done.is_set():
                sum(range(1000))
        threading.Thread(target=spin).start()
        train(DataLoader(Slow(), 4), 1)
        done.set()
        """,
    )
    asked = [f for f in fetches if f["cpu_ns"] >= 0]
    # Of a batch it sleeps four times 2 ms, in which the other thread computes.
    assert all(f["cpu_ns"] <= f["dur_ns"] - 4 * 2_000_000 for f in asked)
    assert len(asked) == 11


@pytest.mark.long
def test_subclasses_workers_that_persist_and_samples_that_are_batches(tmp_path: Path) -> None:
    loading, fetches = recorded(
        tmp_path,
        """
        from torch.utils.data import dataloader
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
        """,
    )
    told = counts(loading)
    assert {kind: told[kind] for kind in ("start", "first", "batch")} == {"start": 2, "first": 2, "batch": 94}
    first, second = (row["workers"] for row in loading if row["kind"] == "start")
    assert first == second
    assert {str(f["pid"]) for f in fetches} == set(first.split())
    # A worker that lives as long as the job is ended by a signal, which may cost its last quarter of a second.
    assert sum(f["count"] for f in fetches) >= 24
    assert max(row["outstanding"] for row in loading if row["kind"] in ("first", "batch")) == 6


@pytest.mark.long
def test_a_loader_whose_iter_is_its_own_is_known(tmp_path: Path) -> None:
    # As torchdata's StatefulDataLoader; what it asks another for within a fetch is no loader of the script's.
    loading, fetches = recorded(
        tmp_path,
        """
        class Own(DataLoader):
            def __iter__(self):
                return self._get_iterator()
        class Nested(Slow):
            def __getitem__(self, i):
                next(iter(Own(range(4), num_workers=0)))
                return super().__getitem__(i)
        train(Own(Slow(), 4, num_workers=2))
        train(Own(Nested(), 8))
        """,
    )
    told = facts(tmp_path / "run/ranks/00000")["loaders"]
    assert [(t["num_workers"], t["batch_size"], t["role"]) for t in told] == [(2, 4, "train"), (0, 8, "train")]
    batches = [row["loader"] for row in loading if row["kind"] in ("first", "batch")]
    assert (batches.count(0), batches.count(1)) == (24, 12)
    # Each of the four epochs is one, though the iterator of the last may lie where that before it lay.
    assert counts(loading)["first"] == counts(loading)["start"] == 4
    assert sum(f["count"] for f in fetches if f["worker"] == -1) == 12


@pytest.mark.long
@pytest.mark.parametrize("persistent", [False, True])
def test_epochs_of_torchdatas_loader_are_timed_from_their_start_to_the_workers_leaving(
    persistent: bool, tmp_path: Path
) -> None:
    pytest.importorskip("torchdata", reason="its loader has an iter() and an end of its own")
    loading, fetches = recorded(
        tmp_path,
        f"""
        from torchdata.stateful_dataloader import StatefulDataLoader
        assert str(StatefulDataLoader.__iter__.__qualname__) == "StatefulDataLoader.__iter__"
        loader = StatefulDataLoader(Slow(), 4, num_workers=2, persistent_workers={persistent})
        seen = train(loader, 3)
        assert len(seen) == 36
        assert loader.state_dict()["_snapshot"]["_snapshot_step"] == 12
        """,
    )
    assert counts(loading) == {"start": 3, "first": 3, "batch": 33} | ({} if persistent else {"end": 3})
    started, again, *_ = (row for row in loading if row["kind"] == "start")
    assert (started["workers"] == again["workers"]) is persistent
    # Forking two processes, and no stopwatch that was never started.
    assert started["dur_ns"] > 1_000_000
    # Workers that live as long as the job are ended by a signal, which may cost their last quarter of a second.
    assert persistent or len({f["pid"] for f in fetches}) == 6


@pytest.mark.long
def test_a_worker_that_is_killed_leaves_what_it_had_written(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        HEAD
        + dedent(
            """
            class Dying(Slow):
                def __len__(self):
                    return 4000
                def __getitem__(self, i):
                    if i == 800:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return super().__getitem__(i)
            train(DataLoader(Dying(), 4, num_workers=2))
            """
        )
    )
    done = launch(wrapped(tmp_path / "run", [sys.executable, script], "--no-trace"), tmp_path)
    # Which error torch raises depends on what the worker was sending when it was killed.
    assert done.returncode == 1, done.stderr
    assert " is off" not in done.stderr
    fetches = fetched(tmp_path / "run/ranks/00000")
    assert len({f["pid"] for f in fetches}) == 2
    assert sum(f["count"] for f in fetches) > 60


@pytest.mark.long
def test_a_timeout_an_error_and_threads_go_their_way(tmp_path: Path) -> None:
    loading, fetches = recorded(
        tmp_path,
        """
        class Broken(Slow):
            def __getitem__(self, i):
                if i == 20:
                    raise KeyError("broken")
                return super().__getitem__(i)
        for workers in (0, 1):
            try:
                train(DataLoader(Broken(), 4, num_workers=workers))
            except KeyError as e:
                assert "broken" in str(e)
            else:
                raise AssertionError
        class Late(Slow):
            def __getitem__(self, i):
                time.sleep(20 if i == 20 else 0)
                return super().__getitem__(i)
        try:
            train(DataLoader(Late(), 4, num_workers=1, timeout=1))
        except RuntimeError as e:
            assert "timed out" in str(e)
        else:
            raise AssertionError
        thread = threading.Thread(target=lambda: [None for _ in DataLoader(Slow(), 4)])
        thread.start()
        thread.join()
        """,
    )
    assert sum(n for kind, n in counts(loading).items() if kind in ("first", "batch")) == 15
    # The thread that does not train is not told of.
    assert sum(f["count"] for f in fetches if f["worker"] == -1) == 5


@pytest.mark.long
def test_a_validation_before_training_is_kept_but_for_what_its_workers_did(tmp_path: Path) -> None:
    loading, fetches = recorded(
        tmp_path,
        """
        held_out = DataLoader(Slow(), 4, num_workers=1)
        with torch.no_grad():
            for pixels, _ in held_out:
                nn.Linear(8, 1)(pixels)
        train(DataLoader(Slow(), 8, num_workers=2), epochs=1)
        """,
    )
    of = {n: [row for row in loading if row["loader"] == n] for n in (0, 1)}
    assert [counts(of[n]).get("batch") for n in (0, 1)] == [11, 5]
    pids = {n: {int(p) for row in of[n] for p in row.get("workers", "").split()} for n in (0, 1)}
    # They were gone before there was a rank to write for.
    assert {n: sum(f["count"] for f in fetches if f["pid"] in pids[n]) for n in (0, 1)} == {0: 0, 1: 6}


def test_who_never_trains_leaves_nothing(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(COMPILES_NOTHING + HEAD + "assert len([b for b in DataLoader(Slow(), 4, num_workers=2)]) == 12\n")
    record(script, folder=tmp_path / "run")
    assert list((tmp_path / "run/ranks").iterdir()) == []
    assert list((tmp_path / "run/hosts").glob("*/rank-*")) == []


@pytest.mark.long
def test_files_grow_no_faster_than_their_budget(tmp_path: Path) -> None:
    loading, fetches = recorded(
        tmp_path,
        """
        import dlprof.record.collectors.loader as ours
        import dlprof.record.log
        import dlprof.record.recorder
        dlprof.record.recorder._PASS_ON_EVERY_NS = 20_000_000
        dlprof.record.log._BURST_BYTES = 3_000
        dlprof.record.log._BYTES_A_SECOND = 0
        ours.WRITE_EVERY_NS = 20_000_000
        train(DataLoader(Slow(), 1, num_workers=2), epochs=3)
        """,
    )
    for rows, kinds in ((loading, ("first", "batch")), (fetches, (None,))):
        mine = [row for row in rows if row.get("kind") in kinds]
        assert sum(row["count"] for row in mine) == 144
        assert len(mine) < 100


@pytest.mark.long
def test_a_job_that_uses_up_what_was_made_ahead_is_as_slow_as_its_loader(tmp_path: Path) -> None:
    # Four workers make a batch every 100 ms, and 16 of them while the first step takes its time; the loop takes 25 ms.
    recorded(
        tmp_path,
        """
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
        """,
    )
    run = measured(tmp_path / "run", step_means)
    assert run.frame(step_means)["step_ns"][0] == pytest.approx(100e6, rel=0.07)


@pytest.mark.long
def test_the_thread_that_pins_batches_is_timed_by_the_kernel(tmp_path: Path) -> None:
    # Only with CUDA do PyTorch's iterators have that thread; here the script gives them one, which spins half the time.
    loading, _ = recorded(
        tmp_path,
        """
        from torch.utils.data import dataloader
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
                print(time.thread_time_ns(), time.perf_counter_ns() - began, file=open("pinned", "w"))
        class Mine(DataLoader):
            def _get_iterator(self):
                return Pinned(self)
        train(Mine(Slow(), 1, num_workers=1, sampler=[0] * 800), 1)
        """,
    )
    # What comes after the last writing is not known: the thread ends with the pass.
    pins = [row for row in loading if row.get("pin_ns", -1) >= 0]
    assert len(pins) >= 4
    share = sum(row["pin_ns"] for row in pins) / sum(row["dur_ns"] for row in pins)
    used, passed = (tmp_path / "pinned").read_text().split()
    assert share == pytest.approx(int(used) / int(passed), rel=0.15)
