"""A gate fails for a slow-down and not for noise; and runs in a row: what each change gave."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from numpy.typing import NDArray

from dlprof.analysis.compare.gate import bootstrap, slowdown
from dlprof.analysis.compare.ladder import Ladder, ladder, script_of
from dlprof.errors import NotMeasured
from dlprof.result import Fact, ForeignLoad, Result, Window
from dlprof.result.figures import Throughput
from tests.fixtures.comparisons import run
from tests.fixtures.results import MS

LIMIT = 0.05
PAIRS = 200


def steps(draw: np.random.Generator, n: int = 100, slower: float = 1.0) -> NDArray[np.float64]:
    """Return steps as jobs have them: each like the one before, one in fifty much longer."""
    noise = np.zeros(n)
    for i in range(1, n):
        noise[i] = 0.5 * noise[i - 1] + draw.normal(0, 0.03)
    lengths: NDArray[np.float64] = 100 * MS * slower * (1 + noise) * np.where(draw.random(n) < 0.02, 3.0, 1.0)
    return lengths


def of(lengths: NDArray[np.float64], **window: object) -> Result:
    made = run(float(lengths.mean()) / MS)
    assert made.window is not None
    return replace(made, window=replace(made.window, lengths_ns=tuple(lengths.tolist()), **window))


@pytest.mark.slow
def test_noise_fails_hardly_any_build() -> None:
    """Fewer than 1 % of pairs of the same job, also where nothing slower at all is allowed."""
    draw = np.random.default_rng(5)
    found = [bootstrap(steps(draw), steps(draw), n)[1:] for n in range(PAIRS)]
    assert sum(low > 1 and high > 1 + LIMIT for low, high in found) < PAIRS / 100
    assert sum(low > 1 for low, _ in found) < PAIRS / 100


def test_a_slow_down_of_five_percent_over_a_hundred_steps_is_found() -> None:
    draw = np.random.default_rng(6)
    found = [slowdown(of(steps(draw)), of(steps(draw, slower=1.05)), n).fails(LIMIT) for n in range(20)]
    assert sum(found) >= 18


def test_a_slow_down_well_below_the_limit_passes() -> None:
    draw = np.random.default_rng(7)
    found = [slowdown(of(steps(draw, 400)), of(steps(draw, 400, slower=1.015)), n).fails(LIMIT) for n in range(10)]
    assert not any(found)


def test_the_interval_holds_the_truth() -> None:
    draw = np.random.default_rng(8)
    found = [bootstrap(steps(draw), steps(draw, slower=1.1), n) for n in range(50)]
    assert sum(low <= 1.1 <= high for _, low, high in found) >= 0.96 * 50


def test_other_batches_compare_by_their_time_a_sample() -> None:
    draw = np.random.default_rng(9)
    one, other = (Throughput(n * 10, None, n, "loader") for n in (32.0, 16.0))
    found = slowdown(of(steps(draw), throughput=one), of(steps(draw, slower=0.6), throughput=other))
    assert found.ratio == pytest.approx(1.2, rel=0.02)
    assert found.what == "the time of a sample"
    assert found.fails(LIMIT)


def test_results_without_lengths_compare_by_their_means() -> None:
    found = slowdown(run(100), run(110))
    assert found.ratio == pytest.approx(1.1)
    assert found.what == "the mean step"
    assert found.fails(LIMIT)
    assert found.words.startswith("10 % slower (99 % interval +8.")
    assert "faster" in slowdown(run(100), run(90)).words
    assert not slowdown(run(100), run(101)).fails(LIMIT)


def test_what_is_no_run_of_the_same_job_is_not_judged() -> None:
    other = run(110)
    for changed in (
        replace(other, run=replace(other.run, command=("python", "other.py"))),
        replace(other, run=replace(other.run, device="NVIDIA H100")),
        replace(other, window=None),
        run(110, noise=None),
    ):
        with pytest.raises(NotMeasured):
            slowdown(run(100), changed)


# -- runs in a row


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


def test_the_command_says_first_what_changed_and_many_settings_are_counted() -> None:
    made = ladder([("a", at(200, num_workers="0")), ("b", at(100, command="train.py --workers 2", num_workers="2"))])
    assert made.rungs[1].changes == ("--workers 2", "num workers 0 → 2")
    a, b = ({f"k{i}": str(i + n) for i in range(6)} for n in (0, 1))  # type: tuple[dict[str, Any], dict[str, Any]]
    assert ladder([("a", at(200, **a)), ("b", at(100, **b))]).rungs[1].changes[-1] == "3 more settings"


def test_without_samples_steps_of_the_same_work_compare() -> None:
    made = ladder([("a", at(200, None)), ("b", at(100, None))], [("c", "is broken")])
    assert (made.unit, made.left_out) == ("steps", (("c", "is broken"),))
    assert made.rungs[1].first is not None
    assert made.rungs[1].first.ratio == pytest.approx(2)
    assert ladder([]) == Ladder("steps", (), (), ())


def test_what_a_reader_must_know_of_a_run() -> None:
    load: Any = ForeignLoad("host", 8, 8, 6, disturbs=True)
    doubts = ladder([("a", replace(at(200), foreign_load=load)), ("b", at(100))]).doubts
    assert doubts == ("a: programs outside the job used the cores that it would have used",)
    assert script_of(at(1, command="-m torch.distributed.run /a/b/train.py --x")) == "train.py"
    assert script_of(replace(at(1), run=replace(at(1).run, command=("a.out",)))) == ""
