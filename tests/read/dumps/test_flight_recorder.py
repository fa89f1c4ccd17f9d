"""Dumps of the flight recorder, pickles and JSON of any version, become one table; others are one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dlprof.errors import DlprofError
from dlprof.read.dumps import flight_recorder
from dlprof.read.formats import Head, recognised
from tests.fixtures import traces
from tests.fixtures.dumps import OPEN, call, dump, write
from tests.fixtures.places import GOLDEN


def read(path: Path, held: Any, name: str = "nccl_trace_rank_0") -> Any:
    return flight_recorder.read(write(path / name, held, protocol=2))


def test_entries_become_a_table(tmp_path: Path) -> None:
    waits = call(2, "broadcast", **OPEN, input_sizes=[[2, 3], []], input_dtypes=["Half"], process_group=("7", "tp"))
    reading = read(tmp_path, dump([call(1), waits], 4))
    rows = reading.tables["recorder_calls"].to_dict("records")
    assert [(r["group"], r["about"], r["sequence"], r["op"], r["state"], r["retired"]) for r in rows] == [
        ("0", "default_pg", 1, "all_reduce", "completed", 1),
        ("7", "tp", 2, "broadcast", "scheduled", 0),
    ]
    assert (rows[0]["created_ns"], rows[0]["completed_ns"]) == (traces.BASE_NS + 10**6, traces.BASE_NS + 10**6 + 2000)
    assert (rows[1]["completed_ns"], rows[1]["input"], rows[1]["dtype"]) == (-1, "2x3, scalar", "Half → Float")
    assert (rows[0]["site"], rows[0]["backend"]) == ("train (/home/me/job/train.py:28)", "nccl")
    assert reading.facts["world_size"] == 4
    assert reading.facts["recorder"] == {"version": "2.10", "groups": {"0": [0, 1, 2, 3]}, "enqueued": {}}


def test_json_gives_what_a_pickle_gives(tmp_path: Path) -> None:
    held = dump([call(1), call(2, **OPEN)], 2)
    (tmp_path / "d_1.json").write_text(json.dumps(held))
    left = flight_recorder.read(tmp_path / "d_1.json")
    right = read(tmp_path, held)
    assert left.tables["recorder_calls"].equals(right.tables["recorder_calls"])
    assert left.facts == right.facts


def test_the_last_collective_that_was_issued_is_told_by_group(tmp_path: Path) -> None:
    status = {"0": {"last_enqueued_collective": 9}, "1": {"last_enqueued_collective": 4}}
    reading = read(tmp_path, dump([call(1)], 2, pg_status=status))
    assert reading.facts["recorder"]["enqueued"] == {"0": 9}


def test_an_old_version_numbers_all_calls_alike(tmp_path: Path) -> None:
    old = {k: v for k, v in call(3).items() if k not in ("collective_seq_id", "p2p_seq_id", "retired", "is_p2p")}
    reading = read(tmp_path, [{**old, "seq_id": 17}])
    (row,) = reading.tables["recorder_calls"].to_dict("records")
    assert (row["sequence"], row["retired"], row["kind"]) == (17, -1, "collective")


def test_sends_are_numbered_by_themselves(tmp_path: Path) -> None:
    sent = call(5, "send 0->1", is_p2p=True, p2p_seq_id=2)
    (row,) = read(tmp_path, dump([sent], 2)).tables["recorder_calls"].to_dict("records")
    assert (row["kind"], row["sequence"], row["op"]) == ("p2p", 2, "send 0->1")


@pytest.mark.parametrize(
    ("name", "rank"),
    [("nccl_trace_rank_3", 3), ("comm_lib_trace_rank_12", 12), ("fr_7", 7), ("dump_4.json", 4), ("any", None)],
)
def test_a_dump_is_known_by_its_content_and_its_rank_by_its_name(tmp_path: Path, name: str, rank: int | None) -> None:
    held = dump([call(1)], 2)
    path = tmp_path / name
    if name.endswith("json"):
        path.write_text(json.dumps(held))
    else:
        write(path, held)
    known = recognised(Head(path))
    assert known is not None
    assert (known[0], known[1][0].rank) == (flight_recorder.FORMAT, rank)


def test_a_cut_dump_gives_what_comes_before(tmp_path: Path) -> None:
    held = dump([call(n) for n in range(40)], 2)
    text = json.dumps(held)
    (tmp_path / "cut.json").write_text(text[: text.index('"record_id": 20')])
    reading = flight_recorder.read(tmp_path / "cut.json")
    assert len(reading.tables["recorder_calls"]) == 20
    assert "its end is missing" in reading.warnings[0]
    data = write(tmp_path / "whole", held).read_bytes()
    (tmp_path / "cut").write_bytes(data[: len(data) // 2])
    reading = flight_recorder.read(tmp_path / "cut")
    assert 5 < len(reading.tables["recorder_calls"]) < 40
    assert "its end is missing" in reading.warnings[0]


@pytest.mark.parametrize("held", [{"weights": 1}, {"entries": 3}, 5, None])
def test_another_pickle_is_one_line(tmp_path: Path, held: Any) -> None:
    with pytest.raises(DlprofError, match="no entries") as raised:
        read(tmp_path, held)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("text", ["", "{", '{"entries": [', "[" * 100_000, '{"entries": 7}', "nonsense"])
def test_broken_json_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(DlprofError):
        flight_recorder.read(tmp_path / "x.json")


def test_values_of_other_types_are_passed_over(tmp_path: Path) -> None:
    odd = call(1, state=3, retired="x", process_group=7, input_sizes="x", input_dtypes=3, frames={}, timeout_ms=[])
    held = dump([None, 4, {"profiling_name": 4}, odd], 2)  # type: ignore[list-item]
    held["pg_config"] = {"0": {"ranks": "[0, __import__('os')]"}, 3: 4, "1": {"ranks": [True, -1, "x", 2]}}
    held["pg_status"] = [1]
    reading = read(tmp_path, held)
    (row,) = reading.tables["recorder_calls"].to_dict("records")
    assert (row["state"], row["retired"], row["group"], row["input"], row["timeout_ms"]) == (
        "scheduled",
        -1,
        "0",
        "",
        -1,
    )
    assert reading.facts["recorder"]["groups"] == {"1": [2]}
    assert "3 malformed" in reading.warnings[0]


def test_too_many_entries_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flight_recorder, "MOST_ENTRIES", 3)
    reading = read(tmp_path, dump([call(n) for n in range(5)], 2))
    assert len(reading.tables["recorder_calls"]) == 3
    assert "--no-limits" in reading.warnings[0]


def test_no_entries_are_a_table_without_rows(tmp_path: Path) -> None:
    assert len(read(tmp_path, dump([], 2)).tables["recorder_calls"]) == 0


def test_real_dumps_of_gloo() -> None:
    folder = GOLDEN / "flight_recorder"
    one, other = (flight_recorder.read(folder / f"nccl_trace_rank_{rank}").tables["recorder_calls"] for rank in (0, 2))
    assert (len(one), len(other)) == (11, 10)
    assert one.iloc[-1][["op", "sequence", "retired", "state", "input", "site"]].tolist() == [
        *("all_reduce", 6, 0, "scheduled", "77", "<module> (/home/u/train.py:36)"),
    ]
    again = flight_recorder.read(folder / "nccl_trace_rank_2.json").tables["recorder_calls"]
    kept = [c for c in other if c not in ("site", "via")]  # JSON has no stacks
    assert again[kept].equals(other[kept])
