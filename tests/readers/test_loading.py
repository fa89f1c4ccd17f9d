"""The log of a rank's loaders, as far as it differs from other logs."""

import json
from pathlib import Path

import pytest

from dlprof.errors import DlprofError
from dlprof.readers import loading


def test_what_does_not_apply_to_a_kind_is_marked(tmp_path: Path) -> None:
    path = tmp_path / "loading.jsonl"
    start = {"kind": "start", "start_ns": 5, "dur_ns": 3, "count": 1, "step": 0, "loader": 0, "workers": "7 8"}
    batch = {"kind": "batch", "start_ns": 9, "dur_ns": 4, "count": 2, "step": 1, "loader": 0, "empty": 1, "ready": 3}
    path.write_text(f"{json.dumps(batch)}\n{json.dumps(start)}\n")
    none = {"worker": -1, "outstanding": -1, "cpu_ns": -1, "delay_ns": -1, "thread_ns": -1}
    assert loading.read(path).tables["loading"].to_dict("records") == [
        {**start, "empty": -1, "ready": -1, **none},
        {**batch, "workers": "", **none},
    ]


def test_what_is_no_such_log_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "loading.jsonl"
    path.write_text('{"kind": "batch"}\n{"kind": "batch"}\n')
    with pytest.raises(DlprofError, match="none of its lines"):
        loading.read(path)
