"""`dlprof try` on real scripts: a planted fault that is a setting, a healthy one, one that fails, and interruptions."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dlprof.cli import cli
from tests.fixtures import runs, traces
from tests.fixtures.jobs import DLPROF, environment, launch, record, running, tiny, until
from tests.fixtures.runs import MS

# Samples that cost 2 ms of sleep each: workers hide them, whatever else the machine does.
SLEEPS = """
class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 40_000
    def __getitem__(self, i):
        time.sleep(0.002)
        return data[i % 64]

for n, batch in enumerate(DataLoader(Slow(), batch_size=8)):
    train(batch)
    if n == int(sys.argv[1]):
        break
"""
WORKERS = "loader.num_workers=2 loader.persistent_workers=True"


def recorded(folder: Path, body: str, steps: int = 60, **env: str) -> tuple[Path, Path]:
    """Record a script of so many steps; return it, made endless, and its run."""
    script = tiny(folder, body)
    record(script, str(steps), folder=folder / "run", options=("--no-sample",), env=environment(**env))
    # Tried for longer than it was recorded.
    told = json.loads((folder / "run/run.json").read_text())
    told["command"][-1] = "1000000"
    (folder / "run/run.json").write_text(json.dumps(told))
    return script, folder / "run"


@pytest.fixture(scope="module")
def waits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a script that waits for its loader, recorded into `run`."""
    pytest.importorskip("torch", reason="recording needs torch")
    folder = tmp_path_factory.mktemp("waits")
    recorded(folder, SLEEPS)
    return folder


def copied(waits: Path, to: Path) -> tuple[Path, Path]:
    """Return the script and a copy of its run."""
    return waits / "train.py", shutil.copytree(waits / "run", to / "run")


def tried(run: Path, *options: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return launch([*DLPROF, "try", str(run), *options], run.parent, **{"timeout": 280, **more})


def kept(run: Path) -> Any:
    return json.loads((run / "try.json").read_text())


@pytest.fixture
def by_hand(tmp_path: Path) -> Path:
    """Return a run of a script that does not train, and in which its loader waits for half of each step."""
    (tmp_path / "train.py").write_text("print('it trains nothing')\n")
    loaders = [{"role": "train", "num_workers": 0, "batch_size": 8, "persistent_workers": False}]
    steps = [runs.light(n, 100 * MS, fetch_ns=50 * MS) for n in range(40)]
    facts = {**runs.CPU, "host": os.uname().nodename, "loaders": loaders, "env": {}}
    runs.recorded(
        tmp_path / "run",
        (traces.training(), steps, facts),
        command=[sys.executable, "train.py"],
        cwd=str(tmp_path),
        hosts=[os.uname().nodename],
    )
    runs.loading(tmp_path / "run", 0, step=100 * MS, wait=50 * MS, fetch=50 * MS, cpu=5 * MS, n=40, workers=0)
    return tmp_path / "run"


def invoked(*words: str | Path) -> Any:
    return CliRunner().invoke(cli, ["try", *map(str, words)])


def test_the_list_runs_nothing(by_hand: Path) -> None:
    done = invoked(by_hand, "--list", "--set", WORKERS, "--obvious", "--quiet")
    assert done.exit_code == 0, done.output
    assert "loader.num_workers=2, loader.persistent_workers=True: named by " in done.output
    assert "torch.autocast" not in done.output  # no model was recorded
    assert not (by_hand / "try.json").exists()
    assert not (by_hand / "try").exists()


def test_a_change_is_named_by_its_place_in_the_report(by_hand: Path) -> None:
    done = invoked(by_hand, "--list", "--change", "1", "--quiet")
    assert done.exit_code == 0, done.output
    (line,) = done.output.splitlines()
    assert line.startswith("loader.num_workers=")
    done = invoked(by_hand, "--change", "99", "--quiet")
    assert (done.exit_code, done.stdout) == (1, "")
    assert "--change 99: the report proposes" in done.stderr


def test_a_job_that_does_not_run_again_is_told_and_kept(by_hand: Path) -> None:
    done = invoked(by_hand, "--set", WORKERS, "--minutes", "1", "--quiet")
    assert done.exit_code == 0, done.output
    assert kept(by_hand)["state"] == "failed"
    assert "did not run again" in done.output
    assert "--in-place" in done.output
    assert json.loads((by_hand / "result.json").read_text())["tried"]["state"] == "failed"


@pytest.mark.parametrize(
    "words", [*(["--minutes", n] for n in ("0", "nan", "inf", "-1")), ["--steps", "2"], ["--format", "xml"]]
)
def test_a_mistake_in_the_options_is_a_usage_error(by_hand: Path, words: list[str]) -> None:
    assert invoked(by_hand, *words).exit_code == 2


@pytest.mark.long
def test_too_short_a_time_is_refused_before_anything_runs(waits: Path, tmp_path: Path) -> None:
    _, run = copied(waits, tmp_path)
    done = tried(run, "--minutes", "0.1")
    assert (done.returncode, (run / "try").exists()) == (2, False), done.stderr
    assert "0.1 min are too short: a run takes about" in done.stderr


@pytest.mark.long
@pytest.mark.slow
def test_a_planted_fault_is_found_measured_and_in_every_report(waits: Path, tmp_path: Path) -> None:
    _, run = copied(waits, tmp_path)
    done = tried(run, "--minutes", "2.5", "--set", "loader.num_workers=4", "--set", "gc.freeze=True")
    assert done.returncode == 0, done.stderr
    assert "each run has a new copy of" in done.stderr
    found = kept(run)
    best = found["best"]
    assert best["settings"]["loader.num_workers"] >= 2
    assert best["measured"]["low"] > 1.5
    assert done.stdout.startswith("Tried: loader.num_workers=")
    assert running(run / "try") == []
    assert not (run / "try").exists()
    # Every report on this run has it.
    assert json.loads((run / "result.json").read_text())["tried"] == {k: v for k, v in found.items() if k != "format"}
    again = launch([*DLPROF, "report", str(run), "--quiet"], tmp_path)
    assert " × measured (" in again.stdout
    assert 'id="tried"' in (run / "report.html").read_text()


def test_without_findings_there_is_nothing_to_try(tmp_path: Path) -> None:
    facts = {**runs.CPU, "host": os.uname().nodename, "env": {}}
    steps = [runs.light(n, 100 * MS) for n in range(40)]
    run = runs.recorded(
        tmp_path / "run",
        (traces.training(), steps, facts),
        command=[sys.executable, "train.py"],
        cwd=str(tmp_path),
        hosts=[os.uname().nodename],
    )
    done = invoked(run)
    assert done.exit_code == 0, done.output
    assert (kept(tmp_path / "run")["attempts"], kept(tmp_path / "run")["state"]) == ([], "complete")
    assert "nothing to try" in done.output


# What SIGINT and SIGTERM leave: `wrap --try` below, and tests/trial/test_running.py.
@pytest.mark.slow
def test_killed_it_leaves_no_process_and_keeps_what_it_has(waits: Path, tmp_path: Path) -> None:
    _, run = copied(waits, tmp_path)
    command = [*DLPROF, "try", str(run), "--minutes", "5", "--set", WORKERS]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment(), start_new_session=True)
    # The job has been measured, and the first run with a change is under way, with its workers.
    assert until(lambda: (run / "try.json").exists() and len(running(run / "try")) >= 3)
    process.kill()
    process.wait(60)
    assert until(lambda: running(run / "try") == [])
    assert kept(run)["state"] == "interrupted"


