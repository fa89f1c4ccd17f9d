"""The exclusive parts of the mean steady step on hand-made steps, and that they add up to it."""

from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.diagnosis import diagnose
from dlprof.analysis.engine import RankData
from dlprof.analysis.step.breakdown import breakdown, part, part_noise, room
from dlprof.analysis.timeline.steps import step_means
from dlprof.errors import NotMeasured
from dlprof.read.run import Rank, open_run
from tests.fixtures import runs, traces
from tests.fixtures.runs import MS, asked


def parts_of(rank: RankData) -> dict[str, float]:
    frame = rank.once(breakdown)
    return dict(zip(frame["category"], frame["ns"], strict=True))


def on_cpu(*events: object, **keys: object) -> dict[str, object]:
    return traces.trace(*events, backend="gloo", device="", **keys)  # type: ignore[arg-type]


def test_the_mean_is_over_the_steps(tmp_path: Path) -> None:
    rank = runs.rank_of(
        tmp_path,
        traces.trace(
            traces.step(1, 0, 1_000_000),
            traces.kernel("gemm", 0, 1_000_000),
            traces.step(2, 1_000_000, 3_000_000),
            traces.fetch(1_000_000, 2_000_000),
            traces.kernel("gemm", 3_000_000, 1_000_000),
        ),
    )
    assert parts_of(rank) == {"computation": 1_000_000, "input_wait": 1_000_000}


def test_the_parts_are_brought_to_the_steps_that_were_not_traced(tmp_path: Path) -> None:
    # Untraced: 1 ms fetch, 3 ms forward, 1 ms else. The profiler made forward (all operators) 2 × and else 3 × as long.
    made = on_cpu(
        traces.step(10, 0, 10 * MS),
        traces.fetch(0, MS),
        traces.annotation("dlprof::forward", MS, 6 * MS),
        traces.op("aten::mm", MS, 4 * MS),
    )
    steps = [runs.light(n, 5 * MS, fetch_ns=MS, forward_ns=3 * MS) for n in range(30)]
    folder = runs.recorded(tmp_path / "run", (made, steps, runs.CPU))
    found = asked(runs.measured(folder, breakdown, step_means), part, "computation")
    assert found == {0: pytest.approx(2 * MS)}  # four of six ms of forward, so two thirds of three
    run = runs.measured(folder, breakdown, step_means)
    assert asked(run, part, "input_wait") == {0: pytest.approx(MS)}
    assert asked(run, part, "host") == {0: pytest.approx(2 * MS)}
    assert run.frame(breakdown)["ns"].sum() == pytest.approx(run.frame(step_means)["step_ns"][0])
    assert run.frame(step_means)["overhead"][0] == pytest.approx(2.0)


def test_a_phase_that_was_shorter_when_traced_waits_for_longer_else(tmp_path: Path) -> None:
    made = traces.trace(
        traces.step(10, 0, 10 * MS),
        traces.annotation("dlprof::optimizer", 0, 4 * MS),
        traces.annotation("horovod:all_reduce", 0, 2 * MS),
        traces.op("aten::add_", 2 * MS, 1 * MS),
        device="",
        backend="",
    )
    steps = [runs.light(n, 15 * MS, optimizer_ns=9 * MS) for n in range(30)]
    run = runs.measured(runs.recorded(tmp_path / "run", (made, steps, runs.CPU)), breakdown)
    assert asked(run, part, "communication") == {0: pytest.approx(7 * MS)}
    assert asked(run, part, "computation") == {0: pytest.approx(MS)}
    assert asked(run, part, "optimizer_host") == {0: pytest.approx(MS)}


def test_device_work_keeps_its_time_whatever_the_profiler_did_to_the_host(tmp_path: Path) -> None:
    made = traces.trace(
        traces.step(10, 0, 10 * MS),
        traces.annotation("dlprof::forward", 0, 10 * MS),
        traces.kernel("gemm", 6 * MS, 4 * MS),
    )
    steps = [runs.light(n, 5 * MS, forward_ns=5 * MS) for n in range(30)]
    run = runs.measured(runs.recorded(tmp_path / "run", (made, steps, {"device": {"type": "cuda"}})), breakdown)
    assert asked(run, part, "computation") == {0: pytest.approx(4 * MS)}
    assert asked(run, part, "host") == {0: pytest.approx(MS)}


