"""Waiting for data: found with what it would gain, silent on a loader that keeps up, abstaining without a loader."""

import json
from pathlib import Path
from typing import Any

import pytest

from dlprof.analysis.input.rules.input_wait import RULE
from dlprof.result import Setting
from tests.fixtures import pipelines, runs, traces
from tests.fixtures.asking import ask
from tests.fixtures.exchanges import held_up as meeting_late
from tests.fixtures.exchanges import meeting
from tests.fixtures.loaders import held_up, ready
from tests.fixtures.runs import MS

LOADER = {"role": "train", "num_workers": 2, "batch_size": 64, "persistent_workers": True}


def steps(wait: int, *, n: int = 40, dur: int = 100 * MS) -> list[dict[str, Any]]:
    return [runs.light(i, dur, fetch_ns=wait, forward_ns=min(30 * MS, max(dur - wait, 0))) for i in range(n)]


def recorded(folder: Path, *waits: int, **loader: Any) -> Path:
    facts = {**runs.CPU, "loaders": [LOADER | loader], "cpu": {"count": 16, "affinity": 16}}
    return runs.recorded(folder / "run", *((None, steps(w), facts) for w in waits))


def test_found_with_the_workers_that_would_do(tmp_path: Path) -> None:
    found = ask(RULE, recorded(tmp_path, 40 * MS))
    assert found.state == "found"
    assert found.share == pytest.approx(0.4)
    assert found.saving_ns == pytest.approx(40 * MS)
    assert found.speedup == pytest.approx(1 / 0.6)
    assert found.verdict.startswith("40 % of each step")
    # Two workers make a batch in 100 ms; one is needed every 60 ms: 2 · 100 ÷ 60, so four.
    assert "`num_workers=4` (is 2)" in found.advice[0]
    assert [c.settings for c in found.changes] == [(Setting("num_workers", 2, 4),)]
    assert found.lost_share == pytest.approx(0.4)


def test_in_the_training_thread_workers_are_what_is_missing(tmp_path: Path) -> None:
    found = ask(RULE, recorded(tmp_path, 75 * MS, num_workers=0))
    assert "`num_workers=3, persistent_workers=True`" in found.advice[0]
    assert found.changes[0].settings == (
        Setting("num_workers", 0, 3),
        Setting("persistent_workers", False, True),
    )
    assert "num_workers=0" in found.summary


def test_with_no_core_free_a_sample_must_be_cheaper(tmp_path: Path) -> None:
    facts = {**runs.CPU, "loaders": [LOADER], "cpu": {"count": 2, "affinity": 2}}
    found = ask(RULE, runs.recorded(tmp_path / "run", (None, steps(50 * MS), facts)))
    assert "make a sample cheaper" in found.advice[0]


def test_a_loader_that_keeps_up_is_left_alone(tmp_path: Path) -> None:
    clear = ask(RULE, recorded(tmp_path, 1 * MS))
    assert clear.state == "clear"
    assert clear.share == clear.lost_share == pytest.approx(0.01)
    assert clear.summary == "1.0 % of each step waits for data"


def test_a_queue_that_one_slow_sample_stalls_is_told_so(tmp_path: Path) -> None:
    found = ask(RULE, recorded(tmp_path, 40 * MS, persistent_workers=False, prefetch_factor=1))
    assert [c.settings for c in found.changes[1:]] == [
        (Setting("persistent_workers", False, True),),
        (Setting("prefetch_factor", 1, 2),),
    ]


def test_a_wait_from_a_twentieth_of_the_step_on_is_found(tmp_path: Path) -> None:
    assert ask(RULE, recorded(tmp_path / "below", 4 * MS)).state == "clear"
    assert ask(RULE, recorded(tmp_path / "above", 6 * MS)).state == "found"


def test_one_starving_rank_is_named(tmp_path: Path) -> None:
    found = ask(RULE, recorded(tmp_path, 0, 40 * MS))
    assert found.ranks == (1,)
    assert {cost.rank: cost.ns for cost in found.by_rank} == pytest.approx({1: 40 * MS})
    assert "on rank 1" in found.verdict


def test_who_waits_for_the_starving_rank_is_told(tmp_path: Path) -> None:
    found = ask(RULE, runs.foreign(tmp_path, *meeting_late({}, {"input_wait": MS}, {})))
    assert found.ranks == (1,)
    assert found.saving_ns == pytest.approx(1.25 * MS)
    assert "Ranks 0 and 2 wait 1.00 ms a step for rank 1, which waits for its loader." in found.summary
    assert found.verdict.endswith("waits for data on rank 1, and all others wait for it.")


