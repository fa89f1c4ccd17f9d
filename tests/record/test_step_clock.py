"""Where steps end and how long their phases take: in real scripts, and call by call on a clock that the test sets."""

from __future__ import annotations

import itertools
import json
import subprocess
import threading
from pathlib import Path
from textwrap import dedent

import pytest

from dlprof.schema import STEPS
from tests.fixtures.jobs import facts, record, rows, tiny
from tests.fixtures.ticking import Job

torch = pytest.importorskip("torch", reason="recording needs torch")


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    return Job(monkeypatch)


def test_the_optimizer_ends_a_step_until_a_loader_is_seen_and_dlprof_step_outranks_both(job: Job) -> None:
    job.train()
    job.train()
    assert (job.clock.mark, len(job.steps)) == ("optimizer", 2)
    job.fetch()
    job.train()
    job.train()
    assert (job.clock.mark, len(job.steps)) == ("loader", 2)
    job.fetch()
    assert [step.optimizer_steps for step in job.steps] == [1, 1, 2]
    job.train()
    job.clock.user_step()
    job.fetch()
    job.train()
    assert (job.clock.mark, len(job.steps)) == ("user", 4)


def test_many_optimizer_steps_on_one_batch_are_a_loop_without_a_loader(job: Job) -> None:
    job.fetch()
    for _ in range(32):
        job.train()
    assert (job.clock.mark, job.steps) == ("loader", [])
    job.train()
    job.train()
    assert job.clock.mark == "optimizer"
    assert [step.optimizer_steps for step in job.steps] == [33, 1]


def test_a_batch_that_nothing_is_done_with_ends_no_step(job: Job) -> None:
    job.fetch()
    job.train()
    for _ in range(3):
        job.fetch()
    job.train()
    job.fetch()
    assert [(step.fetches, step.optimizer_steps) for step in job.steps] == [(1, 1), (3, 1)]


def test_phases_exclude_each_other_and_what_is_none_is_the_rest(job: Job) -> None:
    def closure() -> None:
        job.now += 10
        job.forward(100)
        job.backward(1000)

    job.fetch(2)
    job.now += 5
    job.forward(7)
    job.backward(11)
    job.now += 3
    job.update(20, closure)
    job.fetch(1, inside=lambda: job.forward(50))
    job.backward()
    job.update(0)
    job.fetch()
    first, second = job.steps
    assert (first.dur_ns, first.lead_ns) == (2 + 5 + 7 + 11 + 3 + 20 + 10 + 100 + 1000, 5)
    assert first[4:8] == (2, 7 + 100, 11 + 1000, 20 + 10)
    assert second[4:8] == (1, 50, 1, 0)
    assert (second.start_ns, second.number) == (first.start_ns + first.dur_ns, 1)


def test_inside_is_set_where_modules_need_no_look(job: Job) -> None:
    seen = []
    job.fetch(inside=lambda: seen.append(job.clock.inside))
    job.update(inside=lambda: seen.append(job.clock.inside))
    assert job.clock.begin_forward(job.model)
    seen.append(job.clock.inside)
    job.clock.end()
    seen.append(job.clock.inside)
    job.clock.switch_off()
    assert [*seen, job.clock.inside] == [True, False, True, False, True]


def test_a_backward_inside_a_backward_and_an_optimizer_inside_an_optimizer_count_once(job: Job) -> None:
    assert job.clock.begin_backward()
    assert not job.clock.begin_backward()
    job.clock.end()
    job.update(inside=job.update)
    (step,) = job.steps
    assert (step.backwards, step.optimizer_steps, step.optimizer_ns) == (1, 1, 2)


def test_an_optimizer_that_raised_is_left_at_the_next_batch(job: Job) -> None:
    job.fetch()
    job.clock.begin_optimizer(job.optimizer)  # its hook after the step is never called
    job.fetch()
    assert job.clock.phases == []
    job.train()
    job.fetch()
    assert [step.optimizer_steps for step in job.steps] == [1]


