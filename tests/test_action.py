"""The GitHub action: its steps, run by bash as a runner does, on a committed recording, with the real dlprof."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.fixtures.jobs import DLPROF, environment, launch
from tests.fixtures.places import GOLDEN, ROOT

ACTION: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text())

pytestmark = [pytest.mark.long, pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")]


def act(cwd: Path, **inputs: str) -> tuple[int, str, str]:
    """Run the steps with these inputs, until one fails; return its exit code, the output, and the job's summary."""
    given = {name: of["default"] for name, of in ACTION["inputs"].items()} | {
        name.replace("_", "-"): value for name, value in inputs.items()
    }
    (binaries := cwd / "bin").mkdir(exist_ok=True)
    (dlprof := binaries / "dlprof").write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m dlprof "$@"\n')
    dlprof.chmod(0o755)
    (summary := cwd / "summary.md").write_text("")
    printed = ""
    known = {f"inputs.{name}": value for name, value in given.items()} | {"github.action_path": str(ROOT)}
    for step in ACTION["runs"]["steps"]:
        assert set(step) <= {"name", "if", "shell", "env", "run"}
        assert (step["shell"], step.get("if")) in (("bash", None), ("bash", "inputs.command != ''"))
        if "if" in step and not given["command"]:
            continue
        assert "${{" not in step["run"], "an input is no text of the script"
        env = {name: re.sub(r"\$\{\{ (\S+) \}\}", lambda m: known[m[1]], value) for name, value in step["env"].items()}
        env |= {"GITHUB_STEP_SUMMARY": str(summary), "GITHUB_ACTIONS": "true", "PATH": f"{binaries}:/usr/bin:/bin"}
        words = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
        done = subprocess.run(
            words, cwd=cwd, env=environment(**env), capture_output=True, text=True, check=False, timeout=120
        )
        printed += done.stdout + done.stderr
        if done.returncode:
            break
    return done.returncode, printed, summary.read_text()


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the recording as job, and what is known of it as baseline."""
    folder = tmp_path_factory.mktemp("action")
    (folder / "job").mkdir()
    for trace in GOLDEN.glob("gloo_rank*.json.gz"):
        shutil.copy(trace, folder / "job")
    assert launch([*DLPROF, "report", "job", "-o", "baseline", "--quiet"], folder).returncode == 0
    return folder


@pytest.mark.parametrize(
    ("inputs", "code", "printed", "summed"),
    [
        (
            {"max": "input_wait<5%\n\nhost_bound<90%\n", "baseline": "none.json"},
            *(0, r"::warning title=dlprof::there is no baseline none.json(?s:.*)ok +host_bound < 90 %"),
            r"ok +input_wait < 5 %",
        ),
        (
            {"max": "input_wait<5%\nhost_bound<5%", "baseline": "baseline/result.json"},
            *(3, r"::error title=dlprof.*host_bound(?s:.*)::error title=.*fewer than 30"),
            r"FAIL +host_bound < 5 %(?s:.*)FAIL +slower than",
        ),
        ({"baseline": "baseline", "max_slowdown": "x"}, 2, "'x' is no share", ""),
        ({}, 2, "name a limit", ""),
        ({"max": "input_wait<5%; touch made"}, 2, "is no limit", ""),
    ],
)
def test_it_ends_as_check_ends_and_sums_up(
    inputs: dict[str, str], code: int, printed: str, summed: str, job: Path
) -> None:
    ended, output, summary = act(job, run="job", **inputs)
    assert ended == code, output
    assert re.search(printed, output), output
    assert re.search(summed, summary), summary
    assert "gloo" in summary or "job" in summary  # the report's first screen
    assert "::" not in summary
    assert not (job / "made").exists()


def test_it_records_the_command_as_a_shell_takes_it_and_ends_as_it_ends(tmp_path: Path) -> None:
    code, output, _ = act(tmp_path, command="--no-report -- sh -c 'echo \"a  b\"; exit 7'")
    assert (code, "a  b" in output) == (7, True)
    assert (tmp_path / "dlprof-run/run.json").exists()
