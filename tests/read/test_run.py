"""Files and folders become a run, or one clear line; never a traceback, and nothing from outside the folder."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import os
import shutil
import stat
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from dlprof.analysis.engine import RankData
from dlprof.cli import cli
from dlprof.commands.report import analyse
from dlprof.errors import DlprofError
from dlprof.read import facts, limits, mixture
from dlprof.read.formats import Head
from dlprof.read.kineto import torch_trace
from dlprof.read.mixture import (
    Window,
    described,
    gather,
    is_cut,
    named_process,
    one_file,
    whole,
    windows_of,
)
from dlprof.read.opening import Inside, open_file, unpacked
from dlprof.read.run import FORMAT, TRACE, Rank, of_one_job, open_run
from dlprof.units import listed
from tests.fixtures import dialects, dumps, jobs, runs, traces
from tests.fixtures.claims import add_facts


def report(path: Path, out: Path) -> Result:
    """Run `dlprof report --format json` in this process, on one core."""
    words = ["report", str(path), "-o", str(out), "--format", "json", "--quiet", "--jobs", "1"]
    return CliRunner().invoke(cli, words)


def refused(path: Path) -> str:
    """Return the one line with which a report of the path is refused."""
    out = path.parent / "refused"
    done = report(path, out)
    assert isinstance(done.exception, SystemExit), done.exception
    assert (done.exit_code, done.stdout, out.exists()) == (1, "", False)
    (line,) = done.stderr.splitlines()
    assert line.startswith("dlprof: ")
    return line


def answered(path: Path) -> tuple[dict[str, Any], str]:
    """Return the result of a report that must succeed, all rules answered, and its warnings."""
    out = path.parent / "answered"
    done = report(path, out)
    assert done.exit_code == 0, (done.exception, done.stderr)
    result: dict[str, Any] = json.loads(done.stdout)
    assert [o for o in result["outcomes"] if o["state"] == "error"] == []
    assert (out / "report.html").stat().st_size > 10_000
    return result, "\n".join(result["run"]["warnings"])


def light(number: int, **changes: Any) -> str:
    """Return one line of the step log: a step of 1 ms, 0.2 ms of it waiting for data."""
    at = traces.BASE_NS + number * 1_000_000
    row = {"step": number, "kind": "train", "start_ns": at, "dur_ns": 1_000_000, "fetch_ns": 200_000, "fetches": 1}
    row |= {"forward_ns": 100_000, "backward_ns": 100_000, "optimizer_ns": 100_000, "backwards": 1}
    return json.dumps(row | {"optimizer_steps": 1, "profiled": 0, "first": 0} | changes) + "\n"


STEPS = "".join(light(n) for n in range(30))
RUN: dict[str, Any] = {"format": 1, "command": ["python", "train.py"], "hosts": ["node-1"], "end_ns": 5, "warnings": []}
RUN |= {"exit": {"code": 0, "signal": None}}


def put(path: Path, content: Any) -> None:
    """Write text and bytes as they are, anything else as JSON; None is no file."""
    if content is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        data = content if isinstance(content, (str, bytes)) else json.dumps(content)
        path.write_bytes(data.encode() if isinstance(data, str) else data)


def recorded(folder: Path, info: Any = RUN, ranks: int = 1, traced: int | None = None, **files: Any) -> Path:
    """Make a run folder as the recorder leaves it; `facts` and `steps` are of all ranks, or a tuple of one each.

    `traced`: how many of the ranks have a trace; None: all.
    """
    put(folder / "run.json", info)
    folder.mkdir(exist_ok=True)
    for r in range(ranks):
        place = folder / "ranks" / f"{r:05d}"
        usual = {"facts": {"rank": r, "world_size": ranks, "warnings": []}, "steps": STEPS} | files
        for name, file in (("facts", "facts.json"), ("steps", "steps.jsonl")):
            put(place / file, usual[name][r] if isinstance(usual[name], tuple) else usual[name])
        if traced is None or r < traced:
            traces.write(place / "trace.json.gz", traces.training(rank=r, world_size=ranks))
    return folder


def indices(path: Path) -> list[int]:
    return [rank.index for rank in open_run(path).ranks]


# What is no trace at all.


def test_what_holds_nothing_to_read_is_refused_in_one_line(tmp_path: Path) -> None:
    no_traces = (bytes(range(256)) * 50, b"", b"[" * 200_000, b"\x1f\x8b\x08\x00 this is not what gzip writes")
    for n, content in enumerate(no_traces):  # the tests of the reader have more
        (tmp_path / f"file{n}.json").write_bytes(content)
        assert f"file{n}.json" in refused(tmp_path / f"file{n}.json")
    assert "no such file or folder" in refused(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    assert "it is empty" in refused(tmp_path / "empty")
    put(tmp_path / "other" / "settings.json", {"lr": 0.1})
    put(tmp_path / "other" / "et.json", dialects.execution_trace())
    assert "looked into 2 files; execution trace" in refused(tmp_path / "other")
    os.mkfifo(tmp_path / "pipe")
    assert "neither a file nor a folder" in refused(tmp_path / "pipe")
    assert "give its folder" in refused(recorded(tmp_path / "run") / "run.json")
    for r in range(2):
        data = traces.dump(traces.training(rank=r)).partition(b'"traceEvents"')[0]
        traces.write(tmp_path / "bad" / f"rank{r}.json", data)
    assert "none of 2 traces can be read" in refused(tmp_path / "bad")
    put(tmp_path / "notes", "some words\n")
    assert "dlprof explain sources" in refused(tmp_path / "notes")
    put(tmp_path / "half.json", '{"schemaVersion": 1')
    assert one_file(tmp_path / "half.json").files[0][TRACE].name == "half.json"


# Traces, whole, cut and odd. Several ranks each have a fault of their own, and one report reads them all.


def test_cut_traces_give_what_comes_before_the_cut(tmp_path: Path) -> None:
    for n, (name, share) in enumerate(((".json", 0.3), (".json", 0.99), (".json.gz", 0.6))):
        data = traces.write(tmp_path / f"whole{name}", traces.training(10, rank=n, world_size=3)).read_bytes()
        traces.write(tmp_path / "cut" / f"rank{n}.json", data[: int(share * len(data))])
    result, warnings = answered(tmp_path / "cut")
    assert result["run"]["ranks"] == [0, 1, 2]
    assert warnings.count("cut off") == 3


def test_odd_times_and_durations_do_no_harm(tmp_path: Path) -> None:
    odd: dict[str, tuple[Any, ...]] = {"dur": (-5, 1e300, 0, 9e12), "ts": (9e18, -9e15, "soon")}
    for rank, (field, values) in enumerate(odd.items()):
        made = traces.training(rank=rank, world_size=2)
        for n, one in enumerate(made["traceEvents"][::3]):
            one[field] = values[n % len(values)]
        traces.write(tmp_path / "job" / f"rank{rank}.json", made)
    result, warnings = answered(tmp_path / "job")
    assert all(part["ns"] >= 0 for part in result["time"])
    assert "9 events with a negative or absurd duration" in warnings
    assert "events without a usable time" in warnings


def test_a_trace_without_events_has_no_figures(tmp_path: Path) -> None:
    result, warnings = answered(traces.write(tmp_path / "rank0.json", traces.trace()))
    assert "holds no spans" in warnings
    assert (result["window"], result["time"], result["device"]) == (None, [], [])
    assert {o["state"] for o in result["outcomes"]} == {"not_measured", "does_not_apply"}


def test_odd_words_about_the_job_do_no_harm(tmp_path: Path) -> None:
    odd = {"rank": "first", "world_size": [1], "pg_config": "none", "backend": 5}
    many = 10**30
    for said in (odd, {"rank": 0, "world_size": -5}, {"rank": -1, "world_size": many}, {"rank": many}, [0, 1], None):
        path = traces.write(tmp_path / "t.json", traces.training() | {"distributedInfo": said})
        assert [rank.index for rank in open_run(path).ranks] == [0]
        assert {"rank", "world_size", "backend"} & torch_trace.read(path).facts.keys() <= {"rank"}
    path = traces.write(tmp_path / "t.json", traces.training() | {"distributedInfo": odd})
    result = analyse(path, 1)
    assert (result.run.ranks, result.run.world_size <= 2) == ((0,), True)
    assert not any(o.state == "error" for o in result.outcomes)


NAMES = ("</script><script>alert(1)</script>", "\x1b[31mred\x07", "a\x00b", "x" * 10_240, "\u202egnp.exe", "\ud800")


@pytest.mark.long
def test_hostile_names_in_traces_and_on_a_terminal_that_knows_ascii_only(tmp_path: Path) -> None:
    for rank, (host, device) in enumerate(zip(NAMES[::2], NAMES[1::2], strict=True)):
        made = traces.training(host=host, device=device, rank=rank, world_size=3)
        named = [one for one in made["traceEvents"] if one["cat"] in ("cpu_op", "kernel")]
        for n, one in enumerate(named):
            one["name"] = NAMES[n % len(NAMES)]
        traces.write(tmp_path / "job" / f"rank{rank}.json", made)
    answered(tmp_path / "job")
    made = traces.training(host="\ud800", device="".join(NAMES))
    command = [*jobs.DLPROF, "report", str(traces.write(tmp_path / "rank0.json", made)), "-o", str(tmp_path / "out")]
    done = jobs.launch(command, tmp_path, env=jobs.environment(PYTHONIOENCODING="ascii", LC_ALL="C"))
    assert (done.returncode, done.stderr, "\x1b" in done.stdout) == (0, "", False)


def test_hostile_names_of_files(tmp_path: Path) -> None:
    for n, name in enumerate((b"<script>alert(1)<", b"\x1b[31mred", b"\xff\xfe", "\u202eright".encode())):
        path = traces.write(
            tmp_path / "job" / os.fsdecode(name) / os.fsdecode(name + b".json"), traces.training(rank=n)
        )
        path.with_name(os.fsdecode(name + b"other.json")).write_text("{}")
        assert open_run(path).ranks
        assert "no such file" in refused(path.parent / "gone")
    assert answered(tmp_path / "job")[0]["run"]["ranks"] == [0, 1, 2, 3]


@pytest.mark.parametrize("out", ["file/below", "/proc/nothing"])
def test_a_report_that_cannot_be_written_is_still_printed(tmp_path: Path, out: str) -> None:
    (tmp_path / "file").write_text("in the way")
    done = report(traces.write(tmp_path / "rank0.json", traces.training()), tmp_path / out)
    assert (done.exit_code, json.loads(done.stdout)["format"]) == (1, 2)
    (line,) = done.stderr.splitlines()
    assert "cannot be written" in line
    assert "-o names another folder" in line


def test_foreign_traces_are_not_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = traces.write(tmp_path / "traces" / "rank0.json", traces.training())
    monkeypatch.chdir(tmp_path)
    for n in ("dlprof-report", "dlprof-report-2"):
        done = CliRunner().invoke(cli, ["report", str(path.parent)])
        assert (done.exit_code, f"report: {n}/report.html" in done.stdout) == (0, True)
    assert [p.name for p in path.parent.iterdir()] == ["rank0.json"]


# Which rank a trace is of.


@pytest.mark.parametrize(
    ("files", "ranks", "words"),
    [
        ([("part0.json", 1), ("part1.json", 1)], {1: "part1.json"}, "2 windows are there; read: 2"),
        (
            [(f"rank{r}.json", r) for r in range(2)],
            {r: f"rank{r}.json" for r in range(2)},
            "1 of 3 ranks is missing: 2",
        ),
        (
            [(f"part-{n}-of-job.json", None) for n in (10, 9)],
            {0: "part-9-of-job.json", 1: "part-10-of-job.json"},
            "numbered in the order of their names",
        ),
        (
            [("log/plugins/profile/rank0.json.gz", 0), ("log/settings.json", {"lr": 1})],
            {0: "rank0.json.gz"},
            "settings.json",
        ),
        # Files of a process are windows of one rank.
        (
            [(f"node_4711.{at}.pt.trace.json", None) for at in (1700000000000, 1700000009000)],
            {0: "node_4711.1700000009000.pt.trace.json"},
            "2 windows",
        ),
        # No job has such a rank, and nothing is made for each of a billion.
        ([("b.json", 10**9)], {0: "b.json"}, "b.json: says that it is of rank 1,000,000,000"),
        ([("b.json", 10**9), ("a.json", 1)], {1: "a.json"}, "b.json: says that it is of rank 1,000,000,000"),
    ],
)
def test_the_rank_of_each_trace(
    tmp_path: Path, files: list[tuple[str, Any]], ranks: dict[int, str], words: str
) -> None:
    for name, rank in files:
        of = {} if isinstance(rank, dict) else {"rank": rank, "world_size": 3 if "missing" in words else 2}
        put(tmp_path / name, rank if isinstance(rank, dict) else None)
        if of:
            traces.write(tmp_path / name, traces.training(**of))
    run = open_run(tmp_path)
    assert {r.index: r.files[TRACE].name for r in run.ranks} == ranks
    result = analyse(tmp_path, 1) if "missing" in words else None
    assert words in "\n".join(result.run.warnings if result else run.warnings)


def test_the_largest_rank_is_read_first(tmp_path: Path) -> None:
    for rank, kilobytes in {0: 10, 1: 30, 2: 2}.items():
        data = traces.dump(traces.training(rank=rank)) + b" " * (kilobytes << 10)
        traces.write(tmp_path / f"rank{rank}.json", data)
    run = open_run(str(tmp_path))
    packed = traces.write(tmp_path / "packed.json.gz", traces.training(rank=2))
    assert [rank.index for rank in run.largest_first] == [1, 0, 2]
    assert Rank(0, {"torch_trace": packed}).unpacked_bytes == 15 * packed.stat().st_size
    assert Rank(0, {"torch_trace": tmp_path / "none.json"}).unpacked_bytes == 0


# Run folders.


def test_a_whole_run(tmp_path: Path) -> None:
    run = open_run(recorded(tmp_path / "run", ranks=2))
    assert (run.command, run.hosts, run.exit) == (("python", "train.py"), ("node-1",), {"code": 0, "signal": None})
    assert [(r.index, {TRACE, "steps"} <= set(r.files)) for r in run.ranks] == [(0, True), (1, True)]
    assert (run.recorded, run.warnings) == (True, ())
    result, _ = answered(tmp_path / "run")
    assert (result["window"]["source"], result["window"]["step_ns"]) == ("steps", 1e6)


@pytest.mark.parametrize("newer", [FORMAT + 1, "2", 1.5, True, None])
def test_a_newer_format_is_refused(tmp_path: Path, newer: Any) -> None:
    with pytest.raises(DlprofError, match=f"has format {newer!r}"):
        open_run(recorded(tmp_path / "run", RUN | {"format": newer}, traced=0))


ODD_RUN = {"format": 1, "command": "ls -l", "hosts": {"a": 1}, "exit": {"code": {}, "signal": 1e400}, "warnings": 3}


@pytest.mark.parametrize(
    ("info", "words"),
    [
        (None, "run.json is missing"),
        *((bad, "run.json is broken") for bad in ('{"for', "[]", "[" * 100_000, b'{"command": ["\xff"]}', "1" * 5000)),
        (json.dumps(ODD_RUN), "command, hosts, exit.code, exit.signal, warnings"),
    ],
)
def test_a_run_json_that_is_missing_broken_or_odd(tmp_path: Path, info: Any, words: str) -> None:
    run = open_run(recorded(tmp_path / "run", info))
    assert words in "\n".join(run.warnings)
    assert (run.command, dict(run.exit or {}).get("code")) == ((), None)
    if info is None:
        assert words in answered(tmp_path / "run")[1]


def test_a_run_that_nobody_saw_end(tmp_path: Path) -> None:
    path = recorded(tmp_path / "run", RUN | {"end_ns": None}, steps=STEPS[:-40], traced=0)
    # Its files were written to just now.
    assert "the job still runs" in "\n".join(open_run(path).warnings)
    for file in path.glob("ranks/*/*"):
        os.utime(file, (1, 1))
    assert "the recording was cut off" in answered(path)[1]


def test_ranks_that_left_no_record_or_nothing_at_all(tmp_path: Path) -> None:
    result, warnings = answered(recorded(tmp_path / "none", ranks=0))
    assert ("no rank left a record" in warnings, result["run"]["ranks"]) == (True, [])
    folder = recorded(tmp_path / "run", ranks=2)
    for file in (folder / "ranks" / "00001").iterdir():
        file.unlink()
    result, warnings = answered(folder)
    assert "rank 1: facts.json is missing" in warnings
    assert (result["run"]["ranks"], {p["rank"] for p in result["time"]}) == ([0, 1], {0})
    run = open_run(recorded(tmp_path / "five", ranks=5, facts={"warnings": ["no space left"]}, traced=0))
    assert run.warnings == ("5 ranks: no space left",)


BROKEN_STEPS = ("", '{"step', "no\nstep\nat all\n", STEPS[:-40], STEPS + "{}\n" + STEPS)
ODD_STEPS = (
    {"dur_ns": 0},
    {"dur_ns": 2**62, "start_ns": 2**62},
    {"kind": "odd"},
    {"profiled": 1},
    {"first": 1},
    {"step": 0},
)


def test_broken_and_odd_steps_do_no_harm(tmp_path: Path) -> None:
    odd = tuple("".join(light(n, **changes) for n in range(20)) for changes in ODD_STEPS)
    broken = BROKEN_STEPS + odd
    answered(recorded(tmp_path / "run", ranks=len(broken), steps=broken, traced=4))


ODD_FACTS = [
    '[{"role": "train", "num_workers": "4", "batch_size": [], "prefetch_factor": {}, "parameters": "9"}]',
    '{"state": "waiting", "skip": "x", "name": [1], "type": [], "affinity": "x", "count": "x", "<b>": "</b>"}',
    *("5", "-1", "true", "null", "1e400", '"text"', r'"\ud800"', "[]", "{}", "[1, 2]", "[[1]]", "[null]", '{"a": [1]}'),
    *('[{"a": 1}]', "[" * 900 + "]" * 900),
]


def test_facts_of_other_kinds_than_expected_do_no_harm(tmp_path: Path) -> None:
    names = [*facts.RANK, "argv", "later"]
    odd = tuple("{" + ",".join(f'"{name}": {value}' for name in names) + "}" for value in ODD_FACTS)
    answered(recorded(tmp_path / "run", ranks=len(odd), facts=odd, traced=3))


def test_a_broken_facts_json_costs_only_the_facts(tmp_path: Path) -> None:
    broken = ('{"rank": ', "[]", b"\xff\xfe{", "[" * 100_000)
    result, warnings = answered(recorded(tmp_path / "run", ranks=4, facts=broken, traced=1))
    assert warnings.count("facts.json is broken") == 4
    assert (result["run"]["ranks"], result["window"]["steps"] > 10) == ([0, 1, 2, 3], True)


S = 10**9


def test_a_job_that_was_queued_again_knows_its_earlier_starts(tmp_path: Path) -> None:
    starts = [
        ("x-7", "SLURM job 7", 0, 60 * S, 0),
        ("x-7-1", "SLURM job 7 (restart 1)", 100 * S, None, None),
        ("x-7-2", "SLURM job 7 (restart 2)", 300 * S, 330 * S, 3),
        ("x-70", "SLURM job 70", 10 * S, 20 * S, 0),
    ]
    for name, batch, began, ended, code in starts:
        run = runs.recorded(tmp_path / name, (None, [], {}))
        add_facts(run, "run.json", batch=batch, start_ns=began + 1, end_ns=ended and ended + 1, exit={"code": code})
    said = {name: [w for w in open_run(tmp_path / name).warnings if "start" in w] for name, *_ in starts}
    assert said["x-7"] == said["x-70"] == []
    (second,), (third,) = said["x-7-1"], said["x-7-2"]
    before = "before this start of it, x-7 ran 60.0 s and ended with exit code 0"
    assert second == f"SLURM job 7 (restart 1): {before}; it was started again 40.0 s later"
    assert third == f"SLURM job 7 (restart 2): {before}, x-7-1 was cut off"


def test_a_restarted_job_is_read_from_its_last_start(tmp_path: Path) -> None:
    folder = recorded(tmp_path / "run", ranks=3)
    for rank in ("00000", "00001"):
        (folder / "ranks" / rank).rename(folder / "ranks" / f"{rank}.r1")
    (folder / "ranks" / "00000.4711").mkdir()
    run = open_run(folder)
    assert [r.index for r in run.ranks] == [0, 1]
    for words in ("restarted 1 ×", "rank 2 left nothing after the last restart", "00000.4711"):
        assert words in "\n".join(run.warnings)


def test_a_rank_is_read_once_and_folders_of_no_rank_are_named(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run")
    (run / "ranks/00001").symlink_to("00000")
    for name in ("999999999", "1" * 19, "٣", "²"):
        (run / "ranks" / name).mkdir()
    opened = open_run(run)
    assert [rank.index for rank in opened.ranks] == [0]
    assert any("00001 is the folder 00000 under another name" in w for w in opened.warnings)
    assert any("not read: " in w and "999999999" in w for w in opened.warnings)


def sampled(data: RankData) -> dict[str, float]:
    samples = data.table("samples")
    return dict(zip(samples["metric"], samples["value"], strict=True))


def test_samples_of_a_host_are_read_once_and_machines_of_one_name_are_told_apart(tmp_path: Path) -> None:
    one = tmp_path / "one"
    put(one / "run.json", {"format": 1})
    for number, host in enumerate(["one", "one", "two"]):
        put(one / f"ranks/{number:05d}/facts.json", {"rank": number, "world_size": 3, "host": host})
        put(one / f"ranks/{number:05d}/processes.jsonl", f'{{"at_ns":{number},"cpu_s":{number}}}\n')
    for host, share in (("one", 0.25), ("two", 0.75)):
        put(one / "hosts" / host / "host.jsonl", f'{{"at_ns":9,"cpu_share":{share}}}\n')
    found = [sampled(RankData(rank)) for rank in open_run(one).ranks]
    assert found == [{"cpu_share": 0.25, "cpu_s": 0.0}, {"cpu_s": 1.0}, {"cpu_share": 0.75, "cpu_s": 2.0}]
    # Four ranks on two machines of one name, of which the second was the first to sample.
    two = tmp_path / "two"
    put(two / "run.json", {"format": 1})
    for number, boot in enumerate(["aaaaaaaa-1"] * 2 + ["bbbbbbbb-2"] * 2):
        put(two / f"ranks/{number:05d}/facts.json", {"rank": number, "world_size": 4, "host": "clone", "boot": boot})
    for name, share in (("clone", 0.75), ("clone~aaaaaaaa", 0.25)):
        put(two / "hosts" / name / "host.jsonl", f'{{"at_ns":9,"cpu_share":{share}}}\n')
    put(two / "hosts/clone/boot", "bbbbbbbb-2")
    ranks = open_run(two).ranks
    assert [rank.facts["host"] for rank in ranks] == ["clone~aaaaaaaa"] * 2 + ["clone"] * 2
    with_host = [rank for rank in ranks if any("hosts" in path.parts for path in rank.files.values())]
    assert {rank.index: sampled(RankData(rank)) for rank in with_host if "host" in rank.files} == {
        0: {"cpu_share": 0.25},
        2: {"cpu_share": 0.75},
    }
    # Nothing was sampled: then the first rank's machine has the name.
    shutil.rmtree(two / "hosts")
    put(two / "hosts/clone/notes-aaaaaaaa.jsonl", "{}\n")
    assert [rank.facts["host"] for rank in open_run(two).ranks] == ["clone"] * 2 + ["clone~bbbbbbbb"] * 2


def test_warnings_of_samplers_are_among_those_of_the_run_with_their_hosts(tmp_path: Path) -> None:
    (tmp_path / "ranks").mkdir()
    for host, lines in (("one", "gpu is off\nfull\n"), ("two", "gpu is off\n"), ("odd", "\xff\n")):
        put(tmp_path / "hosts" / host / "warnings.txt", lines.encode("latin-1"))
    assert {"2 hosts: gpu is off", "one: full"} <= set(open_run(tmp_path).warnings)


# Ranks of two jobs in one folder.

HOUR = 3_600_000_000_000
GLOO: dict[str, Any] = {"backend": "gloo", "world_size": 4}


def at(began: int, ended: int | None = None, **more: Any) -> dict[str, Any]:
    return GLOO | {"clock": {"unix_ns": began}, "ended_ns": ended} | more


def of(name: str, value: str | None) -> dict[str, Any]:
    return GLOO | {"launch": {name: value}}


@pytest.mark.parametrize(
    ("first", "second", "why"),
    [
        (of("batch", "SLURM job 7"), of("batch", "SLURM job 8"), "batch"),
        (of("MASTER_PORT", "29500"), of("MASTER_PORT", "29501"), "MASTER_PORT"),
        (GLOO, GLOO | {"world_size": 8}, "the number of their ranks"),
        (at(0, HOUR), at(2 * HOUR), "when they ran"),
        (at(0, HOUR), at(2 * HOUR, 3 * HOUR), "when they ran"),
        # What is not known shows nothing.
        ({}, of("batch", "SLURM job 8"), ""),
        (of("batch", None), of("batch", "SLURM job 8"), ""),
        (at(0, HOUR), at(HOUR + 30_000_000_000), ""),  # hosts' clocks may be so far apart
        (at(0, None), at(2 * HOUR), ""),
        # Without a process group they come and go as they like.
        (at(0, HOUR, backend=None), at(2 * HOUR, backend=None, world_size=1), ""),
    ],
)
def test_ranks_of_two_jobs_are_not_read_together(first: dict[str, Any], second: dict[str, Any], why: str) -> None:
    words = f"the folder holds ranks of 2 jobs, which differ in {why}: read are ranks 0, 1, left out are 5"
    assert of_one_job({0: first, 1: first, 5: second}) == (({0, 1}, [words]) if why else ({0, 1, 5}, []))
    if why:  # of two as large, the later one
        assert of_one_job({2: second, 1: first})[0] == {2}


def test_a_folder_of_two_jobs_opens_with_one_warning(tmp_path: Path) -> None:
    put(tmp_path / "run.json", RUN)
    for rank in range(5):
        made = of("PMIX_NAMESPACE", "1" if rank < 3 else "2") | {"rank": rank, "warnings": [f"of {rank}"]}
        put(tmp_path / "ranks" / f"{rank:05d}" / "facts.json", made)
    run = open_run(tmp_path)
    assert [rank.index for rank in run.ranks] == [0, 1, 2]
    (words,) = (text for text in run.warnings if "2 jobs" in text)
    assert "read are ranks 0 to 2, left out are 3, 4" in words
    assert not any("of 3" in text for text in run.warnings)


# Folders of several kinds of files.

SMI = "timestamp, index, utilization.gpu [%]\n2026/03/04 05:06:07.250, 0, 87 %\n"


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Two windows of two ranks, and what else is in such folders."""
    folder = tmp_path / "job"
    for window in range(2):
        for rank in range(2):
            traces.write(folder / f"iteration_{window}" / f"rank{rank}.json.gz", traces.training(rank=rank))
    put(folder / "readings.txt", SMI)
    put(folder / "loss.png", b"\x89PNG\r\n\x1a\n")
    put(folder / "train.log", "step 1 loss 2\n")
    put(folder / "et.json", dialects.execution_trace())
    put(folder / "model.pt", b"PK\x03\x04 weights")
    put(folder / "timeline", dialects.horovod(ranks=2))
    traces.write(folder / ".dlprof" / "ranks" / "rank1.json", traces.training(rank=1))  # dlprof's own
    return folder


