"""The watched command starts, reads, writes and ends as it does without dlprof, and what went wrong is told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import dlprof
from dlprof import nsys
from dlprof.errors import DlprofError
from dlprof.nsys import Nsys
from dlprof.overrides import Outcome
from dlprof.read.run import open_run
from dlprof.record.collectors.facts import Facts
from dlprof.record.device import cpu
from dlprof.record.launch import options, supervisor
from dlprof.record.launch.child import Lingering, Suspensions
from dlprof.record.launch.folder import RunFolder, batch_of, host_count, task_of
from dlprof.record.launch.process import started
from dlprof.record.launch.supervisor import Ended, left, missing, outcomes, recorded, supervise, unapplied
from dlprof.record.ranks import find_rank
from tests.fixtures.jobs import environment, launch, until, wrapped
from tests.fixtures.sampling import leave_word


def supervised(command: list[str], folder: Path) -> Ended:
    return supervise(command, RunFolder(folder, command, {}, environment()), environment())


ENDINGS = {
    "zero": ("pass", 0, None),
    "three": ("import sys; sys.exit(3)", 3, None),
    "abort": ("import os; os.abort()", None, 6),
    "kill": ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", None, 9),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_command_ends_as_it_does_without_dlprof(ending: str, tmp_path: Path) -> None:
    code, status, signal = ENDINGS[ending]
    command = [sys.executable, "-c", code]
    if ending in ("three", "kill"):  # the supervisor's own process ends alike
        assert launch(wrapped(tmp_path / "run", command), tmp_path).returncode == (
            status if signal is None else -signal
        )
    else:
        ended = supervised(command, tmp_path / "run")
        assert (ended.code, ended.signal) == (status, signal)
    assert json.loads((tmp_path / "run/run.json").read_text())["exit"] == {"code": status, "signal": signal}


def test_the_command_keeps_its_stdin_arguments_descriptors_and_signal_mask(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import json, os, signal, sys\n"
        "print(json.dumps([sys.stdin.read(), sys.argv, __name__, os.read(int(sys.argv[1]), 99).decode(),\n"
        "    sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())), str(signal.getsignal(signal.SIGINT)),\n"
        "    str(signal.getsignal(signal.SIGCHLD)), os.getcwd()]))\n"
    )
    told: list[Any] = []
    wrap = ["-m", "dlprof", "wrap", "--no-report", "-o", str(tmp_path / "r")]
    for prefix in ([sys.executable], [sys.executable, *wrap]):
        reading, writing = os.pipe()
        os.write(writing, b"inherited")
        os.close(writing)
        command: list[str | Path] = [*prefix, script, str(reading), "-o", "--no-trace", "--", "-x", ""]
        done = launch(command, tmp_path, input="typed", pass_fds=[reading])
        os.close(reading)
        told.append(json.loads(done.stdout) if done.stdout else done.stderr)
        told[-1][1][1] = "FD"
    assert told[0] == told[1]
    assert (told[0][0], told[0][3]) == ("typed", "inherited")


@pytest.mark.parametrize(
    ("name", "mode", "status", "hints"),
    [
        ("command", None, 127, False),
        ("./command", 0o644, 126, False),
        ("train.py", None, 127, False),
        ("train.py", 0o644, 127, True),
        ("./train.py", 0o644, 126, True),
    ],
)
def test_a_command_that_cannot_start_ends_as_in_a_shell(
    name: str,
    mode: int | None,
    status: int,
    hints: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    if mode is not None:
        Path(name).write_text("#!/bin/sh\n")
        Path(name).chmod(mode)
    assert supervised([name], tmp_path / "run").code == status
    (line,) = capfd.readouterr().err.splitlines()
    assert name in line
    assert ("leave out the --" in line) == hints


def test_a_process_with_other_threads_still_sees_the_end(tmp_path: Path) -> None:
    idle = threading.Event()
    others = [threading.Thread(target=idle.wait) for _ in range(8)]
    for thread in others:
        thread.start()
    try:
        # The kernel may hand the SIGCHLD to any of them, which has it not blocked and ignores it.
        assert [supervised(["true"], tmp_path / str(n)).code for n in range(4)] == [0] * 4
    finally:
        idle.set()
        for thread in others:
            thread.join()


INJECT = str(Path(dlprof.__file__).parent / "record" / "inject")


@pytest.mark.parametrize(("before", "after"), [(None, []), ("/a:/b", ["/a", "/b"]), ("", [])])
def test_the_hook_stands_before_what_was_on_the_path(before: str | None, after: list[str], tmp_path: Path) -> None:
    env = {"HOME": "/home/me"} | ({} if before is None else {"PYTHONPATH": before})
    changed = recorded(env, tmp_path / "run")
    assert [part for part in changed["PYTHONPATH"].split(os.pathsep) if part] == [INJECT, *after]
    assert (changed["DLPROF_RUN"], changed["HOME"]) == (str(tmp_path / "run"), "/home/me")
    assert "DLPROF_RUN" not in env


def test_processes_that_the_kernel_killed_meanwhile_are_in_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = iter((5, 6))
    monkeypatch.setattr(cpu, "oom_kills", lambda: next(counts))
    supervised(["true"], tmp_path / "run")
    assert open_run(tmp_path / "run").oom_kills == 1


# -- what a command left


def test_a_run_that_recorded_nothing_says_why(tmp_path: Path) -> None:
    reasons = {
        "isolated": ([sys.executable, "-I", "-c", "pass"], "the hook was never reached"),
        "no Python": (["true"], "the hook was never reached"),
        "no torch": ([sys.executable, "-c", "pass"], "never imported torch"),
    }
    for name, (command, why) in reasons.items():
        (warning,) = supervised(command, tmp_path / name).warnings
        assert why in warning
        assert json.loads((tmp_path / name / "run.json").read_text())["warnings"] == [warning]
    rank = tmp_path / "no torch/ranks/00000"
    rank.mkdir()
    (rank / "facts.json").write_text("{}")
    (tmp_path / "no torch/run.json").unlink()
    assert missing(RunFolder(tmp_path / "no torch", ["true"], {}, {})) == []


def test_the_ranks_that_still_run_are_told_by_what_they_said_of_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_LEAVING_S", 0.0)
    ours = os.getpid()
    children = [subprocess.Popen(["sleep", "60"]) for _ in range(5)]
    began = [started(child.pid) for child in children]
    assert 0 < (started(os.getpid()) or 0) < (began[0] or 0)
    said = (
        ("00003.r1", ours, began[0]),
        ("00001", ours, began[1]),
        ("00002", os.getppid(), began[2]),  # another supervisor's, as of the tasks of one job
        ("00004", ours, (began[3] or 0) - 1),  # it has ended, and its number is another process's
        ("no number", ours, began[4]),
    )
    for child, (name, by, since) in zip(children, said, strict=True):
        leave_word(tmp_path, name, child.pid, supervisor=by, since=since)
    try:
        (told,) = left(tmp_path)
        assert f": rank 1 (process {children[1].pid}), rank 3 (process {children[0].pid});" in told
    finally:
        for child in children:
            child.kill()
    for child in children:
        child.wait()
    assert left(tmp_path) == []


ASKED = {"loader.num_workers": 4, "optimizer.fused": True}
FAILED, ONCE = {"error": "no"}, {"applied": 1}


@pytest.mark.parametrize(
    ("asked", "ranks", "lines"),
    [
        # One that applied in some rank is not told.
        (ASKED, [{"loader.num_workers": {}, "optimizer.fused": ONCE}, {"loader.num_workers": {"applied": 2}}], []),
        (
            ASKED,
            [
                {"loader.num_workers": FAILED, "optimizer.fused": ONCE},
                {"loader.num_workers": FAILED, "optimizer.fused": {"error": "too sparse"}},
            ],
            ["loader.num_workers=4 never applied: no", "optimizer.fused=True did not apply everywhere: too sparse"],
        ),
        (ASKED, [], ["loader.num_workers=4 never applied", "optimizer.fused=True never applied"]),
        (ASKED, ['{"loader.num_wor'], ["loader.num_workers=4 never applied", "optimizer.fused=True never applied"]),
        ({}, [{"gc.freeze": FAILED}], []),
    ],
)
def test_what_the_overrides_of_a_job_did_not_do_is_said_once_for_all_ranks(
    asked: Mapping[str, Any], ranks: list[Any], lines: list[str], tmp_path: Path
) -> None:
    ranks_write(tmp_path, ranks)
    assert unapplied(tmp_path, asked) == [f"--set {line}" for line in lines]


def ranks_write(run: Path, ranks: list[Any]) -> None:
    """Write what the overrides did in each rank, or a text."""
    plain = {"value": 1, "applied": 0, "before": [], "places": [], "error": None}
    for number, effects in enumerate(ranks):
        folder = run / f"ranks/{number:05d}"
        folder.mkdir(parents=True)
        whole = effects if isinstance(effects, str) else json.dumps({k: plain | v for k, v in effects.items()})
        (folder / "overrides.json").write_text(whole)


def test_the_counts_of_all_ranks_add_up_and_what_was_not_asked_for_is_left_out(tmp_path: Path) -> None:
    counts = [{"applied": 1, "before": [0]}, {"applied": 2, "before": [1]}]
    ranks_write(tmp_path, [{"loader.num_workers": count, "gc.freeze": ONCE} for count in counts])
    assert outcomes(tmp_path, ["loader.num_workers"]) == {"loader.num_workers": Outcome(3, (0, 1))}


# -- a command that runs on after it was told to end is named, with what it waits for

PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
child.wait()
"""


