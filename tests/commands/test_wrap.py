"""The command line of `dlprof wrap`: whose options are whose, and that the report never costs the exit status."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from dlprof import nsys
from dlprof.cli import cli
from dlprof.commands.wrap import missing_script, name_of
from tests.fixtures.jobs import COMPILES_NOTHING, DLPROF, environment, facts, launch, until

TELLS = "import json, sys; print(json.dumps([sys.argv[1:], sys.orig_argv[0] == sys.executable]))"


@pytest.mark.parametrize(
    "given",
    [
        ["tells.py", "-o", "x", "--quiet", "--", "--window", "1"],
        ["-mtells", "-o", "x", "--quiet", "--", "--window", "1"],
        ["--", sys.executable, "tells.py", "-o", "x", "--quiet", "--", "--window", "1"],
    ],
)
def test_nothing_after_the_scripts_name_is_ours(given: list[str], tmp_path: Path) -> None:
    (tmp_path / "tells.py").write_text(TELLS)
    done = launch([*DLPROF, "wrap", "-o", "run", "--quiet", *given], tmp_path)
    assert json.loads(done.stdout) == [["-o", "x", "--quiet", "--", "--window", "1"], True]
    assert done.returncode == 0
    assert (tmp_path / "run/run.json").exists()


def test_a_window_that_is_none_is_a_usage_error(tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["wrap", "--window", "1,2", "--", "touch", str(tmp_path / "started")])
    assert done.exit_code == 2
    assert not (tmp_path / "started").exists()


def test_variables_reach_the_command_and_secrets_no_file(tmp_path: Path) -> None:
    (tmp_path / "tells.py").write_text("import os; print(os.environ['SOME_TOKEN'], os.environ['NVIDIA_TF32_OVERRIDE'])")
    settings = ("--set", "env.SOME_TOKEN=hush", "--set=env.NVIDIA_TF32_OVERRIDE=0", "--allow-numerics")
    done = launch([*DLPROF, "wrap", "-o", "run", *settings, "tells.py"], tmp_path)
    assert (done.returncode, done.stdout) == (0, "hush 0\n")
    told = json.loads((tmp_path / "run/run.json").read_text())
    assert told["options"]["set"] == {"env.SOME_TOKEN": "[redacted]", "env.NVIDIA_TF32_OVERRIDE": "0"}
    assert "--set env.NVIDIA_TF32_OVERRIDE=0 never applied" in told["warnings"]
    assert not any(b"hush" in path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file())
    assert "hush" not in done.stderr


def test_a_command_that_is_recorded_already_runs_as_it_is(tmp_path: Path) -> None:
    command = [*DLPROF, "wrap", "--", "sh", "-c", "echo $DLPROF_RUN $DLPROF_SUPERVISOR; exit 7"]
    done = launch(command, tmp_path, env=environment(DLPROF_RUN="elsewhere", DLPROF_SUPERVISOR="1"))
    assert (done.returncode, done.stdout) == (7, "elsewhere 1\n")
    assert done.stderr == "dlprof: this is recorded already, into elsewhere, and not a second time\n"
    assert list(tmp_path.iterdir()) == []


TRAINS = (
    COMPILES_NOTHING
    + """
import sys
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for n in range(30):
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
print("stdout is the script's")
sys.exit(5)
"""
)


@pytest.mark.long
def test_the_verdict_is_on_stderr_and_the_exit_status_is_the_scripts(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="recording needs torch")
    (tmp_path / "trains.py").write_text(TRAINS)
    done = launch([*DLPROF, "wrap", "-o", "run", "trains.py"], tmp_path)
    assert done.returncode == 5
    assert done.stdout == "stdout is the script's\n"
    assert facts(tmp_path / "run/ranks/00000")["window"]["state"] == "exported"
    assert json.loads((tmp_path / "run/result.json").read_text())["run"]["exit"]["code"] == 5
    assert (tmp_path / "run/report.html").stat().st_size > 1000
    # A report that cannot be made costs a line. A folder stands where the result should be.
    (tmp_path / "again.py").write_text("import os\nos.mkdir(os.environ['DLPROF_RUN'] + '/result.json')\n" + TRAINS)
    done = launch([*DLPROF, "wrap", "-o", "second", "--no-trace", "again.py"], tmp_path)
    assert done.returncode == 5
    assert [line for line in done.stderr.splitlines() if line.startswith("dlprof: no report: ")]


# Stands where nsys would: it tells how it was called, does what it was asked to, and ends as its command did.
NSYS = """#!/bin/sh
if [ "$1" = export ]; then printf '%s\\n' "$@" > nsys-export-argv; echo no importer >&2; exit 3; fi
printf '%s\\n' "$@" > nsys-argv
for word; do
    case $word in
        --output=*) touch "${word#--output=}.nsys-rep" ;;
    esac
