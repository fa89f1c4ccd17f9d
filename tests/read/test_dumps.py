"""Dumps of torch, read as plain data: nothing in them is run, and what is cut off is read up to the cut."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import pickle
import random
from pathlib import Path
from typing import Any

import pytest

from dlprof.errors import DlprofError
from dlprof.read.dumps import flight_recorder, memory_snapshot, pickles
from dlprof.read.dumps.pickles import NotPlain, Site, Sites, load, site_of
from dlprof.read.formats import Head, recognised
from dlprof.read.limits import NO_LIMITS
from tests.fixtures import dumps, traces
from tests.fixtures.dumps import BACKWARD, FORWARD, MB, OPEN, call, dump, stack, write
from tests.fixtures.places import GOLDEN, SNAPSHOT

MADE = dumps.training().snapshot()
DATA = pickle.dumps(MADE)


class Hostile:
    """Makes a folder where it is read by Python."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


# Pickles.

REFERRED = ["one", "two", "three"]
VALUES: tuple[Any, ...] = (
    {"a": [1, 2.5, None, True, False, "ü", (), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)]},
    {1: -1, 255: 256, 65535: 65536, -(2**31): 2**31, 2**62: -(2**63), "x" * 300: "y"},
    [[], {}, [[]], [{}], {"k": [{}]}],
    [list(REFERRED) for _ in range(3)] + [REFERRED, REFERRED],
    [[list(range(2500))], ["n"] * 2500, [REFERRED[n % 3] for n in range(5000)]],
    {str(n): n for n in range(3000)},
    MADE,
)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_data_is_read_as_python_reads_it_and_nothing_is_called(tmp_path: Path, protocol: int) -> None:
    for value in VALUES:
        assert load(pickle.dumps(value, protocol)) == (value, False)
    binary = [b"x", b"y" * 300]
    if protocol > 2:
        assert load(pickle.dumps(binary, protocol)) == (binary, False)
    else:  # has them decoded by a function
        with pytest.raises(NotPlain):
            load(pickle.dumps(binary, protocol))
    data = pickle.dumps({"segments": [Hostile(tmp_path / "made")]}, protocol)
    with pytest.raises(NotPlain, match="more than plain data"):
        load(data)
    assert not (tmp_path / "made").exists()


BROKEN = (
    *(b"", b"garbage", b"\x80\x04.", b"\x80\x04e.", b"\x80\x04u.", b"\x80\x04Nh\x05.", b"\x80\x04K\x01K\x02."),
    *(b"\x80\x04]K\x01K\x02s.", b"\x80\x04K\x01K\x02a.", b"\x80\x04" + b"(" * 1000),
    b"\x80\x02Nr\xff\xff\xff\x7f.",  # would have Python reserve 16 GB
    b"\x80\x04}](K\x01eK\x01s.",  # a list as a key
    b"\x80\x04})\x85\x85\x85K\x01s.",  # a tuple as a key
    *(b"\x80\x04\x8a\xff" + b"\x01" * 255 + b".", b"\x80\x04cos\nsystem\n.", b"\x80\x04Pid\n.", b"\x80\x04\x82\x01."),
)


@pytest.mark.parametrize("data", BROKEN)
def test_hostile_and_broken_pickles_are_one_line(data: bytes) -> None:
    with pytest.raises(NotPlain) as raised:
        load(data)
    assert "\n" not in str(raised.value)


def test_random_bytes_never_do_more_than_fail_and_a_length_that_is_not_there_reserves_nothing() -> None:
    assert load(b"\x80\x04]\x8e\xff\xff\xff\xff\xff\xff\xff\x7f") == ([], True)
    chosen = random.Random(5)
    for _ in range(300):
        broken = bytearray(DATA)
        for _ in range(chosen.randint(1, 8)):
            broken[chosen.randrange(2, len(broken))] = chosen.randrange(256)
        with contextlib.suppress(NotPlain):
            load(bytes(broken))


def test_of_a_cut_pickle_what_comes_before_is_returned() -> None:
    seen = set()
    for cut in range(12, len(DATA)):  # behind the header
        held, missing = load(DATA[:cut])
        assert missing
        if isinstance(held, dict) and isinstance(held.get("device_traces"), list) and held["device_traces"]:
            events = held["device_traces"][0]
            assert sum(e in MADE["device_traces"][0] for e in events) >= len(events) - 1  # the last may be half
            assert held["segments"] == MADE["segments"]
            seen.add(len(events))
    assert seen == set(range(len(MADE["device_traces"][0]) + 1))


