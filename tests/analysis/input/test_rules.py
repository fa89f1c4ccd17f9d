"""What the rules of input say of waits for data, needless, slow and restarted workers: found, clear or unknown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dlprof.analysis.engine import Maybe
from dlprof.analysis.estimate import Rule
from dlprof.analysis.input.fetch_replay import Forecast
from dlprof.analysis.input.input_waits import FewerWorkers
from dlprof.analysis.input.rules import (
    duplicate_batches,
    input_wait,
    needless_workers,
    slow_worker_batches,
    unused_batches,
    worker_restart,
)
from tests.fixtures import pipelines, runs, traces
from tests.fixtures.asking import ask
from tests.fixtures.claims import Make, add_facts, case, claims, edit, lines, rewrite
from tests.fixtures.exchanges import held_up as late
from tests.fixtures.exchanges import meeting
from tests.fixtures.loaders import copying, fetched, held_up, loaded, needless, ready, waiting
from tests.fixtures.runs import MS, light

WAIT, NEEDLESS = input_wait.RULE, needless_workers.RULE
TWICE, UNUSED = duplicate_batches.RULE, unused_batches.RULE
STEADY = [light(n, 10 * MS) for n in range(40)]
STREAM = {"role": "train", "num_workers": 4, "iterable": True, "dataset": "Stream"}
SLOW, RESTART = slow_worker_batches.RULE, worker_restart.RULE

# One core: training computes 20 ms of each 100, in 30 of them, and the worker all the others.
CROWDED = {"fetch": 100, "cpu": 80, "workers": 1, "own": 30, "cores": 1}
CROWDS = {"loop": 10, "worker": 20, "computing": 20}

# A worker makes a batch in 2 ms and computes for 62, which is to send it; training takes 20 ms of a step of 60.
SENDS = {"fetch": 60, "cpu": 62, "workers": 1, "dataset": "Clips"}


def traced(*events: Any) -> Make:
    """Return what makes a trace of three steps of 1 ms with these events."""
    marks = [traces.step(n, n * MS, MS) for n in range(3)]
    return lambda folder: runs.foreign(folder, traces.trace(*marks, *events, world_size=1))


def met(*ranks: Any) -> Make:
    return lambda folder: runs.foreign(folder, *ranks)


def bare(steps: Sequence[dict[str, Any]], **facts: Any) -> Make:
    return lambda folder: runs.recorded(folder / "run", (None, steps, {**runs.CPU, **facts}))


def starved(folder: Path) -> Path:
    """Record a pipeline of steps of 250 ms, whose rank 0 waits 100 ms for data before each, and rank 1 for rank 0."""
    path = pipelines.recorded(folder, "Schedule1F1B", 2, 4, pipelines.alike(10, 20), step=250)
    rewrite(path, "steps.jsonl", [light(n, 250 * MS, traces.BASE_NS + n * 10_000 * MS, fetch_ns=100 * MS)
                                  for n in range(13)])  # fmt: skip

    def earlier(_: int, line: dict[str, Any]) -> dict[str, Any]:
        if line["action"] != "schedule":  # it begins when rank 1 has nothing to do but wait
            return line
        return line | {"start_ns": line["start_ns"] - 100 * MS, "dur_ns": line["dur_ns"] + 100 * MS}

    edit(path, "chunks.jsonl", earlier, rank=1)
    return path


def bound_by_itself(folder: Path) -> Path:
    """Record the same job as `needless`, whose process left itself two of eight cores."""
    path = needless(folder)
    cores = {"count": 8, "affinity": 2, "allowed": "0-1", "at_start": "0-7", "torch_threads": 2}
    add_facts(path, cpu=cores)
    return path


def pinned(folder: Path) -> Path:
    """Record four workers that make a batch every 25 ms, and one thread that pins one every 50; 8 ms are computed."""
    events: list[Any] = []
    for n in range(3):
        at = n * 50 * MS
        events += [traces.step(50 + n, at, 50 * MS), traces.fetch(at, 40 * MS)]
        events.append(traces.launched("gemm", at + 41 * MS, at + 41 * MS + 5_000, 8 * MS, n + 1))
    loader = {"role": "train", "num_workers": 4, "pin_memory": True, "prefetch_factor": 2}
    facts = {"device": {"type": "cuda", "name": "NVIDIA H200"}, "loaders": [loader], "cpu": {"count": 16}}
    steps = [light(n, 50 * MS, fetch_ns=40 * MS) for n in range(40)]
    path = runs.recorded(folder / "run", (traces.trace(*events, world_size=1), steps, facts))
    runs.loading(path, 0, step=50 * MS, wait=40 * MS, fetch=100 * MS, cpu=100 * MS, n=40, workers=4)
    edit(path, "loading.jsonl", lambda _, row: row | ({"pin_ns": 49 * MS} if row["kind"] == "usage" else {}))
    return path


def carrying(folder: Path, every: int = 1) -> Path:
    """Record the same job as `needless`, whose workers compute for 10 ms more to copy 12 MB for one of a batch."""
    path = needless(folder)
    copying(copied=12, every=every)(path)
    edit(path, "fetches.jsonl", lambda _, row: row | {"cpu_ns": 14 * MS})
    return path


def sending(folder: Path, every: int = 1) -> Path:
    """Record such a job, whose batches are copied with 60 MB for one that they hold."""
    path = loaded(copying(every=every), **SENDS)(folder)
    edit(path, "fetches.jsonl", lambda _, row: row | {"dur_ns": 2 * MS, "collate_ns": 0})
    return path


def sending_to_a_device(folder: Path) -> Path:
    """Record the same beside a device, as `pinned`: each of four workers computes for 160 ms to send a batch."""
    path = pinned(folder)
    add_facts(path, loaders=[{"role": "train", "num_workers": 4, "pin_memory": False, "prefetch_factor": 2}])
    copying(copied=150)(path)
    edit(path, "fetches.jsonl", lambda _, row: row | {"dur_ns": 2 * MS, "cpu_ns": 160 * MS})
    return path


def uneven(folder: Path, *, step: int, slow: int, workers: int = 4) -> Path:
    """Record a rank that computes 20 ms a step; its workers take 40 ms for a batch, the first `slow` ms more."""
    path = waiting(step - 20, of=step, steps=60, num_workers=workers, prefetch_factor=2)(folder)
    wait = (step - 20) * MS
    runs.loading(path, 0, step=step * MS, wait=wait, fetch=40 * MS, cpu=2 * MS, n=60, workers=workers, slow=slow * MS)
    return path


def epochs(
    folder: Path,
    workers: Sequence[str] = ("1 2", "3 4", "5 6", "7 8"),
    *,
    ranks: int = 1,
    start: int = 50,
    first: int = 250,
    end: int = 20,
    slower: int = 0,
    method: str = "fork",
    fetched: bool = True,
) -> Path:
    """Record epochs of 10 steps, 100 ms each; an epoch begins with iter() and its first next(), a batch takes 40 ms."""
    steps, loading, fetches = [], [], []
    for step in range(10 * len(workers)):
        epoch, k = divmod(step, 10)
        pids, at = workers[epoch], traces.BASE_NS + step * 1_000 * MS
        longer = (start + first) * (k == 0) + end * (k == 9)
        forward = 10 + slower * (k == 0)
        steps.append(light(step, (100 + longer) * MS, first=int(k in (0, 9)), forward_ns=forward * MS))
        row: dict[str, Any] = {"start_ns": at, "count": 1, "step": step, "loader": 0}
        if k == 0:
            loading.append(row | {"kind": "start", "dur_ns": start * MS, "workers": pids})
        loading.append(row | {"kind": "batch" if k else "first", "start_ns": at + start * MS, "dur_ns": first * MS})
        if pids and fetched:
            pid = int(pids.split()[k % 2])
            fetches.append({"pid": pid, "worker": k % 2, "start_ns": at, "count": 1, "dur_ns": 40 * MS})
        if k == 9:
            loading.append(row | {"kind": "end", "start_ns": at + 100 * MS, "dur_ns": end * MS})
    loader = {"role": "train", "num_workers": 2, "persistent_workers": False, "start_method": method}
    path = runs.recorded(folder, *((None, steps, {**runs.CPU, "loaders": [loader]}) for _ in range(ranks)))
    for rank in range(ranks):
        rewrite(path, "loading.jsonl", loading, rank)
        rewrite(path, "fetches.jsonl", fetches, rank)
    return path


def taking(batches: Mapping[int, int], folder: Path, *, kind: str = "train", forwards: int = 1, usual: int = 1) -> Path:
    """Record 40 steps of 50 ms that take a batch each, 10 ms long; these take so many, in steps as said."""
    steps = []
    for n in range(40):
        count, more = batches.get(n, 1), n in batches
        of = {"kind": kind, "forwards": forwards} if more else {"forwards": usual}
        steps.append(light(n, (40 + 10 * count) * MS, fetch_ns=10 * count * MS, fetches=count, first=int(more), **of))
    return bare(steps, loaders=[{"role": "train", "num_workers": 0}])(folder)


def iterators(folder: Path) -> Path:
    """Record 40 steps of 44 ms with a new iterator each: 20 ms for iter(), 15 for the batch, 5 for the workers' end."""
    steps, loading = [], []
    for n in range(40):
        at = traces.BASE_NS + n * 1_000 * MS
        steps.append(light(n, 44 * MS, first=1, fetch_ns=35 * MS))
        row = {"count": 1, "step": n, "loader": 0}
        loading.append(
            row | {"kind": "start", "start_ns": at, "dur_ns": 20 * MS, "workers": f"{2 * n + 1} {2 * n + 2}"}
        )
        loading.append(row | {"kind": "first", "start_ns": at + 20 * MS, "dur_ns": 15 * MS})
        loading.append(row | {"kind": "end", "start_ns": at + 38 * MS, "dur_ns": 5 * MS})
    loader = {"role": "train", "num_workers": 2, "persistent_workers": False}
    path = runs.recorded(folder, (None, steps, {**runs.CPU, "loaders": [loader]}))
    rewrite(path, "loading.jsonl", loading)
    return path


