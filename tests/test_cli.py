"""The command line starts at once, documents itself, and ends with the exit code that it promises."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from dlprof import commands
from dlprof.cli import cli
from dlprof.commands import COMMANDS
from tests.fixtures import jobs, traces

README = Path(__file__).parent.parent / "README.md"

HEAVY = ("torch", "pandas", "plotly", "numpy", "jinja2", "msgspec", "isal", "rich")


@pytest.mark.parametrize("words", [["report", "--help"], ["--version"], []])
def test_help_imports_nothing_heavy(words: list[str], tmp_path: Path) -> None:
    code = (
        "import sys\nfrom dlprof.cli import main\n"
        f"sys.argv = ['dlprof', *{words!r}]\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        f"print('heavy:', [m for m in {HEAVY!r} if m in sys.modules])"
    )
    done = jobs.launch([sys.executable, "-c", code], tmp_path)
    assert done.stdout.endswith("heavy: []\n"), done.stdout + done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_and_option_has_help(name: str) -> None:
    command = commands.command(name)
    assert command.name == name
    assert command.help
    assert command.get_short_help_str()
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help, parameter.name
    done = CliRunner().invoke(cli, [str(command.name), "--help"])
    assert done.exit_code == 0
    assert str(command.name) in CliRunner().invoke(cli, ["--help"]).output
    assert commands.EXAMPLES[name] in CliRunner().invoke(cli, ["--help-all"]).output


@pytest.mark.parametrize("words", [[], *([name] for name in COMMANDS)], ids=" ".join)
def test_help_is_one_screen_and_help_all_has_every_option(words: list[str]) -> None:
    options = [p for p in (commands.command(words[0]) if words else cli).params if isinstance(p, click.Option)]
    rare = [p.opts[-1] for p in options if p.hidden]  # --help-all shows them from then on
    short, whole = (CliRunner().invoke(cli, [*words, how]).output for how in ("--help", "--help-all"))
    assert len(short.splitlines()) <= 25
    for name in (p.opts[-1] for p in options):
        listed = re.compile(rf"^  (-\w, )?{name}\b", re.MULTILINE)
        assert listed.search(whole), name
        assert bool(listed.search(short)) != (name in rare), name


@pytest.mark.skipif(not README.read_text().strip(), reason="the README is yet to be written")
@pytest.mark.parametrize("name", COMMANDS)
def test_the_readme_mentions_every_command(name: str) -> None:
    assert re.search(rf"dlprof {name}\b", README.read_text())


@pytest.mark.parametrize(
    "words",
    [
        ["nonsense"],
        ["report"],
        ["report", "--nonsense", "x"],
        ["report", "x", "--format", "xml"],
        ["report", "x", "--jobs", "0"],
        ["check", "x"],
        ["check", "x", "--max", "nonsense"],
        ["explain", "rules", "x"],
        ["wrap"],
        ["run"],
    ],
    ids=" ".join,
)
def test_a_mistake_in_the_words_is_exit_code_2(words: list[str]) -> None:
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 2
    assert "Usage:" in done.stderr


@pytest.mark.parametrize(
    "words",
    [["report", "no/such"], ["check", "no/such", "--max", "input_wait<5%"], ["explain", "no_such"]],
    ids=" ".join,
)
def test_a_users_mistake_is_one_line_and_exit_code_1(words: list[str]) -> None:
    done = CliRunner().invoke(cli, words)
    assert (done.exit_code, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("dlprof: ")


@pytest.mark.parametrize("words", ["explain", "report rank0.json --format json --quiet"])
def test_a_reader_who_leaves_early_gets_no_traceback(tmp_path: Path, words: str) -> None:
    traces.write(tmp_path / "rank0.json", traces.training())
    # The reader is gone before the first word: whatever is written meets a closed pipe.
    with subprocess.Popen(["true"], stdin=subprocess.PIPE) as reader:
        reader.wait()
        assert reader.stdin is not None
        done = subprocess.run(
            [*jobs.DLPROF, *words.split()],
            cwd=tmp_path,
            stdout=reader.stdin.fileno(),
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=60,
        )
    assert done.stderr == ""
    assert done.returncode == 1  # as click has it


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_behind_stdout_is_one_line(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:  # noqa: PTH123 - a device
        command = [*jobs.DLPROF, "explain"]
        done = subprocess.run(
            command, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=60
        )
    assert done.returncode == 1
    assert done.stderr == "dlprof: [Errno 28] No space left on device\n"
