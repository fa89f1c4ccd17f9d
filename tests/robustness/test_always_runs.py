"""The job runs wherever it would run without dlprof, and ends as it would: what is in the way costs the recording."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from dlprof.read.run import open_run
from tests.fixtures.jobs import DLPROF, TORCHRUN, environment, launch, tiny

RUNS = ("--", "sh", "-c", "echo ran; exit 7")
LIMITED = ("sh", "-c", 'ulimit -f "$0"; "$@"')
LOOP = "for batch in list(DataLoader(data, batch_size=8)) * 20: train(batch)\nprint('ran')\nsys.exit(7)"

Mount = Callable[..., Path]


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    """Return what mounts something for one test, by options of the program; skip where that is not allowed."""
    places: list[Path] = []

    def mounted(*options: str) -> Path:
        place = tmp_path / f"mounted-{len(places)}"
        place.mkdir()
        done = subprocess.run(["mount", *options, place], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
        places.append(place)
        return place

    if shutil.which("mount") is None:
        pytest.skip("there is no mount(8)")
    yield mounted
    for place in places:
        subprocess.run(["umount", place], check=False)


def read_only(mount: Mount) -> Path:
    return mount("-t", "tmpfs", "-o", "size=64k,ro", "tmpfs")


def full(mount: Mount) -> Path:
    place = mount("-t", "tmpfs", "-o", "size=64k", "tmpfs")
    (place / "fills").touch()
    with suppress(OSError):
        (place / "fills").write_bytes(bytes(1 << 20))
    assert shutil.disk_usage(place).free == 0
    return place


def temporary(tmp_path: Path) -> Path:
    """Return where the runs of this user lie in $TMPDIR."""
    return tmp_path / "tmp" / f"dlprof-{os.getuid()}"


def told(stderr: str) -> str:
    """Return the one line that says where the recording is, or that there is none."""
    (line,) = (one for one in stderr.splitlines() if "; recording into " in one or "; nothing is recorded" in one)
    return line


@pytest.mark.parametrize(
    ("place", "said", "named"),
    [(read_only, "Read-only file system", False), (full, "No space left on device", True)],
)
def test_a_disk_that_takes_nothing_costs_the_folder_and_then_the_recording(
    place: Callable[[Mount], Path], said: str, named: bool, mount: Mount, tmp_path: Path
) -> None:
    (tmp_path / "tmp").mkdir()
    there = place(mount)
    before = sorted(there.rglob("*"))
    out = ("-o", str(there / "out")) if named else ()
    command = [*DLPROF, "wrap", *out, "--quiet", "--no-sample", *RUNS]
    done = launch(command, there, env=environment(TMPDIR=str(tmp_path / "tmp")))
    assert (done.returncode, done.stdout) == (7, "ran\n"), done.stderr
    (run,) = temporary(tmp_path).iterdir()
    first = re.escape(str(there / "out")) if named else "runs/sh-[0-9-]+"
    assert re.fullmatch(
        f"dlprof: cannot record into {first}: {said}; recording into {re.escape(str(run))}", told(done.stderr)
    )
    assert json.loads((run / "run.json").read_text())["exit"]["code"] == 7
    # Where $TMPDIR is on such a disk too, nothing is recorded.
    off = launch(command, there, env=environment(TMPDIR=str(there)))
    assert (off.returncode, off.stdout) == (7, "ran\n")
    assert told(off.stderr) == off.stderr.rstrip("\n")
    assert off.stderr.count(said) == 2
    assert [path for path in sorted(there.rglob("*")) if path.name not in (f"dlprof-{os.getuid()}", "runs")] == before


@pytest.mark.parametrize(
    ("out", "said"),
    [
        ("file/out", "Not a directory"),
        pytest.param("x" * 300, "File name too long", marks=pytest.mark.slow),
        pytest.param("/proc/out", "No such file or directory", marks=pytest.mark.slow),
    ],
)
def test_a_path_that_cannot_be_costs_the_folder(out: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    (tmp_path / "file").touch()
    command = [*DLPROF, "wrap", "-o", out, "--quiet", "--no-sample", *RUNS]
    done = launch(command, tmp_path, env=environment(TMPDIR=str(tmp_path / "tmp")))
    assert (done.returncode, done.stdout) == (7, "ran\n"), done.stderr
    (run,) = temporary(tmp_path).iterdir()
    assert told(done.stderr) == f"dlprof: cannot record into {out}: {said}; recording into {run}"


def test_a_limit_on_the_size_of_files_costs_the_recording_and_is_named(tmp_path: Path) -> None:
    command = [*LIMITED, "0", *DLPROF, "wrap", "-o", "out", "--quiet", "--no-sample", *RUNS]
    done = launch(command, tmp_path)
    assert (done.returncode, done.stdout) == (7, "ran\n"), done.stderr
    assert "out: File too large (ulimit -f limits the size of files)" in told(done.stderr)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("theirs", ["a link", "open to all", "another user's"])
def test_nobody_else_can_have_the_recording_by_a_folder_in_the_shared_one(theirs: str, tmp_path: Path) -> None:
    elsewhere, planted = tmp_path / "elsewhere", temporary(tmp_path)
    elsewhere.mkdir()
    planted.parent.mkdir()
    if theirs == "a link":
        planted.symlink_to(elsewhere)
    else:
        planted.mkdir()
        if theirs == "open to all":
            planted.chmod(0o777)
        elif os.geteuid() == 0:
            os.chown(planted, 65534, 65534)
        else:
            pytest.skip("to give a folder away needs root")
    (tmp_path / "file").touch()
    command = [*DLPROF, "wrap", "-o", "file/out", "--quiet", "--no-sample", *RUNS]
    done = launch(command, tmp_path, env=environment(TMPDIR=str(planted.parent)))
    assert (done.returncode, done.stdout) == (7, "ran\n"), done.stderr
    assert f"{planted} is not this user's own; nothing is recorded" in told(done.stderr)
    assert not [*elsewhere.iterdir(), *planted.iterdir()]


@pytest.mark.long
def test_each_rank_of_torchrun_that_starts_dlprof_has_the_same_folder(mount: Mount, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torchrun is torch's")
    (tmp_path / "tmp").mkdir()
    there = read_only(mount)
    wrap = [*DLPROF, "wrap", "-o", str(there / "out"), "--quiet", "--no-sample", "--no-report"]
    command = [sys.executable, *TORCHRUN, "--no-python", *wrap, "--", "sh", "-c", "echo ran $RANK"]
    done = launch(command, tmp_path, env=environment(TMPDIR=str(tmp_path / "tmp")))
    assert (done.returncode, sorted(done.stdout.splitlines())) == (0, ["ran 0", "ran 1"]), done.stderr
    (run,) = tmp_path.glob("tmp/dlprof-*/*")
    assert [task["number"] for task in json.loads((run / "run.json").read_text())["tasks"]] == ["0", "1"]
    assert done.stderr.count("; recording into") == 1


@pytest.mark.long
@pytest.mark.parametrize("kb", [120, *(pytest.param(kb, marks=pytest.mark.slow) for kb in (60, 400))])
def test_a_disk_that_fills_while_the_job_runs_or_is_reported_on_changes_nothing_of_it(
    kb: int, mount: Mount, tmp_path: Path
) -> None:
    pytest.importorskip("torch", reason="recording needs torch")
    there = mount("-t", "tmpfs", "-o", f"size={kb}k", "tmpfs")
    loop = tiny(tmp_path, LOOP)
    done = launch([*DLPROF, "wrap", "-o", str(there / "out"), "--window", "10,1,20", str(loop)], tmp_path)
    assert (done.returncode, done.stdout) == (7, "ran\n"), done.stderr
    ours = [line for line in done.stderr.splitlines() if line.startswith("dlprof: ")]
    assert any("No space left on device" in line for line in ours)
    assert "Traceback" not in done.stderr
    # What fitted is a run.
    assert open_run(there / "out").exit == {"code": 7, "signal": None} or "run.json has no end" in done.stderr
