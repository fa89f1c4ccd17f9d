"""How what dlprof says of a job while it runs is judged, and that the job beside is heard and ended."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import live
from benchmarks.gpu import live_judges as judges
from benchmarks.gpu.jobs import Beside, Ended, JobFailedError, python
from benchmarks.gpu.outcome import Part


def ended(code: int | None = 0, out: str = "", errors: str = "") -> Ended:
    return Ended(("dlprof",), code, 1.0, tuple((0.0, text) for text in out.splitlines()), errors)


def failed(*parts: Part) -> list[str]:
    return [part.name for part in parts if part.state == "failed"]


def top(step_s: float | None = 0.030, busy: float | None = 0.8, state: str = "running") -> dict[str, Any]:
    return {"state": state, "step_s": step_s, "ranks": [{"machine": {"gpu_busy_share": busy}}]}


FRAME = ended(out="runs/a  python train.py\nrunning for 0:12:08")


@pytest.mark.parametrize(
    ("text", "told", "used", "wrong"),
    [
        (FRAME, top(), [79.0, 81.0, 80.0], []),
        (FRAME, top(0.0335), [80.0], ["top: step"]),
        (FRAME, top(busy=0.69), [80.0], ["top: the GPU's use"]),
        (FRAME, top(busy=None), [80.0], ["top: the GPU's use"]),
        (FRAME, top(), [], ["top: the GPU's use"]),
        (FRAME, top(state="still"), [80.0], ["top: it runs"]),
        (FRAME, top() | {"ranks": [], "step_s": None}, [80.0], ["top: step", "top: the GPU's use"]),
        (ended(1, errors="Error: no run"), top(), [80.0], ["top: it runs"]),
    ],
)
def test_top_is_held_against_the_jobs_lines_and_nvidia_smi(
    text: Ended, told: dict[str, Any], used: Sequence[float], wrong: list[str]
) -> None:
    sure, figures = judges.of_top(text, told, 0.030, used)
    assert failed(*sure, *figures) == wrong


def row(now: str = "trains (waits for its device)", pid: int = 7, ranks: int = 1, run: str = "") -> dict[str, Any]:
    return {"pid": pid, "ranks": ranks, "run": run, "now": now}


OTHER = row("stopped", pid=8)


@pytest.mark.parametrize(
    ("looks", "wrong"),
    [
        ([[row()]], []),
        ([[OTHER, row("runs Python")], [row(), OTHER]], []),
        ([[row("trains")]], ["ps: its word"]),
        ([[row("waits for data")], [row()]], ["ps: its word"]),
        ([[row("stands still: dlprof hang 7")], [row()]], ["ps: its word"]),
        ([[row(), row()]], ["ps: lists it"]),
        ([[row(ranks=2)]], ["ps: lists it"]),
        ([[row(run="/runs/a")]], ["ps: lists it"]),
        ([[OTHER]], ["ps: lists it", "ps: its word"]),
    ],
)
def test_ps_lists_the_job_with_the_word_for_a_wait(looks: list[list[dict[str, Any]]], wrong: list[str]) -> None:
    assert failed(*judges.of_ps(looks, 7)) == wrong


@pytest.mark.parametrize(("shares", "wrong"), [([0.9], []), ([None, 0.5], []), ([0.2], ["ps"]), ([None], ["ps"])])
def test_ps_says_how_busy_its_gpu_is(shares: list[float | None], wrong: list[str]) -> None:
    part = judges.of_ps_gpu([[row() | {"gpu_share": share}] for share in shares], 7)
    assert [name.partition(":")[0] for name in failed(part)] == wrong


def attached(what: str = "device", share: float = 0.8, place: str = "live_job.py:86") -> Ended:
    parts = [
        {"what": "code", "share": 1 - share, "lines": []},
        {"what": what, "share": share, "lines": [[place, "", 1]]},
    ]
    return ended(out=json.dumps([{"rank": 0, "parts": parts}]))


@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        (attached(), []),
        (attached(share=0.69), ["attach: waits"]),
        (attached(place="live_job.py:87"), ["attach: the line that waits for the device"]),
        (attached("forward"), ["attach: the line that waits for the device", "attach: waits"]),
        (ended(1, errors="Error: it has ended"), ["attach: exit 0"]),
    ],
)
def test_attach_names_the_line_and_the_share_of_the_wait(said: Ended, wrong: list[str]) -> None:
    sure, figures = judges.of_attach(said, 86, 0.8)
    assert failed(*sure, *figures) == wrong


@pytest.mark.parametrize(
    ("said", "blind"),
    [
        (ended(1, errors="Error: the stacks of the job cannot be read: py-spy: Permission denied"), True),
        (ended(1, errors="Error: py-spy is not installed (pip install py-spy)"), True),
        (ended(1, errors="Error: 7: no process of yours on this host"), False),
        (attached(), False),
    ],
)
def test_where_no_process_may_be_looked_into_nothing_is_judged(said: Ended, blind: bool) -> None:
    assert bool(judges.of_blind(said)) == blind


NEEDS = "Error: process 7: this needs gdb (apt install gdb), or Python 3.14 for both dlprof and the job"


@pytest.mark.parametrize(
    ("said", "goes_on", "wrong"),
    [
        (ended(1, errors=NEEDS), True, []),
        (ended(1, errors=NEEDS), False, ["the job goes on"]),
        (ended(0), True, ["refused in a line"]),
        (ended(1, errors=f"Traceback:\n{NEEDS}"), True, ["refused in a line"]),
        (ended(1, errors="Error: 7: no process of yours"), True, ["refused in a line"]),
        (ended(None), True, ["refused in a line"]),
    ],
)
def test_without_gdb_it_is_refused_in_one_line(said: Ended, goes_on: bool, wrong: list[str]) -> None:
    assert failed(*judges.of_refusal(said, goes_on)) == [f"inject without gdb: {name}" for name in wrong]


@pytest.mark.parametrize(
    ("code", "steps", "goes_on", "wrong"),
    [
        (0, 120, True, []),
        (0, 0, True, ["steps are recorded"]),
        (1, 120, True, ["steps are recorded"]),
        (0, 120, False, ["the job goes on"]),
    ],
)
def test_with_gdb_steps_are_recorded_and_the_job_goes_on(
    code: int, steps: int, goes_on: bool, wrong: list[str]
) -> None:
    assert failed(*judges.of_injected(ended(code), steps, goes_on)) == [f"inject: {name}" for name in wrong]


WHY = "Rank 0 waits for its device in .item() (live_job.py:86: value = loss.item())."


@pytest.mark.parametrize(
    ("why", "still_s", "right"),
    [
        (WHY, 11.4, True),
        (WHY, 3.0, False),
        (WHY, 400.0, False),
        (WHY, None, False),
        (WHY.replace("86", "87"), 11.4, False),
        ("Rank 0 runs Python (live_job.py:86: value = loss.item()), and is busy.", 11.4, False),
    ],
)
def test_hang_must_name_the_rank_the_line_and_the_device(why: str, still_s: float | None, right: bool) -> None:
    part = judges.of_hang("hang", {"why": why, "still_s": still_s}, 86, 9.0, 40.0)
    assert (part.state == "passed") == right
    assert judges.of_hang("hang", {}, 86, 9.0, 40.0).state == "failed"


def losses(*values: float) -> list[dict[str, Any]]:
    return [{"pid": 7, "step": 0}, *({"step": 20 * n, "loss": loss} for n, loss in enumerate(values, 1))]


@pytest.mark.parametrize(
    ("recorded", "plain", "right"),
    [
        (losses(0.5, 0.25), losses(0.5, 0.25, 0.125), True),
        (losses(0.5, 0.25000000001), losses(0.5, 0.25), False),
        (losses(), losses(0.5), False),
        (losses(0.5), losses(), False),
    ],
)
def test_losses_are_compared_step_by_step(
    recorded: list[dict[str, Any]], plain: list[dict[str, Any]], right: bool
) -> None:
    assert (judges.of_losses("recorded", recorded, plain).state == "passed") == right


def test_the_line_that_waits_is_the_marked_one() -> None:
    assert ".item()" in live.SCRIPT.read_text().splitlines()[live.line_of_wait() - 1]


def test_a_job_beside_is_heard_while_it_runs_and_has_an_end(tmp_path: Path) -> None:
    body = """
import json, time
from pathlib import Path
step = 0
while not Path("stop").exists():
    step += 1
    print(json.dumps({"step": step}), flush=True)
    time.sleep(0.02)
print("done")
"""
    job = Beside(python("-c", body), tmp_path, 60.0)
    assert job.until("step", 3) == {"step": 3}
    assert job.goes_on(5)
    (tmp_path / "stop").touch()
    assert job.end().code == 0
    assert not job.goes_on(5)
    with pytest.raises(JobFailedError, match=r"a job ended before its pid was 0"):
        job.until("pid")


def test_a_job_beside_is_ended_when_its_time_is_over(tmp_path: Path) -> None:
    began = time.monotonic()
    job = Beside(python("-c", "import time; time.sleep(300)"), tmp_path, 1.0)
    with pytest.raises(JobFailedError):
        job.until("step", 1)
    assert job.end().code is None
    assert time.monotonic() - began < 60
