"""What is known before the first run, and what is kept whatever happens then."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from dlprof.errors import DlprofError
from dlprof.result import Outcome, Result, RunInfo, Window, change
from dlprof.result.tried import Attempt
from dlprof.trial import search
from dlprof.trial.job import kept
from dlprof.trial.search import Options, Trial, prepared, tried
from tests.fixtures import runs, traces

MS = runs.MS
ENVIRON = {"PATH": os.environ["PATH"]}
FUSED = Outcome(
    "unfused_optimizer", "found", "t", saving_ns=1e6, share=0.1, speedup=1.1, changes=(change("x", fused=(None, True)),)
)


def run_of(folder: Path, *, command: list[str] | None = None, firsts: int = 0) -> Path:
    steps = [runs.light(n, 20 * MS, first=int(bool(firsts) and n % firsts == 0)) for n in range(400)]
    return runs.recorded(
        folder,
        (None, steps, {**runs.CPU, "host": os.uname().nodename, "env": {}}),
        command=command or [sys.executable, "train.py"],
        cwd=str(folder.parent),
        hosts=[os.uname().nodename],
    )


def result(*outcomes: Outcome) -> Result:
    return Result(run=RunInfo("run"), window=Window(100, "steps", 20e6), outcomes=outcomes)


def planned(folder: Path, *outcomes: Outcome, options: Options = Options(), **run: Any) -> Trial:  # noqa: B008 - frozen
    return prepared(run_of(folder / "run", **run), result(*outcomes), options, ENVIRON)


def test_each_run_measures_seconds_of_the_recorded_step_and_whole_epochs(tmp_path: Path) -> None:
    assert planned(tmp_path / "a", FUSED).steps == 400
    assert planned(tmp_path / "b", FUSED, firsts=200).steps == 640
    own = planned(tmp_path / "c", FUSED, options=Options(steps=17))
    assert (own.steps, own.seconds) == (17, 0.0)


def test_nothing_to_try_runs_nothing_and_is_kept(tmp_path: Path) -> None:
    trial = planned(tmp_path)
    found = tried(trial, lambda: False)
    assert (found.state, found.attempts, found.runs) == ("complete", (), 0)
    assert kept(tmp_path / "run") == found
    assert not (tmp_path / "run/try").exists()


def test_a_job_that_fails_is_told_and_what_it_printed_is_kept(tmp_path: Path) -> None:
    told: list[Attempt | float] = []
    trial = planned(tmp_path, FUSED, command=[sys.executable, "-c", "raise SystemExit('no data')"])
    found = tried(trial, lambda: False, told.append)
    assert (found.state, found.why) == ("failed", "the job ended with exit code 1: no data")
    assert kept(tmp_path / "run") == found
    assert "no data" in (tmp_path / "run/try/0001/output.txt").read_text()
    # The next trial begins with an empty folder.
    (tmp_path / "run/try/0001/old").touch()
    tried(trial, lambda: False)
    assert not (tmp_path / "run/try/0001/old").exists()


def test_one_that_is_stopped_at_once_is_interrupted(tmp_path: Path) -> None:
    found = tried(planned(tmp_path, FUSED), lambda: True)
    assert (found.state, found.best) == ("interrupted", None)
    assert [a.verdict for a in found.attempts] == ["not_tried"]
    assert kept(tmp_path / "run") == found
    assert not (tmp_path / "run/try").exists()


def test_after_each_pair_it_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.fixtures.trials import Pretended

    pretended = Pretended(lambda settings: 50.0 if settings else 100.0)
    monkeypatch.setattr(search, "Runner", lambda *_: pretended)
    states = []

    def tell(_found: Attempt | float) -> None:
        now = kept(tmp_path / "run")
        assert now is not None
        states.append((now.state, now.runs))

    found = tried(planned(tmp_path, FUSED), lambda: False, tell)
    assert states == [("interrupted", 1), ("interrupted", 3), ("interrupted", 5)]
    assert found.state == "complete"
    assert found.best is not None
    assert found.best.measured is not None
    assert found.best.measured.ratio == pytest.approx(2.0)


def test_what_was_not_recorded_cannot_be_tried(tmp_path: Path) -> None:
    with pytest.raises(DlprofError, match="cannot be run again"):
        prepared(runs.foreign(tmp_path / "traces", traces.training()), result(FUSED), Options(), ENVIRON)
    path = run_of(tmp_path / "run")
    with pytest.raises(DlprofError, match="elsewhere"):
        prepared(path, result(FUSED), Options(), {**ENVIRON, "DLPROF_RUN": "elsewhere"})
