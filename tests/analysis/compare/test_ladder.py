"""Runs in a row: what each change gave, and which runs have no place in it."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from dlprof.analysis.compare.ladder import Ladder, ladder, script_of
from dlprof.result import Fact, ForeignLoad, Result, Window
from dlprof.result.figures import Throughput
from tests.fixtures.comparisons import run
from tests.fixtures.results import MS


def at(step: float, samples: float | None = 32, *, ranks: int = 1, command: str = "train.py", **facts: str) -> Result:
    """Return a run of so many ms a step and so many samples, with these facts of its loader."""
    made = run(step, ranks=ranks, facts=tuple(Fact("Loader", n.replace("_", " "), v) for n, v in facts.items()))
    t = None if samples is None else Throughput(samples * 1000 / step, None, samples, "loader")
    assert made.window is not None
    return replace(
        made,
        window=replace(made.window, throughput=t, memory_bytes=1e9),
        run=replace(made.run, command=("python", *command.split())),
    )


def test_each_run_against_the_one_before_and_the_first() -> None:
    made = ladder([("a", at(200, num_workers="0")), ("b", at(100, num_workers="2")), ("c", at(80, num_workers="4"))])
    assert (made.unit, made.left_out) == ("samples", ())
    assert made.rungs[0].before is None
    steps = [ratio for r in made.rungs[1:] if r.before and r.first for ratio in (r.before.ratio, r.first.ratio)]
    assert steps == pytest.approx([2, 2, 1.25, 2.5])
    assert [r.changes for r in made.rungs] == [(), ("num workers 0 → 2",), ("num workers 2 → 4",)]


def test_other_batches_and_more_ranks_go_by_samples() -> None:
    made = ladder([("a", at(100, 32)), ("b", at(150, 64)), ("c", at(160, 128, ranks=2))])
    ratios = [r.before.ratio for r in made.rungs if r.before]
    assert ratios == [pytest.approx(64 / 32 / 1.5), pytest.approx(2 * 150 / 160)]
    assert made.rungs[2].changes[0] == "1 rank → 2"


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (at(100, command="other.py"), "another script"),
        (replace(at(100), run=replace(at(100).run, device="NVIDIA H100")), "NVIDIA H100"),
        (replace(at(100), window=None), "no steady step"),
        (replace(at(100), window=Window(1, "trace", 5 * MS, unit="trace")), "no step markers"),
        (at(100, None, batch_size="8"), "other work"),
    ],
)
def test_what_cannot_be_compared_is_left_out_and_the_rest_is_kept(other: Result, why: str) -> None:
    first = at(200, None if why == "other work" else 32, batch_size="16")
    last = at(100, None if why == "other work" else 32, batch_size="16")
    made = ladder([("a", first), ("other", other), ("c", last)])
    assert [r.name for r in made.rungs] == ["a", "c"]
    ((name, said),) = made.left_out
    assert name == "other"
    assert why in said


def test_what_could_not_be_read_is_named() -> None:
    made = ladder([("a", at(200)), ("b", at(100))], [("c", "is broken")])
    assert made.left_out == (("c", "is broken"),)


def test_without_samples_steps_of_the_same_work_compare() -> None:
    made = ladder([("a", at(200, None)), ("b", at(100, None))])
    assert made.unit == "steps"
    assert made.rungs[1].first is not None
    assert made.rungs[1].first.ratio == pytest.approx(2)


def test_the_command_says_first_what_changed() -> None:
    made = ladder([("a", at(200, num_workers="0")), ("b", at(100, command="train.py --workers 2", num_workers="2"))])
    assert made.rungs[1].changes == ("--workers 2", "num workers 0 → 2")


def test_many_settings_are_counted() -> None:
    a, b = ({f"k{i}": str(i + n) for i in range(6)} for n in (0, 1))  # type: tuple[dict[str, Any], dict[str, Any]]
    assert ladder([("a", at(200, **a)), ("b", at(100, **b))]).rungs[1].changes[-1] == "3 more settings"


def test_what_a_reader_must_know_of_a_run() -> None:
    load: Any = ForeignLoad("host", 8, 8, 6, disturbs=True)
    doubts = ladder([("a", replace(at(200), foreign_load=load)), ("b", at(100))]).doubts
    assert doubts == ("a: programs outside the job used the cores that it would have used",)


def test_nothing_is_no_ladder() -> None:
    assert ladder([]) == Ladder("steps", (), (), ())


def test_the_script_of_a_run() -> None:
    assert script_of(at(1, command="-m torch.distributed.run /a/b/train.py --x")) == "train.py"
    assert script_of(replace(at(1), run=replace(at(1).run, command=("a.out",)))) == ""
