"""Files are written whole, and never through a link that somebody has laid."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dlprof.errors import DlprofError
from dlprof.files import boot, compact, longer, whole, write, writing


def test_a_link_in_the_place_of_a_file_is_replaced_and_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    (tmp_path / "report.html").symlink_to(precious)
    write(tmp_path / "report.html", "page")
    assert (precious.read_text(), (tmp_path / "report.html").read_text()) == ("mine", "page")
    assert not (tmp_path / "report.html").is_symlink()


def test_names_of_unfinished_files_cannot_be_foreseen(tmp_path: Path) -> None:
    seen = set()
    for _ in range(3):
        with whole(tmp_path / "run.json") as part:
            seen.add(part.name)
    assert len(seen) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_what_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    write(tmp_path / "run.json", "old")

    def fails() -> None:
        with whole(tmp_path / "run.json") as part:
            part.write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fails()
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("run.json", "old")]


def test_a_link_in_the_place_of_an_unfinished_file_is_not_written_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    monkeypatch.setattr(os, "urandom", bytes)  # zeros: somebody guessed the name
    for link in (tmp_path / "precious", tmp_path / "nothing"):
        part = tmp_path / f".run.json.{'00' * 8}.tmp"
        part.unlink(missing_ok=True)
        part.symlink_to(link)
        with pytest.raises(FileExistsError):
            write(tmp_path / "run.json", "ours")
    assert sorted(path.name for path in tmp_path.iterdir()) == [part.name, "precious"]
    assert precious.read_text() == "mine"


def test_the_start_of_a_kernel_is_the_same_all_along_and_unknown_where_it_is_not_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert boot() == boot()
    assert "\n" not in boot()

    def refuse(_: Path) -> str:
        raise PermissionError

    monkeypatch.setattr(Path, "read_text", refuse)
    assert boot() == ""


def test_two_machines_of_one_name_have_two_longer_ones() -> None:
    assert longer("node", "0123456789") == "node~01234567" != longer("node", "9876543210")


def test_what_cannot_be_written_is_said_with_why_and_what_to_do(tmp_path: Path) -> None:
    why = r"^the report cannot be written: No such file or directory; -o helps$"
    with pytest.raises(DlprofError, match=why), writing("the report", "; -o helps"):
        write(tmp_path / "none" / "report.html", "page")


def test_compact_json_has_no_spaces_and_no_number_that_json_lacks() -> None:
    assert compact({"a": [1, "b c"]}) == '{"a":[1,"b c"]}'
    with pytest.raises(ValueError, match="JSON"):
        compact(float("nan"))