def test_packed_files_are_unpacked_within_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    path.write_bytes(gzip.compress(DATA))
    assert pickles.bytes_of(path) == (DATA, False)
    path.write_bytes(gzip.compress(DATA)[:-200])
    part, cut = pickles.bytes_of(path)
    assert (cut, DATA.startswith(part)) == (True, True)
    path.write_bytes(b"\x1f\x8bnonsense")
    with pytest.raises(DlprofError, match="gzip"):
        pickles.bytes_of(path)
    monkeypatch.setattr(pickles, "MOST_CONTAINERS", 10)
    monkeypatch.setattr(pickles, "MOST_WHOLE", 100)
    many = pickle.dumps([[n] for n in range(30)])
    with pytest.raises(NotPlain, match="more than 10"):
        load(many)
    for data in (b"x" * 101, gzip.compress(b"x" * 101)):
        path.write_bytes(data)
        with pytest.raises(DlprofError, match="--no-limits"):
            pickles.bytes_of(path)
    monkeypatch.setenv(NO_LIMITS, "1")
    assert (len(load(many)[0]), len(pickles.bytes_of(path)[0])) == (30, 101)


# Whose line a stack is of.

TORCH = ("forward", "/env/lib/python3.11/site-packages/torch/nn/modules/linear.py", 125)
LIBRARY = ("forward", "/env/lib/python3.11/site-packages/transformers/models/llama.py", 300)
NO_STACKS: list[Any] = [None, "x", 3, {}, [], [None], [{"name": 3}], [[[]]]]
LINEAR, LLAMA = (f"{name} ({file}:{line})" for name, file, line in (TORCH, LIBRARY))
IN_C = stack(("run", "/home/me/a.py", 3), cpp=("at::empty_cuda", "THPVariable_empty"))
IN_C.insert(2, {"name": "type_call", "filename": "/usr/local/src/Objects/typeobject.c", "line": 1679})


@pytest.mark.parametrize(
    ("frames", "line", "via"),
    [
        (FORWARD, "forward (/home/me/job/model.py:10)", LINEAR),
        (IN_C, "run (/home/me/a.py:3)", ""),
        # A library stands for itself before torch does.
        (stack(TORCH, LIBRARY), LLAMA, LINEAR),
        (stack(TORCH), LINEAR, LINEAR),
        # Without Python the backward's node is named.
        (BACKWARD, "backward of MulBackward0", ""),
        (stack(cpp=("torch::autograd::AccumulateGrad::apply(x)",)), "backward of AccumulateGrad", ""),
        (stack(cpp=("torch::autograd::Engine::thread_main()",)), "backward of some node", ""),
        (stack(cpp=("at::empty",)), "", ""),
        *((odd, "", "") for odd in NO_STACKS),
        ([{"name": "f", "filename": None, "line": 1}], "", ""),
    ],
)
def test_the_line_of_a_stack_is_the_innermost_of_the_users_own(frames: Any, line: str, via: str) -> None:
    assert site_of(frames) == Site(line, via)


def test_long_names_are_cut_and_each_stack_is_looked_at_once() -> None:
    assert len(site_of([{"name": "f" * 10_000, "filename": "/" + "a" * 10_000 + ".py", "line": "x"}]).line) < 700
    sites, frames = Sites(), list(FORWARD)
    first = sites.of(frames)
    frames.clear()
    assert sites.of(frames) is first


# The flight recorder.


def recorder(folder: Path, held: Any) -> Any:
    return flight_recorder.read(write(folder / "nccl_trace_rank_0", held, protocol=2))


def calls(reading: Any) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = reading.tables["recorder_calls"].to_dict("records")
    return rows


def test_entries_become_a_table_from_a_pickle_and_from_json(tmp_path: Path) -> None:
    waits = call(2, "broadcast", **OPEN, input_sizes=[[2, 3], []], input_dtypes=["Half"], process_group=("7", "tp"))
    held = dump([call(1), waits], 4)
    reading = recorder(tmp_path, held)
    first, second = calls(reading)
    began = traces.BASE_NS + 10**6
    for row, expected in (
        (
            first,
            {
                "group": "0",
                "about": "default_pg",
                "sequence": 1,
                "op": "all_reduce",
                "state": "completed",
                "retired": 1,
            },
        ),
        (first, {"created_ns": began, "completed_ns": began + 2000, "backend": "nccl"}),
        (first, {"site": "train (/home/me/job/train.py:28)"}),
        (second, {"group": "7", "about": "tp", "sequence": 2, "op": "broadcast", "state": "scheduled", "retired": 0}),
        (second, {"completed_ns": -1, "input": "2x3, scalar", "dtype": "Half → Float"}),
    ):
        assert {name: row[name] for name in expected} == expected
    assert reading.facts["world_size"] == 4
    assert reading.facts["recorder"] == {"version": "2.10", "groups": {"0": [0, 1, 2, 3]}, "enqueued": {}}
    (tmp_path / "d_1.json").write_text(json.dumps(held))
    as_json = flight_recorder.read(tmp_path / "d_1.json")
    assert (calls(as_json), as_json.facts) == (calls(reading), reading.facts)
    assert calls(recorder(tmp_path, dump([], 2))) == []


