"""Whose frame a call comes from, and what is kept of its line."""

from __future__ import annotations

import hashlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dlprof.record.calls import frames
from dlprof.record.calls.frames import MOST_FILE_BYTES, Frames, own_files

POSITIONS = sys.version_info >= (3, 11)  # Python says in which columns a call stands


class Held:
    """Asks about the frame while it stands at the call."""

    def __init__(self, frames: Frames) -> None:
        self.frames = frames
        self.found: Any = None
        self.place: Any = None

    def __call__(self, *_: object, **__: object) -> None:
        frame, library = self.frames.find(sys._getframe(1))
        self.found = frame
        self.place = self.frames.place(frame, library) if frame is not None else None


def held(path: Path, text: str, directory: Path, since: float | None = None, **names: Any) -> Held:
    """Run a file that calls `look(...)`, and return what was found meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode())
    look = Held(Frames(f"{directory}{os.sep}", time.time() + 1 if since is None else since))
    exec(compile(text, str(path), "exec"), {"look": look, **names})
    return look


def test_a_call_has_its_line_function_and_text(tmp_path: Path) -> None:
    text = "def main():\n    x = look(  # the loader\n        1,\n        size='ü',\n    )\nmain()\n"
    place = held(tmp_path / "sub" / "train.py", text, tmp_path).place
    assert (place.file, place.line, place.function) == ("sub/train.py", 2, "main")
    assert place.digest == hashlib.sha256(text.encode()).hexdigest()
    assert place.via == ""
    if POSITIONS:
        assert (place.end_line, place.column, place.end_column) == (5, 8, 5)
        assert place.source == "x = look( 1, size='ü', )"


def test_a_file_outside_the_working_directory_keeps_its_whole_name(tmp_path: Path) -> None:
    place = held(tmp_path / "train.py", "look()\n", tmp_path / "elsewhere").place
    assert place.file == str(tmp_path / "train.py")
    assert place.function == "<module>"


@pytest.mark.parametrize("is_ours", [False, True])
def test_a_librarys_frame_is_passed_and_named_unless_it_is_ours(
    is_ours: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_ours:  # installed beside the libraries
        monkeypatch.setattr(frames, "_OURS", str(tmp_path / "lib/site-packages/fancy/"))
    library = tmp_path / "lib/site-packages/fancy/trainer.py"
    library.parent.mkdir(parents=True)
    body = "class Trainer:\n    def train(self):\n        return look()\n"
    names: dict[str, Any] = {}
    look = Held(Frames(f"{tmp_path}{os.sep}", time.time() + 1))
    exec(compile(body, str(library), "exec"), {"look": look}, names)
    user = tmp_path / "train.py"
    user.write_text("def main(trainer):\n    trainer.train()\n")
    own: dict[str, Any] = {}
    exec(compile(user.read_text(), str(user), "exec"), own)
    names["Trainer"].train.__globals__["look"] = look
    own["main"](names["Trainer"]())
    assert (look.place.file, look.place.line) == ("train.py", 2)
    assert look.place.via == "" if is_ours else look.place.via.endswith("train (fancy/trainer.py:3)")


def test_of_several_frames_of_libraries_the_innermost_is_named(tmp_path: Path) -> None:
    look = Held(Frames(f"{tmp_path}{os.sep}", time.time() + 1))
    scope: dict[str, Any] = {"look": look}
    library = tmp_path / "lib/site-packages/fancy"
    for name, body in (("loop.py", "def loop():\n    look()\n"), ("trainer.py", "def train():\n    loop()\n")):
        exec(compile(body, str(library / name), "exec"), scope)
    exec(compile("train()\n", str(tmp_path / "train.py"), "exec"), scope)
    assert (look.place.file, look.place.line, look.place.via) == ("train.py", 1, "loop (fancy/loop.py:2)")


def test_what_is_read_of_a_file_is_bounded_and_never_of_a_newer_one(tmp_path: Path) -> None:
    big = "look()\n" + "#" * MOST_FILE_BYTES + "\n"
    assert held(tmp_path / "big.py", big, tmp_path).place.digest == ""
    newer = held(tmp_path / "newer.py", "look()\n", tmp_path, since=time.time() - 60).place
    assert (newer.digest, newer.line) == ("", 1)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
def test_a_pipe_in_a_files_place_is_not_waited_for(tmp_path: Path) -> None:
    look = Held(Frames(f"{tmp_path}{os.sep}", time.time() + 1))
    os.mkfifo(tmp_path / "pipe.py")
    exec(compile("look()\n", str(tmp_path / "pipe.py"), "exec"), {"look": look})
    assert (look.place.file, look.place.digest) == ("pipe.py", "")


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("look(api_key='hunter2', size=3)  # hunter2", "look(api_key='…', size=3)"),
        ('x = """ hunter2 \n hunter2 """, look()', '""", look()'),
        ('x = f"""{1} hunter2 \n hunter2 {look()} hunter2 \n"""', ""),
    ],
)
def test_text_in_a_calls_lines_is_left_out(text: str, kept: str, tmp_path: Path) -> None:
    assert held(tmp_path / "train.py", f"{text}\n", tmp_path).place.source == kept


def test_what_was_compiled_anew_is_not_named(tmp_path: Path) -> None:
    """Dynamo's code has the function's first line alone, and no columns."""
    if not POSITIONS:
        pytest.skip("Python says no columns here")
    look = Held(Frames(f"{tmp_path}{os.sep}", time.time() + 1))
    names: dict[str, Any] = {"look": look}
    exec(compile("def step():\n    look()\n", str(tmp_path / "train.py"), "exec"), names)
    names["step"]()
    assert look.place.line == 2
    step = names["step"]
    # A table that says of every instruction: the first line, no column.
    table = b"".join(
        bytes([0x80 | 13 << 3 | min(left, 8) - 1, 0]) for left in range(len(step.__code__.co_code) // 2, 0, -8)
    )
    step.__code__ = step.__code__.replace(co_linetable=table)
    step()
    assert look.found is None


def test_whose_a_file_is() -> None:
    is_own = own_files()
    assert is_own("/home/me/train.py")
    for file in (
        os.__file__,
        pytest.__file__,
        "<string>",
        "/x/dist-packages/y.py",
        sys.modules[Frames.__module__].__file__,
    ):
        assert not is_own(str(file))
