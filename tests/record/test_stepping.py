"""One step's counts and times, what its batches make of the loaders, and the ranges of its phases."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from dlprof.record.loaders import LoaderSeen, Pass
from dlprof.record.stepping import BACKWARD, FETCH, FORWARD, OPTIMIZER, PHASES, Phases, Row, Step, kind_of
from tests.fixtures.devices import Model, Parameter
from tests.fixtures.ticking import Job

torch = pytest.importorskip("torch", reason="recording needs torch")


class Source:
    """A loader, as far as it can be weakly referred to."""


class Refuses:
    """A driver that notes why it was switched off."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    def fail(self, error: Exception) -> None:
        self.failed.append(str(error))


def over(source: Source, seen: LoaderSeen | None = None) -> Pass:
    return Pass(seen or LoaderSeen(weakref.ref(source), {}), 0, 0)


def test_an_ended_step_has_its_cells_in_order_and_the_next_begins_at_its_end() -> None:
    row = Row(7, 100)
    row.parts[:] = [1, 2, 3, 4]
    row.lead_ns = 5
    row.fetches, row.forwards, row.backwards, row.optimizer_steps, row.first, row.profiled = 6, 7, 8, 9, 1, 1
    step = Step._make(row.end(150, "events"))
    assert step == Step(7, 100, 50, 5, 1, 2, 3, 4, 6, 7, 8, 9, 1, 1, "events")
    following = Step._make(row.end(160, None))
    assert following == Step(8, 150, 10, -1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, None)


@pytest.mark.parametrize(
    ("forwards", "backwards", "optimizer_steps", "kind"),
    [(1, 1, 1, "train"), (0, 1, 0, "train"), (0, 0, 1, "train"), (2, 0, 0, "validation"), (0, 0, 0, "other")],
)
def test_a_step_is_of_the_kind_that_its_work_says(
    forwards: int, backwards: int, optimizer_steps: int, kind: str
) -> None:
    row = Row(0, 0)
    row.forwards, row.backwards, row.optimizer_steps = forwards, backwards, optimizer_steps
    assert kind_of(row) == kind
    assert row.worked == (kind != "other")
    assert kind_of(Step._make(row.end(1, None))) == kind


def test_a_loader_is_what_its_batches_are_used_for_and_once_it_trains_it_stays_so() -> None:
    source, row = Source(), Row(0, 0)
    mine = over(source)
    assert mine.loader is not None
    assert row.unsettle(mine)
    assert not row.unsettle(mine)  # a second batch of the same step
    assert not row.settle()  # nothing was done with it
    for forwards, backwards, role in ((1, 0, "validation"), (1, 1, "train"), (1, 0, "train")):
        row.unsettle(mine)
        row.forwards, row.backwards = forwards, backwards
        changed = row.settle()
        assert (mine.loader.role, changed) == (role, not (role == "train" and not backwards))
        assert row.unsettled == []
    assert not mine.unsettled


def test_a_pass_of_an_unknown_loader_is_settled_at_once() -> None:
    row, unknown = Row(0, 0), Pass(None, 0, 0)
    assert not row.unsettle(unknown)
    assert (unknown.unsettled, row.unsettled) == (False, [])


@pytest.fixture
def opened() -> list[str]:
    return []


@pytest.fixture
def phases(opened: list[str]) -> Phases:
    refuses: Any = Refuses()
    made = Phases(refuses)

    @contextmanager
    def named(name: str) -> Iterator[None]:
        opened.append(f"+{name}")
        yield
        opened.append(f"-{name}")

    made.ranges.append(named)
    return made


def test_a_phase_has_a_range_and_those_within_it_lie_within(phases: Phases, opened: list[str]) -> None:
    phases._push(OPTIMIZER)
    phases._push(BACKWARD)
    assert (phases.phase, phases.inside) == (BACKWARD, True)
    assert [phases.end(), phases.phase, phases.inside] == [BACKWARD, OPTIMIZER, False]
    assert [phases.end(), phases.end(), phases.phase] == [OPTIMIZER, -1, None]
    ranges = ["dlprof::optimizer", "dlprof::backward"]
    assert opened == [f"+{ranges[0]}", f"+{ranges[1]}", f"-{ranges[1]}", f"-{ranges[0]}"]


def test_a_range_of_the_scripts_own_is_opened_only_where_a_trace_is_recorded(phases: Phases, opened: list[str]) -> None:
    mine = phases.open_range("mine")
    assert opened == ["+mine"]
    mine.__exit__(None, None, None)
    assert opened == ["+mine", "-mine"]
    phases.ranges.clear()
    assert phases.open_range("mine") is None


def test_a_range_that_cannot_be_opened_switches_off_and_costs_the_script_nothing() -> None:
    driver: Any = Refuses()
    phases = Phases(driver)
    known: dict[str, Any] = {}
    phases.ranges.append(lambda name: known[name])
    assert phases.open_range("mine") is None
    assert driver.failed == ["'mine'"]


def test_only_the_training_thread_inside_a_loader_fetches(phases: Phases) -> None:
    import threading

    phases.owner = threading.get_ident()
    assert not phases.fetching
    phases._push(FETCH)
    assert phases.fetching
    seen: list[bool] = []
    other = threading.Thread(target=lambda: seen.append(phases.fetching))
    other.start()
    other.join()
    assert seen == [False]
    phases._push(FORWARD)
    assert not phases.fetching


def test_phases_have_names() -> None:
    assert [PHASES[phase] for phase in (FETCH, FORWARD, BACKWARD, OPTIMIZER)] == [
        "fetch",
        "forward",
        "backward",
        "optimizer",
    ]


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    return Job(monkeypatch)


