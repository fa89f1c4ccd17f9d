"""Ascend's trace_view.json: what an event is stands in its process's name; sums and waits are no work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dlprof.errors import DlprofError
from dlprof.read.foreign.ascend import read
from dlprof.read.formats import Head, recognised
from dlprof.read.run import open_run
from tests.fixtures import dialects


def written(folder: Path, made: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "trace_view.json"
    path.write_text(json.dumps(made))
    return path


def test_kernels_collectives_operators_and_steps(tmp_path: Path) -> None:
    reading = read(written(tmp_path, dialects.ascend()))
    spans = reading.tables["spans"]
    first = spans[spans["start_ns"] < (dialects.EPOCH_US + 1_000) * 1_000]
    assert [(row.lane, row.kind, row.name, row.launch) for row in first.itertuples()] == [
        ("host:9", "annotation", "ProfilerStep#0", -1),
        ("host:9", "op", "aten::mm", -1),
        ("host:9", "runtime", "Node@launch", 1),
        ("device:Stream 2", "kernel", "MatMulV2", 1),
        ("device:Group 0 Communication", "communication", "hcom_allReduce__123_0_1", 2),
    ]
    assert first["start_ns"].iloc[3] == dialects.EPOCH_US * 1_000 + 200_500
    assert first["collective"].iloc[4] == "all_reduce"
    steps = reading.tables["traced_steps"]
    assert [(row.step, row.dur_ns) for row in steps.itertuples()] == [(0, 990_000), (1, 990_000)]


def test_it_is_recognised_before_a_trace_of_torchs_and_its_rank_is_in_the_folders_name(tmp_path: Path) -> None:
    for n in range(2):
        written(tmp_path / f"rank{n}_ascend_pt" / "ASCEND_PROFILER_OUTPUT", dialects.ascend())
    run = open_run(tmp_path)
    assert [(rank.index, list(rank.files)) for rank in run.ranks] == [(0, ["ascend"]), (1, ["ascend"])]
    whole = written(tmp_path / "dict", {"traceEvents": dialects.ascend()})
    known = recognised(Head(whole))
    assert known is not None
    assert known[0].name == "ascend"
    assert len(read(whole).tables["spans"]) == 10


def test_without_a_known_process_there_is_nothing(tmp_path: Path) -> None:
    made = [event for event in dialects.ascend() if event["ph"] == "M"]
    with pytest.raises(DlprofError, match="no event of Ascend"):
        read(written(tmp_path, made))
