"""Every schedule's order against torch's own, how long orders take, and what they hold, by papers and by hand."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from dlprof.analysis.pipeline.pipeline_plans import FORMULA, GRID, most_held, schedules
from dlprof.analysis.pipeline.schedules import (
    GPIPE,
    INTERLEAVED,
    LOOPED,
    ONE_F_ONE_B,
    SCHEDULES,
    SINGLE,
    V_SHAPED,
    Action,
    Grid,
    closed_form,
    grid,
    replay,
    runs,
)

WORDS = {"F": "forward", "B": "backward", "I": "input", "W": "weight"}
SHAPES = [*itertools.product((1, 2), (1, 2, 6), (1, 2, 3)), *itertools.product((4,), (4, 8), (1, 2))]
SHAPES += [(3, 9, chunks) for chunks in (1, 2, 3)]


def took(made: Grid, forward: float, inputs: float, weights: float) -> dict[Action, float]:
    one = {"forward": forward, "input": inputs, "weight": weights, "backward": inputs + weights}
    return {action: one[action[1]] for row in made.rows for action in row}


def bubble(schedule: str, ranks: int, microbatches: int, chunks: int, *passes: float) -> float:
    """Return the idle share of a step whose stages are alike, each pass of so many ns a rank and micro-batch."""
    made = grid(schedule, ranks, microbatches, chunks)
    step = replay(made.rows, took(made, *(t / chunks for t in passes)), made.held)
    return 1 - microbatches * sum(passes) / step


def torchs(schedule: str, ranks: int, microbatches: int, chunks: int) -> list[list[Action]]:
    """Return torch's own grid, pairs of actions that it does as one taken apart."""
    visualizer = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer", reason="torch >= 2.9 has it")

    def flat(row: list[Any]) -> Iterator[Action]:
        for action in row:
            for a in (action.sub_actions or (action,)) if action is not None else ():
                if a.computation_type.value in WORDS:
                    yield a.stage_index, WORDS[a.computation_type.value], a.microbatch_index

    name = schedule.removeprefix("Schedule")
    return [list(flat(row)) for row in visualizer.get_schedule_ops(name, ranks, microbatches, chunks)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_rank_does_what_torch_has_it_do(schedule: str) -> None:
    shapes = [shape for shape in SHAPES if runs(schedule, *shape)]
    assert len(shapes) >= 5
    for shape in shapes:
        ours, theirs = grid(schedule, *shape).rows, torchs(schedule, *shape)
        if schedule == ONE_F_ONE_B:
            # Its picture of the last rank begins with micro-batch 1 and ends with one that is not there; what it runs
            # is another method (tests/record/collectors/test_pipeline.py sees that). The other ranks are right.
            assert theirs.pop()[0] == (shape[0] - 1, "forward", 1)
            turns = [(shape[0] - 1, what, n) for n in range(shape[1]) for what in ("forward", "backward")]
            assert list(ours[-1]) == turns
        assert [list(row) for row in ours[: len(theirs)]] == theirs, shape


def test_dual_pipe_v_does_in_one_what_torch_overlaps() -> None:
    visualizer = pytest.importorskip("torch.distributed.pipelining._schedule_visualizer", reason="torch >= 2.9 has it")
    for ranks, microbatches in ((2, 4), (4, 8), (4, 13)):
        theirs = visualizer.get_schedule_ops("DualPipeV", ranks, microbatches, 2)
        pairs = {a.sub_actions[0] for row in theirs for a in row if a is not None and a.sub_actions}
        held = grid("ScheduleDualPipeV", ranks, microbatches, 2).held
        assert held == {(a.stage_index, "forward", a.microbatch_index) for a in pairs}


@pytest.mark.parametrize("passes", [(1.0, 1.0, 1.0), (1.0, 2.0, 1.0), (3.0, 0.5, 0.5)])
def test_filling_and_draining_costs_what_the_papers_say_whatever_the_passes(passes: tuple[float, ...]) -> None:
    asked = itertools.product((*SINGLE, *LOOPED[:2]), (2, 4, 8), (1, 2, 4), (1, 2, 4))
    ran = Counter[str]()
    for schedule, ranks, rounds, chunks in asked:
        microbatches = ranks * rounds
        if runs(schedule, ranks, microbatches, chunks):
            ran[schedule] += 1
            expected = (ranks - 1) / (chunks * microbatches + ranks - 1)
            assert bubble(schedule, ranks, microbatches, chunks, *passes) == pytest.approx(expected), schedule
    assert min(ran[schedule] for schedule in (*SINGLE, *LOOPED[:2])) >= 5


def test_zero_bubbles_are_what_the_papers_say_where_the_halves_are_alike() -> None:
    # Interleaved ZB1P leaves (p − 1) forwards of a chunk, ZBV none: its ranks end in the order in which they began.
    assert bubble("ScheduleInterleavedZeroBubble", 4, 8, 2, 1, 1, 1) == pytest.approx(1.5 / 25.5)
    assert bubble("ScheduleZBVZeroBubble", 4, 8, 2, 1, 1, 1) == pytest.approx(0)
    # Weights for nothing leave nothing to fill the gaps with.
    assert bubble("ScheduleInterleavedZeroBubble", 4, 8, 2, 1, 2, 0) == pytest.approx(3 / 19)
    assert bubble("ScheduleZBVZeroBubble", 4, 8, 2, 1, 2, 0) > 0.1


def test_a_pair_hands_on_only_at_its_end() -> None:
    row: list[tuple[Action, ...]] = [
        ((0, "forward", 0), (0, "weight", 7)),
        ((1, "forward", 0),),
    ]
    lengths = {(0, "forward", 0): 1.0, (0, "weight", 7): 5.0, (1, "forward", 0): 10.0}
    # A step begins on each rank with its own first action, so what the second waits for shows only in an action before.
    row[1] = ((1, "weight", 7), (1, "forward", 0))
    lengths[1, "weight", 7] = 0.5
    assert replay(row, lengths) == 11.0
    assert replay(row, lengths, held=frozenset({(0, "forward", 0)})) == 16.0


def test_launching_and_handing_over_take_their_time() -> None:
    made = grid(ONE_F_ONE_B, 2, 2)
    # The second stage's four actions, the first's first and last: six in a row, with two hand-overs.
    for launch, hand_over, length in ((0, 0, 90), (1, 0, 96), (0, 1, 92)):
        assert replay(made.rows, took(made, 10, 10, 10), launch=launch, hand_over=hand_over) == length


def test_an_order_that_cannot_be_gives_no_number() -> None:
    rows = [[(0, "backward", 0), (0, "forward", 0)], [(1, "forward", 0), (1, "backward", 0)]]
    assert math.isnan(replay(rows, {action: 1.0 for row in rows for action in row}))


@pytest.mark.parametrize(
    ("schedule", "shape"),
    [
        (ONE_F_ONE_B, (4, 3, 1)),
        (GPIPE, (4, 4, 2)),
        (INTERLEAVED, (4, 9, 2)),
        (INTERLEAVED, (4, 8, 1)),
        (V_SHAPED[0], (2, 4, 3)),
        (V_SHAPED[1], (2, 3, 2)),
        ("ScheduleOfMyOwn", (2, 4, 1)),
    ],
)
def test_what_torch_refuses_is_refused(schedule: str, shape: tuple[int, int, int]) -> None:
    assert not runs(schedule, *shape)
    with pytest.raises(ValueError, match="micro-batches on"):
        grid(schedule, *shape)


@pytest.mark.parametrize(
    ("schedule", "chunks", "bubble"),
    [
        (GPIPE, 1, 3 / 11),
        (ONE_F_ONE_B, 1, 3 / 11),
        (INTERLEAVED, 2, 3 / 19),
        ("ScheduleLoopedBFS", 2, 3 / 19),
        ("MySchedule", 1, math.nan),
    ],
)
def test_closed_forms_of_four_ranks_and_eight_microbatches(schedule: str, chunks: int, bubble: float) -> None:
    assert closed_form(schedule, 4, 8, chunks) == pytest.approx(bubble, nan_ok=True)


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 8), (8, 16)])
def test_gpipe_holds_all_and_1f1b_as_many_as_ranks(ranks: int, microbatches: int) -> None:
    found = schedules(ranks, microbatches).set_index("schedule")
    bubble = (ranks - 1) / (microbatches + ranks - 1)
    for name, held in (("GPipe", 1.0), ("1F1B", ranks / microbatches)):
        row = found.loc[name]
        assert (row["activations"], row["idle"]) == pytest.approx((held, bubble))
        assert (row["weights"], row["how"]) == (1, GRID)


def test_interleaving_is_idle_for_less_and_holds_more_and_closed_forms_are_named() -> None:
    found = schedules(4, 8).set_index("schedule")
    assert found["idle"]["Interleaved1F1B"] == pytest.approx(3 / (2 * 8 + 3))
    assert found["activations"]["Interleaved1F1B"] > found["activations"]["1F1B"]
    assert found["idle"]["ZBVZeroBubble"] < found["idle"]["Interleaved1F1B"]
    formulas = found[found["how"] == FORMULA]
    chimera = formulas.loc[next(name for name in formulas.index if name.startswith("Chimera"))]
    assert (chimera["idle"], chimera["weights"]) == (pytest.approx(2 / 18), 2)
    assert sorted(formulas["weights"]) == [2, 2, 4]
    assert not any(name.startswith("Chimera") for name in schedules(3, 8)["schedule"])  # an odd number of ranks
    # A backward pass in halves holds until its weights.
    halves: list[Action] = [(0, "forward", 0), (0, "input", 0), (0, "forward", 1), (0, "weight", 0), (0, "weight", 1)]
    assert most_held(halves) == 2
    assert most_held([(0, "forward", 0), (0, "backward", 0), (0, "forward", 1)]) == 1
