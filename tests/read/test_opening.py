"""A folder from a stranger: what leads out of it, what never ends, and what unpacks to more than a machine holds."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from dlprof.errors import DlprofError
from dlprof.read import limits, opening, steps
from dlprof.read.kineto import torch_trace
from dlprof.read.opening import Inside, lines_of, open_file, read_file
from dlprof.read.run import open_run


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, why in ((tmp_path / "pipe", "not a regular file"), (Path("/dev/zero"), "not a regular file")):
        with pytest.raises(DlprofError, match=why), open_file(path):
            pass
    with pytest.raises(DlprofError, match="a folder, not a file"), open_file(tmp_path):
        pass
    with pytest.raises(DlprofError, match="no such file"), open_file(tmp_path / "none"):
        pass


def test_links_within_a_folder_are_followed_and_others_told_of(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("mine")
    folder = tmp_path / "theirs"
    (folder / "below").mkdir(parents=True)
    (folder / "here").write_text("theirs")
    (folder / "inner").symlink_to("here")
    (folder / "outer").symlink_to(secret)
    (folder / "itself").symlink_to("itself")
    (folder / "away").symlink_to(tmp_path)
    inside = Inside(folder)
    names = ("here", "inner", "outer", "itself", "none", "away/secret", "below/../../secret")
    assert [name for name in names if inside.holds(folder / name)] == ["here", "inner"]
    assert [name for name in ("below", "away") if inside.holds_folder(folder / name)] == ["below"]
    assert inside.text(folder / "outer") == ""
    (warning,) = inside.warnings
    assert warning.startswith("links that lead out of the folder are not followed: outer")


def run_of(folder: Path) -> Path:
    """Make the smallest run that can be opened."""
    (folder / "ranks/00000").mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"format": 1, "command": ["true"]}))
    (folder / "ranks/00000/facts.json").write_text("{}")
    return folder


def test_a_run_brings_nothing_of_the_readers_own(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("the reader's own words\n")
    run = run_of(tmp_path / "run")
    (run / "hosts/one").mkdir(parents=True)
    for name in ("warnings.txt", "boot"):
        (run / "hosts/one" / name).symlink_to(secret)
    (run / "ranks/00000/steps.jsonl").symlink_to(secret)
    (run / "ranks/00001").symlink_to(tmp_path)
    os.mkfifo(run / "hosts/one/host.jsonl")
    opened = open_run(run)
    assert "own words" not in str(opened)
    assert [rank.index for rank in opened.ranks] == [0]
    assert opened.ranks[0].files == {}
    assert any("not followed" in text and "warnings.txt" in text for text in opened.warnings)


def test_traces_are_not_looked_for_behind_links(tmp_path: Path) -> None:
    trace = {"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "a", "ts": 1, "dur": 1, "pid": 1, "tid": 1}]}
    (tmp_path / "out").mkdir()
    (tmp_path / "out/rank0.json").write_text(json.dumps({"schemaVersion": 1, **trace}))
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "rank0.json").symlink_to(tmp_path / "out/rank0.json")
    (theirs / "more").symlink_to(tmp_path / "out")
    with pytest.raises(DlprofError, match=r"not followed: more, rank0\.json"):
        open_run(theirs)
    # Who names a link means what it leads to.
    assert open_run(theirs / "rank0.json").ranks


@pytest.mark.parametrize("name", ["1" * 19, "٣", "²", "1" * 5000])
def test_folders_that_are_no_ranks_are_told_of(tmp_path: Path, name: str) -> None:
    run = run_of(tmp_path / "run")
    try:
        (run / "ranks" / name).mkdir()
    except OSError:
        pytest.skip("no such name on this disk")
    assert [rank.index for rank in open_run(run).ranks] == [0]


def test_a_file_of_one_endless_line_is_not_read_to_its_end(tmp_path: Path) -> None:
    sparse = tmp_path / "steps.jsonl"
    sparse.write_text('{"step":0,"start_ns":1,"dur_ns":1}\n')
    os.truncate(sparse, 8 << 30)
    with open_file(sparse) as file:
        lines = [line for some in lines_of(file) for line in some]
        assert file.tell() < 64 << 20
    assert lines == [b'{"step":0,"start_ns":1,"dur_ns":1}', opening.NO_LINE]
    assert len(steps.read(sparse).tables["steps"]) == 1
    with pytest.raises(DlprofError, match="larger than 64 MB"):
        read_file(sparse)


def test_what_unpacks_to_far_more_than_a_trace_does_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LEAST_UNPACKED", 1 << 20)
    event = b'{"ph":"X","cat":"cpu_op","name":"a","ts":1,"dur":1,"pid":1,"tid":1},\n'
    bomb = tmp_path / "rank0.json.gz"
    bomb.write_bytes(gzip.compress(b'{"schemaVersion":1,"traceEvents":[\n' + event * 200_000 + b"{}]}"))
    reading = torch_trace.read(bomb)
    assert 10_000 < len(reading.tables["spans"]) < 100_000
    assert any("--no-limits" in warning for warning in reading.warnings)
    monkeypatch.setenv(limits.NO_LIMITS, "1")
    assert len(torch_trace.read(bomb).tables["spans"]) == 200_000


def test_no_more_rows_are_read_than_memory_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MOST_ROWS", 1_000)
    log = tmp_path / "steps.jsonl"
    # One line may claim to stand for as many steps as it likes.
    log.write_text('{"step":0,"start_ns":1,"dur_ns":1}\n{"step":1,"start_ns":2,"dur_ns":1,"steps":1000000000000000}\n')
    reading = steps.read(log)
    assert len(reading.tables["steps"]) == 1
    assert any("more than 1,000 steps" in warning for warning in reading.warnings)
    log.write_text("".join(f'{{"step":{n},"start_ns":{n},"dur_ns":1}}\n' for n in range(3_000)))
    assert len(steps.read(log).tables["steps"]) == 1_000


def test_no_more_names_are_read_than_memory_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MOST_NAMES", 1_000)
    event = '{"ph":"X","cat":"cpu_op","name":"%d","ts":%d,"dur":1,"pid":1,"tid":1}'
    trace = tmp_path / "rank0.json"
    trace.write_text('{"schemaVersion":1,"traceEvents":[' + ",\n".join(event % (n, n) for n in range(40_000)) + "]}")
    reading = torch_trace.read(trace)
    assert 1_000 < len(reading.tables["spans"]) < 30_000
    assert any("different names or threads" in warning for warning in reading.warnings)
    monkeypatch.setenv(limits.NO_LIMITS, "1")
    assert len(torch_trace.read(trace).tables["spans"]) == 40_000
