"""Each rank's own time from the step log and from the trace, and what the slowest one's lead costs."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from dlprof.analysis.stragglers.own_time import lead, light_own_time, phases, traced_own_time
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


def test_the_light_layer_tells_the_own_time_of_every_step(tmp_path: Path) -> None:
    run = runs.measured(runs.cpu_run(tmp_path, 1 * MS, 3 * MS), light_own_time, traced_own_time, phases)
    light, traced = run.frame(light_own_time), run.frame(traced_own_time)
    assert len(light) > len(traced) == 3
    assert light.mean().to_dict() == pytest.approx({0: 5 * MS, 1: 7 * MS})
    assert traced.mean().to_dict() == pytest.approx({0: 5 * MS, 1: 7 * MS})


def test_more_work_in_a_waiting_phase_shows_only_in_the_trace(tmp_path: Path) -> None:
    run = runs.measured(
        runs.cpu_run(tmp_path, 1 * MS, 1 * MS, extra_backward=(MS, MS, MS)), light_own_time, traced_own_time
    )
    assert lead(run.frame(light_own_time)).behind_ns == 0
    late = lead(run.frame(traced_own_time))
    assert late.ranks == (1,)
    assert late.behind_ns == pytest.approx(MS)


def test_a_device_abstains(tmp_path: Path) -> None:
    with pytest.raises(NotMeasured, match="device"):
        runs.measured(runs.foreign(tmp_path, *late_by(0, MS)), light_own_time).frame(light_own_time)


def test_a_rank_that_lost_its_steps_leaves_the_light_layer_nothing_to_compare(tmp_path: Path) -> None:
    folder = runs.cpu_run(tmp_path, 1 * MS, 3 * MS)
    log = folder / "ranks/00001/steps.jsonl"
    log.write_text(log.read_text().partition("\n")[0] + "\n")
    with pytest.raises(NotMeasured, match="every rank"):
        runs.measured(folder, light_own_time).frame(light_own_time)
