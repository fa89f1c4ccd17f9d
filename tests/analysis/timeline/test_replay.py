"""The replay of traced steps: as recorded, as long as known changes make it, and as short as without the profiler."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dlprof.analysis import intervals as iv
from dlprof.analysis.engine import RankData
from dlprof.analysis.timeline.replay import MOST_WORK, HostClock, Replay, replay_of
from dlprof.analysis.timeline.what_if import TracedCalls, WhatIf, calibrated, usual_ns, what_if
from dlprof.errors import NotMeasured
from dlprof.read.run import open_run
from tests.fixtures import runs, traces
from tests.fixtures.runs import MS, light

GAP = US = 1_000


def synchronised(folder: Path, python: int = 400_000, beside: bool = False) -> Replay:
    """Replay steps whose host launches 1 ms of work, waits for it (to 1.1 ms), and is in Python for the rest."""
    events: list[Any] = []
    period = 1_100_000 + python
    for n in range(4):
        t = n * period
        events += [
            traces.step(n, t, period),
            traces.launched("a", t + 10_000, t + 20_000, 500_000, 10 * n + 1),
            traces.launched("b", t + 30_000, t + 520_000 + GAP, 500_000, 10 * n + 2),
            traces.call("cudaStreamSynchronize", t + 50_000, 1_050_000, 10 * n + 3),
        ]
        events += [traces.kernel("unlinked", t + 600_000, 100_000, 0, stream=21)] if beside else []
    return runs.rank_of(folder, traces.trace(*events, world_size=1)).once(replay_of)


def test_a_synchronised_step_is_as_long_as_known_changes_make_it(tmp_path: Path) -> None:
    replay = synchronised(tmp_path)
    assert replay.step_ns() == pytest.approx(1.5 * MS)
    assert (replay.steps, len(replay.waits)) == (4, 4)
    # Python that the device waits for is gained in full.
    python = traces.BASE_NS + np.array([[n * 1_500_000 + 1_100_000, (n + 1) * 1_500_000] for n in range(4)])
    assert replay.step_ns([(python, 0.0)]) == pytest.approx(1.1 * MS)
    assert replay.step_ns([(python, 0.5)]) == pytest.approx(1.3 * MS)
    assert replay.step_ns([(iv.EMPTY, 0.0)]) == replay.step_ns()
    # Without the wait the host runs ahead: 1 ms of work and the gap between the two kernels; the next step's first
    # kernel follows as closely.
    assert replay.step_ns(free=range(4)) == pytest.approx(1_000_000 + 2 * GAP, rel=0.001)
    # Shorter kernels gain what the device waited for nobody in, and work that is gone leaves no gap either.
    assert replay.step_ns(durations=replay.durations // 2) == pytest.approx(1.0 * MS, rel=0.001)
    gone = np.where(np.arange(len(replay.rows)) % 2 == 1, -1, replay.durations)
    assert replay.step_ns(durations=gone) == pytest.approx(1.5 * MS - 500_000 - GAP, rel=0.002)


def test_the_host_still_sets_the_pace_where_its_python_is_longer_than_the_work(tmp_path: Path) -> None:
    replay = synchronised(tmp_path, python=2 * MS)
    assert replay.step_ns() == pytest.approx(3.1 * MS)
    # What is left of a synchronising call that does not wait is short.
    assert replay.step_ns(free=range(len(replay.waits))) == pytest.approx(2 * MS + 50_000, rel=0.02)


def test_work_without_a_launch_keeps_its_place(tmp_path: Path) -> None:
    replay = synchronised(tmp_path, beside=True)
    assert replay.step_ns() == pytest.approx(1.5 * MS)
    assert replay.step_ns(durations=replay.durations // 2) == pytest.approx(1.0 * MS, rel=0.001)


def crowded(at: random.Random) -> dict[str, Any]:
    """Make steps on three streams that wait for each other, with waits of the host between them."""
    events: list[Any] = []
    host, free, number = 0, {7: 0, 9: 0, 11: 0}, 0
    for n in range(4):
        begin = host
        for _ in range(at.randrange(5, 30)):
            number += 1
            stream = at.choice((7, 7, 7, 9, 11))
            other = at.choice(list(free.values())) if at.random() < 0.3 else 0
            start = max(host + at.randrange(5_000, 9_000), free[stream] + at.randrange(900, 3_000), other + 500)
            dur = at.randrange(2_000, 90_000)
            events += traces.launched(f"kernel{at.randrange(4)}", host, start, dur, number, stream=stream)
            free[stream] = start + dur
            host += at.randrange(6_000, 40_000)
            if at.random() < 0.1:
                number += 1
                end = max(*free.values(), host + 30_000) + 1_000
                events.append(traces.call("cudaDeviceSynchronize", host, end - host, number))
                host = end + 1_000
        events.append(traces.step(n, begin, host - begin))
    return traces.trace(*events, world_size=1)


def piece_by_piece(
    replay: Replay, durations: Any, gap_ns: int | None, free: frozenset[int], at_once: set[int]
) -> float:
    """Replay without runs: what the model says of each piece of work, one after the other."""
    ended: dict[int, int] = {}
    streams = dict.fromkeys(replay._stream.tolist(), -(1 << 62)) | replay._before
    base, shift, boundaries = replay.begin, 0, []
    for _ in range(2):
        shifts = [shift]
        for waits, i in enumerate([*replay._wait_order, -1]):
            for row in np.flatnonzero(replay._until == waits).tolist():
                on, gap = int(replay._stream[row]), int(replay._gap[row])
                starts = [
                    streams[on] + (gap if gap_ns is None else min(gap, gap_ns)),
                    int(replay._called[row] + replay._latency[row]) + shifts[replay._waited[row]],
                ]
                if replay._needs[row] >= 0 and row not in at_once:
                    starts.append(ended[int(replay._needs[row])] + int(replay._needs_gap[row]))
                ended[row] = max(starts)
                if durations[row] >= 0:
                    rest = 0 if row in at_once else int(replay._residual[row])
                    ended[row] = streams[on] = max(starts) + rest + int(durations[row])
            if i < 0:
                continue
            wait = replay.waits[i]
            until = wait.begin + shift + min(wait.end - wait.begin, 20_000)
            if i not in free:
                if wait.row < 0:
                    until = max(until, base + wait.end - replay.begin)
                else:
                    began = int(replay._start[wait.row])
                    done = max(streams.values()) if wait.everything else ended[wait.row]
                    late = done - began - int(replay.durations[wait.row])
                    if wait.from_start:
                        late = ended[wait.row] - max(int(durations[wait.row]), 0) - began
                    until = max(until, wait.end + late)
            shift = until - wait.end
            shifts.append(shift)
        base = max(streams[replay._main], replay.host[1] + shift)
        boundaries.append(base)
        shift += replay.host[1] - replay.host[0]
    return (boundaries[1] - boundaries[0]) / replay.steps


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(seed=1662)  # a stream has work before the steps alone
@given(seed=st.integers(0, 2**32))
def test_runs_of_work_say_exactly_what_its_pieces_say(tmp_path: Path, seed: int) -> None:
    at = random.Random(seed)
    replay = runs.rank_of(tmp_path, crowded(at)).once(replay_of)
    n = len(replay.rows)
    durations = np.array([at.choice((-1, d, d, d // 3, 2 * d)) for d in replay.durations.tolist()], dtype=np.int64)
    free = frozenset(i for i in range(len(replay.waits)) if at.random() < 0.3)
    at_once = {i for i in range(n) if at.random() < 0.1}
    gap = at.choice((None, 0, 1_000))
    told = replay.step_ns(durations=durations, free=sorted(free), gap_ns=gap, at_once=sorted(at_once))
    assert told == piece_by_piece(replay, durations, gap, free, at_once)


def test_of_many_steps_as_many_are_replayed_as_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = traces.ahead(6, host=2 * MS, busy=1 * MS, synchronises=True)
    for most, steps in ((MOST_WORK, 6), (5, 2)):
        monkeypatch.setattr("dlprof.analysis.timeline.replay.MOST_WORK", most)
        replay = runs.rank_of(tmp_path, made).once(replay_of)
        assert (replay.steps, len(replay.rows)) == (steps, 2 * steps)


def test_a_queue_that_is_full_holds_the_host_until_work_starts(tmp_path: Path) -> None:
    events: list[Any] = []
    for n in range(5):
        # The launch waits for room: it returns when the step before begins on the device.
        events += [traces.step(n, n * MS, MS), traces.call("cudaLaunchKernel", n * MS + 10_000, 900_000, n + 1)]
        events.append(traces.kernel("gemm", n * MS + 1_900_000, 999_000, n + 1))
    replay = runs.rank_of(tmp_path, traces.trace(*events, world_size=1)).once(replay_of)
    assert any(wait.from_start for wait in replay.waits)
    assert replay.step_ns() == pytest.approx(1.0 * MS, rel=0.002)
    assert replay.step_ns(durations=replay.durations // 2) == pytest.approx(0.5 * MS, rel=0.05)


def test_work_that_waits_for_another_stream_still_does(tmp_path: Path) -> None:
    events: list[Any] = []
    for n in range(4):
        t = n * MS
        events += [
            traces.step(n, t, MS),
            traces.launched("produces", t + 10_000, t + 20_000, 600_000, 10 * n + 1, stream=9),
            traces.call("cudaStreamWaitEvent", t + 20_000, 2_000, 10 * n + 2),
            traces.launched("consumes", t + 30_000, t + 622_000, 300_000, 10 * n + 3),
            traces.call("cudaDeviceSynchronize", t + 50_000, 880_000, 10 * n + 4),
        ]
    replay = runs.rank_of(tmp_path, traces.trace(*events, world_size=1)).once(replay_of)
    half = np.where(replay.durations == 600_000, 300_000, replay.durations)
    assert replay.step_ns() - replay.step_ns(durations=half) == pytest.approx(300_000, rel=0.01)
    waiting = np.flatnonzero(replay.durations == 300_000).tolist()
    # Without waiting it begins beside the other.
    assert replay.step_ns() - replay.step_ns(at_once=waiting) == pytest.approx(300_000, rel=0.1)


@pytest.mark.parametrize(
    ("events", "why"),
    [
        ([traces.step(0, 0, MS), traces.op("aten::mm", 0, MS)], "no work of a device"),
        ([traces.step(0, 0, MS), traces.kernel("gemm", 10, MS, 0)], "does not link"),
        (traces.launched("gemm", 0, 10_000, MS, 1), "without step markers"),
    ],
)
def test_what_cannot_be_replayed_says_so(events: list[Any], why: str, tmp_path: Path) -> None:
    with pytest.raises(NotMeasured, match=why):
        runs.rank_of(tmp_path, traces.trace(*events)).once(replay_of)


def recorded(folder: Path, events: list[Any], step: int, **said: int) -> WhatIf:
    """Ask of traced steps of which the other steps are recorded; `step`: their length, 0: none are."""
    made = traces.trace(*events, world_size=1)
    if not step:
        return runs.rank_of(folder, made).once(what_if)
    rows = [light(n, step, start=traces.BASE_NS + n * MS, device_step_ns=step, **said) for n in range(40)]
    return RankData(open_run(runs.recorded(folder / "run", (made, rows, runs.GPU))).ranks[0]).once(what_if)


def bound() -> list[Any]:
    """Make steps of 1 ms in which the host launches ten kernels of 20 µs, one every 100 µs, all of it in operators."""
    events: list[Any] = []
    for n in range(4):
        events.append(traces.step(n, n * MS, MS))
        for k in range(10):
            at = n * MS + 100_000 * k
            events.append(traces.op("aten::mm", at, 99_000))
            events += traces.launched("gemm", at + 50_000, at + 60_000, 20_000, 100 * n + k + 1)
    return events


def test_calls_are_as_short_as_the_steps_that_were_not_traced(tmp_path: Path) -> None:
    # Twenty calls a step, in 1 ms: each may be 5 µs shorter without the profiler.
    asked = recorded(tmp_path / "log", bound(), step=900_000)
    assert asked.step_ns == pytest.approx(900_000, rel=0.01)
    assert asked.measured_ns == 900_000
    # Without calls, ten kernels of 20 µs, and the gaps of a graph: 0.2 ms and little more of 0.9.
    assert asked.gain_ns(calls=0.0, gap_ns=1_000) == pytest.approx(700_000, rel=0.05)
    assert asked.gain_ns() == 0
    # Without a step log the traced steps count; a longer step has more left than all.
    asked = recorded(tmp_path / "none", bound(), step=0)
    assert asked.fetch_left == 1.0
    assert asked.step_ns == pytest.approx(MS, rel=0.001)
    assert asked.left(asked.replay.durations * 10) == pytest.approx(2.0, rel=0.05)


def test_waits_for_data_are_brought_to_their_mean(tmp_path: Path) -> None:
    events: list[Any] = []
    for n in range(4):
        t = n * MS
        events += [
            traces.step(n, t, MS),
            traces.fetch(t, 500_000),
            traces.launched("gemm", t + 510_000, t + 520_000, 400_000, 10 * n + 1),
            traces.call("cudaStreamSynchronize", t + 530_000, 400_000, 10 * n + 2),
        ]
    asked = recorded(tmp_path, events, step=750_000, fetch_ns=250_000)
    assert asked.fetch_left == pytest.approx(0.5)
    assert asked.step_ns == pytest.approx(750_000, rel=0.01)
    assert asked.gain_ns(fetch=0.0) == pytest.approx(250_000, rel=0.02)


def test_the_scripts_python_is_no_call(tmp_path: Path) -> None:
    events: list[Any] = []
    for n in range(4):
        t = n * MS
        events += [traces.step(n, t, MS), traces.op("aten::mm", t, 100_000)]
        events += traces.launched("gemm", t + 50_000, t + 60_000, 200_000, n + 1)
    asked = recorded(tmp_path, events, step=0)
    # 0.9 ms of each are Python; without, the kernel of 0.2 ms sets the pace.
    assert asked.gain_ns(python=0.0) == pytest.approx(800_000, rel=0.05)
    assert asked.gain_ns(calls=0.0) == pytest.approx(100_000, rel=0.1)


def phase(name: str, at: int, calls: int, each: int, first: int) -> list[Any]:
    """Make a phase of operators one after the other, each with a launch and a kernel of 1 µs in its middle."""
    events: list[Any] = [traces.annotation(f"dlprof::{name}", at, calls * each)]
    for k in range(calls):
        began = at + k * each
        events += [traces.op("aten::mul", began, each - US)]
        events += traces.launched("tiny", began + each // 2, began + each // 2 + 6 * US, US, first + k)
    return events


def traced(folder: Path, forward: int, optimizer: int, step: int) -> WhatIf:
    """Trace steps of 40 + 40 + 2 calls (10, 10 and 100 µs each); the step log has other phases without the profiler."""
    events: list[Any] = []
    for n in range(4):
        at, ids = n * MS, 1_000 * n
        events.append(traces.step(n, at, MS))
        events += phase("forward", at, 40, 10 * US, ids + 1)
        events += phase("backward", at + 400 * US, 40, 10 * US, ids + 101)
        events += phase("optimizer", at + 800 * US, 2, 100 * US, ids + 201)
    made = traces.trace(*events, world_size=1)
    log: dict[str, int] = {"forward_ns": forward, "backward_ns": 300 * US, "optimizer_ns": optimizer}
    steps = [
        light(n, step, start=traces.BASE_NS + (n - 20) * 10 * MS, device_step_ns=step, **log) for n in range(40, 80)
    ]
    return RankData(open_run(runs.recorded(folder / "run", (made, steps, runs.GPU))).ranks[0]).once(what_if)


def test_each_phase_is_as_long_as_in_the_untraced_steps(tmp_path: Path) -> None:
    found = traced(tmp_path, forward=200 * US, optimizer=198 * US, step=698 * US)
    lengths = {name: found.host_ns(times) / US for name, times in found.phases.items() if name != "rest"}
    # 200 µs less for 80 calls, 100 less for as many, next to nothing for 4: not one factor for all of them.
    assert lengths == pytest.approx({"forward": 200, "backward": 300, "optimizer": 198}, rel=0.05)
    assert found.step_ns == pytest.approx(found.measured_ns, rel=0.02)
    # Where forward lasts longer untraced, as the queue is full there, the backward pass shows what calls cost.
    found = traced(tmp_path / "waits", forward=700 * US, optimizer=200 * US, step=1_200 * US)
    assert 400 * US - found.host_ns(found.phases["forward"]) == pytest.approx(100 * US, rel=0.1)


def one_phase(calls: float, length: int, spent: int) -> TracedCalls:
    ends, of = np.array([0, length]), ("forward", "")
    return TracedCalls(ends, np.array([calls]), np.array([0]), np.array([float(spent)]), of)


@pytest.mark.parametrize(("facts", "usual"), [({}, 1_500), ({"window": {"modules": {"ns_each": 1_000}}}, 2_300)])
def test_without_a_phase_that_shows_it_a_call_costs_the_usual(facts: dict[str, Any], usual: float) -> None:
    clock = calibrated(one_phase(100, MS, MS), {}, 1, lambda _: {}, usual_ns(facts), filled=False)
    (lost,) = MS - clock(np.array([MS], dtype=np.int64))
    assert lost == pytest.approx(100 * usual)


@pytest.mark.parametrize(
    ("untraced", "filled", "left"),
    [
        (900 * US, False, 900 * US),
        # Where the device is filled, the host may wait for it anywhere: no call costs less than usual.
        (900 * US, True, 850 * US),
        # 8 µs a call are the most, of calls that take 250 µs in all: the rest of the phase is as much shorter.
        (600 * US, False, 600 * US),
        # A fifth of it is left at least.
        (10 * US, False, 160 * US),
    ],
)
def test_a_phase_is_brought_to_its_length(untraced: int, filled: bool, left: int) -> None:
    def replayed(clock: HostClock) -> dict[str, float]:
        return {"forward": float(np.diff(clock(np.array([0, MS])))[0])}

    clock = calibrated(one_phase(100, MS, 250 * US), {"forward": untraced}, 1, replayed, 1_500, filled=filled)
    assert replayed(clock)["forward"] == pytest.approx(left, rel=0.02)
    # No call takes more than there is: a quarter of the time in calls is left, and what is in none of them.
    clock = one_phase(1_000, 100 * US, 80 * US).clock(np.array([1_500.0, 0.0]), np.ones(2))
    assert clock(np.array([100 * US], dtype=np.int64)).tolist() == pytest.approx([20 * US + 20 * US])
