"""py-spy's lines: whose stack, in which phase, and what a cut or odd file costs."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from dlprof.errors import DlprofError
from dlprof.read.stacks import read

LIB = "/v/lib/python3.11/site-packages/torch"
RANK = 'process 7:"python -c a;b "x" train.py";'
WORKER = RANK + 'process 9:"python; thread (1): x";'
MAIN = "thread (7): MainThread;"
LOADER = f"__iter__ ({LIB}/utils/data/dataloader.py:9)"
MODULE = f"Module._call_impl ({LIB}/nn/modules/module.py:3)"
STEP = f"Optimizer.profile_hook_step.<locals>.wrapper ({LIB}/optim/optimizer.py:5)"


def packed(path: Path, *members: str) -> Path:
    header = "#" + json.dumps({"start_ns": 0, "end_ns": 2 * 10**9, "rate": 47}) + "\n"
    path.write_bytes(b"".join(gzip.compress((header + text).encode()) for text in members))
    return path


def rows(path: Path) -> list[tuple[str, str, str, str, int]]:
    return [tuple(row)[:5] for row in read(path).tables["stacks"].to_numpy()]


@pytest.mark.parametrize(
    ("frames", "phase"),
    [
        (["main (train.py:3)"], "rest"),
        (["main (train.py:3)", f"_BaseDataLoaderIter.__next__ ({LIB}/utils/data/dataloader.py:7)", MODULE], "fetch"),
        (["main (train.py:3)", LOADER], "fetch"),
        (["main (train.py:3)", MODULE, f"backward ({LIB}/autograd/__init__.py:1)"], "forward"),
        ([f"Tensor.backward ({LIB}/_tensor.py:1)", MODULE], "backward"),
        ([STEP, "closure (train.py:4)"], "optimizer"),
        ([STEP, "closure (train.py:4)", MODULE], "forward"),
        ([f"Optimizer.zero_grad ({LIB}/optim/optimizer.py:5)"], "rest"),
        (["Net.backward (train.py:4)", "step (train.py:9)"], "rest"),
    ],
)
def test_the_phase_is_what_the_recorder_would_have_counted(frames: list[str], phase: str, tmp_path: Path) -> None:
    path = packed(tmp_path / "stacks.txt.gz", f"{RANK}{MAIN}{';'.join(frames)} 3\n")
    assert rows(path) == [("main", "MainThread", phase, ";".join(frames), 3)]


@pytest.mark.parametrize(
    "work",
    [
        ["next (/x/dlprof/record/hooks.py:4)", "steps_due (/x/dlprof/record/recorder.py:9)", "dump (/lib/json.py:1)"],
        [
            "next (/x/dlprof/record/hooks.py:4)",
            "go (/x/dlprof/record/device/profiler.py:4)",
            f"p ({LIB}/profiler/p.py:1)",
        ],
    ],
)
def test_what_a_rank_does_for_the_recorder_is_no_part_of_the_job(work: list[str], tmp_path: Path) -> None:
    own = f"prof.step ({LIB}/profiler/profiler.py:4)"
    frames = ["main (train.py:3)", "call (/x/dlprof/record/collectors/flops.py:1)", "f (/home/dlprof/train.py:4)", own]
    lines = (f"{RANK}{MAIN}{';'.join(stack)} 3\n" for stack in (["main (train.py:3)", *work], frames))
    kept = ";".join((frames[0], *frames[2:]))
    assert rows(packed(tmp_path / "stacks.txt.gz", *lines)) == [("main", "MainThread", "rest", kept, 3)]


def test_bursts_add_up_and_each_stack_is_somebodys(tmp_path: Path) -> None:
    inner = f"_worker_loop ({LIB}/utils/data/_utils/worker.py:5);decode (data.py:7)"
    ours = "__next__ (/x/dlprof/record/hooks.py:4);begin_fetch (/x/dlprof/record/step_clock.py:4)"
    first = (
        f"{RANK}{MAIN}main (train.py:3);{ours};f (train.py:8) 2\n"
        f"{RANK}thread (8): QueueFeederThread;run (q.py:1) 5\n"
        f"{WORKER}{MAIN}main (train.py:3);{inner} 4\n"
        f"{WORKER}thread (9): pin;run (q.py:1) 6\n"
        f"{WORKER}{MAIN}child (train.py:3) 1\n"
    )
    second = f"{WORKER}{MAIN}{inner} 1\n{RANK}{MAIN}main (train.py:3);f (train.py:8) 1\n"
    path = packed(tmp_path / "stacks.txt.gz", first, second)
    assert sorted(rows(path)) == [
        ("main", "MainThread", "rest", "main (train.py:3);f (train.py:8)", 3),
        ("other", "MainThread", "", "child (train.py:3)", 1),
        ("other", "pin", "", "run (q.py:1)", 6),
        ("thread", "QueueFeederThread", "", "run (q.py:1)", 5),
        ("worker", "MainThread", "", inner, 5),
    ]
    assert read(path).facts == {"stacks": {"bursts": 2, "seconds": 4.0}}
    assert read(path).warnings == ()


def test_a_cut_file_keeps_what_came_before_at_any_byte(tmp_path: Path) -> None:
    line = f"{RANK}{MAIN}main (train.py:3) 2\n"
    path = packed(tmp_path / "stacks.txt.gz", line)
    whole = path.read_bytes()
    both = packed(path, line, line).read_bytes()
    for cut in range(len(whole), len(both)):
        path.write_bytes(both[:cut])
        reading = read(path)
        assert reading.tables["stacks"]["samples"].sum() in (2, 4)
        assert reading.warnings == ()


def test_a_file_that_nobody_appended_lines_that_are_none_and_another_file(tmp_path: Path) -> None:
    path = tmp_path / "stacks.part"
    path.write_text(f"{RANK}{MAIN}main (train.py:3) 2\nnonsense\n{RANK}{MAIN}main (train.py:4) 1\n")
    assert [row[4] for row in rows(path)] == [2, 1]
    assert read(path).warnings == ("stacks.part: 1 malformed lines are left out",)
    assert read(path).facts == {}
    path.write_text("")
    assert len(read(path).tables["stacks"]) == 0
    path.write_text("one\ntwo\n")
    with pytest.raises(DlprofError, match="no stacks of py-spy"):
        read(path)


@pytest.mark.parametrize("figure", ["1e999", "-1", "9" * 400, "null", "[" * 100_000, '"\\ud800"'])
def test_a_burst_of_impossible_times_is_left_out_and_its_stacks_stay(figure: str, tmp_path: Path) -> None:
    path = tmp_path / "stacks.txt.gz"
    burst = '#{"start_ns": 0, "end_ns": ' + figure + "}\n"
    path.write_bytes(gzip.compress(f"{burst}{RANK}{MAIN}main (train.py:3) 3\n".encode()))
    reading = read(path)
    assert reading.tables["stacks"]["samples"].tolist() == [3]
    assert reading.facts == {}
    assert reading.warnings == ("stacks.txt.gz: 1 malformed lines are left out",)