def test_a_mixture_is_one_run_and_every_file_is_accounted_for(mixed: Path) -> None:
    found = gather(mixed)
    assert {rank: sorted(files) for rank, files in found.files.items()} == {0: ["nvidia_smi", TRACE], 1: [TRACE]}
    assert {files[TRACE].parent.name for files in found.files.values()} == {"iteration_1"}
    taken = {one.path.relative_to(mixed).as_posix(): one for one in found.taken}
    assert len(taken) == sum(path.is_file() for path in mixed.rglob("*")) - 1
    assert taken["readings.txt"].ranks == (0,)
    for name, words in {
        "loss.png": "picture",
        "model.pt": "checkpoints",
        "train.log": "text",
        "iteration_0/rank1.json.gz": "window 1",
        "et.json": "no times of a device",
        "timeline": "read from a torch.profiler trace",
    }.items():
        assert words in taken[name].left


def test_the_window_that_is_read_is_the_last_whole_one_or_the_one_that_is_asked_for(mixed: Path) -> None:
    def window(**which: int) -> set[str]:
        return {rank.files[TRACE].parent.name for rank in open_run(mixed, **which).ranks}

    assert (window(), window(window=1)) == ({"iteration_1"}, {"iteration_0"})
    with pytest.raises(DlprofError, match="no window 3: there are 2"):
        window(window=3)
    path = mixed / "iteration_1" / "rank1.json.gz"
    path.write_bytes(path.read_bytes()[:-20])
    assert window() == {"iteration_0"}
    assert any("2 windows are there; read: 1" in w for w in open_run(mixed).warnings)


