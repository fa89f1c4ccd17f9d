"""Which recorded steps are steady, how long they are, and how sure the mean of a few is."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from dlprof.analysis.engine import RankData
from dlprof.analysis.timeline.steady import STRETCHES, light_steps, standard_error, steady_steps, stretch_means
from dlprof.read.run import open_run
from tests.fixtures import runs
from tests.fixtures.runs import MS


def test_steps_on_the_devices_clock_are_as_long_as_it_says(tmp_path: Path) -> None:
    steps = [runs.light(n, MS, device_step_ns=-1 if n == 30 else 10 * MS) for n in range(40)]
    gpu = {"device": {"type": "cuda", "name": "NVIDIA A100-SXM4-80GB", "index": 0}}
    rank = RankData(open_run(runs.recorded(tmp_path / "run", (None, steps, gpu))).ranks[0])
    assert set(rank.once(steady_steps)["length_ns"]) == {10 * MS}
    assert rank.once(light_steps).loc[~rank.once(light_steps)["steady"], "step"].tolist() == [0, 1, 2, 30]


def test_stretches_follow_each_other_and_hold_all_values() -> None:
    assert stretch_means(np.arange(2.0 * STRETCHES)).tolist() == [2 * n + 0.5 for n in range(STRETCHES)]


def test_the_error_of_a_mean_of_few_is_wide() -> None:
    rng = np.random.default_rng(1)
    for n in (2, 3, 5, 12, 40):
        draws = rng.normal(10.0, 1.0, (4_000, n))
        missed = np.mean([abs(d.mean() - 10.0) > 1.96 * standard_error(d) for d in draws])
        assert missed == pytest.approx(0.05, abs=0.015), n
    assert standard_error(np.array([3.0])) == 0.0


def hosts_steps(folder: Path, *lengths: int, stopped: tuple[int, ...] = ()) -> pd.DataFrame:
    """Return the light steps of a GPU job without the device's clock; `stopped` begin an epoch."""
    steps = [runs.light(n, ns, first=int(n in stopped)) for n, ns in enumerate(lengths)]
    gpu = {"device": {"type": "cuda", "name": "NVIDIA A100-SXM4-80GB", "index": 0}}
    return RankData(open_run(runs.recorded(folder, (None, steps, gpu))).ranks[0]).once(light_steps)


def test_steps_in_which_a_host_gets_its_lead_again_do_not_count(tmp_path: Path) -> None:
    # The device takes 100 ms a step. After an epoch's end the host runs ahead of it by five steps, and then waits.
    lead = [1 * MS] * 5 + [105 * MS] + [100 * MS] * 20
    frame = hosts_steps(tmp_path / "run", *[100 * MS] * 30, 800 * MS, *lead, stopped=(30,))
    steady = frame[frame["steady"]]
    assert steady["length_ns"].mean() == pytest.approx(100 * MS, rel=0.01)
    assert not frame["steady"][31:36].any()
    # What the host gained, the device had still to do: the whole is as long as it was.
    assert frame["length_ns"].sum() == pytest.approx(frame["dur_ns"].sum(), rel=0.01)


def test_a_few_steps_between_two_stops_tell_only_how_the_hosts_lead_changed(tmp_path: Path) -> None:
    few = [900 * MS, 2 * MS]
    frame = hosts_steps(
        tmp_path / "run", *[100 * MS] * 20, 300 * MS, *few, 300 * MS, *[100 * MS] * 20, stopped=(20, 23)
    )
    assert not frame["steady"][21:23].any()
    assert frame["length_ns"][frame["steady"]].mean() == 100 * MS


def test_where_all_stretches_are_short_they_count(tmp_path: Path) -> None:
    lengths = [500 * MS, *[100 * MS] * 3] * 6
    frame = hosts_steps(tmp_path / "run", *lengths, stopped=tuple(range(0, 24, 4)))
    assert frame["steady"].sum() >= 12


def test_a_host_that_waits_now_and_then_is_measured_from_one_wait_to_another(tmp_path: Path) -> None:
    # The device takes 100 ms a step; every tenth step the host waits for all that it has launched.
    ten = [2 * MS] * 9 + [982 * MS]
    lengths = [*ten, *ten, *ten, 5 * MS, *ten[6:], *ten, *ten, *ten[:4]]
    frame = hosts_steps(tmp_path / "run", *lengths, stopped=(30,))
    assert frame["length_ns"][frame["steady"]].mean() == pytest.approx(100 * MS)
    assert frame["steady"].sum() == 20 + 20  # from the first wait of each stretch to its last


def test_pauses_that_are_a_small_part_of_the_time_are_waits_for_nothing(tmp_path: Path) -> None:
    lengths = [100 * MS] * 20 + [400 * MS] + [100 * MS] * 20 + [400 * MS] + [100 * MS] * 20
    frame = hosts_steps(tmp_path / "run", *lengths)
    assert frame["steady"].sum() == len(lengths) - 3
