"""Files that are known and not read are left with a word on what to use instead."""

from __future__ import annotations

import json
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


def test_profiler_options_are_left(tmp_path: Path) -> None:
    path = tmp_path / "profiler_info_0.json"
    path.write_text(json.dumps({"config": {"common_config": {"schedule": {"wait": 1}}}}))
    assert name_of(path) == "torch_logs"