def test_logs_of_gpus_timelines_and_dumps_are_read_alone_or_beside_a_recording(tmp_path: Path) -> None:
    put(tmp_path / "logs" / "gpu.csv", SMI)
    for where in (tmp_path / "logs", tmp_path / "logs" / "gpu.csv"):
        assert [(rank.index, list(rank.files)) for rank in open_run(where).ranks] == [(0, ["nvidia_smi"])]
    put(tmp_path / "timeline.json", dialects.horovod(ranks=3))
    found = one_file(tmp_path / "timeline.json")
    assert {rank: pieces["horovod"] for rank, pieces in found.pieces.items()} == {0: "0", 1: "1", 2: "2"}
    run = recorded(tmp_path / "run")
    put(run / "gpu.csv", SMI)
    traces.write(run / "other.json", traces.training(world_size=1))
    opened = open_run(run)
    assert sorted(opened.ranks[0].files) == ["nvidia_smi", "steps", TRACE]
    assert opened.ranks[0].files[TRACE].parent.name == "00000"
    assert [one.path.name for one in opened.taken] == ["gpu.csv"]
    for rank in range(2):
        traces.write(tmp_path / "hung" / f"rank{rank}.json.gz", traces.training(rank=rank))
    dumps.hung(tmp_path / "hung" / "dumps")
    kinds = [sorted(rank.files) for rank in open_run(tmp_path / "hung").ranks]
    assert kinds == 2 * [["flight_recorder", TRACE]] + 6 * [["flight_recorder"]]
    result = analyse(tmp_path / "hung", 1)
    assert "Ranks 3 and 5 never entered all_reduce #4" in result.found[0].title
    assert {part.rank for part in result.time} == {0, 1}