def test_last_collectives_old_versions_and_sends(tmp_path: Path) -> None:
    status = {"0": {"last_enqueued_collective": 9}, "1": {"last_enqueued_collective": 4}}
    reading = recorder(tmp_path, dump([call(1)], 2, pg_status=status))
    assert reading.facts["recorder"]["enqueued"] == {"0": 9}
    # An old version numbers all calls alike; sends have numbers of their own.
    newer = ("collective_seq_id", "p2p_seq_id", "retired", "is_p2p")
    old = {k: v for k, v in call(3).items() if k not in newer} | {"seq_id": 17}
    sent = call(5, "send 0->1", is_p2p=True, p2p_seq_id=2)
    found = calls(recorder(tmp_path, [old])) + calls(recorder(tmp_path, dump([sent], 2)))
    assert [(r["kind"], r["sequence"], r["op"], r["retired"]) for r in found] == [
        ("collective", 17, "all_reduce", -1),
        ("p2p", 2, "send 0->1", found[1]["retired"]),
    ]


@pytest.mark.parametrize(
    ("name", "rank"),
    [("nccl_trace_rank_3", 3), ("comm_lib_trace_rank_12", 12), ("fr_7", 7), ("dump_4.json", 4), ("any", None)],
)
def test_a_dump_is_known_by_its_content_and_its_rank_by_its_name(tmp_path: Path, name: str, rank: int | None) -> None:
    held = dump([call(1)], 2)
    if name.endswith("json"):
        (tmp_path / name).write_text(json.dumps(held))
    else:
        write(tmp_path / name, held)
    known = recognised(Head(tmp_path / name))
    assert known is not None
    assert (known[0], known[1][0].rank) == (flight_recorder.FORMAT, rank)


