"""A recorded job is started as it was or it is said why not; what was tried is kept in its folder."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from dlprof.errors import DlprofError
from dlprof.read.run import open_run
from dlprof.result import Change, Proposal, Result, RunInfo
from dlprof.result.tried import Attempt, Gain, Of, Tried, Verdict
from dlprof.trial.job import Job, added, keep, kept, merged, repeatable, with_tried
from tests.fixtures import runs

STEPS = [runs.light(n, 10 * runs.MS) for n in range(20)]
HERE = os.uname().nodename


def job(
    folder: Path,
    *facts: dict[str, Any],
    environ: dict[str, str] | None = None,
    instead: tuple[str, ...] = (),
    **info: Any,
) -> Job:
    stalls = info.pop("stalls", None)
    told = {"command": [sys.executable, "train.py"], "cwd": str(folder), "hosts": [HERE]} | info
    ranks = [(None, STEPS, of) for of in facts or ({},)]
    run = open_run(runs.recorded(folder / "run", *ranks, stalls=stalls, **told))
    return repeatable(run, {"PATH": os.environ["PATH"]} if environ is None else environ, instead)


def test_command_folder_and_exit_are_the_recorded_ones(tmp_path: Path) -> None:
    found = job(tmp_path, exit={"code": 3, "signal": None})
    assert found.command == (sys.executable, "train.py")
    assert found.cwd == tmp_path
    assert found.exit_code == 3


def test_variables_that_affect_training_are_as_they_were(tmp_path: Path) -> None:
    now = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "7", "NCCL_DEBUG": "INFO", "OWN": "x", "DLPROF_JOB": "old"}
    found = job(tmp_path, {"env": {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}}, environ=now)
    assert found.env == {"PATH": now["PATH"], "OWN": "x", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    assert found.warnings == ()


def test_what_differs_from_rank_to_rank_was_the_launchers(tmp_path: Path) -> None:
    ranks = [{"env": {"CUDA_VISIBLE_DEVICES": str(n), "OMP_NUM_THREADS": "1", "SLURM_JOB_ID": "4"}} for n in range(2)]
    assert set(job(tmp_path, *ranks).env) == {"PATH", "OMP_NUM_THREADS"}


def test_an_environment_that_is_not_known_is_told(tmp_path: Path) -> None:
    (warning,) = job(tmp_path).warnings
    assert "environment" in warning


def test_overrides_of_the_recording_stay(tmp_path: Path) -> None:
    options = {"set": {"loader.num_workers": 2, "env.API_KEY": "[redacted]"}}
    assert job(tmp_path, options=options).settings == {"loader.num_workers": 2}


def test_another_host_is_told(tmp_path: Path) -> None:
    assert any("elsewhere" in w for w in job(tmp_path, {"env": {}}, hosts=["elsewhere"]).warnings)


def test_where_it_was_seen_to_save(tmp_path: Path) -> None:
    saved = [runs.stall("checkpoint", n, 5, path=path) for n, path in ((5, "last.pt"), (6, "last.pt"), (7, "best.pt"))]
    assert job(tmp_path, stalls=[[*saved, runs.stall("garbage_collection", 8, 5)]]).saves == ("last.pt", "best.pt")


@pytest.mark.parametrize(
    ("info", "why"),
    [
        ({"command": []}, "no command"),
        ({"command": [sys.executable, "train.py", "--token", "[redacted]"]}, "--keep-arguments"),
        ({"command": [sys.executable, "train.py", "--data", "…"]}, "train.py --data …"),
        ({"command": ["no-such-launcher", "train.py"]}, "no-such-launcher"),
        ({"cwd": "/no/such/folder"}, "/no/such/folder"),
        ({"cwd": None}, "folder"),
        ({"hosts": [HERE, "other"]}, "2 hosts"),
        ({"tasks": [{"host": HERE, "number": "0", "exit": {"code": 0, "signal": None}}]}, "one by one"),
    ],
)
def test_what_cannot_be_started_again_is_refused_with_what_to_do(
    tmp_path: Path, info: dict[str, Any], why: str
) -> None:
    with pytest.raises(DlprofError, match=why):
        job(tmp_path, **info)


def test_another_command_stands_for_the_recorded_one(tmp_path: Path) -> None:
    found = job(tmp_path, instead=(sys.executable, "other.py"), command=["x", "[redacted]"])
    assert found.command == (sys.executable, "other.py")


def test_what_no_dlprof_recorded_is_refused(tmp_path: Path) -> None:
    path = runs.recorded(tmp_path / "run", (None, STEPS, {}))
    (path / "run.json").write_text("{")
    with pytest.raises(DlprofError, match="recorded"):
        repeatable(open_run(path), dict(os.environ))
    (path / "run.json").write_text(json.dumps([]))
    with pytest.raises(DlprofError):
        repeatable(open_run(path), dict(os.environ))


FOUND = Tried("complete", (Attempt({"gc.freeze": True}, "no_gain"),), runs=3)
RESULT = Result(run=RunInfo("run"), window=None)


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert kept(tmp_path) is None
    assert with_tried(RESULT, tmp_path) is RESULT
    keep(tmp_path, FOUND)
    assert kept(tmp_path) == FOUND
    assert with_tried(RESULT, tmp_path).tried == FOUND


@pytest.mark.parametrize(
    ("of", "before_ns", "gain", "after"),
    [
        # Of a run of 100 steps of 1 s each: a start of 40 s that is 4 × as fast leaves 70 s, one that is 2 × leaves 80.
        ("start", 40e9, Gain(4.0, 2.0, 8.0, 2), (1e9, 0.7e9, 70e9, 100 / 70, 100 / 80, 100 / 65)),
        ("start", 40e9, Gain(4.0), (1e9, 0.7e9, 70e9, 100 / 70, None, None)),
        ("step", 0.9e9, Gain(1.5, 1.4, 1.6, 2), (0.9e9, 0.6e9, 50e9, 1.5, 1.4, 1.6)),
    ],
)
def test_a_measured_gain_takes_the_place_of_the_predicted_one(
    of: Of, before_ns: float, gain: Gain, after: tuple[float | None, ...]
) -> None:
    edit = Change("a dictionary", diff="-a\n+b\n")
    one = Proposal(edit, ("slow_start",), "run", 1e9, 5e8, 2.0, at_most=True, job_before_ns=100e9, job_after_ns=50e9)
    tries = Attempt({"code.t.py:1": "x"}, "gain", of=of, measured=gain, before_ns=before_ns, edit="-a\n+b\n")
    tries = replace(tries, after_ns=before_ns / gain.ratio)
    (found,) = added(replace(RESULT, changes=(one,)), replace(FOUND, attempts=(tries,))).changes
    assert (found.known, found.at_most) == ("tried", False)
    figures = (found.before_ns, found.after_ns, found.job_after_ns, found.speedup, found.low, found.high)
    assert list(figures) == pytest.approx(list(after))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format":1}', '{"format":9,"state":"complete"}', "[" * 100_000])
def test_a_broken_file_costs_a_warning(tmp_path: Path, text: str) -> None:
    (tmp_path / "try.json").write_text(text)
    with pytest.raises(DlprofError, match=r"try\.json"):
        kept(tmp_path)
    found = with_tried(RESULT, tmp_path)
    assert found.tried is None
    (warning,) = found.run.warnings
    assert "try.json" in warning


def test_a_link_that_leads_out_is_not_followed(tmp_path: Path) -> None:
    keep(tmp_path, FOUND)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "try.json").symlink_to(tmp_path / "try.json")
    assert kept(tmp_path / "run") is None


def attempt(name: str, verdict: Verdict, ratio: float = 1.0, pairs: int = 0, **more: Any) -> Attempt:
    return Attempt({name: True}, verdict, measured=Gain(ratio, pairs=pairs) if pairs else None, **more)


GAIN = attempt("optimizer.fused", "gain", 1.5, 4, losses="equal")
BEFORE = Tried("complete", (GAIN, attempt("gc.freeze", "unclear", 1.1, 1)), best=GAIN, runs=9, steps=30)


@pytest.mark.parametrize(
    ("now", "attempts", "best"),
    [
        # What did not run, or less often, erases nothing.
        (Tried("failed", why="no data"), BEFORE.attempts, GAIN),
        (Tried("interrupted", (attempt("optimizer.fused", "not_tried"),)), BEFORE.attempts, GAIN),
        (Tried("complete", (attempt("optimizer.fused", "slower", 0.9, 3),)), BEFORE.attempts, GAIN),
        # The later result of as many pairs counts.
        (
            Tried("complete", (no := attempt("optimizer.fused", "no_gain", 1.0, 4, losses="equal"),)),
            (no, BEFORE.attempts[1]),
            None,
        ),
        (
            Tried("complete", (new := attempt("gc.freeze", "gain", 1.6, 2),), best=new),
            (GAIN, new),
            new,
        ),
        (
            Tried("complete", (less := attempt("gc.enabled", "gain", 1.2, 2),), best=less),
            (*BEFORE.attempts, less),
            GAIN,
        ),
    ],
)
def test_nothing_that_was_proved_is_erased_by_a_later_trial(
    now: Tried, attempts: tuple[Attempt, ...], best: Attempt | None
) -> None:
    assert merged(None, now) == now
    found = merged(BEFORE, now)
    assert found.attempts == attempts
    assert found.best == best
    assert (found.state, found.why, found.runs) == (now.state, now.why, 9)
    # The same settings by an edit are another attempt.
    edit = attempt("optimizer.fused", "slower", 0.9, 9, edit="a diff")
    assert merged(BEFORE, Tried("complete", (edit,))).attempts == (*BEFORE.attempts, edit)
