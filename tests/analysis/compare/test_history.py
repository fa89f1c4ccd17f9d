"""The runs of a script in order of time, and the moments at which they changed."""

from __future__ import annotations

from msgspec.structs import replace

from dlprof.analysis.compare.history import Recorded, history
from dlprof.result import Fact, Outcome, Result
from dlprof.result.throughput import Throughput
from tests.fixtures.comparisons import clear, found, run


def at(start: int | None, step: float, *outcomes: Outcome, script: str = "train.py", workers: str = "0") -> Recorded:
    made: Result = run(step, *outcomes, facts=(Fact("Loader", "num workers", workers),))
    assert made.window is not None
    window = replace(made.window, throughput=Throughput(32 * 1000 / step, None, 32.0, "loader"))
    result = replace(made, window=window, run=replace(made.run, command=("python", script)))
    return Recorded(f"run-{start}", result, start)


def test_runs_go_by_time_and_a_change_has_its_settings_and_findings() -> None:
    told = history([
        at(3, 60, clear("input_wait"), found("host_bound", 5), workers="4"),
        at(1, 100, found("input_wait", 40)),
        at(2, 101, found("input_wait", 40)),
    ])  # fmt: skip
    assert [r.name for r in told.ladder.rungs] == ["run-1", "run-2", "run-3"]
    assert told.starts_ns == (1, 2, 3)
    (moment,) = told.moments
    assert (moment.rung.name, moment.rung.changes) == ("run-3", ("num workers 0 → 4",))
    assert (moment.came, moment.went) == (("host_bound",), ("input_wait",))


def test_the_script_of_most_runs_is_chosen_and_the_others_are_told() -> None:
    runs = [at(1, 100), at(2, 100), at(3, 50, script="other.py")]
    told = history(runs)
    assert (told.script, told.moments) == ("train.py", ())
    assert told.ladder.left_out == (("run-3", "it ran other.py"),)
    assert [r.name for r in history(runs, script="other.py").ladder.rungs] == ["run-3"]


def test_runs_without_a_time_come_last_and_broken_ones_are_named() -> None:
    told = history([at(None, 100), at(5, 100)], [("x", "is broken")])
    assert told.starts_ns == (5, None)
    assert told.ladder.left_out == (("x", "is broken"),)


def test_nothing_is_no_history() -> None:
    assert history([]).ladder.rungs == ()
