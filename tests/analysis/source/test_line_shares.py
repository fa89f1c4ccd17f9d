"""Which lines count for a stack, and over several ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlprof.analysis.source.line_shares import line_shares, over_ranks
from dlprof.errors import NotMeasured
from tests.fixtures.runs import measured
from tests.fixtures.sampled_stacks import LOADER, MAIN, WORKER, stacked

LIBRARY = "/lib/python3.11/site-packages"
BACKWARD = f"backward ({LIBRARY}/torch/_tensor.py:500)"
WORKING = 'process 10:"python train.py";process 11:"python train.py";thread (0x2): MainThread'


def test_a_stack_counts_for_the_innermost_line_of_the_users(tmp_path: Path) -> None:
    path = stacked(
        tmp_path,
        f"{MAIN};<module> (/w/train.py:90);main (/w/train.py:68) 60\n",
        f"{MAIN};<module> (/w/train.py:90);main (/w/train.py:69) 30\n",
        f"{MAIN};<module> (/w/train.py:90);main (/w/train.py:69);dumps ({LIBRARY}/fast/json.py:5) 10\n",
        f"{MAIN};<module> (/w/train.py:90);main (/w/train.py:70);{BACKWARD} 40\n",
        f"{MAIN};<module> (/w/train.py:90);main (/w/train.py:61);{LOADER};decode (/w/data.py:7) 25\n",
        f"{WORKING};{WORKER};decode (/w/data.py:8) 50\n",
        f"{MAIN};run ({LIBRARY}/fancy/cli.py:3) 5\n",
        ranks=2,
    )
    frame = measured(path, line_shares).frame(line_shares)
    of_rank = frame[frame["rank"] == 0]
    rows = of_rank[["doing", "own", "file", "line", "function", "samples", "of"]].to_numpy().tolist()
    assert rows == [
        ["backward", True, "/w/train.py", 70, "main", 40, 40],
        ["fetch", True, "/w/data.py", 7, "decode", 25, 25],
        ["rest", True, "/w/train.py", 68, "main", 60, 105],
        ["rest", True, "/w/train.py", 69, "main", 40, 105],
        ["rest", False, "fancy/cli.py", 0, "run", 5, 105],
        ["worker", True, "/w/data.py", 8, "decode", 50, 50],
    ]
    assert of_rank["library"].tolist()[0] == "backward (torch/_tensor.py)"
    both = over_ranks(frame)
    first = both.iloc[0]
    assert (first["line"], first["samples"], first["of"], first["share"]) == (68, 120, 210, 120 / 210)


def test_what_the_users_line_called_is_named_where_it_was_seen_most(tmp_path: Path) -> None:
    log = f"main (/w/train.py:69);dumps ({LIBRARY}/fast/json.py:5);deep ({LIBRARY}/fast/x.py:1)"
    path = stacked(tmp_path, f"{MAIN};{log} 30\n", f"{MAIN};main (/w/train.py:69) 10\n")
    frame = measured(path, line_shares).frame(line_shares)
    assert frame[["line", "library", "samples"]].to_numpy().tolist() == [[69, "dumps (fast/json.py)", 40]]


def test_without_stacks_it_is_not_known(tmp_path: Path) -> None:
    run = measured(stacked(tmp_path, 'process 10:"python train.py";thread (0x2): other;f (/w/x.py:1) 5\n'), line_shares)
    with pytest.raises(NotMeasured):
        run.frame(line_shares)