@pytest.fixture
def family() -> Iterator[tuple[int, int]]:
    """Return a process and the one that it waits for."""
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    yield parent.pid, child
    os.kill(child, 9)
    parent.wait(30)
    parent.stdout.close()


def test_what_lingers_is_named_once_and_what_ends_in_time_is_not(
    family: tuple[int, int], capfd: pytest.CaptureFixture[str]
) -> None:
    in_time = Lingering(family[0], patience_s=0.2)
    in_time.end_requested()
    in_time.ended()
    Lingering(family[0]).ended()
    time.sleep(0.4)
    assert capfd.readouterr().err == ""
    lingering = Lingering(family[0], patience_s=0.05)
    lingering.end_requested()
    lingering.end_requested()
    said: list[str] = []

    def says() -> str:
        said.append(capfd.readouterr().err)
        return said[-1]

    assert until(says)
    time.sleep(0.2)
    says()
    (line,) = "".join(said).splitlines()
    lingering.ended()
    assert f"(processes {family[0]}, {family[1]})" in line


# What is frozen is in tests/robustness/test_suspensions.py.
STARVED_S = 4.0


def delay_s(thread: int) -> float:
    """Return how long a thread of this process was ready and had no core."""
    return int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[1]) / 1e9


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="whoever looks on needs a core as well")
def test_who_waits_for_a_core_is_not_frozen() -> None:
    known = set(threading.enumerate())
    suspensions = Suspensions()
    suspensions.start()
    (watching,) = (t.native_id for t in set(threading.enumerate()) - known if t.native_id is not None)
    core = min(os.sched_getaffinity(0))
    os.sched_setaffinity(watching, {core})
    # Runs only when nobody else wants to, which on this core somebody always does.
    os.sched_setscheduler(watching, os.SCHED_IDLE, os.sched_param(0))
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(8)]
    try:
        for one in busy:
            os.sched_setaffinity(one.pid, {core})
        assert until(lambda: delay_s(watching) > STARVED_S)
    finally:
        for one in busy:
            one.kill()
            one.wait()
    # It has seen how late it is once it has slept again.
    rounds = Path(f"/proc/self/task/{watching}/schedstat")
    before = int(rounds.read_text().split()[2])
    assert until(lambda: int(rounds.read_text().split()[2]) > before)
    assert suspensions.end() == []