def test_a_cut_dump_gives_what_comes_before_and_a_long_one_what_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = dump([call(n) for n in range(40)], 2)
    text = json.dumps(held)
    (tmp_path / "cut.json").write_text(text[: text.index('"record_id": 20')])
    data = write(tmp_path / "whole", held).read_bytes()
    (tmp_path / "cut").write_bytes(data[: len(data) // 2])
    for name, least, most in (("cut.json", 20, 20), ("cut", 6, 39)):
        reading = flight_recorder.read(tmp_path / name)
        assert least <= len(calls(reading)) <= most
        assert "its end is missing" in reading.warnings[0]
    monkeypatch.setattr(flight_recorder, "MOST_ENTRIES", 3)
    reading = recorder(tmp_path, held)
    assert (len(calls(reading)), "--no-limits" in reading.warnings[0]) == (3, True)


@pytest.mark.parametrize("held", [{"weights": 1}, {"entries": 3}, 5, None])
def test_another_pickle_is_no_dump(tmp_path: Path, held: Any) -> None:
    with pytest.raises(DlprofError, match=r"^[^\n]*no entries[^\n]*$"):
        recorder(tmp_path, held)


@pytest.mark.parametrize("text", ["", "{", '{"entries": [', "[" * 100_000, '{"entries": 7}', "nonsense"])
def test_broken_json_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(DlprofError):
        flight_recorder.read(tmp_path / "x.json")


def test_values_of_other_types_in_a_dump_are_passed_over(tmp_path: Path) -> None:
    odd = call(1, state=3, retired="x", process_group=7, input_sizes="x", input_dtypes=3, frames={}, timeout_ms=[])
    held = dump([None, 4, {"profiling_name": 4}, odd], 2)  # type: ignore[list-item]
    held["pg_config"] = {"0": {"ranks": "[0, __import__('os')]"}, 3: 4, "1": {"ranks": [True, -1, "x", 2]}}
    held["pg_status"] = [1]
    reading = recorder(tmp_path, held)
    (row,) = calls(reading)
    found = [row[name] for name in ("state", "retired", "group", "input", "timeout_ms")]
    assert found == ["scheduled", -1, "0", "", -1]
    assert reading.facts["recorder"]["groups"] == {"1": [2]}
    assert "3 malformed" in reading.warnings[0]


def test_real_dumps_of_gloo() -> None:
    folder = GOLDEN / "flight_recorder"
    first, third = (
        flight_recorder.read(folder / f"nccl_trace_rank_{rank}").tables["recorder_calls"] for rank in (0, 2)
    )
    assert (len(first), len(third)) == (11, 10)
    assert first.iloc[-1][["op", "sequence", "retired", "state", "input", "site"]].tolist() == [
        *("all_reduce", 6, 0, "scheduled", "77", "<module> (/home/u/train.py:36)")
    ]
    again = flight_recorder.read(folder / "nccl_trace_rank_2.json").tables["recorder_calls"]
    kept = [c for c in third if c not in ("site", "via")]  # JSON has no stacks
    assert again[kept].equals(third[kept])


# Memory snapshots.


def snapshot(folder: Path, held: Any) -> Any:
    return memory_snapshot.read(write(folder / "s.pickle", held))


def test_events_and_blocks_of_any_version_become_tables(tmp_path: Path) -> None:
    reading = snapshot(tmp_path, MADE)
    events, blocks = reading.tables["memory_events"], reading.tables["memory_blocks"]
    counts = {"alloc": 6, "free_completed": 4, "free_requested": 4, "segment_alloc": 2}
    assert events["action"].value_counts().to_dict() == counts
    first = events[events["action"] == "alloc"].iloc[0]
    assert (first["bytes"], first["site"]) == (8 * MB, "forward (/home/me/job/model.py:10)")
    assert events["at_ns"].iloc[:2].tolist() == [traces.BASE_NS, traces.BASE_NS + 100_000]
    assert blocks["state"].value_counts().to_dict() == {"inactive": 3, "active_allocated": 2}
    assert blocks["bytes"].sum() == 40 * MB
    assert reading.facts == {"allocator": {"conf": "", "expandable": False}}
    assert (reading.warnings, dict(reading.lacks)) == ((), {})
    old = snapshot(tmp_path, dumps.training(timed=False, addressed=False).snapshot()).tables
    assert (old["memory_events"]["at_ns"] == -1).all()
    assert old["memory_blocks"].equals(blocks)
    for held in (MADE["segments"], {**MADE, "device_traces": [[]]}):
        reading = snapshot(tmp_path, held)
        assert list(reading.tables) == ["memory_blocks"]
        assert "_record_memory_history" in reading.lacks["memory_events"]


def test_a_snapshot_is_known_by_its_content_and_a_cut_one_gives_what_comes_before(tmp_path: Path) -> None:
    for name, held, rank in (("rank3_memory", MADE, 3), ("any", MADE["segments"], None)):
        known = recognised(Head(write(tmp_path / name, held)))
        assert known is not None
        assert (known[0], known[1][0].rank) == (memory_snapshot.FORMAT, rank)
    assert recognised(Head(write(tmp_path / "other", {"weights": [1, 2]}))) is None
    (tmp_path / "cut").write_bytes(DATA[: int(len(DATA) * 0.8)])
    reading = memory_snapshot.read(tmp_path / "cut")
    assert len(reading.tables["memory_blocks"]) == 5
    assert 3 < len(reading.tables["memory_events"]) < 16
    assert "its end is missing" in reading.warnings[0]


@pytest.mark.parametrize("held", [{"weights": 1}, [], {"segments": []}, {"segments": [Hostile(Path("x"))]}, 5, "x"])
def test_another_pickle_is_no_snapshot(tmp_path: Path, held: Any) -> None:
    with pytest.raises(DlprofError, match=r"^[^\n]*s\.pickle[^\n]*$"):
        snapshot(tmp_path, held)


def test_values_of_other_types_in_a_snapshot_are_passed_over(tmp_path: Path) -> None:
    odd: list[Any] = [None, 3, {"action": "alloc", "addr": "x", "size": 2**62 + 1, "frames": 7}]
    odd += [{"action": ["x"]}, {"action": "new"}]
    blocks = [None, {"size": "x"}, {"size": 512, "state": 4, "frames": "y"}]
    held = {"segments": [None, {"blocks": 3}, {"total_size": 512, "blocks": blocks}], "device_traces": [None, odd]}
    tables = snapshot(tmp_path, held).tables
    assert len(tables["memory_blocks"]) == 1
    assert tables["memory_events"][["device", "address", "bytes"]].to_numpy().tolist() == [[1, -1, 0]]


@pytest.mark.skipif(not SNAPSHOT.is_file(), reason="needs ../shared/traces/memory")
def test_a_real_snapshot() -> None:
    reading = memory_snapshot.read(SNAPSHOT)
    assert [len(reading.tables[name]) for name in ("memory_events", "memory_blocks")] == [11_300, 213]
    assert reading.warnings == ()