def test_a_log_of_gpus_is_of_the_host_in_its_path(tmp_path: Path) -> None:
    for rank in range(4):
        traces.write(tmp_path / f"rank{rank}.json.gz", traces.training(rank=rank, host=f"gpu-{1 + rank // 2}.cluster"))
    for name in ("smi_gpu-1.csv", "gpu-2/smi.csv", "smi_gpu-12.csv"):
        put(tmp_path / name, SMI.replace("87", "33") if "/" in name else SMI)
    found = gather(tmp_path)
    logs = {rank: files["nvidia_smi"].name for rank, files in found.files.items() if "nvidia_smi" in files}
    assert logs == {0: "smi_gpu-1.csv", 2: "smi.csv"}
    assert any(one.path.name == "smi_gpu-12.csv" and "rank 0 has another log" in one.left for one in found.taken)


@pytest.mark.parametrize(
    ("seconds", "read"),
    [((0, 5, 10), [0, 1, 2]), ((0, 86_400), [1]), ((0, 5, 86_400), [0, 1]), ((86_400, 0, 172_800, 5), [1, 3])],
)
def test_of_traces_that_began_far_apart_the_largest_group_is_read(
    tmp_path: Path, seconds: tuple[int, ...], read: list[int]
) -> None:
    for rank, after in enumerate(seconds):
        made = traces.training(rank=rank, base_ns=traces.BASE_NS + after * 10**9)
        traces.write(tmp_path / f"rank{rank}.json", made)
    found = gather(tmp_path)
    others = sorted(set(range(len(seconds))) - set(read))
    assert sorted(found.files) == read
    assert [one.path.name for one in found.taken if one.left] == [f"rank{rank}.json" for rank in others]
    assert [w.endswith(f"left out are {listed(others)}") for w in found.warnings] == [True] * bool(others)