# -- nsys


def program(folder: Path, body: str = "exit 3") -> str:
    """Put a stand-in for nsys into a folder."""
    (folder / "nsys").write_text(f"#!/bin/sh\n{body}\n")
    (folder / "nsys").chmod(0o755)
    return str(folder / "nsys")


def test_a_window_of_nsys_is_opened_by_the_job_and_tasks_of_a_host_have_reports_of_their_own(tmp_path: Path) -> None:
    window, whole = (Nsys("nsys", "nsys", on).words(tmp_path) for on in (True, False))
    assert {"--capture-range=cudaProfilerApi", "--capture-range-end=stop"} == set(window) - set(whole)
    assert {"--cuda-graph-trace=node", "--kill=none", f"--output={tmp_path / 'nsys'}"} <= set(whole)
    env = {"PATH": str(tmp_path)}
    with pytest.raises(DlprofError, match="no nsys on the PATH"):
        nsys.launcher(env, None, window=True)
    program(tmp_path)
    assert nsys.launcher(env, None, window=True).name == "nsys"
    assert nsys.launcher(env, "3", window=False).name == "nsys-3"


def test_what_nsys_left_is_exported_or_named(tmp_path: Path) -> None:
    made = Nsys(program(tmp_path), "nsys", window=True)
    (line,) = made.ended(tmp_path)
    assert "--window" in line
    for leaves, names in (("nsys.qdstrm", "nsys.qdstrm"), ("nsys.nsys-rep", "nsys-ui")):
        (tmp_path / leaves).touch()
        assert names in made.ended(tmp_path)[0]
    program(tmp_path, 'for w; do case $w in --output=*) touch "${w#*=}";; esac; done')
    assert made.ended(tmp_path) == []
    assert (tmp_path / "nsys.sqlite").exists()


