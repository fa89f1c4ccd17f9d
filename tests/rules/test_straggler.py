"""A late rank: named with what its lateness costs; silent on ranks that take turns; abstaining where one is missing."""

from pathlib import Path

import pytest

from dlprof.rules.straggler import RULE
from tests import runs, traces
from tests.measures.test_collectives import late_by
from tests.rules.asking import ask
from tests.runs import MS


def test_the_culprit_is_named_and_why(tmp_path: Path) -> None:
    found = ask(RULE, runs.foreign(tmp_path, *late_by(0, 200_000, 2 * MS, 100_000)))
    assert (found.state, found.ranks) == ("found", (2,))
    # A step of 6 ms; without rank 2, rank 1 sets the pace, 1.8 ms earlier.
    assert found.saving_ns == pytest.approx(1.8 * MS)
    assert found.share == pytest.approx(0.3)
    assert "computes longer" in found.summary


def test_the_next_slowest_bounds_the_gain(tmp_path: Path) -> None:
    assert ask(RULE, runs.foreign(tmp_path, *late_by(0, 2 * MS, 2 * MS))).state == "clear"


def test_ranks_alike_are_left_alone(tmp_path: Path) -> None:
    clear = ask(RULE, runs.foreign(tmp_path, *late_by(10_000, 0, 20_000)))
    assert clear.state == "clear"


def test_ranks_late_in_turn_are_no_straggler(tmp_path: Path) -> None:
    one, other = late_by(0, 2 * MS), late_by(2 * MS, 0)
    period = 6 * MS / 1000
    made = []
    for rank in range(2):
        events = []
        for block in range(3):
            source = (one, other)[block % 2][rank]["traceEvents"]
            for e in source:
                step = e["name"].startswith("ProfilerStep")
                number = int(e["name"][-1]) + 3 * block if step else 0
                events.append(
                    {**e, "ts": e["ts"] + block * 3 * period, **({"name": f"ProfilerStep#{number}"} if step else {})}
                )
        made.append({**one[rank], "traceEvents": events})
    assert ask(RULE, runs.foreign(tmp_path, *made)).state != "found"


def test_a_missing_rank_abstains(tmp_path: Path) -> None:
    answer = ask(RULE, runs.foreign(tmp_path, *late_by(0, 0, 2 * MS)[:2]))
    assert (answer.state, "1 of 3 are not here" in answer.why) == ("not_measured", True)


def test_one_rank_abstains(tmp_path: Path) -> None:
    assert ask(RULE, runs.foreign(tmp_path, *late_by(0))).state == "not_measured"


def test_what_was_unusual_about_the_traced_steps_is_taken_off(tmp_path: Path) -> None:
    # Rank 1 needs 1 ms more forward in every step; in two of the three traced steps rank 0 was held up by 1 ms itself.
    held = (1 * MS, 0, 1 * MS)
    made, light = [], []
    for rank in range(2):
        events, rows = [], []
        for n in range(3):
            forward = 3 * MS if rank else 2 * MS + held[n]
            t = n * 8 * MS
            events += [
                traces.step(20 + n, t, 8 * MS),
                traces.annotation("dlprof::forward", t, forward),
                traces.op("aten::conv2d", t, forward),
                traces.annotation("dlprof::backward", t + forward, 8 * MS - forward),
                traces.op("aten::conv_backward", t + forward, 2 * MS),
                traces.annotation("gloo:all_reduce", t + forward + 2 * MS, 6 * MS - forward),
            ]
            rows.append(runs.light(20 + n, 8 * MS, forward_ns=forward, backward_ns=8 * MS - forward, profiled=1))
        made.append(traces.trace(*events, rank=rank, backend="gloo", device=""))
        usual = 3 * MS if rank else 2 * MS
        light.append([runs.light(n, 8 * MS, forward_ns=usual, backward_ns=8 * MS - usual) for n in range(20)] + rows)
    folder = runs.recorded(tmp_path / "run", *((m, s, runs.CPU) for m, s in zip(made, light, strict=True)))
    found = ask(RULE, folder)
    assert (found.state, found.ranks) == ("found", (1,))
    assert found.saving_ns == pytest.approx(1 * MS, rel=0.01)
