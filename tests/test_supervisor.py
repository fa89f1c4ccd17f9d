"""The watched command must not be able to tell: it ends, is signalled, reads and writes as it does without dlprof."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dlprof import supervisor
from dlprof.errors import DlprofError
from dlprof.run import open_run
from dlprof.supervisor import missing, new_folder, recorded, supervise, task_of
from tests.jobs import DLPROF, children, environment, launch, words, wrapped

ENDINGS = {
    "zero": "pass",
    "three": "import sys; sys.exit(3)",
    "message": "import sys; sys.exit('no')",
    "uncaught": "raise RuntimeError('boom')",
    "abort": "import os; os.abort()",
    "kill": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "os_exit": "import os; os._exit(77)",
}

# Says when it is ready, then waits to be signalled, and tells how often it was.
WAITS = """
import signal, sys, time
seen = []
for name in sys.argv[1:]:
    signal.signal(getattr(signal, name), lambda number, frame: seen.append(signal.Signals(number).name))
print("ready", flush=True)
deadline = time.monotonic() + 30
while not seen and time.monotonic() < deadline:
    time.sleep(0.02)
time.sleep(0.3)
print(",".join(seen), flush=True)
sys.exit(9)
"""


def until(ready: Callable[[], bool]) -> bool:
    """Wait for something that another process does; False if it never does."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if ready():
            return True
        time.sleep(0.02)
    return False


def signalled(command: Sequence[str], number: int, cwd: Path) -> tuple[int, str]:
    """Start a command, send its process a signal when it says ready, and give its status and the rest of its output."""
    # Whoever runs the tests may ignore it, as nohup does, and what is ignored is inherited.
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=partial(signal.signal, number, signal.SIG_DFL),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    rest = process.stdout.read()
    return process.wait(30), rest


def only_child(pid: int) -> int:
    """Give the command's process: the other children are the samplers' and the witness of signals."""
    (child,) = (c for c in children(pid) if "samplers/__main__.py" not in words(c) and "sigwaitinfo" not in words(c))
    return child


