"""The optimizer steps that gradient scalers skip: counted apart until the scale fits, and found where they are many."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.estimate import Rule
from dlprof.analysis.precision.rules import skipped_steps
from dlprof.analysis.precision.scalers import scale_changes, scalers
from dlprof.errors import DoesNotApply
from tests.fixtures import runs
from tests.fixtures.ruled import Case, check, table
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


def skips(change: Callable[[Path], Any] | None = None, **how: Any) -> Callable[[Path], Path]:
    """Return a job with a scaler, whose log or facts may be changed."""

    def made(folder: Path) -> Path:
        path = scaled(folder, **how)
        if change is not None:
            change(path)
        return path

    return made


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


def not_steady(path: Path) -> None:
    steps = path / "ranks/00000/steps.jsonl"
    steps.write_text("".join(steps.read_text().splitlines(keepends=True)[:1]))


TOO_OFTEN: Any = {"skipped": range(10, 100, 5), "grown": range(9, 99, 5)}
CASES = {
    "a scale that grows too often": Case(
        skips(**TOO_OFTEN, interval=4),
        "found",
        18 * MS,
        share=pytest.approx(0.18),
        says=["18 of 100 steady steps"],
        settings=[[("growth_interval", 4, 2_000)], []],
    ),
    "as often with the usual interval": Case(
        skips(**TOO_OFTEN), "found", 18 * MS, says=["bfloat16", "init_scale=32768"], never=["growth_interval"]
    ),
    "a scale that is not known": Case(
        skips(without_scales, **TOO_OFTEN), "found", 18 * MS, says=["scale was unknown"], never=["init_scale"]
    ),
    "gradients that are never finite": Case(
        skips(skipped=range(30, 100)), "found", 70 * MS, says=["at any scale"], settings=[[], []]
    ),
    "a scale that fits after some steps": Case(
        skips(skipped=(*range(12), 70), grown=(69,)), "clear", share=pytest.approx(0.01), says=["13 steps"]
    ),
    "one rank of two whose skips are known": Case(
        skips(unknown_on_first, **TOO_OFTEN, ranks=2), "found", 18 * MS, ranks=[1]
    ),
    "a fused optimizer that skips on the device": Case(
        skips(unknown=True, ranks=2), "not_measured", says=["fused optimizer"]
    ),
    "a scaler without a record": Case(skips(lambda path: (path / LOG).unlink()), "not_measured"),
    "no scaler": Case(skips(without_scaler), "does_not_apply"),
    "no steady step": Case(skips(not_steady, **TOO_OFTEN), "not_measured"),
}


@table({skipped_steps: CASES})
def test_what_the_rule_says(tmp_path: Path, rule: Rule, case: Case) -> None:
    check(rule, case, tmp_path)
