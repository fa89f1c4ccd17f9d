"""What is said of a run while it is written: read as it grows, whatever stands in its files."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from dlprof.errors import DlprofError
from dlprof.live.follow import FEW, Follower, Now, find, machine
from dlprof.record.launch.process import started
from tests.fixtures.followed import MS, begin, lines, rank, step, steps
from tests.fixtures.sampling import leave_word


def now(run: Path) -> Now:
    follower = Follower(run)
    follower.read()
    return follower.now()


def test_figures_are_those_of_the_step_log(tmp_path: Path) -> None:
    run = begin(tmp_path / "a")
    # The first of an epoch and one under the profiler are left out of both means.
    slow = {0: 900 * MS, 7: 500 * MS}
    rows = [step(n, n * 900 * MS, slow.get(n, 10 * MS), profiled=int(n == 7)) for n in range(60)]
    rows += [step(n, n * 900 * MS, 20 * MS) for n in range(60, 80)]
    rank(run, 0, rows)
    found = now(run)
    (one,) = found.ranks
    assert (found.step, one.step, found.rank_count, found.waited_for) == (79, 79, 1, None)
    assert found.step_s == pytest.approx(0.020)
    assert found.mean_s == pytest.approx((58 * 0.010 + 20 * 0.020) / 78)
    parts = {"fetch": 2, "lead": 0, "forward": 4, "backward": 8, "optimizer": 2, "rest": 4}
    assert one.parts_s == pytest.approx({part: ms / 1000 for part, ms in parts.items()})
    assert found.samples_per_s == pytest.approx(400)
    assert found.tokens_per_s is None


def test_a_line_may_stand_for_several_steps(tmp_path: Path) -> None:
    run = begin(tmp_path / "a")
    rank(run, 0, [*steps(4), step(4, time.time_ns(), 40 * MS, steps=10, samples=80, fetches=10)])
    follower = Follower(run)
    follower.read()
    (one,) = follower.ranks
    assert (one.step, one.by_kind()["train"]["steps"], one.by_kind()["train"]["samples"]) == (13, 14, 112)
    assert follower.now().step_s == pytest.approx((3 * 10 + 40) / 13 / 1000)


def test_a_step_that_is_written_twice_counts_once(tmp_path: Path) -> None:
    run = begin(tmp_path / "a")
    rows = steps(6)
    path = rank(run, 0, [*rows[:3], *(row | {"outstanding": 1} for row in rows[3:5])])
    follower = Follower(run)
    seen = []
    for more in ([], rows[3:4], rows[4:]):
        with path.open("a") as file:
            file.write(lines(more))
        follower.read()
        seen.append((follower.ranks[0].by_kind()["train"]["steps"], follower.ranks[0].step))
    assert seen == [(5, 4), (5, 4), (6, 5)]


def test_only_what_is_new_is_read_and_half_a_line_waits(tmp_path: Path) -> None:
    run = begin(tmp_path / "a")
    rows = steps(10)
    path, text = rank(run, 0, rows[:5]), lines(rows[5:])
    follower = Follower(run)
    counts = []
    for piece in ("", text[:100], text[100:130], text[130:]):
        with path.open("a") as file:
            file.write(piece)
        follower.read()
        counts.append(follower.ranks[0].by_kind()["train"]["steps"])
    assert counts[0] == 5
    assert counts[-1] == 10
    assert counts == sorted(counts)
    path.write_text(lines(steps(3)))  # another file
    follower.read()
    assert follower.ranks[0].by_kind()["train"]["steps"] == 3
    assert follower.now().warnings == ()


def test_of_a_long_log_the_first_look_reads_the_end(tmp_path: Path) -> None:
    run = begin(tmp_path / "a")
    loader = {"role": "train", "dataset_length": 80, "batch_size": 8}
    rank(run, 0, steps(4_000), {"loaders": [loader]})
    follower = Follower(run, most=1)
    follower.read()
    (one,) = follower.ranks
    assert 20 <= one.by_kind()["train"]["steps"] < 200
    assert (one.step, follower.now().epoch, follower.now().warnings) == (3_999, {}, ())


def test_a_restarted_rank_is_shown_in_its_last_life(tmp_path: Path) -> None:
    run = begin(tmp_path / "a")
    rank(run, 0, steps(30))
    rank(run, 0, steps(4), life=".r1")
    rank(run, 0, steps(9), life=".4711")  # of another process, which is not read
    (one,) = now(run).ranks
    assert (one.rank, one.restarts, one.step) == (0, 1, 3)


LOADER = {"role": "train", "dataset_length": 100, "batch_size": 8, "drop_last": False, "iterable": False}
EPOCHS: list[tuple[str, dict[str, Any], dict[str, Any], tuple[int, int, int] | None]] = [
    ("whole batches and the rest", {}, {}, (2, 4, 13)),
    ("without the rest", {"drop_last": True}, {}, (2, 4, 12)),
    ("shared out among ranks", {"replicas": 2}, {}, (2, 4, 7)),
    ("two batches in a step", {}, {"fetches": 2}, (2, 4, 7)),
    ("no length", {"dataset_length": None}, {}, None),
    ("a stream", {"iterable": True}, {}, None),
    ("batches of a sampler", {"batch_size": None}, {}, None),
    ("more steps than the loader has", {"dataset_length": 16}, {}, None),
    ("a hostile length", {"dataset_length": "9" * 50}, {}, None),
]


@pytest.mark.parametrize(("loader", "row", "place"), [case[1:] for case in EPOCHS], ids=[case[0] for case in EPOCHS])
def test_where_in_an_epoch(loader: dict[str, Any], row: dict[str, Any], place: Any, tmp_path: Path) -> None:
    run = begin(tmp_path / "a")
    rows = steps(10, **row)
    rows[6]["first"] = 1
    rank(run, 0, rows, {"loaders": [LOADER | loader, {"role": "validation", "dataset_length": 9, "batch_size": 1}]})
    found = now(run).epoch
    assert (tuple(found[name] for name in ("number", "step", "steps")) if found else None) == place
    if place:
        assert found["left_s"] == pytest.approx((place[2] - place[1]) * 0.010)


STATES = [
    ({}, 0.0, 10, "running"),
    ({}, 9.0, 10, "running"),
    ({}, 30.0, 10, "still"),
    ({}, 30.0, 4_000, "running"),  # its steps take so long
    ({"end_ns": 2 * 10**18, "exit": {"code": 3, "signal": None}}, 30.0, 10, "ended"),
]


@pytest.mark.parametrize(("about", "ago_s", "ms", "state"), STATES)
def test_what_state_a_run_is_in(about: dict[str, Any], ago_s: float, ms: int, state: str, tmp_path: Path) -> None:
    run = begin(tmp_path / "a", **about)
    assert now(run).state == ("starting" if state != "ended" else "ended")
    rank(run, 0, steps(5, ms * MS, ago_s=ago_s))
    rank(run, 1, steps(5, ms * MS, ago_s=ago_s + 100))
    found = now(run)
    assert found.state == state
    assert (found.still_s is None) == (state == "ended")
    assert found.exit == about.get("exit", {})


@pytest.mark.parametrize(("longer", "waited_for"), [(1.0, None), (1.05, None), (1.5, 2)])
def test_who_is_waited_for(longer: float, waited_for: int | None, tmp_path: Path) -> None:
    run = begin(tmp_path / "a")
    for number in range(4):
        own = int(3 * MS * (longer if number == 2 else 1))
        rank(run, number, steps(9, 10 * MS, fetch_ns=own, forward_ns=0))
    assert now(run).waited_for == waited_for


def test_many_ranks_are_those_with_the_most_own_time_and_a_count(tmp_path: Path) -> None:
    run = begin(tmp_path / "a")
    for number in range(200):
        rank(run, number, steps(3, 10 * MS, lead_ns=MS * 6 if number in (70, 199) else 0))
    found = now(run)
    assert (found.rank_count, len(found.ranks)) == (200, FEW)
    assert {70, 199} <= {one.rank for one in found.ranks}
    assert found.waited_for in (70, 199)


HOSTILE = {
    "cut off": lines(steps(3)) + '{"step":3,"kind":"tr',
    "nothing": "",
    "no lines": "x" * 100_000,
    "other JSON": '[1]\n"a"\nnull\n3\n{}\n' + "[" * 100_000 + "\n",
    "no numbers": '{"step":"a","start_ns":null,"dur_ns":[]}\n{"step":true,"start_ns":1,"dur_ns":1}\n',
    "huge numbers": '{"step":1e400,"start_ns":NaN,"dur_ns":-Infinity}\n{"step":' + "9" * 5_000 + "}\n",
    "huge counts": '{"step":1,"start_ns":1,"dur_ns":1,"steps":4000000000000000000,"samples":4e18,"fetch_ns":9e99}\n',
    "negative": '{"step":-1,"start_ns":-1,"dur_ns":-1}\n{"step":1,"start_ns":1,"dur_ns":1,"steps":0}\n',
    "odd kinds": '{"step":1,"start_ns":1,"dur_ns":0,"kind":{"a":1}}\n{"step":2,"start_ns":1,"dur_ns":0,"kind":[]}\n',
    "no text": "\x00\ud800\x1b[2J\n",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize(
    "name",
    ["steps.jsonl", "stalls.jsonl", "facts.json", "gpu.jsonl", "processes.jsonl", "memory.jsonl", "run.json", "host"],
)
def test_no_file_stops_it(name: str, text: str, tmp_path: Path) -> None:
    run = begin(tmp_path / "a")
    folder = rank(run, 0, steps(5)).parent
    (run / "hosts" / "h").mkdir(parents=True)
    path = {"run.json": run / name, "host": run / "hosts" / "h" / "host.jsonl"}.get(name, folder / name)
    path.write_bytes(text.encode(errors="surrogatepass"))
    json.dumps(now(run).__dict__, default=lambda one: getattr(one, "__dict__", str(one)))


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    run = begin(tmp_path / "a")
    folder = rank(run, 0, steps(5)).parent
    for name in ("stalls.jsonl", "gpu.jsonl", "processes.jsonl"):
        os.mkfifo(folder / name)
    (folder / "memory.jsonl").mkdir()
    (run / "ranks" / "00001").write_text("no folder")
    (run / "ranks" / "00002").symlink_to("00002")
    assert now(run).rank_count == 1


def test_figures_of_the_machine_are_the_last_ones(tmp_path: Path) -> None:
    run = begin(tmp_path / "a")
    folder = rank(run, 0, steps(5), {"host": "n1", "cpu": {"memory_limit_bytes": 8e9}}).parent
    used = [
        {"at_ns": n * 10**9, "cpu_s": 2.0 * n, "children_cpu_s": n, "rss_bytes": n, "children_rss_bytes": 5}
        for n in range(3)
    ]
    (folder / "processes.jsonl").write_text(lines(used))
    (folder / "gpu.jsonl").write_text(lines([{"busy_share": 0.2}, {"busy_share": 0.9, "memory_used_bytes": 7}]))
    found = now(run).ranks[0].machine
    assert (found["rss_bytes"], found["workers_rss_bytes"], found["cores"]) == (2, 5, pytest.approx(3.0))
    assert (found["gpu_busy_share"], found["gpu_memory_bytes"], found["host"]) == (0.9, 7, "n1")
    assert (found["memory_limit_bytes"], found["allocated_bytes"]) == (8e9, None)


def test_which_run_is_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DlprofError, match="no run in"):
        find(None)
    with pytest.raises(DlprofError, match="no such folder"):
        find(Path("nowhere"))
    begin(Path("runs/goes on"))
    later = time.time() + 100
    for number, name in enumerate(("over", "over later")):
        begin(Path("runs", name), end_ns=1)
        os.utime(Path("runs", name, "run.json"), (later + number, later + number))
    assert find(None) == Path("runs/goes on")
    (Path("runs/goes on/run.json")).write_text('{"end_ns": 1}')
    assert find(None) == find(Path("runs")) == Path("runs/over later")
    assert find(Path("runs/over")) == Path("runs/over")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DlprofError, match="no run of dlprof"):
        find(Path("empty"))


@pytest.mark.parametrize(
    ("host", "pid", "state"),
    [("", 111_111_111, "gone"), ("", None, "still"), ("another", 111_111_111, "still")],
)
def test_a_run_whose_ranks_have_ended_does_not_stand_still(
    host: str, pid: int | None, state: str, tmp_path: Path
) -> None:
    pid = pid or os.getpid()
    run = begin(tmp_path / "a")
    rank(run, 0, steps(5, ago_s=30.0))
    leave_word(run, "00000", pid, host=host, since=started(pid) or 12345)
    assert now(run).state == state


def test_a_rank_whose_logs_share_a_file_is_followed_by_its_steps_alone(tmp_path: Path) -> None:
    run = begin(tmp_path / "a")
    log = rank(run, 0, steps(9), {"host": "n1"})
    together = [f'{{"log":"steps",{line[1:]}' for line in log.read_text().splitlines()]
    path, host = log.with_name("records.jsonl"), run / "hosts" / "n1"
    host.mkdir(parents=True)
    stall = '{"log":"stalls","kind":"checkpoint","start_ns":1,"dur_ns":2,"step":0}'
    memory = '{"log":"memory","at_ns":1,"allocated_bytes":9}'
    # What was written last is longer than all that is read of the end at first.
    last = '{"log":"sources","files":"' + "x" * (1 << 20) + '"}'
    path.write_text("\n".join(['{"log":"steps"}', *together, stall, memory, last, '{"log":"steps"', ""]))
    (host / "samples.jsonl").write_text(
        '{"log":"boot","boot":"1"}\n{"log":"host","cpu_share":0.5}\n{"log":"gpu","rank":"00000","busy_share":0.25}\n'
        '{"log":"gpu","rank":"00001","busy_share":0.75}\n'
    )
    log.unlink()
    follower = Follower(run, most=1)
    follower.read()
    (one,) = follower.ranks
    assert (one.step, one.broken + one.log.broken) == (8, 0)
    assert machine(one)["gpu_busy_share"] == 0.25
    found = now(run)
    assert [stall["kind"] for stall in found.stalls] == ["checkpoint"]
    assert [of_host["cpu_share"] for of_host in found.hosts] == [0.5]
    assert machine(one)["allocated_bytes"] is None  # it stands before the end of the file that is looked at
