"""Which steps are steady, and where the trace's steps are."""

from pathlib import Path

import pytest

from dlprof.analysis.timeline.steps import mean_step_ns, of_step, step_means, step_series, timing
from dlprof.errors import NotMeasured
from tests.fixtures import runs, traces
from tests.fixtures.runs import MS


def means(folder: Path, steps: list[dict[str, object]], made: dict[str, object] | None = None) -> dict[str, object]:
    run = runs.measured(runs.recorded(folder / "run", (made, steps, runs.CPU)), step_means)
    return {str(k): v for k, v in run.frame(step_means).iloc[0].to_dict().items()}


def test_warm_up_profiled_first_and_validation_steps_are_not_steady(tmp_path: Path) -> None:
    steps = [runs.light(n, 50 * MS) for n in range(4)]
    steps += [
        runs.light(4, 500 * MS, first=1),
        runs.light(5, 90 * MS, kind="validation"),
        runs.light(6, 70 * MS, profiled=1),
    ]
    steps += [runs.light(n, 10 * MS) for n in range(7, 40)]
    found = means(tmp_path, steps)
    assert (found["steps"], found["step_ns"]) == (33, 10 * MS)


def test_a_stall_every_k_steps_is_part_of_the_mean(tmp_path: Path) -> None:
    steps = [runs.light(n, 110 * MS if n % 10 == 9 else 10 * MS) for n in range(103)]
    found = means(tmp_path, steps)
    assert found["steps"] == 100
    assert found["step_ns"] == 20 * MS


def test_a_step_in_which_the_job_was_suspended_is_not_steady(tmp_path: Path) -> None:
    """When it went on is known from beside it, give or take; a step that ended long before is steady."""
    steps = [runs.light(n, 4_000 * MS if n == 20 else 10 * MS) for n in range(23)]
    steps += [runs.light(n, 10 * MS, traces.BASE_NS + (n + 4) * 1_000 * MS) for n in range(23, 43)]
    for after_ms in (3_900, 4_400):
        resumed = [traces.BASE_NS + (20_000 + after_ms) * MS]
        path = runs.recorded(tmp_path / f"run{after_ms}", (None, steps, runs.CPU), resumed_ns=resumed)
        run = runs.measured(path, step_means, step_series)
        assert run.frame(step_means)["step_ns"][0] == 10 * MS
        series = run.frame(step_series)
        assert series.loc[series["kind"] == "suspended", "step"].to_list() == [20]


def test_a_traced_step_in_which_the_job_was_suspended_is_left_out(tmp_path: Path) -> None:
    made = traces.trace(
        *(traces.step(n, n * 2_000 * MS, MS) for n in range(4)), traces.op("aten::mm", 0, 10), device=""
    )
    resumed = [traces.BASE_NS + 4_000 * MS]
    path = runs.recorded(tmp_path / "run", (made, [], runs.CPU), resumed_ns=resumed)
    assert runs.measured(path, step_means).frame(step_means)["traced_steps"][0] == 3


def test_of_traced_steps_shorter_than_anybody_knows_when_the_job_went_on_the_longest_is_left_out(
    tmp_path: Path,
) -> None:
    after = 300 * MS  # it stood for so long
    at = {n: n * MS + (n > 2) * after for n in range(6)}
    marked = traces.trace(*(traces.step(n, at[n], MS + (n == 2) * after) for n in range(5)), traces.op("x", 0, 10))
    unmarked = traces.trace(*(traces.fetch(at[n], 100) for n in range(6)), traces.op("x", 0, 10))
    for name, made in (("marked", marked), ("unmarked", unmarked)):
        resumed = [traces.BASE_NS + at[3]]
        path = runs.recorded(tmp_path / name, (made, [], runs.CPU), resumed_ns=resumed)
        found = runs.measured(path, step_means).frame(step_means)
        assert (found["traced_steps"][0], found["step_ns"][0]) == (4, MS)


def test_a_warm_up_of_any_length_leaves_two_thirds_of_the_run(tmp_path: Path) -> None:
    assert means(tmp_path, [runs.light(n, (30 - n) * MS) for n in range(30)])["steps"] == 20


def test_a_few_light_steps_leave_the_mean_to_the_trace(tmp_path: Path) -> None:
    made = traces.trace(*(traces.step(n, n * MS, MS) for n in range(3)), traces.op("aten::mm", 0, 10), device="")
    found = means(tmp_path, [runs.light(n, 5 * MS) for n in range(4)], made)
    assert (found["source"], found["step_ns"], found["traced_steps"]) == ("trace", MS, 3)


def test_traced_steps_that_hold_an_epochs_end_are_left_out(tmp_path: Path) -> None:
    made = traces.trace(*(traces.step(n, n * MS, MS) for n in range(4)), traces.op("aten::mm", 0, 10), device="")
    steps = [runs.light(n, 5 * MS, first=int(n == 2)) for n in range(30)]
    assert means(tmp_path, steps, made)["traced_steps"] == 3


def test_unmarked_steps_begin_at_the_loader(tmp_path: Path) -> None:
    rank = runs.rank_of(
        tmp_path, traces.trace(*(traces.fetch(n * MS, 100) for n in range(4)), traces.op("x", 3 * MS, 10))
    )
    found = rank.once(timing)
    assert (found.steps, found.step_ns, found.unit) == (3, MS, "step")


def test_where_nothing_marks_a_step_the_trace_stands_for_one(tmp_path: Path) -> None:
    folder = runs.foreign(tmp_path, traces.trace(traces.op("aten::mm", 0, 10), traces.kernel("gemm", 5, 3 * MS - 5)))
    run = runs.measured(folder, step_means)
    assert (run.frame(of_step), run.frame(mean_step_ns)) == ("of the traced time", 3 * MS)


def test_steps_that_overlap_are_cut_at_the_next_ones_start(tmp_path: Path) -> None:
    rank = runs.rank_of(tmp_path, traces.trace(traces.step(1, 0, 2 * MS), traces.step(2, MS, MS)))
    assert (rank.once(timing).windows - traces.BASE_NS).tolist() == [[0, MS], [MS, 2 * MS]]


def test_nothing_recorded_abstains(tmp_path: Path) -> None:
    run = runs.measured(runs.recorded(tmp_path / "run", (None, [], runs.CPU)), step_means)
    with pytest.raises(NotMeasured, match="no complete training step"):
        run.frame(step_means)


def test_long_series_are_thinned_at_the_same_steps_on_every_rank(tmp_path: Path) -> None:
    ranks = [(None, [runs.light(n, MS) for n in range(first, 5_000)], runs.CPU) for first in (0, 1)]
    frame = runs.measured(runs.recorded(tmp_path / "run", *ranks), step_series).frame(step_series)
    series = [set(g["step"]) for _, g in frame.groupby("rank")]
    assert len(series[0]) < 2_000
    assert series[0] - series[1] == {0}
