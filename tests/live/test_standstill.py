"""Why a job stands still, of processes made by hand: what each does by its stack, and the sentence about all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dlprof.live.gather import Call, disagreements, of_job, ranks_of, word_of
from dlprof.live.look import Frame, Process, Thread, activity, doing, fetches, is_own, jobs, role_of
from dlprof.live.standstill import Rank, Seen, standstill

TORCH = "/venv/lib/python3.11/site-packages/torch"
C10D, LOADER = f"{TORCH}/distributed/distributed_c10d.py", f"{TORCH}/utils/data/dataloader.py"
GRAPH, MODULE = f"{TORCH}/autograd/graph.py", f"{TORCH}/nn/modules/module.py"
WORKER = f"{TORCH}/utils/data/_utils/worker.py"
OWN = "/home/me/train.py"
# Stacks, innermost first.
STACKS: dict[str, list[tuple[str, str, int]]] = {
    "collective": [
        ("all_reduce", C10D, 3000),
        ("wrapper", f"{TORCH}/distributed/c10d_logger.py", 83),
        ("main", OWN, 88),
    ],
    "broadcast": [("broadcast", C10D, 3100), ("main", OWN, 90)],
    "objects": [("all_gather", C10D, 1), ("all_gather_object", C10D, 2), ("main", OWN, 91)],
    "backward": [
        ("_engine_run_backward", GRAPH, 900),
        ("Tensor.backward", f"{TORCH}/_tensor.py", 500),
        ("main", OWN, 70),
    ],
    "hook": [("all_reduce", C10D, 3000), ("hook", OWN, 9), ("_engine_run_backward", GRAPH, 900), ("main", OWN, 70)],
    "loader": [
        ("Queue.get", "/usr/lib/python3.11/queue.py", 5),
        ("_MultiProcessingDataLoaderIter._next_data", LOADER, 800),
        ("_BaseDataLoaderIter.__next__", LOADER, 700),
        ("main", OWN, 60),
    ],
    "transform": [
        ("Module._call_impl", MODULE, 1),
        ("D.__getitem__", OWN, 5),
        ("X.__next__", LOADER, 7),
        ("main", OWN, 60),
    ],
    "forward": [
        ("Linear.forward", f"{TORCH}/nn/modules/linear.py", 1),
        ("Module._call_impl", MODULE, 2),
        ("main", OWN, 66),
    ],
    "optimizer": [("Adam.step", f"{TORCH}/optim/adam.py", 1), ("main", OWN, 71)],
    "checkpoint": [("save", f"{TORCH}/serialization.py", 900), ("main", OWN, 75)],
    "recomputed": [
        ("checkpoint", f"{TORCH}/utils/checkpoint.py", 4),
        ("Module._call_impl", MODULE, 2),
        ("main", OWN, 66),
    ],
    "compile": [("compile", f"{TORCH}/_inductor/graph.py", 4), ("Module._call_impl", MODULE, 2), ("main", OWN, 66)],
    "compiled": [("_fn", f"{TORCH}/_dynamo/eval_frame.py", 4), ("Module._call_impl", MODULE, 2), ("main", OWN, 66)],
    "joining": [("init_process_group", C10D, 1700), ("main", OWN, 20)],
    "starting": [("_find_and_load", "<frozen importlib._bootstrap>", 1170), ("main", OWN, 2)],
    "window": [("export", f"{TORCH}/profiler/profiler.py", 4), ("main", OWN, 66)],
    "lock": [("Condition.wait", "/usr/lib/python3.11/threading.py", 320), ("main", OWN, 33)],
    "code": [("main", OWN, 44)],
    "synchronize": [("synchronize", f"{TORCH}/cuda/__init__.py", 1108), ("main", OWN, 45)],
    "event": [("Event.synchronize", f"{TORCH}/cuda/streams.py", 231), ("main", OWN, 46)],
    "worker": [
        ("D.__getitem__", OWN, 12),
        ("fetch", f"{TORCH}/utils/data/_utils/fetch.py", 50),
        ("_worker_loop", WORKER, 9),
    ],
    "idle_worker": [("Queue.get", "/usr/lib/python3.11/queue.py", 5), ("_worker_loop", WORKER, 9)],
    "torchrun": [
        ("run", f"{TORCH}/distributed/elastic/agent/server/api.py", 700),
        ("main", f"{TORCH}/distributed/run.py", 1),
    ],
    "spawner": [("ProcessContext.join", f"{TORCH}/multiprocessing/spawn.py", 100), ("<module>", OWN, 99)],
    "pool": [("worker", "/usr/lib/python3.11/multiprocessing/pool.py", 114)],
}


def process(stack: str, *, pid: int = 10, parent: int = 1, state: str = "S", text: str = "", **more: Any) -> Process:
    """Return a process of that stack."""
    frames = tuple(Frame(*frame) for frame in STACKS[stack])
    own = next((frame for frame in frames if is_own(frame.file)), None)
    made: dict[str, Any] = {
        "threads": (Thread("MainThread", True, state == "R", False, frames),),
        "texts": {(own.file, own.line): text} if own else {},
        "size": 4,
        "torch": True,
    } | more
    return Process(pid, parent, state, 60.0, 5.0, 10**9, "train.py", **made)


@pytest.mark.parametrize(
    ("stack", "what"),
    [
        ("collective", ("collective", "all_reduce")),
        ("objects", ("collective", "all_gather_object")),
        ("hook", ("collective", "all_reduce")),
        ("backward", ("backward", "")),
        ("loader", ("loader", "")),
        ("transform", ("loader", "")),
        ("forward", ("forward", "")),
        ("compiled", ("forward", "")),
        ("recomputed", ("forward", "")),
        ("compile", ("compile", "")),
        ("optimizer", ("optimizer", "")),
        ("checkpoint", ("checkpoint", "")),
        ("joining", ("joining", "init_process_group")),
        ("starting", ("starting", "")),
        ("window", ("window", "")),
        ("code", ("code", "")),
        ("synchronize", ("device", "synchronize")),
        ("event", ("device", "synchronize")),
    ],
)
def test_what_a_stack_is_of(stack: str, what: tuple[str, str]) -> None:
    assert activity([Frame(*frame) for frame in STACKS[stack]]) == what


@pytest.mark.parametrize(
    ("stack", "text", "state", "what"),
    [
        ("lock", "done.wait()", "S", "lock"),
        ("code", "with lock:", "S", "lock"),
        ("code", "with lock:", "R", "code"),
        ("code", "print(loss.item())", "S", "device"),
        ("code", "work.wait()", "S", "wait"),
        ("code", "work.wait()", "R", "code"),
        ("code", "x = f(x)", "S", "code"),
    ],
)
def test_what_an_idle_line_waits_for(stack: str, text: str, state: str, what: str) -> None:
    found = doing(process(stack, text=text, state=state))
    assert (found.what, found.at, found.text) == (what, f"train.py:{STACKS[stack][-1][2]}", text)


@pytest.mark.parametrize(
    ("stack", "text", "gpu", "sentence"),
    [
        ("code", "print(loss.item())", True, "waits for its device in .item() (train.py:44: print(loss.item()))"),
        ("code", "print(loss.item())", False, "runs Python (train.py:44: print(loss.item())), and is busy"),
        ("code", "x = scores.numpy()", True, "runs Python (train.py:44: x = scores.numpy()), and is busy"),
        ("code", "work.wait()", True, "runs Python (train.py:44: work.wait()), and is busy"),
        ("synchronize", "", True, "waits for its device in .synchronize() (train.py:45)"),
        ("event", "", True, "waits for its device in .synchronize() (train.py:46)"),
    ],
)
def test_who_waits_for_a_gpu_keeps_a_core_busy(stack: str, text: str, gpu: bool, sentence: str) -> None:
    seen = Seen((Rank(0, "here", process(stack, text=text, state="R", gpu=gpu)),), 1)
    assert standstill(seen).why == f"Rank 0 {sentence}."


@pytest.mark.parametrize(
    ("file", "idle"),
    [("/venv/lib/python3.11/site-packages/dlprof/record/failures.py", True), (OWN, False)],
)
def test_a_thread_of_the_recorder_keeps_no_rank_busy(file: str, idle: bool) -> None:
    one = process("code", text="print(loss.item())")
    beside = Thread("beside", False, True, False, (Frame("run", file, 1), Frame("run", "/usr/lib/threading.py", 9)))
    assert doing(replace(one, threads=(*one.threads, beside))).idle == idle


@pytest.mark.parametrize("stack", STACKS)
def test_whatever_a_rank_does_has_a_word_and_a_sentence(stack: str) -> None:
    rank = process(stack)
    assert word_of([rank, rank])
    assert standstill(Seen((Rank(0, "here", rank),), 1)).where[0]


def test_who_a_process_is() -> None:
    roles = {
        "worker": "worker",
        "idle_worker": "worker",
        "torchrun": "launcher",
        "spawner": "launcher",
        "pool": "helper",
    }
    for stack, role in (*roles.items(), ("pool", "helper"), ("collective", "rank"), ("code", "rank")):
        assert role_of(process(stack)) == role
    assert role_of(process("code", torch=False)) == "other"
    assert (fetches(process("worker")), fetches(process("idle_worker"))) == (True, False)


def test_jobs_are_told_apart_by_what_has_started_their_ranks() -> None:
    ranks = [process("collective", pid=n, parent=2, rank=n - 3) for n in (3, 4)]
    worker = process("worker", pid=5, parent=3, rank=0)
    torchrun = process("torchrun", pid=2, parent=1)
    notebook = process("code", pid=9, parent=1)
    of_notebook = process("forward", pid=11, parent=9)  # started by a process that itself is no launcher
    steps = [process("collective", pid=n, parent=50, job="77.0") for n in (20, 21)]
    recorded = [process("collective", pid=n, parent=50 + n, run="/runs/a") for n in (30, 31)]
    alone = process("pool", pid=40, parent=1)
    everything = [*ranks, worker, torchrun, notebook, of_notebook, *steps, *recorded, alone]
    found = [[one.pid for one in job] for job in jobs(everything)]
    assert found == [[2, 3, 4, 5], [9], [11], [20, 21], [30, 31]]
    assert {number: one.pid for number, one in ranks_of([torchrun, *ranks, worker]).items()} == {0: 3, 1: 4}
    assert {number: one.pid for number, one in ranks_of(ranks, {3: 7, 4: 8}).items()} == {7: 3, 8: 4}


def rank(
    number: int, stack: str, *, step: int | None = 5, workers: tuple[Process, ...] = (), error: str = "", **more: Any
) -> Rank:
    return Rank(number, "a", process(stack, **more), workers, step, 70.0, error)


FOR_2 = "Ranks 0, 1 and 3 wait in all_reduce (train.py:88) for rank 2, which "
WAITING = (rank(0, "collective"), rank(1, "collective"), rank(3, "collective"))
STOPPED = process("worker", pid=77, state="T")


@pytest.mark.parametrize(
    ("ranks", "why", "blamed"),
    [
        (
            (*WAITING, rank(2, "code", text="x = f(x)", state="R")),
            FOR_2 + "runs Python (train.py:44: x = f(x)), and is busy.",
            (2,),
        ),
        (
            (*WAITING, rank(2, "loader", workers=(process("worker", pid=76), process("idle_worker", pid=77)))),
            FOR_2 + "waits for its loader (train.py:60): 1 worker of 2 is in train.py:12, idle.",
            (2,),
        ),
        (
            (*WAITING, rank(2, "loader", workers=(STOPPED,))),
            FOR_2 + "waits for its loader (train.py:60): its"
            " loader worker (process 77) is stopped (SIGSTOP, or a debugger).",
            (2,),
        ),
        (
            (*WAITING, rank(2, "loader", dead=((78, 9),))),
            FOR_2 + "waits for its loader (train.py:60): its loader worker (process 78) was killed by signal 9.",
            (2,),
        ),
        (
            (*WAITING, rank(2, "collective", state="D")),
            FOR_2 + "is inside the kernel and cannot be"
            " interrupted: a disk, a network file system or a driver does not answer at train.py:88.",
            (2,),
        ),
        (
            (*WAITING, Rank(2, "a", None, error="ValueError (load (data.py:7))")),
            FOR_2 + "has ended (ValueError (load (data.py:7))).",
            (2,),
        ),
        (
            (*WAITING, rank(2, "broadcast", error="OSError: No space left on device (train.py:3)")),
            FOR_2 + "handles OSError: No space left on device (train.py:3), and is in broadcast (train.py:90).",
            (2,),
        ),
        (
            (*WAITING, rank(2, "code", threads=(), unseen="py-spy: Permission Denied")),
            FOR_2 + "could not be looked at: py-spy: Permission Denied.",
            (2,),
        ),
        (
            (*WAITING, rank(2, "broadcast", step=4)),
            "The ranks disagree: ranks 0, 1 and 3 are in all_reduce (train.py:88); rank 2 is in broadcast"
            " (train.py:90). Rank 2 has ended step 4, ranks 0, 1 and 3 step 5.",
            (2,),
        ),
        (
            WAITING,
            "Ranks 0, 1 and 3 wait in all_reduce (train.py:88) for rank 2, of which no process is on this host"
            " (elsewhere, or ended).",
            (),
        ),
        (
            (*WAITING, rank(2, "collective")),
            "All 4 ranks that were seen are in all_reduce (train.py:88): none is missing, so look at the network"
            " between them, and at their devices.",
            (),
        ),
        (
            (rank(0, "backward"), rank(1, "backward"), rank(2, "backward"), rank(3, "checkpoint", state="R")),
            "Ranks 0 to 2 wait in the backward pass (train.py:70) for rank 3, which is saving or loading a checkpoint"
            " (train.py:75).",
            (3,),
        ),
        (
            (rank(0, "loader", size=None),),
            "Rank 0 waits for its loader (train.py:60).",
            (0,),
        ),
        (
            tuple(rank(n, "checkpoint") for n in range(4)),
            "Ranks 0 to 3 are saving or loading a checkpoint (train.py:75).",
            (),
        ),
        (
            (rank(0, "joining"), rank(1, "joining"), rank(2, "code", state="R"), rank(3, "joining")),
            "Ranks 0, 1 and 3 wait in init_process_group (train.py:20) for rank 2, which runs Python (train.py:44), and"
            " is busy.",
            (2,),
        ),
        (
            (rank(0, "starting"), rank(1, "starting"), rank(2, "code", state="R"), rank(3, "starting")),
            "Ranks 0, 1 and 3 are importing modules (train.py:2); rank 2 runs Python (train.py:44), and is busy.",
            (),
        ),
        ((), "No rank of the job was found here.", ()),
        (
            (*WAITING, replace(rank(2, "code", state="R"), host="b")),
            "Ranks 0, 1 and 3 wait in all_reduce (train.py:88) for rank 2 on b, which runs Python (train.py:44), and is"
            " busy.",
            (2,),
        ),
    ],
)
def test_why_and_whose(ranks: tuple[Rank, ...], why: str, blamed: tuple[int, ...]) -> None:
    found = standstill(Seen(ranks, size=4))
    assert (found.why, found.blamed) == (why, blamed)
    assert set(found.where) == {rank.number for rank in ranks}


@pytest.mark.parametrize(
    ("stacks", "at_work"),
    [
        (("checkpoint", "collective"), True),
        (("compile", "compile"), True),
        (("starting", "code"), False),
        (("code", "collective"), False),
        (("collective", "collective"), False),
    ],
)
def test_what_takes_long_is_told_from_what_stands_still(stacks: tuple[str, ...], at_work: bool) -> None:
    seen = Seen(tuple(rank(n, stack, size=2) for n, stack in enumerate(stacks)), size=2)
    assert standstill(seen).at_work == at_work
    failed = replace(seen.ranks[0], error="OSError")
    assert not standstill(replace(seen, ranks=(failed, *seen.ranks[1:]))).at_work or stacks == ("compile", "compile")


def test_what_else_was_seen_follows() -> None:
    together = tuple(rank(n, "collective") for n in range(3))
    seen = Seen(together, 3, full=("/scratch",), silent=("/nfs",), disagree=("Not the same.",))
    more = (
        "The disk of /scratch is full.",
        "The disk of /nfs does not answer.",
    )
    found = standstill(seen)
    assert found.why == "All 3 ranks that were seen are in all_reduce (train.py:88), and do not agree. Not the same."
    assert found.more == more
    other = standstill(replace(seen, ranks=(*together, rank(3, "code", state="R"))))
    assert other.more == (*more, "Not the same.")


UNLIKE = "Collective 21 of the default group is not the same on all ranks: rank 0 gives "
SUM = Call("default_pg", 21, "all_reduce", "8", "Float", ended=False)


@pytest.mark.parametrize(
    ("calls", "found"),
    [
        ([SUM, SUM], []),
        ([SUM._replace(sizes="9"), SUM],
         [UNLIKE + "all_reduce 9 Float; rank 1 gives"
          " all_reduce 8 Float."]),
        ([SUM, SUM._replace(op="barrier", sizes="", dtype="")],
         [UNLIKE + "all_reduce 8 Float; rank 1 gives"
          " barrier."]),
        ([SUM, SUM._replace(dtype="Half")],
         [UNLIKE + "all_reduce 8 Float; rank 1 gives"
          " all_reduce 8 Half."]),
        # What has ended is over, and parts of an all-to-all may be of any size.
        ([SUM._replace(sizes="9", ended=True), SUM._replace(ended=True)], []),
        ([SUM._replace(op="all_to_all"), SUM._replace(op="all_to_all", sizes="9")], []),
        ([SUM, SUM._replace(sequence=22, sizes="9")], []),
    ],
)  # fmt: skip
def test_where_ranks_disagree(calls: list[Call], found: list[str]) -> None:
    assert list(disagreements({rank: [call] for rank, call in enumerate(calls)})) == found


@pytest.mark.parametrize(
    ("pids", "share"),
    [([1], 0.9), ([1, 2], 0.5), ([1, 3], 0.9), ([4], 0.5), ([3, 9], None), ([], None)],
    ids=["one GPU", "two", "a worker computes on none", "one process on both", "none", "no process"],
)
def test_a_jobs_gpus_are_those_that_its_processes_compute_on(pids: list[int], share: float | None) -> None:
    busy = {1: {0: 0.9}, 2: {1: 0.1}, 4: {0: 0.9, 1: 0.1}}
    assert of_job(busy, pids) == (share if share is None else pytest.approx(share))