def alone(folder: Path) -> Path:
    """Record the workload that runs a loader alone."""
    path = waiting(40)(folder)
    add_facts(path, "run.json", command=["python", "workloads/loader_variants.py", "--ceiling"])
    return path


STAY = ("persistent_workers", False, True)
# Epochs that start anew: 50 + 250 + 20 ms, less a batch of 40; three times in 40 steps. Steps of an epoch's ends last
# 420 and 120 ms, and all others 100; the job's very first one counts as one of those.
ANEW = {"saving": 3 * 280 / 40, "scope": "job", "share": 21 / ((3 * 520 + 33 * 100 + 4 * 20) / 40), "sets": [STAY]}
ANEW_ROW = (("training", 4, 50 * MS, 250 * MS, 40 * MS, 0, 20 * MS, 280 * MS),)

CASES = [
    # Two workers make a batch in 100 ms; one is needed every 60 ms: 2 · 100 ÷ 60, so four.
    case("enough workers", WAIT, waiting(40), saving=40.0, share=0.4, lost_share=0.4, speedup=1 / 0.6, at_most=True,
         sets=[("num_workers", 2, 4)], says="40 % of each step"),
    case("no workers yet", WAIT, waiting(75, num_workers=0), says="num_workers=0",
         sets=[("num_workers", 0, 3), STAY]),
    case("no free core", WAIT, waiting(50, cores=2), sets=[], says="make a sample cheaper"),
    case("a shallow queue", WAIT, waiting(40, persistent_workers=False, prefetch_factor=1),
         sets=[("num_workers", 2, 4), ("prefetch_factor", 1, 2)]),
    case("a loader that keeps up", WAIT, waiting(1), state="clear", share=0.01, lost_share=0.01),
    case("just below the threshold", WAIT, waiting(4.9), state="clear"),
    case("just above the threshold", WAIT, waiting(5.1)),
    case("one starving rank", WAIT, waiting(0, 40), ranks=(1,), costs={1: 40.0}, says="on rank 1"),
    case("who waits for it", WAIT, met(*late({}, {"input_wait": MS}, {})), ranks=(1,), saving=1.25,
         says=("Ranks 0 and 2 wait 1.00 ms a step for rank 1", "waits for data on rank 1, and all others wait for it")),
    case("who waits for who waits for it", WAIT,
         met(*meeting(3, ((1, 2),), ((0, 1),), late={2: ("input_wait", MS)}, period=3 * MS)),
         says="Ranks 0 and 1 wait 1.00 ms a step for rank 2"),
    case("ranks starve alike", WAIT, met(*late({"input_wait": MS}, {"input_wait": MS})), ranks=(0, 1),
         verdict="31 % of each step waits for data."),
    case("the loader alone", WAIT, alone, state="does_not_apply", says="nothing that waits for it"),
    case("a pipeline's stage", WAIT, starved, saving=100.0, ranks=(0,)),
    case("a trace alone", WAIT,
         traced(*(e for n in range(3) for e in (traces.fetch(n * MS, MS // 2, "_SingleProcessDataLoaderIter"),
                                                traces.kernel("gemm", n * MS + MS // 2, MS // 2)))),
         share=0.5, says="num_workers is 0", sets=[("num_workers", 0, 2), STAY]),
    case("a wait behind computation", WAIT,
         traced(*(traces.fetch(n * MS, MS // 2) for n in range(3)), traces.kernel("gemm", 0, 3 * MS)), state="clear"),
    case("a trace without a loader", WAIT, traced(traces.kernel("gemm", 0, 1_000)), state="does_not_apply",
         says="no DataLoader"),
    case("a GPU without a trace", WAIT,
         bare([light(n, 100 * MS, fetch_ns=40 * MS) for n in range(40)], device={"type": "cuda"}, loaders=[{}]),
         state="not_measured"),
    case("a script without a loader", WAIT, bare([light(k, 50 * MS, fetches=0, lead_ns=30 * MS) for k in range(40)]),
         state="does_not_apply", says="30.0 ms of each step (60 %) pass before the first forward"),
    case("workers that wait for storage", WAIT, loaded(fetch=80, cpu=2, workers=1, persistent_workers=True),
         sets=[("num_workers", 1, 4)], at_most=False, saving=pytest.approx(60, rel=0.05),
         column=["0", "1 (is)", "2", "3", "4 (proposed)", "5", "6"],
         steps={"0": 100.0, "1": 80.0, "2": 40.0, "3": 80 / 3} | dict.fromkeys("4567", 20.0),
         says=("the queue was empty for 37 of 37 batches; a worker takes 80.0 ms for a batch, 2.00 ms of it",
               "Predicted for 4 workers")),
    # 100 ms of computing a step, on two cores: no better than 50 ms, where the whole wait gone would be 20.
    case("workers that compute", WAIT, loaded(fetch=80, cpu=80, workers=0, cores=2), saving=pytest.approx(37.5, abs=12),
         says="make a sample cheaper"),
    # 8 ms of collating stay.
    case("workers cannot help", WAIT, loaded(fetch=80, cpu=80, workers=0, cores=1), saving=72.0, sets=[], at_most=True,
         says=("make a sample cheaper", "More workers alone would give")),
    case("batches take training's cores", WAIT, loaded(held_up(**CROWDS), **CROWDED), saving=80.0, lost_share=0.7,
         verdict="70 % of each step waits for data, and making it takes the cores from training.",
         says="samples that cost nothing, collating as it is, and training with the cores"),
    # 20 ms of reading stay with the 20 of training.
    case("collating takes longest", WAIT, loaded(held_up(**CROWDS, collating=75), **CROWDED), saving=60.0,
         says=("collate whole tensors", "75.0 ms of it collating", "reading the samples as it is")),
    case("batches are ready", WAIT, loaded(ready(every=1, takes=2), fetch=20, cpu=2, workers=1, own=18), state="clear",
         share=0.0, summary="0 % of each step waits for data, and 10 % takes over batches that are ready"),
    case("some batches are ready", WAIT, loaded(ready(every=2, takes=2), fetch=40, cpu=2, workers=1, own=18),
         saving=pytest.approx(20, rel=0.05)),
    # The workers are next.
    case("a thread that pins", WAIT, pinned, at_most=True, saving=pytest.approx(25, rel=0.05), sets=[],
         says=("80 % of each step waits for the thread that pins batches", "hand over fewer bytes",
               "One thread pins all batches, and takes 50.0 ms for each.")),
    case("cheaper without workers", NEEDLESS, needless, saving=pytest.approx(6.2, rel=0.05),
         sets=[("num_workers", 3, 0)], column=["0 (proposed)", "1", "2", "3 (is)"]),
    case("whole storages are copied", NEEDLESS, carrying, saving=pytest.approx(6, rel=0.3), at_most=False,
         says=("copy what a sample takes out of a larger tensor with `.clone()`", "of storages", "num_workers=0")),
    case("whole storages that are shared after the first time", NEEDLESS, partial(carrying, every=40), at_most=False,
         says="cost more than they save", sets=[("num_workers", 3, 0)]),
    case("waiting for copies", WAIT, sending, saving=pytest.approx(40, rel=0.05), at_most=True,
         says=("copy what a sample takes out of a larger tensor with `.clone()`", "of storages from its worker")),
    case("of some batches", WAIT, partial(sending, every=20), at_most=True, saving=pytest.approx(40, rel=0.05),
         says="`num_workers"),
    case("waiting beside a device", WAIT, sending_to_a_device, saving=pytest.approx(38, rel=0.1), at_most=True,
         says=("copy what a sample takes out of a larger tensor with `.clone()`", "more copying")),
    case("on cores that its process chose", NEEDLESS, bound_by_itself, state="not_measured",
         says="its process bound itself"),
    case("one change, one finding", WAIT, needless, state="clear"),
    case("persistent workers", NEEDLESS, partial(needless, persistent_workers=True),
         sets=[("num_workers", 3, 0), ("persistent_workers", True, False)]),
    case("workers that are needed", NEEDLESS, loaded(fetch=80, cpu=2, workers=4), state="clear", share=0.0),
    # Nothing was taken over ready: without workers, the loop's own work may be what it was.
    case("a gain within what is not known", NEEDLESS, partial(needless, takes=0, held_ms=2), state="clear"),
    case("batches not recorded", NEEDLESS, waiting(1), state="not_measured"),
    # It gives a batch in 160 ms, and so four in 160: 40 ms a step. As fast as the others, 20 ms are the loop's own.
    case("one slow worker", SLOW, partial(uneven, step=40, slow=120), saving=pytest.approx(20, rel=0.1), ranks=(0,),
         says="Worker 0 of rank 0 takes 160.0 ms for a batch, the others 40.0 ms", sets=[("in_order", None, False)]),
    case("equal workers", SLOW, partial(uneven, step=40, slow=0), state="clear", share=0.0),
    case("nobody waits for the slow one", SLOW, partial(uneven, step=20, slow=30), state="clear", share=0.0),
    case("no workers to compare", SLOW, partial(uneven, step=60, slow=0, workers=0), state="does_not_apply",
         says="two workers"),
    case("workers that start anew", RESTART, epochs, ranks=(0,), costs={0: 21.0}, rows=ANEW_ROW, **ANEW),
    case("on two ranks", RESTART, partial(epochs, ranks=2), ranks=(0, 1), costs={0: 21.0, 1: 21.0}, **ANEW),
    case("spawned workers", RESTART, partial(epochs, method="spawn", first=1_000),
         sets=[STAY, ("multiprocessing_context", "spawn", "forkserver")]),
    # Of a first batch nobody knows how long it takes nothing is promised.
    # What a batch takes is not known here: only starting and ending count, and the first start is no restart.
    case("a new iterator for each batch", RESTART, iterators, saving=25 * 39 / 40,
         says="one iterator for all steps"),
    case("fetches not recorded", RESTART, partial(epochs, fetched=False), saving=3 * 70 / 40),
    case("workers that stay", RESTART, partial(epochs, workers=["1 2"] * 4), state="clear", share=0.0,
         summary="the workers stay from epoch to epoch"),
    # 5 + 41 + 2 ms, less a batch of 40; three times in 40 steps of 100 ms and a little.
    case("workers that start at once", RESTART, partial(epochs, start=5, first=41, end=2), state="clear",
         saving=3 * 8 / 40, share=pytest.approx(0.006, rel=0.05), scope="job"),
    case("a loader without workers", RESTART, partial(epochs, workers=[""] * 4), state="does_not_apply"),
    case("one epoch", RESTART, partial(epochs, workers=["1 2"]), state="not_measured", says="one epoch"),
    case("every worker gives all samples", TWICE, bare(STEADY, loaders=[STREAM | {"same_batches": True}]),
         at_most=False, saving=7.5, says="first batches of all 4 workers are the same"),
    case("each gives its share", TWICE, bare(STEADY, loaders=[STREAM | {"same_batches": False}]), state="clear"),
    case("batches that do not tell", TWICE, bare(STEADY, loaders=[STREAM]), state="not_measured"),
    case("one worker", TWICE, bare(STEADY, loaders=[STREAM | {"num_workers": 1}]), state="does_not_apply"),
    # Every tenth step asks 11 times, 110 ms long: once at the end of an epoch, and 9 batches are thrown away.
    case("batches that are counted", UNUSED, partial(taking, dict.fromkeys(range(0, 40, 10), 11)), at_most=True,
         scope="job", saving=4 * 110 * 9 / 11 / 40, says=("In 4 steps", "36 batches", "360.0 ms")),
    case("batches without a training step", UNUSED, partial(taking, {5: 11}, kind="other", forwards=0),
         saving=100 / 39),
    case("an epoch's end is no batch", UNUSED, partial(taking, dict.fromkeys(range(0, 40, 10), 2)), state="clear"),
    case("a model called for each batch", UNUSED, partial(taking, {5: 11}, forwards=11), state="clear"),
    case("batches whose use is not seen", UNUSED, partial(taking, {5: 11}, usual=0), state="not_measured"),
    case("no record of a loader", RESTART, bare([light(n, MS) for n in range(9)]), state="not_measured"),
    # What a fork makes slower in the next step counts.
    case("a slower first step", RESTART, partial(epochs, slower=40), saving=3 * 320 / 40),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "make", "told"), CASES)
def test_rule(tmp_path: Path, rule: Rule, make: Make, told: dict[str, Any]) -> None:
    claims(rule, make(tmp_path), told)


def test_a_change_has_one_figure_everywhere(tmp_path: Path) -> None:
    # The recorded fetches explain 76 of 80 ms: what the replay leaves of a step is not quite the step less its gain.
    found = ask(WAIT, loaded(fetched(60, fetch=76), fetch=80, cpu=2, workers=1)(tmp_path))
    then = 80 * MS - found.saving_ns
    assert f"a step of {then / MS:.1f} ms is predicted" in found.advice[0]
    assert found.evidence is not None
    assert [row[1] for row in found.evidence.rows if "proposed" in str(row[0])] == [pytest.approx(then)]
    assert [f.step_ns for f in found.forecasts if f.value == "4"] == [pytest.approx(then)]


@pytest.mark.parametrize(("collating", "name", "left"), [(0, "samples", 20.0), (75, "collating", 40.0)])
def test_what_costs_nothing_is_the_last_row(tmp_path: Path, collating: int, name: str, left: float) -> None:
    found = ask(WAIT, loaded(held_up(**CROWDS, collating=collating), **CROWDED)(tmp_path))
    assert found.evidence is not None
    then, speed = pytest.approx(left * MS, rel=0.01), pytest.approx(100 / left, rel=0.01)
    cost = "cost" if name == "samples" else "costs"
    assert found.evidence.rows[-1] == (f"{name} that {cost} nothing", then, None, speed)
    assert "proposed" not in str(found.evidence.rows)


def test_half_of_what_is_not_known_of_the_workers_cost_is_the_noise() -> None:
    now, none = Forecast(2, 24 * MS, 0.0), Forecast(0, 18 * MS, 0.0)
    unbound, none_known = SimpleNamespace(facts={0: {}}), Maybe(lambda: None)
    estimate = NEEDLESS.check(FewerWorkers(0, (now, none), none, 2.0 * MS, {0: 6.0 * MS}), none_known, unbound)
    assert (estimate.saving_ns, estimate.noise_ns) == (6 * MS, 2 * MS)


def test_an_epoch_that_begins_while_the_job_is_suspended_is_no_dearer_for_it(tmp_path: Path) -> None:
    path = epochs(tmp_path)
    rows = lines(path, "loading.jsonl")
    third = [row for row in rows if row["kind"] == "start"][2]
    third["dur_ns"] += 60_000 * MS
    rewrite(path, "loading.jsonl", rows)
    assert ask(RESTART, path).state == "not_measured"  # one epoch so unlike the others
    add_facts(path, "run.json", resumed_ns=[third["start_ns"] + third["dur_ns"] - 100 * MS])
    claims(RESTART, path, {"saving": 3 * 280 / 40})
