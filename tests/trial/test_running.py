"""A short run of a real script: it is ended once it has its steps, leaves no process, and what fails is told."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="recording needs torch")

from dlprof.overrides import Value
from dlprof.trial.job import Job
from dlprof.trial.measuring import Steps
from dlprof.trial.running import KEPT, Failed, Runner, Stopped, Watch
from tests.fixtures import runs, traces
from tests.fixtures.jobs import environment, running, tiny

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
    begun = time.monotonic()
    found = ran(run)
    assert isinstance(found, Steps)
    assert 20 <= len(found.numbers) < 2_000
    assert 5e6 < found.step_ns < 100e6
    assert time.monotonic() - begun < 50
    assert running(script) == []
    assert list(run.folder.iterdir()) == []
    # With workers, which are processes of their own.
    found = ran(run, loader__num_workers=2)
    assert isinstance(found, Steps)
    assert found.ahead == 4
    assert running(script) == []


@pytest.mark.long
def test_a_job_that_ends_sooner_is_measured_by_what_it_has(tmp_path: Path) -> None:
    script = tiny(tmp_path, "for batch in DataLoader(data, batch_size=2):\n    train(batch)\n    time.sleep(0.005)\n")
    found = ran(runner(script, steps=500))
    assert isinstance(found, Steps)
    assert 10 < len(found.numbers) < 32


@pytest.mark.long
def test_a_job_that_never_has_enough_steps_is_ended_when_its_time_is_up(tmp_path: Path) -> None:
    script = tiny(tmp_path, "train(data[:4])\nprint('now it waits', flush=True)\ntime.sleep(600)\n")
    run = runner(script)
    found = ran(run, limit_s=8)
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
def test_the_exit_code_of_the_recording_is_no_crash(tmp_path: Path) -> None:
    body = "for batch in DataLoader(data, batch_size=2):\n    train(batch)\nsys.exit(5)\n"
    assert isinstance(ran(runner(tiny(tmp_path, body), steps=500, exit_code=5)), Steps)


@pytest.mark.long
def test_an_override_that_never_applies_does_not_count(tmp_path: Path) -> None:
    body = "for n in range(200):\n    train(data[:4])\n"
    found = ran(runner(tiny(tmp_path, body), steps=500), loader__num_workers=2)
    assert isinstance(found, Failed)
    assert "loader.num_workers" in found.why


@pytest.mark.long
def test_what_the_job_has_already_does_not_count(tmp_path: Path) -> None:
    found = ran(runner(tiny(tmp_path, TRAINS)), loader__num_workers=0)
    assert isinstance(found, Failed)
    assert "already" in found.why


@pytest.mark.long
def test_a_change_that_prints_nan_does_not_count_unless_the_job_does(tmp_path: Path) -> None:
    body = "print('loss: NaN' if torch.get_num_threads() == 2 else 'loss: 0.3')\n" + TRAINS
    run = runner(tiny(tmp_path, body.replace("print(", "torch.set_num_threads(1)\nprint(", 1)))
    assert isinstance(ran(run), Steps)
    found = ran(run, torch__num_threads=2)
    assert isinstance(found, Failed)
    assert "nan" in found.why
    always = tmp_path / "always"
    always.mkdir()
    run = runner(tiny(always, "print('nan')\n" + TRAINS))
    assert isinstance(ran(run), Steps)
    assert isinstance(ran(run, torch__num_threads=2), Steps)


@pytest.mark.long
def test_a_signal_ends_the_run_at_once(tmp_path: Path) -> None:
    script = tiny(tmp_path, TRAINS)
    output = tmp_path / "try" / "0001" / "output.txt"
    run = runner(script, steps=1_000_000, stopped=lambda: output.is_file() and b"begun" in output.read_bytes())
    with pytest.raises(Stopped):
        ran(run)
    assert running(script) == []


@pytest.mark.long
def test_a_copy_takes_what_the_script_writes(tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    tiny(here, "open('written', 'w').close()\n" + TRAINS)
    (tmp_path / "try").mkdir()
    job = Job((sys.executable, "train.py"), here, environment(), {}, 0)
    run = Runner(job, tmp_path / "try", 20, lambda: False, copy=True)
    assert isinstance(run({}, 60), Steps)
    assert not (here / "written").exists()
    assert list((tmp_path / "try").iterdir()) == []


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


def test_short_steps_that_share_a_line_are_all_counted(tmp_path: Path) -> None:
    assert watched(tmp_path, line(0, 40, steps=40), 30).enough()
