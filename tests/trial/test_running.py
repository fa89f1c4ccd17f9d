"""A short run of a real script: it ends with its steps, leaves no process, and what fails is told."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.source.patches import Patch
from dlprof.overrides import Value
from dlprof.record.launch import watching as job_stopping
from dlprof.trial.job import Job
from dlprof.trial.measuring import Steps
from dlprof.trial.running import KEPT, Failed, Runner, Stopped, Watch, stopping
from tests.fixtures import runs, traces
from tests.fixtures.jobs import environment, running, tiny, until, words

pytest.importorskip("torch", reason="recording needs torch")


TRAINS = """
print("begun", flush=True)
for epoch in range(10_000):
    for batch in DataLoader(data, batch_size=4):
        train(batch)
        time.sleep(0.005)
"""


def runner(script: Path, steps: int = 20, stopped: Callable[[], bool] = lambda: False, **more: Any) -> Runner:
    (script.parent / "try").mkdir(exist_ok=True)
    exit_code = more.pop("exit_code", 0)
    cwd = more.pop("cwd", script.parent)
    job = Job((sys.executable, str(script)), cwd, environment(), {}, exit_code)
    return Runner(job, script.parent / "try", steps, stopped, **more)


def ran(run: Runner, limit_s: float = 60, **settings: Value) -> Steps | Failed:
    named: Mapping[str, Value] = {name.replace("__", "."): value for name, value in settings.items()}
    return run(named, limit_s)


@pytest.mark.long
def test_an_endless_job_ends_with_its_steps_and_leaves_nothing(tmp_path: Path) -> None:
    script = tiny(tmp_path, TRAINS)
    run = runner(script)
    found = ran(run)
    assert isinstance(found, Steps)
    assert 20 <= len(found.numbers) < 2_000
    assert found.step_ns > 5e6
    assert running(script) == []
    assert list(run.folder.iterdir()) == []
    # With workers, which are processes of their own.
    found = ran(run, loader__num_workers=2)
    assert isinstance(found, Steps)
    assert found.ahead == 4
    assert running(script) == []


@pytest.mark.long
def test_a_job_that_ends_sooner_is_measured_by_what_it_has(tmp_path: Path) -> None:
    body = "for batch in DataLoader(data, batch_size=2):\n    train(batch)\n    time.sleep(0.005)\nsys.exit(5)\n"
    found = ran(runner(tiny(tmp_path, body), steps=500, exit_code=5))  # as the recording ended: no crash
    assert isinstance(found, Steps)
    assert 10 < len(found.numbers) < 32


@pytest.mark.long
def test_a_job_that_never_has_enough_steps_is_ended_when_its_time_is_up(tmp_path: Path) -> None:
    (script := tmp_path / "train.py").write_text("import time\nprint('now it waits', flush=True)\ntime.sleep(600)\n")
    run = runner(script)
    found = ran(run, limit_s=4)
    assert isinstance(found, Failed)
    assert found.over
    assert "time was up" in found.why
    assert found.output is not None
    assert "now it waits" in found.output.read_text()
    assert running(script) == []


@pytest.mark.long
def test_what_a_crash_printed_is_kept_of_the_last_ones(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit('no data here')\n")
    run = runner(tmp_path / "train.py")
    for _ in range(KEPT + 1):
        found = ran(run)
        assert isinstance(found, Failed)
        assert found.why == "the job ended with exit code 1: no data here"
        assert found.output is not None
        assert "no data here" in found.output.read_text()
    assert sorted(p.name for p in run.folder.iterdir()) == [f"{n:04d}" for n in range(2, KEPT + 2)]


@pytest.mark.long
@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("for n in range(200):\n    train(data[:4])\n", "loader.num_workers"),  # no loader: it never applies
        pytest.param(TRAINS, "already", marks=pytest.mark.slow),
    ],
)
def test_a_change_that_changes_nothing_does_not_count(tmp_path: Path, body: str, why: str) -> None:
    found = ran(runner(tiny(tmp_path, body), steps=500 if body != TRAINS else 20), loader__num_workers=0)
    assert isinstance(found, Failed)
    assert why in found.why


@pytest.mark.long
def test_a_change_that_prints_nan_does_not_count(tmp_path: Path) -> None:
    body = "print('loss: NaN' if torch.get_num_threads() == 2 else 'loss: 0.3')\n" + TRAINS
    run = runner(tiny(tmp_path, body.replace("print(", "torch.set_num_threads(1)\nprint(", 1)))
    assert isinstance(ran(run), Steps)
    found = ran(run, torch__num_threads=2)
    assert isinstance(found, Failed)
    assert "nan" in found.why


@pytest.mark.long
def test_a_signal_ends_the_run_at_once(tmp_path: Path) -> None:
    script = tiny(tmp_path, TRAINS)
    output = tmp_path / "try" / "0001" / "output.txt"
    run = runner(script, steps=1_000_000, stopped=lambda: output.is_file() and b"begun" in output.read_bytes())
    with pytest.raises(Stopped):
        ran(run)
    assert running(script) == []


def edit(before: bytes, after: bytes, file: str = "train.py") -> Patch:
    return Patch("a diff", files={file: (before, after)})


@pytest.mark.long
def test_a_copy_takes_what_the_script_writes_and_an_edit_is_made_in_it(tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    # By its whole path, and with what trackers read.
    body = "open('written', 'w').write(os.environ['WANDB_MODE'])\nassert os.path.isfile('written')\n" + TRAINS
    script = tiny(here, body)
    (here / "other.py").touch()
    (tmp_path / "try").mkdir()
    job = Job((sys.executable, str(script)), here, environment(), {}, 0)
    before = script.read_bytes()
    half = before.replace(b"batch_size=4", b"batch_size=2")
    edits = {"loader.batch_size": edit(before, half), "loader.drop_last": edit(b"", b"# more", "other.py")}
    run = Runner(job, tmp_path / "try", 20, lambda: False, copy=True, patch_of=lambda made: edits[min(made)])
    found = run({"loader.batch_size": 2}, 60)
    assert isinstance(found, Steps), found
    assert found.batch_size == 2
    unused = run({"loader.drop_last": True}, 60)
    assert isinstance(unused, Failed)
    assert "other.py never took effect" in unused.why
    # Nothing of the job's own is touched.
    assert not (here / "written").exists()
    assert script.read_bytes() == before
    assert [path.name for path in (tmp_path / "try").iterdir()] == ["0002"]
    in_place = Runner(job, tmp_path / "try", 20, lambda: False, patch_of=run.patch_of)({"loader.batch_size": 2}, 60)
    assert isinstance(in_place, Failed)
    assert script.read_bytes() == before


def line(n: int, ms: float, **more: Any) -> str:
    return json.dumps(runs.light(n, int(ms * runs.MS), traces.BASE_NS + n, **more)) + "\n"


def watched(folder: Path, text: str, steps: int, seconds: float = 0.0, **facts: Any) -> Watch:
    rank = folder / "ranks" / "00000"
    rank.mkdir(parents=True, exist_ok=True)
    (rank / "steps.jsonl").write_text(text)
    (rank / "facts.json").write_text(json.dumps(facts))
    return Watch(folder, steps, seconds)


def test_the_log_is_followed_as_it_grows(tmp_path: Path) -> None:
    assert not Watch(tmp_path, 5).enough()
    text = "".join(line(n, 10) for n in range(7))
    watch = watched(tmp_path, text + '{"step": 7, "ki', 5)
    assert not watch.enough()
    (tmp_path / "ranks/00000/steps.jsonl").write_text(text + line(7, 10) + "not json\n[]\n" + line(8, 10))
    assert watch.enough()


@pytest.mark.parametrize(
    "odd", [{"kind": "validation"}, {"first": 1}, {"outstanding": 1}], ids=["validation", "first", "outstanding"]
)
def test_only_steps_that_count_are_counted(tmp_path: Path, odd: dict[str, Any]) -> None:
    text = "".join(line(n, 10) for n in range(7)) + "".join(line(n, 10, **odd) for n in range(7, 40))
    assert not watched(tmp_path, text, 5).enough()


def test_the_warm_up_what_was_made_ahead_and_the_seconds_count(tmp_path: Path) -> None:
    text = "".join(line(n, 900 if n < 6 else 10) for n in range(30))
    assert watched(tmp_path / "a", text, 24).enough()
    assert not watched(tmp_path / "b", text, 25).enough()
    loaders = [{"role": "train", "num_workers": 2}]
    assert watched(tmp_path / "c", text, 20, loaders=loaders).enough()
    assert not watched(tmp_path / "d", text, 21, loaders=loaders).enough()
    assert watched(tmp_path / "e", text, 5, seconds=0.24).enough()
    assert not watched(tmp_path / "f", text, 5, seconds=0.25).enough()


# A launcher whose children are hard to end: one that is detached (setsid) and ignores SIGTERM, one that is stopped, one
# whose parent is gone and which is detached as well.
STARTS = """
import os, signal, subprocess, sys, time
wait = "import sys, time; open(sys.argv[1] + str(len(sys.argv[2])), 'w').close(); time.sleep(600)"
deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + wait
subprocess.Popen([sys.executable, "-c", deaf, sys.argv[1], "x"], start_new_session=True)
stopped = subprocess.Popen([sys.executable, "-c", wait, sys.argv[1], "xx"])
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, [sys.executable, "-c", wait, sys.argv[1], "xxx"])
    os._exit(0)
