"""What is to do to keep a gain: a patch as far as one can be made, words for the rest."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import pytest
from msgspec.structs import replace

from dlprof.overrides import Value
from dlprof.read.run import open_run
from dlprof.result import Change, Outcome, Result, RunInfo, Setting, change
from dlprof.result.tried import Attempt, Tried
from dlprof.trial.copies import edit_in
from dlprof.trial.job import Job
from dlprof.trial.planning import Plan
from dlprof.trial.search import Options, Trial, fixed
from tests.fixtures import runs

SCRIPT = """import torch
loader = torch.utils.data.DataLoader(data, num_workers=0)
optimizer = torch.optim.Adam(parameters)
"""
WORKERS: dict[str, Value] = {"loader.num_workers": 2}


def trial(folder: Path, script: str = SCRIPT) -> Trial:
    digest = hashlib.sha256(SCRIPT.encode()).hexdigest()
    calls = [
        {"kind": kind, "file": "train.py", "line": line, "digest": digest, "roles": ["train"], "count": 1}
        for kind, line in (("loader", 2), ("optimizer", 3))
    ]
    facts = {**runs.CPU, "calls": calls, "directory": f"{folder}/"}
    run = open_run(runs.recorded(folder / "run", (None, [runs.light(0, 1)], facts)))
    (folder / "train.py").write_text(script)
    return Trial(run, Job(("train.py",), folder, {}, {}), Plan(()), 30, 0.0, Options())


COMPILE = Outcome("host_bound", "found", "t", changes=(change("compile the model", mode=(None, "default")),))
RESULT = Result(run=RunInfo("run"), window=None, outcomes=(COMPILE,))


@pytest.mark.parametrize(
    ("settings", "no_effect", "lines", "words"),
    [
        ({}, (), [], []),
        (WORKERS, (), ["train.py:2"], []),
        ({**WORKERS, "optimizer.fused": True}, (), ["train.py:2", "train.py:3"], []),
        # No edit makes these.
        ({"env.OMP_NUM_THREADS": "2", **WORKERS}, (), ["train.py:2"], ["OMP_NUM_THREADS=2 before the command"]),
        ({"torch.compile": "default"}, (), [], ["compile the model"]),
        ({"gc.freeze": True}, (), [], ["dlprof wrap --set gc.freeze=True"]),
        # The run that had the edit did not have the setting.
        (WORKERS, ("loader.num_workers",), [], ["--set loader.num_workers=2"]),
    ],
)
def test_what_is_kept_is_a_patch_and_words(
    tmp_path: Path, settings: dict[str, Value], no_effect: tuple[str, ...], lines: list[str], words: list[str]
) -> None:
    best = Attempt(settings, "gain") if settings else None
    made = fixed(trial(tmp_path), RESULT, Tried("complete", best=best, no_effect=no_effect))
    assert list(made.lines) == lines
    assert len(made.words) == len(words)
    assert all(word in text for word, text in zip(words, made.words, strict=True))


def test_an_edit_of_code_is_kept_as_a_patch_or_in_its_words(tmp_path: Path) -> None:
    script = f"{SCRIPT}import gc\ngc.collect()\n"
    (tmp_path / "train.py").write_text(script)
    digest = hashlib.sha256(script.encode()).hexdigest()
    calls = [{"kind": "loader", "file": "train.py", "line": 2, "digest": digest, "roles": ["train"], "count": 1}]
    files = [{"file": "train.py", "digest": digest}]
    facts = {**runs.CPU, "calls": calls, "directory": f"{tmp_path}/", "files": files}
    run = open_run(runs.recorded(tmp_path / "run", (None, [runs.light(0, 1)], facts)))
    mine = Trial(run, Job(("train.py",), tmp_path, {}, {}), Plan(()), 30, 0.0, Options())
    code = "code.train.py:5"
    best = Attempt({code: "collected_by_hand", **WORKERS}, "gain")
    assert best.words == "the edit of train.py:5 (collected_by_hand), loader.num_workers=2"
    made = fixed(mine, RESULT, Tried("complete", best=best))
    assert (list(made.lines), made.words) == (["train.py:2", "train.py:5"], ())
    assert "-gc.collect()\n+pass\n" in made.patch.text
    left_out = Change("leave it out", (Setting("train.py:5", to="collected_by_hand"),))
    known = replace(RESULT, outcomes=(Outcome("gc_pauses", "found", "t", changes=(left_out,)),))
    made = fixed(mine, known, Tried("complete", best=best, no_effect=(code,)))
    assert list(made.lines) == ["train.py:2"]
    assert made.words == ("leave it out (the edit was not seen to take effect)",)


def test_the_patch_applies_with_git_and_is_what_is_written(tmp_path: Path) -> None:
    made = fixed(trial(tmp_path), RESULT, Tried("complete", best=Attempt(WORKERS, "gain")))
    (tmp_path / "fix.patch").write_text(made.patch.text)
    subprocess.run(["git", "apply", "fix.patch"], cwd=tmp_path, check=True)
    by_git = (tmp_path / "train.py").read_text()
    assert by_git == SCRIPT.replace("num_workers=0", "num_workers=2")
    (tmp_path / "train.py").write_text(SCRIPT)
    assert edit_in(tmp_path, made.patch) == ""
    assert (tmp_path / "train.py").read_text() == by_git


def test_a_file_that_has_changed_since_is_left_to_words(tmp_path: Path) -> None:
    made = fixed(trial(tmp_path, SCRIPT + "# more\n"), RESULT, Tried("complete", best=Attempt(WORKERS, "gain")))
    assert made.patch.text == ""
    assert "has changed since it was recorded" in made.words[0]