# -- what can be asked for


@pytest.mark.parametrize(
    ("check", "kept", "refused"),
    [
        (options.window, {"": "", " 3, 1,2": "3,1,2", "0,0,1": "0,0,1"}, ["10,2", "10,-1,2", "-1,2,2", "10,2,0"]),
        (
            options.ranks,
            dict.fromkeys(("all", "0,1,last", "0-7,16000-16383,per-host", "per-stage", "7-7"), "as given"),
            ["", "0,", "7-0", "-1", "first", "10000000000"],
        ),
        (
            options.function,
            dict.fromkeys(("auto", "package.data:Images.__getitem__"), "as given"),
            ["package.data", "data:9"],
        ),
        (options.flops, {"on": "on"}, ["maybe"]),
        (
            options.stacks,
            {"on": options.STACKS_A_SECOND, "off": "off", "0100": "100", "1": "1", "1000": "1000"},
            ["1001", "0"],
        ),
        (
            options.stop_after,
            {
                "": "",
                "40": "40 steps",
                "1 step": "1 step",
                "40 steps": "40 steps",
                "90s": "90 s",
                "90 s": "90 s",
                "2m": "120 s",
                "1m of training": "60 s of training",
            },
            ["0", "0s", "-1", "1.5", "many", "40 x", "40 steps of training", "40 of training"],
        ),
        (options.losses, {"": "", "on": "on", "007": "7"}, ["off", "-1", "1.5", "4294967296"]),
        (options.sample, {"off": "off", "0.10": "0.1", "3600": "3600"}, ["0.01", "nan", "3601"]),
    ],
)
def test_what_is_asked_of_a_recording_is_kept_as_it_is_read_or_refused(
    check: Callable[[str], str], kept: dict[str, str], refused: list[str]
) -> None:
    for given, expected in kept.items():
        assert check(given) == (given if expected == "as given" else expected)
    for given in refused:
        with pytest.raises(ValueError, match=r"\w"):
            check(given)


def test_what_is_asked_reaches_the_ranks_by_its_name() -> None:
    asked = options.asked(lines=("a:f", "b:g"), memory=True, nvtx=False, window="3,1,2")
    assert options.variables(asked) == {
        "DLPROF_LINES": "a:f\nb:g",
        "DLPROF_MEMORY": "on",
        "DLPROF_NVTX": "off",
        "DLPROF_WINDOW": "3,1,2",
    }