def test_batches_until_the_optimizer_steps_are_one_step(job: Job) -> None:
    for _ in range(3):
        for _ in range(4):
            job.fetch()
            job.forward()
            job.backward()
        job.update()
    job.fetch()
    assert [(s.fetches, s.backwards, s.optimizer_steps) for s in job.steps] == [(4, 4, 1)] * 3
    # What is left at an epoch's end is no part of a validation.
    job.forward()
    job.backward()
    assert job.clock.begin_epoch()
    job.clock.end()
    for _ in range(2):
        job.fetch()
        job.forward(with_grad=False)
    job.fetch()
    assert [(s.backwards, s.forwards) for s in job.steps[3:]] == [(1, 1), (0, 1), (0, 1)]


def test_many_micro_batches_are_one_step_once_the_optimizer_has_stepped(job: Job) -> None:
    for _ in range(3):
        for _ in range(20):
            job.fetch()
            job.forward()
            job.backward()
        job.update()
    job.fetch()
    assert [s.backwards for s in job.steps] == [8] + [1] * 12 + [20, 20]


def test_without_an_optimizer_of_pytorchs_each_batch_is_a_step(job: Job) -> None:
    for _ in range(40):
        job.fetch()
        job.forward()
        job.backward()
    job.fetch()
    assert [s.backwards for s in job.steps] == [8] + [1] * 32


def test_a_forward_pass_after_a_backward_pass_begins_a_step_where_nothing_else_does(job: Job) -> None:
    for _ in range(20):
        job.forward(3)
        job.backward(5)
        job.now += 2
    assert job.clock.mark == "backward"
    assert [s.backwards for s in job.steps] == [8] + [1] * 11
    assert [(s.dur_ns, s.forward_ns, s.backward_ns) for s in job.steps[1:]] == [(10, 3, 5)] * 11
    # An optimizer of PyTorch's that steps after all marks them.
    for _ in range(3):
        job.train()
    assert (job.clock.mark, job.steps[-1].optimizer_steps) == ("optimizer", 1)


def test_a_process_that_only_infers_has_its_forward_passes_for_steps(job: Job) -> None:
    for _ in range(100):
        job.forward(100_000_000)
    assert (job.clock.mark, job.clock.started, job.clock.trains) == ("forward", True, False)
    assert [s.forwards for s in job.steps[1:]] == [1] * (len(job.steps) - 1)
    assert sum(s.forwards for s in job.steps) == 99
    # Once it trains, all of that was a validation.
    job.train()
    job.train()
    assert (job.clock.mark, job.clock.trains, job.clock.position) == ("optimizer", True, 2)


def test_a_short_validation_is_no_inference(job: Job) -> None:
    for _ in range(100):
        job.forward(1_000_000)
    assert not job.clock.started


def test_forward_passes_that_no_backward_pass_uses(job: Job) -> None:
    job.forward(1, with_grad=False)
    job.forward(10)
    job.backward()
    job.update()
    job.fetch()
    job.forward(10)
    job.forward(100, with_grad=False)
    job.backward()
    job.update()
    job.forward(1000)
    job.fetch()
    job.forward(7)
    job.forward(7)
    job.backward()
    job.update()
    job.fetch()
    assert [(s.forward_ns, s.unused_forward_ns) for s in job.steps] == [(11, 1), (1110, 1100), (14, 0)]


def test_samples_are_those_of_the_loaders_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch)
    for n in (4, 6):
        job.fetch(batch=torch.zeros(n, 2))
        job.train()
    job.fetch(batch=torch.zeros(1, 2))
    job.fetch(batch=torch.zeros(3, 2))
    job.train()
    job.fetch(batch="text")
    job.train()
    job.fetch()
    assert [s.samples for s in job.steps] == [4, 6, 4, -1]


def test_inputs_are_what_the_model_gets_first_for_each_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch)
    job.model = Model(Parameter(4, "cpu"))
    text = torch.zeros(4, 8, dtype=torch.int64)
    for _ in range(3):
        job.fetch()
        for _ in range(2):  # two micro-batches, each called twice
            job.forward(1, text)
            job.forward(1, text)
            job.backward()
        job.update()
    job.fetch()
    assert [(s.inputs, s.tokens) for s in job.steps][1:] == [(8, 64), (8, 64)]


def test_a_loss_gets_no_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch)
    job.model = Model(Parameter(4, "cpu"))
    for _ in range(3):
        job.fetch()
        job.clock.grad_enabled = lambda: True
        job.forward(1, torch.zeros(5, 2))
        assert job.clock.begin_forward(torch.nn.MSELoss(), (torch.zeros(9),))
        job.clock.end()
        job.backward()
        job.update()
    job.fetch()
    assert [s.inputs for s in job.steps][1:] == [5, 5]


def test_validation_counts_nothing_of_a_model_that_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch)
    job.model = Model(Parameter(4, "cpu"))
    for _ in range(2):
        job.fetch()
        job.forward(1, torch.zeros(5, 2))
        job.backward()
        job.update()
    job.fetch()
    job.forward(1, torch.zeros(5, 2), with_grad=False)
    job.fetch()
    assert [s.inputs for s in job.steps][1:] == [5, -1]


def test_the_script_says_how_much_a_step_is(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(monkeypatch)
    job.model = Model(Parameter(4, "cpu"))
    for told in ((8, 64), (9, None), (torch.tensor(3), "many"), (None, None)):
        job.fetch(batch=torch.zeros(4, 2))
        job.forward()
        job.backward()
        job.update()
        job.clock.user_step(*told)
    assert [(s.samples, s.tokens) for s in job.steps] == [(8, 64), (9, -1), (4, -1), (4, -1)]
    assert job.clock.observed.told
    assert job.clock.observed.calls.problem == "dlprof.step() takes whole numbers of samples and tokens, not a Tensor"
