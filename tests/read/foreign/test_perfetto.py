"""Perfetto's traces: recognised by their packets, read where traceconv is on the path, left with a word elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dlprof.errors import DlprofError
from dlprof.read.foreign.perfetto import read, recognise
from dlprof.read.formats import Head
from dlprof.read.run import TRACE, open_run
from tests.fixtures import traces

# A trace of two packets: a timestamp with a track event, and a descriptor of a track.
PACKETS = bytes([0x0A, 0x06, 0x40, 0x07, 0x5A, 0x02, 0x48, 0x01, 0x0A, 0x05, 0xE2, 0x03, 0x02, 0x08, 0x01])


def written(folder: Path, data: bytes = PACKETS, name: str = "trace.pftrace") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(data)
    return folder / name


def converter(folder: Path, script: str) -> None:
    folder.mkdir()
    (folder / "traceconv").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "traceconv").chmod(0o755)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x0a",
        b"\n\n\n\n",
        b"\x0a\x05hello",
        b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff",
        b"\nword\n",
        traces.dump(traces.training()),
    ],
)
def test_other_files_are_none(tmp_path: Path, data: bytes) -> None:
    assert not recognise(Head(written(tmp_path, data)))


def test_without_the_tool_it_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    path = written(tmp_path / "job", name="anything.bin")
    assert recognise(Head(path))
    with pytest.raises(DlprofError, match="traceconv json FILE"):
        open_run(path)
    traces.write(tmp_path / "job" / "rank0.json", traces.training(world_size=1))
    run = open_run(tmp_path / "job")
    assert [list(rank.files) for rank in run.ranks] == [[TRACE]]
    assert any("anything.bin" in w and "traceconv" in w for w in run.warnings)


def test_with_the_tool_its_json_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = traces.write(tmp_path / "made.json", traces.training(world_size=1))
    converter(tmp_path / "bin", f'[ "$1" = json ] && /bin/cp {made} "$3"')
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    path = written(tmp_path / "job")
    assert [list(rank.files) for rank in open_run(path).ranks] == [["perfetto"]]
    reading = read(path)
    assert len(reading.tables["traced_steps"]) == 3
    assert len(reading.tables["spans"]) == sum(e["ph"] == "X" for e in json.loads(made.read_text())["traceEvents"])


def test_a_tool_that_fails_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    converter(tmp_path / "bin", "echo no good trace >&2; exit 3")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(DlprofError, match="no good trace"):
        read(written(tmp_path / "job"))
