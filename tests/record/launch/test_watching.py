"""--stop-after ends a job, with all of its processes, once it has made its steps; that is no failure of the job."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from dlprof.analysis.timeline.steady import ENOUGH
from dlprof.read.run import open_run
from dlprof.trial.measuring import steps_of
from tests.fixtures.jobs import TORCHRUN, facts, launch, rows, running, tiny, wrapped

pytest.importorskip("torch", reason="recording needs torch")

# The loader's workers, which the script leaves to whoever ends it, and a child that has no parent any more.
ENDLESS = """
    import signal, subprocess
    if "RANK" in os.environ:
        torch.distributed.init_process_group("gloo")
    if "slow" in sys.argv:  # to set itself up
        time.sleep(3)
    if "stubborn" in sys.argv:
        signal.signal(signal.SIGTERM, lambda *_: None)
    if "child" in sys.argv and os.fork() == 0:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", __file__], start_new_session=True)
        os._exit(0)
    loader = DataLoader(data, batch_size=8, num_workers=int("workers" in sys.argv))
    while True:
        for batch in loader:
            train(batch)
            time.sleep(0.01)
"""
ENDS = """
    for n in range(20):
        train(data[:8])
    sys.exit(3)
"""
WINDOW = ("--window", "30,1,2", "--stop-after", "20", "--stacks", "off")
CASES = {
    "one that heeds no signal": (WINDOW, [sys.executable], ["workers", "child", "stubborn"], 33),
    "torchrun": (WINDOW, [sys.executable, *TORCHRUN], [], 33),
    "time": (("--no-trace", "--stop-after", "8s"), [sys.executable], [], 1),
    # The script sets itself up for longer than it may train.
    "time of training": (("--no-trace", "--stop-after", "2s of training"), [sys.executable], ["slow"], 40),
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow if case == "time" else pytest.mark.long) for case in CASES]
)
def test_a_job_is_ended_after_its_steps_and_its_window(case: str, tmp_path: Path) -> None:
    options, before, arguments, least = CASES[case]
    script = tiny(tmp_path, ENDLESS)
    done = launch(wrapped(tmp_path / "r", [*before, script, *arguments], *options), tmp_path)
    assert done.returncode == 0, done.stderr
    assert running(script) == []
    ended = json.loads((tmp_path / "r/run.json").read_text())
    asked = {"time": "8 s", "time of training": "2 s of training"}.get(case, "20 steps")
    assert (ended["exit"], ended["stopped"]["asked"]) == ({"code": 0, "signal": None}, asked)
    run = open_run(tmp_path / "r")
    assert f"stopped after {asked}, as asked (--stop-after)" in run.warnings
    assert f"dlprof: stopped after {asked}, as asked (--stop-after)" in done.stderr
    for rank in run.ranks:
        assert rank.facts["window"]["state"] == ("off" if "time" in case else "exported")
    assert len(run.ranks) == (2 if case == "torchrun" else 1)
    log = rows(tmp_path / "r/ranks/00000")
    assert least <= sum(row["kind"] == "train" for row in log) < 2000
    assert len(steps_of(tmp_path / "r").numbers) >= ENOUGH


@pytest.mark.long
def test_a_script_that_ends_by_itself_ends_as_ever(tmp_path: Path) -> None:
    done = launch(wrapped(tmp_path / "r", [sys.executable, tiny(tmp_path, ENDS)], *WINDOW), tmp_path)
    assert done.returncode == 3
    assert "stopped" not in json.loads((tmp_path / "r/run.json").read_text())
    assert facts(tmp_path / "r/ranks/00000")["ended"] == "exit"
