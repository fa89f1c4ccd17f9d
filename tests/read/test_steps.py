"""The step log's lines, whole, cut off and odd."""

import json
from pathlib import Path
from typing import Any

import pytest

from dlprof import schema
from dlprof.errors import DlprofError
from dlprof.read import opening, steps


def line(number: int, **fields: Any) -> dict[str, Any]:
    made = {name: number + i for i, (name, dtype) in enumerate(schema.STEPS.items()) if dtype == "int64"}
    return made | {"step": number, "kind": "train", "start_ns": 1_735_632_360_000_000_001 + number * 1000} | fields


def write(path: Path, *lines: dict[str, Any] | str | bytes) -> Path:
    parts = [x if isinstance(x, bytes) else x.encode() if isinstance(x, str) else json.dumps(x).encode() for x in lines]
    path.write_bytes(b"\n".join(parts) + b"\n")
    return path


def test_every_column_is_read(tmp_path: Path) -> None:
    lines = [line(0, kind="validation", profiled=1), line(1), line(2, device_step_ns=-1)]
    reading = steps.read(write(tmp_path / "steps.jsonl", *lines))
    assert reading.tables["steps"].to_dict("records") == [{c: one[c] for c in schema.STEPS} for one in lines]
    assert reading.facts == {}
    assert reading.warnings == ()


def test_what_a_line_leaves_out_was_not_measured_and_unknown_keys_pass(tmp_path: Path) -> None:
    lean = {"dur_ns": 5, "step": 3, "start_ns": 7, "power_watts": 1.5}
    row = steps.read(write(tmp_path / "steps.jsonl", lean)).tables["steps"].iloc[0].to_dict()
    rest = {c: -1 for c in schema.STEPS if c not in lean}
    assert row == {"step": 3, "start_ns": 7, "dur_ns": 5} | rest | {"kind": "other"}


# It had the device's time from the first forward on as well, amid the fields that are still there.
OLD = (
    '{"step":7,"kind":"train","start_ns":1000,"dur_ns":100,"lead_ns":1,"fetch_ns":2,"forward_ns":3,"backward_ns":4,'
    '"optimizer_ns":5,"device_ns":%d,"device_step_ns":95,"fetches":6,"backwards":8,"optimizer_steps":9,'
    '"profiled":0,"first":1%s}'
)


@pytest.mark.parametrize("device_ns", [90, -1])
def test_a_line_of_an_older_dlprof_is_read(tmp_path: Path, device_ns: int) -> None:
    path = tmp_path / "steps.jsonl"
    row = {"step": 7, "kind": "train", "start_ns": 1000, "dur_ns": 100, "lead_ns": 1, "fetch_ns": 2, "forward_ns": 3}
    row |= {"backward_ns": 4, "optimizer_ns": 5, "device_step_ns": 95, "fetches": 6, "backwards": 8}
    row |= {"optimizer_steps": 9, "profiled": 0, "first": 1}
    # Which it did not count.
    row |= dict.fromkeys(("forwards", "unused_forward_ns", "samples", "inputs", "tokens"), -1)
    reading = steps.read(write(path, OLD % (device_ns, "")))
    assert reading.tables["steps"].to_dict("records") == [row]
    assert reading.warnings == ()
    frame = steps.read(write(path, OLD % (device_ns, ',"steps":3'))).tables["steps"]
    assert frame["step"].to_list() == [7, 8, 9]
    assert frame["device_step_ns"].sum() == 95


def test_steps_that_share_a_line_are_a_row_each_and_lose_nothing(tmp_path: Path) -> None:
    shared = line(5, start_ns=1000, dur_ns=100, fetch_ns=7, lead_ns=-1, device_step_ns=101, fetches=3, steps=3)
    shared["optimizer_steps"] = 1
    sums = {"dur_ns": 100, "fetch_ns": 7, "device_step_ns": 101, "fetches": 3, "optimizer_steps": 1}
    path = write(tmp_path / "steps.jsonl", line(4, start_ns=900, dur_ns=100), shared, line(8, start_ns=1100))
    frame = steps.read(path).tables["steps"]
    assert frame["step"].to_list() == [4, 5, 6, 7, 8]
    assert frame["start_ns"].to_list() == [900, 1000, 1033, 1066, 1100]
    three = frame.iloc[1:4]
    assert {name: int(three[name].sum()) for name in sums} == sums
    assert (three["start_ns"] + three["dur_ns"]).to_list() == [1033, 1066, 1100]
    assert three["fetches"].to_list() == [1, 1, 1]
    assert three["lead_ns"].to_list() == [-1, -1, -1]
    assert three["profiled"].to_list() == [shared["profiled"]] * 3