# Folders as frameworks leave them: the files of two ranks, the number of windows, whether the traces say their rank.
LAYOUTS = {
    # tensorboard_trace_handler in --tensorboard-dir, and since 2025 a file a rank in torch_profile.
    "Megatron-LM": ("tensorboard/node7_{pid}.{at}.pt.trace.json.gz", 2, True),
    "Megatron-LM, a file a rank": ("tensorboard/torch_profile/rank-{rank}.json.gz", 1, False),
    # Its documentation's schedule exports on_trace_ready with a folder, or chrome traces that people name.
    "DeepSpeed": ("log/node7_{pid}.{at}.pt.trace.json", 2, True),
    "DeepSpeed, named by people": ("traces/deepspeed_rank{rank}_step{window}.json", 2, False),
    # What HolisticTraceAnalysis asks for: a folder of one window, each trace with distributedInfo.
    "HTA": ("trace_folder/rank-{rank}.Feb_10_10.{at}.pt.trace.json.gz", 1, True),
    "HTA, numbered files": ("trace_folder/rank_{rank}.json.gz", 1, False),
    "torchtitan": ("profile_trace/iteration_{window}0/rank{rank}_trace.json", 2, False),
    "Lightning": ("lightning_logs/version_0/fit-pt_profiler_{rank}.{window}.pt.trace.json", 2, True),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_rank_is_read_once_and_of_several_windows_the_last(layout: str, tmp_path: Path) -> None:
    name, windows, says = LAYOUTS[layout]
    last: dict[int, Path] = {}
    for window in range(1, windows + 1):
        for rank in range(2):
            when = 1_700_000_000_000 + 60_000 * window + 7 * rank
            path = tmp_path / name.format(rank=rank, pid=4_700 + 11 * rank, at=when, window=window)
            base = traces.BASE_NS + window * 60 * 10**9
            traces.write(path, traces.training(rank=rank if says else None, world_size=2, base_ns=base))
            last[rank] = path
    run = open_run(tmp_path)
    assert {rank.index: rank.files[TRACE] for rank in run.ranks} == last
    assert sum(1 for one in run.taken if one.left) == 2 * (windows - 1)


# Folders of logs as TensorBoard's plugin opened them: the traces of `tensorboard_trace_handler`, each with its folder
# and process, the second in which it began, and its rank; how many runs they are; and the numbers of those read.
LOGS: dict[str, tuple[list[tuple[str, int, int | None]], int, list[int]]] = {
    "a folder a run": ([("a/n_1", 9, None), ("b/n_2", 0, None), ("b/n_2", 5, None)], 2, [0]),
    "several workers and windows": (
        [(f"plugins/profile/{of}{r}", at, r) for of, at in (("x/n_", 0), ("x/n_", 3), ("y/n_7", 9)) for r in (0, 1)],
        2,
        [4, 5],
    ),
    "a process that wrote into two folders": ([("a/n_1", 0, None), ("b/n_1", 5, None)], 1, [1]),
    "a folder a rank": ([("a/n_1", 0, 0), ("b/n_2", 0, 1)], 1, [0, 1]),
    "two runs with a folder a rank": (
        [("a0/n_1", 0, 0), ("a1/n_2", 0, 1), ("b0/n_3", 9, 0), ("b1/n_4", 9, 1)],
        2,
        [2, 3],
    ),
    "workers of one run": ([("n_1", 0, None), ("n_2", 0, None), ("n_2", 5, None), ("n_1", 5, None)], 1, [3, 2]),
    "names without a process": ([("a/rank0", 0, 0), ("b/rank0", 5, 0)], 1, [1]),
}


@pytest.mark.parametrize("packed", ["", ".gz"])
@pytest.mark.parametrize("layout", LOGS)
def test_of_a_folder_of_tensorboards_logs_the_run_that_began_last_is_read(
    layout: str, packed: str, tmp_path: Path
) -> None:
    files, runs, read = LOGS[layout]
    paths = []
    for name, second, rank in files:
        base = traces.BASE_NS + second * 10**9
        paths.append(tmp_path / f"{name}.{base}.pt.trace.json{packed}")
        traces.write(paths[-1], traces.training(rank=rank, world_size=2, base_ns=base))
    (tmp_path / "events.out.tfevents.1700000000.n.1.0").write_bytes(b"\x18\0\0\0")
    run = open_run(tmp_path)
    assert [rank.files[TRACE] for rank in run.ranks] == [paths[n] for n in read]
    said = [warning.partition(" ")[0] for warning in run.warnings if " runs are there; read: " in warning]
    assert said == [str(runs)] * (runs > 1)
    left = {one.path for one in run.taken if one.left.startswith("of another run")}
    assert bool(left) == (runs > 1)


NUMBERED = "no trace names its rank: they are numbered in the order of their names"

# A folder above unrelated jobs: its traces, each with its rank, how many ranks its job has, and the second in which it
# began; those that are read; and the words with which the others are named.
UNRELATED: dict[str, tuple[list[tuple[str, int | None, int, int]], list[int], str]] = {
    "jobs of other sizes": (
        [("a/0.json", 0, 2, 9), ("b/0.json", 0, 4, 0), ("b/1.json", 1, 4, 0)],
        [1, 2],
        "traces are of jobs of 2 and 4 ranks, and not of one: those of 4 ranks are read, left out: a/0.json",
    ),
    "jobs of other sizes in one folder": (
        [("x.json", 0, 2, 0), ("y.json", 1, 8, 5)],
        [1],
        "traces are of jobs of 2 and 8 ranks, and not of one: those of 8 ranks are read, left out: x.json",
    ),
    "each of one process": (
        [("lr1/trace.json", None, 1, 5), ("lr2/trace.json", None, 1, 0), ("lr3/trace.json", None, 1, 3)],
        [0],
        "3 runs are there; read: lr1, which began last. Name the folder of another: lr2, lr3",
    ),
    "other hours": (
        [("a/r.json", 0, 2, 0), ("b/r.json", 1, 2, 86_400)],
        [1],
        " apart: they are of several jobs",
    ),
    "folders that ranks have": ([("rank0/t.json", None, 1, 0), ("rank1/t.json", None, 1, 0)], [0, 1], NUMBERED),
    "folders that torchrun numbers": ([("0/t.json", None, 1, 0), ("1/t.json", None, 1, 0)], [0, 1], NUMBERED),
}


@pytest.mark.parametrize("case", UNRELATED)
def test_unrelated_jobs_are_not_read_as_one(case: str, tmp_path: Path) -> None:
    files, read, told = UNRELATED[case]
    for name, rank, size, second in files:
        made = traces.training(rank=rank, world_size=size, base_ns=traces.BASE_NS + second * 10**9)
        traces.write(tmp_path / name, made)
    run = open_run(tmp_path)
    assert sorted(rank.files[TRACE] for rank in run.ranks) == [tmp_path / files[n][0] for n in read]
    assert [told in warning for warning in run.warnings].count(True) == 1
    left = {one.path for one in run.taken if one.left}
    assert left == {tmp_path / files[n][0] for n in range(len(files)) if n not in read}


def test_a_folder_above_dlprofs_runs_is_refused_with_their_names(tmp_path: Path) -> None:
    folders = [recorded(tmp_path / "runs" / name) for name in ("a", "b/c")]
    for second, folder in enumerate(folders):
        os.utime(folder, (second, second))
    a, b = folders
    done = report(tmp_path / "runs", tmp_path / "out")
    assert (done.exit_code, done.stdout, (tmp_path / "out").exists()) == (2, "", False)
    names = f"name one: {b}, {a} (the newest first)"
    assert done.stderr == f"dlprof: {tmp_path}/runs holds 2 runs of dlprof and is none itself: {names}\n"
    with pytest.raises(DlprofError, match=f"holds 1 run of dlprof and is none itself: name it: {b}$"):
        open_run(tmp_path / "runs" / "b")
    # Beside traces they are left.
    traces.write(tmp_path / "runs" / "rank0.json", traces.training(rank=0))
    run = open_run(tmp_path / "runs")
    assert [rank.files[TRACE].name for rank in run.ranks] == ["rank0.json"]
    assert f"2 runs of dlprof in the folder are left; {names}" in run.warnings


@pytest.mark.parametrize(
    ("files", "windows"),
    [
        ({r: [(f"it{n}/rank{r}.json", 10 - n) for n in range(3)] for r in range(2)}, ["it2", "it1", "it0"]),
        ({0: [("a2", 7), ("a1", 3)], 1: [("b1", 4)]}, [["a1", "b1"], ["a2"]]),
        ({r: [(f"rank{r}/{n}.json", None) for n in range(2)] for r in range(2)}, [["0.json"] * 2, ["1.json"] * 2]),
        ({}, []),
    ],
    ids=["a folder that ranks share, by time", "the nth file of each rank", "by name", "none"],
)
def test_windows_of_a_job(files: dict[int, list[tuple[str, int | None]]], windows: list[Any]) -> None:
    found = windows_of({rank: [Window(Path(p), n) for p, n in each] for rank, each in files.items()})
    names = [sorted(p.name for p in w.values()) for w in found]
    assert windows in (names, [w[0].parent.name for w in found])


@pytest.mark.parametrize("packed", [False, True])
def test_the_last_whole_window(tmp_path: Path, packed: bool) -> None:
    text = b'{"traceEvents": [' + b"1," * 3_000 + b"1]}\n"
    data = gzip.compress(text) if packed else text
    good, bad = [tmp_path / f"good{n}" for n in range(3)], tmp_path / "bad"
    for path in (*good, bad):
        path.write_bytes(data[:-5] if path == bad else data)
    assert [is_cut(path) for path in (good[0], bad, tmp_path / "none")] == [False, True, True]
    assert whole([{0: good[0], 1: good[1]}, {0: good[2], 1: bad}]) == 1
    assert whole([{0: good[0], 1: good[1]}, {0: good[2]}]) == 1
    assert whole([{0: bad}, {0: bad}]) == 2
    names = ("node-1_4711.1700000000000.pt.trace.json.gz", "rank0.json")
    assert [named_process(Path(name)) for name in names] == ["node-1_4711", ""]


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"", "empty"),
        (b"\x89PNG\r\n\x1a\n", "picture"),
        (b"PK\x03\x04", "checkpoints"),
        *((b"\x28\xb5\x2f\xfd", "zstd -d"), (b"7z\xbc\xaf\x27\x1c", "7z x"), (b"Rar!\x1a\x07", "unrar x")),
        (b"\x04\x22\x4d\x18", "lz4 -d"),
        (b"\x80\x04\x95", "pickle"),
        (b"{}", "JSON"),
        (b"import torch\n", "Python"),
        (b"<!doctype html>", "web page"),
        (b"a,b,c\n1,2,3\n", "table"),
        (b"some words", "text"),
        (b"\0\1\2", "no known format"),
        (b"\x1f\x8b\xff\xff", "gzip"),
        (b"x" * 257 + b"ustar", "tar"),
    ],
)
def test_a_file_of_no_known_format_is_named_by_what_it_seems_to_be(tmp_path: Path, data: bytes, word: str) -> None:
    (tmp_path / "file").write_bytes(data)
    assert word in described(Head(tmp_path / "file"))


