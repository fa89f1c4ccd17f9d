"""What gradient scalers did: the steps that they skipped at first, in steady steps, and after growing."""

from pathlib import Path

import pytest

from dlprof.analysis.precision.scalers import scale_changes, scalers
from dlprof.errors import DoesNotApply
from tests.fixtures import runs
from tests.fixtures.runs import MS, measured
from tests.fixtures.scalers import scaled


def test_steps_skipped_until_the_scale_fits_are_counted_apart(tmp_path: Path) -> None:
    path = scaled(tmp_path, skipped=(0, 1, 2, 3, 4, 20, 50), grown=(19,))
    (row,) = measured(path, scalers).frame(scalers).to_dict("records")
    assert (row["skipped"], row["at_first"], row["steady_skipped"], row["after_growth"]) == (7, 5, 2, 1)
    assert row["steady"] == 100
    assert (row["first_scale"], row["least_scale"], row["scale"]) == (2**16, 2**10, 2**10)
    assert row["interval"] == 2_000
    assert row["known"]


def test_rows_that_stand_for_several_count_as_such(tmp_path: Path) -> None:
    path = scaled(tmp_path, skipped=(30, 40))
    log = path / "ranks/00000/loss_scale.jsonl"
    log.write_text(log.read_text().replace('"count": 1}', '"count": 3}'))
    (row,) = measured(path, scalers).frame(scalers).to_dict("records")
    assert (row["skipped"], row["steady_skipped"]) == (6, 6)


def test_the_scale_is_followed(tmp_path: Path) -> None:
    frame = measured(scaled(tmp_path, skipped=(0, 50), grown=(40,)), scale_changes).frame(scale_changes)
    assert frame[["step", "scale", "skipped"]].to_numpy().tolist() == [
        [0, 2**16, False],
        [0, 2**15, True],
        [40, 2**16, False],
        [50, 2**15, True],
    ]


def test_a_job_without_a_scaler_has_none(tmp_path: Path) -> None:
    path = scaled(tmp_path)
    (path / "ranks/00000/loss_scale.jsonl").write_text("")
    with pytest.raises(DoesNotApply):
        measured(path, scalers).frame(scalers)
    steps = [runs.light(n, MS) for n in range(9)]
    alone = runs.recorded(tmp_path / "other", (None, steps, {**runs.CPU, "grad_scaler": False}))
    with pytest.raises(DoesNotApply):
        measured(alone, scalers).frame(scalers)
