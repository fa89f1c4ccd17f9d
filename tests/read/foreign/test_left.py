"""Files that are known and not read are left with a word on what to use instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlprof.errors import DlprofError
from dlprof.exports import perfetto
from dlprof.read.formats import Head, recognised
from dlprof.read.run import open_run
from tests.fixtures import dialects, runs, traces


def name_of(path: Path) -> str:
    known = recognised(Head(path))
    assert known is not None
    assert known[0].read is None
    assert known[0].left
    return known[0].name


def test_an_execution_trace_is_left_and_said_so_where_it_is_alone(tmp_path: Path) -> None:
    path = tmp_path / "rank0.json"
    path.write_text(dialects.execution_trace())
    assert name_of(path) == "execution_trace"
    for where in (path, tmp_path):
        with pytest.raises(DlprofError, match="execution trace"):
            open_run(where)
    runs.foreign(tmp_path / "job", traces.training(world_size=1))
    (tmp_path / "job" / "et.json").write_text(dialects.execution_trace())
    assert any("et.json" in w for w in open_run(tmp_path / "job").warnings)


def test_our_own_export_is_no_run(tmp_path: Path) -> None:
    run = open_run(runs.foreign(tmp_path / "job", traces.training(world_size=1)))
    perfetto.write(run, tmp_path / "all.json.gz")
    assert name_of(tmp_path / "all.json.gz") == "dlprof_export"


def test_a_trace_of_torchs_is_none_of_them(tmp_path: Path) -> None:
    for n, made in enumerate((traces.training(), {"traceEvents": [], "schema": "1.0.1", "nodes": []})):
        path = traces.write(tmp_path / f"{n}.json", made)
        known = recognised(Head(path))
        assert known is not None
        assert known[0].name == "torch_trace"


def test_perfettos_packets_are_left(tmp_path: Path) -> None:
    """A clock snapshot, as traced and as rocprofv3 begin; a timestamp; text that begins with an empty line is none."""
    path = tmp_path / "anything.bin"
    for data in (b"\n\x06\x32\x04\x0a\x02\x08\x00", b"\n\x80\x02\x40\x00" + bytes(300), b"\n\x05\xe2\x03\x02\x08\x00"):
        path.write_bytes(data)
        assert name_of(path) == "perfetto"
    for data in (b"\n@ word\n", b"\n\x00\x00", b"\n\xff\xff\xff\xff\xff", bytes(50)):
        path.write_bytes(data)
        assert recognised(Head(path)) is None