# -- tasks: what launchers put into the environment, as far as it matters here: Open MPI 4.1, MPICH 4.0, SLURM 22.05
# and Horovod 0.28.
_ALLOCATED = {"SLURM_JOB_ID": "11", "SLURM_NTASKS": "4", "SLURM_NPROCS": "4", "SLURM_TASKS_PER_NODE": "4"}
_BATCH = _ALLOCATED | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
_SHELL = _BATCH | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1"}
_STEP = _ALLOCATED | {"SLURM_STEP_ID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1"}
_OPEN = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
_OPEN |= {"PMIX_NAMESPACE": "2004221953"}
_HOROVOD = {"HOROVOD_SIZE": "4", "HOROVOD_RANK": "3", "HOROVOD_LOCAL_RANK": "1"}
_MPICH = {"PMI_SIZE": "4", "PMI_RANK": "3", "MPI_LOCALRANKID": "1"}
_AGAIN = _STEP | {"SLURM_RESTART_COUNT": "2"}


@pytest.mark.parametrize(
    ("env", "command", "hosts"),
    [
        ({}, ["python", "train.py"], 1),
        ({"SLURM_STEP_NUM_NODES": "2048"}, [], 2048),
        ({"SLURM_NNODES": "300"}, [], 300),
        (_OPEN | {"OMPI_COMM_WORLD_SIZE": "600", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, [], 300),
        ({"WORLD_SIZE": "16384", "LOCAL_WORLD_SIZE": "8"}, [], 2048),
        ({"WORLD_SIZE": "5", "LOCAL_WORLD_SIZE": "1"}, [], 5),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "0"}, [], 4),
        ({"WORLD_SIZE": "", "LOCAL_WORLD_SIZE": "0", "PET_NNODES": "x"}, [], 1),
        ({}, ["torchrun", "--nnodes", "16:512", "train.py"], 512),
        ({}, ["torchrun", "--nnodes=512", "train.py"], 512),
        ({}, ["torchrun", "--nnodes"], 1),
    ],
)
def test_how_many_hosts_there_are_is_what_launchers_say(env: dict[str, str], command: list[str], hosts: int) -> None:
    assert host_count(env, command) == hosts


@pytest.mark.parametrize(
    ("env", "batch"),
    [
        ({}, None),
        (_STEP, "SLURM job 11"),
        (_AGAIN, "SLURM job 11 (restart 2)"),  # a requeued job is another one
        (_STEP | {"SLURM_HET_JOB_ID": "10"}, "SLURM job 10"),
        ({"PBS_JOBID": "7.server"}, "PBS job 7.server"),
    ],
)
def test_the_schedulers_job(env: dict[str, str], batch: str | None) -> None:
    assert batch_of(env) == batch


@pytest.mark.parametrize(
    ("set_by", "rank", "size", "job"),
    [
        ({}, 0, 1, None),
        (_ALLOCATED, 0, 1, None),
        (_BATCH, 0, 1, None),
        (_SHELL, 0, 1, None),
        (_STEP, 3, 4, "11.2"),
        (_AGAIN, 3, 4, "11.2-r2"),
        (_OPEN, 3, 4, "2004221953"),
        (_BATCH | _OPEN, 3, 4, "2004221953"),
        (_MPICH, 3, 4, "this process's parent"),
        (_BATCH | _MPICH, 3, 4, "this process's parent"),
        (_BATCH | _HOROVOD, 3, 4, None),
        (_STEP | {"RANK": "5", "WORLD_SIZE": "8"}, 5, 8, "11.2"),
    ],
)
def test_a_task_is_told_from_a_single_process_in_an_allocation_and_agrees_with_its_rank(
    set_by: Mapping[str, str], rank: int, size: int, job: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in set(os.environ) - set(environment()) | {"OMP_NUM_THREADS"}:
        monkeypatch.delenv(name, raising=False)
    for name, value in set_by.items():
        monkeypatch.setenv(name, value)
    assert (find_rank(), Facts()._group["world_size"]) == (rank, size)
    task = task_of(os.environ)
    if job is None:
        assert task is None
        return
    assert task is not None
    assert task.number == ("3" if "RANK" not in set_by else set_by["SLURM_PROCID"])
    assert (f"-{os.getppid()}-" in task.job) if job == "this process's parent" else task.job == job
