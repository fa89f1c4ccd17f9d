"""Where steps end, how long their phases take and what they count: on a simulated clock, and in real scripts."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dlprof.record.loaders import LoaderSeen, Pass
from dlprof.record.step_clock import BACKWARD, FETCH, FORWARD, OPTIMIZER, PHASES, Phases, Row, Step, kind_of
from dlprof.schema import STEPS
from tests.fixtures.devices import Model, Parameter
from tests.fixtures.jobs import facts, record, rows, tiny
from tests.fixtures.ticking import Job

torch: Any = pytest.importorskip("torch", reason="recording needs torch")


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    return Job(monkeypatch)


def fetched(job: Job, times: int = 1) -> None:
    for _ in range(times):
        job.fetch()
        job.forward()
        job.backward()


def marks_change(job: Job) -> None:
    """The optimizer, then a loader, then the script itself."""
    job.train()
    job.train()
    job.fetch()
    job.train()
    job.train()
    job.fetch()
    job.train()
    job.clock.user_step()
    job.fetch()
    job.train()


def one_batch(job: Job) -> None:
    job.fetch()
    for n in range(34):
        assert job.clock.mark == "loader" or not n or n > 32
        job.train()


def needless_batches(job: Job) -> None:
    for batches in (1, 3, 1):
        for _ in range(batches):
            job.fetch()
        if batches == 1:
            job.train()
    job.fetch()


def micro_batches(job: Job) -> None:
    """What is left at an epoch's end is no part of a validation."""
    for _ in range(3):
        fetched(job, 4)
        job.update()
    fetched(job)
    assert job.clock.begin_epoch()
    job.clock.end()
    for _ in range(2):
        job.fetch()
        job.forward(with_grad=False)
    job.fetch()


def many_micro_batches(job: Job) -> None:
    for _ in range(3):
        fetched(job, 20)
        job.update()
    job.fetch()


def no_optimizer(job: Job) -> None:
    fetched(job, 40)
    job.fetch()


def by_hand_and_an_optimizer_after_all(job: Job) -> None:
    for _ in range(20):
        job.forward(3)
        job.backward(5)
        job.now += 2
    assert job.clock.mark == "backward"
    assert [(s.dur_ns, s.forward_ns, s.backward_ns) for s in job.steps[1:]] == [(10, 3, 5)] * 11
    for _ in range(3):
        job.train()


def inference(job: Job) -> None:
    """Once it trains, all that was before is a validation."""
    for _ in range(100):
        job.forward(100_000_000)
    assert (job.clock.mark, job.clock.started, job.clock.trains) == ("forward", True, False)
    assert [s.forwards for s in job.steps[1:]] == [1] * (len(job.steps) - 1)
    assert sum(s.forwards for s in job.steps) == 99
    job.steps.clear()
    job.train()
    job.train()
    assert (job.clock.trains, job.clock.position) == (True, 2)


def short_validation(job: Job) -> None:
    for _ in range(100):
        job.forward(1_000_000)
    assert not job.clock.started


def a_capture(job: Job) -> None:
    """No step ends meanwhile."""
    job.train()
    job.clock.capturing = True
    job.train()
    job.clock.user_step()
    assert job.clock.row.optimizer_steps == 1


def replays(job: Job) -> None:
    """A replay of a CUDA graph is the work that it holds."""
    for replayed in ((1, 1, 1), (0, 0, 3), (0, 0, 0)):
        job.clock.replayed(*replayed)
    assert job.clock.row.forwards == 1


# What a script does, what marks its steps at the end, and the fetches, forward and backward passes and optimizer steps
# of each.
TRAIN = (0, 1, 1, 1)
SCRIPTS: dict[str, tuple[Callable[[Job], None], str | None, list[tuple[int, int, int, int]]]] = {
    "the strongest mark": (marks_change, "user", [TRAIN, TRAIN, (1, 2, 2, 2), (1, 1, 1, 1)]),
    "one batch for all": (one_batch, "optimizer", [(1, 33, 33, 33), TRAIN]),
    "a batch that nothing is done with": (needless_batches, "loader", [(1, 1, 1, 1), (4, 1, 1, 1)]),
    "micro-batches": (micro_batches, "loader", [(4, 4, 4, 1)] * 3 + [(1, 1, 1, 0)] + [(1, 1, 0, 0)] * 2),
    "many micro-batches": (
        *(many_micro_batches, "loader"),
        [(8, 8, 8, 0)] + [(1, 1, 1, 0)] * 11 + [(1, 1, 1, 1)] + [(20, 20, 20, 1)] * 2,
    ),
    "no optimizer of PyTorch's": (no_optimizer, "loader", [(8, 8, 8, 0)] + [(1, 1, 1, 0)] * 32),
    "by hand, until an optimizer steps": (
        *(by_hand_and_an_optimizer_after_all, "optimizer"),
        [(0, 8, 8, 0)] + [(0, 1, 1, 0)] * 12 + [TRAIN] * 3,
    ),
    "inference": (inference, "optimizer", [(0, 1, 0, 0), TRAIN, TRAIN]),
    "a short validation": (short_validation, "forward", []),
    "a CUDA graph is captured": (a_capture, "user", [TRAIN]),
    "CUDA graphs are replayed": (replays, "optimizer", [TRAIN, (0, 0, 0, 3)]),
}


