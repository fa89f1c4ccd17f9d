"""A long start is found with its line, a short one is left alone; the parts of a run add up to it."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlprof.analysis.diagnosis import diagnose
from dlprof.analysis.step.rules.slow_start import RULE
from dlprof.analysis.step.whole_job import run_parts
from dlprof.read.run import open_run
from dlprof.report.verdict import budget
from dlprof.result import Outcome
from tests.fixtures import runs
from tests.fixtures.asking import ask
from tests.fixtures.runs import MS
from tests.fixtures.sampled_stacks import burst

SECOND = 1000 * MS
DATALOADER = "/lib/python3/site-packages/torch/utils/data/dataloader.py"
LOADS = (
    'process 7:"";thread (7): MainThread;<module> (/w/train.py:3);'
    "read_csv (/lib/python3/site-packages/pandas/io/x.py:9)"
)
WAITS = f'process 7:"";thread (7): MainThread;<module> (/w/train.py:9);_try_get_data ({DATALOADER}:1300)'
STANDS = (
    'process 7:"";process 8:"";thread (8): MainThread;_worker_loop (/lib/torch/utils/data/_utils/worker.py:1);'
    "fetch (/lib/python3/site-packages/torch/utils/data/_utils/fetch.py:52);__getitem__ (/w/data.py:5)"
)
STEP = 'process 7:"";thread (7): MainThread;<module> (/w/train.py:12);{} (/lib/python3/site-packages/torch/{}:9)'
BACKWARD, FORWARD = STEP.format("backward", "_tensor.py"), STEP.format("_call_impl", "nn/modules/module.py")
# A loop over files, at one line of the script, in which a function takes its time in lines that are far apart.
SCANS = 'process 7:"";thread (7): MainThread;<module> (/w/train.py:5)'
SCANNED = f"{SCANS};scanned (/w/data.py:{{}})"
WINDOWS = f"{SCANS};Windows.{{}} (/w/data.py:{{}})"
IMPORTS = LOADS.replace("train.py:3", "train.py:2")
OTHER = 'process 7:"";thread (7): MainThread;<module> (/w/train.py:6);scanned (/w/data.py:60)'
ALSO = LOADS.replace("<module> (/w/train.py:3)", "<module> (/w/train.py:8);texts (/w/data.py:70)")
CUT = 'process 7:"";thread (7): MainThread;read (/lib/python3/site-packages/pandas/io/x.py:9)'
ENDS = f'process 7:"";thread (7): MainThread;<module> (/w/train.py:15);_shutdown_workers ({DATALOADER}:1600)'
TEXTS = [["/w/train.py", 3, "frame = pd.read_csv(path)"], ["/w/data.py", 5, "with lock:"]]
TEXTS += [["/w/data.py", 70, "frame = pd.read_csv(other)"], ["/w/train.py", 2, "import lightning"]]


def run(
    folder: Path, setup_s: float, stacks: dict[str, int], first_s: float = 0.0, steps: int = 100, lead_s: float = 0.0
) -> Path:
    """Record a run: 2 s of launch, a set-up, a wait for the first batch, steps of 0.1 s, and 1 s of ending.

    `lead_s`: what the first step does besides, where its phases are known.
    """
    at = round((2 + setup_s) * SECOND)
    light, began = [], at
    for n in range(steps):
        waits = round(first_s * SECOND) if n == 0 else 0
        dur = 100 * MS + waits + (round(lead_s * SECOND) if n == 0 else 0)
        known = {"forward_ns": 60 * MS, "backward_ns": 40 * MS} if lead_s else {}
        light.append(runs.light(n, dur, fetch_ns=waits, start_ns=began, first=int(n == 0), **known))
        began += dur
    facts = {**runs.CPU, "directory": "/w/", "clock": {"unix_ns": 2 * SECOND}}
    path = runs.recorded(folder / "run", (None, light, facts), start_ns=1, end_ns=began + SECOND)
    head = {"start_ns": 4 * SECOND, "end_ns": at + round(first_s * SECOND), "rate": 20, "start": True, "lines": TEXTS}
    return burst(path, stacks, **head) if stacks else path


def place(found: Outcome) -> str:
    return f"{found.where[0].file}:{found.where[0].line}"


@pytest.mark.parametrize(
    ("setup_s", "first_s", "stacks", "told"),
    [
        # Three quarters of 20 s are in one line, in a run of 33 s.
        pytest.param(20, 0, {LOADS: 300, WAITS: 100}, ("train.py:3", "keep the arrays", 15 / 33), id="a set-up"),
        # The workers' line, not the one that waits for them: 15 of 28 s.
        pytest.param(5, 10, {WAITS: 300, STANDS: 600}, ("data.py:5", "spawn", 15 / 28), id="a first batch"),
        # Half of the stacks in one line, and a quarter in another function's that does the same.
        pytest.param(
            20, 0, {LOADS: 200, ALSO: 100, WAITS: 100}, ("train.py:3", "keep the arrays", 15 / 33), id="twice"
        ),
        pytest.param(0.5, 0, {LOADS: 100}, None, id="a short start"),
        # Of 20 s 15 are imports, which a script needs; of 40 s 30, which no disk of its own takes.
        pytest.param(20, 0, {IMPORTS: 300, WAITS: 100}, ("train.py:9", "", 5 / 33), id="libraries"),
        pytest.param(20, 0, {IMPORTS: 380, LOADS: 20}, None, id="libraries alone"),
        pytest.param(40, 0, {IMPORTS: 300, WAITS: 100}, ("train.py:2", "import only", 30 / 53), id="a slow disk"),
        # Of 400: 300 below one line of the script's, 40 below another one; those that are cut off say nothing.
        pytest.param(
            20,
            0,
            {SCANNED.format(20): 160, SCANNED.format(40): 90, SCANS: 50, OTHER: 40, LOADS: 60, CUT: 99},
            ("data.py:20", "keep the result", 15 / 33),
            id="a function in several lines",
        ),
        # 240 of 400 in two methods of one object, 60 in another function of the same line.
        pytest.param(
            20,
            0,
            {WINDOWS.format("each", 20): 200, WINDOWS.format("all", 40): 40, SCANNED.format(60): 60, LOADS: 100},
            ("data.py:20", "keep the result", 12 / 33),
            id="methods of an object",
        ),
        # The first step may be long, and is no part of the start.
        pytest.param(20, 0, {LOADS: 300, WAITS: 100, BACKWARD: 900}, ("train.py:3", "", 15 / 33), id="a first step"),
        pytest.param(20, 0, {LOADS: 100, FORWARD: 900}, ("train.py:12", "", 18 / 33), id="a model before training"),
    ],
)
def test_the_line_of_a_long_start_is_named_with_what_it_takes_of_the_run(
    tmp_path: Path, setup_s: float, first_s: float, stacks: dict[str, int], told: tuple[str, str, float] | None
) -> None:
    found = ask(RULE, run(tmp_path, setup_s, stacks, first_s))
    assert found.state == ("found" if told else "clear")
    if told:
        where, words, share = told
        assert (place(found), found.scope, found.at_most) == (where, "run", True)
        assert words in found.changes[0].text
        assert found.share == pytest.approx(share, abs=0.01)


def test_all_waits_for_workers_count_also_those_that_end_in_the_first_step(tmp_path: Path) -> None:
    found = ask(RULE, run(tmp_path, 4, {WAITS: 200, ENDS: 80, STANDS: 600, LOADS: 20}, first_s=10, lead_s=5))
    # 280 of 300 stacks of 19 s, in a run of 32 s.
    assert place(found) == "data.py:5"
    assert found.share == pytest.approx(280 / 300 * 19 / 32, abs=0.01)
    assert "21.0 s pass before the first step is done" in found.verdict.replace("\u00a0", " ")


def test_a_long_start_that_nobody_looked_at_is_not_judged(tmp_path: Path) -> None:
    found = ask(RULE, run(tmp_path, 20, {}))
    assert found.state == "not_measured"
    assert "22.0 s" in found.why


def test_a_long_job_hides_its_start(tmp_path: Path) -> None:
    assert ask(RULE, run(tmp_path, 20, {LOADS: 300}, steps=4000)).state == "clear"


def test_the_parts_of_a_run_add_up_to_it(tmp_path: Path) -> None:
    path = run(tmp_path, 5, {}, first_s=4)
    parts = runs.measured(path, run_parts).frame(run_parts).set_index("part")["ns"] / SECOND
    assert parts.sum() == pytest.approx(22)
    assert parts["launch"] == pytest.approx(2)
    assert parts["setup"] == pytest.approx(5)
    assert parts["first_batch"] == pytest.approx(4)
    assert parts["end"] == pytest.approx(1)
    assert parts["warmup"] + parts["steady"] == pytest.approx(10)


def test_the_rank_on_which_a_part_takes_longest_is_named(tmp_path: Path) -> None:
    made = []
    for rank in range(4):
        at = (2 + 3 + 12 * (rank == 2)) * SECOND
        light = [runs.light(n, 100 * MS, start_ns=at + n * 100 * MS) for n in range(200)]
        made.append((None, light, {**runs.CPU, "clock": {"unix_ns": 2 * SECOND}}))
    path = runs.recorded(tmp_path / "run", *made, start_ns=1, end_ns=40 * SECOND)
    result = diagnose(open_run(path), (), jobs=1)
    parts = {part.part: part for part in result.budget}
    assert (parts["setup"].ns, parts["setup"].most_ns, parts["setup"].most_rank) == (6 * SECOND, 15 * SECOND, 2)
    assert (parts["end"].most_rank, parts["steady"].most_ns) == (-1, parts["steady"].ns)
    assert "setting up 15 % (15.0 s on rank 2)" in budget(result).replace("\u00a0", " ")
