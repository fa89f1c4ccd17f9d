"""Chrome traces of any tool: names of processes, marks in pairs, exact times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dlprof.errors import DlprofError
from dlprof.read import limits
from dlprof.read.foreign import chrome


def everything(_name: str) -> bool:
    return True


def written(folder: Path, events: list[object]) -> Path:
    path = folder / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def test_marks_become_events_and_times_keep_their_digits(tmp_path: Path) -> None:
    events: list[object] = [
        {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "one"}},
        {"ph": "B", "name": "outer", "pid": 1, "tid": 2, "ts": "1735632360000000.125"},
        {"ph": "B", "name": "inner", "pid": 1, "tid": 2, "ts": 1735632360000001},
        {"ph": "E", "pid": 1, "tid": 2, "ts": 1735632360000002, "args": {"x": 1}},
        {"ph": "E", "pid": 1, "tid": 2, "ts": "1735632360000004.125"},
        {"ph": "E", "pid": 1, "tid": 2, "ts": 1735632360000005},
        {
            "ph": "X",
            "name": "whole",
            "cat": "c",
            "pid": 1,
            "tid": 2,
            "ts": 1735632360000000.5,
            "dur": 2.5,
            "args": {"y": 2},
        },
    ]
    trace = chrome.read(written(tmp_path, events), everything)
    rows = [
        (trace.places[p].name, start, dur) for p, start, dur in zip(trace.place, trace.start, trace.dur, strict=True)
    ]
    at = 1735632360000000 * 1_000
    assert rows == [("inner", at + 1_000, 1_000), ("outer", at + 125, 4_000), ("whole", at + 500, 2_500)]
    assert trace.processes == {1: "one"}
    assert [chrome.fields(raw) for raw in trace.args.values()] == [{"x": 1}, {}, {"y": 2}]


def test_odd_events_are_left_out(tmp_path: Path) -> None:
    events = [
        7,
        None,
        {"ph": "X", "name": 3},
        {"ph": "X", "name": "a", "ts": "soon", "dur": 1},
        {"ph": "?", "name": "b"},
    ]
    good = {"ph": "X", "name": "good", "ts": 1, "dur": 1, "pid": 1, "tid": 1}
    trace = chrome.read(written(tmp_path, [*events, good]), everything)
    assert [trace.places[p].name for p in trace.place] == ["good"]


def test_no_more_is_read_than_memory_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MOST_ROWS", 100)
    events = [{"ph": "X", "name": "a", "ts": n, "dur": 1, "pid": 1, "tid": 1} for n in range(60_000)]
    trace = chrome.read(written(tmp_path, list(events)), everything)
    assert len(trace.place) < 60_000
    assert trace.warnings


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"a": 1}')
    with pytest.raises(DlprofError):
        chrome.read(tmp_path / "other.json", everything)
