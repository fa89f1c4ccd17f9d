"""What stalls cost the mean steady step, and their place among its parts, which add up to it."""

from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.engine import Measured
from dlprof.analysis.step.breakdown import breakdown, part
from dlprof.analysis.timeline.stalls import compilations, stall_means, stalled_steps
from dlprof.analysis.timeline.steps import step_means
from dlprof.errors import NotMeasured
from tests.fixtures import runs, traces
from tests.fixtures.runs import MS, asked, stall


def run_of(folder: Path, stalls: list[dict[str, Any]], made: Any = None, **more: Any) -> Measured:
    """Make 30 steps of 10 ms each, of which 27 are steady."""
    steps = [runs.light(n, 10 * MS, **more) for n in range(30)]
    facts = runs.CPU if made is None or not traces_device(made) else {"device": {"type": "cuda"}}
    path = runs.recorded(folder / "run", (made, steps, facts), stalls=[stalls])
    return runs.measured(path, breakdown, stall_means, stalled_steps, step_means)


def traces_device(made: dict[str, Any]) -> bool:
    return any(e.get("cat") == "kernel" for e in made["traceEvents"])


def adds_up(run: Measured) -> bool:
    return bool(run.frame(breakdown)["ns"].sum() == pytest.approx(run.frame(step_means)["step_ns"][0], rel=1e-12))


def test_a_stall_counts_in_the_steady_step_in_which_it_begins(tmp_path: Path) -> None:
    stalls = [
        stall("garbage_collection", 0, 9 * MS),  # warm-up
        stall("garbage_collection", 5, 2 * MS),
        stall("garbage_collection", 5, 1 * MS, 4 * MS),
        stall("garbage_collection", 6, 4 * MS, 9 * MS),  # 1 ms of it in its step
        stall("garbage_collection", 7, 4 * MS, 10 * MS),  # in no step: they end after 10 ms
        stall("checkpoint", 8, 8 * MS, path="/d/m.pt"),
        stall("power_failure", 9, 8 * MS),  # of a later dlprof
    ]
    run = run_of(tmp_path, stalls)
    rows = run.frame(stall_means).set_index("kind").to_dict("index")
    pauses, saves = rows["garbage_collection"], rows["checkpoint"]
    assert pauses["mean_ns"] == pytest.approx(4 * MS / 27)
    assert (pauses["stalls"], pauses["longest_ns"], pauses["every"]) == (3, 2 * MS, 27 / 2)
    assert (saves["mean_ns"], saves["stalls"], saves["every"]) == (pytest.approx(8 * MS / 27), 1, 27)
    assert saves["noise_ns"] > 0
    steps = run.frame(stalled_steps)[["kind", "step", "ns", "generation", "path"]].to_numpy().tolist()
    assert steps == [
        ["checkpoint", 8, 8 * MS, -1, "/d/m.pt"],
        ["garbage_collection", 5, 3 * MS, 2, ""],
        ["garbage_collection", 6, 1 * MS, 2, ""],
    ]


def test_a_row_that_stands_for_many_counts_for_all_of_them(tmp_path: Path) -> None:
    stalls = [stall("garbage_collection", 5, 3 * MS), stall("garbage_collection", 6, 40 * MS) | {"count": 20}]
    run = run_of(tmp_path, stalls)
    (pauses,) = (row for row in run.frame(stall_means).to_dict("records") if row["kind"] == "garbage_collection")
    # It is longer than the step in which the first of them fell.
    assert pauses["mean_ns"] == pytest.approx(43 * MS / 27)
    assert (pauses["stalls"], pauses["longest_ns"], pauses["every"]) == (21, 3 * MS, 27 / 21)


def test_what_stalled_steps_take_longer_besides_is_their_difference_to_the_others(tmp_path: Path) -> None:
    often = range(4, 30, 2)
    steps = [runs.light(n, 10 * MS + (n in (10, 20)) * 8 * MS) for n in range(30)]
    stalls = [stall("checkpoint", n, 5 * MS) for n in (10, 20)] + [stall("garbage_collection", n, MS) for n in often]
    path = runs.recorded(tmp_path / "run", (None, steps, runs.CPU), stalls=[stalls])
    rows = runs.measured(path, stall_means).frame(stall_means).set_index("kind")
    # Two of 27 steps are 3 ms longer than by what is known.
    assert rows["longer_ns"]["checkpoint"] == pytest.approx(2 * 3 * MS / 27)
    assert rows["longer_noise_ns"]["checkpoint"] > 0
    # Hardly a step has neither a pause nor one before it, and none compiles.
    assert rows["longer_ns"][["garbage_collection", "compilation"]].isna().all()


def test_no_stall_is_zero_and_no_record_abstains(tmp_path: Path) -> None:
    assert run_of(tmp_path, []).frame(stall_means)["mean_ns"].to_list() == [0.0, 0.0, 0.0]
    path = runs.recorded(tmp_path / "old", (None, [runs.light(n, MS) for n in range(30)], runs.CPU))
    with pytest.raises(NotMeasured, match="no record of garbage collection"):
        runs.measured(path, stall_means).frame(stall_means)