@pytest.mark.long
def test_wrap_records_reports_and_tries_and_ends_as_the_script(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="recording needs torch")
    body = SLEEPS.replace("int(sys.argv[1])", "60") + "print('done')\nsys.exit(7)\n"
    script = tiny(tmp_path, body)
    process = subprocess.Popen(
        [*DLPROF, "wrap", "--no-sample", "--try", "-o", "run", script.name, "--note", "hunter2"],
        cwd=tmp_path,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert until(lambda: (tmp_path / "run/try.json").exists())
    os.kill(process.pid, signal.SIGINT)
    output, said = process.communicate(timeout=60)
    assert process.returncode == 7
    assert output == "done\n"
    assert "input_wait" in said
    assert "to try" in said
    found = kept(tmp_path / "run")
    assert found["runs"] >= 1
    assert found["state"] == "interrupted"
    assert "interrupted" in said
    assert not (tmp_path / "run/try").exists() or list((tmp_path / "run/try").iterdir()) == []
    # It knew the whole command, and recorded less of it.
    assert json.loads((tmp_path / "run/run.json").read_text())["command"][-2:] == ["--note", "…"]
    assert running(tmp_path) == []


@pytest.mark.slow
def test_ranks_of_a_launcher_are_tried_together(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="recording needs torch")
    body = """
    import torch.distributed as dist
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(model)
    """
    script = tiny(tmp_path, body + SLEEPS.replace("\n", "\n    "))
    launcher = [shutil.which("torchrun") or "torchrun", "--standalone", "--nproc-per-node", "2", str(script)]
    if shutil.which("torchrun") is None:
        launcher[:1] = [sys.executable, "-m", "torch.distributed.run"]
    done = launch([*DLPROF, "wrap", "--no-sample", "-o", "run", "--no-report", "--", *launcher, "60"], tmp_path)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "run"
    told = json.loads((run / "run.json").read_text())
    told["command"][-1] = "1000000"
    (run / "run.json").write_text(json.dumps(told))
    done = tried(run, "--minutes", "3", "--set", WORKERS)
    assert done.returncode == 0, done.stderr
    found = [a for a in kept(run)["attempts"] if a["settings"].get("loader.num_workers") == 2]
    assert found[0]["measured"]["ratio"] > 1.3
    assert running(run / "try") == []
