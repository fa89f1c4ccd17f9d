"""What forward passes for nothing take of a step, and the script's lines between the phases."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.step.unused import lines_between, unused_forward
from dlprof.errors import NotMeasured
from tests.fixtures import runs
from tests.fixtures.runs import MS, asked, light
from tests.fixtures.sampled_stacks import MAIN


def recorded(folder: Path, steps: list[dict[str, Any]], stacks: str = "", **more: Any) -> Path:
    path = runs.recorded(folder / "run", (None, steps, {**runs.CPU, "pid": 10}), **more)
    if stacks:
        (path / "ranks/00000/stacks.txt.gz").write_bytes(gzip.compress(stacks.encode()))
    return path


def test_a_second_forward_pass_in_every_step(tmp_path: Path) -> None:
    steps = [light(n, 20 * MS, forward_ns=8 * MS, unused_forward_ns=3 * MS, forwards=2) for n in range(50)]
    (row,) = runs.measured(recorded(tmp_path, steps), unused_forward).frame(unused_forward).to_dict("records")
    assert (row["ns"], row["noise_ns"], row["share"], row["forwards"]) == (3 * MS, 0.0, pytest.approx(3 / 8), 2)


def test_what_few_steps_do_is_no_part_of_each(tmp_path: Path) -> None:
    steps = [light(n, 20 * MS, forward_ns=8 * MS, unused_forward_ns=6 * MS * (n % 7 == 0)) for n in range(50)]
    (row,) = runs.measured(recorded(tmp_path, steps), unused_forward).frame(unused_forward).to_dict("records")
    assert row["ns"] == 0


def test_an_older_log_abstains(tmp_path: Path) -> None:
    made = runs.measured(recorded(tmp_path, [light(n, 20 * MS) for n in range(50)]), unused_forward)
    with pytest.raises(NotMeasured, match="not recorded"):
        made.frame(unused_forward)


def test_lines_share_the_time_between_the_phases(tmp_path: Path) -> None:
    steps = [light(n, 20 * MS, forward_ns=4 * MS, backward_ns=6 * MS) for n in range(50)]
    loss = "cross_entropy (/lib/python3.11/site-packages/torch/nn/functional.py:9)"
    stacks = (
        f"{MAIN};main (/me/train.py:70) 60\n{MAIN};main (/me/train.py:50);{loss} 20\n{MAIN};main (/me/train.py:71) 20\n"
    )
    made = runs.measured(recorded(tmp_path, steps, stacks), lines_between)
    frame = made.frame(lines_between)
    assert list(zip(frame["line"], frame["ns"], strict=True)) == [(70, 6 * MS), (71, 2 * MS)]
    assert frame["noise_ns"].iloc[0] == pytest.approx((0.6 * 0.4 / 100) ** 0.5 * 10 * MS)


def test_a_loss_that_the_script_writes_out_is_none_of_its_own_lines(tmp_path: Path) -> None:
    steps = [light(n, 20 * MS, forward_ns=4 * MS, backward_ns=6 * MS) for n in range(50)]
    loss = {"kind": "loss", "file": "me/train.py", "line": 70, "end_line": 71, "count": 3}
    calls = {"calls": [loss], "directory": "/"}
    stacks = "".join(f"{MAIN};main (/me/train.py:{line}) 25\n" for line in (69, 70, 71, 72))
    path = runs.recorded(tmp_path / "run", (None, steps, {**runs.CPU, "pid": 10, **calls}))
    (path / "ranks/00000/stacks.txt.gz").write_bytes(gzip.compress(stacks.encode()))
    frame = asked(runs.measured(path, lines_between), lambda lines_between: lines_between)
    assert sorted(frame["line"]) == [69, 72]


@pytest.mark.parametrize(
    ("longer", "stalls"),
    [
        (0, [runs.stall("garbage_collection", n, 2 * MS, after=15 * MS) for n in range(200)]),
        (20, []),  # in one step of ten
    ],
    ids=["stalls", "periodic"],
)
def test_what_stalls_and_what_comes_every_few_steps_is_not_shared_among_lines(
    tmp_path: Path, longer: int, stalls: list[dict[str, Any]]
) -> None:
    steps = [light(n, (20 + longer * (n % 10 == 0)) * MS, forward_ns=4 * MS, backward_ns=6 * MS) for n in range(200)]
    path = recorded(tmp_path, steps, f"{MAIN};main (/me/train.py:70) 100\n", stalls=[stalls])
    frame = asked(runs.measured(path, lines_between), lambda lines_between: lines_between)
    rest = 10 * MS - (2 * MS if stalls else 0)
    assert list(zip(frame["line"], frame["ns"], strict=True)) == [(70, pytest.approx(rest, rel=0.01))]