@pytest.mark.parametrize(("script", "mark", "steps"), SCRIPTS.values(), ids=SCRIPTS)
def test_a_step_ends_at_the_strongest_mark_that_was_seen(script: Any, mark: str | None, steps: Any, job: Job) -> None:
    script(job)
    assert job.clock.mark == mark
    assert [step[8:12] for step in job.steps] == steps
    assert job.failed == []


def test_phases_exclude_each_other_and_what_is_none_is_the_rest(job: Job) -> None:
    def closure() -> None:
        job.now += 10
        job.forward(100)
        job.now += 4
        job.backward(1000)
        job.now += 6

    def inside() -> None:
        job.now += 8
        job.forward(50)
        job.now += 9

    job.fetch(2)
    job.now += 5
    job.forward(7)
    job.backward(11)
    job.now += 3
    job.update(20, closure)
    job.fetch(1, inside)
    job.backward()
    job.update(0)
    job.fetch()
    first, second = job.steps
    assert (first.dur_ns, first.lead_ns) == (2 + 5 + 7 + 11 + 3 + 20 + 10 + 100 + 4 + 1000 + 6, 5)
    assert first[4:8] == (2, 7 + 100, 11 + 1000, 20)  # of the closure, what is no pass is the rest
    assert second[4:8] == (1 + 8 + 9, 50, 1, 0)
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


def test_nested_calls_count_once_and_an_optimizer_that_raised_is_left_at_the_next_batch(job: Job) -> None:
    assert job.clock.begin_backward()
    assert not job.clock.begin_backward()
    job.clock.end()
    job.update(inside=job.update)
    (step,) = job.steps
    assert (step.backwards, step.optimizer_steps, step.optimizer_ns) == (1, 1, 2)
    job.fetch()
    job.clock.begin_optimizer(job.optimizer)  # its hook after the step is never called
    job.fetch()
    assert job.clock.phases == []
    job.train()
    job.fetch()
    assert [step.optimizer_steps for step in job.steps[1:]] == [1]


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
    assert (job.clock.trained_from, job.clock.position) == (5, 1)


def test_steps_are_passed_on_when_they_are_due(job: Job) -> None:
    job.train()
    passed = []
    # By time, by the number of a step, or as there is news.
    for due_ns, due_step, news in [(100, 99, False)] * 3 + [(100, 5, False), (0, 99, False), (10**9, 99, True)]:
        job.clock.due_ns, job.clock.due_step, job.clock.observed.news = due_ns, due_step, news
        job.train()
        passed.append(len(job.steps))
    assert passed == [1, 1, 1, 5, 6, 7]


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
    assert (job.steps, len(job.clock.done)) == ([], 2)


def test_a_step_that_ends_while_a_loader_is_asked_in_vain_costs_nothing(job: Job) -> None:
    clock, loader = job.clock, torch.utils.data.DataLoader(range(4))
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


@pytest.mark.parametrize(("frozen", "last", "graded"), [(False, True, 2), (True, True, 0), (False, False, 0)])
def test_graphs_that_nobody_uses_are_counted(frozen: bool, last: bool, graded: int, job: Job) -> None:
    weight = Parameter(4, "cpu")
    weight.requires_grad = not frozen
    held_out, job.model = Model(weight), Model(Parameter(4, "cpu"))
    for _ in range(2):
        job.fetch()
        job.forward(1)
        job.backward()
        job.update()
        job.model, trained = held_out, job.model
        job.fetch()
        job.forward(1, with_grad=False)
        job.forward(1, with_grad=last)
        assert job.clock.begin_forward(torch.nn.MSELoss(), (torch.zeros(9),))  # which has nothing to train
        job.clock.end()
        job.model = trained
    job.fetch()
    assert (job.clock.observed.evaluated, job.clock.observed.graded) == (2, graded)


TEXT = torch.zeros(4, 8, dtype=torch.int64)