def witnessed(pid: int) -> bool:
    """Tell whether the witness of signals is up and waits."""
    return any("sigwaitinfo" in words(child) and state(child) == "S" for child in children(pid))


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_command_ends_as_it_does_without_dlprof(ending: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", ENDINGS[ending]]
    plain = launch(command, tmp_path)
    recorded_ = launch(wrapped(tmp_path / "run", command), tmp_path)
    assert recorded_.returncode == plain.returncode
    assert recorded_.stdout == plain.stdout
    end = json.loads((tmp_path / "run/run.json").read_text())["exit"]
    code, number = (None, -plain.returncode) if plain.returncode < 0 else (plain.returncode, None)
    assert end == {"code": code, "signal": number}


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1"])
def test_a_signal_sent_to_dlprof_reaches_the_command_once(name: str, tmp_path: Path) -> None:
    number = getattr(signal, name)
    command = [sys.executable, "-c", WAITS, name]
    assert signalled(wrapped(tmp_path / "a", command), number, tmp_path) == (9, f"{name}\n")
    unhandled = [sys.executable, "-c", WAITS]
    assert signalled(wrapped(tmp_path / "b", unhandled), number, tmp_path)[0] == -number
    assert signalled(unhandled, number, tmp_path)[0] == -number


@pytest.mark.parametrize(("key", "name"), [(b"\x03", "SIGINT"), (b"\x1c", "SIGQUIT")])
def test_a_key_on_the_terminal_reaches_the_command_once(key: bytes, name: str, tmp_path: Path) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        command = wrapped(tmp_path / "run", [sys.executable, "-c", WAITS, name], "--quiet")
        os.execve(command[0], command, environment())
    seen = b""
    pressed = False
    while select.select([terminal], [], [], 30)[0]:
        try:
            seen += os.read(terminal, 1000)
        except OSError:  # the terminal's last process has gone
            break
        if b"ready" in seen and not pressed:
            os.write(terminal, key)
            pressed = True
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    assert seen.count(name.encode()) == 1


def test_stopping_and_continuing_dlprof_stops_and_continues_the_command(tmp_path: Path) -> None:
    command = wrapped(tmp_path / "run", [sys.executable, "-c", WAITS, "SIGUSR1"])
    # A process group of its own, with its parent outside, as a shell gives its jobs: only such a group can be stopped.
    process = subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, text=True, preexec_fn=lambda: os.setpgid(0, 0)
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    child = only_child(process.pid)
    process.send_signal(signal.SIGTSTP)
    assert until(lambda: state(process.pid) == "T" and state(child) == "T")
    process.send_signal(signal.SIGCONT)
    assert until(lambda: state(process.pid) != "T" and state(child) != "T")
    process.send_signal(signal.SIGUSR1)
    assert process.stdout.read() == "SIGUSR1\n"
    assert process.wait(30) == 9


def test_a_killed_dlprof_leaves_no_command_behind(tmp_path: Path) -> None:
    command = wrapped(tmp_path / "run", [sys.executable, "-c", WAITS])
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    child = only_child(process.pid)
    process.kill()
    process.wait(30)
    assert until(lambda: not Path(f"/proc/{child}").exists() or state(child) == "Z")
    run = json.loads((tmp_path / "run/run.json").read_text())
    assert run["end_ns"] is None


def test_the_command_keeps_its_stdin_arguments_descriptors_and_signal_mask(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import json, os, signal, sys\n"
        "print(json.dumps([sys.stdin.read(), sys.argv, __name__, os.read(int(sys.argv[1]), 99).decode(),\n"
        "    sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())), str(signal.getsignal(signal.SIGINT)),\n"
        "    str(signal.getsignal(signal.SIGCHLD)), os.getcwd()]))\n"
    )
    told: list[Any] = []
    for prefix in (
        [sys.executable],
        [sys.executable, "-m", "dlprof", "wrap", "--no-report", "-o", str(tmp_path / "r")],
    ):
        reading, writing = os.pipe()
        os.write(writing, b"inherited")
        os.close(writing)
        done = launch(
            [*prefix, script, str(reading), "-o", "--no-trace", "--", "-x", ""],
            tmp_path,
            input="typed",
            pass_fds=[reading],
        )
        os.close(reading)
        told.append(json.loads(done.stdout) if done.stdout else done.stderr)
        told[-1][1][1] = "FD"
    assert told[0] == told[1]
    assert told[0][0] == "typed"
    assert told[0][3] == "inherited"


@pytest.mark.parametrize(("mode", "status"), [(None, 127), (0o644, 126)])
def test_a_command_that_cannot_start_ends_as_in_a_shell(mode: int | None, status: int, tmp_path: Path) -> None:
    command = tmp_path / "command"
    if mode is not None:
        command.write_text("#!/bin/sh\n")
        command.chmod(mode)
    done = launch(wrapped(tmp_path / "run", [command]), tmp_path)
    assert done.returncode == status
    assert len(done.stderr.splitlines()) == 2  # where it records, and what went wrong
    assert str(command) in done.stderr


def test_a_folder_that_holds_a_run_is_refused_before_the_command_starts(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "open('started', 'a').write('x')"]
    launch(wrapped(tmp_path / "run", command), tmp_path)
    before = (tmp_path / "run/run.json").read_text()
    again = launch(wrapped(tmp_path / "run", command), tmp_path)
    assert again.returncode == 1
    assert "already holds a run" in again.stderr
    assert (tmp_path / "started").read_text() == "x"
    assert (tmp_path / "run/run.json").read_text() == before


def test_a_folder_that_cannot_be_made_is_refused_before_the_command_starts(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DlprofError, match="-o"):
        supervise(["touch", str(tmp_path / "started")], tmp_path / "file" / "run", {}, {})
    assert not (tmp_path / "started").exists()


def test_the_shadowed_sitecustomize_still_runs_and_its_errors_show(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "sitecustomize.py").write_text("import sys\nsys.theirs = __file__\n")
    code = "import sys, sitecustomize; print(sys.theirs, sitecustomize.__file__)"
    env = environment(PYTHONPATH=str(theirs))
    plain = launch([sys.executable, "-c", code], tmp_path, env=env)
    ours = launch(wrapped(tmp_path / "a", [sys.executable, "-c", code]), tmp_path, env=env)
    assert plain.stdout == ours.stdout
    (theirs / "sitecustomize.py").write_text("raise RuntimeError('theirs')\n")
    broken = launch(wrapped(tmp_path / "b", [sys.executable, "-c", "pass"]), tmp_path, env=env)
    assert "theirs" in broken.stderr
    assert broken.returncode == 0


def test_the_hook_is_silent_without_a_run(tmp_path: Path) -> None:
    env = recorded(environment(), tmp_path / "run")
    del env["DLPROF_RUN"]
    done = launch(
        [sys.executable, "-c", "import sys; print([type(f).__name__ for f in sys.meta_path])"], tmp_path, env=env
    )
    assert "_TorchFinder" not in done.stdout
    assert not (tmp_path / "run").exists()


def test_a_run_that_recorded_nothing_says_why(tmp_path: Path) -> None:
    isolated = launch(wrapped(tmp_path / "a", [sys.executable, "-I", "-c", "pass"]), tmp_path)
    assert "the hook was never reached" in isolated.stderr
    shell = launch(wrapped(tmp_path / "b", ["true"]), tmp_path)
    assert "the hook was never reached" in shell.stderr
    plain = launch(wrapped(tmp_path / "c", [sys.executable, "-c", "pass"]), tmp_path)
    assert "never imported torch" in plain.stderr
    assert "never imported torch" in json.loads((tmp_path / "c/run.json").read_text())["warnings"][0]
    (tmp_path / "c/ranks/00000").mkdir()
    (tmp_path / "c/ranks/00000/facts.json").write_text("{}")
    assert missing(tmp_path / "c") == []


def test_tasks_of_one_job_share_a_folder_and_others_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "PATH": os.environ["PATH"]}
    tasks = [step | {"SLURM_PROCID": number} for number in ("0", "1")]
    folder = new_folder("train", tasks[0])
    first = supervise(["true"], folder, tasks[0], {})
    second = supervise(["false"], new_folder("train", tasks[1]), tasks[1], {})
    assert (second.code, second.folder) == (1, first.folder)
    # What a task records after that is another run: of its own folder, or refused as any second run into one.
    again = [new_folder("train", task) for task in tasks]
    assert again[0] == again[1] != folder
    for other in (tasks[0], tasks[1], tasks[0] | {"SLURM_JOB_ID": "8"}, {}):
        with pytest.raises(DlprofError, match="already holds a run"):
            supervise(["touch", "started"], folder, other, {})
    assert not Path("started").exists()
    assert task_of({}) is None
    assert new_folder("train", {}) != new_folder("train", {})


