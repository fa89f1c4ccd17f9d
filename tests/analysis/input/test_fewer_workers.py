"""Fewer workers on a CPU: predicted from what they cost training, and not asked for with a device or without any."""

import json
from pathlib import Path

import pytest

from dlprof.analysis.input.input_waits import fewer_workers
from dlprof.errors import DoesNotApply, NotMeasured
from tests.fixtures import runs
from tests.fixtures.loaders import held_up, needless, recorded
from tests.fixtures.runs import MS


def test_what_workers_cost_training_is_gone_without_them_and_fetching_comes(tmp_path: Path) -> None:
    found = runs.measured(needless(tmp_path), fewer_workers).frame(fewer_workers)
    assert found is not None
    assert [f.workers for f in found.forecasts] == [3, 0, 1, 2]
    assert found.forecasts[0].step_ns == pytest.approx(24 * MS)
    # Of 24 ms, 6 take batches over; for 3 the training thread had no core, and its two threads both had theirs for
    # (21 ÷ 24)² of the time: workers that compute 4 ms explain that. The thread then fetches for 4 ms.
    assert found.chosen.workers == 0
    assert found.chosen.step_ns == pytest.approx((18 * (21 / 24) ** 2 + 4) * MS, rel=0.02)
    assert found.gain_ns == pytest.approx(24 * MS - found.chosen.step_ns)
    assert 0 < found.least_ns < found.gain_ns
    assert found.by_rank_ns == {0: pytest.approx(found.gain_ns)}


def test_a_core_that_others_took_is_not_gained(tmp_path: Path) -> None:
    # For 12 of 24 ms without a core: two threads both had theirs for 6, and workers that compute 4 ms held them up for
    # 5.6 of the 18. The rest stays: of 15 ms a thread computes, it takes as much from each.
    found = runs.measured(needless(tmp_path, takes=0, held_ms=12), fewer_workers).frame(fewer_workers)
    assert found is not None
    assert found.chosen.step_ns > 18 * MS


def test_workers_that_are_needed_stay(tmp_path: Path) -> None:
    found = runs.measured(recorded(tmp_path, fetch=80, cpu=2, workers=4), fewer_workers).frame(fewer_workers)
    assert found is not None
    assert found.gain_ns == 0
    assert found.least_ns < 0


def test_all_ranks_wait_for_the_one_that_gains_least(tmp_path: Path) -> None:
    path = needless(tmp_path, ranks=2)
    held_up(path, 1, loop=0, worker=0, computing=30 * MS)
    found = runs.measured(path, fewer_workers).frame(fewer_workers)
    assert found is not None
    assert found.rank == 1
    assert found.by_rank_ns[1] == found.gain_ns < found.by_rank_ns[0]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_without_workers_and_on_a_device_there_is_nothing_to_leave_out(tmp_path: Path, device: str) -> None:
    path = recorded(tmp_path, fetch=4, cpu=4, workers=0 if device == "cpu" else 2)
    file = path / "ranks/00000/facts.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"device": {"type": device}}))
    with pytest.raises(DoesNotApply):
        runs.measured(path, fewer_workers).frame(fewer_workers)


def test_batches_that_were_not_recorded_predict_nothing(tmp_path: Path) -> None:
    path = needless(tmp_path)
    (path / "ranks/00000/fetches.jsonl").unlink()
    with pytest.raises(NotMeasured):
        runs.measured(path, fewer_workers).frame(fewer_workers)


def test_what_was_waited_for_workers_whose_batches_were_ready_is_gone_with_them(tmp_path: Path) -> None:
    plain = runs.measured(needless(tmp_path / "plain"), fewer_workers).frame(fewer_workers)
    path = needless(tmp_path / "waits")
    file = path / "ranks/00000/steps.jsonl"
    # Each next() takes 11 ms in place of the 6 that taking a ready batch does, and the step is as much longer.
    steps = [json.loads(line) for line in file.read_text().splitlines()]
    steps = [s | {"dur_ns": s["dur_ns"] + 5 * MS, "fetch_ns": 11 * MS} for s in steps]
    file.write_text("".join(json.dumps(s) + "\n" for s in steps))
    waits = runs.measured(path, fewer_workers).frame(fewer_workers)
    assert plain is not None
    assert waits is not None
    assert waits.forecasts[0].step_ns == pytest.approx(plain.forecasts[0].step_ns + 5 * MS)
    assert waits.chosen.step_ns == pytest.approx(plain.chosen.step_ns, rel=0.05)