def test_a_checkpoint_is_no_archive_of_traces(tmp_path: Path) -> None:
    (tmp_path / "rank0.json").write_bytes(zipped({"model/data.pkl": b"x"}) + bytes(600))
    with pytest.raises(DlprofError, match=r"torch\.save writes checkpoints"):
        open_run(tmp_path / "rank0.json")


# Folders from strangers: links, pipes, and what never ends.


def test_only_regular_files_are_opened_and_links_out_of_a_folder_are_not_followed(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    odd = "not a regular file"
    for path, why in (
        (tmp_path / "pipe", odd),
        (Path("/dev/zero"), odd),
        (tmp_path, "a folder"),
        (tmp_path / "no", "no such"),
    ):
        with pytest.raises(DlprofError, match=why), open_file(path):
            pass
    put(tmp_path / "secret", "mine")
    folder = tmp_path / "theirs"
    (folder / "below").mkdir(parents=True)
    put(folder / "here", "theirs")
    for name, target in (("inner", "here"), ("outer", tmp_path / "secret"), ("itself", "itself"), ("away", tmp_path)):
        (folder / name).symlink_to(target)
    inside = Inside(folder)
    names = ("here", "inner", "outer", "itself", "none", "away/secret", "below/../../secret")
    assert [name for name in names if inside.holds(folder / name)] == ["here", "inner"]
    assert [name for name in ("below", "away") if inside.holds_folder(folder / name)] == ["below"]
    assert inside.text(folder / "outer") == ""
    (warning,) = inside.warnings
    assert warning.startswith("links that lead out of the folder are not followed: outer")


def test_a_run_brings_nothing_of_the_readers_own(tmp_path: Path) -> None:
    put(tmp_path / "secret", "the reader's own words\n")
    run = recorded(tmp_path / "run", steps=None, traced=0)
    (run / "hosts/one").mkdir(parents=True)
    for name in ("hosts/one/warnings.txt", "hosts/one/boot", "ranks/00000/steps.jsonl"):
        (run / name).symlink_to(tmp_path / "secret")
    (run / "ranks/00001").symlink_to(tmp_path)
    os.mkfifo(run / "hosts/one/host.jsonl")
    opened = open_run(run)
    assert "own words" not in str(opened)
    assert [(rank.index, rank.files) for rank in opened.ranks] == [(0, {})]
    assert any("not followed" in text and "warnings.txt" in text for text in opened.warnings)


def test_traces_are_not_looked_for_behind_links_and_pipes_are_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = traces.write(tmp_path / "out/rank0.json", traces.training(world_size=1))
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "rank0.json").symlink_to(trace)
    (theirs / "more").symlink_to(tmp_path / "out")
    with pytest.raises(DlprofError, match=r"not followed: more, rank0\.json"):
        open_run(theirs)
    # Who names a link means what it leads to.
    assert open_run(theirs / "rank0.json").ranks
    os.mkfifo(tmp_path / "out" / "pipe")
    (tmp_path / "out" / "link").symlink_to(theirs)
    found = gather(tmp_path / "out")
    assert [one.path.name for one in found.taken] == ["rank0.json"]
    assert any("not followed" in w for w in found.warnings)
    monkeypatch.setattr(mixture, "MOST_OTHERS", 2)
    for n in range(5):
        put(tmp_path / "out" / f"{n}.png", b"\x89PNG\r\n")
    assert any("3 more files" in w for w in gather(tmp_path / "out").warnings)