def test_another_thread_is_not_timed_once_the_process_trains(job: Job) -> None:
    job.train()
    seen: list[object] = []

    def other() -> None:
        seen.append(job.clock.begin_forward(job.model))
        seen.append(job.clock.begin_backward())
        seen.append(job.clock.begin_fetch(job.iterator, first=True))
        seen.append(job.clock.begin_epoch())
        seen.append(job.clock.begin_optimizer(job.optimizer))
        job.clock.end_optimizer()
        job.clock.user_step()

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen == [False] * 5
    assert (job.clock.row.worked, job.clock.row.fetches, len(job.steps)) == (False, 0, 1)


def test_the_first_backward_pass_takes_over_from_a_thread_that_only_fetched(job: Job) -> None:
    thread = threading.Thread(target=job.fetch)
    thread.start()
    thread.join()
    theirs = job.clock.owner
    assert not job.clock.begin_forward(job.model)
    job.backward()
    assert job.clock.owner == threading.get_ident() != theirs
    assert (job.clock.row.fetches, job.clock.row.backwards) == (0, 1)


def test_steps_before_training_are_kept_within_bounds_and_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dlprof.record.step_clock._EARLY_STEPS", 3)
    job = Job(monkeypatch)
    for _ in range(6):
        job.fetch()
        job.forward()
    job.train()
    job.fetch()
    assert [step.number for step in job.steps] == [0, 1, 2, 5]
    assert job.clock.trained_from == 5
    assert job.clock.position == 1


def test_steps_are_passed_on_when_they_are_due(job: Job) -> None:
    job.train()
    job.clock.due_ns = 100
    job.clock.observed.news = False
    passed = []
    for _ in range(3):
        job.train()
        passed.append(len(job.steps))
    job.clock.due_step = 5
    job.train()
    passed.append(len(job.steps))
    job.clock.due_step = 99
    job.now = 100
    job.train()
    passed.append(len(job.steps))
    job.clock.due_ns = 10**9
    job.clock.observed.news = True
    job.train()
    assert [*passed, len(job.steps)] == [1, 1, 1, 5, 6, 7]


def test_no_step_ends_while_a_graph_is_captured(job: Job) -> None:
    job.train()
    job.clock.capturing = True
    job.train()
    job.clock.user_step()
    assert (len(job.steps), job.clock.row.optimizer_steps) == (1, 1)


def test_replays_are_the_work_that_their_graph_holds(job: Job) -> None:
    job.clock.replayed(1, 1, 1)
    job.clock.replayed(0, 0, 3)
    assert [step[8:12] for step in job.steps] == [(0, 1, 1, 1), (0, 0, 0, 3)]
    job.clock.replayed(0, 0, 0)
    assert (job.clock.row.forwards, len(job.steps)) == (1, 2)


def test_what_fails_switches_off_and_the_script_goes_on(job: Job) -> None:
    job.train()
    job.clock.row = None  # type: ignore[assignment]
    assert not job.clock.begin_forward(job.model)
    assert [type(e) for e in job.failed] == [AttributeError]
    assert job.clock.off
    assert not job.clock.begin_backward()
    assert not job.clock.begin_optimizer(job.optimizer)
    job.clock.end_optimizer()
    assert job.clock.end() == -1
    assert len(job.failed) == 1


def test_a_process_whose_driver_refuses_to_start_passes_nothing_on(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch, trains=False)
    job.train()
    job.train()
    assert job.steps == []
    assert len(job.clock.done) == 2


def test_a_step_that_ends_while_a_loader_is_asked_in_vain_costs_nothing(job: Job) -> None:
    clock = job.clock
    loader = torch.utils.data.DataLoader(range(4))
    assert clock.begin_epoch()
    iterator = iter(loader)
    clock.end()
    clock.see_iterator(loader, iterator)
    assert clock.begin_fetch(iterator, first=True)
    clock.row.forwards += 1
    clock.user_step()  # as a data set may call it
    clock.end()
    clock.end_of_epoch()
    assert job.failed == []
    assert [seen.role for seen in clock.observed.loaders] == ["validation"]


