"""The functions that were seen most, as they travel and are cited."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlprof.analysis.host.stacks import (
    MOST_DEPTH,
    MOST_FRAMES,
    MOST_FUNCTIONS,
    MOST_LIBRARY,
    MOST_LINES,
    MOST_OWN,
    flame,
    hottest,
    hottest_own,
    is_own,
    line_times,
    own_lines,
)
from dlprof.errors import NotMeasured
from tests.fixtures.hosts import LIB, MAIN, SEEN, WORKER, piece, with_lines, with_stacks
from tests.fixtures.runs import CPU, MS, asked, light, measured, recorded


def test_the_users_functions_have_what_libraries_do_for_them(tmp_path: Path) -> None:
    made = measured(with_stacks(tmp_path, SEEN, SEEN), hottest)
    frame = made.frame(hottest)
    mine = frame[(frame["rank"] == 1) & frame["own"].astype(bool)]
    told = [tuple(row) for row in mine[["doing", "function", "line", "alone", "total", "samples"]].to_numpy()]
    assert told == [
        ("rest", "log", 9, 36, 36, 36),
        ("rest", "run", 0, 0, 36, 36),
        ("fetch", "run", 3, 40, 40, 40),
        ("worker", "decode", 4, 80, 80, 100),
        ("worker", "read", 2, 20, 100, 100),
    ]
    assert "80 % are in decode (data.py:4)" in asked(made, hottest_own, 0, "worker")
    assert asked(made, hottest_own, 0, "forward", "backward") == ""
    assert asked(made, hottest_own, 2, "worker") == ""


def test_a_phase_is_called_from_a_line_of_the_script_and_a_loss_is_training(tmp_path: Path) -> None:
    torch = "/lib/python3.11/site-packages/torch"
    forward = f"_wrapped_call_impl ({torch}/nn/modules/module.py:1)"
    seen = (
        f"{MAIN};main (/me/train.py:5);{forward};forward (/me/net.py:3) 30\n"
        f"{MAIN};main (/me/train.py:9);{forward};forward (/me/net.py:3) 10\n"
        f"{MAIN};main (/me/train.py:6);mse_loss ({torch}/nn/functional.py:1) 8\n"
        f"{MAIN};main (/me/train.py:8);all_reduce ({torch}/distributed/distributed_c10d.py:1) 6\n"
        f"{MAIN};main (/me/train.py:7);dumps (/lib/python3.11/json/__init__.py:1) 4\n"
    )
    frame = measured(with_stacks(tmp_path, seen), own_lines).frame(own_lines)
    assert [tuple(row) for row in frame[["doing", "line", "trains", "seen", "samples"]].to_numpy()] == [
        ("forward", 5, False, 30, 40),
        ("forward", 9, False, 10, 40),
        ("rest", 6, True, 8, 18),
        ("rest", 8, True, 6, 18),
        ("rest", 7, False, 4, 18),
    ]


def test_a_few_samples_and_a_thin_spread_are_not_cited(tmp_path: Path) -> None:
    few = f"{WORKER}decode (/me/data.py:4) 20\n"
    thin = "".join(f"{WORKER}decode{n} (/me/data.py:4) 10\n" for n in range(10))
    made = measured(with_stacks(tmp_path, few, thin), hottest)
    assert asked(made, hottest_own, 0, "worker") == asked(made, hottest_own, 1, "worker") == ""


def test_what_travels_is_bounded(tmp_path: Path) -> None:
    many = "".join(f"{MAIN}f{n} (/me/a.py:1);g{n} (/v/lib/python3.11/b.py:1) {n}\n" for n in range(1, 100))
    frame = measured(with_stacks(tmp_path, many), hottest).frame(hottest)
    assert frame["own"].sum() == MOST_OWN
    assert (~frame["own"].astype(bool)).sum() == MOST_LIBRARY
    assert frame["function"].iloc[0] == "f99"


def test_a_run_without_stacks_says_so(tmp_path: Path) -> None:
    made = measured(recorded(tmp_path, (None, [light(n, 10 * MS) for n in range(5)], CPU)), hottest)
    with pytest.raises(NotMeasured, match="py-spy"):
        made.frame(hottest)
    assert asked(made, hottest_own, 0, "worker") == ""


@pytest.mark.parametrize(
    ("file", "own"),
    [
        ("/me/train.py", True),
        ("train.py", True),
        ("/me/python/lib/data.py", True),
        ("/usr/lib/python3.12/json/__init__.py", False),
        ("/usr/lib/python3/dist-packages/x.py", False),
        ("/me/venv/lib/python3.11/site-packages/torch/nn/functional.py", False),
        ("<frozen importlib._bootstrap>", False),
        ("<string>", False),
        ("/tmp/torchinductor_me/qn/cqniytj5.py", False),
        (f"/scratch/cache/qn/c{'qniytj5wpguedtxvs' * 3}.py", False),
        ("/me/qn/cqniytj5.py", True),
    ],
)
def test_whose_a_file_is(file: str, own: bool) -> None:
    assert is_own(file) == own


def test_the_tree_of_calls_stands_on_what_the_thread_was_doing(tmp_path: Path) -> None:
    module = f"Module._call_impl ({LIB}/nn/modules/module.py:9)"
    text = SEEN + f"{MAIN}{module};Net.forward (/me/net.py:5) 50\n"
    frame = measured(with_stacks(tmp_path, text), flame).frame(flame)
    told = {}
    for row in frame.to_dict("records"):
        above = frame["name"][row["parent"]].split(" ")[0] if row["parent"] >= 0 else ""
        told[row["doing"], above, row["name"].split(" ")[0]] = (row["samples"], bool(row["own"]))
    assert told == {
        ("rest", "", "run"): (36, True),
        ("rest", "run", "log"): (36, True),
        ("rest", "log", "dumps"): (6, False),
        ("forward", "", "run"): (50, True),
        ("forward", "run", "Net.forward"): (50, True),
        ("fetch", "", "run"): (40, True),
        ("fetch", "run", "_BaseDataLoaderIter.__next__"): (40, False),
        ("fetch", "_BaseDataLoaderIter.__next__", "wait"): (40, False),
        ("worker", "", "_worker_loop"): (100, False),
        ("worker", "_worker_loop", "read"): (100, True),
        ("worker", "read", "decode"): (80, True),
    }


def test_the_tree_of_calls_is_no_larger_than_a_screen(tmp_path: Path) -> None:
    deep = "".join(f"{MAIN}{';'.join(f'f{k} (/me/f.py:1)' for k in range(n))} 9\n" for n in range(1, 90))
    wide = "".join(f"{MAIN}g{n} (/me/g.py:1) 9\n" for n in range(2000))
    frame = measured(with_stacks(tmp_path, deep, wide), flame).frame(flame)
    assert frame.groupby("rank").size().max() <= MOST_FRAMES
    assert set(frame.loc[frame["rank"] == 1, "name"]) == {
        "run (/me/train.py)"
    }  # each of the others was seen too seldom
    assert len(frame[frame["rank"] == 0]) == MOST_DEPTH


def test_what_travels_of_lines_is_bounded_and_what_never_ran_is_left_out(tmp_path: Path) -> None:
    long = [piece(f"data:f{n}", [(k, 1, k + n) for k in range(1, 500)], file=f"{n}.py") for n in range(20)]
    frame = measured(with_lines(tmp_path / "a", long), line_times).frame(line_times)
    assert frame["function"].nunique() == MOST_FUNCTIONS
    assert frame["function"].iloc[0] == "data:f19"
    assert set(frame.groupby("function")["line"].count()) == {MOST_LINES}
    assert frame["line"].iloc[0] == 500 - MOST_LINES
    idle = with_lines(tmp_path / "b", [piece("data:f", [(2, 0, 0)])])
    with pytest.raises(NotMeasured, match="no function that --lines names was called"):
        measured(idle, line_times).frame(line_times)
