"""The optimizer steps that gradient scalers skip: counted apart until the scale fits, and found where they are many."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.estimate import Rule
from dlprof.analysis.step.rules import skipped_steps
from dlprof.analysis.step.scalers import scale_changes, scalers
from dlprof.errors import DoesNotApply
from tests.fixtures import runs
from tests.fixtures.ruled import Case, check, clear, found, inapplicable, jobs, table, unmeasured
from tests.fixtures.runs import MS, measured
from tests.fixtures.scalers import scaled

LOG = "ranks/00000/loss_scale.jsonl"


def test_steps_skipped_until_the_scale_fits_are_counted_apart(tmp_path: Path) -> None:
    path = scaled(tmp_path, skipped=(0, 1, 2, 3, 4, 20, 50), grown=(19,))
    (row,) = measured(path, scalers).frame(scalers).to_dict("records")
    assert (row["skipped"], row["at_first"], row["steady_skipped"], row["after_growth"]) == (7, 5, 2, 1)
    assert (row["steady"], row["interval"], row["known"]) == (100, 2_000, True)
    assert (row["first_scale"], row["least_scale"], row["scale"]) == (2**16, 2**10, 2**10)


def test_rows_that_stand_for_several_count_as_such(tmp_path: Path) -> None:
    path = scaled(tmp_path, skipped=(30, 40))
    (path / LOG).write_text((path / LOG).read_text().replace('"count": 1}', '"count": 3}'))
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
    (path / LOG).write_text("")
    steps = [runs.light(n, MS) for n in range(9)]
    alone = runs.recorded(tmp_path / "other", (None, steps, {**runs.CPU, "grad_scaler": False}))
    for one in (path, alone):
        with pytest.raises(DoesNotApply):
            measured(one, scalers).frame(scalers)


def recorded(folder: Path, change: Callable[[Path], Any] | None = None, **how: Any) -> Path:
    """Record a job with a scaler, and change its log or its facts."""
    path = scaled(folder, **how)
    if change is not None:
        change(path)
    return path


job = jobs(recorded)


def unknown_on_first(path: Path) -> None:
    lines = (path / LOG).read_text().splitlines()
    (path / LOG).write_text("\n".join([lines[0], lines[0].replace('"began"', '"unknown"')]) + "\n")


def without_scales(path: Path) -> None:
    rows = [json.loads(line) | {"scale": None} for line in (path / LOG).read_text().splitlines()]
    (path / LOG).write_text("".join(json.dumps(row) + "\n" for row in rows))


def without_scaler(path: Path) -> None:
    (path / LOG).unlink()
    facts = path / "ranks/00000/facts.json"
    facts.write_text(facts.read_text().replace('"grad_scaler": true', '"grad_scaler": false'))


TOO_OFTEN: Any = {"skipped": range(10, 100, 5), "grown": range(9, 99, 5)}
CASES = {
    "a scale that grows too often": found(
        job(**TOO_OFTEN, interval=4),
        18 * MS,
        "18 of 100 steady steps",
        noise=(0.18 * 0.82 / 100) ** 0.5 * 100 * MS,
        share=pytest.approx(0.18),
        settings=[[("growth_interval", 4, 2_000)], []],
    ),
    "as often with the usual interval": found(job(**TOO_OFTEN, scale=50_000.0), 18 * MS, "init_scale=32768"),
    "a scale between 1 and 2": found(job(**TOO_OFTEN, scale=1.5), 18 * MS, "init_scale=1)"),
    "a scale that is not known": found(
        job(without_scales, **TOO_OFTEN), 18 * MS, "scale was unknown", never=["init_scale"]
    ),
    "gradients that are never finite": found(job(skipped=range(30, 100)), 70 * MS, "at any scale", settings=[[], []]),
    "a scale that fits after some steps": clear(
        job(skipped=(*range(12), 70), grown=(69,)), pytest.approx(0.01), "13 steps"
    ),
    "one rank of two whose skips are known": found(job(unknown_on_first, **TOO_OFTEN, ranks=2), 18 * MS, ranks=[1]),
    "a fused optimizer that skips on the device": unmeasured(job(unknown=True, ranks=2), "fused optimizer"),
    "a scaler without a record": unmeasured(job(lambda path: (path / LOG).unlink())),
    "no scaler": inapplicable(job(without_scaler)),
}


@table({skipped_steps: CASES})
def test_what_the_rule_says(tmp_path: Path, rule: Rule, case: Case) -> None:
    check(rule, case, tmp_path)
