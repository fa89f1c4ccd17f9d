"""lines.jsonl: the pieces of several processes add up, and a cut or broken line costs only itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dlprof.errors import DlprofError
from dlprof.read.lines import read

PIECE = {"role": "main", "function": "data:f", "file": "data.py", "first": 3, "lines": [[4, 2, 100], [5, 1, 50]]}
SOURCE = "def f():\n    a = 1\n    return a\n    # never\n"


def test_pieces_add_up_and_lines_that_never_ran_are_there(tmp_path: Path) -> None:
    worker = PIECE | {"role": "worker", "lines": [[4, 7, 1]]}
    pieces = [PIECE | {"source": SOURCE}, worker, PIECE | {"lines": [[4, 1, 10]]}]
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps(p) + "\n" for p in pieces) + '{"role": "main", "func')
    reading = read(path)
    assert reading.warnings == ()
    told = [tuple(row) for row in reading.tables["lines"][["role", "line", "hits", "dur_ns", "source"]].to_numpy()]
    assert told == [
        ("main", 3, 0, 0, "def f():"),
        ("main", 4, 3, 110, "    a = 1"),
        ("main", 5, 1, 50, "    return a"),
        ("main", 6, 0, 0, "    # never"),
        ("worker", 3, 0, 0, "def f():"),
        ("worker", 4, 7, 1, "    a = 1"),
        ("worker", 5, 0, 0, "    return a"),
        ("worker", 6, 0, 0, "    # never"),
    ]


def test_a_function_without_its_text_and_broken_lines(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text(f'nonsense\n{json.dumps(PIECE)}\n{{"role": 1}}\n{json.dumps(PIECE)}\n')
    reading = read(path)
    assert reading.warnings == ("lines.jsonl: 2 malformed lines are left out",)
    assert list(reading.tables["lines"]["hits"]) == [4, 2]
    assert set(reading.tables["lines"]["source"]) == {""}


def test_nothing_counted_and_another_file(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text("")
    assert len(read(path).tables["lines"]) == 0
    path.write_text("one\ntwo\n")
    with pytest.raises(DlprofError, match="not a log of lines"):
        read(path)


@pytest.mark.parametrize("figure", [2**63, 10**30, -1, 2**62])
@pytest.mark.parametrize("key", ["first", "lines"])
def test_a_piece_of_impossible_counts_is_left_out(figure: int, key: str, tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    bad = PIECE | {key: [[4, figure, 1]] if key == "lines" else figure, "source": SOURCE}
    path.write_text(f"{json.dumps(PIECE)}\n{json.dumps(bad)}\n{json.dumps(PIECE)}\n")
    reading = read(path)
    assert reading.tables["lines"]["hits"].tolist() == [4, 2]
    assert reading.warnings == ("lines.jsonl: 1 malformed lines are left out",)