def test_what_is_started_host_by_host_shares_a_folder_by_the_name_of_its_job(tmp_path: Path) -> None:
    for options, status in ((["--job", "seven"], 0), (["--job", "seven"], 0), (["--job", "seven", "-o", "run"], 0)):
        command = [*DLPROF, "wrap", "--no-report", "--quiet", "--no-sample", *options, "--", "true"]
        assert launch(command, tmp_path).returncode == status
    # This host has recorded its part of the first one: the second is another.
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["true-seven", "true-seven-1"]
    (tmp_path / "run/tasks" / f"{os.uname().nodename}.json").rename(tmp_path / "run/tasks/another-host.json")
    assert launch([*command[:-2], "--", "false"], tmp_path).returncode == 1
    told = json.loads((tmp_path / "run/run.json").read_text())
    assert [task["exit"]["code"] for task in told["tasks"]] == [0, 1]
    assert launch([*DLPROF, "wrap", "--job", "a/b", "--", "true"], tmp_path).returncode == 2


# Fails once the other two tasks are there.
FALLS = """
import os, sys, time
while len(os.listdir("run/tasks")) < 3:
    time.sleep(0.02)
sys.exit(7)
"""


def test_the_folder_of_a_job_tells_how_each_task_ended(tmp_path: Path) -> None:
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "3"}
    waits = "import os, sys, time\nwhile not os.path.exists('go'): time.sleep(0.02)"
    tasks = [
        subprocess.Popen(
            wrapped(tmp_path / "run", [sys.executable, "-c", code], "--quiet", "--no-sample"),
            cwd=tmp_path,
            env=environment(**step, SLURM_PROCID=str(number)),
            stderr=subprocess.DEVNULL,
        )
        for number, code in enumerate((waits, FALLS, waits + "\nos.abort()"))
    ]
    host = os.uname().nodename
    assert tasks[1].wait(60) == 7
    told = json.loads((tmp_path / "run/run.json").read_text())
    assert told["end_ns"] is None
    assert told["exit"] == {"code": 7, "signal": None}
    assert [one["end_ns"] is None for one in told["tasks"]] == [True, False, True]
    assert f"2 tasks did not end, as far as is known: 0 on {host}, 2 on {host}" in open_run(tmp_path / "run").warnings
    (tmp_path / "go").touch()
    assert [task.wait(60) for task in tasks] == [0, 7, -signal.SIGABRT]
    told = json.loads((tmp_path / "run/run.json").read_text())
    ends = [(one["host"], one["number"], one["exit"]["code"], one["exit"]["signal"]) for one in told["tasks"]]
    assert ends == [(host, "0", 0, None), (host, "1", 7, None), (host, "2", None, int(signal.SIGABRT))]
    assert told["end_ns"] >= told["tasks"][1]["end_ns"]
    run = open_run(tmp_path / "run")
    assert run.exit == {"code": 7, "signal": None}
    assert [text for text in run.warnings if text.startswith("task ")] == [
        f"task 1 on {host} ended with exit code 7",
        f"task 2 on {host} ended by signal {int(signal.SIGABRT)}",
    ]


