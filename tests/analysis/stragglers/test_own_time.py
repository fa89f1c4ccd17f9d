"""Each rank's own time from the step log and from the trace, and what the slowest one's lead costs."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from dlprof.analysis.engine import by_rank
from dlprof.analysis.step.savings import own_time
from dlprof.analysis.stragglers.own_time import BUSY, LOGGED, TRACED, lead, own_steps, steps_of
from dlprof.errors import NotMeasured
from tests.fixtures import runs
from tests.fixtures.exchanges import late_by
from tests.fixtures.runs import MS


def own(*columns: list[float]) -> pd.DataFrame:
    return pd.DataFrame(dict(enumerate(columns)))


def test_the_lead_is_over_the_next_slowest() -> None:
    late = lead(own([10.0, 10.0], [16.0, 16.0], [12.0, 12.0]))
    assert (late.ranks, late.behind_ns, late.saving_ns, late.step_ns) == ((1,), 4.0, 4.0, 16.0)


def test_ranks_that_are_late_together_are_behind_the_slowest_of_the_others() -> None:
    times = own([10.0, 10.0], [16.0, 16.0], [12.0, 12.0], [15.0, 15.0])
    assert lead(times).saving_ns == 1.0
    late = lead(times, (1, 3))
    assert (late.ranks, late.behind_ns, late.saving_ns) == ((1, 3), 3.0, 3.0)


def test_a_late_rank_without_its_lead_keeps_its_jitter() -> None:
    # Rank 1 is 4 late on average: by 8 in one step, on time in the next. Without 4 it is late by 4 every other step.
    late = lead(own([10.0] * 40, [18.0, 10.0] * 20))
    assert late.behind_ns == 4.0
    assert late.saving_ns == pytest.approx(2.0)


def test_work_that_is_shared_out_leaves_each_rank_its_jitter() -> None:
    # Of 16, 12 and 8 each gets 12; without its lead the slowest would still be at 12.
    late = lead(own([16.0, 16.0], [12.0, 12.0], [8.0, 8.0]))
    assert (late.saving_ns, late.shared_ns) == (4.0, 4.0)
    # Rank 1 is at 14 and 10: beside 12 of the other it ends at 14 every other step, and 10 on average are 12 then.
    late = lead(own([20.0] * 4, [14.0, 10.0] * 2))
    assert late.shared_ns == pytest.approx(20 - (18 + 16) / 2)


def test_disturbances_that_last_make_a_short_window_unsure() -> None:
    rng = np.random.default_rng(3)
    lasting = np.repeat(rng.normal(0, 1, 40), 5)
    late = lead(own([10.0] * 200, list(10 + lasting)))
    assert late.window_noise_ns == pytest.approx(1.0, rel=0.3)
    assert late.noise_ns == pytest.approx(1.0 / np.sqrt(40), rel=0.4)


def estimated(path: Path) -> tuple[str, pd.DataFrame]:
    """Return the source of the estimate, and each rank's own time by step."""
    frame = runs.measured(path, own_steps).frame(own_steps)
    (source,) = frame["source"].unique()
    return source, steps_of(frame)


def usage(folder: Path, step: int, *cores: float) -> Path:
    """Write for what share of each of 20 steps of so many ns the ranks were busy."""
    for rank, mine in enumerate(cores):
        runs.loading(folder, rank, step=step, wait=0, fetch=MS, cpu=0, n=20, workers=1, cores=mine)
    return folder


def test_the_step_log_shows_the_own_time_of_every_step(tmp_path: Path) -> None:
    source, steps = estimated(runs.cpu_run(tmp_path, 1 * MS, 3 * MS))
    assert source == LOGGED
    assert len(steps) > 3
    assert steps.mean().to_dict() == pytest.approx({0: 5 * MS, 1: 7 * MS})


def test_more_work_in_a_waiting_phase_shows_only_in_the_trace(tmp_path: Path) -> None:
    source, steps = estimated(runs.cpu_run(tmp_path, 1 * MS, 1 * MS, extra_backward=(MS, MS, MS)))
    assert (source, len(steps)) == (TRACED, 3)
    assert lead(steps).ranks == (1,)
    assert lead(steps).behind_ns == pytest.approx(MS)


def test_several_threads_that_are_not_busy_for_longer_contradict_the_trace(tmp_path: Path) -> None:
    for name, mine, source in (("alike", 0.81, LOGGED), ("longer", 0.97, TRACED)):
        folder = runs.cpu_run(tmp_path / name, 1 * MS, 1 * MS, extra_backward=(MS, MS, MS))
        assert estimated(usage(folder, 6 * MS, 0.8, mine))[0] == source


def test_one_thread_is_busy_in_every_step_for_as_long_as_its_rank_takes(tmp_path: Path) -> None:
    """In the traced steps rank 1 takes 1 ms more; in all of them, 0.62 of 6.2."""
    late = (MS * 4 // 5, MS, MS * 6 // 5)
    folder = runs.cpu_run(tmp_path, MS, MS, extra_backward=late, torch_threads=1, count=8, affinity=8)
    source, steps = estimated(usage(folder, 31 * MS // 5, 0.8, 0.9))
    assert source == BUSY
    assert lead(steps).behind_ns == pytest.approx(0.62 * MS)


def test_what_one_thread_exchanges_for_longer_it_waits(tmp_path: Path) -> None:
    """Each transfers for 2.2 ms of 6.2; rank 0 stands still for 2.82, though for 3.2 in the traced steps."""
    late = (MS * 4 // 5, MS, MS * 6 // 5)
    folder = runs.cpu_run(tmp_path, MS, MS, extra_backward=late, torch_threads=1, count=8, affinity=8)
    source, steps = estimated(usage(folder, 31 * MS // 5, 1 - 2.82 / 6.2, 1 - 2.2 / 6.2))
    assert (source, lead(steps).ranks) == (BUSY, (1,))
    assert lead(steps).behind_ns == pytest.approx(0.62 * MS, rel=0.01)


def test_on_a_device_the_mean_is_that_of_all_steady_steps(tmp_path: Path) -> None:
    made = late_by(0, MS)
    source, steps = estimated(runs.foreign(tmp_path, *made))
    assert source == TRACED
    own = runs.measured(tmp_path, own_time).frame(own_time)
    assert steps.mean().to_dict() == pytest.approx(by_rank(own, "own_ns"))


def test_a_rank_that_lost_its_steps_leaves_the_step_log_nothing_to_compare(tmp_path: Path) -> None:
    folder = runs.cpu_run(tmp_path, 1 * MS, 3 * MS)
    log = folder / "ranks/00001/steps.jsonl"
    log.write_text(log.read_text().partition("\n")[0] + "\n")
    assert estimated(folder)[0] == TRACED


def test_ranks_without_a_common_step_abstain(tmp_path: Path) -> None:
    with pytest.raises(NotMeasured):
        estimated(runs.foreign(tmp_path, *late_by(0)))
