"""One folder holds one run: that of a command, or of all tasks of a job, however many end in the same moment."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dlprof.files import boot
from dlprof.read.run import open_run
from dlprof.record.launch.folder import RunFolder, TakenError, opened
from dlprof.record.launch.supervisor import Ended, supervise
from dlprof.run_folder import boot_of, in_hosts
from tests.fixtures.jobs import COMPILES_NOTHING, DLPROF, environment, launch, noted, rows, spawned, until, wrapped
from tests.fixtures.places import ROOT


def supervised(command: list[str], folder: Path, env: Mapping[str, str]) -> Ended:
    return supervise(command, RunFolder(folder, command, {}, env), env)


def found(env: Mapping[str, str], asked: Path | None = None) -> RunFolder:
    """Return the folder that a task of this environment has, which it makes."""
    run, _ = opened(asked, "train", ["true"], {}, env)
    assert run is not None
    return run


def test_a_folder_that_holds_a_run_stays_and_the_next_number_is_taken(tmp_path: Path) -> None:
    command = wrapped(Path("run"), ["sh", "-c", "echo x >> started; exit 7"], "--no-sample", "--quiet")
    for name in ("run", "run-2"):
        done = launch(command, tmp_path)
        assert (done.returncode, json.loads((tmp_path / name / "run.json").read_text())["exit"]["code"]) == (7, 7)
    assert "dlprof: run already holds a run; recording into run-2\n" in done.stderr
    assert (tmp_path / "started").read_text() == "x\n" * 2


@pytest.mark.parametrize("there", ["a run", "a file", "nowhere/at/all", "run", None])
def test_what_is_in_the_place_of_a_folder_stays(
    there: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "run"
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here" if there is None else tmp_path)
    asked = Path() if there is None else Path("run")  # beside the current folder a run has its name
    if there == "a run":
        found({}, asked)
    elif there == "a file":
        place.write_text("theirs")
    elif there is not None:
        place.symlink_to(there)  # to nothing, or to itself
    before = there and (place.lstat().st_mtime_ns, place.is_dir() and (place / "run.json").read_text())
    why = {"a run": "run already holds a run", None: ""}.get(there, f"{place} is no folder")
    for name in ("run-2", "run-3") if there else ("here", "here-2"):
        run, said = opened(asked, "train", ["true"], {}, {})
        assert run is not None
        assert (run.path.resolve().name, said) == (name, "" if name == "here" else why or ". already holds a run")
    assert before == (there and (place.lstat().st_mtime_ns, place.is_dir() and (place / "run.json").read_text()))


SRUN_TASK = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
ARRAY = {"SLURM_JOB_ID": "15", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3", "SLURM_JOB_NAME": "a/b"}
HOST = os.uname().nodename.partition(".")[0]


@pytest.mark.parametrize(
    ("asked", "env", "name", "batch", "said"),
    [
        ("%x-%j", ARRAY, "a_b-15", "SLURM job 12_3", ""),
        ("%A_%3a", ARRAY, "12_003", "SLURM job 12_3", ""),
        ("%h-%%j", {}, f"{HOST}-%j", None, ""),
        (
            "%j.%s.%t.%n",
            ARRAY | SRUN_TASK | {"SLURM_PROCID": "1", "SLURM_NODEID": "0"},
            "7.0.1.0",
            "SLURM job 12_3",
            "",
        ),
        ("%j", {"PBS_JOBID": "9.host", "SLURM_JOB_ID": ""}, "9.host", "PBS job 9.host", ""),
        ("run-%j-%d", {}, "run-%j-%d", None, "%j in its name is not known here"),
        (None, ARRAY, r"train-12_3-\d{8}-\d{6}", "SLURM job 12_3", ""),
        (None, ARRAY | SRUN_TASK, r"train-12_3\.0", "SLURM job 12_3", ""),
    ],
)
def test_a_folder_is_named_by_the_schedulers_job(
    asked: str | None,
    env: dict[str, str],
    name: str,
    batch: str | None,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    run, why = opened(Path(asked) if asked else None, "train", ["true"], {}, env)
    assert run is not None
    assert (run.path.name == name) if asked else re.fullmatch(name, run.path.name)
    assert (json.loads((run.path / "run.json").read_text())["batch"], why) == (batch, said)


TORCHRUN_RANK = {"TORCHELASTIC_RUN_ID": "x", "MASTER_PORT": "1", "TORCHELASTIC_RESTART_COUNT": "0", "WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("step", "number", "later"),
    [
        (SRUN_TASK, "SLURM_PROCID", {"SLURM_JOB_ID": "8"}),
        (SRUN_TASK, "SLURM_PROCID", {"SLURM_RESTART_COUNT": "1"}),
        (TORCHRUN_RANK, "RANK", {"TORCHELASTIC_RESTART_COUNT": "1"}),
        # One torchrun on each host, itself a task of srun: its ranks are the tasks.
        (SRUN_TASK | {"SLURM_PROCID": "0"} | TORCHRUN_RANK, "RANK", {"MASTER_PORT": "2"}),
    ],
)
@pytest.mark.parametrize("asked", [None, Path("out")])
def test_tasks_of_one_job_share_a_folder_and_others_do_not(
    asked: Path | None,
    step: dict[str, str],
    number: str,
    later: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    tasks = [step | {number: n, "PATH": os.environ["PATH"]} for n in ("0", "1")]
    run = found(tasks[0], asked)
    first, second = supervise(["true"], run, tasks[0]), supervise(["false"], found(tasks[1], asked), tasks[1])
    assert (first.last, second.last, second.code) == (True, True, 1)  # each was the last when it ended
    assert [task["number"] for task in json.loads((run.path / "run.json").read_text())["tasks"]] == ["0", "1"]
    # What a task records after that is another run, and so is what the next job does: whoever of it comes first.
    again = {found(task, asked).path for task in tasks}
    others = {found(task | later, asked).path for task in reversed(tasks)}
    assert len({run.path, *again, *others}) == 3
    if asked:
        assert {path.name for path in again | others} == {"out-2", "out-3"}
        assert opened(asked, "x", [], {}, {})[1] == "out already holds a run"
    assert found({}).path != found({}).path


def test_what_is_started_host_by_host_shares_a_folder_by_the_name_of_its_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    env = {"DLPROF_JOB": "seven", "PATH": os.environ["PATH"]}
    # This host has recorded its part of the first one: the second is another.
    assert [found(env).path.name for _ in range(2)] == ["train-seven", "train-seven-2"]
    run = found(env, Path("run"))
    assert supervise(["true"], run, env).code == 0
    (word,) = run.path.glob("tasks/*.jsonl")
    assert word.stem == f"{os.uname().nodename}~{boot()[:8]}"  # another host may have this one's name
    word.write_text(word.read_text().replace(os.uname().nodename, "another-host"))
    word.rename(word.with_name("another-host~1.jsonl"))
    command = [*DLPROF, "wrap", "--no-report", "--quiet", "--no-sample", "--job", "seven", "-o", "run", "--", "false"]
    assert launch(command, tmp_path).returncode == 1
    told = json.loads((run.path / "run.json").read_text())
    assert [task["exit"]["code"] for task in told["tasks"]] == [0, 1]


def test_the_last_task_to_end_writes_what_all_said_and_until_then_readers_ask_each(tmp_path: Path) -> None:
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "3", "PATH": os.environ["PATH"]}
    run, there, host = tmp_path / "run", tmp_path / "run/tasks/there~2.jsonl", os.uname().nodename
    there.parent.mkdir(parents=True)
    other: dict[str, Any] = {"task": "2", "host": "there", "number": "2", "end_ns": None, "resumed_ns": [7, 5]}
    begun = json.dumps({"log": "begun", **other, "warnings": [], "exit": {"code": None, "signal": None}}) + "\n"
    there.write_text(begun)
    assert not supervised(["sh", "-c", "exit 7"], run, step | {"SLURM_PROCID": "0"}).last
    assert json.loads((run / "run.json").read_text())["tasks"] == []
    so_far = open_run(run)
    assert so_far.exit == {"code": 7, "signal": None}
    fails = f"task 0 on {host} ended with exit code 7"
    assert {"task 2 on there did not end, as far as is known", fails} <= {*so_far.warnings}
    (run / "ranks/00000").mkdir()
    assert open_run(run).ranks[0].resumed_ns == (5, 7)
    killed = {"end_ns": 1 << 62, "exit": {"code": None, "signal": int(signal.SIGABRT)}}
    # The line of its end was cut off, and written again.
    ended = json.dumps({"log": "ended", "task": "2", **killed})
    there.write_text(f"{begun}{ended[:30]}\n{ended}\n")
    assert supervised(["true"], run, step | {"SLURM_PROCID": "1"}).last
    told = json.loads((run / "run.json").read_text())
    ends = [(one["host"], one["number"], one["exit"]["code"], one["exit"]["signal"]) for one in told["tasks"]]
    assert sorted(ends, key=lambda end: end[1]) == [(host, "0", 7, None), (host, "1", 0, None), ("there", "2", None, 6)]
    assert told["end_ns"] == max(one["end_ns"] for one in told["tasks"])
    assert (told["resumed_ns"], told["exit"]) == ([5, 7], {"code": 7, "signal": None})
    warnings = [text for text in open_run(run).warnings if text.startswith("task ")]
    assert warnings == [fails, "task 2 on there ended by signal 6"]


@pytest.mark.parametrize(
    ("number", "ends", "said"), [("0", "kill $$", True), ("1", "kill $$", False), ("0", "exit 3", False)]
)
def test_a_task_that_is_ended_says_which_others_have_not(
    number: str, ends: str, said: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found(SRUN_TASK | {"SLURM_PROCID": "7"}, Path("run"))  # of a node that is lost then
    env = environment(**SRUN_TASK, SLURM_PROCID=number, SLURM_LOCALID=number, PYTHONPATH=str(ROOT))
    _, _, _, *words = wrapped(Path("run"), ["sh", "-c", ends], "--no-sample")
    # As the command does, but for how long it waits for the others.
    starts = "from dlprof.cli import main\nfrom dlprof.commands import wrap\nwrap._OTHERS_END_S = 0.5\nmain()"
    done = launch([sys.executable, "-c", starts, *words], tmp_path, env=env)
    told = f"1 task of the job has not ended ({os.uname().nodename}-7); what was recorded is kept: dlprof report run\n"
    assert (told in done.stderr) is said


def test_the_tasks_of_a_host_write_one_file_and_the_last_of_all_hosts_writes_the_end(tmp_path: Path) -> None:
    step = {"OMPI_COMM_WORLD_SIZE": "9999", "PMIX_NAMESPACE": "1", "PATH": os.environ["PATH"]}
    run, host = tmp_path / "run", os.uname().nodename

    def task(number: int) -> RunFolder:
        return RunFolder(run, ["true"], {}, step | {"OMPI_COMM_WORLD_RANK": str(number)})

    now = time.time_ns()
    end: dict[str, Any] = {"end_ns": now, "exit": {"code": 0, "signal": None}, "resumed_ns": [], "warnings": []}
    tasks = [task(number) for number in (7, 255, 256, 9_000)]
    others = [run / "tasks" / f"{name}~1.jsonl" for name in ("aaa", "zzz")]
    for other in others:
        other.write_text(json.dumps({"log": "begun", "task": other.stem, "number": other.stem, "end_ns": None}) + "\n")
    ended = {name: json.dumps({"log": "ended", "task": name, **end}) + "\n" for name in ("aaa~1", "zzz~1")}
    others[0].open("a").write(ended["aaa~1"])
    assert [path.name for path in (run / "tasks").iterdir() if path.name.startswith(host)] == [
        f"{host}~{boot()[:8]}.jsonl"
    ]
    assert [one.end(list, **end) for one in tasks] == [None] * 4
    with pytest.raises(TakenError):
        task(256)
    late = task(300)
    others[1].open("a").write(ended["zzz~1"])
    assert late.end(lambda: ["of all"], **end | {"warnings": ["of one"]}) == ["of all"]
    told = json.loads((run / "run.json").read_text())
    assert sorted(one["number"] for one in told["tasks"]) == ["255", "256", "300", "7", "9000", "aaa~1", "zzz~1"]
    assert told["warnings"] == ["of one", "of all"]
    assert (told["end_ns"], told["exit"]) == (now, {"code": 0, "signal": None})
    # One that begins later still ends it once more.
    assert task(301).end(list, **end | {"end_ns": now + 1}) == []
    assert json.loads((run / "run.json").read_text())["end_ns"] == now + 1


def test_a_task_packs_the_traces_of_its_own_ranks_and_the_last_to_end_those_that_are_left(tmp_path: Path) -> None:
    step = {"OMPI_COMM_WORLD_SIZE": "2", "PMIX_NAMESPACE": "1", "PATH": os.environ["PATH"]}
    run = tmp_path / "run"
    # Rank 0 trains under this supervisor, rank 300 under another one of this host.
    word = '{"log":"rank","pid":%s,"folder":"%s","supervisor":"%s","since":"1","at_ns":1}\\n'
    other = f"printf '{word}' 1 00256-00511/00300 1 >> notes-x.jsonl; printf '{word}' 2 00000 $PPID >> notes-x.jsonl"
    make = f"cd {run} && mkdir -p ranks/00256-00511/00300 ranks/00000 hosts/$(uname -n)"
    make += " && for rank in 00000 00256-00511/00300; do printf '{}' > ranks/$rank/trace.json; done"
    make += " && printf '{}' > ranks/00000/facts.json && cd hosts/$(uname -n) && " + other
    supervised(["true"], run, step | {"OMPI_COMM_WORLD_RANK": "1"})
    (file,) = (run / "tasks").glob("*.jsonl")
    begun, ended = filter(str.strip, file.read_text().splitlines(keepends=True))
    file.write_text(begun)
    first = supervised(["sh", "-c", make], run, step | {"OMPI_COMM_WORLD_RANK": "0"})
    assert (first.last, first.warnings) == (False, ())
    assert sorted(path.name for path in run.rglob("trace.json*")) == ["trace.json", "trace.json.gz"]
    assert (run / "ranks/00000/trace.json.gz").exists()
    file.write_text(file.read_text() + ended)
    assert supervised(["true"], run, step | {"OMPI_COMM_WORLD_RANK": "2"}).last
    assert sorted(path.name for path in run.rglob("trace.json*")) == ["trace.json.gz"] * 2


def test_the_hosts_of_a_job_lie_flat_unless_its_launcher_says_that_they_are_many(tmp_path: Path) -> None:
    for nodes, there in (("256", "hosts"), ("257", "many-hosts")):
        run = tmp_path / nodes
        env = environment(SLURM_JOB_ID="7", SLURM_STEP_ID="0", SLURM_STEP_NUM_TASKS="2", SLURM_STEP_NUM_NODES=nodes)
        # The interpreter has said that it was there, and the supervisor has found that.
        assert "never imported torch" in supervised([sys.executable, "-c", "pass"], run, env).warnings[0]
        (folder,) = in_hosts(run)
        assert folder.parts[len(run.parts)] == there
        assert noted(folder, "hello")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"SLURM_JOB_ID": "8"}, "already holds a run of SLURM job 7 under the name seven, and this is SLURM job 8"),
        ({"SLURM_RESTART_COUNT": "1"}, "and this is SLURM job 7 (restart 1)"),
        ({"DLPROF_JOB": "eight"}, "already holds a run"),
        ({"SLURM_JOB_ID": ""}, ""),  # a host that was reached by ssh
        ({}, ""),
    ],
)
def test_a_second_job_of_the_same_name_is_refused_or_kept_apart(
    changes: dict[str, str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    env = {"DLPROF_JOB": "seven", "SLURM_JOB_ID": "7", "PATH": os.environ["PATH"]}
    first = found(env).path
    # What follows is on another host.
    (mine,) = (first / "tasks").glob("*.jsonl")
    mine.rename(mine.with_name("another-host.jsonl"))
    if not said:
        assert found(env | changes).path == first
        return
    with pytest.raises(TakenError, match=re.escape(said)):
        RunFolder(first, ["true"], {}, env | changes)
    assert found(env | changes).path != first
    assert [path.name for path in (first / "tasks").iterdir()] == ["another-host.jsonl"]


def test_a_job_that_ended_takes_no_task_of_a_later_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    env = {"DLPROF_JOB": "seven", "PATH": os.environ["PATH"]}
    supervise(["true"], run := found(env), env)
    first = run.path

    def elsewhere() -> None:
        """Have the task of this host be that of another one."""
        for path in (first / "tasks").glob(f"{os.uname().nodename}*"):
            path.rename(path.with_name("another-host" + path.suffix))

    elsewhere()
    assert found(env).path == first  # it ended just now
    elsewhere()
    told = json.loads((first / "run.json").read_text())
    (first / "run.json").write_text(json.dumps(told | {"end_ns": told["end_ns"] - 90_000_000_000}))
    assert found(env).path.name == "train-seven-2"
    with pytest.raises(TakenError, match="of another job under the name seven, which ended at 20"):
        RunFolder(first, ["true"], {}, env)


# Eight tasks of one job, each in a process of its own, that end in the same moment.
TOGETHER = """
import os, sys
from pathlib import Path
from dlprof.record.launch.folder import RunFolder
from dlprof.record.launch.supervisor import supervise
wait = 'touch "$0"; while [ $(ls started-* | wc -l) -lt 8 ]; do sleep 0.01; done'
for number in range(8):
    if os.fork() == 0:
        step = {"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": str(number), "PMIX_NAMESPACE": "1"}
        command, env = ["sh", "-c", wait, f"started-{number}"], os.environ | step
        ended = supervise(command, RunFolder(Path("run"), command, {}, env), env)
        os.write(1, b"last " if ended.last else b"more ")
        os._exit(0)
