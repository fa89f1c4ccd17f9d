"""Pipelines that can be replayed: which calls count, and what their replay takes, by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from dlprof.analysis.pipeline import pipes as subject
from dlprof.analysis.pipeline.pipes import Pipe, pipes
from tests.fixtures import pipelines, runs
from tests.fixtures.pipelines import FIRST, SECOND, alike
from tests.fixtures.runs import MS


def pipe_of(path: Path) -> Pipe:
    (pipe,) = runs.measured(path, pipes).frame(pipes)
    return pipe


def test_a_call_is_replayed_as_it_was(tmp_path: Path) -> None:
    pipe = pipe_of(pipelines.two_stages(tmp_path))
    assert (pipe.ranks, pipe.stages, pipe.rank_of, pipe.is_known) == ((0, 1), 2, {0: 0, 1: 1}, True)
    assert (pipe.step_ns, pipe.busy_ns) == (90 * MS, {0: 60 * MS, 1: 60 * MS})
    assert {pipe.again(took) for took in pipe.took} == {90 * MS}
    assert pipe.again(pipe.lengths(pipe.mean), launch=MS, hand_over=2 * MS) == (90 + 6 + 4) * MS
    assert (pipe.edge_ns, pipe.launch_ns, pipe.hand_over_ns) == (0, 0, 0)


def test_a_loss_belongs_to_its_forward_and_calls_within_a_step_are_told_apart(tmp_path: Path) -> None:
    # The last stage computes a loss of 5 ms; every step has two calls, one after the other.
    second = [("forward", 1, 0, 10, 5), ("loss", 1, 0, 15, 5), *SECOND[1:]]
    calls = [
        [([(a, s, m, at + t, d) for a, s, m, t, d in chunks], at, at + 90) for at in (0, 100)]
        for chunks in (FIRST, second)
    ]
    pipe = pipe_of(pipelines.by_hand(tmp_path, *calls, step=200))
    assert (pipe.calls_a_step, pipe.step_ns) == (2, 90 * MS)
    assert pipe.busy_ns == {0: 60 * MS, 1: 60 * MS}
    assert pipe.mean == {(s, a): ns * MS for s in (0, 1) for a, ns in (("forward", 10), ("backward", 20))}


def test_steps_that_did_something_else_are_left_out(tmp_path: Path) -> None:
    path = pipelines.two_stages(tmp_path)
    before = pipe_of(path)
    for rank in (0, 1):
        log = path / f"ranks/{rank:05d}/chunks.jsonl"
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        # In step 20 the second micro-batch never came, on either rank.
        kept = [c for c in lines if (c["step"], c.get("microbatch")) != (20, 1)]
        log.write_text("".join(json.dumps(line) + "\n" for line in kept))
    after = pipe_of(path)
    assert (after.rows, after.mean) == (before.rows, before.mean)
    assert len(after.took) == len(before.took) - 1


def test_even_stages_have_the_mean_of_each_kind_of_action(tmp_path: Path) -> None:
    longer = pipelines.recorded(tmp_path, "Schedule1F1B", 2, 8, lambda a: alike(10, 20)(a) * (1 + a[0]), hand_over=3)
    pipe = pipe_of(longer)
    assert pipe.even == {(s, a): ns * MS for s in (0, 1) for a, ns in (("forward", 15), ("backward", 30))}
    assert pipe.hand_over_ns == pytest.approx(3 * MS, rel=0.01)
    now, even = (pipe.again(pipe.lengths(of)) for of in (pipe.mean, pipe.even))
    # Without handing over more would be saved.
    assert now - even > 1.1 * pipe.saved_by_even_ns > 0


def test_a_backward_in_halves_is_their_sum(tmp_path: Path) -> None:
    pipe = pipe_of(pipelines.recorded(tmp_path, "ScheduleInterleavedZeroBubble", 2, 4, alike(10, 20), chunks=2))
    assert [pipe.backward_ns(stage) for stage in range(4)] == [20 * MS] * 4


def test_of_many_pipelines_some_are_replayed_from_the_fastest_to_the_slowest() -> None:
    count = 3 * subject.MOST_PIPES
    rows = [
        {"rank": 2 * n + stage, "ranks": f"{2 * n}, {2 * n + 1}", "size": 2, "dur_ns": float(1_000 * n)}
        for n in range(count)
        for stage in (0, 1)
    ]
    frame = pd.DataFrame(rows)
    chosen = subject._replayed(frame)
    assert len(set(chosen)) == subject.MOST_PIPES
    assert (chosen[0], chosen[-1]) == ("0, 1", f"{2 * count - 2}, {2 * count - 1}")
    assert subject._replayed(frame[frame["rank"] < 8]) == ["0, 1", "2, 3", "4, 5", "6, 7"]
