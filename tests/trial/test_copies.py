"""A working copy has what the job reads, links to large data alone, and no way back to what the job keeps."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dlprof.analysis.source.patches import Patch
from dlprof.errors import DlprofError
from dlprof.trial import copies
from dlprof.trial.copies import by_edit, copied, edit_in, is_changed, moved, quiet_trackers

RECORDED_S, LARGE = 1_000_000.0, "x" * (1 << 20)


def made(folder: Path, files: dict[str, str], age_s: float = 10.0) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (RECORDED_S - age_s,) * 2, follow_symlinks=False)
    return folder


def is_link(copy: Path, name: str) -> bool:
    return any(path.is_symlink() for path in (copy / name, *(copy / name).parents) if path.is_relative_to(copy))


def test_a_copy_is_the_folder_without_runs_and_repositories(tmp_path: Path) -> None:
    files = ("train.py", "data/a.txt", ".git/config", "runs/x/run.json", "here/run.json", "sub/__pycache__/x.pyc")
    here = made(tmp_path / "job", {name: name for name in files})
    (tmp_path / "data").mkdir()
    (here / "link").symlink_to("data")
    (here / "out").symlink_to("../data")
    os.mkfifo(here / "pipe")
    copy, _ = copied(here, here / "try/0001-copy/job")
    assert sorted(p.relative_to(copy).as_posix() for p in copy.rglob("*") if p.is_file()) == ["data/a.txt", "train.py"]
    assert (copy / "link").readlink() == Path("data")
    # What relative paths lead to from the job's folder, they lead to from the copy.
    assert (copy / "out").resolve() == (copy / "../data").resolve() == (tmp_path / "data").resolve()
    (copy / "train.py").write_text("changed")
    assert (here / "train.py").read_text() == "train.py"


@pytest.mark.parametrize(
    ("name", "since_s", "linked"),
    [
        ("data.npy", RECORDED_S, True),
        # It was written by the recorded job, or it may be: nothing is known of when that was.
        ("data.npy", RECORDED_S - 20, False),
        ("data.npy", 0.0, False),
        # What jobs write, and what is edited.
        ("best.pt", RECORDED_S, False),
        ("huge.py", RECORDED_S, False),
    ],
)
def test_only_large_data_older_than_the_recording_is_linked_to(
    tmp_path: Path, name: str, since_s: float, linked: bool
) -> None:
    here = made(tmp_path / "job", {name: LARGE, "small.npy": "x"})
    copy, links = copied(here, tmp_path / "try/0001-copy/job", since_s)
    assert is_link(copy, name) == linked
    assert not is_link(copy, "small.npy")
    assert [is_changed(path, RECORDED_S) for path in links] == [False] * linked
    if linked:
        (copy / name).write_text("written")
        assert all(is_changed(path, RECORDED_S) for path in links)


def test_a_folder_of_many_files_is_linked_to_unless_one_is_a_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "_MANY", 4)
    here = made(
        tmp_path / "job", {f"{of}/{n}.jpg": "x" for of in ("data", "few", "both") for n in range(4 - (of == "few"))}
    )
    made(here / "both", {"last.ckpt": "x"})
    copy, _ = copied(here, tmp_path / "try/0001-copy/job", RECORDED_S)
    assert [is_link(copy, f"{of}/0.jpg") for of in ("data", "few", "both")] == [True, False, False]


@pytest.mark.parametrize(("name", "most"), [("MOST_BYTES", 1), ("MOST_FILES", 1)])
def test_too_much_is_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, most: int) -> None:
    monkeypatch.setattr(copies, name, most)
    with pytest.raises(DlprofError, match="too much to copy"):
        copied(made(tmp_path / "job", {"a": "xx", "b": "xx"}), tmp_path / "try/0001-copy/job")


def test_an_edit_is_made_in_the_folder_or_not_at_all(tmp_path: Path) -> None:
    here = made(tmp_path / "job", {"a.py": "1", "b.py": "2"})
    made(tmp_path, {"elsewhere.py": "3"})
    (here / "link.py").symlink_to("../elsewhere.py")
    both = Patch("", files={"a.py": (b"1", b"one"), "b.py": (b"2", b"two")})
    for other in ({"b.py": (b"0", b"two")}, {"link.py": (b"3", b"three")}, {"none.py": (b"", b"x")}):
        assert edit_in(here, Patch("", files={"a.py": (b"1", b"one"), **other})) != ""
    assert ((here / "a.py").read_text(), (tmp_path / "elsewhere.py").read_text()) == ("1", "3")
    assert edit_in(here, both) == ""
    assert ((here / "a.py").read_text(), (here / "b.py").read_text()) == ("one", "two")


@pytest.mark.parametrize(
    ("word", "there"),
    [
        ("/job/train.py", "/copy/train.py"),
        ("--out=/job/x:/job", "--out=/copy/x:/copy"),
        ("/job", "/copy"),
        *((same, same) for same in ("train.py", "/job/.venv/bin/python", "/jobs/x", "/my/job/x", "/job-2")),
    ],
)
def test_words_that_name_the_folder_name_its_copy(word: str, there: str) -> None:
    assert moved(word, Path("/job"), Path("/copy")) == there


def test_trackers_write_into_the_run_and_what_is_off_stays_off() -> None:
    made = quiet_trackers({"WANDB_MODE": "disabled", "MLFLOW_TRACKING_URI": "https://example.org"}, Path("/run"))
    assert made["MLFLOW_TRACKING_URI"] == "file:///run/mlruns"
    assert (made["WANDB_DIR"], "WANDB_MODE" in made) == ("/run", False)


def test_which_settings_only_an_edit_makes() -> None:
    assert [by_edit(n) for n in ("loader.num_workers", "env.OMP_NUM_THREADS", "env.lower", "loader.drop_last")] == [
        False,
        False,
        False,
        True,
    ]


def test_in_a_repository_what_stands_above_is_linked_to_but_what_the_job_wrote(tmp_path: Path) -> None:
    root = tmp_path / "repository"
    old = {
        "a/b/job/train.py": "x",
        "a/b/beside/c": "y",
        "a/data/c": "z",
        "conf/c": "1",
        ".git/config": "",
        "runs/r": "",
    }
    for name, text in {**old, "a/out/last.txt": "new"}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    for path in [*root.rglob("*"), root]:
        if "out" not in path.parts:
            os.utime(path, (RECORDED_S - 10, RECORDED_S - 10))
    copy, _ = copied(root / "a/b/job", tmp_path / "try/0001-copy/job", RECORDED_S)
    assert copy == tmp_path / "try/0001-copy/a/b/job"
    read = {name: (copy / name).read_text() for name in ("train.py", "../beside/c", "../../data/c", "../../../conf/c")}
    assert [*read.values()] == ["x", "y", "z", "1"]
    assert not (copy / "../../out").exists()
    assert not (copy / "../../../runs").exists()
    (root / "a/b/job/.git").mkdir()  # a repository of its own
    assert copied(root / "a/b/job", tmp_path / "try/0002-copy/job", RECORDED_S)[0] == tmp_path / "try/0002-copy/job"