def test_compilations_are_told_by_function_and_reason(tmp_path: Path) -> None:
    def again(n: int) -> dict[str, Any]:
        return stall("compilation", n, 4 * MS, path="m.py:3 forward", reason=f"0/{n}: expected 7, actual {n}")

    stalls = [
        stall("compilation", 0, 50 * MS, path="m.py:3 forward", reason=None),
        *(again(n) for n in (0, 10, 20)),
        stall("checkpoint", 12, 4 * MS),
    ]
    path = runs.recorded(
        tmp_path / "run", (None, [runs.light(n, 60 * MS) for n in range(30)], runs.CPU), stalls=[stalls]
    )
    frame = runs.measured(path, compilations).frame(compilations)
    assert frame.drop(columns="rank").to_numpy().tolist() == [
        ["m.py:3 forward", "", 1, 50 * MS, 0, 0],
        ["m.py:3 forward", "expected 7, actual 0", 3, 12 * MS, 2, 8 * MS],
    ]


def test_saving_on_a_schedule_is_as_sure_as_its_length(tmp_path: Path) -> None:
    alike = run_of(tmp_path / "a", [stall("checkpoint", n, 5 * MS) for n in (5, 15, 25)]).frame(stall_means)
    assert alike["noise_ns"][0] == 0.0
    unlike = run_of(tmp_path / "b", [stall("checkpoint", n, n * MS // 4) for n in (5, 15, 25)]).frame(stall_means)
    assert unlike["noise_ns"][0] > 0.1 * MS


def test_without_a_trace_the_stalls_of_a_cpu_run_are_known(tmp_path: Path) -> None:
    stalls = [stall("checkpoint", n, 2 * MS) for n in range(30)]
    stalls += [stall("garbage_collection", n, MS, 3 * MS, phase="fetch") for n in range(30)]
    run = run_of(tmp_path, stalls, fetch_ns=3 * MS)
    assert asked(run, part, "checkpoint") == {0: pytest.approx(2 * MS)}
    assert asked(run, part, "garbage_collection") == {0: pytest.approx(MS)}
    assert asked(run, part, "input_wait") == {0: pytest.approx(2 * MS)}
    assert asked(run, part, "other") == {0: pytest.approx(5 * MS)}
    assert adds_up(run)


@pytest.mark.parametrize("in_the_trace", [False, True])
def test_on_the_cpu_stalls_leave_computation_as_it_is(tmp_path: Path, in_the_trace: bool) -> None:
    # The traced step: 6 ms forward, all operators; 1 ms operators and 1 ms Python in the rest; a save in one case only.
    save = 20 * MS if in_the_trace else 0
    at = 1_000 * MS * 10
    made = traces.trace(
        traces.step(10, at, 8 * MS + save),
        traces.annotation("dlprof::forward", at, 6 * MS),
        traces.op("aten::mm", at, 6 * MS),
        traces.op("aten::sum", at + 6 * MS, MS),
        device="",
        backend="",
        world_size=1,
    )
    # Untraced: 6 ms forward, 2 ms saving, 2 ms else.
    stalls = [stall("checkpoint", n, 2 * MS, 7 * MS) for n in range(30) if n != 10]
    if in_the_trace:
        stalls.append(stall("checkpoint", 10, save, 7 * MS))
    steps = [runs.light(n, 10 * MS, forward_ns=6 * MS) for n in range(30)]
    steps[10] |= {"dur_ns": 8 * MS + save, "profiled": 1}
    path = runs.recorded(tmp_path / "run", (made, steps, runs.CPU), stalls=[stalls])
    run = runs.measured(path, breakdown, step_means)
    assert asked(run, part, "checkpoint") == {0: pytest.approx(2 * MS)}
    assert asked(run, part, "computation") == {0: pytest.approx(7 * MS)}
    assert asked(run, part, "host") == {0: pytest.approx(MS)}
    assert adds_up(run)


def test_on_a_device_stalls_come_out_of_the_hosts_time_alone(tmp_path: Path) -> None:
    made = traces.trace(
        traces.step(10, 0, 10 * MS),
        traces.launched("gemm", 3 * MS - 10_000, 3 * MS, 7 * MS, 1),
        world_size=1,
    )
    run = run_of(tmp_path / "fits", [stall("garbage_collection", n, 2 * MS) for n in range(30)], made)
    assert asked(run, part, "computation") == {0: pytest.approx(7 * MS)}
    assert asked(run, part, "garbage_collection") == {0: pytest.approx(2 * MS)}
    assert adds_up(run)
    run = run_of(tmp_path / "hidden", [stall("garbage_collection", n, 9 * MS) for n in range(30)], made)
    assert asked(run, part, "computation") == {0: pytest.approx(7 * MS)}
    assert asked(run, part, "garbage_collection") == {0: pytest.approx(3 * MS, rel=0.01)}
    assert adds_up(run)
