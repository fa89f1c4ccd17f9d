"""What stands in a name or a path moves no cursor and begins no line, wherever it is printed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dlprof.errors import DlprofError
from dlprof.plain import plain, tell, words_of
from tests.fixtures import traces
from tests.fixtures.jobs import DLPROF, launch

# A name that clears the screen, and one that pretends to be a line of ours.
EVIL = "a\x1b[2Jb\nreport: theirs\u202e"


@pytest.mark.parametrize(
    ("text", "shown"),
    [("a b", "a b"), ("a\nb", "a\\x0ab"), ("\x1b[2J", "\\x1b[2J"), ("\u202e", "\\u202e"), ("\udcff", "\\udcff")],
)
def test_controls_are_shown_as_escapes(text: str, shown: str) -> None:
    assert plain(text) == shown


def test_what_is_cut_ends_in_an_ellipsis_and_what_is_kept_stays() -> None:
    assert plain("abcdef", 4) == "abc…"
    assert plain("a\nb\x1b", keep="\n") == "a\nb\\x1b"


def safe(said: str) -> bool:
    return "\x1b[2J" not in said and "\u202e" not in said and "\nreport: theirs" not in said


@pytest.mark.long
def test_commands_print_no_path_raw(tmp_path: Path) -> None:
    folder = tmp_path / EVIL
    folder.mkdir()
    traces.write(folder / "rank0.json", traces.training())
    out = tmp_path / f"{EVIL} out"
    asked = (
        ("report", folder / "none"),
        ("report", folder, "-o", out, "--quiet"),
        ("export", folder, "--quiet", "--perfetto", folder / "all.json"),
        ("compare", folder, folder, "-o", out, "--quiet"),
        ("wrap", "-o", tmp_path / f"{EVIL} run", "--no-report", "--", sys.executable, "-c", "pass"),
        ("wrap", "-o", tmp_path / f"{EVIL} none", "--no-report", "--", EVIL),
    )
    for words in asked:
        done = launch([*DLPROF, *map(str, words)], tmp_path)
        assert done.stdout + done.stderr
        assert safe(done.stdout + done.stderr), words


def test_an_error_of_the_system_explains_itself_and_others_say_their_kind() -> None:
    assert words_of(OSError("the disk is full")) == "the disk is full"
    assert words_of(DlprofError("no run")) == "no run"
    assert words_of(KeyError("rank")) == "KeyError: 'rank'"


def test_a_line_of_ours_is_one_line_and_nothing_where_stderr_is_closed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tell("a\nb\x1b[2J")
    assert capfd.readouterr().err == "dlprof: a\\x0ab\\x1b[2J\n"
    code = "import os; from dlprof.plain import tell; os.close(2); tell('a'); print('on')"
    assert launch([sys.executable, "-c", code], tmp_path).stdout == "on\n"