def a_loss(job: Job) -> None:
    """What a loss gets is no samples."""
    job.forward(1, torch.zeros(5, 2))
    assert job.clock.begin_forward(torch.nn.MSELoss(), (torch.zeros(9),))
    job.clock.end()
    job.backward()


def micro_batches_called_twice(job: Job) -> None:
    """A model's inputs are what it gets first for each backward pass."""
    for _ in range(2):
        job.forward(1, TEXT)
        job.forward(1, TEXT)
        job.backward()


def on(*batches: Any) -> Callable[[Job], None]:
    """Return a step on further batches."""

    def step(job: Job) -> None:
        for batch in batches:
            job.fetch(batch=batch)
        job.forward()
        job.backward()

    return step


# The first batch of a step, what a script does with it, what it says of the step, and its samples, inputs and tokens.
SIZES: dict[str, tuple[Any, Callable[[Job], None], tuple[Any, Any] | None, tuple[int, int, int]]] = {
    "of a loader's batches": (torch.zeros(6, 2), on(), None, (6, -1, -1)),
    "of several batches": (torch.zeros(1, 2), on(torch.zeros(3, 2)), None, (4, -1, -1)),
    "a batch that shows none": ("text", on(), None, (-1, -1, -1)),
    "what the model gets": (None, micro_batches_called_twice, None, (-1, 8, 64)),
    "what a loss gets": (None, a_loss, None, (-1, 5, -1)),
    "as the script says": (torch.zeros(4, 2), on(), (8, 64), (8, -1, 64)),
    "samples as the script says": (torch.zeros(4, 2), on(), (9, None), (9, -1, -1)),
    "the script says nonsense": (torch.zeros(4, 2), on(), (torch.tensor(3), "many"), (4, -1, -1)),
}


@pytest.mark.parametrize(("batch", "step", "told", "expected"), SIZES.values(), ids=SIZES)
def test_a_steps_samples_inputs_and_tokens(batch: Any, step: Any, told: Any, expected: Any, job: Job) -> None:
    job.model = Model(Parameter(4, "cpu"))
    for _ in range(2):
        job.fetch(batch=batch)
        step(job)
        job.update()
        if told is not None:
            job.clock.user_step(*told)
    # In a validation nothing is counted of a model that trains.
    job.fetch()
    job.forward(1, torch.zeros(5, 2), with_grad=False)
    job.fetch()
    if told is None:
        assert [job.steps[-1].inputs, job.steps[-1].tokens] == [-1, -1]
    assert (job.steps[1].samples, job.steps[1].inputs, job.steps[1].tokens) == expected
    is_wrong = told is not None and told[1] == "many"
    problem = "dlprof.step() takes whole numbers of samples and tokens, not a Tensor" if is_wrong else ""
    assert job.clock.observed.calls.problem == problem
    assert job.clock.observed.told == (told is not None and not is_wrong)


def test_an_ended_step_has_its_cells_in_order_and_the_next_begins_at_its_end() -> None:
    row = Row(7, 100)
    row.parts[:] = [1, 2, 3, 4, 0]
    row.lead_ns = 5
    row.fetches, row.forwards, row.backwards, row.optimizer_steps, row.first, row.profiled = 6, 7, 8, 9, 1, 1
    step = Step._make(row.end(150, "events"))
    assert step == Step(7, 100, 50, 5, 1, 2, 3, 4, 6, 7, 8, 9, 1, 1, "events")
    assert step.end_ns == 150
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


class Source:
    """A loader, as far as it can be weakly referred to."""


def test_a_loader_is_what_its_batches_are_used_for_and_once_it_trains_it_stays_so() -> None:
    source, row = Source(), Row(0, 0)
    mine = Pass(LoaderSeen(weakref.ref(source), {}), 0, 0)
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
    unknown = Pass(None, 0, 0)
    assert not row.unsettle(unknown)
    assert (unknown.unsettled, row.unsettled) == (False, [])


class Refuses:
    """A driver that notes why it was switched off."""

    def __init__(self) -> None:
        self.failed: list[str] = []

    def fail(self, error: Exception) -> None:
        self.failed.append(str(error))


