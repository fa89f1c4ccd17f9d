"""Logs that share a file: each reads as if it had the file alone, also where it is cut off, and older layouts too."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from dlprof import run_folder, schema
from dlprof.analysis.engine import RankData
from dlprof.errors import DlprofError, NotMeasured
from dlprof.read import records
from dlprof.read.logs import read_steps
from dlprof.read.opening import read_object
from dlprof.read.run import open_run
from dlprof.read.sources import SOURCES
from dlprof.record.log import Log, Part
from tests.fixtures import holding, runs
from tests.fixtures.allocator import reading
from tests.fixtures.layouts import put_together

SAMPLE = {"at_ns": 7, "power_w": 100}
STALL = {"kind": "garbage_collection", "start_ns": 5, "dur_ns": 2, "step": 3}


def lines(path: Path, log: str, rank: str = "") -> list[bytes]:
    return [line for some in records.lines_in(path, run_folder.begins(log, rank)) for line in some]


def test_logs_are_told_apart_by_their_first_letters() -> None:
    assert len({run_folder.begins(source.log)[:16] for source in SOURCES}) == len(SOURCES)


TEXT = '{"log":"aa"}\n{"log":"aa","n":1}\n{"log":"bb","n":2}\nodd\n\n{"log":"aa","n":3}\n{"log":"empty"}\n'


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (TEXT, {"aa": [1, 3], "bb": [2], "empty": []}),
        (TEXT.replace("\n\n", "\n" + "x" * 100 + "\n"), {"aa": [1, 3], "bb": [2]}),
        (TEXT + '{"log":"aa"}\n{"log":"aa","n":4}', {"aa": [4], "bb": [2]}),  # it began anew
        (TEXT + '{"log":"aa"}\n', {"aa": []}),
        ('{"log":"aa","n":1}\n' * 3, {"aa": [1, 1, 1]}),
        ("", {}),
        ('{"log":"', {}),
        ("\n" * 40, {}),
    ],
)
@pytest.mark.parametrize("looked", [1, 7, 1 << 19])
def test_each_log_is_read_alone(
    looked: int, text: str, found: dict[str, list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "_LOOKED", looked)
    monkeypatch.setattr(records, "_BATCH", 20)
    path = tmp_path / f"{looked}"
    path.write_text(text)
    for log, numbers in found.items():
        assert [json.loads(line)["n"] for line in lines(path, log)] == numbers
    with pytest.raises(records.NotThereError):
        lines(path, "nothing")


def test_samples_of_several_ranks_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    file = Log(path)
    for rank in ("00000", "00001", "00000.r1"):
        Part(file, "gpu", rank).write(json.dumps({"n": rank}) + "\n")
    assert [json.loads(line)["n"] for line in lines(path, "gpu", "00000")] == ["00000"]
    assert len(lines(path, "gpu")) == 3
    with pytest.raises(records.NotThereError):
        lines(path, "gpu", "00002")


STEPS = [runs.light(n, 5, 10 * n) for n in range(3)]


@pytest.mark.parametrize("cut", [1, 2, 20, 200, 300])
def test_of_a_last_line_that_is_cut_off_only_that_is_lost(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    file = Log(path)
    for log, rows in (("steps", STEPS[:2]), ("stalls", [STALL]), ("steps", STEPS[2:])):
        Part(file, log).write("".join(json.dumps(one) + "\n" for one in rows))
    os.truncate(path, path.stat().st_size - cut)
    whole = cut == 1  # the end of the line alone
    found = read_steps(path, run_folder.begins("steps"))
    assert (list(found.tables["steps"]["step"]), found.warnings) == ([0, 1, 2] if whole else [0, 1], ())
    assert len(lines(path, "stalls")) == 1


def test_what_follows_a_line_that_was_cut_off_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "records.jsonl"
    part, write = Part(Log(path), "steps"), os.write

    def full(fd: int, data: memoryview) -> int:
        if not path.stat().st_size:
            return write(fd, data[:30])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        part.write(json.dumps(STEPS[0]) + "\n")
    monkeypatch.setattr(os, "write", write)
    part.write(json.dumps(STEPS[1]) + "\n")
    path.write_text(path.read_text()[:-20])  # the process was killed; another one goes on
    Part(Log(path), "steps").write(json.dumps(STEPS[2]) + "\n")
    found = read_steps(path, run_folder.begins("steps"))
    assert list(found.tables["steps"]["step"]) == [2]
    assert found.warnings == ("records.jsonl: 2 malformed lines are left out",)


def test_of_objects_the_last_whole_one_counts(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    part = Part(Log(path), "held")
    for n in range(3):
        part.write(json.dumps({"n": n}) + "\n")
    os.truncate(path, path.stat().st_size - 3)
    assert read_object(path, run_folder.begins("held")) == {"n": 1}
    with pytest.raises(DlprofError):
        read_object(path, run_folder.begins("overrides"))


def filled(folder: Path) -> Path:
    """Write a run with something of every source, in the older layout."""
    run = runs.recorded(folder, *[(None, [runs.light(n, 9) for n in range(9)], runs.CPU)] * 2, stalls=[[STALL], []])
    for rank in sorted((run / "ranks").iterdir()):
        number = int(rank.name)
        runs.loading(run, number, step=9, wait=1, fetch=4, cpu=1, n=8, workers=2)
        samples = [SAMPLE | {"at_ns": n, "power_w": 100 * number + n} for n in range(5)]
        for name in ("gpu.jsonl", "processes.jsonl"):
            (rank / name).write_text("".join(json.dumps(one) + "\n" for one in samples))
        (rank / "memory.jsonl").write_text(json.dumps(reading(1, 1_000)) + "\n")
        (rank / "losses.jsonl").write_text('{"step":0,"loss":0.5}\n')
        burst = json.dumps({"start_ns": 1, "end_ns": 2, "lines": [["a.py", number + 1, "x"]]})
        stacks = f'#{burst}\nprocess 1:"aa";thread (1): MainThread;run (a.py:{number + 1}) 3\n'
        (rank / "stacks.txt.gz").write_bytes(gzip.compress(stacks.encode()))
        holding.write(run, [holding.row("parameter", "", 8)], rank=number)
    effect = {"value": 4, "applied": 2, "before": [0], "places": [["a.py", 3, "f"]], "error": None}
    (run / "ranks/00001/overrides.json").write_text(json.dumps({"loader.num_workers": effect}))
    (run / "hosts/node-1").mkdir(parents=True)
    (run / "hosts/node-1/host.jsonl").write_text('{"at_ns": 1, "core_percent": [50, 100]}\n')
    return run


def test_both_layouts_of_a_recording_read_the_same(tmp_path: Path) -> None:
    old = filled(tmp_path / "old")
    new = put_together(shutil.copytree(old, tmp_path / "new"))
    assert {path.name for path in (new / "ranks/00001").iterdir()} == {"facts.json", "fetches.jsonl", "records.jsonl"}
    of_old, of_new = open_run(old), open_run(new)
    assert of_old.warnings == of_new.warnings
    read = 0
    for one, other in zip(of_old.ranks, of_new.ranks, strict=True):
        a, b = RankData(one), RankData(other)
        assert (a.warnings, a.facts.trace_facts) == (b.warnings, b.facts.trace_facts)
        for table in schema.TABLES:
            found = [_table(rank, table) for rank in (a, b)]
            assert isinstance(found[0], str) == isinstance(found[1], str)
            if isinstance(found[0], pd.DataFrame):
                pd.testing.assert_frame_equal(found[0], found[1])
                read += 1
            else:
                assert found[0] == found[1]  # why it is not there
    assert read >= 2 * 8


def _table(rank: RankData, name: str) -> Any:
    try:
        return rank.table(name)
    except NotMeasured as e:
        return str(e)