def test_of_many_tasks_only_the_last_to_end_reads_what_all_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_MOST_READ", 1)
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "3", "PATH": os.environ["PATH"]}
    run, there = tmp_path / "run", tmp_path / "run/tasks/there-2"
    there.parent.mkdir(parents=True)
    other: dict[str, Any] = {
        "host": "there",
        "number": "2",
        "end_ns": None,
        "exit": {"code": None, "signal": None},
        "warnings": [],
    }
    there.with_suffix(".json").write_text(json.dumps(other))
    assert not supervise(["false"], run, step | {"SLURM_PROCID": "0"}, {}).last
    assert json.loads((run / "run.json").read_text())["tasks"] == []
    warnings = open_run(run).warnings
    assert {
        "task 2 on there did not end, as far as is known",
        f"task 0 on {os.uname().nodename} ended with exit code 1",
    } <= {*warnings}
    there.with_suffix(".json").write_text(json.dumps(other | {"end_ns": 1, "exit": {"code": 0, "signal": None}}))
    there.with_suffix(".ended").touch()
    assert supervise(["true"], run, step | {"SLURM_PROCID": "1"}, {}).last
    told = json.loads((run / "run.json").read_text())
    assert (told["exit"], sorted(one["number"] for one in told["tasks"])) == (
        {"code": 1, "signal": None},
        ["0", "1", "2"],
    )


# Eight tasks of one job, each in a process of its own, that end in the same moment.
TOGETHER = """
import os, sys
from pathlib import Path
from dlprof.supervisor import supervise
wait = 'touch "$0"; while [ $(ls started-* | wc -l) -lt 8 ]; do sleep 0.01; done'
for number in range(8):
    if os.fork() == 0:
        step = {"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_RANK": str(number), "PMIX_NAMESPACE": "1"}
        ended = supervise(["sh", "-c", wait, f"started-{number}"], Path("run"), os.environ | step, {})
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


def test_a_process_with_other_threads_still_sees_the_end(tmp_path: Path) -> None:
    idle = threading.Event()
    others = [threading.Thread(target=idle.wait) for _ in range(8)]
    for thread in others:
        thread.start()
    try:
        # The kernel may hand the SIGCHLD to any of them, which has it not blocked and ignores it.
        for n in range(4):
            assert supervise(["true"], tmp_path / str(n), os.environ, {}).code == 0
    finally:
        idle.set()
        for thread in others:
            thread.join()


def test_a_signal_to_the_whole_group_reaches_the_command_once(tmp_path: Path) -> None:
    told: list[tuple[str, int]] = []
    for command in ([sys.executable, "-c", WAITS, "SIGTERM"], [sys.executable, "-c", WAITS, "SIGUSR1", "SIGTERM"]):
        process = subprocess.Popen(
            wrapped(tmp_path / str(len(told)), command),
            env=environment(),
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        # The witness is up as soon as it waits.
        assert until(partial(witnessed, process.pid))
        os.killpg(process.pid, signal.SIGTERM)
        told.append((process.stdout.read(), process.wait(30)))
    assert told == [("SIGTERM\n", 9)] * 2


def test_a_signal_is_passed_on_where_the_witness_has_died(tmp_path: Path) -> None:
    process = subprocess.Popen(
        wrapped(tmp_path / "run", [sys.executable, "-c", WAITS, "SIGTERM"]),
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    assert until(lambda: any("sigwaitinfo" in words(c) for c in children(process.pid)))
    for pid in children(process.pid):
        if "sigwaitinfo" in words(pid):
            os.kill(pid, signal.SIGKILL)
    process.send_signal(signal.SIGTERM)
    assert process.stdout.read() == "SIGTERM\n"
    assert process.wait(30) == 9