@pytest.mark.parametrize("link", [Path.symlink_to, Path.hardlink_to])
def test_a_second_name_of_a_file_or_a_window_makes_no_second_rank(
    tmp_path: Path, link: Callable[[Path, Path], None]
) -> None:
    file = traces.write(tmp_path / "job" / "rank3.json", traces.training(rank=None))
    for n in (0, 7):
        link(tmp_path / "job" / f"rank{n}.json", file)
    found = gather(tmp_path / "job")
    assert (len(found.files), sorted(bool(one.left) for one in found.taken)) == (1, [False, True, True])
    (warning,) = found.warnings
    assert warning.count("the same file as") == 2
    for rank in range(2):
        traces.write(tmp_path / "windows" / "step_9" / f"rank{rank}.json", traces.training(rank=rank))
    (tmp_path / "windows" / "latest").symlink_to("step_9")
    found = gather(tmp_path / "windows")
    assert (sorted(found.files), any("windows" in w for w in found.warnings)) == ([0, 1], False)


def test_no_more_of_a_trace_is_read_than_memory_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LEAST_UNPACKED", 1 << 20)
    monkeypatch.setattr(limits, "MOST_NAMES", 1_000)
    event = b'{"ph":"X","cat":"cpu_op","name":"%d","ts":%d,"dur":1,"pid":1,"tid":1},\n'
    bomb, names = tmp_path / "rank0.json.gz", tmp_path / "rank0.json"
    head = b'{"schemaVersion":1,"traceEvents":[\n'
    bomb.write_bytes(gzip.compress(head + event % (1, 1) * 100_000 + b"{}]}"))
    names.write_bytes(head + b"".join(event % (n, n) for n in range(40_000)) + b"{}]}")
    for path, least, most, words in (
        (bomb, 10_000, 99_000, "--no-limits"),
        (names, 1_000, 30_000, "different names or"),
    ):
        reading = torch_trace.read(path)
        assert least < len(reading.tables["spans"]) < most
        assert any(words in warning for warning in reading.warnings)
    monkeypatch.setenv(limits.NO_LIMITS, "1")
    assert [len(torch_trace.read(path).tables["spans"]) for path in (bomb, names)] == [100_000, 40_000]


# Archives and packed files.