def test_without_a_trace_the_phases_of_a_cpu_run_are_known(tmp_path: Path) -> None:
    steps = [runs.light(n, 5 * MS, fetch_ns=MS, forward_ns=3 * MS) for n in range(30)]
    run = runs.measured(runs.recorded(tmp_path / "cpu", (None, steps, runs.CPU)), breakdown)
    assert asked(run, part, "input_wait") == {0: pytest.approx(MS)}
    assert asked(run, part, "computation") == {0: pytest.approx(3 * MS)}
    assert asked(run, part, "other") == {0: pytest.approx(MS)}
    run = runs.measured(runs.recorded(tmp_path / "gpu", (None, steps, {"device": {"type": "cuda"}})), breakdown)
    with pytest.raises(NotMeasured, match="trace"):
        run.frame(breakdown)


def test_parts_that_vary_between_the_steps_say_how_much(tmp_path: Path) -> None:
    steady = [e for n in range(4) for e in (traces.step(n, n * MS, MS), traces.kernel("gemm", n * MS, MS // 2))]
    run = runs.measured(runs.foreign(tmp_path / "a", traces.trace(*steady, world_size=1)), breakdown)
    assert asked(run, part_noise, "host") == 0.0
    uneven = [e for n in range(4) for e in (traces.step(n, n * MS, MS), traces.kernel("gemm", n * MS, n * MS // 4))]
    run = runs.measured(runs.foreign(tmp_path / "b", traces.trace(*uneven, world_size=1)), breakdown)
    assert asked(run, part_noise, "host") > 0.1 * MS


def test_a_rank_without_records_abstains() -> None:
    with pytest.raises(NotMeasured):
        RankData(Rank(0)).once(breakdown)


@pytest.mark.parametrize(("stood_still", "communication"), [(500_000, 450_000), (100_000, 100_000), (220_000, 200_000)])
def test_standing_still_in_every_step_bounds_communication(
    tmp_path: Path, stood_still: int, communication: int
) -> None:
    """Of 1 ms the trace shows 200 µs of communication and 50 µs of Python: who waits for it stands still."""
    made = on_cpu(
        traces.step(20, 0, 1_000_000),
        traces.op("aten::conv2d", 0, 750_000),
        traces.annotation("gloo:all_reduce", 750_000, 200_000, tid=traces.MAIN),
    )
    steps = [runs.light(n, 1_000_000) for n in range(20)] + [runs.light(20, 1_000_000, profiled=1)]
    facts = {**runs.CPU, "backend": "gloo", "cpu": {"torch_threads": 1}}
    folder = runs.recorded(tmp_path / "run", (made, steps, facts))
    runs.loading(folder, 0, step=1_000_000, wait=stood_still, fetch=0, cpu=0, n=20, workers=1)
    frame = runs.measured(folder, breakdown).frame(breakdown).set_index("category")
    assert frame["ns"].sum() == pytest.approx(1_000_000)
    assert frame["ns"]["communication"] == pytest.approx(communication)
    # What shares the difference keeps its proportion.
    assert frame["ns"]["computation"] / frame["ns"]["host"] == pytest.approx(15)


def test_a_thread_that_shares_its_work_waits_for_other_threads_too(tmp_path: Path) -> None:
    made = on_cpu(
        traces.step(20, 0, 1_000_000),
        traces.op("aten::conv2d", 0, 750_000),
        traces.annotation("gloo:all_reduce", 750_000, 200_000, tid=traces.MAIN),
    )
    facts = {**runs.CPU, "backend": "gloo", "cpu": {"torch_threads": 2}}
    folder = runs.recorded(tmp_path / "run", (made, [runs.light(n, 1_000_000) for n in range(20)], facts))
    runs.loading(folder, 0, step=1_000_000, wait=500_000, fetch=0, cpu=0, n=20, workers=1)
    frame = runs.measured(folder, breakdown).frame(breakdown).set_index("category")
    assert frame["ns"]["communication"] == pytest.approx(200_000)


GPU = {"device": {"type": "cuda", "name": "NVIDIA H100"}}


def longer(folder: Path, waits: int) -> Path:
    """Record steps of 2 ms of which the device computes all, and untraced ones of 3 ms that wait so long for data."""
    made = traces.ahead(6, host=1 * MS, busy=2 * MS)
    steps = [runs.light(n, 3 * MS, device_step_ns=3 * MS, fetch_ns=waits) for n in range(40)]
    return runs.recorded(folder / "run", (made, steps, GPU))


def test_untraced_steps_that_wait_longer_for_data_are_longer_for_it(tmp_path: Path) -> None:
    run = runs.measured(longer(tmp_path, waits=900_000), breakdown, step_means)
    assert asked(run, part, "computation")[0] == pytest.approx(2 * MS, rel=0.02)
    assert asked(run, part, "input_wait")[0] == pytest.approx(900_000, rel=0.05)
    assert run.frame(breakdown)["ns"].sum() == pytest.approx(3 * MS)


def test_a_wait_that_makes_no_step_longer_is_no_part_of_it(tmp_path: Path) -> None:
    run = runs.measured(longer(tmp_path, waits=2_900_000), breakdown, step_means)
    assert asked(run, part, "input_wait")[0] == pytest.approx(MS, rel=0.05)


def test_what_makes_untraced_steps_longer_and_was_not_recorded_is_said_to_be_so(tmp_path: Path) -> None:
    path = longer(tmp_path, waits=0)
    assert asked(runs.measured(path, breakdown, step_means), part, "other")[0] == pytest.approx(MS, rel=0.05)
    (said,) = (w for w in diagnose(open_run(path), [], jobs=1).run.warnings if "not in the traced steps" in w)
    assert said.startswith("33 % of a step is not in the traced steps")


def test_all_steps_tell_how_sure_the_hosts_part_is(tmp_path: Path) -> None:
    # The device computes 2 ms of each step; the host takes 1, 3 and 2 ms more in the traced steps, and 2 in the mean.
    events: list[Any] = []
    at = 0
    for n, host in enumerate((1 * MS, 3 * MS, 2 * MS)):
        events += [traces.step(n, at, 2 * MS + host), *traces.launched("gemm", at, at + 10_000, 2 * MS, n + 1)]
        at += 2 * MS + host
    steps = [runs.light(n, 4 * MS + (n % 2) * 20_000) for n in range(60)]
    made = traces.trace(*events, world_size=1)
    run = runs.measured(runs.recorded(tmp_path / "run", (made, steps, GPU)), breakdown, step_means)
    assert asked(run, part, "host")[0] == pytest.approx(2 * MS, rel=0.05)
    assert asked(run, part_noise, "host") < 0.01 * MS
    alone = runs.measured(runs.foreign(tmp_path / "trace", made), breakdown, step_means)
    assert asked(alone, part_noise, "host") > 0.5 * MS


def test_a_ranks_own_time_is_the_room(tmp_path: Path) -> None:
    run = runs.measured(runs.foreign(tmp_path, traces.training(world_size=1)), breakdown)
    # Of each step of 990 µs: 550 computing, 120 in a reduction that nothing hides, 25 copying, 100 waiting for data.
    assert asked(run, room, ["copy"]) == 25_000
    assert asked(run, room, ["computation", "copy"]) == 575_000
    assert asked(run, room, ["communication"]) == 120_000
    assert asked(run, room, ["checkpoint"]) == 0
    assert asked(run, room, []) == 0


def test_waiting_for_another_ranks_part_is_room_as_far_as_there_is_waiting(tmp_path: Path) -> None:
    quiet = traces.training(rank=0)
    busy = traces.training(rank=1)
    for event in busy["traceEvents"]:
        if event["name"].startswith("enumerate(DataLoader)"):
            event["dur"] = 5.0  # µs, of 100
    run = runs.measured(runs.foreign(tmp_path, quiet, busy), breakdown)
    # Rank 0 waits 100 µs for data itself. Rank 1's 5 µs may be waited for on rank 0, in its reduction of 120 µs.
    assert asked(run, room, ["input_wait"]) == 105_000


def test_ranks_that_stand_still_in_turn_have_the_sum(tmp_path: Path) -> None:
    rows = [runs.light(n, 100 * MS, first=int(n == 0)) for n in range(30)]
    pauses = [[runs.stall("garbage_collection", n, 20 * MS) for n in range(r, 30, 2)] for r in (0, 1)]
    path = runs.recorded(tmp_path, (None, rows, runs.CPU), (None, rows, runs.CPU), stalls=pauses)
    run = runs.measured(path, breakdown)
    # Each has 10 ms a step of its own, and waits 10 ms for the other's; without a trace that is among the other time.
    assert asked(run, room, ["garbage_collection"]) == pytest.approx(20 * MS, rel=0.1)
