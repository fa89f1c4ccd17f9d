"""Diffs that `git apply` takes, of files that are as they were recorded, and of no others."""

from __future__ import annotations

import ast
import hashlib
import os
import subprocess
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from dlprof.analysis.source.patches import Call, Span, Wanted, calls_of, edit_of, kind_of, patch, sites, wanted_of

SCRIPT = """\
from torch import optim
from torch.utils.data import DataLoader

def main(data, model):
    train = DataLoader(
        data,
        batch_size=4,
    )
    a = optim.AdamW(model.a.parameters(), 1e-3)
    b = optim.AdamW(model.b.parameters(), 1e-3, fused=False)
"""
WORKERS = Wanted("loader", {"num_workers": 4})
FUSED = Wanted("optimizer", {"fused": True})


def calls(folder: Path, name: str = "train.py", text: str = SCRIPT) -> list[Call]:
    """Write a script, and return its calls of loaders and optimizers as they would have been recorded."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode())
    digest = hashlib.sha256(text.encode()).hexdigest()
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            call = node.value
            span = Span(call.lineno, call.end_lineno or 0, call.col_offset, call.end_col_offset or 0)
            kind = "loader" if "DataLoader" in ast.unparse(call.func) else "optimizer"
            roles = ("train",) if kind == "loader" else ()
            found.append(Call(kind, name, call.lineno, digest=digest, roles=roles, span=span, directory=str(folder)))
    return found


def applied(folder: Path, text: str) -> None:
    """Have git apply a patch in a folder."""
    (folder / "fix.diff").write_bytes(text.encode())
    for words in (["init", "-q", "."], ["apply", "fix.diff"]):
        subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True)


def whys(calls: Iterable[Call], *asked: Wanted) -> list[str]:
    """Return why calls could not be edited."""
    made = patch([*calls], asked)
    assert made.text == ""
    return [why for _, _, why in made.left_out]


def test_git_applies_the_edits_of_several_calls(tmp_path: Path) -> None:
    made = patch(calls(tmp_path), [WORKERS, FUSED, Wanted("loader", {"num_workers": 9, "pin_memory": True})])
    assert made.left_out == ()
    applied(tmp_path, made.text)
    edited = SCRIPT.replace("batch_size=4,\n", "batch_size=4,\n        num_workers=4,\n        pin_memory=True,\n")
    edited = edited.replace("model.a.parameters(), 1e-3)", "model.a.parameters(), 1e-3, fused=True)")
    assert (tmp_path / "train.py").read_text() == edited.replace("fused=False", "fused=True")


@pytest.mark.parametrize(
    "text", [SCRIPT.replace("\n", "\r\n"), SCRIPT.replace("    ", "\t"), SCRIPT.rstrip("\n"), "'ü→'\n" + SCRIPT]
)
@pytest.mark.parametrize("name", ["train.py", "sub folder/trän.py"])
def test_git_applies_it_to_files_of_all_kinds(tmp_path: Path, text: str, name: str) -> None:
    applied(tmp_path, patch(calls(tmp_path, name, text), [FUSED]).text)
    after = (tmp_path / name).read_bytes().decode()
    assert after == text.replace("a.parameters(), 1e-3)", "a.parameters(), 1e-3, fused=True)").replace(
        "fused=False", "fused=True"
    )


def test_git_applies_it_below_the_root_of_a_repository(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", "."], cwd=tmp_path, check=True, capture_output=True)
    folder = tmp_path / "examples"
    made = patch(calls(folder), [WORKERS])
    (folder / "fix.diff").write_text(made.text)
    subprocess.run(["git", "apply", "fix.diff"], cwd=folder, check=True, capture_output=True)
    assert "num_workers=4" in (folder / "train.py").read_text()


def test_a_file_that_is_not_as_it_was_recorded_is_left_alone(tmp_path: Path) -> None:
    known = calls(tmp_path)[:1]
    (tmp_path / "train.py").write_text(SCRIPT + "\n")
    assert whys(known, WORKERS) == ["the file has changed since it was recorded"]
    (tmp_path / "train.py").unlink()
    assert whys(known, WORKERS) == ["the file is not here"]
    os.mkfifo(tmp_path / "train.py")  # nobody writes into it
    assert whys(known, WORKERS) == ["the file is not here"]
    (tmp_path / "train.py").unlink()
    (tmp_path / "train.py").mkdir()
    assert whys(known, WORKERS) == ["the file is not here"]
    assert whys([replace(known[0], digest="")], WORKERS) == ["what the file held was not recorded"]
    assert whys([replace(known[0], via="fit (fancy/trainer.py:3)")], WORKERS) == [
        "fit (fancy/trainer.py:3) makes the call"
    ]


@pytest.mark.parametrize("name", ["/etc/passwd", "../train.py", "a/../../b.py", 'a"b.py', "a\nb.py", "a\\b.py"])
def test_a_name_that_leads_elsewhere_is_in_no_patch(tmp_path: Path, name: str) -> None:
    known = calls(tmp_path)[0]
    (why,) = whys([replace(known, file=name)], WORKERS)
    assert why in ("the file is not below the folder that the job was started in", "a patch cannot name the file")


def test_which_call_takes_a_setting() -> None:
    train, held = Call("loader", "a.py", 1, roles=("train",)), Call("loader", "a.py", 2, roles=("validation",))
    through = Call("loader", "a.py", 3, roles=("train",), via="prepare (accelerate/accelerator.py:9)")
    assert sites([through, held, train], WORKERS) == [train]
    assert sites([held, train], Wanted("loader", {}, role="validation")) == [held]
    assert sites([held, Call("loader", "a.py", 4)], WORKERS) == [Call("loader", "a.py", 4)]
    assert sites([held], WORKERS) == []
    two = [Call("optimizer", "a.py", 5), Call("optimizer", "a.py", 6)]
    assert sites(two, FUSED) == two
    assert whys([held], WORKERS) == ["no call that takes it was recorded (loader)"]


def test_the_kind_of_call_of_each_setting() -> None:
    names = "num_workers drop_last bucket_cap_mb fused mode non_blocking OMP_NUM_THREADS num_threads lr"
    kinds = ["loader", "loader", "ddp", "optimizer", "compile", "copy", "", "", ""]
    assert [kind_of(name) for name in names.split()] == kinds
    overrides = {"loader.num_workers": 2, "loader.pin_memory": True, "optimizer.fused": True}
    assert [*wanted_of(overrides)] == [Wanted("loader", {"num_workers": 2, "pin_memory": True}), FUSED]


def test_calls_of_ranks_are_taken_once_and_what_is_no_call_is_not() -> None:
    row = {"kind": "loader", "file": "a.py", "line": 3, "column": 4, "end_line": 5, "end_column": 6, "roles": ["train"]}
    told = {"calls": [row, {"kind": "loader"}, 7, {**row, "file": None}], "directory": "/x/"}
    (call,) = calls_of([told, told, {}, {"calls": None}])
    assert call == Call("loader", "a.py", 3, roles=("train",), span=Span(3, 5, 4, 6), directory="/x/")


def test_overrides_are_an_edit_where_each_of_them_is_one(tmp_path: Path) -> None:
    loader = calls(tmp_path)[0]
    span = loader.span
    row = {"kind": "loader", "file": "train.py", "line": span.line, "end_line": span.end_line, "column": span.column}
    row |= {"end_column": span.end_column, "digest": loader.digest, "roles": ["train"]}
    told = {"calls": [row], "directory": str(tmp_path)}
    applied(tmp_path, edit_of([told], {"loader.num_workers": 4, "loader.persistent_workers": True}))
    after = SCRIPT.replace("_size=4,\n", "_size=4,\n        num_workers=4,\n        persistent_workers=True,\n")
    assert (tmp_path / "train.py").read_text() == after
    (tmp_path / "train.py").write_text(SCRIPT)
    assert edit_of([told], {"loader.num_workers": 4, "env.OMP_NUM_THREADS": "1"}) == ""


def test_a_report_shows_the_edit_without_the_text_around_it(tmp_path: Path) -> None:
    secret = SCRIPT.replace("    a = optim", "    login('hunter2')  # hunter2\n    a = optim")
    made = patch(calls(tmp_path, text=secret), [WORKERS])
    assert "login('hunter2')  # hunter2" in made.text
    assert "+        num_workers=4," in made.shown
    assert "login('…')" in made.shown
    assert "hunter2" not in made.shown
    told = calls(tmp_path, text=secret)[0]
    row = {"kind": "loader", "file": told.file, "line": told.line, "digest": told.digest, "roles": ["train"]}
    assert "hunter2" not in edit_of([{"calls": [row], "directory": str(tmp_path)}], {"loader.num_workers": 4})
