"""Which recorded steps are steady, how long they are, and how sure the mean of a few is."""

import json
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


def fed(folder: Path, ready: list[int], waits: list[int], *, own: int = 10, profiled: int = -1, epoch: int = -1) -> str:
    """Return the steady steps of a loop that finds so many batches ready and waits so many ms, one letter a step."""
    steps = [
        runs.light(n, (own + w) * MS, fetch_ns=w * MS, profiled=int(n == profiled), first=int(n in (0, epoch)))
        for n, w in enumerate(waits)
    ]
    path = runs.recorded(folder / "run", (None, steps, runs.CPU))
    rows = [
        {"kind": "batch", "start_ns": s["start_ns"], "dur_ns": s["fetch_ns"], "count": 1, "step": s["step"],
         "loader": 0, "empty": int(not r), "ready": r, "outstanding": 8}
        for s, r in zip(steps, ready, strict=True)
    ]  # fmt: skip
    (path / "ranks/00000/loading.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    frame = RankData(open_run(path).ranks[0]).once(light_steps)
    return "".join("s" if steady else "." for steady in frame["steady"])


STOCK = [8, 7, 6, 5, 4, 3, 2, 1]


@pytest.mark.parametrize(
    ("ready", "waits", "more", "steady"),
    [
        # Eight batches were ready when training began; the loader makes one in 40 ms.
        (STOCK + [0] * 22, [0] * 8 + [30] * 22, {}, "." * 8 + "s" * 22),
        # While step 15 prepares the profiler, it makes eight more.
        (STOCK + [0] * 8 + STOCK + [0] * 22, ([0] * 8 + [30] * 8 + [0] * 8 + [30] * 22), {"profiled": 15},
         "." * 8 + "s" * 7 + "." * 9 + "s" * 22),
        # Those that are ready when an epoch begins are there in every epoch.
        (STOCK + [0] * 8 + STOCK + [0] * 22, ([0] * 8 + [30] * 8 + [0] * 8 + [30] * 22), {"epoch": 15},
         "." * 8 + "s" * 7 + "." + "s" * 30),
        # A loader that keeps up has its batches ready, until its data end.
        ([8] * 22 + STOCK, [0] * 30, {}, "...." + "s" * 26),
        # Eight workers that are done at once: what is ready comes in waves, and each is part of what a step is.
        ([16, 15, 14, 13, 12, 11, 10, 9] + [0, 7, 6, 5, 4, 3, 2, 1] * 4, [0] * 8 + ([240] + [0] * 7) * 4, {},
         "." * 8 + "s" * 32),
    ],
)  # fmt: skip
def test_steps_that_use_up_what_a_slow_loader_made_ahead_do_not_count(
    tmp_path: Path, ready: list[int], waits: list[int], more: dict[str, int], steady: str
) -> None:
    assert fed(tmp_path, ready, waits, **more) == steady
