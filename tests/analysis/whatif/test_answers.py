"""What a run's step would be with something changed: with known answers, and with what nobody can know."""

from __future__ import annotations

from pathlib import Path

import pytest

from dlprof.analysis.whatif.answers import answers, predictions
from dlprof.analysis.whatif.asked import PERFECT, Asked
from dlprof.errors import NotMeasured
from dlprof.read.run import open_run
from dlprof.result.scale import Answer
from tests.fixtures import loaders, pipelines, runs, traces
from tests.fixtures.runs import MS


def only(path: Path, asked: Asked) -> Answer:
    (answer,) = answers(open_run(path), asked).alone
    return answer


def test_workers_of_a_loader_that_waits_for_storage(tmp_path: Path) -> None:
    path = loaders.recorded(tmp_path, fetch=60, cpu=1, workers=1)  # steps of 60 ms, 20 of them the loop's own
    steps = [a.step_ns for a in predictions(open_run(path), [Asked(workers=n) for n in (0, 1, 2, 3, 8)])]
    assert steps == [pytest.approx(ms * MS, rel=0.06) for ms in (80, 60, 30, 20, 20)]


def test_a_faster_and_a_perfect_input(tmp_path: Path) -> None:
    path = loaders.recorded(tmp_path, fetch=60, cpu=1, workers=1)
    assert only(path, Asked(input=2.0)).step_ns == pytest.approx(30 * MS, rel=0.05)
    assert only(path, Asked(input=PERFECT)).step_ns == pytest.approx(20 * MS, rel=0.05)


def test_changes_together_show_the_loader_that_cannot_keep_up(tmp_path: Path) -> None:
    """With two workers the loop is the limit no more than the loader: twice as fast, it waits for data."""
    made = traces.trace(
        *(traces.step(n, n * 1_000 * MS, 20 * MS) for n in range(30)),
        *(traces.op("aten::mm", n * 1_000 * MS, 20 * MS) for n in range(30)),
        world_size=1,
    )
    path = loaders.recorded(tmp_path, fetch=36, cpu=1, workers=2)
    traces.write(path / "ranks/00000/trace.json.gz", made)
    found = answers(open_run(path), Asked(device=2.0, workers=4))
    workers, device = found.alone
    assert device.step_ns == pytest.approx(18 * MS, rel=0.1)  # two workers make a batch in 18 ms
    assert workers.step_ns == pytest.approx(20 * MS, rel=0.05)
    assert found.together is not None
    assert found.together.step_ns == pytest.approx(10 * MS, rel=0.15)


def test_micro_batches_and_even_stages_of_a_pipeline(tmp_path: Path) -> None:
    path = pipelines.two_stages(tmp_path)
    now = answers(open_run(path), Asked(microbatches=2)).alone[0].step_ns
    more = only(path, Asked(microbatches=8)).step_ns
    assert now == pytest.approx(100 * MS, rel=0.01)
    assert more is not None
    assert now is not None
    assert more < 0.95 * now
    assert only(path, Asked(schedule="GPipe")).step_ns is not None
    assert only(path, Asked(stages=True)).step_ns is not None
    lacking = only(path, Asked(schedule="ZBVZeroBubble"))
    assert lacking.step_ns is None
    assert "does not run" in lacking.why


def test_a_device_twice_as_fast(tmp_path: Path) -> None:
    events = []
    for n in range(6):
        events += [traces.step(n, n * MS, MS), *traces.launched("gemm", n * MS, n * MS + 1_000, 990_000, n + 1)]
        events += [traces.call("cudaDeviceSynchronize", n * MS + 2_000, 989_000, 100 + n)]
    path = runs.foreign(tmp_path / "traces", traces.trace(*events, world_size=1))
    found = only(path, Asked(device=2.0))
    assert found.step_ns == pytest.approx(0.505 * MS, rel=0.03)
    assert any("keeps up" in why for why in found.unknown)
    assert only(path, Asked(workers=4)).step_ns is None


def test_what_a_job_does_not_have_is_not_known(tmp_path: Path) -> None:
    path = loaders.recorded(tmp_path, fetch=60, cpu=1, workers=1)
    for asked in (Asked(microbatches=4), Asked(host=2.0), Asked(copies=2.0)):
        found = only(path, asked)
        assert found.step_ns is None
        assert found.why
    both = answers(open_run(path), Asked(input=PERFECT, microbatches=4))
    assert [a.step_ns is None for a in both.alone] == [False, True]
    assert both.together is not None
    assert both.together.changes == ("perfect input",)
    assert both.together.step_ns == both.alone[0].step_ns


def test_a_run_without_steps_has_no_answer(tmp_path: Path) -> None:
    path = runs.recorded(tmp_path / "run", (None, [], runs.CPU))
    with pytest.raises(NotMeasured):
        answers(open_run(path), Asked(device=2.0))
