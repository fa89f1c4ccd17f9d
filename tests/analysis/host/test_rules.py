"""What the rules of the host say of waits for the device, loops, launches, embeddings and the script's Python."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pandas as pd
import pytest

from dlprof.analysis import idioms
from dlprof.analysis.diagnosis import diagnose
from dlprof.analysis.engine import Maybe
from dlprof.analysis.estimate import Rule
from dlprof.analysis.host.parts import ON_CPU, HeldUp, held_up
from dlprof.analysis.host.rules import (
    anomaly_mode,
    busy_thread,
    host_bound,
    host_embedding,
    host_sync,
    parameter_loop,
    queued_wait,
    step_python,
)
from dlprof.read.run import open_run
from simulator import folder as simulated
from simulator import play
from simulator.faults import FAULTS
from simulator.faults.fault import recording
from tests.fixtures import runs, traces
from tests.fixtures.asking import ask
from tests.fixtures.claims import Make, case, claims, hold, sample
from tests.fixtures.hosts import call, graph, waiting
from tests.fixtures.phases import US, called_again, loop, one_by_one, trained
from tests.fixtures.runs import A100, CPU, GPU, MS, light
from tests.fixtures.sampled_stacks import MAIN, burst

SYNC, LOOP, QUEUED, ANOMALY = host_sync.RULE, parameter_loop.RULE, queued_wait.RULE, anomaly_mode.RULE
PYTHON, BOUND, EMBEDDING = step_python.RULE, host_bound.RULE, host_embedding.RULE

TABLES = next(f for f in FAULTS if f.name == "host_tables")
JOB = TABLES.make(5)


def traced(*events: Any, **keys: Any) -> Make:
    return lambda folder: runs.foreign(folder, traces.trace(*events, world_size=1, **keys))


def made(trace: dict[str, Any] | None, *steps: dict[str, Any], stacks: str = "", **facts: Any) -> Make:
    """Return what makes a rank of a trace and steps, of which stacks may have been seen; on a GPU if not told."""
    rank = (trace, steps, {**GPU, "pid": 10, **facts})
    return lambda folder: sample(runs.recorded(folder / "run", rank), stacks)


def simulation(job: Any) -> Make:
    def write(folder: Path) -> Path:
        simulated.write(folder / "run", job, recording(job, "host_tables"))
        return folder / "run"

    return write


def reading(queued: bool = False, scales: bool = False, call: str = "") -> dict[str, Any]:
    """Trace ten steps of 10 ms: 8 ms of work, a .item() in its middle, and then 2 ms until the host has launched again.

    Where it is queued, the device has that work already when the host waits. Where GradScaler reads, it is as torch
    does: infinities are looked for, found_inf is read, and the optimizer's step is next to it. `call`: the runtime's,
    of a trace without operators, as nsys makes.
    """
    events: list[Any] = []
    for n in range(10):
        at, id_ = n * 10 * MS, 10 * n
        launch, resume = (20 * US, 4 * MS + 20 * US) if queued else (6 * MS, 6 * MS + 10 * US)
        events += [traces.step(n, at, 10 * MS), traces.launched("gemm", at, at + 10 * US, 4 * MS, id_ + 1)]
        if scales:
            events.append(traces.op("aten::_amp_foreach_non_finite_check_and_unscale_", at + 900 * US, 50 * US))
            events.append(traces.annotation("Optimizer.step#SGD.step", at + 4 * MS + 100 * US, 5 * MS))
        events += [] if call else [traces.op("aten::item", at + 1 * MS, 3 * MS + 40 * US)]
        events.append(traces.call(call or "cudaStreamSynchronize", at + 1 * MS, 3 * MS + 30 * US, id_ + 2))
        events.append(traces.launched("gemm", at + launch, at + resume, 10 * MS - resume, id_ + 3))
    return traces.trace(*events, world_size=1)


SCALED = reading(scales=True)


def looping(*names: str, after: str = "backward", reads: bool = False, torch: str = "2.11.0", **more: Any) -> Make:
    """Return what makes steps with a loop of 40 turns over these operators."""
    trace = trained(lambda at, ids: loop(at, ids, 40, *names, reads=reads), length=4_200 * US, after=after)
    return made(trace, versions={"torch": torch}, **more)


def line(number: int, function: str, calls: int) -> dict[str, Any]:
    of = {"phase": "", "after": "backward", "calls": calls, "operators": {"aten::mul_": calls}}
    return {**of, "file": "train.py", "line": number, "function": function, "source": "p.mul_(2)"}


def starved(*, fetches: bool = False, marks: str = "step {}") -> dict[str, Any]:
    """Trace ten steps that take 2 ms of 10, in ranges that name them; nothing is called in between, or a loader is."""
    events: list[Any] = []
    for n in range(10):
        at = n * 10 * MS
        events.append(traces.annotation(marks.format(n), at, 2 * MS))
        for k in range(1, 11):
            begin = at + k * 100 * US
            events += traces.launched("gemm", begin, begin + 20 * US, 90 * US, 20 * n + k)
        events += [traces.fetch(at + 9 * MS, 500 * US)] if fetches else []
    return traces.trace(*events, world_size=1)


def foreign(trace: dict[str, Any]) -> Make:
    """Return what makes a folder of a trace that others recorded."""
    return lambda folder: runs.foreign(folder, trace)


def in_lines(*lines: dict[str, Any], stacks: dict[str, int]) -> Make:
    """Return what makes such a loop whose operators were recorded by line, or seen in stacks."""
    told = "".join(f"{MAIN};<module> (train.py:9);{frames} {n}\n" for frames, n in stacks.items())
    return looping("mul_", flops={"state": "counted", "total": 1, "lines": lines}, stacks=told)


CALLS_IT = {"step (train.py:5);scale (train.py:2)": 8}


def checking(folder: Path, checks: bool) -> Path:
    """Record steps of 1 ms forward and up to 3 ms backward: 20 functions of 50 µs, with 100 µs of checks after each."""
    each, length = (150 * US, 4 * MS) if checks else (50 * US, 2 * MS)
    events: list[Any] = []
    for step in range(6):
        at, ids = step * length, 1_000 * (step + 1)
        events += [traces.step(step, at, length), traces.annotation("dlprof::forward", at, 900 * US)]
        events += [
            traces.op("aten::mm", at, 800 * US),
            *traces.launched("gemm", at + 9 * US, at + 20 * US, 50 * US, ids),
        ]
        events.append(traces.annotation("dlprof::backward", at + MS, 20 * each))
        for n in range(20):
            began, number, tid = at + MS + n * each, ids + 10 * n + 1, traces.AUTOGRAD
            name = "autograd::engine::evaluate_function: MmBackward0"
            events += [
                traces.op(name, began, each - 5 * US, tid=tid),
                traces.op("MmBackward0", began + US, 40 * US, tid),
            ]
            events.append(traces.call("cudaLaunchKernel", began + 9 * US, 5 * US, number, tid=tid))
            events.append(traces.kernel("gemm", began + 20 * US, 10 * US, number))
            for k, check in enumerate(("aten::isnan", "aten::_is_any_true", "aten::item") if checks else ()):
                start, number = began + (45 + 30 * k) * US, ids + 10 * n + 2 + k
                events.append(traces.op(check, start, 28 * US, tid=tid))
                events.append(traces.call("cudaLaunchKernel", start + 2 * US, 4 * US, number, tid=tid))
                events.append(traces.kernel("small", start + 8 * US, 2 * US, number))
    return made(traces.trace(*events, world_size=1, device=A100["name"]))(folder)


LOGGING = f"{MAIN};main (/me/train.py:70) 60\n{MAIN};main (/me/train.py:71) 40\n"
LOSS = f"{MAIN};main (/me/train.py:50);cross_entropy (/lib/python3.11/site-packages/torch/nn/functional.py:9) 100\n"
THIN = "".join(f"{MAIN};f{n} (/me/train.py:{n + 1}) 4\n" for n in range(25))
AUGMENTS = f"{MAIN};main (/me/train.py:3);augment (/me/a.py:7) 40\n"


def outside(ms: int, stacks: str = LOGGING, **facts: Any) -> Make:
    """Return what makes 50 steps of 20 ms on a CPU, so many of them between the phases."""
    steps = [light(n, 20 * MS, forward_ns=5 * MS, backward_ns=(15 - ms) * MS) for n in range(50)]
    return made(None, *steps, stacks=stacks, **{**CPU, **facts})


def beside(lead: int, stacks: str) -> Make:
    """Return what makes steps of 4.2 ms on a GPU, 2 of them before the optimizer or before the forward pass."""
    took = {"forward_ns": MS, "backward_ns": MS, "optimizer_ns": 100 * US, "lead_ns": lead * US, "fetches": 0}
    steps = [light(n, 4_200 * US, profiled=int(n < 5), **took) for n in range(50)]
    return made(trained(length=4_200 * US), *steps, stacks=stacks)


def varying() -> Make:
    events: list[Any] = []
    for n, busy in enumerate((0.99, 0.1, 0.99)):
        length = int(busy * MS) // 10
        events.append(traces.step(n, n * MS, MS))
        for i in range(10):
            at = n * MS + i * 5_000
            events += traces.launched("gemm", at, n * MS + 5_000 + i * length, length, 1 + 10 * n + i)
    return traced(*events)


def launching(gap: int, marks: bool = True) -> Make:
    """Return what makes three steps of 1 ms of ten kernels, each launched `gap` µs after the one before had ended."""
    events: list[Any] = []
    for n in range(3):
        events += [traces.step(n, n * MS, MS)] if marks else []
        for i in range(10):
            at = n * MS + i * 100 * US
            events += traces.launched("small", at + (gap - 5) * US, at + gap * US, (100 - gap) * US, 1 + 10 * n + i)
    return traced(*events)


IDLE = [
    [traces.step(n, n * MS, MS), *traces.launched("gemm", n * MS, n * MS + 5 * US, 9 * US, n + 1)] for n in range(3)
]


def on_cpu(*, optimizer: int = 0, step: dict[str, Any] | None = None, **facts: Any) -> Make:
    """Return what makes steps of 10 ms on a CPU, 6 forward and the others Python, outside or in the optimizer."""
    events: list[Any] = []
    for n in range(3):
        t = n * 10 * MS
        events += [traces.step(n, t, 10 * MS), traces.annotation("dlprof::forward", t, 6 * MS)]
        events += [traces.op("aten::mm", t, 6 * MS)]
        events += [traces.annotation("dlprof::optimizer", t + 6 * MS, optimizer * MS)] if optimizer else []
    trace = traces.trace(*events, device="", backend="", world_size=1)
    steps = [light(n, 10 * MS, forward_ns=6 * MS, optimizer_ns=optimizer * MS, **step or {}) for n in range(30)]
    return made(trace, *steps, **CPU, **facts)


def fusible(*sets: str, **optimizer: Any) -> Any:
    """Return a case of an optimizer that takes 4 ms of Python, and the settings that are advised for it."""
    optimizers = [{"fused": None, "parameters": 9, **optimizer}]
    return case(f"{optimizer}", BOUND, on_cpu(optimizer=4, optimizers=optimizers), sets=[(s, None, True) for s in sets])


CASES = [
    case("a value is read in every step", SYNC, made(reading()), saving=2.0, share=0.2, column=["aten::item"],
         says=("Once a step rank 0 waits", ".item()")),
    *(case(f"a trace without operators, {call}", SYNC, made(reading(call=call)), saving=2.0, changes=1, says=cure)
      for call, cure in (("cudaStreamSynchronize_v3020", ".item()"), ("cudaEventSynchronize", "Event.synchronize()"),
                         ("cudaDeviceSynchronize_v3020", "torch.cuda.synchronize()"))),
    # A wait behind which the device has work, and a script that never waits.
    case("work is queued", SYNC, made(reading(queued=True)), state="clear"),
    case("no wait", SYNC, launching(6), state="clear"),
    case("waits on the CPU", SYNC, outside(0), state="does_not_apply", says="on the CPU"),
    case("GradScaler reads", SYNC, made(SCALED), changes=1, column=["GradScaler.step"], says="fused=True"),
    *(case(f"GradScaler reads for {name}", SYNC, made(SCALED, optimizers=[{"class": name, "parameters": 9}]),
           sets=[("fused", None, True)] if name == "SGD" else []) for name in ("SGD", "RMSprop")),
    # Each loop is told what replaces it; torch has a total norm since 2.6.
    *(case(f"a loop of {' '.join(names)}, read: {reads}", LOOP, looping(*names, after=after, reads=reads, torch=torch),
           changes=1 + reads, says=("over parameters", "a loop of 40 turns", cure, *["every k steps"] * reads))
      for names, after, reads, torch, cure in (
          (["linalg_vector_norm"], "backward", True, "2.11.0", "get_total_norm"),
          (["linalg_vector_norm"], "backward", False, "2.4.1", "clip_grad_norm_"),
          (["mul_", "add_"], "optimizer", False, "2.11.0", "AveragedModel"),
          (["lerp_"], "backward", False, "2.11.0", "_foreach_lerp_"),
          (["mul_"], "backward", False, "2.11.0", "_foreach_mul_"),
          (["clamp_"], "backward", False, "2.11.0", "clip_grad_value_"),
          (["zero_"], "optimizer", False, "2.11.0", "set_to_none=True"),
          (["isnan"], "backward", True, "2.11.0", "total norm"),
          (["histc"], "backward", False, "2.11.0", "_foreach_*"))),
    # A loop in the loss is over samples unless it turns for each parameter.
    *(case(f"a loop over {over}", LOOP, made(one_by_one(), versions={"torch": "2.11.0"},
                                             optimizers=[{"class": "AdamW", "parameters": parameters}]),
           says=(f"over {over}", "with its part of the backward pass", *words))
      for parameters, over, *words in ((60, "samples", "all samples of the batch at once"), (20, "parameters"))),
    case("a loop's lines", LOOP, in_lines(line(2, "scale", 30), line(5, "step", 20), line(7, "log", 1),
                                          stacks=CALLS_IT), lines=[5, 2]),
    case("a loop's lines without stacks", LOOP, in_lines(line(2, "scale", 30), line(5, "step", 20), stacks={}),
         lines=[2, 5]),
    # Where no line was recorded, it is where the stacks are, and what calls the function.
    case("a loop's stacks", LOOP, in_lines(stacks={"scale (train.py:2)": 8, "step (train.py:5)": 1}), lines=[2, 9]),
    case("a loop's few stacks", LOOP, in_lines(stacks={"scale (train.py:2)": 2}), lines=[]),
    *(case(f"queued for {name}", QUEUED, lambda folder, name=name: runs.foreign(folder, waiting(call(name))),
           saving=0.5, ranks=(0,), says=("second", cure))
      for name, cure in (("cudaLaunchHostFunc", "off the stream"), ("cudaStreamWaitEvent", "record the event"))),
    case("a graph's later node", QUEUED, lambda folder: runs.foreign(folder, graph(node=True)),
         says="capture without it"),
    case("a graph's first node", QUEUED, lambda folder: runs.foreign(folder, graph(node=False)), state="not_measured",
         says="which cudaGraphLaunch had launched"),
    case("queued for nobody knows what", QUEUED, lambda folder: runs.foreign(folder, waiting()), state="not_measured",
         says="ends with second on stream device:7"),
    case("short gaps", QUEUED, lambda folder: runs.foreign(folder, waiting(wait=15_000)), state="clear", share=0.0,
         lost_share=0.0),
    # What the replay leaves between queued kernels.
    case("little queued", QUEUED, lambda folder: runs.foreign(folder, waiting(call("cudaLaunchHostFunc"), wait=40_000)),
         state="clear", lost_share=0.04, saving=0.0385, costs={0: 0.04}),
    case("little queued for nobody knows what", QUEUED, lambda folder: runs.foreign(folder, waiting(wait=40_000)),
         state="clear", share=0.0, lost_share=0.04),
    case("no queue on the CPU", QUEUED, on_cpu(), state="does_not_apply"),
    # 20 × 88 µs from the first question to the last answer.
    case("anomaly mode", ANOMALY, partial(checking, checks=True), saving=pytest.approx(20 * 0.088, rel=0.1),
         says="set_detect_anomaly(False)"),
    case("no anomaly mode", ANOMALY, partial(checking, checks=False), state="clear"),
    case("tables on the host", EMBEDDING, simulation(JOB), says="embedding.to(device)",
         saving=pytest.approx((play.true(JOB).period_ns - play.true(TABLES.fix(JOB)).period_ns) / MS, rel=0.1)),
    case("tables on the device", EMBEDDING, simulation(TABLES.fix(JOB)), state="clear"),
    case("tables of a CPU", EMBEDDING, outside(0), state="does_not_apply"),
    case("lines that log", PYTHON, outside(5), rows=(("main (train.py:70)", pytest.approx(3 * MS), pytest.approx(0.15)),
         ("main (train.py:71)", pytest.approx(2 * MS), pytest.approx(0.1))),
         saving=5.0, says="at most 25 % of the step"),
    case("no time between the phases", PYTHON, outside(0), state="clear"),
    case("lines of a little each", PYTHON, outside(5, THIN), state="clear"),
    case("a loss is training", PYTHON, outside(5, LOSS), state="not_measured"),
    case("lines without stacks", PYTHON, outside(5, ""), state="not_measured"),
    case("lines on a GPU without a trace", PYTHON, outside(5, device=A100), state="not_measured"),
    # What lies between ranges that name steps is where a job starves its device.
    case("a starved device", PYTHON, foreign(starved()), at_most=True, changes=2, saving=pytest.approx(9.1, abs=0.1),
         says=("passes between one step and the next with nothing launched", "is the first suspect", "dlprof wrap")),
    case("a device whose loader is seen", PYTHON, foreign(starved(fetches=True)), at_most=True, changes=1,
         says="passes between step # and enumerate(DataLoader)"),
    case("Python beside a device", PYTHON, beside(0, ""), at_most=True, changes=1,
         says=("spends 2.10 ms of each step", "say which lines these are")),
    case("a loader beside a device", PYTHON, beside(1_900, AUGMENTS), at_most=True, changes=2,
         says=("make `augment (a.py:7)` faster", "batches that are made there")),
    case("Python that varies", PYTHON, varying(), state="not_measured", says="varies too much"),
    case("late launches", BOUND, launching(40), share=pytest.approx(0.4, abs=0.02),
         sets=[("mode", None, "reduce-overhead")],
         says=("10 kernels of 60.0 µs each", "the true share is smaller")),
    case("one model for each sample", BOUND, lambda folder: runs.foreign(folder, called_again(5)),
         says=("called again and again", "one call for all", "5 times for each backward pass")),
    case("as many models", BOUND, lambda folder: runs.foreign(folder, called_again(5, same=False)),
         title="The host launches the forward and backward pass too slowly for its device"),
    # Ten gaps of 6 µs in 1 ms, of which a µs each stays.
    case("a busy device", BOUND, launching(6), state="clear", share=pytest.approx(0.05, abs=0.01), ranks=(0,)),
    case("next to nothing", BOUND, traced(*IDLE), state="not_measured", says="that is no training"),
    case("unmarked steps", BOUND, launching(40, marks=False), state="not_measured", says="without step markers"),
    case("Python between steps", BOUND, on_cpu(), share=0.4, title="Python holds up the step",
         says="no remedy is known", informs=[True]),
    # With no loader seen, and much time before the forward, data may come in there.
    case("unfed", BOUND, on_cpu(step={"fetches": 0, "lead_ns": 3 * MS}),
         says="in the 3.00 ms before the first forward, in no loader"),
    fusible("fused", **{"class": "AdamW"}),
    fusible(**{"class": "LBFGS"}),
    fusible(**{"class": "RMSprop"}),
    fusible(**{"class": "AdamW", "takes": ["foreach"]}),
    fusible("fused", **{"class": "Mine", "takes": ["fused"]}),
    case("no trace", BOUND, outside(0), state="not_measured"),
]  # fmt: skip


@pytest.mark.parametrize(("rule", "make", "told"), CASES)
def test_rule(tmp_path: Path, rule: Rule, make: Make, told: dict[str, Any]) -> None:
    claims(rule, make(tmp_path), told)


MODULE = "_wrapped_call_impl (/lib/python3.11/site-packages/torch/nn/modules/module.py:1)"
INSIDE = f"{MAIN};main (/me/train.py:60);{MODULE} 100\n"


def between(folder: Path, ms: int, computing: int = 0, inside: int = 0, stacks: str = LOGGING) -> Path:
    """Record steps of 20 ms on a CPU: so many ms are between the phases, `computing` of them in an operator.

    Of the rest, which is forward, `inside` ms are Python.
    """
    events: list[Any] = []
    for n in range(3):
        t, forward = n * 20 * MS, (20 - ms) * MS
        events += [traces.step(n, t, 20 * MS), traces.annotation("dlprof::forward", t, forward)]
        events += [traces.op("aten::mm", t, forward - inside * MS)]
        events += [traces.op("aten::mean", t + forward, computing * MS)] if computing else []
    trace = traces.trace(*events, device="", backend="", world_size=1)
    return made(trace, *[light(n, 20 * MS, forward_ns=(20 - ms) * MS) for n in range(50)], stacks=stacks, **CPU)(folder)


Told = dict[str, Any]


@pytest.mark.parametrize(
    ("make", "lines", "host"),
    [
        # Without an operator, both would have the same 6 ms at the same lines: they are told once.
        (partial(between, ms=6), {"saving": 6.0}, {"state": "clear", "share": pytest.approx(0, abs=0.001)}),
        # 11 ms are Python, more than the lines take: they have nothing of their own.
        (partial(between, ms=6, inside=5), {"state": "clear"}, {"saving": 11.0}),
        # The lines take 8 ms, 5 of which compute; 3 + 4 ms are Python: the larger lines leave the host its own.
        (
            partial(between, ms=8, computing=5, inside=4),
            {"saving": 8.0, "lines": [70, 71]},
            {"saving": 4.0, "lines": [], "rows": (("Python, between operators", "forward", 4.0 * MS),)},
        ),
        # 3 + 7 ms are Python: the larger host leaves the lines what they compute.
        (
            partial(between, ms=8, computing=5, inside=7),
            {"saving": 5.0, "lines": []},
            {"saving": 10.0, "lines": [70, 71]},
        ),
        (partial(between, ms=6, stacks=INSIDE), {"state": "not_measured"}, {"saving": 6.0}),
    ],
    ids=["the same", "the host has more", "the lines have more", "the host has more that computes", "no lines"],
)
def test_who_keeps_what_lines_and_the_host_both_see(
    tmp_path: Path, make: Callable[[Path], Path], lines: Told, host: Told
) -> None:
    path = make(tmp_path)
    found = {o.id: o for o in diagnose(open_run(path), (BOUND, PYTHON), jobs=1).outcomes}
    hold(found["step_python"], **lines)
    hold(found["host_bound"], **host)
    if lines.get("state") == "not_measured":
        assert not runs.measured(path, held_up).frame(held_up).besides


@pytest.mark.parametrize(
    ("text", "state"), [("x = prepare(x)", "found"), ("dist.broadcast_object_list(box, src=0)", "clear")]
)
def test_waiting_in_a_collective_is_no_python(tmp_path: Path, text: str, state: str) -> None:
    path = between(tmp_path, ms=6, inside=5, stacks="")
    burst(path, {f"{MAIN};<module> (/w/train.py:9);next (/w/train.py:5)": 60}, lines=[["/w/train.py", 5, text]])
    assert ask(BOUND, path).state == state


def test_another_thread_at_work_in_a_job_too_short_to_count_its_waits(tmp_path: Path) -> None:
    path = between(tmp_path, ms=6, inside=5, stacks="")
    other = MAIN.replace("0x1", "0x2").replace("MainThread", "Thread-1")
    burst(path, {f"{MAIN};<module> (/w/train.py:9)": 60, f"{other};poll (/w/train.py:5)": 40})
    hold(ask(busy_thread.RULE, path), saving=11.0, at_most=True, lines=[5])


@pytest.mark.parametrize(
    ("phase", "line", "left"),
    [("forward", False, 5.0), ("optimizer", False, 0.5 * 8 - 3), ("forward", True, 8.0), ("", False, 8.0)],
    ids=["no line is known", "nor of the optimizer", "a loop is", "between the phases"],
)
def test_without_a_line_a_change_is_of_its_phases_and_no_core_is_no_python(phase: str, line: bool, left: float) -> None:
    row = {"rank": 0, "doing": "forward", "function": "forward", "file": "net.py", "line": 5, "text": "", "callers": ()}
    lines = pd.DataFrame([row | {"idiom": idioms.LOOPS if line else "", "samples": 90, "of": 100}])
    phases = {"forward": 4.0, "backward": 2.0, "optimizer": 2.0, "": 0.0} | (
        {"optimizer": 6.0} if phase[:1] == "o" else {}
    )
    phases = phases if phase else {"": 9.0}
    work = pd.DataFrame({"rank": 0, "phase": [*phases], "name": "Python", "ns": [*phases.values()]})
    waits = pd.DataFrame({"rank": [0], "waits_ns": [3.0]})
    found = host_bound.check(
        HeldUp(ON_CPU, 8.0, {0: 8.0}, 1.0),
        work,
        Maybe(lambda: work),
        100.0,
        Maybe(lambda: lines),
        Maybe(lambda: waits),
        cast(Any, None),
    )
    assert found.saving_ns == left