def test_so_is_who_waits_for_one_that_waits_for_it(tmp_path: Path) -> None:
    made = meeting(3, ((1, 2),), ((0, 1),), late={2: ("input_wait", MS)}, period=3 * MS)
    found = ask(RULE, runs.foreign(tmp_path, *made))
    assert "Ranks 0 and 1 wait 1.00 ms a step for rank 2, which waits for its loader." in found.summary


def test_ranks_that_starve_alike_are_not_said_to_wait_for_each_other(tmp_path: Path) -> None:
    found = ask(RULE, runs.foreign(tmp_path, *meeting_late({"input_wait": MS}, {"input_wait": MS})))
    assert "which waits for its loader" not in found.summary
    assert found.verdict.endswith("waits for data.")


@pytest.mark.parametrize("traced", [False, True])
def test_a_pipelines_stage_that_starves_holds_up_the_others(tmp_path: Path, traced: bool) -> None:
    # Rank 0 waits 100 ms for data before each step's pipeline, and rank 1 for rank 0, in its bubble.
    path = pipelines.recorded(tmp_path, "Schedule1F1B", 2, 4, pipelines.alike(10, 20), step=250)
    series = [runs.light(n, 250 * MS, traces.BASE_NS + n * 10_000 * MS, fetch_ns=100 * MS) for n in range(33)]
    (path / "ranks/00000/steps.jsonl").write_text("".join(json.dumps(one) + "\n" for one in series))
    chunks = path / "ranks/00001/chunks.jsonl"
    lines = [json.loads(line) for line in chunks.read_text().splitlines()]
    for line in lines:
        if line["action"] == "schedule":  # it begins when rank 1 has nothing to do but wait
            line |= {"start_ns": line["start_ns"] - 100 * MS, "dur_ns": line["dur_ns"] + 100 * MS}
    chunks.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for rank in range(2) if traced else ():
        events: list[Any] = []
        for n in range(20, 23):
            at = n * 10_000 * MS
            events += [traces.step(n, at, 250 * MS), traces.fetch(at, 100 * MS * (1 - rank))]
            events.append(traces.op("aten::mm", at + 120 * MS, 60 * MS))
            begins = at + 100 * MS if rank == 0 else at
            events.append(traces.annotation(("gloo:send", "gloo:recv")[rank], begins, at + 110 * MS - begins))
        made = traces.trace(*events, rank=rank, device="", backend="gloo")
        traces.write(path / f"ranks/{rank:05d}/trace.json.gz", made)
    found = ask(RULE, path)
    assert found.saving_ns == pytest.approx(100 * MS)
    assert found.ranks == (0,)