done
while [ "${1#-}" != "$1" ] || [ "$1" = profile ]; do shift; done
NSYS_PROFILING_SESSION_ID=1 "$@"
"""


@pytest.mark.long
def test_nsys_starts_the_command_without_a_window_and_its_status_is_the_scripts(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="recording needs torch")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/nsys").write_text(NSYS)
    (tmp_path / "bin/nsys").chmod(0o755)
    (tmp_path / "trains.py").write_text(TRAINS)
    env = environment(PATH=f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    done = launch([*DLPROF, "wrap", "-o", "run", "--nsys", "trains.py", "--nvtx"], tmp_path, env=env)
    assert done.returncode == 5, done.stderr
    assert done.stdout == "stdout is the script's\n"
    report = tmp_path / "run/hosts" / os.uname().nodename / "nsys.nsys-rep"
    assert (tmp_path / "nsys-argv").read_text().splitlines() == [
        "profile",
        "--trace=cuda,nvtx,osrt,cudnn,cublas",
        *(("--capture-range=cudaProfilerApi", "--capture-range-end=stop") if nsys.has_gpu() else ()),
        "--cuda-graph-trace=node",
        "--sample=none",
        "--cpuctxsw=none",
        "--wait=primary",
        "--kill=none",
        "--force-overwrite=true",
        f"--output={report.with_suffix('')}",
        sys.executable,
        "trains.py",
        "--nvtx",
    ]
    assert facts(tmp_path / "run/ranks/00000")["window"]["state"] == "nsys"
    told = json.loads((tmp_path / "run/run.json").read_text())
    assert told["command"] == [sys.executable, "trains.py", "--nvtx"]
    assert (told["options"]["window"], told["options"]["nvtx"]) == ("nsys", "on")
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert f"hosts/{report.parent.name}/nsys.nsys-rep" in [fact["value"] for fact in result["facts"]]
    assert (tmp_path / "nsys-export-argv").read_text().splitlines()[1:] == [
        "--type=sqlite",
        "--force-overwrite=true",
        f"--output={report.with_suffix('.sqlite')}",
        str(report),
    ]
    assert sum("no importer" in warning for warning in result["run"]["warnings"]) == 1
    # Whoever runs nsys himself keeps its device events, too.
    launch(
        [*DLPROF, "wrap", "-o", "own", "--no-report", "trains.py"],
        tmp_path,
        env=environment(NSYS_PROFILING_SESSION_ID="7"),
    )
    assert facts(tmp_path / "own/ranks/00000")["window"]["state"] == "nsys"


@pytest.mark.long
def test_the_last_task_reports_though_its_launcher_ends_all(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="recording needs torch")
    (tmp_path / "trains.py").write_text(TRAINS)
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}
    command = [*DLPROF, "wrap", "-o", "run", "--no-trace", "--no-sample", "trains.py"]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment(**step), stderr=subprocess.PIPE, text=True)
    ended = tmp_path / "run/tasks/1-ended"  # written before the report is made
    assert until(ended.exists)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 5, said
    assert (tmp_path / "run/report.html").exists()
    assert "recording into" not in said  # task 0 says it


@pytest.mark.parametrize(
    ("command", "named"),
    [
        (["python", "a/train.py", "x"], "train"),
        (["torchrun", "-m", "package.train", "-m", "x"], "package.train"),
        (["python", "-mpackage.train"], "package.train"),
        (["API_KEY=hunter2", "python"], "run"),
        (["bash", "-c", "hunter2.py"], "bash"),
        (["./train.sh", "https://me:hunter2@host/x.py"], "train"),
    ],
)
def test_a_folders_name_holds_nothing_but_what_runs(command: list[str], named: str) -> None:
    assert name_of(command) == named


@pytest.mark.parametrize(
    ("words", "missing"),
    [
        ("python nope.py --out x.py", "nope.py"),
        ("/usr/bin/python3.11 -u -X dev -W error nope.py", "nope.py"),
        ("python here.py nope.py", ""),
        ("python -m package nope.py", ""),
        ("python -mpackage nope.py", ""),
        ("python -c 1 nope.py", ""),
        ("python -", ""),
        ("python", ""),
        ("python folder", ""),
        ("torchrun --nproc-per-node 2 nope.py --config other.py", "nope.py"),
        ("/env/bin/torchrun --standalone here.py nope.py", ""),
        ("python -m torch.distributed.run --nnodes 1 nope.py", "nope.py"),
        ("torchrun --nproc-per-node 2 -m package nope.py", ""),
        ("torchrun --no-python nope.py", ""),
        ("torchrun --nproc-per-node 2", ""),
        ("accelerate launch nope.py", ""),  # what is not known starts as it is
        ("bash nope.py", ""),
    ],
)
def test_a_script_that_does_not_exist_is_refused_before_anything_begins(
    words: str, missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("here.py").touch()
    Path("folder").mkdir()
    assert missing_script(words.split()) == missing


@pytest.mark.parametrize("command", ["wrap", "fix"])
def test_the_refusal_is_one_line_and_leaves_nothing(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.dlprof.wrap]\nquiet = true\n")
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli, [command, "nope.py"])
    assert (done.exit_code, done.stderr) == (2, "dlprof: there is no script nope.py\n")
    assert [path.name for path in tmp_path.iterdir()] == ["pyproject.toml"]
