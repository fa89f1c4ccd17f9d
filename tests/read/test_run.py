"""What is on disk becomes a run, or one clear line; never a traceback, whatever the files hold."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from dlprof.analysis.engine import RankData
from dlprof.cli import cli
from dlprof.errors import DlprofError
from dlprof.read import facts
from dlprof.read.run import FORMAT, TRACE, Rank, open_run
from tests.fixtures import jobs, runs, traces


def report(path: Path, out: Path, *more: str) -> Result:
    """Run `dlprof report --format json` in this process, on one core."""
    return CliRunner().invoke(
        cli, ["report", str(path), "-o", str(out), "--format", "json", "--quiet", "--jobs", "1", *more]
    )


def refused(path: Path, out: Path) -> str:
    """Return the one line with which a report of the path is refused."""
    done = report(path, out)
    assert isinstance(done.exception, SystemExit), done.exception
    assert (done.exit_code, done.stdout) == (1, "")
    assert not out.exists()
    (line,) = done.stderr.splitlines()
    assert line.startswith("dlprof: ")
    return line


def answered(path: Path, out: Path) -> dict[str, Any]:
    """Return the result of a report that must succeed, all rules answered."""
    done = report(path, out)
    assert done.exit_code == 0, (done.exception, done.stderr)
    result: dict[str, Any] = json.loads(done.stdout)
    assert [o for o in result["outcomes"] if o["state"] == "error"] == []
    assert (out / "report.html").stat().st_size > 10_000
    return result


def warned(path: Path, out: Path) -> str:
    """Return the warnings of a report that must succeed, joined."""
    return "\n".join(answered(path, out)["run"]["warnings"])


def light(number: int, **changes: Any) -> str:
    """Return one line of the step log: a step of 1 ms, 0.2 ms of it waiting for data."""
    row = {
        "step": number,
        "kind": "train",
        "start_ns": traces.BASE_NS + number * 1_000_000,
        "dur_ns": 1_000_000,
        "fetch_ns": 200_000,
        "forward_ns": 100_000,
        "backward_ns": 100_000,
        "optimizer_ns": 100_000,
        "fetches": 1,
        "backwards": 1,
        "optimizer_steps": 1,
        "profiled": 0,
        "first": 0,
    }
    return json.dumps(row | changes) + "\n"


STEPS = "".join(light(n) for n in range(30))
RUN: dict[str, Any] = {
    "format": 1,
    "command": ["python", "train.py"],
    "hosts": ["node-1"],
    "end_ns": 5,
    "exit": {"code": 0, "signal": None},
    "warnings": [],
}


def recorded(
    folder: Path, info: Any = RUN, told: Any = None, steps: str | None = STEPS, ranks: int = 1, trace: bool = True
) -> Path:
    """Make a run folder as the recorder leaves it; text and bytes as they stand, anything else as JSON."""

    def put(path: Path, content: Any) -> None:
        if content is not None:
            data = content if isinstance(content, (str, bytes)) else json.dumps(content)
            path.write_bytes(data.encode() if isinstance(data, str) else data)

    folder.mkdir()
    put(folder / "run.json", info)
    for r in range(ranks):
        place = folder / "ranks" / f"{r:05d}"
        place.mkdir(parents=True)
        put(place / "facts.json", told if told is not None else {"rank": r, "world_size": ranks, "warnings": []})
        put(place / "steps.jsonl", steps)
        if trace:
            traces.write(place / "trace.json.gz", traces.training(rank=r, world_size=ranks))
    return folder


# What is no trace at all.


def test_a_path_that_does_not_exist(tmp_path: Path) -> None:
    assert "no such file or folder" in refused(tmp_path / "nothing", tmp_path / "out")


def test_an_empty_folder_and_one_without_traces(tmp_path: Path) -> None:
    empty, other = tmp_path / "empty", tmp_path / "other"
    empty.mkdir()
    assert "it is empty" in refused(empty, tmp_path / "out")
    traces.write(other / "settings.json", b'{"lr": 0.1}')
    traces.write(other / "notes.txt", b"nothing")
    assert "looked into 2 files" in refused(other, tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("random.json", bytes(range(256)) * 50),
        ("words.json", b"hello world"),
        ("settings.json", b'{"lr": 0.1}'),
        ("numbers.json", b"[1, 2, 3]"),
        ("number.json", b"42"),
        ("nothing.json", b""),
        ("deep.json", b"[" * 200_000),
        ("null.json", b'{"traceEvents": null}'),
        ("text.json", b'{"schemaVersion": 1, "traceEvents": "none"}'),
        ("damaged.json.gz", b"\x1f\x8b\x08\x00 this is not what gzip writes"),
        ("plain.json.gz", b'{"traceEvents": []}'),
    ],
)
def test_a_file_that_is_no_trace(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    assert name in refused(path, tmp_path / "out")


def test_a_file_of_a_run_is_not_taken_for_a_trace(tmp_path: Path) -> None:
    folder = recorded(tmp_path / "run")
    assert "give its folder" in refused(folder / "run.json", tmp_path / "out")


def test_neither_a_file_nor_a_folder(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "neither a file nor a folder" in refused(tmp_path / "pipe", tmp_path / "out")


def test_a_folder_in_which_no_trace_can_be_read(tmp_path: Path) -> None:
    for r in range(2):
        whole = traces.write(tmp_path / "bad" / f"rank{r}.json", traces.training(rank=r))
        whole.write_bytes(whole.read_bytes().partition(b'"traceEvents"')[0])
    assert "none of 2 traces can be read" in refused(tmp_path / "bad", tmp_path / "out")


# What is a trace in part.


@pytest.mark.parametrize("share", [0.3, 0.6, 0.99])
@pytest.mark.parametrize("name", ["rank0.json", "rank0.json.gz"])
def test_a_cut_trace_gives_what_stands_before_the_cut(tmp_path: Path, name: str, share: float) -> None:
    whole = traces.write(tmp_path / "whole" / name, traces.training(30)).read_bytes()
    path = traces.write(tmp_path / "cut" / "rank0.json", whole[: int(share * len(whole))])
    assert "cut off" in warned(path, tmp_path / "out")


def test_a_trace_without_events(tmp_path: Path) -> None:
    path = traces.write(tmp_path / "rank0.json", traces.trace())
    result = answered(path, tmp_path / "out")
    assert any("holds no spans" in w for w in result["run"]["warnings"])
    assert (result["window"], result["time"], result["device"]) == (None, [], [])
    assert {o["state"] for o in result["outcomes"]} == {"not_measured", "does_not_apply"}


@pytest.mark.parametrize("dur", [-5, 1e300])
def test_absurd_durations_are_left_out(tmp_path: Path, dur: float) -> None:
    made = traces.training()
    for one in made["traceEvents"][::3]:
        one["dur"] = dur
    assert "17 events with a negative or absurd duration" in warned(
        traces.write(tmp_path / "rank0.json", made), tmp_path / "out"
    )


@pytest.mark.parametrize(("field", "value"), [("dur", 0), ("dur", 9e12), ("ts", 9e18), ("ts", -9e15), ("ts", "soon")])
def test_odd_times_do_no_harm(tmp_path: Path, field: str, value: Any) -> None:
    made = traces.training()
    for one in made["traceEvents"][1::2]:
        one[field] = value
    result = answered(traces.write(tmp_path / "rank0.json", made), tmp_path / "out")
    for part in result["time"]:
        assert part["ns"] >= 0


def test_a_rank_that_is_there_twice_is_read_once(tmp_path: Path) -> None:
    for n in range(2):
        traces.write(tmp_path / "twice" / f"part{n}.json", traces.training(rank=1, world_size=2))
    run = open_run(tmp_path / "twice")
    assert [(r.index, r.files[TRACE].name) for r in run.ranks] == [(1, "part1.json")]
    assert "2 windows are there; read: 2" in warned(tmp_path / "twice", tmp_path / "out")


def test_seven_of_eight_ranks(tmp_path: Path) -> None:
    for r in (0, 1, 2, 3, 4, 5, 7):
        traces.write(tmp_path / "seven" / f"rank{r}.json", traces.training(rank=r, world_size=8))
    run = answered(tmp_path / "seven", tmp_path / "out")["run"]
    assert (run["world_size"], run["missing_ranks"]) == (8, [6])
    assert any("1 of 8 ranks is missing: 6" in w for w in run["warnings"])


def test_traces_without_a_rank_are_numbered_by_the_natural_order_of_their_names(tmp_path: Path) -> None:
    for n in (10, 9):
        traces.write(tmp_path / "some" / f"part-{n}-of-job.json", traces.training(rank=None))
    run = open_run(tmp_path / "some")
    assert [r.files[TRACE].name for r in run.ranks] == ["part-9-of-job.json", "part-10-of-job.json"]
    assert "numbered in the order of their names" in "\n".join(run.warnings)


def test_traces_below_folders_are_found_and_other_files_named(tmp_path: Path) -> None:
    traces.write(tmp_path / "log" / "plugins" / "profile" / "rank0.json.gz", traces.training())
    traces.write(tmp_path / "log" / "settings.json", b'{"lr": 0.1}')
    run = open_run(tmp_path / "log")
    assert [r.index for r in run.ranks] == [0]
    assert any("settings.json" in w for w in run.warnings)


@pytest.mark.parametrize(
    "said",
    [
        {"rank": 0, "world_size": -5},
        {"rank": 0, "world_size": 10**30},
        {"rank": -1, "world_size": 2},
        {"rank": 10**30, "world_size": 2},
        {"rank": "first", "world_size": [1], "pg_config": "none", "backend": 5},
        [0, 1],
        None,
    ],
)
def test_odd_words_about_the_job_do_no_harm(tmp_path: Path, said: Any) -> None:
    path = traces.write(tmp_path / "t.json", traces.training() | {"distributedInfo": said})
    run = answered(path, tmp_path / "out")["run"]
    assert (run["ranks"], run["world_size"] <= 2) == ([0], True)


# Names from anywhere.

NAMES = {
    "markup": "</script><script>alert(1)</script>",
    "escape": "\x1b[31mred\x07",
    "nul": "a\x00b",
    "long": "x" * 10_240,
    "right to left": "\u202egnp.exe",
    "half a character": "\ud800",
}


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_hostile_names_in_a_trace(tmp_path: Path, name: str) -> None:
    made = traces.training(host=name, device=name)
    for one in made["traceEvents"]:
        if one["cat"] in ("cpu_op", "kernel"):
            one["name"] = name
    path = traces.write(tmp_path / "rank0.json", made)
    answered(path, tmp_path / "out")


def test_hostile_names_on_a_terminal_that_knows_ascii_only(tmp_path: Path) -> None:
    made = traces.training(host=NAMES["half a character"], device="".join(NAMES.values()))
    path = traces.write(tmp_path / "rank0.json", made)
    command = [*jobs.DLPROF, "report", str(path), "-o", str(tmp_path / "out")]
    done = jobs.launch(command, tmp_path, env=jobs.environment(PYTHONIOENCODING="ascii", LC_ALL="C"))
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout


@pytest.mark.long
@pytest.mark.parametrize("name", [b"<script>alert(1)<", b"\x1b[31mred", b"\xff\xfe", "\u202eright".encode()])
def test_hostile_names_of_files(tmp_path: Path, name: bytes) -> None:
    folder = tmp_path / os.fsdecode(name)
    traces.write(folder / os.fsdecode(name + b".json"), traces.training())
    (folder / os.fsdecode(name + b"other.json")).write_text("{}")
    answered(folder / os.fsdecode(name + b".json"), tmp_path / "out")
    answered(folder, tmp_path / "out")
    assert "no such file" in refused(folder / "gone", tmp_path / "none")


# Where the report goes.


@pytest.mark.parametrize("out", ["file", "file/below", "/proc/nothing"])
def test_a_report_that_cannot_be_written_is_still_said(tmp_path: Path, out: str) -> None:
    (tmp_path / "file").write_text("in the way")
    done = report(traces.write(tmp_path / "rank0.json", traces.training()), tmp_path / out)
    assert done.exit_code == 1
    assert json.loads(done.stdout)["format"] == 2
    (line,) = done.stderr.splitlines()
    assert "cannot be written" in line
    assert "-o names another folder" in line


def test_foreign_traces_are_not_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = traces.write(tmp_path / "traces" / "rank0.json", traces.training())
    monkeypatch.chdir(tmp_path)
    for n in ("dlprof-report", "dlprof-report-2"):
        done = CliRunner().invoke(cli, ["report", str(path.parent)])
        assert done.exit_code == 0
        assert f"report: {n}/report.html" in done.stdout
    assert [p.name for p in path.parent.iterdir()] == ["rank0.json"]


# Run folders.


def test_a_whole_run(tmp_path: Path) -> None:
    run = open_run(recorded(tmp_path / "run", ranks=2))
    assert (run.command, run.hosts, run.exit) == (("python", "train.py"), ("node-1",), {"code": 0, "signal": None})
    assert [(r.index, TRACE in r.files, "steps" in r.files) for r in run.ranks] == [
        (0, True, True),
        (1, True, True),
    ]
    assert (run.recorded, run.warnings) == (True, ())
    result = answered(tmp_path / "run", tmp_path / "out")
    assert (result["window"]["source"], result["window"]["step_ns"]) == ("steps", 1e6)


@pytest.mark.parametrize("newer", [FORMAT + 1, "2", 1.5, True, None])
def test_a_newer_format_is_refused(tmp_path: Path, newer: Any) -> None:
    folder = recorded(tmp_path / "run", RUN | {"format": newer})
    assert f"has format {newer!r}" in refused(folder, tmp_path / "out")


def test_a_run_without_run_json(tmp_path: Path) -> None:
    assert "run.json is missing" in warned(recorded(tmp_path / "run", info=None), tmp_path / "out")


@pytest.mark.parametrize("content", ['{"for', "[]", "[" * 100_000, b'{"command": ["\xff"]}', "1" * 5000])
def test_a_broken_run_json(tmp_path: Path, content: str | bytes) -> None:
    assert "run.json is broken" in warned(recorded(tmp_path / "run", content), tmp_path / "out")


def test_a_run_json_with_facts_of_other_kinds(tmp_path: Path) -> None:
    odd = {"format": 1, "command": "ls -l", "hosts": {"a": 1}, "exit": {"code": {}, "signal": 1e400}, "warnings": 3}
    run = answered(recorded(tmp_path / "run", json.dumps(odd)), tmp_path / "out")["run"]
    assert (run["command"], run["exit"]) == ([], {"code": None, "signal": None})
    assert "command, hosts, exit.code, exit.signal, warnings" in "\n".join(run["warnings"])


def test_a_run_that_nobody_saw_end(tmp_path: Path) -> None:
    path = recorded(tmp_path / "run", RUN | {"end_ns": None}, steps=STEPS[:-40], trace=False)
    # Its files were written to just now.
    assert "the job still runs" in warned(path, tmp_path / "out")
    for file in path.glob("ranks/*/*"):
        os.utime(file, (1, 1))
    assert "the recording was cut off" in warned(path, tmp_path / "again")


def test_a_run_of_which_no_rank_left_a_record(tmp_path: Path) -> None:
    result = answered(recorded(tmp_path / "run", ranks=0), tmp_path / "out")
    assert "no rank left a record" in "\n".join(result["run"]["warnings"])
    assert result["run"]["ranks"] == []


def test_a_rank_whose_folder_is_empty(tmp_path: Path) -> None:
    folder = recorded(tmp_path / "run", ranks=2)
    for file in (folder / "ranks" / "00001").iterdir():
        file.unlink()
    result = answered(folder, tmp_path / "out")
    assert "rank 1: facts.json is missing" in result["run"]["warnings"]
    assert result["run"]["ranks"] == [0, 1]
    assert {p["rank"] for p in result["time"]} == {0}


@pytest.mark.parametrize("steps", ["", '{"step', "no\nstep\nat all\n", STEPS[:-40], STEPS + "{}\n" + STEPS])
@pytest.mark.parametrize("trace", [True, False])
def test_broken_steps(tmp_path: Path, steps: str, trace: bool) -> None:
    answered(recorded(tmp_path / "run", steps=steps, trace=trace), tmp_path / "out")


@pytest.mark.parametrize(
    "changes",
    [{"dur_ns": 0}, {"dur_ns": 2**62, "start_ns": 2**62}, {"kind": "odd"}, {"profiled": 1}, {"first": 1}, {"step": 0}],
)
def test_odd_steps(tmp_path: Path, changes: dict[str, Any]) -> None:
    steps = "".join(light(n, **changes) for n in range(20))
    answered(recorded(tmp_path / "run", steps=steps, trace=False), tmp_path / "out")


def test_many_ranks_with_one_warning_have_one_line(tmp_path: Path) -> None:
    run = open_run(recorded(tmp_path / "run", ranks=5, told={"warnings": ["no room left"]}, trace=False))
    assert run.warnings == ("5 ranks: no room left",)


def test_the_largest_rank_is_read_first(tmp_path: Path) -> None:
    for rank, kilobytes in {0: 10, 1: 30, 2: 2}.items():
        name = f"rank{rank}.json"
        traces.write(tmp_path / name, traces.dump(traces.training(rank=rank)) + b" " * (kilobytes << 10))
    run = open_run(tmp_path)
    packed = traces.write(tmp_path / "packed.json.gz", traces.training(rank=2))
    assert [rank.index for rank in run.largest_first] == [1, 0, 2]
    assert Rank(0, {"torch_trace": packed}).unpacked_bytes == 15 * packed.stat().st_size
    assert Rank(0, {"torch_trace": tmp_path / "none.json"}).unpacked_bytes == 0


def test_a_restarted_job_is_read_from_its_last_start(tmp_path: Path) -> None:
    folder = recorded(tmp_path / "run", ranks=3)
    (folder / "ranks" / "00000").rename(folder / "ranks" / "00000.r1")
    (folder / "ranks" / "00001").rename(folder / "ranks" / "00001.r1")
    (folder / "ranks" / "00000.4711").mkdir()
    run = open_run(folder)
    assert [r.index for r in run.ranks] == [0, 1]
    said = "\n".join(run.warnings)
    assert "restarted 1 ×" in said
    assert "rank 2 left nothing after the last restart" in said
    assert "00000.4711" in said


# facts.json.

FACTS = [*facts.RANK, "argv", "later"]


@pytest.mark.parametrize(
    "value",
    [
        "5",
        "-1",
        "true",
        "null",
        "1e400",
        '"text"',
        r'"\ud800"',
        "[]",
        "{}",
        "[1, 2]",
        "[[1]]",
        "[null]",
        '{"a": [1]}',
        '[{"a": 1}]',
        '[{"role": "train", "num_workers": "4", "batch_size": [], "prefetch_factor": {}, "parameters": "9"}]',
        '{"state": "waiting", "skip": "x", "name": [1], "type": [], "affinity": "x", "count": "x", "<b>": "</b>"}',
        "[" * 900 + "]" * 900,
    ],
)
def test_facts_of_other_kinds_than_expected(tmp_path: Path, value: str) -> None:
    told = "{" + ",".join(f'"{name}": {value}' for name in FACTS) + "}"
    for trace in (True, False):
        folder = recorded(tmp_path / f"run-{trace}", told=told, trace=trace)
        answered(folder, tmp_path / "out")


@pytest.mark.parametrize("content", ['{"rank": ', "[]", b"\xff\xfe{", "[" * 100_000])
def test_a_broken_facts_json_costs_only_the_facts(tmp_path: Path, content: str | bytes) -> None:
    result = answered(recorded(tmp_path / "run", told=content), tmp_path / "out")
    assert any("rank 0: facts.json is broken" in w for w in result["run"]["warnings"])
    assert result["window"]["steps"] > 10


def test_what_fits_is_kept_and_what_does_not_is_named(tmp_path: Path) -> None:
    told = {
        "world_size": 4,
        "host": None,
        "models": [{"parameters": "9"}, {"parameters": 3, "later": {"a": [1, 2.5]}}, 5],
        "env": {"OMP_NUM_THREADS": "1", "DEEP": [[[[1]]]]},
        "cpu": {"count": True, "affinity": 4},
    }
    (rank,) = open_run(recorded(tmp_path / "run", told=told)).ranks
    assert rank.facts == {
        "world_size": 4,
        "host": None,
        "models": [{}, {"parameters": 3, "later": {"a": [1, 2.5]}}],
        "env": {"OMP_NUM_THREADS": "1"},
        "cpu": {"affinity": 4},
    }
    (said,) = open_run(tmp_path / "run").warnings
    assert said.endswith("models[0].parameters, models[2], env.DEEP, cpu.count")


def test_a_path_may_be_text_and_errors_are_of_one_type(tmp_path: Path) -> None:
    assert open_run(str(recorded(tmp_path / "run"))).recorded
    with pytest.raises(DlprofError, match="no such file"):
        open_run(str(tmp_path / "nothing"))


def test_what_was_sampled_of_a_host_is_read_once(tmp_path: Path) -> None:
    """Three ranks on two hosts: each has its own processes, and only the first of a host has the host's."""
    for number, host in enumerate(["one", "one", "two"]):
        folder = tmp_path / "ranks" / f"{number:05d}"
        folder.mkdir(parents=True)
        (folder / "facts.json").write_text(json.dumps({"rank": number, "world_size": 3, "host": host}))
        (folder / "processes.jsonl").write_text(f'{{"at_ns":{number},"cpu_s":{number}}}\n')
    for host, share in (("one", 0.25), ("two", 0.75)):
        (tmp_path / "hosts" / host).mkdir(parents=True)
        (tmp_path / "hosts" / host / "host.jsonl").write_text(f'{{"at_ns":9,"cpu_share":{share}}}\n')
    (tmp_path / "run.json").write_text('{"format": 1}')
    told = []
    for rank in open_run(tmp_path).ranks:
        samples = RankData(rank).table("samples")
        told.append(dict(zip(samples["metric"], samples["value"], strict=True)))
    assert told == [{"cpu_share": 0.25, "cpu_s": 0.0}, {"cpu_s": 1.0}, {"cpu_share": 0.75, "cpu_s": 2.0}]