def test_a_trace_alone_will_do(tmp_path: Path) -> None:
    events = [
        e
        for n in range(3)
        for e in (traces.step(n, n * MS, MS), traces.fetch(n * MS, MS // 2, "_SingleProcessDataLoaderIter"))
    ]
    work = [traces.kernel("gemm", n * MS + MS // 2, MS // 2) for n in range(3)]
    found = ask(RULE, runs.foreign(tmp_path, traces.trace(*events, *work, world_size=1)))
    assert found.state == "found"
    assert found.share == pytest.approx(0.5)
    assert "num_workers is 0" in found.advice[0]
    assert [s.name for s in found.changes[0].settings] == ["num_workers", "persistent_workers"]


def test_a_wait_behind_computation_is_left_alone(tmp_path: Path) -> None:
    events = [e for n in range(3) for e in (traces.step(n, n * MS, MS), traces.fetch(n * MS, MS // 2))]
    busy = traces.kernel("gemm", 0, 3 * MS)
    assert ask(RULE, runs.foreign(tmp_path, traces.trace(*events, busy, world_size=1))).state == "clear"


def test_without_a_loader_it_abstains(tmp_path: Path) -> None:
    made = traces.trace(traces.step(1, 0, MS), traces.kernel("gemm", 0, 1_000), world_size=1)
    answer = ask(RULE, runs.foreign(tmp_path, made))
    assert (answer.state, "no DataLoader" in answer.why) == ("does_not_apply", True)


def test_on_a_gpu_without_a_trace_it_abstains(tmp_path: Path) -> None:
    facts = {"device": {"type": "cuda"}, "loaders": [LOADER]}
    answer = ask(RULE, runs.recorded(tmp_path / "run", (None, steps(40 * MS), facts)))
    assert answer.state == "not_measured"


def watched(folder: Path, *, fetch: int, cpu: int, workers: int, own: int = 20, cores: int = 16) -> Path:
    """Record every batch too; `fetch`, `cpu` (of it) and `own` in ms."""
    step = max(own, fetch // workers) if workers else own + fetch
    facts = {
        **runs.CPU,
        "loaders": [LOADER | {"num_workers": workers, "prefetch_factor": 2}],
        "cpu": {"count": cores, "affinity": cores, "torch_threads": 1},
    }
    path = runs.recorded(folder / "run", (None, steps((step - own) * MS, dur=step * MS), facts))
    wait = (step - own) * MS
    runs.loading(path, 0, step=step * MS, wait=wait, fetch=fetch * MS, cpu=cpu * MS, n=40, workers=workers)
    return path


def test_workers_that_wait_for_storage_are_predicted_to_take_the_wait_away(tmp_path: Path) -> None:
    found = ask(RULE, watched(tmp_path, fetch=80, cpu=2, workers=1))
    assert "`num_workers=4` (is 1)" in found.advice[0]
    assert found.changes[0].settings == (Setting("num_workers", 1, 4),)
    assert not found.at_most
    assert found.saving_ns == pytest.approx(60 * MS, rel=0.05)
    assert (
        "the queue was empty for 37 of 37 batches; a worker takes 80.0 ms for a batch, 2.00 ms of it" in found.summary
    )
    assert found.evidence is not None
    assert [row[0] for row in found.evidence.rows] == ["0", "1 (is)", "2", "3", "4 (proposed)", "5", "6"]
    assert "Predicted for 4 workers" in found.sure
    forecasts = {f.value: f.step_ns for f in found.forecasts}
    assert {f.setting for f in found.forecasts} == {"num_workers"}
    assert forecasts["4"] == pytest.approx(80 * MS - found.saving_ns)
    assert forecasts["2"] == pytest.approx(40 * MS, rel=0.05)


def test_workers_that_compute_are_predicted_to_give_what_the_cores_allow(tmp_path: Path) -> None:
    # 100 ms of computing a step, on two cores: no better than 50 ms, where the whole wait gone would be 20.
    found = ask(RULE, watched(tmp_path, fetch=80, cpu=80, workers=0, cores=2))
    assert 25 * MS < found.saving_ns <= 50 * MS
    assert "make a sample cheaper" in found.advice[1]


def test_where_workers_cannot_help_the_saving_is_that_of_cheaper_samples(tmp_path: Path) -> None:
    path = watched(tmp_path, fetch=80, cpu=80, workers=0, cores=1)
    found = ask(RULE, path)
    assert "make a sample cheaper" in found.advice[0]
    assert "num_workers" not in found.advice[0]
    assert found.saving_ns == pytest.approx(72 * MS)  # 8 ms of collating stay
    assert "More workers alone would give" in found.sure
    assert found.at_most


def test_batches_that_compute_take_the_cores_from_training_too(tmp_path: Path) -> None:
    # One core: training computes 20 ms of each 100, in 30 of them, and the worker all the others.
    path = watched(tmp_path, fetch=100, cpu=80, workers=1, own=30, cores=1)
    held_up(path, 0, loop=10 * MS, worker=20 * MS, computing=20 * MS)
    found = ask(RULE, path)
    assert found.verdict == "70 % of each step waits for data, and making it takes the cores from training."
    assert found.saving_ns == pytest.approx(80 * MS, rel=0.01)
    assert "make a sample cheaper" in found.advice[0]
    assert "samples that cost nothing, collating as it is, and training with the cores" in found.sure
    assert found.evidence is not None
    assert "proposed" not in str(found.evidence.rows)
    then, speed = (pytest.approx(value, rel=0.01) for value in (20 * MS, 5.0))
    assert found.evidence.rows[-1] == ("samples that cost nothing", then, None, speed)
    assert found.lost_share == pytest.approx(0.7)


def test_taking_over_batches_that_are_ready_is_no_waiting(tmp_path: Path) -> None:
    path = watched(tmp_path, fetch=20, cpu=2, workers=1, own=18)
    ready(path, every=1, takes=2 * MS, outstanding=2)
    clear = ask(RULE, path)
    assert (clear.state, clear.summary) == (
        "clear",
        "0 % of each step waits for data, and 10 % takes over batches that are ready",
    )
    assert clear.share == 0.0
    # Where some batches are waited for, taking them over is no part of the wait.
    path = watched(tmp_path / "other", fetch=40, cpu=2, workers=1, own=18)
    ready(path, every=2, takes=2 * MS, outstanding=2)
    assert ask(RULE, path).saving_ns == pytest.approx(20 * MS, rel=0.05)


def test_a_script_without_a_loader_is_told_what_passes_before_its_forward(tmp_path: Path) -> None:
    lines = [runs.light(k, 50 * MS, fetches=0, lead_ns=30 * MS) for k in range(40)]
    answer = ask(RULE, runs.recorded(tmp_path / "run", (None, lines, runs.CPU)))
    assert answer.state == "does_not_apply"
    assert "30.0 ms of each step (60 %) pass before the first forward" in answer.why


def test_collating_that_takes_longest_is_what_is_to_change(tmp_path: Path) -> None:
    path = watched(tmp_path, fetch=100, cpu=80, workers=1, own=30, cores=1)
    held_up(path, 0, loop=10 * MS, worker=20 * MS, computing=20 * MS, collating=75 * MS)
    found = ask(RULE, path)
    # 20 ms of reading stay with the 20 of training.
    assert found.saving_ns == pytest.approx(60 * MS, rel=0.01)
    assert found.advice[0].startswith("collate whole tensors")
    assert "75.0 ms of it collating" in found.summary
    assert "collating that costs nothing, reading the samples as it is" in found.sure
    assert found.evidence is not None
    then, speed = (pytest.approx(value, rel=0.01) for value in (40 * MS, 2.5))
    assert found.evidence.rows[-1] == ("collating that costs nothing", then, None, speed)


def test_a_change_has_one_figure_everywhere(tmp_path: Path) -> None:
    # The recorded fetches explain 76 of 80 ms: what the replay leaves of a step is not quite the step less its gain.
    path = watched(tmp_path, fetch=80, cpu=2, workers=1)
    runs.loading(path, 0, step=80 * MS, wait=60 * MS, fetch=76 * MS, cpu=2 * MS, n=40, workers=1)
    found = ask(RULE, path)
    then = 80 * MS - found.saving_ns
    assert f"a step of {then / MS:.1f} ms is predicted" in found.advice[0]
    assert found.evidence is not None
    assert [row[1] for row in found.evidence.rows if "proposed" in str(row[0])] == [pytest.approx(then)]
    assert [f.step_ns for f in found.forecasts if f.value == "4"] == [pytest.approx(then)]


def test_a_thread_that_pins_all_batches_is_not_helped_by_more_workers(tmp_path: Path) -> None:
    # Four workers make a batch every 25 ms, one thread pins one every 50, and the device computes for 8.
    events: list[Any] = []
    for n in range(3):
        at = n * 50 * MS
        events += [traces.step(50 + n, at, 50 * MS), traces.fetch(at, 40 * MS)]
        events.append(traces.launched("gemm", at + 41 * MS, at + 41 * MS + 5_000, 8 * MS, n + 1))
    gpu = {"type": "cuda", "name": "NVIDIA H200"}
    loader = LOADER | {"num_workers": 4, "pin_memory": True, "prefetch_factor": 2}
    facts = {"device": gpu, "loaders": [loader], "cpu": {"count": 16, "affinity": 16, "torch_threads": 1}}
    path = runs.recorded(tmp_path / "run", (traces.trace(*events, world_size=1), steps(40 * MS, dur=50 * MS), facts))
    runs.loading(path, 0, step=50 * MS, wait=40 * MS, fetch=100 * MS, cpu=100 * MS, n=40, workers=4)
    file = path / "ranks/00000/loading.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines = [line | ({"pin_ns": 49 * MS} if line["kind"] == "usage" else {}) for line in lines]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = ask(RULE, path)
    assert (found.state, found.at_most) == ("found", True)
    assert found.verdict.startswith("80 % of each step waits for the thread that pins batches; a faster loader would")
    assert found.advice[0].startswith("hand over fewer bytes")
    assert not any(s.name == "num_workers" for c in found.changes for s in c.settings)
    assert "One thread pins all batches, and takes 50.0 ms for each." in found.summary
    # The workers are next.
    assert found.saving_ns == pytest.approx(25 * MS, rel=0.05)
