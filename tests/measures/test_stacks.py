"""The functions that were seen most, as they travel and are cited."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlprof.errors import NotMeasured
from dlprof.measures.stacks import MOST_LIBRARY, MOST_OWN, hottest, hottest_own, is_own
from tests.runs import CPU, light, measured, recorded

MS = 1_000_000
LIB = "/v/lib/python3.11/site-packages/torch"
RANK = 'process 7:"python train.py";'
MAIN = f"{RANK}thread (7): MainThread;run (/me/train.py:3);"
WORKER = f'{RANK}process 9:"python train.py";thread (9): MainThread;_worker_loop ({LIB}/utils/data/_utils/worker.py:5);'
NEXT = f"_BaseDataLoaderIter.__next__ ({LIB}/utils/data/dataloader.py:7);wait (/v/lib/python3.11/threading.py:9)"
# What py-spy saw of a rank and a worker of its loader.
SEEN = (
    f"{MAIN}log (/me/log.py:8);dumps (/v/lib/python3.11/json/__init__.py:2) 6\n"
    f"{MAIN}log (/me/log.py:9) 30\n"
    f"{MAIN}{NEXT} 40\n"
    f"{WORKER}read (/me/data.py:1);decode (/me/data.py:4) 80\n"
    f"{WORKER}read (/me/data.py:2) 20\n"
)


def run(folder: Path, *ranks: str) -> Path:
    recorded(folder, *((None, [light(n, 10 * MS) for n in range(5)], CPU) for _ in ranks))
    for n, text in enumerate(ranks):
        (folder / f"ranks/{n:05d}/stacks.part").write_text(text)
    return folder


def test_the_users_functions_have_what_libraries_do_for_them(tmp_path: Path) -> None:
    made = measured(run(tmp_path, SEEN, SEEN), hottest)
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
    assert hottest_own(made, 0, "worker") == "80 % are in decode (data.py:4)"
    assert hottest_own(made, 0, "compute") == ""
    assert hottest_own(made, 2, "worker") == ""


def test_a_few_samples_and_a_thin_spread_are_not_cited(tmp_path: Path) -> None:
    few = f"{WORKER}decode (/me/data.py:4) 20\n"
    thin = "".join(f"{WORKER}decode{n} (/me/data.py:4) 10\n" for n in range(10))
    made = measured(run(tmp_path, few, thin), hottest)
    assert hottest_own(made, 0, "worker") == hottest_own(made, 1, "worker") == ""


def test_what_travels_is_bounded(tmp_path: Path) -> None:
    many = "".join(f"{MAIN}f{n} (/me/a.py:1);g{n} (/v/lib/python3.11/b.py:1) {n}\n" for n in range(1, 100))
    frame = measured(run(tmp_path, many), hottest).frame(hottest)
    assert frame["own"].sum() == MOST_OWN
    assert (~frame["own"].astype(bool)).sum() == MOST_LIBRARY
    assert frame["function"].iloc[0] == "f99"


def test_a_run_without_stacks_says_so(tmp_path: Path) -> None:
    made = measured(recorded(tmp_path, (None, [light(n, 10 * MS) for n in range(5)], CPU)), hottest)
    with pytest.raises(NotMeasured, match="py-spy"):
        made.frame(hottest)
    assert hottest_own(made, 0, "worker") == ""


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
    ],
)
def test_whose_a_file_is(file: str, own: bool) -> None:
    assert is_own(file) == own
