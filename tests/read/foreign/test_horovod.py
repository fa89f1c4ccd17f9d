"""Horovod's timeline: every rank's collectives from when it was ready, who is late, steps; cut and hostile files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dlprof.analysis.communication.matching import matched
from dlprof.errors import DlprofError
from dlprof.read.foreign.horovod import read, recognise
from dlprof.read.formats import Head
from dlprof.read.run import open_run
from tests.fixtures import dialects, runs


def written(folder: Path, text: str) -> Path:
    path = folder / "timeline.json"
    path.write_text(text)
    return path


@pytest.mark.parametrize("closed", [True, False])
def test_each_rank_waits_from_when_it_was_ready(tmp_path: Path, closed: bool) -> None:
    path = written(tmp_path, dialects.horovod(closed=closed))
    assert [(part.rank, part.piece) for part in recognise(Head(path))] == [(n, str(n)) for n in range(4)]
    for rank, ready_us in ((0, 0), (1, 10), (2, dialects.NEGOTIATED_US), (3, 30)):
        reading = read(path, str(rank))
        spans = reading.tables["spans"]
        assert len(spans) == 8 * 3
        assert set(spans["collective"]) == {"all_reduce"}
        assert spans["start_ns"].iloc[0] == (dialects.EPOCH_US + 1_000 + ready_us) * 1_000
        assert set(spans["dur_ns"]) == {(dialects.NEGOTIATED_US - ready_us + dialects.REDUCED_US) * 1_000}
        assert set(spans["bytes"]) == {40_000}
        assert set(spans["dtype"]) == {"float32"}
        assert reading.facts["world_size"] == 4


def test_a_step_is_from_a_tensors_first_turn_to_its_next(tmp_path: Path) -> None:
    steps = read(written(tmp_path, dialects.horovod()), "0").tables["traced_steps"]
    assert len(steps) == 7
    assert set(steps["dur_ns"]) == {dialects.STEP_US * 1_000}


def test_the_others_wait_for_the_rank_that_is_late(tmp_path: Path) -> None:
    written(tmp_path, dialects.horovod(late=2))
    assert [rank.index for rank in open_run(tmp_path).ranks] == [0, 1, 2, 3]
    frame = runs.measured(tmp_path, matched).frame(matched)
    waits = frame.groupby("rank")["wait_ns"].median()
    assert waits[2] == 0
    assert waits[0] == dialects.NEGOTIATED_US * 1_000
    assert waits[3] == (dialects.NEGOTIATED_US - 30) * 1_000


def test_a_timeline_without_a_base_says_so(tmp_path: Path) -> None:
    assert any("no base" in w for w in read(written(tmp_path, dialects.horovod(base=False)), "0").warnings)


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_a_cut_timeline_gives_what_stands_before_the_cut(tmp_path: Path, share: float) -> None:
    text = dialects.horovod()
    whole = len(read(written(tmp_path, text), "0").tables["spans"])
    cut = len(read(written(tmp_path, text[: int(len(text) * share)]), "0").tables["spans"])
    assert 0 < cut < whole


def test_odd_events_do_no_harm(tmp_path: Path) -> None:
    lines = dialects.horovod(closed=True).splitlines()
    odd = [
        '{"ph": "E", "ts": 5, "pid": 99},',
        '{"ph": "X", "name": "NEGOTIATE_ALLREDUCE", "ts": "soon", "pid": {}, "dur": -1},',
        json.dumps({"ph": "B", "name": "ALLREDUCE", "ts": 1e300, "pid": 1}) + ",",
        '{"ph": "M", "name": "process_name", "pid": 1, "args": [1]},',
        "7,",
    ]
    reading = read(written(tmp_path, "\n".join([lines[0], *odd, *lines[1:]])), "0")
    assert len(reading.tables["spans"]) >= 8 * 2


def test_other_files_are_none(tmp_path: Path) -> None:
    assert not recognise(Head(written(tmp_path, '[{"ph": "X", "name": "0", "ts": 1, "dur": 1, "pid": 1}]')))
    with pytest.raises(DlprofError, match="no collective of rank 9"):
        read(written(tmp_path, dialects.horovod()), "9")