def test_a_cut_last_line_is_dropped_without_a_word_at_any_byte(tmp_path: Path) -> None:
    path = write(tmp_path / "steps.jsonl", line(0), line(1))
    data = path.read_bytes()
    first = data.index(b"\n") + 1
    for cut in range(first, len(data) - 1):
        path.write_bytes(data[:cut])
        reading = steps.read(path)
        assert reading.tables["steps"]["step"].to_list() == ([0, 1] if cut == len(data) - 1 else [0])
        assert reading.warnings == ()
    path.write_bytes(data[:-1])
    assert steps.read(path).tables["steps"]["step"].to_list() == [0, 1]


@pytest.mark.parametrize(
    "bad",
    ["{", "text", "[1]", b"\xff\xfe", '{"step": 1}', {"step": 1, "start_ns": -5, "dur_ns": 1}, line(1, dur_ns=1.5)],
)
def test_a_bad_line_in_the_middle_is_dropped_with_a_word(tmp_path: Path, bad: Any) -> None:
    reading = steps.read(write(tmp_path / "steps.jsonl", line(0), bad, line(2)))
    assert reading.tables["steps"]["step"].to_list() == [0, 2]
    assert reading.warnings == ("steps.jsonl: 1 malformed lines are left out",)


def test_rows_are_in_order_of_time(tmp_path: Path) -> None:
    reading = steps.read(write(tmp_path / "steps.jsonl", line(1), "", line(0), line(2)))
    assert reading.tables["steps"]["step"].to_list() == [0, 1, 2]


def test_a_file_of_many_blocks_is_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "_BATCH", 100)
    path = write(tmp_path / "steps.jsonl", *[line(i) for i in range(200)])
    assert steps.read(path).tables["steps"]["step"].to_list() == list(range(200))


def test_an_empty_file_is_an_empty_table_and_a_word(tmp_path: Path) -> None:
    for content in (b"", b'{"step": 1, "sta'):
        path = tmp_path / "steps.jsonl"
        path.write_bytes(content)
        reading = steps.read(path)
        assert len(reading.tables["steps"]) == 0
        assert reading.warnings == ("steps.jsonl: holds no steps",)


def test_what_is_no_log_of_steps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DlprofError, match="none of its lines"):
        steps.read(write(tmp_path / "steps.jsonl", "a", "b", "c"))
    with pytest.raises(DlprofError, match="no such file"):
        steps.read(tmp_path / "none.jsonl")
    with pytest.raises(DlprofError, match="a folder"):
        steps.read(tmp_path)


def test_a_step_that_was_saved_before_its_device_time_was_known_counts_once(tmp_path: Path) -> None:
    def line(step: int, device: int, **more: int) -> str:
        return (
            json.dumps({"step": step, "start_ns": 100 * step, "dur_ns": 100, "device_step_ns": device, **more}) + "\n"
        )

    early = [line(step, -1, outstanding=1) for step in (1, 2)]
    log = tmp_path / "steps.jsonl"
    # The job hung there, and was killed.
    log.write_text("".join((line(0, 50), *early)))
    assert steps.read(log).tables["steps"]["device_step_ns"].tolist() == [50, -1, -1]
    # It went on: both were written again, and a third one hangs.
    log.write_text("".join((line(0, 50), *early, line(1, 51), line(2, 52), line(3, -1, outstanding=1))))
    assert steps.read(log).tables["steps"]["device_step_ns"].tolist() == [50, 51, 52, -1]
    # Short steps share a line.
    log.write_text("".join((line(0, 50), *early, line(1, 103, steps=2, dur_ns=200))))
    frame = steps.read(log).tables["steps"]
    assert (frame["step"].tolist(), frame["device_step_ns"].sum()) == ([0, 1, 2], 153)