os.wait()
while not os.path.exists(sys.argv[1] + "2"):
    time.sleep(0.02)
os.kill(stopped.pid, signal.SIGSTOP)
open(sys.argv[1] + "0", "w").close()
time.sleep(600)
"""


def marked(text: str) -> list[int]:
    return [pid for p in Path("/proc").glob("[0-9]*") if text in words(pid := int(p.name))]


@pytest.mark.long
def test_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_stopping, "GRACE_S", 0.5)
    mark = str(tmp_path / "up")
    env = environment(DLPROF_RUN=str(tmp_path / "run"))
    root = subprocess.Popen([sys.executable, "-c", STARTS, mark], env=env, start_new_session=True)
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env=environment())
    try:
        assert until(lambda: all(Path(f"{mark}{n}").exists() for n in range(4)))
        assert job_stopping.processes_of(root.pid, tmp_path / "run") == set(marked(mark))
        assert len(marked(mark)) == 4
        job_stopping.end(root.pid, tmp_path / "run")
        root.wait(10)
        assert marked(mark) == []
        assert other.poll() is None
    finally:
        for pid in (*marked(mark), other.pid):
            os.kill(pid, 9)
        other.wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_noted_and_ends_nothing(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with stopping() as asked:
        assert not asked()
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), signal.SIGTERM)
        assert asked()
        assert asked.by == number
    assert signal.getsignal(number) is before


def test_one_that_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stopping() as asked:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not asked()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_an_interpreter_above_the_folder_is_started_there(tmp_path: Path) -> None:
    for given, started in (
        ("../../env/python", str(tmp_path / "env/python")),
        ("bin/python", "bin/python"),
        ("python", "python"),
    ):
        run = Runner(Job((given, "../t.py"), tmp_path / "a/b", {}, {}), tmp_path, 1, lambda: False)
        (tmp_path / "copy/bin").mkdir(parents=True, exist_ok=True)
        (tmp_path / "copy/bin/python").touch()
        said = run._words({}, tmp_path / "run", tmp_path / "copy")
        assert said[said.index("--") + 1 :] == [started, "../t.py"]