@pytest.mark.parametrize("frozen", [True, False])
def test_a_frozen_teachers_forward_pass_is_for_the_backward_pass_after_it(frozen: bool, tmp_path: Path) -> None:
    loop = tiny(
        tmp_path,
        f"""
        import copy
        teacher = copy.deepcopy(model).requires_grad_(not {frozen})
        for x, _ in DataLoader(data, batch_size=8):
            with torch.no_grad():
                aim = teacher(x)
            nn.functional.mse_loss(model(x), aim).backward()
            optimizer.step()
        """,
    )
    record(loop, folder=tmp_path / "run", options=["--no-trace", "--flops", "off", "--no-sample"])
    steps = [row for row in rows(tmp_path / "run/ranks/00000") if row["kind"] == "train"]
    assert {row["forwards"] for row in steps} == {2}
    assert all((row["unused_forward_ns"] == 0) is frozen for row in steps)


def test_epochs_validation_and_accumulated_gradients(tmp_path: Path) -> None:
    loop = tiny(
        tmp_path,
        """
        for epoch in range(2):
            for n, (x, y) in enumerate(DataLoader(data, batch_size=8)):
                nn.functional.mse_loss(model(x), y).backward()
                if n % 2:
                    optimizer.step()
                    optimizer.zero_grad()
            with torch.no_grad():
                for x, y in DataLoader(data, batch_size=16):
                    model(x)
        """,
    )
    record(loop, folder=tmp_path / "run", options=["--no-trace", "--flops", "off"])
    rank = tmp_path / "run/ranks/00000"
    steps = rows(rank)
    assert [list(row) for row in steps] == [list(STEPS)] * len(steps)
    assert [row["step"] for row in steps] == list(range(len(steps)))
    epoch = ["train"] * 4 + ["validation"] * 4
    assert [row["kind"] for row in steps] == [*epoch, *epoch, "other"]
    trained = [row for row in steps if row["kind"] == "train"]
    # A step is an optimizer step, of two batches.
    assert [(row["optimizer_steps"], row["fetches"], row["forwards"]) for row in trained[1:4]] == [(1, 2, 2)] * 3
    assert {row["backwards"] for row in trained} == {2}
    assert {row["unused_forward_ns"] for row in trained} == {0}
    # The end of one loader and the start of the next fall into one step.
    assert [row["step"] for row in steps if row["first"]] == [0, 4, 8, 12, 16]
    assert [row["fetches"] for row in steps if row["first"]] == [2, 2, 3, 2, 1]
    for row, following in itertools.pairwise(steps):
        assert row["start_ns"] + row["dur_ns"] == following["start_ns"]
    for row in steps:
        parts = row["fetch_ns"] + row["forward_ns"] + row["backward_ns"] + row["optimizer_ns"]
        assert parts + max(row["lead_ns"], 0) <= row["dur_ns"]
        assert (row["lead_ns"] >= 0) == (row["kind"] != "other")
        assert (row["forward_ns"] > 0) == (row["kind"] != "other")
        assert (row["backward_ns"] > 0) == (row["kind"] == "train")
        assert (row["optimizer_ns"] > 0) == (row["optimizer_steps"] > 0)
        assert (row["fetch_ns"] > 0) == (row["fetches"] > 0)
        assert row["profiled"] == (row["step"] == 9)  # in which it is counted what memory holds
        assert row["device_step_ns"] == -1
    told = facts(rank)
    assert told["step"]["mark"] == "loader"
    assert told["window"]["state"] == "off"
    assert [(loader["role"], loader["batch_size"]) for loader in told["loaders"]][:2] == [
        ("train", 8),
        ("validation", 16),
    ]
    assert not list(rank.glob("trace*"))


