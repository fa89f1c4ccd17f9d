"""Windows of a job: by folder or by time, and the last that all ranks have and no file of which is cut off."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from dlprof.read.folders import Window, is_cut, named_process, whole, windows_of


def test_a_folder_that_ranks_share_is_a_window() -> None:
    of = {r: [Window(Path(f"it{n}/rank{r}.json"), 10 - n) for n in range(3)] for r in range(2)}
    # By time, whatever the names.
    assert [w[0].parent.name for w in windows_of(of)] == ["it2", "it1", "it0"]
    assert all(sorted(w) == [0, 1] for w in windows_of(of))


def test_in_a_folder_of_all_the_nth_file_of_each_rank_is_of_the_nth_window() -> None:
    of = {0: [Window(Path("a2"), 7), Window(Path("a1"), 3)], 1: [Window(Path("b1"), 4)]}
    assert windows_of(of) == [{0: Path("a1"), 1: Path("b1")}, {0: Path("a2")}]
    own = {r: [Window(Path(f"rank{r}/{n}.json"), None) for n in range(2)] for r in range(2)}
    assert [sorted(path.name for path in w.values()) for w in windows_of(own)] == [["0.json"] * 2, ["1.json"] * 2]
    assert windows_of({}) == []


@pytest.mark.parametrize("packed", [False, True])
def test_the_last_whole_window(tmp_path: Path, packed: bool) -> None:
    def made(name: str, cut: int = 0) -> Path:
        text = b'{"traceEvents": [' + b"1," * 3_000 + b"1]}\n"
        data = gzip.compress(text) if packed else text
        (tmp_path / name).write_bytes(data[: len(data) - cut])
        return tmp_path / name

    good, bad = [made(f"good{n}") for n in range(3)], made("bad", cut=5)
    assert not is_cut(good[0])
    assert is_cut(bad)
    assert is_cut(tmp_path / "none")
    assert whole([{0: good[0], 1: good[1]}, {0: good[2], 1: bad}]) == 1
    assert whole([{0: good[0], 1: good[1]}, {0: good[2]}]) == 1
    assert whole([{0: bad}, {0: bad}]) == 2


def test_a_process_is_named_by_torchs_own_file_names() -> None:
    assert named_process(Path("node-1_4711.1700000000000.pt.trace.json.gz")) == "node-1_4711"
    assert named_process(Path("rank0.json")) == ""
