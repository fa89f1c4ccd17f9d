"""`dlprof fix` on real scripts, from the command to a patch that applies and a job that is faster with it."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dlprof.cli import cli
from dlprof.result.tried import Attempt, Gain, Tried, to_json
from tests.fixtures import runs, traces
from tests.fixtures.jobs import DLPROF, environment, launch, running, tiny, until
from tests.fixtures.runs import MS

# Samples that take 2 ms of sleep each: workers hide them, whatever else the machine does.
SLEEPS = """
class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 40_000
    def __getitem__(self, i):
        time.sleep(0.002)
        return data[i % 64]

open("written", "w").close()
for batch in DataLoader(Slow(), batch_size=4, num_workers=0):
    train(batch)
"""


def invoked(*words: str | Path) -> Any:
    return CliRunner().invoke(cli, ["fix", *map(str, words)])


@pytest.mark.long
def test_from_a_command_to_a_patch_that_makes_the_job_faster(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="recording needs torch")
    script = tiny(tmp_path, SLEEPS)
    before = script.read_text()
    options = ["--minutes", "1", "--stop-after", "30", "--format", "json", "-o", "run"]
    done = launch([*DLPROF, "fix", *options, "train.py", "--lr", "0.1"], tmp_path, timeout=200)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    best = found["best"]
    assert best is not None, done.stderr
    workers = best["settings"]["loader.num_workers"]
    assert best["measured"]["low"] > 1.02
    assert (best["losses"], found["no_effect"]) == ("equal", [])
    assert f"1. loader.num_workers={workers}, loader.persistent_workers=True: named by" in done.stderr
    assert "a new copy of" in done.stderr
    assert running(tmp_path) == []
    assert script.read_text() == before
    # The patch is the change, and no more.
    subprocess.run(["git", "apply", "run/fix.patch"], cwd=tmp_path, check=True)
    assert f"batch_size=4, num_workers={workers}, persistent_workers=True" in script.read_text()
    assert found["fix"]["lines"] == [f"train.py:{1 + before[: before.index('num_workers')].count(chr(10))}"]
    subprocess.run(["git", "apply", "-R", "run/fix.patch"], cwd=tmp_path, check=True)
    assert script.read_text() == before


# An edit of code: no setting takes the collector out.
COLLECTS = """
import gc
for batch in DataLoader(data, batch_size=8, sampler=torch.randint(64, (100_000,)).tolist()):
    train(batch)
    gc.collect()
"""


@pytest.mark.slow
def test_a_line_that_is_known_is_edited_and_the_losses_are_the_same(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="recording needs torch")
    script = tiny(tmp_path, COLLECTS)
    options = ["--minutes", "1.6", "--stop-after", "30", "--format", "json", "-o", "run"]
    done = launch([*DLPROF, "fix", *options, "train.py"], tmp_path, timeout=200)
    assert done.returncode == 0, done.stderr
    best = json.loads(done.stdout)["best"]
    assert best is not None, done.stderr
    line = 1 + script.read_text()[: script.read_text().index("gc.collect")].count("\n")
    assert best["settings"][f"code.train.py:{line}"] == "collected_by_hand"
    assert (best["losses"], best["measured"]["low"] > 1.5) == ("equal", True)
    subprocess.run(["git", "apply", "run/fix.patch"], cwd=tmp_path, check=True)
    assert "    pass\n" in script.read_text()


@pytest.mark.long
def test_interrupted_it_leaves_nothing_and_says_so(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="recording needs torch")
    script = tiny(tmp_path, SLEEPS)
    process = subprocess.Popen(
        [*DLPROF, "fix", "-o", "run", script.name], cwd=tmp_path, env=environment(), start_new_session=True
    )
    assert until(lambda: (tmp_path / "written").exists())
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(60) == 128 + signal.SIGINT
    assert running(tmp_path) == []


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run of a script that trains nothing, of which a change was tried before."""
    script = "loader = DataLoader(data, num_workers=0)\n"
    (tmp_path / "train.py").write_text(script)
    call = {"kind": "loader", "file": "train.py", "line": 1, "roles": ["train"], "count": 1}
    call["digest"] = hashlib.sha256(script.encode()).hexdigest()
    facts = {**runs.CPU, "host": os.uname().nodename, "env": {}, "calls": [call], "directory": f"{tmp_path}/"}
    runs.recorded(
        tmp_path / "run",
        (traces.training(), [runs.light(n, 100 * MS) for n in range(40)], facts),
        command=["true"],
        cwd=str(tmp_path),
        hosts=[os.uname().nodename],
    )
    best = Attempt({"loader.num_workers": 2}, "gain", measured=Gain(1.4, 1.3, 1.5, 3), losses="equal")
    (tmp_path / "run/try.json").write_text(json.dumps(to_json(Tried("complete", (best,), best=best))))
    return tmp_path / "run"


@pytest.mark.long
def test_what_was_proved_before_is_kept_and_written_on_request(run: Path) -> None:
    script = run.parent / "train.py"
    done = invoked(run, "--quiet")
    assert done.exit_code == 0, done.output
    assert "Keep loader.num_workers=2: 1.40 × (1.30 to 1.50); its losses are the same" in done.output.replace("\n", " ")
    assert "The patch changes train.py:1." in done.output
    assert "num_workers=2" not in script.read_text()
    done = invoked("--write", run, "--quiet")
    assert "Written into train.py:1. To undo: " in done.output
    assert script.read_text() == "loader = DataLoader(data, num_workers=2)\n"
    # It is not the file any more that was recorded.
    done = invoked(run, "--quiet", "--write")
    assert done.exit_code == 0
    assert "has changed since it was recorded" in " ".join(done.output.split())


def test_nothing_to_gain_is_an_answer(run: Path) -> None:
    (run / "try.json").unlink()
    done = invoked(run, "--quiet")
    assert done.exit_code == 0
    assert "Nothing to keep" in done.output
    assert not (run / "fix.patch").exists()


def test_what_is_not_clear_is_said(run: Path) -> None:
    unclear = Attempt({"gc.freeze": True}, "unclear", measured=Gain(1.1, 0.9, 1.3, 2))
    (run / "try.json").write_text(json.dumps(to_json(Tried("out_of_time", (unclear,)))))
    assert "Nothing to keep yet: gc.freeze=True may" in invoked(run, "--quiet").output


def test_a_job_that_fails_and_a_mistake_are_told(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit(3)\n")
    done = launch([*DLPROF, "fix", "--quiet", "-o", "run", "train.py"], tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert "dlprof: the job ended with exit code 3: nothing is tried" in done.stderr
    assert [invoked(*words).exit_code for words in ((), ("--stop-after", "x", "train.py"))] == [2, 2]