def test_phases_and_the_scripts_own_blocks_have_ranges_while_a_trace_is_recorded(job: Job) -> None:
    opened, driver = list[str](), Refuses()
    phases = Phases(driver)  # type: ignore[arg-type]

    @contextmanager
    def named(name: str) -> Iterator[None]:
        opened.append(f"+{name}")
        yield
        opened.append(f"-{name}")

    phases.ranges.append(named)
    phases._push(OPTIMIZER)
    phases._push(BACKWARD)
    assert (phases.phase, phases.inside) == (BACKWARD, True)
    assert [phases.end(), phases.phase, phases.inside] == [BACKWARD, OPTIMIZER, False]
    assert [phases.end(), phases.end(), phases.phase] == [OPTIMIZER, -1, None]
    phases.open_range("mine").__exit__(None, None, None)
    names = ["dlprof::optimizer", "dlprof::backward"]
    assert opened == [f"+{names[0]}", f"+{names[1]}", f"-{names[1]}", f"-{names[0]}", "+mine", "-mine"]
    opened.clear()
    job.clock.ranges.append(named)
    job.fetch()
    job.train()
    parts = ("fetch", "forward", "backward", "optimizer")
    assert opened == [f"{sign}dlprof::{part}" for part in parts for sign in "+-"]
    unknown: dict[str, Any] = {}
    phases.ranges[:] = [unknown.__getitem__]  # one that cannot be opened switches off
    assert phases.open_range("mine") is None
    phases.ranges.clear()
    assert phases.open_range("mine") is None
    assert driver.failed == ["'mine'"]
    assert [PHASES[phase] for phase in (FETCH, FORWARD, BACKWARD, OPTIMIZER)] == [
        *("fetch", "forward", "backward", "optimizer")
    ]


def test_only_the_training_thread_inside_a_loader_fetches(job: Job) -> None:
    seen = []
    other = threading.Thread(target=lambda: seen.append(job.clock.fetching))

    def inside() -> None:
        other.start()
        other.join()
        seen.append(job.clock.fetching)
        assert job.clock.begin_forward(job.model)
        seen.append(job.clock.fetching)
        job.clock.end()

    job.fetch(inside=inside)
    assert [*seen, job.clock.fetching] == [False, True, False, False]


@pytest.mark.parametrize("frozen", [True, False])
def test_a_frozen_teachers_forward_pass_is_for_the_backward_pass_after_it(frozen: bool, job: Job) -> None:
    weight = Parameter(4, "cpu")
    weight.requires_grad = not frozen
    teacher, student = Model(weight), Model(Parameter(4, "cpu"))
    for _ in range(2):
        job.fetch()
        job.model = teacher
        job.forward(10, with_grad=False)
        job.model = student
        job.forward(5)
        job.backward()
        job.update()
    job.fetch()
    assert [(s.forwards, s.forward_ns, s.unused_forward_ns) for s in job.steps] == [(2, 15, 0 if frozen else 10)] * 2


@pytest.mark.long
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
    assert {(row["backwards"], row["unused_forward_ns"]) for row in trained} == {(2, 0)}
    # The end of one loader and the start of the next fall into one step.
    assert [(row["step"], row["fetches"]) for row in steps if row["first"]] == [
        (0, 2),
        (4, 2),
        (8, 3),
        (12, 2),
        (16, 1),
    ]
    for row, following in itertools.pairwise(steps):
        assert row["start_ns"] + row["dur_ns"] == following["start_ns"]
    for row in steps:
        parts = row["fetch_ns"] + row["forward_ns"] + row["backward_ns"] + row["optimizer_ns"]
        assert parts + max(row["lead_ns"], 0) <= row["dur_ns"]
        assert (row["lead_ns"] >= 0) == (row["forward_ns"] > 0) == (row["kind"] != "other")
        assert (row["backward_ns"] > 0) == (row["kind"] == "train")
        assert (row["optimizer_ns"] > 0) == (row["optimizer_steps"] > 0)
        assert (row["fetch_ns"] > 0) == (row["fetches"] > 0)
        assert row["profiled"] == (row["step"] == 9)  # in which it is counted what memory holds
        assert row["device_step_ns"] == -1
    known = facts(rank)
    assert (known["step"]["mark"], known["window"]["state"]) == ("loader", "off")
    loaders = [(loader["role"], loader["batch_size"]) for loader in known["loaders"]]
    assert loaders[:2] == [("train", 8), ("validation", 16)]
    assert not list(rank.glob("trace*"))


@pytest.mark.long
def test_a_script_that_updates_by_hand(tmp_path: Path) -> None:
    by_hand = """
    weights = list(model.parameters())
    for n in range(40):
        loss = nn.functional.mse_loss(model(data[:8][0]), data[:8][1])
        for weight, gradient in zip(weights, torch.autograd.grad(loss, weights)):
            weight.data -= 0.1 * gradient
    """
    record(tiny(tmp_path, by_hand), folder=tmp_path / "run", options=["--no-trace"])
    rank = tmp_path / "run/ranks/00000"
    assert facts(rank)["step"]["mark"] == "backward"
    assert [row["backwards"] for row in rows(rank)] == [8] + [1] * 32
