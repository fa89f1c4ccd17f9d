"""How nsys is called, and what is said where that fails. A stand-in answers: this tests no reading."""

from __future__ import annotations

from pathlib import Path

from dlprof import nsys


def test_an_export_that_fails_says_why(tmp_path: Path) -> None:
    program, to = tmp_path / "nsys", tmp_path / "x.sqlite"
    assert "does not start" in nsys.export(str(program), tmp_path / "x.nsys-rep", to, 10)
    for body, expected in (
        ("echo no importer >&2; exit 3", "(3): no importer"),
        ("exit 0", "(0)"),
        ("exec sleep 60", "took more than 1 s"),
        (f"touch '{to}'", ""),
    ):
        program.write_text(f"#!/bin/sh\n{body}\n")
        program.chmod(0o755)
        said = nsys.export(str(program), tmp_path / "x.nsys-rep", to, 1)
        assert expected in said if expected else not said


def test_nsys_is_looked_for_on_a_path(tmp_path: Path) -> None:
    assert nsys.found(str(tmp_path)) is None
    (tmp_path / "nsys").write_text("#!/bin/sh\n")
    (tmp_path / "nsys").chmod(0o755)
    assert nsys.found(str(tmp_path)) == str(tmp_path / "nsys")
