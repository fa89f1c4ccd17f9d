"""What a sweep goes through: values, ranges and grids of settings and of words of the command."""

from __future__ import annotations

import pytest

from dlprof.errors import DlprofError
from dlprof.result.sweep import Axis
from dlprof.trial.sweep.sweeping import MOST_POINTS, axis, filled, grid, placeholders, settings


@pytest.mark.parametrize(
    ("word", "values"),
    [
        ("n=0,1,2", "0 1 2"),
        ("n=0..3", "0 1 2 3"),
        ("n=0..8..4", "0 4 8"),
        ("n=8..70*2", "8 16 32 64"),
        ("n=0,2..4,2", "0 2 3 4"),
        ("n=fp32,bf16", "fp32 bf16"),
    ],
)
def test_values(word: str, values: str) -> None:
    assert axis(word) == Axis("n", tuple(values.split()))


@pytest.mark.parametrize("word", ["n", "=1", "n=", "n=,", "n=4..1", "n=0..8*2", "n=1..8*1", "n=0..9999", "a b=1"])
def test_no_axis(word: str) -> None:
    with pytest.raises(DlprofError):
        axis(word)


def test_a_grid() -> None:
    assert grid([axis("a=1,2"), axis("b=x,y")]) == [
        {"a": "1", "b": "x"}, {"a": "1", "b": "y"}, {"a": "2", "b": "x"}, {"a": "2", "b": "y"}
    ]  # fmt: skip
    with pytest.raises(DlprofError, match=str(MOST_POINTS)):
        grid([axis("a=0..50"), axis("b=0..50")])
    with pytest.raises(DlprofError, match="twice"):
        grid([axis("a=1"), axis("a=2")])


def test_axes_are_settings_or_stand_in_the_command() -> None:
    axes = [axis("loader.num_workers=0,2"), axis("batch=8")]
    command = ("python", "train.py", "--batch-size={batch}")
    assert placeholders(axes, command) == {"batch"}
    values = {"loader.num_workers": "2", "batch": "8"}
    assert filled(command, values) == ("python", "train.py", "--batch-size=8")
    assert settings(values, {"batch"}) == {"loader.num_workers": 2}
    with pytest.raises(DlprofError, match=r"\{batch\}"):
        placeholders(axes, ("python", "train.py"))
    with pytest.raises(DlprofError, match="a whole number"):
        placeholders([axis("loader.num_workers=many")], command)