DATA = traces.dump(traces.training(rank=None))


def tarred(files: Mapping[str, bytes], mode: str = "w") -> bytes:
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode=mode) as archive:  # type: ignore[call-overload]
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return held.getvalue()


def zipped(files: Mapping[str, bytes]) -> bytes:
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return held.getvalue()


FILES = {f"job/rank{n}.json": DATA for n in range(2)}
PACKED: dict[str, tuple[bytes, list[int]]] = {
    "rank3.json.xz": (lzma.compress(DATA), [3]),
    "rank3.json.bz2": (bz2.compress(DATA), [3]),
    "rank3.json.gz.gz": (gzip.compress(gzip.compress(DATA)), [3]),
    "glued.json.xz": (lzma.compress(DATA[:5_000]) + lzma.compress(DATA[5_000:]), [0]),
    "job.zip": (zipped(FILES), [0, 1]),
    "job.tar": (tarred(FILES), [0, 1]),
    "job.tar.gz": (tarred(FILES, "w:gz"), [0, 1]),
    "job.tar.xz": (tarred(FILES, "w:xz"), [0, 1]),
    "job.tbz2": (tarred(FILES, "w:bz2"), [0, 1]),
    "packed.zip": (zipped({"rank1.json.xz": lzma.compress(DATA), "rank0.json.gz": gzip.compress(DATA)}), [0, 1]),
}


@pytest.mark.parametrize("name", PACKED)
def test_packed_files_and_archives_are_read(tmp_path: Path, name: str) -> None:
    data, ranks = PACKED[name]
    (tmp_path / name).write_bytes(data)
    run = open_run(tmp_path / name)
    assert ([rank.index for rank in run.ranks], run.path) == (ranks, tmp_path / name)
    for rank in run.ranks:
        (file,) = rank.files.values()
        opened = file.read_bytes()
        assert (gzip.decompress(opened) if file.suffix == ".gz" else opened) == DATA


def test_packed_traces_of_a_folder_are_read_and_a_packed_recording_is_its_folder(tmp_path: Path) -> None:
    put(tmp_path / "job/rank0.json.xz", lzma.compress(DATA))
    put(tmp_path / "job/rank1.json.bz2", bz2.compress(DATA))
    put(tmp_path / "job/more.zip", PACKED["job.zip"][0])
    run = open_run(tmp_path / "job")
    assert [rank.index for rank in run.ranks] == [0, 1]
    assert ["read where it is named itself" in one.left for one in run.taken if one.left] == [True]
    runs.recorded(tmp_path / "run", (traces.training(world_size=1), [], runs.CPU))
    with tarfile.open(tmp_path / "run.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "run", "runs/run")
    run = open_run(tmp_path / "run.tar.gz")
    assert (run.recorded, run.command, run.ranks[0].facts["host"]) == (True, ("train.py",), "node-1")


def hostile_tar() -> bytes:
    held = io.BytesIO()
    links = {"out": (tarfile.SYMTYPE, "/etc"), "hard": (tarfile.LNKTYPE, "/etc/passwd"), "pipe": (tarfile.FIFOTYPE, "")}
    names = ["out", "out/passwd.json", "hard", "pipe", "../above.json", "a/../../above.json", "/tmp/absolute.json"]
    names += ["twice.json", "twice.json", "twice.json/below.json", "x" * 300, "rank0.json"]
    with tarfile.open(fileobj=held, mode="w") as archive:
        for name in names:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = links.get(name, (tarfile.REGTYPE, ""))
            info.size = len(DATA) if info.type == tarfile.REGTYPE else 0
            archive.addfile(info, io.BytesIO(DATA))
    return held.getvalue()


def hostile_zip() -> bytes:
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as archive:
        link = zipfile.ZipInfo("out")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(link, "/etc")
        for name in ("../above.json", "/tmp/absolute.json", "..\\above.json", "out/passwd.json", "rank0.json"):
            archive.writestr(name, DATA)
    return held.getvalue()


@pytest.mark.parametrize(("made", "files"), [(hostile_tar, 3), (hostile_zip, 2)])
def test_nothing_of_an_archive_leads_out_of_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: Callable[[], bytes], files: int
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "job.bin").write_bytes(made())
    found = unpacked(tmp_path / "job.bin")
    assert found is not None
    every = [p for p in tmp_path.rglob("*") if p.is_symlink() or not p.is_dir()]
    assert [p for p in every if p.is_symlink() or not p.is_file()] == []
    assert [p.name for p in every if found.path not in p.parents] == ["job.bin"]
    assert len(every) == files + 1
    assert ["passed over: " in w for w in found.warnings] == [True]


def test_no_more_is_unpacked_than_the_limits_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LEAST_UNPACKED", len(DATA) - 100)
    monkeypatch.setattr(limits, "MOST_UNPACKED", 1)
    monkeypatch.setattr("dlprof.read.opening.MOST_MEMBERS", 5)
    many = tarred({f"{n}.json": b"{}" for n in range(50)})
    for name in ("rank3.json.xz", "job.tar.gz", "job.zip", "many.tar"):
        (tmp_path / name).write_bytes(many if name == "many.tar" else PACKED[name][0])
        found = unpacked(tmp_path / name)
        assert found is not None
        files = [found.path] if found.path.is_file() else [p for p in found.path.rglob("*") if p.is_file()]
        assert (sum(p.stat().st_size for p in files) <= len(DATA) - 100, len(files) <= 5) == (True, True)
        words = "holds more than 5 files" if name == "many.tar" else "unpacks to more than is read"
        assert words in found.warnings[0]


@pytest.mark.parametrize("name", [n for n in PACKED if n.startswith("job") or n == "rank3.json.xz"])
@pytest.mark.parametrize("how", ["cut", "damaged"])
def test_of_a_broken_archive_what_comes_before_is_read_or_one_line_said(tmp_path: Path, name: str, how: str) -> None:
    data = PACKED[name][0]
    half = len(data) // 2
    (tmp_path / name).write_bytes(data[:half] + (bytes(255 - b for b in data[half:]) if how == "damaged" else b""))
    try:
        said = open_run(tmp_path / name).warnings[0]
    except DlprofError as e:
        said = str(e)
    assert "cut off or damaged" in said
    assert not any(part in said for part in ("dlprof-unpacked", "\n"))


def test_a_damaged_member_costs_no_other_and_a_header_of_gigabytes_is_not_read(tmp_path: Path) -> None:
    data = bytearray(zipped(FILES))
    data[200] ^= 255  # within the first member
    (tmp_path / "job.zip").write_bytes(data)
    assert 1 in indices(tmp_path / "job.zip")
    assert "job/rank0.json is cut off or damaged" in open_run(tmp_path / "job.zip").warnings[0]
    header = tarfile.TarInfo("pax")
    header.type, header.size = tarfile.XHDTYPE, 6 << 30
    sound = tarred({"rank0.json": DATA})[: 512 + (len(DATA) + 511) // 512 * 512]
    (tmp_path / "job.tar").write_bytes(sound + header.tobuf())
    assert indices(tmp_path / "job.tar") == [0]
    assert "cut off or damaged" in open_run(tmp_path / "job.tar").warnings[0]