for number in range(8):
    os.wait()
"""


def test_of_tasks_that_end_together_one_reports_and_none_is_forgotten(tmp_path: Path) -> None:
    done = launch([sys.executable, "-c", TOGETHER], tmp_path)
    assert sorted(done.stdout.split()) == ["last", *["more"] * 7], done.stderr
    told = json.loads((tmp_path / "run/run.json").read_text())
    assert [one["number"] for one in told["tasks"]] == [str(number) for number in range(8)]
    assert all(one["exit"]["code"] == 0 for one in told["tasks"])
    assert told["end_ns"] == max(one["end_ns"] for one in told["tasks"])


# Two jobs of six tasks each, all of which start in the same moment and want a folder that has a run.
RUSH = """
import os, sys, time
from pathlib import Path
from dlprof.record.launch.folder import opened
opened(Path("run"), "x", [], {}, {})
begins = time.monotonic() + 0.3
for number in range(12):
    if os.fork() == 0:
        job = {"OMPI_COMM_WORLD_SIZE": "6", "OMPI_COMM_WORLD_RANK": str(number // 2), "PMIX_NAMESPACE": str(number % 2)}
        while time.monotonic() < begins:
            pass
        run, _ = opened(Path("run"), "x", [], {}, job)
        os.write(1, f"{number % 2} {run.path.name} {run.made}\\n".encode())
        os._exit(0)
for number in range(12):
    os.wait()
"""


def test_tasks_of_two_jobs_that_start_together_are_kept_apart_and_together(tmp_path: Path) -> None:
    done = launch([sys.executable, "-c", RUSH], tmp_path)
    had = [tuple(line.split()) for line in done.stdout.splitlines()]
    assert len(had) == 12, done.stderr
    assert {len([1 for _, name, _ in had if name == folder]) for folder in ("run-2", "run-3")} == {6}
    assert len({(job, name) for job, name, _ in had}) == 2
    assert sorted(name for _, name, made in had if made == "True") == ["run-2", "run-3"]


TRAINS = """
import time
import torch
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for n in range(100_000):
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    if n == 20:
        open("ready", "w").close()
    time.sleep(0.002)
"""


@pytest.mark.long
def test_what_is_recorded_on_a_disk_of_the_node_is_put_into_the_run_folder(tmp_path: Path) -> None:
    disk, run = tmp_path / "disk", tmp_path / "run"
    (tmp_path / "trains.py").write_text(COMPILES_NOTHING + TRAINS)
    words = [sys.executable, str(tmp_path / "trains.py")]
    options = ("--window", "25,1,3", "--sample", "0.1", "--stacks", "off", "--flops", "off")
    command = wrapped(run, words, "--local", "$DISK/jobs", *options)
    with spawned(command, env=environment(DISK=str(disk)), cwd=tmp_path) as job:
        assert until(lambda: (tmp_path / "ready").exists())
        (local,) = (disk / "jobs").iterdir()
        assert until(lambda: len(rows(local / "ranks/00000")) > 30)
        assert not (run / "ranks/00000").exists()
        assert stat.S_IMODE(local.stat().st_mode) == 0o700
        job.send_signal(signal.SIGTERM)
        assert job.wait(60) == -signal.SIGTERM
    assert not [*(disk / "jobs").iterdir()]
    about = json.loads((run / "run.json").read_text())
    assert (about["exit"]["signal"], about["warnings"]) == (signal.SIGTERM, [])
    assert len(rows(run / "ranks/00000")) >= 30
    (host,) = (run / "hosts").iterdir()
    assert (host / "samples.jsonl").exists()
    assert noted(host, "hello")
    assert (run / "ranks/00000/trace.json.gz").exists()


@pytest.mark.parametrize(
    ("place", "why"),
    [("$NOWHERE_AT_ALL/x", "$NOWHERE_AT_ALL/x is not set"), ("/dev/null/x", "Not a directory"), ("FOREIGN", "own")],
)
def test_where_a_node_has_no_such_disk_its_ranks_record_into_the_run_folder(
    place: str, why: str, tmp_path: Path
) -> None:
    run = RunFolder(tmp_path / "run", ["true"], {}, {})
    if place == "FOREIGN":  # somebody else may write there
        assert run.record_at(str(tmp_path)) == ""
        run.records.chmod(0o777)
        run.local, place = None, str(tmp_path)
    said = run.record_at(place)
    assert said.startswith(f"--local {place}: ")
    assert why in said
    assert (run.local, run.records) == (None, run.path)


def test_what_cannot_be_copied_stays_and_is_named(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run", ["true"], {}, {})
    assert run.record_at(str(tmp_path / "disk")) == ""
    rank = run.records / "ranks/00000"
    rank.mkdir()
    (rank / "steps.jsonl").write_text("{}")
    (run.path / "ranks/00000").write_text("in the way")
    assert run.local is not None
    (said,) = run.local.end([rank])
    assert said.startswith(f"what {os.uname().nodename} recorded could not be copied (")
    assert f"in {run.records};" in said
    assert (rank / "steps.jsonl").read_text() == "{}"
    (run.path / "ranks/00000").unlink()
    # Another one still records there.
    other = run.records / "supervisors/1"
    other.touch()
    assert run.local.end([rank]) == []
    assert (run.path / "ranks/00000/steps.jsonl").read_text() == "{}"
    assert run.records.exists()
    other.unlink()
    assert run.local.end([]) == []
    assert not run.records.exists()


def test_hosts_of_one_name_keep_apart(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run", ["true"], {}, {})
    assert run.record_at(str(tmp_path / "disk")) == ""
    assert run.local is not None
    here, there = (folder / "hosts" / os.uname().nodename for folder in (run.records, run.path))
    for folder, whose in ((here, "ours"), (there, "theirs")):
        folder.mkdir(parents=True)
        (folder / "samples.jsonl").write_text(json.dumps({"log": "boot", "boot": whose}) + "\n")
    assert run.local.end([]) == []
    assert sorted(map(boot_of, (run.path / "hosts").iterdir())) == ["ours", "theirs"]
