"""`[tool.dlprof]` in pyproject.toml: what it sets, what it may not set, and that it never keeps a job from running."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from dlprof.cli import cli
from dlprof.commands import configured, doctor
from dlprof.errors import DlprofError
from tests.fixtures.jobs import DLPROF, environment, launch


def options_of(run: Path) -> dict[str, str]:
    told: dict[str, str] = json.loads((run / "run.json").read_text())["options"]
    return told


@pytest.mark.parametrize(
    ("table", "words", "env", "window", "lines"),
    [
        ('window = "3,1,2"\nlines = "auto"\nquiet = true', [], {}, "3,1,2", "auto"),
        ('window = "3,1,2"\nlines = ["a:b", "c.py:d"]', [], {}, "3,1,2", "a:b\nc.py:d"),
        ('window = "3,1,2"', ["--window", "5,1,1"], {}, "5,1,1", ""),
        ('window = "3,1,2"', [], {"DLPROF_CONFIG": ""}, "", ""),
        ("no-trace = true", [], {}, "off", ""),
    ],
)
def test_a_job_is_recorded_as_the_nearest_file_says_unless_words_or_the_variable_differ(
    table: str, words: list[str], env: dict[str, str], window: str, lines: str, tmp_path: Path
) -> None:
    (tmp_path / "pyproject.toml").write_text(f"[tool.dlprof.wrap]\n{table}\n")
    (here := tmp_path / "deep").mkdir()
    (here / "pyproject.toml").write_text('[project]\nname = "of-another-tool"\n')
    done = launch([*DLPROF, "wrap", "-o", "run", *words, "--", "true"], here, env=environment(**env))
    assert done.returncode == 0, done.stderr
    assert (options_of(here / "run")["window"], options_of(here / "run")["lines"]) == (window, lines)
    assert ("recording into" in done.stderr) != ("quiet" in table)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[tool]\ndlprof = 3\n", "cannot be read"),
        (f"dlprof = {'[' * 5000}", "cannot be read"),
        ("[tool.dlprof]\nquiet = true\n", "options stand in tables such as [tool.dlprof.wrap]"),
        ("[tool.dlprof.rap]\n", "has no command rap; there are: wrap"),
        ('[tool.dlprof.wrap]\nline = "auto"\n', "has no option --line; there are: --lines"),
        ("[tool.dlprof.wrap]\nquiet = 3\n", "quiet: true or false"),
        ("[tool.dlprof.wrap]\nwindow = [1, 2]\n", "window: a text or a number"),
        ('[tool.dlprof.wrap]\nwindow = "soon"\n', "window: "),
        ('[tool.dlprof.wrap]\nout = "/"\n', "cannot set --out: it stands on the command line alone"),
        ("[tool.dlprof.wrap]\nhelp-all = true\n", "cannot set --help-all"),
    ],
)
def test_what_is_wrong_in_a_file(text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pyproject.toml").write_text(text)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DlprofError, match=re.escape(said)):
        configured.defaults("wrap")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[tool.dlprof.wrap\n", "cannot be read"),
        ('[tool.dlprof.wrap]\nset = ["torch.autocast=bf16"]\n', "--allow-numerics allows that"),
        ("[tool.dlprof.wrap]\nno-report = true\ntry = true\n", "--no-report makes none"),
    ],
)
def test_a_file_that_is_wrong_costs_a_line_and_the_job_runs(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(text)
    done = launch(
        [*DLPROF, "wrap", "-o", "run", "--no-report", "--quiet", "--", "sh", "-c", "echo ran; exit 7"], tmp_path
    )
    assert (done.returncode, done.stdout) == (7, "ran\n")
    first, *rest = done.stderr.splitlines()
    assert said in first
    assert first.endswith("; the defaults of pyproject.toml are left out")
    assert not [line for line in rest if "pyproject" in line]
    assert (tmp_path / "run/run.json").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[tool.dlprof.report]\njob = 4\n", "has no option --job; there are: --jobs"),
        ("[tool.dlprof.report]\njobs = 0\n", "jobs: 0 is not in the range x>=1."),
        ('[tool.dlprof.report]\ndask = "tcp://elsewhere:1"\n', "cannot set --dask"),
        ("[tool.dlprof.report]\nno-limits = true\n", "cannot set --no-limits"),
        ('[tool.dlprof.report]\ncache = "/"\n', "cannot set --cache"),
    ],
)
def test_other_commands_end_with_one_line(
    text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pyproject.toml").write_text(text)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli, ["report", "."])
    assert (done.exit_code, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"dlprof: {tmp_path}/pyproject.toml: [tool.dlprof.report] ")
    assert said in line
    assert said in doctor._config().found
    assert CliRunner().invoke(cli, ["report", "--help"]).exit_code == 0


def test_the_file_of_a_folder_that_everybody_may_write_into_is_none_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.dlprof.wrap]\nquiet = true\n")
    (here := tmp_path / "deep").mkdir()
    monkeypatch.chdir(here)
    assert configured.found()[0] == str(tmp_path / "pyproject.toml")
    tmp_path.chmod(0o1777)
    assert configured.found() == ("", {})
    monkeypatch.setenv("DLPROF_CONFIG", str(tmp_path / "pyproject.toml"))
    assert configured.defaults("wrap") == {"quiet": True}
    monkeypatch.setenv("DLPROF_TRIAL", "1")  # as in each run of `dlprof try`
    assert configured.defaults("wrap") == {}
    monkeypatch.delenv("DLPROF_TRIAL")
    here.rmdir()
    monkeypatch.delenv("DLPROF_CONFIG")
    assert configured.found() == ("", {})