@pytest.mark.long
def test_a_script_without_a_loader_and_one_with_a_single_batch(tmp_path: Path) -> None:
    body = "import time\nfor n in range(6):\n    time.sleep(0.01)\n    train(data[:8])"
    record(tiny(tmp_path, body), folder=tmp_path / "a", options=["--no-trace"])
    rank = tmp_path / "a/ranks/00000"
    assert facts(rank)["step"]["mark"] == "optimizer"
    assert [row["optimizer_steps"] for row in rows(rank)] == [1] * 6
    assert all(row["lead_ns"] >= 10_000_000 for row in rows(rank)[1:])
    body = "batch = next(iter(DataLoader(data, batch_size=8)))\nfor n in range(40): train(batch)"
    record(tiny(tmp_path, body), folder=tmp_path / "b", options=["--no-trace"])
    rank = tmp_path / "b/ranks/00000"
    assert facts(rank)["step"]["mark"] == "optimizer"
    assert sum(row["optimizer_steps"] for row in rows(rank)) == 40
    assert [row["optimizer_steps"] for row in rows(rank)][1:] == [1] * 7


@pytest.mark.long
def test_steps_that_the_script_marks_itself_and_closures_and_nested_optimizers(tmp_path: Path) -> None:
    loop = tiny(
        tmp_path,
        """
        import dlprof

        def closure():
            with dlprof.annotate("closure"):
                optimizer.zero_grad()
                time.sleep(0.02)
                loss = model(data[:8][0]).sum()
                loss.backward()
            return loss

        class Outer(torch.optim.Optimizer):
            def step(self, closure=None):
                return optimizer.step(closure)

        outer = Outer(model.parameters(), {})
        for n in range(8):
            outer.step(closure)
            outer.step(closure)
            dlprof.step()
        """,
    )
    record(loop, folder=tmp_path / "run", options=["--window", "2,1,2"])
    rank = tmp_path / "run/ranks/00000"
    assert facts(rank)["step"]["mark"] == "user"
    # Before the first dlprof.step() the optimizer marked the steps.
    assert [row["optimizer_steps"] for row in rows(rank)] == [1, 1, 0] + [2] * 7
    assert all(row["backwards"] == row["optimizer_steps"] for row in rows(rank))
    assert all(row["optimizer_ns"] >= 40_000_000 for row in rows(rank)[3:])
    assert all(row["forward_ns"] < row["optimizer_ns"] for row in rows(rank)[3:])
    events = json.loads(subprocess.run(["gzip", "-dc", rank / "trace.json.gz"], capture_output=True, check=True).stdout)
    assert sum(event.get("name") == "closure" for event in events["traceEvents"]) == 4


@pytest.mark.long
def test_scripts_that_update_by_hand_or_only_infer(tmp_path: Path) -> None:
    by_hand = """
    weights = list(model.parameters())
    for n in range(40):
        loss = nn.functional.mse_loss(model(data[:8][0]), data[:8][1])
        for weight, gradient in zip(weights, torch.autograd.grad(loss, weights)):
            weight.data -= 0.1 * gradient
    """
    record(tiny(tmp_path, dedent(by_hand)), folder=tmp_path / "a", options=["--no-trace"])
    rank = tmp_path / "a/ranks/00000"
    assert facts(rank)["step"]["mark"] == "backward"
    assert [row["backwards"] for row in rows(rank)] == [8] + [1] * 32
    infers = """
    began = time.monotonic()
    with torch.no_grad():
        while time.monotonic() < began + 4:
            time.sleep(0.01)
            model(data[:8][0])
    """
    record(tiny(tmp_path, dedent(infers)), folder=tmp_path / "b", options=["--no-trace"])
    rank = tmp_path / "b/ranks/00000"
    assert facts(rank)["step"]["mark"] == "forward"
    steps = rows(rank)[1:-1]
    assert len(steps) > 50
    assert {(row["kind"], row["forwards"]) for row in steps} == {("validation", 1)}


@pytest.mark.long
def test_a_process_that_calls_a_model_for_a_moment_leaves_no_trace(tmp_path: Path) -> None:
    body = "with torch.no_grad():\n    for n in range(100): model(data[:8][0])"
    record(tiny(tmp_path, body), folder=tmp_path / "run", options=["--no-trace"])
    assert not list((tmp_path / "run").glob("ranks/*"))