def test_machines_of_one_name_are_told_apart(tmp_path: Path) -> None:
    """Four ranks on two machines of one name, of which the second was the first to sample."""
    boots = {"aaaaaaaa-1": (0, 1), "bbbbbbbb-2": (2, 3)}
    for boot, numbers in boots.items():
        for number in numbers:
            folder = tmp_path / "ranks" / f"{number:05d}"
            folder.mkdir(parents=True)
            facts = {"rank": number, "world_size": 4, "host": "clone", "boot": boot}
            (folder / "facts.json").write_text(json.dumps(facts))
    for name, share in (("clone", 0.75), ("clone~aaaaaaaa", 0.25)):
        (tmp_path / "hosts" / name).mkdir(parents=True)
        (tmp_path / "hosts" / name / "host.jsonl").write_text(f'{{"at_ns":9,"cpu_share":{share}}}\n')
    (tmp_path / "hosts/clone/boot").write_text("bbbbbbbb-2")
    (tmp_path / "run.json").write_text('{"format": 1}')
    ranks = open_run(tmp_path).ranks
    assert [rank.facts["host"] for rank in ranks] == ["clone~aaaaaaaa"] * 2 + ["clone"] * 2
    sampled = {rank.index: RankData(rank) for rank in ranks if any("host" in str(path) for path in rank.files.values())}
    told = {
        number: data.table("samples")["value"].tolist()
        for number, data in sampled.items()
        if "samples" in data.tables and len(data.table("samples"))
    }
    assert told == {0: [0.25], 2: [0.75]}
    # Nothing was sampled, and each has left word of its interpreters: then the first rank's machine has the name.
    shutil.rmtree(tmp_path / "hosts")
    (tmp_path / "hosts/clone").mkdir(parents=True)
    (tmp_path / "hosts/clone/hello.jsonl").write_text("{}\n")
    assert [rank.facts["host"] for rank in open_run(tmp_path).ranks] == ["clone"] * 2 + ["clone~bbbbbbbb"] * 2


def test_what_samplers_had_to_say_is_among_the_warnings_with_their_hosts(tmp_path: Path) -> None:
    (tmp_path / "ranks").mkdir()
    for host, lines in (("one", "gpu is off\nfull\n"), ("two", "gpu is off\n"), ("odd", "\xff\n")):
        (tmp_path / "hosts" / host).mkdir(parents=True)
        (tmp_path / "hosts" / host / "warnings.txt").write_bytes(lines.encode("latin-1"))
    warnings = open_run(tmp_path).warnings
    assert "2 hosts: gpu is off" in warnings
    assert "one: full" in warnings


def test_a_rank_is_read_once_and_a_number_that_no_job_has_is_named(tmp_path: Path) -> None:
    run = runs.recorded(tmp_path / "run", (traces.training(world_size=1), [], runs.CPU))
    (run / "ranks/00001").symlink_to("00000")
    (run / "ranks/999999999").mkdir()
    opened = open_run(run)
    assert [rank.index for rank in opened.ranks] == [0]
    assert any("00001 is the folder 00000 under another name" in w for w in opened.warnings)
    assert any("not read: 999999999" in w for w in opened.warnings)
